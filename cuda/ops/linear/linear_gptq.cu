#include "cuda/device/sync.cuh"
#include "cuda/ops/linear/gptq_block.cuh"
#include "cuda/ops/linear/launches.hpp"
#include "cuda/ops/linear/linear.cuh"
#include "cuda/runtime/launch.hpp"

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

/// What both epilogues share: x, and the wait for it.
template <class T>
struct LinearInput {
  const GptqCall& c;

  __device__ void ready() const { wait_for_predecessors(); }
  __device__ const T* x(int token) const { return static_cast<const T*>(c.x) + long(token) * c.matrix.in; }
};

/// Finishes one row of any call.
template <class T, int Rows>
struct LinearEpilogue : LinearInput<T> {
  struct Element {
    int token, row;
    Addends add;
  };

  __device__ Element prepare(int token, int r) const {
    const int row = this->c.pairs.row(r);
    return {.token = token, .row = row, .add = {.bias = bias_bits(this->c.output, row), .residual = 0}};
  }
  __device__ void begin(Element& e) const { e.add.residual = residual_bits(this->c.output, e.token, e.row); }
  __device__ void finish(const Element& e, const float (&v)[2]) const {
    cf::cuda::finish(this->c.output, e.token, e.row, v[0], e.add);
  }
};

/// Finishes two or four rows of a token at once. The rows are packed in order and the bias is of T. A kernel of a few
/// thousand cycles is faster with less code.
template <class T, int Rows>
requires(Rows > 1) struct LinearEpilogue<T, Rows> : LinearInput<T> {
  struct Element {
    int token, row;
    StoredWeight<Rows> bias, residual;
  };

  __device__ long place(const Element& e) const { return e.token * this->c.output.out + e.row; }
  __device__ Element prepare(int token, int row) const {
    const LinearOutput& output = this->c.output;
    Element e{.token = token, .row = row, .bias = {}, .residual = {}};
    if (output.bias) e.bias.load(static_cast<const T*>(output.bias) + row);
    return e;
  }
  __device__ void begin(Element& e) const {
    const LinearOutput& output = this->c.output;
    if (output.residual) e.residual.load(static_cast<const T*>(output.residual) + place(e));
  }
  __device__ void finish(const Element& e, float (&v)[Rows]) const {
    const LinearOutput& output = this->c.output;
    const auto add = [&](const StoredWeight<Rows>& stored) {
      float added[Rows];
      stored.unpack(added, T{});
#pragma unroll
      for (int i = 0; i < Rows; ++i) v[i] += added[i];
    };
    if (output.bias) add(e.bias);
    if (output.residual) add(e.residual);
    apply(output.epilogue, v);
    store_few(static_cast<T*>(output.y) + place(e), v);
  }
};

extern __shared__ __align__(128) char gptq_smem[];

template <class T, GptqTokens Tokens, bool HalfChunks, int Rows>
__global__ void __launch_bounds__(gptq_threads(kLinearGptqTurns), kLinearGptqBlocksPerSm)
    linear_gptq_kernel(const __grid_constant__ GptqCall c) {
  constexpr GptqConfig config{
      .tokens = Tokens, .turns = kLinearGptqTurns, .half_chunks = HalfChunks, .near_x = false, .rows = Rows};
  let_successor_start();
  gptq_block<T, config>(c.matrix, c.plan, c.tokens, LinearEpilogue<T, Rows>{{c}}, gptq_smem);
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

Status prepare_gptq(const ops::Linear::Args& a, const PackedWeight& weight, LaunchList& launches) {
  const auto d = ops::Linear::dims(a);
  CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(ops::Linear::name, weight));
  const GptqSizes sizes = gptq_sizes(layout);
  return with_gptq_activation(ops::Linear::name, a.x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    GptqCall c{.matrix = gptq_matrix(weight, layout),
               .plan = {},
               .pairs = layout.pairs,
               .x = a.x.data,
               .output = linear_output(a),
               .tokens = 0};
    const bool is_plain =
        layout.pairs == RopePairs{} && d.out % 4 == 0 && (!a.linear.bias || a.linear.bias.dtype == a.y.dtype);
    return for_each_gptq_launch(launches.arch(), sizes, d.tokens, [&](std::int64_t first, const GptqPlan& plan) {
      c.plan = plan;
      c.tokens = plan.tokens;
      // An element has two rows where a thread then has at most one element. A cluster's first block has more elements:
      // there an element has four rows.
      const bool pairs_fit =
          c.plan.split == 1 && (c.plan.tiles * kGptqRows << c.plan.token_bits) <= 2 * gptq_threads(kLinearGptqTurns);
      c.x = static_cast<const T*>(a.x.data) + first * d.in;
      c.output.y = static_cast<T*>(a.y.data) + first * d.out;
      if (a.residual) c.output.residual = static_cast<const T*>(a.residual.data) + first * d.out;
      return launch(ops::Linear::name, launches,
                    {.grid = unsigned(c.plan.grid),
                     .block = gptq_threads(kLinearGptqTurns),
                     .smem_bytes = std::size_t(linear_gptq_smem_bytes(launches.arch(), c.plan)),
                     .cluster_blocks = c.plan.split},
                    !is_plain   ? gptq_kernel_for<LinearGptqKernels<T, 1>>(c.plan, sizes, d.tokens)
                    : pairs_fit ? gptq_kernel_for<LinearGptqKernels<T, 2>>(c.plan, sizes, d.tokens)
                                : gptq_kernel_for<LinearGptqKernels<T, 4>>(c.plan, sizes, d.tokens),
                    c);
    });
  });
}

}  // namespace cf::cuda
