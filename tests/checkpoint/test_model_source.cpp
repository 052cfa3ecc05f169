#include "golden/checkpoint/model_source.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "core/procedural.hpp"
#include "golden/checkpoint/hf_config.hpp"
#include "tests/checkpoint/safetensors_writer.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/taken.hpp"

namespace {

using namespace cf;
using namespace cf::checkpoint;
using namespace cf::test;

const std::string kCheckpoints = CF_DATA_DIR "/checkpoints/";

std::string fault_of(const Status& refused, Code code, std::string_view text) {
  return refusal_fault(refused, code, {text});
}

bool has_values(const LoadedModel& m) {
  bool all = true;
  for_each_model_weight(m.config.spec(), m.weights,
                        [&](const TensorSpec&, const auto& view, const auto&) { all = all && view; });
  return all;
}

/// A small model whose tensors lie in memory, as a source.
struct InMemory {
  ModelConfig config{.name = "small",
                     .hidden_size = 24,
                     .num_hidden_layers = 2,
                     .num_attention_heads = 2,
                     .intermediate_size = 40,
                     .vocab_size = 5,
                     .rotary_dim = 4,
                     .dtype = DType::f32};
  OwnedModelWeights model = procedural_model(config, DType::f32, 7);
  std::vector<TensorEntry> entries{};

  InMemory() {
    for_each_model_weight(config, model.weights, [&](const TensorSpec& spec, const auto& view, auto shape) {
      entries.push_back({.name = std::string(spec.name),
                         .stored_dtype = "F32",
                         .shape = Shape(shape.begin(), shape.end()),
                         .data = view.data,
                         .bytes = view.bytes()});
    });
  }
  ModelSource source(std::shared_ptr<const void> owner = nullptr) const {
    return ModelSource(
        taken(Checkpoint::from_memory(to_hf_json(config), std::nullopt, entries, std::move(owner), "memory")));
  }
};

}  // namespace

TEST_CASE("model source: a preset's weights are those of its seed, layer by layer and whole", "[source]") {
  for (const WeightFormat& linears : {WeightFormat{}, WeightFormat{.bits = 4, .group_size = 32}}) {
    const ModelSource source =
        taken(ModelSource::open({.preset = "pythia-14m", .dtype = DType::bf16, .linears = linears, .seed = 3}));
    CHECK_FALSE(source.is_checkpoint());
    CHECK(source.linears().bits == linears.bits);
    CHECK(source.description() ==
          (linears.bits ? "procedural GPTQ of 4 bits, group 32, seed 3" : "procedural weights, seed 3"));
    const ModelConfig& m = source.config();
    CHECK(m.dtype == DType::bf16);
    const LoadedLayer layer = taken(source.layer(2));
    CHECK(layer.dtype == DType::bf16);
    CHECK(layer.notes.empty());
    CHECK(weights_checksum(m.spec(), layer.weights) ==
          weights_checksum(m.spec(), procedural_layer(m, DType::bf16, 2, 3, linears).weights));

    LoadedModel model = taken(source.outline());
    const std::int64_t bytes = model.bytes();
    CHECK_FALSE(has_values(model));
    std::vector<std::int64_t> told;
    REQUIRE(source.fill(model, [&](std::int64_t made, std::int64_t all) {
      CHECK(all == bytes);
      told.push_back(made);
      return Status();
    }));
    CHECK(has_values(model));
    CHECK(std::is_sorted(told.begin(), told.end()));
    CHECK(told.back() == bytes);
    CHECK(model.bytes() == bytes);
    CHECK(weights_checksum(m.spec(), model.weights.layers[2]) == weights_checksum(m.spec(), layer.weights));
    CHECK(model.check_files());
    CHECK(model.changes().empty());
  }
  CHECK(taken(ModelSource::open({.preset = "pythia-14m"})).config().dtype == DType::f16);
}

TEST_CASE("model source: an error of the progress ends the making of weights", "[source]") {
  const ModelSource source = taken(ModelSource::open({.preset = "pythia-14m"}));
  LoadedModel model = taken(source.outline());
  int asked = 0;
  const Status ended = source.fill(
      model, [&](auto...) { return ++asked == 2 ? Status::error(Code::io_error, "interrupted") : Status(); });
  CHECK(ended.message() == "interrupted");
  CHECK(asked == 2);
  CHECK_FALSE(model.owner);
}

TEST_CASE("model source: a checkpoint is opened once, and gives layers and the whole model", "[source]") {
  const std::string directory = kCheckpoints + "neox-gptq-sym";
  const ModelSource source = taken(ModelSource::open({.directory = directory, .preset = "none such"}));
  const Checkpoint checkpoint = taken(Checkpoint::open(directory));
  CHECK(source.is_checkpoint());
  CHECK(source.linears().bits == 4);
  CHECK(source.description() == "checkpoint " + directory + ", " + describe(source.linears()));
  CHECK(source.check_files());
  CHECK(source.changes().empty());
  const LoadedModel model = taken(source.load());
  CHECK(model.description == source.description());
  CHECK(model.checkpoint);
  CHECK(model.check_files());
  const ModelSpec spec = source.config().spec();
  CHECK(weights_checksum(spec, model.weights) == weights_checksum(spec, taken(checkpoint.model()).weights));
  CHECK(weights_checksum(spec, taken(source.layer(0)).weights) ==
        weights_checksum(spec, taken(checkpoint.layer(0)).weights));
}

TEST_CASE("model source: a model whose values were dropped keeps its sizes", "[source]") {
  for (const char* name : {"neox-d80", "neox-tied", "neox-gptq-sym"}) {
    CAPTURE(name);
    LoadedModel loaded = taken(taken(ModelSource::open({.directory = kCheckpoints + name})).load());
    const std::int64_t bytes = loaded.bytes();
    CHECK(bytes > 0);
    loaded.drop_values();
    CHECK(loaded.bytes() == bytes);
    CHECK_FALSE(loaded.owner);
    CHECK_FALSE(loaded.checkpoint);
    for_each_model_weight(loaded.config.spec(), loaded.weights,
                          [](const TensorSpec&, const auto& view, const auto&) { CHECK(!view); });
    CHECK(std::get<DenseWeight>(loaded.weights.embed_out.weight).weight.shape == loaded.weights.embed_in.shape);
  }
}

TEST_CASE("model source: tensors in memory are kept by the weights' owner alone", "[source]") {
  const InMemory tensors;
  auto owner = std::make_shared<int>();
  LoadedModel model = taken(tensors.source(owner).load());
  CHECK_FALSE(model.checkpoint);
  CHECK(model.weights.embed_in.data == tensors.model.weights.embed_in.data);
  CHECK(owner.use_count() > 1);
  model.owner.reset();
  CHECK(owner.use_count() == 1);
}

TEST_CASE("model source: a name that there is not, a missing tensor and a NaN are refused", "[bad][source]") {
  CHECK(fault_of(ModelSource::open({.preset = "pythia-1m"}).status(), Code::not_found, "pythia-14m") == "");
  CHECK(fault_of(ModelSource::open({.directory = "/none/such"}).status(), Code::not_found, "/none/such") == "");

  InMemory damaged;
  const auto entry = std::find_if(damaged.entries.begin(), damaged.entries.end(), [](const TensorEntry& t) {
    return t.name == "gpt_neox.layers.1.mlp.dense_h_to_4h.bias";
  });
  REQUIRE(entry != damaged.entries.end());
  static_cast<float*>(const_cast<void*>(entry->data))[2] = std::numeric_limits<float>::quiet_NaN();
  const ModelSource with_nan = damaged.source();
  CHECK(with_nan.layer(0));
  CHECK(with_nan.outline());
  for (const Status& refused : {with_nan.layer(1).status(), with_nan.load().status()})
    CHECK(fault_of(refused, Code::invalid_file, "layers.1.mlp.dense_h_to_4h.bias") == "");

  damaged.entries.erase(entry);
  const ModelSource lacking = damaged.source();
  CHECK(lacking.layer(0));
  for (const Status& refused : {lacking.layer(1).status(), lacking.outline().status(), lacking.load().status()})
    CHECK(fault_of(refused, Code::invalid_file, "layers.1.mlp.dense_h_to_4h.bias") == "");
}

TEST_CASE("model source: heads and formats in words", "[source]") {
  ModelConfig m = taken(find_preset("pythia-14m"));
  CHECK(heads_of(m) == "4");
  CHECK(heads_of(taken(find_preset("llama-3.1-8b"))) == "32 over 8 key and value heads");
  CHECK(describe({}) == "");
  CHECK(describe({.bits = 4, .group_size = 128}) == "GPTQ of 4 bits, group 128");
  CHECK(describe({.bits = 8, .group_size = -1}) == "GPTQ of 8 bits, one group");
  const std::vector<std::string> names = preset_names();
  CHECK(names.size() == presets().size());
  CHECK(std::find(names.begin(), names.end(), "pythia-2.8b") != names.end());
}
