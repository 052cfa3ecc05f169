#include "python/src/port/port_steps.hpp"

#include <optional>

#include "cuda/port/row_ops.hpp"
#include "cuda/port/row_steps.hpp"
#include "cuda/port/run.hpp"
#include "cuda/runtime/check.hpp"
#include "python/src/device_context.hpp"

namespace cf::python {
namespace {

cuda::TokenRows rows_of(const RowsLayer& a) { return {.k = a.k_rows, .v = a.v_rows, .first = a.first, .last = a.last}; }

/// Whether a graph may be launched on the stream: it is not being captured.
bool takes_graphs(CUstream_st* stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  // On the default stream, a capture on another stream makes this an error, which the launches then name.
  return cuda::from_cuda(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing") &&
         capture == cudaStreamCaptureStatusNone;
}

}  // namespace

Status run_on_device(const RowsLayer& args, const DeviceStream& at) {
  return run_launches(
      at, {}, [&](cuda::LaunchList& launches) { return cuda::prepare_layer(args.layer, rows_of(args), launches); });
}

struct DeviceSteps::State {
  ~State() {
    if (!steps) return;
    const DeviceGuard guard(device);
    const cuda::RelaxedCapture relaxed;
    steps.reset();
  }

  int device = 0;
  std::optional<cuda::RowSteps> steps;
};

DeviceSteps::DeviceSteps() : state_(std::make_unique<State>()) {}
DeviceSteps::~DeviceSteps() = default;

std::size_t DeviceSteps::graphs() const { return state_->steps ? state_->steps->graphs() : 0; }

Status DeviceSteps::run(const RowsLayer& args, const DeviceStream& at) {
  if (args.first < args.last) return run_on_device(args, at);
  return with_context(at, [&](const cuda::Context& context) -> Status {
    if (!takes_graphs(context.stream())) return run_on_device(args, at);
    if (!state_->steps) {
      state_->steps.emplace(context);
      state_->device = at.device;
    }
    return state_->steps->step(args.layer, rows_of(args), context.stream());
  });
}

}  // namespace cf::python
