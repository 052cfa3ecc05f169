#pragma once
// What a model on a GPU holds, and how its calls share it. Private to cuda/model.
//   model.cpp          creation
//   model_prompts.cpp  prompts, chunk by chunk
//   model_steps.cpp    steps of all slots
//   model_choices.cpp  the next ids, and why there is none
//   model_ahead.cpp    steps that run before they are asked for
#include <cuda_runtime_api.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/model/slot_lengths.hpp"
#include "cuda/model/extend.hpp"
#include "cuda/model/model.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/ops/sample/sample.hpp"
#include "cuda/persistent/persistent_kernel.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/runtime/memory.hpp"
#include "cuda/runtime/stream.hpp"

namespace cf::cuda {

inline constexpr std::string_view kModelName = "model";

/// Memory of the host that a device copies from and to without waiting.
struct FreePinned {
  void operator()(std::int32_t* p) const { (void)cudaFreeHost(p); }
};
using Pinned = std::unique_ptr<std::int32_t, FreePinned>;

inline Status copy_async(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, CUstream_st* stream) {
  return from_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream), "cudaMemcpyAsync");
}

/// Rows [first, first + count) of a matrix.
inline AnyView<2> rows_of(AnyView<2> matrix, std::int64_t first, std::int64_t count = 1) {
  matrix.data = static_cast<std::byte*>(matrix.data) + first * matrix.shape[1] * std::int64_t(size_bytes(matrix.dtype));
  matrix.shape[0] = count;
  return matrix;
}

/// Puts the site's name before the message of a Status that is not ok.
inline Status name_site(const ModelSite& site, const Status& status) {
  return status ? status : Status::error(status.code(), site.name() + ": " + status.message());
}

/// Where the logits that a slot's next id is chosen from lie: in the memory of prompts, or in one of the two that steps
/// write in turn, so that a step may run while the logits before it are still read.
enum class Where { prompts, even_steps, odd_steps };
inline constexpr int kPlaces = 3;

/// What a step's graph begins with: the tokens are on the device; they are those chosen last; or they are chosen first,
/// among the logits of the step before.
enum class Start { placed, follows, chooses };
inline constexpr int kStarts = 3;

/// What `told` holds until the device has made the choice.
inline constexpr std::int32_t kNotChosen = -2;

struct Model::State {
  State(const Context& c, Stream s, const ModelSpec& m, const Options& o, Impl i, ResidentWeights w, KvCache k,
        Workspace a)
      : stream(std::move(s)),
        context(c),
        spec(m),
        options(o),
        impl(i),
        weights(std::move(w)),
        cache(std::move(k)),
        workspace(std::move(a)),
        executor(context, i),
        lengths(o.slots, m, o.capacity),
        last_ids(std::size_t(o.slots)),
        where(std::size_t(o.slots), Where::prompts),
        made_by(std::size_t(o.slots)),
        told_ends(std::size_t(o.slots)) {}
  ~State() {
    end_launch();
    (void)cudaDeviceSynchronize();
  }

  std::size_t lay_out(std::byte* block);
  /// Prepares the layers' steps: those of the persistent impl with what lies outside the layers.
  Status prepare_layers();
  Status prepare_steps();
  /// Calls add(site, args) for the sites that belong to no layer: the embedding, the final LayerNorm and the LM head.
  template <class Add>
  Status for_each_outer_site(Where to, Add&& add) const;
  /// A step as one graph. executor_step() captures what the executor puts onto a stream for the layers.
  /// dataflow_step() adds every op by itself: an op waits for the ops whose data it needs, and for no other.
  Result<GraphExec> executor_step(Where to, Start start);
  Result<GraphExec> dataflow_step(Where to, Start start);
  /// whole_step() captures one launch for the whole model.
  Result<GraphExec> whole_step(Where to, Start start);
  /// Puts what such a step begins with onto the stream that is being captured.
  Status begin_step(Where to, Start start, const Submission& how);
  /// What the first layer of a step reads.
  ConstAnyView<2> step_input() const { return rows_of(hidden[0], 0, options.slots); }

  /// The walk's tensors for q_len new tokens of each of `batch` slots from `slot` on. `caches` holds what the result
  /// points to.
  ModelTensors tensors(std::int64_t slot, std::int64_t batch, std::int64_t q_len, const StepArrays& step,
                       AnyView<2> logits, std::vector<LayerCache>& caches) const;
  /// The arrays of a pass of `tokens` tokens of one slot.
  StepArrays prompt_arrays(std::int64_t tokens) const {
    return {.ids = {prompt_ids.data, {tokens}},
            .positions = {prompt_positions.data, {tokens}},
            .kv_len = {prompt_kv_len.data, {1}}};
  }
  /// Puts a chunk's ids, positions and length onto the stream, and then its pass.
  Status pass(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids, AnyView<2> logits);
  /// The pass of these tensors as a graph.
  Result<GraphExec> pass_graph(const ModelTensors& t);
  /// The pass of these tensors site by site, each with a call of `visit_site`.
  Status walk(const ModelTensors& t, const Visit& visit_site);
  /// Puts the tokens of a call through the model, chunk by chunk. `logits_of(first, count)` is where rows
  /// [first, first + count) of the call's last `rows` tokens go; `done` is called with them after each chunk.
  template <class LogitsOf, class Done>
  Status run(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids, std::int64_t rows,
             LogitsOf&& logits_of, Done&& done);
  /// Refuses what cannot hold rows of logits.
  Status check_logits(const AnyView<2>& logits) const;
  /// Model::forward(), whose rows of logits `copy(to, from, bytes)` takes from the device.
  template <class Copy>
  Status forward(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids, AnyView<2> logits,
                 Copy&& copy);

  /// Puts the tokens of a step onto the device.
  Status enqueue_tokens(std::span<const Token> tokens);
  /// Runs a step, whose logits go to `to`.
  Status run_step(Where to, Start start);
  /// Copies the logits of slots that this step leaves out, where the step would overwrite them.
  Status keep_logits(std::span<const Token> tokens, Where overwritten);
  /// Whether these tokens are those of the step that is on the stream already.
  bool ran_ahead(std::span<const Token> tokens) const;
  static Where step_place(std::size_t parity) { return parity == 0 ? Where::even_steps : Where::odd_steps; }
  static Where other_place(Where step) { return step == Where::even_steps ? Where::odd_steps : Where::even_steps; }
  Where next_place() const { return other_place(last_step); }

  /// Puts steps onto the stream that continue the ids of these draws, which are being chosen: as many as may follow
  /// where the persistent kernel chooses by itself, one where the next step is known, or none.
  Status run_ahead(std::span<const Draw> draws);
  /// The part of run_ahead() for draws that the persistent kernel chooses for.
  Status run_many_ahead(std::span<const Draw> draws);
  /// Whether the persistent kernel ends a draw's sequence for its choice, which is a stop id.
  bool has_stopped(const Draw& draw) const;
  /// Whether the next step has a token of each of these draws, and of no other slot.
  bool knows_next(std::span<const Draw> draws) const;
  /// Puts the next step of these draws onto the stream.
  Status run_next(std::span<const Draw> draws, Start start);
  /// Whether the persistent kernel chooses what these draws ask for.
  bool kernel_chooses(std::span<const Draw> draws) const;
  /// The choices of the step that a launch of many tokens has made, once they are there.
  Status take_choices(std::span<const Draw> draws);
  /// Asks the launch of many tokens to end; what it makes from now on is not wanted.
  void end_launch();
  /// Whether the logits of a slot's last entry are there.
  bool has_logits(std::int64_t slot) const { return !made_by[std::size_t(slot)] || lengths[slot] == 0; }
  /// Where they are not, runs the last token of every such slot again, which gives the same bits.
  Status restore_logits(std::int64_t slot);
  Status take_report();

  /// Brings how a place's choices are made to the device, where it differs from what is there.
  Status enqueue_settings(Where place, std::span<const Draw> draws);
  /// Waits until `made(draw)` has an id for each draw, and keeps these ids.
  template <class Made>
  Status await_choices(std::span<const Draw> draws, Made&& made) {
    for (const Draw& d : draws)
      for (unsigned polls = 1;; ++polls) {
        if (const std::optional<std::int32_t> id = made(d)) {
          last_chosen[std::size_t(d.slot)] = *id;
          break;
        }
        if (polls % 1024) continue;
        const cudaError_t running = cudaStreamQuery(stream.get());
        if (running == cudaErrorNotReady) continue;
        CF_TRY(from_cuda(running, "cudaStreamQuery"));
        CF_TRY(take_report());
        if (!made(d)) return Status::error(Code::device_error, "model: the stream has ended without a choice");
      }
    return take_report();
  }
  Result<std::int32_t> chosen_id(const Draw& draw);
  std::string first_nan(std::int64_t slot);
  AnyView<2> logits_at(Where place) const { return logits[std::size_t(place)]; }
  AnyView<2> logits_of_slot(std::int64_t slot) const { return rows_of(logits_at(where[std::size_t(slot)]), slot); }
  Result<Tensor> fetch_logits(std::int64_t slot);

  Stream stream;
  Context context;  // on `stream`
  ModelSpec spec;
  Options options;
  Impl impl;
  ModelBytes taken;
  ResidentWeights weights;
  KvCache cache;
  Workspace workspace;
  Executor executor;

  Visit visit;
  Check go_on;
  SlotLengths lengths;
  std::vector<std::int32_t> last_ids;  // by slot: the token of its last entry
  std::vector<Where> where;            // by slot
  Where last_step = Where::odd_steps;

  // On the device.
  DeviceMemory memory, forward_memory;
  StepArrays step;  // of all slots
  View<std::int32_t, 1> prompt_ids, prompt_positions, prompt_kv_len, prompt_lengths, chosen;
  AnyView<2> final_norm;
  AnyView<2> prompt_logits;                // (1, vocab): a slot's row of `logits` is not aligned for every vocab
  std::array<AnyView<2>, 2> hidden;        // the embedding and the layers' outputs, in turn
  std::array<AnyView<2>, kPlaces> logits;  // (slots, vocab), by Where
  std::array<View<std::int32_t, 1>, kPlaces> settings;  // SlotSampling of each slot, by Where
  View<std::int32_t, 1> seen;

  // On the host.
  std::array<std::vector<SlotSampling>, kPlaces> sent;  // what `settings` hold
  std::vector<std::size_t> seen_size;                   // by slot: the size of the history that `seen` holds, or 0
  Pinned pinned_prompt;
  Pinned told;                            // by slot: the choice that is on its way, or that was made last
  std::vector<std::int32_t> last_chosen;  // by slot
  Event prompt_copied, handover;

  std::vector<LaunchList> sample;  // by Where
  // A step of all slots, by its start and by the parity of where its logits go.
  std::array<std::array<GraphExec, 2>, kStarts> steps;
  using PassKey = std::tuple<std::int64_t, std::int64_t, const void*, std::int64_t>;
  // The passes of prompts' chunks so far, by slot, tokens, logits and their rows. From its second time on a pass is a
  // graph, whose branches run side by side.
  std::map<PassKey, GraphExec> passes;
  std::vector<Token> ahead;  // the step that is on the stream already; its ids are those chosen last
  // Whether `step` on the device has the tokens of the step that was asked for last: then a step may follow it.
  bool can_follow = false;

  // Of the persistent impl.
  std::optional<PersistentKernel> whole;
  // The kernel numbers the tokens of its launches. `next_token` is the number of the step in `ahead`, and `end_token`
  // is one past the last number that was launched. `last_token` is the number of the step that was asked for last,
  // where a launch of many tokens has made it.
  unsigned next_token = 0, end_token = 0;
  std::optional<unsigned> last_token;
  // By slot: the number of the token that made the slot's last entry, where a launch of many tokens has made it. The
  // launch has gone on, and the entry's logits are overwritten.
  std::vector<std::optional<unsigned>> made_by;
  /// Where a launch ends a slot's sequence: with a stop id, or with the token at `position`.
  struct End {
    std::int64_t position;
    std::vector<std::int32_t> stop_ids;
    bool operator==(const End&) const = default;
  };
  End end_of(const Draw& draw) const;
  std::vector<std::optional<End>> told_ends;  // by slot: the end that the launches so far were given
  bool logits_asked = false;                  // since the last prompt: then launches have one token
};

}  // namespace cf::cuda
