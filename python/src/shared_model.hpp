#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/model/decoder.hpp"
#include "core/model/slot_lengths.hpp"
#include "python/src/device.hpp"
#include "python/src/work.hpp"

namespace cf::python {

/// A model on a GPU that several runners share. Each runner leases slots of its own. One thread at a time uses the
/// model.
class SharedModel {
 public:
  /// `weights` keeps the memory of weights that the model reads in place.
  SharedModel(DeviceModel model, int device, std::shared_ptr<const void> weights)
      : weights_(std::move(weights)),
        model_(std::move(model)),
        device_(device),
        slots_(model_.runner->slots()),
        capacity_(model_.runner->capacity()),
        activation_(model_.runner->activation()),
        taken_(std::size_t(slots_)) {}
  SharedModel(const SharedModel&) = delete;
  SharedModel& operator=(const SharedModel&) = delete;
  /// Waits for the device. The GIL must be held.
  ~SharedModel();

  int device() const { return device_; }
  std::int64_t slots() const { return slots_; }
  std::int64_t capacity() const { return capacity_; }
  DType activation() const { return activation_; }
  const std::string& impl() const { return model_.impl; }
  std::int64_t weights_bytes() const { return model_.weights_bytes; }
  std::int64_t cache_bytes() const { return model_.cache_bytes; }
  std::int64_t workspace_bytes() const { return model_.workspace_bytes; }
  std::int64_t free_slots();
  Turns& turns() { return turns_; }

  /// Call the members below only while holding turns().

  /// The model, or an error once it is closed.
  Result<ModelRunner*> runner();
  /// Gives the device's memory back. Every call of a runner is refused from now on.
  void close() {
    model_.runner.reset();
    weights_.reset();
  }
  bool is_open() const { return model_.runner != nullptr; }

 private:
  friend class LeasedRunner;
  /// Takes slots that no runner has, and forgets their entries. Refuses more than are free.
  Result<std::vector<std::int64_t>> take_slots(std::int64_t count);
  /// May be called without holding turns(): Python decides when a runner ends.
  void give_slots(const std::vector<std::int64_t>& slots);

  std::shared_ptr<const void> weights_;
  DeviceModel model_;
  int device_;
  std::int64_t slots_, capacity_;
  DType activation_;
  Turns turns_;
  std::mutex mutex_;         // of taken_, and never held while the GIL is waited for
  std::vector<bool> taken_;  // by slot
};

/// Some slots of a shared model as a model of their own. Before each step and each pass of a prompt Python handles
/// signals. All calls must be in the shared model's turn.
class LeasedRunner final : public ModelRunner {
 public:
  /// Refuses more slots than are free, and less than one.
  static Result<std::unique_ptr<LeasedRunner>> create(std::shared_ptr<SharedModel> shared, std::int64_t slots,
                                                      Interrupt& interrupt);
  LeasedRunner(const LeasedRunner&) = delete;
  LeasedRunner& operator=(const LeasedRunner&) = delete;
  ~LeasedRunner() override { close(); }
  /// Gives the slots back. Every other call is refused from now on.
  void close();
  bool is_open() const { return !slots_.empty() && shared_->is_open(); }

  const ModelSpec& model() const override { return spec_; }
  std::int64_t slots() const override { return lengths_.slots(); }
  std::int64_t capacity() const override { return lengths_.capacity(); }
  DType activation() const override { return shared_->activation(); }
  std::int64_t length(std::int64_t slot) const override { return lengths_[slot]; }

  Status run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) override;
  std::vector<Result<std::int32_t>> choose(std::span<const Draw> draws) override;
  Result<Tensor> logits(std::int64_t slot) override;
  void release(std::int64_t slot) override;
  /// The visitor sees the passes of this runner alone.
  void watch(Visit visit) override { visit_ = std::move(visit); }
  void check_between(Check check) override { check_ = std::move(check); }
  Status fetch(const SiteTensor& tensor, void* to) override;

 private:
  LeasedRunner(std::shared_ptr<SharedModel> shared, const ModelSpec& spec, std::vector<std::int64_t> slots,
               Interrupt& interrupt)
      : shared_(std::move(shared)),
        spec_(spec),
        slots_(std::move(slots)),
        lengths_(std::int64_t(slots_.size()), spec, shared_->capacity()),
        interrupt_(interrupt) {}
  /// The shared model, while this runner has slots of it.
  Result<ModelRunner*> shared_runner() const;
  std::int64_t shared_slot(std::int64_t slot) const { return slots_[std::size_t(slot)]; }

  std::shared_ptr<SharedModel> shared_;
  ModelSpec spec_;
  std::vector<std::int64_t> slots_;  // by this runner's own number; none once closed
  SlotLengths lengths_;
  Visit visit_;
  Check check_;
  Interrupt& interrupt_;
};

}  // namespace cf::python
