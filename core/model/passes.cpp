#include "core/model/passes.hpp"

#include <algorithm>
#include <array>
#include <optional>

#include "core/model/ranks.hpp"

namespace cf {
namespace {

using Nodes = std::vector<Node>;

/// What ranks do together, which no family has a module for.
constexpr Site kAttentionSum{"attention.all_reduce", "attention.all_reduce"},
    kMlpSum{"mlp.all_reduce", "mlp.all_reduce"}, kLogitsGather{"all_gather", "all_gather"};

bool has(const std::vector<const void*>& tensors, const void* tensor) {
  return std::ranges::find(tensors, tensor) != tensors.end();
}

/// The node that reads what node `i` writes to a tensor, where it is one node alone.
std::optional<std::size_t> sole_reader(const Nodes& nodes, std::size_t i, const void* tensor) {
  std::optional<std::size_t> reader;
  for (std::size_t j = i + 1; j < nodes.size(); ++j) {
    if (has(nodes[j].reads, tensor)) {
      if (reader) return {};
      reader = j;
    }
    if (has(nodes[j].writes, tensor)) break;
  }
  return reader;
}

template <class Args>
const Args* call_of(const Nodes& nodes, std::optional<std::size_t> i) {
  return i ? std::get_if<Args>(&nodes[*i].call) : nullptr;
}

/// Whether a part may run with the last of the parts instead: no other node between the two writes what it touches, or
/// reads what it writes.
bool may_wait(const Nodes& nodes, const std::vector<std::size_t>& parts, std::size_t i) {
  for (std::size_t k = i + 1; k < parts.back(); ++k) {
    if (std::ranges::find(parts, k) != parts.end()) continue;
    for (const void* tensor : nodes[k].writes)
      if (has(nodes[i].reads, tensor) || has(nodes[i].writes, tensor)) return false;
    for (const void* tensor : nodes[k].reads)
      if (has(nodes[i].writes, tensor)) return false;
  }
  return true;
}

/// The parts of a fused call by their numbers in order, and the node that takes their place: the last one's.
struct Fusion {
  std::vector<std::size_t> parts;
  Node node;
};

/// Asks `find(nodes, i)` for the fusion that begins with each node in turn, and rewrites the program for each wanted.
template <class Find>
Program rewrite(Program program, const Wanted& wanted, Find&& find) {
  Nodes& nodes = program.nodes;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    std::optional<Fusion> fusion = find(nodes, i);
    if (!fusion) continue;
    const std::vector<std::size_t>& parts = fusion->parts;
    const bool fits = std::ranges::all_of(parts, [&](std::size_t p) { return may_wait(nodes, parts, p); });
    if (!fits || !wanted(fusion->node)) continue;
    nodes[parts.back()] = std::move(fusion->node);
    for (std::size_t p = parts.size() - 1; p-- > 0;) nodes.erase(nodes.begin() + std::ptrdiff_t(parts[p]));
    --i;  // the node behind node i is now at index i
  }
  return program;
}

/// The product that reads all that a norm makes, and no residual of it.
template <class Norm>
std::optional<std::size_t> product_of(const Nodes& nodes, std::size_t norm, const Norm& args) {
  const auto at = sole_reader(nodes, norm, args.y.data);
  const auto* linear = call_of<ops::Linear::Args>(nodes, at);
  const bool fits = linear && linear->x.data == args.y.data && linear->x.shape == args.y.shape && !linear->residual;
  return fits ? at : std::nullopt;
}

/// The kv_append behind a Rope. A stream's stays an op by itself, since no fused op has a window.
std::optional<std::size_t> append_of(const Nodes& nodes, std::size_t rope, const ops::Rope::Args& args) {
  const auto at = sole_reader(nodes, rope, args.k.data);
  const auto* append = call_of<ops::KvAppend::Args>(nodes, at);
  const bool fits = append && !append->window && !args.q_sinks && append->k.data == args.k.data &&
                    append->v.data == args.v.data && sole_reader(nodes, rope, args.v.data) == at;
  return fits ? at : std::nullopt;
}

}  // namespace

Program with_rope_append(Program program, const Wanted& wanted) {
  return rewrite(std::move(program), wanted, [](const Nodes& nodes, std::size_t i) -> std::optional<Fusion> {
    const auto* rope = call_of<ops::Rope::Args>(nodes, i);
    const auto append = rope ? append_of(nodes, i, *rope) : std::nullopt;
    if (!append) return {};
    const auto& to = std::get<ops::KvAppend::Args>(nodes[*append].call);
    return Fusion{{i, *append}, make_node(nodes[*append].at, ops::RopeAppend::of_parts(*rope, to))};
  });
}

Program with_ln_qkv(Program program, const Wanted& wanted) {
  return rewrite(std::move(program), wanted, [](const Nodes& nodes, std::size_t i) -> std::optional<Fusion> {
    const auto* norm = call_of<ops::LayerNorm::Args>(nodes, i);
    const auto product = norm ? product_of(nodes, i, *norm) : std::nullopt;
    if (!product) return {};
    const auto& linear = std::get<ops::Linear::Args>(nodes[*product].call);
    const auto turn = sole_reader(nodes, *product, linear.y.data);
    const auto* rope = call_of<ops::Rope::Args>(nodes, turn);
    if (!rope || linear.epilogue != ops::Epilogue::none || rope->qkv.data != linear.y.data ||
        rope->qkv.size() != linear.y.size() || rope->layout != ops::QkvLayout::interleaved_by_head || rope->q_sinks)
      return {};
    // LnQkv writes k and v, so that others may read them.
    std::optional<std::size_t> append;
    for (std::size_t j = *turn + 1; j < nodes.size() && !append && !has(nodes[j].writes, rope->k.data); ++j)
      if (const auto* to = call_of<ops::KvAppend::Args>(nodes, j);
          to && !to->window && to->k.data == rope->k.data && to->v.data == rope->v.data)
        append = j;
    if (!append) return {};
    const auto& to = std::get<ops::KvAppend::Args>(nodes[*append].call);
    return Fusion{{i, *product, *turn, *append},
                  make_node(nodes[*product].at, ops::LnQkv::of_parts(*norm, linear, *rope, to))};
  });
}

Program with_linear_sum(Program program, const Wanted& wanted) {
  return rewrite(std::move(program), wanted, [](const Nodes& nodes, std::size_t i) -> std::optional<Fusion> {
    const auto* first = call_of<ops::Linear::Args>(nodes, i);
    if (!first || (first->epilogue != ops::Epilogue::none && first->epilogue != ops::Epilogue::residual)) return {};
    for (std::size_t j = i + 1; j < nodes.size(); ++j) {
      const auto* second = call_of<ops::Linear::Args>(nodes, j);
      if (second && second->residual.data == first->y.data && second->x.data != first->y.data)
        return Fusion{{i, j}, make_node(nodes[j].at, ops::LinearSum::of_parts(*first, *second))};
      if (has(nodes[j].writes, first->y.data)) return {};
    }
    return {};
  });
}

Program with_rms_linear(Program program, const Wanted& wanted) {
  return rewrite(std::move(program), wanted, [](const Nodes& nodes, std::size_t i) -> std::optional<Fusion> {
    const auto* norm = call_of<ops::RmsNorm::Args>(nodes, i);
    const auto product = norm ? product_of(nodes, i, *norm) : std::nullopt;
    if (!product) return {};
    const auto& linear = std::get<ops::Linear::Args>(nodes[*product].call);
    return Fusion{{i, *product}, make_node(nodes[*product].at, ops::RmsLinear::of_parts(*norm, linear))};
  });
}

Program with_all_reduce(Program program, const ModelSpec& m) {
  if (m.ranks == 1) return program;
  Program summed;
  for (Node& node : program.nodes) {
    const SiteId site = node.at.site.id;
    const bool is_summed = makes_part(m, site);
    const AnyView<2> y = is_summed ? std::get<ops::Linear::Args>(node.call).y : AnyView<2>();
    ModelSite at = node.at;
    summed.nodes.push_back(std::move(node));
    if (!is_summed) continue;
    at.site = site == SiteId::dense ? kAttentionSum : kMlpSum;
    const ConstAnyView<3> part(y.data, {1, y.shape[0], y.shape[1]}, y.dtype);
    summed.nodes.push_back(make_node(at, ops::AllReduce::Args{.x = part, .y = y, .ranks = m.ranks}));
  }
  return summed;
}

std::int64_t rank_head_rows(const ModelSpec& m) {
  const std::int64_t rows = m.shape.vocab_size / m.ranks;
  return m.ranks == 1 || m.shape.vocab_size % m.ranks || rows % 8 ? 0 : rows;
}

Program with_rank_head(Program program, const ModelSpec& m, std::int64_t rank, const AnyView<2>& part) {
  const std::int64_t width = rank_head_rows(m);
  if (width == 0) return program;
  for (std::size_t i = 0; i < program.nodes.size(); ++i) {
    const auto* whole = call_of<ops::Linear::Args>(program.nodes, i);
    const bool is_head = whole && program.nodes[i].at.site.id == SiteId::embed_out;
    const auto* dense = is_head ? std::get_if<DenseWeight>(&whole->linear.weight) : nullptr;
    if (!dense || whole->y.shape[0] > part.shape[0]) continue;
    const AnyView<2> logits = whole->y;
    ops::Linear::Args head = *whole;
    ConstAnyView<2> rows = dense->weight;
    rows.shape[0] = width;
    rows.data = static_cast<const std::byte*>(rows.data) + rank * rows.bytes();
    head.linear.weight = DenseWeight{rows};
    head.y = {part.data, {logits.shape[0], width}, logits.dtype};
    ModelSite at = program.nodes[i].at;
    program.nodes[i] = make_node(at, head);
    at.site = kLogitsGather;
    const ConstAnyView<3> made(part.data, {1, logits.shape[0], width}, logits.dtype);
    program.nodes.insert(program.nodes.begin() + std::ptrdiff_t(++i),
                         make_node(at, ops::AllGather::Args{.x = made, .y = logits, .ranks = m.ranks}));
  }
  return program;
}

Program with_rms_qkv(Program program, const Wanted& wanted) {
  return rewrite(std::move(program), wanted, [](const Nodes& nodes, std::size_t i) -> std::optional<Fusion> {
    const auto* linear = call_of<ops::RmsLinear::Args>(nodes, i);
    if (!linear || linear->epilogue != ops::Epilogue::none) return {};
    const auto turn = sole_reader(nodes, i, linear->y.data);
    const auto* rope = call_of<ops::RopeAppend::Args>(nodes, turn);
    if (!rope || rope->qkv.data != linear->y.data || rope->qkv.size() != linear->y.size() ||
        rope->layout != ops::QkvLayout::separate)
      return {};
    return Fusion{{i, *turn}, make_node(nodes[*turn].at, ops::RmsQkv::of_parts(*linear, *rope))};
  });
}

}  // namespace cf
