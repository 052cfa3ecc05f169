#include <cmath>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "golden/checkpoint/families_json.hpp"
#include "golden/checkpoint/hf_config.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::checkpoint;
using namespace cf::test;

constexpr std::string_view kPath = "dir/config.json";

// As transformers 4.x writes Pythia-2.8B's.
const std::string kConfig4 = R"({
  "architectures": ["GPTNeoXForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "bos_token_id": 0,
  "classifier_dropout": 0.1, "eos_token_id": 0, "hidden_act": "gelu", "hidden_dropout": 0.0, "hidden_size": 2560,
  "initializer_range": 0.02, "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
  "model_type": "gpt_neox", "num_attention_heads": 32, "num_hidden_layers": 32, "partial_rotary_factor": 0.25,
  "rope_scaling": null, "rope_theta": 10000, "rotary_emb_base": 10000, "rotary_pct": 0.25,
  "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.46.0", "use_cache": true,
  "use_parallel_residual": true, "vocab_size": 50304})";

// As transformers 5.x writes a model with every field off its default.
const std::string kConfig5 = R"({
  "architectures": ["GPTNeoXForCausalLM"], "attention_bias": false, "dtype": "bfloat16", "hidden_act": "gelu_new",
  "hidden_size": 512, "intermediate_size": 1536, "layer_norm_eps": 1e-06, "max_position_embeddings": 4096,
  "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 3,
  "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 250000.5, "rope_type": "default"},
  "transformers_version": "5.17.0", "use_parallel_residual": false, "vocab_size": 1000})";

// As transformers 4.x and 5.x write Llama-3.2-1B's.
const std::string kLlama4 = R"({
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
  "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
  "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
  "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
  "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": true,
  "vocab_size": 128256})";
const std::string kLlama5 = R"({
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "dtype": "bfloat16", "head_dim": 64,
  "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
  "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
  "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_parameters": {"factor": 32.0,
  "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
  "rope_type": "llama3"}, "tie_word_embeddings": true, "transformers_version": "5.17.0", "vocab_size": 128256})";

/// The least that a config must hold, with more members behind.
std::string minimal(const std::string& more = "") {
  return R"({"model_type":"gpt_neox","hidden_size":320,"num_hidden_layers":2,"num_attention_heads":4,)"
         R"("intermediate_size":1280,"vocab_size":96)" +
         more + "}";
}

/// The same with the first `from` replaced.
std::string replaced(std::string text, const std::string& from, const std::string& to) {
  return text.replace(text.find(from), from.size(), to);
}

Result<ModelConfig> parse(std::string_view text) { return parse_hf_config(text, std::string(kPath)); }

/// The names of the fields in which two configs differ.
std::vector<std::string> differences(const ModelConfig& a, const ModelConfig& b) {
  std::vector<std::string> names;
  const auto field = [&](const char* name, const auto& x, const auto& y) {
    if (x != y) names.push_back(name);
  };
  field("model_type", a.model_type, b.model_type);
  field("name", a.name, b.name);
  field("sliding_window", a.sliding_window, b.sliding_window);
  field("full_layers", a.full_layers, b.full_layers);
  field("num_key_value_heads", a.num_key_value_heads, b.num_key_value_heads);
  field("attention_head_dim", a.attention_head_dim, b.attention_head_dim);
  field("rope_scaling", a.rope_scaling, b.rope_scaling);
  field("mlp_bias", a.mlp_bias, b.mlp_bias);
  field("hidden_size", a.hidden_size, b.hidden_size);
  field("num_hidden_layers", a.num_hidden_layers, b.num_hidden_layers);
  field("num_attention_heads", a.num_attention_heads, b.num_attention_heads);
  field("intermediate_size", a.intermediate_size, b.intermediate_size);
  field("vocab_size", a.vocab_size, b.vocab_size);
  field("max_position_embeddings", a.max_position_embeddings, b.max_position_embeddings);
  field("rotary_dim", a.rotary_dim, b.rotary_dim);
  field("rope_theta", a.rope_theta, b.rope_theta);
  field("layer_norm_eps", a.layer_norm_eps, b.layer_norm_eps);
  field("use_parallel_residual", a.use_parallel_residual, b.use_parallel_residual);
  field("attention_bias", a.attention_bias, b.attention_bias);
  field("tie_word_embeddings", a.tie_word_embeddings, b.tie_word_embeddings);
  field("hidden_act", a.hidden_act, b.hidden_act);
  field("dtype", a.dtype, b.dtype);
  return names;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("config: transformers 4.x") {
  const auto m = parse(kConfig4);
  REQUIRE(m.status().message() == "");
  ModelConfig expected = *find_preset("pythia-2.8b");
  expected.name = "";
  CHECK(differences(*m, expected) == Names{});
}

TEST_CASE("config: transformers 5.x") {
  const auto m = parse(kConfig5);
  REQUIRE(m.status().message() == "");
  const ModelConfig expected{.name = "",
                             .hidden_size = 512,
                             .num_hidden_layers = 3,
                             .num_attention_heads = 8,
                             .intermediate_size = 1536,
                             .vocab_size = 1000,
                             .max_position_embeddings = 4096,
                             .rotary_dim = 32,
                             .rope_theta = 250000.5,
                             .layer_norm_eps = 1e-6,
                             .use_parallel_residual = false,
                             .attention_bias = false,
                             .hidden_act = Activation::gelu_tanh,
                             .dtype = DType::bf16};
  CHECK(differences(*m, expected) == Names{});
}

TEST_CASE("config: absent fields have transformers' defaults") {
  const auto m = parse(minimal());
  REQUIRE(m.status().message() == "");
  const ModelConfig expected{.name = "",
                             .hidden_size = 320,
                             .num_hidden_layers = 2,
                             .num_attention_heads = 4,
                             .intermediate_size = 1280,
                             .vocab_size = 96,
                             .max_position_embeddings = 2048,
                             .rotary_dim = 20,
                             .rope_theta = 10000,
                             .layer_norm_eps = 1e-5,
                             .use_parallel_residual = true,
                             .attention_bias = true,
                             .hidden_act = Activation::gelu_erf,
                             .dtype = DType::f32};
  CHECK(differences(*m, expected) == Names{});
  const auto nulls = parse(minimal(R"(,"torch_dtype":null,"dtype":null,"rope_scaling":null,"rope_parameters":null)"));
  REQUIRE(nulls.status().message() == "");
  CHECK(differences(*nulls, expected) == Names{});
}

TEST_CASE("config: values with several spellings") {
  const auto rotary_dim = [](const std::string& more) { return parse(minimal(more))->rotary_dim; };
  CHECK(rotary_dim(R"(,"rotary_pct":1)") == 80);
  CHECK(rotary_dim(R"(,"rotary_pct":1.0)") == 80);
  CHECK(rotary_dim(R"(,"rope_parameters":{"partial_rotary_factor":0.5})") == 40);
  CHECK(rotary_dim(R"(,"rope_parameters":{"partial_rotary_factor":0.5},"rotary_pct":0.5)") == 40);
  CHECK(rotary_dim(R"(,"rotary_pct":0.337)") == 26);  // of 26.96
}

TEST_CASE("config: activations and dtypes by name") {
  for (const auto& [name, act] : {std::pair{"gelu", Activation::gelu_erf},
                                  {"gelu_new", Activation::gelu_tanh},
                                  {"gelu_fast", Activation::gelu_tanh},
                                  {"gelu_pytorch_tanh", Activation::gelu_tanh}})
    CHECK(parse(minimal(std::string(R"(,"hidden_act":")") + name + "\""))->hidden_act == act);
  for (const char* field : {"dtype", "torch_dtype"})
    for (DType d : {DType::f16, DType::bf16, DType::f32})
      CHECK(parse(minimal(",\"" + std::string(field) + "\":\"" + std::string(to_string(d)) + "\""))->dtype == d);
}

TEST_CASE("config: its own text reads back exactly") {
  for (const ModelConfig& m : presets()) {
    const auto same = parse(to_hf_json(m));
    REQUIRE(same.status().message() == "");
    CHECK(differences(*same, m) == Names{});
  }
  const ModelConfig odd{.name = "a \"quoted\"\nna\xc3\xafve/path",
                        .hidden_size = 96,
                        .num_hidden_layers = 65536,
                        .num_attention_heads = 3,
                        .intermediate_size = 1,
                        .vocab_size = 1,
                        .max_position_embeddings = 1,
                        .rotary_dim = 2,
                        .rope_theta = 10000.000000000002,
                        .layer_norm_eps = 0x1.23456789abcdfp-20,
                        .use_parallel_residual = false,
                        .attention_bias = false,
                        .tie_word_embeddings = true,
                        .hidden_act = Activation::gelu_tanh,
                        .dtype = DType::bf16};
  const auto same = parse(to_hf_json(odd));
  REQUIRE(same.status().message() == "");
  CHECK(differences(*same, odd) == Names{});
}

namespace {

/// The least config of a type beside GPT-NeoX, with more members behind.
std::string minimal_of(const std::string& type, const std::string& more = "") {
  return replaced(minimal(more), "gpt_neox", type);
}

}  // namespace

TEST_CASE("config: Llama's in the names of transformers 4 and 5") {
  ModelConfig expected = *find_preset("llama-3.2-1b");
  expected.name = "";
  expected.attention_head_dim = 64;
  for (const std::string& text : {kLlama4, kLlama5}) {
    const auto m = parse(text);
    REQUIRE(m.status().message() == "");
    CHECK(differences(*m, expected) == Names{});
    CHECK(m->num_parameters() == 1235814400);
  }
}

TEST_CASE("config: absent fields have transformers' defaults of each type") {
  ModelConfig expected{.model_type = ModelType::llama,
                       .name = "",
                       .hidden_size = 320,
                       .num_hidden_layers = 2,
                       .num_attention_heads = 4,
                       .num_key_value_heads = 4,
                       .intermediate_size = 1280,
                       .vocab_size = 96,
                       .max_position_embeddings = 2048,
                       .rotary_dim = 80,
                       .layer_norm_eps = 1e-6,
                       .use_parallel_residual = false,
                       .attention_bias = false,
                       .mlp_bias = false,
                       .hidden_act = Activation::swiglu,
                       .dtype = DType::f32};
  auto m = parse(minimal_of("llama"));
  REQUIRE(m.status().message() == "");
  CHECK(differences(*m, expected) == Names{});
  const std::string heads16 = R"("num_attention_heads":16)", heads32 = R"("num_attention_heads":32)";
  m = parse(
      replaced(minimal_of("mistral", R"(,"sliding_window":null,"head_dim":6)"), R"("num_attention_heads":4)", heads16));
  REQUIRE(m.status().message() == "");
  CHECK(m->num_key_value_heads == 8);
  CHECK(m->max_position_embeddings == 131072);
  CHECK(m->rotary_dim == 6);
  CHECK_FALSE(m->spec().traits.qkv_bias);
  m = parse(replaced(minimal_of("qwen2", R"(,"head_dim":null,"sliding_window":8,"layer_types":null)"),
                     R"("num_attention_heads":4)", heads32));
  REQUIRE(m.status().message() == "");
  CHECK(m->num_key_value_heads == 32);
  CHECK(m->max_position_embeddings == 32768);
  CHECK(m->head_dim() == 10);
  m = parse(minimal_of("stablelm", R"(,"num_key_value_heads":2,"use_qkv_bias":true,"use_parallel_residual":false)"));
  REQUIRE(m.status().message() == "");
  CHECK(m->rotary_dim == 20);
  CHECK(m->spec().traits.norm == NormKind::layernorm);
  CHECK(m->spec().traits.residual == Residual::sequential);
  CHECK(m->spec().traits.qkv_bias);
  CHECK_FALSE(m->spec().traits.dense_bias);
}

// As transformers writes GPT-2's, and as the published file has it: without n_inner.
const std::string kGpt2 = R"({
  "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
  "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
  "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
  "resid_pdrop": 0.1, "summary_type": "cls_index", "vocab_size": 50257})";

TEST_CASE("config: GPT-2's in its own names") {
  ModelConfig m = *parse(kGpt2);
  ModelConfig preset = *find_preset("gpt2");
  preset.name = "";
  preset.dtype = DType::f32;
  CHECK(differences(m, preset) == Names{});
  CHECK(m.validate());
  CHECK(m.tie_word_embeddings);
  CHECK(m.intermediate_size == 3072);
  CHECK(m.hidden_act == Activation::gelu_tanh);
  CHECK(m.spec().traits.positions == Positions::learned);
  CHECK(parse(replaced(kGpt2, "\"n_head\"", "\"n_inner\":null,\"n_head\""))->intermediate_size == 3072);
  m = *parse(
      replaced(kGpt2, "\"n_head\"", "\"n_inner\":100,\"dtype\":\"bfloat16\",\"tie_word_embeddings\":false,\"n_head\""));
  CHECK(m.intermediate_size == 100);
  CHECK(m.dtype == DType::bf16);
  CHECK_FALSE(m.tie_word_embeddings);
  CHECK(to_hf_json(*parse(to_hf_json(m))) == to_hf_json(m));
  for (const auto& [field, part] :
       {std::pair{"\"scale_attn_weights\":false", "'scale_attn_weights' is false, expected true"},
        {"\"scale_attn_by_inverse_layer_idx\":true", "'scale_attn_by_inverse_layer_idx' is true"},
        {"\"reorder_and_upcast_attn\":true", "'reorder_and_upcast_attn' is true"},
        {"\"add_cross_attention\":true", "'add_cross_attention' is true"},
        {"\"activation_function\":\"relu\"", "'activation_function' is 'relu'"}}) {
    const std::string text = replaced(replaced(kGpt2, "\"activation_function\": \"gelu_new\", ", ""), "\"n_ctx\"",
                                      std::string(field) + ",\"n_ctx\"");
    CAPTURE(text);
    const auto refused = parse_hf_config(text, std::string(kPath));
    REQUIRE_FALSE(refused);
    CHECK(refused.status().message().find(part) != std::string::npos);
  }
  const auto missing = parse_hf_config(replaced(kGpt2, "\"n_embd\": 768, ", ""), std::string(kPath));
  REQUIRE_FALSE(missing);
  CHECK(missing.status().message().find("'n_embd' is missing") != std::string::npos);
}

TEST_CASE("config: Qwen3's heads have a norm and a size of their own") {
  const std::string text = minimal_of("qwen3", R"(,"num_key_value_heads":2)");
  ModelConfig m = *parse(text);
  CHECK(m.validate());
  CHECK(m.head_dim() == 128);
  CHECK(m.rotary_dim == 128);
  CHECK(m.spec().shape.head_norm);
  CHECK_FALSE(m.attention_bias);
  CHECK(m.max_position_embeddings == 32768);
  CHECK(parse(minimal_of("qwen3", R"(,"num_key_value_heads":2,"head_dim":64)"))->head_dim() == 64);
  CHECK(parse(minimal_of("qwen3", R"(,"num_key_value_heads":2,"attention_bias":true)"))->spec().traits.dense_bias);
  CHECK(to_hf_json(*parse(to_hf_json(m))) == to_hf_json(m));
  m = *find_preset("qwen3-4b");
  CHECK(to_hf_json(*parse(to_hf_json(m))) == to_hf_json(m));
}

TEST_CASE("config: a window is the most positions of a sequence, where the type has one") {
  const auto window = [](const std::string& type, const std::string& more) {
    const auto m = parse(minimal_of(type, R"(,"num_key_value_heads":4)" + more));
    REQUIRE(m.status().message() == "");
    const auto same = parse(to_hf_json(*m));
    REQUIRE(same.status().message() == "");
    CHECK(differences(*same, *m) == Names{});
    return m->sliding_window;
  };
  CHECK(window("mistral", "") == 4096);  // of Mistral-7B-v0.1
  CHECK(window("mistral", R"(,"sliding_window":null)") == 0);
  CHECK(window("mistral", R"(,"sliding_window":63,"layer_types":["full_attention","full_attention"])") == 63);
  CHECK(window("llama", R"(,"sliding_window":63)") == 0);
  CHECK(window("qwen2", R"(,"sliding_window":63)") == 0);
  CHECK(window("qwen2", R"(,"sliding_window":63,"use_sliding_window":false)") == 0);
  // Layers from max_window_layers on slide, 28 of them do not by default.
  const std::string slides = R"(,"sliding_window":63,"use_sliding_window":true)";
  CHECK(window("qwen2", slides) == 0);
  CHECK(window("qwen2", slides + R"(,"max_window_layers":2)") == 0);
  CHECK(window("qwen2", slides + R"(,"max_window_layers":1)") == 63);
  CHECK(window("qwen2", slides + R"(,"max_window_layers":2,"layer_types":["full_attention","sliding_attention"])") ==
        63);
  CHECK(window("qwen2", slides + R"(,"max_window_layers":0,"layer_types":["full_attention","full_attention"])") == 0);
  // Layers that see all keys beside others that do not.
  const auto full_layers = [&](const std::string& fields) {
    const auto m = parse(minimal_of("qwen2", R"(,"num_key_value_heads":4)" + slides + fields));
    REQUIRE(m.status().message() == "");
    const auto same = parse_hf_config(to_hf_json(*m), "config.json");
    REQUIRE(same.status().message() == "");
    CHECK(differences(*same, *m) == Names{});
    CHECK(m->spec().of_layer(0).traits.window ==
          (m->full_layers.empty() || !m->full_layers[0] ? m->sliding_window : 0));
    return m->full_layers;
  };
  using Layers = std::vector<bool>;
  CHECK(full_layers(R"(,"max_window_layers":0)") == Layers{});
  CHECK(full_layers(R"(,"max_window_layers":1)") == Layers{true, false});
  CHECK(full_layers(R"(,"max_window_layers":2)") == Layers{});
  CHECK(full_layers(R"(,"max_window_layers":0,"layer_types":["sliding_attention","full_attention"])") ==
        Layers{false, true});
  CHECK(full_layers(R"(,"layer_types":["sliding_attention","sliding_attention"])") == Layers{});
  const auto m = parse(minimal_of("mistral", R"(,"num_key_value_heads":4,"sliding_window":63)"));
  CHECK(m->most_positions() == 63);
  CHECK(m->spec().traits.window == 63);
}

TEST_CASE("config: null of num_key_value_heads is as many as heads, whatever the type's default") {
  for (const char* type : {"llama", "mistral", "qwen2"})
    CHECK(parse(minimal_of(type, R"(,"num_key_value_heads":null)"))->num_key_value_heads == 4);
}

TEST_CASE("config: a dtype's name may have torch's prefix") {
  for (const char* field : {"dtype", "torch_dtype"})
    CHECK(parse(minimal(",\"" + std::string(field) + "\":\"torch.bfloat16\""))->dtype == DType::bf16);
}

TEST_CASE("config: what does not count gets a note") {
  struct Noted {
    std::string type, more, note;  // without a note the value says what counts anyway
  };
  const std::vector<Noted> table{
      {"llama", R"(,"rope_parameters":{"rope_theta":5e5},"rope_theta":1e4)",
       "'rope_theta' is 10000.0 beside 'rope_parameters.rope_theta' 500000.0, which counts"},
      {"llama", R"(,"rope_parameters":{"rope_theta":5e5},"rope_theta":5e5)", ""},
      {"gpt_neox", R"(,"rope_scaling":{"partial_rotary_factor":0.5},"rotary_pct":0.25)",
       "'rotary_pct' is 0.25 beside 'rope_scaling.partial_rotary_factor' 0.5, which counts"},
      {"llama", R"(,"rope_scaling":{"rope_theta":1e4},"rope_parameters":{"rope_theta":2e4})",
       "'rope_parameters' is not read beside 'rope_scaling', which counts"},
      {"llama", R"(,"rope_scaling":{},"rope_parameters":{"rope_theta":2e4})", ""},
      {"gpt_neox", R"(,"rope_theta":5e5)", "'rope_theta' is 500000.0, which is not read of a gpt_neox: 10000.0 counts"},
      {"gpt_neox", R"(,"rope_theta":10000,"partial_rotary_factor":0.25,"mlp_bias":true)", ""},  // transformers 4's own
      {"gpt_neox", R"(,"partial_rotary_factor":0.5)",
       "'partial_rotary_factor' is 0.5, which is not read of a gpt_neox: 0.25 counts"},
      {"qwen2", R"(,"num_key_value_heads":4,"attention_bias":false)",
       "'attention_bias' is false, which is not read of a qwen2: true counts"},
      {"qwen2", R"(,"num_key_value_heads":4,"attention_bias":true,"mlp_bias":false)", ""},
      {"mistral", R"(,"num_key_value_heads":4,"attention_bias":true)",
       "'attention_bias' is true, which is not read of a mistral: false counts"},
      {"qwen2", R"(,"num_key_value_heads":4,"mlp_bias":true)",
       "'mlp_bias' is true, which is not read of a qwen2: false counts"},
      {"llama", R"(,"sliding_window":100)", "'sliding_window' is 100, which is not read of a llama: it has none"},
      {"llama", R"(,"sliding_window":null,"pretraining_tp":1,"initializer_range":0.02)", ""}};
  for (const Noted& n : table) {
    CAPTURE(n.type, n.more);
    const auto read = parse_noted_hf_config(minimal_of(n.type, n.more), "f");
    REQUIRE(read.status().message() == "");
    CHECK(read->notes == (n.note.empty() ? Names{} : Names{"f: " + n.note}));
  }
}

TEST_CASE("config: what other layers ask for and is not built is refused by name") {
  const std::vector<std::tuple<std::string, std::string, std::vector<std::string_view>>> table{
      {"mistral", R"(,"num_key_value_heads":4,"sliding_window":0)", {"'sliding_window' is 0", "null or at least 1"}},
      {"mistral", R"(,"num_key_value_heads":4,"layer_types":["sliding_attention"])", {"'layer_types'"}},
      {"qwen2", R"(,"num_key_value_heads":4,"layer_types":["sliding_attention"])", {"'layer_types'"}},
      {"qwen2",
       R"(,"num_key_value_heads":4,"use_sliding_window":true,"layer_types":["sliding_attention"])",
       {"'layer_types' is a list of 1, expected one of 2 layers"}},
      {"qwen2",
       R"(,"num_key_value_heads":4,"use_sliding_window":true,"layer_types":["sliding_attention","full_attention"],"sliding_window":null)",
       {"'sliding_window' is null, expected at least 1"}},
      {"qwen2",
       R"(,"num_key_value_heads":4,"use_sliding_window":true,"layer_types":["chunked_attention"])",
       {"'layer_types'", "chunked_attention", "'full_attention' and 'sliding_attention'"}},
      {"llama", R"(,"layer_types":["full_attention","sliding_attention"])", {"'layer_types'", "sliding_attention"}},
      {"llama", R"(,"num_local_experts":8)", {"'num_local_experts' is 8", "not built"}},
      {"qwen2", R"(,"num_key_value_heads":4,"num_experts":60)", {"'num_experts' is 60", "not built"}},
      {"llama", R"(,"use_qk_norm":true)", {"'use_qk_norm' is true", "not built"}},
      {"llama", R"(,"attention_sinks":4)", {"'attention_sinks' is 4", "not built"}},
      {"llama", R"(,"rope_scaling":{"type":"yarn","factor":4})", {"'rope_type' is 'yarn'", "'default' or 'llama3'"}},
      {"llama", R"(,"rope_parameters":{"rope_type":"linear","factor":4})", {"'rope_type' is 'linear'"}},
      {"llama", R"(,"rope_scaling":{"rope_type":"llama3"})", {"'factor' is missing", "llama3"}},
      {"llama",
       R"(,"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":4})",
       {"high_freq_factor must be above low_freq_factor"}},
      {"llama",
       R"(,"rope_scaling":{"rope_type":"llama3","factor":-8,"low_freq_factor":1,"high_freq_factor":4})",
       {"factor must be positive", "-8"}},
      {"llama", R"(,"partial_rotary_factor":0.5)", {"'partial_rotary_factor' is 0.5", "expected 1"}},
      {"llama", R"(,"hidden_act":"gelu")", {"'hidden_act' is 'gelu'", "'silu'"}},
      {"llama", R"(,"num_key_value_heads":3)", {"num_kv_heads must divide num_heads 4", "got 3"}},
      {"llama", R"(,"num_key_value_heads":0)", {"num_key_value_heads must be", "got 0"}},
      {"llama", R"(,"head_dim":0)", {"'head_dim' is 0", "null or at least 1"}},
      {"llama", R"(,"head_dim":81)", {"rotary_dim must be even", "got 81"}},
      {"llama", R"(,"head_dim":9223372036854775807)", {"head_dim must be", "got 9223372036854775807"}},
      {"gpt2",
       R"(,"n_embd":9223372036854775807,"n_layer":1,"n_head":1,"n_positions":8)",
       {"hidden_size must be", "got 9223372036854775807"}},
      {"stablelm", R"(,"use_parallel_residual":true)", {"'use_parallel_residual' is true, expected false"}},
      {"stablelm", R"(,"qk_layernorm":true)", {"'qk_layernorm' is true", "not built"}},
      {"stablelm", R"(,"rope_scaling":{"type":"linear","factor":2})", {"'rope_type' is 'linear'", "'default'"}},
      {"llama", R"(,"rms_norm_eps":0)", {"layer_norm_eps must be positive"}}};
  for (const auto& [type, more, parts] : table) {
    CAPTURE(type, more);
    const Status s = parse(minimal_of(type, more)).status();
    for (std::string_view part : parts) CHECK(refusal_fault(s, Code::invalid_file, {part}) == "");
  }
}

TEST_CASE("config: every rotary_dim of every head_dim reads back") {
  ModelConfig m = *find_preset("pythia-14m");
  int wrong = 0;
  for (m.hidden_size = 2; m.hidden_size <= 256; ++m.hidden_size)
    for (m.rotary_dim = 2, m.num_attention_heads = 1; m.rotary_dim <= m.hidden_size; m.rotary_dim += 2)
      wrong += parse(to_hf_json(m))->rotary_dim != m.rotary_dim;
  CHECK(wrong == 0);
}

TEST_CASE("config: a name that is no UTF-8 does not spoil its text") {
  ModelConfig m = *find_preset("pythia-14m");
  m.name = "\xff";
  CHECK(parse(to_hf_json(m))->hidden_size == m.hidden_size);
}

TEST_CASE("config: what is no config") {
  struct Bad {
    std::string text;
    std::vector<std::string_view> parts;
  };
  const auto with = [](const std::string& field, const std::string& value) {
    return minimal(",\"" + field + "\":" + value);
  };
  const auto size = [](const char* from, const char* to) { return replaced(minimal(), from, to); };
  const std::vector<Bad> table{
      {"", {"is empty, expected a JSON object"}},
      {" \n", {"is empty, expected a JSON object"}},
      {"hello", {"not JSON"}},
      {minimal().substr(0, 40), {"not JSON"}},
      {minimal() + "}", {"not JSON"}},
      {"[]", {"expected a JSON object", "got an array"}},
      {"7", {"expected a JSON object", "got 7"}},
      {std::string(100'000, '['), {"nested deeper"}},
      {with("hidden_size", "320"), {"duplicate name 'hidden_size'"}},
      {"{}", {"'model_type' is missing", "expected a string"}},
      {size("gpt_neox", "gemma"), {"'model_type' is 'gemma'", "expected 'gpt_neox', 'llama'"}},
      {size("\"gpt_neox\"", "5"), {"'model_type' is 5", "expected a string"}},
      {size("\"hidden_size\":320,", ""), {"'hidden_size' is missing", "integer"}},
      {size("\"num_hidden_layers\":2,", ""), {"'num_hidden_layers' is missing"}},
      {size("\"num_attention_heads\":4,", ""), {"'num_attention_heads' is missing"}},
      {size("\"intermediate_size\":1280,", ""), {"'intermediate_size' is missing"}},
      {size(",\"vocab_size\":96", ""), {"'vocab_size' is missing"}},
      {size(":320", ":null"), {"'hidden_size' is null", "expected a 64-bit integer"}},
      {size(":320", ":320.0"), {"'hidden_size' is 320.0", "expected a 64-bit integer"}},
      {size(":320", ":\"320\""), {"'hidden_size' is \"320\"", "expected a 64-bit integer"}},
      {size(":320", ":[320]"), {"'hidden_size' is an array", "expected a 64-bit integer"}},
      {size(":320", ":9223372036854775808"), {"'hidden_size' is 9223372036854775808", "64-bit integer"}},
      {size(":320", ":20000000000000000000"), {"'hidden_size' is 2e+19", "64-bit integer"}},
      {size(":320", ":1e999"), {"not JSON"}},
      {size(":320", ":9223372036854775807"), {"hidden_size must be", "got 9223372036854775807"}},
      {size(":320", ":0"), {"hidden_size must be", "got 0"}},
      {size(":320", ":-320"), {"hidden_size must be", "got -320"}},
      {size("heads\":4", "heads\":0"), {"num_attention_heads must be", "got 0"}},
      {size("heads\":4", "heads\":-9223372036854775808"), {"num_attention_heads must be"}},
      {size("heads\":4", "heads\":3"), {"num_attention_heads must divide hidden_size", "3 heads", "320"}},
      {size("layers\":2", "layers\":0"), {"num_hidden_layers must be", "got 0"}},
      {with("hidden_act", "\"relu\""),
       {"'hidden_act' is 'relu'", "'gelu'", "'gelu_new'", "'gelu_fast'", "'gelu_pytorch_tanh'"}},
      {with("hidden_act", "1"), {"'hidden_act' is 1", "expected a string"}},
      {with("dtype", "\"int8\""), {"'dtype' is 'int8'", "'float16', 'bfloat16' or 'float32'"}},
      {with("torch_dtype", "\"float64\""), {"dtype must be float16, bfloat16 or float32", "got float64"}},
      {minimal(R"(,"torch_dtype":"float16","dtype":"float32")"),
       {"'torch_dtype' is \"float16\"", "expected \"float32\" as 'dtype' is"}},
      {with("rope_scaling", R"({"type":"linear","factor":2.0})"), {"'rope_type' is 'linear'", "expected 'default'"}},
      {with("rope_scaling", R"({"rope_type":"dynamic"})"), {"'rope_type' is 'dynamic'", "expected 'default'"}},
      {with("rope_scaling", "[]"), {"'rope_scaling' is an array", "expected an object"}},
      {with("rope_parameters", R"({"rope_type":"yarn"})"), {"'rope_type' is 'yarn'", "expected 'default'"}},
      {with("rope_parameters", R"({"rope_type":null})"), {"'rope_parameters.rope_type' is null", "expected a string"}},
      {with("rope_parameters", R"({"rope_theta":"x"})"),
       {"'rope_parameters.rope_theta' is \"x\"", "expected a number"}},
      {with("rope_parameters", "5"), {"'rope_parameters' is 5", "expected an object"}},
      {with("head_dim", "64"), {"'head_dim' is 64, expected 80, hidden_size / num_attention_heads, in gpt_neox"}},
      {with("rotary_emb_base", "0"), {"rope_theta must be positive", "got 0"}},
      {with("rotary_emb_base", "true"), {"'rotary_emb_base' is true", "expected a number"}},
      {with("rotary_pct", "0"), {"'rotary_pct' is 0.0", "more than 0 and at most 1"}},
      {with("rotary_pct", "1.01"), {"'rotary_pct' is 1.01", "more than 0 and at most 1"}},
      {with("rotary_pct", "1e300"), {"'rotary_pct' is 1e+300", "more than 0 and at most 1"}},
      {with("rotary_pct", "1e30"), {"'rotary_pct' is 1e+30", "more than 0 and at most 1"}},
      {with("rope_parameters", R"({"partial_rotary_factor":-1e30})"), {"-1e+30", "more than 0 and at most 1"}},
      {with("rotary_pct", "0.01"), {"rotary_dim must be even", "2 to head_dim 80", "got 0"}},
      {with("rotary_pct", "0.32"), {"rotary_dim must be even", "got 25"}},
      {with("layer_norm_eps", "0"), {"layer_norm_eps must be positive"}},
      {with("layer_norm_eps", "\"1e-5\""), {"'layer_norm_eps' is \"1e-5\"", "expected a number"}},
      {with("use_parallel_residual", "1"), {"'use_parallel_residual' is 1", "expected true or false"}},
      {with("use_parallel_residual", "null"), {"'use_parallel_residual' is null", "expected true or false"}},
      {with("attention_bias", "\"no\""), {"'attention_bias' is \"no\"", "expected true or false"}},
      {with("max_position_embeddings", "2048.5"), {"'max_position_embeddings' is 2048.5", "64-bit integer"}},
  };
  for (const Bad& bad : table) {
    CAPTURE(bad.text.substr(0, 300));
    const Status s = parse(bad.text).status();
    CHECK(refusal_fault(s, Code::invalid_file, {kPath}) == "");
    for (std::string_view part : bad.parts) CHECK(refusal_fault(s, Code::invalid_file, {part}) == "");
  }
}

TEST_CASE("config: the families' JSON for Python is what core/families says") {
  std::ifstream file(CF_DATA_DIR "/../python/cf_ops/_families.json", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const bool is_current = text == families_json();  // else: cmake --build --preset dev --target families_json
  CHECK(is_current);
}

TEST_CASE("config: from a file") {
  const TempDir dir;
  const std::string path = dir / "config.json";
  CHECK(refusal_fault(read_hf_config(path).status(), Code::not_found, {path, "no such file"}) == "");
  CHECK(refusal_fault(read_hf_config(dir.path()).status(), Code::invalid_file, {dir.path(), "is a directory"}) == "");
  write_file(path, "");
  CHECK(refusal_fault(read_hf_config(path).status(), Code::invalid_file, {path + ": is empty"}) == "");
  write_file(path, kConfig4);
  CHECK(read_hf_config(path)->hidden_size == 2560);
}
