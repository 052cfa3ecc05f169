#include "core/model/ranks.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/contract.hpp"
#include "core/fp8.hpp"

namespace cf {
namespace {

constexpr std::string_view kName = "ranks";

/// Consecutive rows or columns.
struct Piece {
  std::int64_t first, count;
};

/// The part of a matrix that a rank holds: some rows, or some columns of all rows.
struct Part {
  std::vector<Piece> rows;
  Piece columns;

  std::int64_t row_count() const {
    std::int64_t count = 0;
    for (const Piece& p : rows) count += p.count;
    return count;
  }
};

/// The rows of a rank's heads.
std::vector<Piece> qkv_rows(const ModelShape& whole, const ModelShape& part, std::int64_t rank) {
  if (whole.qkv_layout == ops::QkvLayout::interleaved_by_head) return {{rank * part.qkv_size(), part.qkv_size()}};
  const std::int64_t q = part.attention_size(), kv = part.num_kv_heads * part.head_dim;
  const std::int64_t k_first = whole.attention_size(), v_first = k_first + whole.num_kv_heads * whole.head_dim;
  return {{rank * q, q}, {k_first + rank * kv, kv}, {v_first + rank * kv, kv}};
}

Part part_of(const ModelSpec& whole, const ModelSpec& part, std::int64_t rank, SiteId site, const LinearSize& size) {
  const std::vector<Piece> all_rows{{0, size.out}};
  switch (site) {
    case SiteId::query_key_value: return {qkv_rows(whole.shape, part.shape, rank), {0, size.in}};
    case SiteId::dense_h_to_4h: return {{{rank * part.mlp_rows(), part.mlp_rows()}}, {0, size.in}};
    case SiteId::dense: return {all_rows, {rank * part.shape.attention_size(), part.shape.attention_size()}};
    default: return {all_rows, {rank * part.shape.intermediate_size, part.shape.intermediate_size}};
  }
}

/// Cuts parts out of matrices. Without `copies` what would be copied is a view of the right shape at the source's
/// address.
struct Cutter {
  bool copies;
  std::vector<Tensor>& storage;

  /// Rows and columns of a matrix, or of a vector as a matrix with one column.
  template <class V>
  V operator()(const V& source, const Part& part) const {
    const std::int64_t width = source.shape[1];
    const bool is_whole_width = part.columns.count == width;
    V cut = source;
    cut.shape = {part.row_count(), part.columns.count};
    if (!source.data) return cut;
    using Byte = const std::byte;
    const auto bytes = std::int64_t(size_bytes(source.dtype));
    Byte* const from = reinterpret_cast<Byte*>(static_cast<const void*>(source.data));
    const auto at = [&](Byte* place) { cut.data = static_cast<typename V::element*>(static_cast<const void*>(place)); };
    if (is_whole_width && part.rows.size() == 1) {
      at(from + part.rows[0].first * width * bytes);
      return cut;
    }
    if (!copies) return cut;
    Tensor made(source.dtype, {cut.shape[0], cut.shape[1]});
    auto* to = static_cast<std::byte*>(made.data());
    const std::int64_t row_bytes = part.columns.count * bytes;
    for (const Piece& p : part.rows)
      for (std::int64_t r = p.first; r < p.first + p.count; ++r, to += row_bytes)
        std::memcpy(to, from + (r * width + part.columns.first) * bytes, std::size_t(row_bytes));
    at(static_cast<const std::byte*>(made.data()));
    storage.push_back(std::move(made));
    return cut;
  }

  /// The elements of a vector that go with some rows.
  template <class V>
  V of_vector(const V& source, const std::vector<Piece>& rows) const {
    const auto matrix = (*this)(reshape<2>(source, {source.shape[0], 1}), {rows, {0, 1}});
    return reshape<1>(matrix, {matrix.shape[0]});
  }
};

Status cut_columns(const std::string& name, const GptqWeight& from, const Piece& columns, const Cutter& cut,
                   GptqWeight& to) {
  const std::int64_t in = from.g_idx.shape[0], group = from.group_size, out = from.scales.shape[1];
  for (std::int64_t k = 0; from.g_idx.data && k < in; ++k)
    if (from.g_idx.data[k] != k / group)
      return Status::error(Code::unimplemented, std::string(kName) + ": " + name +
                                                    ": GPTQ in act order is not built for several ranks, expected "
                                                    "groups of consecutive inputs, as without desc_act");
  const bool one_group = group >= in;
  if (!one_group && columns.count % group)
    return bad_argument(kName, name + ": a rank has " + std::to_string(columns.count) +
                                   " inputs, expected a multiple of the group_size " + std::to_string(group));
  if (columns.count % from.codes_per_word())
    return bad_argument(kName, name + ": a rank has " + std::to_string(columns.count) +
                                   " inputs, expected a multiple of the " + std::to_string(from.codes_per_word()) +
                                   " codes in a word");
  const auto words = [&](const Piece& p, std::int64_t each) { return Piece{p.first / each, p.count / each}; };
  const Piece groups = one_group ? Piece{0, 1} : words(columns, group);
  to.group_size = one_group ? columns.count : group;
  to.qweight = cut(from.qweight, {{words(columns, from.codes_per_word())}, {0, out}});
  to.qzeros = cut(from.qzeros, {{groups}, {0, from.qzeros.shape[1]}});
  to.scales = cut(from.scales, {{groups}, {0, out}});
  // The rank's groups are counted from 0: they are the first groups of the whole.
  to.g_idx.shape = {columns.count};
  return {};
}

Status cut_rows(const std::string& name, const GptqWeight& from, const std::vector<Piece>& rows, const Cutter& cut,
                GptqWeight& to) {
  std::vector<Piece> zeros;
  for (const Piece& p : rows) {
    const std::int64_t codes = from.codes_per_word();
    if (p.first % codes || p.count % codes)
      return bad_argument(kName, name + ": a rank has rows " + std::to_string(p.first) + " to " +
                                     std::to_string(p.first + p.count - 1) + ", expected multiples of the " +
                                     std::to_string(codes) + " codes in a word");
    zeros.push_back({p.first / codes, p.count / codes});
  }
  // The rows are the columns of a quantised weight's tensors.
  const auto columns = [&](const auto& source, const std::vector<Piece>& pieces) {
    std::int64_t count = 0;
    for (const Piece& p : pieces) count += p.count;
    auto joined = source;
    joined.shape[1] = count;
    if (!source.data) return joined;
    if (!cut.copies) return joined;
    using Element = std::remove_const_t<typename std::decay_t<decltype(source)>::element>;
    Tensor made(source.dtype, {source.shape[0], count});
    Element* to = made.template as<Element>();
    for (std::int64_t r = 0; r < source.shape[0]; ++r)
      for (const Piece& p : pieces) {
        std::memcpy(to, source.data + r * source.shape[1] + p.first, std::size_t(p.count) * sizeof(Element));
        to += p.count;
      }
    joined.data = made.template as<Element>();
    cut.storage.push_back(std::move(made));
    return joined;
  };
  to.qweight = columns(from.qweight, rows);
  to.qzeros = columns(from.qzeros, zeros);
  to.scales = columns(from.scales, rows);
  return {};
}

Status cut_linear(const std::string& name, const LinearParams& from, const Part& part, bool by_rows, const Cutter& cut,
                  LinearParams& to) {
  to = from;
  if (from.bias.shape[0] > 0 && by_rows) to.bias = cut.of_vector(from.bias, part.rows);
  if (const auto* dense = std::get_if<DenseWeight>(&from.weight)) {
    to.weight = DenseWeight{cut(dense->weight, part)};
    return {};
  }
  const auto* gptq = std::get_if<GptqWeight>(&from.weight);
  if (!gptq)
    return Status::error(Code::unimplemented, std::string(kName) + ": " + name + ": " +
                                                  (is_fp8(from.weight) ? "an fp8" : "a packed") + " weight is not cut");
  auto& cut_weight = std::get<GptqWeight>(to.weight);
  return by_rows ? cut_rows(name, *gptq, part.rows, cut, cut_weight)
                 : cut_columns(name, *gptq, part.columns, cut, cut_weight);
}

Result<OwnedLayerWeights> cut_layer(const ModelSpec& whole, const LayerWeights& layer, std::int64_t rank,
                                    std::int64_t ranks, bool copies) {
  CF_TRY_ASSIGN(const ModelSpec part, whole.of_rank(rank, ranks));
  OwnedLayerWeights owned;
  owned.weights = layer;
  const Cutter cut{copies, owned.storage};
  std::vector<LinearParams*> places;
  for_each_linear(whole, owned.weights, [&](const Site&, LinearParams& l, auto...) { places.push_back(&l); });
  Status status;
  std::size_t i = 0;
  for_each_linear(whole, layer, [&](const Site& site, const LinearParams& from, const LinearSize& size) {
    LinearParams& to = *places[i++];
    const bool by_rows = site.id == SiteId::query_key_value || site.id == SiteId::dense_h_to_4h;
    if (status)
      status = cut_linear(std::string(site.name), from, part_of(whole, part, rank, site.id, size), by_rows, cut, to);
  });
  CF_TRY(status);
  return owned;
}

}  // namespace

Result<OwnedLayerWeights> layer_of_rank(const ModelSpec& whole, const LayerWeights& layer, std::int64_t rank,
                                        std::int64_t ranks) {
  return cut_layer(whole, layer, rank, ranks, true);
}

Result<ModelWeights> outline_of_rank(const ModelSpec& whole, const ModelWeights& model, std::int64_t rank,
                                     std::int64_t ranks) {
  ModelWeights outline = model;
  for (std::size_t l = 0; l < outline.layers.size(); ++l) {
    Result<OwnedLayerWeights> cut = cut_layer(whole, model.layers[l], rank, ranks, false);
    if (!cut)
      return Status::error(cut.status().code(), names_of(whole).layer(std::int64_t(l)) + cut.status().message());
    outline.layers[l] = cut->weights;
  }
  return outline;
}

bool makes_part(const ModelSpec& m, SiteId site) {
  if (m.ranks == 1) return false;
  return site == SiteId::dense_4h_to_h || (site == SiteId::dense && m.traits.residual == Residual::sequential);
}

std::string identity_of(const ModelSpec& m, const ModelWeights& model) {
  const ModelShape& s = m.shape;
  const ModelTraits& t = m.traits;
  const ops::RopeScaling& scaling = t.rope_scaling;
  std::string text = "model_type " + std::string(family_of(m).model_type);
  const auto add = [&](std::string_view name, double value) {
    std::array<char, 32> number{};
    (void)std::snprintf(number.data(), number.size(), "%.17g", value);
    text += "\n" + std::string(name) + " " + number.data();
  };
  for (const auto& [name, size] : {std::pair{"hidden_size", s.hidden_size},
                                   {"num_layers", s.num_layers},
                                   {"num_heads", s.num_heads},
                                   {"num_kv_heads", s.num_kv_heads},
                                   {"head_dim", s.head_dim},
                                   {"intermediate_size", s.intermediate_size},
                                   {"vocab_size", s.vocab_size},
                                   {"rotary_dim", s.rotary_dim},
                                   {"max_positions", s.max_positions},
                                   {"qkv_layout", std::int64_t(s.qkv_layout)},
                                   {"head_norm", std::int64_t(s.head_norm)},
                                   {"norm", std::int64_t(t.norm)},
                                   {"activation", std::int64_t(t.activation)},
                                   {"residual", std::int64_t(t.residual)},
                                   {"positions", std::int64_t(t.positions)},
                                   {"qkv_bias", std::int64_t(t.qkv_bias)},
                                   {"dense_bias", std::int64_t(t.dense_bias)},
                                   {"mlp_bias", std::int64_t(t.mlp_bias)},
                                   {"tied_embeddings", std::int64_t(t.tied_embeddings)},
                                   {"window", t.window},
                                   {"rope_scaling", std::int64_t(scaling.kind)},
                                   {"original_max_positions", scaling.original_max_positions}})
    add(name, double(size));
  for (const auto& [name, value] : {std::pair{"layer_norm_eps", t.layer_norm_eps},
                                    {"rope_theta", t.rope_theta},
                                    {"factor", scaling.factor},
                                    {"low_freq_factor", scaling.low_freq_factor},
                                    {"high_freq_factor", scaling.high_freq_factor}})
    add(name, value);
  text += "\nfull_layers ";
  for (const bool full : t.full_layers) text += full ? '1' : '0';
  text += "\nweights " + std::string(to_string(model.embed_in.dtype));
  WeightFormat linears;
  for (const LayerWeights& layer : model.layers)
    for_each_linear(m, layer, [&](const Site&, const LinearParams& l, const LinearSize&) {
      if (const WeightFormat format = format_of(l.weight); format.bits) linears = format;
    });
  if (linears.bits)
    text += ", GPTQ of " + std::to_string(linears.bits) + " bits, groups of " + std::to_string(linears.group_size);
  // FNV-1a.
  constexpr std::int64_t most_bytes = 4096;
  std::uint64_t hash = 0xcbf29ce484222325;
  for_each_model_weight(m, model, [&](const TensorSpec&, const auto& view, const auto&) {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(view.data);
    for (std::int64_t i = 0; bytes && i < std::min(view.bytes(), most_bytes); ++i)
      hash = (hash ^ bytes[i]) * 0x100000001b3;
  });
  std::array<char, 24> digits{};
  (void)std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(hash));
  return text + "\nhash of weights " + digits.data();
}

}  // namespace cf
