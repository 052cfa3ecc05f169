// cf-model on checkpoints as users have met them: tests/checkpoint/cases.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/model/weights.hpp"
#include "golden/checkpoint/token_file.hpp"
#include "tests/apps/run_cf_model.hpp"
#include "tests/checkpoint/safetensors_writer.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::test;

const std::string cases = CF_CASES_DIR "/";

/// Ids 3, 4, 5 ... of the cases' vocabulary of 32.
std::vector<std::int32_t> some_ids(std::size_t count) {
  std::vector<std::int32_t> ids(count);
  for (std::size_t i = 0; i < count; ++i) ids[i] = std::int32_t(3 + i % 29);
  return ids;
}

std::string list_of(const std::vector<std::int32_t>& ids) {
  std::string text;
  for (std::int32_t id : ids) text += (text.empty() ? "" : ",") + std::to_string(id);
  return text;
}

}  // namespace

TEST_CASE("cf-model eval: checkpoints as users have met them score as Hugging Face's models do", "[cf_model]") {
  struct Case {
    std::string name;
    double nll;        // what expected.py beside the cases prints
    std::string note;  // on stderr; "" where there is none
  };
  const std::vector<Case> table{
      {"base-model-names", 6.144497, ""},
      {"config-dtype-text", 6.679856, ""},
      {"fp8-block", 27.214913, ""},
      {"fp8-channel", 6.666298, ""},
      {"gptq-dynamic-head", 6.390460, ""},
      {"gptq-file-name", 6.390460, ""},
      {"gptq-without-g-idx", 6.390460, ""},
      {"mixed-dtypes", 6.681919,
       "tensor 'model.layers.0.input_layernorm.weight' is F32, cast to bfloat16 as Hugging Face does, like 2 others"},
      {"qwen2-attention-bias-field", 5.458980, "'attention_bias' is false, which is not read of a qwen2: true counts"},
      {"rope-theta-twice", 6.468656,
       "'rope_theta' is 10000.0 beside 'rope_parameters.rope_theta' 500000.0, which counts"},
      {"tied-beside-another-head", 6.224552,
       "'tie_word_embeddings' is true, but tensor 'lm_head.weight' differs from 'model.embed_tokens.weight': the head "
       "counts, as in transformers 5"},
      {"window-beyond-the-text", 6.679856, ""}};
  const TempDir dir;
  for (const Case& c : table) {
    CAPTURE(c.name);
    const std::string model = "--model '" + cases + c.name + "' ";
    const auto r = cf_model_ok("eval " + model + "--tokens '" + cases + "ids.npy' --activation float64 --json '" +
                               (dir / "x.json") + "'");
    const auto report = nlohmann::json::parse(read_file(dir / "x.json"));
    CHECK(double(report["figures"]["float64"]["nll"]["mean"]) == Approx(c.nll).margin(6e-7).epsilon(0));
    const bool has_note = r.err.find("note: ") != std::string::npos;
    CHECK(has_note == !c.note.empty());
    CHECK(r.err.find(c.note) != std::string::npos);
    CHECK(cf_model_ok("info " + model).err.find(c.note) != std::string::npos);
  }
}

TEST_CASE("cf-model generate reads eos_token_id alone of generation_config.json", "[cf_model]") {
  const auto r =
      cf_model_ok("generate --model '" + cases + "generation-config-top-k' --prompt-ids 5,7,11 --max-new-tokens 6");
  CHECK(r.out == "1,9,13,24,5,19\n");
}

TEST_CASE("cf-model: fp8 weights are told of, run on the CPU, and have kernels for a GPU", "[cf_model]") {
  const std::string model = "--model '" + cases + "fp8-block' ";
  const std::string info = cf_model_ok("info " + model).out;
  CHECK(info.find("fp8-block, fp8 (e4m3), a scale for a block of 128 x 128") != std::string::npos);
  CHECK(cf_model_ok("info --model '" + cases + "fp8-channel'").out.find("fp8 (e4m3), a scale a channel") !=
        std::string::npos);
  CHECK(cf_model_ok("generate --model '" + cases + "fp8-channel' --prompt-ids 5,7,11 --max-new-tokens 6 --stop none")
            .out == "28,21,21,21,21,21\n");  // Hugging Face's, on the dequantised weights
  const std::string plan = cf_model_ok("info " + model + "--plan --gpu h100").out;
  CHECK(plan.find("self_attn.qkv_proj: gemv_fp8, ") != std::string::npos);
  CHECK(plan.find("lm_head: gemv, ") != std::string::npos);
}

TEST_CASE("cf-model: a sequence grows beyond the window", "[cf_model]") {
  const std::string model = "--model '" + cases + "window-beyond-the-text' ";
  CHECK(cf_model_ok("info " + model).out.find("64 keys that a token sees") != std::string::npos);
  for (std::size_t count : {60, 65})
    CHECK(cf_model_ok("generate " + model + "--stop none --max-new-tokens 6 --prompt-ids " + list_of(some_ids(count)))
              .exit_code == 0);
  const TempDir dir;
  REQUIRE(checkpoint::write_token_file(dir / "ids.npy", some_ids(80), {80}));
  for (const char* feed : {"token", "prompt"})
    CHECK(cf_model_ok("eval " + model + "--tokens '" + (dir / "ids.npy") + "' --feed " + feed).exit_code == 0);
}

TEST_CASE("cf-model refuses what a file or a config asks too much of, in one line", "[cf_model]") {
  check_cf_model_refusal("info --model '" + cases + "truncated-many-layers'",
                         "model.safetensors: truncated: the header asks for 1200 bytes, the file has 1000");
  check_cf_model_refusal("info --model '" + cases + "rotary-pct-overflow'",
                         "config.json: 'rotary_pct' is 1e+30, expected more than 0 and at most 1");
}

TEST_CASE("cf-model: weights that are a hole of 2 TB are neither read nor run", "[cf_model]") {
  ModelConfig m{.name = "hole",
                .hidden_size = 8192,
                .num_hidden_layers = 1,
                .num_attention_heads = 64,
                .intermediate_size = 8,
                .vocab_size = 1 << 26,
                .rotary_dim = 32};
  std::vector<StoredTensor> tensors = layer_tensors(m, 0);
  ModelWeights outside;
  for_each_model_weight(m, outside, [&](const TensorSpec& spec, const auto&, auto shape) {
    const Shape all(shape.begin(), shape.end());
    tensors.push_back({std::string(spec.name), "F16", all, 2 * element_count(all), nullptr});
  });
  const TempDir dir;
  try {
    write_checkpoint(dir.path(), m, {tensors});
  } catch (const std::filesystem::filesystem_error&) {
    return;  // of a file system without files of that size
  }
  const std::string model = "--model '" + dir.path() + "'";
  CHECK(cf_model_ok("info " + model).out.find("slots that fit") != std::string::npos);
  check_cf_model_refusal("generate " + model + " --prompt-ids 1 --max-new-tokens 1", "hole: the weights need 2199.5");
}
