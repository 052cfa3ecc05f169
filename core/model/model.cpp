#include "core/model/model.hpp"

#include <type_traits>
#include <utility>

#include "core/contract.hpp"
#include "core/fp8.hpp"

namespace cf {

std::string ModelSite::name() const {
  if (layer < 0) return std::string(site.name);
  return names->layer(layer) + std::string(site.name);
}

std::string ModelSite::tap() const {
  if (layer < 0) return std::string(site.tap);
  return "layers." + std::to_string(layer) + "." + std::string(site.tap);
}

std::vector<Tap> model_taps(const ModelSpec& m, const ModelWeights& w) {
  const ModelShape& s = m.shape;
  ModelTensors t;
  const auto set_shape = [](const TensorSpec&, auto& view, auto shape) { point(view, nullptr, shape, DType::f32); };
  for_each_activation(s, {}, set_shape, t.layer);
  t.ids.shape = {1};
  for (AnyView<2>& h : t.hidden) h.shape = {1, s.hidden_size};
  t.final_norm.shape = {1, s.hidden_size};
  t.logits.shape = {1, s.vocab_size};
  const std::vector<LayerCache> caches(w.layers.size());
  t.caches = caches;
  std::vector<Tap> taps;
  const Status walked = for_each_model_site(m, w, t, [&](const ModelSite& site, const auto& args) -> Status {
    using Op = typename std::decay_t<decltype(args)>::Op;
    std::vector<Tap> outputs;
    Op::tensors(Op::dims(args), args, [&](const TensorSpec& spec, const auto& view, const auto&) {
      if (spec.role == Role::output)
        outputs.push_back({std::string(spec.name), Shape(view.shape.begin() + 1, view.shape.end())});
    });
    for (Tap& o : outputs) taps.push_back({output_tap(site.tap(), o.name, outputs.size()), std::move(o.shape)});
    return {};
  });
  return walked ? taps : std::vector<Tap>();
}

Budget model_budget(const ModelSpec& m, DType activation, Condition c) {
  const DType compute = size_bytes(activation) == 2 ? DType::f32 : activation;
  Budget b = reduction_budget(1, {compute, activation}, c);
  const double stores = double(names_of(m).sites().size()) * double(m.shape.num_layers) * unit_roundoff(activation);
  return b += {stores, stores};
}

namespace {

Status check_layer_count(const ModelSpec& m, const ModelWeights& w) {
  CF_TRY(check_model(m));
  if (std::int64_t(w.layers.size()) == m.shape.num_layers) return {};
  return Status::error(Code::invalid_argument, "model: expected weights of " + std::to_string(m.shape.num_layers) +
                                                   " layers, got " + std::to_string(w.layers.size()));
}

}  // namespace

Status check_outer_weights(const ModelSpec& m, const ModelWeights& w) {
  CF_TRY(check_layer_count(m, w));
  ModelWeights outer = w;
  outer.layers.clear();
  TensorCheck check("model");
  for_each_model_weight(m, outer, check);
  return check.status();
}

Status check_model_weights(const ModelSpec& m, const ModelWeights& w) {
  CF_TRY(check_layer_count(m, w));
  TensorCheck check("model");
  for_each_model_weight(m, w, check);
  CF_TRY(check.status());
  Status status;
  for (std::size_t i = 0; i < w.layers.size(); ++i)
    for_each_linear(m, w.layers[i], [&](const Site& site, const LinearParams& l, const LinearSize& size) {
      if (!status || !is_fp8(l.weight)) return;
      const std::string where = "model: '" + names_of(m).layer(std::int64_t(i)) + std::string(site.name) + ".weight'";
      status = ops::Linear::check_linear(where, size.out, size.in, l);
      if (status) status = check_fp8(where, std::get<PackedWeight>(l.weight));
    });
  return status;
}

}  // namespace cf
