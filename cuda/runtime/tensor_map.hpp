#pragma once
// Tensor maps: what the copy engine knows of a matrix in device memory, so that it copies tiles of it to shared memory.
// Private to cuda.
#include <cuda.h>

#include <cstdint>

#include "core/dtype.hpp"
#include "core/status.hpp"

namespace cf::cuda {

/// A stack of matrices of 16-bit elements: `matrices` of them, each (rows, columns) and contiguous, one behind the
/// other.
struct TiledMatrix {
  const void* data;
  DType dtype;
  std::int64_t columns, rows, matrices = 1;
};

/// Elements of a tile's row: 128 bytes.
inline constexpr int kTileColumns = 64;

/// Makes the map of a matrix for tiles of kTileColumns columns and `tile_rows` rows, at most 256, of `tile_matrices`
/// matrices, whose tiles then lie one behind the other. In shared memory a
/// tile begins at a multiple of 1024 bytes and its row i has its 16-byte units in the order u ^ (i % 8), as
/// cuda/device/wgmma.cuh reads it. What a tile has beyond the matrix is zeros. The columns are a multiple of 8, and the
/// data lies at a multiple of 16 bytes. Code::device_error where the driver has no tensor maps or refuses this one.
Status make_tensor_map(const TiledMatrix& matrix, int tile_rows, CUtensorMap& map, int tile_matrices = 1);

}  // namespace cf::cuda
