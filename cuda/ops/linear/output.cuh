#pragma once
// What linear's kernels do with the sums of a product: the epilogue.
#include <type_traits>

#include "core/ops/linear.hpp"
#include "cuda/device/math.cuh"
#include "cuda/device/vec.cuh"

namespace cf::cuda {

/// Applies the activation function of an epilogue that takes one sum: GELU in either form, or none. finish() adds the
/// residual.
template <int N>
__device__ void apply(ops::Epilogue epilogue, float (&v)[N]) {
  if (epilogue == ops::Epilogue::gelu_erf)
#pragma unroll
    for (float& x : v) x = gelu_erf(x);
  if (epilogue == ops::Epilogue::gelu_tanh)
#pragma unroll
    for (float& x : v) x = gelu_tanh(x);
}

/// An element of y from the sums of two neighbouring rows, the gate's and the up row's: silu(gate) * up.
template <int N>
__device__ void apply_gates(const float (&sums)[N], float (&y)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) y[i] = silu(sums[2 * i]) * sums[2 * i + 1];
}

/// What linear does with the sums of a launch. The pointers are those of the launch's first token. A kernel that is
/// compiled as Gated makes an element of y of two rows' sums, and adds no residual.
struct LinearOutput {
  const void* bias;
  const void* residual;
  void* y;
  long out;  // of y: with gates half as many as the weight has rows
  DType activation, bias_dtype;
  ops::Epilogue epilogue;
};

inline LinearOutput linear_output(const ops::Linear::Args& a) {
  return {.bias = a.linear.bias.data,
          .residual = a.residual.data,
          .y = a.y.data,
          .out = a.y.shape[1],
          .activation = a.y.dtype,
          .bias_dtype = a.linear.bias.dtype,
          .epilogue = a.epilogue};
}

/// The same from a token of the call on.
inline LinearOutput from_token(LinearOutput to, long token) {
  const long bytes = token * to.out * long(size_bytes(to.activation));
  to.y = static_cast<char*>(to.y) + bytes;
  if (to.residual) to.residual = static_cast<const char*>(to.residual) + bytes;
  return to;
}

/// The stored bits of what is added to an element's sum. finish() converts them; until then nothing waits for their
/// loads.
struct Addends {
  std::uint32_t bias, residual;
};

__device__ inline std::uint32_t bias_bits(const LinearOutput& to, long row) {
  return to.bias ? load_bits(to.bias, to.bias_dtype, row) : 0;
}
__device__ inline std::uint32_t residual_bits(const LinearOutput& to, int token, long row) {
  return to.residual ? load_bits(to.residual, to.activation, token * to.out + row) : 0;
}
__device__ inline Addends addends(const LinearOutput& to, int token, long row) {
  return {bias_bits(to, row), residual_bits(to, token, row)};
}

/// The same of a gate's row and the up row behind it.
struct GateAddends {
  std::uint32_t gate, up;
};
template <bool Gated>
using AddendsOf = std::conditional_t<Gated, GateAddends, Addends>;

/// `row` is the gate's row or the up row.
__device__ inline GateAddends gate_addends(const LinearOutput& to, long row) {
  const long gate = row & ~1L;
  return {bias_bits(to, gate), bias_bits(to, gate + 1)};
}

/// Those of either kernel: addends() or gate_addends().
template <bool Gated>
__device__ AddendsOf<Gated> addends_of(const LinearOutput& to, int token, int row) {
  if constexpr (Gated)
    return gate_addends(to, row);
  else
    return addends(to, token, row);
}

/// Stores an element of y.
__device__ inline void finish(const LinearOutput& to, int token, long row, float sum, Addends add) {
  float v[] = {sum};
  if (to.bias) v[0] += from_bits(add.bias, to.bias_dtype);
  if (to.residual) v[0] += from_bits(add.residual, to.activation);
  apply(to.epilogue, v);
  store_scalar(to.y, to.activation, token * to.out + row, v[0]);
}

/// Stores the element of y that two rows make; `row` is the gate's.
__device__ inline void finish_gate(const LinearOutput& to, int token, long row, float gate, float up, GateAddends add) {
  float v[] = {gate, up}, y[1];
  if (to.bias) {
    v[0] += from_bits(add.gate, to.bias_dtype);
    v[1] += from_bits(add.up, to.bias_dtype);
  }
  apply_gates(v, y);
  store_scalar(to.y, to.activation, token * to.out + row / 2, y[0]);
}

/// Stores the element that sum(row) makes, or with gates sum(row) and sum(row ^ 1) together where row is the gate's.
template <bool Gated, class Sum>
__device__ void finish_of(const LinearOutput& to, int token, int row, Sum sum, AddendsOf<Gated> add) {
  if constexpr (!Gated)
    finish(to, token, row, sum(row), add);
  else if (row % 2 == 0)
    finish_gate(to, token, row, sum(row), sum(row ^ 1), add);
}

}  // namespace cf::cuda
