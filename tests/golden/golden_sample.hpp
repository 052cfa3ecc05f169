#pragma once
// Small golden files made on the spot: inputs and weights from the generator, the reference taps from the oracle.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "apps/verify/golden_walk.hpp"
#include "core/procedural.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "golden/file/golden_file.hpp"
#include "tests/support/temp_dir.hpp"

namespace cf::test {

struct SampleOptions {
  DType dtype = DType::f16;
  std::string cache = "random", weights = "stored";
  std::int64_t q_len = 1;
  std::vector<std::int32_t> kv_len = {5, 3};
  bool parallel_residual = true;
};

/// A golden file's content, for a test to change before it is written.
struct GoldenSample {
  golden::GoldenMeta meta;
  std::map<std::string, Tensor> inputs, weights;
  std::map<std::string, std::map<std::string, Tensor>> taps;  // by variant
  std::map<std::string, golden::VariantInfo> variants;
  OwnedLayerWeights layer;
};

inline Tensor procedural_tensor(DType dtype, Shape shape, const std::string& name, std::uint64_t seed) {
  Tensor t(dtype, std::move(shape));
  fill_procedural(t.data(), dtype, 0, t.size(), ProceduralKind::activation, seed, name);
  return t;
}

inline void check_ok(const Status& s) {
  if (!s) throw std::runtime_error(s.message());
}

inline GoldenSample make_sample(const SampleOptions& o = {}) {
  ModelConfig c{.name = "small",
                .hidden_size = 32,
                .num_hidden_layers = 2,
                .num_attention_heads = 4,
                .intermediate_size = 48,
                .vocab_size = 64,
                .max_position_embeddings = 64,
                .rotary_dim = 4};
  c.use_parallel_residual = o.parallel_residual;
  c.dtype = o.dtype;
  GoldenSample s;
  golden::GoldenMeta& m = s.meta;
  m.producer = "the tests";
  m.command = "a 'quoted' command, \xc3\xa9";
  m.versions = "{\"oracle\": \"1\"}";
  m.model = c.name;
  m.config = c;
  m.layer = 1;
  m.dtype = o.dtype;
  m.seed = 0xfedcba9876543210;
  m.kv_len = o.kv_len;
  m.load = {std::int64_t(o.kv_len.size()), o.q_len, *std::max_element(o.kv_len.begin(), o.kv_len.end()), 0};
  m.cache = o.cache;
  m.weights = o.weights;

  s.layer = procedural_layer(c, c.dtype, m.layer, m.seed);
  m.weights_checksum = weights_checksum(c, s.layer.weights);
  if (o.weights == "stored") {
    std::size_t i = 0;
    for_each_weight(c, s.layer.weights, [&](const TensorSpec& t, const auto&, auto) {
      s.weights[std::string(t.name)] = s.layer.storage[i++].clone();
    });
  }

  LayerState state(c, m.load, DType::f64);
  state.set_kv_len(m.kv_len);
  state.fill_rope_table(c.rope_theta);
  const std::int64_t tokens = m.load.tokens(), half = c.rotary_dim / 2, d = c.head_dim(), heads = c.num_attention_heads;
  s.inputs["hidden"] = procedural_tensor(o.dtype, {tokens, c.hidden_size}, "hidden", m.seed);
  s.inputs["kv_len"] = state.kv_len.clone();
  s.inputs["positions"] = state.positions.clone();
  for (const auto& [name, table] : {std::pair{"cos", &state.cos}, std::pair{"sin", &state.sin}}) {
    Tensor rows(DType::f32, {tokens, half});
    for (std::int64_t t = 0; t < tokens; ++t)
      std::memcpy(rows.as<float>() + t * half, table->as<float>() + state.positions.as<std::int32_t>()[t] * half,
                  std::size_t(half) * sizeof(float));
    s.inputs[name] = std::move(rows);
  }
  const std::int64_t old = m.load.kv_len - o.q_len;
  if (old > 0)
    for (const char* name : {"k_cache", "v_cache"}) {
      Tensor cache = procedural_tensor(o.dtype, {m.load.batch, heads, old, d}, name, m.seed);
      const std::uint64_t sum = checksum(cache.data(), std::size_t(cache.size_bytes()));
      m.cache_checksum += name[0] == 'k' ? sum : 3 * sum;
      Tensor& filled = name[0] == 'k' ? state.k_cache : state.v_cache;
      for (std::int64_t row = 0; row < m.load.batch * heads; ++row)
        convert(static_cast<char*>(cache.data()) + std::size_t(row * old * d) * size_bytes(o.dtype), o.dtype,
                filled.as<double>() + row * m.load.kv_len * d, DType::f64, old * d);
      if (o.cache != "procedural") s.inputs[name] = std::move(cache);
    }
  convert(s.inputs["hidden"].data(), o.dtype, state.hidden.data(), DType::f64, state.hidden.size());

  s.variants["float64"] = {"float64", "float64", "sdpa", "cpu", {}};
  s.variants["float16_eager"] = {"float16_eager", "float16", "eager", "cpu", {}};
  const LayerTensors t = state.tensors();
  check_ok(for_each_site(c, s.layer.weights, t, [&](const Site& site, const auto& args) -> Status {
    CF_TRY(cpu_ref::run(args));
    for (const apps::SiteOutput& output : apps::site_outputs(site, args)) {
      Tensor tap = apps::read_tap(output, c, m.load, t.kv_len);
      s.taps["float16_eager"][output.tap] = tap.converted(DType::f16);
      s.taps["float64"][output.tap] = std::move(tap);
    }
    return {};
  }));
  return s;
}

inline Status write_sample(const GoldenSample& s, const std::string& path) {
  CF_TRY_ASSIGN(golden::GoldenWriter writer, golden::GoldenWriter::create(path, s.meta));
  for (const auto& [name, tensor] : s.inputs) CF_TRY(writer.add_input(name, tensor));
  for (const auto& [name, tensor] : s.weights) CF_TRY(writer.add_weight(name, tensor));
  for (const auto& [variant, taps] : s.taps)
    for (const auto& [name, tensor] : taps) CF_TRY(writer.add_tap(s.variants.at(variant), name, tensor));
  return writer.commit();
}

/// Fills in the seal of a golden file's bytes, by the schema's words.
inline void seal(std::string& file) {
  const std::uint64_t length = file.size() - 512, sum = checksum(file.data() + 512, length);
  std::fill_n(file.begin(), 512, '\0');
  std::memcpy(file.data(), "cfgolden", 8);
  std::memcpy(file.data() + 8, &length, 8);
  std::memcpy(file.data() + 16, &sum, 8);
}

/// How many entries a directory has.
inline std::ptrdiff_t entries(const std::string& directory) {
  return std::distance(std::filesystem::directory_iterator(directory), {});
}

}  // namespace cf::test
