#pragma once
// The layer's two LayerNorms, which every block makes for itself.
#include "cuda/fused/block.cuh"

namespace cf::cuda {

/// Eights of a row's elements that a thread of the products' holds, at most; two for most models. Where the warps have
/// several rows at once, and no weights, five.
inline constexpr int kMaxNormPieces = 3, kWideNormPieces = 5;

/// How the products' warps share out rows: so many at once, a power of two, each to as many warps.
struct RowWarps {
  int tokens;

  /// As many rows at once as registers hold, and as there are.
  static __device__ RowWarps beside(int hidden, int batch) {
    int tokens = 1;
    while (tokens < min(batch, kProductWarps) && hidden * 2 * tokens <= kWideNormPieces * kVec * kProductThreads)
      tokens *= 2;
    return {tokens};
  }
  /// Of each row; which of them the thread at hand is, and of which row.
  __device__ int threads() const { return kProductThreads / tokens; }
  __device__ int thread() const { return thread_index() & (threads() - 1); }
  __device__ int token() const { return thread_index() / threads(); }
};

/// A row's part in a thread's registers, as float32.
template <int Pieces>
struct RowPart {
  float x[Pieces][kVec] = {};
};

template <int Pieces, class F>
__device__ void for_each_norm_piece(const RowWarps& of, int hidden, F f) {
#pragma unroll
  for (int p = 0; p < Pieces; ++p)
    if (const int column = (p * of.threads() + of.thread()) * kVec; column < hidden) f(p, column);
}

/// Eight elements of gamma and of beta, as stored.
struct NormWeightPiece {
  uint4 gamma, beta;
};
/// A norm's weights in registers: asked for before there is anything to normalise.
template <class T, int Pieces>
struct NormWeights {
  NormWeightPiece piece[Pieces] = {};

  __device__ void load(const RowWarps& of, int hidden, const char* g, const char* b) {
    for_each_norm_piece<Pieces>(of, hidden, [&](int p, int column) {
      piece[p] = {load_streaming(reinterpret_cast<const T*>(g) + column),
                  load_streaming(reinterpret_cast<const T*>(b) + column)};
    });
  }
  __device__ NormWeightPiece at(int p, int) const { return piece[p]; }
};
/// The same where they lie, in shared memory or not.
template <class T>
struct StoredNormWeights {
  const T *gamma, *beta;

  __device__ NormWeightPiece at(int, int column) const { return {load_raw(gamma + column), load_raw(beta + column)}; }
};

/// Brings them as far as the L2.
template <class T, int Pieces>
__device__ void prefetch_norm(const RowWarps& of, int hidden, const char* g, const char* b) {
  for_each_norm_piece<Pieces>(of, hidden, [&](int, int column) {
    prefetch_line(reinterpret_cast<const T*>(g) + column);
    prefetch_line(reinterpret_cast<const T*>(b) + column);
  });
}

struct Moments {
  float mean, rstd;
};

/// Mean and reciprocal deviation of a row that lies in the products' registers: two passes over a thread's own elements,
/// then Welford's merge over lanes and warps, in one order. All of the products' warps call; `side` alternates: one barrier
/// a call.
template <int Pieces>
__device__ Moments moments(const Block& block, const RowWarps& of, const RowPart<Pieces>& row, int side) {
  const int hidden = block.c.dims.hidden, vectors = hidden / kVec;
  Welford state, warp;
  float sum = 0;
  for_each_norm_piece<Pieces>(of, hidden, [&](int p, int) {
    state.count += kVec;
#pragma unroll
    for (int e = 0; e < kVec; ++e) sum += row.x[p][e];
  });
  state.mean = state.count > 0 ? sum / state.count : 0;
  for_each_norm_piece<Pieces>(of, hidden, [&](int p, int) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) state.m2 += (row.x[p][e] - state.mean) * (row.x[p][e] - state.mean);
  });
#pragma unroll
  for (int p = 0; p < Pieces; ++p)
    warp.count += float(kVec * min(max(vectors - (p * of.threads() + of.thread() / 32 * 32), 0), 32));
  warp.mean = warp.count > 0 ? warp_sum(sum) / warp.count : 0;
  warp.m2 = warp_sum(state.m2_about(warp.mean));
  Welford* const states = block.at<Welford>(block.c.layout.moments) + side * kProductWarps;
  if (of.thread() % 32 == 0) states[thread_index() / 32] = warp;
  block.sync();
  // Lanes beyond the row's warps stand for none.
  const int warps = of.threads() / 32, lane = of.thread() % kProductWarps;
  Welford other;
  if (lane < warps) other = states[of.token() * warps + lane];
  const float n = float(hidden), mean = warp_sum<kProductWarps>(other.sum()) / n;
  return {mean, rsqrtf(warp_sum<kProductWarps>(other.m2_about(mean)) / n + block.c.eps)};
}

template <class T, int Pieces, class Weights>
__device__ void normalise(const RowWarps& of, int hidden, const RowPart<Pieces>& row, const Moments& m,
                          const Weights& weights, char* to, T* tap) {
  for_each_norm_piece<Pieces>(of, hidden, [&](int p, int column) {
    float y[kVec], gamma[kVec], beta[kVec];
    const NormWeightPiece piece = weights.at(p, column);
    unpack(piece.gamma, gamma, T{});
    unpack(piece.beta, beta, T{});
#pragma unroll
    for (int e = 0; e < kVec; ++e) y[e] = (row.x[p][e] - m.mean) * m.rstd * gamma[e] + beta[e];
    store_vec(reinterpret_cast<T*>(to) + column, y);
    if (tap && blockIdx.x == 0) store_vec(tap + column, y);
  });
}

/// A row of a residual that other blocks are making: waits for each element's tag, unless all of it is there. `d` is what
/// a wait is reported as.
template <int Pieces>
__device__ void await_row(const Block& block, const RowWarps& of, const Tagged* from, bool there, int layer,
                          Dependency d, RowPart<Pieces>& row) {
  const unsigned tag = block.tag(layer);
  const int made_in = d == Dependency::hidden ? layer - 1 : layer;
  // While nothing is there, one lane of each warp looks at its first elements.
  if (!there && of.thread() % 32 == 0)
    block.spin(made_in, d, [&] {
      Tagged two[2];
      load_tagged(from + min(of.thread() * kVec, block.c.dims.hidden - kVec), two);
      return two[0].tag == tag && two[1].tag == tag;
    });
  __syncwarp();
  constexpr int at_once = Pieces > kMaxNormPieces ? Pieces : 2;  // pieces whose loads are in flight together
#pragma unroll
  for (int begin = 0; begin < Pieces; begin += at_once) {
    Tagged x[at_once][kVec] = {};
    const auto column = [&](int p) { return ((begin + p) * of.threads() + of.thread()) * kVec; };
    const auto mine = [&](int p) { return begin + p < Pieces && column(p) < block.c.dims.hidden; };
    const auto load = [&](int p) {
      if (!mine(p)) return;
#pragma unroll
      for (int e = 0; e < kVec; e += 2) load_tagged(from + column(p) + e, *reinterpret_cast<Tagged(*)[2]>(x[p] + e));
    };
    const auto here = [&](int p) {
      bool all = true;
#pragma unroll
      for (int e = 0; e < kVec; ++e) all = all && x[p][e].tag == tag;
      return there || !mine(p) || all;
    };
    await_pieces<at_once>(block, made_in, d, load, here);
#pragma unroll
    for (int p = 0; p < at_once; ++p)
      if (begin + p < Pieces)
#pragma unroll
        for (int e = 0; e < kVec; ++e) row.x[begin + p][e] = x[p][e].value;
  }
}
/// A row of a launch's input.
template <class T, int Pieces>
__device__ void load_row(const RowWarps& of, int hidden, const T* from, RowPart<Pieces>& row) {
  for_each_norm_piece<Pieces>(of, hidden, [&](int p, int column) { load_vec(from + column, row.x[p]); });
}

}  // namespace cf::cuda
