#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "core/procedural.hpp"
#include "golden/checkpoint.hpp"
#include "tests/catch.hpp"
#include "tests/refusal.hpp"
#include "tests/safetensors_writer.hpp"
#include "tests/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::golden;
using namespace cf::test;

constexpr std::uint64_t kSeed = 7;
const std::string kSingle = "model.safetensors", kIndex = "model.safetensors.index.json";

ModelConfig small_model(DType dtype = DType::f16) {
  return {.name = "small",
          .hidden_size = 24,
          .num_hidden_layers = 3,
          .num_attention_heads = 2,
          .intermediate_size = 40,
          .vocab_size = 5,
          .rotary_dim = 4,
          .dtype = dtype};
}

/// A checkpoint of procedural weights in memory.
struct Model {
  ModelConfig config;
  std::vector<OwnedLayerWeights> layers;
  std::vector<StoredTensor> tensors;  // of all layers, by their names

  explicit Model(ModelConfig m) : config(std::move(m)) {
    for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) layers.push_back(procedural_layer(config, i, kSeed));
    for (std::int64_t i = 0; i < config.num_hidden_layers; ++i)
      for (StoredTensor& t : layer_tensors(config, i, layers[std::size_t(i)].weights)) tensors.push_back(std::move(t));
    const std::int64_t h = config.hidden_size, element = std::int64_t(size_bytes(config.dtype));
    for (const char* name : {"gpt_neox.embed_in.weight", "embed_out.weight"})
      tensors.push_back({name, stored_dtype(config.dtype), {config.vocab_size, h}, config.vocab_size * h * element});
    for (const char* name : {"gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias"})
      tensors.push_back({name, stored_dtype(config.dtype), {h}, h * element});
  }

  StoredTensor& tensor(const std::string& name) {
    return *std::find_if(tensors.begin(), tensors.end(), [&](const StoredTensor& t) { return t.name == name; });
  }
  void erase(const std::string& name) {
    std::erase_if(tensors, [&](const StoredTensor& t) { return t.name == name; });
  }
  /// Deals the tensors round to n shards, so that each layer lies in all of them.
  std::vector<std::vector<StoredTensor>> shards(std::size_t n) const {
    std::vector<std::vector<StoredTensor>> dealt(n);
    for (std::size_t i = 0; i < tensors.size(); ++i) dealt[i % n].push_back(tensors[i]);
    return dealt;
  }
};

/// Checks every layer against the weights that the model was made with.
void check_layers(const std::string& directory, const Model& model) {
  auto checkpoint = Checkpoint::open(directory);
  REQUIRE(checkpoint.status().message() == "");
  for (std::int64_t i = model.config.num_hidden_layers; i-- > 0;) {
    const auto layer = checkpoint->layer(i);
    REQUIRE(layer.status().message() == "");
    CHECK(layer->dtype == model.config.dtype);
    std::vector<std::string> faults;
    for_each_weight(model.config, layer->weights, [&](std::string_view name, const auto& view, auto shape) {
      if (view.shape != shape || view.dtype != model.config.dtype ||
          reinterpret_cast<std::uintptr_t>(view.data) % size_bytes(view.dtype))
        faults.emplace_back(name);
    });
    CHECK(faults == std::vector<std::string>{});
    CHECK(weights_checksum(model.config, layer->weights) ==
          weights_checksum(model.config, model.layers[std::size_t(i)].weights));
  }
  CHECK(checkpoint->check_names().message() == "");
}

/// The message of opening the directory and reading layer 1.
Status layer_status(const std::string& directory) {
  auto checkpoint = Checkpoint::open(directory);
  return checkpoint ? checkpoint->layer(1).status() : checkpoint.status();
}

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kShadowMemory = true;
#elif defined(__has_feature)
constexpr bool kShadowMemory = __has_feature(address_sanitizer);
#else
constexpr bool kShadowMemory = false;
#endif

/// A field of /proc/self/status that is in kB, in bytes.
double status_bytes(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(field + ":")) return std::stod(line.substr(field.size() + 1)) * 1024;
  return 0;
}

}  // namespace

TEST_CASE("checkpoint: one file or shards, every dtype, aligned or not") {
  const DType dtype = GENERATE(DType::f16, DType::bf16, DType::f32);
  const std::size_t shards = GENERATE(1, 2, 5), shift = GENERATE(0, 1, 2);
  CAPTURE(to_string(dtype), shards, shift);
  const TempDir dir;
  const Model model(small_model(dtype));
  write_checkpoint(dir.path(), model.config, model.shards(shards), shift);
  check_layers(dir.path(), model);
}

TEST_CASE("checkpoint: without attention biases") {
  const TempDir dir;
  ModelConfig m = small_model();
  m.attention_bias = false;
  const Model model(m);
  write_checkpoint(dir.path(), m, model.shards(1));
  check_layers(dir.path(), model);
  CHECK_FALSE(bool(Checkpoint::open(dir.path())->layer(0)->weights.dense.bias));
}

TEST_CASE("checkpoint: the buffers of old files are passed by") {
  const TempDir dir;
  Model model(small_model());
  for (int i = 0; i < 3; ++i) {
    const std::string attention = "gpt_neox.layers." + std::to_string(i) + ".attention.";
    // Each of an odd size or of another dtype, ahead of the weights that it misaligns.
    model.tensors.insert(model.tensors.begin(), {{attention + "bias", "BOOL", {1, 1, 7, 7}, 49},
                                                 {attention + "masked_bias", "F16", {}, 2},
                                                 {attention + "rotary_emb.inv_freq", "F32", {2}, 8}});
  }
  write_checkpoint(dir.path(), model.config, model.shards(1));
  check_layers(dir.path(), model);
}

TEST_CASE("checkpoint: weights are the file's own memory unless they are misaligned") {
  const TempDir dir;
  const Model model(small_model());
  for (std::size_t shift : {0u, 1u}) {
    write_checkpoint(dir.path(), model.config, model.shards(1), shift);
    const auto layer = Checkpoint::open(dir.path())->layer(2);
    REQUIRE(layer.status().message() == "");
    CHECK(layer->copies.size() == (shift ? 12 : 0));
    REQUIRE(layer->files.size() == 1);
    const auto* entry = layer->files[0].find("gpt_neox.layers.2.attention.dense.weight");
    REQUIRE(entry);
    CHECK((std::get<DenseWeight>(layer->weights.dense.weight).weight.data == entry->data) == (shift == 0));
  }
}

TEST_CASE("checkpoint: a layer outlives its checkpoint") {
  const TempDir dir;
  const Model model(small_model());
  write_checkpoint(dir.path(), model.config, model.shards(3));
  CheckpointLayer layer;
  {
    auto checkpoint = Checkpoint::open(dir.path());
    REQUIRE(checkpoint.status().message() == "");
    auto read = checkpoint->layer(1);
    REQUIRE(read.status().message() == "");
    layer = std::move(*read);
  }
  CHECK(layer.files.size() == 3);
  CHECK(weights_checksum(model.config, layer.weights) == weights_checksum(model.config, model.layers[1].weights));
}

TEST_CASE("checkpoint: opens only the shards that a layer needs") {
  const TempDir dir;
  const Model model(small_model());
  std::vector<std::vector<StoredTensor>> shards(3);
  for (std::int64_t i = 0; i < 3; ++i)
    shards[std::size_t(i)] = layer_tensors(model.config, i, model.layers[std::size_t(i)].weights);
  write_checkpoint(dir.path(), model.config, shards);
  write_file(dir / shard_name(0, 3), "damaged");
  auto checkpoint = Checkpoint::open(dir.path());
  REQUIRE(checkpoint.status().message() == "");
  CHECK(checkpoint->layer(1).status().message() == "");
  CHECK(refusal_fault(checkpoint->layer(0).status(), Code::invalid_file, {dir / shard_name(0, 3), "truncated"}) == "");
}

TEST_CASE("checkpoint: its name is the config's, else the directory's") {
  const TempDir dir;
  Model model(small_model());
  write_checkpoint(dir.path(), model.config, model.shards(1));
  CHECK(Checkpoint::open(dir.path())->config().name == "small");
  model.config.name = "";
  write_checkpoint(dir.path(), model.config, model.shards(1));
  const std::string base = dir.path().substr(dir.path().rfind('/') + 1);
  CHECK(Checkpoint::open(dir.path())->config().name == base);
  CHECK(Checkpoint::open(dir.path() + "/")->config().name == base);
}

TEST_CASE("checkpoint: layers beyond the model") {
  const TempDir dir;
  const Model model(small_model());
  write_checkpoint(dir.path(), model.config, model.shards(1));
  auto checkpoint = Checkpoint::open(dir.path());
  REQUIRE(checkpoint.status().message() == "");
  CHECK(refusal_fault(checkpoint->layer(3).status(), Code::invalid_argument, {dir.path(), "0 to 2", "got 3"}) == "");
  CHECK(refusal_fault(checkpoint->layer(-1).status(), Code::invalid_argument, {dir.path(), "0 to 2", "got -1"}) == "");
}

TEST_CASE("checkpoint: directories that hold none") {
  const TempDir dir;
  const auto refusal = [&](const std::string& path, Code code, std::initializer_list<std::string_view> parts) {
    return refusal_fault(Checkpoint::open(path).status(), code, parts);
  };
  CHECK(refusal(dir / "absent", Code::not_found, {dir / "absent", "no such directory"}) == "");
  CHECK(refusal("", Code::not_found, {"no such directory"}) == "");
  write_file(dir / "file", "");
  CHECK(refusal(dir / "file", Code::invalid_file, {dir / "file", "is no directory"}) == "");
  CHECK(refusal(dir.path(), Code::not_found, {dir / "config.json", "no such file"}) == "");
  write_file(dir / "config.json", "{}");
  CHECK(refusal(dir.path(), Code::invalid_file, {dir / "config.json", "'model_type' is missing"}) == "");
  write_file(dir / "config.json", to_hf_json(small_model()));
  CHECK(refusal(dir.path(), Code::not_found, {dir.path(), "expected model.safetensors or " + kIndex}) == "");
  write_file(dir / "pytorch_model-00001-of-00002.bin", "PK");
  write_file(dir / "pytorch_model-00002-of-00002.bin", "PK");
  CHECK(refusal(dir.path(), Code::not_found,
                {dir.path(), "holds 'pytorch_model-0000", ".bin' but no safetensors file",
                 "expected model.safetensors or " + kIndex, "python3 -c", "AutoModelForCausalLM",
                 "from_pretrained('" + dir.path() + "'", "save_pretrained(", "safe_serialization=True"}) == "");
}

TEST_CASE("checkpoint: tensors that are missing, misshapen or of another dtype") {
  const TempDir dir;
  const std::string name = "gpt_neox.layers.1.attention.dense.weight";
  Model model(small_model());
  const auto refusal = [&](Code code, std::initializer_list<std::string_view> parts) {
    write_checkpoint(dir.path(), model.config, model.shards(1));
    const Status s = layer_status(dir.path());
    return refusal_fault(s, code, {dir / kSingle, "'" + name + "'", "expected"}) + refusal_fault(s, code, parts);
  };
  SECTION("missing") {
    model.erase(name);
    write_checkpoint(dir.path(), model.config, model.shards(1));
    CHECK(refusal_fault(layer_status(dir.path()), Code::not_found, {dir / kSingle, "'" + name + "' is missing"}) == "");
    CHECK(Checkpoint::open(dir.path())->layer(0).status().message() == "");
  }
  SECTION("shape") {
    model.tensor(name).shape = {12, 48};
    CHECK(refusal(Code::invalid_file, {"expected shape (24, 24)", "got (12, 48)"}) == "");
  }
  SECTION("rank") {
    model.tensor(name).shape = {24 * 24};
    CHECK(refusal(Code::invalid_file, {"expected shape (24, 24)", "got (576)"}) == "");
  }
  SECTION("integers") {
    model.tensor(name).dtype = "I16";
    CHECK(refusal(Code::invalid_file, {"expected dtype F16, BF16 or F32", "got I16"}) == "");
  }
  SECTION("mixed") {
    model.tensor(name).dtype = "BF16";
    CHECK(refusal(Code::invalid_file, {"expected dtype float16 as 'gpt_neox.layers.1.", "got bfloat16"}) == "");
  }
}

TEST_CASE("checkpoint: a model of another size than the config's") {
  const TempDir dir;
  const Model model(small_model());
  write_checkpoint(dir.path(), model.config, model.shards(1));
  ModelConfig other = model.config;
  other.intermediate_size = 48;
  write_file(dir / "config.json", to_hf_json(other));
  CHECK(refusal_fault(layer_status(dir.path()), Code::invalid_file,
                      {dir / kSingle, "mlp.dense_h_to_4h.weight", "expected shape (48, 24)", "got (40, 24)"}) == "");
}

TEST_CASE("checkpoint: a duplicate tensor") {
  const TempDir dir;
  Model model(small_model());
  model.tensors.push_back(model.tensors[3]);
  write_checkpoint(dir.path(), model.config, model.shards(1));
  CHECK(refusal_fault(layer_status(dir.path()), Code::invalid_file,
                      {dir / kSingle, "duplicate name '" + model.tensors[3].name + "'"}) == "");
  // In two shards the index has the name twice.
  write_checkpoint(dir.path(), model.config, model.shards(2));
  std::filesystem::remove(dir / kSingle);
  CHECK(refusal_fault(layer_status(dir.path()), Code::invalid_file,
                      {dir / kIndex, "duplicate name '" + model.tensors[3].name + "'"}) == "");
}

TEST_CASE("checkpoint: an index that is wrong") {
  const TempDir dir;
  const Model model(small_model());
  write_checkpoint(dir.path(), model.config, model.shards(2));
  struct Bad {
    std::string text;
    std::vector<std::string_view> parts;
  };
  const auto shard = [](const std::string& name) { return "{\"weight_map\":{\"t\":" + name + "}}"; };
  const std::vector<Bad> table{
      {"", {"not JSON"}},
      {"[1]", {"expected a JSON object", "got an array"}},
      {"{}", {"'weight_map' is missing", "expected an object"}},
      {"{\"weight_map\":[]}", {"'weight_map'", "expected an object", "got an array"}},
      {"{\"weight_map\":{},\"metadata\":3}", {"'metadata'", "expected an object", "got 3"}},
      {"{\"weight_map\":{},\"metadata\":{\"total_size\":\"3\"}}", {"'metadata.total_size'", "got \"3\""}},
      {"{\"weight_map\":{},\"metadata\":{\"total_size\":-3}}", {"'metadata.total_size'", "got -3"}},
      {shard("1"), {"'t'", "expected a shard's file name", "got 1"}},
      {shard("\"model-00003-of-00002.safetensors\""),
       {"'t'", "'model-00003-of-00002.safetensors'", "expected", "got no such file"}},
      {shard("\"../config.json\""), {"'t'", "expected a plain file name", "got '../config.json'"}},
      {shard("\"/etc/passwd\""), {"'t'", "expected a plain file name", "got '/etc/passwd'"}},
      {shard("\"a\\\\b\""), {"'t'", "expected a plain file name", "got 'a\\b'"}},
      {shard("\"a\\u0000\""), {"'t'", "expected a plain file name", "got 'a\\x00'"}},
      {shard("\"\""), {"'t'", "expected a plain file name", "got ''"}},
      {shard("\"..\""), {"'t'", "expected a plain file name", "got '..'"}},
      {shard("\".\""), {"'t'", "expected a plain file name", "got '.'"}},
  };
  for (const Bad& bad : table) {
    CAPTURE(bad.text);
    write_file(dir / kIndex, bad.text);
    const Status s = Checkpoint::open(dir.path()).status();
    CHECK(refusal_fault(s, Code::invalid_file, {dir / kIndex}) == "");
    for (std::string_view part : bad.parts) CHECK(refusal_fault(s, Code::invalid_file, {part}) == "");
  }
}

TEST_CASE("checkpoint: an index that does not say what the shards hold") {
  const TempDir dir;
  const Model model(small_model());
  const auto shards = model.shards(2);
  const std::string name = shards[1][6].name;  // layer 1's
  REQUIRE(name.starts_with("gpt_neox.layers.1."));
  write_checkpoint(dir.path(), model.config, shards);

  SECTION("a tensor that its shard lacks") {
    auto fewer = shards[1];
    fewer.erase(fewer.begin() + 6);
    write_safetensors(dir / shard_name(1, 2), fewer);
    CHECK(refusal_fault(layer_status(dir.path()), Code::not_found,
                        {dir / shard_name(1, 2), "'" + name + "' is missing", "expected by the index"}) == "");
  }
  SECTION("a tensor that the index lacks") {
    auto fewer = shards;
    fewer[1].erase(fewer[1].begin() + 6);
    write_checkpoint(dir.path(), model.config, fewer);
    write_safetensors(dir / shard_name(1, 2), shards[1]);
    CHECK(refusal_fault(layer_status(dir.path()), Code::not_found, {dir / kIndex, "'" + name + "' is missing"}) == "");
    CHECK(refusal_fault(Checkpoint::open(dir.path())->check_names(), Code::invalid_file,
                        {dir / shard_name(1, 2), "'" + name + "' is not in the index", "expected"}) == "");
  }
  SECTION("a tensor in two shards") {
    auto more = shards[0];
    more.push_back(shards[1][6]);
    write_safetensors(dir / shard_name(0, 2), more);
    CHECK(refusal_fault(Checkpoint::open(dir.path())->check_names(), Code::invalid_file,
                        {dir / shard_name(0, 2), "'" + name + "' is duplicate", shard_name(1, 2)}) == "");
  }
}

TEST_CASE("checkpoint: names that are no GPT-NeoX model's") {
  for (const char* name :
       {"bias", "gpt_neox.embed_in.bias", "gpt_neox.layers.3.attention.dense.weight", "gpt_neox.layers.0",
        "gpt_neox.layers.00.attention.dense.weight", "gpt_neox.layers.-1.attention.dense.weight",
        "gpt_neox.layers..attention.dense.weight", "gpt_neox.layers.0.attention.dense.weight2",
        "gpt_neox.layers.99999999999999999999.mlp.dense_4h_to_h.bias", "gpt_neox.layers.0.bias",
        "model.layers.0.self_attn.q_proj.weight"}) {
    CAPTURE(name);
    const TempDir dir;
    Model model(small_model());
    model.tensors.push_back({name, "F16", {1}, 2});
    write_checkpoint(dir.path(), model.config, model.shards(1));
    CHECK(refusal_fault(Checkpoint::open(dir.path())->check_names(), Code::invalid_file,
                        {dir / kSingle, "'" + std::string(name) + "'", "expected", "3 layers", "got"}) == "");
  }
}

TEST_CASE("checkpoint: only the layer asked for is in memory") {
  const TempDir dir;
  const ModelConfig m{.name = "holes",
                      .hidden_size = 2048,
                      .num_hidden_layers = 12,
                      .num_attention_heads = 16,
                      .intermediate_size = 8192,
                      .vocab_size = 50304,
                      .rotary_dim = 32};
  std::vector<std::vector<StoredTensor>> shards(3);
  for (std::int64_t i = 0; i < 12; ++i)
    for (StoredTensor& t : layer_tensors(m, i)) shards[std::size_t(i % 3)].push_back(std::move(t));
  write_checkpoint(dir.path(), m, shards);
  std::uintmax_t stored_bytes = 0;
  for (std::size_t i = 0; i < 3; ++i) stored_bytes += std::filesystem::file_size(dir / shard_name(i, 3));
  const double layer_bytes = 2 * double(m.layer_parameters()), most_bytes = 2 * layer_bytes + 200e6;
  REQUIRE(double(stored_bytes) > 1e9);
  REQUIRE(double(stored_bytes) > 2 * most_bytes);

  const double before_bytes = status_bytes("VmRSS");
  auto checkpoint = Checkpoint::open(dir.path());
  REQUIRE(checkpoint.status().message() == "");
  const auto layer = checkpoint->layer(7);
  REQUIRE(layer.status().message() == "");
  const double opened_bytes = status_bytes("VmRSS");
  // Reads every byte.

  CHECK(weights_checksum(m, layer->weights) != 0);
  REQUIRE(before_bytes > 0);
  if (!kShadowMemory) {
    CHECK(opened_bytes - before_bytes < 50e6);
    CHECK(status_bytes("VmRSS") < most_bytes);
    CHECK(status_bytes("VmHWM") < most_bytes);
  }
}
