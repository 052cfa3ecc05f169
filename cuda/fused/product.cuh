#pragma once
// Products of the tokens with a block's rows of a weight matrix, from the ring, on tensor cores.
#include "cuda/fused/block.cuh"
#include "cuda/fused/ring.cuh"

namespace cf::cuda {

/// One of the layer's four products. A row is cut into slices, and four slices are a stage. For one token they come as they
/// lie in memory, in one copy, and each of four warps takes one: a warp has to do with one slice of all rows, whose
/// activations it keeps in registers. Slices then have one of kNarrowColumns. With more tokens, or other slices, the first
/// slice of all rows comes first, then the second; two stages are a tile of eight rows, and each of eight warps takes some
/// of its columns, which it keeps of all tokens in registers.
struct Product {
  const char* weight;  // (rows, columns)
  int columns, slices, slice_columns;
  int first, count;  // of the block's rows
  Deal deal;

  __device__ Product(const DecodeCall& c, Phase phase, int layer)
      : weight(c.first_layer.weight[int(weight_of(phase))] + layer * c.layer_stride),
        columns(phase == Phase::down ? c.dims.intermediate : c.dims.hidden),
        slices(phase == Phase::down ? c.plan.act_slices : c.plan.hidden_slices),
        slice_columns(phase == Phase::down ? c.plan.act_columns : c.plan.hidden_columns),
        first(0),
        deal(c.deals.deal(weight_of(phase), layer, int(blockIdx.x))) {
    const int half = first_rows(c.plan, deal.count);
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
  template <bool Wide>
  __device__ int stages() const {
    return Wide ? slices * ((count + kStageSlices - 1) / kStageSlices)
                : (count * slices + kStageSlices - 1) / kStageSlices;
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
        const char* const from = p.weight + (long(p.row(i)) * p.columns + slice * p.slice_columns) * 2;
        if (p.slices == 1) {
          if (lane == 0) ring.copy(stage, from, rows * slice_bytes);
        } else if (lane < rows) {
          ring.copy(stage + lane * slice_bytes, from + long(lane) * p.columns * 2, slice_bytes);
        }
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

/// What a product's sums are made of, eight for each: of one token those of each slice of a row, of tiles the eight shares
/// of the products' warps.
template <bool Wide>
struct Sums {
  float* data;
  int batch, slices, rows;

  /// Where no row is cut a warp keeps its own rows' sums, numbered by itself, apart from the other warps'; else `i` counts
  /// the product's rows, whose sums lie behind those.
  __device__ Sums(const Block& block, const Product& p, int warp)
      : data(block.at<float>(block.c.layout.sums)),
        batch(Wide ? block.c.dims.batch : 1),
        slices(p.slices),
        rows(p.count) {
    const int own = Wide ? 0 : block.c.plan.own_rows * 8;
    data += warps_own(p) ? warp * own : kProductWarps * own;
  }
  static __device__ bool warps_own(const Product& p) { return !Wide && p.slices == 1; }
  /// Eight of a slice.
  __device__ float* of_slice(int i, int slice) const { return data + (i * slices + slice) * 8; }
  /// One of a row's token.
  __device__ float* share(int which, int i, int token) const { return data + (which * rows + i) * batch + token; }
  __device__ float total(int i, int token) const {
    const auto all = [](auto x) { return ((x(0) + x(1)) + (x(2) + x(3))) + ((x(4) + x(5)) + (x(6) + x(7))); };
    if constexpr (Wide) return all([&](int e) { return *share(e, i, token); });
    float sum = 0;
#pragma unroll 1
    for (int s = 0; s < slices; ++s) sum += all([x = of_slice(i, s)](int e) { return x[e]; });
    return sum;
  }
};

/// A warp's product of one slice with one token. A chunk is 256 columns, 32 pieces of eight. The tensor core's eight columns
/// are eight pieces of the weights, its rows sixteen of the activations': with pieces 0 to 7 and 16 to 23 of the weights the
/// diagonal of its upper half is wanted, with the others that of its lower half. So each chunk is read as it lies, 512 bytes
/// at once, and a chunk of activations takes four registers.
template <class T>
struct RowProduct {
  static constexpr int kChunkBytes = 512;
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
  static __device__ bool on_diagonal(int lane) { return lane % 4 == lane / 8; }
};

/// A warp's product of its columns of a slice with up to eight tokens and a tile of eight rows. A line of 64 columns is two
/// halves of four pieces of eight columns. The tensor core's eight columns are the rows, of which the even ones have one
/// half of a line and the odd ones the other, its first eight rows are the tokens with the line's first half and the
/// second eight those with its second: half of the sums are wanted. So eight lanes, which load together, find two rows in
/// different banks, however far rows are apart.
struct TileTokens {
  // The left operand, twice a line: of each piece the first four columns, then the rest.
  uint4 half_line[2 * kMaxLines];
  int pieces;  // that the warp has

  static __device__ int lane_offset(int lane) { return lane % 4 * 16; }

  /// The slice lies at `x` in shared memory, each token's `x_row` bytes after the one before.
  __device__ TileTokens(const DecodeCall& c, const char* x, int x_row, int tokens, int slice_columns, int warp) {
    const int lane = thread_index() % 32, begin = warp * warp_lines(slice_columns) * kLineColumns;
    pieces = max(min(slice_columns - begin, warp_lines(slice_columns) * kLineColumns), 0) / kVec;
    x += min(lane / 4, tokens - 1) * x_row + begin * 2 + lane_offset(lane);
#pragma unroll
    for (int line = 0; line < kMaxLines; ++line) {
      const uint4 low = load_piece<false>(x, line, 0), high = load_piece<false>(x, line, 1);
      half_line[2 * line] = operand(c, {low.x, high.x, low.y, high.y});
      half_line[2 * line + 1] = operand(c, {low.z, high.z, low.w, high.w});
    }
  }
  /// The lane's piece of half a line, zero where there is none.
  template <bool Whole>
  __device__ uint4 load_piece(const char* lane_at, int line, int half) const {
    if (!Whole && 8 * line + 4 * half + thread_index() % 4 >= pieces) return {};
    return *reinterpret_cast<const uint4*>(lane_at + line * kLineColumns * 2 + half * kLineColumns);
  }

 private:
  /// The tensor core wants four registers in a row. The compiler would put them together for each product anew, where it
  /// saw that they are copies: what lies first in shared memory lies at zero, which it does not know.
  static __device__ uint4 operand(const DecodeCall& c, const uint4& x) {
    const unsigned none = c.layout.barriers;
    return {x.x ^ none, x.y ^ none, x.z ^ none, x.w ^ none};
  }
};
/// The sums of one tile.
template <class T>
struct TileProduct {
  // [Even rows' first half of a line, then their second][of the pieces the first four columns, then the rest].
  float sum[2][2][4] = {};

  /// `w` is where the lane's row begins of the warp's columns, plus lane_offset().
  __device__ void add(const char* w, const TileTokens& tokens) {
    constexpr int most = kMaxLines - 1;
    add_lines<0, most>(w, tokens);
    add_lines<most, kMaxLines>(w, tokens);
  }
  /// Of token lane / 4 and of the tile's row 2 (lane % 4) or the next.
  __device__ float of(int next) const {
    return next ? (sum[0][0][3] + sum[0][1][3]) + (sum[1][0][1] + sum[1][1][1])
                : (sum[0][0][0] + sum[0][1][0]) + (sum[1][0][2] + sum[1][1][2]);
  }

 private:
  template <int First, int End>
  __device__ void add_lines(const char* w, const TileTokens& tokens) {
    if (8 * End <= tokens.pieces)
      add_lines<First, End, true>(w, tokens);
    else if (8 * First < tokens.pieces)
      add_lines<First, End, false>(w, tokens);
  }
  /// Their pieces are on their way together.
  template <int First, int End, bool Whole>
  __device__ void add_lines(const char* w, const TileTokens& tokens) {
    const int odd = thread_index() / 4 % 2;
    uint4 piece[End - First][2];
#pragma unroll
    for (int line = First; line < End; ++line)
#pragma unroll
      for (int turn = 0; turn < 2; ++turn)
        piece[line - First][turn] = tokens.template load_piece<Whole>(w, line, turn ^ odd);
#pragma unroll
    for (int line = First; line < End; ++line)
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        const uint4 &x = tokens.half_line[2 * line], &y = tokens.half_line[2 * line + 1],
                    &at = piece[line - First][turn];
        mma(sum[turn][0], x.x, x.y, x.z, x.w, at.x, at.y, T{});
        mma(sum[turn][1], y.x, y.y, y.z, y.w, at.z, at.w, T{});
      }
  }
};

/// Takes the product's stages from the ring; its sums come to lie in `sums`. `begun` counts the ring's stages before.
/// x_at(slice) gives where a slice lies in shared memory, when it does, null to stop; x_taken(slice) says that it may go.
/// Columns are those of a slice, or 0 for tiles.
template <class T, int Columns, class Reader, class XAt, class XTaken>
__device__ bool consume_product(const DecodeCall& c, Reader& ring, const Product& p, const Sums<Columns == 0>& sums,
                                int begun, int x_row, XAt x_at, XTaken x_taken) {
  constexpr bool Wide = Columns == 0;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32;
  if constexpr (Wide) {
    constexpr int tile_rows = 2 * kStageSlices;
    const int slice_bytes = p.slice_columns * 2;
    const int first_byte = warp * warp_lines(p.slice_columns) * kLineColumns * 2 + TileTokens::lane_offset(lane);
#pragma unroll 1
    for (int slice = 0; slice < p.slices; ++slice) {
      const char* const x = x_at(slice);
      if (!x) return false;
      const TileTokens tokens(c, x, x_row, sums.batch, p.slice_columns, warp);
      x_taken(slice);
#pragma unroll 1
      for (int begin = 0; begin < p.count; begin += tile_rows) {
        const int rows = min(tile_rows, p.count - begin), row = min(lane / 4, rows - 1);
        const char* w = ring.wait();
        const bool two = rows > kStageSlices;
        if (two) {
          const char* const second = ring.wait(1);
          if (row >= kStageSlices) w = second;
        }
        TileProduct<T> product;
        product.add(w + row % kStageSlices * slice_bytes + first_byte, tokens);
        ring.release(lane == 0);
        if (two) ring.release(lane == 0);
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          const int of = lane % 4 * 2 + next, token = lane / 4;
          if (of >= rows || token >= sums.batch) continue;
          float* const to = sums.share(warp, begin + of, token);
          *to = product.of(next) + (slice > 0 ? *to : 0);
        }
      }
    }
  } else {
    using Row = RowProduct<T>;
    const int unit = warp % kStageSlices, first = (warp / kStageSlices + begun) % 2, stages = p.stages<Wide>();
    const std::uint32_t w_lane = unit * p.slice_columns * 2 + Row::weight_lane(lane);
    const char* const whole = x_at(0);
    if (!whole) return false;
    const int slice = (first * kStageSlices + unit) & (p.slices - 1);
    const std::uint32_t x = shared_address(whole) + slice * Columns * 2 + Row::token_lane(lane);
    constexpr int chunks = Columns * 2 / Row::kChunkBytes;
    static_assert(Columns * 2 % Row::kChunkBytes == 0);
    uint4 token[chunks];
#pragma unroll
    for (int k = 0; k < chunks; ++k) token[k] = load_matrices(x + k * Row::kChunkBytes);
    // Slices of all rows are numbered through, four a stage.
    const bool own = sums.warps_own(p);
    float* to = (own ? sums.of_slice(0, 0) : sums.of_slice(0, first * kStageSlices + unit)) + lane / 4;
    const int step = (own ? 1 : 2 * kStageSlices) * 8;
#pragma unroll 1
    for (int s = first; s < stages; s += 2) {
      const std::uint32_t w_at = shared_address(ring.wait()) + w_lane;
      if (s * kStageSlices + unit < p.count * p.slices) {
        Row product;
#pragma unroll
        for (int k = 0; k < chunks; ++k) product.add(load_matrices(w_at + k * Row::kChunkBytes), token[k], k % 2);
        if (Row::on_diagonal(lane)) *to = product.diagonal(lane);
      }
      to += step;
      ring.release(lane == 0);
    }
  }
  return true;
}

}  // namespace cf::cuda
