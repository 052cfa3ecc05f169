#pragma once
// A layer by its sites' own kernels. Private to cuda/model and the Python package.
#include <type_traits>

#include "core/ops/decode_layer.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/check.hpp"

namespace cf::cuda {

/// Adds every site's own kernels in the walk's order. `append(args)` adds those that append to the cache.
template <class Append>
Status prepare_layer(const ops::DecodeLayer::Args& a, LaunchList& launches, Append&& append) {
  CF_TRY(check_call(a, launches));
  return for_each_site(a.model, a.weights, a.t, [&](const Site& site, const auto& args) -> Status {
    launches.set_label(site.name.data());  // a literal, which ends in a zero byte
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(args)>, ops::KvAppend::Args>)
      return append(args);
    else
      return prepare(args, launches);
  });
}

}  // namespace cf::cuda
