#include "cuda/linear_gptq.cuh"

#include "cuda/launch.hpp"
#include "cuda/linear.cuh"

namespace cf::cuda {
namespace {

struct GptqCall {
  GptqMatrix matrix;
  GptqPlan plan;
  RopePairs pairs;
  const void* x;
  LinearOutput output;
  int tokens;
};

/// An element of the product: its place in y, and what is added to it.
struct LinearElement {
  long at;
  Addends add;
};

extern __shared__ __align__(128) char gptq_smem[];

template <class T, GptqTokens Tokens, bool HalfChunks>
__global__ void __launch_bounds__(gptq_threads(kLinearGptqTurns), kLinearGptqBlocksPerSm)
    linear_gptq_kernel(const __grid_constant__ GptqCall c) {
  let_successor_start();
  const T* x = static_cast<const T*>(c.x);
  gptq_block<T, kLinearGptqTurns, Tokens, HalfChunks>(
      c.matrix, c.plan, c.tokens,
      [&](int token, int r) {
        const int row = c.pairs.row(r);
        return LinearElement{.at = token * c.output.out + row,
                             .add = {.bias = bias_bits(c.output, row), .residual = 0}};
      },
      [] { wait_for_predecessors(); }, [&](int token) { return x + long(token) * c.matrix.in; },
      [&](LinearElement& e) { e.add.residual = residual_bits(c.output, e.at); },
      [&](const LinearElement& e, float sum, float) { finish(c.output, e.at, sum, e.add); }, gptq_smem);
}

template <class T>
struct LinearGptqKernels {
  template <GptqTokens Tokens, bool HalfChunks>
  static constexpr auto kernel = linear_gptq_kernel<T, Tokens, HalfChunks>;
};

}  // namespace

Status run_gptq(const ops::Linear::Args& a, const GptqTiles& tiles, Context& context) {
  const auto d = ops::Linear::dims(a);
  const GptqSizes sizes = gptq_sizes(tiles);
  return with_gptq_activation(ops::Linear::name, a.x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    GptqCall c{.matrix = gptq_matrix(tiles, d.in, d.out),
               .plan = {},
               .pairs = tiles.pairs,
               .x = a.x.data,
               .output = linear_output(a),
               .tokens = 0};
    for (std::int64_t first = 0; first < d.tokens; first += c.tokens) {
      c.plan = gptq_plan(context.arch(), sizes, d.tokens - first, kLinearGptqTurns, kLinearGptqBlocksPerSm);
      if (c.plan.grid == 0)
        return Status::error(Code::unimplemented, "linear: cuda takes GPTQ weights of up to " +
                                                      std::to_string(kGptqMaxColumns) + " columns, got " +
                                                      std::to_string(kGptqColumns * sizes.chunks));
      c.tokens = c.plan.tokens;
      c.x = static_cast<const T*>(a.x.data) + first * d.in;
      c.output.y = static_cast<T*>(a.y.data) + first * d.out;
      if (a.residual) c.output.residual = static_cast<const T*>(a.residual.data) + first * d.out;
      CF_TRY(launch(ops::Linear::name, context,
                    {.grid = unsigned(c.plan.grid),
                     .block = gptq_threads(kLinearGptqTurns),
                     .smem_bytes = std::size_t(linear_gptq_smem_bytes(context.arch(), c.plan)),
                     .cluster_blocks = c.plan.split},
                    gptq_kernel_for<LinearGptqKernels<T>>(c.plan, sizes, d.tokens), c));
    }
    return {};
  });
}

}  // namespace cf::cuda
