// Drafts of trained models: over many prompts the ids are those without drafts, and what a lookup finds is often right.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/model/decoder.hpp"
#include "cpu_ref/model.hpp"
#include "golden/checkpoint/model_source.hpp"
#include "golden/checkpoint/token_file.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/taken.hpp"

namespace {

using namespace cf;
using namespace cf::test;
using Ids = std::vector<std::int32_t>;
constexpr std::int64_t kPrompt = 64, kNew = 24;

}  // namespace

TEST_CASE("Trained models make with drafts the ids that they make without, dense and GPTQ", "[draft]") {
  omp_set_num_threads(1);
  const std::string name = GENERATE("stdlib-4m", "stdlib-llama-2m", "stdlib-4m-gptq", "stdlib-llama-2m-gptq");
  CAPTURE(name);
  const std::string checkpoints = std::string(CF_DATA_DIR) + "/checkpoints/";
  const auto source = taken(checkpoint::ModelSource::open({.directory = checkpoints + name}));
  const checkpoint::LoadedModel loaded = taken(source.load());
  // Both models have the same vocabulary.
  const Ids text = taken(checkpoint::read_token_file(checkpoints + "stdlib-4m/held_out.npy")).ids;
  constexpr std::int64_t prompts = 12;
  const auto stride = std::int64_t(text.size()) / prompts;
  std::int64_t accepted = 0, steps = 0, made = 0;
  for (bool drawn : {false, true}) {
    // Four slots at a time, and with drafts as many as are read together.
    const auto run = [&](const Drafter& draft) {
      auto model = taken(cpu_ref::Model::create(loaded.config, loaded.weights, loaded.owner,
                                                {.slots = 4, .capacity = kPrompt + kNew}));
      Decoder d(std::move(model));
      for (std::int64_t i = 0; i < prompts; ++i) {
        SequenceOptions o{.id = std::uint64_t(i),
                          .max_new_tokens = kNew,
                          .logprobs = i % 3 == 0 ? std::optional(2) : std::nullopt,
                          .draft = draft};
        if (drawn) o.sampling = {.temperature = 0.7, .top_p = 0.9, .seed = 4};
        taken(d.add(std::span(text).subspan(std::size_t(i * stride), kPrompt), o));
      }
      while (d.active()) taken(d.decode());
      return d;
    };
    Decoder plain = run({}), with = run(lookup_drafter());
    for (std::int64_t i = 0; i < prompts; ++i) {
      CAPTURE(drawn, i);
      REQUIRE(taken(with.ids(i)) == taken(plain.ids(i)));
      const std::vector<TokenLogprobs> a = taken(with.logprobs(i)), b = taken(plain.logprobs(i));
      REQUIRE(a.size() == b.size());
      for (std::size_t n = 0; n < a.size(); ++n) REQUIRE((a[n].logprob == b[n].logprob && a[n].top == b[n].top));
      const DraftCounts counts = taken(with.drafts(i));
      CHECK(counts.accepted <= counts.drafted);
      if (drawn) continue;
      accepted += counts.accepted;
      steps += counts.steps;
      made += std::int64_t(taken(with.ids(i)).size());
    }
  }
  INFO(accepted << " of " << made << " greedy ids were accepted in " << steps << " steps with drafts");
  CHECK(made == prompts * kNew);
  CHECK(accepted > made / 10);
}
