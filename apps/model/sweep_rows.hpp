#pragma once
// The rows of a sweep over revisions, and the files that hold them: those of cf_ops.sweep.
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/status.hpp"
#include "golden/checkpoint/revisions.hpp"

namespace cf::apps {

/// What was read and measured of a revision.
struct SweepRow {
  checkpoint::Revision revision;
  std::string directory{};
  std::vector<std::pair<std::string, double>> metrics{};  // by name, in the order that they were asked for
  double load_s = 0;                                      // in which it was read, beside the one before
  double swap_s = 0;                                      // until the model had its weights
  double run_s = 0;                                       // until it was measured

  /// Whether anything is known of it.
  bool is_done() const { return revision.error || !revision.identity.sha256.empty(); }
  /// A metric's value, or null.
  const double* find(const std::string& metric) const;
  /// A line for a person.
  std::string in_words() const;
};

/// The names of all metrics, in the order of the rows.
std::vector<std::string> metrics_of(std::span<const SweepRow> rows);

/// What is wrong with the rows' revisions.
std::vector<checkpoint::RevisionFault> faults_of(std::span<const SweepRow> rows);

/// A row as JSON, with the names of cf_ops.Revision.
nlohmann::ordered_json json_of(const SweepRow& row);

/// The rows without an error that lie in a file of JSON, by name; none where there is no such file. Refuses a file
/// whose members `about` are others, and rows of another form.
Result<std::map<std::string, SweepRow>> read_rows(const std::string& path, const nlohmann::ordered_json& about);

/// The table of cf_ops.Sweep.to_csv(): revision, step, each metric, sha256, directory, error.
std::string csv_of(std::span<const SweepRow> rows);

}  // namespace cf::apps
