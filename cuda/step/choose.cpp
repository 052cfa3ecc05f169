#include "cuda/step/choose.hpp"

#include <algorithm>
#include <iterator>
#include <type_traits>
#include <utility>

#include "core/call_groups.hpp"
#include "core/model/passes.hpp"
#include "cuda/ops/attention/attention.hpp"
#include "cuda/ops/linear/linear.hpp"
#include "cuda/ops/linear/pack/pack.hpp"
#include "cuda/ops/ln_qkv/ln_qkv.hpp"
#include "cuda/ops/norm/layernorm.hpp"

namespace cf::cuda {
namespace {

/// The plan of a kernel, where it is of that type.
template <class Plan>
const Plan* plan_of(const Planned& planned) {
  return std::any_cast<Plan>(&planned.plan);
}

/// Whether ln_qkv is faster than its parts, and gives their bits. One launch must take all tokens. Its bits are those
/// of its parts only where layernorm gives each thread the same eight elements of a row.
bool ln_qkv_pays(const Arch& arch, const ops::LnQkv::Args& a, const Planned& planned) {
  const auto [tokens, hidden] = a.x.shape;
  const auto* const packed = plan_of<LnQkvPacked>(planned);
  const auto* const dense = plan_of<LnQkvDense>(planned);
  const bool one_launch = packed ? packed->launches.size() == 1 : dense->plan.tokens == tokens;
  return one_launch && tokens <= arch.tuning->ln_qkv_tokens && layernorm_plan(arch, tokens, hidden, 1).elements == 8;
}

/// rms_qkv and rms_linear in the place of both norms of a layer and of what lies behind them, where kernels take all.
Program with_norms(const Target& target, const Program& layer) {
  Program fused = with_rms_qkv(with_rope_append(with_rms_linear(layer)));
  const auto fits = [&](Node& n) {
    const bool has_norm =
        std::holds_alternative<ops::RmsLinear::Args>(n.call) || std::holds_alternative<ops::RmsQkv::Args>(n.call);
    return !has_norm || takes(target, n);
  };
  return std::ranges::all_of(fused.nodes, fits) ? fused : layer;
}

Program fuse_layer(const Target& target, Program layer) {
  const auto wanted = [&](Node& node) { return takes(target, node); };
  layer = with_linear_sum(with_ln_qkv(std::move(layer), wanted), wanted);
  const bool sums = std::ranges::any_of(
      layer.nodes, [](const Node& n) { return std::holds_alternative<ops::LinearSum::Args>(n.call); });
  if (!sums) layer = with_norms(target, layer);
  return with_rope_append(std::move(layer), wanted);
}

/// What the modes of a layer's nodes depend on.
struct LayerFacts {
  bool few = false;         // ln_qkv makes q, k and v
  bool norms = false;       // rms_qkv and rms_linear normalise the token
  bool packed_qkv = false;  // ln_qkv's weight is packed
  bool packed_up = false;   // the weight of the MLP's first product is packed
  bool shares_sms = false;  // ln_qkv and the MLP's first product run on the same SMs
  int gqa_heads = 1;        // query heads that attend together
  int key_splits = 1;       // blocks of a cluster of attention; 1 where attention has no clusters
  bool mixed = false;       // attention has runs that differ: a launch for each group of them
  std::int64_t tokens = 0;
  std::int64_t max_kv_len = 0;
};

/// The weight of a call's product, or null.
const LinearWeight* weight_of(const Call& call) {
  return std::visit(
      [](const auto& args) -> const LinearWeight* {
        if constexpr (requires { args.linear.weight; }) return &args.linear.weight;
        return nullptr;
      },
      call);
}

/// Whether ln_qkv and the MLP's first product, both with packed weights, can share SMs. Pythia-6.9B's ln_qkv leaves no
/// room for the product's blocks.
bool share_sms(const Arch& arch, const LnQkvPacked& ln_qkv, const GptqPlan& up) {
  const LnQkvGptqPlan& first = ln_qkv.launches.front();
  const int system_bytes = arch.smem_per_sm_bytes - arch.smem_per_block_bytes;  // of each block
  return first.product.digit_bytes && ln_qkv_can_share_sms(gptq_slice_chunks(first.product)) &&
         first.product.split == 1 && up.digit_bytes && up.split == 1 &&
         first.smem_bytes + linear_gptq_smem_bytes(arch, up) + 2 * system_bytes <= arch.smem_per_sm_bytes;
}

template <class Nodes>
LayerFacts facts_of(const Arch& arch, const Nodes& nodes) {
  LayerFacts f;
  const LnQkvPacked* ln_qkv = nullptr;
  const GptqPlan* up = nullptr;
  for (const PlannedNode& n : nodes) {
    const Call& call = n.node.call;
    const Planned& planned = n.choice.planned;
    f.norms = f.norms || std::holds_alternative<ops::RmsQkv::Args>(call) ||
              std::holds_alternative<ops::RmsLinear::Args>(call);
    if (std::holds_alternative<ops::LnQkv::Args>(call)) {
      f.few = true;
      ln_qkv = plan_of<LnQkvPacked>(planned);
      f.packed_qkv = ln_qkv != nullptr;
    }
    if (n.node.at.site.id == SiteId::dense_h_to_4h) {
      const LinearWeight* const weight = weight_of(call);
      f.packed_up = weight && std::holds_alternative<PackedWeight>(*weight);
      if (const auto* plan = plan_of<PackedLaunches>(planned)) up = &plan->launches.front().plan;
    }
    if (const auto* attention = std::get_if<ops::Attention::Args>(&call)) {
      f.tokens = attention->q.shape[0];
      f.max_kv_len = attention->max_kv_len;
      f.mixed = differ(attention->runs);
      if (const auto* plan = plan_of<AttentionPlan>(planned)) {
        f.gqa_heads = plan->gqa_heads;
        f.key_splits = plan->splits;
      }
      if (const auto* plan = plan_of<FloatAttentionPlan>(planned)) f.key_splits = plan->splits;
    }
  }
  f.shares_sms = ln_qkv && up && f.max_kv_len <= arch.tuning->shared_sms_entries && share_sms(arch, *ln_qkv, *up);
  return f;
}

/// LaunchMode::shared_percent of all kernels of a layer. With 0 the driver divides an SM's memory for each kernel, and
/// a kernel waits until SMs with another division are empty (kH200Tuning has the measurements):
/// - Dense weights are faster with Tuning::dense_shared_percent where attention's blocks form clusters, whose SMs then
///   become free sooner. They are slower so where attention has no clusters, as for four tokens of 32 heads.
/// - Packed weights of one token that ln_qkv takes are faster with all of the memory shared.
/// - Packed weights of one token that rms_qkv and rms_linear take are faster with all of the memory shared, together
///   with LaunchMode::leaves_room. They are slower so where lone heads' clusters have kMaxSplits blocks.
int shared_percent(const Arch& arch, const LayerFacts& f) {
  if (f.norms) return f.gqa_heads > 1 || f.key_splits < kMaxSplits ? 100 : 0;
  if (!f.few) return 0;
  if (f.packed_qkv) return f.tokens == 1 ? 100 : 0;
  return f.key_splits > 1 ? arch.tuning->dense_shared_percent : 0;
}

/// Whether a site's kernel may start before the kernels that it waits for are done. An early kernel occupies SMs while
/// it waits. These start late, as other kernels need the SMs more:
///   attention.dense           It runs beside the MLP's first product. Where that product has quantised weights its
///                             blocks are resident before attention begins, and attention.dense starts early.
///   attention                 It starts late behind an ln_qkv of quantised weights, unless attention has clusters or
///                             ln_qkv shares SMs.
///   post_attention_layernorm  It starts late beside an ln_qkv of quantised weights, unless ln_qkv shares SMs.
/// An attention kernel that starts early does so once its predecessor has waited (LaunchMode::after_waiting), and loads
/// older keys while it waits. The predecessor of a later group's launch is the launch before it, which has not waited.
bool starts_early(const LayerFacts& f, SiteId site) {
  if (site == SiteId::dense) return f.packed_up;
  const bool waits_for_sms = f.few && f.packed_qkv && !f.shares_sms;
  if (site == SiteId::context) return !waits_for_sms || f.key_splits > 1;
  return site != SiteId::post_attention_layernorm || !waits_for_sms;
}

/// The MLP's first product is the shorter branch: it fills the SMs that the branch through attention leaves free.
LaunchMode mode_of(const Arch& arch, const LayerFacts& f, SiteId site) {
  const bool early = starts_early(f, site), is_up = site == SiteId::dense_h_to_4h;
  const int percent = shared_percent(arch, f);
  return {.early = early,
          .after_waiting = early && site == SiteId::context && !f.mixed,
          .shares_sms = f.shares_sms && is_up,
          .leaves_room = f.norms && percent > 0,
          .urgent = f.few && !is_up,
          .shared_percent = percent};
}

}  // namespace

RopePairs qkv_pairs(const ModelSpec& m) {
  const bool separate = m.shape.qkv_layout == ops::QkvLayout::separate;
  const bool is_fused = separate == (m.traits.norm == NormKind::rmsnorm) && !m.shape.head_norm;  // rms_qkv or ln_qkv
  if (!is_fused) return {};
  return rope_pairs(m.shape.qkv_heads(), m.shape.head_dim, m.shape.rotary_dim);
}

bool takes(const Target& target, Node& node) {
  return std::visit(
      [&]<class Args>(const Args& args) {
        // A launch for each group of runs would read the weight each time.
        if constexpr (std::is_same_v<Args, ops::LnQkv::Args> || std::is_same_v<Args, ops::RmsQkv::Args>)
          if (differ(args.runs)) return false;
        if (!Args::Op::check(args)) return false;
        Result<Choice> choice = choose(target, args);
        if (!choice) return false;
        if constexpr (std::is_same_v<Args, ops::LnQkv::Args>)
          if (!ln_qkv_pays(target.arch, args, choice->planned)) return false;
        node.planned = *std::move(choice);
        return true;
      },
      node.call);
}

Program fuse(const Target& target, Program program) {
  Program fused;
  auto& nodes = program.nodes;
  for (auto first = nodes.begin(); first != nodes.end();) {
    const std::int64_t layer = first->at.layer;
    const auto last = std::find_if(first, nodes.end(), [&](const Node& n) { return n.at.layer != layer; });
    Program part{{std::move_iterator(first), std::move_iterator(last)}};
    if (layer >= 0) part = fuse_layer(target, std::move(part));
    std::ranges::move(part.nodes, std::back_inserter(fused.nodes));
    first = last;
  }
  return fused;
}

Result<StepPlan> choose(const Target& target, Program program) {
  StepPlan plan;
  for (Node& node : program.nodes) {
    if (auto* const known = std::any_cast<Choice>(&node.planned)) {
      Choice choice = std::move(*known);
      node.planned.reset();
      plan.nodes.push_back({std::move(node), std::move(choice), {}});
      continue;
    }
    Result<Choice> choice = std::visit(
        [&]<class Args>(const Args& args) -> Result<Choice> {
          CF_TRY(Args::Op::check(args));
          return choose(target, args);
        },
        node.call);
    if (!choice) return choice.status();
    plan.nodes.push_back({std::move(node), *std::move(choice), {}});
  }
  return plan;
}

void set_graph_modes(const Arch& arch, StepPlan& plan) {
  auto& nodes = plan.nodes;
  for (auto first = nodes.begin(); first != nodes.end();) {
    const std::int64_t layer = first->node.at.layer;
    const auto last = std::find_if(first, nodes.end(), [&](const auto& n) { return n.node.at.layer != layer; });
    const std::span<PlannedNode> part(first, last);
    const LayerFacts facts = facts_of(arch, part);
    // The LM head starts late. If its blocks come one by one to SMs where the last layer's kernels still run, it may
    // read more slowly until its end (kH200Tuning).
    for (PlannedNode& n : part)
      n.mode = layer >= 0 ? mode_of(arch, facts, n.node.at.site.id)
                          : LaunchMode{.early = n.node.at.site.id != SiteId::embed_out};
    first = last;
  }
}

Result<StepPlan> plan_graph(const Target& target, Program program) {
  CF_TRY_ASSIGN(StepPlan plan, choose(target, fuse(target, std::move(program))));
  set_graph_modes(target.arch, plan);
  return plan;
}

}  // namespace cf::cuda
