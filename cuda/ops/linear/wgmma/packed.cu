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
__global__ void __launch_bounds__(threads_of(Tokens), packed_blocks_an_sm(Tokens))
    linear_wgmma_gptq_kernel([[maybe_unused]] const __grid_constant__ CUtensorMap x,
                             [[maybe_unused]] const __grid_constant__ CUtensorMap codes,
                             [[maybe_unused]] const __grid_constant__ CUtensorMap scales,
                             [[maybe_unused]] const __grid_constant__ PackedCall c) {
#ifdef CF_HAVE_WGMMA
  if (threadIdx.x == kWgmmaConsumers)
    for (const CUtensorMap* map : {&x, &codes, &scales}) prefetch_map(map);
  using Ring = PackedRing<Tokens>;
  const PackedOrder order{c.weight.pairs};
  multiply_rows<T, Tokens, Gated, Ring, threads_of(Tokens)>(
      c.product, order,
      [&](const Ring& ring, const Steps& steps, int first_row) {
        copy_steps(ring, steps, x, [&](int step, unsigned char* to, std::uint64_t* full) {
          copy_packed(to, codes, scales, c.weight.halves_a_group, first_row / kGptqRows, step, full);
        });
      },
      [&](const Ring& ring, const Steps& steps, int, float(&sum)[Tokens / 2]) {
        RingSlot slot;
        multiply_codes<T, Tokens, Halves, packed_stages(Tokens)>(
            ring, slot, steps.first, steps.count, c.weight.halves_a_group,
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
  CF_TRY_ASSIGN(const PackedMaps maps, packed_maps(weight.matrix));
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
                  maps.codes, maps.scales, c);
  };
  return dtype == DType::f16 ? add(f16{}) : add(bf16{});
}

}  // namespace cf::cuda
