#pragma once
// A layer by its sites' own kernels, for a caller that has the cache as rows, too. Private to cuda/port and the Python
// package.
#include <map>
#include <type_traits>

#include "core/ops/decode_layer.hpp"
#include "cuda/port/run.hpp"
#include "cuda/step/choose.hpp"

namespace cf::cuda {

/// Which ops a layer of one token is made of whose caller has the cache as rows, too, and the modes of their sites in a
/// graph.
struct RowOps {
  bool few = false;  // ln_qkv takes the place of the first four sites
  std::map<SiteId, LaunchMode> modes{};

  LaunchMode mode(const Site& site) const {
    const auto found = modes.find(site.id);
    return found == modes.end() ? LaunchMode{.early = true} : found->second;
  }
};

/// Calls f(site, args) for every op of such a layer, in order, and stops at the first Status that is not ok: every
/// site's own op in the walk's order, or with `few` ln_qkv in the place of the first four, which gives the same bits.
/// Then nothing writes attn_in and qkv. AppendRows takes the place of the append, or follows ln_qkv.
template <class F>
Status for_each_op_of_rows(bool few, const ops::DecodeLayer::Args& a, const TokenRows& rows, F&& f) {
  ops::LayerNorm::Args norm;
  ops::Linear::Args qkv;
  ops::Rope::Args rope;
  return for_each_site(a.model, a.weights, a.t, [&]<class Args>(const Site& site, const Args& args) -> Status {
    if constexpr (std::is_same_v<Args, ops::LayerNorm::Args>)
      if (few && site.id == SiteId::input_layernorm) return norm = args, Status();
    if constexpr (std::is_same_v<Args, ops::Linear::Args>)
      if (few && site.id == SiteId::query_key_value) return qkv = args, Status();
    if constexpr (std::is_same_v<Args, ops::Rope::Args>)
      if (few) return rope = args, Status();
    if constexpr (std::is_same_v<Args, ops::KvAppend::Args>) {
      if (few) CF_TRY(f(names_of(a.model).query_key_value, ops::LnQkv::of_parts(norm, qkv, rope, args)));
      return f(site, AppendRows::Args{.append = args, .rows = rows, .is_appended = few});
    } else {
      return f(site, args);
    }
  });
}

/// Chooses them.
Result<RowOps> row_ops(const Target& target, const ops::DecodeLayer::Args& a);

/// Adds the launches of these ops.
Status prepare_layer(const ops::DecodeLayer::Args& a, const TokenRows& rows, LaunchList& launches);

}  // namespace cf::cuda
