#pragma once
// The commands of cf-model: each declares its options on a subcommand's line, then runs.
#include <cstdint>
#include <string>
#include <vector>

#include "apps/cli/options.hpp"
#include "apps/model/common.hpp"
#include "apps/model/sweep_metrics.hpp"
#include "apps/model/sweep_rows.hpp"
#include "core/model/draft.hpp"
#include "core/sampling.hpp"

namespace cf::apps {

/// Continues prompts and prints ids or text as they come.
class Generate {
 public:
  explicit Generate(CommandLine& line);
  int run(const std::string& command);

 private:
  ModelOptions model_;
  Sampling sampling_;
  std::string prompt_, prompt_ids_, stop_, draft_, json_;
  std::vector<std::vector<std::int32_t>> prompts_;
  std::vector<std::int32_t> stop_ids_;
  std::optional<std::int64_t> slots_, capacity_;
  std::int64_t max_new_tokens_ = 32, top_k_ = 0, draft_len_ = kMostDraft;
  bool print_ids_ = false, check_ = false, processes_ = false;
};

/// Continues one prompt without end, in memory that does not grow.
class Stream {
 public:
  explicit Stream(CommandLine& line);
  int run(const std::string& command);

 private:
  ModelOptions model_;
  Sampling sampling_;
  std::string prompt_ids_, stop_ = "none", json_;
  std::vector<std::int32_t> prompt_, stop_ids_;
  std::optional<std::int64_t> max_new_tokens_;
  std::int64_t top_k_ = 0, every_ = 1000;
  bool print_ids_ = false;
};

/// Perplexity over a text's ids, and how far a model is from a reference.
class Evaluate {
 public:
  explicit Evaluate(CommandLine& line);
  int run(const std::string& command);

 private:
  /// The ids of --tokens or --reference. Refuses fewer than two, and ids outside the vocabulary.
  Result<std::vector<std::int32_t>> read_ids(const ModelConfig& config);

  ModelOptions model_;
  std::string tokens_, reference_, json_, feed_ = "token";
  std::int64_t context_ = 2048;
  std::optional<std::int64_t> stride_, limit_, slots_;
  bool oracle_ = false;
};

/// How much of its training data a model continues word for word.
class Memorize {
 public:
  explicit Memorize(CommandLine& line);
  int run(const std::string& command);

 private:
  ModelOptions model_;
  std::string tokens_, id_type_ = "uint16", never_, csv_, json_;
  std::optional<std::int64_t> row_, count_;
  std::int64_t context_ = 32, continuation_ = 32, first_ = 0, slots_ = kSlots;
  bool exact_only_ = false;
  std::vector<std::int32_t> never_ids_;
};

/// A metric over the revisions of a model.
class Sweep {
 public:
  explicit Sweep(CommandLine& line);
  int run(const std::string& command);

 private:
  /// A row of each revision, with nothing measured.
  std::vector<SweepRow> rows() const;

  ModelOptions model_;
  SweepMetricsOptions options_;
  std::vector<std::string> revisions_;
  std::string model_folder_, json_, csv_;
};

/// Time to first token, time per token and throughput over prompts, outputs and slots; how long a prompt that joins
/// stops the others. Or the time of scores.
class Bench {
 public:
  explicit Bench(CommandLine& line);
  int run(const std::string& command);

 private:
  ModelOptions model_;
  std::string prompt_lens_ = "128", new_tokens_ = "32", slots_ = "1", scored_, json_, csv_;
  std::optional<std::int64_t> texts_, runs_, warmup_, joiner_len_;
  std::vector<std::int64_t> prompts_, outputs_, batches_;  // outputs: new tokens, or ids that are scored
};

/// A model's sizes, bytes and what fits this machine.
class Info {
 public:
  explicit Info(CommandLine& line);
  int run();

 private:
  ModelOptions model_;
  std::optional<std::int64_t> capacity_, gpu_memory_;  // in GB
  bool plan_ = false;
  std::string gpu_ = "h200";
};

}  // namespace cf::apps
