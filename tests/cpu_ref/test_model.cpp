#include <omp.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/compare.hpp"
#include "core/model/config.hpp"
#include "core/model/decoder.hpp"
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
using Emitted = std::vector<Decoder::Emitted>;

const Status& status_of(const Status& s) { return s; }
template <class T>
const Status& status_of(const Result<T>& r) {
  return r.status();
}

/// "" if the call was refused with this text in its message; otherwise what is wrong.
template <class R>
std::string fault_of(const R& refused, std::string_view text) {
  return refusal_fault(status_of(refused), Code::invalid_argument, {text});
}

void require_ok(const Status& s) {
  INFO(s.message());
  REQUIRE(s);
}

ModelSpec small_spec(std::int64_t layers = 3) {
  ModelConfig m;
  m.name = "small";
  m.hidden_size = 48;
  m.num_hidden_layers = layers;
  m.num_attention_heads = 3;
  m.intermediate_size = 100;
  m.vocab_size = 61;
  m.max_position_embeddings = 64;
  m.rotary_dim = 8;
  return m;
}

/// A small model with its weights.
struct Small {
  ModelSpec spec;
  std::shared_ptr<OwnedModelWeights> weights;

  explicit Small(ModelSpec m = small_spec(), WeightFormat linears = {})
      : spec(m), weights(std::make_shared<OwnedModelWeights>(procedural_model(m, DType::f16, 7, linears))) {}

  std::unique_ptr<Model> model(const Model::Options& options = {}) const {
    return taken(Model::create(spec, weights->weights, weights, options));
  }
  Decoder decoder(std::int64_t slots, DType activation = DType::f32) const {
    return Decoder(model({.slots = slots, .capacity = 64, .chunk = 8, .activation = activation}));
  }
};

Ids ids_of(std::int64_t count, std::uint64_t seed) {
  Tensor t(DType::f32, {count});
  fill_procedural(t.data(), DType::f32, 0, count, ProceduralKind::activation, seed, "ids");
  Ids ids;
  for (std::int64_t i = 0; i < count; ++i) ids.push_back(std::int32_t(std::abs(t.at(i)) * 1000) % 61);
  return ids;
}

/// The bytes of a tensor.
std::string bits(const Tensor& t) { return {static_cast<const char*>(t.data()), std::size_t(t.size_bytes())}; }

/// The ids of each sequence among what a decoder emitted.
std::map<Decoder::Sequence, Ids> by_sequence(const Emitted& emitted) {
  std::map<Decoder::Sequence, Ids> ids;
  for (const auto& [sequence, id] : emitted) ids[sequence].push_back(id);
  return ids;
}

const SiteList sites = names_of(ModelType::gpt_neox).sites();

}  // namespace

TEST_CASE("The walk of a model names every module in Hugging Face's order", "[model]") {
  const Small small(small_spec(2));
  const auto model = small.model({.capacity = 8});
  std::vector<std::string> names, taps;
  model->watch([&](const ModelSite& site, std::span<const Model::SiteTensor>) -> Status {
    names.push_back(site.name());
    taps.push_back(site.tap());
    return {};
  });
  require_ok(model->prefill(0, 0, Ids{1, 2, 3}));
  REQUIRE(names.size() == 2 * sites.size() + 3);
  CHECK(names.front() == "gpt_neox.embed_in");
  CHECK(names[1] == "gpt_neox.layers.0.input_layernorm");
  CHECK(names[sites.size()] == "gpt_neox.layers.0.mlp.dense_4h_to_h");
  CHECK(taps[sites.size()] == "layers.0.output");
  CHECK(names[sites.size() + 1] == "gpt_neox.layers.1.input_layernorm");
  CHECK(names[names.size() - 2] == "gpt_neox.final_layer_norm");
  CHECK(names.back() == "embed_out");
  CHECK(taps.back() == "logits");
}

TEST_CASE("A check ends a call, and the calls after it are as if that had not been", "[model]") {
  const Small small(small_spec());
  const auto model = small.model({.capacity = 40, .chunk = 4}), other = small.model({.capacity = 40, .chunk = 4});
  const Ids prompt = ids_of(30, 5);
  int asked = 0, most = std::numeric_limits<int>::max();
  model->check_between(
      [&]() -> Status { return ++asked <= most ? Status() : Status::error(Code::io_error, "interrupted"); });
  require_ok(model->prefill(0, 0, prompt));
  CHECK(asked >= 8);  // once at the end of each chunk at least
  asked = 0;
  most = 3;
  model->release(0);
  const Status ended = model->prefill(0, 0, prompt);
  CHECK(ended.code() == Code::io_error);
  CHECK(ended.message() == "interrupted");  // without a site's name, whose fault it is not
  CHECK(model->length(0) < 30);
  const ModelRunner::Token token{.slot = 0, .id = 1, .position = model->length(0)};
  CHECK(model->step(std::span(&token, 1)).message() == "interrupted");
  model->check_between({});
  for (Model* m : {model.get(), other.get()}) require_ok(m->prefill(0, 0, prompt));
  CHECK(bits(taken(model->logits(0))) == bits(taken(other->logits(0))));
}

TEST_CASE("A model whose cache does not fit the free memory is refused before it is taken", "[model]") {
  const Small small(small_spec());
  CHECK(
      refusal_fault(Model::create(small.spec, small.weights->weights, small.weights, {.capacity = 1000000000}).status(),
                    Code::out_of_memory, {"1 slots of 1000000000 entries need ", "of memory that are free"}) == "");
}

TEST_CASE("The list of taps is what a pass makes", "[model]") {
  const WeightFormat linears = GENERATE(WeightFormat{}, WeightFormat{.bits = 4, .group_size = 16});
  ModelSpec spec = small_spec(2);
  spec.shape.intermediate_size = 96;
  const Small small(spec, linears);
  const auto model = small.model({.capacity = 8});
  const std::int64_t tokens = 3;
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  model->watch([&](const ModelSite& site, std::span<const Model::SiteTensor> tensors) -> Status {
    const auto is_output = [](const Model::SiteTensor& t) { return t.role == Role::output; };
    const auto outputs = std::size_t(std::count_if(tensors.begin(), tensors.end(), is_output));
    for (const Model::SiteTensor& t : tensors) {
      if (!is_output(t)) continue;
      names.push_back(output_tap(site.tap(), t.name, outputs));
      shapes.push_back(t.shape);
    }
    return {};
  });
  Tensor logits(DType::f32, {tokens, 61});
  require_ok(model->forward(0, 0, Ids{1, 2, 3}, logits.view<2>()));
  const std::vector<Tap> taps = model_taps(spec, small.weights->weights);
  REQUIRE(taps.size() == names.size());
  for (std::size_t i = 0; i < taps.size(); ++i) {
    Shape shape = taps[i].shape;
    shape.insert(shape.begin(), tokens);
    CAPTURE(taps[i].name);
    CHECK(taps[i].name == names[i]);
    CHECK(shape == shapes[i]);
  }
  CHECK(taps[2].name == "layers.0.attention.query_key_value");
  CHECK(std::set<std::string>(names.begin(), names.end()).contains("layers.1.attention.rotary_emb.v"));
}

namespace {

/// A model that hands every call on to another one.
class Relay : public ModelRunner {
 public:
  explicit Relay(std::unique_ptr<Model> model) : model_(std::move(model)) {}
  const ModelSpec& model() const override { return model_->model(); }
  std::int64_t slots() const override { return model_->slots(); }
  std::int64_t capacity() const override { return model_->capacity(); }
  DType activation() const override { return model_->activation(); }
  std::int64_t length(std::int64_t slot) const override { return model_->length(slot); }
  Status run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) override {
    return model_->run(runs, ids, logits);
  }
  std::vector<Result<std::int32_t>> choose(std::span<const Draw> draws) override { return model_->choose(draws); }
  Result<Tensor> logits(std::int64_t slot) override { return model_->logits(slot); }
  void release(std::int64_t slot) override { model_->release(slot); }
  void watch(Visit visit) override { model_->watch(std::move(visit)); }
  void check_between(Check check) override { model_->check_between(std::move(check)); }
  Status fetch(const SiteTensor& tensor, void* to) override { return model_->fetch(tensor, to); }

 protected:
  std::unique_ptr<Model> model_;
};

/// A model whose tensors a visitor cannot read where they are, as on a device.
class FarModel final : public Relay {
 public:
  using Relay::Relay;
  void watch(Visit visit) override {
    if (!visit) return model_->watch({});
    model_->watch([visit = std::move(visit)](const ModelSite& site, std::span<const SiteTensor> tensors) {
      std::vector<SiteTensor> far;
      for (const SiteTensor& t : tensors) far.push_back(moved(t));
      return visit(site, far);
    });
  }
  Status fetch(const SiteTensor& tensor, void* to) override { return model_->fetch(moved(tensor), to); }

 private:
  /// The tensor at an address that no process has, or back again.
  static SiteTensor moved(SiteTensor t) {
    t.data = reinterpret_cast<const void*>(~reinterpret_cast<std::uintptr_t>(t.data));
    return t;
  }
};

/// The taps of a prompt, each with room for `rows` rows.
Result<std::map<std::string, TapRows>> taps_of(ModelRunner& runner, const Ids& ids, const std::vector<Tap>& taps,
                                               std::int64_t rows, DType dtype = DType::f32) {
  std::map<std::string, TapRows> made;
  for (const Tap& t : taps) {
    Shape shape = t.shape;
    shape.insert(shape.begin(), rows);
    made[t.name].rows = Tensor(dtype, std::move(shape));
  }
  runner.watch([&](const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors) {
    return append_taps(runner, site, tensors, made);
  });
  Tensor logits(runner.activation(), {std::int64_t(ids.size()), runner.model().shape.vocab_size});
  CF_TRY(runner.forward(0, 0, ids, logits.view<2>()));
  runner.watch({});
  return made;
}

}  // namespace

TEST_CASE("Taps are the rows of all tokens, in chunks or not, wherever the model runs", "[model]") {
  const Small small;
  const Ids ids = ids_of(11, 6);
  const std::vector<Tap> all = model_taps(small.spec, small.weights->weights);
  FarModel whole(small.model({.capacity = 11, .chunk = 11})), chunked(small.model({.capacity = 11, .chunk = 4}));
  const auto expected = taken(taps_of(whole, ids, all, 11)), got = taken(taps_of(chunked, ids, all, 11));
  REQUIRE(expected.size() == all.size());
  for (const auto& [name, tap] : expected) {
    CAPTURE(name);
    CHECK(tap.made_rows == 11);
    CHECK(got.at(name).made_rows == 11);
    const auto error = compare(got.at(name).rows, tap.rows);
    REQUIRE(error);
    CHECK(error->non_finite == 0);
    CHECK(error->rel_l2 < 1e-5);
  }
  // The rows of the embedding are those of the table.
  const Tensor& rows = expected.at("embed_in").rows;
  const ConstAnyView<2> table = small.weights->weights.embed_in;
  for (std::int64_t i = 0; i < rows.size(); ++i) {
    const std::int64_t h = table.shape[1], from = ids[std::size_t(i / h)] * h + i % h;
    REQUIRE(rows.at(i) == load_element(table.data, table.dtype, from));
  }
}

TEST_CASE("Taps without room, or of another dtype, are refused", "[model]") {
  const Small small;
  const std::vector<Tap> all = model_taps(small.spec, small.weights->weights), one{all[1]};
  const auto model = small.model({.capacity = 8, .chunk = 2});
  CHECK(refusal_fault(
            taps_of(*model, ids_of(5, 1), one, 3).status(), Code::invalid_argument,
            {"tap 'layers.0.input_layernorm': expected at most (1, 48) of float32, got (2, 48) of float32"}) == "");
  CHECK(refusal_fault(taps_of(*model, ids_of(5, 1), one, 5, DType::f64).status(), Code::invalid_argument,
                      {"expected at most (5, 48) of float64, got (2, 48) of float32"}) == "");
  const std::vector<Tap> wide{{.name = all[1].name, .shape = {33}}};
  CHECK(refusal_fault(taps_of(*model, ids_of(5, 1), wide, 5).status(), Code::invalid_argument,
                      {"expected at most (5, 33) of float32, got (2, 48) of float32"}) == "");
}

TEST_CASE("A step reads each weight once for all slots", "[model]") {
  const Small small;
  const std::int64_t slots = GENERATE(1, 3, 17);
  CAPTURE(slots);
  const auto model = small.model({.slots = slots, .capacity = 8});
  // The embedding is read by rows, and the head whole.
  std::int64_t expected = 0, read = 0;
  for_each_model_weight(small.spec, small.weights->weights, [&](const TensorSpec& t, const auto& view, const auto&) {
    if (t.name != "gpt_neox.embed_in.weight") expected += view.bytes();
  });
  model->watch([&](const ModelSite& site, std::span<const Model::SiteTensor> tensors) -> Status {
    for (const auto& t : tensors)
      if (is_weight(t.role) && site.name() != "gpt_neox.embed_in") read += t.size() * std::int64_t(size_bytes(t.dtype));
    return {};
  });
  std::vector<ModelRunner::Token> tokens;
  for (std::int64_t s = 0; s < slots; ++s) {
    require_ok(model->prefill(s, 0, Ids{1}));
    tokens.push_back({.slot = s, .id = std::int32_t(s), .position = 1});
  }
  read = 0;
  require_ok(model->step(tokens));
  CHECK(read == expected);
}

TEST_CASE("A prefill and the steps behind it make the logits of one prefill", "[model]") {
  const Small small;
  const Ids ids = ids_of(80, 3);
  const auto [activation, bound] = GENERATE(table<DType, double>({{DType::f64, 1e-13}, {DType::f32, 1e-5}}));
  const std::int64_t chunk = GENERATE(1, 7, 8, 64, 80);
  CAPTURE(to_string(activation), chunk);
  const auto whole = small.model({.capacity = 80, .chunk = 80, .activation = activation});
  Tensor expected(activation, {std::int64_t(ids.size()), small.spec.shape.vocab_size});
  require_ok(whole->forward(0, 0, ids, expected.view<2>()));
  for (const std::size_t split : {1u, 7u, 8u, 9u, 63u, 64u, 65u, 79u}) {
    CAPTURE(split);
    const auto model = small.model({.capacity = 80, .chunk = chunk, .activation = activation});
    require_ok(model->prefill(0, 0, std::span(ids).first(split)));
    for (std::size_t i = split - 1; i < ids.size(); ++i) {
      if (i >= split) require_ok(model->step(std::vector{ModelRunner::Token{0, ids[i], std::int64_t(i)}}));
      const Tensor logits = taken(model->logits(0));
      const std::int64_t vocab = logits.size();
      ConstAnyView<1> reference{
          static_cast<const char*>(expected.data()) + i * std::size_t(vocab) * size_bytes(activation),
          {vocab},
          activation};
      double error2 = 0, norm2 = 0;
      for (std::int64_t v = 0; v < vocab; ++v) {
        const double r = load_element(reference.data, activation, v);
        error2 += (logits.at(v) - r) * (logits.at(v) - r);
        norm2 += r * r;
      }
      CHECK(std::sqrt(error2 / norm2) < bound);
    }
  }
}

TEST_CASE("A step of a prompt, running sequences and drafts gives what separate calls give, bit by bit", "[model]") {
  const DType activation = GENERATE(DType::f32, DType::f64);
  const std::int64_t chunk = GENERATE(64, 512);
  CAPTURE(to_string(activation), chunk);
  const Small small;
  const Model::Options options{.slots = 4, .capacity = 320, .chunk = chunk, .activation = activation};
  constexpr std::int64_t kPrompt = 300, kDrafts = 5, kOthers[] = {9, 20, 12};  // slots 1, 2 and 3
  const Ids prompt = ids_of(kPrompt, 1), next = ids_of(3, 2), drafts = ids_of(kDrafts, 3);
  const auto ready = [&] {
    auto model = small.model(options);
    for (std::int64_t i = 0; i < 3; ++i) require_ok(model->prefill(i + 1, 0, ids_of(kOthers[i], std::uint64_t(4 + i))));
    return model;
  };
  const auto vocab = small.spec.shape.vocab_size;
  // What the separate calls give.
  const auto apart = ready();
  require_ok(apart->prefill(0, 0, prompt));
  Tensor verified(apart->activation(), {kDrafts, vocab});
  require_ok(apart->forward(3, kOthers[2], drafts, verified.view<2>()));
  require_ok(apart->step(std::vector<ModelRunner::Token>{{1, next[0], kOthers[0]}, {2, next[1], kOthers[1]}}));

  const auto mixed = ready();
  const std::vector<Run> runs{{2, kOthers[1], 1}, {0, 0, kPrompt}, {3, kOthers[2], kDrafts}, {1, kOthers[0], 1}};
  Ids ids{next[1]};
  ids.insert(ids.end(), prompt.begin(), prompt.end());
  ids.insert(ids.end(), drafts.begin(), drafts.end());
  ids.push_back(next[0]);
  const std::vector<std::int64_t> wanted{0, 1, kDrafts, 1};
  Tensor rows(mixed->activation(), {1 + kDrafts + 1, vocab});
  require_ok(mixed->run(runs, ids, {.rows = wanted, .to = rows.view<2>()}));
  const auto rows_at = [&](const Tensor& t, std::int64_t first, std::int64_t count) {
    const auto bytes = vocab * std::int64_t(size_bytes(t.dtype()));
    return std::string(static_cast<const char*>(t.data()) + first * bytes, std::size_t(count * bytes));
  };
  for (std::int64_t slot : {0, 1, 2}) {
    CAPTURE(slot);
    CHECK(bits(taken(mixed->logits(slot))) == bits(taken(apart->logits(slot))));
  }
  CHECK(rows_at(rows, 0, 1) == bits(taken(apart->logits(0))));
  CHECK(rows_at(rows, 1, kDrafts) == bits(verified));
  CHECK(rows_at(rows, 1 + kDrafts, 1) == bits(taken(apart->logits(1))));
  CHECK(bits(taken(mixed->logits(3))) == rows_at(verified, kDrafts - 1, 1));
  CHECK(mixed->length(0) == kPrompt);
  CHECK(mixed->length(3) == kOthers[2] + kDrafts);
  // The drafts but two are taken back, and all sequences go on.
  const std::vector<ModelRunner::Token> all{
      {0, next[2], kPrompt}, {1, 5, kOthers[0] + 1}, {2, 6, kOthers[1] + 1}, {3, 7, kOthers[2] + 2}};
  require_ok(mixed->step(all));
  require_ok(apart->step(all));
  for (std::int64_t slot = 0; slot < 4; ++slot)
    CHECK(bits(taken(mixed->logits(slot))) == bits(taken(apart->logits(slot))));
  const auto fault = [&](std::span<const Run> given, const Ids& fed, const StepLogits& logits, std::string_view text) {
    return fault_of(mixed->run(given, fed, logits), text);
  };
  const std::vector<Run> one{{0, 1, 2}}, twice{{0, 1, 1}, {0, 2, 1}};
  const std::vector<std::int64_t> three{3}, two{2};
  CHECK(fault({}, {}, {}, "model: runs: expected at least one, got none") == "");
  CHECK(fault(one, {1}, {}, "model: ids: expected 2, one a token of the runs, got 1") == "");
  CHECK(fault(one, {1, 61}, {}, "model: ids[1]: expected an id of 0 to 60, got 61") == "");
  CHECK(fault(twice, {1, 1}, {}, "model: slot 0: expected one run a step, got two") == "");
  CHECK(fault(one, {1, 1}, {.rows = wanted}, "expected a number of rows for each of 1 runs, got 4") == "");
  CHECK(fault(one, {1, 1}, {.rows = three}, "model: logits: expected 0 to 2 rows, got 3") == "");
  CHECK(fault(one, {1, 1}, {.rows = two, .to = rows.view<2>()}, "expected 2 rows, those of the runs, got 7") == "");
  const AnyView<2> narrow(rows.data(), {2, 60}, activation);
  CHECK(fault(one, {1, 1}, {.rows = two, .to = narrow}, "expected rows of 61 ") == "");
  CHECK(refusal_fault(mixed->run(one, Ids{1, 1}, {.stream = 0}), Code::unimplemented,
                      {"expected memory of the host, got a device's"}) == "");
  CHECK(mixed->length(0) == kPrompt + 1);
}

TEST_CASE("Models whose last rows are asked for make the bits of those that make all", "[model]") {
  const Small small;
  const Ids ids = ids_of(20, 5);
  const std::int64_t vocab = small.spec.shape.vocab_size, rows = GENERATE(0, 1, 4, 5, 19, 20);
  CAPTURE(rows);
  const Model::Options options{.capacity = 20, .chunk = 4};
  Tensor all(DType::f32, {20, vocab}), last(DType::f32, {20, vocab});
  require_ok(small.model(options)->forward(0, 0, ids, all.view<2>()));
  require_ok(small.model(options)->forward(0, 0, ids, {last.data(), {rows, vocab}, DType::f32}));
  const auto* expected = all.as<float>() + (20 - rows) * vocab;
  double most = 0;
  for (std::int64_t i = 0; i < rows * vocab; ++i)
    most = std::max(most, double(std::abs(last.as<float>()[i] - expected[i])));
  // The head takes few rows and many in different orders.
  CHECK(most < 1e-5);
  if (rows % 4 == 0) CHECK(std::equal(expected, expected + rows * vocab, last.as<float>()));
}

TEST_CASE("Sequences that share steps make the bits of each alone", "[model]") {
  const std::int64_t slots = GENERATE(3, 9);
  const WeightFormat linears = GENERATE(WeightFormat{}, WeightFormat{4, 16});
  ModelSpec spec = small_spec();
  spec.shape.intermediate_size = 128;
  const Small small(spec, linears);
  CAPTURE(slots, linears.bits);
  const std::vector<Ids> prompts{ids_of(5, 1), ids_of(1, 2), ids_of(17, 3)};
  const Sampling sampled{.temperature = 1.5, .top_k = 20, .seed = 5};
  std::vector<Ids> alone;
  std::vector<std::string> logits;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    Decoder d = small.decoder(slots);
    const auto s = taken(d.add(prompts[i], {.sampling = sampled, .id = i}));
    taken(d.decode(12));
    alone.push_back(taken(d.ids(s)));
    logits.push_back(bits(taken(d.logits(s))));
    CHECK(alone.back().size() == 12);
  }
  // The third joins when the others have three tokens, and the first is dropped before that.
  Decoder d = small.decoder(slots);
  const auto first = taken(d.add(prompts[0], {.sampling = sampled, .id = 0}));
  const auto second = taken(d.add(prompts[1], {.sampling = sampled, .id = 1}));
  Emitted emitted = taken(d.decode(3));
  const auto third = taken(d.add(prompts[2], {.sampling = sampled, .id = 2}));
  for (const auto& e : taken(d.decode(9))) emitted.push_back(e);
  CHECK(bits(taken(d.logits(second))) == logits[1]);
  CHECK(by_sequence(emitted)[first] == alone[0]);
  CHECK(by_sequence(emitted)[second] == alone[1]);
  require_ok(d.drop(first));
  emitted = taken(d.decode(3));
  CHECK(taken(d.ids(third)) == alone[2]);
  CHECK(bits(taken(d.logits(third))) == logits[2]);
  // The slot of the dropped one starts anew.
  const auto again = taken(d.add(prompts[0], {.sampling = sampled, .id = 0}));
  taken(d.decode(12));
  CHECK(taken(d.ids(again)) == alone[0]);
}

TEST_CASE("A decoder makes the same bits a hundred times, on 1 to 3 threads", "[model]") {
  const Small small;
  std::set<std::string> seen;
  const int threads = omp_get_max_threads();
  for (int i = 0; i < 100; ++i) {
    omp_set_num_threads(1 + i % 3);
    Decoder d = small.decoder(2);
    const auto s = taken(d.add(ids_of(9, 1)));
    taken(d.decode(6));
    seen.insert(bits(taken(d.logits(s))));
  }
  omp_set_num_threads(threads);
  CHECK(seen.size() == 1);
}

TEST_CASE("Sequences end at their stop ids and limits", "[model]") {
  const Small small;
  const Ids prompt = ids_of(6, 4);
  Decoder d = small.decoder(2);
  const auto whole = taken(d.add(prompt));
  taken(d.decode(10));
  const Ids ids = taken(d.ids(whole));
  require_ok(d.drop(whole));

  const std::int32_t stop = ids[4];
  const auto place = std::find(ids.begin(), ids.end(), stop) - ids.begin();
  const auto stopped = taken(d.add(prompt, {.stop = {stop, 60}}));
  const auto limited = taken(d.add(prompt, {.max_new_tokens = 3}));
  const Emitted emitted = taken(d.decode(100));
  CHECK_FALSE(d.active());
  CHECK(taken(d.finish(stopped)) == Finish::stop);
  CHECK(taken(d.finish(limited)) == Finish::length);
  CHECK(taken(d.ids(stopped)) == Ids(ids.begin(), ids.begin() + place + 1));
  CHECK(taken(d.ids(limited)) == Ids(ids.begin(), ids.begin() + 3));
  CHECK(by_sequence(emitted)[limited] == taken(d.ids(limited)));
  CHECK(d.free_slots() == 2);
  CHECK(taken(d.decode(5)).empty());
  CHECK(d.status(stopped));
}

TEST_CASE("A sequence that reaches the capacity says so and keeps its ids, and the others go on", "[model]") {
  const Small small;
  Decoder d(small.model({.slots = 2, .capacity = 12, .chunk = 5}));
  const auto longer = taken(d.add(ids_of(9, 1))), shorter = taken(d.add(ids_of(2, 2)));
  taken(d.decode(6));
  CHECK(taken(d.finish(longer)) == Finish::failed);
  CHECK(d.status(longer).message() ==
        "decoder: sequence 0: the cache's capacity of 12 entries is reached after 4 new tokens");
  CHECK(taken(d.ids(longer)).size() == 4);
  CHECK(taken(d.finish(shorter)) == Finish::running);
  CHECK(taken(d.ids(shorter)).size() == 6);
  // Behind a prompt that fills the cache there is no room for an entry, but one id can still be chosen.
  const auto full = taken(d.add(ids_of(12, 3)));
  taken(d.decode(1));
  CHECK(taken(d.ids(full)).size() == 1);
}

TEST_CASE("A slot that a step leaves out keeps its cache, also a full one, and is no part of the condition",
          "[model]") {
  const Small small;
  const std::int64_t capacity = 6, kv_size = 6 * 48;
  const auto model = small.model({.slots = 3, .capacity = capacity, .activation = DType::f64});
  require_ok(model->prefill(0, 0, ids_of(capacity, 1)));
  require_ok(model->prefill(1, 0, ids_of(3, 2)));
  require_ok(model->prefill(2, 0, ids_of(2, 3)));
  std::map<std::string, std::vector<double>> caches[2];
  int nth = 0;
  model->watch([&](const ModelSite& site, std::span<const Model::SiteTensor> tensors) -> Status {
    for (const auto& t : tensors)
      if (t.role == Role::cache) {
        CHECK(t.shape == Shape{3, 3, capacity, 16});
        const auto* values = static_cast<const double*>(t.data);
        caches[nth][site.name() + t.name] = {values, values + t.size()};
      }
    return {};
  });
  Condition total{0, 0};
  model->measure(&total);
  for (std::int64_t i = 0; i < 2; ++i, ++nth) {
    const ModelRunner::Token token{.slot = 1, .id = 5, .position = 3 + i};
    require_ok(model->step(std::span(&token, 1)));
  }
  CHECK(std::isfinite(total.l2));
  CHECK(total.max > 1);
  REQUIRE(caches[0].size() == 2 * 3);  // keys and values of three layers
  for (const auto& [name, before] : caches[0])
    for (std::size_t i = 0; i < before.size(); ++i) {
      const std::int64_t slot = std::int64_t(i) / kv_size, entry = std::int64_t(i) / 16 % capacity;
      if ((before[i] == caches[1][name][i]) == (slot == 1 && entry == 4)) FAIL(name << " of slot " << slot);
    }
  CHECK(model->length(0) == capacity);
  const auto alone = small.model({.slots = 3, .capacity = capacity, .activation = DType::f64});
  require_ok(alone->prefill(1, 0, ids_of(3, 2)));
  for (std::int64_t i = 0; i < 2; ++i) {
    const ModelRunner::Token token{.slot = 1, .id = 5, .position = 3 + i};
    require_ok(alone->step(std::span(&token, 1)));
  }
  CHECK(bits(taken(model->logits(1))) == bits(taken(alone->logits(1))));
}

namespace {

/// A model that forgets to forget: a slot's next sequence follows the entries of the one before.
class StaleModel final : public Relay {
 public:
  using Relay::Relay;
  Status run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) override {
    std::vector<Run> later(runs.begin(), runs.end());
    for (Run& r : later) {
      if (r.first_position == 0) offset_ = model_->length(r.sequence);
      r.first_position += offset_;
    }
    return model_->run(later, ids, logits);
  }
  void release(std::int64_t) override {}

 private:
  std::int64_t offset_ = 0;
};

}  // namespace

TEST_CASE("A length that is stale after a stop changes the logits of the next sequence", "[model]") {
  const Small small;
  const auto second = [&](std::unique_ptr<ModelRunner> runner) {
    Decoder d(std::move(runner));
    taken(d.add(ids_of(7, 1), {.max_new_tokens = 4}));
    taken(d.decode(4));
    const auto s = taken(d.add(ids_of(9, 2)));
    taken(d.decode(3));
    return bits(taken(d.logits(s)));
  };
  Decoder alone = small.decoder(1);
  const auto s = taken(alone.add(ids_of(9, 2)));
  taken(alone.decode(3));
  const std::string expected = bits(taken(alone.logits(s)));
  const Model::Options options{.capacity = 64, .chunk = 8};
  CHECK(second(small.model(options)) == expected);
  CHECK(second(std::make_unique<StaleModel>(small.model(options))) != expected);
}

TEST_CASE("A NaN is reported with the site that made it, and ends its own sequence alone", "[model]") {
  Small small;
  // Token 7's embedding alone meets this weight.
  ModelWeights& w = small.weights->weights;
  for (Tensor& t : small.weights->storage)
    if (t.data() == w.embed_in.data) t.as<f16>()[7 * small.spec.shape.hidden_size] = f16{0x7e00};  // a NaN
  Decoder d = small.decoder(2);
  const auto bad = taken(d.add(Ids{1, 7})), good = taken(d.add(Ids{1, 2}));
  taken(d.decode(4));
  CHECK(taken(d.finish(bad)) == Finish::failed);
  INFO(d.status(bad).message());
  CHECK(d.status(bad).message().find("sequence 0") != std::string::npos);
  CHECK(d.status(bad).message().find("made by gpt_neox.embed_in") != std::string::npos);
  const Ids ids = taken(d.ids(good));
  // The small model may choose token 7 itself.
  CHECK((ids.size() == 4 || ids.back() == 7));
}

TEST_CASE("Sequences wait for a slot in the order of add(), and get the ids that they have alone", "[model]") {
  const Small small;
  std::vector<Ids> alone;
  const auto options = [](std::int64_t i) {
    return SequenceOptions{.sampling = {.temperature = 1, .seed = 3}, .id = std::uint64_t(i), .max_new_tokens = 3 + i};
  };
  for (std::int64_t i = 0; i < 5; ++i) {
    Decoder d = small.decoder(2);
    const auto s = taken(d.add(ids_of(4 + i, std::uint64_t(i)), options(i)));
    while (d.active()) taken(d.decode());
    alone.push_back(taken(d.ids(s)));
  }
  Decoder d = small.decoder(2);
  for (std::int64_t i = 0; i < 5; ++i)
    CHECK(taken(d.add(ids_of(4 + i, std::uint64_t(i)), options(i))) == Decoder::Sequence(i));
  CHECK(d.free_slots() == 0);
  const auto waiting = [&] {
    std::vector<Decoder::Sequence> found;
    for (Decoder::Sequence s = 0; s < 5; ++s)
      if (taken(d.waits(s))) found.push_back(s);
    return found;
  };
  CHECK(waiting() == std::vector<Decoder::Sequence>{2, 3, 4});
  CHECK(taken(d.prefill()).size() == 2);
  // The first has 3 new ids and the second 4: the third begins in the step behind the first's last.
  taken(d.decode(2));
  CHECK(d.ended() == std::vector<Decoder::Sequence>{0});
  CHECK(waiting() == std::vector<Decoder::Sequence>{2, 3, 4});
  CHECK(taken(d.decode()).size() == 2);
  CHECK(d.ended() == std::vector<Decoder::Sequence>{0, 1});
  CHECK(waiting() == std::vector<Decoder::Sequence>{3, 4});
  // One that waits can be dropped: the next one is the next.
  CHECK(fault_of(d.logits(3), "sequence 3 has no logits") == "");
  require_ok(d.drop(3));
  while (d.active()) taken(d.decode(2));
  CHECK(d.ended() == std::vector<Decoder::Sequence>{0, 1, 2, 4});
  for (const Decoder::Sequence s : d.ended()) CHECK(taken(d.ids(s)) == alone[std::size_t(s)]);
  CHECK(d.free_slots() == 2);
}

TEST_CASE("Holders of some slots of a runner do not see the others', and are refused once they gave them back",
          "[model]") {
  const Small small;
  const auto shared = std::make_shared<SharedRunner>(small.model({.slots = 3, .capacity = 64, .chunk = 8}));
  const auto first = taken(SlotLease::create(shared, 1)), second = taken(SlotLease::create(shared, 2));
  CHECK(shared->free_slots() == 0);
  CHECK(fault_of(SlotLease::create(shared, 1), "expected one that is free, got a model whose 3 are all in use") == "");
  CHECK((*second)[1] == 2);
  Decoder one(first), two(second), alone(small.model({.slots = 3, .capacity = 64, .chunk = 8}));
  const auto ids_by = [&](Decoder& d, std::uint64_t seed) {
    const auto s = taken(d.add(ids_of(9, seed), {.max_new_tokens = 6}));
    taken(d.decode(3));
    return s;
  };
  const auto a = ids_by(one, 1), b = ids_by(two, 2), c = ids_by(two, 3);
  taken(one.decode(9));
  taken(two.decode(9));
  for (const auto& [d, s, seed] : {std::tuple(&one, a, 1), std::tuple(&two, b, 2), std::tuple(&two, c, 3)}) {
    const auto expected = taken(alone.add(ids_of(9, std::uint64_t(seed)), {.max_new_tokens = 6}));
    while (alone.active()) taken(alone.decode());
    CHECK(taken(d->ids(s)) == taken(alone.ids(expected)));
  }
  const auto running = taken(one.add(ids_of(3, 4)));
  taken(one.decode(2));
  first->close();
  CHECK(!first->is_open());
  CHECK(shared->free_slots() == 1);
  CHECK(fault_of(one.decode(), "slots: expected some of the model, got none: close() gave them back") == "");
  CHECK(taken(one.ids(running)).size() == 2);
  require_ok(one.drop(running));
  CHECK(fault_of(SlotLease::create(shared, 2), "slots: expected 1 to 1, those that are free of the model's 3, got 2") ==
        "");
  taken(two.add(ids_of(3, 5)));
  shared->close();
  CHECK(!second->is_open());
  CHECK(refusal_fault(two.decode().status(), Code::device_error, {"memory on the device was given back"}) == "");
}

TEST_CASE("What a decoder cannot take is refused, and nothing changes", "[model]") {
  const Small small;
  Decoder d = small.decoder(1);
  CHECK(fault_of(d.add({}), "decoder: prompt: expected at least one id, got none") == "");
  CHECK(fault_of(d.add(Ids(65, 1)), "expected at most 64 ids, the cache's capacity, got 65") == "");
  CHECK(fault_of(d.add(Ids{0, 61}), "decoder: prompt[1]: expected an id of 0 to 60, got 61") == "");
  CHECK(fault_of(d.add(Ids{-1}), "decoder: prompt[0]: expected an id of 0 to 60, got -1") == "");
  CHECK(fault_of(d.add(Ids{1}, {.stop = {99}}), "decoder: stop[0]: expected an id of 0 to 60, got 99") == "");
  CHECK(fault_of(d.add(Ids{1}, {.max_new_tokens = 0}), "max_new_tokens: expected at least 1, got 0") == "");
  CHECK(fault_of(d.add(Ids{1}, {.sampling = {.temperature = -1}}), "temperature") == "");
  CHECK(fault_of(d.decode(0), "steps: expected at least 1, got 0") == "");
  CHECK(fault_of(d.drop(0), "sequence 0 is unknown or was dropped") == "");
  CHECK(fault_of(d.ids(3), "sequence 3 is unknown or was dropped") == "");
  CHECK(d.free_slots() == 1);
  const auto s = taken(d.add(Ids{1}));
  CHECK(fault_of(d.logits(s), "has no logits") == "");
  taken(d.prefill());
  CHECK(taken(d.logits(s)).size() == 61);

  ModelWeights few = small.weights->weights;
  few.layers.pop_back();
  CHECK(fault_of(Model::create(small.spec, few, {}, {}), "expected weights of 3 layers, got 2") == "");
  CHECK(fault_of(Model::create(small.spec, small.weights->weights, {}, {.slots = 0}), "slots must be 1") == "");
  CHECK(fault_of(Model::create(small.spec, small.weights->weights, {}, {.activation = DType::f16}),
                 "expected activations of float32 or float64, got float16") == "");
  const auto model = small.model({.slots = 2, .capacity = 4});
  CHECK(fault_of(model->prefill(2, 0, Ids{1}), "slot: expected 0 to 1, got 2") == "");
  CHECK(fault_of(model->prefill(0, 1, Ids{1}), "slot 0: expected a first position of 0 to 0, its entries, got 1") ==
        "");
  CHECK(fault_of(model->prefill(0, 0, Ids(5, 1)), "slot 0: expected at most 4 entries, the cache's capacity, got 5") ==
        "");
  const std::vector<ModelRunner::Token> twice{{1, 3, 0}, {1, 4, 0}};
  CHECK(fault_of(model->step(twice), "slot 1: expected one run a step, got two") == "");
  CHECK(model->length(1) == 0);
}

TEST_CASE("Memory that is not free is refused before it is taken", "[model]") {
  const ModelSpec spec = small_spec();
  require_ok(Model::check_memory("small", spec, {.slots = 2, .capacity = 8}));
  // More bytes than 64 bits count.
  const Status status = Model::check_memory("small", spec, {.slots = 1 << 30, .capacity = std::int64_t(1) << 31});
  CHECK(refusal_fault(status, Code::out_of_memory,
                      {"small: 1073741824 slots of 2147483648 entries need ", " GB for the cache and ",
                       " GB for activations, expected at most the ", " GB of memory that are free"}) == "");
}
