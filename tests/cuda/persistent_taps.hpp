#pragma once
// The taps of one layer in the persistent kernel beside the double oracle's.
#include <algorithm>
#include <vector>

#include "core/compare.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cuda/persistent/persistent_kernel.hpp"
#include "tests/cuda/device_layers.hpp"

namespace cf::test {

/// A batch's lengths, all different where kv_len is large enough.
inline std::vector<std::int32_t> lengths(const Workload& w, std::int32_t kv_len) {
  std::vector<std::int32_t> n;
  for (std::int64_t b = 0; b < w.batch; ++b) n.push_back(std::max(1, kv_len - 3 * std::int32_t(b)));
  return n;
}

/// Runs the first layer of `on` and calls f(name, error, budget) for each tap and both caches. The error is the
/// distance from the double oracle of `expected`, whose sizes are those of `on`.
template <class F>
void compare_taps(cuda::PersistentKernel& kernel, const cuda::Context& c, DeviceLayers& on, const HostLayers& expected,
                  int kv_len, F&& f) {
  using Layer = ops::DecodeLayer;
  const ModelConfig& m = expected.config;
  const std::int64_t batch = expected.load.batch, capacity = expected.load.capacity;
  on.set_kv_len(lengths(expected.load, kv_len));
  const LayerTensors got = on.tensors(0);
  require_ok(kernel.set_probe({.taps = got}));
  require_ok(kernel.enqueue(c.stream(), 0, 1, got.hidden, got.output));

  LayerState oracle(m, {.batch = batch, .kv_len = capacity, .capacity = capacity}, DType::f64);
  oracle.hidden = expected.hidden.converted(DType::f64);
  oracle.k_cache = expected.k_caches[0].converted(DType::f64);
  oracle.v_cache = expected.v_caches[0].converted(DType::f64);
  oracle.fill_rope_table(m.rope_theta, m.rope_scaling);
  oracle.set_kv_len(lengths(expected.load, kv_len));
  const Layer::Args args{.model = m, .weights = expected.weights[0].weights, .t = oracle.tensors()};
  require_ok(cpu_ref::run(args));
  const auto condition = cpu_ref::condition(args);
  REQUIRE(condition);
  const Budget budget = Layer::budget(Layer::dims(args), {DType::f32, m.dtype}, *condition);
  // Of the caches this compares all entries: the append has changed its own alone.
  for_each_activation(
      args.model.shape, Layer::dims(args).step,
      [&]<class V>(const TensorSpec& t, const V& tap, const Tensor& reference, auto) {
        if (!is_written(t.role)) return;
        const auto error = compare(fetch<V::rank>(tap), reference);
        REQUIRE(error);
        f(t.name, *error, budget);
      },
      got, oracle);
}

}  // namespace cf::test
