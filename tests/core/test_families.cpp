// The families' own data: that it is whole, and that a model's tensors follow from it.
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "core/model/config.hpp"
#include "core/model/layer.hpp"
#include "core/model/weights.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;

namespace {

/// A small model of a family.
ModelSpec small_spec(ModelType type) {
  const FamilySpec& family = family_of(type);
  const bool rotates = family.positions == Positions::rope;
  return {.shape = {.hidden_size = 24,
                    .num_layers = 2,
                    .num_heads = 3,
                    .num_kv_heads = 3,
                    .head_dim = 8,
                    .intermediate_size = 40,
                    .vocab_size = 5,
                    .rotary_dim = rotates ? 8 : 0,
                    .max_positions = 16,
                    .qkv_layout = family.qkv_layout,
                    .head_norm = family.head_norm},
          .traits = {.family = type, .norm = family.norm, .positions = family.positions}};
}

/// The names and shapes of a model's tensors: "layers.0.x (2, 3)".
std::vector<std::string> tensors_of(const ModelSpec& m) {
  ModelWeights weights;
  weights.layers.resize(std::size_t(m.shape.num_layers));
  std::vector<std::string> tensors;
  for_each_model_weight(m, weights, [&](const TensorSpec& t, auto&, auto shape) {
    tensors.push_back(std::string(t.name) + " " + to_string(Shape(shape.begin(), shape.end())));
  });
  return tensors;
}

}  // namespace

TEST_CASE("A family's name leads to its type and back", "[families]") {
  for (std::size_t i = 0; i < kFamilies.size(); ++i) {
    const auto type = ModelType(i);
    CHECK(model_type_from_string(to_string(type)) == type);
    CHECK(&family_of(type) == kFamilies[i]);
    CHECK(family_of(type).class_name.find("LM") != std::string_view::npos);
  }
  CHECK_FALSE(model_type_from_string("gemma"));
  CHECK(to_string(ModelType{}) == "gpt_neox");
}

TEST_CASE("A family has every site that its traits ask for, once and in the order of the walk", "[families]") {
  for (const FamilySpec* family : kFamilies) {
    CAPTURE(std::string(family->model_type));
    const ModelNames& names = family->names;
    std::set<std::string_view> modules, taps;
    SiteId last = SiteId::other;
    for (const Site& site : names.sites()) {
      CHECK(site.id > last);
      last = site.id;
      CHECK(modules.insert(site.name).second);
      CHECK(taps.insert(site.tap).second);
    }
    CHECK(names.sites().size() == (family->head_norm ? 10u : 9u));
    CHECK(last == SiteId::dense_4h_to_h);
    CHECK(names.q_norm.name.empty() != family->head_norm);
    CHECK(names.k_norm.name.empty() != family->head_norm);
    CHECK(names.embed_positions.name.empty() == (family->positions == Positions::rope));
    CHECK(names.layers.starts_with(names.base()));
    for (const Site& site : {names.embed_in, names.final_layer_norm}) CHECK(site.name.starts_with(names.base()));
  }
}

TEST_CASE("The parts that checkpoints store of a Linear make up its rows", "[families]") {
  for (std::size_t i = 0; i < kFamilies.size(); ++i) {
    const ModelSpec m = small_spec(ModelType(i));
    for_each_linear(m, LayerWeights{}, [&](const Site& site, const LinearParams&, const LinearSize& size) {
      const StoredParts stored = stored_parts(m, site, size);
      std::set<std::int64_t> rows;
      for (std::size_t part = 0; part < stored.parts.size(); ++part)
        for (std::int64_t r = 0; r < stored.parts[part].rows; ++r) rows.insert(stored.joined_row(part, r));
      CAPTURE(std::string(site.name));
      CHECK(std::int64_t(rows.size()) == size.out);
      CHECK(*rows.begin() == 0);
      CHECK(*rows.rbegin() == size.out - 1);
    });
  }
}

TEST_CASE("Norms of heads and learned positions have weights, and no others have them", "[families]") {
  ModelSpec m = small_spec(ModelType::llama);
  const std::vector<std::string> plain = tensors_of(m);
  m.shape.head_norm = true;
  CHECK(tensors_of(m).size() == plain.size() + 2 * 2);  // without names: the family has none
  m.traits.positions = Positions::learned;
  m.shape.rotary_dim = 0;
  const std::vector<std::string> all = tensors_of(m);
  CHECK(all.size() == plain.size() + 2 * 2 + 1);
  CHECK(all[1] == ".weight (16, 24)");
  CHECK(std::count(all.begin(), all.end(), "model.layers.1..weight (8)") == 2);
}

TEST_CASE("A family's fields have a name each, and those that are read say a key each", "[families]") {
  for (const FamilySpec* family : kFamilies) {
    CAPTURE(std::string(family->model_type));
    std::set<std::string_view> names;
    std::set<ConfigKey> keys;
    for (const ConfigField& field : family->fields) {
      CAPTURE(std::string(field.name));
      CHECK(names.insert(field.name).second);
      if (!is_read(field.use) || field.key == ConfigKey::none) continue;
      CHECK(keys.insert(field.key).second);
      CHECK(family->field(field.key) == &field);
    }
    for (ConfigKey key : {ConfigKey::hidden_size, ConfigKey::num_hidden_layers, ConfigKey::num_attention_heads,
                          ConfigKey::vocab_size, ConfigKey::hidden_act, ConfigKey::max_position_embeddings})
      CHECK(keys.contains(key));
    CHECK(keys.contains(ConfigKey::rope_theta) == (family->positions == Positions::rope));
    CHECK(keys.contains(ConfigKey::rotary_fraction) == (family->positions == Positions::rope));
    CHECK(std::ranges::count(family->activations, family->otherwise<std::string_view>(ConfigKey::hidden_act),
                             &ActivationName::name) == 1);
  }
}

TEST_CASE("What a family has no field for is refused by name", "[families]") {
  const auto refused = [](const char* preset, auto change, std::string_view what) {
    ModelConfig m = *find_preset(preset);
    change(m);
    return test::refusal_fault(m.validate(), Code::invalid_argument, {what});
  };
  using M = ModelConfig;
  const char *neox = "pythia-70m", *llama = "llama-3.2-1b", *qwen2 = "qwen2.5-7b";
  CHECK(refused(
            neox, [](M& m) { m.num_key_value_heads = 4; }, "has no num_key_value_heads of its own, got 4") == "");
  CHECK(refused(
            neox, [](M& m) { m.attention_head_dim = 96; }, "gpt_neox has no head_dim of its own, got 96") == "");
  CHECK(refused(
            neox, [](M& m) { m.rope_scaling.factor = 2; }, "gpt_neox has no scaling of RoPE, got one") == "");
  CHECK(refused(
            neox, [](M& m) { m.hidden_act = Activation::swiglu; }, "with hidden_act silu is not built") == "");
  CHECK(refused(
            neox, [](M& m) { m.mlp_bias = false; }, "expected mlp_bias true in gpt_neox, got false") == "");
  CHECK(refused(
            neox, [](M& m) { m.sliding_window = 9; }, "gpt_neox has no sliding_window, got 9") == "");
  CHECK(refused(
            llama, [](M& m) { m.num_key_value_heads = 0; }, "num_key_value_heads must be 1 to") == "");
  CHECK(refused(
            llama, [](M& m) { m.hidden_act = Activation::gelu_erf; }, "hidden_act gelu is not built") == "");
  CHECK(refused(
            llama, [](M& m) { m.use_parallel_residual = true; },
            "expected use_parallel_residual false in llama, got true") == "");
  CHECK(refused(
            llama, [](M& m) { m.rotary_dim = 32; }, "rotary_dim must be head_dim 64 in llama, got 32") == "");
  CHECK(refused(
            qwen2, [](M& m) { m.attention_bias = false; }, "expected attention_bias true in qwen2, got false") == "");
  CHECK(refused(
            qwen2, [](M& m) { m.mlp_bias = true; }, "expected mlp_bias false in qwen2, got true") == "");
  CHECK(refused(
            "stablelm-3b-4e1t", [](M& m) { m.use_parallel_residual = true; },
            "expected use_parallel_residual false in stablelm, got true") == "");
}

TEST_CASE("A rotary_dim is asked for with RoPE, and refused without", "[families]") {
  ModelSpec m = small_spec(ModelType::llama);
  const auto refused = [&](std::string_view what) {
    return test::refusal_fault(check_model(m), Code::invalid_argument, {what});
  };
  CHECK(check_model(m));
  m.shape.rotary_dim = 0;
  CHECK(refused("rotary_dim must be even, 2 to head_dim 8, got 0") == "");
  m.traits.positions = Positions::learned;
  CHECK(check_model(m));
  m.shape.rotary_dim = 8;
  CHECK(refused("rotary_dim must be 0 where positions are learned, got 8") == "");
}
