// Whole models on the GPU whose slots share a pool of pages: as a contiguous cache, and what sharing adds.
#include <algorithm>
#include <string>
#include <vector>

#include "tests/cuda/small_model.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

/// Puts ids through a slot: the first `prompt` of them as a prompt, the others in steps of a token. Calls check(position) behind the prompt and behind each step.
template <class Check>
void feed(Model& model, std::int64_t slot, const Ids& ids, std::int64_t prompt, Check&& check) {
  require_ok(model.prefill(slot, 0, std::span(ids).first(std::size_t(prompt))));
  check(prompt - 1);
  for (std::int64_t p = prompt; p < std::int64_t(ids.size()); ++p) {
    const Model::Token token{.slot = slot, .id = ids[std::size_t(p)], .position = p};
    require_ok(model.step(std::span(&token, 1)));
    check(p);
  }
}

}  // namespace

TEST_CASE("pages on the GPU: logits are the oracle's within the budget, across pages, chunks and impls",
          "[gpu][model][pages]") {
  const auto [dtype, impl, gated] = GENERATE(table<DType, Impl, bool>({{DType::f16, Impl::graph, false},
                                                                       {DType::bf16, Impl::graph, true},
                                                                       {DType::f16, Impl::persistent, false},
                                                                       {DType::bf16, Impl::persistent, true},
                                                                       {DType::bf16, Impl::split, false},
                                                                       {DType::f16, Impl::layer, true},
                                                                       {DType::f16, Impl::unfused, true},
                                                                       {DType::f32, Impl::graph, false}}));
  const std::int64_t page_entries = GENERATE(64, 128);
  CAPTURE(to_string(dtype), to_string(impl), gated, page_entries);
  const Small small(dtype, {}, gated ? gated_config() : small_config());
  const Ids ids = ids_of(200, 3);
  const Reference reference = reference_of(small, ids);
  const auto model = small.model({.slots = 3,
                                  .capacity = 256,
                                  .chunk = 96,
                                  .impl = impl,
                                  .pages = 512 / page_entries,
                                  .page_entries = page_entries});
  CHECK(model->impl() == impl);
  CHECK(model->page_entries() == page_entries);
  // Other slots take the first pages, so that a sequence's pages are not those of its number.
  require_ok(model->prefill(0, 0, ids_of(5, 1)));
  for (std::int64_t prompt : {63, 64, 65, 127, 150}) {
    CAPTURE(prompt);
    feed(*model, 2, Ids(ids.begin(), ids.begin() + 190), prompt, [&](std::int64_t p) {
      if (p % 64 > 1 && p % 64 < 62 && p != prompt - 1) return;
      check_rows(row_of(*model, 2), reference, p);
    });
  }
  // Drafts: several tokens with their logits, behind what the slot has.
  Tensor rows(dtype, {10, kVocab});
  require_ok(model->forward(2, 185, std::span(ids).subspan(185, 10), rows.view<2>()));
  check_rows(rows, reference, 185);
}

TEST_CASE("pages on the GPU: steps have the bits of a contiguous cache's", "[gpu][model][pages]") {
  const auto [dtype, impl, gated] = GENERATE(table<DType, Impl, bool>({{DType::f16, Impl::graph, false},
                                                                       {DType::bf16, Impl::graph, true},
                                                                       {DType::f32, Impl::graph, true},
                                                                       {DType::f16, Impl::persistent, true},
                                                                       {DType::bf16, Impl::persistent, false}}));
  CAPTURE(to_string(dtype), to_string(impl), gated);
  const Small small(dtype, {}, gated ? gated_config() : small_config());
  const Ids ids = ids_of(140, 3);
  Model::Options options{.slots = 3, .capacity = 192, .impl = impl};
  const auto contiguous = small.model(options);
  options.pages = 7;
  const auto paged = small.model(options);
  require_ok(paged->prefill(0, 0, ids_of(5, 1)));  // takes the first page
  std::vector<std::string> expected, got;
  feed(*contiguous, 2, ids, 1, [&](std::int64_t) { expected.push_back(bits(taken(contiguous->logits(2)))); });
  feed(*paged, 2, ids, 1, [&](std::int64_t) { got.push_back(bits(taken(paged->logits(2)))); });
  CHECK(std::ranges::mismatch(got, expected).in1 == got.end());
}

TEST_CASE("pages on the GPU: a fork shares pages until one of the two writes, and leaves the other its bits",
          "[gpu][model][pages]") {
  const Small small;
  const Ids ids = ids_of(140, 3), other = ids_of(140, 4);
  const std::int64_t shared = GENERATE(63, 64, 65, 100, 128);
  const Impl impl = GENERATE(Impl::graph, Impl::persistent);
  CAPTURE(shared, to_string(impl));
  Ids branch(ids.begin(), ids.begin() + shared);
  branch.insert(branch.end(), other.begin() + shared, other.end());
  const Reference of_ids = reference_of(small, ids), of_branch = reference_of(small, branch);
  const Model::Options options{.slots = 2, .capacity = 192, .impl = impl, .pages = 6};
  std::vector<std::string> alone;
  {
    const auto model = small.model(options);
    feed(*model, 0, ids, 130, [&](std::int64_t) { alone.push_back(bits(taken(model->logits(0)))); });
  }
  const auto model = small.model(options);
  require_ok(model->prefill(0, 0, std::span(ids).first(130)));
  std::vector<std::string> beside{bits(taken(model->logits(0)))};
  require_ok(model->fork(0, 1, shared));
  CHECK(model->length(1) == shared);
  for (std::int64_t p = shared; p < 140; ++p) {
    std::vector<Model::Token> tokens{{.slot = 1, .id = branch[std::size_t(p)], .position = p}};
    if (p >= 130) tokens.push_back({.slot = 0, .id = ids[std::size_t(p)], .position = p});
    require_ok(model->step(tokens));
    check_rows(row_of(*model, 1), of_branch, p);
    if (p < 130) continue;
    check_rows(row_of(*model, 0), of_ids, p);
    beside.push_back(bits(taken(model->logits(0))));
  }
  CHECK(beside == alone);
  CHECK(refusal_fault(model->fork(0, 1, 3), Code::invalid_argument, {"sequence 1: expected one without entries"}) ==
        "");
  model->release(1);
  CHECK(refusal_fault(model->fork(0, 1, 141), Code::invalid_argument, {"expected 0 to 140 entries of slot 0"}) == "");
  CHECK(refusal_fault(small.model()->fork(0, 0, 1), Code::unimplemented, {"expected a cache in pages"}) == "");
}

TEST_CASE(
    "pages on the GPU: samples of a prompt, prompts that begin alike and steps that run ahead are given their ids",
    "[gpu][model][pages]") {
  const Small small(DType::f32);
  const bool share = GENERATE(false, true);
  const std::int64_t pages = GENERATE(4, 9, 40);  // for one sequence, for some, and for all
  CAPTURE(share, pages);
  Decoder contiguous(small.model({.slots = 1, .capacity = 256, .impl = Impl::graph}));
  Decoder d(small.model({.slots = 6, .capacity = 256, .impl = Impl::graph, .pages = pages}), {.share_prefixes = share});
  const Ids begin = ids_of(120, 3);
  struct Sequence {
    Decoder::Sequence number;
    Ids prompt;
    SequenceOptions options;
  };
  std::vector<Sequence> all;
  for (std::uint64_t i = 0; i < 8; ++i) {
    SequenceOptions options{.id = i, .max_new_tokens = std::int64_t(40 + 9 * i)};
    if (i % 2) options.sampling = {.temperature = 1, .seed = 5};
    Ids prompt = begin;
    const Ids rest = ids_of(std::int64_t(i % 3), i);
    if (i >= 3) prompt.insert(prompt.end(), rest.begin(), rest.end());
    all.push_back({i < 3 && i > 0 ? taken(d.fork(0, options)) : taken(d.add(prompt, options)), prompt, options});
    taken(d.decode(3));
  }
  for (int turns = 0; d.active() && turns < 3000; ++turns) taken(d.decode());
  for (const Sequence& s : all) {
    CAPTURE(s.number);
    CHECK(taken(d.finish(s.number)) == Finish::length);
    const auto alone = taken(contiguous.add(s.prompt, s.options));
    while (contiguous.active()) taken(contiguous.decode());
    CHECK(taken(d.ids(s.number)) == taken(contiguous.ids(alone)));
    require_ok(contiguous.drop(alone));
  }
}

TEST_CASE("pages on the GPU: launches of many tokens go on from page to page, with the ids of a contiguous cache",
          "[gpu][model][pages][tokens]") {
  const std::int64_t slots = GENERATE(1, 3);
  const bool gated = GENERATE(false, true);
  CAPTURE(slots, gated);
  const Small small(DType::f16, {}, gated ? gated_config() : small_config());
  Model::Options options{.slots = slots, .capacity = 256, .impl = Impl::persistent};
  const auto decoded = [&] {
    Decoder d = small.decoder(options);
    std::vector<Ids> all;
    // Sequences end at different times, and others follow them in their slots.
    for (std::uint64_t round = 0; round < 2; ++round) {
      std::vector<Decoder::Sequence> numbers;
      for (std::uint64_t i = 0; i < std::uint64_t(slots); ++i)
        numbers.push_back(taken(d.add(ids_of(std::int64_t(50 + 7 * i + 3 * round), i + 10 * round),
                                      {.max_new_tokens = std::int64_t(90 + 40 * i)})));
      while (d.active()) taken(d.decode(7));
      for (const Decoder::Sequence s : numbers) {
        CHECK(taken(d.finish(s)) == Finish::length);
        all.push_back(taken(d.ids(s)));
        require_ok(d.drop(s));
      }
    }
    return all;
  };
  const std::vector<Ids> expected = decoded();
  options.pages = 4 * slots;
  CHECK(decoded() == expected);
}

TEST_CASE("pages on the GPU: launches leave pages to others, and a sequence that has none waits for them",
          "[gpu][model][pages][tokens]") {
  const Small small;
  const std::int64_t pages = GENERATE(3, 4, 5);
  CAPTURE(pages);
  Decoder d = small.decoder({.slots = 3, .capacity = 192, .impl = Impl::persistent, .pages = pages});
  std::vector<Decoder::Sequence> all;
  for (std::uint64_t i = 0; i < 5; ++i) {
    all.push_back(taken(d.add(ids_of(std::int64_t(30 + 9 * i), i), {.max_new_tokens = 100})));
    taken(d.decode(3));
  }
  for (int turns = 0; d.active() && turns < 3000; ++turns) taken(d.decode());
  for (const Decoder::Sequence s : all) {
    CAPTURE(s);
    CHECK(taken(d.finish(s)) == Finish::length);
    CHECK(taken(d.ids(s)).size() == 100);
  }
}

TEST_CASE("pages on the GPU: what has no room is refused, and what no kernel takes by name", "[gpu][model][pages]") {
  const Small small;
  const auto model = small.model({.slots = 2, .capacity = 128, .pages = 2});
  CHECK(model->impl() == small.model({.slots = 2, .capacity = 128})->impl());
  CHECK(model->free_pages() == 2);
  const Ids ids = ids_of(128, 2);
  require_ok(model->prefill(0, 0, std::span(ids).first(70)));
  CHECK(model->free_pages() == 0);
  const std::string before = bits(taken(model->logits(0)));
  CHECK(refusal_fault(model->prefill(1, 0, std::span(ids).first(3)), Code::out_of_memory,
                      {"expected free ones for 3 more entries, got 0 of 2 pages of 64 entries"}) == "");
  CHECK(model->length(1) == 0);
  CHECK(bits(taken(model->logits(0))) == before);
  model->release(0);
  CHECK(model->free_pages() == 2);
  require_ok(model->prefill(1, 0, std::span(ids).first(128)));
  const auto refused = [&](const Model::Options& o, Code code, std::string_view text) {
    return refusal_fault(small.try_model(o).status(), code, {text});
  };
  CHECK(refused({.capacity = 64, .pages = 4, .page_entries = 16}, Code::unimplemented,
                "page_entries: cuda takes a multiple of 64 up to 1024, got 16") == "");
  CHECK(refused({.capacity = 64, .impl = Impl::persistent, .pages = 4, .page_entries = 2048}, Code::unimplemented,
                "page_entries: cuda takes a multiple of 64 up to 1024, got 2048") == "");
  CHECK(refused({.capacity = 300, .pages = 4}, Code::invalid_argument,
                "capacity: expected at most 256 entries, those of 4 pages, got 300") == "");
  CHECK(refused({.window = 8, .sinks = 2, .pages = 4}, Code::invalid_argument, "pages: expected none for streams") ==
        "");
}
