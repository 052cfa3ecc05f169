#include "cuda/model/model.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>

#include "core/model/slot_lengths.hpp"
#include "core/resources.hpp"
#include "core/scores.hpp"
#include "cuda/graph/capture.hpp"
#include "cuda/model/extend.hpp"
#include "cuda/model/linear_scratch.hpp"
#include "cuda/model/place.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/ops/sample/sample.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/runtime/stream.hpp"

namespace cf::cuda {
namespace {

constexpr std::string_view kName = "model";

/// Memory of the host that a device copies from and to without waiting.
struct FreePinned {
  void operator()(std::int32_t* p) const { (void)cudaFreeHost(p); }
};
using Pinned = std::unique_ptr<std::int32_t, FreePinned>;

Result<Pinned> make_pinned(std::int64_t count) {
  void* data = nullptr;
  CF_TRY(from_cuda(cudaMallocHost(&data, std::size_t(count) * sizeof(std::int32_t)), "cudaMallocHost"));
  return Pinned(static_cast<std::int32_t*>(data));
}

Result<Event> make_event() {
  cudaEvent_t event = nullptr;
  CF_TRY(from_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate"));
  return Event(event);
}

Status copy_async(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, CUstream_st* stream) {
  return from_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream), "cudaMemcpyAsync");
}

/// Rows [first, first + count) of a matrix.
AnyView<2> rows_of(AnyView<2> matrix, std::int64_t first, std::int64_t count = 1) {
  matrix.data = static_cast<std::byte*>(matrix.data) + first * matrix.shape[1] * std::int64_t(size_bytes(matrix.dtype));
  matrix.shape[0] = count;
  return matrix;
}

/// The dtype of a model's weights outside its Linears, which its activations have too.
DType dtype_of_weights(const ModelWeights& w) { return w.embed_in.dtype; }

bool is_quantised(const ModelWeights& w) {
  return !w.layers.empty() && std::holds_alternative<GptqWeight>(w.layers.front().query_key_value.weight);
}

std::int64_t most_tokens(const Model::Options& o) { return std::max(o.slots, std::min(o.chunk, o.capacity)); }

/// The distance of a prompt's ids, positions and length in their block. Tensors begin at multiples of 16 bytes.
std::int64_t prompt_stride(const Model::Options& o) { return (most_tokens(o) + 3) / 4 * 4; }

std::int64_t table_rows(const ModelSpec& m, const Model::Options& o) {
  return std::max(m.shape.max_positions, o.capacity);
}

Status name_site(const ModelSite& site, const Status& status) {
  return status ? status : Status::error(status.code(), site.name() + ": " + status.message());
}

}  // namespace

/// Where the logits that a slot's next id is chosen from lie: in the memory of prompts, or in one of the two that steps
/// write in turn, so that a step may run while the logits before it are still read.
enum class Where { prompts, even_steps, odd_steps };
constexpr int kPlaces = 3;

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
        lengths(o.slots, o.capacity),
        last_ids(std::size_t(o.slots)),
        where(std::size_t(o.slots), Where::prompts) {}
  ~State() { (void)cudaDeviceSynchronize(); }

  std::size_t lay_out(std::byte* block);
  Status prepare_steps();
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
  /// Puts the tokens of a call through the model, chunk by chunk. `logits_of(first, count)` is where rows
  /// [first, first + count) of the call's last `rows` tokens go; `done` is called with them after each chunk.
  template <class LogitsOf, class Done>
  Status run(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids, std::int64_t rows,
             LogitsOf&& logits_of, Done&& done);

  /// Runs the step whose tokens are on the device, or with `follows` the one that continues the chosen ids; its logits
  /// go to `to`.
  Status run_step(Where to, bool follows);
  Status enqueue_step(std::size_t parity, bool follows);
  /// Copies the logits of slots that this step leaves out, where the step would overwrite them.
  Status keep_logits(std::span<const Token> tokens, Where overwritten);
  /// Whether the step that was run ahead is this one.
  bool ran_ahead(std::span<const Token> tokens) const;
  static Where step_place(std::size_t parity) { return parity == 0 ? Where::even_steps : Where::odd_steps; }
  Where next_place() const { return last_step == Where::even_steps ? Where::odd_steps : Where::even_steps; }

  Status enqueue_choice(Where place, std::span<const Draw> draws);
  Result<std::int32_t> chosen_id(const Draw& draw);
  std::string first_nan(std::int64_t slot);
  AnyView<2> logits_at(Where place) const { return logits[std::size_t(place)]; }
  AnyView<2> logits_of_slot(std::int64_t slot) const { return rows_of(logits_at(where[std::size_t(slot)]), slot); }
  Result<Tensor> fetch_logits(std::int64_t slot);

  Stream stream, copies;
  Context context;  // on `stream`
  ModelSpec spec;
  Options options;
  Impl impl;
  ModelBytes taken;
  ResidentWeights weights;
  KvCache cache;
  Workspace workspace;
  Executor executor;

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
  Pinned pinned_prompt, pinned_chosen;
  Event prompt_copied, choice_made, choice_copied;

  std::vector<LaunchList> sample;  // by Where
  // A step of all slots, by the parity of where its logits go: what comes before and after the executor's layers, and
  // all of it as a graph.
  std::vector<LaunchList> embed, finish;
  std::array<GraphExec, 2> steps, followers;
  using PassKey = std::tuple<std::int64_t, std::int64_t, const void*, std::int64_t>;
  // The passes of prompts' chunks so far, by slot, tokens, logits and their rows. From its second time on a pass is a
  // graph, whose branches run side by side.
  std::map<PassKey, GraphExec> passes;
  std::vector<Token> ahead;  // the step that is on the stream already; its ids are those chosen last
};

std::size_t Model::State::lay_out(std::byte* block) {
  Arena arena(block);
  const std::int64_t chunk = prompt_stride(options), slots = options.slots, vocab = spec.shape.vocab_size;
  const DType dtype = workspace.activation();
  for (View<std::int32_t, 1>* v : {&step.ids, &prompt_lengths, &chosen}) arena.place(*v, extents(slots), DType::i32);
  // The host copies the three as one.
  View<std::int32_t, 1> prompt;
  arena.place(prompt, extents(2 * chunk + 1), DType::i32);
  prompt_ids = {prompt.data, {chunk}};
  prompt_positions = {prompt.data + chunk, {chunk}};
  prompt_kv_len = {prompt.data + 2 * chunk, {1}};
  arena.place(seen, extents(slots * seen_words(vocab)), DType::i32);
  for (auto& s : settings)
    arena.place(s, extents(slots * std::int64_t(sizeof(SlotSampling) / sizeof(std::int32_t))), DType::i32);
  arena.place(final_norm, extents(most_tokens(options), spec.shape.hidden_size), dtype);
  for (AnyView<2>& l : logits) arena.place(l, extents(slots, vocab), dtype);
  arena.place(prompt_logits, extents(1, vocab), dtype);
  return arena.bytes();
}

ModelTensors Model::State::tensors(std::int64_t slot, std::int64_t batch, std::int64_t q_len, const StepArrays& arrays,
                                   AnyView<2> logits_to, std::vector<LayerCache>& caches) const {
  const std::int64_t tokens = batch * q_len;
  ModelTensors t;
  t.ids = arrays.ids;
  for (std::size_t i = 0; i < 2; ++i) t.hidden[i] = rows_of(hidden[i], 0, tokens);
  t.layer = workspace.tensors(cache, 0, 0, 1);
  for_each_activation(
      spec.shape, {.batch = batch, .q_len = q_len},
      [&](const TensorSpec& s, auto& view, const auto& shape) {
        if (s.role == Role::output) view.shape = shape;
      },
      t.layer);
  t.layer.positions = arrays.positions;
  t.layer.kv_len = arrays.kv_len;
  caches.clear();
  for (std::int64_t l = 0; l < spec.shape.num_layers; ++l) {
    LayerCache c = cache.layer(l);
    for (AnyView<4>* v : {&c.k, &c.v}) {
      v->shape[0] = batch;
      v->data = static_cast<std::byte*>(v->data) + slot * (v->bytes() / batch);
    }
    caches.push_back(c);
  }
  t.caches = caches;
  t.logits = logits_to;
  t.final_norm = rows_of(final_norm, 0, logits_to.shape[0]);
  return t;
}

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

// Creation.

Impl Model::auto_impl(const Context& context, const ModelSpec& model, const ModelWeights& weights, std::int64_t slots) {
  // On an H200 with one slot the persistent kernel is the faster one from Pythia-1.4B on (hidden_size 2048), and the
  // graph below; data/bench has both.
  constexpr std::int64_t least_hidden = 2048, most_slots = 4;
  const bool suits = slots <= most_slots && !is_quantised(weights) && size_bytes(dtype_of_weights(weights)) == 2 &&
                     model.shape.hidden_size >= least_hidden;
  return suits && context.arch().compute_capability >= 90 ? Impl::persistent : Impl::graph;
}

ModelBytes Model::bytes(const ModelSpec& m, const ModelWeights& weights, const Options& o) {
  const ModelShape& s = m.shape;
  const auto element = double(size_bytes(dtype_of_weights(weights)));
  ModelBytes b;
  for_each_model_weight(m, weights, [&](const TensorSpec&, const auto& view, const auto&) {
    if (view) b.weights += double(view.bytes());
  });
  b.cache = 2 * double(s.num_layers) * double(o.slots) * double(s.num_kv_heads) * double(o.capacity) *
            double(s.head_dim) * element;
  const auto tokens = double(most_tokens(o));
  double elements = tokens * 3 * double(s.hidden_size) + kPlaces * double(o.slots) * double(s.vocab_size);
  LayerTensors views;
  for_each_activation(
      s, {},
      [&](const TensorSpec& spec, auto&, const auto& shape) {
        if (spec.role != Role::output) return;
        double n = 1;
        for (std::int64_t d : shape) n *= double(d);
        elements += tokens * n;
      },
      views);
  b.workspace = elements * element + double(table_rows(m, o)) * double(s.rotary_dim) * double(sizeof(float)) +
                double(linear_scratch_bytes(m, dtype_of_weights(weights), most_tokens(o), is_quantised(weights)));
  return b;
}

Result<std::unique_ptr<Model>> Model::create(const Context& on, const std::string& name, const ModelSpec& spec,
                                             const ModelWeights& host, const Options& o) {
  CF_TRY(check_model_weights(spec, host));
  constexpr std::int64_t most = std::int64_t(1) << 26;
  CF_TRY(check_sizes({{"slots", o.slots, kMaxSlots}, {"capacity", o.capacity, most}, {"chunk", o.chunk, most}}));
  const ModelBytes needed = bytes(spec, host, o);
  std::size_t free = 0, total = 0;
  CF_TRY(from_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo"));
  if (needed.total() > double(free))
    return Status::error(Code::out_of_memory,
                         name + ": " + std::to_string(o.slots) + " slots of " + std::to_string(o.capacity) +
                             " entries need " + gigabytes(needed.weights) + " of device memory for the weights, " +
                             gigabytes(needed.cache) + " for the cache and " + gigabytes(needed.workspace) +
                             " for activations, " + gigabytes(double(free)) + " are free");

  CF_TRY_ASSIGN(Stream stream, make_stream());
  Context context = on.on_stream(stream.get());
  context.set_overlap(true);  // the weights do not change while a model runs
  const DType dtype = dtype_of_weights(host);
  CF_TRY_ASSIGN(ResidentWeights weights, ResidentWeights::load(context, spec, dtype, host));
  CF_TRY_ASSIGN(KvCache cache, KvCache::create(context, spec, dtype, {0, spec.shape.num_layers}, o.slots, o.capacity));
  CF_TRY_ASSIGN(Workspace workspace,
                Workspace::create(context, spec, dtype, most_tokens(o), table_rows(spec, o), is_quantised(host)));
  const Impl impl = o.impl.value_or(auto_impl(context, spec, host, o.slots));
  auto state = std::make_unique<State>(context, std::move(stream), spec, o, impl, std::move(weights), std::move(cache),
                                       std::move(workspace));
  State& s = *state;
  CF_TRY_ASSIGN(s.memory, DeviceMemory::create(context, s.lay_out(nullptr), "logits and ids"));
  s.lay_out(s.memory.data());
  CF_TRY(from_cuda(cudaMemsetAsync(s.memory.data(), 0, s.memory.bytes(), s.stream.get()), "cudaMemset"));
  s.step.positions = s.cache.writable_positions();
  s.step.kv_len = s.cache.writable_kv_len();
  const std::int64_t tokens = most_tokens(o);
  // The walk's layer i reads hidden[i % 2] and writes the other. An executor's last layer writes where the walk's does:
  // with an even number of layers that is hidden[0], which the first layer reads.
  const auto output_of = [&](std::int64_t layer) {
    return rows_of(s.workspace.tensors(s.cache, 0, layer, 1).output, 0, tokens);
  };
  s.hidden = {spec.shape.num_layers % 2 ? s.workspace.hidden(tokens) : output_of(1), output_of(0)};
  s.seen_size.resize(std::size_t(o.slots));
  CF_TRY_ASSIGN(s.pinned_prompt, make_pinned(2 * prompt_stride(o) + 1));
  CF_TRY_ASSIGN(s.pinned_chosen, make_pinned(o.slots));
  CF_TRY_ASSIGN(s.prompt_copied, make_event());
  CF_TRY_ASSIGN(s.choice_made, make_event());
  CF_TRY_ASSIGN(s.choice_copied, make_event());
  CF_TRY_ASSIGN(s.copies, make_stream());
  const Step step{.stream = s.stream.get(), .input = s.step_input()};
  Status prepared = s.executor.prepare(s.weights, s.cache, s.workspace, step);
  if (!o.impl && prepared.code() == Code::unimplemented) {
    // What the persistent kernel does not take, such as a hidden_size beyond its own, the graph does.
    s.impl = Impl::graph;
    s.executor = Executor(context, Impl::graph);
    prepared = s.executor.prepare(s.weights, s.cache, s.workspace, step);
  }
  CF_TRY(prepared);
  CF_TRY(s.prepare_steps());
  s.taken = {.weights = double(s.weights.device_bytes()),
             .cache = double(s.cache.device_bytes()),
             .workspace = double(s.workspace.device_bytes() + s.memory.bytes())};
  return std::unique_ptr<Model>(new Model(std::move(state)));
}

Model::Model(std::unique_ptr<State> state) : state_(std::move(state)) {}
Model::~Model() = default;

const ModelSpec& Model::model() const { return state_->spec; }
std::int64_t Model::slots() const { return state_->options.slots; }
std::int64_t Model::capacity() const { return state_->options.capacity; }
DType Model::activation() const { return state_->workspace.activation(); }
Impl Model::impl() const { return state_->impl; }
const ModelBytes& Model::bytes() const { return state_->taken; }
void Model::release(std::int64_t slot) { state_->lengths.set(slot, 0); }

// Prompts.

Result<GraphExec> Model::State::pass_graph(const ModelTensors& t) {
  const AnyView<2> layers_output = t.hidden[std::size_t(spec.shape.num_layers) % 2];
  const auto record = [&](DataflowCapture& graph) {
    return for_each_model_site(
        spec, weights.model_weights(), t, [&](const ModelSite& site, const auto& args) -> Status {
          const LaunchMode mode{.early = true};
          if (site.site.name != site::final_layer_norm.name) return name_site(site, graph.run(args, mode));
          // It reads the last rows of what the layers make, whose first byte is another one.
          LaunchList launches(context, workspace.scratch());
          CF_TRY(name_site(site, prepare(args, launches)));
          const void *const reads[] = {layers_output.data}, *const writes[] = {t.final_norm.data};
          return graph.add(reads, writes, launches, mode);
        });
  };
  return capture_dataflow(context, record, workspace.scratch());
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

  const LaunchMode mode{.early = context.overlap()};
  std::vector<LayerCache> caches;
  const ModelTensors t = tensors(slot, 1, tokens, prompt_arrays(tokens), logits_to, caches);
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
  std::int64_t layer = -1;
  parts.emplace_back(context, workspace.scratch());
  CF_TRY(for_each_model_site(spec, weights.model_weights(), t, [&](const ModelSite& site, const auto& args) -> Status {
    if (site.layer != layer) {
      layer = site.layer;
      CF_TRY(parts.back().submit(stream.get(), mode));
      parts.emplace_back(context, workspace.scratch());
    }
    parts.back().set_label(site.site.name.data());  // a literal, which ends in a zero byte
    return name_site(site, prepare(args, parts.back()));
  }));
  CF_TRY(parts.back().submit(stream.get(), mode));
  constexpr std::size_t most_passes = 64;
  if (passes.size() == most_passes) passes.clear();
  passes[key] = {};
  return {};
}

template <class LogitsOf, class Done>
Status Model::State::run(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids, std::int64_t rows,
                         LogitsOf&& logits_of, Done&& done) {
  CF_TRY(lengths.check(slot, first, std::int64_t(ids.size())));
  CF_TRY(check_ids(kName, "ids", ids, spec.shape.vocab_size));
  if (rows < 0 || rows > std::int64_t(ids.size()))
    return bad_argument(kName,
                        "logits: expected 0 to " + std::to_string(ids.size()) + " rows, got " + std::to_string(rows));
  ahead.clear();
  seen_size[std::size_t(slot)] = 0;
  std::int64_t rows_made = 0;
  while (!ids.empty()) {
    const std::span<const std::int32_t> chunk = ids.first(std::min(ids.size(), std::size_t(options.chunk)));
    ids = ids.subspan(chunk.size());
    // The chunk's tokens that are among the last rows of the call.
    const std::int64_t count = std::max<std::int64_t>(0, rows - rows_made - std::int64_t(ids.size()));
    CF_TRY_ASSIGN(const AnyView<2> to, logits_of(rows_made, count));
    CF_TRY(pass(slot, first, chunk, to));
    first += std::int64_t(chunk.size());
    lengths.set(slot, first);
    last_ids[std::size_t(slot)] = chunk.back();
    CF_TRY(done(to, rows_made));
    rows_made += count;
  }
  return {};
}

Status Model::prefill(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids) {
  State& s = *state_;
  CF_TRY(s.run(
      slot, first, ids, 1,
      [&](std::int64_t, std::int64_t count) -> Result<AnyView<2>> { return rows_of(s.prompt_logits, 0, count); },
      [](const AnyView<2>&, std::int64_t) { return Status(); }));
  CF_TRY(copy_async(rows_of(s.logits_at(Where::prompts), slot).data, s.prompt_logits.data,
                    std::size_t(s.prompt_logits.bytes()), cudaMemcpyDeviceToDevice, s.stream.get()));
  s.where[std::size_t(slot)] = Where::prompts;
  return enqueue_end_of_prompt(s.step, s.prompt_lengths, s.prompt_kv_len, slot, s.context);
}

Status Model::forward(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids, AnyView<2> logits) {
  State& s = *state_;
  const std::int64_t vocab = s.spec.shape.vocab_size;
  if (logits.shape[1] != vocab || logits.dtype != activation())
    return bad_argument(kName, "logits: expected rows of " + std::to_string(vocab) + " " +
                                   std::string(to_string(activation())) + ", got " + std::to_string(logits.shape[1]) +
                                   " " + std::string(to_string(logits.dtype)));
  return s.run(
      slot, first, ids, logits.shape[0],
      [&](std::int64_t, std::int64_t count) -> Result<AnyView<2>> {
        AnyView<2> to(nullptr, {count, vocab}, activation());
        if (std::size_t(to.bytes()) > s.forward_memory.bytes()) {
          CF_TRY(from_cuda(cudaStreamSynchronize(s.stream.get()), "cudaStreamSynchronize"));
          s.passes.clear();
          s.forward_memory = {};
          CF_TRY_ASSIGN(s.forward_memory, DeviceMemory::create(s.context, std::size_t(to.bytes()),
                                                               "logits of " + std::to_string(count) + " tokens"));
        }
        to.data = s.forward_memory.data() ? s.forward_memory.data() : s.memory.data();
        return to;
      },
      [&](const AnyView<2>& from, std::int64_t row) -> Status {
        if (from.shape[0] == 0) return {};
        return copy_to_host(s.context, rows_of(logits, row).data, from.data, std::size_t(from.bytes()));
      });
}

// Steps.

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
  for (const Token& t : tokens) CF_TRY(check_ids(kName, "ids", std::span(&t.id, 1), s.spec.shape.vocab_size));
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

// Choices.

Status Model::State::enqueue_choice(Where place, std::span<const Draw> draws) {
  std::vector<SlotSampling> wanted(std::size_t(options.slots), SlotSampling{});
  for (const Draw& d : draws) {
    const bool penalises = d.sampling.repetition_penalty != 1;
    wanted[std::size_t(d.slot)] = {
        .rule = d.sampling.rule(), .sequence = d.sequence, .chooses = 1, .penalises = penalises ? 1 : 0};
    if (!penalises) continue;
    // The sampler marks what it chooses; a history that grew in another way is copied.
    const std::int64_t words = seen_words(spec.shape.vocab_size);
    std::size_t& known = seen_size[std::size_t(d.slot)];
    if (known == 0 || d.history.size() != known + 1 || d.history.back() != pinned_chosen.get()[d.slot]) {
      std::vector<std::uint32_t> bits(std::size_t(words), 0);
      CF_TRY(check_ids("sample", "history", d.history, spec.shape.vocab_size));
      for (std::int32_t id : d.history) bits[std::size_t(id) / 32] |= 1u << (id % 32);
      CF_TRY(copy_async(seen.data + d.slot * words, bits.data(), bits.size() * sizeof(std::uint32_t),
                        cudaMemcpyHostToDevice, stream.get()));
      CF_TRY(from_cuda(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize"));
    }
    known = d.history.size();
  }
  std::vector<SlotSampling>& has = sent[std::size_t(place)];
  const std::size_t bytes = wanted.size() * sizeof(SlotSampling);
  static_assert(sizeof(SlotSampling) % sizeof(std::int32_t) == 0);
  if (std::memcmp(has.data(), wanted.data(), bytes) != 0) {
    has = wanted;
    CF_TRY(copy_async(settings[std::size_t(place)].data, has.data(), bytes, cudaMemcpyHostToDevice, stream.get()));
  }
  return sample[std::size_t(place)].submit(stream.get(), {.early = context.overlap()});
}

std::vector<Result<std::int32_t>> Model::choose(std::span<const Draw> draws) {
  State& s = *state_;
  const auto all = [&](const Status& status) {
    return std::vector<Result<std::int32_t>>(draws.size(), Result<std::int32_t>(status));
  };
  std::array<std::vector<Draw>, kPlaces> by_place;
  for (const Draw& d : draws) {
    if (Status known = s.lengths.check(d.slot, 0, 1); !known) return all(known);
    if (Status valid = d.sampling.validate(); !valid) return all(valid);
    if (d.position != s.lengths[d.slot])
      return all(bad_argument(kName, "slot " + std::to_string(d.slot) + ": expected a choice for position " +
                                         std::to_string(s.lengths[d.slot]) + ", got " + std::to_string(d.position)));
    by_place[std::size_t(s.where[std::size_t(d.slot)])].push_back(d);
  }
  const auto enqueue = [&]() -> Status {
    for (std::size_t place = 0; place < kPlaces; ++place)
      if (!by_place[place].empty()) CF_TRY(s.enqueue_choice(Where(place), by_place[place]));
    // The ids are copied beside the next step, which does not wait for the copy.
    CF_TRY(from_cuda(cudaEventRecord(s.choice_made.get(), s.stream.get()), "cudaEventRecord"));
    CF_TRY(from_cuda(cudaStreamWaitEvent(s.copies.get(), s.choice_made.get()), "cudaStreamWaitEvent"));
    CF_TRY(copy_async(s.pinned_chosen.get(), s.chosen.data, std::size_t(s.chosen.bytes()), cudaMemcpyDeviceToHost,
                      s.copies.get()));
    CF_TRY(from_cuda(cudaEventRecord(s.choice_copied.get(), s.copies.get()), "cudaEventRecord"));
    // The next step of the same slots needs nothing of the host: it runs while the host reads the ids. Behind a prompt
    // it is that of the only slot.
    const std::vector<Draw>& stepped = by_place[std::size_t(s.options.slots == 1 ? s.where[0] : s.last_step)];
    s.ahead.clear();
    if (stepped.size() == draws.size() && std::none_of(draws.begin(), draws.end(), [&](const Draw& d) {
          return d.is_last || d.position >= s.options.capacity;
        })) {
      std::vector<Token> next;
      for (const Draw& d : draws) next.push_back({.slot = d.slot, .id = kNoToken, .position = d.position});
      const Where to = s.next_place();
      CF_TRY(s.keep_logits(next, to));
      CF_TRY(s.run_step(to, true));
      s.ahead = std::move(next);
    }
    CF_TRY(from_cuda(cudaEventSynchronize(s.choice_copied.get()), "cudaEventSynchronize"));
    return s.executor.take_report();
  };
  if (Status enqueued = enqueue(); !enqueued) return all(enqueued);
  for (Token& t : s.ahead) t.id = s.pinned_chosen.get()[t.slot];
  std::vector<Result<std::int32_t>> ids;
  for (const Draw& d : draws) ids.push_back(s.chosen_id(d));
  return ids;
}

Result<std::int32_t> Model::State::chosen_id(const Draw& d) {
  const std::int32_t id = pinned_chosen.get()[d.slot];
  if (id != kNoToken) return id;
  CF_TRY_ASSIGN(const Tensor row, fetch_logits(d.slot));
  std::vector<float> wide;
  for (std::int64_t i = 0; i < spec.shape.vocab_size; ++i)
    wide.push_back(float(load_element(row.data(), row.dtype(), i)));
  Status why = scores_of<float>(std::span<const float>(wide), d.sampling, d.history).status();
  if (why) return Status::error(Code::device_error, "sample: no token was chosen among valid logits");
  const std::string site = first_nan(d.slot);
  return site.empty() ? why
                      : Status::error(why.code(), why.message() + "; the first NaN of this token is made by " + site);
}

std::string Model::State::first_nan(std::int64_t slot) {
  // The step that runs ahead uses the same activations: it is over before, and is run again.
  ahead.clear();
  std::string found;
  const std::int64_t position = lengths[slot] - 1;
  const std::int32_t staged[] = {last_ids[std::size_t(slot)], std::int32_t(position), std::int32_t(position + 1)};
  const StepArrays arrays = prompt_arrays(1);
  std::vector<LayerCache> caches;
  const ModelTensors t = tensors(slot, 1, 1, arrays, prompt_logits, caches);
  const auto look = [&]() -> Status {
    CF_TRY(copy_to_device(context, arrays.ids.data, staged, sizeof *staged));
    CF_TRY(copy_to_device(context, arrays.positions.data, staged + 1, sizeof *staged));
    CF_TRY(copy_to_device(context, arrays.kv_len.data, staged + 2, sizeof *staged));
    return for_each_model_site(
        spec, weights.model_weights(), t, [&](const ModelSite& site, const auto& args) -> Status {
          using Op = typename std::remove_cvref_t<decltype(args)>::Op;
          LaunchList launches(context, workspace.scratch());
          CF_TRY(prepare(args, launches));
          CF_TRY(launches.submit(stream.get()));
          Status status;
          Op::tensors(Op::dims(args), args, [&](const TensorSpec& spec_of, const auto& view, const auto&) {
            if (spec_of.role != Role::output || !found.empty() || !status) return;
            std::vector<std::byte> values(std::size_t(view.bytes()));
            status = copy_to_host(context, values.data(), view.data, values.size());
            for (std::int64_t i = 0; status && i < view.size(); ++i)
              if (std::isnan(load_element(values.data(), view.dtype, i))) {
                found = site.name();
                break;
              }
          });
          return status;
        });
  };
  return look() ? found : "";
}

Result<Tensor> Model::State::fetch_logits(std::int64_t slot) {
  Tensor row(workspace.activation(), {spec.shape.vocab_size});
  CF_TRY(copy_to_host(context, row.data(), logits_of_slot(slot).data, std::size_t(row.size_bytes())));
  return row;
}

Result<Tensor> Model::logits(std::int64_t slot) {
  CF_TRY(state_->lengths.check(slot, 0, 1));
  return state_->fetch_logits(slot);
}

}  // namespace cf::cuda
