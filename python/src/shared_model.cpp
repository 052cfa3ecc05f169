#include "python/src/shared_model.hpp"

#include <algorithm>
#include <utility>

namespace nb = nanobind;

namespace cf::python {

SharedModel::~SharedModel() {
  const WithoutGil without_gil;
  close();
}

std::int64_t SharedModel::free_slots() {
  const std::lock_guard lock(mutex_);
  return std::count(taken_.begin(), taken_.end(), false);
}

Result<ModelRunner*> SharedModel::runner() {
  if (model_.runner) return model_.runner.get();
  return Status::error(Code::device_error, "the model's memory on the device was given back");
}

Result<std::vector<std::int64_t>> SharedModel::take_slots(std::int64_t count) {
  CF_TRY_ASSIGN(ModelRunner* const model, runner());
  std::vector<std::int64_t> slots;
  {
    const std::lock_guard lock(mutex_);
    const std::int64_t free = std::count(taken_.begin(), taken_.end(), false);
    if (free == 0)
      return Status::error(Code::invalid_argument, "slots: expected one that is free, got a model whose " +
                                                       std::to_string(slots_) + " are all in use");
    if (count < 1 || count > free)
      return Status::error(Code::invalid_argument, "slots: expected 1 to " + std::to_string(free) +
                                                       ", those that are free of the model's " +
                                                       std::to_string(slots_) + ", got " + std::to_string(count));
    for (std::int64_t slot = 0; std::int64_t(slots.size()) < count; ++slot)
      if (!taken_[std::size_t(slot)]) {
        taken_[std::size_t(slot)] = true;
        slots.push_back(slot);
      }
  }
  for (std::int64_t slot : slots) model->release(slot);
  return slots;
}

void SharedModel::give_slots(const std::vector<std::int64_t>& slots) {
  const std::lock_guard lock(mutex_);
  for (std::int64_t slot : slots) taken_[std::size_t(slot)] = false;
}

Result<std::unique_ptr<LeasedRunner>> LeasedRunner::create(std::shared_ptr<SharedModel> shared, std::int64_t slots,
                                                           Interrupt& interrupt) {
  CF_TRY_ASSIGN(ModelRunner* const model, shared->runner());
  CF_TRY_ASSIGN(std::vector<std::int64_t> taken, shared->take_slots(slots));
  return std::unique_ptr<LeasedRunner>(
      new LeasedRunner(std::move(shared), model->model(), std::move(taken), interrupt));
}

void LeasedRunner::close() {
  shared_->give_slots(slots_);
  slots_.clear();
}

Result<ModelRunner*> LeasedRunner::shared_runner() const {
  if (slots_.empty())
    return Status::error(Code::invalid_argument, "slots: expected some of the model, got none: close() gave them back");
  return shared_->runner();
}

Status LeasedRunner::run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) {
  CF_TRY_ASSIGN(ModelRunner* const model, shared_runner());
  CF_TRY(lengths_.check(runs));
  CF_TRY(interrupt_.check());
  std::vector<Run> theirs(runs.begin(), runs.end());
  for (Run& r : theirs) r.sequence = shared_slot(r.sequence);
  model->check_between([this]() -> Status {
    CF_TRY(interrupt_.check());
    return check_ ? check_() : Status();
  });
  if (visit_) model->watch(visit_);
  const Status ran = model->run(theirs, ids, logits);
  if (visit_) model->watch({});
  model->check_between({});
  CF_TRY(ran);
  for (const Run& r : runs) lengths_.set(r.sequence, r.first_position + r.count);
  return {};
}

std::vector<Result<std::int32_t>> LeasedRunner::choose(std::span<const Draw> draws) {
  const Result<ModelRunner*> model = shared_runner();
  if (!model) return std::vector<Result<std::int32_t>>(draws.size(), model.status());
  std::vector<Draw> theirs(draws.begin(), draws.end());
  for (Draw& d : theirs) d.slot = shared_slot(d.slot);
  return (*model)->choose(theirs);
}

Result<Tensor> LeasedRunner::logits(std::int64_t slot) {
  CF_TRY_ASSIGN(ModelRunner* const model, shared_runner());
  CF_TRY(lengths_.check(slot, 0, 1));
  return model->logits(shared_slot(slot));
}

Status LeasedRunner::fetch(const SiteTensor& tensor, void* to) {
  CF_TRY_ASSIGN(ModelRunner* const model, shared_runner());
  return model->fetch(tensor, to);
}

void LeasedRunner::release(std::int64_t slot) {
  lengths_.set(slot, 0);
  if (const Result<ModelRunner*> model = shared_runner()) (*model)->release(shared_slot(slot));
}

}  // namespace cf::python
