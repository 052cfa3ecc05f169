#pragma once
// What the commands of cf-model share: the model that they run, and its prompts.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/cli/options.hpp"
#include "apps/verify/model_source.hpp"
#include "core/status.hpp"
#include "cpu_ref/model.hpp"

namespace cf::apps {

inline constexpr std::int64_t kMaxSlots = 64, kMaxCapacity = 1 << 20;

/// The options that choose a model and how it runs.
struct ModelOptions {
  ModelChoice choice;
  std::string quant;
  std::optional<std::int64_t> group;  // with quant
  std::optional<DType> activation;
  std::int64_t threads = 1;
  std::int64_t chunk = 512;
};

/// Declares --model, --preset, --dtype, --quant, --group and --weights-seed; with `runs` --activation, --chunk and
/// --threads, too.
void declare_model(CommandLine& line, ModelOptions& o, bool runs = true);

/// What the options say beside each other.
ModelChoice choice_of(const ModelOptions& o);

/// A model that runs, with its weights.
struct RunningModel {
  LoadedModel loaded;
  std::unique_ptr<cpu_ref::Model> model;
};

/// Loads the model and takes memory for its cache and activations. Prints the checkpoint's notes, and on a line of
/// stderr that positions go beyond max_position_embeddings. Refuses what load_model() and Model::create() refuse, and
/// what the machine's free memory does not hold.
Result<RunningModel> open_model(const ModelOptions& o, std::int64_t slots, std::int64_t capacity);

/// The prompts of --prompt-ids: "1,2,3", several separated by ";", or a .npy file of token ids whose rows are prompts.
Result<std::vector<std::vector<std::int32_t>>> parse_prompts(const std::string& text);

}  // namespace cf::apps
