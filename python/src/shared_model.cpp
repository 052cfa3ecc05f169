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

Result<DeviceRunner*> SharedModel::runner() {
  if (model_.runner) return model_.runner.get();
  return Status::error(Code::device_error, "the model's memory on the device was given back");
}

Result<std::vector<std::int64_t>> SharedModel::take_slots(std::int64_t count) {
  CF_TRY_ASSIGN(DeviceRunner* const model, runner());
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
  CF_TRY_ASSIGN(DeviceRunner* const model, shared->runner());
  CF_TRY_ASSIGN(std::vector<std::int64_t> taken, shared->take_slots(slots));
  return std::unique_ptr<LeasedRunner>(
      new LeasedRunner(std::move(shared), model->model(), std::move(taken), interrupt));
}

void LeasedRunner::close() {
  shared_->give_slots(slots_);
  slots_.clear();
}

Result<DeviceRunner*> LeasedRunner::shared_runner() const {
  if (slots_.empty())
    return Status::error(Code::invalid_argument, "slots: expected some of the model, got none: close() gave them back");
  return shared_->runner();
}

template <class Pass>
Status LeasedRunner::watched(ModelRunner& model, Pass&& pass) {
  model.check_between([this]() -> Status {
    CF_TRY(interrupt_.check());
    return check_ ? check_() : Status();
  });
  if (visit_) model.watch(visit_);
  const Status ran = pass();
  if (visit_) model.watch({});
  model.check_between({});
  return ran;
}

template <class Pass>
Status LeasedRunner::ordered(DeviceRunner& model, std::uintptr_t stream, Pass&& pass) {
  CF_TRY(model.run_after(stream));
  // What a pass that fails has put onto the device is ordered too: it may write memory that the caller then frees.
  const Status ran = pass(), ended = model.run_before(stream);
  return ran ? ended : ran;
}

template <class Pass>
Status LeasedRunner::extend(std::int64_t slot, std::int64_t first, std::int64_t tokens, Pass&& pass) {
  CF_TRY_ASSIGN(DeviceRunner* const model, shared_runner());
  CF_TRY(lengths_.check(slot, first, tokens));
  CF_TRY(interrupt_.check());
  CF_TRY(watched(*model, [&] { return pass(*model, shared_slot(slot)); }));
  lengths_.set(slot, first + tokens);
  return {};
}

Status LeasedRunner::prefill(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids) {
  return extend(slot, first, std::int64_t(ids.size()),
                [&](DeviceRunner& model, std::int64_t at) { return model.prefill(at, first, ids); });
}

Status LeasedRunner::forward(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids,
                             AnyView<2> logits) {
  return extend(slot, first, std::int64_t(ids.size()),
                [&](DeviceRunner& model, std::int64_t at) { return model.forward(at, first, ids, logits); });
}

Status LeasedRunner::forward_on_device(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids,
                                       AnyView<2> logits, std::uintptr_t stream) {
  return extend(slot, first, std::int64_t(ids.size()), [&](DeviceRunner& model, std::int64_t at) {
    return ordered(model, stream, [&] { return model.forward_on_device(at, first, ids, logits); });
  });
}

Status LeasedRunner::step_on_device(std::span<const Token> tokens, AnyView<2> logits, std::uintptr_t stream) {
  CF_TRY_ASSIGN(DeviceRunner* const model, shared_runner());
  return ordered(*model, stream, [&]() -> Status {
    CF_TRY(step(tokens));
    std::vector<std::int64_t> slots;
    for (const Token& t : tokens) slots.push_back(shared_slot(t.slot));
    return model->copy_logits(slots, logits);
  });
}

Status LeasedRunner::step(std::span<const Token> tokens) {
  CF_TRY_ASSIGN(DeviceRunner* const model, shared_runner());
  CF_TRY(lengths_.check_step(tokens));
  CF_TRY(interrupt_.check());
  std::vector<Token> theirs(tokens.begin(), tokens.end());
  for (Token& t : theirs) t.slot = shared_slot(t.slot);
  CF_TRY(watched(*model, [&] { return model->step(theirs); }));
  for (const Token& t : tokens) lengths_.set(t.slot, t.position + 1);
  return {};
}

std::vector<Result<std::int32_t>> LeasedRunner::choose(std::span<const Draw> draws) {
  const Result<DeviceRunner*> model = shared_runner();
  if (!model) return std::vector<Result<std::int32_t>>(draws.size(), model.status());
  std::vector<Draw> theirs(draws.begin(), draws.end());
  for (Draw& d : theirs) d.slot = shared_slot(d.slot);
  return (*model)->choose(theirs);
}

Result<Tensor> LeasedRunner::logits(std::int64_t slot) {
  CF_TRY_ASSIGN(DeviceRunner* const model, shared_runner());
  CF_TRY(lengths_.check(slot, 0, 1));
  return model->logits(shared_slot(slot));
}

Status LeasedRunner::fetch(const SiteTensor& tensor, void* to) {
  CF_TRY_ASSIGN(DeviceRunner* const model, shared_runner());
  return model->fetch(tensor, to);
}

void LeasedRunner::release(std::int64_t slot) {
  lengths_.set(slot, 0);
  if (const Result<DeviceRunner*> model = shared_runner()) (*model)->release(shared_slot(slot));
}

}  // namespace cf::python
