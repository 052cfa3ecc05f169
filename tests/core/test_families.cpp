// The families' own data: that it is whole, and that a model's tensors follow from it.
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
  return {
      .shape = {.hidden_size = 24,
                .num_layers = 2,
                .num_heads = 3,
                .num_kv_heads = 3,
                .head_dim = 8,
                .intermediate_size = 40,
                .vocab_size = 5,
                .rotary_dim = rotates ? 8 : 0,
                .max_positions = 16,
                .qkv_layout = family.qkv_layout},
      .traits = {.family = type, .norm = family.norm, .positions = family.positions, .head_norm = family.head_norm}};
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
    CHECK(family_of(type).class_name.ends_with("ForCausalLM"));
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
    CHECK(names.sites().size() == (family->head_norm ? 11u : 9u));
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
        for (std::int64_t r = 0; r < stored.parts[part].rows; ++r) rows.insert(stored.place(part, r));
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
  m.traits.head_norm = true;
  CHECK(tensors_of(m).size() == plain.size() + 2 * 2);  // without names: the family has none
  m.traits.positions = Positions::learned;
  m.shape.rotary_dim = 0;
  const std::vector<std::string> all = tensors_of(m);
  CHECK(all.size() == plain.size() + 2 * 2 + 1);
  CHECK(all[1] == ".weight (16, 24)");
  CHECK(std::count(all.begin(), all.end(), "model.layers.1..weight (8)") == 2);
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
