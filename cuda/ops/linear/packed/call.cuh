#pragma once
// A call of linear with a packed weight as kernels take it, and what they do with the product's sums.
#include "cuda/device/sync.cuh"
#include "cuda/ops/linear/output.cuh"
#include "cuda/ops/linear/packed/block.cuh"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {

/// One launch of linear with a packed weight.
struct GptqCall {
  GptqMatrix matrix;
  GptqPlan plan;
  RopePairs pairs;
  const void* x;
  LinearOutput output;
  int tokens;
};

/// The call without a plan and its tokens.
inline GptqCall gptq_call(const ops::Linear::Args& a, const PackedWeight& weight, const GptqLayout& layout) {
  return {.matrix = gptq_matrix(weight, layout),
          .plan = {},
          .pairs = layout.pairs,
          .x = a.x.data,
          .output = linear_output(a),
          .tokens = 0};
}

/// The launch's shape with `smem_bytes` of dynamic shared memory a block, at least the plan's.
inline LaunchShape linear_gptq_shape(const GptqPlan& plan, int smem_bytes) {
  return {.grid = unsigned(plan.grid),
          .block = gptq_threads(kLinearGptqTurns),
          .smem_bytes = std::size_t(smem_bytes),
          .cluster_blocks = plan.split};
}

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

/// Finishes two or four rows of a token at once, with gates one or two elements of y. It takes calls for which
/// gptq_is_plain() holds, and has less code than the epilogue of one row: a kernel runs for a few thousand cycles
/// alone.
template <class T, int Rows, bool Gated>
requires(Rows > 1) struct LinearEpilogue<T, Rows, Gated> : LinearInput<T> {
  struct Element {
    int token, row;
    StoredWeight<Rows> bias, residual;
  };

  /// The offset of the element in y.
  __device__ long offset(const Element& e) const { return e.token * this->c.output.out + (Gated ? e.row / 2 : e.row); }
  __device__ Element prepare(int token, int row) const {
    const LinearOutput& output = this->c.output;
    Element e{.token = token, .row = row, .bias = {}, .residual = {}};
    if (output.bias) e.bias.load(static_cast<const T*>(output.bias) + row);
    return e;
  }
  __device__ void begin(Element& e) const {
    const LinearOutput& output = this->c.output;
    if constexpr (!Gated)
      if (output.residual) e.residual.load(static_cast<const T*>(output.residual) + offset(e));
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
      store_few(static_cast<T*>(output.y) + offset(e), of_pairs);
    } else {
      if (output.residual) add(e.residual);
      apply(output.epilogue, v);
      store_few(static_cast<T*>(output.y) + offset(e), v);
    }
  }
};

}  // namespace cf::cuda
