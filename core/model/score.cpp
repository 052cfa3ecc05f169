#include "core/model/score.hpp"

#include <algorithm>
#include <atomic>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "core/log_probs.hpp"
#include "core/model/slot_lengths.hpp"
#include "core/resources.hpp"

namespace cf {
namespace {

Status refused(std::string what) { return Status::error(Code::invalid_argument, "score: " + std::move(what)); }

std::string range(std::int64_t least, std::int64_t most) {
  return std::to_string(least) + " to " + std::to_string(most);
}

template <class Real>
RowScore score_values(std::span<const Real> logits, std::span<const std::int32_t> next, std::int64_t top) {
  const Result<LogProbs<Real>> row = LogProbs<Real>::of(logits);
  if (!row) return {.status = row.status()};
  RowScore score;
  const std::int32_t best = row->best();
  for (std::int32_t id : next) score.next.push_back({(*row)[id], id == best});
  for (std::int32_t id : row->top(std::size_t(top))) score.top.push_back({id, (*row)[id]});
  return score;
}

}  // namespace

RowScore score_row(ConstAnyView<1> logits, std::span<const std::int32_t> next, std::int64_t top) {
  const auto vocab = std::size_t(logits.shape[0]);
  if (logits.dtype == DType::f64) return score_values(std::span(logits.as<const double>().data, vocab), next, top);
  if (logits.dtype == DType::f32) return score_values(std::span(logits.as<const float>().data, vocab), next, top);
  std::vector<float> wide(vocab);
  convert(logits.data, logits.dtype, wide.data(), DType::f32, logits.shape[0]);
  return score_values(std::span<const float>(wide), next, top);
}

Status check_request(const ModelSpec& model, const ScoreRequest& request) {
  const std::int64_t vocab = model.shape.vocab_size;
  const std::int64_t rows = std::accumulate(request.rows.begin(), request.rows.end(), std::int64_t(0));
  if (std::int64_t(request.next.size()) != rows)
    return refused("next: expected a list of ids for each of " + std::to_string(rows) + " rows, got " +
                   std::to_string(request.next.size()));
  const auto is_known = [&](std::int32_t id) { return id >= 0 && id < vocab; };
  for (std::size_t i = 0; i < request.next.size(); ++i)
    if (!std::ranges::all_of(request.next[i], is_known))  // looked at first: to make the row's name takes longer
      return check_ids("score", "next[" + std::to_string(i) + "]", request.next[i], vocab);
  if (request.top < 0 || request.top > vocab)
    return refused("top: expected " + range(0, vocab) + ", got " + std::to_string(request.top));
  return {};
}

Result<std::vector<RowScore>> score_on_host(ModelRunner& runner, std::span<const Run> runs,
                                            std::span<const std::int32_t> ids, const ScoreRequest& request,
                                            const ForEach& for_each) {
  CF_TRY(check_request(runner.model(), request));
  const std::int64_t vocab = runner.model().shape.vocab_size, rows = std::int64_t(request.next.size());
  const DType dtype = runner.activation();
  const double bytes = double(rows) * double(vocab) * double(size_bytes(dtype));
  CF_TRY(check_free_memory(bytes, "score: the logits of " + std::to_string(rows) + " ids need " + gigabytes(bytes)));
  Tensor logits(dtype, {rows, vocab});
  CF_TRY(runner.run(runs, ids, {.own = false, .rows = request.rows, .to = logits.view<2>()}));
  std::vector<RowScore> scores(request.next.size());
  CF_TRY(for_each(rows, [&](std::int64_t row) {
    const auto* const first =
        static_cast<const std::byte*>(logits.data()) + row * vocab * std::int64_t(size_bytes(dtype));
    scores[std::size_t(row)] = score_row({first, {vocab}, dtype}, request.next[std::size_t(row)], request.top);
  }));
  return scores;
}

namespace {

/// On up to 16 threads, with 8 numbers or more each: a thread begins within the time of a row of 50304 logits.
Status on_threads(std::int64_t n, const std::function<void(std::int64_t)>& f) {
  std::atomic<std::int64_t> next = 0;
  std::atomic<bool> failed = false;
  const auto work = [&]() noexcept {
    try {
      for (std::int64_t i; !failed && (i = next++) < n;) f(i);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  };
  {
    std::vector<std::jthread> threads;
    const std::int64_t most = std::min<std::int64_t>({16, std::int64_t(std::thread::hardware_concurrency()), n / 8});
    try {
      while (std::int64_t(threads.size()) + 1 < most) threads.emplace_back(work);
    } catch (const std::system_error&) {
      // The threads that were made do the work.
    }
    work();
  }
  return failed ? Status::error(Code::out_of_memory, "score: out of memory") : Status();
}

}  // namespace

Result<std::vector<RowScore>> ModelRunner::score(std::span<const Run> runs, std::span<const std::int32_t> ids,
                                                 const ScoreRequest& request) {
  return score_on_host(*this, runs, ids, request, on_threads);
}

namespace {

/// A piece that one run reads, for all prompts that begin with it and the pieces before it.
struct Pass {
  std::int64_t first = 0, count = 0;  // positions
  std::int64_t rows = 0;              // its last tokens, behind which an id is scored
  std::size_t begin = 0, end = 0;     // its prompts: those of `order` from `begin` to before `end`
};

/// The passes of prompts that begin with the same piece, in an order in which each finds the entries before it.
using Group = std::vector<Pass>;

/// Piece `index` of a prompt.
Pass piece_of(const ScorePrompt& prompt, std::int64_t index, std::int64_t piece) {
  const std::int64_t fed = std::int64_t(prompt.ids.size()) - 1, first = index * piece;
  const std::int64_t count = std::clamp<std::int64_t>(fed - first, 0, piece);
  // Position p predicts the id at p + 1.
  return {.first = first, .count = count, .rows = std::clamp<std::int64_t>(first + count - prompt.first + 1, 0, count)};
}

std::span<const std::int32_t> ids_of(const ScorePrompt& prompt, const Pass& pass) {
  return std::span(prompt.ids).subspan(std::size_t(pass.first), std::size_t(pass.count));
}

/// The order in which prompts that share pieces come after each other, and the number of pieces that two share.
class PieceOrder {
 public:
  explicit PieceOrder(std::int64_t piece) : piece_(piece) {}

  bool before(const ScorePrompt& a, const ScorePrompt& b) const {
    const std::int64_t shared = shared_pieces(a, b);
    const Pass x = piece_of(a, shared, piece_), y = piece_of(b, shared, piece_);
    if (std::tie(x.count, x.rows) != std::tie(y.count, y.rows))
      return std::tie(x.count, x.rows) < std::tie(y.count, y.rows);
    const std::span<const std::int32_t> mine = ids_of(a, x), theirs = ids_of(b, y);
    return std::lexicographical_compare(mine.begin(), mine.end(), theirs.begin(), theirs.end());
  }
  std::int64_t shared_pieces(const ScorePrompt& a, const ScorePrompt& b) const {
    for (std::int64_t i = 0;; ++i) {
      const Pass x = piece_of(a, i, piece_), y = piece_of(b, i, piece_);
      if (x.count == 0 || x.count != y.count || x.rows != y.rows) return i;
      if (!std::ranges::equal(ids_of(a, x), ids_of(b, y))) return i;
    }
  }

 private:
  std::int64_t piece_;
};

}  // namespace

struct Scorer::State {
  /// The group that a slot reads, and its next pass.
  struct Reader {
    const Group* group = nullptr;
    std::size_t next = 0;
    bool done() const { return !group || next == group->size(); }
  };

  std::shared_ptr<SlotLease> slots;
  std::vector<ScorePrompt> prompts;
  ScoreOptions options;
  std::int64_t most_rows = 0;      // of a step
  std::vector<std::size_t> order;  // prompts, those that share pieces one after the other
  std::vector<Group> groups;
  std::vector<Reader> readers;  // by slot
  std::size_t next_group = 0;
  std::int64_t ids = 0, ids_read = 0;
  std::vector<PromptScore> scores;
  std::vector<std::vector<std::int32_t>> next;  // of a step, by row; the next step uses the memory again

  void plan();
  bool is_needed(const Pass& pass) const;
  const Pass* next_pass(Reader& reader);
  void put(const Pass& pass, std::span<const RowScore> rows);
};

void Scorer::State::plan() {
  const PieceOrder by_piece(options.piece);
  order.resize(prompts.size());
  std::iota(order.begin(), order.end(), std::size_t(0));
  std::ranges::sort(order, [&](std::size_t a, std::size_t b) {
    if (by_piece.before(prompts[a], prompts[b])) return true;
    return !by_piece.before(prompts[b], prompts[a]) && a < b;
  });
  std::vector<std::size_t> open;  // for each piece of the prompt before: its pass, by number in the last group
  for (std::size_t i = 0; i < order.size(); ++i) {
    const ScorePrompt& prompt = prompts[order[i]];
    const std::int64_t shared = i == 0 ? 0 : by_piece.shared_pieces(prompts[order[i - 1]], prompt);
    if (shared == 0) groups.emplace_back();
    Group& group = groups.back();
    open.resize(std::size_t(shared));
    for (std::size_t pass : open) group[pass].end = i + 1;
    for (std::int64_t index = shared;; ++index) {
      Pass pass = piece_of(prompt, index, options.piece);
      if (pass.count == 0) break;
      pass.begin = i;
      pass.end = i + 1;
      open.push_back(group.size());
      group.push_back(pass);
      ids += pass.count;
    }
  }
}

/// Whether any of a pass's prompts has not failed.
bool Scorer::State::is_needed(const Pass& pass) const {
  return std::any_of(order.begin() + std::ptrdiff_t(pass.begin), order.begin() + std::ptrdiff_t(pass.end),
                     [&](std::size_t prompt) { return bool(scores[prompt].status); });
}

/// The next pass of a slot that is needed; null where no group is left.
const Pass* Scorer::State::next_pass(Reader& reader) {
  for (;; ++reader.next) {
    if (reader.done()) {
      if (next_group == groups.size()) return nullptr;
      reader = {&groups[next_group++], 0};
    }
    const Pass& pass = (*reader.group)[reader.next];
    if (is_needed(pass)) return &pass;
    ids_read += pass.count;
  }
}

/// Gives the prompts of a pass its rows. Row r has the scores of the prompts' ids behind its token, in their order.
void Scorer::State::put(const Pass& pass, std::span<const RowScore> rows) {
  for (std::size_t i = pass.begin; i < pass.end; ++i) {
    const std::size_t prompt = order[i];
    PromptScore& score = scores[prompt];
    for (std::size_t r = 0; r < rows.size() && score.status; ++r) {
      if (!rows[r].status) {
        const std::int64_t position = pass.first + pass.count - pass.rows + std::int64_t(r) + 1;
        score.status = Status::error(rows[r].status.code(),
                                     "score: ids[" + std::to_string(position) + "]: " + rows[r].status.message());
        break;
      }
      score.ids.push_back(rows[r].next[i - pass.begin]);
      score.top.insert(score.top.end(), rows[r].top.begin(), rows[r].top.end());
    }
  }
}

Scorer::Scorer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Scorer::Scorer(Scorer&&) noexcept = default;
Scorer& Scorer::operator=(Scorer&&) noexcept = default;
Scorer::~Scorer() = default;

Result<Scorer> Scorer::create(std::shared_ptr<SlotLease> slots, std::vector<ScorePrompt> prompts,
                              const ScoreOptions& options) {
  CF_TRY_ASSIGN(ModelRunner* const runner, slots->runner());
  const std::int64_t vocab = runner->model().shape.vocab_size;
  const EntryLimit limit = runner->limit();
  if (options.piece < 0) return refused("piece: expected at least 0, got " + std::to_string(options.piece));
  if (options.top < 0 || options.top > vocab)
    return refused("top: expected " + range(0, vocab) + ", got " + std::to_string(options.top));
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const std::string name = "prompt " + std::to_string(i);
    const auto count = std::int64_t(prompts[i].ids.size());
    if (count < 2)
      return refused(name + ": expected at least 2 ids, one to score and one before it, got " + std::to_string(count));
    CF_TRY(check_ids("score", name, prompts[i].ids, vocab));
    if (prompts[i].first < 1 || prompts[i].first >= count)
      return refused(name + ": first: expected " + range(1, count - 1) +
                     ", the position of an id with one before it, got " + std::to_string(prompts[i].first));
    if (count - 1 > limit.most)
      return refused(name + ": expected at most " + std::to_string(limit.most + 1) + " ids, one more than " +
                     std::string(limit.name) + ", got " + std::to_string(count));
  }
  auto state = std::make_unique<State>();
  state->readers.resize(std::size_t(slots->slots()));
  state->slots = std::move(slots);
  state->prompts = std::move(prompts);
  const ScoreSizes sizes = runner->score_sizes(state->slots->slots(), options.top);
  state->options = {.piece = options.piece ? options.piece : sizes.piece, .top = options.top};
  state->most_rows = std::max(state->options.piece, sizes.rows);
  state->scores.resize(state->prompts.size());
  state->plan();
  return Scorer(std::move(state));
}

std::int64_t Scorer::ids() const { return state_->ids; }
std::int64_t Scorer::ids_read() const { return state_->ids_read; }
const std::vector<PromptScore>& Scorer::scores() const { return state_->scores; }

bool Scorer::done() const {
  const State& s = *state_;
  return s.next_group == s.groups.size() &&
         std::ranges::all_of(s.readers, [](const State::Reader& r) { return r.done(); });
}

Status Scorer::step() {
  State& s = *state_;
  CF_TRY_ASSIGN(ModelRunner* const runner, s.slots->runner());
  std::vector<State::Reader*> readers;
  std::vector<const Pass*> passes;
  std::vector<Run> runs;
  std::vector<std::int32_t> ids;
  std::vector<std::int64_t> rows;
  std::size_t asked = 0;  // rows
  for (std::size_t i = 0; i < s.readers.size(); ++i) {
    const Pass* const pass = s.next_pass(s.readers[i]);
    if (!pass) continue;
    if (!passes.empty() && std::int64_t(asked) + pass->rows > s.most_rows) continue;
    readers.push_back(&s.readers[i]);
    passes.push_back(pass);
    runs.push_back({.sequence = (*s.slots)[std::int64_t(i)], .first_position = pass->first, .count = pass->count});
    rows.push_back(pass->rows);
    const std::span<const std::int32_t> fed = ids_of(s.prompts[s.order[pass->begin]], *pass);
    ids.insert(ids.end(), fed.begin(), fed.end());
    for (std::int64_t position = pass->first + pass->count - pass->rows; position < pass->first + pass->count;
         ++position) {
      if (asked == s.next.size()) s.next.emplace_back();
      std::vector<std::int32_t>& ids_behind = s.next[asked++];
      ids_behind.clear();
      for (std::size_t p = pass->begin; p < pass->end; ++p)
        ids_behind.push_back(s.prompts[s.order[p]].ids[std::size_t(position) + 1]);
    }
  }
  if (passes.empty()) return {};
  CF_TRY_ASSIGN(const std::vector<RowScore> scores,
                runner->score(runs, ids, {.rows = rows, .next = std::span(s.next).first(asked), .top = s.options.top}));
  std::span<const RowScore> left = scores;
  for (std::size_t i = 0; i < passes.size(); ++i) {
    s.put(*passes[i], left.first(std::size_t(passes[i]->rows)));
    left = left.subspan(std::size_t(passes[i]->rows));
    ++readers[i]->next;
    s.ids_read += passes[i]->count;
  }
  return {};
}

}  // namespace cf
