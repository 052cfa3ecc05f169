#pragma once
// Private to cuda.
#include "core/view.hpp"
#include "cuda/cuda.hpp"

namespace cf::cuda {

/// Adds `count` to every position and every kv_len on the device, behind all that is on the context's stream.
Status enqueue_advance(View<std::int32_t, 1> positions, View<std::int32_t, 1> kv_len, std::int32_t count,
                       const Context& context);

}  // namespace cf::cuda
