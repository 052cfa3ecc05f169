#include "golden/checkpoint/hf_config.hpp"

#include <cmath>
#include <cstdint>
#include <string>

#include "golden/checkpoint/json_fields.hpp"
#include "golden/checkpoint/mapped_file.hpp"

namespace cf::checkpoint {

Result<ModelConfig> parse_hf_config(std::string_view text, const std::string& source) {
  CF_TRY_ASSIGN(Json document, parse_json_object(text, source));
  // transformers writes null in these fields where they have no value. In other fields null is a value of the wrong
  // type.
  for (const char* name : {"torch_dtype", "dtype", "rope_parameters", "rope_scaling", "_name_or_path"})
    if (const auto it = document.find(name); it != document.end() && it->is_null()) document.erase(it);

  Fields fields(document, source);
  const auto refuse_value = [&](const std::string& name, const std::string& got, const std::string& expected) {
    fields.refuse(name, "is " + quote(got) + ", expected " + expected);
  };

  if (const auto type = fields.required<std::string>("model_type"); type != "gpt_neox")
    refuse_value("model_type", type, "'gpt_neox'");
  ModelConfig m;
  m.name = fields.get("_name_or_path", std::string());
  m.hidden_size = fields.required<std::int64_t>("hidden_size");
  m.num_hidden_layers = fields.required<std::int64_t>("num_hidden_layers");
  m.num_attention_heads = fields.required<std::int64_t>("num_attention_heads");
  m.intermediate_size = fields.required<std::int64_t>("intermediate_size");
  m.vocab_size = fields.required<std::int64_t>("vocab_size");
  m.max_position_embeddings = fields.get<std::int64_t>("max_position_embeddings", 2048);
  m.layer_norm_eps = fields.get("layer_norm_eps", 1e-5);
  m.use_parallel_residual = fields.get("use_parallel_residual", true);
  m.attention_bias = fields.get("attention_bias", true);
  m.tie_word_embeddings = fields.get("tie_word_embeddings", false);

  const auto act = fields.get("hidden_act", std::string("gelu"));
  if (act == "gelu")
    m.hidden_act = Activation::gelu_erf;
  else if (act == "gelu_new" || act == "gelu_fast" || act == "gelu_pytorch_tanh")
    m.hidden_act = Activation::gelu_tanh;
  else
    refuse_value("hidden_act", act, "'gelu', 'gelu_new', 'gelu_fast' or 'gelu_pytorch_tanh'");

  const auto dtype = fields.get_any({"dtype", "torch_dtype"}, std::string("float32"));
  if (const auto known = dtype_from_string(dtype))
    m.dtype = *known;
  else
    refuse_value("dtype", dtype, "'float16', 'bfloat16' or 'float32'");

  const auto rope_type = fields.get_any(
      {"rope_parameters.rope_type", "rope_parameters.type", "rope_scaling.rope_type", "rope_scaling.type"},
      std::string("default"));
  if (rope_type != "default") refuse_value("rope_type", rope_type, "'default'");
  m.rope_theta = fields.get_any(
      {"rope_parameters.rope_theta", "rope_scaling.rope_theta", "rotary_emb_base", "rope_theta"}, 10000.0);
  const double fraction = fields.get_any({"rope_parameters.partial_rotary_factor", "rope_scaling.partial_rotary_factor",
                                          "rotary_pct", "partial_rotary_factor"},
                                         0.25);
  if (!(fraction > 0 && fraction <= 1))
    fields.refuse("rotary_pct", "is " + shown(fraction) + ", expected more than 0 and at most 1");
  CF_TRY(fields.status());

  // validate() refuses a config without heads.
  if (m.num_attention_heads > 0) m.rotary_dim = std::int64_t(double(m.head_dim()) * fraction);
  if (const Status s = m.validate(); !s) return Status::error(Code::invalid_file, source + ": " + s.message());
  return m;
}

Result<ModelConfig> read_hf_config(const std::string& path) {
  CF_TRY_ASSIGN(const MappedFile file, map_file(path));
  return parse_hf_config(file.text(), path);
}

std::string to_hf_json(const ModelConfig& m) {
  // The double nearest to rotary_dim / head_dim may lie below the quotient, and the reader rounds the product down.
  double fraction = double(m.rotary_dim) / double(m.head_dim());
  if (std::int64_t(double(m.head_dim()) * fraction) < m.rotary_dim) fraction = std::nextafter(fraction, 2.0);
  Json j = {{"architectures", {"GPTNeoXForCausalLM"}},
            {"model_type", "gpt_neox"},
            {"hidden_size", m.hidden_size},
            {"num_hidden_layers", m.num_hidden_layers},
            {"num_attention_heads", m.num_attention_heads},
            {"intermediate_size", m.intermediate_size},
            {"vocab_size", m.vocab_size},
            {"max_position_embeddings", m.max_position_embeddings},
            {"rotary_pct", fraction},
            {"rotary_emb_base", m.rope_theta},
            {"layer_norm_eps", m.layer_norm_eps},
            {"use_parallel_residual", m.use_parallel_residual},
            {"attention_bias", m.attention_bias},
            {"hidden_act", to_string(m.hidden_act)},
            {"tie_word_embeddings", m.tie_word_embeddings},
            {"torch_dtype", to_string(m.dtype)}};
  if (!m.name.empty()) j["_name_or_path"] = m.name;
  return indented(j) + "\n";
}

}  // namespace cf::checkpoint
