#include "golden/file/golden_file.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>

#include "core/cache_view.hpp"
#include "core/procedural.hpp"
#include "core/resources.hpp"
#include "golden/checkpoint/join_parts.hpp"
#include "golden/file/schema.hpp"

namespace cf::golden {
namespace {

constexpr double kMaxElements = 0x1p33;
constexpr std::int64_t kMaxTokens = 1 << 24, kMaxGroupSize = 1 << 22;

Status read_meta(const Hdf5Reader& file, GoldenMeta& m) {
  CF_TRY(read_origin(file, kLayerSchema, {"stored", "checkpoint", "procedural", "procedural_gptq"}, m));
  CF_TRY_ASSIGN(m.layer, file.integer("", "layer"));
  CF_TRY(in_range(file, "attribute 'layer'", m.layer, 0, m.config.num_hidden_layers - 1));
  CF_TRY_ASSIGN(m.load.batch, file.integer("", "batch"));
  CF_TRY(in_range(file, "attribute 'batch'", m.load.batch, 1, kMaxTokens));
  CF_TRY_ASSIGN(m.load.q_len, file.integer("", "q_len"));
  CF_TRY(in_range(file, "attribute 'q_len'", m.load.q_len, 1, m.config.most_positions()));
  CF_TRY(in_range(file, "batch * q_len", m.load.tokens(), 1, kMaxTokens));
  CF_TRY(check_integers(file, "inputs/kv_len", {m.load.batch}, m.load.q_len, m.config.most_positions(), m.kv_len));
  m.load.kv_len = *std::max_element(m.kv_len.begin(), m.kv_len.end());

  CF_TRY_ASSIGN(m.cache, file.text("", "cache"));
  CF_TRY(one_of(file, "cache", m.cache, {"prefill", "random", "procedural", "none"}));
  if (m.cache == "none") CF_TRY(in_range(file, "largest kv_len with cache = 'none'", m.load.kv_len, 1, m.load.q_len));
  if (m.cache == "procedural") {
    CF_TRY_ASSIGN(m.cache_checksum, file.unsigned_integer("", "cache_checksum"));
  }
  if (m.weights == "procedural_gptq") {
    std::int64_t bits = 0;
    CF_TRY_ASSIGN(bits, file.integer("", "weights_bits"));
    if (bits != 4 && bits != 8)
      return file.refuse(Code::invalid_file, "attribute 'weights_bits'",
                         "expected 4 or 8, got " + std::to_string(bits));
    CF_TRY_ASSIGN(m.linears.group_size, file.integer("", "weights_group_size"));
    if (const std::int64_t size = m.linears.group_size; size != -1 && (size < 1 || size > kMaxGroupSize))
      return file.refuse(Code::invalid_file, "attribute 'weights_group_size'",
                         "expected -1 or 1 to " + std::to_string(kMaxGroupSize) + ", got " + std::to_string(size));
    m.linears.bits = int(bits);
  }
  return {};
}

/// The shape of the cache entries before the append.
Shape old_cache_shape(const GoldenMeta& m) {
  return {m.load.batch, m.config.kv_heads(), m.load.kv_len - m.load.q_len, m.config.head_dim()};
}

Shape table_shape(const GoldenMeta& m) { return {m.load.tokens(), m.config.rotary_dim / 2}; }

/// Bounds the sizes before memory is allocated for them. Computes in double, which cannot overflow here.
Status check_size(const Hdf5Reader& file, const GoldenMeta& m) {
  const ModelConfig& c = m.config;
  const double tokens = double(m.load.tokens());
  // The widest row of a token outside the MLP.
  const double hidden = std::max(double(c.hidden_size), double(c.num_attention_heads) * double(c.head_dim()));
  const double step =
      2 * double(m.load.batch) * double(m.load.kv_len) * hidden + tokens * (12 * hidden + double(c.intermediate_size));
  if (const double elements = std::max(step, double(c.layer_parameters())); elements > kMaxElements)
    return file.refuse(Code::invalid_file, "attribute 'config'",
                       "expected a layer and a step of at most 2^33 elements, got " +
                           std::to_string(std::int64_t(std::min(elements, 0x1p62))));
  return {};
}

Status check_inputs(const Hdf5Reader& file, const GoldenMeta& m) {
  CF_TRY(expect(file, "inputs/hidden", m.dtype, {m.load.tokens(), m.config.hidden_size}));
  std::vector<std::int32_t> positions;
  CF_TRY(
      check_integers(file, "inputs/positions", {m.load.tokens()}, 0, m.config.max_position_embeddings - 1, positions));
  if (m.config.rotary_dim > 0)
    for (const char* table : {"inputs/cos", "inputs/sin"}) CF_TRY(expect(file, table, DType::f32, table_shape(m)));
  if (m.cache == "procedural" || m.load.kv_len == m.load.q_len) return {};
  CF_TRY(expect(file, "inputs/k_cache", m.dtype, old_cache_shape(m)));
  return expect(file, "inputs/v_cache", m.dtype, old_cache_shape(m));
}

/// A stored weight's datasets: the weight itself or, of a Linear that checkpoints store in several modules, theirs.
struct StoredWeight {
  std::vector<std::string> datasets;
  std::vector<Shape> shapes;  // of each dataset
  StoredParts parts;
  bool transposed = false;  // the datasets are (in, rows)
};

StoredWeight stored_weight(const Hdf5Reader& file, const ModelConfig& m, std::string_view name, const Shape& shape) {
  const std::string group = "weights/", whole = group + std::string(name);
  const std::size_t dot = name.rfind('.');
  StoredWeight stored{{whole}, {shape}, {}};
  const bool is_whole = bool(file.info(whole));
  for_each_linear(m, LayerWeights{}, [&](const Site& site, const auto&, const LinearSize& size) {
    if (site.name != name.substr(0, dot)) return;
    const StoredParts parts = stored_parts(m, site, size);
    const bool transposed = parts.transposed && name.ends_with(".weight");
    if (is_whole && !transposed) return;
    stored = {{}, {}, parts, transposed};
    for (const StoredPart& part : parts.parts) {
      stored.datasets.push_back(group + std::string(part.module) + std::string(name.substr(dot)));
      stored.shapes.push_back(shape);
      stored.shapes.back()[0] = part.rows;
      if (transposed) stored.shapes.back() = {shape[1], part.rows};
    }
  });
  return stored;
}

Status check_stored_weights(const Hdf5Reader& file, const GoldenMeta& m) {
  LayerWeights w;
  Status status;
  for_each_weight(m.config, w, [&](const TensorSpec& t, auto&, auto shape) {
    const StoredWeight stored = stored_weight(file, m.config, t.name, Shape(shape.begin(), shape.end()));
    for (std::size_t i = 0; status && i < stored.datasets.size(); ++i)
      status = expect(file, stored.datasets[i], m.dtype, stored.shapes[i]);
  });
  return status;
}

Status read_variants(const Hdf5Reader& file, const GoldenMeta& m, std::vector<VariantInfo>& variants) {
  std::vector<std::string> names;
  CF_TRY_ASSIGN(names, file.names("taps"));
  for (std::string& name : names) {
    const std::string group = "taps/" + name;
    VariantInfo v;
    v.name = std::move(name);
    DType dtype{};
    CF_TRY(read_variant(file, group, v, dtype));
    CF_TRY_ASSIGN(v.taps, file.names(group));
    for (const std::string& tap : v.taps) {
      Shape shape;
      for (const TapDim& d : tap_dims(m.config, m.load, tap)) shape.push_back(d.size);
      if (!shape.empty()) CF_TRY(expect(file, group + "/" + tap, dtype, shape));
    }
    variants.push_back(std::move(v));
  }
  return {};
}

void fill_nan(Tensor& t) {
  dispatch_float(t.dtype(), [&](auto zero) {
    using T = decltype(zero);
    std::fill_n(t.as<T>(), t.size(), narrow<T>(std::numeric_limits<double>::quiet_NaN()));
  });
}

char* row(Tensor& t, std::int64_t index, std::int64_t elements) {
  return static_cast<char*>(t.data()) + std::size_t(index * elements) * size_bytes(t.dtype());
}
const char* row(const Tensor& t, std::int64_t index, std::int64_t elements) {
  return static_cast<const char*>(t.data()) + std::size_t(index * elements) * size_bytes(t.dtype());
}

/// Reads a stored weight as the walk has it: joins what is stored in parts, and transposes what is stored so.
Result<Tensor> read_stored(const Hdf5Reader& file, const GoldenMeta& m, std::string_view name, const Shape& shape) {
  const StoredWeight stored = stored_weight(file, m.config, name, shape);
  if (stored.datasets.size() == 1 && !stored.transposed) return file.read(stored.datasets[0]);
  Tensor joined(m.dtype, shape);
  const std::int64_t columns = joined.size() / shape[0];
  for (std::size_t part = 0; part < stored.datasets.size(); ++part) {
    CF_TRY_ASSIGN(const Tensor rows, file.read(stored.datasets[part]));
    if (stored.transposed) {
      checkpoint::transpose_part(stored.parts, part, rows.data(), joined.data(), columns, size_bytes(m.dtype));
      continue;
    }
    for (std::int64_t r = 0; r < rows.shape()[0]; ++r)
      std::memcpy(row(joined, stored.parts.joined_row(part, r), columns), row(rows, r, columns),
                  std::size_t(columns) * size_bytes(m.dtype));
  }
  return joined;
}

/// Copies each sequence's entries from before the append; the rest of the cache becomes NaN.
void fill_cache(Tensor& cache, const Tensor& old, const GoldenMeta& m) {
  const CacheView from(old.view<4>()), to(cache.view<4>());
  fill_nan(cache);
  for (std::int64_t b = 0; b < m.load.batch; ++b)
    for (std::int64_t h = 0; h < to.heads(); ++h)
      convert(row(old, from.entry(b, h, 0), 1), old.dtype(), row(cache, to.entry(b, h, 0), 1), cache.dtype(),
              (m.kv_len[std::size_t(b)] - m.load.q_len) * to.head_dim());
}

}  // namespace

std::string weight_tap(std::string_view module) { return std::string(module) + ".weight"; }

std::vector<TapDim> tap_dims(const ModelConfig& m, const Workload& load, std::string_view tap) {
  const TapDim token{"token", load.tokens()}, hidden{"hidden", m.hidden_size}, head{"head", m.num_attention_heads},
      kv_head{"head", m.kv_heads()}, d{"d", m.head_dim()};
  const ModelNames& names = m.family().names;
  const auto of = [&](const Site& site, std::string_view output) {
    return tap == std::string(site.tap) + "." + std::string(output);
  };
  if (tap == names.query_key_value.tap || (m.family().head_norm && tap == names.qk_norm.tap)) {
    const auto shape = m.spec().shape.qkv_heads().extents_of(load.tokens(), m.head_dim());
    return {token, {"head", shape[1]}, {"qkv", shape[2]}, d};
  }
  if (of(names.rotary_emb, "q")) return {token, head, d};
  if (of(names.rotary_emb, "k") || of(names.rotary_emb, "v")) return {token, kv_head, d};
  if (of(names.kv_append, "k_cache") || of(names.kv_append, "v_cache"))
    return {{"sequence", load.batch}, kv_head, {"new", load.q_len}, d};
  if (tap == names.context.tap) return {token, head, d};
  if (tap == names.dense_h_to_4h.tap) return {token, {"intermediate", m.intermediate_size}};
  for (const Site& s : {names.input_layernorm, names.dense, names.post_attention_layernorm, names.dense_4h_to_h})
    if (tap == s.tap) return {token, hidden};
  std::vector<TapDim> weight;
  for_each_linear(m, LayerWeights{}, [&](const Site& site, const auto&, const LinearSize& size) {
    if (tap == weight_tap(site.name)) weight = {{"out", size.out}, {"in", size.in}};
  });
  return weight;
}

struct GoldenFile::Impl {
  Hdf5Reader file;
  GoldenMeta meta;
  std::vector<VariantInfo> variants;

  /// K's and V's entries from before the append. Procedural ones are made and checked; without entries both are empty.
  Result<std::pair<Tensor, Tensor>> old_cache() const {
    const Shape shape = old_cache_shape(meta);
    Tensor k, v;
    if (element_count(shape) > 0 && meta.cache != "procedural") {
      CF_TRY_ASSIGN(k, file.read("inputs/k_cache"));
      CF_TRY_ASSIGN(v, file.read("inputs/v_cache"));
      return std::pair{std::move(k), std::move(v)};
    }
    const double bytes = 2 * double(element_count(shape)) * double(size_bytes(meta.dtype));
    CF_TRY(check_free_memory(bytes, file.path() + ": the procedural cache needs " + gigabytes(bytes)));
    k = Tensor(meta.dtype, shape);
    v = Tensor(meta.dtype, shape);
    if (meta.cache != "procedural") return std::pair{std::move(k), std::move(v)};
    fill_procedural(k.data(), meta.dtype, 0, k.size(), ProceduralKind::activation, meta.seed, "k_cache");
    fill_procedural(v.data(), meta.dtype, 0, v.size(), ProceduralKind::activation, meta.seed, "v_cache");
    const std::uint64_t sum =
        checksum(k.data(), std::size_t(k.size_bytes())) + 3 * checksum(v.data(), std::size_t(v.size_bytes()));
    if (sum != meta.cache_checksum)
      return file.refuse(Code::invalid_file, "attribute 'cache_checksum'",
                         "expected " + std::to_string(meta.cache_checksum) + ", got " + std::to_string(sum) +
                             " from the procedural cache of seed " + std::to_string(meta.seed));
    return std::pair{std::move(k), std::move(v)};
  }

  /// Copies the row of each token's cos or sin to the row of its position in a table.
  Status load_table(const std::string& name, Tensor& table, const Tensor& positions) const {
    Tensor rows;
    CF_TRY_ASSIGN(rows, file.read("inputs/" + name));
    fill_nan(table);
    const std::int64_t half = rows.shape()[1];
    std::set<std::int32_t> filled;
    for (std::int64_t t = 0; t < rows.shape()[0]; ++t) {
      const std::int32_t p = positions.as<std::int32_t>()[t];
      if (p >= table.shape()[0])
        return file.refuse(Code::invalid_file, "inputs/positions[" + std::to_string(t) + "]",
                           "expected a position of the cache's entries, below " + std::to_string(table.shape()[0]) +
                               ", got " + std::to_string(p));
      const float* from = rows.as<float>() + t * half;
      float* to = table.as<float>() + p * half;
      if (!filled.insert(p).second && std::memcmp(to, from, std::size_t(half) * sizeof(float)) != 0)
        return file.refuse(
            Code::invalid_file, "inputs/" + name,
            "row " + std::to_string(t) + " differs from an earlier one at the same position " + std::to_string(p));
      std::copy_n(from, half, to);
    }
    return {};
  }
};

Result<GoldenFile> GoldenFile::open(const std::string& path) {
  return guarded(path, [&]() -> Result<GoldenFile> {
    Result<Hdf5Reader> file = Hdf5Reader::open(path);
    if (!file) return file.status();
    GoldenMeta meta;
    CF_TRY(read_meta(*file, meta));
    CF_TRY(check_size(*file, meta));
    CF_TRY(check_inputs(*file, meta));
    if (meta.weights == "stored") CF_TRY(check_stored_weights(*file, meta));
    std::vector<VariantInfo> variants;
    CF_TRY(read_variants(*file, meta, variants));
    GoldenFile golden;
    golden.impl_ = std::make_shared<const Impl>(Impl{std::move(*file), std::move(meta), std::move(variants)});
    return golden;
  });
}

const std::string& GoldenFile::path() const { return impl_->file.path(); }
const GoldenMeta& GoldenFile::meta() const { return impl_->meta; }
const std::vector<VariantInfo>& GoldenFile::variants() const { return impl_->variants; }

Result<Tensor> GoldenFile::input(const std::string& name) const {
  return guarded(path(), [&]() -> Result<Tensor> {
    if (name != "k_cache" && name != "v_cache") return impl_->file.read("inputs/" + name);
    auto old = impl_->old_cache();
    if (!old) return old.status();
    return std::move(name == "k_cache" ? old->first : old->second);
  });
}

Result<Tensor> GoldenFile::tap(const std::string& variant, const std::string& tap) const {
  return guarded(path(), [&] { return impl_->file.read("taps/" + variant + "/" + tap); });
}

Status GoldenFile::load(LayerState& state) const {
  const GoldenMeta& m = impl_->meta;
  const Shape cache = state.k_cache.shape(), table = state.cos.shape();
  const bool rotates = m.config.rotary_dim > 0;
  const bool fits =
      state.hidden.shape() == Shape{m.load.tokens(), m.config.hidden_size} && state.kv_len.size() == m.load.batch &&
      cache.size() == 4 && cache[0] == m.load.batch && cache[1] == m.config.kv_heads() && cache[2] >= m.load.kv_len &&
      cache[3] == m.config.head_dim() &&
      (!rotates || (table.size() == 2 && table[0] >= m.load.kv_len && table[1] == m.config.rotary_dim / 2));
  if (!fits)
    return Status::error(Code::invalid_argument, path() + ": state: expected one made for this file's config and load");
  return guarded(path(), [&]() -> Status {
    Tensor hidden, positions;
    CF_TRY_ASSIGN(hidden, impl_->file.read("inputs/hidden"));
    CF_TRY_ASSIGN(positions, impl_->file.read("inputs/positions"));
    auto old = impl_->old_cache();
    if (!old) return old.status();

    state.set_kv_len(m.kv_len);
    convert(hidden.data(), hidden.dtype(), state.hidden.data(), state.hidden.dtype(), hidden.size());
    std::memcpy(state.positions.data(), positions.data(), std::size_t(positions.size_bytes()));
    if (rotates) {
      CF_TRY(impl_->load_table("cos", state.cos, positions));
      CF_TRY(impl_->load_table("sin", state.sin, positions));
    }
    fill_cache(state.k_cache, old->first, m);
    fill_cache(state.v_cache, old->second, m);
    return {};
  });
}

Result<GoldenWeights> GoldenFile::weights(const std::string& checkpoint) const {
  const GoldenMeta& m = impl_->meta;
  const auto stored = [&]() -> Result<GoldenWeights> {
    auto owned = std::make_shared<OwnedLayerWeights>();
    Status status;
    for_each_weight(m.config, owned->weights, [&](const TensorSpec& spec, auto& view, auto shape) {
      if (!status) return;
      Result<Tensor> t = read_stored(impl_->file, m, spec.name, Shape(shape.begin(), shape.end()));
      status = t.status();
      if (!status) return;
      point(view, t->data(), shape, m.dtype);
      owned->storage.push_back(std::move(*t));
    });
    CF_TRY(status);
    return GoldenWeights{owned->weights, m.dtype, owned};
  };
  const auto procedural = [&]() -> Result<GoldenWeights> {
    ModelSpec one_layer = m.config;
    one_layer.shape.num_layers = 1;
    const ModelWeights outline = outline_model(one_layer, m.config.dtype, m.linears);
    double bytes = 0;
    for_each_weight(one_layer, outline.layers[0],
                    [&](const TensorSpec&, const auto& view, const auto&) { bytes += double(view.bytes()); });
    CF_TRY(check_free_memory(bytes, path() + ": the procedural weights need " + gigabytes(bytes)));
    auto owned =
        std::make_shared<OwnedLayerWeights>(procedural_layer(m.config, m.config.dtype, m.layer, m.seed, m.linears));
    return GoldenWeights{owned->weights, m.dtype, owned};
  };
  const auto loaded = [&]() -> Result<GoldenWeights> {
    CF_TRY_ASSIGN(const checkpoint::Checkpoint opened, open_checkpoint(path(), m, checkpoint, layer_sizes));
    CF_TRY_ASSIGN(checkpoint::CheckpointLayer layer, opened.layer(m.layer));
    CF_TRY(opened.check_finite(layer));
    auto owned = std::make_shared<checkpoint::CheckpointLayer>(std::move(layer));
    return GoldenWeights{owned->weights, owned->dtype, owned, owned->notes};
  };
  return guarded(path(), [&]() -> Result<GoldenWeights> {
    const bool from_checkpoint = !checkpoint.empty() || m.weights == "checkpoint";
    Result<GoldenWeights> w = from_checkpoint ? loaded() : m.weights == "stored" ? stored() : procedural();
    if (!w) return w;
    CF_TRY(check_weights(impl_->file, m, weights_checksum(m.config, w->weights),
                         from_checkpoint ? "checkpoint" : m.weights));
    return w;
  });
}

struct GoldenWriter::Impl {
  Hdf5Writer file;
};

GoldenWriter::GoldenWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GoldenWriter::GoldenWriter(GoldenWriter&&) noexcept = default;
GoldenWriter::~GoldenWriter() = default;

Result<GoldenWriter> GoldenWriter::create(const std::string& path, const GoldenMeta& m) {
  Result<Hdf5Writer> file = Hdf5Writer::create(path);
  if (!file) return file.status();
  CF_TRY(write_origin(*file, kLayerSchema, m));
  CF_TRY(file->integer("", "layer", m.layer));
  CF_TRY(file->integer("", "batch", m.load.batch));
  CF_TRY(file->integer("", "q_len", m.load.q_len));
  CF_TRY(file->text("", "cache", m.cache));
  if (m.cache == "procedural") CF_TRY(file->unsigned_integer("", "cache_checksum", m.cache_checksum));
  if (m.weights == "procedural_gptq") {
    CF_TRY(file->integer("", "weights_bits", m.linears.bits));
    CF_TRY(file->integer("", "weights_group_size", m.linears.group_size));
  }
  return GoldenWriter(std::make_unique<Impl>(Impl{std::move(*file)}));
}

Status GoldenWriter::add_input(const std::string& name, const Tensor& tensor) {
  return impl_->file.write("inputs/" + name, tensor);
}

Status GoldenWriter::add_weight(const std::string& name, const Tensor& tensor) {
  return impl_->file.write("weights/" + name, tensor);
}

Status GoldenWriter::add_tap(const VariantInfo& variant, const std::string& tap, const Tensor& tensor) {
  const std::string group = "taps/" + variant.name;
  CF_TRY(write_variant(impl_->file, group, variant));
  return impl_->file.write(group + "/" + tap, tensor);
}

Status GoldenWriter::commit() {
  return guarded(impl_->file.path(), [&] { return impl_->file.commit(); });
}

}  // namespace cf::golden
