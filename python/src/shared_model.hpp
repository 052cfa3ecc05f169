#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "core/model/slot_lease.hpp"
#include "python/src/device.hpp"
#include "python/src/weights.hpp"
#include "python/src/work.hpp"

namespace cf::python {

/// A model on a GPU whose slots runners and decoders of Python share. One thread at a time uses the model.
class SharedModel {
 public:
  /// `weights` keeps the memory of weights that the model reads in place.
  SharedModel(DeviceModel model, int device, std::shared_ptr<const void> weights)
      : weights_(std::move(weights)),
        model_(std::move(model)),
        device_(device),
        spec_(model_.runner->model()),
        capacity_(model_.runner->capacity()),
        activation_(model_.runner->activation()),
        runner_(std::make_shared<SharedRunner>(std::move(model_.runner))) {}
  SharedModel(const SharedModel&) = delete;
  SharedModel& operator=(const SharedModel&) = delete;
  /// Waits for the device. The GIL must be held.
  ~SharedModel();

  int device() const { return device_; }
  const ModelSpec& spec() const { return spec_; }
  std::int64_t slots() const { return runner_->slots(); }
  std::int64_t capacity() const { return capacity_; }
  DType activation() const { return activation_; }
  const std::string& impl() const { return model_.impl; }
  std::int64_t weights_bytes() const { return model_.weights_bytes; }
  std::int64_t cache_bytes() const { return model_.cache_bytes; }
  std::int64_t workspace_bytes() const { return model_.workspace_bytes; }
  std::int64_t free_slots() const { return runner_->free_slots(); }
  Turns& turns() { return turns_; }

  /// Call the members below only while holding turns().

  const std::shared_ptr<SharedRunner>& runner() const { return runner_; }
  /// ModelRunner::swap_weights(). Refuses it while a lease has slots. Files of `weights` that became shorter while they
  /// were read end the model, as close() does.
  Status swap(const Weights& weights);
  /// Gives the device's memory back. Every use of the runner is refused from now on.
  Status close();

 private:
  std::shared_ptr<const void> weights_;
  DeviceModel model_;  // without its runner
  int device_;
  ModelSpec spec_;
  std::int64_t capacity_;
  DType activation_;
  std::shared_ptr<SharedRunner> runner_;
  Turns turns_;
};

}  // namespace cf::python
