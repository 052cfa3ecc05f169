#include "cuda/stack.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/gptq_tiles.hpp"
#include "cuda/advance.hpp"
#include "cuda/check.hpp"
#include "cuda/decode_layer.hpp"
#include "cuda/decode_stack.hpp"
#include "cuda/graph.hpp"
#include "cuda/memory.hpp"

namespace cf::cuda {
namespace {

constexpr std::string_view kName = "stack";

std::string layer_prefix(std::int64_t layer) { return "layer " + std::to_string(layer) + ": "; }

/// Hands out consecutive parts of a block, 256-byte aligned. Without a block it measures how large one must be.
class Arena {
 public:
  explicit Arena(std::byte* block) : block_(block) {}

  template <class V>
  void place(V& v, std::array<std::int64_t, V::rank> shape, DType dtype) {
    v.shape = shape;
    if constexpr (std::is_void_v<std::remove_const_t<typename V::element>>) v.dtype = dtype;
    v.data = block_ ? reinterpret_cast<typename V::element*>(block_ + bytes_) : nullptr;
    bytes_ += (std::size_t(v.size()) * size_bytes(dtype) + 255) / 256 * 256;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* block_;
  std::size_t bytes_ = 0;
};

/// A host's quantised matrix as the op would take it.
Status check_gptq(const std::string& name, std::int64_t out, std::int64_t in, const LinearParams& linear) {
  CF_TRY(ops::Linear::check_linear(name, out, in, linear));
  TensorCheck check(name);
  ops::Linear::linear_tensors(out, in, linear, check);
  return check.status();
}

}  // namespace

std::string_view to_string(Impl impl) {
  switch (impl) {
    case Impl::unfused: return "unfused";
    case Impl::graph: return "graph";
    case Impl::split: return "split";
    case Impl::fused: return "fused";
    case Impl::stack: return "stack";
  }
  return "?";
}

std::optional<Impl> impl_from_string(std::string_view name) {
  for (Impl impl : kImpls)
    if (to_string(impl) == name) return impl;
  return std::nullopt;
}

struct Stack::State {
  State(const Context& c, const ModelConfig& m, const Workload& l, DType a, std::int64_t count)
      : context(c), config(m), load(l), activation(a), layers(std::size_t(count)) {}
  ~State() { (void)cudaStreamSynchronize(context.stream()); }

  struct Layer {
    LayerWeights weights;
    AnyView<4> k_cache, v_cache;
    DeviceMemory quantised;  // the tiles
    bool loaded = false;
  };

  /// Gives every tensor its place in the block; without one, the bytes that it must have.
  std::size_t lay_out(std::byte* block);
  Status refuse(std::string what) const { return bad_argument(kName, std::move(what)); }
  Status check_layer(std::int64_t layer) const;
  /// Copies a host tensor over, whose shape and dtype must be the view's.
  template <int Rank>
  Status copy_in(const std::string& name, const AnyView<Rank>& to, const ConstAnyView<Rank>& from) const;
  template <int Rank>
  Status copy_in(const std::string& name, const AnyView<Rank>& to, const Tensor& from) const;
  /// Repacks a layer's quantised weights and brings them over, into memory of their own.
  Status load_quantised(std::int64_t layer, const LayerWeights& host);
  LayerTensors tensors(std::int64_t layer) const;
  /// Calls f(weights, tensors) for layers [first, last) in order and names the one that it fails for.
  template <class F>
  Status for_each_layer(std::int64_t first, std::int64_t last, F&& f) const;
  Result<CUgraphExec_st*> graph(std::int64_t first, std::int64_t last);
  /// The persistent kernel, in as many launches as the implementation has.
  Status enqueue_fused(Impl impl, std::int64_t first, std::int64_t last);

  Context context;
  ModelConfig config;
  Workload load;  // kv_len is the capacity
  DType activation;
  std::vector<Layer> layers;
  LayerTensors shared;                      // what is not a layer's own; hidden and output aside
  AnyView<2> hidden;                        // layer 0's input
  std::array<AnyView<2>, 2> outputs;        // layer i writes the one of i % 2
  View<std::int32_t, 1> positions, kv_len;  // writable, as tensors() does not show them
  View<float, 2> cos, sin;
  DeviceMemory memory;
  Stream capture_stream;  // the context's may be the default one, where none can
  std::map<std::pair<std::int64_t, std::int64_t>, GraphExec> graphs;
  Result<DecodeStack> fused = Status::error(Code::unimplemented, "");  // or why there is none
};

std::size_t Stack::State::lay_out(std::byte* block) {
  const std::int64_t tokens = load.tokens(), h = config.hidden_size, heads = config.num_attention_heads,
                     d = config.head_dim(), half = config.rotary_dim / 2,
                     table_rows = std::max(config.max_position_embeddings, load.kv_len);
  Arena arena(block);
  const auto place = [&](auto& view, auto shape) { arena.place(view, shape, activation); };
  for (Layer& layer : layers) {
    for_each_weight(config, layer.weights,
                    [&](std::string_view, auto& view, auto shape) { arena.place(view, shape, config.dtype); });
    place(layer.k_cache, extents(load.batch, heads, load.kv_len, d));
    place(layer.v_cache, extents(load.batch, heads, load.kv_len, d));
  }
  place(hidden, extents(tokens, h));
  for (AnyView<2>& output : outputs) place(output, extents(tokens, h));
  place(shared.attn_in, extents(tokens, h));
  place(shared.qkv, extents(tokens, heads, 3, d));
  for (AnyView<3>* v : {&shared.q, &shared.k, &shared.v, &shared.context}) place(*v, extents(tokens, heads, d));
  place(shared.attn_residual, extents(tokens, h));
  place(shared.mlp_in, extents(tokens, h));
  place(shared.mlp_act, extents(tokens, config.intermediate_size));
  arena.place(positions, extents(tokens), DType::i32);
  arena.place(kv_len, extents(load.batch), DType::i32);
  arena.place(cos, extents(table_rows, half), DType::f32);
  arena.place(sin, extents(table_rows, half), DType::f32);
  shared.positions = positions;
  shared.kv_len = kv_len;
  shared.cos = cos;
  shared.sin = sin;
  shared.max_kv_len = load.kv_len;
  return arena.bytes();
}

Status Stack::State::check_layer(std::int64_t layer) const {
  if (layer >= 0 && layer < std::int64_t(layers.size())) return {};
  return refuse("layer must be 0 to " + std::to_string(layers.size() - 1) + ", got " + std::to_string(layer));
}

template <int Rank>
Status Stack::State::copy_in(const std::string& name, const AnyView<Rank>& to, const ConstAnyView<Rank>& from) const {
  TensorCheck check(kName);
  check(to.dtype == DType::i32 ? Role::index : Role::input, name, from, to.shape);
  CF_TRY(check.status());
  if (from.dtype != to.dtype)
    return refuse("'" + name + "' has dtype " + std::string(to_string(from.dtype)) + ", expected " +
                  std::string(to_string(to.dtype)));
  return copy_to_device(context, to.data, from.data, std::size_t(to.bytes()));
}

template <int Rank>
Status Stack::State::copy_in(const std::string& name, const AnyView<Rank>& to, const Tensor& from) const {
  if (from.shape().size() != Rank)
    return refuse("'" + name + "' has shape " + cf::to_string(from.shape()) + ", expected rank " +
                  std::to_string(Rank));
  return copy_in<Rank>(name, to, from.view<Rank>());
}

Status Stack::State::load_quantised(std::int64_t layer, const LayerWeights& host) {
  Layer& to = layers[std::size_t(layer)];
  std::vector<GptqTiles*> places;  // null where the stack holds a dense weight
  for_each_linear(config, to.weights, [&](std::string_view, LinearParams& l, auto...) {
    places.push_back(std::get_if<GptqTiles>(&l.weight));
  });
  std::vector<OwnedGptqTiles> packed(places.size());
  Status status;
  std::size_t i = 0;
  for_each_linear(
      config, host, [&](std::string_view name, const LinearParams& l, std::int64_t out, std::int64_t in, bool) {
        const std::string weight = "'" + layer_prefix(layer) + std::string(name) + ".weight' ";
        const auto* gptq = std::get_if<GptqWeight>(&l.weight);
        const bool expected = places[i++];
        if (!status) return;
        if (expected != bool(gptq)) {
          status = refuse(weight +
                          (expected ? "is dense, expected a GPTQ weight" : "is quantised, expected a dense weight"));
        } else if (gptq) {
          status = check_gptq(std::string(kName) + ": " + layer_prefix(layer) + std::string(name), out, in, l);
          if (!status) return;
          const bool is_qkv = name == site::query_key_value.name;
          Result<OwnedGptqTiles> tiles =
              repack_gptq(*gptq, is_qkv ? RopePairs{config.head_dim(), config.rotary_dim} : RopePairs{});
          if (tiles)
            packed[i - 1] = std::move(*tiles);
          else
            status = refuse(weight + tiles.status().message());
        }
      });
  CF_TRY(status);

  const auto lay_out = [&](Arena& arena) {
    for (std::size_t l = 0; l < places.size(); ++l) {
      if (!places[l]) continue;
      const GptqTiles& tiles = packed[l].tiles;
      GptqTiles& device = *places[l] = tiles;
      arena.place(device.codes, tiles.codes.shape, DType::i32);
      arena.place(device.scales, tiles.scales.shape, DType::i32);
      if (tiles.order) arena.place(device.order, tiles.order.shape, DType::i32);
    }
    return arena.bytes();
  };
  Arena measure(nullptr);
  const std::size_t bytes = lay_out(measure);
  if (bytes == 0) return {};
  Result<DeviceMemory> block = DeviceMemory::create(context, bytes, layer_prefix(layer) + "quantised weights");
  if (!block) return block.status();
  Arena arena(block->data());
  lay_out(arena);
  for (std::size_t l = 0; l < places.size(); ++l) {
    if (!places[l]) continue;
    const auto bring = [&](const auto& device, const auto& from) {
      return copy_to_device(context, const_cast<std::int32_t*>(device.data), from.data, std::size_t(from.bytes()));
    };
    CF_TRY(bring(places[l]->codes, packed[l].tiles.codes));
    CF_TRY(bring(places[l]->scales, packed[l].tiles.scales));
    if (packed[l].tiles.order) CF_TRY(bring(places[l]->order, packed[l].tiles.order));
  }
  to.quantised = std::move(*block);
  return {};
}

LayerTensors Stack::State::tensors(std::int64_t layer) const {
  LayerTensors t = shared;
  t.hidden = layer == 0 ? hidden : outputs[std::size_t(layer - 1) % 2];
  t.output = outputs[std::size_t(layer) % 2];
  t.k_cache = layers[std::size_t(layer)].k_cache;
  t.v_cache = layers[std::size_t(layer)].v_cache;
  return t;
}

template <class F>
Status Stack::State::for_each_layer(std::int64_t first, std::int64_t last, F&& f) const {
  for (std::int64_t layer = first; layer < last; ++layer)
    if (Status s = f(layers[std::size_t(layer)].weights, tensors(layer)); !s)
      return Status::error(s.code(), layer_prefix(layer) + s.message());
  return {};
}

Result<CUgraphExec_st*> Stack::State::graph(std::int64_t first, std::int64_t last) {
  auto& exec = graphs[{first, last}];
  if (exec) return exec.get();
  if (!capture_stream) {
    Result<Stream> stream = make_stream();
    if (!stream) return stream.status();
    capture_stream = std::move(*stream);
  }
  Result<Context> capturing = Context::create(context.device(), capture_stream.get());
  if (!capturing) return capturing.status();
  capturing->set_plan_arch(context.arch());
  Result<GraphExec> captured = capture(capture_stream.get(), [&] {
    DataflowCapture graph(*capturing);
    return for_each_layer(first, last, [&](const LayerWeights& weights, const LayerTensors& tensors) {
      return capture_layer(config, weights, tensors, graph);
    });
  });
  if (!captured) return captured.status();
  // The graph's own memory is taken now rather than at the first launch.
  if (Status s = from_cuda(cudaGraphUpload(captured->get(), context.stream()), "cudaGraphUpload"); !s) return s;
  exec = std::move(*captured);
  return exec.get();
}

Status Stack::State::enqueue_fused(Impl impl, std::int64_t first, std::int64_t last) {
  if (!fused) return fused.status();
  const std::int64_t layers_at_once = impl == Impl::stack ? last - first : 1;
  for (std::int64_t layer = first; layer < last; layer += layers_at_once) {
    const std::int64_t end = layer + layers_at_once;
    const ConstAnyView<2> input = layer == first ? tensors(layer).hidden : ConstAnyView<2>();
    const AnyView<2> output = tensors(end - 1).output;
    CF_TRY(impl == Impl::split ? fused->enqueue_split(context.stream(), layer, input, output)
                               : fused->enqueue(context.stream(), layer, end, input, output));
  }
  return {};
}

Stack::Stack(std::unique_ptr<State> state) : state_(std::move(state)) {}
Stack::Stack(Stack&&) noexcept = default;
Stack& Stack::operator=(Stack&&) noexcept = default;
Stack::~Stack() = default;

Result<Stack> Stack::create(const Context& context, const ModelConfig& config, std::int64_t layers,
                            const Workload& load, DType activation, const LayerWeights& like) {
  if (Status s = config.validate(); !s) return s;
  const std::int64_t capacity = load.cache_capacity();
  if (layers < 1 || layers > config.num_hidden_layers)
    return bad_argument(
        kName, "layers must be 1 to " + std::to_string(config.num_hidden_layers) + ", got " + std::to_string(layers));
  if (load.batch < 1) return bad_argument(kName, "batch must be at least 1, got " + std::to_string(load.batch));
  if (load.q_len < 1 || load.q_len > capacity)
    return bad_argument(
        kName, "q_len must be 1 to capacity " + std::to_string(capacity) + ", got " + std::to_string(load.q_len));
  if (Status s = with_activation(kName, activation, [](auto) { return Status(); }); !s) return s;
  if (Status s = with_activation(kName, config.dtype, [](auto) { return Status(); }); !s) return s;

  auto state = std::make_unique<State>(context, config, Workload{load.batch, load.q_len, capacity, capacity},
                                       activation, layers);
  for (State::Layer& layer : state->layers) {
    std::vector<bool> quantised;
    for_each_linear(config, like, [&](std::string_view, const LinearParams& l, auto...) {
      quantised.push_back(std::holds_alternative<GptqWeight>(l.weight));
    });
    std::size_t i = 0;
    for_each_linear(config, layer.weights, [&](std::string_view, LinearParams& l, auto...) {
      if (quantised[i++]) l.weight = GptqTiles{};
    });
  }
  Result<DeviceMemory> memory =
      DeviceMemory::create(context, state->lay_out(nullptr), "stack of " + std::to_string(layers) + " layers");
  if (!memory) return memory.status();
  state->memory = std::move(*memory);
  state->lay_out(state->memory.data());

  Tensor cos(DType::f32, {state->cos.shape[0], state->cos.shape[1]}), sin = cos.clone();
  ops::rope_table({cos.as<float>(), state->cos.shape}, {sin.as<float>(), state->sin.shape}, config.rope_theta);
  if (Status s = state->copy_in<2>("cos", state->cos, cos); !s) return s;
  if (Status s = state->copy_in<2>("sin", state->sin, sin); !s) return s;
  Stack stack(std::move(state));
  stack.state_->fused = DecodeStack::create(context, stack);
  if (Status s = stack.set_kv_len(std::vector<std::int32_t>(std::size_t(load.batch), std::int32_t(load.q_len))); !s)
    return s;
  return stack;
}

Status Stack::load_layer(std::int64_t layer, const LayerWeights& host) {
  State& s = *state_;
  CF_TRY(s.check_layer(layer));
  for (const LinearParams* l : {&host.query_key_value, &host.dense})
    if (!s.config.attention_bias && l->bias)
      return s.refuse(layer_prefix(layer) + "attention has a bias, expected none of a model without attention_bias");

  // Both sides are one list.
  State::Layer& to = s.layers[std::size_t(layer)];
  to.loaded = false;
  CF_TRY(s.load_quantised(layer, host));
  std::vector<const void*> places;
  for_each_weight(s.config, to.weights,
                  [&](std::string_view, const auto& view, const auto&) { places.push_back(view.data); });
  std::size_t i = 0;
  Status status;
  for_each_weight(s.config, host, [&]<class V>(std::string_view name, const V& view, const auto& shape) {
    if constexpr (!std::is_void_v<std::remove_const_t<typename V::element>>) return;  // in the tiles already
    // The stack's own memory, const to its users alone.
    const AnyView<V::rank> place(const_cast<void*>(places[i++]), shape, s.config.dtype);
    if (status) status = s.copy_in<V::rank>(layer_prefix(layer) + std::string(name), place, view);
  });
  to.loaded = bool(status);
  return status;
}

Status Stack::set_hidden(const Tensor& hidden) { return state_->copy_in<2>("hidden", state_->hidden, hidden); }

Status Stack::set_cache(std::int64_t layer, const Tensor& k_cache, const Tensor& v_cache) {
  State& s = *state_;
  CF_TRY(s.check_layer(layer));
  CF_TRY(s.copy_in<4>("k_cache", s.layers[std::size_t(layer)].k_cache, k_cache));
  return s.copy_in<4>("v_cache", s.layers[std::size_t(layer)].v_cache, v_cache);
}

Status Stack::set_kv_len(std::span<const std::int32_t> kv_len) {
  State& s = *state_;
  const std::int64_t q_len = s.load.q_len;
  if (std::int64_t(kv_len.size()) != s.load.batch)
    return s.refuse("kv_len has " + std::to_string(kv_len.size()) + " elements, expected one for each of " +
                    std::to_string(s.load.batch) + " sequences");
  Tensor lengths(DType::i32, {s.load.batch}), positions(DType::i32, {s.load.tokens()});
  for (std::int64_t b = 0; b < s.load.batch; ++b) {
    const std::int32_t n = kv_len[std::size_t(b)];
    if (n < q_len || n > s.load.kv_len)
      return s.refuse("kv_len[" + std::to_string(b) + "] must be q_len " + std::to_string(q_len) + " to capacity " +
                      std::to_string(s.load.kv_len) + ", got " + std::to_string(n));
    lengths.as<std::int32_t>()[b] = n;
    for (std::int64_t i = 0; i < q_len; ++i) positions.as<std::int32_t>()[b * q_len + i] = std::int32_t(n - q_len + i);
  }
  CF_TRY(s.copy_in<1>("kv_len", s.kv_len, lengths));
  return s.copy_in<1>("positions", s.positions, positions);
}

Status Stack::advance() {
  return enqueue_advance(state_->positions, state_->kv_len, std::int32_t(state_->load.q_len), state_->context);
}

Status Stack::step(Impl impl) { return step(impl, 0, layers()); }

Status Stack::step(Impl impl, std::int64_t first, std::int64_t last) {
  State& s = *state_;
  if (first < 0 || first >= last || last > layers())
    return s.refuse("layers [first, last) must be a range within [0, " + std::to_string(layers()) + "), got [" +
                    std::to_string(first) + ", " + std::to_string(last) + ")");
  for (std::int64_t layer = first; layer < last; ++layer)
    if (!s.layers[std::size_t(layer)].loaded)
      return s.refuse("layer " + std::to_string(layer) + " has no weights, expected load_layer() first");
  if (impl == Impl::split || impl == Impl::fused || impl == Impl::stack) return s.enqueue_fused(impl, first, last);
  if (impl == Impl::unfused)
    return s.for_each_layer(first, last, [&](const LayerWeights& weights, const LayerTensors& tensors) {
      return enqueue_layer(s.config, weights, tensors, s.context);
    });
  const Result<CUgraphExec_st*> graph = s.graph(first, last);
  if (!graph) return graph.status();
  return from_cuda(cudaGraphLaunch(*graph, s.context.stream()), "cudaGraphLaunch");
}

const ModelConfig& Stack::config() const { return state_->config; }
std::int64_t Stack::layers() const { return std::int64_t(state_->layers.size()); }
LayerTensors Stack::tensors(std::int64_t layer) const { return state_->tensors(layer); }
LayerWeights Stack::weights(std::int64_t layer) const { return state_->layers[std::size_t(layer)].weights; }
std::size_t Stack::device_bytes() const {
  std::size_t bytes = state_->memory.bytes();
  for (const State::Layer& layer : state_->layers) bytes += layer.quantised.bytes();
  return bytes;
}

}  // namespace cf::cuda
