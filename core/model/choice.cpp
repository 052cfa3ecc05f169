#include "core/model/choice.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "core/host_sampler.hpp"
#include "core/model/score.hpp"
#include "core/model/slot_lengths.hpp"

namespace cf {
namespace {

constexpr double kMostPenalty = 2;

Status refused(std::string what) { return Status::error(Code::invalid_argument, "decoder: " + std::move(what)); }

void penalise(std::span<float> row, const LogitsChanges& changes, const ChoiceRequest& request) {
  const std::span<const std::int32_t> seen = request.draw.history, output = seen.subspan(request.prompt_size);
  const auto penalty = float(request.draw.sampling.repetition_penalty);
  if (penalty != 1) {
    std::vector<bool> done(row.size());
    for (std::int32_t id : seen) {
      float& logit = row[std::size_t(id)];
      if (!done[std::size_t(id)]) logit = sampling::score(logit, true, penalty, 1.0f);
      done[std::size_t(id)] = true;
    }
  }
  if (changes.frequency_penalty == 0 && changes.presence_penalty == 0) return;
  std::vector<std::int64_t> counts(row.size());
  for (std::int32_t id : output) ++counts[std::size_t(id)];
  for (std::size_t id = 0; id < row.size(); ++id)
    if (counts[id] > 0)
      row[id] = float(row[id] - changes.frequency_penalty * double(counts[id]) - changes.presence_penalty);
}

bool has_changes(const ChoiceRequest& r) { return r.changes && !r.changes->none(); }
bool is_by_host(const ChoiceRequest& r) { return has_changes(r) || r.logits; }

/// The host's choice among the logits, changed as the request says.
Result<std::int32_t> choose_on_host(const ConstAnyView<1>& logits, const ChoiceRequest& request) {
  const ModelRunner::Draw& draw = request.draw;
  // Unchanged doubles are the oracle's, which compares them as they are.
  if (!has_changes(request) && logits.dtype == DType::f64)
    return sample(std::span(static_cast<const double*>(logits.data), std::size_t(logits.size())), draw.sampling,
                  draw.history, draw.sequence, draw.position);
  std::vector<float> row(std::size_t(logits.size()));
  convert(logits.data, logits.dtype, row.data(), DType::f32, logits.size());
  if (!has_changes(request))
    return sample(std::span<const float>(row), draw.sampling, draw.history, draw.sequence, draw.position);
  const LogitsChanges& changes = *request.changes;
  for (const LogitBias& b : changes.logit_bias) row[std::size_t(b.id)] += b.bias;
  penalise(row, changes, request);
  if (std::int64_t(draw.history.size() - request.prompt_size) < changes.min_new_tokens)
    for (std::int32_t id : draw.stop) row[std::size_t(id)] = -std::numeric_limits<float>::infinity();
  if (changes.processor) CF_TRY(changes.processor(row, draw.history));
  Sampling sampling = draw.sampling;
  sampling.repetition_penalty = 1;
  return sample(std::span<const float>(row), sampling, {}, draw.sequence, draw.position);
}

}  // namespace

bool LogitsChanges::none() const {
  return logit_bias.empty() && frequency_penalty == 0 && presence_penalty == 0 && min_new_tokens == 0 && !processor;
}

Status LogitsChanges::validate(std::int64_t vocab_size) const {
  std::vector<std::int32_t> ids;
  for (const LogitBias& b : logit_bias) {
    ids.push_back(b.id);
    if (!(b.bias < std::numeric_limits<float>::infinity()))
      return refused("logit_bias: expected a number below infinity for id " + std::to_string(b.id) + ", got " +
                     std::to_string(b.bias));
  }
  CF_TRY(check_ids("decoder", "logit_bias", ids, vocab_size));
  std::sort(ids.begin(), ids.end());
  if (const auto twice = std::adjacent_find(ids.begin(), ids.end()); twice != ids.end())
    return refused("logit_bias: expected one bias an id, got two for id " + std::to_string(*twice));
  for (const auto& [name, value] :
       {std::pair("frequency_penalty", frequency_penalty), std::pair("presence_penalty", presence_penalty)})
    if (!(std::abs(value) <= kMostPenalty))
      return refused(std::string(name) + ": expected -2 to 2, got " + std::to_string(value));
  if (min_new_tokens < 0) return refused("min_new_tokens: expected at least 0, got " + std::to_string(min_new_tokens));
  return {};
}

std::vector<Choice> choose_ids(ModelRunner& runner, std::span<const ChoiceRequest> requests) {
  const bool by_host = std::any_of(requests.begin(), requests.end(), is_by_host);
  // Logits are read before the runner chooses, which may begin the next step.
  std::vector<std::optional<Result<Tensor>>> own(requests.size());
  std::vector<ModelRunner::Draw> draws;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const ChoiceRequest& r = requests[i];
    if (!r.logits && (has_changes(r) || r.logprobs)) own[i].emplace(runner.logits(r.draw.slot));
    if (is_by_host(r)) continue;
    draws.push_back(r.draw);
    // The next step also has tokens that the host chooses: a runner need not begin one of the others alone.
    if (by_host) draws.back().left = 0;
  }
  std::vector<Result<std::int32_t>> chosen;
  if (!draws.empty()) chosen = runner.choose(draws);
  std::vector<Choice> choices;
  auto next = chosen.begin();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const ChoiceRequest& r = requests[i];
    ConstAnyView<1> row;
    if (r.logits)
      row = *r.logits;
    else if (own[i] && *own[i])
      row = {(*own[i])->data(), {(*own[i])->size()}, (*own[i])->dtype()};
    const Status read = own[i] ? own[i]->status() : Status();
    Result<std::int32_t> id = !is_by_host(r) ? std::move(*next++) : read ? choose_on_host(row, r) : read;
    if (id && !read) id = read;
    Choice& choice = choices.emplace_back(Choice{.id = std::move(id)});
    if (!choice.id || !r.logprobs) continue;
    RowScore score = score_row(row, std::span(&*choice.id, 1), *r.logprobs);
    if (score.status)
      choice.logprobs = {score.next[0].log_prob, std::move(score.top)};
    else
      choice.id = score.status;
  }
  return choices;
}

}  // namespace cf
