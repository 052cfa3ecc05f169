#include "cuda/step/lower.hpp"

#include <string>

namespace cf::cuda {
namespace {

Status refuse(const Node& node, const std::string& why) {
  return Status::error(Code::unimplemented, "persistent: " + node.at.name() + ": the persistent kernel has " + why);
}

/// Where a site's norm or product has its weights.
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

/// Gives a layer what its phases need of a node.
Status take(const Node& node, PersistentLayer& layer) {
  return std::visit(
      [&]<class Args>(const Args& args) -> Status {
        const SiteId site = node.at.site.id;
        if constexpr (std::is_same_v<Args, ops::LayerNorm::Args> || std::is_same_v<Args, ops::RmsNorm::Args>) {
          NormParams* const norm = norm_of(site, layer.weights);
          if (!norm) return refuse(node, "phases with a layer's two norms alone");
          if constexpr (std::is_same_v<Args, ops::LayerNorm::Args>)
            *norm = args.norm;
          else
            norm->gamma = args.gamma;
        } else if constexpr (std::is_same_v<Args, ops::Linear::Args>) {
          LinearParams* const linear = linear_of(site, layer.weights);
          if (!linear) return refuse(node, "phases for a layer's four products alone");
          *linear = args.linear;
        } else if constexpr (std::is_same_v<Args, ops::QkNorm::Args>) {
          layer.weights.q_norm.gamma = args.q_gamma;
          layer.weights.k_norm.gamma = args.k_gamma;
        } else if constexpr (std::is_same_v<Args, ops::KvAppend::Args>) {
          if (!args.runs.empty()) return refuse(node, "one new token of each sequence, no runs");
          if (args.page_table) return refuse(node, "a contiguous cache, no pages");
          if (args.window) return refuse(node, "a cache of all keys, no stream's");
          layer.cache = {args.k_cache, args.v_cache};
        } else if constexpr (std::is_same_v<Args, ops::Attention::Args>) {
          if (args.window && args.window.keys < args.max_kv_len) return refuse(node, "all keys, no window");
        } else if constexpr (!std::is_same_v<Args, ops::Rope::Args>) {
          return refuse(node, "no phase for " + std::string(Args::Op::name));
        }
        return {};
      },
      node.call);
}

}  // namespace

Result<std::vector<PersistentLayer>> lower(const Program& program) {
  std::vector<PersistentLayer> layers;
  std::int64_t current = -1;
  for (const Node& node : program.nodes) {
    if (node.at.layer < 0) continue;
    if (layers.empty() || node.at.layer != current) layers.emplace_back();
    current = node.at.layer;
    CF_TRY(take(node, layers.back()));
  }
  return layers;
}

}  // namespace cf::cuda
