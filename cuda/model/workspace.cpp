#include "cuda/model/workspace.hpp"

#include <cuda_runtime_api.h>

#include <array>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/model/streams.hpp"
#include "core/ops/rope.hpp"
#include "cuda/model/arena.hpp"
#include "cuda/model/linear_scratch.hpp"
#include "cuda/model/stream_rows.hpp"
#include "cuda/runtime/check.hpp"

namespace cf::cuda {
namespace {

constexpr std::string_view kName = "workspace";

/// What a workspace holds.
struct StepTensors {
  LayerTensors all;                   // the outputs of all tokens
  AnyView<2> hidden;                  // what the first layer reads
  std::array<AnyView<2>, 2> outputs;  // layer i writes outputs[i % 2]
  View<float, 2> cos, sin;
  View<std::int32_t, 1> scratch;
  // Of streams: 0, 1, 2 ..., and the angles for a distance of one.
  View<std::int32_t, 1> rows;  // (2 * tokens)
  View<double, 1> frequencies;

  void allocate(Arena& arena, const ModelShape& shape, DType activation, std::int64_t tokens, std::int64_t table_rows,
                std::size_t scratch_bytes, const KeyWindow& stream) {
    for_each_activation(
        shape, {.batch = tokens, .q_len = 1, .sinks = stream.sinks > 0},
        [&](const TensorSpec& t, auto& view, auto size) {
          if (t.role == Role::output) arena.allocate(view, size, activation);
        },
        all);
    outputs[0] = all.output;
    for (AnyView<2>* v : {&hidden, &outputs[1]}) arena.allocate(*v, all.output.shape, activation);
    if (shape.rotary_dim > 0)
      for (View<float, 2>* v : {&cos, &sin}) arena.allocate(*v, extents(table_rows, shape.rotary_dim / 2), DType::f32);
    arena.allocate(scratch, extents(std::int64_t(scratch_bytes / 4)), DType::i32);
    if (!stream) return;
    arena.allocate(rows, extents(table_rows), DType::i32);
    arena.allocate(frequencies, extents(shape.rotary_dim / 2), DType::f64);
  }
};

}  // namespace

struct Workspace::State : StepTensors {
  State(const Context& c, const ModelSpec& m, DType d, std::int64_t t, std::int64_t rows, std::size_t scratch,
        const KeyWindow& w)
      : context(c), shape(m.shape), activation(d), tokens(t), table_rows(rows), scratch_bytes(scratch), stream(w) {}
  ~State() { (void)cudaDeviceSynchronize(); }

  std::size_t lay_out(std::byte* block) {
    Arena arena(block);
    allocate(arena, shape, activation, tokens, table_rows, scratch_bytes, stream);
    return arena.bytes();
  }

  Context context;
  ModelShape shape;
  DType activation;
  std::int64_t tokens, table_rows;
  std::size_t scratch_bytes;
  KeyWindow stream;
  DeviceMemory memory;
  std::uint64_t version = next_version();
};

Workspace::Workspace(std::unique_ptr<State> state) : state_(std::move(state)) {}
Workspace::Workspace(Workspace&&) noexcept = default;
Workspace& Workspace::operator=(Workspace&&) noexcept = default;
Workspace::~Workspace() = default;

Result<Workspace> Workspace::create(const Context& context, const ModelSpec& model, DType activation,
                                    std::int64_t tokens, std::int64_t table_rows, bool quantised,
                                    const KeyWindow& stream) {
  CF_TRY(check_model(model));
  for (const auto& [name, size] : {std::pair{"tokens", tokens}, {"table_rows", table_rows}})
    if (size < 1) return bad_argument(kName, std::string(name) + " must be at least 1, got " + std::to_string(size));
  CF_TRY(with_activation(kName, activation, [](auto) { return Status(); }));

  auto state = std::make_unique<State>(
      context, model, activation, tokens, stream ? 2 * tokens : table_rows,
      linear_scratch_bytes(model, activation, tokens, quantised, context.arch().tuning->is_invariant()), stream);
  CF_TRY_ASSIGN(DeviceMemory memory, DeviceMemory::create(context, state->lay_out(nullptr),
                                                          "workspace of " + std::to_string(tokens) + " tokens"));
  state->memory = std::move(memory);
  state->lay_out(state->memory.data());

  if (model.shape.rotary_dim == 0) return Workspace(std::move(state));
  if (stream) {
    std::vector<std::int32_t> rows(std::size_t(state->rows.size()));
    std::iota(rows.begin(), rows.end(), 0);
    const std::vector<double> frequencies = rope_frequencies(model);
    CF_TRY(copy_to_device(context, state->rows.data, rows.data(), rows.size() * sizeof(std::int32_t)));
    CF_TRY(copy_to_device(context, state->frequencies.data, frequencies.data(), frequencies.size() * sizeof(double)));
    return Workspace(std::move(state));
  }
  Tensor cos(DType::f32, {table_rows, model.shape.rotary_dim / 2}), sin = cos.clone();
  ops::rope_table({cos.as<float>(), state->cos.shape}, {sin.as<float>(), state->sin.shape}, model.traits.rope_theta,
                  model.traits.rope_scaling);
  CF_TRY(copy_in<2>(context, kName, "cos", state->cos, cos));
  CF_TRY(copy_in<2>(context, kName, "sin", state->sin, sin));
  return Workspace(std::move(state));
}

double Workspace::bytes(const ModelSpec& model, DType activation, std::int64_t tokens, std::int64_t table_rows,
                        bool quantised, bool invariant, const KeyWindow& stream) {
  StepTensors tensors;
  Arena arena(nullptr);
  tensors.allocate(arena, model.shape, activation, tokens, stream ? 2 * tokens : table_rows,
                   linear_scratch_bytes(model, activation, tokens, quantised, invariant), stream);
  return arena.measured();
}

Status Workspace::set_hidden(const Tensor& hidden) {
  const State& s = *state_;
  const std::int64_t rows = hidden.shape().size() == 2 ? hidden.shape()[0] : s.tokens;
  if (rows < 1 || rows > s.tokens)
    return bad_argument(kName,
                        "'hidden' has " + std::to_string(rows) + " rows, expected 1 to " + std::to_string(s.tokens));
  return copy_in<2>(s.context, kName, "hidden", this->hidden(rows), hidden);
}

namespace {

/// The first `tokens` rows of a view.
template <int Rank>
AnyView<Rank> rows(AnyView<Rank> view, std::int64_t tokens) {
  view.shape[0] = tokens;
  return view;
}

}  // namespace

AnyView<2> Workspace::hidden(std::int64_t tokens) const { return rows(state_->hidden, tokens); }
std::int64_t Workspace::max_tokens() const { return state_->tokens; }
DType Workspace::activation() const { return state_->activation; }

LayerTensors Workspace::tensors(const KvCache& cache, std::int64_t first, std::int64_t layer,
                                std::int64_t q_len) const {
  const State& s = *state_;
  const std::int64_t tokens = cache.batch() * q_len;
  const LayerCache entries = cache.layer(layer);
  LayerTensors t = s.all;
  t.hidden = layer == first ? rows(s.hidden, tokens) : rows(s.outputs[std::size_t(layer - 1) % 2], tokens);
  t.output = s.outputs[std::size_t(layer) % 2];
  for_each_activation(
      s.shape, {.sinks = s.stream.sinks > 0},
      [&](const TensorSpec& spec, auto& view, auto) {
        if (spec.role == Role::output) view.shape[0] = tokens;
      },
      t);
  t.positions = cache.positions(q_len);
  if (s.stream) {
    t.stream = s.stream;
    t.positions = {s.rows.data, {tokens}};
    if (s.stream.sinks > 0) t.sink_positions = {s.rows.data + s.tokens, {tokens}};
  }
  t.page_table = cache.page_table();
  t.kv_len = cache.kv_len();
  t.cos = s.cos;
  t.sin = s.sin;
  t.k_cache = entries.k;
  t.v_cache = entries.v;
  t.max_kv_len = cache.most_entries();
  return t;
}

Status Workspace::add_rope_rows(View<const std::int32_t, 1> positions, LaunchList& launches) const {
  const State& s = *state_;
  if (!s.stream) return bad_argument(kName, "rope rows: expected a workspace of streams");
  return add_stream_rows({.cos = s.cos,
                          .sin = s.sin,
                          .frequencies = {s.frequencies.data, s.frequencies.shape},
                          .last_position = position_in_cache(s.stream, kMostStreamTokens)},
                         positions, launches);
}

Scratch Workspace::scratch() const {
  if (state_->scratch_bytes == 0) return {};
  return {reinterpret_cast<std::byte*>(state_->scratch.data), state_->scratch_bytes};
}
std::size_t Workspace::device_bytes() const { return state_->memory.bytes(); }
std::uint64_t Workspace::version() const { return state_->version; }

}  // namespace cf::cuda
