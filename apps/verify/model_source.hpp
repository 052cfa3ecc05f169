#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/model/config.hpp"
#include "core/model/weights.hpp"
#include "core/status.hpp"
#include "golden/checkpoint/checkpoint.hpp"

namespace cf::apps {

/// Where a program's model comes from.
struct ModelChoice {
  std::string directory;       // of a checkpoint; where it is empty, the preset counts
  std::string preset;          // with procedural weights
  std::optional<DType> dtype;  // of a preset's weights
  WeightFormat linears{};      // a preset's quantisation
  std::uint64_t seed = 0;      // of a preset's weights
};

/// A whole model in memory. A checkpoint's weights lie in its mapped files.
struct LoadedModel {
  ModelConfig config;
  ModelWeights weights;
  DType dtype = DType::f16;                            // of every weight that is not quantised
  std::shared_ptr<const void> owner;                   // of the weights' memory
  std::string description;                             // "checkpoint DIR, GPTQ of 4 bits, group 128"
  std::vector<std::string> notes{};                    // of the checkpoint
  std::optional<checkpoint::Checkpoint> checkpoint{};  // while the weights lie in its files

  /// The bytes of all weights.
  std::int64_t bytes() const;
  /// What the checkpoint says of its files.
  Status check_files() const;
  std::vector<std::string> changes() const;
  /// Gives the weights' memory back. Formats, dtypes and shapes stay, and every view's pointer is null.
  void drop_values();
};

/// The names of all presets.
std::vector<std::string> preset_names();

/// The config of a choice, without its weights. Refuses what Checkpoint::open() and find_preset() refuse.
Result<ModelConfig> config_of(const ModelChoice& choice);

/// Loads all weights. Refuses besides: a weight that is NaN or infinite, and procedural weights that the machine's free
/// memory does not hold.
Result<LoadedModel> load_model(const ModelChoice& choice);

/// The same without the values: of a preset formats, dtypes and shapes, and null pointers. A checkpoint is loaded, but no
/// weight is looked at that need not be joined or cast.
Result<LoadedModel> outline_of(const ModelChoice& choice);
/// Makes load_model()'s result of outline_of()'s.
Status fill_in(const ModelChoice& choice, LoadedModel& outline);

/// The heads in words: "32", or "32 over 8 key and value heads".
std::string heads_of(const ModelConfig& m);

/// The format in words, such as "GPTQ of 4 bits, group 128". Dense weights give an empty text.
std::string describe(const WeightFormat& linears);

}  // namespace cf::apps
