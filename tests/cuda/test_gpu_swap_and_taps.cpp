// Weights that take the place of others in the device's memory, taps of steps and of passes, and their way to the host.
#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/model/memorizer.hpp"
#include "core/model/tap_reader.hpp"
#include "core/model/taps.hpp"
#include "tests/cuda/small_model.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

/// Small weights of another seed.
Small other_weights(const Small& like, std::uint64_t seed, WeightFormat linears = {}) {
  Small made = like;
  const DType dtype = like.weights->weights.embed_in.dtype;
  made.weights = std::make_shared<OwnedModelWeights>(procedural_model(like.config, dtype, seed, linears));
  return made;
}

/// The logits behind a prompt and behind each of the greedy ids that follow it, and those ids.
std::string continued(Model& model) {
  std::string all;
  for (std::int64_t slot = 0; slot < model.slots(); ++slot) require_ok(model.prefill(slot, 0, ids_of(9 + slot, 3)));
  std::vector<ModelRunner::Token> tokens;
  for (std::int64_t step = 0; step < 6; ++step) {
    std::vector<ModelRunner::Draw> draws;
    for (std::int64_t slot = 0; slot < model.slots(); ++slot) {
      all += bits(taken(model.logits(slot)));
      draws.push_back({.slot = slot,
                       .sampling = {.temperature = 0},
                       .sequence = std::uint64_t(slot),
                       .position = 9 + slot + step,
                       .history = {}});
    }
    tokens.clear();
    const auto ids = model.choose(draws);
    for (std::size_t i = 0; i < ids.size(); ++i) tokens.push_back({draws[i].slot, taken(ids[i]), draws[i].position});
    for (const auto& t : tokens) all += std::to_string(t.id) + ",";
    require_ok(model.step(tokens));
  }
  return all;
}

}  // namespace

TEST_CASE("swap on the GPU: ids and logits are those of a fresh load, bit for bit, by every impl",
          "[gpu][model][swap][persistent][small]") {
  const Impl impl = GENERATE(Impl::unfused, Impl::graph, Impl::split, Impl::layer, Impl::persistent);
  const std::int64_t slots = GENERATE(1, 4);
  const bool gated = GENERATE(false, true);
  if (gated && slots > 1 && impl != Impl::unfused && impl != Impl::graph) return;
  CAPTURE(to_string(impl), slots, gated);
  const Small first(DType::f16, {}, gated ? gated_config() : small_config()), second = other_weights(first, 8);
  const Model::Options options{.slots = slots, .capacity = 64, .chunk = 16, .impl = impl};
  const auto model = first.model(options);
  const std::string of_first = continued(*model);
  const std::string expected = continued(*second.model(options));
  CHECK((of_first != expected));
  // In the middle of what runs ahead.
  require_ok(model->swap_weights(second.config, second.weights->weights, nullptr));
  CHECK(model->length(0) == 0);
  CHECK((continued(*model) == expected));
  require_ok(model->swap_weights(first.config, first.weights->weights, nullptr));
  CHECK((continued(*model) == of_first));
}

TEST_CASE("swap on the GPU: quantised weights are packed anew", "[gpu][model][swap]") {
  const int of_bits = GENERATE(4, 8);
  const WeightFormat linears{of_bits, 64};
  const Small first(DType::f16, linears), second = other_weights(first, 8, linears);
  const Model::Options options{.capacity = 64, .chunk = 16, .impl = Impl::graph};
  const auto model = first.model(options);
  const std::string of_first = continued(*model);
  require_ok(model->swap_weights(second.config, second.weights->weights, nullptr));
  CHECK((continued(*model) == continued(*second.model(options))));
  require_ok(model->swap_weights(first.config, first.weights->weights, nullptr));
  CHECK((continued(*model) == of_first));
}

TEST_CASE("swap on the GPU: what does not fit is refused by name, and the model goes on with its own",
          "[gpu][model][swap][bad]") {
  const Small own;
  const auto model = own.model({.capacity = 64, .chunk = 16});
  const std::string expected = continued(*model);
  const auto refused = [&](const Small& other, std::string_view text) {
    return refusal_fault(model->swap_weights(other.config, other.weights->weights, nullptr), Code::invalid_argument,
                         {text});
  };
  CHECK(refused(Small(DType::f16, {}, small_config(2)), "swap: expected num_layers 3, got 2") == "");
  CHECK(refused(Small(DType::bf16), "has dtype bfloat16, expected float16") == "");
  CHECK(refused(Small(DType::f16, {4, 64}), "is GPTQ of 4 bits, group 64, expected dense") == "");
  const auto there = taken(cuda::ResidentWeights::load(context(), own.config, DType::f16, own.weights->weights));
  const ModelWeights on_device = there.model_weights();
  CHECK(refusal_fault(model->swap_weights(own.config, on_device, nullptr), Code::invalid_argument,
                      {"is in the memory of a device, expected the host's"}) == "");
  CHECK((continued(*model) == expected));
  const auto in_place =
      taken(Model::create(context(), "small", own.config, on_device, {.capacity = 64, .in_place = true}));
  CHECK(refusal_fault(in_place->swap_weights(own.config, own.weights->weights, nullptr), Code::unimplemented,
                      {"swap: expected weights that load() has brought"}) == "");
}

TEST_CASE("taps on the GPU: steps and passes of several sequences have the oracle's within the budget",
          "[gpu][model][taps][persistent][small]") {
  const DType dtype = GENERATE(DType::f16, DType::bf16);
  const Impl impl = GENERATE(Impl::graph, Impl::persistent);
  const Small small(dtype);
  const std::vector<Ids> prompts{ids_of(12, 1), ids_of(5, 2), ids_of(20, 3)};
  const std::vector<Tap> all = model_taps(small.config, small.weights->weights);
  const auto model = small.model({.slots = 4, .capacity = 64, .chunk = 32, .impl = impl});
  std::vector<Run> runs;
  Ids ids;
  for (const Ids& prompt : prompts) {
    runs.push_back({.sequence = std::int64_t(runs.size()), .count = std::int64_t(prompt.size())});
    ids.insert(ids.end(), prompt.begin(), prompt.end());
  }
  require_ok(model->run(runs, ids, {}));
  // A token of each, beside a prompt of a fourth.
  const Ids joiner = ids_of(7, 4);
  std::vector<Run> step;
  Ids step_ids;
  for (std::int64_t slot = 0; slot < 3; ++slot) {
    step.push_back({.sequence = slot, .first_position = std::int64_t(prompts[std::size_t(slot)].size())});
    step_ids.push_back(std::int32_t(40 + slot));
  }
  const bool joins = GENERATE(false, true);
  if (joins) {
    step.push_back({.sequence = 3, .count = 7});
    step_ids.insert(step_ids.end(), joiner.begin(), joiner.end());
  }
  const auto rows = std::int64_t(step_ids.size());
  std::map<std::string, TapRows> made;
  for (const Tap& t : all) {
    if (t.name == "final_layer_norm" || t.name == "logits") continue;  // a row of each run
    Shape shape = t.shape;
    shape.insert(shape.begin(), rows);
    made[t.name].rows = Tensor(dtype, shape);
  }
  model->watch([&](const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors) {
    return append_taps(*model, site, tensors, made);
  });
  require_ok(model->run(step, step_ids, {}));
  model->watch({});

  for (std::int64_t slot = 0; slot < std::int64_t(step.size()); ++slot) {
    Ids whole = slot < 3 ? prompts[std::size_t(slot)] : joiner;
    if (slot < 3) whole.push_back(std::int32_t(40 + slot));
    const Reference reference = reference_of(small, whole);
    CAPTURE(slot, to_string(dtype), to_string(impl), joins);
    check_rows(row_of(*model, slot), reference, std::int64_t(whole.size()) - 1);
    // The last layer's output, of the run's last token.
    const auto n = std::int64_t(whole.size());
    const auto oracle = taken(cpu_ref::Model::create(small.config, small.weights->weights, small.weights,
                                                     {.capacity = n, .chunk = n, .activation = DType::f64}));
    std::map<std::string, TapRows> exact;
    exact["layers.2.output"].rows = Tensor(DType::f64, {n, small.config.hidden_size});
    oracle->watch([&](const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors) {
      return append_taps(*oracle, site, tensors, exact);
    });
    require_ok(oracle->prefill(0, 0, whole));
    const Tensor& ours = made.at("layers.2.output").rows;
    CHECK(made.at("layers.2.output").made_rows == rows);
    const std::int64_t hidden = small.config.hidden_size, row = slot < 3 ? slot : rows - 1;
    Tensor one(dtype, {hidden}), theirs(DType::f64, {hidden});
    std::memcpy(one.data(), static_cast<const char*>(ours.data()) + row * one.size_bytes(),
                std::size_t(one.size_bytes()));
    std::copy_n(exact.at("layers.2.output").rows.as<double>() + (n - 1) * hidden, hidden, theirs.as<double>());
    const auto error = compare(one, theirs);
    REQUIRE(error);
    CHECK(error->rel_l2 <= reference.budget.rel_l2);
  }
  // What follows is a step of all slots again.
  const ModelRunner::Token next{.slot = 0, .id = 5, .position = 13};
  require_ok(model->step(std::span(&next, 1)));
  Ids whole = prompts[0];
  whole.insert(whole.end(), {40, 5});
  check_rows(row_of(*model, 0), reference_of(small, whole), 13);
}

TEST_CASE("taps on the GPU: blocks that are on their way have the values that fetch() brings",
          "[gpu][model][taps][small]") {
  const Small small;
  const std::vector<Tap> taps = model_taps(small.config, small.weights->weights);
  const auto blocks_of = [](std::uint64_t seed) {
    return std::vector<Ids>{ids_of(30, seed), ids_of(2, seed + 1), ids_of(17, seed + 2)};
  };
  const Model::Options options{.slots = 3, .capacity = 64, .chunk = 32};
  const auto alone = small.model(options);
  const auto expected = [&](const std::vector<Ids>& prompts) {
    std::vector<Run> runs;
    Ids ids;
    for (const Ids& prompt : prompts) {
      runs.push_back({.sequence = std::int64_t(runs.size()), .count = std::int64_t(prompt.size())});
      ids.insert(ids.end(), prompt.begin(), prompt.end());
    }
    std::vector<std::int64_t> rows;
    for (const Run& r : runs) rows.push_back(r.count);
    std::map<std::string, TapRows> made;
    for (const Tap& t : taps) {
      Shape shape = t.shape;
      shape.insert(shape.begin(), std::int64_t(ids.size()));
      made[t.name].rows = Tensor(DType::f16, shape);
    }
    alone->watch([&](const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors) {
      return append_taps(*alone, site, tensors, made);
    });
    Tensor logits(DType::f16, {std::int64_t(ids.size()), kVocab});
    require_ok(alone->run(runs, ids, {.own = false, .rows = rows, .to = logits.view<2>()}));
    alone->watch({});
    CHECK((bits(made.at("logits").rows) == bits(logits)));
    return made;
  };
  auto lease = SlotLease::of_all(small.model(options));
  TapReader reader(lease, taps);
  std::vector<TapBlock> blocks;
  for (std::uint64_t i = 0; i < 5; ++i) blocks.push_back(taken(reader.read(blocks_of(10 * i))));
  for (std::uint64_t i = 0; i < 5; ++i) {
    const auto made = expected(blocks_of(10 * i));
    require_ok(blocks[i].await());
    for (const auto& [name, values] : blocks[i].taps) {
      CAPTURE(i, name);
      const auto bytes = std::size_t(element_count(values.shape)) * size_bytes(values.dtype);
      CHECK((std::string(static_cast<const char*>(values.data), bytes) == bits(made.at(name).rows)));
    }
  }
  // The last norm alone makes no logits, and the same bits.
  TapReader of_norm(lease, {*std::ranges::find(taps, std::string("final_layer_norm"), &Tap::name)});
  for (const std::vector<Ids>& prompts : {blocks_of(3), std::vector<Ids>{ids_of(40, 6)}}) {
    const TapBlock block = taken(of_norm.read(prompts));
    const auto made = expected(prompts);
    require_ok(block.await());
    const TapBlock::Values& values = block.taps.at("final_layer_norm");
    CHECK((std::string(static_cast<const char*>(values.data), std::size_t(element_count(values.shape)) * 2) ==
           bits(made.at("final_layer_norm").rows)));
  }
}

TEST_CASE("memorize on the GPU: the results are those of one slot, and of the ids that a decoder makes",
          "[gpu][model][memorize]") {
  const Small small;
  std::vector<Ids> rows;
  Decoder decoder = small.decoder({.slots = 1, .capacity = 64, .invariant = true});
  for (std::uint64_t i = 0; i < 40; ++i) {
    Ids row = ids_of(8, i);
    const auto sequence = taken(decoder.add(row, {.max_new_tokens = 8}));
    while (decoder.active()) taken(decoder.decode());
    for (std::int32_t id : taken(decoder.ids(sequence))) row.push_back(id);
    if (i % 3) row[8 + i % 8] = (row[8 + i % 8] + 1) % std::int32_t(kVocab);
    rows.push_back(row);
  }
  for (std::int64_t slots : {1, 7, 64}) {
    auto lease = SlotLease::of_all(small.model({.slots = slots, .capacity = 64, .invariant = true}));
    Memorizer memorizer = taken(Memorizer::create(lease, {.context = 8, .continuation = 8}));
    for (std::size_t i = 0; i < rows.size(); ++i) require_ok(memorizer.add(std::int64_t(i), rows[i]));
    std::size_t ended = 0;
    while (memorizer.running() > 0)
      for (const auto& [place, equal, prefix] : taken(memorizer.step())) {
        CAPTURE(slots, place);
        CHECK(equal == (place % 3 ? 7 : 8));
        CHECK(prefix == (place % 3 ? place % 8 : 8));
        ++ended;
      }
    CHECK(ended == rows.size());
  }
}
