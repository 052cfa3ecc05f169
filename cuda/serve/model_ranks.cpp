#include <algorithm>
#include <utility>

#include "core/model/passes.hpp"
#include "cuda/comm/communicator.hpp"
#include "cuda/serve/model_state.hpp"
#include "cuda/step/capture.hpp"

namespace cf::cuda {

// A rank's host must not wait for its GPU with something in its hands that another rank's host needs: the GPU may be in
// an exchange with that rank, whose host then never launches its part. Kernels that are loaded at their first use,
// algorithms of cuBLASLt that are tried, and memory that is given back all wait for the GPU.

Status Model::State::prepare_prompts() {
  if (!context.peers()) return {};
  if (LaunchList launches(context); is_divided(LogitsBuffer::even_steps))
    for (const std::int64_t count : {std::int64_t(1), options.slots})
      CF_TRY(add_gather(LogitsBuffer::even_steps, 0, count, launches));
  const std::int64_t most = most_tokens();
  for (const std::int64_t tokens :
       {most, std::int64_t(1024), std::int64_t(512), std::int64_t(257), std::int64_t(129), std::int64_t(65),
        std::int64_t(33), std::int64_t(17), std::int64_t(9), std::int64_t(4), std::int64_t(1)})
    for (const bool mixed_runs : {false, true}) {
      if (tokens > most || (mixed_runs && (options.slots < 2 || tokens < 2))) continue;
      const std::vector<RowRun> runs{{.sequence = 0, .first_row = 0, .count = tokens - 1},
                                     {.sequence = 1, .first_row = tokens - 1, .count = 1}};
      StepSizes sizes{.q_len = tokens};
      StepArrays arrays = prompt_arrays(tokens);
      if (mixed_runs) {
        sizes = {.batch = options.slots, .q_len = tokens - 1, .mixed = tokens};
        arrays.kv_len = prompt_kv_len;
      }
      std::vector<LayerCache> caches;
      // Nothing is launched: all rows of logits may have one place.
      ModelTensors t =
          tensors(0, sizes, arrays, {prompt_logits.data, {tokens, spec.shape.vocab_size}, prompt_logits.dtype}, caches);
      if (mixed_runs) t.layer.runs = runs;
      CF_TRY_ASSIGN(Program program, record_model(spec, weights.model_weights(), t));
      LaunchList launches(context, workspace.scratch());
      launches.trust_addresses();
      for (const Node& node : with_rope_append(with_all_reduce(std::move(program), spec)).nodes) {
        if (node.at.layer > 0) continue;  // as the first layer
        if (Status s = prepare(node, launches); s.code() == Code::device_error || s.code() == Code::out_of_memory)
          return name_site(node.at, s);
      }
    }
  return from_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Status Model::State::add_gather(LogitsBuffer buffer, std::int64_t slot, std::int64_t count,
                                LaunchList& launches) const {
  const AnyView<2> part = rows_of(head_parts[std::size_t(buffer)], slot, count);
  return prepare(ops::AllGather::Args{.x = {part.data, {1, count, part.shape[1]}, part.dtype},
                                      .y = rows_of(logits_at(buffer), slot, count),
                                      .ranks = spec.ranks},
                 launches);
}

Status Model::State::gather_logits(LogitsBuffer buffer, std::int64_t slot, std::int64_t count) {
  if (!is_divided(buffer)) return {};
  LaunchList launches(context);
  CF_TRY(add_gather(buffer, slot, count, launches));
  return launches.submit(stream.get(), {.early = context.overlap()});
}

Status Model::State::meet() { return meet_ranks(context); }

}  // namespace cf::cuda
