#include "cuda/runtime/tensor_map.hpp"

#include <cuda_runtime_api.h>

#include "cuda/runtime/check.hpp"

namespace cf::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

/// The driver's function. It is asked for by name, so that no build links the driver's library.
Result<Encode> find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  CF_TRY(from_cuda(error, "cuTensorMapEncodeTiled"));
  if (found != cudaDriverEntryPointSuccess || !function)
    return Status::error(Code::device_error, "the CUDA driver has no cuTensorMapEncodeTiled, expected one of CUDA 12");
  return reinterpret_cast<Encode>(function);
}

}  // namespace

Status make_tensor_map(const TiledMatrix& m, int tile_rows, CUtensorMap& map, int tile_matrices) {
  static const Result<Encode> encode = find_encode();
  CF_TRY(encode.status());
  const auto columns = cuuint64_t(m.columns), rows = cuuint64_t(m.rows);
  const cuuint64_t sizes[] = {columns, rows, cuuint64_t(m.matrices)};
  const cuuint64_t pitches_bytes[] = {columns * 2, columns * rows * 2};
  const cuuint32_t tile[] = {kTileColumns, cuuint32_t(tile_rows), cuuint32_t(tile_matrices)}, strides[] = {1, 1, 1};
  const CUresult made =
      (*encode)(&map, m.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
                const_cast<void*>(m.data), sizes, pitches_bytes, tile, strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (made != CUDA_SUCCESS)
    return Status::error(Code::device_error, "cuTensorMapEncodeTiled refuses a matrix (" + std::to_string(m.matrices) +
                                                 ", " + std::to_string(m.rows) + ", " + std::to_string(m.columns) +
                                                 "), error " + std::to_string(int(made)));
  return {};
}

}  // namespace cf::cuda
