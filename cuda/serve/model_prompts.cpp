#include <algorithm>
#include <utility>

#include "core/model/passes.hpp"
#include "core/model/streams.hpp"
#include "core/model/taps.hpp"
#include "cuda/serve/model_state.hpp"
#include "cuda/step/capture.hpp"
#include "cuda/step/graph.hpp"

namespace cf::cuda {

Result<GraphExec> Model::State::chunk_graph(const ModelTensors& t) {
  const AnyView<2> layers_output = t.hidden[std::size_t(spec.shape.num_layers) % 2];
  const auto record = [&](DataflowCapture& graph) {
    CF_TRY_ASSIGN(Program program, record_model(spec, weights.model_weights(), t));
    program = with_rope_append(with_all_reduce(std::move(program), spec));
    std::vector<LaunchList> launches;
    bool calls_library = false;  // in the layers
    for (Node& node : program.nodes) {
      // The final LayerNorm reads the last rows of the layers' output. A graph knows tensors by their first byte.
      if (node.at.site.id == SiteId::final_layer_norm) node.reads = {layers_output.data};
      CF_TRY(name_site(node.at, prepare(node, launches.emplace_back(graph.launches({.early = true})))));
      calls_library = calls_library || (node.at.layer >= 0 && launches.back().has_calls());
    }
    // A kernel that starts early holds SMs while it waits. A library's products in the other branch need them more.
    for (std::size_t i = 0; i < launches.size(); ++i)
      CF_TRY(graph.add(program.nodes[i].reads, program.nodes[i].writes, launches[i], !calls_library));
    return Status();
  };
  return capture_dataflow(context, record, workspace.scratch());
}

Status Model::State::walk(const ModelTensors& t, const Visit& visit_site) {
  const Submission how{.early = context.overlap()};
  CF_TRY_ASSIGN(Program program, record_model(spec, weights.model_weights(), t));
  for (const Node& node : with_all_reduce(std::move(program), spec).nodes) {
    if (norm_alone && node.at.site.id == SiteId::embed_out) continue;
    LaunchList launches(context, workspace.scratch());
    launches.set_label(node.at.site.name.data());  // a literal, which ends in a zero byte
    CF_TRY(name_site(node.at, prepare(node, launches)));
    CF_TRY(launches.submit(stream.get(), how));
    CF_TRY(std::visit([&](const auto& args) { return visit_site(node.at, tensors_of(args)); }, node.call));
  }
  return {};
}

Status Model::State::put(const ModelTensors& t) {
  // A layer's launches are put onto the stream as soon as they are prepared, so that the device need not wait.
  const Submission how{.early = context.overlap()};
  std::vector<LaunchList> parts;
  Program part;
  const auto submit = [&]() -> Status {
    LaunchList& launches = parts.emplace_back(context, workspace.scratch());
    launches.trust_addresses();  // the model's own, which its steps have checked
    for (const Node& node : with_rope_append(with_all_reduce(std::exchange(part, {}), spec)).nodes) {
      launches.set_label(node.at.site.name.data());  // a literal, which ends in a zero byte
      CF_TRY(name_site(node.at, prepare(node, launches)));
    }
    return launches.submit(stream.get(), how);
  };
  const auto add = [&](const ModelSite& site, const auto& args) -> Status {
    if (!part.nodes.empty() && part.nodes.back().at.layer != site.layer) CF_TRY(submit());
    part.nodes.push_back(make_node(site, args));
    return {};
  };
  CF_TRY(for_each_model_site(spec, weights.model_weights(), t, add));
  return submit();
}

Status Model::State::put(const ModelTensors& t, ChunkKey key) {
  if (const auto found = chunks.find(key); found != chunks.end()) {
    GraphExec& known = found->second;
    if (!known) {
      CF_TRY_ASSIGN(known, chunk_graph(t));
      CF_TRY(meet());
    }
    return from_cuda(cudaGraphLaunch(known.get(), stream.get()), "cudaGraphLaunch");
  }
  CF_TRY(put(t));
  constexpr std::size_t most_chunks = 64;
  if (chunks.size() == most_chunks) {
    chunks.clear();
    CF_TRY(meet());
  }
  chunks[std::move(key)] = {};
  return {};
}

Status Model::State::read_chunk(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids,
                                AnyView<2> logits_to) {
  const auto tokens = std::int64_t(ids.size()), chunk = prompt_ids.shape[0];
  CF_TRY(stage(std::size_t(2 * chunk + 1), [&](std::int32_t* staged) {
    for (std::int64_t i = 0; i < tokens; ++i) {
      staged[i] = ids[std::size_t(i)];
      staged[chunk + i] = std::int32_t(first + i);
    }
    staged[2 * chunk] = std::int32_t(first + tokens);
  }));
  CF_TRY(make_rope_rows({prompt_positions.data, {tokens}}));

  std::vector<LayerCache> caches;
  const ModelTensors t = tensors(slot, {.q_len = tokens}, prompt_arrays(tokens), logits_to, caches);
  if (visit) return walk(t, visit);
  return put(t, {.runs = {{slot, tokens}}, .logits = logits_to.data, .rows = logits_to.shape[0], .is_pass = false});
}

template <class LogitsOf, class Done>
Status Model::State::feed(const StepPart& prompt, std::int64_t rows, LogitsOf&& logits_of, Done&& done) {
  const std::int64_t slot = prompt.run.sequence;
  std::span<const std::int32_t> ids = prompt.ids;
  std::int64_t first = prompt.run.first_position, rows_made = 0;
  CF_TRY(pipeline.begin_prompt(slot, first, std::int64_t(ids.size())));
  seen_size[std::size_t(slot)] = 0;
  while (!ids.empty()) {
    const std::span<const std::int32_t> chunk = ids.first(std::min(ids.size(), std::size_t(options.chunk)));
    ids = ids.subspan(chunk.size());
    // The chunk's tokens that are among the last rows of the call.
    const std::int64_t count = std::max<std::int64_t>(0, rows - rows_made - std::int64_t(ids.size()));
    if (go_on) CF_TRY(go_on());
    CF_TRY_ASSIGN(const AnyView<2> to, logits_of(count));
    CF_TRY(read_chunk(slot, first, chunk, to));
    first += std::int64_t(chunk.size());
    CF_TRY(pipeline.extend(slot, first, chunk.back()));
    CF_TRY(done(to, rows_made));
    rows_made += count;
  }
  return {};
}

Result<AnyView<2>> Model::State::rows_for_caller(std::int64_t rows) {
  AnyView<2> to(nullptr, {rows, spec.shape.vocab_size}, workspace.activation());
  if (norm_alone) return to;
  if (std::size_t(to.bytes()) > forward_memory.bytes()) {
    CF_TRY(from_cuda(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize"));
    chunks.clear();
    forward_memory = {};
    CF_TRY_ASSIGN(forward_memory, DeviceMemory::create(context, std::size_t(to.bytes()),
                                                       "logits of " + std::to_string(rows) + " tokens"));
    CF_TRY(meet());
  }
  to.data = forward_memory.data() ? forward_memory.data() : memory.data();
  return to;
}

Status Model::State::copy_rows(const AnyView<2>& to, const AnyView<2>& from, bool on_device) {
  if (from.shape[0] == 0 || norm_alone) return {};
  const auto bytes = std::size_t(from.bytes());
  return on_device ? copy_async(to.data, from.data, bytes, cudaMemcpyDeviceToDevice, stream.get())
                   : copy_to_host(context, to.data, from.data, bytes);
}

Status Model::State::read(const StepPart& prompt, bool own, bool on_device) {
  const std::int64_t slot = prompt.run.sequence, rows = prompt.rows.shape[0];
  const bool is_own_alone = own && rows == 0;
  if (!own) CF_TRY(pipeline.restore(slot));
  AnyView<2> last;  // the logits of the last token
  CF_TRY(feed(
      prompt, is_own_alone ? 1 : rows,
      [&](std::int64_t count) {
        return is_own_alone ? Result<AnyView<2>>(rows_of(prompt_logits, 0, count)) : rows_for_caller(count);
      },
      [&](const AnyView<2>& from, std::int64_t row) {
        if (from.shape[0] > 0) last = rows_of(from, from.shape[0] - 1);
        return is_own_alone ? Status() : copy_rows(rows_of(prompt.rows, row, from.shape[0]), from, on_device);
      }));
  if (!own) return {};
  CF_TRY(copy_async(rows_of(logits_at(LogitsBuffer::prompts), slot).data, last.data, std::size_t(last.bytes()),
                    cudaMemcpyDeviceToDevice, stream.get()));
  CF_TRY(pipeline.end_prompt(slot));
  stepping[std::size_t(slot)] = true;
  return enqueue_end_of_prompt(step, prompt_lengths, prompt_kv_len, slot, context);
}

Status Model::run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) {
  State& s = *state_;
  CF_TRY(check_step(*this, s.pipeline.lengths(), runs, ids, logits));
  std::vector<StepPart> running, prompts;
  // A step of all slots has no sites of its own: while a visitor watches, running tokens are read as prompts are.
  for (const StepPart& p : parts_of(runs, ids, logits)) (p.decodes && !s.visit ? running : prompts).push_back(p);
  CF_TRY(check_rewinds(s.options.stream(), s.options.capacity, s.pipeline.lengths(), runs));
  std::vector<Token> tokens;
  for (const StepPart& p : running)
    tokens.push_back({.slot = p.run.sequence, .id = p.ids[0], .position = p.run.first_position});
  // A step that runs ahead has its room.
  if (!prompts.empty() || !s.pipeline.foresees(tokens)) CF_TRY(s.reserve(runs));
  const bool on_device = logits.stream.has_value();
  if (logits.norm_alone && (!s.visit || logits.own))
    return bad_argument(kModelName, "norm_alone: expected a visitor, and no logits of the slots' own");
  const auto put_parts = [&]() -> Status {
    if (!prompts.empty() && runs.size() > 1) return s.read_together(std::move(running), prompts, logits.own, on_device);
    for (const StepPart& p : prompts) CF_TRY(s.read(p, logits.own, on_device));
    return s.decode(running, on_device);
  };
  const auto put = [&] {
    s.norm_alone = logits.norm_alone;
    const Status status = put_parts();
    s.norm_alone = false;
    return status;
  };
  if (!on_device) return put();
  auto* const theirs = reinterpret_cast<CUstream_st*>(*logits.stream);
  CF_TRY(run_after(theirs));
  // What a step that fails has put onto the device is ordered too: it may write memory that the caller then frees.
  const Status ran = put(), ended = run_before(theirs);
  return ran ? ended : ran;
}

}  // namespace cf::cuda
