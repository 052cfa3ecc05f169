// Weights that take the place of others, taps of blocks of prompts, and sequences compared with their continuation.
#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/compare.hpp"
#include "core/model/config.hpp"
#include "core/model/memorizer.hpp"
#include "core/model/tap_reader.hpp"
#include "core/model/taps.hpp"
#include "core/procedural.hpp"
#include "cpu_ref/model.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/taken.hpp"

namespace {

using namespace cf;
using namespace cf::test;
using cpu_ref::Model;
using Ids = std::vector<std::int32_t>;

ModelSpec small_spec(std::int64_t hidden_size = 48) {
  ModelConfig m;
  m.name = "small";
  m.hidden_size = hidden_size;
  m.num_hidden_layers = 2;
  m.num_attention_heads = 3;
  m.intermediate_size = 100;
  m.vocab_size = 61;
  m.max_position_embeddings = 64;
  m.rotary_dim = 8;
  return m;
}

std::shared_ptr<OwnedModelWeights> weights_of(const ModelSpec& spec, std::uint64_t seed, DType dtype = DType::f16,
                                              WeightFormat linears = {}) {
  return std::make_shared<OwnedModelWeights>(procedural_model(spec, dtype, seed, linears));
}

std::string bits(const Tensor& t) { return {static_cast<const char*>(t.data()), std::size_t(t.size_bytes())}; }

/// The logits of every position, bit by bit.
std::string logits_of(Model& model, std::int64_t slot = 0) {
  Tensor logits(model.activation(), {9, 61});
  const Status ran = model.forward(slot, 0, Ids{3, 1, 4, 1, 5, 9, 2, 6, 5}, logits.view<2>());
  INFO(ran.message());
  REQUIRE(ran);
  return bits(logits);
}

}  // namespace

TEST_CASE("Swapped weights make the bits of a model that has read them itself", "[model][swap]") {
  const ModelSpec spec = small_spec();
  const auto first = weights_of(spec, 1), second = weights_of(spec, 2);
  const Model::Options options{.slots = 2, .capacity = 16, .activation = DType::f64};
  const auto model = taken(Model::create(spec, first->weights, first, options));
  const std::string of_first = logits_of(*model);
  const std::weak_ptr<const void> before = first;
  CHECK(model->swap_weights(spec, second->weights, second));
  CHECK(model->length(0) == 0);
  CHECK((logits_of(*model, 1) == logits_of(*taken(Model::create(spec, second->weights, second, options)))));
  CHECK(model->swap_weights(spec, first->weights, first));
  CHECK((logits_of(*model) == of_first));
}

TEST_CASE("Weights that do not fit are refused by name, and the model keeps its own", "[model][swap]") {
  const ModelSpec spec = small_spec();
  const auto own = weights_of(spec, 1);
  const auto model = taken(Model::create(spec, own->weights, own, {.capacity = 16, .activation = DType::f64}));
  const std::string expected = logits_of(*model);
  const auto refused = [&](const ModelSpec& other, const ModelWeights& weights, std::string_view text) {
    return refusal_fault(model->swap_weights(other, weights, nullptr), Code::invalid_argument, {text});
  };
  const ModelSpec wide = small_spec(96);
  CHECK(refused(wide, weights_of(wide, 1)->weights, "swap: expected hidden_size 48, got 96") == "");
  ModelSpec other_theta = spec;
  other_theta.traits.rope_theta = 5;
  CHECK(refused(other_theta, own->weights, "swap: expected weights of the same family, norms, activation") == "");
  const auto floats = weights_of(spec, 1, DType::f32);
  CHECK(refused(spec, floats->weights, "swap: 'gpt_neox.embed_in.weight' has dtype float32, expected float16") == "");
  ModelWeights few = own->weights;
  few.layers.pop_back();
  CHECK(refused(spec, few, "expected weights of 2 layers, got 1") == "");
  ModelWeights without = own->weights;
  without.layers[1].dense.bias.data = nullptr;
  CHECK(refused(spec, without, "'gpt_neox.layers.1.attention.dense.bias' is null") == "");
  CHECK((logits_of(*model) == expected));

  ModelConfig quantised;
  quantised.name = "quantised";
  quantised.hidden_size = 64;
  quantised.num_hidden_layers = 1;
  quantised.num_attention_heads = 4;
  quantised.intermediate_size = 128;
  quantised.vocab_size = 61;
  quantised.max_position_embeddings = 64;
  quantised.rotary_dim = 8;
  const auto dense = weights_of(quantised, 1), gptq = weights_of(quantised, 1, DType::f16, {4, 32});
  const auto small = taken(Model::create(quantised, dense->weights, dense, {}));
  CHECK(refusal_fault(small->swap_weights(quantised, gptq->weights, gptq), Code::invalid_argument,
                      {"query_key_value.weight' is GPTQ of 4 bits, group 32, expected dense"}) == "");
}

TEST_CASE("Blocks of prompts have the taps that a visitor of each prompt sees", "[model][taps]") {
  const ModelSpec spec = small_spec();
  const auto weights = weights_of(spec, 3);
  const std::vector<Tap> taps = model_taps(spec, weights->weights);
  const std::vector<Ids> prompts{{1, 2, 3}, {4}, {5, 6, 7, 8, 9, 10, 11}};
  const auto create = [&] {
    return taken(Model::create(spec, weights->weights, weights,
                               {.slots = 3, .capacity = 16, .chunk = 4, .activation = DType::f64}));
  };
  std::map<std::string, std::string> expected;
  const auto alone = create();
  for (const Ids& prompt : prompts) {
    std::map<std::string, TapRows> made;
    for (const Tap& t : taps) {
      Shape shape = t.shape;
      shape.insert(shape.begin(), std::int64_t(prompt.size()));
      made[t.name].rows = Tensor(DType::f64, shape);
    }
    alone->watch([&](const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors) {
      return append_taps(*alone, site, tensors, made);
    });
    Tensor logits(DType::f64, {std::int64_t(prompt.size()), 61});
    REQUIRE(alone->forward(0, 0, prompt, logits.view<2>()));
    for (const auto& [name, tap] : made) expected[name] += bits(tap.rows);
  }

  auto lease = SlotLease::of_all(create());
  TapReader reader(lease, taps);
  std::vector<TapBlock> blocks;  // which the reader must not write again while they live
  for (int i = 0; i < 4; ++i) blocks.push_back(taken(reader.read(prompts)));
  for (const TapBlock& block : blocks) {
    REQUIRE(block.await());
    REQUIRE(block.taps.size() == taps.size());
    for (const auto& [name, values] : block.taps) {
      CAPTURE(name);
      CHECK(values.shape[0] == 11);
      const auto bytes = std::size_t(element_count(values.shape)) * size_bytes(values.dtype);
      CHECK((std::string(static_cast<const char*>(values.data), bytes) == expected.at(name)));
    }
  }
  // The last norm alone makes no logits, and the same bits.
  const auto norm = std::ranges::find(taps, std::string("final_layer_norm"), &Tap::name);
  REQUIRE(norm != taps.end());
  TapReader of_norm(lease, {*norm});
  const TapBlock block = taken(of_norm.read(prompts));
  REQUIRE(block.await());
  const TapBlock::Values& values = block.taps.at("final_layer_norm");
  CHECK((std::string(static_cast<const char*>(values.data), std::size_t(element_count(values.shape)) * 8) ==
         expected.at("final_layer_norm")));
  CHECK(refusal_fault(reader.read(std::vector<Ids>(4, Ids{1})).status(), Code::invalid_argument,
                      {"taps: expected 1 to 3 prompts, one a slot, got 4"}) == "");
  CHECK(refusal_fault(reader.read(std::vector<Ids>{{61}}).status(), Code::invalid_argument,
                      {"expected an id of 0 to 60, got 61"}) == "");
}

TEST_CASE("Sequences are compared with what a decoder makes of their context", "[model][memorize]") {
  const ModelSpec spec = small_spec();
  const auto weights = weights_of(spec, 4);
  const auto create = [&](std::int64_t slots) {
    return taken(
        Model::create(spec, weights->weights, weights, {.slots = slots, .capacity = 16, .activation = DType::f64}));
  };
  // Sequence i has the model's own ids but for the i-th, and the last one has all.
  std::vector<Ids> rows;
  Decoder decoder(create(1));
  for (std::int32_t i = 0; i <= 6; ++i) {
    const Ids context{i, 5, std::int32_t(60 - i)};
    const auto sequence = taken(decoder.add(context, {.max_new_tokens = 6}));
    while (decoder.active()) taken(decoder.decode());
    Ids row = context;
    for (std::int32_t id : taken(decoder.ids(sequence))) row.push_back(id);
    if (i < 6) row[std::size_t(3 + i)] = (row[std::size_t(3 + i)] + 1) % 61;
    rows.push_back(row);
  }
  const auto all = [&](std::int64_t slots, const MemorizeOptions& options) {
    Memorizer memorizer = taken(Memorizer::create(SlotLease::of_all(create(slots)), options));
    for (std::size_t i = 0; i < rows.size(); ++i) REQUIRE(memorizer.add(std::int64_t(i) + 100, rows[i]));
    std::map<std::int64_t, std::pair<std::int32_t, std::int32_t>> found;
    while (memorizer.running() > 0)
      for (const auto& [place, equal, prefix] : taken(memorizer.step())) found[place] = {equal, prefix};
    return found;
  };
  const MemorizeOptions options{.context = 3, .continuation = 6};
  const auto found = all(3, options);
  REQUIRE(found.size() == 7);
  for (std::int32_t i = 0; i < 7; ++i) CHECK(found.at(100 + i) == std::pair(i < 6 ? 5 : 6, std::min(i, 6)));
  CHECK(all(1, options) == found);
  MemorizeOptions exact = options;
  exact.exact_only = true;
  for (const auto& [place, made] : all(3, exact))
    CHECK(made == std::pair(place == 106 ? 6 : -1, found.at(place).second));

  // Without the ids that the last sequence has, none of them is made, and other sequences lose them too.
  MemorizeOptions never = options;
  never.never.assign(rows.back().begin() + 3, rows.back().end());
  CHECK(all(3, never).at(106) == std::pair(0, 0));

  auto lease = SlotLease::of_all(create(1));
  CHECK(refusal_fault(Memorizer::create(lease, {.context = 0}).status(), Code::invalid_argument,
                      {"memorize: context: expected at least 1, got 0"}) == "");
  CHECK(refusal_fault(Memorizer::create(lease, {.never = {61}}).status(), Code::invalid_argument,
                      {"memorize: never[0]: expected an id of 0 to 60, got 61"}) == "");
  Ids every(61);
  for (std::int32_t i = 0; i < 61; ++i) every[std::size_t(i)] = i;
  CHECK(refusal_fault(Memorizer::create(lease, {.never = every}).status(), Code::invalid_argument,
                      {"never: expected an id that may be chosen, got none"}) == "");
  Memorizer memorizer = taken(Memorizer::create(lease, options));
  CHECK(refusal_fault(memorizer.add(5, Ids{1, 2}), Code::invalid_argument,
                      {"memorize: sequence 5: expected 9 ids, got 2"}) == "");
  CHECK(refusal_fault(memorizer.add(5, Ids(9, 61)), Code::invalid_argument,
                      {"memorize: sequence 5[0]: expected an id of 0 to 60, got 61"}) == "");
}
