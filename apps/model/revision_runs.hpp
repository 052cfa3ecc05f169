#pragma once
// The revisions of a model, one after the other: read by a thread while the one before runs, then run.
#include <atomic>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/model/common.hpp"
#include "core/model/runner.hpp"
#include "core/model/slot_lease.hpp"
#include "core/status.hpp"
#include "golden/checkpoint/model_source.hpp"
#include "golden/checkpoint/revisions.hpp"

namespace cf::apps {

/// A revision that was read, or why it was not.
struct ReadRevision {
  Status status{};
  checkpoint::Identity identity{};  // also where the weights are refused
  checkpoint::LoadedModel loaded{};
  std::vector<std::int32_t> eos_token_ids{};
  double seconds = 0;
};

/// Reads one revision after the other in a thread: takes its checksums, maps its weights and looks at their values,
/// which brings them into the system's cache. Its end waits for no more than a piece of that.
class RevisionReader {
 public:
  /// Weights that the host runs must fit into its memory.
  explicit RevisionReader(bool runs_on_host) : runs_on_host_(runs_on_host) {}
  RevisionReader(const RevisionReader&) = delete;
  RevisionReader& operator=(const RevisionReader&) = delete;
  ~RevisionReader() { stop_ = true; }

  void begin(const std::string& directory);
  /// What begin() has begun, once it is there; nothing where `check` ends the wait.
  std::optional<ReadRevision> wait(const ModelRunner::Check& check);

 private:
  ReadRevision read(const std::string& directory) const;

  bool runs_on_host_;
  std::atomic<bool> stop_ = false;
  std::future<ReadRevision> coming_;  // ends first: its thread reads the members above
};

/// What runs the revisions: on a GPU one model whose weights are replaced, which keeps its memory; on the CPU a model
/// that reads the mapped weights, for each lease.
class RevisionRunner {
 public:
  /// `slots` and `capacity` are those of a GPU's model. `check` ends long calls.
  RevisionRunner(const ModelOptions& options, std::int64_t slots, std::int64_t capacity, ModelRunner::Check check)
      : options_(options), slots_(slots), capacity_(capacity), check_(std::move(check)) {}

  /// Takes a revision's weights. The slots of the one before must be given back.
  Status take(checkpoint::LoadedModel loaded);
  /// Slots of a model with these weights: at most so many, with room for so many entries.
  Result<std::shared_ptr<SlotLease>> lease(std::int64_t slots, std::int64_t capacity);
  const ModelConfig& config() const { return running_.loaded.config; }
  /// Whether work may go on: the files are whole, and nothing has ended it.
  Status check() const;
  bool on_gpu() const { return options_.cuda(); }
  /// Gives a GPU's memory back.
  void close() { shared_.reset(); }

 private:
  const ModelOptions& options_;
  std::int64_t slots_, capacity_;
  ModelRunner::Check check_;
  RunningModel running_{};
  std::shared_ptr<SharedRunner> shared_;  // on a GPU
};

}  // namespace cf::apps
