#pragma once
// Work on a stream that somebody else owns. With CUDA's types: only files that the CUDA backend needs include it.
#include <map>
#include <mutex>

#include "cuda/runtime/context.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "cuda/runtime/stream.hpp"
#include "python/src/device_guard.hpp"
#include "python/src/device_ops.hpp"

namespace cf::python {

/// A context on a stream that somebody else owns. A device's limits are asked for once, since that takes long.
inline Result<cuda::Context> context_on(const DeviceStream& at) {
  static std::mutex mutex;
  static std::map<int, cuda::Context> contexts;
  const std::lock_guard lock(mutex);
  auto found = contexts.find(at.device);
  if (found == contexts.end()) {
    CF_TRY_ASSIGN(const cuda::Context made, cuda::Context::create(at.device));
    found = contexts.emplace(at.device, made).first;
  }
  return found->second.on_stream(reinterpret_cast<CUstream_st*>(at.stream));
}

/// Calls f with a context, on the device. What f does first loads kernels and libraries, and may be captured.
template <class F>
Status with_context(const DeviceStream& at, F&& f) {
  const DeviceGuard guard(at.device);
  CF_TRY(guard.status());
  const cuda::RelaxedCapture relaxed;
  CF_TRY_ASSIGN(const cuda::Context context, context_on(at));
  return f(context);
}

/// Submits what `add` adds to a list, on the device's stream.
template <class Add>
Status run_launches(const DeviceStream& at, const DeviceScratch& scratch, Add&& add) {
  return with_context(at, [&](const cuda::Context& context) -> Status {
    cuda::LaunchList launches(context, {reinterpret_cast<std::byte*>(scratch.address), scratch.bytes});
    launches.trust_addresses();
    CF_TRY(add(launches));
    // Later launches read only weights before they wait, and the work before the first launch has written those by
    // then.
    return launches.submit(context.stream(), {.early = true, .first_waits = true});
  });
}

}  // namespace cf::python
