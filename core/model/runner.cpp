#include "core/model/runner.hpp"

#include <array>
#include <map>
#include <utility>

#include "core/fp8.hpp"
#include "core/model/slot_lengths.hpp"

namespace cf {
namespace {

Status refused(std::string what) { return Status::error(Code::invalid_argument, "model: " + std::move(what)); }

/// Refuses another spec, and names a size that differs.
Status check_same_spec(const ModelSpec& own, const ModelSpec& other) {
  const auto sizes_of = [](const ModelShape& s) {
    return std::array<std::pair<std::string_view, std::int64_t>, 9>{{{"hidden_size", s.hidden_size},
                                                                     {"num_layers", s.num_layers},
                                                                     {"num_heads", s.num_heads},
                                                                     {"num_kv_heads", s.num_kv_heads},
                                                                     {"head_dim", s.head_dim},
                                                                     {"intermediate_size", s.intermediate_size},
                                                                     {"vocab_size", s.vocab_size},
                                                                     {"rotary_dim", s.rotary_dim},
                                                                     {"max_positions", s.max_positions}}};
  };
  const auto expected = sizes_of(own.shape), got = sizes_of(other.shape);
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (expected[i].second != got[i].second)
      return refused("swap: expected " + std::string(expected[i].first) + " " + std::to_string(expected[i].second) +
                     ", got " + std::to_string(got[i].second));
  if (own == other) return {};
  return refused("swap: expected weights of the same family, norms, activation, biases and RoPE, got others");
}

std::string describe(const LinearWeight& weight) {
  const WeightFormat f = format_of(weight);
  if (f.bits == 0) return "dense";
  const std::string kind = is_fp8(weight) ? "fp8" : "GPTQ of " + std::to_string(f.bits) + " bits";
  return kind + ", group " + std::to_string(f.group_size);
}

}  // namespace

Status ModelRunner::prefill(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids) {
  const Run one{.sequence = slot, .first_position = first, .count = std::int64_t(ids.size())};
  return run(std::span(&one, 1), ids, {});
}

Status ModelRunner::forward(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids,
                            AnyView<2> logits) {
  const Run one{.sequence = slot, .first_position = first, .count = std::int64_t(ids.size())};
  return run(std::span(&one, 1), ids, {.own = false, .rows = std::span(&logits.shape[0], 1), .to = logits});
}

Status ModelRunner::step(std::span<const Token> tokens) {
  if (tokens.empty()) return {};
  std::vector<Run> runs;
  std::vector<std::int32_t> ids;
  for (const Token& t : tokens) {
    runs.push_back({.sequence = t.slot, .first_position = t.position});
    ids.push_back(t.id);
  }
  return run(runs, ids, {});
}

Status ModelRunner::fork(std::int64_t, std::int64_t, std::int64_t) {
  return Status::error(Code::unimplemented, "model: expected a cache in pages to share entries, got one without");
}

Status ModelRunner::swap_weights(const ModelSpec&, const ModelWeights&, std::shared_ptr<const void>) {
  return Status::error(Code::unimplemented, "model: swap: expected a model that takes other weights");
}

Result<std::shared_ptr<std::byte[]>> ModelRunner::host_memory(std::size_t bytes) {
  return std::make_shared<std::byte[]>(bytes);
}

Status check_swap(const ModelSpec& own_spec, const ModelWeights& own, const ModelSpec& spec,
                  const ModelWeights& weights) {
  CF_TRY(check_same_spec(own_spec, spec));
  CF_TRY(check_model_weights(spec, weights));
  const std::string_view prefix = "swap: '";
  for (std::size_t layer = 0; layer < own.layers.size(); ++layer) {
    std::vector<std::string> formats;
    for_each_linear(spec, own.layers[layer],
                    [&](const Site&, const LinearParams& l, auto&&...) { formats.push_back(describe(l.weight)); });
    std::size_t next = 0;
    Status status;
    for_each_linear(spec, weights.layers[layer], [&](const Site& site, const LinearParams& l, auto&&...) {
      const std::string expected = formats[next++], got = describe(l.weight);
      if (status && expected != got)
        status = refused(std::string(prefix) + names_of(spec).layer(std::int64_t(layer)) + std::string(site.name) +
                         ".weight' is " + got + ", expected " + expected);
    });
    CF_TRY(status);
  }
  std::map<std::string, DType> dtypes;
  for_each_model_weight(
      spec, own, [&](const TensorSpec& t, const auto& view, auto&&) { dtypes[std::string(t.name)] = view.dtype; });
  Status status;
  for_each_model_weight(spec, weights, [&](const TensorSpec& t, const auto& view, auto&&) {
    const auto found = dtypes.find(std::string(t.name));
    if (status && found != dtypes.end() && found->second != view.dtype)
      status = refused(std::string(prefix) + std::string(t.name) + "' has dtype " + std::string(to_string(view.dtype)) +
                       ", expected " + std::string(to_string(found->second)));
  });
  return status;
}

Status check_step(const ModelRunner& runner, const SlotLengths& lengths, std::span<const Run> runs,
                  std::span<const std::int32_t> ids, const StepLogits& logits) {
  const std::int64_t vocab = runner.model().shape.vocab_size;
  CF_TRY(lengths.check(runs));
  if (std::int64_t(ids.size()) != tokens_of(runs))
    return refused("ids: expected " + std::to_string(tokens_of(runs)) + ", one a token of the runs, got " +
                   std::to_string(ids.size()));
  CF_TRY(check_ids("model", "ids", ids, vocab));
  if (logits.rows.empty()) return {};
  if (logits.rows.size() != runs.size())
    return refused("logits: expected a number of rows for each of " + std::to_string(runs.size()) + " runs, got " +
                   std::to_string(logits.rows.size()));
  std::int64_t rows = 0;
  for (std::size_t i = 0; i < runs.size(); rows += logits.rows[i++])
    if (logits.rows[i] < 0 || logits.rows[i] > runs[i].count)
      return refused("logits: expected 0 to " + std::to_string(runs[i].count) + " rows, got " +
                     std::to_string(logits.rows[i]));
  if (logits.to.shape[0] != rows)
    return refused("logits: expected " + std::to_string(rows) + " rows, those of the runs, got " +
                   std::to_string(logits.to.shape[0]));
  if (logits.to.shape[1] != vocab || logits.to.dtype != runner.activation())
    return refused("logits: expected rows of " + std::to_string(vocab) + " " +
                   std::string(to_string(runner.activation())) + ", got " + std::to_string(logits.to.shape[1]) + " " +
                   std::string(to_string(logits.to.dtype)));
  return {};
}

std::vector<StepPart> parts_of(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) {
  std::vector<StepPart> parts;
  AnyView<2> rows = logits.to;
  std::byte* next = static_cast<std::byte*>(rows.data);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    rows.data = next;
    rows.shape[0] = logits.rows.empty() ? 0 : logits.rows[i];
    if (next) next += rows.bytes();
    parts.push_back({.run = run,
                     .ids = ids.first(std::size_t(run.count)),
                     .rows = rows,
                     .decodes = logits.own && run.count == 1 && run.first_position > 0});
    ids = ids.subspan(std::size_t(run.count));
  }
  return parts;
}

}  // namespace cf
