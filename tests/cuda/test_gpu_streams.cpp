// Models on the GPU that leave keys out: a model's own window beyond its length, and streams, which have no end.
#include <algorithm>
#include <string>
#include <vector>

#include "tests/cuda/small_model.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

/// What the oracle's stream says behind every id.
Reference stream_of(const Small& small, const Ids& ids, const KeyWindow& stream) {
  const auto n = std::int64_t(ids.size());
  const auto oracle = taken(
      cpu_ref::Model::create(small.config, small.weights->weights, small.weights,
                             {.chunk = n, .activation = DType::f64, .window = stream.keys, .sinks = stream.sinks}));
  Condition condition{0, 0};
  oracle->measure(&condition);
  Reference r{.logits = Tensor(DType::f64, {n, kVocab}), .budget = {}};
  require_ok(oracle->forward(0, 0, ids, r.logits.view<2>()));
  r.budget = model_budget(small.config, small.weights->weights.embed_in.dtype, condition);
  return r;
}

}  // namespace

TEST_CASE("windows on the GPU: a sequence is longer than the model's window", "[gpu][model][window]") {
  const auto [dtype, impl, chunk] = GENERATE(table<DType, Impl, std::int64_t>({{DType::f16, Impl::graph, 64},
                                                                               {DType::bf16, Impl::graph, 7},
                                                                               {DType::f16, Impl::unfused, 64},
                                                                               {DType::f32, Impl::graph, 64}}));
  const std::int64_t pages = GENERATE(0, 8);
  const bool is_mixed = GENERATE(false, true);  // with a layer that sees all keys
  CAPTURE(to_string(dtype), to_string(impl), chunk, pages, is_mixed);
  ModelConfig m = gated_config(is_mixed ? ModelType::qwen2 : ModelType::mistral);
  m.sliding_window = 32;
  if (is_mixed) m.full_layers = {false, true, false};
  const Small small(dtype, {}, m);
  const Ids ids = ids_of(150, 11);
  const Reference reference = reference_of(small, ids);
  const auto model = small.model({.slots = 2, .capacity = 192, .chunk = chunk, .impl = impl, .pages = pages});
  CHECK(model->limit().most == 192);
  for (std::int64_t prompt : {20, 33, 100}) {
    CAPTURE(prompt);
    require_ok(model->prefill(1, 0, std::span(ids).first(std::size_t(prompt))));
    check_rows(row_of(*model, 1), reference, prompt - 1);
    for (std::int64_t p = prompt; p < 150; ++p) {
      const Model::Token token{.slot = 1, .id = ids[std::size_t(p)], .position = p};
      require_ok(model->step(std::span(&token, 1)));
      if (p % 16 < 2) check_rows(row_of(*model, 1), reference, p);
    }
  }
  // The persistent kernel sees all keys: a sequence of its ends at the window.
  CHECK(small.model({.capacity = 192})->impl() == Impl::graph);
}

TEST_CASE("streams on the GPU: logits are those of the oracle's stream, far behind the cache", "[gpu][model][stream]") {
  const auto [dtype, sinks, gated] = GENERATE(table<DType, std::int64_t, bool>(
      {{DType::f16, 4, false}, {DType::bf16, 4, true}, {DType::f32, 4, false}, {DType::f16, 0, true}}));
  const Impl impl = GENERATE(Impl::graph, Impl::unfused);
  if (impl == Impl::unfused && dtype != DType::f16) return;
  CAPTURE(to_string(dtype), sinks, gated, to_string(impl));
  const KeyWindow window{.keys = 60, .sinks = sinks};
  const Small small(dtype, {}, gated ? gated_config() : small_config(2));
  const Ids ids = ids_of(1400, 3);
  const Reference reference = stream_of(small, ids, window);
  const auto model = small.model({.slots = 2, .chunk = 64, .impl = impl, .window = window.keys, .sinks = window.sinks});
  CHECK(model->capacity() == sinks + 60 + 64 - 1);
  // A neighbour, whose positions are others.
  require_ok(model->prefill(0, 0, ids_of(9, 1)));
  const std::int64_t prompt = 700;
  require_ok(model->prefill(1, 0, std::span(ids).first(std::size_t(prompt))));
  check_rows(row_of(*model, 1), reference, prompt - 1);
  for (std::int64_t p = prompt; p < 1390; ++p) {
    std::vector<Model::Token> tokens{{.slot = 1, .id = ids[std::size_t(p)], .position = p}};
    if (p % 3 == 0) tokens.push_back({.slot = 0, .id = 5, .position = model->length(0)});
    require_ok(model->step(tokens));
    if (p % 97 == 0 || p > 1386) check_rows(row_of(*model, 1), reference, p);
  }
  // Several tokens at once, behind what the stream has, and again from where they began.
  Tensor rows(dtype, {10, kVocab});
  for (int again = 0; again < 2; ++again) {
    require_ok(model->forward(1, 1390, std::span(ids).subspan(1390, 10), rows.view<2>()));
    check_rows(rows, reference, 1390);
  }
  CHECK(refusal_fault(model->prefill(1, 700, std::span(ids).subspan(700, 1)), Code::invalid_argument,
                      {"whose window the stream still has, got 700"}) == "");
}

TEST_CASE("streams on the GPU: a decoder's stream goes on, ahead or not, and its memory is the cache's",
          "[gpu][model][stream]") {
  const Small small(DType::f32);
  const Model::Options options{.slots = 2, .chunk = 64, .impl = Impl::graph, .window = 60, .sinks = 4};
  Decoder alone(small.model(options)), both(small.model(options));
  const auto one = taken(alone.add(ids_of(9, 3), {.max_new_tokens = 2000}));
  while (alone.active()) taken(alone.decode(50));
  const Ids expected = taken(alone.ids(one));
  REQUIRE(expected.size() == 2000);
  const auto same = taken(both.add(ids_of(9, 3), {.max_new_tokens = 2000}));
  for (int i = 0; both.active(); ++i) {
    if (i % 200 == 7) taken(both.add(ids_of(70, std::uint64_t(i)), {.id = 1, .max_new_tokens = 90}));
    taken(both.decode());
  }
  CHECK(taken(both.ids(same)) == expected);
  const auto model = small.model(options);
  CHECK(model->limit().most > 1'000'000);
  CHECK(model->bytes().cache < 64 * 1024 * double(model->capacity()));
}

TEST_CASE("streams on the GPU: what is none is refused by name", "[gpu][model][stream]") {
  const Small small;
  const auto refused = [&](const Small& of, const Model::Options& o, Code code, std::string_view text) {
    return refusal_fault(of.try_model(o).status(), code, {text});
  };
  CHECK(refused(small, {.sinks = 4}, Code::invalid_argument, "sinks 0 or more beside a window, got 0 and 4") == "");
  CHECK(refused(small, {.impl = Impl::persistent, .window = 8}, Code::unimplemented,
                "window: cuda takes the impls unfused and graph, got persistent") == "");
  ModelConfig m = gated_config(ModelType::mistral);
  m.sliding_window = 32;
  CHECK(refused(Small(DType::f16, {}, m), {.window = 40}, Code::invalid_argument,
                "expected at most the config's sliding_window 32 in all, got 40") == "");
}

TEST_CASE("pages and streams on the GPU: whole models for compute-sanitizer", "[gpu][model][pages][stream][small]") {
  const Small small(DType::f16, {}, small_config(1));
  const Ids ids = ids_of(70, 3);
  const auto paged = small.model({.slots = 2, .capacity = 128, .chunk = 32, .impl = Impl::graph, .pages = 4});
  require_ok(paged->prefill(0, 0, std::span(ids).first(63)));
  require_ok(paged->fork(0, 1, 60));
  const std::vector<Model::Token> tokens{{.slot = 0, .id = 5, .position = 63}, {.slot = 1, .id = 6, .position = 60}};
  require_ok(paged->step(tokens));
  CHECK(paged->length(1) == 61);
  Ids branch(ids.begin(), ids.begin() + 60);
  branch.push_back(6);
  check_rows(row_of(*paged, 1), reference_of(small, branch), 60);
  const auto stream = small.model({.slots = 2, .chunk = 8, .impl = Impl::graph, .window = 12, .sinks = 2});
  const Reference reference = stream_of(small, ids, {.keys = 12, .sinks = 2});
  require_ok(stream->prefill(1, 0, std::span(ids).first(40)));
  for (std::int64_t p = 40; p < 44; ++p) {
    const Model::Token token{.slot = 1, .id = ids[std::size_t(p)], .position = p};
    require_ok(stream->step(std::span(&token, 1)));
  }
  check_rows(row_of(*stream, 1), reference, 43);
}
