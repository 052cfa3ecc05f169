#include "cuda/ops/linear/wgmma/block.cuh"
#include "cuda/ops/linear/wgmma/codes.cuh"
#include "cuda/ops/linear/wgmma/packed_call.hpp"
#include "cuda/ops/linear/wgmma/wgmma.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

struct PackedCall {
  WgmmaCall product;
  PackedOperand weight;
};

#ifdef CF_HAVE_WGMMA
/// Rows in the order of a packed matrix.
struct PackedOrder {
  static constexpr bool always = false;
  const RopePairs& pairs;
  __device__ bool holds() const { return pairs.head_dim == 0; }
  __device__ int row(int r) const { return pairs.row(r); }
};
#endif

/// 128 tokens' sums need more registers than a thread of a block of nine warps may have.
constexpr int threads_of(int token_tile) { return token_tile > 64 ? kWgmmaMostThreads : kWgmmaThreads; }

template <class T, int Tokens, int Halves, bool Gated>
__global__ void __launch_bounds__(threads_of(Tokens), 1)
    linear_wgmma_gptq_kernel([[maybe_unused]] const __grid_constant__ CUtensorMap x,
                             [[maybe_unused]] const __grid_constant__ PackedCall c) {
#ifdef CF_HAVE_WGMMA
  if (threadIdx.x == kWgmmaConsumers) prefetch_map(&x);
  using Ring = WgmmaRing<Tokens, 4>;
  static_assert(Ring::a_bytes == kLinearWgmmaWarps * kGptqTileBytes && kLinearWgmmaColumns == kGptqColumns);
  const GptqMatrix& m = c.weight.matrix;
  const PackedOrder order{c.weight.pairs};
  // Of tiles that the matrix does not have nothing is finished.
  const auto tile = [&](int first_row, int i) { return min(first_row / kGptqRows + i, m.tiles - 1); };
  multiply_rows<T, Tokens, Gated, Ring, threads_of(Tokens)>(
      c.product, order,
      [&](const Ring& ring, const Steps& steps, int first_row) {
        // A lane copies a tile.
        const char* const codes = m.codes + long(tile(first_row, threadIdx.x % 32)) * m.chunks * kGptqTileBytes;
        copy_steps(ring, steps, x, [&](int lane, int step, unsigned char* to, std::uint64_t* full) {
          if (lane < kLinearWgmmaWarps)
            copy_bulk(to + lane * kGptqTileBytes, codes + step * kGptqTileBytes, kGptqTileBytes, full);
        });
      },
      [&](const Ring& ring, const Steps& steps, int first_row, float(&sum)[Tokens / 2]) {
        const long first = long(tile(first_row, threadIdx.x / 32)) * m.groups * kGptqGroupBytes;
        const CodeScales scales{m.scales + first + threadIdx.x % 32 / 4 * 8, m.groups};
        RingSlot slot;
        multiply_codes<T, Tokens, Halves>(
            ring, slot, steps.first, steps.count, scales, c.weight.halves_a_group,
            [&](int stage) {
              __syncwarp();  // all lanes have read the codes
              if (threadIdx.x % 32 == 0) arrive(ring.empty + stage);
            },
            sum);
      });
#endif
}

template <class T, int Halves, bool Gated>
auto kernel_for(int token_tile) {
  if constexpr (Halves == 2)
    if (token_tile <= 32) return linear_wgmma_gptq_kernel<T, 32, Halves, Gated>;
  return token_tile <= 64 ? linear_wgmma_gptq_kernel<T, 64, Halves, Gated>
                          : linear_wgmma_gptq_kernel<T, 128, Halves, Gated>;
}

template <class T>
auto kernel_for(int token_tile, bool whole, bool gated) {
  return whole   ? gated ? kernel_for<T, 2, true>(token_tile) : kernel_for<T, 2, false>(token_tile)
           : gated ? kernel_for<T, 1, true>(token_tile)
                 : kernel_for<T, 1, false>(token_tile);
}

}  // namespace

Status launch_wgmma_packed(const ops::Linear::Args& a, const WgmmaPackedPlan& plan, LaunchList& launches) {
  const DType dtype = a.x.dtype;
  CF_TRY_ASSIGN(const PackedOperand weight, packed_operand(a));
  CF_TRY_ASSIGN(const PackedInput x, packed_input(a, weight, launches));
  const LinearWgmmaPlan& p = plan.product;
  CUtensorMap map;
  CF_TRY(
      make_tensor_map({.data = x.data, .dtype = dtype, .columns = x.columns, .rows = a.x.shape[0]}, p.token_tile, map));
  PackedCall c{.product = wgmma_call(a, p), .weight = weight};
  c.product.steps = weight.matrix.chunks;
  const auto add = [&](auto zero) {
    using T = decltype(zero);
    return launch(ops::Linear::name, launches,
                  {.grid = unsigned(p.row_tiles * p.splits),
                   .block = unsigned(threads_of(p.token_tile)),
                   .smem_bytes = std::size_t(p.smem_bytes),
                   .cluster_blocks = p.splits},
                  kernel_for<T>(p.token_tile, weight.halves_a_group % 2 == 0, a.epilogue == ops::Epilogue::swiglu), map,
                  c);
  };
  return dtype == DType::f16 ? add(f16{}) : add(bf16{});
}

}  // namespace cf::cuda
