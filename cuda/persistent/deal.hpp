#pragma once
// Which rows of a layer's weight matrices each block multiplies. Without CUDA: the host tests it.
#include "core/host_device.hpp"

namespace cf::cuda {

/// The rows of a matrix that one block has: `count` consecutive rows from `first` on.
struct Deal {
  int first, count;

  CF_HD constexpr int row(int i) const { return first + i; }
};

/// A matrix's rows over a grid. `together` consecutive rows make an element, which one block has. Each block has `each`
/// elements, and `rest` of the blocks have one more. The struct has 16 bytes: a kernel reads it in one access.
struct alignas(16) DealtRows {
  int each, rest;
  int earlier_rest;  // the sum of `rest` over the layer's deals before this one
  int together;
};

/// The four products of a layer, by the weights' names. A block owns the same rows of dense and of down: the sum of the
/// two is one row of the output.
enum class Weight : unsigned { qkv, up, dense, down };
inline constexpr int kWeights = 4;
/// The LM head's number behind these in tables of dealt matrices.
inline constexpr unsigned kHeadMatrix = kWeights, kMatrices = kWeights + 1;

/// The rows of a layer's products. mlp.act has `act` elements, each made of rows_of_act consecutive rows: with SwiGLU
/// of two, the gate's and the up row. `out` counts the rows of dense, which are also those of down.
struct LayerRows {
  int qkv, act, rows_of_act, out;
  int together = 1;  // consecutive rows that stay in one block: those of a tile of packed weights, else 1
};

/// Deals the rows of a layer's products to the blocks: those of qkv, then those of up, then those of dense and down
/// together. The rows of one element of mlp.act stay together and count as one here. Where rows do not divide evenly,
/// some consecutive blocks get one row more. The next deal, also that of the next layer, begins with the block behind
/// these. So the blocks of a layer read nearly the same number of bytes, and over many layers all blocks read the same
/// number.
struct LayerDeals {
  int grid, rest;             // `rest`: the sum over a layer's deals
  DealtRows of[kMatrices]{};  // by Weight, then the LM head

  CF_HD constexpr LayerDeals(const LayerRows& rows, int blocks, int vocab_size = 0) : grid(blocks), rest(0) {
    const auto add = [&](Weight w, int matrix_rows, int together) {
      const int elements = matrix_rows / together;
      of[int(w)] = {elements / grid, elements % grid, rest, together};
      rest += elements % grid;
    };
    const int of_act = rows.together > rows.rows_of_act ? rows.together : rows.rows_of_act;
    add(Weight::qkv, rows.qkv, rows.together);
    add(Weight::up, rows.act * rows.rows_of_act, of_act);
    add(Weight::dense, rows.out, rows.together);
    of[int(Weight::down)] = of[int(Weight::dense)];
    of[kHeadMatrix] = {vocab_size / grid, vocab_size % grid, 0, 1};
  }
  /// The block with which a layer's first deal begins. This takes a division.
  CF_HD constexpr int start(int layer) const { return layer * rest % grid; }
  /// start() of the next layer, from that of the current one. This takes no division.
  CF_HD constexpr int next_start(int start) const {
    start += rest;
    while (start >= grid) start -= grid;
    return start;
  }
  /// A block's rows of a matrix. `matrix` is an index of `of`. `start` is the block with which the layer's deals begin,
  /// and with which the LM head's deal begins.
  CF_HD constexpr Deal deal(int matrix, int start, int block) const {
    const DealtRows rows = of[matrix];
    int turn = block - start - rows.earlier_rest;
    while (turn < 0) turn += grid;
    const int first = turn * rows.each + (turn < rows.rest ? turn : rows.rest), more = turn < rows.rest;
    return {.first = first * rows.together, .count = (rows.each + more) * rows.together};
  }
  CF_HD constexpr Deal deal(Weight weight, int start, int block) const { return deal(int(weight), start, block); }
  /// The most rows that a block has.
  CF_HD constexpr int most_rows(Weight weight) const {
    const DealtRows& rows = of[int(weight)];
    return (rows.each + (rows.rest > 0)) * rows.together;
  }
};

}  // namespace cf::cuda
