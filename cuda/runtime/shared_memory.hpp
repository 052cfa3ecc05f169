#pragma once
// What a kernel must be allowed before a launch. Private to cuda.
#include <cstddef>
#include <string_view>

#include "core/status.hpp"

namespace cf::cuda {

/// Lets a kernel take `bytes` of dynamic shared memory on the current device, beside what earlier calls let it take.
/// Called when a launch is prepared. A kernel is allowed no more than its launches ask for:
/// presumably the driver divides an SM's memory by what a kernel may take (kH200Tuning).
Status allow_shared_memory(std::string_view op, const void* kernel, std::size_t bytes);

/// Lets a kernel's clusters have `blocks` blocks on the current device, also more than Arch::max_cluster_blocks.
Status allow_cluster(std::string_view op, const void* kernel, int blocks);

}  // namespace cf::cuda
