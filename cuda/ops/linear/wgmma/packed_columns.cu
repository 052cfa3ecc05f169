#include "cuda/device/sync.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/ops/linear/wgmma/packed_call.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

constexpr int kThreads = 128;

/// to[token][c] = x[token][order[c]], or 0 where column c has no input. Elements are any of 16 bits. A thread makes
/// eight.
__global__ void __launch_bounds__(kThreads)
    packed_columns_kernel(const std::uint16_t* x, const int* order, std::uint16_t* to, int in, int columns) {
  let_successor_start();
  wait_for_predecessors();
  const int c = (int(blockIdx.x) * kThreads + int(threadIdx.x)) * kVec;
  if (c >= columns) return;
  const std::uint16_t* const from = x + long(blockIdx.y) * in;
  int inputs[kVec];
  *reinterpret_cast<int4*>(inputs) = *reinterpret_cast<const int4*>(order + c);
  *reinterpret_cast<int4*>(inputs + 4) = *reinterpret_cast<const int4*>(order + c + 4);
  std::uint32_t bits[kVec];
#pragma unroll
  for (int e = 0; e < kVec; ++e) bits[e] = inputs[e] >= 0 ? from[inputs[e]] : 0;
  uint4 v;
  v.x = bits[0] | bits[1] << 16;
  v.y = bits[2] | bits[3] << 16;
  v.z = bits[4] | bits[5] << 16;
  v.w = bits[6] | bits[7] << 16;
  *reinterpret_cast<uint4*>(to + long(blockIdx.y) * columns + c) = v;
}

}  // namespace

Result<PackedInput> packed_input(const ops::Linear::Args& a, const PackedOperand& operand, LaunchList& launches) {
  const auto d = ops::Linear::dims(a);
  const GptqMatrix& m = operand.matrix;
  if (!m.order) return PackedInput{a.x.data, d.in};
  const int columns = m.chunks * kGptqColumns;
  constexpr std::int64_t most_blocks = 65535;  // of a grid's y
  launches.use_scratch();
  for (std::int64_t first = 0; first < d.tokens; first += most_blocks) {
    const std::int64_t tokens = std::min(most_blocks, d.tokens - first);
    CF_TRY(launch(ops::Linear::name, launches,
                  {.grid = dim3(unsigned((columns + kThreads * kVec - 1) / (kThreads * kVec)), unsigned(tokens)),
                   .block = kThreads},
                  packed_columns_kernel, static_cast<const std::uint16_t*>(a.x.data) + first * d.in, m.order,
                  reinterpret_cast<std::uint16_t*>(launches.scratch().data) + first * columns, int(d.in), columns));
  }
  return PackedInput{launches.scratch().data, columns};
}

}  // namespace cf::cuda
