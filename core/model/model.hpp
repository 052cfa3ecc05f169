#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/contract.hpp"
#include "core/model/layer.hpp"
#include "core/ops/embedding.hpp"

namespace cf {

/// A step of a whole model: a site of one of its layers, or a module outside them.
struct ModelSite {
  std::int64_t layer = -1;  // -1 outside the layers
  Site site{};
  const ModelNames* names = nullptr;  // the family's

  /// Hugging Face's module: "gpt_neox.layers.3.attention.dense", "gpt_neox.embed_in", "embed_out".
  std::string name() const;
  /// The name under which golden files hold what the step makes: "layers.3.attention.residual", "embed_in", "logits".
  std::string tap() const;
};

/// Every tensor of a model's step. All layers share one set of activations.
struct ModelTensors {
  View<const std::int32_t, 1> ids{};     // (tokens)
  std::array<AnyView<2>, 2> hidden{};    // (tokens, hidden)  the embedding, then the layers' outputs in turn
  LayerTensors layer{};                  // hidden, output, k_cache and v_cache are not used: the walk sets them
  std::span<const LayerCache> caches{};  // (layers)
  AnyView<2> final_norm{};               // (rows, hidden)    final_layer_norm of the last `rows` tokens
  AnyView<2> logits{};                   // (rows, vocab)     embed_out of the same
};

/// The end of a model for rows of hidden states that the last layer has made: calls f(model_site, args) for the final
/// norm and the LM head.
template <class F>
Status for_each_head_site(const ModelSpec& m, const ModelWeights& w, const AnyView<2>& hidden,
                          const AnyView<2>& final_norm, const AnyView<2>& logits, F&& f) {
  const ModelNames& names = names_of(m);
  const auto outside = [&](const Site& site) { return ModelSite{.site = site, .names = &names}; };
  CF_TRY(visit_norm(m.traits, names.final_layer_norm, hidden, w.final_layer_norm, final_norm,
                    [&](const Site& site, const auto& args) { return f(outside(site), args); }));
  return f(outside(names.embed_out), ops::Linear::Args{.x = final_norm, .linear = w.embed_out, .y = logits});
}

/// A model, once: calls f(model_site, args) for the embedding, every site of every layer, the final norm and
/// the LM head, in order, and stops at the first Status that is not ok. Without rows of logits it ends after the
/// layers.
///   h = embed_in[ids], and with learned positions + embed_positions[positions]
///   h = layer_i(h) for every i;  logits = norm(h) embed_out^T
/// A padded vocabulary has as many logits as the head has rows.
/// Source: the forward() of transformers' GPTNeoXModel and GPTNeoXForCausalLM, LlamaModel and LlamaForCausalLM, and
/// GPT2Model.
template <class F>
Status for_each_model_site(const ModelSpec& m, const ModelWeights& w, const ModelTensors& t, F&& f) {
  const ModelNames& names = names_of(m);
  const auto outside = [&](const Site& site) { return ModelSite{.site = site, .names = &names}; };
  ops::Embedding::Args embedding{.ids = t.ids, .table = w.embed_in, .y = t.hidden[0]};
  if (m.traits.positions == Positions::learned) {
    embedding.position_table = w.embed_positions;
    embedding.positions = t.layer.positions;
  }
  CF_TRY(f(outside(names.embed_in), embedding));
  for (std::size_t i = 0; i < w.layers.size(); ++i) {
    LayerTensors layer = t.layer;
    layer.hidden = t.hidden[i % 2];
    layer.output = t.hidden[(i + 1) % 2];
    layer.k_cache = t.caches[i].k;
    layer.v_cache = t.caches[i].v;
    CF_TRY(for_each_site(m.of_layer(std::int64_t(i)), w.layers[i], layer, [&](const Site& site, const auto& args) {
      return f(ModelSite{std::int64_t(i), site, &names}, args);
    }));
  }
  const std::int64_t rows = t.logits.shape[0];
  if (rows == 0) return {};
  // The last rows, as many as the logits have.
  AnyView<2> last = t.hidden[w.layers.size() % 2];
  last.data =
      static_cast<char*>(last.data) + (last.shape[0] - rows) * last.shape[1] * std::int64_t(size_bytes(last.dtype));
  last.shape[0] = rows;
  return for_each_head_site(m, w, last, t.final_norm, t.logits, f);
}

/// What a model's step makes beside its caches.
struct Tap {
  std::string name;  // "embed_in", "layers.3.attention.rotary_emb.q", "logits"
  Shape shape;       // of one token
};

/// Every tap of a model, in the order of the walk.
std::vector<Tap> model_taps(const ModelSpec& m, const ModelWeights& w);

/// The bound of a tap's error in this activation dtype. `c` is the sum of the conditions of all sites up to the tap.
/// Sums of 16-bit values are taken in float32. Every site stores its output once, which adds one rounding each.
Budget model_budget(const ModelSpec& m, DType activation, Condition c);

/// Refuses weights that are not those of a whole model: other than num_layers layers, or tensors of other shapes than
/// for_each_model_weight lists.
Status check_model_weights(const ModelSpec& m, const ModelWeights& w);
/// Checks the same of weights whose layers have no values yet: the number of layers, and the tensors outside them.
Status check_outer_weights(const ModelSpec& m, const ModelWeights& w);

}  // namespace cf
