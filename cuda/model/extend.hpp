#pragma once
// Private to cuda/model.
#include "core/view.hpp"
#include "cuda/runtime/context.hpp"

namespace cf::cuda {

/// kv_len[b] += q_len;  positions[b * q_len + i] = kv_len[b] - q_len + i, with the new kv_len.
Status enqueue_extend(View<std::int32_t, 1> positions, View<std::int32_t, 1> kv_len, std::int32_t q_len,
                      const Context& context);

}  // namespace cf::cuda
