#include "apps/verify/model_source.hpp"

#include <fmt/format.h>
#include <utility>

#include "apps/cli/terminal.hpp"
#include "core/procedural.hpp"
#include "core/resources.hpp"
#include "golden/checkpoint/checkpoint.hpp"

namespace cf::apps {

std::int64_t LoadedModel::bytes() const { return weight_bytes(config.spec(), weights); }

Status LoadedModel::check_files() const { return checkpoint ? checkpoint->check_files() : Status(); }

std::vector<std::string> LoadedModel::changes() const {
  return checkpoint ? checkpoint->changes() : std::vector<std::string>();
}

void LoadedModel::drop_values() {
  const ModelSpec spec = config.spec();
  for_each_model_weight(spec, weights, [](const TensorSpec&, auto& view, const auto&) { view.data = nullptr; });
  tie_embeddings(spec, weights);
  owner.reset();
  checkpoint.reset();
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const ModelConfig& m : presets()) names.push_back(m.name);
  return names;
}

Result<ModelConfig> config_of(const ModelChoice& choice) {
  if (!choice.directory.empty()) {
    CF_TRY_ASSIGN(const checkpoint::Checkpoint opened, checkpoint::Checkpoint::open(choice.directory));
    return opened.config();
  }
  CF_TRY_ASSIGN(ModelConfig preset, find_preset(choice.preset));
  preset.dtype = choice.dtype.value_or(preset.dtype);
  return preset;
}

Result<LoadedModel> outline_of(const ModelChoice& choice) {
  if (!choice.directory.empty()) {
    CF_TRY_ASSIGN(const checkpoint::Checkpoint opened, checkpoint::Checkpoint::open(choice.directory));
    CF_TRY_ASSIGN(checkpoint::CheckpointModel model, opened.model());
    const auto& gptq = opened.gptq();
    const std::string format = describe(gptq ? WeightFormat{gptq->bits, gptq->group_size} : WeightFormat{});
    LoadedModel loaded{.config = opened.config(),
                       .weights = std::move(model.weights),
                       .dtype = model.dtype,
                       .owner = std::move(model.storage),
                       .description = "checkpoint " + choice.directory + (format.empty() ? "" : ", " + format),
                       .notes = std::move(model.notes),
                       .checkpoint = opened};
    loaded.config.dtype = model.dtype;
    return loaded;
  }
  CF_TRY_ASSIGN(const ModelConfig config, config_of(choice));
  const std::string format = describe(choice.linears);
  return LoadedModel{
      .config = config,
      .weights = outline_model(config.spec(), config.dtype, choice.linears),
      .dtype = config.dtype,
      .owner = nullptr,
      .description = fmt::format("procedural {}, seed {}", format.empty() ? "weights" : format, choice.seed)};
}

Status fill_in(const ModelChoice& choice, LoadedModel& loaded) {
  if (!choice.directory.empty()) {
    CF_TRY_ASSIGN(const checkpoint::Checkpoint opened, checkpoint::Checkpoint::open(choice.directory));
    checkpoint::CheckpointModel model;
    model.weights = loaded.weights;
    model.dtype = loaded.dtype;
    return opened.check_finite(model);
  }
  const double needed = double(loaded.bytes());
  CF_TRY(check_free_memory(needed, loaded.config.name + ": the weights need " + gigabytes(needed)));
  Progress progress("making the weights of " + loaded.config.name, loaded.bytes());
  CF_TRY_ASSIGN(OwnedModelWeights made, procedural_model(loaded.config.spec(), loaded.dtype, choice.seed,
                                                         choice.linears, [&](std::int64_t bytes, std::int64_t) {
                                                           progress.set(bytes);
                                                           return Status();
                                                         }));
  auto owned = std::make_shared<OwnedModelWeights>(std::move(made));
  loaded.weights = owned->weights;
  loaded.owner = std::move(owned);
  return {};
}

Result<LoadedModel> load_model(const ModelChoice& choice) {
  CF_TRY_ASSIGN(LoadedModel loaded, outline_of(choice));
  CF_TRY(fill_in(choice, loaded));
  return loaded;
}

std::string heads_of(const ModelConfig& m) {
  if (m.kv_heads() == m.num_attention_heads) return std::to_string(m.num_attention_heads);
  return fmt::format("{} over {} key and value heads", m.num_attention_heads, m.kv_heads());
}

std::string describe(const WeightFormat& linears) {
  if (linears.bits == 0) return "";
  if (linears.group_size == -1) return fmt::format("GPTQ of {} bits, one group", linears.bits);
  return fmt::format("GPTQ of {} bits, group {}", linears.bits, linears.group_size);
}

}  // namespace cf::apps
