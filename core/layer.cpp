#include "core/layer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace cf {

LayerState::LayerState(const ModelConfig& m, const Workload& load, DType activation) {
  const std::int64_t tokens = load.tokens(), h = m.hidden_size, heads = m.num_attention_heads, d = m.head_dim();
  const std::int64_t table_rows = std::max(m.max_position_embeddings, load.kv_len);
  const auto make = [&](Shape shape) { return Tensor(activation, std::move(shape)); };
  hidden = make({tokens, h});
  positions = Tensor(DType::i32, {tokens});
  kv_len = Tensor(DType::i32, {load.batch});
  cos = Tensor(DType::f32, {table_rows, m.rotary_dim / 2});
  sin = Tensor(DType::f32, {table_rows, m.rotary_dim / 2});
  k_cache = make({load.batch, heads, load.cache_capacity(), d});
  v_cache = make({load.batch, heads, load.cache_capacity(), d});
  attn_in = make({tokens, h});
  qkv = make({tokens, heads, 3, d});
  q = make({tokens, heads, d});
  k = make({tokens, heads, d});
  v = make({tokens, heads, d});
  context = make({tokens, heads, d});
  attn_residual = make({tokens, h});
  mlp_in = make({tokens, h});
  mlp_act = make({tokens, m.intermediate_size});
  output = make({tokens, h});
  set_kv_len(std::vector<std::int32_t>(std::size_t(load.batch), std::int32_t(load.kv_len)));
}

void LayerState::set_kv_len(std::span<const std::int32_t> lengths) {
  const std::int64_t batch = kv_len.size(), q_len = positions.size() / batch;
  max_kv_len_ = 0;
  for (std::int64_t b = 0; b < batch; ++b) {
    kv_len.as<std::int32_t>()[b] = lengths[std::size_t(b)];
    max_kv_len_ = std::max<std::int64_t>(max_kv_len_, lengths[std::size_t(b)]);
    for (std::int64_t i = 0; i < q_len; ++i)
      positions.as<std::int32_t>()[b * q_len + i] = std::int32_t(lengths[std::size_t(b)] - q_len + i);
  }
}

void LayerState::fill_rope_table(double theta) {
  ops::rope_table({cos.as<float>(), cos.view<2>().shape}, {sin.as<float>(), sin.view<2>().shape}, theta);
}

LayerTensors LayerState::tensors() {
  LayerTensors t;
  t.hidden = hidden.view<2>();
  t.positions = {positions.as<std::int32_t>(), {positions.size()}};
  t.kv_len = {kv_len.as<std::int32_t>(), {kv_len.size()}};
  t.cos = {cos.as<float>(), cos.view<2>().shape};
  t.sin = {sin.as<float>(), sin.view<2>().shape};
  t.k_cache = k_cache.view<4>();
  t.v_cache = v_cache.view<4>();
  t.attn_in = attn_in.view<2>();
  t.qkv = qkv.view<4>();
  t.q = q.view<3>();
  t.k = k.view<3>();
  t.v = v.view<3>();
  t.context = context.view<3>();
  t.attn_residual = attn_residual.view<2>();
  t.mlp_in = mlp_in.view<2>();
  t.mlp_act = mlp_act.view<2>();
  t.output = output.view<2>();
  t.max_kv_len = max_kv_len_;
  return t;
}

Tensor appended_rows(ConstAnyView<4> cache, View<const std::int32_t, 1> kv_len, std::int64_t q_len) {
  const auto [batch, heads, capacity, head_dim] = cache.shape;
  Tensor rows(cache.dtype, {batch, heads, q_len, head_dim});
  const std::size_t bytes = std::size_t(q_len * head_dim) * size_bytes(cache.dtype);
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t from = ((b * heads + h) * capacity + kv_len.data[b] - q_len) * head_dim;
      std::memcpy(static_cast<char*>(rows.data()) + std::size_t(b * heads + h) * bytes,
                  static_cast<const char*>(cache.data) + std::size_t(from) * size_bytes(cache.dtype), bytes);
    }
  return rows;
}

namespace ops {

void rope_table(View<float, 2> cos, View<float, 2> sin, double theta) {
  const auto [rows, half] = cos.shape;
  for (std::int64_t i = 0; i < half; ++i) {
    // Float32 throughout, the power included, as Hugging Face computes it.
    const float inv_freq = 1.0f / std::pow(float(theta), float(2 * i) / float(2 * half));
    for (std::int64_t p = 0; p < rows; ++p) {
      const float angle = float(p) * inv_freq;
      cos.data[p * half + i] = std::cos(angle);
      sin.data[p * half + i] = std::sin(angle);
    }
  }
}

}  // namespace ops
}  // namespace cf
