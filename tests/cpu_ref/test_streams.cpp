// Models that leave keys out: Mistral's window beyond its length, and streams with sinks, which have no end.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/cache_tensors.hpp"
#include "core/model/config.hpp"
#include "core/model/decoder.hpp"
#include "core/procedural.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/model.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/setups.hpp"
#include "tests/support/small_model.hpp"

namespace {

using namespace cf;
using namespace cf::test;
using cpu_ref::Model;
using Ids = std::vector<std::int32_t>;

struct Small {
  ModelSpec spec;
  std::shared_ptr<OwnedModelWeights> weights;

  explicit Small(const ModelConfig& m)
      : spec(m.spec()), weights(std::make_shared<OwnedModelWeights>(procedural_model(spec, DType::f16, 7, {}))) {}

  Result<std::unique_ptr<Model>> made(Model::Options options) const {
    options.activation = DType::f64;
    return Model::create(spec, weights->weights, weights, options);
  }
  std::unique_ptr<Model> model(const Model::Options& options) const {
    auto made = this->made(options);
    INFO(made.status().message());
    REQUIRE(made);
    return std::move(*made);
  }
};

ModelConfig neox() {
  ModelConfig m = model_of(2, 16, 8, 64);
  m.num_hidden_layers = 2;
  m.vocab_size = 41;
  return m;
}

ModelConfig mistral(std::int64_t window) {
  ModelConfig m = gated_model_of(ModelType::mistral, 4, 2, 8, 32, 48);
  m.num_hidden_layers = 2;
  m.vocab_size = 41;
  m.sliding_window = window;
  return m;
}

Ids ids_of(std::int64_t count) {
  Ids ids;
  for (std::int64_t i = 0; i < count; ++i) ids.push_back(std::int32_t((7 * i + i * i / 5) % 41));
  return ids;
}

/// The logits behind each of the ids, read `at_once` tokens a call.
std::vector<double> logits_of(Model& model, const Ids& ids, std::int64_t at_once) {
  const std::int64_t vocab = model.model().shape.vocab_size;
  std::vector<double> all;
  for (std::int64_t first = 0; first < std::int64_t(ids.size()); first += at_once) {
    const std::int64_t n = std::min(at_once, std::int64_t(ids.size()) - first);
    Tensor logits(DType::f64, {n, vocab});
    const Status s =
        model.forward(0, first, std::span(ids).subspan(std::size_t(first), std::size_t(n)), logits.view<2>());
    INFO(s.message());
    REQUIRE(s);
    all.insert(all.end(), logits.as<double>(), logits.as<double>() + logits.size());
  }
  return all;
}

/// The largest difference of two results, over the largest of them.
double difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double most = 0, largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, std::isfinite(a[i] - b[i]) ? std::abs(a[i] - b[i]) : 1e300);
    largest = std::max(largest, std::abs(b[i]));
  }
  return most / largest;
}

/// StreamingLLM as its paper has it: keys are kept before RoPE; a step takes the cache's first and newest tokens,
/// rotates all of their keys by their numbers among them, and its query by the last of these. All in double.
std::vector<double> logits_of_paper(const Small& small, const Ids& ids, const KeyWindow& stream) {
  const ModelSpec& m = small.spec;
  const ModelShape& s = m.shape;
  const std::int64_t half = s.rotary_dim / 2;
  std::vector<Tensor> storage;
  storage.reserve(64);
  const auto take = [&](auto& view, const auto& shape) {
    storage.emplace_back(DType::f64, Shape(shape.begin(), shape.end()));
    point(view, storage.back().data(), shape, DType::f64);
  };
  ModelTensors t;
  for_each_activation(
      s, {.table_rows = 1, .capacity = 1},
      [&](const TensorSpec& spec, auto& view, const auto& shape) {
        if (is_activation(spec.role)) take(view, shape);
      },
      t.layer);
  for (AnyView<2>& h : t.hidden) take(h, extents(1, s.hidden_size));
  take(t.final_norm, extents(1, s.hidden_size));
  take(t.logits, extents(1, s.vocab_size));
  // A table that turns nothing.
  const std::vector<float> ones(std::size_t(half), 1.f), zeros(std::size_t(half), 0.f);
  t.layer.cos = {ones.data(), {1, half}};
  t.layer.sin = {zeros.data(), {1, half}};
  const std::int32_t position = 0, length = 1;
  t.layer.positions = {&position, {1}};
  t.layer.kv_len = {&length, {1}};
  t.layer.max_kv_len = 1;
  const std::vector<LayerCache> one(std::size_t(s.num_layers), {t.layer.k_cache, t.layer.v_cache});
  t.caches = one;

  const auto turn = [&](double* x, std::int64_t place) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle =
          double(place) * double(1.0f / std::pow(float(m.traits.rope_theta), float(2 * i) / float(2 * half)));
      const double a = x[i], b = x[i + half];
      x[i] = a * std::cos(angle) - b * std::sin(angle);
      x[i + half] = b * std::cos(angle) + a * std::sin(angle);
    }
  };
  // By layer: the kept tokens' keys and values, (kv_heads, head_dim) each.
  std::vector<std::vector<std::vector<double>>> keys(std::size_t(s.num_layers)), values(keys);
  const auto row_of = [](const AnyView<3>& v) {
    return std::vector<double>(v.as<double>().data, v.as<double>().data + v.size());
  };
  std::vector<double> all;
  for (std::int32_t id : ids) {
    t.ids = {&id, {1}};
    const Status walked =
        for_each_model_site(m, small.weights->weights, t, [&](const ModelSite& site, const auto& args) -> Status {
          if constexpr (std::is_same_v<std::decay_t<decltype(args)>, ops::Attention::Args>) {
            auto &k = keys[std::size_t(site.layer)], &v = values[std::size_t(site.layer)];
            k.push_back(row_of(t.layer.k));
            v.push_back(row_of(t.layer.v));
            if (std::int64_t(k.size()) > stream.sinks + stream.keys)
              for (auto* list : {&k, &v}) list->erase(list->begin() + stream.sinks);
            const std::int64_t n = std::int64_t(k.size());
            Tensor k_cache(DType::f64, {1, s.num_kv_heads, n, s.head_dim}), v_cache(DType::f64, k_cache.shape());
            for (std::int64_t h = 0; h < s.num_kv_heads; ++h)
              for (std::int64_t e = 0; e < n; ++e) {
                double* const to = k_cache.as<double>() + (h * n + e) * s.head_dim;
                std::copy_n(k[std::size_t(e)].begin() + h * s.head_dim, s.head_dim, to);
                turn(to, e);
                std::copy_n(v[std::size_t(e)].begin() + h * s.head_dim, s.head_dim,
                            v_cache.as<double>() + (h * n + e) * s.head_dim);
              }
            for (std::int64_t h = 0; h < s.num_heads; ++h) turn(t.layer.q.as<double>().data + h * s.head_dim, n - 1);
            const std::int32_t kv_len = std::int32_t(n);
            ops::Attention::Args here = args;
            here.k_cache = k_cache.view<4>();
            here.v_cache = v_cache.view<4>();
            here.kv_len = {&kv_len, {1}};
            here.max_kv_len = n;
            return cpu_ref::run(here);
          } else {
            return cpu_ref::run(args);
          }
        });
    INFO(walked.message());
    REQUIRE(walked);
    all.insert(all.end(), t.logits.as<double>().data, t.logits.as<double>().data + s.vocab_size);
  }
  return all;
}

}  // namespace

TEST_CASE("A stream's logits are StreamingLLM's, whose keys are rotated anew at each step", "[model][stream]") {
  const Ids ids = ids_of(120);
  ModelConfig llama = gated_model_of(ModelType::llama, 4, 2, 8, 32, 48);
  llama.num_hidden_layers = 2;
  llama.vocab_size = 41;
  for (const ModelConfig& config : {neox(), llama}) {
    INFO(config.name);
    const Small small(config);
    const KeyWindow stream{.keys = 11, .sinks = 3};
    const auto model = small.model({.chunk = 8, .window = stream.keys, .sinks = stream.sinks});
    const std::vector<double> logits = logits_of(*model, ids, 1), paper = logits_of_paper(small, ids, stream);
    // The model's table has the float32 rounding of cos and sin; the paper's has none.
    CHECK(difference(logits, paper) < 1e-6);
    // A prompt that is read in larger pieces gives the same logits, up to the rounding of sums.
    for (std::int64_t at_once : {5, 8, 120}) {
      model->release(0);
      CHECK(difference(logits_of(*model, ids, at_once), logits) < 1e-12);
    }
    // The comparison sees a window, sinks and places that are off by one.
    for (const KeyWindow& wrong : {KeyWindow{10, 3}, {12, 3}, {11, 2}, {11, 4}})
      CHECK(difference(logits, logits_of_paper(small, ids, wrong)) > 1e-4);
  }
}

TEST_CASE("A window without sinks is a stream too", "[model][stream]") {
  const Small small(neox());
  const Ids ids = ids_of(60);
  const auto model = small.model({.chunk = 4, .window = 9});
  // Without sinks the places in the cache and the positions differ by the same number for all keys.
  CHECK(difference(logits_of(*model, ids, 1), logits_of_paper(small, ids, {.keys = 9})) < 1e-6);
}

TEST_CASE("A stream goes on without end in the memory that it began with", "[model][stream]") {
  const Small small(neox());
  const Model::Options options{.slots = 2, .chunk = 8, .window = 11, .sinks = 3};
  Decoder decoder(small.model(options));
  const auto sequence = decoder.add(ids_of(5), {.max_new_tokens = 3000});
  REQUIRE(sequence);
  while (decoder.active()) REQUIRE(decoder.decode(100));
  CHECK(*decoder.finish(*sequence) == Finish::length);
  const Ids ids = *decoder.ids(*sequence);
  REQUIRE(ids.size() == 3000);
  // The ids are those of the same stream, read as a prompt: the last ones, from where the windows of both layers begin.
  Ids fed = ids_of(5);
  fed.insert(fed.end(), ids.begin(), ids.end() - 1);
  const std::vector<double> logits = logits_of(*small.model(options), fed, 97);
  std::size_t same = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto row = logits.begin() + std::ptrdiff_t((i + 4) * 41);
    same += std::max_element(row, row + 41) - row == ids[i];
  }
  CHECK(same == ids.size());
}

TEST_CASE("A stream's length has the places of its newest entries whatever its size", "[cache][stream]") {
  const RingView ring(CacheView(1, 29, 1), 4);
  for (std::int64_t length : {std::int64_t(1), std::int64_t(1) << 30, (std::int64_t(1) << 30) + 77,
                              (std::int64_t(1) << 31) + 5, (std::int64_t(1) << 60) + 3}) {
    const std::int64_t told = stream_length(length, 29, 4);
    CHECK(told <= INT32_MAX);
    for (std::int64_t back = 1; back <= std::min<std::int64_t>(25, length); ++back)
      CHECK(ring.stored_index(told - back) == ring.stored_index(length - back));
  }
}

TEST_CASE("What a stream cannot do is refused by name", "[bad][stream]") {
  const Small small(neox());
  const auto refusal = [&](const Small& of, const Model::Options& options, std::string_view text) {
    return refusal_fault(of.made(options).status(), Code::invalid_argument, {text});
  };
  CHECK(refusal(small, {.sinks = 4}, "model: window must be 0 or more keys, and sinks 0 or more beside a window") ==
        "");
  CHECK(refusal(small, {.window = -1}, "model: window must be 0 or more keys") == "");
  CHECK(refusal(Small(learned_model_of(2, 16, 64)), {.window = 8}, "expected a model with RoPE, got one without") ==
        "");
  CHECK(refusal(Small(mistral(12)), {.window = 10, .sinks = 3},
                "model: window, sinks: expected at most the config's sliding_window 12 in all, got 13") == "");
  const auto model = small.model({.chunk = 4, .window = 9, .sinks = 2});  // 14 entries, 12 of them behind the sinks
  const Ids ids = ids_of(40);
  REQUIRE(model->prefill(0, 0, ids));
  CHECK(model->length(0) == 40);
  const auto back = [&](std::int64_t first) { return model->prefill(0, first, Ids{1}); };
  CHECK(refusal_fault(back(35), Code::invalid_argument,
                      {"model: slot 0: expected a first position of 0 or of 36 to 40, whose window the stream still "
                       "has, got 35"}) == "");
  CHECK(model->length(0) == 40);
  REQUIRE(back(36));
  REQUIRE(back(0));
  CHECK(model->length(0) == 1);
  const std::vector<float> table(4);
  CHECK(refusal_fault(model->set_rope_table({table.data(), {1, 4}}, {table.data(), {1, 4}}), Code::invalid_argument,
                      {"RoPE table: expected none for streams"}) == "");
}

TEST_CASE("Going back within a stream gives what a new stream gives", "[model][stream]") {
  const Small small(neox());
  const Model::Options options{.chunk = 8, .window = 9, .sinks = 2};
  const auto one = small.model(options), other = small.model(options);
  Ids ids = ids_of(50);
  (void)logits_of(*one, ids, 10);
  ids.resize(46);
  for (std::int32_t id : {3, 1, 4}) ids.push_back(id);
  Tensor logits(DType::f64, {3, 41});
  REQUIRE(one->forward(0, 46, std::span(ids).subspan(46), logits.view<2>()));
  const std::vector<double> expected = logits_of(*other, ids, 49);
  CHECK(difference({logits.as<double>(), logits.as<double>() + logits.size()},
                   {expected.end() - std::ptrdiff_t(logits.size()), expected.end()}) < 1e-12);
}

TEST_CASE("A sequence grows beyond Mistral's window", "[model][window]") {
  const std::int64_t window = 8;
  const Small small(mistral(window)), all_seen(mistral(0));
  for (std::int64_t count : {5, 8, 9, 10, 40}) {
    INFO(count << " tokens");
    const Ids ids = ids_of(count);
    const Model::Options options{.capacity = 40, .chunk = 16};
    const auto one = small.model(options);
    const std::vector<double> logits = logits_of(*one, ids, count);
    one->release(0);
    CHECK(difference(logits_of(*one, ids, 1), logits) < 1e-12);
    const std::vector<double> dense = logits_of(*all_seen.model(options), ids, count);
    const auto upto = [&](const std::vector<double>& from) {
      return std::vector(from.begin(), from.begin() + 41 * std::min(count, window));
    };
    CHECK(difference(upto(logits), upto(dense)) < 1e-12);
    if (count > window) CHECK(difference(logits, dense) > 1e-4);
  }
  const auto full = small.model({.capacity = 40});
  CHECK(full->limit().most == 40);
  CHECK(refusal_fault(full->prefill(0, 0, ids_of(41)), Code::invalid_argument,
                      {"expected at most 40 entries, the cache's capacity, got 41"}) == "");
}
