#include "cuda/serve/model.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/cache_view.hpp"
#include "core/call_groups.hpp"
#include "core/fp8.hpp"
#include "core/model/passes.hpp"
#include "core/model/ranks.hpp"
#include "core/model/streams.hpp"
#include "core/resources.hpp"
#include "cuda/comm/peers.hpp"
#include "cuda/ops/any_cache.hpp"
#include "cuda/serve/model_state.hpp"
#include "cuda/step/fastest_impl.hpp"

namespace cf::cuda {
namespace {

/// The dtype of a model's weights outside its Linears, which its activations have too.
DType dtype_of_weights(const ModelWeights& w) { return w.embed_in.dtype; }

/// Whether any Linear has such a weight.
bool any_linear(const ModelSpec& m, const ModelWeights& w, bool (*is)(const LinearWeight&)) {
  bool found = false;
  for (const LayerWeights& layer : w.layers)
    for_each_linear(m, layer, [&](const Site&, const LinearParams& l, const LinearSize&) { found |= is(l.weight); });
  return found;
}
bool is_quantised(const LinearWeight& w) { return !std::holds_alternative<DenseWeight>(w); }
/// GPTQ, whose products of many tokens take scratch memory.
bool is_gptq(const LinearWeight& w) { return is_quantised(w) && !is_fp8(w); }

/// The tokens that go through the model at once, at most: a chunk, as far as all slots have room for one, or a token of
/// each slot.
std::int64_t most_tokens(const Model::Options& o) {
  const bool fills_chunk = o.slots >= o.chunk || o.capacity >= o.chunk;
  return std::max(o.slots, fills_chunk ? o.chunk : std::min(o.chunk, o.slots * o.capacity));
}

/// The options with the capacity that streams need.
Model::Options with_capacity(Model::Options o) {
  if (o.stream()) o.capacity = stream_entries(o.stream(), std::max(o.chunk, o.slots));
  return o;
}

/// Whether an impl has ops in the place of the persistent kernel, which reads caches of all keys alone.
bool has_ops(Impl impl) { return impl == Impl::unfused || impl == Impl::graph; }

/// Whether sequences may be longer than the model's own window.
bool leaves_keys_out(const ModelSpec& m, const Model::Options& o) {
  return m.traits.window > 0 && o.capacity > m.traits.window && (!o.impl || has_ops(*o.impl));
}

CacheKind kind_of(const ModelSpec& m, const Model::Options& o) {
  return {.pool = o.pool(), .stream = o.stream(), .leaves_keys_out = leaves_keys_out(m, o)};
}

/// Refuses pages that the options have no room for, and pages and streams that no kernel of the impl takes.
Status check_cache_options(const Model::Options& o) {
  CF_TRY(SlotPages::check(o.pool(), o.capacity, o.stream()));
  const auto unimplemented = [](std::string what) {
    return Status::error(Code::unimplemented, "model: " + std::move(what));
  };
  if (o.pages > 0 && !is_page_size(o.page_entries))
    return unimplemented("page_entries: cuda takes a multiple of " + std::to_string(kPageUnit) + " up to " +
                         std::to_string(kMostPageEntries) + ", got " + std::to_string(o.page_entries));
  if (o.stream() && o.impl && !has_ops(*o.impl))
    return unimplemented("window: cuda takes the impls unfused and graph, got " + std::string(to_string(*o.impl)));
  return {};
}

/// Words that begin at a multiple of 16 bytes, as tensors do, and so do those behind them.
std::int64_t whole_words(std::int64_t words) { return (words + 3) / 4 * 4; }

/// The words of a pass in their block: ids, positions, lengths, and the rows whose logits are made.
struct PassWords {
  std::int64_t tokens, slots;
  explicit PassWords(const Model::Options& o) : tokens(whole_words(most_tokens(o))), slots(whole_words(o.slots)) {}
  std::int64_t all() const { return 3 * tokens + slots; }
};

}  // namespace

void OwnTensors::allocate(Arena& arena, const ModelSpec& spec, DType dtype, const Model::Options& options) {
  const PassWords words(options);
  const std::int64_t slots = options.slots, vocab = spec.shape.vocab_size;
  for (View<std::int32_t, 1>* v : {&step.ids, &prompt_lengths, &chosen}) arena.allocate(*v, extents(slots), DType::i32);
  // The host copies the four as one.
  View<std::int32_t, 1> pass;
  arena.allocate(pass, extents(words.all()), DType::i32);
  prompt_ids = {pass.data, {words.tokens}};
  prompt_positions = {prompt_ids.data + words.tokens, {words.tokens}};
  prompt_kv_len = {prompt_positions.data + words.tokens, {slots}};
  pass_rows = {prompt_kv_len.data + words.slots, {words.tokens}};
  arena.allocate(seen, extents(slots * seen_words(vocab)), DType::i32);
  for (auto& s : settings)
    arena.allocate(s, extents(slots * std::int64_t(sizeof(SlotSampling) / sizeof(std::int32_t))), DType::i32);
  arena.allocate(final_norm, extents(most_tokens(options), spec.shape.hidden_size), dtype);
  if (const std::int64_t rows = rank_head_rows(spec); rows > 0 && slots <= Model::kRankHeadRows)
    for (LogitsBuffer b : {LogitsBuffer::even_steps, LogitsBuffer::odd_steps})
      arena.allocate(head_parts[std::size_t(b)], extents(slots, rows), dtype);
  for (AnyView<2>& l : logits) arena.allocate(l, extents(slots, vocab), dtype);
  arena.allocate(prompt_logits, extents(std::min(slots, kPassLogits), vocab), dtype);
}

ModelTensors Model::State::tensors(std::int64_t slot, const StepSizes& sizes, const StepArrays& arrays,
                                   AnyView<2> logits_to, std::vector<LayerCache>& caches) const {
  const std::int64_t tokens = sizes.tokens();
  ModelTensors t;
  t.ids = arrays.ids;
  for (std::size_t i = 0; i < 2; ++i) t.hidden[i] = rows_of(hidden[i], 0, tokens);
  t.layer = workspace.tensors(cache, 0, 0, 1);
  StepSizes with_sinks = sizes;
  with_sinks.sinks = options.sinks > 0;
  for_each_activation(
      spec.shape, with_sinks,
      [&](const TensorSpec& s, auto& view, const auto& shape) {
        if (s.role == Role::output) view.shape = shape;
      },
      t.layer);
  if (options.stream()) {
    t.layer.positions.shape[0] = tokens;
    if (options.sinks > 0) t.layer.sink_positions.shape[0] = tokens;
  } else {
    t.layer.positions = arrays.positions;
  }
  t.layer.kv_len = arrays.kv_len;
  if (t.layer.page_table) t.layer.page_table = part_of(t.layer.page_table, slot, sizes.batch);
  caches.clear();
  for (std::int64_t l = 0; l < spec.shape.num_layers; ++l) {
    const LayerCache c = cache.layer(l);
    if (pages)
      caches.push_back(c);  // pages are no one slot's
    else
      caches.push_back({cache_of(c.k, slot, sizes.batch), cache_of(c.v, slot, sizes.batch)});
  }
  t.caches = caches;
  t.logits = logits_to;
  t.final_norm = rows_of(final_norm, 0, logits_to.shape[0]);
  return t;
}

Impl Model::auto_impl(const Arch& arch, const ModelSpec& model, const ModelWeights& weights, const Options& o) {
  if (o.stream() || leaves_keys_out(model, o)) return Impl::graph;
  return fastest_impl(arch, model, dtype_of_weights(weights), any_linear(model, weights, is_quantised), o.slots);
}

ModelBytes Model::bytes(const ModelSpec& m, const ModelWeights& weights, const Options& options) {
  const Options o = with_capacity(options);
  const DType dtype = dtype_of_weights(weights);
  OwnTensors own;
  Arena arena(nullptr);
  own.allocate(arena, m, dtype, o);
  return {.weights = o.in_place ? 0 : double(weight_bytes(m, weights) + packed_bytes(m, weights)),
          .cache = KvCache::bytes(m, dtype, o.slots, o.capacity, kind_of(m, o)),
          .workspace = arena.measured() + Workspace::bytes(m, dtype, most_tokens(o), o.capacity,
                                                           any_linear(m, weights, is_gptq), o.invariant, o.stream())};
}

Status Model::check_memory(const std::string& name, const ModelSpec& m, const ModelWeights& weights,
                           const Options& options) {
  CF_TRY(check_stream(m, options.stream()));
  const Options o = with_capacity(options);
  const ModelBytes needed = bytes(m, weights, o);
  std::size_t free = 0, total = 0;
  CF_TRY(from_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo"));
  if (needed.total() <= double(free)) return {};
  return Status::error(
      Code::out_of_memory,
      name + ": " + std::to_string(o.pages > 0 ? o.pages : o.slots) + (o.pages > 0 ? " pages of " : " slots of ") +
          std::to_string(o.pages > 0 ? o.page_entries : o.capacity) + " entries need " + gigabytes(needed.weights) +
          " of device memory for the weights, " + gigabytes(needed.cache) + " for the cache and " +
          gigabytes(needed.workspace) + " for activations, " + gigabytes(double(free)) + " are free");
}

Result<std::unique_ptr<Model>> Model::create(const Context& on, const std::string& name, const ModelSpec& spec,
                                             const ModelWeights& host, const Options& options,
                                             const LayerOf& layer_of) {
  if (on.peers()) return create_rank(on, name, spec, host, options, layer_of);
  return create_part(on, name, spec, host, options, layer_of);
}

Result<std::unique_ptr<Model>> Model::create_rank(const Context& on, const std::string& name, const ModelSpec& whole,
                                                  const ModelWeights& host, const Options& options,
                                                  const LayerOf& layer_of) {
  const std::int64_t rank = on.peers()->rank, ranks = on.peers()->layout.ranks;
  CF_TRY(layer_of ? check_outer_weights(whole, host) : check_model_weights(whole, host));
  if (options.in_place)
    return Status::error(Code::unimplemented, "model: in_place: a model on several GPUs copies its weights");
  if (options.impl && !has_ops(*options.impl) && *options.impl != Impl::persistent)
    return Status::error(Code::unimplemented,
                         "model: a model on several GPUs takes the impls unfused, graph and persistent, got " +
                             std::string(to_string(*options.impl)));
  CF_TRY_ASSIGN(const ModelSpec part, whole.of_rank(rank, ranks));
  CF_TRY_ASSIGN(const ModelWeights outline, outline_of_rank(whole, host, rank, ranks));
  return create_part(on, name, part, outline, options, [&](std::int64_t layer) -> Result<OwnedLayerWeights> {
    if (!layer_of) return layer_of_rank(whole, host.layers[std::size_t(layer)], rank, ranks);
    CF_TRY_ASSIGN(OwnedLayerWeights made, layer_of(layer));
    CF_TRY_ASSIGN(OwnedLayerWeights cut, layer_of_rank(whole, made.weights, rank, ranks));
    // What is not copied is a view of what was made.
    std::ranges::move(made.storage, std::back_inserter(cut.storage));
    return cut;
  });
}

Result<std::unique_ptr<Model>> Model::create_part(const Context& on, const std::string& name, const ModelSpec& spec,
                                                  const ModelWeights& host, const Options& options,
                                                  const LayerOf& layer_of) {
  CF_TRY(layer_of ? check_outer_weights(spec, host) : check_model_weights(spec, host));
  constexpr std::int64_t most = std::int64_t(1) << 26;
  CF_TRY(check_sizes({{"slots", options.slots, kMaxSlots}, {"chunk", options.chunk, most}}));
  CF_TRY(check_stream(spec, options.stream()));
  const Options o = with_capacity(options);
  CF_TRY(check_sizes({{"capacity", o.capacity, most}}));
  CF_TRY(check_cache_options(o));
  if (o.invariant && o.impl && *o.impl != Impl::graph && *o.impl != Impl::unfused)
    return bad_argument(kModelName,
                        "invariant: expected the impl graph or unfused, got " + std::string(to_string(*o.impl)));
  CF_TRY(check_memory(name, spec, host, o));

  CF_TRY_ASSIGN(Stream stream, make_stream());
  Context context = on.on_stream(stream.get());
  // The weights do not change while a model runs: whoever writes those in place calls run_after().
  context.set_overlap(true);
  if (o.invariant) context.set_plan_arch(invariant_arch(context.arch()));
  const DType dtype = dtype_of_weights(host);
  CF_TRY_ASSIGN(ResidentWeights weights, o.in_place ? ResidentWeights::in_place(context, spec, dtype, host)
                                                    : ResidentWeights::load(context, spec, dtype, host, layer_of));
  const CacheKind kind = kind_of(spec, o);
  CF_TRY_ASSIGN(KvCache cache,
                KvCache::create(context, spec, dtype, {0, spec.shape.num_layers}, o.slots, o.capacity, kind));
  CF_TRY_ASSIGN(Workspace workspace, Workspace::create(context, spec, dtype, most_tokens(o), o.capacity,
                                                       any_linear(spec, host, is_gptq), o.stream()));
  const Impl impl = o.impl.value_or(auto_impl(context.arch(), spec, host, o));
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
  CF_TRY_ASSIGN(s.pinned_prompt, make_pinned<std::int32_t>(std::size_t(PassWords(o).all())));
  CF_TRY_ASSIGN(s.told, make_pinned<std::int32_t>(std::size_t(o.slots)));
  CF_TRY_ASSIGN(s.prompt_copied, make_event());
  CF_TRY_ASSIGN(s.handover, make_event());
  CF_TRY_ASSIGN(s.crossing, make_event());
  CF_TRY_ASSIGN(s.side, make_stream());
  Status prepared = s.prepare_layers();
  if (!o.impl && prepared.code() == Code::unimplemented) {
    // What the persistent kernel does not take, such as more blocks than the device holds at once, the graph does.
    s.impl = Impl::graph;
    s.executor = Executor(context, Impl::graph);
    prepared = s.prepare_layers();
  }
  CF_TRY(prepared);
  CF_TRY(s.prepare_steps());
  CF_TRY(s.prepare_prompts());
  s.pipeline.set_launches({.launches = s.whole.has_value(), .most_stop_ids = PersistentKernel::most_stop_ids()});
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
std::int64_t Model::pass_tokens() const { return state_->most_tokens(); }
std::int64_t Model::exact_run_tokens() const {
  const Options& o = state_->options;
  return o.invariant && !o.stream() ? o.capacity : 0;
}

std::int64_t Model::preferred_step_tokens() const {
  // Running sequences wait for such a step, so it is short. Products have tiles of 128 rows: beside a row for each slot
  // there is a tile or more for prompts, up to whole tiles.
  constexpr std::int64_t tile = 128;
  return slots() == 1 ? 0 : std::min((slots() + 2 * tile - 1) / tile * tile, pass_tokens());
}
bool Model::runs_ahead(std::span<const Run> runs, std::span<const std::int32_t> ids) const {
  std::vector<Token> tokens;
  for (const Run& r : runs) {
    if (r.count != 1) return false;
    tokens.push_back({.slot = r.sequence, .id = ids[tokens.size()], .position = r.first_position});
  }
  return state_->pipeline.foresees(tokens);
}
EntryLimit Model::limit() const { return state_->cache.limit(); }
DType Model::activation() const { return state_->workspace.activation(); }
std::int64_t Model::length(std::int64_t slot) const { return state_->pipeline.lengths()[slot]; }
Impl Model::impl() const { return state_->impl; }
const ModelBytes& Model::bytes() const { return state_->taken; }
Status Model::swap_weights(const ModelSpec& model, const ModelWeights& weights, std::shared_ptr<const void>) {
  State& s = *state_;
  CF_TRY(check_swap(s.spec, s.weights.model_weights(), model, weights));
  CF_TRY(s.take_report());
  for (std::int64_t slot = 0; slot < slots(); ++slot) release(slot);
  s.pipeline.give_up();
  return s.weights.swap(weights);
}
void Model::watch(Visit visit) { state_->visit = std::move(visit); }
void Model::check_between(Check check) { state_->go_on = std::move(check); }

Status Model::run_after(CUstream_st* stream) {
  State& s = *state_;
  CF_TRY(s.take_report());
  s.pipeline.give_up();  // what runs ahead has not waited for that stream
  CF_TRY(from_cuda(cudaEventRecord(s.handover.get(), stream), "cudaEventRecord"));
  return from_cuda(cudaStreamWaitEvent(s.stream.get(), s.handover.get()), "cudaStreamWaitEvent");
}

Status Model::run_before(CUstream_st* stream) {
  State& s = *state_;
  CF_TRY(from_cuda(cudaEventRecord(s.handover.get(), s.stream.get()), "cudaEventRecord"));
  return from_cuda(cudaStreamWaitEvent(stream, s.handover.get()), "cudaStreamWaitEvent");
}

}  // namespace cf::cuda
