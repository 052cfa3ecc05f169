#include "golden/file/schema.hpp"

#include <filesystem>

#include "golden/checkpoint/hf_config.hpp"
#include "golden/checkpoint/printable.hpp"

namespace cf::golden {

using checkpoint::quote;

namespace {

std::string described(DType dtype, const Shape& shape) {
  return std::string(to_string(dtype)) + " " + to_string(shape);
}

}  // namespace

Status expect(const Hdf5Reader& file, const std::string& name, DType dtype, const Shape& shape) {
  Hdf5Reader::Info info;
  CF_TRY_ASSIGN(info, file.info(name));
  if (info.dtype != dtype || info.shape != shape)
    return file.refuse(Code::invalid_file, name,
                       "expected " + described(dtype, shape) + ", got " + described(info.dtype, info.shape));
  return {};
}

Status in_range(const Hdf5Reader& file, const std::string& what, std::int64_t value, std::int64_t least,
                std::int64_t most) {
  if (value >= least && value <= most) return {};
  return file.refuse(
      Code::invalid_file, what,
      "expected " + std::to_string(least) + " to " + std::to_string(most) + ", got " + std::to_string(value));
}

Status one_of(const Hdf5Reader& file, const std::string& attribute, const std::string& value,
              std::initializer_list<std::string_view> allowed) {
  std::string names;
  for (std::string_view a : allowed) {
    if (a == value) return {};
    names += (names.empty() ? "" : ", ") + std::string(a);
  }
  return file.refuse(Code::invalid_file, "attribute '" + attribute + "'",
                     "expected one of " + names + ", got " + quote(value));
}

Status check_integers(const Hdf5Reader& file, const std::string& name, const Shape& shape, std::int64_t least,
                      std::int64_t most, std::vector<std::int32_t>& values) {
  CF_TRY(expect(file, name, DType::i32, shape));
  Tensor t;
  CF_TRY_ASSIGN(t, file.read(name));
  values.assign(t.as<std::int32_t>(), t.as<std::int32_t>() + t.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    if (values[i] < least || values[i] > most)
      return in_range(file, name + "[" + std::to_string(i) + "]", values[i], least, most);
  return {};
}

Status read_origin(const Hdf5Reader& file, const Schema& expected, std::initializer_list<std::string_view> sources,
                   GoldenOrigin& m) {
  std::string schema, dtype;
  std::int64_t version = 0;
  CF_TRY_ASSIGN(schema, file.text("", "schema"));
  CF_TRY(one_of(file, "schema", schema, {expected.name}));
  CF_TRY_ASSIGN(version, file.integer("", "schema_version"));
  CF_TRY(in_range(file, "attribute 'schema_version'", version, expected.oldest, expected.newest));
  if (const std::string& attribute = file.variable_length_text(); version >= expected.fixed_text && !attribute.empty())
    return file.refuse(
        Code::invalid_file, attribute,
        "expected a string of fixed length in schema " + std::to_string(version) + ", got a variable one");
  CF_TRY_ASSIGN(m.producer, file.text("", "producer"));
  CF_TRY_ASSIGN(m.command, file.text("", "command"));
  CF_TRY_ASSIGN(m.versions, file.text("", "versions"));
  CF_TRY_ASSIGN(m.model, file.text("", "model"));
  CF_TRY_ASSIGN(m.config_json, file.text("", "config"));
  CF_TRY_ASSIGN(m.config, checkpoint::parse_hf_config(m.config_json, file.path() + ": /attribute 'config'"));
  m.config.name = m.model;
  CF_TRY_ASSIGN(dtype, file.text("", "dtype"));
  CF_TRY(one_of(file, "dtype", dtype, {to_string(DType::f16), to_string(DType::bf16), to_string(DType::f32)}));
  m.dtype = m.config.dtype = *dtype_from_string(dtype);
  CF_TRY_ASSIGN(m.seed, file.unsigned_integer("", "seed"));
  CF_TRY_ASSIGN(m.weights, file.text("", "weights"));
  CF_TRY(one_of(file, "weights", m.weights, sources));
  CF_TRY_ASSIGN(m.weights_checksum, file.unsigned_integer("", "weights_checksum"));
  if (m.weights == "checkpoint") {
    CF_TRY_ASSIGN(m.weights_checkpoint, file.text("", "weights_checkpoint"));
  }
  return {};
}

Status write_origin(Hdf5Writer& file, const Schema& schema, const GoldenOrigin& m) {
  CF_TRY(file.text("", "schema", std::string(schema.name)));
  CF_TRY(file.integer("", "schema_version", schema.newest));
  CF_TRY(file.text("", "producer", m.producer));
  CF_TRY(file.text("", "command", m.command));
  CF_TRY(file.text("", "versions", m.versions));
  CF_TRY(file.text("", "config", m.config_json.empty() ? checkpoint::to_hf_json(m.config) : m.config_json));
  CF_TRY(file.text("", "model", m.model));
  CF_TRY(file.text("", "dtype", std::string(to_string(m.dtype))));
  CF_TRY(file.unsigned_integer("", "seed", m.seed));
  CF_TRY(file.text("", "weights", m.weights));
  CF_TRY(file.unsigned_integer("", "weights_checksum", m.weights_checksum));
  return m.weights == "checkpoint" ? file.text("", "weights_checkpoint", m.weights_checkpoint) : Status();
}

Status read_variant(const Hdf5Reader& file, const std::string& object, VariantInfo& v, DType& dtype) {
  CF_TRY_ASSIGN(v.dtype, file.text(object, "dtype"));
  CF_TRY_ASSIGN(v.attn_implementation, file.text(object, "attn_implementation"));
  CF_TRY_ASSIGN(v.device, file.text(object, "device"));
  const std::optional<DType> known = dtype_from_string(v.dtype);
  if (!known || *known == DType::i32)
    return file.refuse(Code::invalid_file, object + " attribute 'dtype'",
                       "expected a floating-point type, got " + quote(v.dtype));
  if (v.name == kReference && *known != DType::f64)
    return file.refuse(Code::invalid_file, object + " attribute 'dtype'", "expected float64, got " + v.dtype);
  dtype = *known;
  return {};
}

Status write_variant(Hdf5Writer& file, const std::string& object, const VariantInfo& v) {
  CF_TRY(file.text(object, "dtype", v.dtype));
  CF_TRY(file.text(object, "attn_implementation", v.attn_implementation));
  return file.text(object, "device", v.device);
}

std::string layer_sizes(const ModelConfig& c) {
  return "hidden_size " + std::to_string(c.hidden_size) + ", intermediate_size " + std::to_string(c.intermediate_size) +
         ", " + std::to_string(c.num_attention_heads) + " heads, " +
         (c.family().reads(ConfigKey::num_key_value_heads)
              ? std::to_string(c.kv_heads()) + " key and value heads of " + std::to_string(c.head_dim()) + ", "
              : "") +
         (c.attention_bias ? "with" : "without") + " attention bias";
}

Result<checkpoint::Checkpoint> open_checkpoint(const std::string& path, const GoldenOrigin& origin,
                                               const std::string& directory,
                                               const std::function<std::string(const ModelConfig&)>& sizes) {
  const auto beside = std::filesystem::path(path).parent_path() / origin.weights_checkpoint;
  CF_TRY_ASSIGN(checkpoint::Checkpoint opened,
                checkpoint::Checkpoint::open(directory.empty() ? beside.string() : directory));
  const std::string expected = sizes(origin.config), got = sizes(opened.config());
  if (expected != got)
    return Status::error(Code::invalid_argument,
                         opened.directory() + ": expected " + expected + " as " + path + " has, got " + got);
  return opened;
}

Status check_weights(const Hdf5Reader& file, const GoldenOrigin& origin, std::uint64_t checksum,
                     std::string_view source) {
  if (checksum == origin.weights_checksum) return {};
  return file.refuse(Code::invalid_file, "attribute 'weights_checksum'",
                     "expected " + std::to_string(origin.weights_checksum) + ", got " + std::to_string(checksum) +
                         " from the " + std::string(source) + " weights");
}

}  // namespace cf::golden
