#include "core/model/slot_lease.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace cf {

SharedRunner::SharedRunner(std::unique_ptr<ModelRunner> runner)
    : runner_(std::move(runner)), taken_(std::size_t(runner_->slots())) {}

std::int64_t SharedRunner::free_slots() const {
  const std::lock_guard lock(mutex_);
  return std::count(taken_.begin(), taken_.end(), false);
}

Result<ModelRunner*> SharedRunner::runner() const {
  if (runner_) return runner_.get();
  return Status::error(Code::device_error, "the model's memory on the device was given back");
}

void SharedRunner::forget_returned() {
  std::vector<std::int64_t> returned;
  {
    const std::lock_guard lock(mutex_);
    returned.swap(returned_);
  }
  if (!runner_ || runner_->page_entries() == 0) return;
  for (std::int64_t slot : returned) runner_->release(slot);
}

Result<std::shared_ptr<SlotLease>> SlotLease::create(std::shared_ptr<SharedRunner> shared, std::int64_t count) {
  CF_TRY_ASSIGN(ModelRunner* const runner, shared->runner());
  shared->forget_returned();
  std::vector<std::int64_t> slots;
  {
    const std::lock_guard lock(shared->mutex_);
    const std::int64_t free = std::count(shared->taken_.begin(), shared->taken_.end(), false);
    const std::string all = std::to_string(shared->slots());
    if (free == 0)
      return Status::error(Code::invalid_argument,
                           "slots: expected one that is free, got a model whose " + all + " are all in use");
    if (count < 1 || count > free)
      return Status::error(Code::invalid_argument, "slots: expected 1 to " + std::to_string(free) +
                                                       ", those that are free of the model's " + all + ", got " +
                                                       std::to_string(count));
    for (std::int64_t slot = 0; std::int64_t(slots.size()) < count; ++slot)
      if (!shared->taken_[std::size_t(slot)]) {
        shared->taken_[std::size_t(slot)] = true;
        std::erase(shared->returned_, slot);
        slots.push_back(slot);
      }
  }
  for (std::int64_t slot : slots) runner->release(slot);
  return std::shared_ptr<SlotLease>(new SlotLease(std::move(shared), std::move(slots)));
}

std::shared_ptr<SlotLease> SlotLease::of_all(std::unique_ptr<ModelRunner> runner) {
  auto shared = std::make_shared<SharedRunner>(std::move(runner));
  std::vector<std::int64_t> slots;
  for (std::int64_t slot = 0; slot < shared->slots(); ++slot) slots.push_back(slot);
  shared->taken_.assign(slots.size(), true);
  return std::shared_ptr<SlotLease>(new SlotLease(std::move(shared), std::move(slots)));
}

void SlotLease::close() {
  if (!is_open_) return;
  is_open_ = false;
  const std::lock_guard lock(shared_->mutex_);
  for (std::int64_t slot : slots_) {
    shared_->taken_[std::size_t(slot)] = false;
    shared_->returned_.push_back(slot);
  }
}

Result<ModelRunner*> SlotLease::runner() const {
  if (!is_open_)
    return Status::error(Code::invalid_argument, "slots: expected some of the model, got none: close() gave them back");
  shared_->forget_returned();
  return shared_->runner();
}

}  // namespace cf
