#pragma once
// The suite proves that it can fail: each fault that a port of this layer could have is put into the walk over golden
// files, and at least one tap must leave its budget. The list of faults, for every backend.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>

#include "apps/verify/golden_walk.hpp"
#include "core/compare.hpp"
#include "tests/golden/golden_files.hpp"
#include "tests/support/catch.hpp"

namespace cf::test {

/// A change of what a walk starts from, or of a site's arguments. `scratch` owns the tensors that the change makes.
struct Fault {
  using Scratch = std::vector<Tensor>;
  std::string name;
  bool everywhere = true;                              // caught in every golden file, or in one at least
  bool quantised = false;                              // concerns GPTQ weights alone
  bool dense = false;                                  // concerns dense weights alone
  bool fine = false;                                   // below the rounding errors of 16-bit activations
  std::function<bool(const ModelConfig&)> concerns{};  // the models that can show it; all where it is empty
  std::function<void(ModelConfig&, LayerWeights&, LayerState&, Scratch&)> before{};
  std::function<void(GptqWeight&, Scratch&)> gptq{};
  std::function<void(ops::QkNorm::Args&, Scratch&)> qk_norm{};
  std::function<void(ops::Rope::Args&, Scratch&)> rope{};
  std::function<void(ops::KvAppend::Args&, Scratch&)> kv_append{};
  std::function<void(ops::Attention::Args&, Scratch&)> attention{};
  std::function<void(ops::RmsNorm::Args&, Scratch&)> rmsnorm{};

  void apply(ops::Linear::Args& a, Scratch& t) const {
    auto* const weight = std::get_if<GptqWeight>(&a.linear.weight);
    if (gptq && weight) gptq(*weight, t);
  }
  void apply(ops::QkNorm::Args& a, Scratch& t) const {
    if (qk_norm) qk_norm(a, t);
  }
  void apply(ops::Rope::Args& a, Scratch& t) const {
    if (rope) rope(a, t);
  }
  void apply(ops::Attention::Args& a, Scratch& t) const {
    if (attention) attention(a, t);
  }
  void apply(ops::RmsNorm::Args& a, Scratch& t) const {
    if (rmsnorm) rmsnorm(a, t);
  }
  void apply(ops::LayerNorm::Args&, Scratch&) const {}
  void apply(ops::KvAppend::Args& a, Scratch& t) const {
    if (kv_append) kv_append(a, t);
  }
};

/// Moves a cache's entries so that the second comes first.
inline void drop_oldest(Tensor& cache) {
  const std::size_t entry = std::size_t(cache.shape()[3]) * size_bytes(cache.dtype()),
                    row = std::size_t(cache.shape()[2]) * entry;
  for (std::size_t at = 0; at < std::size_t(cache.size_bytes()); at += row) {
    auto* const first = static_cast<std::byte*>(cache.data()) + at;
    std::memmove(first, first + entry, row - entry);
  }
}

inline void add_to(Tensor& integers, std::int32_t by) {
  for (std::int64_t i = 0; i < integers.size(); ++i) integers.as<std::int32_t>()[i] += by;
}

/// The same Linear with a bias of zeros.
inline void zero_bias(LinearParams& linear, Fault::Scratch& scratch) {
  Tensor zeros(linear.bias.dtype, {linear.bias.size()});
  std::memset(zeros.data(), 0, std::size_t(zeros.size_bytes()));
  scratch.push_back(std::move(zeros));
  linear.bias = scratch.back().view<1>();
}

inline View<const std::int32_t, 1> shifted(View<const std::int32_t, 1> v, std::int32_t by, Fault::Scratch& scratch) {
  Tensor t(DType::i32, {v.size()});
  for (std::int64_t i = 0; i < v.size(); ++i) t.as<std::int32_t>()[i] = v.data[i] + by;
  scratch.push_back(std::move(t));
  return {scratch.back().as<std::int32_t>(), v.shape};
}

/// A view of changed elements: element i is f(i) of the old ones.
template <class T, int Rank, class F>
View<const T, Rank> changed(View<const T, Rank> v, Fault::Scratch& scratch, F&& f) {
  Tensor t(v.dtype, {v.size()});
  for (std::int64_t i = 0; i < v.size(); ++i) t.as<T>()[i] = f(i);
  scratch.push_back(std::move(t));
  return {scratch.back().as<T>(), v.shape};
}

/// A float32 cache whose head h is head h + 1 of another, the last one its first.
inline ConstAnyView<4> next_heads(ConstAnyView<4> cache, Fault::Scratch& scratch) {
  const auto [batch, heads, capacity, head_dim] = cache.shape;
  const std::int64_t head = capacity * head_dim;
  Tensor t(DType::f32, {batch, heads, capacity, head_dim});
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t h = 0; h < heads; ++h)
      std::copy_n(cache.as<const float>().data + (b * heads + (h + 1) % heads) * head, head,
                  t.as<float>() + (b * heads + h) * head);
  scratch.push_back(std::move(t));
  return scratch.back().view<4>();
}

/// A float32 cache whose sequence b is sequence b + 1 of another, the last one its first.
inline ConstAnyView<4> next_sequences(ConstAnyView<4> cache, Fault::Scratch& scratch) {
  const std::int64_t batch = cache.shape[0], sequence = cache.size() / batch;
  Tensor t(DType::f32, Shape(cache.shape.begin(), cache.shape.end()));
  for (std::int64_t b = 0; b < batch; ++b)
    std::copy_n(cache.as<const float>().data + (b + 1) % batch * sequence, sequence, t.as<float>() + b * sequence);
  scratch.push_back(std::move(t));
  return scratch.back().view<4>();
}

/// A float32 product of which the elements of each head of q and k are in the order of pairs, as before Hugging Face's
/// conversion of Llama.
inline ConstAnyView<4> paired_elements(const ops::Rope::Args& a, Fault::Scratch& scratch) {
  const auto d = ops::Rope::dims(a);
  const std::int64_t heads = d.heads + 2 * d.kv_heads, half = d.head_dim / 2;
  Tensor t = Tensor(DType::f32, {d.tokens, a.qkv.shape[1], a.qkv.shape[2], d.head_dim});
  for (std::int64_t row = 0; row < d.tokens * heads; ++row) {
    const float* from = a.qkv.as<const float>().data + row * d.head_dim;
    float* to = t.as<float>() + row * d.head_dim;
    const bool turns = row % heads < d.heads + d.kv_heads;
    for (std::int64_t i = 0; i < d.head_dim; ++i) to[i] = from[turns ? i % half * 2 + i / half : i];
  }
  scratch.push_back(std::move(t));
  return scratch.back().view<4>();
}

/// Keeps in float32 what a norm of heads reads: the product, q's gain and k's. A fault of a later site reads it.
inline void keep_unnormed(const ops::QkNorm::Args& a, Fault::Scratch& scratch) {
  Tensor qkv(DType::f32, Shape(a.qkv.shape.begin(), a.qkv.shape.end()));
  std::copy_n(a.qkv.as<const float>().data, qkv.size(), qkv.as<float>());
  scratch.push_back(std::move(qkv));
  for (const ConstAnyView<1>& gamma : {a.q_gamma, a.k_gamma}) {
    Tensor gain(DType::f32, {gamma.size()});
    convert(gamma.data, gamma.dtype, gain.data(), DType::f32, gamma.size());
    scratch.push_back(std::move(gain));
  }
}

/// The product that RoPE must be given so that it makes what it would make of heads without gains, each then times its
/// gain: a norm after RoPE, as a rotation keeps the mean of squares. `scratch` holds what keep_unnormed() kept.
inline ConstAnyView<4> normed_after_rope(const ops::Rope::Args& a, Fault::Scratch& scratch) {
  const auto d = ops::Rope::dims(a);
  const std::int64_t heads = d.heads + 2 * d.kv_heads, half = d.rotary_dim / 2;
  Tensor t = scratch[0].clone();
  for (std::int64_t row = 0; row < d.tokens * heads; ++row) {
    const std::int64_t head = row % heads, position = a.positions.data[row / heads] * half;
    if (head >= d.heads + d.kv_heads) continue;
    const float* gamma = scratch[head < d.heads ? 1 : 2].as<float>();
    float* x = t.as<float>() + row * d.head_dim;
    double squares = 0;
    for (std::int64_t i = 0; i < d.head_dim; ++i) squares += double(x[i]) * double(x[i]);
    const double scale = 1 / std::sqrt(squares / double(d.head_dim));
    for (std::int64_t i = 0; i < half; ++i) {
      const double cos = a.cos.data[position + i], sin = a.sin.data[position + i];
      const double p = (x[i] * cos - x[i + half] * sin) * gamma[i] * scale,
                   q = (x[i + half] * cos + x[i] * sin) * gamma[i + half] * scale;
      x[i] = float(p * cos + q * sin);
      x[i + half] = float(q * cos - p * sin);
    }
  }
  scratch.push_back(std::move(t));
  return scratch.back().view<4>();
}

/// The same Linear with each pair of rows exchanged.
inline void exchange_rows(LinearParams& linear, Fault::Scratch& scratch) {
  const ConstAnyView<2> w = std::get<DenseWeight>(linear.weight).weight;
  Tensor t(w.dtype, {w.shape[0], w.shape[1]});
  const std::size_t row = std::size_t(w.shape[1]) * size_bytes(w.dtype);
  for (std::size_t i = 0; i < std::size_t(w.shape[0]); ++i)
    std::memcpy(static_cast<std::byte*>(t.data()) + (i ^ 1) * row, static_cast<const std::byte*>(w.data) + i * row,
                row);
  scratch.push_back(std::move(t));
  linear.weight = DenseWeight{scratch.back().view<2>()};
}

/// Changes float32 rows x so that their RMSNorm is x / (sqrt(mean of squares) + eps): with x times c the norm is
/// x / sqrt(mean + eps / c^2).
inline void take_eps_out_of_root(ops::RmsNorm::Args& a, Fault::Scratch& scratch) {
  const auto [tokens, hidden] = a.x.shape;
  Tensor t(DType::f32, {tokens, hidden});
  for (std::int64_t row = 0; row < tokens; ++row) {
    const float* from = a.x.as<const float>().data + row * hidden;
    double squares = 0;
    for (std::int64_t i = 0; i < hidden; ++i) squares += double(from[i]) * double(from[i]);
    const double c = 1 / std::sqrt(2 * std::sqrt(squares / double(hidden)) + a.eps);
    for (std::int64_t i = 0; i < hidden; ++i) t.as<float>()[row * hidden + i] = float(double(from[i]) * c);
  }
  scratch.push_back(std::move(t));
  a.x = scratch.back().view<2>();
}

inline void round_to_f16(Tensor& table) {
  for (std::int64_t i = 0; i < table.size(); ++i) table.as<float>()[i] = widen<float>(narrow<f16>(table.at(i)));
}

/// Every fault that the suite must catch.
inline std::vector<Fault> faults() {
  std::vector<Fault> all;
  all.reserve(64);  // references stay valid
  const auto add = [&](std::string name) -> Fault& { return all.emplace_back(Fault{.name = std::move(name)}); };
  const auto is_neox = [](const ModelConfig& m) { return m.model_type == ModelType::gpt_neox; };
  const auto is_gated = [](const ModelConfig& m) { return m.hidden_act == Activation::swiglu; };
  const auto rotates = [](const ModelConfig& m) { return m.rotary_dim > 0; };
  add("the oldest cache entry is dropped").before = [](ModelConfig&, LayerWeights&, LayerState& s, Fault::Scratch&) {
    drop_oldest(s.k_cache);
    drop_oldest(s.v_cache);
    add_to(s.kv_len, -1);
  };
  add("the newest cache entry is not seen").attention = [](ops::Attention::Args& a, Fault::Scratch& s) {
    a.kv_len = shifted(a.kv_len, -1, s);
  };
  add("new cache entries are one too early").kv_append = [](ops::KvAppend::Args& a, Fault::Scratch& s) {
    a.kv_len = shifted(a.kv_len, -1, s);
  };
  Fault& sequence = add("a sequence reads the next one's cache");
  sequence.everywhere = false;  // one sequence is its own next
  sequence.attention = [](ops::Attention::Args& a, Fault::Scratch& s) {
    a.k_cache = next_sequences(a.k_cache, s);
    a.v_cache = next_sequences(a.v_cache, s);
  };
  Fault& scale = add("the scale is that of head_dim 64");
  scale.concerns = [](const ModelConfig& m) { return m.head_dim() != 64; };
  scale.attention = [](ops::Attention::Args& a, Fault::Scratch&) { a.scale = 1 / std::sqrt(64.0); };
  Fault& next = add("a query head reads the next kv head");
  next.concerns = [](const ModelConfig& m) { return m.kv_heads() > 1; };
  next.attention = [](ops::Attention::Args& a, Fault::Scratch& s) {
    a.k_cache = next_heads(a.k_cache, s);
    a.v_cache = next_heads(a.v_cache, s);
  };
  Fault& position = add("positions are one too high");
  position.concerns = rotates;
  position.before = [](ModelConfig&, LayerWeights&, LayerState& s, Fault::Scratch&) { add_to(s.positions, 1); };
  Fault& order = add("QKV is read as if q, k and v were not interleaved");
  order.concerns = is_neox;
  order.rope = [](ops::Rope::Args& a, Fault::Scratch& s) {
    const auto [tokens, heads, three, head_dim] = a.qkv.shape;
    Tensor t(DType::f32, {tokens, heads, three, head_dim});
    const float* from = a.qkv.as<const float>().data;
    for (std::int64_t i = 0; i < tokens; ++i)
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t part = 0; part < 3; ++part)
          std::copy_n(from + ((i * 3 + part) * heads + h) * head_dim, head_dim,
                      t.as<float>() + ((i * heads + h) * 3 + part) * head_dim);
    s.push_back(std::move(t));
    a.qkv = s.back().view<4>();
  };
  Fault& pairs = add("the elements of q and k are in the order of pairs");
  pairs.concerns = is_gated;
  pairs.rope = [](ops::Rope::Args& a, Fault::Scratch& s) { a.qkv = paired_elements(a, s); };
  Fault& exchanged = add("gate and up are exchanged");
  exchanged.concerns = is_gated;
  exchanged.dense = true;
  exchanged.before = [](ModelConfig&, LayerWeights& w, LayerState&, Fault::Scratch& t) {
    exchange_rows(w.dense_h_to_4h, t);
  };
  Fault& scaling = add("RoPE's scaling is left out");
  scaling.concerns = [](const ModelConfig& m) { return m.rope_scaling != ops::RopeScaling{}; };
  scaling.before = [](ModelConfig& m, LayerWeights&, LayerState& s, Fault::Scratch&) {
    s.fill_rope_table(m.rope_theta);
  };
  // Changes a norm by eps / sqrt(mean of squares) instead of eps / (2 mean): about eps, for the smaller ones below the
  // budget.
  Fault& root = add("RMSNorm's eps is outside the root");
  root.concerns = is_gated;
  root.everywhere = false;
  root.fine = true;
  root.rmsnorm = take_eps_out_of_root;
  Fault& qkv_bias = add("QKV has no bias");
  qkv_bias.concerns = [](const ModelConfig& m) { return m.spec().traits.qkv_bias; };
  qkv_bias.before = [](ModelConfig&, LayerWeights& w, LayerState&, Fault::Scratch& t) {
    zero_bias(w.query_key_value, t);
  };
  Fault& dense_bias = add("the attention's output has no bias");
  dense_bias.concerns = [](const ModelConfig& m) { return m.spec().traits.dense_bias; };
  dense_bias.before = [](ModelConfig&, LayerWeights& w, LayerState&, Fault::Scratch& t) { zero_bias(w.dense, t); };
  Fault& gelu = add("GELU is the tanh form");
  gelu.fine = true;
  gelu.concerns = [](const ModelConfig& m) { return m.hidden_act == Activation::gelu_erf; };
  gelu.before = [](ModelConfig& m, LayerWeights&, LayerState&, Fault::Scratch&) {
    m.hidden_act = Activation::gelu_tanh;
  };
  Fault& erf = add("GELU is the erf form");
  erf.fine = true;
  erf.concerns = [](const ModelConfig& m) { return m.hidden_act == Activation::gelu_tanh; };
  erf.before = [](ModelConfig& m, LayerWeights&, LayerState&, Fault::Scratch&) { m.hidden_act = Activation::gelu_erf; };
  const auto has_head_norms = [](const ModelConfig& m) { return m.family().head_norm; };
  Fault& unnormed = add("the heads of q and k have no norm");
  unnormed.concerns = has_head_norms;
  unnormed.qk_norm = [](ops::QkNorm::Args& a, Fault::Scratch& s) { keep_unnormed(a, s); };
  unnormed.rope = [](ops::Rope::Args& a, Fault::Scratch& s) { a.qkv = s.front().view<4>(); };
  Fault& late = add("the heads of q and k have their norm after RoPE");
  late.concerns = has_head_norms;
  late.qk_norm = unnormed.qk_norm;
  late.rope = [](ops::Rope::Args& a, Fault::Scratch& s) { a.qkv = normed_after_rope(a, s); };
  Fault& gains = add("the gains of q's and of k's heads are exchanged");
  gains.concerns = has_head_norms;
  gains.qk_norm = [](ops::QkNorm::Args& a, Fault::Scratch&) { std::swap(a.q_gamma, a.k_gamma); };
  // Changes a norm by 4.5e-6 / variance: below the budget of 2e-6 where the hidden state's variance is above 2.
  Fault& eps = add("eps is 1e-6");
  eps.everywhere = false;
  eps.fine = true;
  eps.before = [](ModelConfig& m, LayerWeights&, LayerState&, Fault::Scratch&) { m.layer_norm_eps = 1e-6; };
  add("the residual is sequential").before = [](ModelConfig& m, LayerWeights&, LayerState&, Fault::Scratch&) {
    m.use_parallel_residual = !m.use_parallel_residual;
  };
  add("the two norms are exchanged").before = [](ModelConfig&, LayerWeights& w, LayerState&, Fault::Scratch&) {
    std::swap(w.input_layernorm, w.post_attention_layernorm);
  };
  Fault& table = add("cos and sin are float16");
  table.concerns = rotates;
  table.fine = true;
  table.before = [](ModelConfig&, LayerWeights&, LayerState& s, Fault::Scratch&) {
    round_to_f16(s.cos);
    round_to_f16(s.sin);
  };
  Fault& exponent = add("RoPE's exponent is over head_dim");
  exponent.concerns = [](const ModelConfig& m) { return m.rotary_dim > 0 && m.rotary_dim < m.head_dim(); };
  exponent.before = [](ModelConfig& m, LayerWeights&, LayerState& s, Fault::Scratch&) {
    s.fill_rope_table(std::pow(m.rope_theta, double(m.rotary_dim) / double(m.head_dim())));
  };
  // Each is caught in the files that use the format in question.
  const auto add_gptq = [&](std::string name, std::function<void(GptqWeight&, Fault::Scratch&)> change) -> Fault& {
    Fault& fault = add(std::move(name));
    fault.everywhere = false;
    fault.quantised = true;
    fault.gptq = std::move(change);
    return fault;
  };
  // A zero that is off by one changes a row by the sum of scale * x over its inputs. In bfloat16 this is less than the
  // row's rounding errors, and in float16 too with the smaller scales of 8 bits.
  add_gptq("GPTQ zeros are one too high", [](GptqWeight& w, Fault::Scratch&) { ++w.zero_offset; }).fine = true;
  add_gptq("GPTQ zeros are one too low", [](GptqWeight& w, Fault::Scratch&) { --w.zero_offset; }).fine = true;
  add_gptq("GPTQ codes are read high bits first", [](GptqWeight& w, Fault::Scratch& s) {
    const View<const std::int32_t, 2> words = w.qweight;
    const int bits = w.bits;
    w.qweight = changed(words, s, [=](std::int64_t i) {
      std::uint32_t from = std::uint32_t(words.data[i]), to = 0;
      for (int shift = 0; shift < 32; shift += bits) to = to << bits | (from >> shift & ((1u << bits) - 1));
      return std::int32_t(to);
    });
  });
  add_gptq("the halves of a byte of GPTQ codes are exchanged", [](GptqWeight& w, Fault::Scratch& s) {
    const View<const std::int32_t, 2> words = w.qweight;
    w.qweight = changed(words, s, [=](std::int64_t i) {
      const std::uint32_t word = std::uint32_t(words.data[i]);
      return std::int32_t((word & 0x0f0f0f0fu) << 4 | (word >> 4 & 0x0f0f0f0fu));
    });
  });
  add_gptq("GPTQ g_idx is ignored", [](GptqWeight& w, Fault::Scratch& s) {
    w.g_idx = changed(w.g_idx, s, [&](std::int64_t k) { return std::int32_t(k / w.group_size); });
  });
  add_gptq("GPTQ scales are the neighbouring group's", [](GptqWeight& w, Fault::Scratch& s) {
    const View<const f16, 2> scales = w.scales;
    w.scales = changed(scales, s, [=](std::int64_t i) { return scales.data[(i + scales.shape[1]) % scales.size()]; });
  });
  return all;
}

/// The workload with room for one more entry, so that the RoPE table has a row for positions that are one too high.
inline Workload with_room(Workload load) {
  load.capacity = load.kv_len + 1;
  return load;
}

/// A golden file's step on host tensors, with a fault in what it starts from.
struct FaultyStep {
  ModelConfig config;
  LayerWeights weights;
  LayerState state;
  Fault::Scratch scratch;

  FaultyStep(const golden::GoldenFile& file, const golden::GoldenWeights& sound, const Fault& fault, DType activation)
      : config(file.meta().config), weights(sound.weights), state(config, with_room(file.meta().load), activation) {
    scratch.reserve(8);  // views into it stay valid
    REQUIRE(file.load(state));
    state.fill_rope_table(config.rope_theta, config.rope_scaling);
    if (fault.before) fault.before(config, weights, state, scratch);
  }
};

/// The taps that leave budget_of(tap) in a walk of the step where every error is passed on. run(args) runs a site.
template <class BudgetOf, class Run>
std::vector<std::string> taps_outside(const golden::GoldenFile& file, FaultyStep& step, BudgetOf&& budget_of,
                                      Run&& run) {
  std::vector<std::string> taps;
  const LayerTensors t = step.state.tensors();
  const Status walked = for_each_site(step.config, step.weights, t, [&](const Site& site, const auto& args) -> Status {
    CF_TRY(run(args));
    for (const apps::SiteOutput& output : apps::site_outputs(site, args)) {
      CF_TRY_ASSIGN(const Tensor reference, file.tap(std::string(golden::kReference), output.tap));
      CF_TRY_ASSIGN(const Comparison c,
                    compare(apps::read_tap(output, step.config, file.meta().load, t.kv_len), reference));
      if (!(c.rel_l2 <= budget_of(output.tap)) || c.non_finite) taps.push_back(output.tap);
    }
    return {};
  });
  INFO(walked.message());
  REQUIRE(walked);
  return taps;
}

/// The taps that leave the float32 budget under a fault. run(args) runs a site.
template <class Run>
std::vector<std::string> caught(const golden::GoldenFile& file, const golden::GoldenWeights& weights,
                                const Fault& fault, Run&& run) {
  FaultyStep step(file, weights, fault, DType::f32);
  const double budget = apps::walk_budget({.activation = DType::f32});
  return taps_outside(
      file, step, [&](const std::string&) { return budget; },
      [&](auto args) {
        fault.apply(args, step.scratch);
        return run(args);
      });
}

/// Small golden files in which every sequence has an old cache entry: GPT-NeoX's of head_dim 80, the other families',
/// and, with `quantised`, those with GPTQ weights.
inline std::vector<std::string> gate_files(bool quantised) {
  std::vector<std::string> files;
  for (const std::string& path : golden_files()) {
    const auto file = golden::GoldenFile::open(path);
    REQUIRE(file);
    const auto& meta = file->meta();
    const std::int32_t shortest = *std::min_element(meta.kv_len.begin(), meta.kv_len.end());
    if (meta.config.hidden_size >= 1000 || shortest <= meta.load.q_len) continue;
    const auto weights = file->weights();
    REQUIRE(weights);
    if (quantised_linears(weights->weights) > 0
            ? quantised
            : meta.config.head_dim() == 80 || meta.config.model_type != ModelType::gpt_neox)
      files.push_back(path);
  }
  return files;
}

/// Runs the gate: each fault is caught at one tap at least of every file that shows it, and no tap is outside without a
/// fault. Unless `quantised`, `run` takes no GPTQ weights, and their files and faults are left out.
template <class Run>
void check_gate(bool quantised, Run&& run) {
  std::vector<Fault> all = faults();
  if (!quantised) std::erase_if(all, [](const Fault& fault) { return fault.quantised; });
  const std::vector<std::string> files = gate_files(quantised);
  REQUIRE(files.size() >= 4);
  std::map<std::string, std::size_t> files_caught;
  for (const std::string& path : files) {
    const auto file = golden::GoldenFile::open(path);
    REQUIRE(file);
    const auto weights = file->weights();
    INFO(path << " " << weights.status().message());
    REQUIRE(weights);
    CHECK(caught(*file, *weights, {.name = "no fault"}, run).empty());
    const bool is_quantised = quantised_linears(weights->weights) > 0;
    for (const Fault& fault : all) {
      if ((fault.concerns && !fault.concerns(file->meta().config)) || (fault.dense && is_quantised)) continue;
      INFO("fault: " << fault.name);
      const bool is_caught = !caught(*file, *weights, fault, run).empty();
      if (fault.everywhere) CHECK(is_caught);
      files_caught[fault.name] += is_caught;
    }
  }
  for (const Fault& fault : all) {
    INFO("fault: " << fault.name);
    CHECK(files_caught[fault.name] > 0);
  }
}

}  // namespace cf::test
