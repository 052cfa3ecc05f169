#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/model/config.hpp"
#include "core/model/weights.hpp"
#include "core/procedural.hpp"
#include "core/status.hpp"
#include "golden/checkpoint/checkpoint.hpp"

namespace cf::checkpoint {

/// Which model is asked for: a checkpoint, or a preset with procedural weights.
struct ModelChoice {
  std::string directory{};       // of a checkpoint; where it is empty, the preset counts
  std::string preset{};          // its name
  std::optional<DType> dtype{};  // of a preset's weights; where there is none, the preset's own
  WeightFormat linears{};        // of a preset's Linears
  std::uint64_t seed = 0;        // of a preset's weights
};

/// A whole model in memory. A checkpoint's weights lie in its mapped files.
struct LoadedModel {
  ModelConfig config;  // its dtype is that of every weight that is not quantised
  ModelWeights weights;
  std::shared_ptr<const void> owner{};     // of the weights' memory; null for an outline
  std::string description{};               // "checkpoint DIR, GPTQ of 4 bits, group 128"
  std::vector<std::string> notes{};        // of the checkpoint
  std::int64_t copied_bytes = 0;           // of a checkpoint's tensors that were joined or cast
  std::optional<Checkpoint> checkpoint{};  // while the weights lie in its files

  /// The bytes of all weights.
  std::int64_t bytes() const;
  /// What the checkpoint says of its files.
  Status check_files() const;
  std::vector<std::string> changes() const;
  /// Gives the weights' memory back. Formats, dtypes and shapes stay, and every view's pointer is null.
  void drop_values();
};

/// One layer's weights in memory, valid as long as a copy of this struct lives.
struct LoadedLayer {
  LayerWeights weights;
  DType dtype = DType::f16;  // of every weight that is not quantised
  std::shared_ptr<const void> owner{};
  std::vector<std::string> notes{};  // of the checkpoint
};

/// Where a model's weights come from: a checkpoint that is opened once, or a preset's name and a seed.
class ModelSource {
 public:
  /// Refuses what Checkpoint::open() and find_preset() refuse.
  static Result<ModelSource> open(const ModelChoice& choice);
  explicit ModelSource(Checkpoint checkpoint);

  const ModelConfig& config() const { return config_; }
  /// The format of the Linears, or of the quantised ones among them. A group_size of -1 is one group of all inputs.
  const WeightFormat& linears() const { return linears_; }
  bool is_checkpoint() const { return checkpoint_.has_value(); }
  /// The weights in words: "checkpoint DIR, GPTQ of 4 bits, group 128", or "procedural weights, seed 0".
  std::string description() const;
  /// What the checkpoint says of its files.
  Status check_files() const;
  std::vector<std::string> changes() const;

  /// A layer's weights. May be called from several threads. Refuses what Checkpoint::layer() refuses, and a weight that
  /// is NaN or infinite. What a checkpoint lacks is Code::invalid_file; not_found stands for the checkpoint itself.
  Result<LoadedLayer> layer(std::int64_t index) const;

  /// The whole model without its values. Of a preset: formats, dtypes and shapes, and null pointers. A checkpoint is
  /// mapped, and no weight is read that need not be joined or cast and is not fp8. Refuses what Checkpoint::model() refuses, as
  /// layer() does.
  Result<LoadedModel> outline() const;
  /// Makes load()'s result of outline()'s. `progress` is told of each tensor that is made, or whose
  /// values were looked at.
  Status fill(LoadedModel& outline, const WeightsProgress& progress = {}) const;
  /// The whole model. Refuses besides what outline() refuses a weight that is NaN or infinite, and procedural weights
  /// that the machine's free memory does not hold.
  Result<LoadedModel> load(const WeightsProgress& progress = {}) const;

 private:
  ModelSource(ModelConfig preset, WeightFormat linears, std::uint64_t seed);

  ModelConfig config_;
  WeightFormat linears_;
  std::uint64_t seed_ = 0;
  std::optional<Checkpoint> checkpoint_;  // empty for procedural weights
};

/// The names of all presets.
std::vector<std::string> preset_names();

/// The heads in words: "32", or "32 over 8 key and value heads".
std::string heads_of(const ModelConfig& m);

/// The format in words, such as "GPTQ of 4 bits, group 128" or "fp8 (e4m3), a scale for a row". Dense weights give an empty text.
std::string describe(const WeightFormat& linears);

}  // namespace cf::checkpoint
