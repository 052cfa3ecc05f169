#include "core/model/layer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

#include "core/cache_view.hpp"
#include "core/model/streams.hpp"

namespace cf {

Status check_model(const ModelSpec& m) {
  CF_TRY(m.validate());
  return m.shape.qkv_heads().check("model");
}

StepSizes step_sizes(const Workload& load) {
  return {load.batch, load.q_len, load.cache_capacity(), load.cache_capacity()};
}

namespace {

DType stored_dtype(Role role, DType activation) {
  return is_index(role) ? DType::i32 : is_table(role) ? DType::f32 : activation;
}

}  // namespace

double LayerState::bytes(const ModelSpec& m, const Workload& load, DType activation) {
  double sum = 0;
  LayerTensors views;
  for_each_activation(
      m.shape, step_sizes(load),
      [&](const TensorSpec& spec, auto&, const auto& shape) {
        double bytes = double(size_bytes(stored_dtype(spec.role, activation)));
        for (std::int64_t size : shape) bytes *= double(size);
        sum += bytes;
      },
      views);
  return sum;
}

LayerState::LayerState(const ModelSpec& m, const Workload& load, DType activation)
    : shape_(m.shape), sizes_(step_sizes(load)) {
  for_each_activation(
      shape_, sizes_,
      [&](const TensorSpec& spec, Tensor& t, auto shape) {
        t = Tensor(stored_dtype(spec.role, activation), Shape(shape.begin(), shape.end()));
      },
      *this);
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

void LayerState::fill_rope_table(double theta, const ops::RopeScaling& scaling) {
  if (shape_.rotary_dim == 0) return;
  ops::rope_table({cos.as<float>(), cos.view<2>().shape}, {sin.as<float>(), sin.view<2>().shape}, theta, scaling);
}

LayerTensors LayerState::tensors() {
  LayerTensors views;
  for_each_activation(
      shape_, sizes_,
      [](const TensorSpec&, Tensor& t, auto& view, auto shape) { point(view, t.data(), shape, t.dtype()); }, *this,
      views);
  views.max_kv_len = max_kv_len_;
  return views;
}

Tensor appended_rows(ConstAnyView<4> cache, View<const std::int32_t, 1> kv_len, std::int64_t q_len) {
  const CacheView view(cache);
  const std::int64_t batch = cache.shape[0], heads = view.heads(), head_dim = view.head_dim();
  Tensor rows(cache.dtype, {batch, heads, q_len, head_dim});
  const std::size_t bytes = std::size_t(q_len * head_dim) * size_bytes(cache.dtype);
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t from = view.rows(b, h, kv_len.data[b] - q_len, q_len).first;
      std::memcpy(static_cast<char*>(rows.data()) + std::size_t(b * heads + h) * bytes,
                  static_cast<const char*>(cache.data) + std::size_t(from) * size_bytes(cache.dtype), bytes);
    }
  return rows;
}

namespace ops {

namespace {

/// Float32 throughout, as Hugging Face computes it.
float scaled(float inv_freq, const RopeScaling& s) {
  if (s.kind == RopeScaling::Kind::none) return inv_freq;
  const float wavelength = float(2 * std::numbers::pi) / inv_freq;
  const double positions = double(s.original_max_positions);
  const float longest = float(positions / s.low_freq_factor), shortest = float(positions / s.high_freq_factor);
  if (wavelength > longest) return inv_freq / float(s.factor);
  if (wavelength < shortest) return inv_freq;
  const float share =
      (float(positions) / wavelength - float(s.low_freq_factor)) / float(s.high_freq_factor - s.low_freq_factor);
  return (1 - share) * inv_freq / float(s.factor) + share * inv_freq;
}

/// Float32 throughout, the power included, as Hugging Face computes it.
float inv_freq_of(std::int64_t i, std::int64_t half, double theta, const RopeScaling& scaling) {
  return scaled(1.0f / std::pow(float(theta), float(2 * i) / float(2 * half)), scaling);
}

}  // namespace

void rope_rows(View<float, 2> cos, View<float, 2> sin, std::span<const std::int64_t> positions, double theta,
               const RopeScaling& scaling) {
  const std::int64_t half = cos.shape[1];
  for (std::int64_t i = 0; i < half; ++i) {
    const double inv_freq = inv_freq_of(i, half, theta, scaling);
    for (std::size_t r = 0; r < positions.size(); ++r) {
      const double angle = double(positions[r]) * inv_freq;
      cos.data[std::int64_t(r) * half + i] = float(std::cos(angle));
      sin.data[std::int64_t(r) * half + i] = float(std::sin(angle));
    }
  }
}

void rope_table(View<float, 2> cos, View<float, 2> sin, double theta, const RopeScaling& scaling) {
  const auto [rows, half] = cos.shape;
  for (std::int64_t i = 0; i < half; ++i) {
    const float inv_freq = inv_freq_of(i, half, theta, scaling);
    for (std::int64_t p = 0; p < rows; ++p) {
      const float angle = float(p) * inv_freq;
      cos.data[p * half + i] = std::cos(angle);
      sin.data[p * half + i] = std::sin(angle);
    }
  }
}

}  // namespace ops

std::vector<double> rope_frequencies(const ModelSpec& m) {
  const std::int64_t half = m.shape.rotary_dim / 2;
  std::vector<double> frequencies;
  for (std::int64_t i = 0; i < half; ++i)
    frequencies.push_back(ops::inv_freq_of(i, half, m.traits.rope_theta, m.traits.rope_scaling));
  return frequencies;
}

}  // namespace cf
