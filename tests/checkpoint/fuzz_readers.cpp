#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "core/model/config.hpp"
#include "golden/checkpoint/fp8_config.hpp"
#include "golden/checkpoint/gptq_config.hpp"
#include "golden/checkpoint/hf_config.hpp"
#include "golden/checkpoint/safetensors.hpp"
#include "tests/checkpoint/mutator.hpp"
#include "tests/checkpoint/reader_invariants.hpp"
#include "tests/checkpoint/safetensors_writer.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::checkpoint;
using namespace cf::test;

}  // namespace

TEST_CASE("fuzz: mutated safetensors headers") {
  const std::vector<std::string> seeds{
      safetensors_header({{"gpt_neox.layers.0.attention.dense.weight", "F16", {4, 8}, 64},
                          {"gpt_neox.layers.0.attention.bias", "BOOL", {1, 1, 3, 3}, 9},
                          {"embed_out.weight", "BF16", {2, 2}, 8},
                          {"none", "I64", {0}, 0},
                          {"scalar", "F32", {}, 4}}),
      safetensors_header({{"w", "F32", {2}, 8}}), "{}"};
  const std::string buffer(85, '\1');
  Mutator mutator(20240229);
  int accepted = 0;
  for (int i = 0; i < 40000; ++i) {
    const std::string header = mutator.mutate(seeds[mutator.below(seeds.size())]);
    // Sizes that fit the seeds, so that what is accepted gets past the last check.
    constexpr std::array<std::uint64_t, 4> sizes{85, 8, 0, 84};
    const std::uint64_t buffer_bytes = sizes[mutator.below(sizes.size())];
    const auto entries = parse_safetensors_header(header, buffer.data(), buffer_bytes, "f");
    accepted += bool(entries);
    const std::string fault = entries ? header_fault(*entries, buffer.data(), std::int64_t(buffer_bytes))
                                      : message_fault(entries.status(), "f");
    if (!fault.empty()) FAIL("mutation " << i << " of the seed: " << fault << "\n" << header);
  }
  // Otherwise the mutations are too coarse to test anything behind the JSON parser.
  CHECK(accepted > 500);
}

TEST_CASE("fuzz: mutated safetensors files") {
  const TempDir dir;
  const std::string path = dir / "model.safetensors";
  const std::string seed =
      with_length(safetensors_header({{"w", "F32", {2}, 8}, {"b", "F16", {3}, 6}})) + std::string(14, '\1');
  Mutator mutator(3);
  int accepted = 0;
  for (int i = 0; i < 1500; ++i) {
    const std::string written = mutator.mutate(seed);
    write_file(path, written);
    const auto file = SafetensorsFile::open(path);
    accepted += bool(file);
    std::string fault = file ? "" : message_fault(file.status(), path);
    if (file && !file->tensors().empty()) {
      const void* buffer = file->tensors().front().data;
      std::size_t bytes = 0;
      for (const TensorEntry& t : file->tensors()) bytes += std::size_t(t.bytes);
      fault = header_fault(file->tensors(), buffer, std::int64_t(bytes));
      if (fault.empty() && std::memcmp(buffer, written.data() + written.size() - bytes, bytes) != 0)
        fault = "the bytes are not the file's";
    }
    if (!fault.empty()) FAIL("mutation " << i << " of the seed: " << fault);
  }
  CHECK(accepted > 20);
}

TEST_CASE("fuzz: mutated configs") {
  ModelConfig other = *find_preset("pythia-1b");
  other.name = "other";
  other.use_parallel_residual = false;
  const std::vector<std::string> seeds{
      to_hf_json(*find_preset("pythia-2.8b")),
      to_hf_json(other),
      to_hf_json(*find_preset("llama-3.2-1b")),
      to_hf_json(*find_preset("qwen2.5-7b")),
      to_hf_json(*find_preset("qwen3-4b")),
      to_hf_json(*find_preset("gpt2")),
      to_hf_json(*find_preset("stablelm-3b-4e1t")),
      R"({"model_type":"mistral","hidden_size":64,"num_hidden_layers":2,"num_attention_heads":4,"head_dim":128,)"
      R"("intermediate_size":72,"vocab_size":128,"num_key_value_heads":1,"sliding_window":4096,"dtype":"float16",)"
      R"("max_position_embeddings":512,"rope_parameters":{"rope_type":"llama3","rope_theta":1e6,"factor":8,)"
      R"("low_freq_factor":1,"high_freq_factor":4,"original_max_position_embeddings":64}})",
      R"({"model_type":"gpt_neox","hidden_size":512,"num_hidden_layers":6,"num_attention_heads":8,"dtype":"bfloat16",)"
      R"("intermediate_size":2048,"vocab_size":50304,"hidden_act":"gelu_new","rope_scaling":null,)"
      R"("rope_parameters":{"rope_theta":10000.0,"partial_rotary_factor":0.25,"rope_type":"default"}})"};
  Mutator mutator(11);
  int accepted = 0;
  for (int i = 0; i < 15000; ++i) {
    const std::string text = mutator.mutate(seeds[mutator.below(seeds.size())]);
    const auto m = parse_hf_config(text, "f");
    accepted += bool(m);
    const std::string fault = m ? config_fault(*m) : message_fault(m.status(), "f");
    if (!fault.empty()) FAIL("mutation " << i << " of the seed: " << fault << "\n" << text);
  }
  CHECK(accepted > 500);
}

TEST_CASE("fuzz: mutated GPTQ configs") {
  const std::vector<std::string> seeds{
      R"({"bits":4,"group_size":128,"desc_act":true,"sym":false,"quant_method":"gptq","checkpoint_format":"gptq_v2"})",
      R"({"bits":8,"group_size":-1,"dynamic":{},"rotation":null,)"
      R"("modules_in_block_to_quantize":[["attention.dense"]]})"};
  Mutator mutator(17);
  int accepted = 0;
  for (int i = 0; i < 15000; ++i) {
    const std::string text = mutator.mutate(seeds[mutator.below(seeds.size())]);
    const auto c = parse_gptq_config(text, "f");
    accepted += bool(c);
    const std::string fault = c ? gptq_config_fault(*c) : message_fault(c.status(), "f");
    if (!fault.empty()) FAIL("mutation " << i << " of the seed: " << fault << "\n" << text);
  }
  CHECK(accepted > 500);
}

TEST_CASE("fuzz: mutated fp8 configs") {
  const std::vector<std::string> seeds{
      R"({"quant_method":"fp8","fmt":"e4m3","activation_scheme":"dynamic","weight_block_size":[128,128]})",
      R"({"quant_method":"fbgemm_fp8","activation_scale_ub":1200.0})",
      R"({"quant_method":"compressed-tensors","format":"float-quantized","kv_cache_scheme":null,"config_groups":)"
      R"({"g":{"weights":{"type":"float","num_bits":8,"strategy":"block","block_structure":[128,128]},)"
      R"("input_activations":{"type":"float","num_bits":8,"dynamic":true}}}})"};
  Mutator mutator(19);
  int accepted = 0;
  for (int i = 0; i < 15000; ++i) {
    const std::string text = mutator.mutate(seeds[mutator.below(seeds.size())]);
    const auto c = parse_fp8_config(text, "f");
    accepted += bool(c);
    const std::string fault = c ? fp8_config_fault(*c, text) : message_fault(c.status(), "f");
    if (!fault.empty()) FAIL("mutation " << i << " of the seed: " << fault << "\n" << text);
  }
  CHECK(accepted > 500);
}
