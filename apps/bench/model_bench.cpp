#include "apps/bench/model_bench.hpp"

#include <algorithm>
#include <chrono>

#include "apps/bench/host_probe.hpp"
#include "apps/cli/statistics.hpp"
#include "core/model/examples.hpp"
#include "core/model/model.hpp"
#include "core/ops/decode_layer.hpp"

namespace cf::apps {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds(Clock::duration d) { return std::chrono::duration<double, std::milli>(d).count(); }

}  // namespace

std::vector<std::int32_t> prompt_of(std::int64_t length, std::int64_t slot, std::int64_t vocab_size) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < length; ++i)
    ids.push_back(
        std::int32_t((std::uint64_t(i + 1) * 2654435761u + std::uint64_t(slot) * 40503u) % std::uint64_t(vocab_size)));
  return ids;
}

double ModelTiming::best_read() const { return *std::max_element(read_bytes_per_s.begin(), read_bytes_per_s.end()); }

double ModelTiming::tokens_per_s(const ModelLoad& load) const {
  return 1e3 * double(load.new_tokens * load.slots) / total_ms.median;
}

double ModelTiming::percent_of_read() const {
  const double seconds = (total_ms.median - first_token_ms.median) * 1e-3;
  return seconds > 0 ? 100 * steps.bytes / seconds / best_read() : 0;
}

double weights_read_rate(const ModelSpec& m, const ModelWeights& weights) {
  ReadRate rate;
  for_each_model_weight(m, weights, [&](const TensorSpec&, const auto& view, const auto& shape) {
    // Vectors are too short to measure a rate.
    if (shape.size() == 2) rate.add(view.data, std::size_t(view.bytes()));
  });
  for (const LayerWeights& layer : weights.layers)
    for_each_packed(m, layer, [&](const PackedWeight& w) { rate.add(w.data.data, std::size_t(w.data.bytes())); });
  return rate.bytes_per_s();
}

Cost pass_cost(const ModelSpec& m, const ModelWeights& w, const Workload& load, std::int64_t logit_rows,
               DType activation) {
  const DType dense = w.embed_in.dtype;
  const std::int64_t hidden = m.shape.hidden_size;
  Cost cost = ops::Embedding::cost(ops::example<ops::Embedding>(m, load).first, activation, dense);
  for (const LayerWeights& layer : w.layers) {
    ops::DecodeLayer::Dims dims{m, step_sizes(load), load.kv_len};
    dims.linears = {format_of(layer.query_key_value.weight), format_of(layer.dense.weight),
                    format_of(layer.dense_h_to_4h.weight), format_of(layer.dense_4h_to_h.weight)};
    cost += ops::DecodeLayer::cost(dims, activation, dense);
  }
  cost += ops::LayerNorm::cost({logit_rows, hidden}, activation, dense);
  return cost += ops::Linear::cost({logit_rows, hidden, m.shape.vocab_size, false}, activation, dense);
}

Result<ModelTiming> time_model(Decoder& decoder, const ModelWeights& weights, const ModelLoad& load, std::int64_t runs,
                               std::int64_t warmup, const std::function<Result<double>()>& read_rate,
                               const std::function<void()>& done) {
  const ModelSpec& m = decoder.model();
  const DType activation = decoder.activation();
  ModelTiming timing;
  std::vector<double> first_ms, total_ms, token_ms;
  for (std::int64_t run = -warmup; run < runs; ++run) {
    CF_TRY_ASSIGN(const double read, read_rate());
    std::vector<Decoder::Sequence> sequences;
    for (std::int64_t slot = 0; slot < load.slots; ++slot) {
      CF_TRY_ASSIGN(const Decoder::Sequence s, decoder.add(prompt_of(load.prompt_len, slot, m.shape.vocab_size),
                                                           {.max_new_tokens = load.new_tokens}));
      sequences.push_back(s);
    }
    const Clock::time_point start = Clock::now();
    CF_TRY(decoder.prefill().status());
    std::vector<Clock::time_point> times{Clock::now()};
    while (decoder.active()) {
      CF_TRY(decoder.decode(1).status());
      times.push_back(Clock::now());
    }
    for (Decoder::Sequence s : sequences) {
      CF_TRY(decoder.status(s));
      CF_TRY(decoder.drop(s));
    }
    done();
    if (run < 0) continue;
    timing.read_bytes_per_s.push_back(read);
    first_ms.push_back(milliseconds(times.front() - start));
    total_ms.push_back(milliseconds(times.back() - start));
    for (std::size_t i = 1; i < times.size(); ++i) token_ms.push_back(milliseconds(times[i] - times[i - 1]));
  }
  timing.first_token_ms = spread(first_ms);
  timing.total_ms = spread(total_ms);
  if (!token_ms.empty()) {
    timing.token_ms = spread(token_ms);
    std::sort(token_ms.begin(), token_ms.end());
    timing.inter_token_p90_ms = percentile(token_ms, 0.9);
    timing.time_per_token_ms = (timing.total_ms.median - timing.first_token_ms.median) / double(load.new_tokens - 1);
  }
  // The flops are the same where several prompts share a pass.
  for (std::int64_t slot = 0; slot < load.slots; ++slot)
    timing.prompt += pass_cost(m, weights, {1, load.prompt_len, load.prompt_len, 0}, 1, activation);
  for (std::int64_t i = 1; i < load.new_tokens; ++i)
    timing.steps += pass_cost(m, weights, {load.slots, 1, load.prompt_len + i, 0}, load.slots, activation);
  return timing;
}

Result<JoinerTiming> time_joiner(Decoder& decoder, const ModelLoad& load, std::int64_t joiner_len, std::int64_t runs,
                                 std::int64_t warmup, const std::function<void()>& done) {
  const std::int64_t vocab = decoder.model().shape.vocab_size;
  std::vector<double> stall_ms, first_ms;
  for (std::int64_t run = -warmup; run < runs; ++run) {
    std::vector<Decoder::Sequence> sequences;
    const auto add = [&](std::int64_t length) -> Status {
      CF_TRY_ASSIGN(const Decoder::Sequence s,
                    decoder.add(prompt_of(length, std::int64_t(sequences.size()), vocab), {}));
      sequences.push_back(s);
      return {};
    };
    while (std::int64_t(sequences.size()) + 1 < load.slots) CF_TRY(add(load.prompt_len));
    CF_TRY(decoder.prefill().status());
    CF_TRY(decoder.decode(kStepsBesideJoiner).status());
    CF_TRY(add(joiner_len));
    const Clock::time_point start = Clock::now();
    Clock::time_point last = start;
    double stall = 0;
    for (bool joined = false; !joined;) {
      CF_TRY(decoder.decode(1).status());
      const Clock::time_point now = Clock::now();
      stall = std::max(stall, milliseconds(now - last));
      last = now;
      CF_TRY(decoder.status(sequences.back()));
      CF_TRY_ASSIGN(const std::vector<std::int32_t> ids, decoder.ids(sequences.back()));
      joined = !ids.empty();
    }
    CF_TRY(decoder.decode(kStepsBesideJoiner).status());
    for (Decoder::Sequence s : sequences) {
      CF_TRY(decoder.status(s));
      CF_TRY(decoder.drop(s));
    }
    done();
    if (run < 0) continue;
    stall_ms.push_back(stall);
    first_ms.push_back(milliseconds(last - start));
  }
  return JoinerTiming{spread(stall_ms), spread(first_ms)};
}

}  // namespace cf::apps
