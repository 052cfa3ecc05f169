#include "cuda/step/lower.hpp"

#include <string>
#include <utility>

#include "core/fp8.hpp"

namespace cf::cuda {
namespace {

Status refuse(const Node& node, const std::string& why) {
  return Status::error(Code::unimplemented, "persistent: " + node.at.name() + ": the persistent kernel has " + why);
}

/// Where a layer's norm or product has its weights.
NormParams* norm_of(SiteId site, LayerWeights& w) {
  switch (site) {
    case SiteId::input_layernorm: return &w.input_layernorm;
    case SiteId::post_attention_layernorm: return &w.post_attention_layernorm;
    default: return nullptr;
  }
}
LinearParams* linear_of(SiteId site, LayerWeights& w) {
  switch (site) {
    case SiteId::query_key_value: return &w.query_key_value;
    case SiteId::dense: return &w.dense;
    case SiteId::dense_h_to_4h: return &w.dense_h_to_4h;
    case SiteId::dense_4h_to_h: return &w.dense_4h_to_h;
    default: return nullptr;
  }
}
NormParams params_of(const ops::LayerNorm::Args& args) { return args.norm; }
NormParams params_of(const ops::RmsNorm::Args& args) { return {.gamma = args.gamma, .beta = {}}; }

/// Gives a layer what its phases need of a node. An op that no other overload takes has no phase.
template <class Args>
Status take(const Node& node, const Args&, PersistentLayer&) {
  return refuse(node, "no phase for " + std::string(Args::Op::name));
}
template <class Args>
Status take_norm(const Node& node, const Args& args, PersistentLayer& layer) {
  NormParams* const norm = norm_of(node.at.site.id, layer.weights);
  if (!norm) return refuse(node, "phases with a layer's two norms alone");
  *norm = params_of(args);
  return {};
}
Status take(const Node& node, const ops::LayerNorm::Args& args, PersistentLayer& layer) {
  return take_norm(node, args, layer);
}
Status take(const Node& node, const ops::RmsNorm::Args& args, PersistentLayer& layer) {
  return take_norm(node, args, layer);
}
Status take(const Node& node, const ops::Linear::Args& args, PersistentLayer& layer) {
  LinearParams* const linear = linear_of(node.at.site.id, layer.weights);
  if (!linear) return refuse(node, "phases for a layer's four products alone");
  if (is_fp8(args.linear.weight)) return refuse(node, "dense and packed GPTQ weights, no fp8 ones");
  *linear = args.linear;
  return {};
}
Status take(const Node&, const ops::QkNorm::Args& args, PersistentLayer& layer) {
  layer.weights.q_norm.gamma = args.q_gamma;
  layer.weights.k_norm.gamma = args.k_gamma;
  return {};
}
Status take(const Node& node, const ops::Rope::Args& args, PersistentLayer&) {
  return args.q_sinks ? refuse(node, "one position of a query, no other one for sinks") : Status();
}
/// Whoever reads the residual stream sums what the ranks have made.
Status take(const Node&, const ops::AllReduce::Args&, PersistentLayer&) { return {}; }
Status take(const Node& node, const ops::KvAppend::Args& args, PersistentLayer& layer) {
  if (!args.runs.empty()) return refuse(node, "one new token of each sequence, no runs");
  if (args.window) return refuse(node, "a cache of all keys, no stream's");
  layer.cache = {args.k_cache, args.v_cache};
  layer.page_table = args.page_table;
  return {};
}
Status take(const Node& node, const ops::Attention::Args& args, PersistentLayer&) {
  if (args.window && args.window.keys < args.max_kv_len) return refuse(node, "all keys, no window");
  return {};
}

/// Gives a whole model's ends what they need of a node outside the layers.
template <class Args>
Status take(const Node& node, const Args&, PersistentEnds&) {
  return refuse(node, "no phase for " + std::string(Args::Op::name) + " outside the layers");
}
Status take(const Node& node, const ops::Embedding::Args& args, PersistentEnds& ends) {
  if (args.position_table) return refuse(node, "rotary position embeddings, no table of learned ones");
  ends.embed_in = args.table;
  return {};
}
template <class Args>
Status take_norm(const Node& node, const Args& args, PersistentEnds& ends) {
  if (node.at.site.id != SiteId::final_layer_norm) return refuse(node, "the final norm alone outside the layers");
  ends.final_layer_norm = params_of(args);
  return {};
}
Status take(const Node& node, const ops::LayerNorm::Args& args, PersistentEnds& ends) {
  return take_norm(node, args, ends);
}
Status take(const Node& node, const ops::RmsNorm::Args& args, PersistentEnds& ends) {
  return take_norm(node, args, ends);
}
Status take(const Node& node, const ops::Linear::Args& args, PersistentEnds& ends) {
  if (node.at.site.id != SiteId::embed_out) return refuse(node, "the LM head's product alone outside the layers");
  const auto* const head = std::get_if<DenseWeight>(&args.linear.weight);
  if (!head) return refuse(node, "a dense LM head, no quantised one");
  if (args.linear.bias) return refuse(node, "an LM head without a bias");
  ends.embed_out = head->weight;
  return {};
}
bool is_whole(const PersistentEnds& e) { return e.embed_in && e.final_layer_norm.gamma && e.embed_out; }

}  // namespace

Result<LoweredProgram> lower(const Program& program) {
  LoweredProgram lowered;
  std::int64_t current = -1;
  for (const Node& node : program.nodes) {
    const std::int64_t layer = node.at.layer;
    if (layer >= 0 && (lowered.layers.empty() || layer != current)) lowered.layers.emplace_back(), current = layer;
    if (layer < 0 && !lowered.ends) lowered.ends.emplace();
    CF_TRY(std::visit(
        [&](const auto& args) {
          return layer < 0 ? take(node, args, *lowered.ends) : take(node, args, lowered.layers.back());
        },
        node.call));
  }
  if (lowered.ends && !is_whole(*lowered.ends))
    return Status::error(Code::unimplemented,
                         "persistent: the persistent kernel has an embedding, a final norm and an LM head together, or "
                         "none of them");
  return lowered;
}

}  // namespace cf::cuda
