#pragma once
// Which rows of a layer's weight matrices each block multiplies. Without CUDA: the host tests it.
#include "core/host_device.hpp"

namespace cf::cuda {

/// The rows of a matrix that one block has: `count` consecutive rows from `first` on.
struct Deal {
  int first, count;

  CF_HD constexpr int row(int i) const { return first + i; }
};

/// A matrix's rows over a grid: each block has `each` rows, and `rest` of the blocks have one row more.
struct RowCounts {
  int each, rest;
};
CF_HD constexpr RowCounts row_counts(int rows, int grid) { return {rows / grid, rows % grid}; }

/// The four products of a layer, by the weights' names. A block owns the same rows of dense and of down: the sum of the
/// two is one row of the output.
enum class Weight : int { qkv, up, dense, down };
inline constexpr int kWeights = 4;

/// The rows of a layer's products. mlp.act has `act` elements, each made of rows_of_act consecutive rows: with SwiGLU
/// of two, the gate's and the up row. `out` counts the rows of dense, which are also those of down.
struct LayerRows {
  int qkv, act, rows_of_act, out;
};

/// Deals the rows of a layer's products to the blocks: those of qkv, then those of up, then those of dense and down
/// together. The rows of one element of mlp.act stay together and count as one here. Where rows do not divide evenly,
/// some consecutive blocks get one row more. The next deal, also that of the next layer, begins with the block behind
/// these. So the blocks of a layer read nearly the same number of bytes, and over many layers all blocks read the same
/// number.
struct LayerDeals {
  int grid, rows_of_act;
  RowCounts qkv, up, out, vocab;  // `up` counts elements of mlp.act

  CF_HD constexpr LayerDeals(const LayerRows& rows, int blocks, int vocab_size = 0)
      : grid(blocks),
        rows_of_act(rows.rows_of_act),
        qkv(row_counts(rows.qkv, blocks)),
        up(row_counts(rows.act, blocks)),
        out(row_counts(rows.out, blocks)),
        vocab(row_counts(vocab_size, blocks)) {}
  /// The block with which a layer's first deal begins. A division: kernels ask for it once a layer.
  CF_HD constexpr int start(int layer) const { return layer * (qkv.rest + up.rest + out.rest) % grid; }
  /// The rows of a layer that begins with block `start`.
  CF_HD constexpr Deal deal(Weight weight, int start, int block) const {
    const Deal d = deal(counts(weight), start, block,
                        weight == Weight::qkv  ? 0
                        : weight == Weight::up ? qkv.rest
                                               : qkv.rest + up.rest);
    return {d.first * rows_together(weight), d.count * rows_together(weight)};
  }
  /// The most rows that a block has.
  CF_HD constexpr int most_rows(Weight weight) const {
    return (counts(weight).each + (counts(weight).rest > 0)) * rows_together(weight);
  }
  /// The rows of the LM head, whose deal begins with block `start`.
  CF_HD constexpr Deal head(int start, int block) const { return deal(vocab, start, block, 0); }

 private:
  CF_HD constexpr const RowCounts& counts(Weight weight) const {
    return weight == Weight::qkv ? qkv : weight == Weight::up ? up : out;
  }
  CF_HD constexpr int rows_together(Weight weight) const { return weight == Weight::up ? rows_of_act : 1; }
  CF_HD constexpr Deal deal(const RowCounts& rows, int start, int block, int earlier_rest_in_layer) const {
    int turn = block - start - earlier_rest_in_layer;
    while (turn < 0) turn += grid;
    return {.first = turn * rows.each + (turn < rows.rest ? turn : rows.rest), .count = rows.each + (turn < rows.rest)};
  }
};

}  // namespace cf::cuda
