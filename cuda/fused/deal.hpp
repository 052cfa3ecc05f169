#pragma once
#include "cuda/device/math.cuh"

namespace cf::cuda {

/// A block's share of a matrix's rows, one behind the other.
struct Deal {
  int first, count;

  CF_HD constexpr int row(int i) const { return first + i; }
};

/// How many rows every block gets, and how many blocks get one more.
struct Share {
  int each, rest;
};
CF_HD constexpr Share share(int rows, int grid) { return {rows / grid, rows % grid}; }

/// The products of a layer, by the weights' names. A block owns the same rows of dense and down, whose sum is one row of the
/// output.
enum class Weight : int { qkv, up, dense, down };

/// A layer's deals, in the order qkv, up, dense and down. In each the block after the last one that got a row more is
/// served first, and in a layer's first the one after the layer before: no block waits long for another, which has more to
/// read, and over many layers all read as much.
struct LayerDeals {
  int grid;
  Share qkv, up, out;

  CF_HD constexpr LayerDeals(int hidden, int intermediate, int blocks)
      : grid(blocks), qkv(share(3 * hidden, blocks)), up(share(intermediate, blocks)), out(share(hidden, blocks)) {}
  CF_HD constexpr Deal deal(Weight of, int layer, int block) const {
    const int served = layer * (qkv.rest + up.rest + out.rest) % grid;
    const Share& mine = of == Weight::qkv ? qkv : of == Weight::up ? up : out;
    int turn = block - served - (of == Weight::qkv ? 0 : of == Weight::up ? qkv.rest : qkv.rest + up.rest);
    while (turn < 0) turn += grid;
    return {.first = turn * mine.each + (turn < mine.rest ? turn : mine.rest), .count = mine.each + (turn < mine.rest)};
  }
};

}  // namespace cf::cuda
