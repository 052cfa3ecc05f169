#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda/serve/model_state.hpp"
#include "cuda/step/capture.hpp"

namespace cf::cuda {
namespace {

/// Copies of rows. Those that follow each other on both sides are one.
class RowCopies {
 public:
  /// A row each.
  void add(const AnyView<2>& to, const AnyView<2>& from) {
    if (!copies_.empty()) {
      auto& [last_to, last_from] = copies_.back();
      const std::int64_t rows = last_to.shape[0];
      if (rows_of(last_to, rows).data == to.data && rows_of(last_from, rows).data == from.data) {
        last_to.shape[0] = last_from.shape[0] = rows + 1;
        return;
      }
    }
    copies_.push_back({to, from});
  }
  template <class Copy>
  Status run(Copy&& copy) const {
    for (const auto& [to, from] : copies_) CF_TRY(copy(to, from));
    return {};
  }

 private:
  std::vector<std::pair<AnyView<2>, AnyView<2>>> copies_;
};

}  // namespace

std::vector<Model::State::Pieces> Model::State::passes_of(std::span<const StepPart> running,
                                                          std::span<const StepPart> prompts, bool own) const {
  std::vector<Pieces> passes(1);
  for (const StepPart& p : running)
    passes.back().push_back({.run = p.run, .ids = p.ids, .rows = p.rows, .own = true, .is_running = true});
  std::int64_t room = most_tokens() - std::int64_t(running.size());
  for (const StepPart& p : prompts) {
    const auto& [sequence, first_position, count] = p.run;
    const std::int64_t first_row = count - p.rows.shape[0];
    for (std::int64_t first = 0, n; first < count; first += n) {
      n = std::min(count - first, options.chunk);
      // A pass has one piece of a prompt at most: its table has one run of a sequence.
      if (n > room || first > 0) {
        passes.emplace_back();
        room = most_tokens();
      }
      room -= n;
      // The piece's tokens that are among the prompt's last rows.
      const std::int64_t begin = std::max(first, first_row), rows = std::max<std::int64_t>(0, first + n - begin);
      passes.back().push_back({.run = {sequence, first_position + first, n},
                               .ids = p.ids.subspan(std::size_t(first), std::size_t(n)),
                               .rows = rows > 0 ? rows_of(p.rows, begin - first_row, rows) : AnyView<2>(),
                               .own = own && first + n == count});
    }
  }
  if (passes.front().empty()) passes.erase(passes.begin());
  return passes;
}

Status Model::State::read_together(std::vector<StepPart> running, std::span<const StepPart> prompts, bool own,
                                   bool on_device) {
  for (const StepPart& p : prompts) {
    if (!own) CF_TRY(pipeline.restore(p.run.sequence));
    seen_size[std::size_t(p.run.sequence)] = 0;
  }
  // Slots side by side can share a launch.
  std::ranges::sort(running, {}, [](const StepPart& p) { return p.run.sequence; });
  std::vector<Pieces> passes = passes_of(running, prompts, own);
  // Where no prompt fits beside them, the running tokens are a step.
  const bool are_apart = !running.empty() && passes.front().size() == running.size();
  if (are_apart) passes.erase(passes.begin());
  for (const Pieces& pieces : passes) {
    if (go_on) CF_TRY(go_on());
    CF_TRY(pass(pieces));
    CF_TRY(make_logits(pieces, on_device));
  }
  return are_apart ? decode(running, on_device) : Status();
}

Status Model::State::pass(const Pieces& pieces) {
  std::vector<Run> runs;
  for (const Piece& p : pieces) runs.push_back(p.run);
  CF_TRY(pipeline.begin_pass(runs));
  const std::vector<RowRun> table = cf::rows_of(runs);
  const std::int64_t tokens = tokens_of(runs);
  std::int64_t longest = 0;
  for (const Run& r : runs) longest = std::max(longest, r.count);

  const auto words = std::size_t(pass_rows.data + pass_rows.shape[0] - prompt_ids.data);
  CF_TRY(stage(words, [&](std::int32_t* staged) {
    std::int32_t* id = staged;
    std::int32_t* position = staged + (prompt_positions.data - prompt_ids.data);
    std::int32_t* const kv_len = staged + (prompt_kv_len.data - prompt_ids.data);
    std::int32_t* row = staged + (pass_rows.data - prompt_ids.data);
    std::fill_n(kv_len, options.slots, kIdleLength);
    std::int32_t end = 0;  // of a piece's rows
    for (const Piece& p : pieces) {
      id = std::ranges::copy(p.ids, id).out;
      for (std::int64_t i = 0; i < p.run.count; ++i) *position++ = std::int32_t(p.run.first_position + i);
      kv_len[p.run.sequence] = std::int32_t(p.run.first_position + p.run.count);
      end += std::int32_t(p.run.count);
      for (std::int64_t i = p.head_rows(); i > 0; --i) *row++ = end - std::int32_t(i);
    }
  }));
  CF_TRY(make_rope_rows({prompt_positions.data, {tokens}}));

  const StepArrays arrays{
      .ids = {prompt_ids.data, {tokens}}, .positions = {prompt_positions.data, {tokens}}, .kv_len = prompt_kv_len};
  const AnyView<2> no_logits(nullptr, {0, spec.shape.vocab_size}, workspace.activation());
  std::vector<LayerCache> caches;
  ModelTensors t = tensors(0, {.batch = options.slots, .q_len = longest, .mixed = tokens}, arrays, no_logits, caches);
  t.layer.runs = table;
  // The runs of a pass with running tokens seldom come again, and these do not wait for a graph to be made. A graph
  // takes as long to make as two long passes, which gain little.
  constexpr std::int64_t most_of_graph = 1024;
  const std::int64_t running = std::ranges::count_if(pieces, [](const Piece& p) { return p.is_running; });
  if (visit) {
    CF_TRY(walk(t, visit));
  } else if (running > 0) {
    CF_TRY(put_mixed(t, running));
  } else if (tokens > most_of_graph) {
    CF_TRY(put(t));
  } else {
    ChunkKey key{.runs = {}, .logits = nullptr, .rows = 0, .is_pass = true};
    for (const Run& r : runs) key.runs.emplace_back(r.sequence, r.count);
    CF_TRY(put(t, std::move(key)));
  }
  for (const Piece& p : pieces)
    CF_TRY(pipeline.extend(p.run.sequence, p.run.first_position + p.run.count, p.ids.back()));
  return {};
}

Status Model::State::make_logits(const Pieces& pieces, bool on_device) {
  std::int64_t rows = 0;
  bool any_for_caller = false, any_own = false;
  for (const Piece& p : pieces) {
    rows += p.head_rows();
    any_for_caller |= p.rows.shape[0] > 0;
    any_own |= p.own;
  }
  if (rows == 0) return {};
  AnyView<2> made = prompt_logits;
  if (any_for_caller || rows > made.shape[0]) {
    CF_TRY_ASSIGN(made, rows_for_caller(rows));
  }
  made.shape[0] = rows;
  // The last layer's input is read no more.
  const AnyView<2> gathered = rows_of(hidden[std::size_t(spec.shape.num_layers + 1) % 2], 0, rows);
  CF_TRY(enqueue_gather(layers_output(), {pass_rows.data, {rows}}, gathered, context));
  LaunchList launches(context, workspace.scratch());
  launches.trust_addresses();
  CF_TRY(for_each_head_site(spec, weights.model_weights(), gathered, rows_of(final_norm, 0, rows), made,
                            [&](const ModelSite& site, const auto& args) {
                              if (visit) return run_site(site, args, visit);
                              launches.set_label(site.site.name.data());  // a literal, which ends in a zero byte
                              return name_site(site, prepare(args, launches));
                            }));
  CF_TRY(launches.submit(stream.get(), {.early = context.overlap()}));

  RowCopies to_slots, to_caller;
  std::int64_t next = 0;
  for (const Piece& p : pieces) {
    for (std::int64_t i = 0, n = p.rows.shape[0]; i < n; ++i)
      to_caller.add(rows_of(p.rows, i), rows_of(made, next + p.head_rows() - n + i));
    next += p.head_rows();
    if (p.own) to_slots.add(rows_of(logits_at(LogitsBuffer::prompts), p.run.sequence), rows_of(made, next - 1));
  }
  CF_TRY(to_slots.run([&](const AnyView<2>& to, const AnyView<2>& from) { return copy_rows(to, from, true); }));
  CF_TRY(to_caller.run([&](const AnyView<2>& to, const AnyView<2>& from) { return copy_rows(to, from, on_device); }));
  if (!any_own) return {};
  for (const Piece& p : pieces) {
    if (p.own) CF_TRY(pipeline.end_prompt(p.run.sequence));
    stepping[std::size_t(p.run.sequence)] = true;  // enqueue_ends_of_prompts() ends them all
  }
  return enqueue_ends_of_prompts(step, prompt_lengths, prompt_kv_len, context);
}

}  // namespace cf::cuda
