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

/// Finishes one row of any call. With gates the rows are packed in order, and the gate's row finishes both.
template <class T, int Rows, bool Gated>
struct LinearEpilogue : LinearInput<T> {
  struct Element {
    int token, row;
    AddendsOf<Gated> add;
  };

  __device__ Element prepare(int token, int r) const {
    if constexpr (Gated) {
      return {.token = token, .row = r, .add = gate_addends(this->c.output, r)};
    } else {
      const int row = this->c.pairs.row(r);
      return {.token = token, .row = row, .add = {.bias = bias_bits(this->c.output, row), .residual = 0}};
    }
  }
  __device__ void begin(Element& e) const {
    if constexpr (!Gated) e.add.residual = residual_bits(this->c.output, e.token, e.row);
  }
  __device__ void finish(const Element& e, const float (&v)[2]) const {
    if constexpr (!Gated)
      cf::cuda::finish(this->c.output, e.token, e.row, v[0], e.add);
    else if (e.row % 2 == 0)
      finish_gate(this->c.output, e.token, e.row, v[0], v[1], e.add);
  }
};

/// Finishes two or four rows of a token at once, with gates one or two elements of y. The rows are packed in order and the bias is of T. A kernel of a few
/// thousand cycles is faster with less code.
template <class T, int Rows, bool Gated>
requires(Rows > 1) struct LinearEpilogue<T, Rows, Gated> : LinearInput<T> {
  struct Element {
    int token, row;
    StoredWeight<Rows> bias, residual;
  };

  /// Of the first element in y.
  __device__ long place(const Element& e) const { return e.token * this->c.output.out + (Gated ? e.row / 2 : e.row); }
  __device__ Element prepare(int token, int row) const {
    const LinearOutput& output = this->c.output;
    Element e{.token = token, .row = row, .bias = {}, .residual = {}};
    if (output.bias) e.bias.load(static_cast<const T*>(output.bias) + row);
    return e;
  }
  __device__ void begin(Element& e) const {
    const LinearOutput& output = this->c.output;
    if constexpr (!Gated)
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
    if constexpr (Gated) {
      float of_pairs[Rows / 2];
      apply_gates(v, of_pairs);
      store_few(static_cast<T*>(output.y) + place(e), of_pairs);
    } else {
      if (output.residual) add(e.residual);
      apply(output.epilogue, v);
      store_few(static_cast<T*>(output.y) + place(e), v);
    }
  }
};

extern __shared__ __align__(128) char gptq_smem[];

template <class T, GptqTokens Tokens, bool HalfChunks, int Rows, bool Gated, int Chunks>
__global__ void __launch_bounds__(gptq_threads(kLinearGptqTurns), kLinearGptqBlocksPerSm)
    linear_gptq_kernel(const __grid_constant__ GptqCall c) {
  constexpr GptqConfig config = linear_gptq_config(Tokens, HalfChunks, Rows, Chunks);
  let_successor_start();
  gptq_block<T, config>(c.matrix, c.plan, c.tokens, LinearEpilogue<T, Rows, Gated>{{c}}, gptq_smem);
}

template <class T, int Rows, bool Gated>
struct LinearGptqKernels {
  static constexpr int rows(GptqTokens tokens, bool half_chunks) {
    if (tokens == GptqTokens::sixteen || half_chunks) return 1;
    return tokens == GptqTokens::one ? std::min(Rows, 2) : Rows;
  }
  template <GptqTokens Tokens, bool HalfChunks, int Chunks = kGptqMaxChunks>
  static constexpr auto kernel = linear_gptq_kernel<T, Tokens, HalfChunks, rows(Tokens, HalfChunks), Gated, Chunks>;
};

/// The kernel for a plan whose elements may have up to `rows` rows.
template <class T, bool Gated>
auto kernel_for(int rows, const GptqPlan& plan, const GptqSizes& sizes) {
  return rows == 1   ? gptq_kernel_for<LinearGptqKernels<T, 1, Gated>>(plan, sizes)
         : rows == 2 ? gptq_kernel_for<LinearGptqKernels<T, 2, Gated>>(plan, sizes)
                     : gptq_kernel_for<LinearGptqKernels<T, 4, Gated>>(plan, sizes);
}

}  // namespace

Status prepare_gptq(const ops::Linear::Args& a, const PackedWeight& weight, LaunchList& launches) {
  const auto d = ops::Linear::dims(a);
  CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(ops::Linear::name, weight));
  const GptqSizes sizes = gptq_sizes(layout, d.tokens);
  const bool gated = a.epilogue == ops::Epilogue::swiglu, in_order = layout.pairs == RopePairs{};
  if (gated && !in_order)
    return Status::error(Code::unimplemented,
                         "linear: cuda takes rows that are packed in order with Epilogue::swiglu, got RoPE's order");
  return with_gptq_activation(ops::Linear::name, a.x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    GptqCall c{.matrix = gptq_matrix(weight, layout),
               .plan = {},
               .pairs = layout.pairs,
               .x = a.x.data,
               .output = linear_output(a),
               .tokens = 0};
    const bool is_plain = in_order && d.rows() % 4 == 0 && (!a.linear.bias || a.linear.bias.dtype == a.y.dtype);
    return for_each_gptq_launch(launches.arch(), sizes, d.tokens, [&](std::int64_t first, const GptqPlan& plan) {
      c.plan = plan;
      if (launches.shares_sms()) fill_places(launches.arch(), sizes.tiles, kLinearGptqBlocksPerSm, c.plan);
      c.tokens = plan.tokens;
      // An element has two rows where a thread then has at most one element. A cluster's first block has more elements:
      // there an element has four rows.
      const bool pairs_fit =
          c.plan.split == 1 && (c.plan.tiles * kGptqRows << c.plan.token_bits) <= 2 * gptq_threads(kLinearGptqTurns);
      const int rows = !is_plain ? 1 : pairs_fit ? 2 : 4;
      c.x = static_cast<const T*>(a.x.data) + first * d.in;
      c.output.y = static_cast<T*>(a.y.data) + first * d.out;
      if (a.residual) c.output.residual = static_cast<const T*>(a.residual.data) + first * d.out;
      return launch(ops::Linear::name, launches,
                    {.grid = unsigned(c.plan.grid),
                     .block = gptq_threads(kLinearGptqTurns),
                     .smem_bytes = std::size_t(linear_gptq_smem_bytes(launches.arch(), c.plan)),
                     .cluster_blocks = c.plan.split},
                    gated ? kernel_for<T, true>(rows, c.plan, sizes) : kernel_for<T, false>(rows, c.plan, sizes), c);
    });
  });
}

}  // namespace cf::cuda
