#pragma once
// Layers of a model on the device as the persistent kernel takes them: each tensor in an allocation of its own.
#include <algorithm>
#include <array>
#include <random>
#include <span>
#include <variant>
#include <vector>

#include "core/model/examples.hpp"
#include "cuda/model/resident_weights.hpp"
#include "cuda/persistent/persistent_kernel.hpp"
#include "cuda/runtime/memory.hpp"
#include "tests/cuda/device_tensors.hpp"

namespace cf::test {

/// A model's layers on the host, with what a step starts from.
struct HostLayers {
  ModelConfig config;
  Workload load;
  std::vector<OwnedLayerWeights> weights;
  std::vector<Tensor> k_caches, v_caches;
  Tensor hidden;

  /// Caches and hidden state differ from one `seed` to the next, the weights do not. `linears` is the Linears' format.
  HostLayers(const ModelConfig& m, const Workload& w, const std::string& seed = "", WeightFormat linears = {})
      : config(m), load(w) {
    config.max_position_embeddings = std::max(m.max_position_embeddings, w.cache_capacity());
    const Shape cache{w.batch, m.kv_heads(), w.cache_capacity(), m.head_dim()};
    for (std::int64_t l = 0; l < m.num_hidden_layers; ++l) {
      weights.push_back(procedural_layer(m, m.dtype, l, 7, linears));
      k_caches.push_back(activations(m.dtype, cache, seed + "k" + std::to_string(l)));
      v_caches.push_back(activations(m.dtype, cache, seed + "v" + std::to_string(l)));
    }
    hidden = activations(m.dtype, {w.tokens(), m.hidden_size}, seed + "hidden");
  }

  /// The Linears of a layer.
  static constexpr std::array kLinears{&LayerWeights::query_key_value, &LayerWeights::dense,
                                       &LayerWeights::dense_h_to_4h, &LayerWeights::dense_4h_to_h};

  /// Gives one Linear of a layer another format; WeightFormat{} is dense.
  void set_format(std::size_t layer, LinearParams LayerWeights::*linear, WeightFormat format) {
    others_.push_back(procedural_layer(config, config.dtype, std::int64_t(layer), 7, format));
    weights[layer].weights.*linear = others_.back().weights.*linear;
  }
  /// Gives each layer's four Linears four different formats, one of them dense. From one layer to the next a Linear's
  /// format changes; after four layers the formats repeat.
  void mix() {
    constexpr WeightFormat formats[]{{}, {4, 128}, {8, 128}, {4, 32}};
    for (std::size_t l = 0; l < weights.size(); ++l)
      for (std::size_t i = 0; i < kLinears.size(); ++i) set_format(l, kLinears[i], formats[(l + i) % 4]);
  }
  /// Deals the inputs of every GPTQ matrix to the groups at random, as act-order does.
  void shuffle_groups() {
    std::mt19937 random(11);
    for (OwnedLayerWeights& layer : weights)
      for (LinearParams LayerWeights::*linear : kLinears)
        if (auto* gptq = std::get_if<GptqWeight>(&(layer.weights.*linear).weight)) {
          auto* const words = const_cast<std::int32_t*>(gptq->g_idx.data);
          std::shuffle(words, words + gptq->g_idx.size(), random);
        }
  }

 private:
  std::vector<OwnedLayerWeights> others_;  // what set_format() has made
};

class DeviceLayers {
 public:
  DeviceLayers(const cuda::Context& c, const HostLayers& host) : context_(c), host_(host) {
    const ModelConfig& m = host.config;
    const std::int64_t tokens = host.load.tokens(), h = m.hidden_size;
    const ModelShape shape = m.spec().shape;
    layers.resize(host.weights.size());
    for (std::size_t l = 0; l < layers.size(); ++l) {
      layers[l].weights = host.weights[l].weights;
      pack(layers[l].weights);
      for_each_weight(m, layers[l].weights, [&](const TensorSpec&, auto& view, const auto&) {
        view.data = static_cast<decltype(view.data)>(copy(view.data, view.bytes()));
      });
      const auto cache = extents(host.load.batch, shape.num_kv_heads, host.load.cache_capacity(), shape.head_dim);
      layers[l].cache = {allocate<4>(m.dtype, cache), allocate<4>(m.dtype, cache)};
    }
    for_each_activation(
        shape, step_sizes(host.load),
        [&]<class V>(const TensorSpec& t, V& view, auto size) {
          if constexpr (std::is_same_v<V, AnyView<V::rank>>)
            if (t.role == Role::output) view = allocate<V::rank>(m.dtype, size);
        },
        tensors_);
    hidden_ = allocate<2>(m.dtype, extents(tokens, h));
    tensors_.hidden = hidden_;
    positions = {static_cast<std::int32_t*>(allocate(tokens * 4)), {tokens}};
    kv_len = {static_cast<std::int32_t*>(allocate(host.load.batch * 4)), {host.load.batch}};
    tensors_.positions = positions;
    tensors_.kv_len = kv_len;
    tensors_.max_kv_len = host.load.cache_capacity();
    Tensor cos(DType::f32, {m.max_position_embeddings, m.rotary_dim / 2}), sin = cos.clone();
    const auto table = extents(m.max_position_embeddings, m.rotary_dim / 2);
    ops::rope_table({cos.as<float>(), table}, {sin.as<float>(), table}, m.rope_theta, m.rope_scaling);
    tensors_.cos = {static_cast<const float*>(copy(cos.data(), cos.size_bytes())), table};
    tensors_.sin = {static_cast<const float*>(copy(sin.data(), sin.size_bytes())), table};
    reset();
  }

  const ModelConfig& config() const { return host_.config; }
  cuda::PersistentSequences sequences() const { return {positions, kv_len}; }
  cuda::RopeTable rope() const { return {tensors_.cos, tensors_.sin}; }
  std::vector<LayerCache> caches() const {
    std::vector<LayerCache> all;
    for (const cuda::PersistentLayer& l : layers) all.push_back(l.cache);
    return all;
  }
  LayerTensors tensors(std::size_t layer) const {
    LayerTensors t = tensors_;
    t.k_cache = layers[layer].cache.k;
    t.v_cache = layers[layer].cache.v;
    return t;
  }
  /// Brings the caches back to what they were before any append, and the hidden state.
  void reset() {
    for (std::size_t l = 0; l < layers.size(); ++l) {
      bring(layers[l].cache.k.data, host_.k_caches[l]);
      bring(layers[l].cache.v.data, host_.v_caches[l]);
    }
    bring(hidden_.data, host_.hidden);
  }
  void set_kv_len(const std::vector<std::int32_t>& lengths) {
    std::vector<std::int32_t> last;
    for (std::int32_t n : lengths) last.push_back(n - 1);
    require_ok(cuda::copy_to_device(context_, kv_len.data, lengths.data(), lengths.size() * 4));
    require_ok(cuda::copy_to_device(context_, positions.data, last.data(), last.size() * 4));
  }
  /// Makes the output NaN.
  void scrub_output() { require_cuda(cudaMemset(tensors_.output.data, 0xff, std::size_t(tensors_.output.bytes()))); }
  /// The output, then all caches.
  std::vector<Tensor> results() const {
    std::vector<Tensor> all;
    all.push_back(fetch<2>(tensors_.output));
    for (const cuda::PersistentLayer& l : layers) {
      all.push_back(fetch<4>(l.cache.k));
      all.push_back(fetch<4>(l.cache.v));
    }
    return all;
  }

  /// Memory that lasts as long as this object.
  void* allocate(std::int64_t bytes) {
    Result<cuda::DeviceMemory> memory = cuda::DeviceMemory::create(context_, std::size_t(bytes), "a test's tensor");
    require_ok(memory.status());
    memory_.push_back(std::move(*memory));
    return memory_.back().data();
  }
  /// The same with the host's bytes.
  const void* copy(const void* host, std::int64_t bytes) {
    void* const device = allocate(bytes);
    require_ok(cuda::copy_to_device(context_, device, host, std::size_t(bytes)));
    return device;
  }

  std::vector<cuda::PersistentLayer> layers;
  View<std::int32_t, 1> positions, kv_len;

 private:
  /// Packs the quantised Linears, as ResidentWeights does. What is packed lies on the device.
  void pack(LayerWeights& weights) {
    const ModelSpec spec = host_.config.spec();
    for_each_linear(spec, weights, [&](const Site& site, LinearParams& l, const auto&) {
      Result<cuda::Packed> packed = cuda::pack(l.weight, cuda::pack_hint(site, spec), context_);
      require_ok(packed.status());
      l.weight = packed->weight;
      if (auto* const on_host = std::get_if<PackedWeight>(&l.weight))
        on_host->data.data = static_cast<const std::int32_t*>(copy(packed->storage.data(), on_host->data.bytes()));
    });
  }
  template <int Rank>
  AnyView<Rank> allocate(DType dtype, std::array<std::int64_t, Rank> shape) {
    AnyView<Rank> view(nullptr, shape, dtype);
    view.data = allocate(view.bytes());
    return view;
  }
  void bring(void* device, const Tensor& from) {
    require_ok(cuda::copy_to_device(context_, device, from.data(), std::size_t(from.size_bytes())));
  }

  cuda::Context context_;
  const HostLayers& host_;
  std::vector<cuda::DeviceMemory> memory_;
  AnyView<2> hidden_;
  LayerTensors tensors_;
};

}  // namespace cf::test
