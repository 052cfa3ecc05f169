#include "cuda/step/outline.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/procedural.hpp"
#include "cuda/ops/linear/pack/pack.hpp"
#include "cuda/step/choose.hpp"

namespace cf::cuda {

template <class V>
void StepOutline::give_address(V& view) {
  view.data = reinterpret_cast<typename V::element*>(next_);
  next_ += std::uintptr_t(view.bytes() + 255) / 256 * 256;
}

void StepOutline::pack(LinearParams& linear, const LinearSize& size, WeightFormat format, bool is_qkv) {
  const auto tiles = [](std::int64_t n, std::int64_t tile) { return std::int32_t((n + tile - 1) / tile); };
  // 8-bit codes have two columns an input, and an order.
  const int planes = format.bits / 4;
  const std::int64_t group = format.group_size > 0 ? format.group_size : size.in;
  const GptqLayout layout{.row_tiles = tiles(size.out, kGptqRows),
                          .chunks = tiles(planes * size.in, kGptqColumns),
                          .groups = planes * tiles(size.in, group),
                          .columns_per_group = tiles(group, 32) * 32,
                          .inputs = std::int32_t(size.in),
                          .has_order = planes > 1,
                          .in_order = true,
                          .fits_f16 = true,
                          .pairs = is_qkv ? qkv_pairs(spec) : RopePairs{}};
  PackedWeight packed{
      .packer = kCudaPacker, .format = format, .out = size.out, .in = size.in, .data = {}, .layout = {}};
  packed.data.shape = {layout.words()};
  give_address(packed.data);
  static_assert(sizeof layout <= sizeof packed.layout && std::is_trivially_copyable_v<GptqLayout>);
  std::memcpy(packed.layout.data(), &layout, sizeof layout);
  linear.weight = packed;
}

StepOutline::StepOutline(const ModelSpec& model, const StepSizes& sizes, DType activation, WeightFormat linears,
                         std::int64_t rows)
    : spec(model), weights(outline_model(model, activation, linears)) {
  for_each_model_weight(spec, weights, [&](const TensorSpec&, auto& view, const auto&) { give_address(view); });
  for (LayerWeights& w : weights.layers)
    for_each_linear(spec, w, [&](const Site& site, LinearParams& l, const LinearSize& size) {
      if (auto* const packed = std::get_if<PackedWeight>(&l.weight))
        give_address(packed->data);  // fp8
      else if (linears.bits)
        pack(l, size, linears, site.id == SiteId::query_key_value);
    });
  tie_embeddings(spec, weights);
  for_each_activation(
      spec.shape, sizes,
      [&](const TensorSpec&, auto& view, const auto& shape) {
        point(view, nullptr, shape, activation);
        give_address(view);
      },
      tensors.layer);
  const std::int64_t window = spec.traits.window;
  const bool is_bound = window > 0 && spec.traits.full_layers.empty();
  tensors.layer.max_kv_len = is_bound ? std::min(window, sizes.capacity) : sizes.capacity;
  tensors.ids.shape = {sizes.tokens()};
  give_address(tensors.ids);
  const auto matrix = [&](AnyView<2>& view, std::int64_t count, std::int64_t columns) {
    view = {nullptr, {count, columns}, activation};
    give_address(view);
  };
  for (AnyView<2>& h : tensors.hidden) matrix(h, sizes.tokens(), spec.shape.hidden_size);
  matrix(tensors.final_norm, rows, spec.shape.hidden_size);
  matrix(tensors.logits, rows, spec.shape.vocab_size);
  for (std::size_t i = 0; i < weights.layers.size(); ++i) {
    caches_.push_back({tensors.layer.k_cache, tensors.layer.v_cache});
    give_address(caches_.back().k);
    give_address(caches_.back().v);
  }
  tensors.caches = caches_;
}

Result<Program> StepOutline::record_layer(std::int64_t layer) const {
  LayerTensors t = tensors.layer;
  t.hidden = tensors.hidden[0];
  t.output = tensors.hidden[1];
  t.k_cache = caches_[std::size_t(layer)].k;
  t.v_cache = caches_[std::size_t(layer)].v;
  return cf::record_layer(spec.of_layer(layer), weights.layers[std::size_t(layer)], t, layer);
}

}  // namespace cf::cuda
