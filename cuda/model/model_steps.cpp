#include <algorithm>
#include <utility>

#include "cuda/model/model_state.hpp"

namespace cf::cuda {

Status Model::State::prepare_steps() {
  std::vector<LayerCache> caches;
  for (std::size_t parity : {0, 1}) {
    // The layers of a step are the executor's. What comes before and after them are launches of their own.
    LaunchList before(context, workspace.scratch()), after(context, workspace.scratch());
    const ModelTensors t = tensors(0, options.slots, 1, step, logits_at(step_place(parity)), caches);
    CF_TRY(for_each_model_site(spec, weights.model_weights(), t, [&](const ModelSite& site, const auto& args) {
      if (site.layer >= 0) return Status();
      LaunchList& launches = site.site.name == site::embed_in.name ? before : after;
      launches.set_label(site.site.name.data());  // a literal, which ends in a zero byte
      return name_site(site, prepare(args, launches));
    }));
    embed.push_back(std::move(before));
    finish.push_back(std::move(after));
    for (bool follows : {false, true}) {
      if (impl == Impl::graph) continue;  // a graph's executable cannot become part of another graph
      CF_TRY_ASSIGN(GraphExec graph, capture(stream.get(), [&] { return enqueue_step(parity, follows); }));
      CF_TRY(from_cuda(cudaGraphUpload(graph.get(), stream.get()), "cudaGraphUpload"));
      (follows ? followers : steps)[parity] = std::move(graph);
    }
  }
  for (std::size_t i = 0; i < kPlaces; ++i) {
    LaunchList launches(context);
    CF_TRY(prepare(SampleArgs{.logits = logits[i],
                              .settings = reinterpret_cast<const SlotSampling*>(settings[i].data),
                              .positions = Where(i) == Where::prompts ? prompt_lengths.data : step.kv_len.data,
                              .seen = reinterpret_cast<std::uint32_t*>(seen.data),
                              .chosen = chosen.data},
                   launches));
    sample.push_back(std::move(launches));
    sent[i].resize(std::size_t(options.slots));
  }
  return {};
}

Status Model::State::enqueue_step(std::size_t parity, bool follows) {
  const LaunchMode mode{.early = context.overlap()};
  if (follows) CF_TRY(enqueue_follow(step, chosen, std::int32_t(options.capacity), context));
  CF_TRY(embed[parity].submit(stream.get(), mode));
  CF_TRY(executor.step(weights, cache, workspace, {.stream = stream.get(), .input = step_input()}));
  return finish[parity].submit(stream.get(), mode);
}

Status Model::State::run_step(Where to, bool follows) {
  const std::size_t parity = to == Where::even_steps ? 0 : 1;
  const GraphExec& graph = (follows ? followers : steps)[parity];
  CF_TRY(graph ? from_cuda(cudaGraphLaunch(graph.get(), stream.get()), "cudaGraphLaunch")
               : enqueue_step(parity, follows));
  last_step = to;
  return {};
}

Status Model::State::keep_logits(std::span<const Token> tokens, Where overwritten) {
  std::vector<bool> stepped(where.size());
  for (const Token& t : tokens) stepped[std::size_t(t.slot)] = true;
  for (std::int64_t slot = 0; slot < options.slots; ++slot) {
    if (stepped[std::size_t(slot)] || where[std::size_t(slot)] != overwritten || lengths[slot] == 0) continue;
    const AnyView<2> from = logits_of_slot(slot), to = rows_of(logits_at(Where::prompts), slot);
    CF_TRY(copy_async(to.data, from.data, std::size_t(from.bytes()), cudaMemcpyDeviceToDevice, stream.get()));
    const auto length = std::int32_t(lengths[slot]);
    CF_TRY(copy_async(prompt_lengths.data + slot, &length, sizeof length, cudaMemcpyHostToDevice, stream.get()));
    where[std::size_t(slot)] = Where::prompts;
  }
  return {};
}

bool Model::State::ran_ahead(std::span<const Token> tokens) const {
  return std::is_permutation(
      tokens.begin(), tokens.end(), ahead.begin(), ahead.end(),
      [](const Token& a, const Token& b) { return a.slot == b.slot && a.id == b.id && a.position == b.position; });
}

Status Model::step(std::span<const Token> tokens) {
  State& s = *state_;
  CF_TRY(s.lengths.check_step(tokens));
  for (const Token& t : tokens) CF_TRY(check_ids(kModelName, "ids", std::span(&t.id, 1), s.spec.shape.vocab_size));
  if (tokens.empty()) return {};
  if (!s.ran_ahead(tokens)) {
    const Where to = s.next_place();
    CF_TRY(s.keep_logits(tokens, to));
    SlotTokens placed{};
    std::fill(std::begin(placed.position), std::end(placed.position), std::int32_t(capacity()));
    for (const Token& t : tokens) {
      placed.id[t.slot] = t.id;
      placed.position[t.slot] = std::int32_t(t.position);
    }
    CF_TRY(enqueue_place(s.step, placed, s.context));
    CF_TRY(s.run_step(to, false));
  }
  s.ahead.clear();
  for (const Token& t : tokens) {
    s.lengths.set(t.slot, t.position + 1);
    s.last_ids[std::size_t(t.slot)] = t.id;
    s.where[std::size_t(t.slot)] = s.last_step;
  }
  return {};
}

}  // namespace cf::cuda
