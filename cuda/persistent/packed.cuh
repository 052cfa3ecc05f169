#pragma once
// Products of one token with packed GPTQ weights (cuda/ops/linear/pack.hpp), from the ring, by integer tensor cores.
//
// Activations are quantised to 16-bit integers v. A group of 128 columns has one factor: x[k] = factor * v[k]. The error
// is at most 1 / 65024 of the group's largest |x|, less than the rounding of that element to a 16-bit dtype. An
// integer is two signed digits of eight bits: v = 256 high + low. One tensor core instruction multiplies sixteen rows of
// codes by both digits of 32 columns; its integer sums are exact. With a row's scale s and zero z in a group of weights:
//
//   sum over k of s (q[k] - z) x[k] = s * factor * (sum of q[k] v[k] - z * sum of v[k])
//
// A word of codes is two operands: its low nibbles are codes, its high nibbles are sixteen times codes. The product
// warps take a stage's groups of columns in turn. Each warp adds up its own groups of a row.
//
// gptq_fragment.cuh makes 16-bit operands of codes, which need no digits. That takes 0.6 instructions a weight, and
// digits take 0.25. A first version of this product with 16-bit operands was slower on an H100.
#include "cuda/persistent/product.cuh"

namespace cf::cuda {

/// What a group's integer sums are scaled by. Those sums are sixteen times too large.
struct DigitScale {
  float factor;  // a sixteenth of the group's factor; NaN where an element of the group is infinite or NaN
  float sum;     // sixteen times the sum of v
};
static_assert(sizeof(DigitScale) == kDigitScaleBytes);

/// A token's digits in shared memory, 256 bytes a group. Byte 128 h + 64 d + 16 t + b is digit d (0 low, 1 high) of
/// column 64 h + 8 t + c. For b = 0 to 3 column c is 0, 2, 1, 3. For b = 4 to 7 it is 32 further. For b = 8 to 11 it is
/// 4, 6, 5, 7, and for b = 12 to 15 it is 32 further. This is the order of the codes in their words (pack.hpp).
struct Digits {
  char* bytes;
  DigitScale* scales;  // of each group

  /// Converts a token's `columns` elements of T to digits, in place. All product warps call it. The sixteen lanes of a
  /// group load all of its elements before one of them stores a digit.
  template <class T>
  __device__ void replace(int columns) const {
    const int thread = thread_index();
#pragma unroll 2
    for (int column = thread * kVec; column - thread % 32 * kVec < columns; column += kProductThreads * kVec) {
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
    const float most = fmaxf(__uint_as_float(top), kLeast), inverse = finite ? __fdividef(kLargest, most) : 0;
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
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned even = __byte_perm(v[4 * half], v[4 * half + 2], 0x5140),
                     odd = __byte_perm(v[4 * half + 1], v[4 * half + 3], 0x5140);
      to[2 * half] = __byte_perm(even, odd, 0x5410) ^ 0x80808080u;
      to[2 * half + 16] = __byte_perm(even, odd, 0x7632);
    }
    if (lane % 16 == 0) scales[group] = {finite ? most * (1 / (16 * kLargest)) : NAN, 16 * float(sum)};
  }

 private:
  // |v| <= kLargest leaves room for the carry of the low digit.
  static constexpr float kLargest = 32512, kLeast = 1e-30f;
};

/// Streams the product's rows of a packed matrix, tile by tile, each in slices. False where nobody empties the ring any
/// more.
__device__ inline bool stream_packed(RingWriter& ring, const Product& p, const PackedShape& shape, const char* matrix) {
  const bool copies = threadIdx.x % 32 == 0;  // one lane requests a stage's copies
#pragma unroll 1
  for (int i = 0; i < p.count; i += kGptqRows) {
    const int tile = p.row(i) / kGptqRows;
    const char* const from = matrix + long(tile) * shape.tile_bytes;
    const char* const scales = matrix + shape.scales + long(tile) * shape.groups * kGptqGroupBytes;
#pragma unroll 1
    for (int begin = 0; begin < p.columns; begin += p.slice_columns) {
      const int columns = min(p.slice_columns, p.columns - begin), first = shape.group(begin),
                groups = shape.group(begin + columns - 1) - first + 1;
      const int code_bytes = columns * kGptqRows / 2;
      if (!ring.next()) return false;
      ring.expect(code_bytes + groups * kGptqGroupBytes);
      if (copies) {
        ring.copy(0, from + long(begin) * kGptqRows / 2, code_bytes);
        ring.copy(code_bytes, scales + first * kGptqGroupBytes, groups * kGptqGroupBytes);
      }
    }
  }
  return true;
}

/// A warp's partial sums of a tile's rows g and g + 8, g = lane / 4. Only lane 4 g has them: its sums are those of the
/// tensor core's columns 0 and 1, which are the two digits. The other lanes' sums are not used.
struct PackedSums {
  float row[2] = {};

  /// Adds a group of columns. `codes` and `digits` point to the lane's bytes of the group, `scales` to the scales and
  /// zeros of the lane's two rows.
  __device__ void add(const char* codes, const char* digits, const char* scales, const DigitScale& of_group) {
    int low[4] = {}, high[4] = {};  // sums of codes and of sixteen times the codes, with the lower and the upper digit
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 w = *reinterpret_cast<const uint4*>(codes + h * kGptqTileBytes),
                  x = *reinterpret_cast<const uint4*>(digits + h * 128);
      constexpr unsigned lower = 0x0f0f0f0fu, upper = 0xf0f0f0f0u;
      mma_bytes(low, w.x & lower, w.y & lower, w.z & lower, w.w & lower, x.x, x.y);
      mma_bytes(high, w.x & upper, w.y & upper, w.z & upper, w.w & upper, x.z, x.w);
    }
    const uint2 words = *reinterpret_cast<const uint2*>(scales);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 row_scale = unpack(r ? words.y : words.x, f16{});  // scale, zero
      const int sum = 16 * (low[2 * r] + 256 * low[2 * r + 1]) + (high[2 * r] + 256 * high[2 * r + 1]);
      row[r] += row_scale.x * of_group.factor * (float(sum) - row_scale.y * of_group.sum);
    }
  }
};

/// Multiplies all stages of a packed product.
template <class Reader>
__device__ void consume_packed(Reader& ring, const Product& p, const PackedShape& shape, const Sums<true>& sums,
                               const Digits& x) {
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const char* const digits = x.bytes + lane / 4 % 2 * 64 + lane % 4 * 16;
  int turn = warp;  // the warp's next group, counted from the stage's first
#pragma unroll 1
  for (int i = 0; i < p.count; i += kGptqRows) {
    PackedSums tile;
#pragma unroll 1
    for (int begin = 0; begin < p.columns; begin += p.slice_columns) {
      const int columns = min(p.slice_columns, p.columns - begin), groups = columns / kDigitColumns;
      const char* const stage = shared_pointer(ring.wait());
      const char* const scales = stage + columns * kGptqRows / 2 + lane / 4 * 8;
      const int first = begin / kDigitColumns;
#pragma unroll 1
      for (; turn < groups; turn += kProductWarps) {
        const int of_weights = shape.group_columns == kDigitColumns
                                   ? turn
                                   : shape.group(begin + turn * kDigitColumns) - shape.group(begin);
        tile.add(stage + turn * 2 * kGptqTileBytes + lane * 16, digits + (first + turn) * 256,
                 scales + of_weights * kGptqGroupBytes, x.scales[first + turn]);
      }
      turn -= groups;
      ring.release(lane == 0);
    }
    if (lane % 4 == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r) *sums.of_warp(warp, i + lane / 4 + 8 * r, 0) = tile.row[r];
  }
}

}  // namespace cf::cuda
