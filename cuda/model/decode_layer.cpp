#include "cuda/model/decode_layer.hpp"

#include <type_traits>

#include "cuda/model/layer_ops.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/check.hpp"

namespace cf::cuda {
namespace {

/// Adds every site's own kernels in the walk's order. append(args) adds those that append to the cache.
template <class Append>
Status prepare_sites(const ops::DecodeLayer::Args& a, LaunchList& launches, Append&& append) {
  return for_each_site(a.model, a.weights, a.t, [&]<class Args>(const Site& site, const Args& args) -> Status {
    launches.set_label(site.name.data());  // a literal, which ends in a zero byte
    if constexpr (std::is_same_v<Args, ops::KvAppend::Args>)
      return append(args);
    else
      return prepare(args, launches);
  });
}

}  // namespace

Status prepare(const ops::DecodeLayer::Args& a, LaunchList& launches) {
  CF_TRY(check_call(a, launches));
  return prepare_sites(a, launches, [&](const ops::KvAppend::Args& append) { return prepare(append, launches); });
}

Status prepare_layer(const ops::DecodeLayer::Args& a, const TokenRows& rows, LaunchList& launches) {
  CF_TRY(check_call(a, launches));
  const auto store_rows = [&](const ops::KvAppend::Args& append) { return prepare(append, rows, launches); };
  if (!layer_ops(launches.arch(), a.model, a.weights, a.t).few) return prepare_sites(a, launches, store_rows);
  return for_each_layer_op(
      launches.arch(), a.model, a.weights, a.t, [&]<class Args>(const Args& args, const LaunchMode&) -> Status {
        CF_TRY(prepare(args, launches));
        if constexpr (!std::is_same_v<Args, ops::LnQkv::Args>) return {};
        return store_rows(
            {.k = a.t.k, .v = a.t.v, .kv_len = a.t.kv_len, .k_cache = a.t.k_cache, .v_cache = a.t.v_cache});
      });
}

}  // namespace cf::cuda
