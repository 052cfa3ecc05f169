#pragma once
// The layer's two norms, LayerNorms or RMSNorms, which every block computes for itself.
#include "cuda/device/compiled_for.hpp"
#include "cuda/device/norm.cuh"
#include "cuda/persistent/block.cuh"
#include "cuda/persistent/packed.cuh"

namespace cf::cuda {

/// Vectors of eight elements of a row that a thread holds, at most: kMaxNormPieces where registers hold the norms'
/// weights too, kTokensNormPieces where they do not, as with several tokens.
inline constexpr int kMaxNormPieces = 3, kTokensNormPieces = 5;
static_assert(kMaxPersistentHidden <= kMaxNormPieces * kVec * kConsumerThreads);

/// How the consumer warps share the tokens' rows: they normalise `tokens` rows at once, a power of two, with equally
/// many warps a row.
struct RowWarps {
  int tokens;

  /// As many rows at once as the batch has and as registers hold.
  static __device__ RowWarps for_batch(int hidden, int batch) {
    int tokens = 1;
    while (tokens < min(batch, kConsumerWarps) && hidden * 2 * tokens <= kTokensNormPieces * kVec * kConsumerThreads)
      tokens *= 2;
    return {tokens};
  }
  /// Threads of a row; the calling thread's number among them; its row.
  __device__ int threads() const { return kConsumerThreads / tokens; }
  __device__ int thread() const { return thread_index() & (threads() - 1); }
  __device__ int token() const { return thread_index() / threads(); }
};

/// The elements of a row that a thread holds, as float32.
template <int Pieces>
struct RowPieces {
  float x[Pieces][kVec] = {};
};

/// Calls f(p, column) for each piece of the row that the thread has.
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
/// A norm's weights in registers, loaded before there is a row to normalise.
template <class T, int Pieces>
struct NormWeights {
  NormWeightPiece piece[Pieces] = {};

  __device__ void load(const RowWarps& of, int hidden, const char* gamma, const char* beta) {
    for_each_norm_piece<Pieces>(of, hidden, [&](int p, int column) {
      piece[p].gamma = load_streaming(reinterpret_cast<const T*>(gamma) + column);
      if (beta) piece[p].beta = load_streaming(reinterpret_cast<const T*>(beta) + column);
    });
  }
  __device__ NormWeightPiece at(int p, int) const { return piece[p]; }
};
/// A norm's weights in shared memory or in device memory.
template <class T>
struct StoredNormWeights {
  const T *gamma, *beta;

  __device__ NormWeightPiece at(int, int column) const { return {load_raw(gamma + column), load_raw(beta + column)}; }
};

/// Brings a norm's weights into the L2.
template <class T, int Pieces>
__device__ void prefetch_norm(const RowWarps& of, int hidden, const char* gamma, const char* beta) {
  for_each_norm_piece<Pieces>(of, hidden, [&](int, int column) {
    prefetch_line(reinterpret_cast<const T*>(gamma) + column);
    prefetch_line(reinterpret_cast<const T*>(beta) + column);
  });
}

/// The mean and the reciprocal standard deviation of a row: two passes over a thread's own elements, then Welford's
/// merge over lanes and over warps, in a fixed order. All consumer warps call, each for its own row. `side` alternates
/// from call to call between 0 and 1, so that one barrier a call is enough. The norms are on the layer's critical path,
/// so the second pass runs beside the sum over the lanes; in centre_warp() it would wait for that sum. Divisions are
/// approximate, as in centre_warp(): their error is that of a few roundings of the mean. RMSNorm is LayerNorm about the
/// mean 0.
template <int Pieces>
__device__ RowMoments moments(const Block& block, const RowWarps& of, const RowPieces<Pieces>& row, int side) {
  const int hidden = block.c.dims.hidden, vectors = hidden / kVec;
  Welford state, warp;
  float sum = 0;
  for_each_norm_piece<Pieces>(of, hidden, [&](int p, int) {
    state.count += kVec;
#pragma unroll
    for (int e = 0; e < kVec; ++e) sum += row.x[p][e];
  });
  if (block.c.rms_norm) sum = 0;
  state.mean = state.count > 0 ? __fdividef(sum, state.count) : 0;
  for_each_norm_piece<Pieces>(of, hidden, [&](int p, int) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) state.m2 += (row.x[p][e] - state.mean) * (row.x[p][e] - state.mean);
  });
#pragma unroll
  for (int p = 0; p < Pieces; ++p)
    warp.count += float(kVec * min(max(vectors - (p * of.threads() + of.thread() / 32 * 32), 0), 32));
  warp.mean = warp.count > 0 ? __fdividef(warp_sum(sum), warp.count) : 0;
  warp.m2 = warp_sum(state.m2_about(warp.mean));
  Welford* const states = block.at<Welford>(block.c.layout.moments) + side * kConsumerWarps;
  if (of.thread() % 32 == 0) states[thread_index() / 32] = warp;
  block.sync();
  const int warps = of.threads() / 32;
  return merge_warps<kConsumerWarps>(states + of.token() * warps, warps, of.thread() % kConsumerWarps,
                                     1 / float(hidden), block.c.eps);
}

/// y = (x - mean) * rstd * gamma + beta of a piece.
template <class T>
__device__ void normalise_piece(const float (&x)[kVec], const RowMoments& m, const NormWeightPiece& weights,
                                float (&y)[kVec]) {
  float gamma[kVec], beta[kVec];
  unpack(weights.gamma, gamma, T{});
  unpack(weights.beta, beta, T{});
#pragma unroll
  for (int e = 0; e < kVec; ++e) y[e] = (x[e] - m.mean) * m.rstd * gamma[e] + beta[e];
}

/// Stores the thread's pieces of the normalised row at `to`, with `columns` each element in its own column; block 0
/// stores the row at `tap` too, if there is one.
template <class T, int Pieces, class Weights>
__device__ void normalise(const RowWarps& of, int hidden, const RowPieces<Pieces>& row, const RowMoments& m,
                          const Weights& weights, char* to, const int* columns, T* tap) {
  for_each_norm_piece<Pieces>(of, hidden, [&](int p, int column) {
    float y[kVec];
    normalise_piece<T>(row.x[p], m, weights.at(p, column), y);
    T* const row_at = reinterpret_cast<T*>(to);
    if (columns)
#pragma unroll
      for (int e = 0; e < kVec; ++e) row_at[__ldg(columns + column + e)] = from_float<T>(y[e]);
    else
      store_vec(row_at + column, y);
    if (tap && blockIdx.x == 0) store_vec(tap + column, y);
  });
}

/// Stores the digits of the thread's pieces of the normalised row at `to`; block 0 stores the row at `tap`, if there is
/// one. Nothing here is conditional: the pieces' chains of shuffles run side by side.
template <class T, int Pieces, class Weights>
__device__ void normalise(const RowWarps& of, int hidden, const RowPieces<Pieces>& row, const RowMoments& m,
                          const Weights& weights, const Digits& to, T* tap) {
#pragma unroll
  for (int p = 0; p < Pieces; ++p) {
    const int column = (p * of.threads() + of.thread()) * kVec;
    float y[kVec];
    normalise_piece<T>(row.x[p], m, weights.at(p, column), y);
    to.store(column, y, column < hidden);
    if (tap && blockIdx.x == 0 && column < hidden) store_vec(tap + column, y);
  }
}

/// Loads a row of the residual stream that other blocks make, and waits for each element's epoch unless the row is
/// complete. `d` is the dependency that a wait which takes too long reports.
template <int Pieces>
__device__ void await_row(const Block& block, const RowWarps& of, const NormWord* from, bool complete, int layer,
                          Dependency d, RowPieces<Pieces>& row) {
  const unsigned epoch = block.epoch(layer);
  const int made_in = d == Dependency::hidden ? layer - 1 : layer;
  // Of a long row one lane of each warp polls the warp's first elements.
  if (!complete && block.c.dims.hidden > kUnsampledHidden && of.thread() % 32 == 0)
    block.poll(made_in, d, [&] {
      return have_norm_epoch(load_relaxed_quad(from + min(of.thread() * kVec, block.c.dims.hidden - kVec)), epoch);
    });
  __syncwarp();
  constexpr int at_once = Pieces > kMaxNormPieces ? Pieces : 2;  // pieces whose loads are in flight together
#pragma unroll
  for (int begin = 0; begin < Pieces; begin += at_once) {
    uint4 words[at_once][2] = {};
    const auto column = [&](int p) { return ((begin + p) * of.threads() + of.thread()) * kVec; };
    const auto in_row = [&](int p) { return begin + p < Pieces && column(p) < block.c.dims.hidden; };
    const auto load = [&](int p) {
      if (!in_row(p)) return;
      words[p][0] = load_relaxed_quad(from + column(p));
      words[p][1] = load_relaxed_quad(from + column(p) + 4);
    };
    const auto here = [&](int p) {
      return complete || !in_row(p) || (have_norm_epoch(words[p][0], epoch) && have_norm_epoch(words[p][1], epoch));
    };
    await_pieces<at_once>(block, made_in, d, load, here);
#pragma unroll
    for (int p = 0; p < at_once; ++p)
      if (begin + p < Pieces)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4& w = words[p][half];
          float* const x = row.x[begin + p] + 4 * half;
          x[0] = norm_value(w.x), x[1] = norm_value(w.y), x[2] = norm_value(w.z), x[3] = norm_value(w.w);
        }
  }
}
/// The same of a row of which every rank makes a part: their sum, in the order of the ranks. `at` is the row's first
/// element.
template <int Pieces>
__device__ void await_sum(const Block& block, const RowWarps& of, long at, int layer, Dependency d,
                          RowPieces<Pieces>& row) {
  const RankExchange& x = block.c.ranks;
  const unsigned epoch = block.rank_epoch(layer);
  const int made_in = d == Dependency::hidden ? layer - 1 : layer, buffer = block.rank_buffer(d, made_in),
            hidden = block.c.dims.hidden, lane = of.thread() % 32;
  // Of long rows one lane of each warp polls the warp's first elements of each rank's.
  if (hidden * x.ranks > kUnsampledHidden && lane < x.ranks)
    block.poll(
        made_in, d,
        [&] {
          const int sample = min((of.thread() - lane) * kVec, hidden - kVec);
          return have_norm_epoch(load_quad_of_peer(x.norms(x.rank, buffer, lane) + at + sample), epoch);
        },
        [&] { return lane; });
  __syncwarp();
  // Pieces whose loads are in flight together, as many as registers hold: those of two ranks where that is not too much.
  constexpr int at_once = Pieces > kMaxNormPieces ? 3 : 2,
                ranks_at_once = Pieces > kMaxNormPieces || kCompiledFor == 120 ? 1 : 2;
#pragma unroll
  for (int begin = 0; begin < Pieces; begin += at_once)
#pragma unroll 1
    for (int first = 0; first < x.ranks; first += ranks_at_once) {
      uint4 words[at_once * ranks_at_once][2] = {};
      const auto rank = [&](int u) { return first + u % ranks_at_once; };
      const auto column = [&](int u) { return ((begin + u / ranks_at_once) * of.threads() + of.thread()) * kVec; };
      const auto in_row = [&](int u) {
        return begin + u / ranks_at_once < Pieces && column(u) < hidden && rank(u) < x.ranks;
      };
      const auto load = [&](int u) {
        if (!in_row(u)) return;
        const NormWord* const from = x.norms(x.rank, buffer, rank(u)) + at + column(u);
        words[u][0] = load_quad_of_peer(from);
        words[u][1] = load_quad_of_peer(from + 4);
      };
      const auto here = [&](int u) {
        return !in_row(u) || (have_norm_epoch(words[u][0], epoch) && have_norm_epoch(words[u][1], epoch));
      };
      await_pieces<at_once * ranks_at_once>(block, made_in, d, load, here, rank);
#pragma unroll
      for (int u = 0; u < at_once * ranks_at_once; ++u)
        if (begin + u / ranks_at_once < Pieces)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint4& w = words[u][half];
            float* const sum = row.x[begin + u / ranks_at_once] + 4 * half;
            sum[0] += norm_value(w.x), sum[1] += norm_value(w.y), sum[2] += norm_value(w.z), sum[3] += norm_value(w.w);
          }
    }
}
/// Loads a row of a launch's input.
template <class T, int Pieces>
__device__ void load_row(const RowWarps& of, int hidden, const T* from, RowPieces<Pieces>& row) {
  for_each_norm_piece<Pieces>(of, hidden, [&](int p, int column) { load_vec(from + column, row.x[p]); });
}

}  // namespace cf::cuda
