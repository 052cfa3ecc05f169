#pragma once
#include <string_view>

#include "core/fp8.hpp"
#include "core/model/weights.hpp"

namespace cf {

/// Whether a Linear of a layer is fp8.
inline bool has_fp8(const ModelSpec& m, const LayerWeights& layer) {
  bool found = false;
  for_each_linear(m, layer, [&](const Site&, const LinearParams& l, const LinearSize&) { found |= is_fp8(l.weight); });
  return found;
}

/// Refuses a model that has an fp8 Linear: `backend` has no kernels for it. `name` is whose refusal it is.
inline Status check_no_fp8(std::string_view name, std::string_view backend, const ModelSpec& m, const ModelWeights& w) {
  for (const LayerWeights& layer : w.layers)
    if (has_fp8(m, layer)) return no_fp8_kernels(name, backend);
  return {};
}

}  // namespace cf
