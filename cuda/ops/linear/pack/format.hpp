#pragma once
// The layout of a packed GPTQ matrix, as kernels read it. Kernels include this file and not pack.hpp, whose headers
// take nvcc seconds to read.
#include <cstdint>

namespace cf::cuda {

/// An order of a QKV product's rows in which the two elements that RoPE rotates together are neighbours. A head of q, k
/// or v has head_dim rows. Of q's and k's heads the first rotary_dim rows are reordered: rows i and rotary_dim / 2 + i
/// become rows 2i and 2i + 1. Every other row keeps its place. Where head_dim is 0, every row does.
struct RopePairs {
  std::int64_t head_dim = 0, rotary_dim = 0;
  /// Where q, k and v are separate, the number of q's and k's heads, behind which come v's. 0 where the three are
  /// interleaved by head.
  std::int64_t turned_heads = 0;

  /// The element of a head that comes at place c. `half` is rotary_dim / 2. Of v nothing is turned.
  template <class Int>
  static constexpr Int element(bool turned, Int c, Int half) {
    return turned && c < 2 * half ? c / 2 + c % 2 * half : c;
  }
  /// The matrix's row that comes at place r.
  template <class Int>
  constexpr Int row(Int r) const {
    if (head_dim == 0) return r;
    const Int head = r / Int(head_dim), c = r % Int(head_dim);
    const bool turned = turned_heads > 0 ? head < Int(turned_heads) : head % 3 < 2;
    return r - c + element(turned, c, Int(rotary_dim / 2));
  }
  bool operator==(const RopePairs&) const = default;
};

// How a GPTQ matrix is packed, for mma.m16n8k16 with the weights as the 16 x 16 operand. The block holds up to four
// parts, one behind the other: codes, scales, order and inverse. The last two are there only where they are needed.
//
//   Columns are the inputs sorted by group. Every group has columns_per_group columns, a multiple of 32: column c
//   belongs to group c / columns_per_group and to input order[c]. A column without an input (-1) has any code: its
//   activation counts as zero. Without an order column k is input k.
//   An 8-bit code is stored as two 4-bit codes: W = 16 s (q / 16 - z / 16) + s (q % 16 - z % 16). Every input has two
//   columns: first come the groups of the high codes, with scale 16 s, then those of the low codes, with scale s.
//
//   codes   (row_tiles, chunks, 128)  Tile (i, j) holds rows 16i .. 16i + 15 and columns 64j .. 64j + 63 in 512 bytes.
//           Lane l of a warp has bytes 16l .. 16l + 15 of a tile. With g = l / 4 and t = l % 4 these are four words:
//           row g, columns 8t .. 8t + 7; row g + 8, the same columns; row g, columns 32 + 8t .. 39 + 8t; row g + 8, the
//           same. A word's eight columns lie in the order 0, 4, 2, 6, 1, 5, 3, 7, low bits first. So the two columns of
//           a pair lie 16 bits apart, as a pair of 16-bit numbers does, and one mask makes a pair.
//   scales  (row_tiles, groups, 16)  Word (i, group, r) is of row 16i + r / 2 + 8 (r % 2): the float16 scale in its low
//           half, the zero as a float16 in its high half. A scale is never 0: where GPTQ's is, and in groups of columns
//           without an input, the scale is 1, the zero and the codes are 0.
//   order   (64 * chunks)  The input of each column, or -1. Matrices of 4-bit codes whose column k is input k have
//           none.
//   inverse (inputs)  The column of each input. With 8 bits it is the column of the input's high code. Matrices whose
//           inputs come in order have none, with 8 bits either.
//   Rows that the matrix does not have are zero.

inline constexpr int kGptqRows = 16, kGptqColumns = 64, kGptqTileBytes = 512;  // of a tile of codes
inline constexpr int kGptqGroupBytes = kGptqRows * 4;  // the scales and zeros of a tile's rows in one group

/// The lowest bit of column c in a word that holds eight columns.
constexpr int gptq_shift(int c) { return 4 * (c / 4 + 2 * (c / 2 % 2) + 4 * (c % 2)); }

}  // namespace cf::cuda
