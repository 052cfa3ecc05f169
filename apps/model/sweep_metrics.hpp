#pragma once
// What a sweep measures of each revision.
#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/model/revision_runs.hpp"
#include "apps/model/sequences.hpp"
#include "apps/model/text_score.hpp"
#include "core/status.hpp"

namespace cf::apps {

inline constexpr const char *kPerplexity = "perplexity", *kSurprisal = "surprisal", *kMemorization = "memorization";

/// The name of a path's last folder.
std::string folder_of(std::string path);

struct SweepMetricsOptions {
  std::vector<std::string> names{};  // of metrics, in their order
  std::string tokens{};              // a text for perplexity and surprisal
  std::int64_t context = 2048;
  std::optional<std::int64_t> stride{}, limit{};
  std::string sequences{}, id_type = "uint16";  // for memorization
  std::optional<std::int64_t> row{}, count{};
  std::int64_t slots = kSlots;  // sequences at once
  std::string per_token{};      // a folder for the surprisal of each id; none where it is empty
};

/// The metrics of `cf_ops sweep` by their names there:
///   perplexity, perplexity.error     exp of the mean of -log p of each scored id, and its standard error
///   surprisal.mean, surprisal.std    the mean of -log p, in nats, and its deviation
///   memorization.accuracy, .exact    the share of equal ids among the 32 behind 32 that are given, and of sequences
///                                    all of whose ids are equal
class SweepMetrics {
 public:
  /// Reads the ids. Refuses files that hold no such ids, and a folder that cannot be made.
  static Result<SweepMetrics> open(SweepMetricsOptions options);

  /// What the results depend on beside the weights: checksums of the ids, and sizes.
  nlohmann::ordered_json settings() const;
  /// The most slots and entries that a metric needs.
  std::int64_t slots() const;
  std::int64_t capacity() const;

  using Measured = std::vector<std::pair<std::string, double>>;
  /// Measures the runner's weights. Ids of `never` are not chosen. Refuses ids outside the vocabulary and a text that
  /// has the probability 0.
  Result<Measured> measure(RevisionRunner& runner, const std::string& revision, std::vector<std::int32_t> never);

 private:
  /// -log p of each id; NaN where it is scored in no window.
  Result<std::vector<double>> surprisal(RevisionRunner& runner, const std::string& revision) const;
  Status add_memorization(RevisionRunner& runner, const std::string& revision, std::vector<std::int32_t> never,
                          Measured& measured);
  Status write_per_token(const std::string& revision, const std::vector<double>& nats) const;
  std::int64_t context() const { return std::min(options_.context, std::int64_t(ids_.size())); }

  SweepMetricsOptions options_;
  std::vector<std::int32_t> ids_;
  std::vector<Window> windows_;
  std::optional<Sequences> sequences_;
  std::int64_t count_ = 0;
  std::string ids_sha256_, sequences_sha256_;
};

}  // namespace cf::apps
