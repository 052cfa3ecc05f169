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

/// An element of the product, and what is added to it.
struct LinearElement {
  int token, row;
  Addends add;
};

/// Rows of a token from `row` on, and what is added to them as it lies in memory: a conversion would wait for the load.
template <int Rows>
struct LinearRows {
  int token, row;
  StoredWeight<Rows> bias, residual;
};

extern __shared__ __align__(128) char gptq_smem[];

/// A thread finishes one row of any call, or two or four of a token at once where rows are in order and the bias is of
/// T. Kernels of a few thousand cycles are the faster the shorter they are.
template <class T, GptqTokens Tokens, bool HalfChunks, int Rows>
__global__ void __launch_bounds__(gptq_threads(kLinearGptqTurns), kLinearGptqBlocksPerSm)
    linear_gptq_kernel(const __grid_constant__ GptqCall c) {
  let_successor_start();
  const T* const x = static_cast<const T*>(c.x);
  const auto row_of_x = [&](int token) { return x + long(token) * c.matrix.in; };
  if constexpr (Rows > 1) {
    const auto place = [&](const auto& e) { return e.token * c.output.out + e.row; };
    gptq_block<T, kLinearGptqTurns, Tokens, HalfChunks, false, Rows>(
        c.matrix, c.plan, c.tokens,
        [&](int token, int row) {
          LinearRows<Rows> e{.token = token, .row = row, .bias = {}, .residual = {}};
          if (c.output.bias) e.bias.load(static_cast<const T*>(c.output.bias) + row);
          return e;
        },
        [] { wait_for_predecessors(); }, row_of_x,
        [&](LinearRows<Rows>& e) {
          if (c.output.residual) e.residual.load(static_cast<const T*>(c.output.residual) + place(e));
        },
        [&](const LinearRows<Rows>& e, float(&v)[Rows]) {
          float add[Rows];
          const auto add_all = [&] {
#pragma unroll
            for (int i = 0; i < Rows; ++i) v[i] += add[i];
          };
          if (c.output.bias) {
            e.bias.unpack(add, T{});
            add_all();
          }
          if (c.output.residual) {
            e.residual.unpack(add, T{});
            add_all();
          }
          apply(c.output.epilogue, v);
          store_few(static_cast<T*>(c.output.y) + place(e), v);
        },
        gptq_smem);
  } else {
    gptq_block<T, kLinearGptqTurns, Tokens, HalfChunks, false, Rows>(
        c.matrix, c.plan, c.tokens,
        [&](int token, int r) {
          const int row = c.pairs.row(r);
          return LinearElement{.token = token, .row = row, .add = {.bias = bias_bits(c.output, row), .residual = 0}};
        },
        [] { wait_for_predecessors(); }, row_of_x,
        [&](LinearElement& e) { e.add.residual = residual_bits(c.output, e.token, e.row); },
        [&](const LinearElement& e, const float(&v)[2]) { finish(c.output, e.token, e.row, v[0], e.add); }, gptq_smem);
  }
}

template <class T, int Rows>
struct LinearGptqKernels {
  static constexpr int rows(GptqTokens tokens, bool half_chunks) {
    if (tokens == GptqTokens::sixteen || half_chunks) return 1;
    return tokens == GptqTokens::one ? std::min(Rows, 2) : Rows;
  }
  template <GptqTokens Tokens, bool HalfChunks>
  static constexpr auto kernel = linear_gptq_kernel<T, Tokens, HalfChunks, rows(Tokens, HalfChunks)>;
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
    const bool is_plain =
        tiles.pairs == RopePairs{} && d.out % 4 == 0 && (!a.linear.bias || a.linear.bias.dtype == a.y.dtype);
    for (std::int64_t first = 0; first < d.tokens; first += c.tokens) {
      c.plan = gptq_plan(context.arch(), sizes, d.tokens - first, kLinearGptqTurns, kLinearGptqBlocksPerSm);
      if (c.plan.grid == 0)
        return Status::error(Code::unimplemented, "linear: cuda takes GPTQ weights of up to " +
                                                      std::to_string(kGptqMaxColumns) + " columns, got " +
                                                      std::to_string(kGptqColumns * sizes.chunks));
      c.tokens = c.plan.tokens;
      // A cluster's first block has the more to finish: four.
      const bool pairs_fit =
          c.plan.split == 1 && (c.plan.tiles * kGptqRows << c.plan.token_bits) <= 2 * gptq_threads(kLinearGptqTurns);
      c.x = static_cast<const T*>(a.x.data) + first * d.in;
      c.output.y = static_cast<T*>(a.y.data) + first * d.out;
      if (a.residual) c.output.residual = static_cast<const T*>(a.residual.data) + first * d.out;
      CF_TRY(launch(ops::Linear::name, context,
                    {.grid = unsigned(c.plan.grid),
                     .block = gptq_threads(kLinearGptqTurns),
                     .smem_bytes = std::size_t(linear_gptq_smem_bytes(context.arch(), c.plan)),
                     .cluster_blocks = c.plan.split},
                    !is_plain   ? gptq_kernel_for<LinearGptqKernels<T, 1>>(c.plan, sizes, d.tokens)
                    : pairs_fit ? gptq_kernel_for<LinearGptqKernels<T, 2>>(c.plan, sizes, d.tokens)
                                : gptq_kernel_for<LinearGptqKernels<T, 4>>(c.plan, sizes, d.tokens),
                    c));
    }
    return {};
  });
}

}  // namespace cf::cuda
