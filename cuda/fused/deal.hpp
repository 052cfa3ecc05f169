#pragma once
#include "cuda/device/math.cuh"

namespace cf::cuda {

/// A block's share of a matrix's rows: every grid-th tile of 2^tile_shift rows that lie one behind the other.
struct Deal {
  int first, grid, tile_shift, count;  // first counts tiles, count rows

  CF_HD constexpr int row(int i) const {
    return ((first + (i >> tile_shift) * grid) << tile_shift) + (i & ((1 << tile_shift) - 1));
  }
};

/// How many tiles every block gets, and how many blocks get one more.
struct Share {
  int each, rest;
};
CF_HD constexpr Share share(int tiles, int grid) { return {tiles / grid, tiles % grid}; }

/// The products of a layer, by the weights' names. A block owns the same rows of dense and down, whose sum is one row of the
/// output.
enum class Weight : int { qkv, up, dense, down };

/// A layer's deals, in the order qkv, up, dense and down. Each starts with the block after the last one that got a tile more,
/// and a layer's where the one before ended: over many layers all blocks read as much.
struct LayerDeals {
  int grid, tile_shift;
  Share qkv, up, out;

  CF_HD constexpr LayerDeals(int hidden, int intermediate, int shift, int blocks)
      : grid(blocks),
        tile_shift(shift),
        qkv(share(3 * hidden >> shift, blocks)),
        up(share(intermediate >> shift, blocks)),
        out(share(hidden >> shift, blocks)) {}
  CF_HD constexpr Deal deal(Weight of, int layer, int block) const {
    const int served = layer * (qkv.rest + up.rest + out.rest) % grid;
    const Share& mine = of == Weight::qkv ? qkv : of == Weight::up ? up : out;
    int first = block - served - (of == Weight::qkv ? 0 : of == Weight::up ? qkv.rest : qkv.rest + up.rest);
    while (first < 0) first += grid;
    return {.first = first,
            .grid = grid,
            .tile_shift = tile_shift,
            .count = (mine.each + (first < mine.rest)) << tile_shift};
  }
};

}  // namespace cf::cuda
