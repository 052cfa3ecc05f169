#include "cuda/ops/linear/packed/packed.hpp"

#include "cuda/device/compiled_for.hpp"
#include "cuda/ops/linear/packed/call.cuh"

namespace cf::cuda {
namespace {

extern __shared__ __align__(128) char gptq_smem[];

/// Whether a kernel is a wide one: other devices' plans have no launches of those.
constexpr bool is_wide(GptqTokens tokens, bool half_chunks) { return tokens >= GptqTokens::sixteen && !half_chunks; }

template <class T, GptqTokens Tokens, bool HalfChunks, int Rows, bool Gated, int Chunks>
__global__ void __launch_bounds__(gptq_threads(kLinearGptqTurns),
                                  linear_gptq_blocks_per_sm(is_wide(Tokens, HalfChunks), int(Tokens)))
    linear_gptq_kernel([[maybe_unused]] const __grid_constant__ GptqCall c) {
  constexpr GptqConfig config = linear_gptq_config(Tokens, HalfChunks, Rows, Chunks);
  if constexpr (is_hopper(kCompiledFor) || !is_wide(Tokens, HalfChunks)) {
    let_successor_start();
    gptq_block<T, config>(c.matrix, c.plan, c.tokens, LinearEpilogue<T, Rows, Gated>{{c}}, gptq_smem);
  }
}

template <class T, int Rows, bool Gated>
struct LinearGptqKernels {
  static constexpr int rows(GptqTokens tokens, bool half_chunks) {
    if (half_chunks) return 1;
    return tokens == GptqTokens::one ? std::min(Rows, 2) : Rows;
  }
  template <GptqTokens Tokens, bool HalfChunks, int Chunks = kGptqMaxChunks>
  static constexpr auto kernel = linear_gptq_kernel<T, Tokens, HalfChunks, rows(Tokens, HalfChunks), Gated, Chunks>;
};

template <class T, bool Gated, GptqTokens Tokens>
auto wide_kernel_for(int rows, const GptqPlan& plan) {
  if (gptq_slice_chunks(plan) == kGptqQuad) return linear_gptq_kernel<T, Tokens, false, 4, Gated, kGptqQuad>;
  return rows == 1 ? linear_gptq_kernel<T, Tokens, false, 1, Gated, kGptqWideChunks>
                   : linear_gptq_kernel<T, Tokens, false, 4, Gated, kGptqWideChunks>;
}

/// The kernel for a plan whose elements may have up to `rows` rows.
template <class T, bool Gated>
auto kernel_for(int rows, const GptqPlan& plan, const GptqSizes& sizes) {
  if (plan.wide)
    return plan.tokens > kGptqWideTokens ? wide_kernel_for<T, Gated, GptqTokens::thirty_two>(rows, plan)
                                         : wide_kernel_for<T, Gated, GptqTokens::sixteen>(rows, plan);
  return rows == 1   ? gptq_kernel_for<LinearGptqKernels<T, 1, Gated>>(plan, sizes)
         : rows == 2 ? gptq_kernel_for<LinearGptqKernels<T, 2, Gated>>(plan, sizes)
                     : gptq_kernel_for<LinearGptqKernels<T, 4, Gated>>(plan, sizes);
}

}  // namespace

Status launch_packed(const ops::Linear::Args& a, const PackedLaunches& plan, LaunchList& launches) {
  const auto d = ops::Linear::dims(a);
  const auto& weight = std::get<PackedWeight>(a.linear.weight);
  CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(ops::Linear::name, weight));
  const GptqSizes sizes = gptq_sizes(layout, d.tokens);
  const bool gated = a.epilogue == ops::Epilogue::swiglu, is_plain = gptq_is_plain(a, layout, {}, 4);
  return with_gptq_activation(ops::Linear::name, a.x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    GptqCall c = gptq_call(a, weight, layout);
    for (const auto& l : plan.launches) {
      c.plan = l.plan;
      if (launches.mode().shares_sms)
        fill_device(launches.arch(), sizes.tiles, linear_gptq_blocks_per_sm(c.plan.wide, c.plan.tokens), c.plan);
      c.tokens = int(l.tokens);
      // An element has two rows if each thread then has at most one element. The first block of a cluster has more
      // elements; there an element has four rows.
      const bool pairs_fit =
          c.plan.split == 1 && (c.plan.tiles * kGptqRows << c.plan.token_bits) <= 2 * gptq_threads(kLinearGptqTurns);
      const int rows = !is_plain ? 1 : pairs_fit ? 2 : 4;
      c.x = static_cast<const T*>(a.x.data) + l.first * d.in;
      c.output.y = static_cast<T*>(a.y.data) + l.first * d.out;
      if (a.residual) c.output.residual = static_cast<const T*>(a.residual.data) + l.first * d.out;
      const int smem_bytes =
          launches.mode().leaves_room ? c.plan.smem_bytes : linear_gptq_smem_bytes(launches.arch(), c.plan);
      CF_TRY(launch(ops::Linear::name, launches, linear_gptq_shape(c.plan, smem_bytes),
                    gated ? kernel_for<T, true>(rows, c.plan, sizes) : kernel_for<T, false>(rows, c.plan, sizes), c));
    }
    return {};
  });
}

}  // namespace cf::cuda
