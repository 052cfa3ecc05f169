#include "cuda/decode_stack.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/check.hpp"
#include "cuda/fused/call.hpp"
#include "cuda/fused/launch.hpp"
#include "cuda/stack.hpp"

namespace cf::cuda {
namespace {

/// Columns of hidden at most, of which a thread of the norms holds three times eight.
constexpr std::int64_t kMaxDecodeHidden = 3 * 8 * kProductThreads;
/// Stages of the ring: two more than may be in flight.
constexpr int kMinStages = 3, kMaxStages = 16, kMaxBarrierBytes = 2 * kMaxStages * 8;
constexpr int kTileKeys = 16, kBytesInFlight = 60 << 10, kMaxGatheredBytes = 8 << 10;

constexpr std::string_view kName = "decode_stack";

/// The sites that blocks wait for, by Dependency.
constexpr Site kAwaited[kDependencies] = {site::query_key_value, site::context, site::dense, site::dense_h_to_4h,
                                          site::dense_4h_to_h};

/// Puts a choice in the place of the plan's own.
Status choose(std::string_view name, const std::optional<int>& choice, int lowest, int highest, int& own) {
  if (!choice) return {};
  if (*choice < lowest || *choice > highest)
    return bad_argument(kName, std::string(name) + " must be " + std::to_string(lowest) + " to " +
                                   std::to_string(highest) + ", got " + std::to_string(*choice));
  own = *choice;
  return {};
}

Status refuse(std::string what) { return Status::error(Code::unimplemented, "decode_stack: cuda takes " + what); }

}  // namespace

Result<DecodeStackPlan> plan_decode_stack(const Arch& arch, const ModelConfig& m, std::int64_t batch,
                                          const DecodeChoices& choices) {
  if (Status s = m.validate(); !s) return s;
  if (m.dtype != DType::f16 && m.dtype != DType::bf16)
    return refuse("float16 or bfloat16, got " + std::string(to_string(m.dtype)));
  if (batch < 1 || batch > kMaxDecodeBatch)
    return refuse("1 to " + std::to_string(kMaxDecodeBatch) + " sequences, got " + std::to_string(batch));
  for (const auto& [name, size] : {std::pair<const char*, std::int64_t>{"hidden", m.hidden_size},
                                   {"head_dim", m.head_dim()},
                                   {"intermediate", m.intermediate_size}})
    if (size % 8) return refuse(std::string(name) + " a multiple of 8, got " + std::to_string(size));
  if (m.head_dim() > kMaxDecodeHeadDim)
    return refuse("head_dim up to " + std::to_string(kMaxDecodeHeadDim) + ", got " + std::to_string(m.head_dim()));
  if (m.hidden_size > kMaxDecodeHidden)
    return refuse("hidden up to " + std::to_string(kMaxDecodeHidden) + ", got " + std::to_string(m.hidden_size));

  const int hidden = int(m.hidden_size), intermediate = int(m.intermediate_size);
  const DecodeDims d = decode_dims(m, batch, 1, 1);
  DecodeStackPlan p{};
  p.grid = arch.sm_count;
  CF_TRY(choose("blocks", choices.blocks, 1, arch.sm_count, p.grid));
  // What chose the values below is in data/bench/ablation-pythia-2.8b.json: an H200 at kv_len 128 and at 2048. Of 0, 2,
  // 3, 4, 6 and 8 eighths none is faster. Splits that fill the grid cost little at 128 and save a seventh at 2048;
  // merged in clusters they are as fast as in device memory with as many blocks, but clusters leave SMs out.
  p.up_eighths = 3;
  CF_TRY(choose("up_eighths", choices.up_eighths, 0, 8, p.up_eighths));
  const int most_splits = std::min(32, kMaxGatheredBytes / (floats_a_part(d.head_dim) * 4));
  p.attention_splits = int(std::clamp<std::int64_t>(p.grid / (batch * m.num_attention_heads), 1, most_splits));
  CF_TRY(choose("attention_splits", choices.attention_splits, 1, most_splits, p.attention_splits));
  p.cluster_merge = choices.cluster_merge;
  if (p.cluster_merge) {
    if (p.attention_splits < 2 || p.attention_splits > arch.max_cluster_blocks)
      return bad_argument(kName, "cluster_merge takes 2 to " + std::to_string(arch.max_cluster_blocks) +
                                     " splits of a head's keys, got " + std::to_string(p.attention_splits));
    if (!choices.blocks) p.grid -= p.grid % p.attention_splits;
    if (p.grid == 0 || p.grid % p.attention_splits)
      return bad_argument(kName, "cluster_merge takes blocks in clusters of " + std::to_string(p.attention_splits) +
                                     ", got " + std::to_string(p.grid));
  }
  // As many slices as leave none with more columns than `most`; 0 where there is no such number.
  const auto slices = [](int columns, int most, int least, int limit) {
    int n = least;
    while (n <= limit && (columns > n * most || columns % (8 * n))) n *= 2;
    return n <= limit ? n : 0;
  };
  const LayerDeals deals(hidden, intermediate, p.grid);
  const auto rows = [](const Share& s) { return s.each + (s.rest > 0); };
  p.out_rows = rows(deals.out);
  const auto cut = [&](int most_columns, int limit) {
    p.hidden_slices = slices(hidden, most_columns, 1, limit);
    p.act_slices = p.hidden_slices ? slices(intermediate, most_columns, p.hidden_slices, limit) : 0;
    if (p.act_slices == 0) return false;
    p.hidden_columns = hidden / p.hidden_slices;
    p.act_columns = intermediate / p.act_slices;
    return true;
  };
  // Whether a ring of such stages fits, which hold some keys in any case.
  const auto fits = [&](int stage_bytes) {
    const int tile_bytes = kTileKeys * d.head_dim * 4;
    p.stage_bytes = std::max((stage_bytes + 127) / 128 * 128, tile_bytes);
    p.stage_keys = p.stage_bytes / tile_bytes * kTileKeys;
    p.stages = 0;
    p.stages = std::min((arch.smem_per_block_bytes - decode_layout(d, p).bytes - kMaxBarrierBytes) / p.stage_bytes,
                        kMaxStages);
    return p.stages >= kMinStages;
  };
  const auto narrow = [&](int columns) {
    if (!cut(columns, kProductWarps) || p.hidden_columns != columns || p.act_columns != columns) return false;
    p.narrow_columns = columns;
    p.shared_norms = false;
    const int most_rows = std::max(rows(deals.qkv), rows(deals.up)), out_sums = p.out_rows * p.act_slices;
    const bool own = p.hidden_slices == 1;  // but for the rows of down
    p.own_rows = own ? (std::max(most_rows, p.out_rows) + kProductWarps - 1) / kProductWarps + 1 : 0;
    p.sums = own && p.act_slices == 1 ? 0 : std::max(own ? 0 : most_rows * p.hidden_slices, out_sums);
    return fits(kStageSlices * columns * 2);
  };
  const auto wide = [&](int most_columns) {
    if (!cut(most_columns, 64)) return false;
    p.narrow_columns = 0;
    const int up = rows(deals.up), up_first = first_rows(p, up);
    p.own_rows = 0;
    p.sums = kProductWarps * std::max({rows(deals.qkv), up_first, up - first_rows(p, up - 1), p.out_rows});
    return fits(kStageSlices * std::max(p.hidden_columns, p.act_columns) * 2);
  };
  const auto found = [&] {
    if (batch == 1)
      for (int columns : kNarrowColumns)
        if (narrow(columns)) return true;
    for (bool shared_norms : {true, false})
      for (int most = kMaxSliceColumns; most >= 256; most /= 2)
        if (p.shared_norms = shared_norms; wide(most)) return true;
    return false;
  };
  // What gathers the parts of a head takes room too.
  while (!found() && !choices.attention_splits && !p.cluster_merge && p.attention_splits > 1) p.attention_splits /= 2;
  if (p.stages < kMinStages)
    return refuse("a hidden of which a ring of " + std::to_string(kMinStages) + " stages fits " +
                  std::to_string(arch.smem_per_block_bytes) + " B of shared memory, got " + std::to_string(hidden) +
                  " with " + std::to_string(batch) + " sequences");
  CF_TRY(choose("stages", choices.stages, kMinStages, p.stages, p.stages));
  // 60 KB in flight an SM: with less a block that lags cannot catch up while others wait for it, more adds to what the
  // wait takes. Of 20, 40, 60, 80, 100, 120 and 140 KB 60 is the fastest.
  p.stages_in_flight = std::clamp(kBytesInFlight / p.stage_bytes, 1, p.stages - 2);
  CF_TRY(choose("stages_in_flight", choices.stages_in_flight, 1, p.stages - 2, p.stages_in_flight));
  p.smem_bytes = decode_layout(d, p).bytes;
  return p;
}

std::string to_string(const DecodeStackPlan& p) {
  const auto n = [](int i) { return std::to_string(i); };
  return n(p.grid) + " blocks, rows in " + n(p.hidden_slices) + " and " + n(p.act_slices) + " slices, ring of " +
         n(p.stages) + " stages of " + n(p.stage_bytes) + " B, " + n(p.stages_in_flight) + " in flight, " +
         (p.narrow_columns ? "rows one by one" : "rows in tiles") + ", " + n(p.attention_splits) +
         " splits of a head's keys" + (p.cluster_merge ? ", a cluster each" : "") + ", " + n(p.up_eighths) +
         " eighths of the MLP's first product before attention, " + n(p.stage_keys) + " keys a stage, " +
         n(p.smem_bytes) + " B of shared memory";
}

struct DecodeStack::State {
  struct Unpin {
    void operator()(unsigned* p) const { (void)cudaFreeHost(p); }
  };
  State(const DecodeCall& c, const LayerTensors& t, DType d) : call(c), tensors(t), dtype(d) {}

  DecodeCall call_of(std::int64_t first, std::int64_t last, const ConstAnyView<2>& input,
                     const AnyView<2>& output) const {
    DecodeCall c = call;
    c.first = int(first);
    c.last = int(last);
    c.input = input.data;
    c.output = output.data;
    return c;
  }

  DecodeCall call;
  LayerTensors tensors;  // for their taps
  DType dtype;
  DeviceMemory scratch;
  std::unique_ptr<unsigned, Unpin> report;
};

DecodeStack::DecodeStack(std::unique_ptr<State> state) : state_(std::move(state)) {}
DecodeStack::DecodeStack(DecodeStack&&) noexcept = default;
DecodeStack& DecodeStack::operator=(DecodeStack&&) noexcept = default;
DecodeStack::~DecodeStack() = default;

Result<DecodeStack> DecodeStack::create(const Context& context, const Stack& stack, const DecodeChoices& choices) {
  const auto cache = [&](std::int64_t layer) {
    return static_cast<const std::byte*>(stack.tensors(layer).k_cache.data);
  };
  return create(context, stack.config(), stack.layers(),
                {stack.weights(0), stack.tensors(0), stack.layers() > 1 ? std::int64_t(cache(1) - cache(0)) : 0},
                choices);
}

Result<DecodeStack> DecodeStack::create(const Context& context, const ModelConfig& config, std::int64_t layers,
                                        const Layers& where, const DecodeChoices& choices) {
  const LayerTensors& t = where.tensors;
  const std::int64_t batch = t.kv_len.shape[0];
  if (t.positions.shape[0] != batch)
    return refuse("one new token a sequence, got " + std::to_string(t.positions.shape[0]) + " for " +
                  std::to_string(batch));
  if (Status s = check_weight_dtype(kName, t.output.dtype, config.dtype); !s) return s;
  Result<DecodeStackPlan> plan = plan_decode_stack(context.arch(), config, batch, choices);
  if (!plan) return plan.status();
  if (plan->cluster_merge && !choices.blocks) {
    const Result<int> blocks = resident_cluster_blocks(*plan, config.dtype);
    if (!blocks) return blocks.status();
    DecodeChoices resident = choices;
    resident.blocks = std::min(plan->grid, *blocks);
    plan = plan_decode_stack(context.arch(), config, batch, resident);
    if (!plan) return plan.status();
  }

  const LayerWeights& w = where.first;
  for (const LinearParams* l : {&w.query_key_value, &w.dense, &w.dense_h_to_4h, &w.dense_4h_to_h})
    if (!std::holds_alternative<DenseWeight>(l->weight)) return refuse("dense weights, got quantised ones");
  const DecodeDims dims = decode_dims(config, batch, t.k_cache.shape[2], t.cos.shape[0]);
  const auto bytes = [](const void* p) { return static_cast<const char*>(p); };
  const auto weight = [&](const LinearParams& l) { return bytes(std::get<DenseWeight>(l.weight).weight.data); };
  const auto bias = [&](const LinearParams& l) { return bytes(l.bias.data); };
  auto state = std::make_unique<State>(
      DecodeCall{
          .plan = *plan,
          .layout = decode_layout(dims, *plan),
          .dims = dims,
          .deals = LayerDeals(dims.hidden, dims.intermediate, plan->grid),
          .scale = float(config.attention_scale()),
          .eps = float(config.layer_norm_eps),
          .parallel_residual = config.use_parallel_residual,
          .gelu_tanh = config.hidden_act == Activation::gelu_tanh,
          .phases = config.use_parallel_residual ? kParallelPhases : kSequentialPhases,
          .alternates = plan->narrow_columns == 0,
          .continues = false,
          .first_layer = {.gamma = {bytes(w.input_layernorm.gamma.data), bytes(w.post_attention_layernorm.gamma.data)},
                          .beta = {bytes(w.input_layernorm.beta.data), bytes(w.post_attention_layernorm.beta.data)},
                          .weight = {weight(w.query_key_value), weight(w.dense_h_to_4h), weight(w.dense),
                                     weight(w.dense_4h_to_h)},
                          .bias = {bias(w.query_key_value), bias(w.dense_h_to_4h), bias(w.dense),
                                   bias(w.dense_4h_to_h)},
                          .k_cache = static_cast<char*>(t.k_cache.data),
                          .v_cache = static_cast<char*>(t.v_cache.data)},
          .layer_stride = where.stride_bytes,
          .layers = int(layers),
          .first = 0,
          .last = 0,
          .input = nullptr,
          .output = nullptr,
          .hidden = {},
          .attn_residual = nullptr,
          .qkv = nullptr,
          .context = nullptr,
          .act = nullptr,
          .context_done = nullptr,
          .act_done = nullptr,
          .parts = nullptr,
          .flags = nullptr,
          .report = nullptr,
          .positions = t.positions.data,
          .kv_len = t.kv_len.data,
          .cos = t.cos.data,
          .sin = t.sin.data,
          .wait_limit_ns = DecodeStack::kWaitLimitMs * 1'000'000ull,
          .taps = {},
          .delay_seed = 0,
          .withheld = 0},
      t, config.dtype);
  DecodeCall& c = state->call;

  const auto lay_out = [&](std::byte* block) {
    std::size_t at = 0;
    const auto place = [&](auto*& p, std::int64_t count) {
      p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(block + at);
      at += (std::size_t(count) * sizeof(*p) + 255) / 256 * 256;
    };
    for (Tagged*& hidden : c.hidden) place(hidden, batch * config.hidden_size);
    place(c.attn_residual, batch * config.hidden_size);
    place(c.qkv, batch * 3 * config.hidden_size);
    place(c.context, batch * config.hidden_size);
    place(c.act, batch * config.intermediate_size);
    place(c.context_done, batch * config.num_attention_heads);
    place(c.act_done, plan->grid);
    place(c.parts, batch * config.num_attention_heads * plan->attention_splits * floats_a_part(dims.head_dim));
    place(c.flags, 1);
    return at;
  };
  Result<DeviceMemory> scratch = DeviceMemory::create(context, lay_out(nullptr), "decode_stack's scratch");
  if (!scratch) return scratch.status();
  state->scratch = std::move(*scratch);
  lay_out(state->scratch.data());
  if (Status s = from_cuda(cudaMemsetAsync(state->scratch.data(), 0, state->scratch.bytes(), context.stream()),
                           "cudaMemsetAsync");
      !s)
    return s;
  void* report = nullptr;
  if (Status s = from_cuda(cudaHostAlloc(&report, sizeof(unsigned), cudaHostAllocMapped), "cudaHostAlloc"); !s)
    return s;
  state->report.reset(static_cast<unsigned*>(report));
  *state->report = 0;
  c.report = state->report.get();  // one address for both
  return DecodeStack(std::move(state));
}

Status DecodeStack::set_probe(const Probe& probe) {
  DecodeCall& c = state_->call;
  int withheld = 0;
  if (probe.withheld_layer >= 0) {
    const Site* const site = std::find_if(std::begin(kAwaited), std::end(kAwaited),
                                          [&](const Site& s) { return s.name == probe.withheld_site; });
    if (site == std::end(kAwaited))
      return bad_argument(kName, "no block waits for site '" + std::string(probe.withheld_site) + "'");
    withheld = int(probe.withheld_layer) * kDependencies + int(site - kAwaited) + 1;
  }
  const LayerTensors& t = state_->tensors;
  c.taps = {};
  if (probe.taps)
    c.taps = {t.attn_in.data, t.qkv.data,           t.q.data,      t.k.data,      t.v.data,
              t.context.data, t.attn_residual.data, t.mlp_in.data, t.mlp_act.data};
  c.delay_seed = probe.delay_seed;
  c.withheld = withheld;
  c.wait_limit_ns = std::uint64_t(probe.wait_limit_ms) * 1'000'000;
  return {};
}

const DecodeStackPlan& DecodeStack::plan() const { return state_->call.plan; }

/// What an earlier launch has left: ok, or what it was given up for.
Status DecodeStack::take_report() {
  volatile unsigned* const report = state_->report.get();
  const unsigned missed = *report;
  if (missed == 0) return {};
  *report = 0;
  return Status::error(Code::device_error,
                       std::string(kName) + ": layer " + std::to_string((missed - 1) / kDependencies) + ": " +
                           std::string(kAwaited[(missed - 1) % kDependencies].name) + " was not complete within " +
                           std::to_string(state_->call.wait_limit_ns / 1'000'000) + " ms, expected all " +
                           std::to_string(plan().grid) + " blocks to run at once");
}

Status DecodeStack::enqueue(CUstream_st* stream, std::int64_t first, std::int64_t last, const ConstAnyView<2>& input,
                            const AnyView<2>& output) {
  CF_TRY(take_report());
  return launch_decode_stack(state_->call_of(first, last, input, output), state_->dtype, true, stream);
}

Status DecodeStack::enqueue_split(CUstream_st* stream, std::int64_t layer, const ConstAnyView<2>& input,
                                  const AnyView<2>& output) {
  CF_TRY(take_report());
  DecodeCall call = state_->call_of(layer, layer + 1, input, output);
  for (const bool second : {false, true}) {
    call.phases = (call.parallel_residual ? kParallelHalves : kSequentialHalves)[second];
    call.continues = second;
    // The context comes while mlp.act is there, unless dense was in the launch before.
    call.alternates = call.plan.narrow_columns == 0 && !call.phases.has(Phase::dense);
    CF_TRY(launch_decode_stack(call, state_->dtype, false, stream));
  }
  return {};
}

}  // namespace cf::cuda
