#include "cuda/ops/linear/wgmma/wgmma.hpp"

#include "cuda/device/copy_once.cuh"
#include "cuda/ops/linear/wgmma/block.cuh"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/tensor_map.hpp"

namespace cf::cuda {
namespace {

template <class T, int Tokens, bool Gated>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    linear_wgmma_kernel([[maybe_unused]] const __grid_constant__ CUtensorMap weight,
                        [[maybe_unused]] const __grid_constant__ CUtensorMap x,
                        [[maybe_unused]] const __grid_constant__ WgmmaCall c) {
#ifdef CF_HAVE_WGMMA
  if (threadIdx.x == kWgmmaConsumers) {
    prefetch_map(&weight);
    prefetch_map(&x);
  }
  using Ring = WgmmaRing<Tokens>;
  multiply_rows<T, Tokens, Gated, Ring>(
      c, InOrder{},
      [&](const Ring& ring, const Steps& steps, int first_row) {
        copy_steps(ring, steps, x, [&, policy = evict_first()](int step, unsigned char* to, std::uint64_t* full) {
          copy_tensor_tile(to, &weight, step * kLinearWgmmaColumns, first_row, 0, full, policy);
        });
      },
      [&](const Ring& ring, const Steps& steps, int, float(&sum)[Tokens / 2]) {
        RingSlot slot;
        multiply_steps<T>(ring, steps.count, slot, sum);
      });
#endif
}

template <class T, bool Gated>
auto kernel_for(int token_tile) {
  switch (token_tile) {
    case 16: return linear_wgmma_kernel<T, 16, Gated>;
    case 32: return linear_wgmma_kernel<T, 32, Gated>;
    case 64: return linear_wgmma_kernel<T, 64, Gated>;
    default: return linear_wgmma_kernel<T, 128, Gated>;
  }
}
template <class T>
auto kernel_for(int token_tile, bool gated) {
  return gated ? kernel_for<T, true>(token_tile) : kernel_for<T, false>(token_tile);
}

}  // namespace

Status launch_wgmma(const ops::Linear::Args& a, const LinearWgmmaPlan& plan, LaunchList& launches) {
  const auto& dense = std::get<DenseWeight>(a.linear.weight);
  const auto d = ops::Linear::dims(a);
  const DType dtype = a.x.dtype;
  const bool gated = a.epilogue == ops::Epilogue::swiglu;
  CUtensorMap weight, x;
  CF_TRY(make_tensor_map({.data = dense.weight.data, .dtype = dtype, .columns = d.in, .rows = d.rows()},
                         kLinearWgmmaTileRows, weight));
  CF_TRY(make_tensor_map({.data = a.x.data, .dtype = dtype, .columns = d.in, .rows = d.tokens}, plan.token_tile, x));
  const WgmmaCall c = wgmma_call(a, plan);
  return launch(
      ops::Linear::name, launches,
      {.grid = unsigned(plan.row_tiles * plan.splits),
       .block = kWgmmaThreads,
       .smem_bytes = std::size_t(plan.smem_bytes),
       .cluster_blocks = plan.splits},
      dtype == DType::f16 ? kernel_for<f16>(plan.token_tile, gated) : kernel_for<bf16>(plan.token_tile, gated), weight,
      x, c);
}

}  // namespace cf::cuda
