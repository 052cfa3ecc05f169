#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/model/config.hpp"
#include "core/model/weights.hpp"
#include "golden/checkpoint/checkpoint.hpp"

namespace cf::python {

/// Where weights lie: `none` after drop_values().
enum class Place { host, device, none };

/// A model's config and its weights. `owner` keeps the weights' memory: the mapped files, or a Python object.
struct Weights {
  ModelConfig config;
  ModelWeights weights;
  std::shared_ptr<const void> owner;
  std::vector<std::string> notes;
  Place place = Place::host;
  std::int64_t copied_bytes = 0;                       // of tensors that were joined when they were loaded
  bool procedural = false;                             // no checkpoint's
  std::int64_t layers_left_out = 0;                    // behind the last one of `weights`
  std::optional<checkpoint::Checkpoint> checkpoint{};  // while the weights lie in its files

  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for_each_model_weight(config.spec(), weights,
                          [&](const auto&, const auto& view, const auto&) { sum += view.bytes(); });
    for (const LayerWeights& layer : weights.layers)
      for_each_linear(config.spec(), layer, [&](const Site&, const LinearParams& l, const LinearSize&) {
        if (const auto* packed = std::get_if<PackedWeight>(&l.weight)) sum += packed->data.bytes();
      });
    return sum;
  }

  /// Gives the weights' memory back. Formats, dtypes and shapes stay.
  void drop_values() {
    const ModelSpec spec = config.spec();
    for_each_model_weight(spec, weights, [](const TensorSpec&, auto& view, const auto&) { view.data = nullptr; });
    tie_embeddings(spec, weights);
    place = Place::none;
    owner.reset();
    checkpoint.reset();
  }
};

}  // namespace cf::python
