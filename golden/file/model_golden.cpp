#include "golden/file/model_golden.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "core/procedural.hpp"
#include "core/resources.hpp"
#include "golden/checkpoint/printable.hpp"
#include "golden/file/schema.hpp"

namespace cf::golden {
namespace {

constexpr double kMaxParameters = 0x1p34;

std::string logits_of(const std::string& variant) { return "logits/" + variant; }
std::string taps_of(const std::string& variant) { return "taps/" + variant; }

Status read_meta(const Hdf5Reader& file, ModelGoldenMeta& m, std::vector<std::int32_t>& ids) {
  CF_TRY(read_origin(file, kModelSchema, {"checkpoint", "procedural"}, m));
  const ModelConfig& c = m.config;
  // Computed in double, which cannot overflow here.
  const double layers = double(c.num_hidden_layers) * double(c.layer_parameters());
  if (const double parameters = layers + 2 * double(c.vocab_size) * double(c.hidden_size); parameters > kMaxParameters)
    return file.refuse(Code::invalid_file, "attribute 'config'",
                       "expected a model of at most 2^34 parameters, got " +
                           std::to_string(std::int64_t(std::min(parameters, 0x1p62))));
  CF_TRY_ASSIGN(const Hdf5Reader::Info info, file.info("ids"));
  m.tokens = info.shape.size() == 1 ? info.shape[0] : 0;
  CF_TRY(in_range(file, "ids: tokens in one dimension", m.tokens, 2, c.most_positions() + 1));
  CF_TRY(check_integers(file, "ids", {m.tokens}, 0, c.vocab_size - 1, ids));
  CF_TRY_ASSIGN(m.prompt_len, file.integer("", "prompt_len"));
  return in_range(file, "attribute 'prompt_len'", m.prompt_len, 1, m.tokens - 1);
}

/// Whether a name is one of the schema's taps.
bool is_tap(const ModelConfig& config, const std::string& name) {
  const ModelNames& names = config.family().names;
  if (name == names.embed_in.tap || name == names.final_layer_norm.tap) return true;
  constexpr std::string_view before = "layers.";
  if (!name.starts_with(before)) return false;
  std::int64_t layer = -1;
  std::from_chars(name.data() + before.size(), name.data() + name.size(), layer);
  return layer >= 0 && layer < config.num_hidden_layers && name == layer_output_tap(layer);
}

/// Checks the shapes of one variant's logits. A file's first variant says how many logits a position has.
Status check_logits(const Hdf5Reader& file, const std::string& variant, DType dtype, bool is_first,
                    ModelGoldenMeta& m) {
  const std::string path = logits_of(variant);
  if (!file.is_group(path)) {
    if (m.top != 0) return file.refuse(Code::invalid_file, path, "expected a group as of the other variants");
    return expect(file, path, dtype, {m.fed(), m.config.vocab_size});
  }
  CF_TRY_ASSIGN(const Hdf5Reader::Info info, file.info(path + "/ids"));
  const std::int64_t top = info.shape.size() == 2 ? info.shape[1] : 0;
  CF_TRY(in_range(file, path + "/ids: logits of a position", top, 1, m.config.vocab_size));
  if (is_first) m.top = top;
  if (m.top == 0) return file.refuse(Code::invalid_file, path, "expected a dataset as of the other variants");
  CF_TRY(expect(file, path + "/ids", DType::i32, {m.fed(), m.top}));
  CF_TRY(expect(file, path + "/values", dtype, {m.fed(), m.top}));
  return expect(file, path + "/log_sum_exp", DType::f64, {m.fed()});
}

/// Reads the names of a variant's taps into v.taps. Refuses a tap that a model does not have, or of another shape or
/// dtype.
Status check_taps(const Hdf5Reader& file, const ModelGoldenMeta& m, DType dtype, VariantInfo& v) {
  const std::string group = taps_of(v.name);
  VariantInfo described;
  described.name = v.name;
  DType described_dtype{};
  CF_TRY(read_variant(file, group, described, described_dtype));
  if (described_dtype != dtype)
    return file.refuse(Code::invalid_file, group + " attribute 'dtype'",
                       "expected " + v.dtype + " as /" + logits_of(v.name) + " has, got " + described.dtype);
  CF_TRY_ASSIGN(v.taps, file.names(group));
  for (const std::string& tap : v.taps) {
    if (!is_tap(m.config, tap))
      return file.refuse(Code::invalid_file, group,
                         "expected the taps " + std::string(m.config.family().names.embed_in.tap) + ", " +
                             std::string(m.config.family().names.final_layer_norm.tap) + " and layers.N.output of " +
                             std::to_string(m.config.num_hidden_layers) + " layers, got " + checkpoint::quote(tap));
    CF_TRY(expect(file, group + "/" + tap, dtype, {m.fed(), m.config.hidden_size}));
  }
  return {};
}

Status read_variants(const Hdf5Reader& file, ModelGoldenMeta& m, std::vector<VariantInfo>& variants) {
  CF_TRY_ASSIGN(const std::vector<std::string> names, file.names("logits"));
  CF_TRY_ASSIGN(const std::vector<std::string> in_root, file.names(""));
  if (names.empty()) return file.refuse(Code::invalid_file, "logits", "expected at least one variant, got none");
  std::vector<std::string> with_taps;
  if (std::count(in_root.begin(), in_root.end(), "taps")) {
    CF_TRY_ASSIGN(with_taps, file.names("taps"));
  }
  for (const std::string& name : with_taps)
    if (!std::count(names.begin(), names.end(), name))
      return file.refuse(Code::invalid_file, "taps",
                         "expected the variants of /logits, got " + checkpoint::quote(name));
  for (const std::string& name : names) {
    VariantInfo v;
    v.name = name;
    DType dtype{};
    CF_TRY(read_variant(file, logits_of(name), v, dtype));
    CF_TRY(check_logits(file, name, dtype, variants.empty(), m));
    if (std::count(with_taps.begin(), with_taps.end(), name)) CF_TRY(check_taps(file, m, dtype, v));
    variants.push_back(std::move(v));
  }
  return {};
}

/// Checks each variant's ids of the largest logits: distinct in a row, and the same in all variants.
Status check_top_ids(const Hdf5Reader& file, const ModelGoldenMeta& m, const std::vector<VariantInfo>& variants) {
  std::vector<std::int32_t> first, ids;
  for (const VariantInfo& v : variants) {
    const std::string path = logits_of(v.name) + "/ids";
    CF_TRY(check_integers(file, path, {m.fed(), m.top}, 0, m.config.vocab_size - 1, ids));
    if (&v == &variants.front()) {
      for (std::int64_t p = 0; p < m.fed(); ++p) {
        const std::set<std::int32_t> distinct(ids.begin() + p * m.top, ids.begin() + (p + 1) * m.top);
        if (std::int64_t(distinct.size()) != m.top)
          return file.refuse(Code::invalid_file, path, "expected each id once in row " + std::to_string(p));
      }
      first = ids;
    } else if (ids != first) {
      return file.refuse(Code::invalid_file, path,
                         "expected the ids of /" + logits_of(variants.front().name) + "/ids, got others");
    }
  }
  return {};
}

/// Checks the reference's logits: they are finite, the largest first where the others are left out, and they choose the
/// file's ids.
Status check_reference(const Hdf5Reader& file, const ModelGoldenMeta& m, const std::vector<std::int32_t>& ids) {
  std::string path = logits_of(std::string(kReference));
  const auto in_row = [&](std::int64_t p) { return " in row " + std::to_string(p); };
  Tensor of_ids;
  if (m.top > 0) {
    CF_TRY_ASSIGN(of_ids, file.read(path + "/ids"));
    CF_TRY_ASSIGN(const Tensor sums, file.read(path + "/log_sum_exp"));
    for (std::int64_t p = 0; p < m.fed(); ++p)
      if (!std::isfinite(sums.as<double>()[p]))
        return file.refuse(Code::invalid_file, path + "/log_sum_exp",
                           "expected finite numbers, got another" + in_row(p));
    path += "/values";
  }
  CF_TRY_ASSIGN(const Tensor logits, file.read(path));
  const std::int64_t columns = logits.shape()[1];
  for (std::int64_t p = 0; p < m.fed(); ++p) {
    const double* row = logits.as<double>() + p * columns;
    const auto id_of = [&](std::int64_t i) {
      return m.top > 0 ? of_ids.as<std::int32_t>()[p * columns + i] : std::int32_t(i);
    };
    for (std::int64_t i = 0; i < columns; ++i) {
      if (!std::isfinite(row[i]))
        return file.refuse(Code::invalid_file, path, "expected finite numbers, got another" + in_row(p));
      if (m.top > 0 && i > 0 && !(row[i] < row[i - 1] || (row[i] == row[i - 1] && id_of(i) > id_of(i - 1))))
        return file.refuse(
            Code::invalid_file, path,
            "expected the largest logits first, of equal ones the lowest id, got another order" + in_row(p));
    }
    const std::int32_t chosen = id_of(std::max_element(row, row + columns) - row), next = ids[std::size_t(p + 1)];
    if (p + 1 >= m.prompt_len && chosen != next)
      return file.refuse(Code::invalid_file, "ids[" + std::to_string(p + 1) + "]",
                         "expected the lowest id of the largest logit" + in_row(p) + " of /" + path + ", which is " +
                             std::to_string(chosen) + ", got " + std::to_string(next));
  }
  return {};
}

}  // namespace

std::string layer_output_tap(std::int64_t layer) { return "layers." + std::to_string(layer) + ".output"; }

Result<GoldenSchema> golden_schema(const std::string& path) {
  return guarded(path, [&]() -> Result<GoldenSchema> {
    CF_TRY_ASSIGN(const Hdf5Reader file, Hdf5Reader::open(path));
    CF_TRY_ASSIGN(const std::string name, file.text("", "schema"));
    CF_TRY(one_of(file, "schema", name, {kLayerSchema.name, kModelSchema.name}));
    return name == kModelSchema.name ? GoldenSchema::model : GoldenSchema::layer;
  });
}

struct ModelGolden::Impl {
  Hdf5Reader file;
  ModelGoldenMeta meta;
  std::vector<VariantInfo> variants;

  /// Refuses what the file does not hold of the logits.
  Status check_asked(const std::string& variant, bool top) const {
    if (top == (meta.top > 0)) return {};
    return file.refuse(Code::invalid_argument, logits_of(variant),
                       meta.top > 0 ? "expected all logits, got the " + std::to_string(meta.top) + " largest alone"
                                    : "expected the largest logits alone, got all");
  }
};

Result<ModelGolden> ModelGolden::open(const std::string& path) {
  return guarded(path, [&]() -> Result<ModelGolden> {
    CF_TRY_ASSIGN(Hdf5Reader file, Hdf5Reader::open(path));
    ModelGoldenMeta meta;
    std::vector<std::int32_t> ids;
    std::vector<VariantInfo> variants;
    CF_TRY(read_meta(file, meta, ids));
    for (const char* table : {"inputs/cos", "inputs/sin"})
      if (meta.config.rotary_dim > 0) CF_TRY(expect(file, table, DType::f32, {meta.fed(), meta.config.rotary_dim / 2}));
    CF_TRY(read_variants(file, meta, variants));
    if (meta.top > 0) CF_TRY(check_top_ids(file, meta, variants));
    if (std::any_of(variants.begin(), variants.end(), [](const VariantInfo& v) { return v.name == kReference; }))
      CF_TRY(check_reference(file, meta, ids));
    ModelGolden golden;
    golden.impl_ = std::make_shared<const Impl>(Impl{std::move(file), std::move(meta), std::move(variants)});
    return golden;
  });
}

const std::string& ModelGolden::path() const { return impl_->file.path(); }
const ModelGoldenMeta& ModelGolden::meta() const { return impl_->meta; }
const std::vector<VariantInfo>& ModelGolden::variants() const { return impl_->variants; }

Result<Tensor> ModelGolden::ids() const {
  return guarded(path(), [&] { return impl_->file.read("ids"); });
}

Result<Tensor> ModelGolden::input(const std::string& name) const {
  return guarded(path(), [&] { return impl_->file.read("inputs/" + name); });
}

Result<Tensor> ModelGolden::logits(const std::string& variant) const {
  CF_TRY(impl_->check_asked(variant, false));
  return guarded(path(), [&] { return impl_->file.read(logits_of(variant)); });
}

Result<TopLogits> ModelGolden::top_logits(const std::string& variant) const {
  CF_TRY(impl_->check_asked(variant, true));
  return guarded(path(), [&]() -> Result<TopLogits> {
    TopLogits top;
    const std::string group = logits_of(variant);
    CF_TRY_ASSIGN(top.ids, impl_->file.read(group + "/ids"));
    CF_TRY_ASSIGN(top.values, impl_->file.read(group + "/values"));
    CF_TRY_ASSIGN(top.log_sum_exp, impl_->file.read(group + "/log_sum_exp"));
    return top;
  });
}

Result<Tensor> ModelGolden::tap(const std::string& variant, const std::string& tap) const {
  return guarded(path(), [&] { return impl_->file.read(taps_of(variant) + "/" + tap); });
}

Result<GoldenModelWeights> ModelGolden::weights(const std::string& checkpoint) const {
  const ModelGoldenMeta& m = impl_->meta;
  const auto procedural = [&]() -> Result<GoldenModelWeights> {
    const ModelSpec spec = m.config;
    const auto bytes = double(weight_bytes(spec, outline_model(spec, m.dtype)));
    CF_TRY(check_free_memory(bytes, path() + ": the procedural weights need " + gigabytes(bytes)));
    auto owned = std::make_shared<OwnedModelWeights>(procedural_model(m.config, m.dtype, m.seed));
    return GoldenModelWeights{owned->weights, m.dtype, owned};
  };
  const auto loaded = [&]() -> Result<GoldenModelWeights> {
    const auto sizes = [](const ModelConfig& s) {
      return std::to_string(s.num_hidden_layers) + " layers, " + layer_sizes(s) + ", vocab_size " +
             std::to_string(s.vocab_size) + ", " + (s.tie_word_embeddings ? "tied" : "untied") + " embeddings";
    };
    CF_TRY_ASSIGN(const checkpoint::Checkpoint opened, open_checkpoint(path(), m, checkpoint, sizes));
    CF_TRY_ASSIGN(checkpoint::CheckpointModel model, opened.model());
    CF_TRY(opened.check_finite(model));
    auto owned = std::make_shared<checkpoint::CheckpointModel>(std::move(model));
    return GoldenModelWeights{owned->weights, owned->dtype, owned, owned->notes};
  };
  return guarded(path(), [&]() -> Result<GoldenModelWeights> {
    const bool from_checkpoint = !checkpoint.empty() || m.weights == "checkpoint";
    CF_TRY_ASSIGN(GoldenModelWeights w, from_checkpoint ? loaded() : procedural());
    CF_TRY(check_weights(impl_->file, m, weights_checksum(m.config, w.weights),
                         from_checkpoint ? "checkpoint" : m.weights));
    return w;
  });
}

struct ModelGoldenWriter::Impl {
  Hdf5Writer file;
};

ModelGoldenWriter::ModelGoldenWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ModelGoldenWriter::ModelGoldenWriter(ModelGoldenWriter&&) noexcept = default;
ModelGoldenWriter::~ModelGoldenWriter() = default;

Result<ModelGoldenWriter> ModelGoldenWriter::create(const std::string& path, const ModelGoldenMeta& m) {
  CF_TRY_ASSIGN(Hdf5Writer file, Hdf5Writer::create(path));
  CF_TRY(write_origin(file, kModelSchema, m));
  CF_TRY(file.integer("", "prompt_len", m.prompt_len));
  return ModelGoldenWriter(std::make_unique<Impl>(Impl{std::move(file)}));
}

Status ModelGoldenWriter::add_ids(const Tensor& ids) { return impl_->file.write("ids", ids); }

Status ModelGoldenWriter::add_input(const std::string& name, const Tensor& tensor) {
  return impl_->file.write("inputs/" + name, tensor);
}

Status ModelGoldenWriter::add_logits(const VariantInfo& variant, const Tensor& logits) {
  CF_TRY(impl_->file.write(logits_of(variant.name), logits));
  return write_variant(impl_->file, logits_of(variant.name), variant);
}

Status ModelGoldenWriter::add_logits(const VariantInfo& variant, const TopLogits& logits) {
  const std::string group = logits_of(variant.name);
  CF_TRY(impl_->file.write(group + "/ids", logits.ids));
  CF_TRY(impl_->file.write(group + "/values", logits.values));
  CF_TRY(impl_->file.write(group + "/log_sum_exp", logits.log_sum_exp));
  return write_variant(impl_->file, group, variant);
}

Status ModelGoldenWriter::add_tap(const VariantInfo& variant, const std::string& tap, const Tensor& tensor) {
  const std::string group = taps_of(variant.name);
  CF_TRY(write_variant(impl_->file, group, variant));
  return impl_->file.write(group + "/" + tap, tensor);
}

Status ModelGoldenWriter::commit() {
  return guarded(impl_->file.path(), [&] { return impl_->file.commit(); });
}

}  // namespace cf::golden
