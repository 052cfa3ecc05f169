#pragma once
// The kernel of every op with a LayerNorm or an RMSNorm. An op's Row says what the kernel loads and stores of a row.
#include "core/weights.hpp"
#include "cuda/device/math.cuh"
#include "cuda/device/norm.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/ops/norm/layernorm.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {

/// The arguments of a norm's kernel beside the op's own tensors.
struct LayerNormParams {
  NormParams norm;
  int hidden;
  float eps, inverse_hidden;
};

/// A block normalises one row: y = Norm(x; norm). A Row has
///   Norm                        LayerNormOfRow or RmsNormOfRow
///   Element                     the activations' type; an access is 16 bytes, kLane<Element> elements
///   inputs                      the number of tensors that x is the sum of
///   Input load(at)              loads the inputs of x[at ..)
///   input(loaded, x)            computes x from the loaded inputs
///   begin(at, x)                stores what the op wants of x before the norm
///   Side side(at)               loads what finish() needs beside y
///   finish(at, side, y)         stores the results
/// `at` is the number of an element, counted from the first element of row 0.
template <class Row, int Elements>
__global__ void __launch_bounds__(max_layernorm_threads(Elements), min_layernorm_blocks(Elements))
    layernorm_kernel(const __grid_constant__ Row row, const __grid_constant__ LayerNormParams params) {
  constexpr int lane_elements = kLane<typename Row::Element>, pieces = Elements / lane_elements;
  constexpr int max_warps = max_layernorm_threads(Elements) / 32;
  // The loads of weights and side inputs are in flight together with those of x where registers can hold the results.
  constexpr bool weights_ahead = Elements == 8, side_ahead = Elements <= 16;
  constexpr bool loads_apart = pieces * sizeof(typename Row::Input) <= 256;
  using Norm = typename Row::Norm;
  __shared__ typename Norm::WarpState warp_states[max_warps];
  using Weight = StoredWeight<lane_elements>;
  Weight gamma[weights_ahead ? pieces : 1], beta[weights_ahead ? pieces : 1];
  typename Row::Side side[side_ahead ? pieces : 1];
  float x[pieces][lane_elements];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const long begin = long(blockIdx.x) * params.hidden;
  const auto for_each_piece = [&](auto f) {
#pragma unroll
    for (int p = 0; p < pieces; ++p)
      if (const int i = (p * int(blockDim.x) + int(threadIdx.x)) * lane_elements; i < params.hidden) f(p, i);
  };
  const auto load_weights = [&](int p, int i, auto type) {
    gamma[p].load(static_cast<const decltype(type)*>(params.norm.gamma.data) + i);
    if constexpr (Norm::has_beta) beta[p].load(static_cast<const decltype(type)*>(params.norm.beta.data) + i);
  };
  const DType weight = params.norm.gamma.dtype;

  let_successor_start();
  if constexpr (weights_ahead)
    with_weight(weight, [&](auto type) { for_each_piece([&](int p, int i) { load_weights(p, i, type); }); });
  wait_for_predecessors();
  if constexpr (loads_apart) {
    typename Row::Input loaded[pieces];
    for_each_piece([&](int p, int i) { loaded[p] = row.load(begin + i); });
    if constexpr (side_ahead) for_each_piece([&](int p, int i) { side[p] = row.side(begin + i); });
    for_each_piece([&](int p, int) { row.input(loaded[p], x[p]); });
  } else {
    for_each_piece([&](int p, int i) { row.input(row.load(begin + i), x[p]); });
  }

  for_each_piece([&](int p, int i) { row.begin(begin + i, x[p]); });
  const auto state = Norm::of_warp([&](auto f) { for_each_piece([&](int p, int) { f(p); }); }, x);
  if (lane == 0) warp_states[warp] = state;
  __syncthreads();
  const auto normalised = Norm::template of_row<max_warps>(state, warp_states, warps, int(threadIdx.x) % max_warps,
                                                           params.inverse_hidden, params.eps);

  with_weight(weight, [&](auto type) {
    for_each_piece([&](int p, int i) {
      if constexpr (!weights_ahead) load_weights(0, i, type);
      if constexpr (!side_ahead) side[0] = row.side(begin + i);
      float y[lane_elements], g[lane_elements];
      gamma[weights_ahead ? p : 0].unpack(g, type);
      if constexpr (Norm::has_beta) {
        float b[lane_elements];
        beta[weights_ahead ? p : 0].unpack(b, type);
#pragma unroll
        for (int e = 0; e < lane_elements; ++e) y[e] = normalised(x[p][e], g[e], b[e]);
      } else {
#pragma unroll
        for (int e = 0; e < lane_elements; ++e) y[e] = normalised(x[p][e], g[e]);
      }
      row.finish(begin + i, side[side_ahead ? p : 0], y);
    });
  });
}

/// The Row of an op that normalises x as it is stored. Ops derive from it and add what they store.
template <class T>
struct LayerNormRow {
  using Norm = LayerNormOfRow;
  using Element = T;
  using Input = uint4;
  struct Side {};
  using Piece = float[kLane<T>];
  static constexpr int inputs = 1;

  const T* x;

  __device__ Input load(long at) const { return load_raw(x + at); }
  __device__ void input(const Input& loaded, Piece& v) const { unpack(loaded, v, T{}); }
  __device__ void begin(long, const Piece&) const {}
  __device__ Side side(long) const { return {}; }
};

/// Adds the launch of one block for each token.
template <class Row>
Status launch_norm(std::string_view op, LaunchList& launches, const LayerNormPlan& plan, const Row& row,
                   const NormParams& norm, const ConstAnyView<2>& x, double eps) {
  const auto [tokens, hidden] = x.shape;
  const LayerNormParams params{
      .norm = norm, .hidden = int(hidden), .eps = float(eps), .inverse_hidden = 1 / float(hidden)};
  auto kernel = plan.elements == 8 ? layernorm_kernel<Row, 8> : layernorm_kernel<Row, 64>;
  if constexpr (Row::inputs == 1)
    if (plan.elements == 16) kernel = layernorm_kernel<Row, 16>;
  return launch(op, launches, {.grid = unsigned(tokens), .block = unsigned(plan.threads)}, kernel, row, params);
}

}  // namespace cf::cuda
