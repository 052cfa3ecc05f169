#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "core/model/slot_lease.hpp"
#include "cpu_ref/model.hpp"
#include "python/src/shared_model.hpp"
#include "python/src/weights.hpp"
#include "python/src/work.hpp"

namespace cf::python {

/// The slots that a runner or a decoder of Python's has: all of a model on the CPU, or some of one on a GPU, which
/// others share. Threads take turns.
class ModelSlots {
 public:
  /// A model on the CPU that takes memory for its cache and activations, once that memory is known to be free. While it
  /// works it notices signals, and files of its weights that become shorter.
  ModelSlots(const Weights& weights, const cpu_ref::Model::Options& options);
  /// Slots of a model on a GPU that are free.
  ModelSlots(const std::shared_ptr<SharedModel>& shared, std::int64_t slots);
  ModelSlots(const ModelSlots&) = delete;
  ModelSlots& operator=(const ModelSlots&) = delete;

  const ModelSpec& spec() const { return spec_; }
  DType activation() const { return activation_; }
  std::int64_t slots() const { return lease_->slots(); }
  std::int64_t capacity() const { return capacity_; }
  std::int64_t vocab_size() const { return spec_.shape.vocab_size; }
  std::int64_t cache_bytes() const { return cache_bytes_; }
  std::int64_t workspace_bytes() const { return workspace_bytes_; }
  const std::shared_ptr<SlotLease>& lease() const { return lease_; }
  /// The number in the model of slot i.
  std::int64_t operator[](std::int64_t i) const { return (*lease_)[i]; }
  /// The model where it runs on the CPU; null for a GPU's.
  cpu_ref::Model* on_cpu() const { return on_cpu_; }

  /// Runs f(runner), which returns a Status or a Result, without the GIL and in turn with other threads; for a GPU its
  /// device is the thread's meanwhile. Python handles signals between the parts of the runner's work. Refuses slots
  /// that were given back.
  template <class F>
  auto use(F&& f) {
    using Made = decltype(f(std::declval<ModelRunner&>()));
    return work(*turns_, [&]() -> Made {
      CF_TRY_ASSIGN(ModelRunner* const runner, lease_->runner());
      std::optional<Made> made;
      const auto run = [&]() -> Status {
        runner->check_between([this] { return check_(); });
        made.emplace(f(*runner));
        runner->check_between({});
        return {};
      };
      CF_TRY(shared_ ? on_device(shared_->device(), run) : run());
      return std::move(*made);
    });
  }
  /// Runs f(), which returns a Status or a Result and asks the runner for nothing, in turn with other threads.
  template <class F>
  auto look(F&& f) {
    return work(*turns_, std::forward<F>(f));
  }

  /// Gives slots of a GPU back: use() is refused then. Does nothing on the CPU.
  void close();
  bool is_open();

  /// Checks runs whose sequences are numbers of these slots, and returns them with the runner's numbers. Errors name
  /// the numbers that the caller gave.
  Result<std::vector<Run>> runs_of(const ModelRunner& runner, std::span<const Run> runs) const;

 private:
  std::shared_ptr<SharedModel> shared_;  // null on the CPU
  std::shared_ptr<Turns> turns_;         // the model's
  Interrupt interrupt_;
  ModelRunner::Check check_;
  cpu_ref::Model* on_cpu_ = nullptr;
  std::shared_ptr<SlotLease> lease_;
  ModelSpec spec_;
  DType activation_ = DType::f32;
  std::int64_t capacity_ = 0, cache_bytes_ = 0, workspace_bytes_ = 0;
};

}  // namespace cf::python
