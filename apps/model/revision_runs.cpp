#include "apps/model/revision_runs.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "core/resources.hpp"
#include "golden/checkpoint/generation_config.hpp"

namespace cf::apps {

void RevisionReader::begin(const std::string& directory) {
  coming_ = std::async(std::launch::async, [this, directory] { return read(directory); });
}

std::optional<ReadRevision> RevisionReader::wait(const ModelRunner::Check& check) {
  while (coming_.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready)
    if (!check()) return std::nullopt;
  return coming_.get();
}

ReadRevision RevisionReader::read(const std::string& directory) const {
  const auto begun = std::chrono::steady_clock::now();
  ReadRevision made;
  const auto work = [&]() -> Status {
    const auto go_on = [&] { return stop_ ? Status::error(Code::io_error, "interrupted") : Status(); };
    const int threads = int(std::clamp(std::thread::hardware_concurrency(), 1u, 4u));
    CF_TRY_ASSIGN(made.identity, checkpoint::identify(directory, threads, go_on));
    CF_TRY_ASSIGN(const checkpoint::ModelSource source, checkpoint::ModelSource::open({.directory = directory}));
    CF_TRY_ASSIGN(made.loaded, source.outline());
    if (runs_on_host_) {
      const auto needed = double(made.loaded.bytes());
      CF_TRY(check_total_memory(needed, source.config().name + ": the weights need " + gigabytes(needed)));
    }
    CF_TRY(source.fill(made.loaded, [&](std::int64_t, std::int64_t) { return go_on(); }));
    CF_TRY_ASSIGN(checkpoint::GenerationConfig generation, checkpoint::read_generation_config(directory));
    made.eos_token_ids = std::move(generation.eos_token_ids);
    return {};
  };
  made.status = work();
  made.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  return made;
}

Status RevisionRunner::take(checkpoint::LoadedModel loaded) {
  if (!on_gpu()) {
    running_.loaded = std::move(loaded);
    return {};
  }
  if (!running_.device) {
    CF_TRY_ASSIGN(DeviceTimer device, DeviceTimer::create());
    running_.device = std::make_shared<DeviceTimer>(std::move(device));
  }
  if (shared_) {
    CF_TRY_ASSIGN(ModelRunner* const runner, shared_->runner());
    Status swapped = runner->swap_weights(loaded.config.spec(), loaded.weights, loaded.owner);
    // A model of another config is made anew.
    const bool is_other = swapped.code() == Code::invalid_argument || swapped.code() == Code::unimplemented;
    if (swapped) swapped = loaded.check_files();
    if (!swapped) close();
    if (!is_other) CF_TRY(swapped);
  }
  running_.loaded = std::move(loaded);
  if (!shared_) {
    CF_TRY(start_model(options_, slots_, capacity_, running_));
    shared_ = std::make_shared<SharedRunner>(std::move(running_.model));
  }
  running_.loaded.drop_values();
  return {};
}

Result<std::shared_ptr<SlotLease>> RevisionRunner::lease(std::int64_t slots, std::int64_t capacity) {
  if (on_gpu()) {
    CF_TRY_ASSIGN(ModelRunner* const runner, shared_->runner());
    runner->check_between(check_);
    return SlotLease::create(shared_, std::min(slots, shared_->free_slots()));
  }
  CF_TRY(check_host_memory(options_, slots, capacity, config()));
  CF_TRY(start_model(options_, slots, capacity, running_));
  running_.model->check_between(check_);
  return SlotLease::of_all(std::move(running_.model));
}

Status RevisionRunner::check() const {
  CF_TRY(running_.loaded.check_files());
  return check_();
}

}  // namespace cf::apps
