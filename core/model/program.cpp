#include "core/model/program.hpp"

#include <optional>

namespace cf {

Cost cost_of(const Call& call) {
  return std::visit(
      [](const auto& args) {
        using Op = typename std::decay_t<decltype(args)>::Op;
        const auto dims = Op::dims(args);
        std::optional<DType> activation, weight;
        Op::tensors(dims, args, [&](const TensorSpec& t, const auto& view, const auto&) {
          if (is_activation(t.role) && !activation) activation = view.dtype;
          if (is_weight(t.role) && view && !weight) weight = view.dtype;
        });
        const DType otherwise = activation.value_or(DType::f32);
        return Op::cost(dims, otherwise, weight.value_or(otherwise));
      },
      call);
}

Node make_node(const ModelSite& at, Call call) {
  Node node{.at = at, .call = std::move(call)};
  std::visit(
      [&](const auto& args) {
        using Op = typename std::decay_t<decltype(args)>::Op;
        Op::tensors(Op::dims(args), args, [&](const TensorSpec& t, const auto& view, const auto&) {
          if (is_read(t.role) || is_index(t.role)) node.reads.push_back(view.data);
          if (is_written(t.role)) node.writes.push_back(view.data);
        });
      },
      node.call);
  return node;
}

Result<Program> record_layer(const ModelSpec& m, const LayerWeights& w, const LayerTensors& t, std::int64_t layer) {
  Program program;
  const ModelNames& names = names_of(m);
  CF_TRY(for_each_site(m, w, t, [&](const Site& site, const auto& args) -> Status {
    program.nodes.push_back(make_node({layer, site, &names}, args));
    return {};
  }));
  return program;
}

Result<Program> record_model(const ModelSpec& m, const ModelWeights& w, const ModelTensors& t) {
  Program program;
  CF_TRY(for_each_model_site(m, w, t, [&](const ModelSite& site, const auto& args) -> Status {
    program.nodes.push_back(make_node(site, args));
    return {};
  }));
  return program;
}

}  // namespace cf
