#include "cuda/linear_gptq.cuh"

#include <array>

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

/// One product, or two that share the blocks: the first's come first.
struct GptqCall {
  GptqProduct products[2];
};

extern __shared__ __align__(128) char gptq_smem[];

template <class T, GptqTokens Tokens, bool HalfChunks>
__global__ void __launch_bounds__(gptq_threads(kLinearGptqTurns), kLinearGptqBlocksPerSm)
    linear_gptq_kernel(const __grid_constant__ GptqCall c) {
  let_successor_start();
  const int of_first = c.products[0].plan.grid, second = int(blockIdx.x) >= of_first;
  const GptqProduct& p = c.products[second];
  const T* x = static_cast<const T*>(p.x);
  gptq_block<T, kLinearGptqTurns, Tokens, HalfChunks>(
      p.matrix, p.plan, int(blockIdx.x) - second * of_first, p.tokens, [] { wait_for_predecessors(); },
      [&](int token) { return x + long(token) * p.matrix.in; },
      [&](int token, int r) { return addends(p.output, token, p.pairs.row(r)); },
      [&](int token, int r, auto sum, Addends add) { finish(p.output, token, p.pairs.row(r), sum(r), add); },
      gptq_smem);
}

template <class T>
struct LinearGptqKernels {
  template <GptqTokens Tokens, bool HalfChunks>
  static constexpr auto kernel = linear_gptq_kernel<T, Tokens, HalfChunks>;
};

GptqPlan plan_of(const Arch& arch, const GptqSizes& sizes, std::int64_t tokens, int tiles_beside = 0) {
  return gptq_plan(arch, sizes, tokens, kLinearGptqTurns, kLinearGptqBlocksPerSm, 0, 0, tiles_beside);
}

/// The product of the call's tokens from `first` on.
GptqProduct product_of(const ops::Linear::Args& a, const GptqTiles& tiles, std::int64_t first, const GptqPlan& plan) {
  const auto d = ops::Linear::dims(a);
  const std::int64_t element_bytes = std::int64_t(size_bytes(a.x.dtype));
  GptqProduct p{.matrix = gptq_matrix(tiles, d.in, d.out),
                .plan = plan,
                .pairs = tiles.pairs,
                .x = static_cast<const char*>(a.x.data) + first * d.in * element_bytes,
                .output = linear_output(a),
                .tokens = plan.tokens};
  p.output.y = static_cast<char*>(a.y.data) + first * d.out * element_bytes;
  if (a.residual) p.output.residual = static_cast<const char*>(a.residual.data) + first * d.out * element_bytes;
  return p;
}

/// One launch of products whose plans agree on all but their grids and tiles; call_tokens are those of the whole call.
template <class T>
Status launch_products(const GptqCall& c, const GptqSizes& sizes, std::int64_t call_tokens, Context& context) {
  const GptqPlan &first = c.products[0].plan, &second = c.products[1].plan;
  return launch(ops::Linear::name, context,
                {.grid = unsigned(first.grid + second.grid),
                 .block = gptq_threads(kLinearGptqTurns),
                 .smem_bytes = std::size_t(std::max(linear_gptq_smem_bytes(context.arch(), first), second.smem_bytes)),
                 .cluster_blocks = first.split},
                gptq_kernel_for<LinearGptqKernels<T>>(first, sizes, call_tokens), c);
}

/// The plans of a pair; none has a grid where they cannot share a launch.
std::array<GptqPlan, 2> pair_plans(const Arch& arch, const LinearPair& pair) {
  const auto *first = std::get_if<GptqTiles>(&pair.first.linear.weight),
             *second = std::get_if<GptqTiles>(&pair.second.linear.weight);
  const std::int64_t tokens = pair.first.x.shape[0];
  if (!first || !second || pair.first.x.dtype != pair.second.x.dtype || tokens != pair.second.x.shape[0]) return {};
  const GptqSizes sizes[] = {gptq_sizes(*first), gptq_sizes(*second)};
  if (sizes[0].halves_a_group % 2 != sizes[1].halves_a_group % 2) return {};
  const std::array<GptqPlan, 2> plans{plan_of(arch, sizes[0], tokens, sizes[1].tiles),
                                      plan_of(arch, sizes[1], tokens, sizes[0].tiles)};
  for (const GptqPlan& p : plans)
    if (p.grid == 0 || p.tokens != tokens || p.split != plans[0].split) return {};
  return plans;
}

}  // namespace

Status run_gptq(const ops::Linear::Args& a, const GptqTiles& tiles, Context& context) {
  const auto d = ops::Linear::dims(a);
  const GptqSizes sizes = gptq_sizes(tiles);
  return with_gptq_activation(ops::Linear::name, a.x.dtype, [&](auto zero) -> Status {
    GptqCall c{};
    for (std::int64_t first = 0; first < d.tokens; first += c.products[0].tokens) {
      const GptqPlan plan = plan_of(context.arch(), sizes, d.tokens - first);
      if (plan.grid == 0)
        return Status::error(Code::unimplemented, "linear: cuda takes GPTQ weights of up to " +
                                                      std::to_string(kGptqMaxColumns) + " columns, got " +
                                                      std::to_string(kGptqColumns * sizes.chunks));
      c.products[0] = product_of(a, tiles, first, plan);
      CF_TRY(launch_products<decltype(zero)>(c, sizes, d.tokens, context));
    }
    return {};
  });
}

bool share_launch(const Arch& arch, const LinearPair& pair) { return pair_plans(arch, pair)[0].grid > 0; }

Status run(const LinearPair& pair, Context& context) {
  const std::array<GptqPlan, 2> plans = pair_plans(context.arch(), pair);
  if (plans[0].grid == 0) {
    CF_TRY(run(pair.first, context));
    return run(pair.second, context);
  }
  for (const ops::Linear::Args* a : {&pair.first, &pair.second}) CF_TRY(check_call(*a, context));
  const auto &first = *std::get_if<GptqTiles>(&pair.first.linear.weight),
             &second = *std::get_if<GptqTiles>(&pair.second.linear.weight);
  return with_gptq_activation(ops::Linear::name, pair.first.x.dtype, [&](auto zero) {
    return launch_products<decltype(zero)>(
        {{product_of(pair.first, first, 0, plans[0]), product_of(pair.second, second, 0, plans[1])}}, gptq_sizes(first),
        pair.first.x.shape[0], context);
  });
}

}  // namespace cf::cuda
