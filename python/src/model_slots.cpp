#include "python/src/model_slots.hpp"

#include "core/model/slot_lengths.hpp"
#include "python/src/arrays.hpp"

namespace cf::python {

ModelSlots::ModelSlots(const Weights& w, const cpu_ref::Model::Options& options)
    : turns_(std::make_shared<Turns>()), spec_(w.config.spec()), activation_(options.activation) {
  if (w.memory != Memory::host)
    refuse(std::string("weights: expected them in the memory of the host, got ") +
           (w.memory == Memory::device ? "a device's" : "none: drop_values() gave it back"));
  std::unique_ptr<cpu_ref::Model> model = take([&]() -> Result<std::unique_ptr<cpu_ref::Model>> {
    const WithoutGil without_gil;
    CF_TRY(cpu_ref::Model::check_memory(w.config.name, w.config, options));
    return cpu_ref::Model::create(w.config, w.weights, w.owner, options);
  }());
  const cpu_ref::ModelBytes bytes = cpu_ref::Model::bytes(w.config, options);
  cache_bytes_ = std::int64_t(bytes.cache);
  workspace_bytes_ = std::int64_t(bytes.workspace);
  check_ = [this, checkpoint = w.checkpoint]() -> Status {
    if (checkpoint) CF_TRY(checkpoint->check_files());
    return interrupt_.check();
  };
  on_cpu_ = model.get();
  capacity_ = model->capacity();
  lease_ = SlotLease::of_all(std::move(model));
}

ModelSlots::ModelSlots(const std::shared_ptr<SharedModel>& shared, std::int64_t slots)
    : shared_(shared),
      turns_(shared, &shared->turns()),
      check_([this] { return interrupt_.check(); }),
      lease_(take(work(*turns_, [&] { return SlotLease::create(shared->runner(), slots); }))),
      spec_(shared->spec()),
      activation_(shared->activation()),
      capacity_(shared->capacity()),
      cache_bytes_(shared->cache_bytes() / shared->slots() * slots),
      workspace_bytes_(shared->workspace_bytes()) {}

void ModelSlots::close() {
  check(look([&] {
    if (shared_) lease_->close();
    return Status();
  }));
}

bool ModelSlots::is_open() {
  return take(look([&]() -> Result<bool> { return !shared_ || lease_->is_open(); }));
}

Result<std::vector<Run>> ModelSlots::runs_of(const ModelRunner& runner, std::span<const Run> runs) const {
  SlotLengths lengths(slots(), capacity_, runner.limit());
  for (std::int64_t slot = 0; slot < slots(); ++slot) lengths.set(slot, runner.length((*lease_)[slot]));
  CF_TRY(lengths.check(runs));
  std::vector<Run> theirs(runs.begin(), runs.end());
  for (Run& r : theirs) r.sequence = (*lease_)[r.sequence];
  return theirs;
}

}  // namespace cf::python
