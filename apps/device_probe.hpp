#pragma once
// The kernels of DeviceTimer's probes.
#include <cstddef>

struct CUstream_st;

namespace cf::apps {

/// Fills the block with random words: a memory full of zeros would be read faster than a model's weights.
void enqueue_random_fill(CUstream_st* stream, void* data, std::size_t bytes);

/// Reads the block once. `sink` is one word that the kernel may write.
void enqueue_stream_read(CUstream_st* stream, const void* data, std::size_t bytes, unsigned* sink);

}  // namespace cf::apps
