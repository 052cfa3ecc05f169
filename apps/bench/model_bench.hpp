#pragma once
// Times a decoder: prompts, tokens, slots.
#include <cstdint>
#include <functional>
#include <vector>

#include "apps/bench/timing.hpp"
#include "core/contract.hpp"
#include "core/model/decoder.hpp"
#include "core/model/weights.hpp"
#include "core/model/workload.hpp"

namespace cf::apps {

/// As many prompts as there are slots, all of one length, and as many new tokens for each.
struct ModelLoad {
  std::int64_t prompt_len = 1, new_tokens = 1, slots = 1;
};

struct ModelTiming {
  Spread first_token_ms;          // TTFT, over the runs: from the prompts to the last slot's first id
  Spread total_ms;                // over the runs: to the last id
  Spread token_ms;                // the time between two steps, over all steps of all runs; 0 without a second token
  double inter_token_p90_ms = 0;  // the same
  double time_per_token_ms = 0;   // TPOT: (total - first token) / (new tokens - 1), by medians; 0 for one token
  Cost prompt, steps;             // what the prompts' pass moves and computes, and all steps together
  std::vector<double> read_bytes_per_s;  // a streaming read of the memory that holds the weights, in each run

  double best_read() const;
  /// New tokens of all slots a second, prompts included.
  double tokens_per_s(const ModelLoad& load) const;
  /// The share of the best read that the steps' bytes reach, in percent.
  double percent_of_read() const;
};

/// Ids that spread over the vocabulary, the same for the same slot.
std::vector<std::int32_t> prompt_of(std::int64_t length, std::int64_t slot, std::int64_t vocab_size);

/// A prompt that joins sequences which decode: how long these wait for it.
struct JoinerTiming {
  Spread stall_ms;        // over the runs: the longest time between two steps of the others until its first id
  Spread first_token_ms;  // over the runs: from the prompt to its first id
};

/// The steps that the others make before a prompt joins them and behind its first id.
inline constexpr std::int64_t kStepsBesideJoiner = 4;

/// The bytes that a pass of q_len tokens a slot must move, and its flops. Each weight counts once, of the embedding the
/// tokens' rows alone. The head makes `logit_rows` rows of logits.
Cost pass_cost(const ModelSpec& m, const ModelWeights& w, const Workload& load, std::int64_t logit_rows,
               DType activation);

/// The rate of a streaming read of all weights by the CPU, in bytes per second.
double weights_read_rate(const ModelSpec& m, const ModelWeights& weights);

/// Times a load `runs` times after `warmup` runs, by the host's clock. Before each run it calls `read_rate` for the
/// streaming read's bytes per second, and after each `done`. It reads the weights' formats, dtypes and shapes.
Result<ModelTiming> time_model(Decoder& decoder, const ModelWeights& weights, const ModelLoad& load, std::int64_t runs,
                               std::int64_t warmup, const std::function<Result<double>()>& read_rate,
                               const std::function<void()>& done);

/// Times a prompt of `joiner_len` ids that comes while load.slots - 1 sequences decode, behind prompts of
/// load.prompt_len ids. Calls `done` after each run. The cache has entries for both prompts in one slot, and for
/// 2 * kStepsBesideJoiner tokens.
Result<JoinerTiming> time_joiner(Decoder& decoder, const ModelLoad& load, std::int64_t joiner_len, std::int64_t runs,
                                 std::int64_t warmup, const std::function<void()>& done);

}  // namespace cf::apps
