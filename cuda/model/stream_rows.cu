#include "cuda/model/stream_rows.hpp"

#include "cuda/device/sync.cuh"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// Block (i, w) makes one of token i's rows: w = 0 for its position, w = 1 for that in the cache. It does not let
/// successors start early: what reads the rows is not the next kernel.
__global__ void stream_rows_kernel(const std::int32_t* positions, const double* frequencies, float* cos, float* sin,
                                   int half, int tokens, int last_position) {
  wait_for_predecessors();
  const int token = int(blockIdx.x), position = positions[token], in_cache = min(position, last_position);
  const long row = long(blockIdx.y == 0 ? token : tokens + token) * half;
  const double p = double(blockIdx.y == 0 ? position : in_cache);
  for (int i = int(threadIdx.x); i < half; i += int(blockDim.x)) {
    double s, c;
    sincos(p * frequencies[i], &s, &c);
    cos[row + i] = float(c);
    sin[row + i] = float(s);
  }
}

}  // namespace

Status add_stream_rows(const StreamTable& t, View<const std::int32_t, 1> positions, LaunchList& launches) {
  const int half = int(t.cos.shape[1]);
  return launch("stream_rows", launches,
                {.grid = {unsigned(positions.size()), 2}, .block = unsigned((half + 31) / 32 * 32)}, stream_rows_kernel,
                positions.data, t.frequencies.data, t.cos.data, t.sin.data, half, int(t.cos.shape[0] / 2),
                int(t.last_position));
}

}  // namespace cf::cuda
