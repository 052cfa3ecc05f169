#include "cuda/linear_gptq.cuh"

#include "cuda/launch.hpp"
#include "cuda/linear.cuh"

namespace cf::cuda {
namespace {

struct GptqProduct {
  GptqMatrix matrix;
  GptqPlan plan;
  RopePairs pairs;
  const void* x;
  LinearOutput output;
  int tokens;
};

extern __shared__ __align__(128) char gptq_smem[];

template <class T, GptqTokens Tokens, bool HalfChunks>
__global__ void __launch_bounds__(gptq_threads(kLinearGptqTurns), kLinearGptqBlocksPerSm)
    linear_gptq_kernel(const __grid_constant__ GptqProduct p) {
  let_successor_start();
  const T* x = static_cast<const T*>(p.x);
  gptq_block<T, kLinearGptqTurns, Tokens, HalfChunks>(
      p.matrix, p.plan, p.tokens, [] { wait_for_predecessors(); },
      [&](int token, int column) { return load_columns(p.matrix, x + long(token) * p.matrix.in, column); },
      [&](int token, int r) { return addends(p.output, token, p.pairs.row(r)); },
      [&](int token, int r, auto sum, Addends add) { finish(p.output, token, p.pairs.row(r), sum(r), add); },
      gptq_smem);
}

template <class T>
struct LinearGptqKernels {
  template <GptqTokens Tokens, bool HalfChunks>
  static constexpr auto kernel = linear_gptq_kernel<T, Tokens, HalfChunks>;
};

}  // namespace

Status run_gptq(const ops::Linear::Args& a, const GptqTiles& tiles, Context& context) {
  constexpr std::string_view name = ops::Linear::name;
  const auto d = ops::Linear::dims(a);
  const GptqSizes sizes = gptq_sizes(tiles);
  return with_gptq_activation(name, a.x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    GptqProduct p{.matrix = gptq_matrix(tiles, d.in, d.out),
                  .plan = {},
                  .pairs = tiles.pairs,
                  .x = nullptr,
                  .output = linear_output(a),
                  .tokens = 0};
    for (std::int64_t first = 0; first < d.tokens; first += p.tokens) {
      p.plan = gptq_plan(context.arch(), sizes, d.tokens - first, kLinearGptqTurns, kLinearGptqBlocksPerSm);
      if (p.plan.grid == 0)
        return Status::error(Code::unimplemented, "linear: cuda takes GPTQ weights of up to " +
                                                      std::to_string(kGptqMaxColumns) + " columns, got " +
                                                      std::to_string(kGptqColumns * sizes.chunks));
      p.tokens = p.plan.tokens;
      p.x = static_cast<const T*>(a.x.data) + first * d.in;
      p.output.y = static_cast<T*>(a.y.data) + first * d.out;
      if (a.residual) p.output.residual = static_cast<const T*>(a.residual.data) + first * d.out;
      CF_TRY(launch(name, context,
                    {.grid = unsigned(p.plan.grid),
                     .block = gptq_threads(kLinearGptqTurns),
                     .smem_bytes = std::size_t(linear_gptq_smem_bytes(context.arch(), p.plan)),
                     .cluster_blocks = p.plan.split},
                    gptq_kernel_for<LinearGptqKernels<T>>(p.plan, sizes, d.tokens), p));
    }
    return {};
  });
}

}  // namespace cf::cuda
