// Models that several processes share, with sockets over loopback as the wire.
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/compare.hpp"
#include "core/model/decoder.hpp"
#include "core/ranks/group.hpp"
#include "cpu_ref/model.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/held_port.hpp"
#include "tests/support/rank_process.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/small_model.hpp"

using namespace cf;
using namespace cf::test;

namespace {

using cpu_ref::Model;
using Ids = std::vector<std::int32_t>;

struct Format {
  DType dtype;
  WeightFormat linears;
};
const Format kFormats[] = {{DType::f32, {}}, {DType::f16, {.bits = 4, .group_size = 16}}};

Result<std::unique_ptr<Model>> model_of(const ModelConfig& m, const Format& format, Model::Options options,
                                        std::uint64_t seed = 1) {
  const auto weights = std::make_shared<OwnedModelWeights>(procedural_model(m, format.dtype, seed, format.linears));
  options.capacity = 32;
  return Model::create(m, weights->weights, weights, options);
}

/// The ids of three prompts in two slots: one is greedy, the others are drawn.
Result<std::vector<Ids>> decode(
    std::unique_ptr<Model> model, const std::function<void()>& between = [] {}) {
  const Ids prompts[] = {{3, 1, 4, 1, 5}, {9, 2}, {6, 5, 3, 5, 8, 9, 7}};
  Decoder decoder(std::move(model), {});
  for (std::size_t i = 0; i < std::size(prompts); ++i)
    CF_TRY(decoder
               .add(prompts[i],
                    {.sampling = {.temperature = i == 0 ? 0.0f : 1.0f, .seed = 7}, .id = i, .max_new_tokens = 8})
               .status());
  while (decoder.active()) {
    CF_TRY(decoder.decode(1).status());
    between();
  }
  std::vector<Ids> ids;
  for (std::int64_t i = 0; i < std::int64_t(std::size(prompts)); ++i) {
    CF_TRY(decoder.status(i));
    ids.push_back(*decoder.ids(i));
  }
  return ids;
}

std::string text_of(const std::vector<Ids>& all) {
  std::string text;
  for (const Ids& ids : all)
    for (const std::int32_t id : ids) text += std::to_string(id) + (&id == &ids.back() ? "\n" : ",");
  return text;
}

/// Runs work(group) as each rank of a group, on threads of this process.
std::vector<Status> on_threads(std::int64_t ranks,
                               const std::function<Status(const std::shared_ptr<RankGroup>&)>& work) {
  const HeldPort port;
  std::vector<Status> ended(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (std::int64_t r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      const auto group = join_here(r, ranks, port.port());
      ended[std::size_t(r)] = group ? work(*group) : group.status();
    });
  for (std::thread& t : threads) t.join();
  return ended;
}

/// Decodes with the models of all families as a rank of the group, and agrees with the other ranks on the ids.
Status decode_all(const std::shared_ptr<RankGroup>& group, std::vector<std::string>& made) {
  for (const ModelConfig& m : divisible_models())
    for (const Format& format : kFormats) {
      CF_TRY_ASSIGN(std::unique_ptr<Model> model,
                    model_of(m, format, {.slots = 2, .activation = DType::f64, .group = group}));
      CF_TRY_ASSIGN(const std::vector<Ids> ids, decode(std::move(model)));
      CF_TRY(group->agree(text_of(ids)));
      made.push_back(text_of(ids));
    }
  return {};
}

}  // namespace

TEST_CASE("A rank of a process of its own decodes", "[.][decoding-rank]") {
  std::vector<std::string> made;
  require_done(decode_all(join_as_torchrun_says(), made));
}

TEST_CASE("Two processes make the ids of one, in every family, dense and GPTQ", "[ranks]") {
  const HeldPort port;
  RankProcess other("[decoding-rank]", 1, 2, port.port());
  std::vector<std::string> made;
  const auto group = join_here(0, 2, port.port());
  REQUIRE(group);
  const Status decoded = decode_all(*group, made);
  INFO(decoded.message());
  REQUIRE(decoded);
  const int ended = other.wait();
  INFO(other.last_line());
  CHECK(WIFEXITED(ended));
  CHECK(WEXITSTATUS(ended) == 0);
  std::size_t next = 0;
  for (const ModelConfig& m : divisible_models())
    for (const Format& format : kFormats) {
      INFO(m.name);
      auto whole = model_of(m, format, {.slots = 2, .activation = DType::f64});
      REQUIRE(whole);
      const auto ids = decode(*std::move(whole));
      REQUIRE(ids);
      CHECK(made.at(next++) == text_of(*ids));
    }
}

TEST_CASE("Four ranks have the same bits of float32 logits, in steps, streams, pages and scores", "[ranks]") {
  const ModelConfig m = divisible_models()[2];
  std::vector<Model::Options> ways{{.slots = 2},
                                   {.slots = 2, .chunk = 3, .invariant = true},
                                   {.slots = 2, .window = 8, .sinks = 2},
                                   {.slots = 2, .pages = 8, .page_entries = 4}};
  const auto ended = on_threads(4, [&](const std::shared_ptr<RankGroup>& group) -> Status {
    for (Model::Options o : ways) {
      o.group = group;
      CF_TRY_ASSIGN(std::unique_ptr<Model> model, model_of(m, kFormats[0], o));
      const Ids ids{3, 1, 4, 1, 5, 9, 2};
      CF_TRY(model->prefill(0, 0, ids));
      CF_TRY(model->prefill(1, 0, std::span(ids).first(2)));
      const ModelRunner::Token tokens[] = {{.slot = 0, .id = 6, .position = 7}, {.slot = 1, .id = 5, .position = 2}};
      CF_TRY(model->step(tokens));
      for (const std::int64_t slot : {0, 1}) {
        CF_TRY_ASSIGN(const Tensor row, model->logits(slot));
        CF_TRY(group->agree({static_cast<const char*>(row.data()), std::size_t(row.size_bytes())}));
      }
    }
    return {};
  });
  for (const Status& s : ended) {
    INFO(s.message());
    CHECK(s);
  }
}

TEST_CASE("A rank with another model, other weights or other options is named on all ranks", "[ranks]") {
  const std::vector<ModelConfig> models = divisible_models();
  struct Case {
    const char* expected;
    std::function<void(ModelConfig&, Model::Options&, std::uint64_t& seed, Format&)> change;  // of rank 1
  };
  const Case cases[] = {{"ranks: rank 1 has 'num_layers 3', expected 'num_layers 2' as rank 0 has",
                         [](auto& m, auto&, auto&, auto&) { m.num_hidden_layers = 3; }},
                        {"ranks: rank 1 has 'rope_theta 500', expected 'rope_theta 10000' as rank 0 has",
                         [](auto& m, auto&, auto&, auto&) { m.rope_theta = 500; }},
                        {"ranks: rank 1 has 'weights float16', expected 'weights float32' as rank 0 has",
                         [](auto&, auto&, auto&, Format& f) { f.dtype = DType::f16; }},
                        {"ranks: rank 1 has 'hash of weights ", [](auto&, auto&, auto& seed, auto&) { seed = 2; }},
                        {"ranks: rank 1 has 'chunk 7', expected 'chunk 512' as rank 0 has",
                         [](auto&, Model::Options& o, auto&, auto&) { o.chunk = 7; }},
                        // What a rank refuses by itself, the others hear of.
                        {"ranks: rank 1: model: invariant: expected activations of float32, got float64",
                         [](auto&, Model::Options& o, auto&, auto&) {
                           o.invariant = true;
                           o.activation = DType::f64;
                         }}};
  for (const Case& c : cases) {
    const auto ended = on_threads(2, [&](const std::shared_ptr<RankGroup>& group) -> Status {
      ModelConfig m = models[0];
      Model::Options o{.group = group};
      std::uint64_t seed = 1;
      Format format = kFormats[0];
      if (group->rank() == 1) c.change(m, o, seed, format);
      return model_of(m, format, o, seed).status();
    });
    INFO(ended[0].message());
    CHECK(ended[0].message().starts_with(c.expected));
    CHECK(ended[0].message().find(ended[1].message()) != std::string::npos);  // whole, or behind its rank
  }
}

TEST_CASE("What ranks cannot share is refused by name", "[ranks]") {
  const auto refused = [](const ModelConfig& m, const Format& format, const char* expected) {
    const auto ended = on_threads(
        4, [&](const std::shared_ptr<RankGroup>& group) { return model_of(m, format, {.group = group}).status(); });
    for (const Status& s : ended) {
      INFO(s.message());
      CHECK(s.message().find(expected) != std::string::npos);
    }
  };
  ModelConfig m = divisible_models()[2];
  refused(m, {DType::f16, {.bits = 8, .group_size = 64}}, "expected a multiple of the group_size 64");
  m.num_key_value_heads = 2;
  refused(m, kFormats[0], "4 ranks must divide num_kv_heads, got 2");
}

TEST_CASE("Ranks swap weights together or not at all, and no visitor watches them", "[ranks][swap]") {
  const ModelConfig m = divisible_models()[0];
  const Ids ids{3, 1, 4, 1, 5};
  const auto weights_of = [&](std::uint64_t seed) {
    return std::make_shared<OwnedModelWeights>(procedural_model(m, DType::f32, seed, {}));
  };
  const auto logits_of = [&](Model& model) -> Result<Tensor> {
    CF_TRY(model.prefill(0, 0, ids));
    return model.logits(0);
  };
  auto whole = model_of(m, kFormats[0], {.activation = DType::f64}, 2);
  REQUIRE(whole);
  const Result<Tensor> expected = logits_of(**whole);
  REQUIRE(expected);
  std::vector<Status> differed(2), watched(2);
  std::vector<double> errors(2, 1);
  const auto ended = on_threads(2, [&](const std::shared_ptr<RankGroup>& group) -> Status {
    const auto rank = std::size_t(group->rank());
    CF_TRY_ASSIGN(std::unique_ptr<Model> model, model_of(m, kFormats[0], {.activation = DType::f64, .group = group}));
    CF_TRY_ASSIGN(const Tensor first, logits_of(*model));
    const auto other = weights_of(3 + rank), second = weights_of(2);
    differed[rank] = model->swap_weights(m, other->weights, other);
    CF_TRY_ASSIGN(const Tensor kept, logits_of(*model));
    if (!std::equal(first.as<double>(), first.as<double>() + first.size(), kept.as<double>()))
      return Status::error(Code::io_error, "the weights are not those from before");
    CF_TRY(model->swap_weights(m, second->weights, second));
    CF_TRY_ASSIGN(const Tensor swapped, logits_of(*model));
    const auto error = compare(swapped, *expected);
    CF_TRY(error.status());
    errors[rank] = error->rel_l2;
    model->watch([](auto&&...) { return Status(); });
    watched[rank] = model->prefill(0, 0, ids);
    model->watch({});
    return model->prefill(0, 0, ids);
  });
  for (std::size_t r = 0; r < 2; ++r) {
    INFO(ended[r].message());
    CHECK(ended[r]);
    CHECK(errors[r] < 1e-11);
    CHECK(refusal_fault(differed[r], Code::invalid_argument, {"ranks: rank 1 has 'hash of weights "}) == "");
    CHECK(refusal_fault(watched[r], Code::unimplemented, {"expected no visitor of sites"}) == "");
  }
}

TEST_CASE("A rank of a process that is killed in its second step", "[.][killed-rank]") {
  const auto group = join_as_torchrun_says();
  auto model = model_of(divisible_models()[0], kFormats[0], {.slots = 2, .group = group});
  require_done(model.status());
  int steps = 0;
  (void)decode(*std::move(model), [&] {
    if (++steps == 2) (void)::raise(SIGKILL);
  });
}

TEST_CASE("A rank of a process that goes on as long as its group does", "[.][surviving-rank]") {
  const auto group = join_as_torchrun_says();
  auto model = model_of(divisible_models()[0], kFormats[0], {.slots = 2, .group = group});
  require_done(model.status());
  require_done(decode(*std::move(model)).status());
}

TEST_CASE("A killed process ends the others with one line that names it", "[ranks]") {
  for (const std::int64_t killed : {0, 2}) {
    const HeldPort port;
    std::vector<std::unique_ptr<RankProcess>> all;
    for (std::int64_t r = 0; r < 4; ++r)
      all.push_back(
          std::make_unique<RankProcess>(r == killed ? "[killed-rank]" : "[surviving-rank]", r, 4, port.port()));
    for (std::int64_t r = 0; r < 4; ++r) {
      INFO(r);
      const int ended = all[std::size_t(r)]->wait();
      if (r == killed) {
        CHECK(WIFSIGNALED(ended));
        continue;
      }
      CHECK(WIFEXITED(ended));
      CHECK(WEXITSTATUS(ended) != 0);
      CHECK(all[std::size_t(r)]->last_line().starts_with("ranks: rank " + std::to_string(killed) +
                                                         " has gone in exchange "));
    }
  }
}
