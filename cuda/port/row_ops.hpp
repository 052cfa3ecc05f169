#pragma once
// A layer by its sites' own kernels, for a caller that has the cache as rows, too. Private to cuda/port and the Python
// package.
#include <type_traits>

#include "core/ops/decode_layer.hpp"
#include "cuda/model/layer_ops.hpp"
#include "cuda/port/token_rows.hpp"

namespace cf::cuda {

/// Calls f(args, mode, label) for every op of a layer of one token whose caller has the cache as rows, too, in order,
/// and stops at the first Status that is not ok: every site's own kernels in the walk's order, or ln_qkv in the place
/// of the first four, which gives the same bits. Then nothing writes attn_in and qkv. AppendRows takes the place of the
/// append, or follows ln_qkv. The label is what profiles call the op, null for its own name.
template <class F>
Status for_each_op_of_rows(const LayerOps& ops, const ops::DecodeLayer::Args& a, const TokenRows& rows, F&& f) {
  if (!ops.few)
    return for_each_site(a.model, a.weights, a.t, [&]<class Args>(const Site& site, const Args& args) -> Status {
      const LaunchMode mode = mode_of(ops, site, a.weights);
      const char* const label = site.name.data();  // a literal, which ends in a zero byte
      if constexpr (std::is_same_v<Args, ops::KvAppend::Args>)
        return f(AppendRows::Args{.append = args, .rows = rows}, mode, label);
      else
        return f(args, mode, label);
    });
  return for_each_layer_op(
      ops, a.model, a.weights, a.t, [&]<class Args>(const Args& args, const LaunchMode& mode) -> Status {
        CF_TRY(f(args, mode, nullptr));
        if constexpr (!std::is_same_v<Args, ops::LnQkv::Args>) return {};
        const ops::KvAppend::Args append{
            .k = a.t.k, .v = a.t.v, .kv_len = a.t.kv_len, .k_cache = a.t.k_cache, .v_cache = a.t.v_cache};
        return f(AppendRows::Args{.append = append, .rows = rows, .is_appended = true}, mode, nullptr);
      });
}

/// Adds the launches of these ops.
Status prepare_layer(const ops::DecodeLayer::Args& a, const TokenRows& rows, LaunchList& launches);

}  // namespace cf::cuda
