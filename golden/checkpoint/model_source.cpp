#include "golden/checkpoint/model_source.hpp"

#include <utility>

#include "core/resources.hpp"

namespace cf::checkpoint {
namespace {

/// Where a file or tensor is missing inside a checkpoint, the checkpoint is invalid; it is not "not found".
Status fault_of(const Status& loaded) {
  return loaded.code() == Code::not_found ? Status::error(Code::invalid_file, loaded.message()) : loaded;
}

WeightFormat format_of(const Checkpoint& checkpoint) {
  if (const auto& gptq = checkpoint.gptq()) return {.bits = gptq->bits, .group_size = gptq->group_size};
  if (const auto& fp8 = checkpoint.fp8())
    return {.bits = 8, .group_size = fp8->scales == Fp8Scales::block ? kFp8Block : -1, .is_fp8 = true};
  return {};
}

}  // namespace

std::int64_t LoadedModel::bytes() const {
  const ModelSpec spec = config.spec();
  return weight_bytes(spec, weights) + packed_bytes(spec, weights);
}

Status LoadedModel::check_files() const { return checkpoint ? checkpoint->check_files() : Status(); }

std::vector<std::string> LoadedModel::changes() const {
  return checkpoint ? checkpoint->changes() : std::vector<std::string>();
}

void LoadedModel::drop_values() {
  const ModelSpec spec = config.spec();
  for_each_model_weight(spec, weights, [](const TensorSpec&, auto& view, const auto&) { view.data = nullptr; });
  for (LayerWeights& layer : weights.layers)
    for_each_linear(spec, layer, [&](const Site&, LinearParams& l, const LinearSize&) {
      if (auto* packed = std::get_if<PackedWeight>(&l.weight)) packed->data.data = nullptr;
    });
  tie_embeddings(spec, weights);
  owner.reset();
  checkpoint.reset();
}

ModelSource::ModelSource(ModelConfig preset, WeightFormat linears, std::uint64_t seed)
    : config_(std::move(preset)), linears_(linears), seed_(seed) {}

ModelSource::ModelSource(Checkpoint checkpoint)
    : config_(checkpoint.config()), linears_(format_of(checkpoint)), checkpoint_(std::move(checkpoint)) {}

Result<ModelSource> ModelSource::open(const ModelChoice& choice) {
  if (!choice.directory.empty()) {
    CF_TRY_ASSIGN(Checkpoint opened, Checkpoint::open(choice.directory));
    return ModelSource(std::move(opened));
  }
  CF_TRY_ASSIGN(ModelConfig preset, find_preset(choice.preset));
  preset.dtype = choice.dtype.value_or(preset.dtype);
  return ModelSource(std::move(preset), choice.linears, choice.seed);
}

std::string ModelSource::description() const {
  const bool is_stored_fp8 = checkpoint_ && checkpoint_->fp8();
  const std::string format = is_stored_fp8 ? describe_fp8(*checkpoint_->fp8()) : describe(linears_);
  if (checkpoint_) return "checkpoint " + checkpoint_->directory() + (format.empty() ? "" : ", " + format);
  return "procedural " + (format.empty() ? "weights" : format) + ", seed " + std::to_string(seed_);
}

Status ModelSource::check_files() const { return checkpoint_ ? checkpoint_->check_files() : Status(); }

std::vector<std::string> ModelSource::changes() const {
  return checkpoint_ ? checkpoint_->changes() : std::vector<std::string>();
}

Result<LoadedLayer> ModelSource::layer(std::int64_t index) const {
  if (!checkpoint_) {
    auto owned = std::make_shared<OwnedLayerWeights>(procedural_layer(config_, config_.dtype, index, seed_, linears_));
    return LoadedLayer{.weights = owned->weights, .dtype = config_.dtype, .owner = owned};
  }
  Result<CheckpointLayer> loaded = checkpoint_->layer(index);
  CF_TRY(fault_of(loaded.status()));
  CF_TRY(checkpoint_->check_finite(*loaded));
  return LoadedLayer{.weights = std::move(loaded->weights),
                     .dtype = loaded->dtype,
                     .owner = std::move(loaded->storage),
                     .notes = std::move(loaded->notes)};
}

Result<LoadedModel> ModelSource::outline() const {
  if (!checkpoint_)
    return LoadedModel{.config = config_,
                       .weights = outline_model(config_.spec(), config_.dtype, linears_),
                       .description = description()};
  Result<CheckpointModel> model = checkpoint_->model();
  CF_TRY(fault_of(model.status()));
  LoadedModel loaded{.config = config_,
                     .weights = std::move(model->weights),
                     .description = description(),
                     .notes = std::move(model->notes)};
  loaded.config.dtype = model->dtype;
  for (const Tensor& copy : model->storage->copies) loaded.copied_bytes += std::int64_t(copy.size_bytes());
  loaded.owner = std::move(model->storage);
  if (!checkpoint_->in_memory()) loaded.checkpoint = checkpoint_;
  return loaded;
}

Status ModelSource::fill(LoadedModel& outline, const WeightsProgress& progress) const {
  if (checkpoint_) {
    CheckpointModel model;
    model.weights = outline.weights;
    model.dtype = outline.config.dtype;
    return checkpoint_->check_finite(model, progress);
  }
  const auto needed = double(outline.bytes());
  CF_TRY(check_free_memory(needed, config_.name + ": the weights need " + gigabytes(needed)));
  CF_TRY_ASSIGN(OwnedModelWeights made,
                procedural_model(config_.spec(), config_.dtype, seed_, linears_,
                                 progress ? progress : WeightsProgress([](auto...) { return Status(); })));
  auto owned = std::make_shared<OwnedModelWeights>(std::move(made));
  outline.weights = owned->weights;
  outline.owner = std::move(owned);
  return {};
}

Result<LoadedModel> ModelSource::load(const WeightsProgress& progress) const {
  CF_TRY_ASSIGN(LoadedModel loaded, outline());
  CF_TRY(fill(loaded, progress));
  return loaded;
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const ModelConfig& m : presets()) names.push_back(m.name);
  return names;
}

std::string heads_of(const ModelConfig& m) {
  const std::string heads = std::to_string(m.num_attention_heads);
  if (m.kv_heads() == m.num_attention_heads) return heads;
  return heads + " over " + std::to_string(m.kv_heads()) + " key and value heads";
}

std::string describe(const WeightFormat& linears) {
  if (linears.bits == 0) return "";
  if (linears.is_fp8)
    return std::string("fp8 (e4m3), a scale for ") +
           (linears.group_size == -1 ? "a row" : std::to_string(linears.group_size) + " inputs of a row");
  const std::string bits = "GPTQ of " + std::to_string(linears.bits) + " bits, ";
  return bits + (linears.group_size == -1 ? "one group" : "group " + std::to_string(linears.group_size));
}

}  // namespace cf::checkpoint
