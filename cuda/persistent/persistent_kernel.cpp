#include "cuda/persistent/persistent_kernel.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/contract.hpp"
#include "cuda/comm/peers.hpp"
#include "cuda/ops/any_cache.hpp"
#include "cuda/ops/linear/pack/pack.hpp"
#include "cuda/persistent/arguments.hpp"
#include "cuda/persistent/launch.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/runtime/memory.hpp"

namespace cf::cuda {
namespace {

/// The sites whose outputs blocks wait for, by Dependency.
std::array<Site, kDependencies> awaited_sites(ModelType family) {
  const ModelNames& n = names_of(family);
  return {n.query_key_value, n.context, n.dense, n.dense_h_to_4h, n.dense_4h_to_h, n.embed_out};
}

Status refuse(std::string what) {
  return Status::error(Code::unimplemented, std::string(kPersistentName) + ": cuda takes " + what);
}
Status bad(std::string what) { return bad_argument(kPersistentName, std::move(what)); }

/// Checks shapes, dtypes and memory of the tensors that create() gets. `layer` is the layer's number in the model.
class ViewCheck {
 public:
  ViewCheck(const Context& context, const PersistentModel& m, const PersistentDims& d)
      : context_(context), m_(m), d_(d), batch_(d.batch), names_(names_of(m.family)) {}

  Status layer(std::int64_t layer, const LayerWeights& w) const {
    const std::int64_t h = m_.hidden_size;
    const LayerRows rows = d_.rows();
    Checks check(name(layer), context_);
    const auto linear = [&](const Site& site, const LinearParams& l, std::int64_t out, std::int64_t in) {
      const std::string weight = std::string(site.name) + ".weight", bias = std::string(site.name) + ".bias";
      if (const auto* dense = std::get_if<DenseWeight>(&l.weight))
        check({Role::weight, weight}, dense->weight, {out, in});
      check({Role::weight, bias, true}, l.bias, {out});
    };
    for (const LinearParams* l : {&w.query_key_value, &w.dense, &w.dense_h_to_4h, &w.dense_4h_to_h})
      if (std::holds_alternative<GptqWeight>(l->weight)) return refuse("dense or packed weights, got quantised ones");
    norm(check, names_.input_layernorm, w.input_layernorm);
    norm(check, names_.post_attention_layernorm, w.post_attention_layernorm);
    if (m_.head_norm)
      for (const auto& [site, gamma] : {std::pair{names_.q_norm, w.q_norm.gamma}, {names_.k_norm, w.k_norm.gamma}})
        check({Role::gain, std::string(site.name) + ".weight"}, gamma, {m_.head_dim});
    linear(names_.query_key_value, w.query_key_value, rows.qkv, h);
    linear(names_.dense, w.dense, h, d_.attention);
    linear(names_.dense_h_to_4h, w.dense_h_to_4h, rows.act * rows.rows_of_act, h);
    linear(names_.dense_4h_to_h, w.dense_4h_to_h, h, rows.act);
    CF_TRY(check.status());
    if (w.input_layernorm.gamma.dtype == m_.dtype) return {};
    return bad_argument(name(layer), "weights have dtype " + std::string(to_string(w.input_layernorm.gamma.dtype)) +
                                         ", expected the model's " + std::string(to_string(m_.dtype)));
  }
  /// `storages` and `entries`: the sequences and the capacity of a contiguous cache, or the pages and the entries of one.
  Status cache(std::int64_t layer, const PersistentLayer& l, std::int64_t storages, std::int64_t entries,
               const View<const std::int32_t, 2>& table) const {
    CF_TRY(check_weight_dtype(kPersistentName, l.cache.k.dtype, m_.dtype));
    Checks check(name(layer), context_);
    check({Role::state, "k_cache"}, l.cache.k, {storages, m_.kv_heads, entries, m_.head_dim});
    check({Role::state, "v_cache"}, l.cache.v, {storages, m_.kv_heads, entries, m_.head_dim});
    check({Role::page_table, "page_table", true}, l.page_table, {batch_, table.shape[1]});
    CF_TRY(check.status());
    return l.page_table.data == table.data
               ? Status()
               : bad_argument(name(layer), "expected the page table of the layers before, got another one");
  }
  Status ends(const PersistentEnds& e) const {
    const std::int64_t h = m_.hidden_size, vocab = e.embed_in.shape[0];
    Checks check(std::string(kPersistentName), context_);
    check({Role::weight, "embed_in"}, e.embed_in, {vocab, h});
    norm(check, names_.final_layer_norm, e.final_layer_norm);
    check({Role::weight, "embed_out"}, e.embed_out, {vocab, h});
    check({Role::token_id, "ids"}, e.ids, {batch_});
    check({Role::position, "positions"}, e.positions, {batch_});
    check({Role::length, "kv_len"}, e.kv_len, {batch_});
    check({Role::token_id, "chosen"}, e.chosen, {batch_});
    CF_TRY(check.status());
    return check_weight_dtype(kPersistentName, e.embed_in.dtype, m_.dtype);
  }
  Status sequences(const PersistentSequences& s) const {
    Checks check(std::string(kPersistentName), context_);
    check({Role::length, "kv_len"}, s.kv_len, {batch_});
    check({Role::position, "positions"}, s.positions, {batch_});
    return check.status();
  }
  Status rope(const RopeTable& t) const {
    Checks check(std::string(kPersistentName), context_);
    check({Role::cosine, "cos"}, t.cos, {t.cos.shape[0], m_.rotary_dim / 2});
    check({Role::sine, "sin"}, t.sin, {t.cos.shape[0], m_.rotary_dim / 2});
    return check.status();
  }

 private:
  /// The contract's check of a tensor, then the check that it lies on the device, aligned to the copy engine's 16
  /// bytes.
  class Checks {
   public:
    Checks(std::string op, const Context& context) : op_(std::move(op)), shape_(op_), device_(op_, context.device()) {}
    template <class V>
    void operator()(const TensorSpec& t, const V& v, std::array<std::int64_t, V::rank> shape) {
      shape_(t, v, shape);
      if (v.data && shape_.status()) device_(t, v, shape);
    }
    Status status() const { return shape_.status() ? device_.status() : shape_.status(); }

   private:
    std::string op_;
    TensorCheck shape_;
    DeviceCheck device_;
  };
  static std::string name(std::int64_t layer) {
    return std::string(kPersistentName) + ": layer " + std::to_string(layer);
  }
  /// RMSNorm has no beta: one that is given is not looked at.
  void norm(Checks& check, const Site& site, const NormParams& n) const {
    const std::string gamma = std::string(site.name) + ".weight", beta = std::string(site.name) + ".bias";
    check({Role::gain, gamma}, n.gamma, {m_.hidden_size});
    if (m_.norm == NormKind::layernorm) check({Role::weight, beta}, n.beta, {m_.hidden_size});
  }

  const Context& context_;
  const PersistentModel& m_;
  PersistentDims d_;
  std::int64_t batch_;
  const ModelNames& names_;
};

/// `adds_residual`: the rank adds the biases of summed products.
WeightPointers weight_pointers(const LayerWeights& w, bool adds_residual) {
  const auto bytes = [](const auto& view) { return reinterpret_cast<const char*>(view.data); };
  const auto matrix = [&](const LinearParams& l) {
    if (const auto* packed = std::get_if<PackedWeight>(&l.weight)) return bytes(packed->data);
    return bytes(std::get<DenseWeight>(l.weight).weight);
  };
  const auto summed_bias = [&](const LinearParams& l) { return adds_residual ? bytes(l.bias) : nullptr; };
  return {.gamma = {bytes(w.input_layernorm.gamma), bytes(w.post_attention_layernorm.gamma)},
          .beta = {bytes(w.input_layernorm.beta), bytes(w.post_attention_layernorm.beta)},
          .head_gamma = {bytes(w.q_norm.gamma), bytes(w.k_norm.gamma)},
          .bias = {bytes(w.query_key_value.bias), bytes(w.dense_h_to_4h.bias), summed_bias(w.dense),
                   summed_bias(w.dense_4h_to_h)},
          .matrix = {matrix(w.query_key_value), matrix(w.dense_h_to_4h), matrix(w.dense), matrix(w.dense_4h_to_h)}};
}
/// The number of columns of codes that each input has: 1 with 4 bits, 2 with 8 bits.
int planes_of(const PackedWeight& w) { return int(w.format.bits) / 4; }

/// The kind of a layer, read from its weights. Code::unimplemented, with the matrix's name, for groups that the kernel
/// does not take.
Result<LayerKind> layer_kind(const PersistentDims& d, const PersistentPlan& plan, const ModelNames& names,
                             const LayerWeights& w) {
  LayerKind kind{};
  const auto read = [&](Weight which, const Site& site, const LinearParams& l, int out, int in) -> Status {
    const auto* packed = std::get_if<PackedWeight>(&l.weight);
    if (!packed) return {};
    const std::string weight = std::string(site.name) + ".weight";
    CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(std::string(kPersistentName) + ": " + weight, *packed));
    if (packed->out != out || packed->in != in)
      return bad("'" + weight + "' must be (" + std::to_string(out) + ", " + std::to_string(in) + "), got (" +
                 std::to_string(packed->out) + ", " + std::to_string(packed->in) + ")");
    const int columns = in * planes_of(*packed);
    if (layout.groups * layout.columns_per_group != columns)
      return refuse("groups of equally many columns, a multiple of 32, got " + std::to_string(layout.groups) +
                    " groups of up to " + std::to_string(layout.columns_per_group) + " of the " +
                    std::to_string(columns) + " columns of '" + weight + "'");
    kind.packed[std::size_t(which)] = {
        .scales = layout.code_words() * 4,
        .input_columns = layout.in_order ? 0 : (layout.words() - layout.inverse_words()) * 4,
        .inputs = in,
        .columns = columns,
        .groups = layout.groups,
        .group_columns = layout.columns_per_group};
    if (which != Weight::qkv) return {};
    kind.pairs_head_dim = int(layout.pairs.head_dim);
    kind.pairs_rotary = int(layout.pairs.rotary_dim);
    kind.pairs_turned_heads = int(layout.pairs.turned_heads);
    return {};
  };
  const LayerRows rows = d.rows();
  CF_TRY(read(Weight::qkv, names.query_key_value, w.query_key_value, rows.qkv, d.hidden));
  CF_TRY(read(Weight::up, names.dense_h_to_4h, w.dense_h_to_4h, rows.act * rows.rows_of_act, d.hidden));
  CF_TRY(read(Weight::dense, names.dense, w.dense, d.hidden, d.attention));
  CF_TRY(read(Weight::down, names.dense_4h_to_h, w.dense_4h_to_h, d.hidden, rows.act));
  kind.shapes = product_shapes(d, plan, kind.packed);
  return kind;
}

/// Returns the index of `kind` in `kinds`, and appends a kind that is not there. Refuses more than kMaxLayerKinds kinds
/// with Code::unimplemented.
Result<std::int64_t> number_of_kind(std::vector<LayerKind>& kinds, const LayerKind& kind) {
  const auto found = std::find(kinds.begin(), kinds.end(), kind);
  if (found != kinds.end()) return found - kinds.begin();
  if (kinds.size() == kMaxLayerKinds)
    return refuse("layers packed in up to " + std::to_string(kMaxLayerKinds - 1) + " ways, got more");
  kinds.push_back(kind);
  return std::int64_t(kinds.size()) - 1;
}

/// Notes in the model what a plan depends on of the packed matrices of a layer.
Status note_packing(const LayerWeights& w, PersistentModel& model) {
  for (const LinearParams* l : {&w.query_key_value, &w.dense, &w.dense_h_to_4h, &w.dense_4h_to_h}) {
    const auto* packed = std::get_if<PackedWeight>(&l->weight);
    if (!packed) continue;
    CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(kPersistentName, *packed));
    model.packed = true;
    model.packed_group = std::min(model.packed_group, int(layout.columns_per_group));
  }
  return {};
}

PhaseTraits phase_traits(const PersistentModel& m, const PersistentPlan& p) {
  return {.parallel_residual = m.use_parallel_residual,
          .tiled = is_tiled(p.products),
          .act_in_registers = p.act_in_registers,
          .head_norm = m.head_norm,
          .adds_residual = m.adds_residual};
}

/// The head as a layer.
LayerPointers head_pointers(const PersistentEnds& e) {
  const auto bytes = [](const auto& view) { return static_cast<const char*>(view.data); };
  LayerPointers p{};
  p.weights.gamma[0] = bytes(e.final_layer_norm.gamma);
  p.weights.beta[0] = bytes(e.final_layer_norm.beta);
  p.weights.matrix[int(Weight::qkv)] = bytes(e.embed_out);
  return p;
}
PersistentPages pages_of(const View<const std::int32_t, 2>& table, std::int64_t entries) {
  if (!table) return {.entries = int(entries)};
  return {.table = table.data,
          .of_sequence = int(table.shape[1]),
          .entries = int(entries),
          .by_entries = Divisor(int(entries))};
}
CachePointers cache_pointers(const LayerCache& cache) {
  return {.k = static_cast<char*>(cache.k.data), .v = static_cast<char*>(cache.v.data)};
}

/// What a rank's kernel knows of the others; null where it is no rank's. Refuses ranks that cannot share a kernel.
Result<const Peers*> peers_of(const Context& context, const PersistentModel& m, const PersistentDims& d,
                              const PersistentOptions& options) {
  if (m.ranks == 1) return static_cast<const Peers*>(nullptr);
  const Peers* const peers = context.peers();
  if (!peers || peers->layout.ranks != m.ranks)
    return bad("expected the context of one of " + std::to_string(m.ranks) + " ranks, got one of " +
               std::to_string(peers ? peers->layout.ranks : 1));
  if (options.ends) return refuse("layers alone on several GPUs, got a whole model");
  if (const std::int64_t needed = RankExchange::bytes(m.ranks); peers->layout.area_bytes < needed)
    return refuse("an area of " + std::to_string(needed) + " B that all ranks reach, got one of " +
                  std::to_string(peers->layout.area_bytes) + " B");
  // The epochs of words that not every launch writes would be too old to be told apart.
  const std::int64_t use = std::int64_t(d.batch) * d.hidden * 2 + (m.use_parallel_residual ? 0 : 1);
  std::int64_t first = 0;
  if (!peers->area_use->compare_exchange_strong(first, use) && first != use)
    return refuse("steps of one kind on ranks that share an area, got another batch, hidden_size or residual");
  return peers;
}
RankExchange rank_exchange(const Peers& peers, unsigned* launches) {
  RankExchange x{.rank = peers.rank, .ranks = peers.layout.ranks, .launches = launches};
  for (int rank = 0; rank < x.ranks; ++rank) x.areas[rank] = peers.memory[rank] + peers.layout.area();
  return x;
}

/// The scratch memory: the exchange, then the zeros that are RMSNorm's beta. Gives `a` its pointers to both and returns
/// the bytes that this takes. Without memory it only counts them.
std::size_t allocate_scratch(std::byte* memory, PersistentArguments& a, bool of_ranks) {
  const PersistentDims& d = a.dims;
  const std::size_t words = allocate_words(a.exchange,
                                           {.batch = d.batch,
                                            .hidden = d.hidden,
                                            .qkv_rows = d.qkv_rows,
                                            .heads = d.heads,
                                            .head_dim = d.head_dim,
                                            .intermediate = d.intermediate,
                                            .grid = a.plan.grid,
                                            .splits = a.plan.attention_splits,
                                            .partial_floats = partial_floats(d.head_dim),
                                            .tiled = is_tiled(a.plan.products),
                                            .has_head = a.head_layer >= 0,
                                            .of_ranks = of_ranks},
                                           memory);
  if (!a.rms_norm) return words;
  a.no_beta = memory ? reinterpret_cast<std::uint16_t*>(memory + words) : nullptr;
  return words + std::size_t(d.hidden) * sizeof(*a.no_beta);
}

}  // namespace

struct PersistentKernel::State {
  /// Launches of whole tokens that are on their way at once, at most.
  static constexpr unsigned kLaunches = 4;
  /// What host and device share.
  struct Shared {
    unsigned report = 0;
    unsigned end_serials[kLaunches] = {};  // by launch
    std::uint64_t made[kMadeTokens * kMaxPersistentBatch] = {};
  };
  struct FreeHost {
    void operator()(Shared* p) const { (void)cudaFreeHost(p); }
  };
  State(const Context& c, const PersistentModel& m, const PersistentArguments& a)
      : context(c), model(m), arguments(a) {}

  Status check_step(std::int64_t first, std::int64_t last, const ConstAnyView<2>& input,
                    const AnyView<2>& output) const;
  std::int64_t layers() const { return std::int64_t(pointers.size()) - (arguments.head_layer >= 0); }
  Status check_tokens(const AnyView<2>& logits) const;
  using SequenceEnds = decltype(PersistentArguments::sequence_ends);
  /// The kernel's form of `given`, which has an end for each sequence, or is empty: then no sequence ends within
  /// `count` tokens.
  Result<SequenceEnds> ends_for_tokens(std::int64_t count, std::span<const PersistentEnd> given) const;
  /// The arguments of a launch of layers [first, last).
  PersistentArguments arguments_for_tokens(std::int64_t count, const AnyView<2>& logits) const;
  PersistentArguments arguments_for(std::int64_t first, std::int64_t last, const ConstAnyView<2>& input,
                                    const AnyView<2>& output) const;
  Status launch(const PersistentArguments& a, bool cooperative, CUstream_st* stream);

  Context context;
  PersistentModel model;
  PersistentArguments arguments;        // of every launch, but for its layers, input, output and phases
  std::vector<LayerPointers> pointers;  // of all layers, then of the head
  DeviceMemory table;                   // holds `pointers`
  std::int64_t first_model_layer = 0;
  const void* kernel = nullptr;
  const Peers* peers = nullptr;  // of a rank
  std::uint64_t launched_wait_limit_ns = 0;
  std::unique_ptr<Shared, FreeHost> shared;
  unsigned next_serial = 1, token_launches = 0;
  DeviceMemory scratch;
};

PersistentKernel::PersistentKernel(std::unique_ptr<State> state) : state_(std::move(state)) {}
PersistentKernel::PersistentKernel(PersistentKernel&&) noexcept = default;
PersistentKernel& PersistentKernel::operator=(PersistentKernel&&) noexcept = default;
PersistentKernel::~PersistentKernel() = default;

Result<PersistentKernel> PersistentKernel::create(const Context& context, const PersistentModel& given,
                                                  std::span<const PersistentLayer> layers,
                                                  const PersistentSequences& sequences, const RopeTable& rope,
                                                  const PersistentOptions& options) {
  if (layers.empty()) return bad("layers are none, expected at least 1");
  if (const std::size_t all = layers.size() + (options.ends ? 1 : 0); all > std::size_t(kMaxPersistentLayers))
    return refuse("up to " + std::to_string(kMaxPersistentLayers) + " layers, the LM head among them, got " +
                  std::to_string(all));
  const std::int64_t batch = sequences.kv_len.shape[0], tokens = sequences.positions.shape[0];
  if (tokens != batch)
    return refuse("one new token a sequence, got " + std::to_string(tokens) + " for " + std::to_string(batch));
  PersistentModel model = given;
  for (const PersistentLayer& l : layers) CF_TRY(note_packing(l.weights, model));
  const PersistentKernelLookup kernels = options.kernels ? options.kernels : persistent_kernels;
  const View<const std::int32_t, 2>& table = layers[0].page_table;
  const std::int64_t storages = table ? layers[0].cache.k.shape[0] : batch, entries = layers[0].cache.k.shape[2],
                     capacity = entries * (table ? table.shape[1] : 1);
  if (table && !is_page_size(entries))
    return refuse("pages of a multiple of " + std::to_string(kPageUnit) + " entries up to " +
                  std::to_string(kMostPageEntries) + ", got " + std::to_string(entries));
  const PersistentChoices choices = for_capacity(context.arch(), options.choices, batch, capacity);
  const PersistentDims dims = persistent_dims(model, batch);
  CF_TRY_ASSIGN(const Peers* const peers, peers_of(context, model, dims, options));
  Arch arch = context.arch();
  // Ranks of one GPU are all resident.
  if (peers && peers->share_device) arch.sm_count /= peers->layout.ranks;
  CF_TRY_ASSIGN(const PersistentPlan plan, plan_persistent(arch, model, batch, choices));
  const PersistentLayout layout = persistent_layout(dims, plan, model.ranks > 1);
  const ViewCheck check(context, model, dims);
  CF_TRY(check.sequences(sequences));
  CF_TRY(check.rope(rope));
  std::vector<LayerPointers> pointers;
  // The first kind has dense weights alone: the head's, and every layer's of a model that is not packed.
  std::vector<LayerKind> kinds{{.shapes = product_shapes(dims, plan, {}), .packed = {}}};
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const std::int64_t number = options.first_model_layer + std::int64_t(l);
    CF_TRY(check.cache(number, layers[l], storages, entries, table));
    CF_TRY(check.layer(number, layers[l].weights));
    CF_TRY_ASSIGN(const LayerKind kind, layer_kind(dims, plan, names_of(model.family), layers[l].weights));
    CF_TRY_ASSIGN(const std::int64_t of_kinds, number_of_kind(kinds, kind));
    pointers.push_back(
        {weight_pointers(layers[l].weights, model.adds_residual), cache_pointers(layers[l].cache), of_kinds});
  }
  const std::optional<PersistentEnds>& ends = options.ends;
  const int vocab = ends ? int(ends->embed_in.shape[0]) : 0;
  if (ends) {
    CF_TRY(check.ends(*ends));
    pointers.push_back(head_pointers(*ends));
  }

  auto state = std::make_unique<State>(context, model,
                                       PersistentArguments{
                                           .plan = plan,
                                           .layout = layout,
                                           .dims = dims,
                                           .capacity = int(capacity),
                                           .table_rows = int(rope.cos.shape[0]),
                                           .deals = LayerDeals(dims.rows(model.packed), plan.grid, vocab),
                                           .attention_scale = float(model.attention_scale),
                                           .eps = float(model.layer_norm_eps),
                                           .rms_norm = model.norm == NormKind::rmsnorm,
                                           .activation = model.hidden_act,
                                           .phases = phase_table(phase_traits(model, plan)),
                                           .two_act_buffers = is_tiled(plan.products),
                                           .layers = int(pointers.size()),
                                           .head_layer = ends ? int(layers.size()) : -1,
                                           .positions = sequences.positions.data,
                                           .kv_len = sequences.kv_len.data,
                                           .cos = rope.cos.data,
                                           .sin = rope.sin.data,
                                           .exchange = {.token_epochs = int(pointers.size()) + 1},
                                           .wait_limit_ns = kWaitLimitMs * 1'000'000ull,
                                           .digit_offsets = digit_offsets(dims, plan, layout),
                                           .pages = pages_of(table, entries),
                                       });
  std::copy(kinds.begin(), kinds.end(), state->arguments.kinds.begin());
  state->first_model_layer = options.first_model_layer;
  state->kernel = peers ? rank_kernels(plan, model.dtype) : kernels(plan, model.dtype);
  state->peers = peers;
  CF_TRY(prepare_persistent(state->kernel, plan, context.device()));

  PersistentArguments& a = state->arguments;
  CF_TRY_ASSIGN(DeviceMemory scratch, DeviceMemory::create(context, allocate_scratch(nullptr, a, peers != nullptr),
                                                           "the persistent kernel's scratch memory"));
  state->scratch = std::move(scratch);
  allocate_scratch(state->scratch.data(), a, peers != nullptr);
  CF_TRY(from_cuda(cudaMemsetAsync(state->scratch.data(), 0, state->scratch.bytes(), context.stream()),
                   "cudaMemsetAsync"));
  if (a.rms_norm)
    for (LayerPointers& p : pointers)
      for (const char*& beta : p.weights.beta) beta = reinterpret_cast<const char*>(a.no_beta);
  const std::size_t table_bytes = pointers.size() * sizeof(LayerPointers);
  CF_TRY_ASSIGN(state->table, DeviceMemory::create(context, table_bytes, "the persistent kernel's table of pointers"));
  CF_TRY(copy_to_device(context, state->table.data(), pointers.data(), table_bytes));
  a.layer_pointers = reinterpret_cast<const LayerPointers*>(state->table.data());
  state->pointers = std::move(pointers);
  void* shared = nullptr;
  CF_TRY(from_cuda(cudaHostAlloc(&shared, sizeof(State::Shared), cudaHostAllocMapped), "cudaHostAlloc"));
  state->shared.reset(new (shared) State::Shared());
  a.report = &state->shared->report;  // one address for host and device
  if (peers) {
    a.ranks = rank_exchange(*peers, &a.exchange.grid_state->launches);
    a.exchange.grid_state = &a.ranks.state(peers->rank)->grid;
    a.report = peers->area_reports + peers->rank;
    a.wait_limit_ns = peers->patience_ns / 2;  // which is half of what a block waits for another rank
  }
  if (ends) {
    TokenArguments& t = a.token;
    t.vocab = vocab;
    t.embed_in = ends->embed_in.data;
    t.ids = ends->ids.data;
    t.positions = ends->positions.data;
    t.kv_len = ends->kv_len.data;
    t.chosen = ends->chosen.data;
    t.made = state->shared->made;
  }
  return PersistentKernel(std::move(state));
}

std::int64_t PersistentKernel::rank_area_bytes(std::int64_t ranks) { return RankExchange::bytes(ranks); }
const PersistentPlan& PersistentKernel::plan() const { return state_->arguments.plan; }

Status PersistentKernel::State::check_step(std::int64_t first, std::int64_t last, const ConstAnyView<2>& input,
                                           const AnyView<2>& output) const {
  if (first < 0 || first >= last || last > layers())
    return bad("layers [first, last) must be a range within [0, " + std::to_string(layers()) + "), got [" +
               std::to_string(first) + ", " + std::to_string(last) + ")");
  const std::array shape{std::int64_t(arguments.dims.batch), std::int64_t(arguments.dims.hidden)};
  TensorCheck check(kPersistentName);
  // What a launch of ranks has left for the next one has no epoch there.
  check({Role::input, "input", peers == nullptr}, input, shape);
  check({Role::output, "output"}, output, shape);
  CF_TRY(check.status());
  return check_weight_dtype(kPersistentName, output.dtype, model.dtype);
}

PersistentArguments PersistentKernel::State::arguments_for(std::int64_t first, std::int64_t last,
                                                           const ConstAnyView<2>& input,
                                                           const AnyView<2>& output) const {
  PersistentArguments a = arguments;
  a.first_layer = int(first);
  a.end_layer = int(last);
  a.input = input.data;
  a.output = output.data;
  a.first_pointers = pointers[std::size_t(first)];
  return a;
}

Status PersistentKernel::State::launch(const PersistentArguments& a, bool cooperative, CUstream_st* stream) {
  launched_wait_limit_ns = a.wait_limit_ns;
  // Cooperative launches of ranks on one GPU might not run at once.
  return launch_persistent(kernel, a, cooperative && !(peers && peers->share_device), stream);
}

Status PersistentKernel::enqueue(CUstream_st* stream, std::int64_t first, std::int64_t last,
                                 const ConstAnyView<2>& input, const AnyView<2>& output) {
  State& s = *state_;
  CF_TRY(s.check_step(first, last, input, output));
  CF_TRY(take_report());
  return s.launch(s.arguments_for(first, last, input, output), true, stream);
}

Status PersistentKernel::State::check_tokens(const AnyView<2>& logits) const {
  if (arguments.head_layer < 0) return bad("expected a kernel of a whole model for whole tokens, got layers alone");
  TensorCheck check(kPersistentName);
  check({Role::output, "logits"}, logits,
        std::array{std::int64_t(arguments.dims.batch), std::int64_t(arguments.token.vocab)});
  CF_TRY(check.status());
  return check_weight_dtype(kPersistentName, logits.dtype, model.dtype);
}

PersistentArguments PersistentKernel::State::arguments_for_tokens(std::int64_t count, const AnyView<2>& logits) const {
  PersistentArguments a = arguments;
  a.first_layer = 0;
  a.end_layer = a.layers;
  a.first_pointers = pointers[0];
  a.token.count = int(count);
  a.token.logits = logits.data;
  return a;
}

Result<PersistentKernel::State::SequenceEnds> PersistentKernel::State::ends_for_tokens(
    std::int64_t count, std::span<const PersistentEnd> given) const {
  if (!given.empty() && std::int64_t(given.size()) != arguments.dims.batch)
    return bad("the sequences' ends must be none or " + std::to_string(arguments.dims.batch) + ", got " +
               std::to_string(given.size()));
  SequenceEnds ends{};
  for (SequenceEnd& e : ends) {
    e.tokens = int(count) + 1;
    e.stop_ids.fill(kNoStopId);
  }
  for (std::size_t s = 0; s < given.size(); ++s) {
    const auto& [tokens, stop_ids] = given[s];
    if (stop_ids.size() > most_stop_ids())
      return bad("a sequence's stop ids must be at most " + std::to_string(most_stop_ids()) + ", got " +
                 std::to_string(stop_ids.size()));
    ends[s].tokens = int(std::clamp<std::int64_t>(tokens, 0, count + 1));
    std::copy(stop_ids.begin(), stop_ids.end(), ends[s].stop_ids.begin());
  }
  return ends;
}

Status PersistentKernel::enqueue_token(CUstream_st* stream, const AnyView<2>& logits) {
  State& s = *state_;
  CF_TRY(s.check_tokens(logits));
  CF_TRY(take_report());
  return s.launch(s.arguments_for_tokens(1, logits), true, stream);
}

Result<unsigned> PersistentKernel::enqueue_tokens(CUstream_st* stream, std::int64_t count, const AnyView<2>& logits,
                                                  std::span<const PersistentEnd> sequence_ends) {
  State& s = *state_;
  CF_TRY(s.check_tokens(logits));
  if (count < 1 || count > most_tokens())
    return bad("tokens of a launch must be 1 to " + std::to_string(most_tokens()) + ", got " + std::to_string(count));
  CF_TRY_ASSIGN(const auto ends, s.ends_for_tokens(count, sequence_ends));
  CF_TRY(take_report());
  PersistentArguments a = s.arguments_for_tokens(count, logits);
  a.sequence_ends = ends;
  a.token.chooses = true;
  a.token.first_serial = s.next_serial;
  s.next_serial += unsigned(count);
  volatile unsigned* const end = &s.shared->end_serials[s.token_launches++ % State::kLaunches];
  *end = s.next_serial;
  a.token.end_serial = const_cast<const unsigned*>(end);
  CF_TRY(s.launch(a, true, stream));
  return a.token.first_serial;
}

std::int64_t PersistentKernel::most_tokens() { return kMadeTokens / 4; }
std::size_t PersistentKernel::most_stop_ids() { return kMaxStopIds; }

std::optional<std::int32_t> PersistentKernel::made(unsigned number, std::int64_t sequence) const {
  const volatile std::uint64_t* const words = state_->shared->made;
  const std::uint64_t word = words[number % kMadeTokens * kMaxPersistentBatch + unsigned(sequence)];
  if (unsigned(word >> 32) != number) return std::nullopt;
  return std::int32_t(std::uint32_t(word));
}

void PersistentKernel::end_before(unsigned number) {
  for (volatile unsigned& end : state_->shared->end_serials) end = number;
}

Status PersistentKernel::enqueue_split(CUstream_st* stream, std::int64_t layer, const ConstAnyView<2>& input,
                                       const AnyView<2>& output) {
  State& s = *state_;
  if (s.peers) return refuse("whole layers on several GPUs, got halves");
  CF_TRY(s.check_step(layer, layer + 1, input, output));
  CF_TRY(take_report());
  PersistentArguments a = s.arguments_for(layer, layer + 1, input, output);
  for (const bool second : {false, true}) {
    a.phases = phase_table(phase_traits(s.model, a.plan), second ? LayerPart::second_half : LayerPart::first_half);
    a.continues = second;
    a.two_act_buffers = is_tiled(a.plan.products) && has_two_act_buffers(a.phases);
    CF_TRY(s.launch(a, false, stream));
  }
  return {};
}

Status PersistentKernel::take_report() {
  State& s = *state_;
  int rank = -1;
  unsigned report = 0;
  if (s.peers) {
    // It stays: the ranks may have launched different numbers of steps. Of several reports the first in the order of the
    // layers counts.
    for (int of = 0; of < s.peers->layout.ranks; ++of)
      if (const unsigned other = static_cast<const volatile std::uint32_t*>(s.peers->area_reports)[of];
          other != 0 && (report == 0 || code_of(other) < code_of(report)))
        rank = of, report = other;
  } else {
    volatile unsigned& own = s.shared->report;
    report = own;
    if (report != 0) own = 0;
  }
  if (report == 0) return {};
  const int code = code_of(report), layer = layer_of_code(code), late = late_rank_of(report);
  const Dependency missing = dependency_of_code(code);
  // A rank that the others have waited for may have launched nothing.
  const std::uint64_t limit_ms = (s.peers ? s.arguments.wait_limit_ns : s.launched_wait_limit_ns) / 1'000'000;
  return Status::error(
      Code::device_error,
      std::string(kPersistentName) + ": " + (rank < 0 ? "" : "rank " + std::to_string(rank) + ": ") +
          (layer == s.arguments.head_layer ? "" : "layer " + std::to_string(s.first_model_layer + layer) + ": ") +
          std::string(awaited_sites(s.model.family)[std::size_t(missing)].name) +
          (late < 0 ? "" : " of rank " + std::to_string(late)) + " was not complete within " +
          std::to_string(limit_ms + limit_ms * unsigned(missing) / 4) + " ms, expected all " +
          std::to_string(plan().grid) + " blocks" + (rank < 0 ? "" : " of every rank") + " to run at once");
}

Status PersistentKernel::set_probe(const Probe& probe) {
  PersistentArguments& a = state_->arguments;
  int withheld = 0;
  if (probe.withheld_layer >= 0) {
    const auto awaited = awaited_sites(state_->model.family);
    const auto site =
        std::find_if(awaited.begin(), awaited.end(), [&](const Site& s) { return s.name == probe.withheld_site; });
    if (site == awaited.end()) return bad("no block waits for site '" + std::string(probe.withheld_site) + "'");
    withheld = dependency_code(int(probe.withheld_layer), Dependency(site - awaited.begin()));
  }
  a.taps = {};
  if (const auto& t = probe.taps)
    a.taps = {.attn_in = t->attn_in.data,
              .qkv = t->qkv.data,
              .qkv_normed = t->qkv_normed.data,
              .q = t->q.data,
              .k = t->k.data,
              .v = t->v.data,
              .context = t->context.data,
              .attn_residual = t->attn_residual.data,
              .mlp_in = t->mlp_in.data,
              .mlp_act = t->mlp_act.data};
  a.delay_seed = probe.delay_seed;
  a.withheld = withheld;
  a.wait_limit_ns = std::uint64_t(probe.wait_limit_ms) * 1'000'000;
  return {};
}

}  // namespace cf::cuda
