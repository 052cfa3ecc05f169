#include "cuda/model/layer_ops.hpp"

#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/ops/ln_qkv/ln_qkv.hpp"
#include "cuda/ops/norm/layernorm.hpp"

namespace cf::cuda {
namespace {

/// The plan of ln_qkv with a packed weight, whose grid is 0 where ln_qkv does not take the layer.
LnQkvGptqPlan packed_ln_qkv_plan(const Arch& arch, const ModelSpec& m, const LayerWeights& w, const LayerTensors& t,
                                 const PackedWeight& weight) {
  const Result<GptqLayout> layout = gptq_layout(names_of(m).query_key_value.name, weight);
  if (!layout || layout->pairs != qkv_pairs(m)) return {};
  return ln_qkv_gptq_plan(arch, gptq_sizes(*layout, t.hidden.shape[0]), m.shape.hidden_size, t.hidden.shape[0],
                          std::int64_t(size_bytes(w.input_layernorm.gamma.dtype)));
}

/// Whether ln_qkv takes the place of the four sites from input_layernorm to kv_append. On an H200 ln_qkv is faster for
/// up to four tokens; with a dense weight it is slower from eight tokens on. Its shared memory must hold the tokens.
/// Its bits are those of the four sites only where layernorm gives each thread the same eight elements of a row.
bool takes_ln_qkv(const Arch& arch, const ModelSpec& m, const LayerWeights& w, const LayerTensors& t) {
  constexpr std::int64_t most_tokens = 4;
  const std::int64_t tokens = t.hidden.shape[0], h = m.shape.hidden_size,
                     weight_bytes = std::int64_t(size_bytes(w.input_layernorm.gamma.dtype));
  if (!begins_as_ln_qkv(m) || tokens > most_tokens || layernorm_plan(arch, tokens, h, 1).elements != 8) return false;
  if (const auto* packed = std::get_if<PackedWeight>(&w.query_key_value.weight)) {
    const GptqPlan plan = packed_ln_qkv_plan(arch, m, w, t, *packed).product;
    return plan.grid > 0 && plan.tokens == tokens;
  }
  return ln_qkv_plan(arch, h, m.shape.qkv_size(), tokens, std::int64_t(size_bytes(t.hidden.dtype)), weight_bytes)
             .tokens == tokens;
}

/// The largest cache, in entries, of a layer whose kernels share SMs. Attention to more entries takes longer, and it
/// starts later where other kernels hold the registers.
constexpr std::int64_t kSharedSmsEntries = 1024;

/// Whether ln_qkv and the MLP's first product, both with packed weights, share SMs. On an H200 the layers of
/// Pythia-410M, 1.4B and 2.8B are 3 to 7 % faster so in caches of up to 512 entries:
/// data/bench/TRIALS.md, old-and-new-gptq. Pythia-6.9B's ln_qkv leaves no room for the product's blocks.
bool share_sms(const Arch& arch, const ModelSpec& m, const LayerWeights& w, const LayerTensors& t) {
  if (t.max_kv_len > kSharedSmsEntries) return false;
  const auto* const qkv = std::get_if<PackedWeight>(&w.query_key_value.weight);
  const auto* const up = std::get_if<PackedWeight>(&w.dense_h_to_4h.weight);
  if (!qkv || !up) return false;
  const Result<GptqLayout> layout = gptq_layout(names_of(m).dense_h_to_4h.name, *up);
  if (!layout) return false;
  const std::int64_t tokens = t.hidden.shape[0];
  const GptqPlan linear =
      gptq_plan(arch, gptq_sizes(*layout, tokens), tokens, kLinearGptqTurns, kLinearGptqBlocksPerSm);
  const LnQkvGptqPlan ln_qkv = packed_ln_qkv_plan(arch, m, w, t, *qkv);
  const int system_bytes = arch.smem_per_sm_bytes - arch.smem_per_block_bytes;  // of each block
  return ln_qkv.product.digit_bytes && ln_qkv_can_share_sms(gptq_slice_chunks(ln_qkv.product)) &&
         ln_qkv.product.split == 1 && linear.digit_bytes && linear.split == 1 &&
         ln_qkv.smem_bytes + linear_gptq_smem_bytes(arch, linear) + 2 * system_bytes <= arch.smem_per_sm_bytes;
}

/// LaunchMode::shared_percent for dense weights. On an H200 this is 132 KB: attention's block fits beside three blocks
/// of a product, and the rest of the L1 has room for the products' loads. Of 44, 58, 65, 72 and 100, Pythia-2.8B with a
/// cache of 2048 is fastest with 58 and 65. With 100 it is slower than with the driver's own divisions.
constexpr int kDenseSharedPercent = 58;

/// LaunchMode::shared_percent of all kernels of a layer. With 0 the driver divides an SM's memory for each kernel, and
/// a kernel waits until SMs with another division are empty. On an H200:
/// - Dense weights are faster with kDenseSharedPercent where attention's blocks form clusters, whose SMs then become
///   free sooner. They are slower so where attention has no clusters, as for four tokens of 32 heads.
/// - Packed weights of one token that ln_qkv takes are faster with all of the memory shared.
/// - Packed weights of one token that RmsQkv and RmsLinear take are faster with all of the memory shared, together with
///   LaunchMode::leaves_room. They are slower so where lone heads' clusters have kMaxSplits blocks, as those of
///   Llama-3.2-3B (data/bench/TRIALS.md, old-and-new-llama-gptq).
int shared_percent(const LayerOps& ops, const LayerWeights& w, std::int64_t tokens) {
  if (ops.norms) return ops.share_heads > 1 || ops.key_splits < kMaxSplits ? 100 : 0;
  if (!ops.few) return 0;
  if (std::holds_alternative<PackedWeight>(w.query_key_value.weight)) return tokens == 1 ? 100 : 0;
  return ops.key_splits > 1 ? kDenseSharedPercent : 0;
}

/// Whether a site's kernel may start before the kernels that it waits for are done. An early kernel occupies SMs while
/// it waits. These start late, as other kernels need the SMs more:
///   attention.dense           It runs beside the MLP's first product. Where that product has quantised weights its
///                             blocks are resident before attention begins, and attention.dense starts early.
///   attention                 It starts late behind an ln_qkv of quantised weights, unless attention has clusters or
///                             ln_qkv shares SMs.
///   post_attention_layernorm  It starts late beside an ln_qkv of quantised weights, unless ln_qkv shares SMs.
/// An attention kernel that starts early does so once its predecessor has waited (LaunchMode::after_waiting), and loads
/// older keys while it waits.
bool starts_early(const LayerOps& ops, const Site& s, const LayerWeights& w) {
  const bool packed = std::holds_alternative<PackedWeight>(w.query_key_value.weight);
  if (s.id == SiteId::dense) return std::holds_alternative<PackedWeight>(w.dense_h_to_4h.weight);
  const bool waits_for_sms = ops.few && packed && !ops.shares_sms;
  if (s.id == SiteId::context) return !waits_for_sms || ops.key_splits > 1;
  return s.id != SiteId::post_attention_layernorm || !waits_for_sms;
}

/// Whether LinearSum takes the place of attention.dense and mlp.dense_4h_to_h. What lies between the two in the walk
/// must not read attn_residual.
bool takes_sums(const Arch& arch, const ModelSpec& m, const LayerWeights& w, const LayerTensors& t) {
  if (m.traits.residual != Residual::parallel) return false;
  bool takes = false;
  const Status walked = for_each_site(m, w, t, with_linear_sum([&]<class Args>(const Site&, const Args& args) {
                                        if constexpr (std::is_same_v<Args, LinearSum::Args>)
                                          takes = linear_sum_plan(arch, args).second.grid > 0;
                                        return Status();
                                      }));
  return walked && takes;
}

/// Whether RmsQkv and RmsLinear take the place of both norms and of what lies behind them.
bool takes_norms(const Arch& arch, const ModelSpec& m, const LayerWeights& w, const LayerTensors& t) {
  if (m.traits.norm != NormKind::rmsnorm) return false;
  bool takes = true;
  const Status walked = for_each_site_with_norms(m, w, t, [&]<class Args>(const Site&, const Args& args) {
    if constexpr (std::is_same_v<Args, RmsLinear::Args>) takes = takes && rms_linear_plan(arch, args).grid > 0;
    if constexpr (std::is_same_v<Args, RmsQkv::Args>) takes = takes && rms_qkv_plan(arch, args).grid > 0;
    return Status();
  });
  return walked && takes;
}

/// Whether a site is on the longer branch, the one through attention. The MLP's first product is the other branch: it
/// fills the SMs that the longer branch leaves free.
bool is_urgent(const Site& s) { return s.id != SiteId::dense_h_to_4h; }

}  // namespace

AttentionPlan attention_plan(const Arch& arch, const LayerTensors& t) {
  const ops::Attention::Args args{.q = t.q,
                                  .k_cache = t.k_cache,
                                  .v_cache = t.v_cache,
                                  .kv_len = t.kv_len,
                                  .y = t.context,
                                  .max_kv_len = t.max_kv_len};
  return attention_plan(arch, ops::Attention::dims(args), t.q.dtype);
}

bool begins_as_ln_qkv(const ModelSpec& m) {
  return m.traits.norm == NormKind::layernorm && m.shape.qkv_layout == ops::QkvLayout::interleaved_by_head;
}

RopePairs qkv_pairs(const ModelSpec& m) {
  if (!begins_as_ln_qkv(m) && (m.traits.norm != NormKind::rmsnorm || m.shape.qkv_layout != ops::QkvLayout::separate))
    return {};
  return rope_pairs(m.shape.qkv_heads(), m.shape.head_dim, m.shape.rotary_dim);
}

LayerOps layer_ops(const Arch& arch, const ModelSpec& m, const LayerWeights& w, const LayerTensors& t) {
  const AttentionPlan attention = attention_plan(arch, t);
  LayerOps ops{.few = takes_ln_qkv(arch, m, w, t),
               .sums = takes_sums(arch, m, w, t),
               .share_heads = attention.share_heads,
               .key_splits = attention.splits};
  ops.norms = !ops.sums && takes_norms(arch, m, w, t);
  ops.shares_sms = ops.few && share_sms(arch, m, w, t);
  ops.shared_percent = shared_percent(ops, w, t.hidden.shape[0]);
  ops.leaves_room = ops.norms && ops.shared_percent > 0;
  return ops;
}

LaunchMode mode_of(const LayerOps& ops, const Site& s, const LayerWeights& w) {
  const bool early = starts_early(ops, s, w);
  return {.early = early,
          .after_waiting = early && s.id == SiteId::context,
          .shares_sms = ops.shares_sms && s.id == SiteId::dense_h_to_4h,
          .leaves_room = ops.leaves_room,
          .urgent = ops.few && is_urgent(s),
          .shared_percent = ops.shared_percent};
}

bool is_part_of_ln_qkv(const Site& s) {
  return s.id == SiteId::input_layernorm || s.id == SiteId::query_key_value || s.id == SiteId::rotary_emb ||
         s.id == SiteId::kv_append;
}

ops::LnQkv::Args ln_qkv_args(const ModelSpec& m, const LayerWeights& w, const LayerTensors& t) {
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
          .eps = m.traits.layer_norm_eps};
}

}  // namespace cf::cuda
