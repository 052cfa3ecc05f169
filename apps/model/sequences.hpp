#pragma once
// Sequences of ids in a file, and how a model continues them.
#include <cstdint>
#include <fstream>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/model/memorizer.hpp"
#include "core/status.hpp"

namespace cf::apps {

/// The sequences of a file, equally long. A .npy file is read whole, any other by its parts.
class Sequences {
 public:
  /// `row`: the ids of a sequence, where the file does not say. `type`: of the ids in a file that is no .npy file.
  static Result<Sequences> open(const std::string& path, std::optional<std::int64_t> row, const std::string& type);

  std::int64_t count() const { return count_; }
  std::int64_t length() const { return length_; }
  /// The first `ids` ids of a sequence.
  Result<std::vector<std::int32_t>> read(std::int64_t number, std::int64_t ids);

 private:
  std::string path_;
  std::int64_t count_ = 0, length_ = 0;
  std::vector<std::int32_t> ids_;  // of a .npy file
  std::ifstream file_;             // any other one
  std::size_t id_bytes_ = 0;
};

/// Continues the sequences [begin, end) of so many ids, of which up to `slots` run at once, and calls `put` with those
/// that have ended, after each step.
Status continue_sequences(Memorizer& memorizer, Sequences& sequences, std::int64_t begin, std::int64_t end,
                          std::int64_t ids, std::int64_t slots,
                          const std::function<Status(std::span<const Memorized>)>& put);

}  // namespace cf::apps
