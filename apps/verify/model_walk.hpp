#pragma once
// A golden file of a whole model: a backend runs the file's ids, and what it makes is compared with the file.
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "apps/verify/golden_walk.hpp"
#include "core/model/decoder.hpp"
#include "core/sampling.hpp"
#include "core/status.hpp"
#include "golden/file/model_golden.hpp"

namespace cf::apps {

/// The bound of the oracle's relative L2 error against Hugging Face's float64, of logits and of taps.
inline constexpr double kModelBudget = 1e-10;

/// What a model made of a file's ids, beside the file.
struct ModelWalk {
  std::vector<TapResult> taps;  // the site is the module's whole name; the logits are a tap, too
  // Of the ids that the file's float64 run chose:
  std::int64_t chosen = 0;
  std::int64_t same = 0;     // our logits choose the same
  std::int64_t excused = 0;  // they choose another, and its reference logit is within twice the budget of the largest

  bool ok() const;
};

/// How a model's golden file is walked.
struct ModelWalkOptions {
  Backend backend = Backend::cpu;
  DType activation = DType::f64;  // a GPU's are the weights' dtype
  bool one_by_one = false;        // every id as a step of its own; a GPU has no taps of steps
  std::int64_t chunk = 0;         // ids that go through the model at once; 0 for all
};

/// Feeds the file's ids to a backend. The CPU takes the file's RoPE table, a GPU the library's own. The bound in
/// float64 is kModelBudget; in other dtypes it is derived as a layer's is, from the conditions that the oracle
/// measures. For a table of its own a GPU has kTableBudget for each layer besides. Refuses activations of another dtype
/// than a GPU has.
Result<ModelWalk> walk_model(const golden::ModelGolden& file, const golden::GoldenModelWeights& weights,
                             const ModelWalkOptions& options);

/// What a runner made of a prompt and its new ids, beside the oracle.
struct GenerationCheck {
  Comparison error;  // of the logits behind every id from the prompt's last on, but the last new one
  Budget budget;     // derived as walk_model()'s, from the dtype in which the runner stores
  std::int64_t chosen = 0, same = 0, excused = 0;  // of the new ids, as in ModelWalk; 0 where they were sampled

  bool ok() const { return error.within(budget) && same + excused == chosen; }
};

/// Feeds the prompt and then the new ids one by one, to slot 0 of the runner, whose entries are forgotten, and to the
/// oracle, which reads `weights` on the CPU. Of sampled ids the logits alone are compared.
/// Refuses what the runner refuses and Model::create() of the oracle.
Result<GenerationCheck> check_generation(ModelRunner& runner, const ModelWeights& weights,
                                         std::shared_ptr<const void> owner, std::span<const std::int32_t> prompt,
                                         std::span<const std::int32_t> ids, const Sampling& sampling);

}  // namespace cf::apps
