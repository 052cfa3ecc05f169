#pragma once
// Products of the tokens with a block's rows of a weight matrix, from the ring, on tensor cores.
#include "cuda/fused/block.cuh"
#include "cuda/fused/ring.cuh"

namespace cf::cuda {

/// One of the layer's four products. A row is cut into slices; four slices are a stage, and each of four warps takes one.
/// For one token the slices come as they lie in memory, a stage in one copy, and a warp has to do with one slice of all
/// rows, whose activations it keeps in registers: slices then have one of kNarrowColumns. With more
/// tokens, or other slices, activations lie in shared memory, a few slices at a time: the first slice of all rows comes
/// first, then the second.
struct Product {
  const char* weight;  // (rows, columns)
  int columns, slices, slice_columns, resident;
  int first, count;  // of the block's rows
  Deal deal;

  __device__ Product(const DecodeCall& c, Phase phase, int layer)
      : weight(c.first_layer.weight[int(weight_of(phase))] + layer * c.layer_stride),
        columns(phase == Phase::down ? c.dims.intermediate : c.dims.hidden),
        slices(phase == Phase::down ? c.plan.act_slices : c.plan.hidden_slices),
        slice_columns(phase == Phase::down ? c.plan.act_columns : c.plan.hidden_columns),
        resident(phase == Phase::down ? c.plan.act_resident : slices),
        first(0),
        deal(c.deals.deal(weight_of(phase), layer, int(blockIdx.x))) {
    const int half = deal.count * c.plan.up_eighths / 8 / kStageSlices * kStageSlices;  // whole stages
    count = phase == Phase::up_first ? half : deal.count;
    if (phase == Phase::up_rest) first = half, count -= half;
  }
  static __device__ Weight weight_of(Phase phase) {
    switch (phase) {
      case Phase::qkv: return Weight::qkv;
      case Phase::dense: return Weight::dense;
      case Phase::down: return Weight::down;
      default: return Weight::up;
    }
  }

  /// Of the matrix.
  __device__ int row(int i) const { return deal.row(first + i); }
  /// Stages of one slice of all rows, where slices come one after the other.
  __device__ int slice_stages() const { return (count + kStageSlices - 1) / kStageSlices; }
  template <bool Wide>
  __device__ int stages() const {
    return Wide ? slices * slice_stages() : (count * slices + kStageSlices - 1) / kStageSlices;
  }
};

/// Streams the product's weights; false when nobody empties the ring any more.
template <bool Wide>
__device__ bool stream_product(RingWriter& ring, const Product& p) {
  const int lane = int(threadIdx.x) % 32, slice_bytes = p.slice_columns * 2;
  if constexpr (Wide) {
#pragma unroll 1
    for (int slice = 0; slice < p.slices; ++slice)
#pragma unroll 1
      for (int i = 0; i < p.count; i += kStageSlices) {
        const int rows = min(kStageSlices, p.count - i);
        char* const stage = ring.next(rows * slice_bytes);
        if (!stage) return false;
        if (lane < rows)
          ring.copy(stage + lane * slice_bytes,
                    p.weight + (long(p.row(i + lane)) * p.columns + slice * p.slice_columns) * 2, slice_bytes);
      }
  } else {
    const char* const rows = p.weight + long(p.row(0)) * p.columns * 2;
    const int all = p.count * p.columns * 2;
#pragma unroll 1
    for (int at = 0; at < all; at += kStageSlices * slice_bytes) {
      const int bytes = min(kStageSlices * slice_bytes, all - at);
      char* const stage = ring.next(bytes);
      if (!stage) return false;
      if (lane == 0) ring.copy(stage, rows + at, bytes);
    }
  }
  return true;
}

/// The sums of a product's rows' slices and tokens: eight that add up to it, or with many tokens one.
template <bool Wide>
struct Sums {
  float* data;
  int batch, slices;
  static constexpr int kWidth = Wide ? 1 : 8;

  /// Where no row is cut a warp keeps its own rows' sums, numbered by itself, apart from the other warps'; else `i` counts
  /// the product's rows, whose sums lie behind those.
  __device__ Sums(const Block& block, const Product& p, int warp)
      : data(block.at<float>(block.c.layout.sums)), batch(block.c.dims.batch), slices(p.slices) {
    const int own = own_rows(block.c) * kWidth;
    data += warps_own(p) ? warp * own : kProductWarps * own;
  }
  static __device__ bool warps_own(const Product& p) { return !Wide && p.slices == 1; }
  static __device__ int own_rows(const DecodeCall& c) { return Wide ? 0 : c.plan.own_rows; }
  __device__ float* at(int i, int slice, int token) const {
    return data + ((i * slices + slice) * batch + token) * kWidth;
  }
  __device__ float total(int i, int token) const {
    float sum = 0;
#pragma unroll 1
    for (int s = 0; s < slices; ++s) {
      const float* const x = at(i, s, token);
      if constexpr (Wide)
        sum += *x;
      else
        sum += ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    }
    return sum;
  }
};

/// A warp's product of one slice with one token. A chunk is 256 columns, 32 pieces of eight. The tensor core's eight columns
/// are eight pieces of the weights, its rows sixteen of the activations': with pieces 0 to 7 and 16 to 23 of the weights the
/// diagonal of its upper half is wanted, with the others that of its lower half. So each chunk is read as it lies, 512 bytes
/// at once, and a chunk of activations takes four registers.
template <class T>
struct RowProduct {
  float upper[2][4] = {}, lower[2][4] = {};

  /// Where lane `lane` loads from the chunk of weights and of activations at 0.
  static __device__ std::uint32_t weight_lane(int lane) { return (lane % 8 + lane / 16 * 8 + lane / 8 % 2 * 16) * 16; }
  static __device__ std::uint32_t token_lane(int lane) { return lane * 16; }
  __device__ void add(const uint4& w, const uint4& x, int side) {
    mma(upper[side], x.x, x.y, x.z, x.w, w.x, w.y, T{});
    mma(lower[side], x.x, x.y, x.z, x.w, w.z, w.w, T{});
  }
  /// The diagonals: element [g][g], g = lane / 4, lies with lane 4 g + g / 2.
  __device__ float diagonal(int lane) const {
    const int odd = lane / 4 % 2;
    return ((odd ? upper[0][1] : upper[0][0]) + (odd ? upper[1][1] : upper[1][0])) +
           ((odd ? lower[0][3] : lower[0][2]) + (odd ? lower[1][3] : lower[1][2]));
  }
};

/// A warp's product of one slice with two tokens. A chunk is 256 columns, 32 pieces of eight. The tensor core's eight columns
/// are eight pieces of the weights, its rows the same pieces of the activations, of one token and then of the other: of
/// what it makes, the two diagonals are wanted. So each chunk is read as it lies, 512 bytes at once.
template <class T>
struct SliceProduct {
  static constexpr int kChunkBytes = 512;
  struct Tokens {
    uint4 first, second;  // pieces 0 to 15 and 16 to 31 of a chunk, as the tensor core's left operand
  };
  float sum[4][4] = {};

  /// Where lane `lane` loads from the chunk of weights and of activations at 0.
  static __device__ std::uint32_t weight_lane(int lane) { return lane * 16; }
  static __device__ std::uint32_t token_lane(int lane, int pair, int batch, int row_bytes) {
    return min(2 * pair + lane / 8 % 2, batch - 1) * row_bytes + (lane / 16 * 8 + lane % 8) * 16;
  }
  /// What there is of a chunk of `pieces` < 32 pieces: the rest counts as zero, whatever it is.
  static __device__ uint4 keep(uint4 w, int lane, int pieces) {
    const int g = lane / 4;
    if (g >= pieces) w.x = 0;
    if (g + 8 >= pieces) w.y = 0;
    if (g + 16 >= pieces) w.z = 0;
    if (g + 24 >= pieces) w.w = 0;
    return w;
  }
  static __device__ Tokens load_tokens(std::uint32_t x, int lane, int pieces) {
    Tokens t{load_matrices(x), load_matrices(x + kChunkBytes / 2)};
    const int g = lane / 4;
    if (g >= pieces) t.first.x = t.first.y = 0;
    if (g + 8 >= pieces) t.first.z = t.first.w = 0;
    if (g + 16 >= pieces) t.second.x = t.second.y = 0;
    if (g + 24 >= pieces) t.second.z = t.second.w = 0;
    return t;
  }
  __device__ void add(const uint4& w, const Tokens& t, int side) {
    mma(sum[2 * side], t.first.x, t.first.y, t.first.z, t.first.w, w.x, w.y, T{});
    mma(sum[2 * side + 1], t.second.x, t.second.y, t.second.z, t.second.w, w.z, w.w, T{});
  }
  /// The diagonals: element [g][g], g = lane / 4, lies with lane 4 g + g / 2. Of the pair's first token or its second.
  __device__ float diagonal(int lane, int token) const {
    const auto pick = [&](const float(&s)[4]) { return lane / 4 % 2 ? s[2 * token + 1] : s[2 * token]; };
    return (pick(sum[0]) + pick(sum[1])) + (pick(sum[2]) + pick(sum[3]));
  }
  static __device__ bool on_diagonal(int lane) { return lane % 4 == lane / 8; }
};

/// Takes the product's stages from the ring, of which the warp has every second; its sums come to lie in `sums`. `begun`
/// counts the ring's stages before. x_at(slice) is called before the first slice that has not been resident so far and
/// returns where that lies in shared memory, 0 to stop. Columns are those of a slice, or 0 for the way of many tokens.
template <class T, int Columns, class XAt>
__device__ bool consume_product(RingReader& ring, const Product& p, const Sums<Columns == 0>& sums, int begun,
                                int x_row, XAt x_at) {
  constexpr bool Wide = Columns == 0;
  using Slice = SliceProduct<T>;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32, unit = warp % kStageSlices;
  const int first = (warp / kStageSlices + begun) % 2, stages = p.stages<Wide>();
  const std::uint32_t w_lane =
      unit * p.slice_columns * 2 + (Wide ? Slice::weight_lane(lane) : RowProduct<T>::weight_lane(lane));
  std::uint32_t x = x_at(0);
  if (x == 0) return false;
  if constexpr (Wide) {
    const int pieces = p.slice_columns / kVec, chunks = (pieces + 31) / 32;
    int resident = 0;
#pragma unroll 1
    for (int s = first; s < stages; s += 2) {
      const int slice = s / p.slice_stages();
      for (; slice >= resident + p.resident; resident += p.resident) {
        x = x_at(resident + p.resident);
        if (x == 0) return false;
      }
      const int i = (s - slice * p.slice_stages()) * kStageSlices + unit;
      const std::uint32_t w_at = shared_address(ring.wait()) + w_lane;
#pragma unroll 1
      for (int pair = 0; 2 * pair < sums.batch && i < p.count; ++pair) {
        const std::uint32_t x_slice =
            x + (slice - resident) * p.slice_columns * 2 + Slice::token_lane(lane, pair, sums.batch, x_row);
        Slice product;
        const auto add = [&](int k, int side) {
          product.add(Slice::keep(load_matrices(w_at + k * Slice::kChunkBytes), lane, pieces - k * 32),
                      Slice::load_tokens(x_slice + k * Slice::kChunkBytes, lane, pieces - k * 32), side);
        };
#pragma unroll 1
        for (int k = 0; k + 1 < chunks; k += 2) {
          add(k, 0);
          add(k + 1, 1);
        }
        if (chunks % 2) add(chunks - 1, 0);
#pragma unroll
        for (int token = 0; token < 2; ++token) {
          const float sum = warp_sum(Slice::on_diagonal(lane) ? product.diagonal(lane, token) : 0);
          if (lane == 0 && 2 * pair + token < sums.batch) *sums.at(i, slice, 2 * pair + token) = sum;
        }
      }
      ring.release(lane == 0);
    }
    // All warps ask for all that is resident in turn, whether they have stages of it or not.
    for (; resident + p.resident < p.slices; resident += p.resident)
      if (x_at(resident + p.resident) == 0) return false;
  } else {
    const int slice = (first * kStageSlices + unit) & (p.slices - 1);
    x += slice * Columns * 2 + RowProduct<T>::token_lane(lane);
    constexpr int chunks = Columns * 2 / Slice::kChunkBytes;
    static_assert(Columns * 2 % Slice::kChunkBytes == 0);
    uint4 token[chunks];
#pragma unroll
    for (int k = 0; k < chunks; ++k) token[k] = load_matrices(x + k * Slice::kChunkBytes);
    // Slices of all rows are numbered through, four a stage.
    const bool own = sums.warps_own(p);
    float* to = (own ? sums.at(0, 0, 0) : sums.at(0, first * kStageSlices + unit, 0)) + lane / 4;
    const int step = (own ? 1 : 2 * kStageSlices) * sums.kWidth;
#pragma unroll 1
    for (int s = first; s < stages; s += 2) {
      const std::uint32_t w_at = shared_address(ring.wait()) + w_lane;
      if (s * kStageSlices + unit < p.count * p.slices) {
        RowProduct<T> product;
#pragma unroll
        for (int k = 0; k < chunks; ++k) product.add(load_matrices(w_at + k * Slice::kChunkBytes), token[k], k % 2);
        if (Slice::on_diagonal(lane)) *to = product.diagonal(lane);
      }
      to += step;
      ring.release(lane == 0);
    }
  }
  return true;
}

}  // namespace cf::cuda
