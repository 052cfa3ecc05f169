#include "core/model/runner.hpp"

#include <utility>

#include "core/model/slot_lengths.hpp"

namespace cf {
namespace {

Status refused(std::string what) { return Status::error(Code::invalid_argument, "model: " + std::move(what)); }

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
