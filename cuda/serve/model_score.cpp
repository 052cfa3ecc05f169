#include <algorithm>
#include <cstring>
#include <utility>

#include "core/model/score.hpp"
#include "core/model/streams.hpp"
#include "cuda/ops/sample/score.hpp"
#include "cuda/serve/model_state.hpp"

namespace cf::cuda {
namespace {

/// The rows of logits that exist at a time: 26 MB for 50304 logits of 16 bits, which Hopper's L2 holds until they are
/// scored. The head multiplies as many rows always, so that a row's bits do not depend on how many others there are.
constexpr std::int64_t kScoredRows = 256;

constexpr std::int64_t words_of(std::size_t bytes) { return std::int64_t(bytes / sizeof(std::int32_t)); }

/// `count` values that lie behind the first `at` words.
template <class T>
std::vector<T> values_in(std::span<const std::int32_t> words, std::int64_t at, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  std::memcpy(values.data(), words.data() + at, values.size() * sizeof(T));
  return values;
}

}  // namespace

/// One call of score(): its rows, what is asked of them, and the answers.
class Model::State::ScoreCall {
 public:
  ScoreCall(State& state, const ScoreRequest& request) : s_(state), request_(request) {
    asked_.reserve(request.next.size());
    next_end_.reserve(request.next.size());
    for (const std::vector<std::int32_t>& ids : request.next) {
      asked_.insert(asked_.end(), ids.begin(), ids.end());
      next_end_.push_back(std::int32_t(asked_.size()));
    }
  }

  /// Takes memory for the call, and brings what is asked to the device.
  Status begin();
  /// Takes the call's next rows: hidden states that the last layer has made.
  Status add(AnyView<2> hidden);
  /// Waits for the answers for all rows.
  Result<std::vector<RowScore>> finish();

 private:
  std::int64_t rows() const { return std::int64_t(next_end_.size()); }
  std::int64_t ids() const { return std::int64_t(asked_.size()); }
  // The answers in words of four bytes: the sums of all rows, the likely ids of all rows, the logits of all ids.
  std::int64_t likely_at() const { return rows() * words_of(sizeof(RowSum)); }
  std::int64_t next_logits_at() const { return likely_at() + rows() * request_.top * words_of(sizeof(LogitOf)); }
  std::int64_t answer_words() const { return next_logits_at() + ids(); }

  std::size_t lay_out(std::byte* block);
  /// Prepares the final norm or the head for these rows.
  Status prepare_site(SiteId which, const AnyView<2>& hidden, const AnyView<2>& norm, LaunchList& launches) const;
  /// Scores the rows that are held.
  Status score_held();

  State& s_;
  const ScoreRequest& request_;
  std::vector<std::int32_t> asked_, next_end_;
  std::int64_t held_ = 0, scored_ = 0;  // rows whose final norm is there, and the rows before them
  // On the device.
  AnyView<2> norm_, logits_;  // (kScoredRows, hidden) and (kScoredRows, vocab)
  View<std::int32_t, 1> device_asked_, device_end_, answers_;
};

std::size_t Model::State::ScoreCall::lay_out(std::byte* block) {
  Arena arena(block);
  arena.allocate(norm_, extents(kScoredRows, s_.spec.shape.hidden_size), s_.workspace.activation());
  arena.allocate(logits_, extents(kScoredRows, s_.spec.shape.vocab_size), s_.workspace.activation());
  arena.allocate(device_asked_, extents(ids()), DType::i32);
  arena.allocate(device_end_, extents(rows()), DType::i32);
  arena.allocate(answers_, extents(answer_words()), DType::i32);
  return arena.bytes();
}

Status Model::State::ScoreCall::begin() {
  const std::size_t bytes = lay_out(nullptr);
  CUstream_st* const stream = s_.stream.get();
  if (bytes > s_.score_memory.bytes()) {
    CF_TRY(from_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize"));
    s_.score_memory = {};
    CF_TRY_ASSIGN(s_.score_memory,
                  DeviceMemory::create(s_.context, bytes, "scores of " + std::to_string(rows()) + " ids"));
    CF_TRY(from_cuda(cudaMemsetAsync(s_.score_memory.data(), 0, bytes, stream), "cudaMemset"));
    CF_TRY(s_.meet());
  }
  lay_out(s_.score_memory.data());
  for (const auto& [to, from] : {std::pair(device_asked_, &asked_), std::pair(device_end_, &next_end_)})
    if (!from->empty())
      CF_TRY(copy_async(to.data, from->data(), from->size() * sizeof(std::int32_t), cudaMemcpyHostToDevice, stream));
  return {};
}

Status Model::State::ScoreCall::prepare_site(SiteId which, const AnyView<2>& hidden, const AnyView<2>& norm,
                                             LaunchList& launches) const {
  const auto prepare_that = [&](const ModelSite& site, const auto& args) {
    return site.site.id == which ? name_site(site, prepare(args, launches)) : Status();
  };
  return for_each_head_site(s_.spec, s_.weights.model_weights(), hidden, norm, logits_, prepare_that);
}

Status Model::State::ScoreCall::add(AnyView<2> hidden) {
  while (hidden.shape[0] > 0) {
    const std::int64_t count = std::min(hidden.shape[0], kScoredRows - held_);
    LaunchList launches(s_.context, s_.workspace.scratch());
    launches.trust_addresses();
    CF_TRY(prepare_site(SiteId::final_layer_norm, rows_of(hidden, 0, count), rows_of(norm_, held_, count), launches));
    CF_TRY(launches.submit(s_.stream.get(), {.early = s_.context.overlap()}));
    held_ += count;
    hidden = rows_of(hidden, count, hidden.shape[0] - count);
    if (held_ == kScoredRows) CF_TRY(score_held());
  }
  return {};
}

Status Model::State::ScoreCall::score_held() {
  LaunchList launches(s_.context, s_.workspace.scratch());
  launches.trust_addresses();
  CF_TRY(prepare_site(SiteId::embed_out, norm_, norm_, launches));
  std::int32_t* const answers = answers_.data;
  CF_TRY(prepare(
      ScoreArgs{
          .logits = rows_of(logits_, 0, held_),
          .next_end = {device_end_.data + scored_, {held_}},
          .next = device_asked_,
          .next_begin = scored_ == 0 ? 0 : next_end_[std::size_t(scored_ - 1)],
          .sums = reinterpret_cast<RowSum*>(answers) + scored_,
          .next_logits = reinterpret_cast<float*>(answers + next_logits_at()),
          .likely = reinterpret_cast<LogitOf*>(answers + likely_at()) + scored_ * request_.top,
          .top = request_.top,
      },
      launches));
  CF_TRY(launches.submit(s_.stream.get(), {.early = s_.context.overlap()}));
  scored_ += std::exchange(held_, 0);
  return {};
}

Result<std::vector<RowScore>> Model::State::ScoreCall::finish() {
  if (held_ > 0) CF_TRY(score_held());
  std::vector<RowScore> scores;
  if (rows() == 0) return scores;
  scores.reserve(std::size_t(rows()));
  std::vector<std::int32_t> words(static_cast<std::size_t>(answer_words()));
  CF_TRY(copy_to_host(s_.context, words.data(), answers_.data, words.size() * sizeof(std::int32_t)));
  const std::vector<RowSum> sums = values_in<RowSum>(words, 0, rows());
  const std::vector<LogitOf> likely = values_in<LogitOf>(words, likely_at(), rows() * request_.top);
  const std::vector<float> next_logits = values_in<float>(words, next_logits_at(), ids());
  const auto top = std::size_t(request_.top);
  for (std::size_t row = 0, begin = 0; row < sums.size(); begin = std::size_t(next_end_[row++]))
    scores.push_back(row_score(sums[row], request_.next[row],
                               std::span(next_logits).subspan(begin, request_.next[row].size()),
                               std::span(likely).subspan(row * top, top)));
  return scores;
}

Status Model::State::score(std::span<const StepPart> prompts, ScoreCall& call) {
  for (const StepPart& p : prompts) {
    CF_TRY(pipeline.restore(p.run.sequence));
    seen_size[std::size_t(p.run.sequence)] = 0;
  }
  for (const Pieces& pieces : passes_of({}, prompts, false)) {
    if (go_on) CF_TRY(go_on());
    std::int64_t tokens = 0, rows = 0;
    for (const Piece& p : pieces) {
      tokens += p.run.count;
      rows += p.head_rows();
    }
    if (prompts.size() == 1) {
      // As a graph, from its second time on.
      const Piece& p = pieces.front();
      CF_TRY(pipeline.begin_prompt(p.run.sequence, p.run.first_position, p.run.count));
      CF_TRY(read_chunk(p.run.sequence, p.run.first_position, p.ids,
                        {nullptr, {0, spec.shape.vocab_size}, workspace.activation()}));
      CF_TRY(pipeline.extend(p.run.sequence, p.run.first_position + p.run.count, p.ids.back()));
    } else {
      CF_TRY(pass(pieces));
    }
    if (pieces.size() == 1 || rows == tokens) {
      CF_TRY(call.add(rows_of(layers_output(), tokens - rows, rows)));
    } else if (rows > 0) {
      // The last layer's input is read no more.
      const AnyView<2> gathered = rows_of(hidden[std::size_t(spec.shape.num_layers + 1) % 2], 0, rows);
      CF_TRY(enqueue_gather(layers_output(), {pass_rows.data, {rows}}, gathered, context));
      CF_TRY(call.add(gathered));
    }
  }
  return {};
}

ScoreSizes Model::score_sizes(std::int64_t slots, std::int64_t top) const {
  // Pieces of all slots make up a pass of 2048 tokens, with which products are fastest. Shorter ones are shared by more.
  const std::int64_t piece = std::clamp<std::int64_t>(2048 / slots, 512, 2048);
  // On the device more rows take memory for their answers alone. With few breaks the host is waited for less often.
  return {.piece = piece, .rows = top > kMostLikely ? piece : 8192};
}

Result<std::vector<RowScore>> Model::score(std::span<const Run> runs, std::span<const std::int32_t> ids,
                                           const ScoreRequest& request) {
  State& s = *state_;
  if (s.visit || request.top > kMostLikely) return ModelRunner::score(runs, ids, request);
  CF_TRY(check_request(s.spec, request));
  const StepLogits logits{
      .own = false,
      .rows = request.rows,
      .to = {nullptr, {std::int64_t(request.next.size()), s.spec.shape.vocab_size}, s.workspace.activation()}};
  CF_TRY(check_step(*this, s.pipeline.lengths(), runs, ids, logits));
  CF_TRY(check_rewinds(s.options.stream(), s.options.capacity, s.pipeline.lengths(), runs));
  CF_TRY(s.reserve(runs));
  State::ScoreCall call(s, request);
  CF_TRY(call.begin());
  CF_TRY(s.score(parts_of(runs, ids, logits), call));
  return call.finish();
}

}  // namespace cf::cuda
