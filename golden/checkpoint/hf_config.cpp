#include "golden/checkpoint/hf_config.hpp"

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "golden/checkpoint/json_fields.hpp"
#include "golden/checkpoint/mapped_file.hpp"

namespace cf::checkpoint {

namespace {

/// The types of models that a row of the table is about.
enum Types : unsigned {
  kNeox = 1,
  kLlama = 2,
  kMistral = 4,
  kQwen2 = 8,
  kGated = kLlama | kMistral | kQwen2,
  kAll = 15
};

Types only(ModelType type) {
  switch (type) {
    case ModelType::gpt_neox: return kNeox;
    case ModelType::llama: return kLlama;
    case ModelType::mistral: return kMistral;
    case ModelType::qwen2: return kQwen2;
  }
  return kAll;
}

enum class Use {
  read,          // a value
  read_or_null,  // a value, or null, which transformers writes where it has none and which counts as absent
  noted,         // transformers does not read it of these types: a value other than the one that counts gets a note
  refused        // it asks for what is not built, unless it is null, false, empty, or at most one expert
};

struct FieldUse {
  const char* name;
  unsigned types;
  Use use;
  // Of what is noted: the value that the model has whatever is said, by its config and the share of a head in RoPE.
  Json (*counts)(const ModelConfig&, double rotary_fraction) = nullptr;
};

/// What is read of a config.json, what is ignored with a note, and what is refused. No other field is looked at:
/// transformers computes nothing from it, such as initializer_range, or it is of training alone, such as
/// attention_dropout.
constexpr FieldUse kFields[] = {
    {"_name_or_path", kAll, Use::read_or_null},
    {"dtype", kAll, Use::read_or_null},
    {"head_dim", kAll, Use::read_or_null},
    {"hidden_act", kAll, Use::read},
    {"hidden_size", kAll, Use::read},
    {"intermediate_size", kAll, Use::read},
    {"max_position_embeddings", kAll, Use::read},
    {"model_type", kAll, Use::read},
    {"num_attention_heads", kAll, Use::read},
    {"num_hidden_layers", kAll, Use::read},
    {"rope_parameters", kAll, Use::read_or_null},
    {"rope_scaling", kAll, Use::read_or_null},
    {"tie_word_embeddings", kAll, Use::read},
    {"torch_dtype", kAll, Use::read_or_null},
    {"vocab_size", kAll, Use::read},

    {"attention_bias", kNeox | kLlama, Use::read},
    {"layer_norm_eps", kNeox, Use::read},
    {"layer_types", kGated, Use::read_or_null},
    {"max_window_layers", kQwen2, Use::read},
    {"mlp_bias", kLlama, Use::read},
    {"num_key_value_heads", kGated, Use::read},
    {"original_max_position_embeddings", kGated, Use::read},
    {"partial_rotary_factor", kGated, Use::read},
    {"rms_norm_eps", kGated, Use::read},
    {"rope_theta", kGated, Use::read},
    {"rotary_emb_base", kNeox, Use::read},
    {"rotary_pct", kNeox, Use::read},
    {"sliding_window", kMistral | kQwen2, Use::read},
    {"use_parallel_residual", kNeox, Use::read},
    {"use_sliding_window", kQwen2, Use::read},

    {"attention_bias", kMistral | kQwen2, Use::noted,
     [](const ModelConfig& m, double) { return Json(m.attention_bias); }},
    {"mlp_bias", kNeox | kMistral | kQwen2, Use::noted, [](const ModelConfig& m, double) { return Json(m.mlp_bias); }},
    {"num_key_value_heads", kNeox, Use::noted,
     [](const ModelConfig& m, double) { return Json(m.num_attention_heads); }},
    {"partial_rotary_factor", kNeox, Use::noted,
     [](const ModelConfig&, double rotary_fraction) { return Json(rotary_fraction); }},
    {"rope_theta", kNeox, Use::noted, [](const ModelConfig& m, double) { return Json(m.rope_theta); }},
    {"rotary_emb_base", kGated, Use::noted, [](const ModelConfig& m, double) { return Json(m.rope_theta); }},
    {"rotary_pct", kGated, Use::noted, [](const ModelConfig&, double) { return Json(1.0); }},
    {"sliding_window", kNeox | kLlama, Use::noted, [](const ModelConfig&, double) { return Json(); }},
    {"use_parallel_residual", kGated, Use::noted, [](const ModelConfig&, double) { return Json(false); }},

    {"attention_sinks", kGated, Use::refused},
    {"attn_logit_softcapping", kGated, Use::refused},
    {"n_routed_experts", kGated, Use::refused},
    {"num_experts", kGated, Use::refused},
    {"num_local_experts", kGated, Use::refused},
    {"qk_layernorm", kGated, Use::refused},
    {"qk_norm", kGated, Use::refused},
    {"use_attention_sink", kGated, Use::refused},
    {"use_qk_norm", kGated, Use::refused},
};

/// The fields of a config that are read of a model of this type.
Json read_fields(const Json& document, ModelType type) {
  Json read = Json::object();
  for (const FieldUse& field : kFields) {
    if (!(field.types & only(type)) || (field.use != Use::read && field.use != Use::read_or_null)) continue;
    const auto it = document.find(field.name);
    if (it != document.end() && !(it->is_null() && field.use == Use::read_or_null)) read[field.name] = *it;
  }
  return read;
}

/// A config while it is read.
struct Reading {
  const Json& read;  // the fields that read_fields() gives
  Fields fields;
  std::string source;
  std::vector<std::string> notes{};
  ModelConfig m{};
  double rotary_fraction = 1;

  void note(const std::string& what) { notes.push_back(source + ": " + what); }
  void refuse_value(const std::string& name, const std::string& got, const std::string& expected) {
    fields.refuse(name, "is " + got + ", expected " + expected);
  }
  /// The object that says how RoPE turns: rope_scaling of transformers 4, unless it is empty, before rope_parameters.
  std::string rope_object() const {
    const auto scaling = read.find("rope_scaling");
    return scaling != read.end() && asks(*scaling) ? "rope_scaling" : "rope_parameters";
  }
  /// A value that the object of RoPE has, or the config itself; the object's counts.
  double rope_value(const std::string& inner, const std::string& outer, double otherwise) {
    const std::string nested = rope_object() + "." + inner;
    const double beside = fields.get(outer, otherwise), value = fields.get(nested, beside);
    if (value != beside && read.contains(outer))
      note(quote(outer) + " is " + shown(beside) + " beside " + quote(nested) + " " + shown(value) + ", which counts");
    return value;
  }
  /// The share of a head that RoPE turns; 1 after a fault.
  double partial_rotary_factor(const std::string& outer, double otherwise) {
    const double fraction = rope_value("partial_rotary_factor", outer, otherwise);
    if (fraction > 0 && fraction <= 1) return fraction;
    fields.refuse(outer, "is " + shown(fraction) + ", expected more than 0 and at most 1");
    return 1;
  }
};

void read_rope(Reading& r) {
  const Json *scaling = nullptr, *parameters = nullptr;
  for (const auto& [name, object] : {std::pair{"rope_scaling", &scaling}, {"rope_parameters", &parameters}})
    if (const auto it = r.read.find(name); it != r.read.end()) {
      if (!it->is_object()) return r.refuse_value(name, shown(*it), "an object");
      if (!it->empty()) *object = &*it;
    }
  if (scaling && parameters && *scaling != *parameters)
    r.note("'rope_parameters' is not read beside 'rope_scaling', which counts");
  const bool neox = r.m.model_type == ModelType::gpt_neox;
  const std::string object = r.rope_object() + ".";
  const auto type = r.fields.get_any({object + "rope_type", object + "type"}, std::string("default"));
  r.m.rope_theta = r.rope_value("rope_theta", neox ? "rotary_emb_base" : "rope_theta", 10000.0);
  if (type == "llama3" && !neox) {
    const auto factor = [&](const char* name) {
      const double value = r.fields.get(object + name, std::nan(""));
      if (std::isnan(value)) r.fields.refuse(name, "is missing, expected a number with rope_type 'llama3'");
      return value;
    };
    r.m.rope_scaling = {.kind = ops::RopeScaling::Kind::llama3,
                        .factor = factor("factor"),
                        .low_freq_factor = factor("low_freq_factor"),
                        .high_freq_factor = factor("high_freq_factor"),
                        .original_max_positions = r.fields.get_any<std::int64_t>(
                            {object + "original_max_position_embeddings", "original_max_position_embeddings"},
                            r.m.max_position_embeddings)};
  } else if (type != "default") {
    r.refuse_value("rope_type", quote(type), neox ? "'default'" : "'default' or 'llama3'");
  }
}

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

  read_rope(r);
  r.rotary_fraction = r.partial_rotary_factor("rotary_pct", 0.25);
  // validate() refuses a config without heads, and larger heads, whose product may leave 64 bits.
  if (m.num_attention_heads < 1 || m.hidden_size > 1 << 20) return;
  m.rotary_dim = std::int64_t(double(m.head_dim()) * r.rotary_fraction);
  // transformers 5 turns so many elements of a head that has fewer.
  if (const auto given = r.fields.get("head_dim", m.head_dim()); given != m.head_dim())
    r.refuse_value("head_dim", std::to_string(given),
                   std::to_string(m.head_dim()) + ", hidden_size / num_attention_heads, in gpt_neox");
}

/// The window of keys that a query sees, 0 for all.
std::int64_t read_window(Reading& r) {
  const bool qwen2 = r.m.model_type == ModelType::qwen2;
  bool slides = r.m.model_type == ModelType::mistral;
  if (qwen2 && r.fields.get("use_sliding_window", false))
    slides = r.fields.get<std::int64_t>("max_window_layers", 28) < r.m.num_hidden_layers;
  if (const auto types = r.read.find("layer_types"); types != r.read.end()) {
    const bool may_slide = qwen2 && r.fields.get("use_sliding_window", false);
    if (!types->is_array()) r.refuse_value("layer_types", shown(*types), "a list");
    if (may_slide) slides = false;
    for (const Json& type : *types) {
      if (may_slide && type == "sliding_attention")
        slides = true;
      else if (type != "full_attention")
        r.refuse_value("layer_types", "a list with " + shown(type),
                       may_slide ? "'full_attention' and 'sliding_attention'" : "'full_attention' alone");
    }
  }
  if (const auto given = r.read.find("sliding_window"); given != r.read.end() && given->is_null()) {
    if (qwen2 && slides && r.read.contains("layer_types"))
      r.refuse_value("sliding_window", "null", "at least 1 with layers of 'sliding_attention'");
    return 0;
  }
  const auto window = r.fields.get<std::int64_t>("sliding_window", 4096);
  if (!slides) return 0;
  if (window < 1) r.refuse_value("sliding_window", std::to_string(window), "null or at least 1");
  return window;
}

/// The fields of LlamaConfig, MistralConfig and Qwen2Config.
void read_gated(Reading& r) {
  ModelConfig& m = r.m;
  const bool mistral = m.model_type == ModelType::mistral, qwen2 = m.model_type == ModelType::qwen2;
  m.max_position_embeddings = r.fields.get<std::int64_t>("max_position_embeddings", mistral ? 131072
                                                                                    : qwen2 ? 32768
                                                                                            : 2048);
  // An absent field has the type's default, and null means as many as heads.
  const auto kv_heads = r.read.find("num_key_value_heads");
  m.num_key_value_heads = m.num_attention_heads;
  if (kv_heads == r.read.end() || !kv_heads->is_null())
    m.num_key_value_heads = r.fields.get<std::int64_t>("num_key_value_heads", mistral ? 8
                                                                              : qwen2 ? 32
                                                                                      : m.num_attention_heads);
  m.attention_head_dim = r.fields.get<std::int64_t>("head_dim", 0);
  if (r.read.contains("head_dim") && m.attention_head_dim < 1)
    r.refuse_value("head_dim", std::to_string(m.attention_head_dim), "null or at least 1");
  m.layer_norm_eps = r.fields.get("rms_norm_eps", 1e-6);
  m.use_parallel_residual = false;
  m.attention_bias = r.fields.get("attention_bias", qwen2);
  m.mlp_bias = r.fields.get("mlp_bias", false);
  if (m.model_type == ModelType::llama) {
    (void)read_window(r);  // refuses other layers
  } else {
    m.sliding_window = read_window(r);
  }

  m.hidden_act = Activation::swiglu;
  if (const auto act = r.fields.get("hidden_act", std::string("silu")); act != "silu" && act != "swish")
    r.refuse_value("hidden_act", quote(act), "'silu'");

  read_rope(r);
  if (const double fraction = r.partial_rotary_factor("partial_rotary_factor", 1.0); fraction != 1)
    r.refuse_value("partial_rotary_factor", shown(fraction), "1");
  if (m.attention_head_dim || m.num_attention_heads > 0) m.rotary_dim = m.head_dim();
}

/// A dtype's name, without the prefix that str() gives it in torch.
std::string dtype_name(std::string name) {
  constexpr std::string_view prefix = "torch.";
  return name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

}  // namespace

Result<HfConfig> parse_noted_hf_config(std::string_view text, const std::string& source) {
  CF_TRY_ASSIGN(Json document, parse_json_object(text, source));
  Fields all(document, source);
  const auto type = all.required<std::string>("model_type");
  const auto known = model_type_from_string(type);
  if (!known) all.refuse("model_type", "is " + quote(type) + ", expected 'gpt_neox', 'llama', 'mistral' or 'qwen2'");
  CF_TRY(all.status());
  for (const char* name : {"dtype", "torch_dtype"})
    if (const auto it = document.find(name); it != document.end() && it->is_string())
      *it = dtype_name(it->get<std::string>());

  const Json read = read_fields(document, *known);
  Reading r{.read = read, .fields = Fields(read, source), .source = source};
  ModelConfig& m = r.m;
  m.model_type = *known;
  m.name = r.fields.get("_name_or_path", std::string());
  m.hidden_size = r.fields.required<std::int64_t>("hidden_size");
  m.num_hidden_layers = r.fields.required<std::int64_t>("num_hidden_layers");
  m.num_attention_heads = r.fields.required<std::int64_t>("num_attention_heads");
  m.intermediate_size = r.fields.required<std::int64_t>("intermediate_size");
  m.vocab_size = r.fields.required<std::int64_t>("vocab_size");
  m.tie_word_embeddings = r.fields.get("tie_word_embeddings", false);
  const auto dtype = r.fields.get_any({"dtype", "torch_dtype"}, std::string("float32"));
  if (const auto d = dtype_from_string(dtype))
    m.dtype = *d;
  else
    r.refuse_value("dtype", quote(dtype), "'float16', 'bfloat16' or 'float32'");
  if (m.model_type == ModelType::gpt_neox)
    read_gpt_neox(r);
  else
    read_gated(r);
  for (const FieldUse& field : kFields) {
    const auto it = document.find(field.name);
    if (field.use != Use::refused || !(field.types & only(m.model_type)) || it == document.end()) continue;
    if (asks(*it) && *it != 0 && *it != 1) r.refuse_value(field.name, shown(*it), "nothing: it is not built");
  }
  CF_TRY(r.fields.status());
  if (const Status s = m.validate(); !s) return Status::error(Code::invalid_file, source + ": " + s.message());
  for (const FieldUse& field : kFields) {
    const auto it = document.find(field.name);
    if (field.use != Use::noted || !(field.types & only(m.model_type)) || it == document.end() || it->is_null())
      continue;
    if (const Json counts = field.counts(m, r.rotary_fraction); *it != counts)
      r.note(quote(field.name) + " is " + shown(*it) + ", which is not read of a " + type + ": " +
             (counts.is_null() ? "it has none" : shown(counts) + " counts"));
  }
  const bool has_dtype = read.contains("dtype") || read.contains("torch_dtype");
  return HfConfig{m, has_dtype ? std::optional(m.dtype) : std::nullopt, std::move(r.notes)};
}

Result<ModelConfig> parse_hf_config(std::string_view text, const std::string& source) {
  CF_TRY_ASSIGN(HfConfig read, parse_noted_hf_config(text, source));
  return std::move(read.config);
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
  const bool slides = m.sliding_window != 0;
  if (mistral) j["sliding_window"] = slides ? Json(m.sliding_window) : Json();
  if (slides && m.model_type == ModelType::qwen2)
    j.update({{"use_sliding_window", true}, {"sliding_window", m.sliding_window}, {"max_window_layers", 0}});
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
  Json j = m.model_type == ModelType::gpt_neox ? gpt_neox_json(m) : llama_json(m);
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
