#include "golden/checkpoint/hf_config.hpp"

#include <cmath>
#include <cstdint>
#include <string>

#include "golden/checkpoint/json_fields.hpp"
#include "golden/checkpoint/mapped_file.hpp"

namespace cf::checkpoint {

namespace {

/// A config while it is read.
struct Reading {
  Fields fields;
  ModelConfig m{};

  void refuse_value(const std::string& name, const std::string& got, const std::string& expected) {
    fields.refuse(name, "is " + got + ", expected " + expected);
  }
  std::string rope_type() {
    return fields.get_any(
        {"rope_parameters.rope_type", "rope_parameters.type", "rope_scaling.rope_type", "rope_scaling.type"},
        std::string("default"));
  }
  double partial_rotary_factor(std::initializer_list<std::string> names, double otherwise) {
    const double fraction = fields.get_any(names, otherwise);
    if (!(fraction > 0 && fraction <= 1))
      fields.refuse(*(names.end() - 2), "is " + shown(fraction) + ", expected more than 0 and at most 1");
    return fraction;
  }
};

/// The fields that GPTNeoXConfig alone has.
void read_gpt_neox(Reading& r) {
  ModelConfig& m = r.m;
  m.max_position_embeddings = r.fields.get<std::int64_t>("max_position_embeddings", 2048);
  m.layer_norm_eps = r.fields.get("layer_norm_eps", 1e-5);
  m.use_parallel_residual = r.fields.get("use_parallel_residual", true);
  m.attention_bias = r.fields.get("attention_bias", true);

  const auto act = r.fields.get("hidden_act", std::string("gelu"));
  if (act == "gelu")
    m.hidden_act = Activation::gelu_erf;
  else if (act == "gelu_new" || act == "gelu_fast" || act == "gelu_pytorch_tanh")
    m.hidden_act = Activation::gelu_tanh;
  else
    r.refuse_value("hidden_act", quote(act), "'gelu', 'gelu_new', 'gelu_fast' or 'gelu_pytorch_tanh'");

  if (const auto type = r.rope_type(); type != "default") r.refuse_value("rope_type", quote(type), "'default'");
  m.rope_theta = r.fields.get_any(
      {"rope_parameters.rope_theta", "rope_scaling.rope_theta", "rotary_emb_base", "rope_theta"}, 10000.0);
  const double fraction =
      r.partial_rotary_factor({"rope_parameters.partial_rotary_factor", "rope_scaling.partial_rotary_factor",
                               "rotary_pct", "partial_rotary_factor"},
                              0.25);
  // validate() refuses a config without heads.
  if (m.num_attention_heads > 0) m.rotary_dim = std::int64_t(double(m.head_dim()) * fraction);
}

/// What a config may ask of a layer that is not built: its fields must be null, false, empty, or at most one expert.
constexpr const char* kNotBuilt[] = {
    "num_local_experts", "num_experts",     "n_routed_experts",   "use_qk_norm",           "qk_norm",
    "qk_layernorm",      "attention_sinks", "use_attention_sink", "attn_logit_softcapping"};

void refuse_not_built(Reading& r, const Json& document) {
  for (const char* name : kNotBuilt)
    if (const auto it = document.find(name); it != document.end() && asks(*it) && *it != 0 && *it != 1)
      r.refuse_value(name, shown(*it), "nothing: it is not built");
  if (const auto it = document.find("layer_types"); it != document.end() && it->is_array())
    for (const Json& type : *it)
      if (type != "full_attention")
        r.refuse_value("layer_types", "a list with " + shown(type), "'full_attention' alone");
}

/// Refuses a window of keys that is shorter than the context.
void refuse_short_window(Reading& r, bool has_window) {
  const auto window = r.fields.get<std::int64_t>("sliding_window", r.m.model_type == ModelType::mistral ? 4096 : 0);
  if (has_window && window != 0 && window < r.m.max_position_embeddings)
    r.refuse_value("sliding_window", std::to_string(window),
                   "null or at least max_position_embeddings " + std::to_string(r.m.max_position_embeddings));
}

void read_llama3_scaling(Reading& r) {
  const auto positive = [&](const std::string& name, std::initializer_list<std::string> names) {
    const double value = r.fields.get_any(names, std::nan(""));
    if (std::isnan(value)) r.fields.refuse(name, "is missing, expected a number with rope_type 'llama3'");
    return value;
  };
  r.m.rope_scaling = {.kind = ops::RopeScaling::Kind::llama3,
                      .factor = positive("factor", {"rope_parameters.factor", "rope_scaling.factor"}),
                      .low_freq_factor = positive("low_freq_factor",
                                                  {"rope_parameters.low_freq_factor", "rope_scaling.low_freq_factor"}),
                      .high_freq_factor = positive(
                          "high_freq_factor", {"rope_parameters.high_freq_factor", "rope_scaling.high_freq_factor"}),
                      .original_max_positions = r.fields.get_any<std::int64_t>(
                          {"rope_parameters.original_max_position_embeddings",
                           "rope_scaling.original_max_position_embeddings", "original_max_position_embeddings"},
                          r.m.max_position_embeddings)};
}

/// The fields of LlamaConfig, MistralConfig and Qwen2Config.
void read_llama(Reading& r, const Json& document) {
  ModelConfig& m = r.m;
  const bool mistral = m.model_type == ModelType::mistral, qwen2 = m.model_type == ModelType::qwen2;
  refuse_not_built(r, document);
  m.max_position_embeddings = r.fields.get<std::int64_t>("max_position_embeddings", mistral ? 131072
                                                                                    : qwen2 ? 32768
                                                                                            : 2048);
  m.num_key_value_heads = r.fields.get<std::int64_t>("num_key_value_heads", mistral ? 8
                                                                            : qwen2 ? 32
                                                                                    : m.num_attention_heads);
  m.attention_head_dim = r.fields.get<std::int64_t>("head_dim", 0);
  if (document.contains("head_dim") && m.attention_head_dim < 1)
    r.refuse_value("head_dim", std::to_string(m.attention_head_dim), "null or at least 1");
  m.layer_norm_eps = r.fields.get("rms_norm_eps", 1e-6);
  m.use_parallel_residual = false;
  m.attention_bias = r.fields.get("attention_bias", qwen2);
  m.mlp_bias = r.fields.get("mlp_bias", false);
  refuse_short_window(r, qwen2 ? r.fields.get("use_sliding_window", false) : true);

  m.hidden_act = Activation::swiglu;
  if (const auto act = r.fields.get("hidden_act", std::string("silu")); act != "silu" && act != "swish")
    r.refuse_value("hidden_act", quote(act), "'silu'");

  m.rope_theta = r.fields.get_any({"rope_parameters.rope_theta", "rope_scaling.rope_theta", "rope_theta"}, 10000.0);
  if (const auto type = r.rope_type(); type == "llama3")
    read_llama3_scaling(r);
  else if (type != "default")
    r.refuse_value("rope_type", quote(type), "'default' or 'llama3'");
  if (const double fraction =
          r.partial_rotary_factor({"rope_parameters.partial_rotary_factor", "rope_scaling.partial_rotary_factor",
                                   "partial_rotary_factor", "rotary_pct"},
                                  1.0);
      fraction != 1)
    r.refuse_value("partial_rotary_factor", shown(fraction), "1");
  if (m.attention_head_dim || m.num_attention_heads > 0) m.rotary_dim = m.head_dim();
}

}  // namespace

Result<ModelConfig> parse_hf_config(std::string_view text, const std::string& source) {
  CF_TRY_ASSIGN(Json document, parse_json_object(text, source));
  // transformers writes null in these fields where they have no value. In other fields null is a value of the wrong
  // type.
  for (const char* name : {"torch_dtype", "dtype", "rope_parameters", "rope_scaling", "_name_or_path", "head_dim",
                           "num_key_value_heads", "layer_types"})
    if (const auto it = document.find(name); it != document.end() && it->is_null()) document.erase(it);
  // Here null means that there is no window, and an absent field may mean that there is one.
  if (const auto it = document.find("sliding_window"); it != document.end() && it->is_null()) *it = 0;

  Reading r{.fields = Fields(document, source)};
  ModelConfig& m = r.m;
  const auto type = r.fields.required<std::string>("model_type");
  if (const auto known = model_type_from_string(type))
    m.model_type = *known;
  else
    r.refuse_value("model_type", quote(type), "'gpt_neox', 'llama', 'mistral' or 'qwen2'");
  m.name = r.fields.get("_name_or_path", std::string());
  m.hidden_size = r.fields.required<std::int64_t>("hidden_size");
  m.num_hidden_layers = r.fields.required<std::int64_t>("num_hidden_layers");
  m.num_attention_heads = r.fields.required<std::int64_t>("num_attention_heads");
  m.intermediate_size = r.fields.required<std::int64_t>("intermediate_size");
  m.vocab_size = r.fields.required<std::int64_t>("vocab_size");
  m.tie_word_embeddings = r.fields.get("tie_word_embeddings", false);
  const auto dtype = r.fields.get_any({"dtype", "torch_dtype"}, std::string("float32"));
  if (const auto known = dtype_from_string(dtype))
    m.dtype = *known;
  else
    r.refuse_value("dtype", quote(dtype), "'float16', 'bfloat16' or 'float32'");
  if (m.family() == ModelFamily::gpt_neox)
    read_gpt_neox(r);
  else
    read_llama(r, document);
  CF_TRY(r.fields.status());
  if (const Status s = m.validate(); !s) return Status::error(Code::invalid_file, source + ": " + s.message());
  return m;
}

Result<ModelConfig> read_hf_config(const std::string& path) {
  CF_TRY_ASSIGN(const MappedFile file, map_file(path));
  return parse_hf_config(file.text(), path);
}

namespace {

Json gpt_neox_json(const ModelConfig& m) {
  // The double nearest to rotary_dim / head_dim may lie below the quotient, and the reader rounds the product down.
  double fraction = double(m.rotary_dim) / double(m.head_dim());
  if (std::int64_t(double(m.head_dim()) * fraction) < m.rotary_dim) fraction = std::nextafter(fraction, 2.0);
  return {{"architectures", {"GPTNeoXForCausalLM"}},
          {"rotary_pct", fraction},
          {"rotary_emb_base", m.rope_theta},
          {"layer_norm_eps", m.layer_norm_eps},
          {"use_parallel_residual", m.use_parallel_residual},
          {"attention_bias", m.attention_bias}};
}

Json llama_json(const ModelConfig& m) {
  const bool mistral = m.model_type == ModelType::mistral;
  Json j = {{"architectures",
             {mistral                            ? "MistralForCausalLM"
              : m.model_type == ModelType::qwen2 ? "Qwen2ForCausalLM"
                                                 : "LlamaForCausalLM"}},
            {"num_key_value_heads", m.num_key_value_heads},
            {"rope_theta", m.rope_theta},
            {"rms_norm_eps", m.layer_norm_eps}};
  if (m.attention_head_dim) j["head_dim"] = m.attention_head_dim;
  if (mistral) j["sliding_window"] = nullptr;
  if (m.model_type == ModelType::llama) {
    j["attention_bias"] = m.attention_bias;
    j["mlp_bias"] = m.mlp_bias;
  }
  if (const ops::RopeScaling& s = m.rope_scaling; s.kind == ops::RopeScaling::Kind::llama3)
    j["rope_scaling"] = {{"rope_type", "llama3"},
                         {"factor", s.factor},
                         {"low_freq_factor", s.low_freq_factor},
                         {"high_freq_factor", s.high_freq_factor},
                         {"original_max_position_embeddings", s.original_max_positions}};
  return j;
}

}  // namespace

std::string to_hf_json(const ModelConfig& m) {
  Json j = m.family() == ModelFamily::gpt_neox ? gpt_neox_json(m) : llama_json(m);
  j["model_type"] = to_string(m.model_type);
  j["hidden_size"] = m.hidden_size;
  j["num_hidden_layers"] = m.num_hidden_layers;
  j["num_attention_heads"] = m.num_attention_heads;
  j["intermediate_size"] = m.intermediate_size;
  j["vocab_size"] = m.vocab_size;
  j["max_position_embeddings"] = m.max_position_embeddings;
  j["hidden_act"] = to_string(m.hidden_act);
  j["tie_word_embeddings"] = m.tie_word_embeddings;
  j["torch_dtype"] = to_string(m.dtype);
  if (!m.name.empty()) j["_name_or_path"] = m.name;
  return indented(j) + "\n";
}

}  // namespace cf::checkpoint
