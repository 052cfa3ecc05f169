// Log-probabilities of given ids by a whole model on the CPU.
#include <omp.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "core/model/score.hpp"
#include "core/procedural.hpp"
#include "cpu_ref/model.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/small_model.hpp"

namespace {

using namespace cf;
using namespace cf::test;
using Ids = std::vector<std::int32_t>;

constexpr std::int64_t kPiece = 8;

std::unique_ptr<cpu_ref::Model> model_of(const ModelConfig& config, DType activation, std::int64_t slots) {
  auto weights = std::make_shared<OwnedModelWeights>(procedural_model(config.spec(), DType::f16, 1, {}));
  auto model = cpu_ref::Model::create(config, weights->weights, weights,
                                      {.slots = slots, .capacity = 64, .chunk = 16, .activation = activation});
  INFO(model.status().message());
  REQUIRE(model);
  return std::move(*model);
}

std::vector<PromptScore> scores_of(const ModelConfig& config, DType activation, const std::vector<ScorePrompt>& prompts,
                                   std::int64_t slots) {
  auto scorer =
      Scorer::create(SlotLease::of_all(model_of(config, activation, slots)), prompts, {.piece = kPiece, .top = 2});
  REQUIRE(scorer);
  while (!scorer->done()) REQUIRE(scorer->step());
  return scorer->scores();
}

/// The same by the logits of the prompt's pieces, one after the other.
PromptScore by_forward(const ModelConfig& config, DType activation, const ScorePrompt& prompt) {
  const auto model = model_of(config, activation, 1);
  PromptScore score;
  const auto read = std::int64_t(prompt.ids.size()) - 1;
  for (std::int64_t first = 0; first < read; first += kPiece) {
    const std::int64_t count = std::min(kPiece, read - first);
    const std::int64_t rows = std::clamp<std::int64_t>(first + count - prompt.first + 1, 0, count);
    Tensor logits(activation, {rows, config.vocab_size});
    REQUIRE(model->forward(0, first, std::span(prompt.ids).subspan(std::size_t(first), std::size_t(count)),
                           logits.view<2>()));
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int32_t next = prompt.ids[std::size_t(first + count - rows + row + 1)];
      const auto* const at = static_cast<const std::byte*>(logits.data()) + row * logits.size_bytes() / rows;
      const RowScore made = score_row({at, {config.vocab_size}, activation}, Ids{next}, 2);
      score.ids.push_back(made.next.at(0));
      score.top.insert(score.top.end(), made.top.begin(), made.top.end());
    }
  }
  return score;
}

}  // namespace

TEST_CASE("A model scores each prompt as it does alone, bit for bit, on any number of threads and slots", "[score]") {
  Ids text;
  for (std::int32_t i = 0; i < 40; ++i) text.push_back((i * i + 3 * i) % 37);
  std::vector<ScorePrompt> prompts{{text, 1}, {text, 30}, {Ids(text.begin(), text.begin() + 2), 1}};
  for (std::int32_t choice : {5, 6, 7}) {
    prompts.push_back({Ids(text.begin(), text.begin() + 20), 20});
    prompts.back().ids.push_back(choice);
    if (choice == 6) prompts.back().ids.push_back(9);
  }
  const int threads = omp_get_max_threads();
  for (const ModelConfig& config : small_models())
    for (DType activation : {DType::f64, DType::f32}) {
      INFO(config.name << ", " << to_string(activation));
      std::vector<PromptScore> alone;
      for (const ScorePrompt& prompt : prompts) alone.push_back(by_forward(config, activation, prompt));
      for (int n : {1, 2, 3}) {
        omp_set_num_threads(n);
        const std::vector<PromptScore> made = scores_of(config, activation, prompts, n);
        for (std::size_t i = 0; i < prompts.size(); ++i) {
          REQUIRE(made[i].status);
          CHECK(made[i].ids == alone[i].ids);
          CHECK(made[i].top == alone[i].top);
        }
      }
      omp_set_num_threads(threads);
    }
}
