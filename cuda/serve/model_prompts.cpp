#include <algorithm>
#include <utility>

#include "core/model/passes.hpp"
#include "core/model/taps.hpp"
#include "cuda/serve/model_state.hpp"
#include "cuda/step/capture.hpp"
#include "cuda/step/graph.hpp"

namespace cf::cuda {

Result<GraphExec> Model::State::pass_graph(const ModelTensors& t) {
  const AnyView<2> layers_output = t.hidden[std::size_t(spec.shape.num_layers) % 2];
  const auto record = [&](DataflowCapture& graph) {
    CF_TRY_ASSIGN(Program program, record_model(spec, weights.model_weights(), t));
    program = with_rope_append(std::move(program));
    for (Node& node : program.nodes) {
      // The final LayerNorm reads the last rows of the layers' output. A graph knows tensors by their first byte.
      if (node.at.site.id == SiteId::final_layer_norm) node.reads = {layers_output.data};
      LaunchList launches = graph.launches({.early = true});
      CF_TRY(name_site(node.at, prepare(node, launches)));
      CF_TRY(graph.add(node.reads, node.writes, launches, true));
    }
    return Status();
  };
  return capture_dataflow(context, record, workspace.scratch());
}

Status Model::State::walk(const ModelTensors& t, const Visit& visit_site) {
  const Submission how{.early = context.overlap()};
  return for_each_model_site(spec, weights.model_weights(), t, [&](const ModelSite& site, const auto& args) -> Status {
    LaunchList launches(context, workspace.scratch());
    launches.set_label(site.site.name.data());  // a literal, which ends in a zero byte
    CF_TRY(name_site(site, prepare(args, launches)));
    CF_TRY(launches.submit(stream.get(), how));
    return visit_site(site, tensors_of(args));
  });
}

Status Model::State::pass(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids,
                          AnyView<2> logits_to) {
  const auto tokens = std::int64_t(ids.size()), chunk = prompt_ids.shape[0];
  CF_TRY(from_cuda(cudaEventSynchronize(prompt_copied.get()), "cudaEventSynchronize"));
  std::int32_t* const staged = pinned_prompt.get();
  for (std::int64_t i = 0; i < tokens; ++i) {
    staged[i] = ids[std::size_t(i)];
    staged[chunk + i] = std::int32_t(first + i);
  }
  staged[2 * chunk] = std::int32_t(first + tokens);
  CF_TRY(copy_async(prompt_ids.data, staged, std::size_t(2 * chunk + 1) * sizeof(std::int32_t), cudaMemcpyHostToDevice,
                    stream.get()));
  CF_TRY(from_cuda(cudaEventRecord(prompt_copied.get(), stream.get()), "cudaEventRecord"));

  std::vector<LayerCache> caches;
  const ModelTensors t = tensors(slot, 1, tokens, prompt_arrays(tokens), logits_to, caches);
  if (visit) return walk(t, visit);
  const Submission how{.early = context.overlap()};
  const PassKey key{slot, tokens, logits_to.data, logits_to.shape[0]};
  if (const auto found = passes.find(key); found != passes.end()) {
    GraphExec& known = found->second;
    if (!known) {
      CF_TRY_ASSIGN(known, pass_graph(t));
    }
    return from_cuda(cudaGraphLaunch(known.get(), stream.get()), "cudaGraphLaunch");
  }
  // A layer's launches are put onto the stream as soon as they are prepared, so that the device need not wait.
  std::vector<LaunchList> parts;
  Program part;
  const auto submit = [&]() -> Status {
    LaunchList& launches = parts.emplace_back(context, workspace.scratch());
    for (const Node& node : with_rope_append(std::exchange(part, {})).nodes) {
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
  CF_TRY(submit());
  constexpr std::size_t most_passes = 64;
  if (passes.size() == most_passes) passes.clear();
  passes[key] = {};
  return {};
}

template <class LogitsOf, class Done>
Status Model::State::feed(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids, std::int64_t rows,
                          LogitsOf&& logits_of, Done&& done) {
  CF_TRY(pipeline.lengths().check(slot, first, std::int64_t(ids.size())));
  CF_TRY(check_ids(kModelName, "ids", ids, spec.shape.vocab_size));
  if (rows < 0 || rows > std::int64_t(ids.size()))
    return bad_argument(kModelName,
                        "logits: expected 0 to " + std::to_string(ids.size()) + " rows, got " + std::to_string(rows));
  CF_TRY(pipeline.begin_prompt(slot, first, std::int64_t(ids.size())));
  seen_size[std::size_t(slot)] = 0;
  std::int64_t rows_made = 0;
  while (!ids.empty()) {
    const std::span<const std::int32_t> chunk = ids.first(std::min(ids.size(), std::size_t(options.chunk)));
    ids = ids.subspan(chunk.size());
    // The chunk's tokens that are among the last rows of the call.
    const std::int64_t count = std::max<std::int64_t>(0, rows - rows_made - std::int64_t(ids.size()));
    if (go_on) CF_TRY(go_on());
    CF_TRY_ASSIGN(const AnyView<2> to, logits_of(rows_made, count));
    CF_TRY(pass(slot, first, chunk, to));
    first += std::int64_t(chunk.size());
    CF_TRY(pipeline.extend(slot, first, chunk.back()));
    CF_TRY(done(to, rows_made));
    rows_made += count;
  }
  return {};
}

Status Model::prefill(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids) {
  State& s = *state_;
  CF_TRY(s.feed(
      slot, first, ids, 1,
      [&](std::int64_t, std::int64_t count) -> Result<AnyView<2>> { return rows_of(s.prompt_logits, 0, count); },
      [](const AnyView<2>&, std::int64_t) { return Status(); }));
  CF_TRY(copy_async(rows_of(s.logits_at(LogitsBuffer::prompts), slot).data, s.prompt_logits.data,
                    std::size_t(s.prompt_logits.bytes()), cudaMemcpyDeviceToDevice, s.stream.get()));
  CF_TRY(s.pipeline.end_prompt(slot));
  return enqueue_end_of_prompt(s.step, s.prompt_lengths, s.prompt_kv_len, slot, s.context);
}

Status Model::State::check_logits(const AnyView<2>& logits) const {
  const std::int64_t vocab = spec.shape.vocab_size;
  const DType dtype = workspace.activation();
  if (logits.shape[1] == vocab && logits.dtype == dtype) return {};
  return bad_argument(kModelName, "logits: expected rows of " + std::to_string(vocab) + " " +
                                      std::string(to_string(dtype)) + ", got " + std::to_string(logits.shape[1]) + " " +
                                      std::string(to_string(logits.dtype)));
}

template <class Copy>
Status Model::State::forward(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids,
                             AnyView<2> logits_to, Copy&& copy) {
  CF_TRY(check_logits(logits_to));
  CF_TRY(pipeline.lengths().check(slot, first, std::int64_t(ids.size())));
  CF_TRY(pipeline.restore(slot));
  return feed(
      slot, first, ids, logits_to.shape[0],
      [&](std::int64_t, std::int64_t count) -> Result<AnyView<2>> {
        AnyView<2> to(nullptr, {count, spec.shape.vocab_size}, workspace.activation());
        if (std::size_t(to.bytes()) > forward_memory.bytes()) {
          CF_TRY(from_cuda(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize"));
          passes.clear();
          forward_memory = {};
          CF_TRY_ASSIGN(forward_memory, DeviceMemory::create(context, std::size_t(to.bytes()),
                                                             "logits of " + std::to_string(count) + " tokens"));
        }
        to.data = forward_memory.data() ? forward_memory.data() : memory.data();
        return to;
      },
      [&](const AnyView<2>& from, std::int64_t row) -> Status {
        if (from.shape[0] == 0) return {};
        return copy(rows_of(logits_to, row).data, from.data, std::size_t(from.bytes()));
      });
}

Status Model::forward(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids, AnyView<2> logits) {
  return state_->forward(slot, first, ids, logits, [&](void* to, const void* from, std::size_t bytes) {
    return copy_to_host(state_->context, to, from, bytes);
  });
}

Status Model::forward_on_device(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids,
                                AnyView<2> logits) {
  return state_->forward(slot, first, ids, logits, [&](void* to, const void* from, std::size_t bytes) {
    return copy_async(to, from, bytes, cudaMemcpyDeviceToDevice, state_->stream.get());
  });
}

}  // namespace cf::cuda
