#pragma once
// Products of the tokens with a block's rows of a weight matrix, from the ring, on tensor cores.
//
// A row product takes one token. A stage holds four consecutive slices of the block's rows as they lie in memory, and
// each of four warps multiplies one of them. A warp meets the same slice of every row, so it keeps that slice of the
// activations in registers. There is a loop for each of kWholeSliceColumns, and one for every number of chunks that
// another slice may have.
//
// A tile product takes up to eight tokens, or slices of any number of columns. A stage holds the same slice of four
// rows; the ring brings the first slice of all rows, then the second, and so on. Two stages are a tile of eight rows.
// Each of eight warps multiplies some of the slice's columns, and keeps these columns of all tokens in registers. The
// last slice of a row may be smaller than the others.
#include "cuda/persistent/block.cuh"
#include "cuda/persistent/ring.cuh"

namespace cf::cuda {

/// Loads the whole shape in one access. From plain C++ the compiler loads each member by itself, and a phase waits for
/// every load.
__device__ inline ProductShape load_whole(const ProductShape& shape) {
  uint4 words = *reinterpret_cast<const uint4*>(&shape);
  asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
  return __builtin_bit_cast(ProductShape, words);
}

/// The block's part of one phase's product.
struct Product {
  int columns, slices, slice_columns;
  int first, count;  // the phase's rows, counted within the deal
  bool gated;        // the rows are pairs, of which SwiGLU makes one element each
  RingStage stage;
  Deal deal;

  /// Of a layer whose deals begin with block `start`. `part` counts the parts of the LM head.
  __device__ Product(const PersistentArguments& c, const LayerKind& kind, PhaseSpec phase, int start, int part = 0)
      : first(0), deal(c.deals.deal(int(phase.matrix), start, int(blockIdx.x))) {
    const ProductShape shape = load_whole(kind.shapes[phase.matrix]);
    columns = shape.columns, slices = shape.slices, slice_columns = shape.slice_columns, gated = shape.together == 2;
    stage = shape.stage;
    const int up_first = rows_before_attention(c.plan, deal.count);
    count = phase.rows == PhaseRows::before_attention ? up_first : deal.count;
    if (phase.rows == PhaseRows::behind_attention) first = up_first, count -= up_first;
    if (phase.rows == PhaseRows::in_parts)
      first = part * c.plan.head_rows, count = min(deal.count - first, c.plan.head_rows);
  }
  /// How many parts a phase's product has.
  static __device__ int parts(const PersistentArguments& c, PhaseSpec phase, int start) {
    if (phase.rows != PhaseRows::in_parts) return 1;
    const int rows = c.deals.deal(int(phase.matrix), start, int(blockIdx.x)).count;
    return c.plan.divisors.head_rows.quotient(rows + c.plan.head_rows - 1);
  }

  /// The elements of a token that the rows make.
  __device__ int elements() const { return count >> int(gated); }
  /// The columns of a slice of a tile product.
  __device__ int columns_of(int slice) const { return min(slice_columns, columns - slice * slice_columns); }
  /// Rows of one element.
  __device__ int together() const { return 1 << int(gated); }
  /// The matrix's row that is row i of the phase.
  __device__ int row(int i) const { return deal.row(first + i); }
  template <bool Tiles>
  __device__ int stages() const {
    return Tiles ? slices * ((count + kStageSlices - 1) / kStageSlices)
                 : (count * slices + kStageSlices - 1) / kStageSlices;
  }
};

/// Streams the product's rows of `matrix`. False where nobody empties the ring any more.
template <bool Tiles>
__device__ bool stream_product(RingWriter& ring, const Product& p, const char* matrix) {
  if constexpr (Tiles) {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll 1
    for (int slice = 0; slice < p.slices; ++slice) {
      const int slice_bytes = p.columns_of(slice) * 2;
#pragma unroll 1
      for (int i = 0; i < p.count; i += kStageSlices) {
        const int rows = min(kStageSlices, p.count - i);
        const char* const from = matrix + (long(p.row(i)) * p.columns + slice * p.slice_columns) * 2;
        const auto prefetch = [&](int k) {
          const int first = k * kStageSlices + lane;
          if (i + first < p.count && lane < kStageSlices)
            prefetch_bulk(from + long(first) * p.columns * 2, slice_bytes);
          __syncwarp();
          return i + k * kStageSlices < p.count;
        };
        if (!ring.next(prefetch)) return false;
        if (p.slices == 1) {
          ring.bring(from, rows * slice_bytes);
          continue;
        }
        ring.expect(rows * slice_bytes);
        if (lane < rows) ring.copy(lane * slice_bytes, from + long(lane) * p.columns * 2, slice_bytes);
      }
    }
  } else {
    const char* from = matrix + long(p.row(0)) * p.columns * 2;
    const int stage_bytes = kStageSlices * p.slice_columns * 2;
#pragma unroll 1
    for (int left = p.count * p.columns * 2; left > 0; left -= stage_bytes, from += stage_bytes) {
      const auto prefetch = [&](int k) {
        const int at = k * stage_bytes;
        if (at >= left) return false;
        request_prefetch(from + at, min(left - at, stage_bytes));
        return true;
      };
      if (!ring.next(prefetch)) return false;
      ring.bring(from, min(left, stage_bytes));
    }
  }
  return true;
}

/// The partial sums of a product in shared memory. A row product has eight partial sums for each slice of a row, a tile
/// product has eight for each row and token, one of each consumer warp.
template <bool Tiles>
struct Sums {
  float* data;
  int batch, slices, rows;

  /// Where the rows of a row product are neither sliced nor pairs, each warp owns whole rows: it has partial sums of
  /// its own and counts its own rows. Otherwise all warps share partial sums, which lie behind the warps' own.
  __device__ Sums(const Block& block, const Product& p, int warp)
      : data(block.at<float>(block.c.layout.sums)),
        batch(Tiles ? block.c.dims.batch : 1),
        slices(p.slices),
        rows(p.count) {
    const int warp_floats = Tiles ? 0 : block.c.plan.warp_rows * 8;
    data += warps_own_rows(p) ? warp * warp_floats : kConsumerWarps * warp_floats;
  }
  static __device__ bool warps_own_rows(const Product& p) { return !Tiles && p.slices == 1 && !p.gated; }
  /// Of a row product: the eight partial sums of row i's slice.
  __device__ float* of_slice(int i, int slice) const { return data + (i * slices + slice) * 8; }
  /// Of a tile product: a warp's partial sum of row i and a token.
  __device__ float* of_warp(int warp, int i, int token) const { return data + (warp * rows + i) * batch + token; }
  /// The sum of row i. Of a row product, as many neighbouring lanes as the row has slices call for one row, and each
  /// adds one slice: the other blocks wait for a layer's last rows.
  __device__ float total(int i, int token) const {
    if constexpr (Tiles) {
      const auto of = [&](int warp) { return *of_warp(warp, i, token); };
      return ((of(0) + of(1)) + (of(2) + of(3))) + ((of(4) + of(5)) + (of(6) + of(7)));
    } else {
      const auto* const quads = reinterpret_cast<const float4*>(of_slice(i, thread_index() & (slices - 1)));
      const float4 a = quads[0], b = quads[1];
      float sum = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
#pragma unroll 1
      for (int offset = 1; offset < slices; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      return sum;
    }
  }
};

/// A warp's product of one slice of a row with one token. A chunk is 256 columns: 32 pieces of eight, one for each lane
/// to load, 512 consecutive bytes in one instruction. The tensor core gets eight pieces of weights as its eight columns
/// and sixteen pieces of activations as its sixteen rows. Wanted is the product of each piece of weights with its own
/// piece of activations: pieces 0 to 7 and 16 to 23 of the weights have theirs on the diagonal of the upper eight rows,
/// the others on that of the lower eight. A chunk of activations takes four registers a lane.
template <class T>
struct RowProduct {
  static constexpr int kChunkBytes = 2 * kChunkColumns;
  float upper[2][4] = {}, lower[2][4] = {};

  /// Where the lane loads from a chunk of weights and from one of activations, in bytes.
  static __device__ std::uint32_t weight_lane(int lane) { return (lane % 8 + lane / 16 * 8 + lane / 8 % 2 * 16) * 16; }
  static __device__ std::uint32_t token_lane(int lane) { return lane * 16; }
  __device__ void add(const uint4& w, const uint4& x, int side) {
    mma(upper[side], x.x, x.y, x.z, x.w, w.x, w.y, T{});
    mma(lower[side], x.x, x.y, x.z, x.w, w.z, w.w, T{});
  }
  /// The sum of the elements [g][g] of the diagonals, g = lane / 4. It is right in lane 4 g + g / 2, which holds them.
  __device__ float diagonal(int lane) const {
    const int odd = lane / 4 % 2;
    return ((odd ? upper[0][1] : upper[0][0]) + (odd ? upper[1][1] : upper[1][0])) +
           ((odd ? lower[0][3] : lower[0][2]) + (odd ? lower[1][3] : lower[1][2]));
  }
  static __device__ bool on_diagonal(int lane) { return lane % 4 == lane / 8; }
};

/// A warp's activations of a tile product: its columns of a slice of up to eight tokens, in lines of 64 columns. A line
/// is two halves of four pieces of eight columns. The tensor core's eight columns are the rows of the tile: the even
/// rows bring one half of a line and the odd rows the other. Its upper eight rows are the tokens with the line's first
/// half, its lower eight the tokens with the second half. So only half of the sums are wanted. In return, the eight
/// lanes that load together read two rows from different banks, whatever the distance of the rows.
struct TileTokens {
  // The left operands, two a line: the first four columns of each piece, then the other four.
  uint4 half_line[2 * kMaxLines];
  int pieces;  // pieces that the warp has

  static __device__ int lane_offset(int lane) { return lane % 4 * 16; }

  /// The slice lies at `x` in shared memory, the tokens `x_row` bytes apart.
  __device__ TileTokens(const PersistentArguments& c, const char* x, int x_row, int tokens, int slice_columns,
                        int warp) {
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
  /// The lane's piece of half a line; zero where the warp has no such piece.
  template <bool Whole>
  __device__ uint4 load_piece(const char* lane_at, int line, int half) const {
    if (!Whole && 8 * line + 4 * half + thread_index() % 4 >= pieces) return {};
    return *reinterpret_cast<const uint4*>(lane_at + line * kLineColumns * 2 + half * kLineColumns);
  }

 private:
  /// The tensor core wants an operand in four consecutive registers. The compiler would copy plain loads into such a
  /// group before every product. An exclusive or with layout.barriers, which is 0 but which the compiler does not know,
  /// makes the group once.
  static __device__ uint4 operand(const PersistentArguments& c, const uint4& x) {
    const unsigned zero = c.layout.barriers;
    return {x.x ^ zero, x.y ^ zero, x.z ^ zero, x.w ^ zero};
  }
};
/// The sums of one tile of eight rows.
template <class T>
struct TileProduct {
  // First index: the sums of even rows with a line's first half, or with its second half. Second index: those of the
  // first four columns of the pieces, or of the other four.
  float sum[2][2][4] = {};

  /// `w` is where the lane's row of the warp's columns begins, plus lane_offset().
  __device__ void add(const char* w, const TileTokens& tokens) {
    constexpr int most = kMaxLines - 1;
    add_lines<0, most>(w, tokens);
    add_lines<most, kMaxLines>(w, tokens);
  }
  /// The sum of token lane / 4 and of the tile's row 2 (lane % 4) + next.
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
  /// Loads all pieces of the lines before it multiplies by any of them.
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

/// Where a row product finds its token: in shared memory at `x`. Where `x` is null, the token is the layer's mlp.act,
/// which other blocks make and each warp loads from device memory.
struct RowTokens {
  const Block& block;
  int layer;
  const char* x;
};

/// Waits for a slice of mlp.act. Loads it to registers, as load_matrices() would from shared memory: word m of
/// token[k] is the pair of columns that begins with 256 k + 64 m + 2 lane. Pairs beyond `columns` are zero. A wait that
/// takes too long stops the block; the slice is then incomplete.
template <int Chunks, bool Whole>
__device__ void await_slice(const Block& block, int layer, const ElementWord* from, int columns,
                            uint4 (&token)[Chunks]) {
  constexpr int at_once = Chunks > 8 ? 5 : Chunks;  // chunks whose loads are in flight together
  const int lane = thread_index() % 32;
  const unsigned epoch = block.epoch(layer);
  if (lane < kSampleLanes)
    block.poll(layer, Dependency::mlp_act,
               [&] { return has_epoch(load_relaxed(from + columns / kSampleLanes * lane), epoch); });
  __syncwarp();
#pragma unroll
  for (int begin = 0; begin < Chunks; begin += at_once) {
    uint2 words[at_once][4] = {};
    const auto there = [&](int u, int m) {
      return begin + u < Chunks && (Whole || (begin + u) * kChunkColumns + m * 64 + 2 * lane < columns);
    };
    const auto load = [&](int u) {
#pragma unroll
      for (int m = 0; m < 4; ++m)
        if (there(u, m)) words[u][m] = load_relaxed_pair(from + (begin + u) * kChunkColumns + m * 64 + 2 * lane);
    };
    const auto here = [&](int u) {
      unsigned missing = 0;
#pragma unroll
      for (int m = 0; m < 4; ++m)
        if (there(u, m)) missing |= (words[u][m].x ^ epoch << 16) | (words[u][m].y ^ epoch << 16);
      return missing < 0x10000;
    };
    await_pieces<at_once>(block, layer, Dependency::mlp_act, load, here);
#pragma unroll
    for (int u = 0; u < at_once; ++u)
      if (begin + u < Chunks) {
        const auto pair = [&](int m) { return __byte_perm(words[u][m].x, words[u][m].y, 0x5410); };
        token[begin + u] = {pair(0), pair(1), pair(2), pair(3)};
      }
  }
  __syncwarp();
}

/// The warp multiplies its slice of each row by the same slice of the token. The partial sums go to `sums`.
/// Chunks: the chunks of a slice.
/// Whole: whether the last chunk is as large as the others. If it is smaller, the activations that it lacks are zero,
/// and the lanes of the weights that it lacks load its first piece.
/// MayAwait: whether `from` may have no `x`.
template <class T, int Chunks, bool Whole, bool MayAwait, class Reader>
__device__ __forceinline__ void consume_rows(Reader& ring, const Product& p, const Sums<false>& sums,
                                             const RowTokens& from) {
  using Row = RowProduct<T>;
  int thread = thread_index(), slice_columns = Whole ? Chunks * kChunkColumns : p.slice_columns;
  // The loops for slices of any length do not share what they compute of these: registers have no room for that.
  if constexpr (!Whole) make_anew(thread), make_anew(slice_columns);
  const int lane = thread % 32, warp = thread / 32;
  const int unit = warp % kStageSlices, first = ring.first(), stages = p.stages<false>();
  const std::uint32_t w_lane = unit * slice_columns * 2 + Row::weight_lane(lane);
  const int slice = (first * kStageSlices + unit) & (p.slices - 1);
  uint4 token[Chunks];
  if (!MayAwait || from.x) {
    const std::uint32_t x_lane = shared_address(from.x) + slice * slice_columns * 2 + Row::token_lane(lane);
#pragma unroll
    for (int k = 0; k < Chunks; ++k) token[k] = load_matrices(x_lane + k * Row::kChunkBytes);
  } else {
    await_slice<Chunks, Whole>(from.block, from.layer, from.block.c.exchange.mlp_act + slice * slice_columns,
                               slice_columns, token);
  }
  std::uint32_t w_last = (Chunks - 1) * Row::kChunkBytes;  // from the lane's place in a slice to that in its last chunk
  if constexpr (!Whole) {
    const int pieces = (slice_columns - (Chunks - 1) * kChunkColumns) / kVec;
    if (int(Row::weight_lane(lane)) >= pieces * 16) w_last -= Row::weight_lane(lane);
    // Each register has its elements of piece lane / 4 of one of the chunk's four matrices.
    uint4& last = token[Chunks - 1];
    const auto keep = [&](unsigned& two, int matrix) { two = 8 * matrix + lane / 4 < pieces ? two : 0; };
    keep(last.x, 0), keep(last.y, 1), keep(last.z, 2), keep(last.w, 3);
  }
  // The slices of all rows have consecutive numbers, row after row. A stage has four of them.
  const bool own_rows = sums.warps_own_rows(p);
  float* to = (own_rows ? sums.of_slice(0, 0) : sums.of_slice(0, first * kStageSlices + unit)) + lane / 4;
  const int step = (own_rows ? 1 : 2 * kStageSlices) * 8;
  int s = first;
#pragma unroll 1
  for (; s < stages; s += 2) {
    const std::uint32_t w_at = ring.wait() + w_lane;
    if (s * kStageSlices + unit < p.count * p.slices) {
      Row product;
#pragma unroll
      for (int k = 0; k < Chunks; ++k)
        product.add(load_matrices(w_at + (k + 1 < Chunks ? k * Row::kChunkBytes : w_last)), token[k], k % 2);
      const float sum = product.diagonal(lane);
      if (Row::on_diagonal(lane)) *to = sum;
    }
    to += step;
    ring.release(lane == 0);
  }
  ring.end((s - stages) & 1);
}

/// Multiplies one slice of all rows of a tile product, of so many columns, and adds to the partial sums of the slices
/// before. The slice of the tokens is in registers.
template <class T, class Reader>
__device__ void consume_tiles(Reader& ring, const Product& p, const Sums<true>& sums, int slice, int columns,
                              const TileTokens& tokens) {
  constexpr int tile_rows = 2 * kStageSlices;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32, slice_bytes = columns * 2;
  const int first_byte = warp * warp_lines(columns) * kLineColumns * 2 + TileTokens::lane_offset(lane);
#pragma unroll 1
  for (int begin = 0; begin < p.count; begin += tile_rows) {
    const int rows = min(tile_rows, p.count - begin), row = min(lane / 4, rows - 1);
    const char* w = shared_pointer(ring.wait());
    const bool two_stages = rows > kStageSlices;
    if (two_stages) {
      const char* const second = shared_pointer(ring.wait_second());
      if (row >= kStageSlices) w = second;
    }
    TileProduct<T> product;
    product.add(w + row % kStageSlices * slice_bytes + first_byte, tokens);
    ring.release(lane == 0);
    if (two_stages) ring.release(lane == 0);
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      const int of = lane % 4 * 2 + next, token = lane / 4;
      if (of >= rows || token >= sums.batch) continue;
      float* const to = sums.of_warp(warp, begin + of, token);
      *to = product.of(next) + (slice > 0 ? *to : 0);
    }
  }
}

/// Calls the consume_rows() that is compiled for the product's slices.
template <class T, bool MayAwait, class Reader>
__device__ void consume_row_product(Reader& ring, const Product& p, const Sums<false>& sums, const RowTokens& from) {
  const auto whole = [&]<int Chunks>(std::integral_constant<int, Chunks>) {
    consume_rows<T, Chunks, true, MayAwait>(ring, p, sums, from);
  };
  const auto part = [&]<int Chunks>(std::integral_constant<int, Chunks>) {
    consume_rows<T, Chunks, false, MayAwait>(ring, p, sums, from);
  };
  static_assert(kWholeSliceColumns == std::array{2560, 2048, 1024} && kChunkColumns == 256);
  if (p.slice_columns == 1024) [[likely]]
    return whole(std::integral_constant<int, 4>());
  if (p.slice_columns == 2048) [[likely]]
    return whole(std::integral_constant<int, 8>());
  if (p.slice_columns == 2560) [[likely]]
    return whole(std::integral_constant<int, 10>());
  static_assert(kMinRowChunks == 5 && kMaxRowChunks == 10);
  switch (row_chunks(p.slice_columns)) {
    case 5: return part(std::integral_constant<int, 5>());
    case 6: return part(std::integral_constant<int, 6>());
    case 7: return part(std::integral_constant<int, 7>());
    case 8: return part(std::integral_constant<int, 8>());
    case 9: return part(std::integral_constant<int, 9>());
    default: return part(std::integral_constant<int, 10>());
  }
}

}  // namespace cf::cuda
