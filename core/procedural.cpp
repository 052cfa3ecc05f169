#include "core/procedural.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <future>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/fp8.hpp"

namespace cf {
namespace {

constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15ull;

constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

std::uint64_t fnv1a64(std::string_view s) {
  std::uint64_t h = 0xcbf29ce484222325ull;
  for (char c : s) h = (h ^ std::uint8_t(c)) * 0x100000001b3ull;
  return h;
}

constexpr int bell(std::uint64_t key, std::uint64_t i) {
  const std::uint64_t r = mix(key + (i + 1) * kStep);
  return int(r & 511) + int(r >> 9 & 511) + int(r >> 18 & 511) + int(r >> 27 & 511) - 1022;
}

constexpr float value(ProceduralKind kind, int n) {
  switch (kind) {
    case ProceduralKind::weight: return float(n) * 0x1p-14f;
    case ProceduralKind::gain: return 1.0f + float(n >> 3) * 0x1p-10f;
    case ProceduralKind::activation: return float(n) * 0x1p-8f;
  }
  return 0;
}

std::uint64_t key_of(std::uint64_t seed, std::string_view name) { return mix(fnv1a64(name) ^ mix(seed)); }

/// Fills a part of a GPTQ weight. The name says which part.
void fill_gptq(Tensor& t, WeightFormat format, std::uint64_t seed, std::string_view name) {
  const std::uint64_t key = key_of(seed, name);
  if (name.ends_with("scales")) {
    for (std::int64_t i = 0; i < t.size(); ++i)
      t.as<f16>()[i] =
          narrow<f16>(std::ldexp(value(ProceduralKind::gain, bell(key, std::uint64_t(i))), -4 - format.bits));
    return;
  }
  const bool index = name.ends_with("g_idx"), zeros = name.ends_with("qzeros");
  const std::uint32_t ones = format.bits == 4 ? 0x11111111u : 0x01010101u, below = format.bits == 4 ? 7 : 127;
  const std::int64_t group_size = format.group_size == -1 ? t.size() : format.group_size;
  for (std::int64_t i = 0; i < t.size(); ++i) {
    const auto r = std::uint32_t(mix(key + (std::uint64_t(i) + 1) * kStep));
    t.as<std::int32_t>()[i] =
        index ? std::int32_t(i / group_size) : std::int32_t(zeros ? ones * below + (r & ones) : r);
  }
}

int most_threads() { return int(std::clamp(std::thread::hardware_concurrency(), 1u, 16u)); }

/// Does work on a thread of its own; where it makes few bytes, or where there is no thread, when it is asked for.
template <class Make>
std::future<std::invoke_result_t<Make>> begin(const Make& make, std::int64_t bytes) {
  if (bytes >= (1 << 19)) {
    try {
      return std::async(std::launch::async, make);
    } catch (const std::system_error&) {
    }
  }
  return std::async(std::launch::deferred, make);
}

/// Calls fill(first, count) for all of `size` elements, where these are many on several threads.
template <class Fill>
void fill_on_threads(std::int64_t size, std::int64_t element_bytes, int threads, const Fill& fill) {
  constexpr std::int64_t least = 1 << 19;  // elements of a part
  const std::int64_t parts = std::clamp<std::int64_t>(size / least, 1, threads);
  const std::int64_t part = (size + parts - 1) / parts;
  std::vector<std::future<void>> made;
  for (std::int64_t first = 0; first < size; first += part) {
    const auto fill_part = [&, first] { fill(first, std::min(part, size - first)); };
    made.push_back(begin(fill_part, first == 0 ? 0 : part * element_bytes));
  }
  for (std::future<void>& f : made) f.get();
}

/// The float8 number nearest to x, which lies within their range; of two the even one.
e4m3 nearest_e4m3(float x) {
  e4m3 best{0};
  const auto distance = [&](std::uint8_t bits) { return std::abs(std::abs(x) - widen<float>(e4m3{bits})); };
  for (std::uint8_t bits = 1; bits < 0x7f; ++bits) {
    const float nearer = distance(best.bits) - distance(bits);
    if (nearer > 0 || (nearer == 0 && bits % 2 == 0)) best.bits = bits;
  }
  if (x < 0) best.bits |= 0x80;
  return best;
}

OwnedFp8 make_fp8(const PackedWeight& like, std::uint64_t seed, const std::string& name, int threads) {
  OwnedFp8 w(like.out, like.in, like.format.group_size);
  static const std::vector<e4m3> table = [] {
    std::vector<e4m3> numbers;
    for (int n = -1022; n <= 1022; ++n) numbers.push_back(nearest_e4m3(float(n) * 0x1p-2f));
    return numbers;
  }();
  const std::uint64_t codes = key_of(seed, name + ".weight"), scales = key_of(seed, name + ".weight_scale");
  fill_on_threads(w.weight.out * w.weight.in, 1, threads, [&](std::int64_t first, std::int64_t count) {
    for (std::int64_t i = first; i < first + count; ++i)
      w.codes()[i] = table[std::size_t(bell(codes, std::uint64_t(i)) + 1022)];
  });
  for (std::int64_t i = 0; i < w.weight.out * w.view().groups(); ++i)
    w.scales()[i] = value(ProceduralKind::gain, bell(scales, std::uint64_t(i))) * 0x1p-12f;
  return w;
}

/// Makes every Linear a quantised weight of this format, still without values. A format of 0 bits leaves them dense.
void mark_quantised(const ModelSpec& m, WeightFormat format, LayerWeights& weights) {
  if (!format.bits) return;
  for_each_linear(m, weights, [&](const Site&, LinearParams& l, const LinearSize& size) {
    const std::int64_t group = format.group_size == -1 ? size.in : format.group_size;
    if (format.is_fp8)
      l.weight = fp8_outline(size.out, size.in, group);
    else
      l.weight = GptqWeight{.bits = format.bits, .group_size = group};
  });
}

/// Calls f(name, packed) for every fp8 weight of a layer, by its module's name in the model.
template <class F>
void for_each_fp8(const ModelSpec& m, std::int64_t layer, LayerWeights& weights, F&& f) {
  for_each_linear(m, weights, [&](const Site& site, LinearParams& l, const LinearSize&) {
    if (is_fp8(l.weight))
      f(names_of(m).layer(layer).substr(names_of(m).base().size()) + std::string(site.name),
        std::get<PackedWeight>(l.weight));
  });
}

/// Makes the weight that spec names, and points the view to it.
template <class V, class Extents>
Tensor make_weight(const TensorSpec& spec, V& view, const Extents& shape, DType dense, std::uint64_t seed,
                   WeightFormat linears, int threads = 1) {
  const DType dtype = dtype_of_view<V>(dense);
  Tensor t(dtype, Shape(shape.begin(), shape.end()));
  if (is_weight(spec.role)) {
    const auto kind = spec.role == Role::gain ? ProceduralKind::gain : ProceduralKind::weight;
    const auto element_bytes = std::int64_t(size_bytes(dtype));
    fill_on_threads(t.size(), element_bytes, threads, [&](std::int64_t first, std::int64_t count) {
      fill_procedural(static_cast<std::byte*>(t.data()) + first * element_bytes, dtype, first, count, kind, seed,
                      spec.name);
    });
  } else {
    fill_gptq(t, linears, seed, spec.name);
  }
  point(view, t.data(), shape, dtype);
  return t;
}

/// A tensor's name without the model's base.
std::string_view name_in_model(const ModelSpec& m, std::string_view name) {
  if (const std::string_view base = names_of(m).base(); name.starts_with(base)) name.remove_prefix(base.size());
  return name;
}

/// A tensor that is being made, and its bytes.
struct Ahead {
  std::int64_t bytes = 0;
  std::future<Tensor> tensor;
};

/// Adds up the tensors' checksums, each times its number, from 1 on.
struct ChecksumInOrder {
  template <class V, class Extents>
  void operator()(const TensorSpec&, const V& view, const Extents&) {
    value += checksum(view.data, std::size_t(view.bytes())) * ++number;
  }
  void add_fp8(const ModelSpec& m, const LayerWeights& w) {
    for_each_linear(m, w, [&](const Site&, const LinearParams& l, const LinearSize&) {
      if (!is_fp8(l.weight)) return;
      const auto& data = std::get<PackedWeight>(l.weight).data;
      value += checksum(data.data, std::size_t(data.bytes())) * ++number;
    });
  }
  std::uint64_t value = 0, number = 0;
};

}  // namespace

void fill_procedural(void* out, DType dtype, std::int64_t first, std::int64_t count, ProceduralKind kind,
                     std::uint64_t seed, std::string_view name) {
  const std::uint64_t key = key_of(seed, name);
  dispatch_float(dtype, [&](auto zero) {
    using T = decltype(zero);
    // There are 2045 possible values. Each is rounded once here, so that the loop need not convert.
    std::vector<T> table(2045);
    for (int n = -1022; n <= 1022; ++n) table[std::size_t(n + 1022)] = narrow<T>(value(kind, n));
    T* o = static_cast<T*>(out);
    for (std::int64_t i = 0; i < count; ++i) o[i] = table[std::size_t(bell(key, std::uint64_t(first + i)) + 1022)];
  });
}

std::uint64_t checksum(const void* data, std::size_t bytes) {
  const char* p = static_cast<const char*>(data);
  std::uint64_t sum = bytes;
  const std::size_t words = bytes / 8;
  for (std::size_t i = 0; i < words; ++i) {
    std::uint64_t w;
    std::memcpy(&w, p + 8 * i, 8);
    sum += mix(w + (i + 1) * kStep);
  }
  if (const std::size_t rest = bytes % 8) {
    std::uint64_t w = 0;
    std::memcpy(&w, p + 8 * words, rest);
    sum += mix(w + (words + 1) * kStep);
  }
  return sum;
}

OwnedLayerWeights procedural_layer(const ModelSpec& m, DType dense, std::int64_t layer, std::uint64_t seed,
                                   WeightFormat linears, int threads) {
  OwnedLayerWeights owned;
  mark_quantised(m, linears, owned.weights);
  for_each_weight(m, owned.weights, [&](const TensorSpec& spec, auto& view, auto shape) {
    const std::string name = names_of(m).layer(layer).substr(names_of(m).base().size()) + std::string(spec.name);
    owned.storage.push_back(make_weight({spec.role, name}, view, shape, dense, seed, linears, threads));
  });
  for_each_fp8(m, layer, owned.weights, [&](const std::string& name, PackedWeight& packed) {
    OwnedFp8 made = make_fp8(packed, seed, name, threads);
    packed = made.weight;
    owned.storage.push_back(std::move(made.storage));
  });
  return owned;
}

ModelWeights outline_model(const ModelSpec& m, DType dense, WeightFormat linears) {
  ModelWeights outline;
  outline.layers.resize(std::size_t(m.shape.num_layers));
  for (LayerWeights& layer : outline.layers) mark_quantised(m, linears, layer);
  for_each_model_weight(m, outline, [&]<class V>(const TensorSpec&, V& view, auto shape) {
    point(view, nullptr, shape, dtype_of_view<V>(dense));
  });
  tie_embeddings(m, outline);
  return outline;
}

OwnedModelWeights procedural_outer(const ModelSpec& m, DType dense, std::uint64_t seed, WeightFormat linears) {
  OwnedModelWeights owned{outline_model(m, dense, linears), {}};
  std::vector<LayerWeights> layers = std::move(owned.weights.layers);
  owned.weights.layers.clear();
  for_each_model_weight(m, owned.weights, [&](const TensorSpec& spec, auto& view, auto shape) {
    owned.storage.push_back(
        make_weight({spec.role, name_in_model(m, spec.name)}, view, shape, dense, seed, linears, most_threads()));
  });
  owned.weights.layers = std::move(layers);
  tie_embeddings(m, owned.weights);
  return owned;
}

OwnedModelWeights procedural_model(const ModelSpec& m, DType dense, std::uint64_t seed, WeightFormat linears) {
  Result<OwnedModelWeights> made = procedural_model(m, dense, seed, linears, [](auto...) { return Status(); });
  return std::move(*made);
}

Result<OwnedModelWeights> procedural_model(const ModelSpec& m, DType dense, std::uint64_t seed, WeightFormat linears,
                                           const WeightsProgress& progress) {
  OwnedModelWeights owned{outline_model(m, dense, linears), {}};
  const std::int64_t all_bytes = weight_bytes(m, owned.weights) + packed_bytes(m, owned.weights);
  std::int64_t made_bytes = 0;
  Status told;
  // Threads make the next tensors; this one takes them in order.
  std::deque<Ahead> ahead;
  const auto take = [&] {
    owned.storage.push_back(ahead.front().tensor.get());
    made_bytes += ahead.front().bytes;
    ahead.pop_front();
    told = progress(made_bytes, all_bytes);
  };
  const auto threads = std::size_t(most_threads());
  for_each_model_weight(m, owned.weights, [&](const TensorSpec& spec, auto& view, auto shape) {
    if (told && ahead.size() == threads) take();
    if (!told) return;
    const auto make = [name = std::string(name_in_model(m, spec.name)), role = spec.role, &view, shape, dense, seed,
                       linears] {
      return make_weight({role, name}, view, shape, dense, seed, linears);
    };
    ahead.push_back({view.bytes(), begin(make, view.bytes())});
  });
  for (std::size_t layer = 0; layer < owned.weights.layers.size(); ++layer)
    for_each_fp8(m, std::int64_t(layer), owned.weights.layers[layer],
                 [&](const std::string& name, PackedWeight& packed) {
                   if (told && ahead.size() == threads) take();
                   if (!told) return;
                   const std::int64_t bytes = packed.data.bytes();
                   const auto make = [name, &packed, seed] {
                     OwnedFp8 made = make_fp8(packed, seed, name, 1);
                     packed = made.weight;
                     return std::move(made.storage);
                   };
                   ahead.push_back({bytes, begin(make, bytes)});
                 });
  while (told && !ahead.empty()) take();
  CF_TRY(told);
  tie_embeddings(m, owned.weights);
  return owned;
}

std::uint64_t weights_checksum(const ModelSpec& m, const LayerWeights& w) {
  ChecksumInOrder sum;
  for_each_weight(m, w, sum);
  sum.add_fp8(m, w);
  return sum.value;
}

std::uint64_t weights_checksum(const ModelSpec& m, const ModelWeights& w) {
  ChecksumInOrder sum;
  for_each_model_weight(m, w, sum);
  for (const LayerWeights& layer : w.layers) sum.add_fp8(m, layer);
  return sum.value;
}

}  // namespace cf
