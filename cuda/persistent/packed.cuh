#pragma once
// Products of up to eight tokens with packed GPTQ weights (cuda/ops/linear/pack/format.hpp), from the ring, by integer
// tensor cores.
//
// Activations are quantised to 16-bit integers v. A group of 128 columns has one factor: x[k] = factor * v[k]. The
// error is at most 1 / 65024 of the group's largest |x|, less than the rounding of that element to a 16-bit dtype. An
// integer is two signed digits of eight bits: v = 256 high + low. One tensor core instruction multiplies sixteen rows
// of codes by both digits of 32 columns of four tokens. Its integer sums are exact. With a row's scale s and zero z in
// a group of weights:
//
//   sum over k of s (q[k] - z) x[k] = s * factor * (sum of q[k] v[k] - z * sum of v[k])
//
// A word of codes is two operands: its low nibbles are codes, its high nibbles are sixteen times codes. The product
// warps take a stage's groups of columns in turn. Each warp adds up its own groups of a row.
//
// Where groups of weights are no multiple of 128 columns, each 32 columns have sums of their own. An 8-bit code
// is stored as two 4-bit codes, in two columns. Both columns multiply the same activation.
//
// packed/fragment.cuh makes 16-bit operands of codes, which need no digits. That takes 0.6 instructions a weight, and
// digits take 0.25. A first version of this product with 16-bit operands was slower.
#include "cuda/device/digits.cuh"
#include "cuda/persistent/product.cuh"

namespace cf::cuda {

/// The factors of a group's integer sums. They are those of PackedSums::add(), whose sums are sixteen times too large.
struct DigitScale {
  float factor;  // a sixteenth of the group's factor; NaN where an element of the group is infinite or NaN
  float sum;     // sixteen times the sum of v
};
static_assert(sizeof(DigitScale) == kDigitScaleBytes);

/// A token's digits in shared memory, 256 bytes a group. Byte 128 h + 64 d + 16 t + b is digit d (0 low, 1 high) of
/// column 64 h + 8 t + c(b), where for b = 0 to 15 c(b) is
///   0 2 1 3   32 34 33 35   4 6 5 7   36 38 37 39
/// This is the order of the codes in their words.
struct Digits {
  char* bytes;
  DigitScale* scales;  // of each group

  /// Converts a token's `columns` elements of T to digits, in place. All consumer warps call it. The sixteen lanes of a
  /// group load all of its elements before one of them stores a digit.
  template <class T>
  __device__ void replace(int columns) const {
    const int thread = thread_index();
#pragma unroll 2
    for (int column = thread * kVec; column - thread % 32 * kVec < columns; column += kConsumerThreads * kVec) {
      const bool in_row = column < columns;
      float x[kVec] = {};
      if (in_row) load_vec(reinterpret_cast<const T*>(bytes) + column, x);
      __syncwarp();
      store(column, x, in_row);
    }
  }
  /// Stores the digits of x, which is columns [column, column + 8). Sixteen neighbouring lanes have a group. All lanes
  /// of a warp call it; `in_row` is false for groups beyond the row.
  __device__ void store(int column, const float (&x)[kVec], bool in_row) const {
    const int lane = thread_index() % 32;
    unsigned top = 0;  // bits of positive floats compare as integers, infinity and NaN above all numbers
#pragma unroll
    for (int e = 0; e < kVec; ++e) top = max(top, __float_as_uint(x[e]) & 0x7fffffffu);
#pragma unroll
    for (int bit = 1; bit < 16; bit *= 2) top = max(top, __shfl_xor_sync(~0u, top, bit));
    const bool finite = top < 0x7f800000u;
    const float most = fmaxf(__uint_as_float(top), kLeast), inverse = finite ? __fdividef(kLargestDigits, most) : 0;
    unsigned v[kVec];
    int sum = 0;
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const int whole = __float2int_rn(x[e] * inverse);
      sum += whole;
      v[e] = unsigned(whole + 128);  // its lower byte is the low digit + 128, the next one the high digit
    }
#pragma unroll
    for (int bit = 1; bit < 16; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    if (!in_row) return;
    const int group = column / kDigitColumns, piece = column / kVec % 16;
    std::uint32_t* const to =
        reinterpret_cast<std::uint32_t*>(bytes + group * 256 + piece / 8 * 128 + piece % 4 * 16 + piece / 4 % 2 * 4);
    const DigitWords words = digit_words(v);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      to[2 * u] = words.low[u];
      to[2 * u + 16] = words.high[u];
    }
    if (lane % 16 == 0) scales[group] = {finite ? most * (1 / (16 * kLargestDigits)) : NAN, 16 * float(sum)};
  }

 private:
  static constexpr float kLeast = 1e-30f;
};

/// Streams the product's rows of a packed matrix. A stage is one slice of one tile. With one token the ring brings
/// all slices of a tile, then the next tile. With Tiles it brings one slice of every tile, then the next slice. False
/// where nobody empties the ring any more.
template <bool Tiles>
__device__ bool stream_packed(RingWriter& ring, const Product& p, const PackedShape& shape, const char* matrix) {
  const bool copies = threadIdx.x % 32 == 0;  // one lane requests a stage's copies
  const auto stream = [&](int i, int begin, int columns) {
    const int tile = p.row(i) / kGptqRows, first = shape.group(begin),
              groups = shape.group(begin + columns - 1) - first + 1, code_bytes = columns * kGptqRows / 2;
    if (!ring.next()) return false;
    ring.expect(code_bytes + groups * kGptqGroupBytes);
    if (copies) {
      ring.copy(0, matrix + (long(tile) * p.columns + begin) * (kGptqRows / 2), code_bytes);
      ring.copy(code_bytes, matrix + shape.scales + (long(tile) * shape.groups + first) * kGptqGroupBytes,
                groups * kGptqGroupBytes);
    }
    return true;
  };
  if constexpr (Tiles) {
#pragma unroll 1
    for (int input = 0; input < shape.inputs; input += p.slice_columns)
#pragma unroll 1
      for (int begin = input; begin < p.columns; begin += shape.inputs)
#pragma unroll 1
        for (int i = 0; i < p.count; i += kGptqRows)
          if (!stream(i, begin, min(p.slice_columns, shape.inputs - input))) return false;
  } else {
    const int inputs = shape.inputs;
#pragma unroll 1
    for (int i = 0; i < p.count; i += kGptqRows)
#pragma unroll 1
      for (int begin = 0, end = 0, input = 0; begin < p.columns;
           begin = end, input = end < inputs ? end : end - inputs) {
        end = begin + min(p.slice_columns, inputs - input);
        if (!stream(i, begin, end - begin)) return false;
      }
  }
  return true;
}

/// Which of four tokens a lane loads digits of, and at which offset in a group: the tensor core's columns 2 n and
/// 2 n + 1 are the digits of token n.
__device__ inline int digit_lane_token(int lane) { return lane / 8; }
__device__ inline int digit_lane_offset(int lane) { return lane / 4 % 2 * 64 + lane % 4 * 16; }

/// A warp's partial sums of a tile of sixteen rows with four tokens. Lane l has two of them: those of rows l / 4 and
/// l / 4 + 8 with token l % 4.
struct PackedSums {
  float row[2] = {};

  /// Adds the warp's groups of a stage. The stage holds `columns` columns from `begin` on. `digits` and
  /// `of_digits` are those of the stage's first group, at the lane's offset. `turn` is the warp's next group, counted
  /// from the stage's first. `whole_groups`: every group of weights is a multiple of kDigitColumns columns.
  __device__ void add_stage(const char* stage, int lane, int begin, int columns, const PackedShape& shape,
                            bool whole_groups, const char* digits, const DigitScale* of_digits, int& turn) {
    const int groups = columns / kDigitColumns;
    const char* const codes = stage + lane * 16;
    const char* const scales = stage + columns * kGptqRows / 2 + lane / 4 * 8;
    const auto first_column = [&] { return begin + turn * kDigitColumns; };
    if (whole_groups) [[likely]] {
#pragma unroll 1
      for (; turn < groups; turn += kConsumerWarps) {
        const int group =
            shape.group_columns == kDigitColumns ? turn : shape.group(first_column()) - shape.group(begin);
        add(codes + turn * 2 * kGptqTileBytes, digits + turn * 256, scales + group * kGptqGroupBytes, of_digits[turn]);
      }
    } else {
#pragma unroll 1
      for (; turn < groups; turn += kConsumerWarps)
        add_units(codes + turn * 2 * kGptqTileBytes, digits + turn * 256, scales, of_digits[turn].factor,
                  first_column(), shape.group(begin), shape);
    }
    turn -= groups;
  }

 private:
  /// Adds a group of columns. `codes` and `digits` point to the lane's bytes of the group, `scales` to the scales and
  /// zeros of the lane's two rows.
  __device__ void add(const char* codes, const char* digits, const char* scales, const DigitScale& of_group) {
    DigitSums sums{};
#pragma unroll
    for (int h = 0; h < 2; ++h)
      sums.add(*reinterpret_cast<const uint4*>(codes + h * kGptqTileBytes),
               *reinterpret_cast<const uint4*>(digits + h * 128));
    const auto& [low, high] = sums;
    const uint2 words = *reinterpret_cast<const uint2*>(scales);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 row_scale = unpack(r ? words.y : words.x, f16{});  // scale, zero
      const int sum = 16 * (low[2 * r] + 256 * low[2 * r + 1]) + (high[2 * r] + 256 * high[2 * r + 1]);
      row[r] += row_scale.x * of_group.factor * (float(sum) - row_scale.y * of_group.sum);
    }
  }
  /// Adds the 128 columns from `column` on, each 32 of them with the scale and zero of their own group of weights.
  /// `scales` points to those of group `first_group`. `factor` is a sixteenth of the digits' factor.
  __device__ void add_units(const char* codes, const char* digits, const char* scales, float factor, int column,
                            int first_group, const PackedShape& shape) {
#pragma unroll 1
    for (int unit = 0; unit < 4; ++unit, column += 32) {
      const uint2 w = *reinterpret_cast<const uint2*>(codes + unit / 2 * kGptqTileBytes + unit % 2 * 8);
      const char* const at = digits + unit / 2 * 128 + unit % 2 * 4;
      const unsigned x = *reinterpret_cast<const unsigned*>(at), y = *reinterpret_cast<const unsigned*>(at + 8);
      constexpr unsigned lower = 0x0f0f0f0fu, one = 0x01010101u;
      int sum[4] = {}, of_digits[4] = {};  // with the codes, and with ones in their place
      mma_bytes(sum, w.x & lower, w.y & lower, w.x >> 4 & lower, w.y >> 4 & lower, x, y);
      mma_bytes(of_digits, one, one, one, one, x, y);
      const uint2 words =
          *reinterpret_cast<const uint2*>(scales + (shape.group(column) - first_group) * kGptqGroupBytes);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 row_scale = unpack(r ? words.y : words.x, f16{});  // scale, zero
        row[r] += row_scale.x * (16 * factor) *
                  (float(sum[2 * r] + 256 * sum[2 * r + 1]) -
                   row_scale.y * float(of_digits[2 * r] + 256 * of_digits[2 * r + 1]));
      }
    }
  }
};

/// Multiplies one token by the block's rows of a packed matrix, stage by stage. Each warp stores its partial sums.
template <class Reader>
__device__ void consume_packed(Reader& ring, const Product& p, const PackedShape& shape, const Sums<true>& sums,
                               const Digits& x) {
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const char* const digits = x.bytes + digit_lane_offset(lane);
  int turn = warp, inputs = shape.inputs, whole_groups = shape.group_columns % kDigitColumns == 0;
  make_anew(inputs), make_anew(whole_groups);  // keeps both in registers: a stage is few instructions
#pragma unroll 1
  for (int i = 0; i < p.count; i += kGptqRows) {
    PackedSums tile;
#pragma unroll 1
    for (int begin = 0, end = 0, input = 0; begin < p.columns; begin = end, input = end < inputs ? end : end - inputs) {
      end = begin + min(p.slice_columns, inputs - input);
      const int first = input / kDigitColumns;
      tile.add_stage(shared_pointer(ring.wait()), lane, begin, end - begin, shape, whole_groups, digits + first * 256,
                     x.scales + first, turn);
      ring.release(lane == 0);
    }
    if (lane % 4 == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r) *sums.of_warp(warp, i + lane / 4 + 8 * r, 0) = tile.row[r];
  }
}

/// The digits of several tokens.
struct DigitRows {
  Digits first;
  int row_bytes, row_scales;  // from one token to the next; of the scales in elements

  __device__ Digits of(int token) const { return {first.bytes + token * row_bytes, first.scales + token * row_scales}; }
};

/// Multiplies a slice of up to eight tokens, their inputs [input, input + columns), by the block's rows of a packed
/// matrix, four tokens at a time. `x` has the slice's digits. Each warp adds the products to its partial sums, which
/// are those of the slices before this one. With 8 bits the high codes are multiplied first, and then the low codes,
/// which lie shape.inputs columns behind them.
template <class Reader>
__device__ void consume_packed_slice(Reader& ring, const Product& p, const PackedShape& shape, const Sums<true>& sums,
                                     const DigitRows& x, int input, int columns) {
  constexpr int at_once = 4;
  const int lane = thread_index() % 32, warp = thread_index() / 32, last = sums.batch - 1;
#pragma unroll 1
  for (int begin = input; begin < p.columns; begin += shape.inputs) {
    int next = warp;
#pragma unroll 1
    for (int i = 0; i < p.count; i += kGptqRows) {
      const char* const stage = shared_pointer(ring.wait());
      int turn = next;
#pragma unroll 1
      for (int token = 0; token <= last; token += at_once) {
        turn = next;
        PackedSums tile;
        tile.add_stage(stage, lane, begin, columns, shape, shape.group_columns % kDigitColumns == 0,
                       x.of(min(token + digit_lane_token(lane), last)).bytes + digit_lane_offset(lane),
                       x.of(min(token + lane % at_once, last)).scales, turn);
        if (token + lane % at_once <= last)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float* const to = sums.of_warp(warp, i + lane / 4 + 8 * r, token + lane % at_once);
            *to = tile.row[r] + (begin > 0 ? *to : 0);
          }
      }
      next = turn;
      ring.release(lane == 0);
    }
  }
}

}  // namespace cf::cuda
