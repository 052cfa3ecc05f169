#pragma once
// The kernels of DeviceTimer's probes.
#include <cstddef>

struct CUstream_st;

namespace cf::apps {

/// Fills the block with random words. Zeros would be read faster than a model's weights. `bytes`, here and below, is a
/// multiple of 16.
void enqueue_random_fill(CUstream_st* stream, void* data, std::size_t bytes);

/// Reads the block once. `sink` is one word that the kernel may write.
void enqueue_stream_read(CUstream_st* stream, const void* data, std::size_t bytes, unsigned* sink);

/// Copies the block `from` to the block `to` with loads and stores of SMs, as kernels write their outputs. The copy
/// engine of cudaMemcpyAsync is slower.
void enqueue_stream_copy(CUstream_st* stream, const void* from, void* to, std::size_t bytes);

}  // namespace cf::apps
