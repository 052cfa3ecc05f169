#pragma once
// Private to cuda.
#include "core/status.hpp"
#include "cuda/fused/call.hpp"

namespace cf::cuda {

/// Launches the persistent kernel, all of whose blocks must be resident at once; an error where they cannot be.
Status launch_decode_stack(const DecodeCall& call, DType dtype, CUstream_st* stream);

}  // namespace cf::cuda
