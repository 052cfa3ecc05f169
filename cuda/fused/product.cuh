#pragma once
// Products of the tokens with a block's rows of a weight matrix, from the ring, on tensor cores.
#include "cuda/fused/block.cuh"
#include "cuda/fused/ring.cuh"

namespace cf::cuda {

/// One of the layer's four products. A row is cut into slices. For one token four slices are a stage, as they lie in memory,
/// in one copy, and each of four warps takes one: a warp has to do with one slice of all rows, whose activations it keeps
/// in registers. Slices then have one of kNarrowColumns. With more tokens, or other slices, the first slice of all rows
/// comes first, then the second, each in tiles of rows as tiling() cuts them, and a warp keeps its columns of the slice of
/// all tokens in registers.
struct Product {
  const char* weight;  // (rows, columns)
  int columns, slices, slice_columns, tile_limit;
  int first, count;  // of the block's rows
  Deal deal;

  __device__ Product(const DecodeCall& c, Phase phase, int layer)
      : weight(c.first_layer.weight[int(weight_of(phase))] + layer * c.layer_stride),
        columns(phase == Phase::down ? c.dims.intermediate : c.dims.hidden),
        slices(phase == Phase::down ? c.plan.act_slices : c.plan.hidden_slices),
        slice_columns(phase == Phase::down ? c.plan.act_columns : c.plan.hidden_columns),
        tile_limit(c.plan.tile_rows),
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
  /// Tiles of all rows, as even as can be, and the rows of each but the last.
  __device__ int tiles() const { return (count + tile_limit - 1) / tile_limit; }
  __device__ int tile_rows() const { return count > 0 ? (count + tiles() - 1) / tiles() : 0; }
  template <bool Wide>
  __device__ int stages() const {
    return Wide ? slices * tiles() * tiling(slice_columns).groups : (count * slices + kStageSlices - 1) / kStageSlices;
  }
};

/// Streams the product's weights; false when nobody empties the ring any more.
template <bool Wide>
__device__ bool stream_product(RingWriter& ring, const Product& p) {
  const int lane = int(threadIdx.x) % 32, slice_bytes = p.slice_columns * 2;
  if constexpr (Wide) {
    const Tiling t = tiling(p.slice_columns);
    const int pitch = pitch_bytes(t), group_bytes = pitch - 16, tile_rows = p.tile_rows();
#pragma unroll 1
    for (int slice = 0; slice < p.slices; ++slice)
#pragma unroll 1
      for (int i = 0; i < p.count; i += tile_rows)
#pragma unroll 1
        for (int group = 0; group < t.groups; ++group) {
          const int rows = min(tile_rows, p.count - i);
          const int bytes = max(min(group_bytes, slice_bytes - group * group_bytes), 0);
          char* const stage = ring.next(rows * bytes);
          if (!stage) return false;
          if (lane < rows && bytes > 0)
            ring.copy(
                stage + lane * pitch,
                p.weight + (long(p.row(i + lane)) * p.columns + slice * p.slice_columns) * 2 + group * group_bytes,
                bytes);
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

/// A warp's columns of a slice of up to eight tokens in registers, as the tensor core's right operand: lane / 4 is the token.
struct TileTokens {
  uint2 step[2][kMaxWarpSteps];  // of the warp's first group of columns and of its second
  int steps[2];                  // that there are
  int half[2];                   // the one that has eight columns only

  /// The slice lies at `x` in shared memory, each token's `x_row` bytes after the one before.
  __device__ TileTokens(std::uint32_t x, int x_row, int tokens, const Product& p, const Tiling& t, int first_group,
                        int unit) {
    const int lane = thread_index() % 32;
    x += min(lane % 8, tokens - 1) * x_row + lane / 8 * 16;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const int group = first_group + 2 * g, begin = (group * kStageSlices + unit) * t.warp_steps;
      steps[g] = group < t.groups ? max(min(t.steps - begin, t.warp_steps), 0) : 0;
      half[g] = p.slice_columns % kStepColumns ? t.steps - 1 - begin : -1;
#pragma unroll
      for (int i = 0; i < kMaxWarpSteps; i += 2) {
        uint4 two{};
        if (i < steps[g]) two = load_matrices(x + (begin + i) * kStepColumns * 2);
        step[g][i] = {two.x, i == half[g] ? 0 : two.y};
        step[g][i + 1] = {two.z, i + 1 == half[g] ? 0 : two.w};
      }
    }
  }
};

/// A warp's product of its columns of a tile of sixteen rows with the tokens.
template <class T>
struct TileProduct {
  float sum[2][4] = {};  // of row lane / 4 and eight further, tokens 2 (lane % 4) and the next

  /// Where lane `lane` loads from the warp's columns of a stage; rows beyond the tile's are the last one's.
  static __device__ std::uint32_t lane_offset(int lane, int rows, int pitch) {
    return min(lane % 16, rows - 1) * pitch + lane / 16 * 16;
  }
  /// Adds group g's part, g known at compile time.
  __device__ void add(std::uint32_t w, const TileTokens& tokens, int g) {
    constexpr int at_once = kMaxWarpSteps / 2;
#pragma unroll
    for (int begin = 0; begin < kMaxWarpSteps; begin += at_once) {
      uint4 a[at_once];
#pragma unroll
      for (int u = 0; u < at_once; ++u)
        if (begin + u < tokens.steps[g]) a[u] = load_matrices(w + (begin + u) * kStepColumns * 2);
#pragma unroll
      for (int u = 0; u < at_once; ++u)
        if (const int i = begin + u; i < tokens.steps[g]) {
          if (i == tokens.half[g]) a[u].z = a[u].w = 0;
          mma(sum[i % 2], a[u].x, a[u].y, a[u].z, a[u].w, tokens.step[g][i].x, tokens.step[g][i].y, T{});
        }
    }
  }
  __device__ float of(int row_half, int next_token) const {
    return sum[0][2 * row_half + next_token] + sum[1][2 * row_half + next_token];
  }
};

/// Takes the product's stages from the ring, of which the warp has every second; its sums come to lie in `sums`. `begun`
/// counts the ring's stages before. x_at(slice) says where a slice lies in shared memory when it does, 0 to stop; x_taken()
/// that it may go. Columns are those of a slice, or 0 for rows in tiles.
template <class T, int Columns, class XAt, class XTaken>
__device__ bool consume_product(RingReader& ring, const Product& p, const Sums<Columns == 0>& sums, int begun,
                                int x_row, XAt x_at, XTaken x_taken) {
  constexpr bool Wide = Columns == 0;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32, unit = warp % kStageSlices;
  const int first = (warp / kStageSlices + begun) % 2;
  if constexpr (Wide) {
    const Tiling t = tiling(p.slice_columns);
    const int pitch = pitch_bytes(t), tile_rows = p.tile_rows();
    // The same columns' sums lie in the same place whatever the ring has brought before.
    const int share = first * kStageSlices + unit;
#pragma unroll 1
    for (int slice = 0; slice < p.slices; ++slice) {
      const std::uint32_t x = x_at(slice);
      if (x == 0) return false;
      const TileTokens tokens(x, x_row, sums.batch, p, t, first, unit);
      x_taken(slice);
#pragma unroll 1
      for (int begin = 0; begin < p.count; begin += tile_rows) {
        const int rows = min(tile_rows, p.count - begin);
        const std::uint32_t w = unit * t.warp_steps * kStepColumns * 2 + TileProduct<T>::lane_offset(lane, rows, pitch);
        TileProduct<T> product;
#pragma unroll
        for (int g = 0; g < 2; ++g)
          if (first + 2 * g < t.groups) {
            product.add(shared_address(ring.wait()) + w, tokens, g);
            ring.release(lane == 0);
          }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = lane / 4 + e / 2 * 8, token = lane % 4 * 2 + e % 2;
          if (row >= rows || token >= sums.batch) continue;
          float* const to = sums.share(share, begin + row, token);
          *to = product.of(e / 2, e % 2) + (slice > 0 ? *to : 0);
        }
      }
    }
  } else {
    using Row = RowProduct<T>;
    const int stages = p.stages<Wide>();
    const std::uint32_t w_lane = unit * p.slice_columns * 2 + Row::weight_lane(lane);
    std::uint32_t x = x_at(0);
    if (x == 0) return false;
    const int slice = (first * kStageSlices + unit) & (p.slices - 1);
    x += slice * Columns * 2 + Row::token_lane(lane);
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
