#pragma once
// Steps of a layer whose cache others hold token by token, on a GPU. The header holds no CUDA types: without the CUDA
// backend every call is refused.
#include <cstdint>
#include <memory>

#include "core/ops/decode_layer.hpp"
#include "core/status.hpp"
#include "python/src/device_ops.hpp"

namespace cf::python {

/// One token through a layer whose cache others hold token by token, k_rows and v_rows (tokens, heads * head_dim).
struct RowsLayer {
  ops::DecodeLayer::Args layer{};
  AnyView<2> k_rows{}, v_rows{};
  std::int64_t first = 0;  // rows first .. last - 1 are no entries of the layer's cache yet, and become some
  std::int64_t last = 0;   // the token's row, in which its k and v are stored
};
/// Launches it on tensors of the device, as run_on_device() does.
Status run_on_device(const RowsLayer& args, const DeviceStream& at);

/// Steps of one layer on one device, whose shapes and dtypes stay as they are. Not shared between threads.
class DeviceSteps {
 public:
  DeviceSteps();
  DeviceSteps(const DeviceSteps&) = delete;
  DeviceSteps& operator=(const DeviceSteps&) = delete;
  ~DeviceSteps();

  /// Launches a step as one CUDA graph; its bits are those of run_on_device(). A step that turns rows, and one on a
  /// stream that is being captured, goes to run_on_device().
  Status run(const RowsLayer& args, const DeviceStream& at);
  /// How many graphs are kept: one for each plan of attention that steps have had.
  std::size_t graphs() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cf::python
