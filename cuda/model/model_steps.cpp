#include <algorithm>
#include <utility>

#include "cuda/graph/capture.hpp"
#include "cuda/model/layer_graph.hpp"
#include "cuda/model/model_state.hpp"
#include "cuda/model/place.hpp"

namespace cf::cuda {

Status Model::State::prepare_layers() {
  if (impl != Impl::persistent)
    return executor.prepare(weights, cache, workspace, {.stream = stream.get(), .input = step_input()});
  const ModelWeights model = weights.model_weights();
  std::vector<PersistentLayer> layers;
  for (std::int64_t l = 0; l < spec.shape.num_layers; ++l) layers.push_back({weights.layer(l), cache.layer(l)});
  const LayerTensors t = workspace.tensors(cache, 0, 0, 1);
  const auto* const head = std::get_if<DenseWeight>(&model.embed_out.weight);
  CF_TRY_ASSIGN(whole,
                PersistentKernel::create(context, persistent_model(spec, workspace.activation()), layers,
                                         {t.positions, t.kv_len}, {t.cos, t.sin},
                                         {.ends = PersistentEnds{.embed_in = model.embed_in,
                                                                 .final_layer_norm = model.final_layer_norm,
                                                                 .embed_out = head ? head->weight : ConstAnyView<2>(),
                                                                 .ids = step.ids,
                                                                 .positions = step.positions,
                                                                 .kv_len = step.kv_len,
                                                                 .chosen = chosen}}));
  return from_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Status Model::State::prepare_steps() {
  for (std::size_t i = 0; i < kPlaces; ++i) {
    LaunchList launches(context);
    CF_TRY(prepare(SampleArgs{.logits = logits[i],
                              .settings = reinterpret_cast<const SlotSampling*>(settings[i].data),
                              .positions = Where(i) == Where::prompts ? prompt_lengths.data : step.kv_len.data,
                              .seen = reinterpret_cast<std::uint32_t*>(seen.data),
                              .chosen = chosen.data,
                              .told = told.get()},
                   launches));
    sample.push_back(std::move(launches));
    sent[i].resize(std::size_t(options.slots));
  }
  for (std::size_t parity : {0, 1})
    for (Start start : {Start::placed, Start::follows, Start::chooses}) {
      const Where to = step_place(parity);
      CF_TRY_ASSIGN(GraphExec graph, impl == Impl::graph        ? dataflow_step(to, start)
                                     : impl == Impl::persistent ? whole_step(to, start)
                                                                : executor_step(to, start));
      CF_TRY(from_cuda(cudaGraphUpload(graph.get(), stream.get()), "cudaGraphUpload"));
      steps[std::size_t(start)][parity] = std::move(graph);
    }
  return {};
}

Status Model::State::begin_step(Where to, Start start, const Submission& how) {
  if (start == Start::chooses) CF_TRY(sample[std::size_t(other_place(to))].submit(stream.get(), how));
  if (start == Start::placed) return {};
  LaunchList follow(context);
  CF_TRY(add_follow(step, chosen, std::int32_t(options.capacity), follow));
  return follow.submit(stream.get(), how);
}

template <class Add>
Status Model::State::for_each_outer_site(Where to, Add&& add) const {
  std::vector<LayerCache> caches;
  const ModelTensors t = tensors(0, options.slots, 1, step, logits_at(to), caches);
  return for_each_model_site(spec, weights.model_weights(), t, [&](const ModelSite& site, const auto& args) -> Status {
    return site.layer >= 0 ? Status() : name_site(site, add(site.site, args));
  });
}

Result<GraphExec> Model::State::executor_step(Where to, Start start) {
  LaunchList before(context, workspace.scratch()), after(context, workspace.scratch());
  CF_TRY(for_each_outer_site(to, [&](const Site& site, const auto& args) {
    LaunchList& launches = site.id == SiteId::embed_in ? before : after;
    launches.set_label(site.name.data());  // a literal, which ends in a zero byte
    return prepare(args, launches);
  }));
  const Submission how{.early = context.overlap()};
  return capture(stream.get(), [&]() -> Status {
    CF_TRY(begin_step(to, start, how));
    CF_TRY(before.submit(stream.get(), how));
    CF_TRY(executor.step(weights, cache, workspace, {.stream = stream.get(), .input = step_input()}));
    return after.submit(stream.get(), how);
  });
}

Result<GraphExec> Model::State::dataflow_step(Where to, Start start) {
  const auto record = [&](DataflowCapture& graph) -> Status {
    if (start == Start::chooses) {
      const Where from = other_place(to);
      const void *const reads[] = {logits_at(from).data, step.kv_len.data}, *const writes[] = {chosen.data};
      CF_TRY(graph.add(reads, writes, sample[std::size_t(from)], true));
    }
    if (start != Start::placed) {
      LaunchList launches(context);
      CF_TRY(add_follow(step, chosen, std::int32_t(options.capacity), launches));
      const void *const reads[] = {chosen.data}, *const writes[] = {step.ids.data, step.positions.data,
                                                                    step.kv_len.data};
      CF_TRY(graph.add(reads, writes, launches, true));
    }
    return for_each_outer_site(to, [&](const Site& site, const auto& args) -> Status {
      // The LM head starts late. If its blocks come one by one to SMs where the last layer's kernels still run, it may
      // read more slowly until its end, as it does on an H200 for Llama-3.1-8B with packed weights.
      CF_TRY(graph.run(args, {.early = site.id != SiteId::embed_out}));
      if (site.id != SiteId::embed_in) return {};
      for (std::int64_t l = 0; l < spec.shape.num_layers; ++l) {
        LayerTensors t = workspace.tensors(cache, 0, l, 1);
        if (l == 0) t.hidden = step_input();
        if (Status captured = capture_layer(spec, weights.layer(l), t, graph); !captured)
          return Status::error(captured.code(), layer_prefix(l) + captured.message());
      }
      return {};
    });
  };
  return capture_dataflow(context, record, workspace.scratch());
}

Result<GraphExec> Model::State::whole_step(Where to, Start start) {
  return capture(stream.get(), [&]() -> Status {
    CF_TRY(begin_step(to, start, {}));
    return whole->enqueue_token(stream.get(), logits_at(to));
  });
}

Status Model::State::run_step(Where to, Start start) {
  const std::size_t parity = to == Where::even_steps ? 0 : 1;
  CF_TRY(from_cuda(cudaGraphLaunch(steps[std::size_t(start)][parity].get(), stream.get()), "cudaGraphLaunch"));
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

Status Model::State::enqueue_tokens(std::span<const Token> tokens) {
  SlotTokens placed{};
  std::fill(std::begin(placed.position), std::end(placed.position), std::int32_t(options.capacity));
  for (const Token& t : tokens) {
    placed.id[t.slot] = t.id;
    placed.position[t.slot] = std::int32_t(t.position);
  }
  return enqueue_place(step, placed, context);
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
  if (s.visit)
    return Status::error(Code::unimplemented,
                         "model: step: expected no visitor of sites on a GPU, which has them for "
                         "prompts alone; watch() takes an empty one");
  if (s.ran_ahead(tokens)) {
    s.last_token.reset();
    if (s.next_token != s.end_token) s.last_token = s.next_token++;
    s.can_follow = s.next_token == s.end_token;
  } else {
    s.end_launch();
    for (std::int64_t slot = 0; slot < s.options.slots; ++slot)
      if (std::none_of(tokens.begin(), tokens.end(), [&](const Token& t) { return t.slot == slot; }))
        CF_TRY(s.restore_logits(slot));
    s.last_token.reset();
    const Where to = s.next_place();
    CF_TRY(s.keep_logits(tokens, to));
    CF_TRY(s.enqueue_tokens(tokens));
    CF_TRY(s.run_step(to, Start::placed));
    s.can_follow = true;
  }
  s.ahead.clear();
  for (const Token& t : tokens) {
    s.lengths.set(t.slot, t.position + 1);
    s.last_ids[std::size_t(t.slot)] = t.id;
    s.where[std::size_t(t.slot)] = s.last_step;
    s.made_by[std::size_t(t.slot)] = s.last_token;
  }
  return {};
}

}  // namespace cf::cuda
