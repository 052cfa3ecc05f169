#pragma once
// The ops of a layer as a graph has them, without CUDA's headers. Private to cuda/model.
#include <type_traits>
#include <utility>

#include "core/model/layer.hpp"
#include "core/ops/ln_qkv.hpp"
#include "core/ops/rope_append.hpp"
#include "cuda/ops/attention/attention.hpp"
#include "cuda/ops/linear/packed/sum.hpp"
#include "cuda/ops/rms_linear/rms_linear.hpp"
#include "cuda/runtime/arch.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// How a layer's ops are chosen and launched.
struct LayerOps {
  bool few = false;          // ln_qkv takes the place of the four sites from input_layernorm to kv_append
  bool sums = false;         // one launch makes attention.dense and mlp.dense_4h_to_h: LinearSum
  bool norms = false;        // the kernels of RmsQkv and RmsLinear normalise the token
  int share_heads = 1;       // query heads that attend together
  int key_splits = 1;        // blocks of a cluster of attention; 1 where attention has no clusters
  bool shares_sms = false;   // ln_qkv and the MLP's first product run on the same SMs: LaunchMode, for the latter
  int shared_percent = 0;    // of LaunchMode, for every op
  bool leaves_room = false;  // of LaunchMode, for every op
};

/// Whether a layer's first four sites, of however many tokens, are those of ln_qkv: LayerNorm, and q, k and v that are
/// interleaved by head.
bool begins_as_ln_qkv(const ModelSpec& m);

/// The order in which a packed query_key_value must have its rows for the layer's ops.
RopePairs qkv_pairs(const ModelSpec& m);

/// The plan of a layer's decode attention.
AttentionPlan attention_plan(const Arch& arch, const LayerTensors& t);

LayerOps layer_ops(const Arch& arch, const ModelSpec& m, const LayerWeights& w, const LayerTensors& t);
LaunchMode mode_of(const LayerOps& ops, const Site& s, const LayerWeights& w);
/// Whether ln_qkv computes this site.
bool is_part_of_ln_qkv(const Site& s);
ops::LnQkv::Args ln_qkv_args(const ModelSpec& m, const LayerWeights& w, const LayerTensors& t);

/// A visitor for a walk over sites: it calls f(site, args) with rope_append, at kv_append, in the place of rotary_emb
/// and of kv_append behind it. Nothing then writes k and v.
template <class F>
auto with_rope_append(F f) {
  return [f, rope = ops::Rope::Args{}]<class Args>(const auto& site, const Args& args) mutable -> Status {
    if constexpr (std::is_same_v<Args, ops::Rope::Args>) {
      rope = args;
      return {};
    } else if constexpr (std::is_same_v<Args, ops::KvAppend::Args>) {
      return f(site, ops::RopeAppend::of_parts(rope, args));
    } else {
      return f(site, args);
    }
  };
}

/// A visitor for a walk over sites: it calls f(site, args) with LinearSum, at mlp.dense_4h_to_h, in the place of
/// attention.dense and of mlp.dense_4h_to_h.
template <class F>
auto with_linear_sum(F f) {
  return [f, dense = ops::Linear::Args{}]<class Args>(const Site& site, const Args& args) mutable -> Status {
    if constexpr (std::is_same_v<Args, ops::Linear::Args>) {
      if (site.id == SiteId::dense) {
        dense = args;
        return {};
      }
      if (site.id == SiteId::dense_4h_to_h) return f(site, LinearSum::Args{dense, args});
    }
    return f(site, args);
  };
}

/// A visitor for a walk over sites: it calls f(site, args) with RmsLinear, at the product, in the place of an RMSNorm
/// and of the product behind it.
template <class F>
auto with_rms_linear(F f) {
  return [f, norm = ops::RmsNorm::Args{}]<class Args>(const Site& site, const Args& args) mutable -> Status {
    if constexpr (std::is_same_v<Args, ops::RmsNorm::Args>) {
      norm = args;
      return {};
    } else {
      if constexpr (std::is_same_v<Args, ops::Linear::Args>)
        if (norm.y && args.x.data == norm.y.data) return f(site, RmsLinear::Args{norm, args});
      return f(site, args);
    }
  };
}

/// A visitor for the ops that with_rms_linear() and with_rope_append() make: at kv_append it calls f(site, args) with
/// RmsQkv, in the place of query_key_value's RmsLinear and of rope_append.
template <class F>
auto with_rms_qkv(F f) {
  return [f, qkv = RmsLinear::Args{}]<class Args>(const Site& site, const Args& args) mutable -> Status {
    if constexpr (std::is_same_v<Args, RmsLinear::Args>) {
      if (site.id == SiteId::query_key_value) {
        qkv = args;
        return {};
      }
    }
    if constexpr (std::is_same_v<Args, ops::RopeAppend::Args>)
      return f(site, RmsQkv::Args{qkv.norm, qkv.linear, args});
    else
      return f(site, args);
  };
}

/// for_each_site() with RmsQkv and RmsLinear in the place of their parts.
template <class F>
Status for_each_site_with_norms(const ModelSpec& m, const LayerWeights& w, const LayerTensors& t, F f) {
  return for_each_site(m, w, t, with_rms_linear(with_rope_append(with_rms_qkv(f))));
}

/// Calls f(args, mode) for every op of a layer, in order, and stops at the first Status that is not ok: for_each_site()
/// with ln_qkv in the place of its parts where it takes the tokens, and else with rope_append in the place of its own;
/// with LinearSum, or with RmsQkv and RmsLinear, where these take the layer's weights.
template <class F>
Status for_each_layer_op(const LayerOps& ops, const ModelSpec& m, const LayerWeights& w, const LayerTensors& t, F&& f) {
  if (ops.few) CF_TRY(f(ln_qkv_args(m, w, t), mode_of(ops, names_of(m).query_key_value, w)));
  const auto visit = [&](const Site& site, const auto& args) {
    return ops.few && is_part_of_ln_qkv(site) ? Status() : f(args, mode_of(ops, site, w));
  };
  if (ops.norms) return for_each_site_with_norms(m, w, t, visit);
  if (ops.sums) return for_each_site(m, w, t, with_linear_sum(with_rope_append(visit)));
  return for_each_site(m, w, t, with_rope_append(visit));
}
template <class F>
Status for_each_layer_op(const Arch& arch, const ModelSpec& m, const LayerWeights& w, const LayerTensors& t, F&& f) {
  return for_each_layer_op(layer_ops(arch, m, w, t), m, w, t, std::forward<F>(f));
}

}  // namespace cf::cuda
