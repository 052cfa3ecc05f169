#pragma once

struct CUstream_st;

namespace cf::test {

/// Puts a kernel onto the stream that holds `blocks` SMs, all the shared memory of each, for about `time_ms`.
void enqueue_occupy(CUstream_st* stream, int blocks, int time_ms);

}  // namespace cf::test
