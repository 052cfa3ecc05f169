#include "cuda/linear_gptq.cuh"

#include "cuda/launch.hpp"
#include "cuda/linear.cuh"

namespace cf::cuda {
namespace {

struct GptqProduct {
  GptqMatrix matrix;
  GptqPlan plan;
  const void* x;
  LinearOutput output;
  int tokens;
};

extern __shared__ __align__(128) char gptq_smem[];

template <class T, int Chunks, bool TwoTokens, bool HalfChunks>
__global__ void __launch_bounds__(kGptqThreads, gptq_blocks_per_sm(kCompiledFor, TwoTokens, HalfChunks))
    linear_gptq_kernel(const __grid_constant__ GptqProduct p) {
  let_successor_start();
  const T* x = static_cast<const T*>(p.x);
  gptq_block<T, Chunks, TwoTokens, HalfChunks>(
      p.matrix, p.plan, p.tokens, [] { wait_for_predecessors(); },
      [&](int token, int column) { return load_columns(p.matrix, x + long(token) * p.matrix.in, column); },
      [&](int token, int row) { return addends(p.output, token, row); },
      [&](int token, int row, auto sum, Addends add) { finish(p.output, token, row, sum(row), add); }, gptq_smem);
}

template <class T>
auto kernel_for(const GptqPlan& plan, bool half_chunks, bool two_tokens) {
  // Groups that end within a chunk are rare enough to do without a kernel of four chunks.
  if (half_chunks) return two_tokens ? linear_gptq_kernel<T, 5, true, true> : linear_gptq_kernel<T, 5, false, true>;
  if (plan.kernel_chunks == 4)
    return two_tokens ? linear_gptq_kernel<T, 4, true, false> : linear_gptq_kernel<T, 4, false, false>;
  return two_tokens ? linear_gptq_kernel<T, 5, true, false> : linear_gptq_kernel<T, 5, false, false>;
}

}  // namespace

Status run_gptq(const ops::Linear::Args& a, const GptqTiles& tiles, Context& context) {
  constexpr std::string_view name = ops::Linear::name;
  const auto d = ops::Linear::dims(a);
  if (a.x.dtype == DType::f32)
    return Status::error(Code::unimplemented,
                         "linear: cuda takes float16 or bfloat16 activations with GPTQ weights, got float32");
  if (tiles.pairs != RopePairs{})
    return Status::error(Code::unimplemented, "linear: cuda takes GPTQ tiles of rows in their own order, got pairs");
  const GptqSizes sizes = gptq_sizes(tiles);
  return with_activation(name, a.x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    if constexpr (std::is_same_v<T, float>) {
      return {};
    } else {
      GptqProduct p{
          .matrix = gptq_matrix(tiles, d.in, d.out), .plan = {}, .x = nullptr, .output = linear_output(a), .tokens = 0};
      for (std::int64_t first = 0; first < d.tokens; first += p.tokens) {
        p.plan = gptq_plan(context.arch(), sizes, std::min<std::int64_t>(kMmaTokens, d.tokens - first));
        if (p.plan.grid == 0)
          return Status::error(Code::unimplemented, "linear: cuda takes GPTQ weights of up to " +
                                                        std::to_string(kGptqMaxColumns) + " columns, got " +
                                                        std::to_string(64 * sizes.chunks));
        p.tokens = p.plan.tokens;
        p.x = static_cast<const T*>(a.x.data) + first * d.in;
        p.output.y = static_cast<T*>(a.y.data) + first * d.out;
        if (a.residual) p.output.residual = static_cast<const T*>(a.residual.data) + first * d.out;
        CF_TRY(launch(name, context,
                      {.grid = unsigned(p.plan.grid),
                       .block = kGptqThreads,
                       .smem_bytes = std::size_t(p.plan.smem_bytes),
                       .cluster_blocks = p.plan.split},
                      kernel_for<T>(p.plan, sizes.halves_a_group % 2 != 0, p.tokens > 8), p));
      }
      return {};
    }
  });
}

}  // namespace cf::cuda
