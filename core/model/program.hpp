#pragma once
// A step as a value: the calls of a walk, in order. Passes (core/model/passes.hpp) rewrite it; backends run it.
#include <any>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "core/model/model.hpp"
#include "core/ops/all.hpp"

namespace cf {

namespace detail {
template <class Ops>
struct CallOf;
/// DecodeLayer is left out: it is a walk itself
template <class... Ops>
struct CallOf<std::tuple<Ops...>> {
  template <class... Args>
  static std::variant<Args...> variant(std::tuple<Args...>);
  template <class Op>
  using Wanted = std::conditional_t<std::is_same_v<Op, ops::DecodeLayer>, std::tuple<>, std::tuple<typename Op::Args>>;
  using type = decltype(variant(std::tuple_cat(std::declval<Wanted<Ops>>()...)));
};
}  // namespace detail

/// A call of any op of ops.def, fused.def or ranks.def: the op's Args.
using Call = detail::CallOf<ops::Every>::type;

/// A call in a step: where it stands, and the tensors that it reads and writes, each known by its first byte. A tensor
/// that is written in part, as a cache is, counts as written alone. Weights and tables, which no call writes, are left
/// out.
struct Node {
  ModelSite at;  // `layer` is -1 outside the layers
  Call call;
  std::vector<const void*> reads{}, writes{};
  std::any planned{};  // a backend's own: what it has planned for the call
};

/// The calls of a step, in an order in which they may run one after the other.
struct Program {
  std::vector<Node> nodes;
};

/// A call's compulsory bytes and flops, by its contract and the dtypes of its tensors.
Cost cost_of(const Call& call);

/// A node with the tensors that the call's contract lists.
Node make_node(const ModelSite& at, Call call);

/// The calls of one layer: for_each_site(), recorded. `layer` is its number in the model.
Result<Program> record_layer(const ModelSpec& m, const LayerWeights& w, const LayerTensors& t, std::int64_t layer = 0);
/// The calls of a model: for_each_model_site(), recorded.
Result<Program> record_model(const ModelSpec& m, const ModelWeights& w, const ModelTensors& t);
/// The calls of any walk: `walk(add)` calls add(site, args) for each in order, as for_each_site() does.
template <class Walk>
Result<Program> record(Walk&& walk) {
  Program program;
  CF_TRY(walk([&](const Site& site, const auto& args) -> Status {
    program.nodes.push_back(make_node({.layer = -1, .site = site}, args));
    return {};
  }));
  return program;
}

/// Runs a program on a backend: `run(args)` for every node in order. Stops at the first Status that is not ok, and
/// names the node.
template <class Run>
Status run_program(const Program& program, Run&& run) {
  for (const Node& node : program.nodes)
    if (Status s = std::visit([&](const auto& args) { return run(args); }, node.call); !s)
      return Status::error(s.code(), node.at.name() + ": " + s.message());
  return {};
}

}  // namespace cf
