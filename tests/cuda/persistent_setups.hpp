#pragma once
// How the tests of the persistent kernel run it: on which plans, in which launches, on which layers.
#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "core/compare.hpp"
#include "core/model/examples.hpp"
#include "cuda/persistent/persistent_kernel.hpp"
#include "tests/cuda/device_layers.hpp"
#include "tests/cuda/two_blocks_kernel.hpp"
#include "tests/support/grouped.hpp"
#include "tests/support/setups.hpp"

namespace cf::test {

using cuda::PersistentKernel;

/// The device's own plans with the library's kernels, or an RTX 5090's plans with kernels of which an SM holds two
/// blocks.
enum class Plans { own, rtx5090 };
inline constexpr Plans kPlans[] = {Plans::own, Plans::rtx5090};
inline const char* to_string(Plans p) { return p == Plans::own ? "own plans" : "an RTX 5090's plans"; }

/// Test cases for each Plans, which is `plans`, and for each of them and each dtype, which is `dtype`: together they take
/// minutes, and so they can run beside each other.
#define CF_FOR_PLANS(name, tags) TEMPLATE_TEST_CASE_SIG(name, tags, ((Plans plans), plans), Plans::own, Plans::rtx5090)
#define CF_FOR_PLANS_AND_DTYPES(name, tags)                                                                \
  TEMPLATE_TEST_CASE_SIG(name, tags, ((Plans plans, DType dtype), plans, dtype), (Plans::own, DType::f16), \
                         (Plans::own, DType::bf16), (Plans::rtx5090, DType::f16), (Plans::rtx5090, DType::bf16))

inline cuda::Context planned(Plans plans, cudaStream_t stream = nullptr) {
  cuda::Context c = context(stream);
  if (plans == Plans::rtx5090) c.set_plan_arch(cuda::kRtx5090);
  return c;
}

/// Heads share keys where they can, although the caches are short. `layers` are others than those of `on`, if any.
inline PersistentKernel kernel_of(Plans plans, const cuda::Context& c, const DeviceLayers& on,
                                  cuda::PersistentChoices choices = {}, std::int64_t first_model_layer = 0,
                                  std::span<const cuda::PersistentLayer> layers = {}) {
  if (!choices.shares_keys) choices.shares_keys = true;
  Result<PersistentKernel> kernel = PersistentKernel::create(
      c, cuda::persistent_model(on.config(), on.config().dtype),
      layers.empty() ? std::span<const cuda::PersistentLayer>(on.layers) : layers, on.sequences(), on.rope(),
      {.choices = choices,
       .first_model_layer = first_model_layer,
       .kernels = plans == Plans::own ? nullptr : two_blocks_kernels});
  require_ok(kernel.status());
  return std::move(*kernel);
}

/// One launch for all layers, one a layer, two a layer.
enum class Launches { persistent, layer, split };
inline const char* to_string(Launches l) {
  return l == Launches::persistent ? "persistent" : l == Launches::layer ? "layer" : "split";
}

inline Status run(PersistentKernel& kernel, const cuda::Context& c, const DeviceLayers& on,
                  Launches launches = Launches::persistent) {
  const LayerTensors t = on.tensors(0);
  const std::int64_t layers = std::int64_t(on.layers.size());
  if (launches == Launches::persistent) return kernel.enqueue(c.stream(), 0, layers, t.hidden, t.output);
  for (std::int64_t l = 0; l < layers; ++l) {
    const ConstAnyView<2> input = l == 0 ? t.hidden : ConstAnyView<2>();
    CF_TRY(launches == Launches::layer ? kernel.enqueue(c.stream(), l, l + 1, input, t.output)
                                       : kernel.enqueue_split(c.stream(), l, input, t.output));
  }
  return {};
}

inline bool same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Tensor& x, const Tensor& y) { return test::same_bits(x, y); });
}

/// The arithmetic of a test's layers.
enum class Kind { parallel, sequential, gated };
inline constexpr Kind kKinds[] = {Kind::parallel, Kind::sequential, Kind::gated};
inline const char* to_string(Kind k) {
  return k == Kind::parallel ? "parallel residual" : k == Kind::sequential ? "sequential residual" : "Llama's layers";
}

/// A layer of GPT-NeoX, or, of the same sizes, one of Llama with four query heads for each kv head.
inline ModelConfig model_of_kind(Kind kind, std::int64_t heads, std::int64_t head_dim, std::int64_t rotary_dim,
                                 std::int64_t intermediate) {
  if (kind == Kind::gated)
    return gated_model_of(ModelType::llama, heads, heads / 4, head_dim, heads * head_dim, intermediate);
  ModelConfig m = model_of(heads, head_dim, rotary_dim, intermediate);
  m.use_parallel_residual = kind == Kind::parallel;
  return m;
}

/// How a test's Linears are stored: dense, as GPTQ's 4 bits in groups of 128 columns, or as HostLayers::mix() has them.
enum class Linears { dense, packed, mixed };
inline constexpr Linears kLinears[] = {Linears::dense, Linears::packed, Linears::mixed};
inline const char* to_string(Linears l) {
  return l == Linears::dense ? "dense" : l == Linears::packed ? "packed" : "mixed";
}
inline constexpr WeightFormat kPacked{.bits = 4, .group_size = 128};

inline HostLayers host_layers(const ModelConfig& m, const Workload& load, Linears linears) {
  HostLayers host(m, load, "", linears == Linears::packed ? kPacked : WeightFormat{});
  if (linears == Linears::mixed) host.mix();
  return host;
}

inline ModelConfig small_model(DType dtype, std::int64_t layers = 3, Kind kind = Kind::parallel) {
  ModelConfig m = model_of_kind(kind, 4, 64, 16, 512);
  m.num_hidden_layers = layers;
  m.dtype = dtype;
  return m;
}

/// What lies outside the layers of a small whole model, on the device.
class DeviceEnds {
 public:
  static constexpr std::int64_t vocab = 1031;

  DeviceEnds(const cuda::Context& c, const HostLayers& host, DeviceLayers& on) : context_(c), batch_(host.load.batch) {
    const ModelConfig& m = host.config;
    const bool is_rms = m.spec().traits.norm == NormKind::rmsnorm;
    const auto matrix = [&](const char* name) {
      const Tensor host_matrix = activations(m.dtype, {vocab, m.hidden_size}, name);
      return ConstAnyView<2>(on.copy(host_matrix.data(), host_matrix.size_bytes()), {vocab, m.hidden_size}, m.dtype);
    };
    const auto vector = [&](const char* name) {
      const Tensor host_vector = activations(m.dtype, {m.hidden_size}, name);
      return ConstAnyView<1>(on.copy(host_vector.data(), host_vector.size_bytes()), {m.hidden_size}, m.dtype);
    };
    const auto words = [&] {
      return View<std::int32_t, 1>{static_cast<std::int32_t*>(on.allocate(batch_ * 4)), {batch_}};
    };
    ends = cuda::PersistentEnds{.embed_in = matrix("embed_in"),
                                .final_layer_norm = {vector("gamma"), is_rms ? ConstAnyView<1>() : vector("beta")},
                                .embed_out = matrix("embed_out"),
                                .ids = words(),
                                .positions = on.positions,
                                .kv_len = on.kv_len,
                                .chosen = words()};
    logits = AnyView<2>(on.allocate(batch_ * vocab * 2), {batch_, vocab}, m.dtype);
  }

  void set_ids(const std::vector<std::int32_t>& ids) {
    require_ok(cuda::copy_to_device(context_, ends.ids.data, ids.data(), ids.size() * 4));
  }
  std::vector<std::int32_t> words_of(const View<std::int32_t, 1>& view) const {
    std::vector<std::int32_t> words(static_cast<std::size_t>(view.shape[0]));
    require_ok(cuda::copy_to_host(context_, words.data(), view.data, words.size() * 4));
    return words;
  }
  /// The highest logit of each sequence, the first of equal ones.
  std::vector<std::int32_t> best() const {
    const Tensor rows = fetch<2>(logits);
    std::vector<std::int32_t> ids;
    for (std::int64_t b = 0; b < batch_; ++b) {
      std::int32_t id = 0;
      for (std::int32_t i = 1; i < vocab; ++i)
        if (rows.at(b * vocab + i) > rows.at(b * vocab + id)) id = i;
      ids.push_back(id);
    }
    return ids;
  }

  cuda::PersistentEnds ends;
  AnyView<2> logits;

 private:
  cuda::Context context_;
  std::int64_t batch_;
};

inline PersistentKernel kernel_of_tokens(Plans plans, const cuda::Context& c, const DeviceLayers& on,
                                         const DeviceEnds& ends, std::span<const cuda::PersistentLayer> layers = {}) {
  Result<PersistentKernel> kernel = PersistentKernel::create(
      c, cuda::persistent_model(on.config(), on.config().dtype),
      layers.empty() ? std::span<const cuda::PersistentLayer>(on.layers) : layers, on.sequences(), on.rope(),
      {.ends = ends.ends, .kernels = plans == Plans::own ? nullptr : two_blocks_kernels});
  require_ok(kernel.status());
  return std::move(*kernel);
}

}  // namespace cf::test
