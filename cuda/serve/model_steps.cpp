#include <algorithm>
#include <utility>

#include "core/cache_view.hpp"
#include "core/call_groups.hpp"
#include "core/model/passes.hpp"
#include "cuda/comm/peers.hpp"
#include "cuda/model/arena.hpp"
#include "cuda/ops/ranks/choose.hpp"
#include "cuda/serve/model_state.hpp"
#include "cuda/step/capture.hpp"
#include "cuda/step/graph.hpp"
#include "cuda/step/lower.hpp"

namespace cf::cuda {
namespace {

/// A layer's step of one token of each sequence, for the first `batch` sequences.
LayerTensors first_sequences(const ModelShape& shape, LayerTensors t, std::int64_t batch) {
  if (t.page_table) t.page_table = part_of(t.page_table, 0, batch);
  for_each_activation(
      shape, {.batch = batch, .sinks = bool(t.sink_positions)},
      [&]<class V>(const TensorSpec& spec, V& view, const auto& size) {
        if (spec.role == Role::input || spec.role == Role::position || spec.role == Role::length ||
            spec.role == Role::output)
          view.shape = size;
        if constexpr (std::is_same_v<V, AnyView<4>>)
          if (spec.role == Role::state && !t.page_table) view = cache_of(view, 0, batch);
      },
      t);
  return t;
}

}  // namespace

bool Model::State::makes_whole_tokens() const { return impl == Impl::persistent && !context.peers(); }

Status Model::State::prepare_layers() {
  if (!makes_whole_tokens())
    return executor.prepare(weights, cache, workspace, {.stream = stream.get(), .input = step_input()});
  // The program of a decode step. Where its logits go is said with each launch.
  std::vector<LayerCache> caches;
  const ModelTensors t = tensors(0, {.batch = options.slots}, step, logits_at(LogitsBuffer::even_steps), caches);
  CF_TRY_ASSIGN(Program program, record_model(spec, weights.model_weights(), t));
  CF_TRY_ASSIGN(LoweredProgram lowered, lower(with_all_reduce(std::move(program), spec)));
  lowered.ends->ids = step.ids;
  lowered.ends->positions = step.positions;
  lowered.ends->kv_len = step.kv_len;
  lowered.ends->chosen = chosen;
  CF_TRY_ASSIGN(whole, PersistentKernel::create(context, persistent_model(spec, workspace.activation()), lowered.layers,
                                                {t.layer.positions, t.layer.kv_len}, {t.layer.cos, t.layer.sin},
                                                {.ends = lowered.ends}));
  return from_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Status Model::State::prepare_steps() {
  for (std::size_t i = 0; i < kLogitsBuffers; ++i) {
    LaunchList launches(context);
    const SampleArgs choice{
        .logits = logits[i],
        .settings = reinterpret_cast<const SlotSampling*>(settings[i].data),
        .positions = LogitsBuffer(i) == LogitsBuffer::prompts ? prompt_lengths.data : step.kv_len.data,
        .seen = reinterpret_cast<std::uint32_t*>(seen.data),
        .chosen = chosen.data,
        .told = told.get()};
    CF_TRY(is_divided(LogitsBuffer(i))
               ? prepare(RankChoiceArgs{.choice = choice, .part = head_parts[i], .logits = logits[i]}, launches)
               : prepare(choice, launches));
    sample.push_back(std::move(launches));
    sent[i].resize(std::size_t(options.slots));
  }
  placed_slots = options.slots;
  for (LogitsBuffer to : {LogitsBuffer::even_steps, LogitsBuffer::odd_steps})
    for (Start start : {Start::placed, Start::follows, Start::chooses})
      CF_TRY(step_graph(start, to, options.slots).status());
  return {};
}

std::int64_t Model::State::step_slots(std::int64_t slots) const {
  // A model of many slots whose last ones are idle has graphs for some smaller numbers of them, whose products are all of
  // the class of many tokens.
  constexpr std::int64_t least = 256;
  if (impl != Impl::graph) return options.slots;
  std::int64_t some = least;
  while (some < slots) some *= 2;
  return std::min(some, options.slots);
}

Result<cudaGraphExec_t> Model::State::step_graph(Start start, LogitsBuffer to, std::int64_t slots) {
  GraphExec& graph = steps[{start, to, slots}];
  if (!graph) {
    CF_TRY_ASSIGN(graph, impl == Impl::graph    ? dataflow_step(to, start, slots)
                         : makes_whole_tokens() ? whole_step(to, start)
                                                : executor_step(to, start));
    CF_TRY(from_cuda(cudaGraphUpload(graph.get(), stream.get()), "cudaGraphUpload"));
    CF_TRY(meet());
  }
  return graph.get();
}

Status Model::State::begin_step(LogitsBuffer to, Start start, const Submission& how) {
  if (start == Start::chooses) CF_TRY(sample[std::size_t(other_buffer(to))].submit(stream.get(), how));
  if (start != Start::placed) {
    LaunchList follow(context);
    CF_TRY(add_follow(step, chosen, most_followed(), follow));
    CF_TRY(follow.submit(stream.get(), how));
  }
  return make_rope_rows(step.positions);
}

Status Model::State::make_rope_rows(View<const std::int32_t, 1> positions) {
  if (!options.stream()) return {};
  LaunchList launches(context);
  CF_TRY(workspace.add_rope_rows(positions, launches));
  return launches.submit(stream.get(), {.early = context.overlap()});
}

template <class Add>
Status Model::State::for_each_outer_site(LogitsBuffer to, std::int64_t slots, Add&& add) const {
  const StepArrays arrays{.ids = {step.ids.data, {slots}},
                          .positions = {step.positions.data, {slots}},
                          .kv_len = {step.kv_len.data, {slots}}};
  std::vector<LayerCache> caches;
  const ModelTensors t = tensors(0, {.batch = slots}, arrays, rows_of(logits_at(to), 0, slots), caches);
  CF_TRY_ASSIGN(Program program, record_model(spec, weights.model_weights(), t));
  if (is_divided(to))
    program = with_rank_head(std::move(program), spec, context.peers()->rank, head_parts[std::size_t(to)]);
  for (const Node& node : program.nodes)
    if (node.at.layer < 0 && !std::holds_alternative<ops::AllGather::Args>(node.call))  // gather_logits()
      CF_TRY(std::visit([&](const auto& args) { return name_site(node.at, add(node.at.site, args)); }, node.call));
  return {};
}

Result<GraphExec> Model::State::executor_step(LogitsBuffer to, Start start) {
  LaunchList before(context, workspace.scratch()), after(context, workspace.scratch());
  CF_TRY(for_each_outer_site(to, options.slots, [&](const Site& site, const auto& args) {
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

Result<GraphExec> Model::State::dataflow_step(LogitsBuffer to, Start start, std::int64_t slots) {
  const auto record = [&](DataflowCapture& graph) -> Status {
    if (start == Start::chooses) {
      const LogitsBuffer from = other_buffer(to);
      // The logits that are put together from parts are nobody else's to read in a step.
      const void* const made = is_divided(from) ? head_parts[std::size_t(from)].data : logits_at(from).data;
      const void *const reads[] = {made, step.kv_len.data}, *const writes[] = {chosen.data};
      CF_TRY(graph.add(reads, writes, sample[std::size_t(from)], true));
    }
    if (start != Start::placed) {
      LaunchList launches(context);
      CF_TRY(add_follow(step, chosen, most_followed(), launches));
      const void *const reads[] = {chosen.data}, *const writes[] = {step.ids.data, step.positions.data,
                                                                    step.kv_len.data};
      CF_TRY(graph.add(reads, writes, launches, true));
    }
    if (options.stream()) {
      LaunchList launches(context);
      CF_TRY(workspace.add_rope_rows(step.positions, launches));
      // RoPE names the rows of its table by positions, which stand for them here.
      const void *const reads[] = {step.positions.data}, *const writes[] = {
                                                             workspace.tensors(cache, 0, 0, 1).positions.data};
      CF_TRY(graph.add(reads, writes, launches, true));
    }
    return for_each_outer_site(to, slots, [&](const Site& site, const auto& args) -> Status {
      // The LM head starts late. If its blocks come one by one to SMs where the last layer's kernels still run, it may
      // read more slowly until its end (kH200Tuning).
      CF_TRY(graph.run(args, {.early = site.id != SiteId::embed_out}));
      if (site.id != SiteId::embed_in) return {};
      for (std::int64_t l = 0; l < spec.shape.num_layers; ++l) {
        LayerTensors t = workspace.tensors(cache, 0, l, 1);
        if (l == 0) t.hidden = step_input();
        t = first_sequences(spec.shape, t, slots);
        if (Status captured = capture_layer(spec.of_layer(l), weights.layer(l), t, graph); !captured)
          return Status::error(captured.code(), layer_prefix(l) + captured.message());
      }
      return {};
    });
  };
  return capture_dataflow(context, record, workspace.scratch());
}

Result<GraphExec> Model::State::whole_step(LogitsBuffer to, Start start) {
  return capture(stream.get(), [&]() -> Status {
    CF_TRY(begin_step(to, start, {}));
    return whole->enqueue_token(stream.get(), logits_at(to));
  });
}

Status Model::State::place(std::span<const Token> tokens) {
  stepping.assign(stepping.size(), false);
  for (const Token& t : tokens) stepping[std::size_t(t.slot)] = true;
  SlotTokens placed(options.slots);
  std::int64_t slots = 0;
  for (const Token& t : tokens) {
    slots = std::max(slots, t.slot + 1);
    const auto slot = std::size_t(t.slot);
    placed.id[slot] = t.id;
    placed.position[slot] = std::int32_t(t.position);
    placed.length[slot] = std::int32_t(t.position + 1);
  }
  placed_slots = step_slots(slots);
  return enqueue_place(step, placed, context);
}

Status Model::State::run(Start start, LogitsBuffer to) {
  CF_TRY_ASSIGN(const cudaGraphExec_t graph, step_graph(start, to, placed_slots));
  return from_cuda(cudaGraphLaunch(graph, stream.get()), "cudaGraphLaunch");
}

Status Model::State::keep(std::int64_t slot, LogitsBuffer from, std::int64_t length) {
  CF_TRY(gather_logits(from, slot));
  const AnyView<2> row = rows_of(logits_at(from), slot), to = rows_of(logits_at(LogitsBuffer::prompts), slot);
  CF_TRY(copy_async(to.data, row.data, std::size_t(row.bytes()), cudaMemcpyDeviceToDevice, stream.get()));
  const auto entries = std::int32_t(length);
  return copy_async(prompt_lengths.data + slot, &entries, sizeof entries, cudaMemcpyHostToDevice, stream.get());
}

Result<unsigned> Model::State::launch(std::int64_t count, LogitsBuffer to, std::span<const SlotEnd> ends) {
  std::vector<PersistentEnd> sequence_ends;
  for (const SlotEnd& end : ends) sequence_ends.push_back({.tokens = end.tokens, .stop_ids = end.stop_ids});
  CF_TRY(begin_step(to, Start::follows, {}));
  return whole->enqueue_tokens(stream.get(), count, logits_at(to), sequence_ends);
}

Status Model::State::decode(std::span<const StepPart> parts, bool on_device) {
  std::vector<Token> tokens;
  std::vector<std::int64_t> slots;
  std::vector<AnyView<2>> rows;
  for (const StepPart& p : parts) {
    tokens.push_back({.slot = p.run.sequence, .id = p.ids[0], .position = p.run.first_position});
    if (p.rows.shape[0] == 0) continue;
    slots.push_back(p.run.sequence);
    rows.push_back(p.rows);
  }
  if (go_on && !tokens.empty()) CF_TRY(go_on());
  CF_TRY(pipeline.step(tokens));
  return copy_logits(slots, rows, on_device);
}

}  // namespace cf::cuda
