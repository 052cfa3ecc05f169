#include "apps/bench/layer_bench.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "apps/bench/host_probe.hpp"
#include "core/procedural.hpp"
#include "cpu_ref/cpu_ref.hpp"

namespace cf::apps {
namespace {

using Clock = std::chrono::steady_clock;

double microseconds(Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); }

Tensor procedural_activation(DType dtype, Shape shape, std::uint64_t seed, std::string_view name) {
  Tensor t(dtype, std::move(shape));
  fill_procedural(t.data(), dtype, 0, t.size(), ProceduralKind::activation, seed, name);
  return t;
}

/// The cache entries before the append, as golden files define procedural ones.
Tensor old_cache(const ModelConfig& m, const Workload& load, std::uint64_t seed, DType stored, std::string_view name) {
  return procedural_activation(stored, {load.batch, m.kv_heads(), load.kv_len - load.q_len, m.head_dim()}, seed, name);
}

Tensor hidden_input(const ModelConfig& m, const Workload& load, std::uint64_t seed, DType stored) {
  return procedural_activation(stored, {load.tokens(), m.hidden_size}, seed, "hidden");
}

/// Copies each head's old entries to the front of its room in the cache.
void fill_cache(const Tensor& old, Tensor& cache) {
  const std::int64_t rows = old.shape()[0] * old.shape()[1], head_dim = old.shape()[3];
  const std::int64_t used = old.shape()[2] * head_dim, room = cache.shape()[2] * head_dim;
  for (std::int64_t r = 0; r < rows; ++r)
    convert(static_cast<const char*>(old.data()) + std::size_t(r * used) * size_bytes(old.dtype()), old.dtype(),
            static_cast<char*>(cache.data()) + std::size_t(r * room) * size_bytes(cache.dtype()), cache.dtype(), used);
}

/// Calls f(data, bytes) for every weight, or for the matrices alone: vectors are too short to measure a rate.
template <class F>
void for_each_block(const ModelConfig& m, const LayerWeights& weights, bool matrices, F&& f) {
  for_each_weight(m, weights, [&](const TensorSpec&, const auto& v, const auto& shape) {
    if (!matrices || shape.size() == 2) f(v.data, std::size_t(v.bytes()));
  });
  for_each_packed(m, weights, [&](const PackedWeight& w) { f(w.data.data, std::size_t(w.data.bytes())); });
}

void evict(const ModelConfig& m, const LayerWeights& weights) { for_each_block(m, weights, false, evict_from_caches); }

double read_rate(const ModelConfig& m, const LayerWeights& weights) {
  ReadRate rate;
  for_each_block(m, weights, true, [&](const void* data, std::size_t bytes) { rate.add(data, bytes); });
  return rate.bytes_per_s();
}

DType weight_dtype(const LayerWeights& w) { return w.input_layernorm.gamma.dtype; }

/// A site's times over the runs.
struct SiteSeries {
  Timing timing;
  std::vector<double> time_us;
};

}  // namespace

double LayerTiming::best_read() const { return *std::max_element(read_bytes_per_s.begin(), read_bytes_per_s.end()); }

double LayerTiming::median_read() const { return spread(read_bytes_per_s).median; }

double own_bytes_of(const std::vector<Timing>& sites) {
  double bytes = 0;
  for (const Timing& t : sites) bytes += t.own_bytes;
  return bytes;
}

void fill_inputs(const ModelConfig& m, const Workload& load, std::uint64_t seed, DType stored, LayerState& state) {
  const Tensor hidden = hidden_input(m, load, seed, stored);
  convert(hidden.data(), stored, state.hidden.data(), state.hidden.dtype(), hidden.size());
  fill_cache(old_cache(m, load, seed, stored, "k_cache"), state.k_cache);
  fill_cache(old_cache(m, load, seed, stored, "v_cache"), state.v_cache);
  state.fill_rope_table(m.rope_theta, m.rope_scaling);
}

Result<LayerTiming> time_layer(const ModelConfig& m, const LayerWeights& weights, LayerState& state,
                               const BenchOptions& options, const std::function<void()>& step) {
  const LayerTensors t = state.tensors();
  const DType weight = weight_dtype(weights);
  std::vector<SiteSeries> series;
  std::vector<double> total_us;
  LayerTiming result;
  for (std::int64_t run = -options.warmup; run < options.runs; ++run) {
    // The streaming read is cold in any case, since it measures memory.
    evict(m, weights);
    const double read = read_rate(m, weights);
    if (!options.warm) {
      // In a whole model the other layers' weights would have displaced these.
      evict(m, weights);
      evict_from_caches(state.k_cache.data(), std::size_t(state.k_cache.size_bytes()));
      evict_from_caches(state.v_cache.data(), std::size_t(state.v_cache.size_bytes()));
    }
    std::size_t place = 0;
    const Clock::time_point begin = Clock::now();
    CF_TRY(for_each_site(m, weights, t, [&]<class Args>(const Site& site, const Args& args) -> Status {
      const Clock::time_point start = Clock::now();
      CF_TRY(cpu_ref::run(args));
      const double time_us = microseconds(Clock::now() - start);
      using Op = typename Args::Op;
      if (place == series.size()) {
        const double bytes = Op::cost(Op::dims(args), kActivation, weight).bytes;
        series.push_back(
            {{std::string(site.name), std::string(Op::name), {}, bytes, bytes - activation_bytes(args)}, {}});
      }
      if (run >= 0) series[place].time_us.push_back(time_us);
      ++place;
      return {};
    }));
    if (run >= 0) {
      total_us.push_back(microseconds(Clock::now() - begin));
      result.read_bytes_per_s.push_back(read);
    }
    step();
  }
  for (SiteSeries& s : series) {
    s.timing.time_us = spread(std::move(s.time_us));
    result.sites.push_back(std::move(s.timing));
  }
  using Layer = ops::DecodeLayer;
  const Layer::Args args{.model = m, .weights = weights, .t = t};
  result.total = {"total", std::string(Layer::name), spread(std::move(total_us)),
                  Layer::cost(Layer::dims(args), kActivation, weight).bytes, own_bytes_of(result.sites)};
  return result;
}

Result<LayerCheck> check_layer(const ModelConfig& m, const LayerWeights& weights, const Tensor& output,
                               Precision precision, LayerState& inputs) {
  using Layer = ops::DecodeLayer;
  const Layer::Args args{.model = m, .weights = weights, .t = inputs.tensors()};
  CF_TRY(cpu_ref::run(args));
  CF_TRY_ASSIGN(const Condition condition, cpu_ref::condition(args));
  CF_TRY_ASSIGN(Comparison error, compare(output, inputs.output));
  return LayerCheck{std::move(error), Layer::budget(Layer::dims(args), precision, condition)};
}

SiteWalk cpu_walk(const ModelConfig& m, const LayerWeights& weights, LayerState& state) {
  return [&](const AddTap& add) {
    return for_each_site(m, weights, state.tensors(), [&](const Site& site, const auto& args) -> Status {
      CF_TRY(cpu_ref::run(args));
      for (const SiteOutput& output : site_outputs(site, args)) CF_TRY(add(output));
      return {};
    });
  };
}

Status dump_layer(const std::string& path, golden::GoldenMeta meta, const golden::VariantInfo& variant,
                  LayerState& inputs, const SiteWalk& walk) {
  const ModelConfig& m = meta.config;
  meta.cache = meta.load.kv_len == meta.load.q_len ? "none" : "procedural";
  if (meta.cache == "procedural") {
    const Tensor k = old_cache(m, meta.load, meta.seed, meta.dtype, "k_cache"),
                 v = old_cache(m, meta.load, meta.seed, meta.dtype, "v_cache");
    meta.cache_checksum =
        checksum(k.data(), std::size_t(k.size_bytes())) + 3 * checksum(v.data(), std::size_t(v.size_bytes()));
  }
  CF_TRY_ASSIGN(golden::GoldenWriter writer, golden::GoldenWriter::create(path, meta));

  // The file's RoPE table has one row for each token.
  const std::int64_t tokens = meta.load.tokens(), half = m.rotary_dim / 2;
  const auto rows_of = [&](const Tensor& table) {
    Tensor rows(DType::f32, {tokens, half});
    for (std::int64_t t = 0; t < tokens; ++t)
      std::copy_n(table.as<float>() + inputs.positions.as<std::int32_t>()[t] * half, half, rows.as<float>() + t * half);
    return rows;
  };
  CF_TRY(writer.add_input("hidden", hidden_input(m, meta.load, meta.seed, meta.dtype)));
  CF_TRY(writer.add_input("kv_len", inputs.kv_len));
  CF_TRY(writer.add_input("positions", inputs.positions));
  if (half > 0) {
    CF_TRY(writer.add_input("cos", rows_of(inputs.cos)));
    CF_TRY(writer.add_input("sin", rows_of(inputs.sin)));
  }

  const LayerTensors tensors = inputs.tensors();
  CF_TRY(walk([&](const SiteOutput& output) {
    return writer.add_tap(variant, output.tap, read_tap(output, m, meta.load, tensors.kv_len));
  }));
  return writer.commit();
}

}  // namespace cf::apps
