// A whole model on the GPU beside the oracle: prompts, steps, choices, slots that come and go.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/model/taps.hpp"
#include "cpu_ref/sample.hpp"
#include "tests/cuda/occupy.hpp"
#include "tests/cuda/small_model.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

/// The logits behind every id from `split` - 1 on, where the first `split` ids are the prompt.
std::vector<Tensor> prefill_and_step(Model& model, const Ids& ids, std::size_t split, std::int64_t slot = 0) {
  std::vector<Tensor> rows;
  require_ok(model.prefill(slot, 0, std::span(ids).first(split)));
  rows.push_back(row_of(model, slot));
  for (std::size_t i = split; i < ids.size(); ++i) {
    const ModelRunner::Token token{slot, ids[i], std::int64_t(i)};
    require_ok(model.step(std::span(&token, 1)));
    rows.push_back(row_of(model, slot));
  }
  return rows;
}

/// A decoder's ids of these prompts, all together, with the bits of the logits behind each last id.
struct Continued {
  std::vector<Ids> ids;
  bool operator==(const Continued&) const = default;
};

Continued continued(Decoder& d, const std::vector<Ids>& prompts, const SequenceOptions& o, std::int64_t at_once) {
  std::vector<Decoder::Sequence> sequences;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    SequenceOptions own = o;
    own.id = i;
    sequences.push_back(taken(d.add(prompts[i], own)));
  }
  while (d.active()) taken(d.decode(at_once));
  Continued c;
  for (Decoder::Sequence s : sequences) {
    CHECK(taken(d.finish(s)) != Finish::failed);
    c.ids.push_back(taken(d.ids(s)));
    require_ok(d.drop(s));
  }
  return c;
}

const SiteList sites = names_of(ModelType::gpt_neox).sites();

}  // namespace

TEST_CASE("model on the GPU: a prompt's logits at every position are the oracle's within the budget",
          "[gpu][model][small][library]") {
  const DType dtype = GENERATE(DType::f16, DType::bf16);
  const bool gated = GENERATE(false, true);
  const Small small(dtype, {}, gated ? gated_config() : small_config());
  const Ids ids = ids_of(41, 1);
  const Reference reference = reference_of(small, ids);
  for (std::int64_t chunk : {1, 5, 8, 16, 64}) {
    const auto model = small.model({.capacity = 96, .chunk = chunk});
    CHECK(model->activation() == dtype);
    Tensor logits(dtype, {41, kVocab});
    require_ok(model->forward(0, 0, ids, logits.view<2>()));
    CAPTURE(chunk, gated);
    check_rows(logits, reference, 0);
    // The last rows alone, behind entries that stay.
    Tensor last(dtype, {3, kVocab});
    require_ok(model->forward(0, 20, std::span(ids).subspan(20), last.view<2>()));
    check_rows(last, reference, 38);
  }
}

TEST_CASE("model on the GPU: a prompt and then single tokens, at every split and by every impl, are the oracle's",
          "[gpu][model]") {
  const DType dtype = GENERATE(DType::f16, DType::bf16);
  const Impl impl = GENERATE(Impl::unfused, Impl::graph, Impl::split, Impl::layer, Impl::persistent);
  const Small small(dtype);
  const Ids ids = ids_of(80, 2);
  const Reference reference = reference_of(small, ids);
  for (std::size_t split : {1, 7, 8, 9, 63, 64, 65, 79, 80}) {
    const auto model = small.model({.capacity = 96, .chunk = 32, .impl = impl});
    CHECK(model->impl() == impl);
    const std::vector<Tensor> rows = prefill_and_step(*model, ids, split);
    REQUIRE(rows.size() == 81 - split);
    CAPTURE(to_string(impl), split);
    for (std::size_t i = 0; i < rows.size(); ++i) check_rows(rows[i], reference, std::int64_t(split + i) - 1);
  }
}

TEST_CASE("model on the GPU: RMSNorm, SwiGLU and grouped heads: a prompt and then single tokens are the oracle's",
          "[gpu][model][grouped]") {
  const DType dtype = GENERATE(DType::f16, DType::bf16);
  const Impl impl = GENERATE(Impl::unfused, Impl::graph, Impl::split, Impl::layer, Impl::persistent);
  const ModelType type = GENERATE(ModelType::llama, ModelType::mistral, ModelType::qwen2);
  const WeightFormat linears = GENERATE(WeightFormat{}, WeightFormat{4, 64}, WeightFormat{8, 64});
  if (linears.bits && impl != Impl::unfused && impl != Impl::graph) return;  // the persistent kernel takes dense ones
  const Small small(dtype, linears, gated_config(type));
  const Ids ids = ids_of(80, 2);
  const Reference reference = reference_of(small, ids);
  for (std::size_t split : {1, 9, 64, 79}) {
    const auto model = small.model({.capacity = 96, .chunk = 32, .impl = impl});
    const std::vector<Tensor> rows = prefill_and_step(*model, ids, split);
    REQUIRE(rows.size() == 81 - split);
    CAPTURE(to_string(impl), to_string(type), linears.bits, split);
    for (std::size_t i = 0; i < rows.size(); ++i) check_rows(rows[i], reference, std::int64_t(split + i) - 1);
  }
}

TEST_CASE(
    "model on the GPU: RMSNorm, SwiGLU and grouped heads: a graph's logits are the launches' bit by bit, and so "
    "are weights in place",
    "[gpu][model][grouped]") {
  const std::int64_t slots = GENERATE(1, 4, 12);
  const Small small(DType::f16, {}, gated_config(ModelType::qwen2));
  const auto source = taken(cuda::ResidentWeights::load(context(), small.config, DType::f16, small.weights->weights));
  const ModelWeights there = source.model_weights();
  const Ids ids = ids_of(30, 4);
  const auto rows = [&](Impl impl, bool in_place) {
    const Model::Options options{.slots = slots, .capacity = 64, .chunk = 16, .impl = impl, .in_place = in_place};
    const auto model =
        in_place ? taken(Model::create(context(), "gated", small.config, there, options)) : small.model(options);
    std::string all;
    for (const Tensor& row : prefill_and_step(*model, ids, 13, slots - 1)) all += bits(row);
    return all;
  };
  const std::string expected = rows(Impl::unfused, false);
  CHECK((rows(Impl::graph, false) == expected));
  CHECK((rows(Impl::unfused, true) == expected));
  CHECK((rows(Impl::graph, true) == expected));
}

TEST_CASE("model on the GPU: a small model's steps are a graph, unless told otherwise", "[gpu][model][small]") {
  const Small gated(DType::f16, {}, gated_config());
  CHECK(gated.model()->impl() == Impl::graph);
  for (Impl impl : {Impl::split, Impl::layer, Impl::persistent})
    CHECK(gated.model({.capacity = 96, .impl = impl})->impl() == impl);
}

TEST_CASE("model on the GPU: sequential residuals, tied embeddings, one layer, GPTQ weights", "[gpu][model]") {
  const auto check = [](const Small& small) {
    const Ids ids = ids_of(30, 3);
    const Reference reference = reference_of(small, ids);
    const auto model = small.model({.capacity = 64, .chunk = 16});
    const std::vector<Tensor> rows = prefill_and_step(*model, ids, 20);
    for (std::size_t i = 0; i < rows.size(); ++i) check_rows(rows[i], reference, std::int64_t(i) + 19);
  };
  ModelConfig sequential = small_config();
  sequential.use_parallel_residual = false;
  check(Small(DType::f16, {}, sequential));
  ModelConfig tied = small_config();
  tied.tie_word_embeddings = true;
  check(Small(DType::f16, {}, tied));
  check(Small(DType::f16, {}, small_config(1)));
  check(Small(DType::f16, {.bits = 4, .group_size = 64}));
  check(Small(DType::f16, {.bits = 8, .group_size = 64}));
}

TEST_CASE("model on the GPU: many slots, of which some hold nothing", "[gpu][model]") {
  const std::int64_t slots = GENERATE(2, 8, 9, 16, 33, 64);
  const bool gated = GENERATE(false, true);
  const Small small(DType::f16, {}, gated ? gated_config() : small_config());
  const auto model = small.model({.slots = slots, .capacity = 64, .chunk = 32});
  // Sequence s of length 3 + s % 20 in every second slot.
  std::map<std::int64_t, Ids> sequences;
  for (std::int64_t s = 0; s < slots; s += 2) {
    sequences[s] = ids_of(3 + s % 20 + 4, std::uint64_t(10 + s));
    require_ok(model->prefill(s, 0, std::span(sequences[s]).first(sequences[s].size() - 4)));
  }
  for (std::size_t step = 4; step >= 1; --step) {
    std::vector<ModelRunner::Token> tokens;
    for (const auto& [slot, ids] : sequences)
      tokens.push_back({slot, ids[ids.size() - step], std::int64_t(ids.size() - step)});
    require_ok(model->step(tokens));
  }
  for (const auto& [slot, ids] : sequences) {
    CAPTURE(slots, slot, gated);
    check_rows(row_of(*model, slot), reference_of(small, ids), std::int64_t(ids.size()) - 1);
  }
}

TEST_CASE("model on the GPU: a slot's bits do not depend on what the other slots hold", "[gpu][model]") {
  const auto [impl, gated] = GENERATE(table<Impl, bool>({{Impl::unfused, false},
                                                         {Impl::graph, false},
                                                         {Impl::persistent, false},
                                                         {Impl::unfused, true},
                                                         {Impl::graph, true}}));
  const Small small(DType::f16, {}, gated ? gated_config() : small_config());
  const Model::Options options{.slots = 4, .capacity = 64, .chunk = 16, .impl = impl};
  const Ids ids = ids_of(24, 4);
  const auto alone = small.model(options), beside = small.model(options);
  std::vector<std::string> expected, got;
  for (const Tensor& row : prefill_and_step(*alone, ids, 10, 2)) expected.push_back(bits(row));
  // The same while other slots come, decode and go.
  const Ids other = ids_of(60, 5);
  require_ok(beside->prefill(0, 0, std::span(other).first(31)));
  require_ok(beside->prefill(2, 0, std::span(ids).first(10)));
  got.push_back(bits(row_of(*beside, 2)));
  for (std::size_t i = 10; i < ids.size(); ++i) {
    std::vector<ModelRunner::Token> tokens{{2, ids[i], std::int64_t(i)}};
    if (i < 20) tokens.insert(tokens.begin(), {0, other[21 + i], std::int64_t(21 + i)});
    if (i == 15) require_ok(beside->prefill(3, 0, other));
    if (i == 20) beside->release(0);
    require_ok(beside->step(tokens));
    got.push_back(bits(row_of(*beside, 2)));
  }
  CAPTURE(to_string(impl), gated);
  CHECK(got == expected);
}

TEST_CASE("model on the GPU: slots that a step leaves out keep their logits", "[gpu][model][small][library]") {
  const Small small;
  const auto model = small.model({.slots = 3, .capacity = 32, .chunk = 16});
  const Ids ids = ids_of(12, 6);
  for (std::int64_t slot : {0, 1, 2}) require_ok(model->prefill(slot, 0, std::span(ids).first(std::size_t(2 + slot))));
  const auto step = [&](std::vector<ModelRunner::Token> tokens) { require_ok(model->step(tokens)); };
  step({{0, ids[2], 2}, {1, ids[3], 3}});
  const std::string second = bits(row_of(*model, 1)), third = bits(row_of(*model, 2));
  for (std::int64_t position = 3; position < 8; ++position) {
    step({{0, ids[std::size_t(position)], position}});
    CHECK(bits(row_of(*model, 1)) == second);
    CHECK(bits(row_of(*model, 2)) == third);
  }
  const ModelRunner::Draw draw{.slot = 1, .sampling = {}, .sequence = 0, .position = 4, .history = {}};
  const auto chosen = model->choose(std::span(&draw, 1));
  REQUIRE(chosen.size() == 1);
  const Tensor row = taken(model->logits(1));
  std::vector<float> wide;
  for (std::int64_t i = 0; i < kVocab; ++i) wide.push_back(float(row.at(i)));
  CHECK(taken(chosen[0]) == taken(cpu_ref::sample(wide, {}, {}, 0, 4)));
}

TEST_CASE("model on the GPU: a step of a prompt, running sequences and drafts gives what separate calls give",
          "[gpu][model]") {
  const Impl impl = GENERATE(Impl::unfused, Impl::graph, Impl::persistent);
  const std::int64_t chunk = GENERATE(128, 512);  // one pass has room for all of the step, or not
  CAPTURE(to_string(impl), chunk);
  const Small small;
  const Model::Options options{.slots = 4, .capacity = 320, .chunk = chunk, .impl = impl};
  constexpr std::int64_t kPrompt = 300, kDrafts = 5, kOthers[] = {9, 20, 12};  // slots 1, 2 and 3
  const Ids prompt = ids_of(kPrompt, 1), next = ids_of(3, 2), drafts = ids_of(kDrafts, 3);
  const auto model = small.model(options);
  std::vector<Ids> all{prompt};  // by slot: what each sequence has read
  for (std::int64_t i = 0; i < 3; ++i) {
    all.push_back(ids_of(kOthers[i], std::uint64_t(4 + i)));
    require_ok(model->prefill(i + 1, 0, all.back()));
  }
  all[1].push_back(next[0]);
  all[2].push_back(next[1]);
  all[3].insert(all[3].end(), drafts.begin(), drafts.end());

  const std::vector<Run> runs{{2, kOthers[1], 1}, {0, 0, kPrompt}, {3, kOthers[2], kDrafts}, {1, kOthers[0], 1}};
  Ids ids{next[1]};
  ids.insert(ids.end(), prompt.begin(), prompt.end());
  ids.insert(ids.end(), drafts.begin(), drafts.end());
  ids.push_back(next[0]);
  const std::vector<std::int64_t> wanted{0, 1, kDrafts, 1};
  Tensor rows(model->activation(), {1 + kDrafts + 1, kVocab});
  require_ok(model->run(runs, ids, {.rows = wanted, .to = rows.view<2>()}));
  const auto rows_at = [&](std::int64_t first, std::int64_t count) {
    Tensor part(rows.dtype(), {count, kVocab});
    const auto bytes = kVocab * std::int64_t(size_bytes(rows.dtype()));
    std::memcpy(part.data(), static_cast<const char*>(rows.data()) + first * bytes, std::size_t(count * bytes));
    return part;
  };
  std::vector<Reference> references;
  for (std::int64_t slot = 0; slot < 4; ++slot) {
    CAPTURE(slot);
    const Ids& read = all[std::size_t(slot)];
    CHECK(model->length(slot) == std::int64_t(read.size()));
    references.push_back(reference_of(small, read));
    check_rows(row_of(*model, slot), references.back(), std::int64_t(read.size()) - 1);
  }
  check_rows(rows_at(1, kDrafts), references[3], kOthers[2]);
  // The caller's rows are the slots' own.
  CHECK(bits(rows_at(0, 1)) == bits(row_of(*model, 0)));
  CHECK(bits(rows_at(kDrafts, 1)) == bits(row_of(*model, 3)));
  CHECK(bits(rows_at(1 + kDrafts, 1)) == bits(row_of(*model, 1)));
  // The drafts but two are taken back, and all sequences go on.
  all[3].resize(kOthers[2] + 2);
  std::vector<ModelRunner::Token> tokens;
  for (std::int64_t slot = 0; slot < 4; ++slot) {
    Ids& read = all[std::size_t(slot)];
    tokens.push_back({slot, std::int32_t(5 + slot), std::int64_t(read.size())});
    read.push_back(tokens.back().id);
  }
  require_ok(model->step(tokens));
  std::vector<ModelRunner::Draw> draws;
  for (std::int64_t slot = 0; slot < 4; ++slot) {
    CAPTURE(slot);
    const Ids& read = all[std::size_t(slot)];
    check_rows(row_of(*model, slot), reference_of(small, read), std::int64_t(read.size()) - 1);
    draws.push_back({.slot = slot, .sampling = {}, .sequence = 0, .position = model->length(slot), .history = {}});
  }
  const auto chosen = model->choose(draws);
  for (std::int64_t slot = 0; slot < 4; ++slot) {
    const Tensor row = row_of(*model, slot);
    std::vector<float> wide;
    for (std::int64_t i = 0; i < kVocab; ++i) wide.push_back(float(row.at(i)));
    CHECK(taken(chosen[std::size_t(slot)]) == taken(cpu_ref::sample(wide, {}, {}, 0, model->length(slot))));
  }
}

TEST_CASE("model on the GPU: weights in place give the same bits and take no memory", "[gpu][model]") {
  const Impl impl = GENERATE(from_range(std::begin(cuda::kImpls), std::end(cuda::kImpls)));
  const WeightFormat linears = GENERATE(WeightFormat{}, WeightFormat{4, 64});  // packed where they lie
  const bool is_gated = GENERATE(false, true);
  if ((linears.bits || is_gated) && impl != Impl::unfused && impl != Impl::graph) return;  // the others take neither
  const Small small(DType::f16, linears, is_gated ? gated_config() : small_config());
  const auto source = taken(cuda::ResidentWeights::load(context(), small.config, DType::f16, small.weights->weights));
  const ModelWeights there = source.model_weights();
  const Model::Options options{.capacity = 96, .impl = impl, .in_place = true};
  CHECK(Model::bytes(small.config, there, options).weights == 0);
  const auto model = taken(Model::create(context(), "small", small.config, there, options));
  CHECK(model->bytes().weights == 0);
  const auto copied = small.model({.capacity = 96, .impl = impl});
  CHECK(copied->bytes().weights > 0);
  CHECK(Model::bytes(small.config, there, options).workspace ==
        Model::bytes(small.config, small.weights->weights, options).workspace);
  const Ids ids = ids_of(20, 4);
  const std::vector<Tensor> ours = prefill_and_step(*model, ids, 9), theirs = prefill_and_step(*copied, ids, 9);
  CAPTURE(to_string(impl), linears.bits, is_gated);
  REQUIRE(ours.size() == theirs.size());
  for (std::size_t i = 0; i < ours.size(); ++i) CHECK(same_bits(ours[i], theirs[i]));
}

TEST_CASE("model on the GPU: logits stay on the device, in order with another stream", "[gpu][model]") {
  constexpr std::int64_t kTokens = 20;
  constexpr int kDelayMs = 30;
  const Small small;
  const auto source = taken(cuda::ResidentWeights::load(context(), small.config, DType::f16, small.weights->weights));
  const ModelWeights there = source.model_weights();
  const auto model = taken(Model::create(context(), "small", small.config, there,
                                         {.slots = 4, .capacity = 32, .chunk = 8, .in_place = true}));
  const Ids ids = ids_of(kTokens, 6);
  Tensor expected(DType::f16, {kTokens, kVocab});
  require_ok(model->forward(0, 0, ids, expected.view<2>()));

  struct Theirs {
    Theirs() {
      require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      for (void*& b : blocks) require_cuda(cudaMalloc(&b, kTokens * kVocab * 2));
    }
    ~Theirs() {
      (void)cudaDeviceSynchronize();
      for (void* b : blocks) (void)cudaFree(b);
      (void)cudaStreamDestroy(stream);
    }
    cudaStream_t stream = nullptr;
    void* blocks[2] = {};
  } theirs;
  const auto logits = [&](int block, std::int64_t rows) {
    return AnyView<2>(theirs.blocks[block], {rows, kVocab}, DType::f16);
  };
  // Their stream is late. Rows that did not wait for it are overwritten, and rows that it does not wait for are missed.
  const auto copied = [&](std::int64_t rows, auto&& run, bool orders_itself = false) {
    enqueue_occupy(theirs.stream, 1, kDelayMs);
    require_cuda(cudaMemsetAsync(theirs.blocks[0], 0xff, kTokens * kVocab * 2, theirs.stream));
    if (!orders_itself) require_ok(model->run_after(theirs.stream));
    require_ok(run(logits(0, rows)));
    if (!orders_itself) require_ok(model->run_before(theirs.stream));
    require_cuda(cudaMemcpyAsync(theirs.blocks[1], theirs.blocks[0], std::size_t(rows * kVocab * 2),
                                 cudaMemcpyDeviceToDevice, theirs.stream));
    return fetch<2>(logits(1, rows));
  };
  // A step whose rows go to the device orders itself.
  const auto forward_on_device = [&](AnyView<2> to) {
    const Run run{.sequence = 0, .first_position = 0, .count = std::int64_t(ids.size())};
    return model->run(std::span(&run, 1), ids,
                      {.own = false,
                       .rows = std::span(&to.shape[0], 1),
                       .to = to,
                       .stream = reinterpret_cast<std::uintptr_t>(theirs.stream)});
  };
  CHECK(same_bits(copied(kTokens, forward_on_device, true), expected));

  for (std::int64_t slot : {0, 1, 2, 3})
    require_ok(model->prefill(slot, 0, std::span(ids).first(std::size_t(2 + slot))));
  const std::vector<ModelRunner::Token> tokens{{0, ids[2], 2}, {1, ids[3], 3}, {3, ids[5], 5}};
  const std::vector<std::int64_t> slots{3, 0, 1, 2};  // slot 2 has those of its prompt
  const Tensor rows = copied(4, [&](AnyView<2> to) -> Status {
    CF_TRY(model->step(tokens));
    return model->copy_logits(slots, to);
  });
  for (std::int64_t row = 0; row < 4; ++row) {
    const Tensor one = row_of(*model, slots[std::size_t(row)]);
    CHECK(std::memcmp(static_cast<const std::byte*>(rows.data()) + row * one.size_bytes(), one.data(),
                      std::size_t(one.size_bytes())) == 0);
  }

  // Weights that their stream changes.
  const Tensor none = copied(1, [&](AnyView<2> to) -> Status {
    for (const ConstAnyView<1>& v : {there.final_layer_norm.gamma, there.final_layer_norm.beta})
      require_cuda(cudaMemsetAsync(const_cast<void*>(v.data), 0, std::size_t(v.bytes()), theirs.stream));
    CF_TRY(model->run_after(theirs.stream));
    return forward_on_device(to);
  });
  for (std::int64_t i = 0; i < kVocab; ++i) CHECK(none.at(i) == 0);

  const auto fault = [](const Status& s, std::string_view part) {
    return refusal_fault(s, Code::invalid_argument, {part});
  };
  CHECK(fault(forward_on_device(AnyView<2>(theirs.blocks[0], {1, 8}, DType::f16)),
              "expected rows of 333 float16, got 8 float16") == "");
  CHECK(fault(model->copy_logits(slots, logits(0, 3)), "expected a row for each of 4 slots, got 3") == "");
}

TEST_CASE("decoder on the GPU: each id is the CPU sampler's choice among the logits", "[gpu][model][sampling]") {
  const Sampling sampling =
      GENERATE(Sampling{}, Sampling{.temperature = 0.8, .top_k = 20, .seed = 3},
               Sampling{.temperature = 1.3, .top_p = 0.9, .min_p = 0.01, .seed = 4},
               Sampling{.temperature = 1, .repetition_penalty = 1.3, .seed = 5}, Sampling{.repetition_penalty = 1.8});
  const Small small;
  Decoder d = small.decoder({.slots = 2, .capacity = 96, .chunk = 16});
  const Ids prompt = ids_of(9, 7);
  // A first sequence ends, and leaves its slot to the second.
  const auto before = taken(d.add(ids_of(5, 8), {.sampling = sampling, .max_new_tokens = 3}));
  taken(d.decode(3));
  CHECK(taken(d.finish(before)) == Finish::length);
  const auto s = taken(d.add(prompt, {.sampling = sampling, .id = 11}));
  Ids history = prompt;
  for (int i = 0; i < 40; ++i) {
    const auto emitted = taken(d.decode(1));
    REQUIRE(emitted.size() == 1);
    const Tensor row = taken(d.logits(s));
    std::vector<float> wide;
    for (std::int64_t k = 0; k < kVocab; ++k) wide.push_back(float(row.at(k)));
    CHECK(emitted[0].id == taken(cpu_ref::sample(wide, sampling, history, 11, std::int64_t(history.size()))));
    history.push_back(emitted[0].id);
  }
}

TEST_CASE("decoder on the GPU: the same run has the same ids, however it is cut and whoever is beside it",
          "[gpu][model][reruns]") {
  const Impl impl = GENERATE(Impl::unfused, Impl::graph, Impl::persistent);
  const Small small;
  const Model::Options options{.slots = 3, .capacity = 96, .chunk = 16, .impl = impl};
  const std::vector<Ids> prompts{ids_of(9, 1), ids_of(30, 2), ids_of(1, 3)};
  const SequenceOptions sampled{.sampling = {.temperature = 1, .seed = 9}, .max_new_tokens = 24};
  Decoder d = small.decoder(options);
  const Continued first = continued(d, prompts, sampled, 1);
  for (const Ids& ids : first.ids) CHECK(ids.size() == 24);
  for (int run = 0; run < 100; ++run) CHECK(continued(d, prompts, sampled, 1 + run % 30) == first);
  // One by one, each in another slot than before.
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    SequenceOptions own = sampled;
    own.id = i;
    const auto s = taken(d.add(prompts[i], own));
    while (d.active()) taken(d.decode(5));
    CHECK(taken(d.ids(s)) == first.ids[i]);
  }
}

TEST_CASE("decoder on the GPU: stops, limits, joiners and the cache's end", "[gpu][model]") {
  const Small small;
  Decoder d = small.decoder({.slots = 2, .capacity = 24, .chunk = 16});
  const Ids prompt = ids_of(6, 11);
  const auto free_run = taken(d.add(prompt, {.max_new_tokens = 12}));
  taken(d.decode(20));
  const Ids ids = taken(d.ids(free_run));
  REQUIRE(ids.size() == 12);
  // The same sequence, ended by an id, while another joins it.
  const auto stopped = taken(d.add(prompt, {.stop = {ids[5]}}));
  taken(d.decode(2));
  const auto joined = taken(d.add(ids_of(20, 12)));
  taken(d.decode(12));
  CHECK(taken(d.finish(stopped)) == Finish::stop);
  const Ids until = taken(d.ids(stopped));
  CHECK(until == Ids(ids.begin(), std::find(ids.begin(), ids.end(), ids[5]) + 1));
  CHECK(taken(d.finish(joined)) == Finish::failed);
  CHECK(refusal_fault(d.status(joined), Code::invalid_argument,
                      {"the cache's capacity of 24 entries is reached after 5 new tokens"}) == "");
  CHECK(taken(d.ids(joined)).size() == 5);
}

TEST_CASE("decoder on the GPU: a sequence ends at the model's window, whatever runs ahead", "[gpu][model]") {
  const Impl impl = GENERATE(Impl::layer, Impl::persistent);  // the others leave keys out
  ModelConfig m = gated_config(ModelType::mistral);
  m.tie_word_embeddings = false;
  std::vector<Ids> ids;
  for (std::int64_t window : {0, 32}) {
    m.sliding_window = window;
    const Small small(DType::f16, {}, m);
    Decoder d = small.decoder({.capacity = 96, .chunk = 16, .impl = impl});
    const auto s = taken(d.add(ids_of(20, 11), {.max_new_tokens = 30}));
    while (d.active()) taken(d.decode(7));
    CHECK(taken(d.finish(s)) == (window ? Finish::failed : Finish::length));
    if (window)
      CHECK(refusal_fault(d.status(s), Code::invalid_argument,
                          {"the config's sliding_window of 32 entries is reached after 13 new tokens"}) == "");
    ids.push_back(taken(d.ids(s)));
  }
  REQUIRE(ids[1].size() == 13);
  CHECK(std::equal(ids[1].begin(), ids[1].end(), ids[0].begin()));
  const Small small(DType::f16, {}, m);
  const auto model = small.model({.capacity = 96, .impl = impl});
  CHECK(refusal_fault(model->prefill(0, 0, ids_of(33, 1)), Code::invalid_argument,
                      {"slot 0: expected at most 32 entries, the config's sliding_window, got 33"}) == "");
}

namespace {

AnyView<2> rows_of_embedding(const Small& small) {
  const ConstAnyView<2>& table = small.weights->weights.embed_in;
  return AnyView<2>(const_cast<void*>(table.data), table.shape, table.dtype);
}

/// Greedy ids of these prompts. With `each` above 0 also the bits of the logits, which are asked for every `each` ids.
struct Greedy {
  std::vector<Ids> ids;
  std::vector<std::vector<std::string>> logits;
};

Greedy greedy(const Small& small, const Model::Options& o, const std::vector<Ids>& prompts, std::int64_t tokens,
              std::int64_t at_once, std::int64_t each) {
  Decoder d = small.decoder(o);
  std::vector<Decoder::Sequence> sequences;
  for (const Ids& prompt : prompts) sequences.push_back(taken(d.add(prompt)));
  Greedy g;
  g.logits.resize(prompts.size());
  std::int64_t made = 0;
  while (made < tokens) {
    const std::int64_t n = std::min(at_once, tokens - made);
    taken(d.decode(n));
    made += n;
    if (each > 0 && made % each == 0)
      for (std::size_t i = 0; i < sequences.size(); ++i) g.logits[i].push_back(bits(taken(d.logits(sequences[i]))));
  }
  for (Decoder::Sequence s : sequences) g.ids.push_back(taken(d.ids(s)));
  return g;
}

}  // namespace

TEST_CASE("decoder on the GPU: a launch of many tokens gives the ids and logits of single steps",
          "[gpu][model][tokens]") {
  const DType dtype = GENERATE(DType::f16, DType::bf16);
  const std::size_t sequences = GENERATE(std::size_t(1), std::size_t(3), std::size_t(8));
  const bool gated = GENERATE(false, true), parallel = GENERATE(true, false);
  if (gated && parallel) return;  // no such model
  CAPTURE(to_string(dtype), sequences, gated, parallel);
  ModelConfig config = gated ? gated_config() : small_config();
  config.use_parallel_residual = parallel;
  const Small small(dtype, {}, config);
  const Model::Options options{.slots = std::int64_t(sequences), .capacity = 96, .chunk = 16, .impl = Impl::persistent};
  std::vector<Ids> prompts;
  for (std::size_t i = 0; i < sequences; ++i) prompts.push_back(ids_of(1 + 5 * std::int64_t(i % 4), i));
  // Whoever asks for each token's logits gets steps of one token.
  const Greedy single = greedy(small, options, prompts, 75, 1, 1);
  for (std::int64_t at_once : {1, 33, 75}) {
    const Greedy many = greedy(small, options, prompts, 75, at_once, 0);
    CHECK(many.ids == single.ids);
  }
  // In the middle of a launch.
  for (std::int64_t asked : {7, 40}) {
    const Greedy many = greedy(small, options, prompts, asked, 5, asked);
    for (std::size_t i = 0; i < sequences; ++i) {
      CHECK(std::equal(many.ids[i].begin(), many.ids[i].end(), single.ids[i].begin()));
      CHECK(many.logits[i].at(0) == single.logits[i].at(std::size_t(asked) - 1));
    }
  }
}

TEST_CASE("decoder on the GPU: a launch of many tokens ends for stops, joiners, drops and the cache's end",
          "[gpu][model][tokens]") {
  const Small small;
  const Model::Options options{.slots = 2, .capacity = 40, .chunk = 16, .impl = Impl::persistent};
  const Ids prompt = ids_of(6, 11), other = ids_of(20, 12);
  const auto alone = [&](const Ids& p, std::int64_t tokens) {
    Decoder d = small.decoder(options);
    const auto s = taken(d.add(p));
    for (std::int64_t i = 0; i < tokens; ++i) {
      taken(d.decode(1));
      taken(d.logits(s));
    }
    return taken(d.ids(s));
  };
  const Ids ids = alone(prompt, 34), ids_of_other = alone(other, 20);
  Decoder d = small.decoder(options);
  const auto stopped = taken(d.add(prompt, {.stop = {ids[9]}}));
  taken(d.decode(3));
  const auto joined = taken(d.add(other));
  taken(d.decode(4));
  const auto before = taken(d.ids(joined));
  taken(d.decode(60));
  CHECK(taken(d.finish(stopped)) == Finish::stop);
  CHECK(taken(d.ids(stopped)) == Ids(ids.begin(), std::find(ids.begin(), ids.end(), ids[9]) + 1));
  CHECK(std::equal(before.begin(), before.end(), ids_of_other.begin()));
  // The prompt has 20 ids, the cache 40 entries: 20 new ids are appended, and the last entry gives one id more.
  CHECK(taken(d.finish(joined)) == Finish::failed);
  const Ids all = taken(d.ids(joined));
  REQUIRE(all.size() == 21);
  CHECK(std::equal(ids_of_other.begin(), ids_of_other.end(), all.begin()));
  // A dropped sequence leaves nothing behind for the next one in its slot.
  require_ok(d.drop(stopped));
  require_ok(d.drop(joined));
  const auto dropped = taken(d.add(other));
  taken(d.decode(5));
  require_ok(d.drop(dropped));
  const auto again = taken(d.add(prompt, {.max_new_tokens = 34}));
  while (d.active()) taken(d.decode(50));
  CHECK(taken(d.ids(again)) == ids);
}

TEST_CASE("decoder on the GPU: sequences of one launch end at their own stop ids, limits and the cache's end",
          "[gpu][model][tokens]") {
  const bool gated = GENERATE(false, true);
  const Small small(DType::f16, {}, gated ? gated_config() : small_config());
  const Model::Options options{.slots = 4, .capacity = 80, .chunk = 16, .impl = Impl::persistent};
  std::vector<Ids> prompts;
  for (std::uint64_t i = 0; i < 4; ++i) prompts.push_back(ids_of(9 + std::int64_t(i), i));
  const Greedy free_run = greedy(small, options, prompts, 60, 60, 0);
  const auto until = [&](std::size_t i, std::int32_t stop) {
    const Ids& ids = free_run.ids[i];
    return Ids(ids.begin(), std::find(ids.begin(), ids.end(), stop) + 1);
  };
  // A launch has up to 32 tokens: the second sequence's stop id comes around the first launch's end.
  const std::int32_t early = free_run.ids[0][4], late = free_run.ids[1][std::size_t(GENERATE(31, 32, 33, 34, 35))];
  // The last sequence has more stop ids than a launch looks for, and ends at the last of them.
  Ids many{free_run.ids[3][20]};
  for (std::int32_t id = 0; many.size() < 12; ++id)
    if (std::find(free_run.ids[3].begin(), free_run.ids[3].end(), id) == free_run.ids[3].end())
      many.insert(many.begin(), id);
  for (std::int64_t at_once : {1, 7, 60}) {
    CAPTURE(at_once);
    Decoder d = small.decoder(options);
    const auto first = taken(d.add(prompts[0], {.stop = {early}})), second = taken(d.add(prompts[1], {.stop = {late}})),
               third = taken(d.add(prompts[2], {.max_new_tokens = 41})),
               fourth = taken(d.add(prompts[3], {.stop = many}));
    for (std::int64_t made = 0; made < 50; made += at_once) taken(d.decode(at_once));
    CHECK(!d.active());
    CHECK(taken(d.ids(first)) == until(0, early));
    CHECK(taken(d.ids(second)) == until(1, late));
    CHECK(taken(d.ids(third)) == Ids(free_run.ids[2].begin(), free_run.ids[2].begin() + 41));
    CHECK(taken(d.ids(fourth)) == until(3, many.back()));
    CHECK(taken(d.finish(first)) == Finish::stop);
    CHECK(taken(d.finish(third)) == Finish::length);
    // Their slots serve other sequences.
    const auto again = taken(d.add(prompts[1], {.max_new_tokens = 60}));
    while (d.active()) taken(d.decode(at_once));
    CHECK(taken(d.ids(again)) == free_run.ids[1]);
  }
}

TEST_CASE("model on the GPU: a choice can be made twice, and a sequence goes on behind a stop id or a limit",
          "[gpu][model][tokens]") {
  const Impl impl = GENERATE(Impl::graph, Impl::persistent);
  const std::int64_t slots = GENERATE(1, 3);
  CAPTURE(to_string(impl), slots);
  const Small small;
  const Model::Options options{.slots = slots, .capacity = 80, .chunk = 16, .impl = impl};
  std::vector<Ids> prompts;
  for (std::int64_t i = 0; i < slots; ++i) prompts.push_back(ids_of(9 + i, std::uint64_t(i)));
  const Greedy expected = greedy(small, options, prompts, 51, 1, 1);
  const auto model = small.model(options);
  for (std::int64_t i = 0; i < slots; ++i) require_ok(model->prefill(i, 0, prompts[std::size_t(i)]));
  // Every draw has other stop ids and limits: the caller goes on all the same.
  for (std::int64_t n = 0; n < 50; ++n) {
    CAPTURE(n);
    std::vector<ModelRunner::Token> next;
    for (int twice = 0; twice < 2; ++twice) {
      std::vector<ModelRunner::Draw> draws;
      for (std::int64_t i = 0; i < slots; ++i) {
        const Ids& ids = expected.ids[std::size_t(i)];
        const std::int64_t position = std::int64_t(prompts[std::size_t(i)].size()) + n;
        ModelRunner::Draw draw{.slot = i, .sampling = {}, .sequence = 0, .position = position, .history = {}};
        if (n % 11 == 7) draw.left = (n + i) % 2;
        // The first of two draws has a stop id that the second one lacks.
        if (i > 0 && n >= 20 && n <= 40 && twice == 0) draw.stop = std::span(ids).subspan(30, 1);
        if (n == 44) draw.stop = std::span(ids).subspan(44, 1);
        draws.push_back(draw);
      }
      const auto chosen = model->choose(draws);
      next.clear();
      for (std::int64_t i = 0; i < slots; ++i) {
        const std::int32_t id = taken(chosen[std::size_t(i)]);
        CHECK(id == expected.ids[std::size_t(i)][std::size_t(n)]);
        next.push_back({.slot = i, .id = id, .position = draws[std::size_t(i)].position});
      }
    }
    require_ok(model->step(next));
  }
  for (std::int64_t i = 0; i < slots; ++i)
    CHECK(bits(taken(model->logits(i))) == expected.logits[std::size_t(i)].back());
}

TEST_CASE("decoder on the GPU: a hundred runs of many tokens a launch have the same ids", "[gpu][model][tokens]") {
  const bool gated = GENERATE(false, true);
  const Small small(DType::f16, {}, gated ? gated_config(ModelType::qwen2) : small_config());
  const Model::Options options{.slots = 1, .capacity = 96, .chunk = 16, .impl = Impl::persistent};
  const std::vector<Ids> prompts{ids_of(9, 1)};
  const Greedy first = greedy(small, options, prompts, 80, 80, 0);
  Decoder d = small.decoder(options);
  for (int run = 0; run < 100; ++run) {
    const auto s = taken(d.add(prompts[0], {.max_new_tokens = 80}));
    while (d.active()) taken(d.decode(1 + run));
    CHECK(taken(d.ids(s)) == first.ids[0]);
    require_ok(d.drop(s));
  }
}

TEST_CASE("model on the GPU: a NaN is named with the site that made it", "[gpu][model]") {
  const bool gated = GENERATE(false, true);
  const Small small(DType::f16, {}, gated ? gated_config() : small_config());
  const auto& dense = std::get<DenseWeight>(small.weights->weights.layers[1].dense.weight).weight;
  constexpr std::uint16_t nan = 0x7e00;
  std::memcpy(static_cast<char*>(const_cast<void*>(dense.data)) + 10, &nan, sizeof nan);
  Decoder d = small.decoder({.slots = 2, .capacity = 32});
  const auto s = taken(d.add(ids_of(4, 1)));
  taken(d.decode(2));
  CHECK(taken(d.finish(s)) == Finish::failed);
  CHECK(refusal_fault(d.status(s), Code::invalid_argument,
                      {"logits[0] is NaN",
                       std::string("the first NaN of this token is made by ") +
                           (gated ? "model.layers.1.self_attn.o_proj" : "gpt_neox.layers.1.attention.dense")}) == "");
}

TEST_CASE("model on the GPU: a NaN in a launch of many tokens ends its sequence alone, and is named",
          "[gpu][model][tokens]") {
  const Model::Options options{.slots = 2, .capacity = 96, .chunk = 16, .impl = Impl::persistent};
  const std::vector<Ids> prompts{ids_of(9, 1), ids_of(4, 2)};
  const Greedy sound = greedy(Small(), options, prompts, 30, 30, 0);
  // The first sequence meets an id that the other does not, and whose row of the embedding is NaN.
  const auto in = [](const Ids& ids, std::int32_t id) { return std::find(ids.begin(), ids.end(), id) != ids.end(); };
  std::size_t at = 0;
  const Ids& ids = sound.ids[0];
  while (at < ids.size() && (in(prompts[0], ids[at]) || in(prompts[1], ids[at]) || in(sound.ids[1], ids[at]))) ++at;
  REQUIRE(at < ids.size());
  const Small small;
  const AnyView<2> table = rows_of_embedding(small);
  constexpr std::uint16_t nan = 0x7e00;
  std::memcpy(static_cast<std::byte*>(table.data) + ids[at] * table.shape[1] * 2, &nan, sizeof nan);
  Decoder d = small.decoder(options);
  const auto first = taken(d.add(prompts[0])), second = taken(d.add(prompts[1]));
  taken(d.decode(30));
  CHECK(taken(d.finish(first)) == Finish::failed);
  CHECK(taken(d.ids(first)) == Ids(ids.begin(), ids.begin() + std::ptrdiff_t(at) + 1));
  CHECK(refusal_fault(d.status(first), Code::invalid_argument,
                      {"is NaN", "the first NaN of this token is made by gpt_neox.embed_in"}) == "");
  CHECK(taken(d.ids(second)) == sound.ids[1]);
}

TEST_CASE("model on the GPU: the taps of every site are the oracle's within the budget, and watching changes no bit",
          "[gpu][model][small]") {
  const auto [dtype, bits_of_weights] = GENERATE(
      table<DType, int>({{DType::f16, 0}, {DType::bf16, 0}, {DType::f32, 0}, {DType::f16, 4}, {DType::f16, 8}}));
  const bool gated = GENERATE(false, true);
  const Small small(dtype, {.bits = bits_of_weights, .group_size = bits_of_weights ? 64 : 0},
                    gated ? gated_config() : small_config());
  const Ids ids = ids_of(19, 12);
  const auto n = std::int64_t(ids.size());
  const std::vector<Tap> all = model_taps(small.config, small.weights->weights);
  const auto watched = [&](ModelRunner& runner, Tensor& logits) {
    std::map<std::string, TapRows> taps;
    for (const Tap& t : all) {
      Shape shape = t.shape;
      shape.insert(shape.begin(), n);
      taps[t.name].rows = Tensor(runner.activation(), std::move(shape));
    }
    runner.watch([&](const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors) {
      return append_taps(runner, site, tensors, taps);
    });
    require_ok(runner.forward(0, 0, ids, logits.view<2>()));
    runner.watch({});
    return taps;
  };
  const auto oracle = taken(cpu_ref::Model::create(small.config, small.weights->weights, small.weights,
                                                   {.capacity = n, .chunk = n, .activation = DType::f64}));
  Tensor exact(DType::f64, {n, kVocab});
  const auto expected = watched(*oracle, exact);
  const Budget budget = reference_of(small, ids).budget;
  for (std::int64_t chunk : {1, 5, 64}) {
    const auto model = small.model({.capacity = 96, .chunk = chunk});
    Tensor plain(dtype, {n, kVocab}), logits(dtype, {n, kVocab});
    require_ok(small.model({.capacity = 96, .chunk = chunk})->forward(0, 0, ids, plain.view<2>()));
    const auto got = watched(*model, logits);
    CAPTURE(to_string(dtype), bits_of_weights, chunk, gated);
    CHECK(bits(logits) == bits(plain));
    CHECK(bits(got.at("logits").rows) == bits(logits));
    for (const auto& [name, tap] : got) {
      CHECK(tap.made_rows == n);
      const auto error = compare(tap.rows, expected.at(name).rows);
      REQUIRE(error);
      CAPTURE(name, error->rel_l2, error->rel_max, budget.rel_l2, budget.rel_max);
      CHECK(error->non_finite == 0);
      CHECK(error->rel_l2 <= budget.rel_l2);
    }
    // What follows is not watched, and has the bits of a model that never was.
    require_ok(model->forward(0, 0, ids, logits.view<2>()));
    CHECK(bits(logits) == bits(plain));
  }
}

TEST_CASE("model on the GPU: a visitor sees the sites that the CPU's does, those of steps too, and ends a prompt",
          "[gpu][model][small]") {
  const Small small;
  const auto names_of = [&](ModelRunner& runner) {
    std::vector<std::string> names;
    runner.watch([&](const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors) -> Status {
      names.push_back(site.name());
      CHECK(std::count_if(tensors.begin(), tensors.end(), [](const auto& t) { return is_written(t.role); }) > 0);
      return {};
    });
    require_ok(runner.prefill(0, 0, Ids{1, 2, 3}));
    return names;
  };
  const auto model = small.model({.slots = 2, .capacity = 8, .chunk = 2});
  const auto oracle = taken(cpu_ref::Model::create(small.config, small.weights->weights, small.weights,
                                                   {.capacity = 8, .chunk = 2, .activation = DType::f64}));
  const std::vector<std::string> names = names_of(*model);
  CHECK(names == names_of(*oracle));
  CHECK(names.size() == 2 * (3 * sites.size() + 1) + 2);

  const ModelRunner::Token token{.slot = 0, .id = 4, .position = 3};
  std::vector<std::string> of_step;
  model->watch([&](const ModelSite& site, auto&&) -> Status {
    of_step.push_back(site.name());
    return {};
  });
  require_ok(model->step(std::span(&token, 1)));
  CHECK(of_step.size() == 3 * sites.size() + 3);
  model->watch([](const ModelSite& site, auto&&) -> Status {
    return site.layer == 1 ? Status::error(Code::io_error, "enough") : Status();
  });
  CHECK(refusal_fault(model->prefill(1, 0, Ids{1, 2}), Code::io_error, {"enough"}) == "");
  model->watch({});
  const ModelRunner::Token next{.slot = 0, .id = 4, .position = 4};
  require_ok(model->step(std::span(&next, 1)));
  require_ok(model->prefill(1, 0, Ids{1, 2}));
}

TEST_CASE("model on the GPU: what cannot be is refused by name", "[gpu][model][bad]") {
  const Small small;
  const auto refused = [&](const Model::Options& o, Code code, std::initializer_list<std::string_view> parts) {
    return refusal_fault(small.try_model(o).status(), code, parts);
  };
  CHECK(refused({.slots = 1025}, Code::invalid_argument, {"slots", "1024", "1025"}) == "");
  CHECK(refused({.capacity = 0}, Code::invalid_argument, {"capacity", "0"}) == "");
  CHECK(refused({.slots = 64, .capacity = 1 << 26}, Code::out_of_memory, {"small: 64 slots of ", "GB are free"}) == "");
  CHECK(refused({.slots = 9, .impl = Impl::persistent}, Code::unimplemented, {"1 to 8 sequences, got 9"}) == "");
  Small lacks;
  lacks.weights->weights.layers.pop_back();
  CHECK(refusal_fault(lacks.try_model({}).status(), Code::invalid_argument, {"3 layers, got 2"}) == "");

  const auto model = small.model({.slots = 2, .capacity = 8});
  const auto fault = [](const Status& s, std::string_view part) {
    return refusal_fault(s, Code::invalid_argument, {part});
  };
  CHECK(fault(model->prefill(2, 0, Ids{1}), "slot: expected 0 to 1, got 2") == "");
  CHECK(fault(model->prefill(0, 1, Ids{1}), "expected a first position of 0 to 0") == "");
  CHECK(fault(model->prefill(0, 0, Ids(9, 1)), "at most 8 entries") == "");
  CHECK(fault(model->prefill(0, 0, Ids{1, kVocab}), "ids[1]: expected an id of 0 to 332, got 333") == "");
  Tensor logits(DType::f32, {1, kVocab});
  CHECK(fault(model->forward(0, 0, Ids{1}, logits.view<2>()), "expected rows of 333 float16, got 333 float32") == "");
  require_ok(model->prefill(0, 0, Ids{1, 2}));
  const std::vector<ModelRunner::Token> twice{{0, 3, 2}, {0, 4, 2}};
  CHECK(fault(model->step(twice), "expected one run a step, got two") == "");
  const ModelRunner::Token bad{0, -1, 2};
  CHECK(fault(model->step(std::span(&bad, 1)), "expected an id of 0 to 332, got -1") == "");
  const ModelRunner::Draw draw{.slot = 0, .sampling = {}, .sequence = 0, .position = 3, .history = {}};
  CHECK(fault(model->choose(std::span(&draw, 1))[0].status(), "a choice for position 2, got 3") == "");
}

TEST_CASE("model on the GPU: its bytes are what it takes, and all are given back", "[gpu][model][alone]") {
  const Small small;
  small.model();  // loads the kernels
  const auto free_bytes = [] {
    std::size_t free = 0, total = 0;
    require_cuda(cudaMemGetInfo(&free, &total));
    return double(free);
  };
  const Model::Options options{.slots = 4, .capacity = 4096, .chunk = 8};
  const double before = free_bytes();
  {
    const auto model = small.model(options);
    const cuda::ModelBytes bytes = Model::bytes(small.config, small.weights->weights, options);
    const double told = bytes.total();
    CHECK(model->bytes().cache == bytes.cache);
    CHECK(model->bytes().workspace == bytes.workspace);
    CHECK(std::abs(model->bytes().total() - told) <= 0.01 * told + 1e6);
    // The driver takes memory in pieces of 2 MB; a graph has some of its own.
    CHECK(before - free_bytes() <= told + 64e6);
  }
  CHECK(free_bytes() >= before - 2e6);
}
