#include "cuda/decode_layer.hpp"

#include "cuda/attention.hpp"
#include "cuda/check.hpp"
#include "cuda/layernorm.hpp"
#include "cuda/ln_qkv.hpp"

namespace cf::cuda {
namespace {

/// Whether ln_qkv takes the place of the four sites that it is made of: on an H200 it is faster up to four tokens, and
/// with a dense weight slower from eight on. It must hold the tokens, and layernorm must lay a row out as it does.
bool takes_ln_qkv(const Arch& arch, const ModelConfig& m, const LayerWeights& w, const LayerTensors& t) {
  constexpr std::int64_t most_tokens = 4;
  const std::int64_t tokens = t.hidden.shape[0], h = m.hidden_size,
                     weight_bytes = std::int64_t(size_bytes(w.input_layernorm.gamma.dtype));
  if (tokens > most_tokens || layernorm_plan(arch, tokens, h, 1).elements != 8) return false;
  if (const auto* tiles = std::get_if<GptqTiles>(&w.query_key_value.weight)) {
    const GptqPlan plan = ln_qkv_gptq_plan(arch, gptq_sizes(*tiles), h, tokens, weight_bytes).product;
    return tiles->pairs == RopePairs{m.head_dim(), m.rotary_dim} && plan.grid > 0 && plan.tokens == tokens;
  }
  return ln_qkv_plan(arch, h, 3 * h, tokens, std::int64_t(size_bytes(t.hidden.dtype)), weight_bytes).tokens == tokens;
}

bool is_part_of_ln_qkv(const Site& s) {
  for (const Site& part : {site::input_layernorm, site::query_key_value, site::rotary_emb, site::kv_append})
    if (s.name == part.name) return true;
  return false;
}

ops::LnQkv::Args ln_qkv_args(const ModelConfig& m, const LayerWeights& w, const LayerTensors& t) {
  return {.x = t.hidden,
          .norm = w.input_layernorm,
          .linear = w.query_key_value,
          .cos = t.cos,
          .sin = t.sin,
          .positions = t.positions,
          .kv_len = t.kv_len,
          .q = t.q,
          .k = t.k,
          .v = t.v,
          .k_cache = t.k_cache,
          .v_cache = t.v_cache,
          .eps = m.layer_norm_eps};
}

/// Whether a site's kernel may start early. It holds its part of the SMs while it waits, which costs more than it gains
/// where the other branch can use them: beside attention and attention.dense runs the MLP's first product. That of
/// four-bit weights has its part by the time that attention begins.
bool starts_early(const Site& s, const LayerWeights& w) {
  if (s.name == site::dense.name) return std::holds_alternative<GptqTiles>(w.dense_h_to_4h.weight);
  return s.name != site::context.name;
}

/// Whether attention's blocks come in clusters, which find their SMs sooner where all kernels divide an SM's L1 alike.
/// Where each comes alone, as with four tokens of 32 heads, it is slower with the shared memory that this leaves.
bool attends_in_clusters(const Arch& arch, const LayerTensors& t) {
  return attention_plan(arch, t.q.shape[2], t.q.shape[0] * t.q.shape[1], t.max_kv_len).splits > 1;
}

/// Whether a site is of the longer branch, which goes through the attention, or ends it. The MLP's first product fills
/// what that leaves of the SMs. With many tokens it is as long.
bool is_urgent(const Site& s) { return s.name != site::dense_h_to_4h.name; }

}  // namespace

/// The unfused layer: every site's own kernel, in the walk's order.
Status enqueue_layer(const ModelConfig& config, const LayerWeights& weights, const LayerTensors& tensors,
                     Context& context) {
  return for_each_site(config, weights, tensors, [&](const Site&, const auto& args) { return run(args, context); });
}

/// All sites are checked before the first is launched.
Status run(const ops::DecodeLayer::Args& a, Context& context) {
  CF_TRY(check_call(a, context));
  Context checking = context;
  checking.set_dry_run(true);
  for (Context* c : {&checking, &context}) CF_TRY(enqueue_layer(*a.config, a.weights, a.t, *c));
  return {};
}

Status capture_layer(const ModelConfig& m, const LayerWeights& w, const LayerTensors& t, DataflowCapture& graph) {
  const bool few = takes_ln_qkv(graph.arch(), m, w, t);
  graph.set_side_by_side(few && attends_in_clusters(graph.arch(), t));
  const auto add = [&](const Site& site, const auto& args) {
    return graph.run(args, few && is_urgent(site), starts_early(site, w));
  };
  if (few) CF_TRY(add(site::query_key_value, ln_qkv_args(m, w, t)));
  return for_each_site(m, w, t, [&](const Site& site, const auto& args) {
    return few && is_part_of_ln_qkv(site) ? Status() : add(site, args);
  });
}

}  // namespace cf::cuda
