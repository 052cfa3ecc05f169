#pragma once
// What a model on a GPU holds, and how its calls share it. Private to cuda/serve.
//   model.cpp          creation
//   model_prompts.cpp  a prompt, chunk by chunk
//   model_passes.cpp   several prompts and running tokens together, pass by pass
//   model_mixed.cpp    the launches of a pass that has running tokens
//   model_score.cpp    log-probabilities of given ids
//   model_steps.cpp    steps of all slots
//   model_ranks.cpp    what a rank that shares a model does before the others may wait for it
//   model_pages.cpp    the pages of slots, where they share a pool
//   model_choices.cpp  the next ids, and why there is none
//   model_taps.cpp     what sites make, on its way to the host
//   pipeline.hpp       which steps run before they are asked for, and where the logits lie
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/model/taps.hpp"
#include "cuda/model/arena.hpp"
#include "cuda/model/extend.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/ops/sample/sample.hpp"
#include "cuda/persistent/persistent_kernel.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/runtime/memory.hpp"
#include "cuda/runtime/pinned.hpp"
#include "cuda/runtime/stream.hpp"
#include "cuda/serve/model.hpp"
#include "cuda/serve/pipeline.hpp"

namespace cf::cuda {

inline constexpr std::string_view kModelName = "model";

inline Result<Event> make_event() {
  cudaEvent_t event = nullptr;
  CF_TRY(from_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate"));
  return Event(event);
}

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

/// The rows of logits that a pass makes at once, at most, for the slots' own.
inline constexpr std::int64_t kPassLogits = 256;

/// What `told` holds until the device has made the choice.
inline constexpr std::int32_t kNotChosen = -2;

/// What a model has on the device beside its weights, its cache and its workspace.
struct OwnTensors {
  StepArrays step;                                     // of all slots
  View<std::int32_t, 1> prompt_ids, prompt_positions;  // (tokens of a pass)
  View<std::int32_t, 1> prompt_kv_len;                 // (slots) of a pass; a prompt by itself has the first
  View<std::int32_t, 1> pass_rows;                     // (tokens of a pass): those whose logits are made
  View<std::int32_t, 1> prompt_lengths, chosen;        // (slots)
  AnyView<2> final_norm;
  /// (slots, vocab / ranks), of a rank that makes a part of the head: its logits of a step. Rows of `logits` are put
  /// together from the ranks' parts when they are asked for.
  std::array<AnyView<2>, kLogitsBuffers> head_parts;
  // (slots, kPassLogits at most, vocab). The head writes here and not into a slot's row of `logits`, whose address is
  // not aligned for every vocab.
  AnyView<2> prompt_logits;
  std::array<AnyView<2>, kLogitsBuffers> logits;               // (slots, vocab)
  std::array<View<std::int32_t, 1>, kLogitsBuffers> settings;  // SlotSampling of each slot, by the logits' buffer
  View<std::int32_t, 1> seen;

  void allocate(Arena& arena, const ModelSpec& spec, DType dtype, const Model::Options& options);
};

/// Copies of sites' tensors that are on their way to the host.
class TapCopies {
 public:
  /// Puts a copy of the tensor onto the context's stream, and the copy of that to the host onto a stream of its own.
  Status add(const Context& context, const ModelRunner::SiteTensor& tensor, void* to);
  /// Waits for the copies so far.
  Result<ModelRunner::Await> made() const;

 private:
  struct Buffer {
    DeviceMemory memory;
    Event filled, free;
  };
  Stream stream_;
  std::array<Buffer, 8> buffers_;
  std::size_t next_ = 0;
};

struct Model::State final : PipelineDevice, OwnTensors {
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
        pipeline(*this, o.slots, o.capacity, cache.limit()),
        pages(o.slots, o.capacity, o.pool()),
        stepping(std::size_t(o.slots), false) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() override {
    pipeline.give_up();
    (void)cudaDeviceSynchronize();
  }

  std::size_t lay_out(std::byte* block) {
    Arena arena(block);
    OwnTensors::allocate(arena, spec, workspace.activation(), options);
    return arena.bytes();
  }
  /// Whether a launch of the persistent kernel makes whole tokens. On ranks it makes the layers alone.
  bool makes_whole_tokens() const;
  /// Prepares the layers' steps: those of the persistent impl with what lies outside the layers.
  Status prepare_layers();
  Status prepare_steps();
  /// Of a rank: loads the kernels of prompts and chooses their products' algorithms, before there is an exchange.
  Status prepare_prompts();
  /// Of a rank: waits until all ranks have come so far. It comes between memory that changes hands and the next launch.
  Status meet();
  /// Calls add(site, args) for the sites that belong to no layer: the embedding, the final LayerNorm and the LM head.
  template <class Add>
  Status for_each_outer_site(LogitsBuffer to, std::int64_t slots, Add&& add) const;
  /// A step as one graph. executor_step() captures what the executor puts onto a stream for the layers.
  /// dataflow_step() adds every op by itself, for the first `slots` slots: an op waits for the ops whose data it needs,
  /// and for no other.
  Result<GraphExec> executor_step(LogitsBuffer to, Start start);
  Result<GraphExec> dataflow_step(LogitsBuffer to, Start start, std::int64_t slots);
  /// whole_step() captures one launch for the whole model.
  Result<GraphExec> whole_step(LogitsBuffer to, Start start);
  /// The graph of a step, made when it is first asked for.
  Result<cudaGraphExec_t> step_graph(Start start, LogitsBuffer to, std::int64_t slots);
  /// The slots of a step whose tokens are in the first `slots` slots.
  std::int64_t step_slots(std::int64_t slots) const;
  /// Puts what such a step begins with onto the stream that is being captured.
  Status begin_step(LogitsBuffer to, Start start, const Submission& how);
  /// What the first layer of a step reads.
  ConstAnyView<2> step_input() const { return rows_of(hidden[0], 0, options.slots); }

  /// The walk's tensors for new tokens of `sizes.batch` slots from `slot` on. `caches` holds what the result points to.
  ModelTensors tensors(std::int64_t slot, const StepSizes& sizes, const StepArrays& step, AnyView<2> logits,
                       std::vector<LayerCache>& caches) const;
  /// The arrays of a prefill chunk: `tokens` tokens of one slot.
  StepArrays prompt_arrays(std::int64_t tokens) const {
    return {.ids = {prompt_ids.data, {tokens}},
            .positions = {prompt_positions.data, {tokens}},
            .kv_len = {prompt_kv_len.data, {1}}};
  }
  /// Puts the first words of the memory of a prompt or a pass, which fill(words) writes, onto the stream. Waits until
  /// the device has taken those before.
  template <class Fill>
  Status stage(std::size_t words, Fill&& fill) {
    CF_TRY(from_cuda(cudaEventSynchronize(prompt_copied.get()), "cudaEventSynchronize"));
    fill(pinned_prompt.get());
    CF_TRY(copy_async(prompt_ids.data, pinned_prompt.get(), words * sizeof(std::int32_t), cudaMemcpyHostToDevice,
                      stream.get()));
    return from_cuda(cudaEventRecord(prompt_copied.get(), stream.get()), "cudaEventRecord");
  }
  /// Puts the launches of these tensors onto the stream, a layer's as soon as they are prepared.
  Status put(const ModelTensors& t);
  /// The same of a pass whose first `running` runs are running sequences' tokens. What is prepared is kept for passes of
  /// as many tokens.
  Status put_mixed(const ModelTensors& t, std::int64_t running);
  /// Launches of such a pass that follow each other on a stream.
  struct PassPart {
    LaunchList launches;
    bool is_beside;  // of the part behind it: on the stream `side`
  };
  struct MixedPass {
    std::int64_t tokens = 0, running = 0;
    std::vector<RowRun> runs{};
    std::vector<PassPart> parts{};
  };
  /// Puts a part onto its stream.
  Status submit(const MixedPass& pass, std::size_t part);
  /// Lets a stream's next work wait for the work that another stream has now.
  Status wait_for(CUstream_st* waits, CUstream_st* goes_first);
  /// What a chunk's launches depend on: the slots and tokens of its runs, and where its logits go.
  struct ChunkKey {
    std::vector<std::pair<std::int64_t, std::int64_t>> runs;
    const void* logits;
    std::int64_t rows;
    bool is_pass;  // of all slots' caches
    auto operator<=>(const ChunkKey&) const = default;
  };
  /// The same for a chunk or a pass that may come again.
  Status put(const ModelTensors& t, ChunkKey key);
  /// Puts a chunk's ids, positions and length onto the stream, and then its launches.
  Status read_chunk(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids, AnyView<2> logits);
  /// The launches of a chunk with these tensors, as a graph.
  Result<GraphExec> chunk_graph(const ModelTensors& t);
  /// The chunk or pass of these tensors site by site, each with a call of `visit_site`.
  Status walk(const ModelTensors& t, const Visit& visit_site);
  /// Puts a site's launches onto the stream and calls `visit_site`.
  template <class Args>
  Status run_site(const ModelSite& site, const Args& args, const Visit& visit_site);
  /// Puts a prompt through the model, chunk by chunk. `logits_of(count)` is where the logits of the last `count` tokens
  /// of a chunk go; `done` is called with them after each chunk. They are those of the prompt's last `rows` tokens.
  template <class LogitsOf, class Done>
  Status feed(const StepPart& prompt, std::int64_t rows, LogitsOf&& logits_of, Done&& done);
  /// Memory for rows of logits that are on their way to a caller.
  Result<AnyView<2>> rows_for_caller(std::int64_t rows);
  /// Copies rows to a caller's memory, of the device or the host.
  Status copy_rows(const AnyView<2>& to, const AnyView<2>& from, bool on_device);
  /// A step in two parts: read() puts a prompt onto the stream, decode() the sequences that decode.
  Status read(const StepPart& prompt, bool own, bool on_device);
  Status decode(std::span<const StepPart> parts, bool on_device);

  /// Tokens of a run that go through the model in one pass.
  struct Piece {
    Run run;
    std::span<const std::int32_t> ids;
    AnyView<2> rows;  // where the caller's logits of its last tokens go
    bool own;         // whether its last token's logits become the slot's
    bool is_running = false;
    /// The last tokens whose logits are made.
    std::int64_t head_rows() const { return std::max<std::int64_t>(rows.shape[0], own ? 1 : 0); }
  };
  using Pieces = std::vector<Piece>;
  /// The tokens of a pass, at most.
  std::int64_t most_tokens() const { return hidden[0].shape[0]; }
  /// The passes of running tokens, which are the first pieces of the first pass, and of prompts. A prompt is cut where
  /// it is cut by itself; whatever fits into a pass behind others does.
  std::vector<Pieces> passes_of(std::span<const StepPart> running, std::span<const StepPart> prompts, bool own) const;
  /// Puts a pass through the layers. Its hidden states, a row a token, are in layers_output() until the next one.
  Status pass(const Pieces& pieces);
  AnyView<2> layers_output() const { return hidden[std::size_t(spec.shape.num_layers) % 2]; }
  /// Makes the logits of the pass before, and copies them to their slots and their caller.
  Status make_logits(const Pieces& pieces, bool on_device);
  /// Several parts of a step: running tokens, and prompts beside them.
  Status read_together(std::vector<StepPart> running, std::span<const StepPart> prompts, bool own, bool on_device);

  /// Reads prompts whose last rows a call of score() asks for: several pass by pass, a lone one chunk by chunk.
  class ScoreCall;
  Status score(std::span<const StepPart> prompts, ScoreCall& call);
  /// Copies the logits of slots to rows, one each.
  Status copy_logits(std::span<const std::int64_t> slots, std::span<const AnyView<2>> rows, bool on_device);

  /// Of streams: puts the rows of RoPE's table for a pass of these positions onto the stream.
  Status make_rope_rows(View<const std::int32_t, 1> positions);
  /// The entries at which a slot is full: from there on a step that follows its last one leaves it idle.
  std::int32_t most_followed() const { return std::int32_t(options.stream() ? kMostStreamTokens : options.capacity); }

  /// Makes room in the pages for what these runs write, which was not foreseen. Code::out_of_memory, and no change,
  /// where too few are free.
  Status reserve(std::span<const Run> runs);
  /// The same for what is not asked for yet. False, and no change, where too few are free.
  Result<bool> try_reserve(std::span<const Run> runs);
  /// Brings the device's pages up to date.
  Status update_pages(std::span<const PagePool::Copy> copies);
  /// Forgets the entries of a step that ran ahead and is not asked for.
  void drop_pages_ahead(SlotPages& of) const;

  // What the pipeline asks for.
  Result<bool> make_room(std::span<const Token> next) override;
  Result<bool> make_room_for_launch(std::span<const Run> runs) override { return try_reserve(runs); }
  Status place(std::span<const Token> tokens) override;
  Status run(Start start, LogitsBuffer to) override;
  Status keep(std::int64_t slot, LogitsBuffer from, std::int64_t length) override;
  Status prepare_choice(LogitsBuffer from, std::span<const Draw> draws) override;
  Status choose(LogitsBuffer from) override;
  Status await(std::span<const Draw> draws, std::span<std::int32_t> ids) override;
  Result<unsigned> launch(std::int64_t count, LogitsBuffer to, std::span<const SlotEnd> ends) override;
  Status await_launched(unsigned number, std::span<const Draw> draws, std::span<std::int32_t> ids) override;
  void end_before(unsigned number) override { whole->end_before(number); }

  static LogitsBuffer other_buffer(LogitsBuffer step) {
    return step == LogitsBuffer::even_steps ? LogitsBuffer::odd_steps : LogitsBuffer::even_steps;
  }
  Status take_report();
  /// Waits until made(draw) has an id for each draw, and writes these ids.
  template <class Made>
  Status await_ids(std::span<const Draw> draws, std::span<std::int32_t> ids, Made&& made) {
    for (std::size_t i = 0; i < draws.size(); ++i)
      for (unsigned polls = 1;; ++polls) {
        if (const std::optional<std::int32_t> id = made(draws[i])) {
          ids[i] = *id;
          break;
        }
        if (polls % 1024) continue;
        const cudaError_t running = cudaStreamQuery(stream.get());
        if (running == cudaErrorNotReady) continue;
        CF_TRY(from_cuda(running, "cudaStreamQuery"));
        CF_TRY(take_report());
        if (!made(draws[i])) return Status::error(Code::device_error, "model: the stream has ended without a choice");
      }
    return take_report();
  }
  Result<std::int32_t> chosen_id(const Draw& draw);
  std::string first_nan(std::int64_t slot);
  AnyView<2> logits_at(LogitsBuffer buffer) const { return logits[std::size_t(buffer)]; }
  /// Whether a buffer's logits lie in parts on the ranks.
  bool is_divided(LogitsBuffer buffer) const { return head_parts[std::size_t(buffer)].data != nullptr; }
  /// Adds the launch that puts the parts of `count` slots' logits side by side.
  Status add_gather(LogitsBuffer buffer, std::int64_t slot, std::int64_t count, LaunchList& launches) const;
  /// Puts it onto the stream, where the logits lie in parts. All ranks make the same call.
  Status gather_logits(LogitsBuffer buffer, std::int64_t slot, std::int64_t count = 1);
  AnyView<2> logits_of_slot(std::int64_t slot) const { return rows_of(logits_at(pipeline.buffer_of(slot)), slot); }
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
  bool norm_alone = false;  // whether the head of the call that runs makes no logits
  Check go_on;
  Pipeline pipeline;
  SlotPages pages;
  std::vector<bool> stepping;  // by slot: whether a step that follows the last one has a token of it

  // On the device.
  DeviceMemory memory, forward_memory, score_memory;  // `memory` is that of OwnTensors
  std::array<AnyView<2>, 2> hidden;                   // the embedding and the layers' outputs, in turn

  TapCopies tap_copies;

  // On the host.
  std::array<std::vector<SlotSampling>, kLogitsBuffers> sent;  // what `settings` hold
  std::vector<std::size_t> seen_size;  // by slot: the size of the history that `seen` holds, or 0
  Pinned<std::int32_t> pinned_prompt;
  Pinned<std::int32_t> told;  // by slot: the choice that is on its way, or that was made last
  Stream side;                // what runs beside the stream's work
  Event prompt_copied, handover, crossing;

  std::vector<LaunchList> sample;  // by the logits' buffer
  /// The steps so far, by their start, where their logits go, and their slots.
  std::map<std::tuple<Start, LogitsBuffer, std::int64_t>, GraphExec> steps;
  std::int64_t placed_slots = 0;  // of the step that was placed last and of those that follow it
  /// The chunks and passes of prompts so far. From its second time on one is a graph, whose branches run side by side.
  std::map<ChunkKey, GraphExec> chunks;
  std::vector<MixedPass> mixed;           // the newest first
  std::optional<PersistentKernel> whole;  // where it makes whole tokens
};

template <class Args>
Status Model::State::run_site(const ModelSite& site, const Args& args, const Visit& visit_site) {
  if (norm_alone && site.site.id == SiteId::embed_out) return {};
  LaunchList launches(context, workspace.scratch());
  launches.set_label(site.site.name.data());  // a literal, which ends in a zero byte
  CF_TRY(name_site(site, prepare(args, launches)));
  CF_TRY(launches.submit(stream.get(), {.early = context.overlap()}));
  return visit_site(site, tensors_of(args));
}

}  // namespace cf::cuda
