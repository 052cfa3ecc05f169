#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "core/procedural.hpp"
#include "golden/checkpoint/checkpoint.hpp"
#include "golden/checkpoint/hf_config.hpp"
#include "tests/checkpoint/safetensors_writer.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::checkpoint;
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
  std::vector<Tensor> others;         // those outside the layers
  std::vector<StoredTensor> tensors;  // by their names

  explicit Model(ModelConfig m) : config(std::move(m)) {
    for (std::int64_t i = 0; i < config.num_hidden_layers; ++i)
      layers.push_back(procedural_layer(config, config.dtype, i, kSeed));
    for (std::int64_t i = 0; i < config.num_hidden_layers; ++i)
      for (StoredTensor& t : layer_tensors(config, i, layers[std::size_t(i)].weights)) tensors.push_back(std::move(t));
    ModelWeights outside;
    for_each_model_weight(config, outside, [&](const TensorSpec& spec, auto&, auto shape) {
      Tensor t(config.dtype, Shape(shape.begin(), shape.end()));
      fill_procedural(t.data(), t.dtype(), 0, t.size(), ProceduralKind::weight, kSeed, spec.name);
      tensors.push_back({std::string(spec.name), stored_dtype(t.dtype()), t.shape(), t.size_bytes(), t.data()});
      others.push_back(std::move(t));
    });
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
    for_each_weight(model.config, layer->weights, [&](const TensorSpec& spec, const auto& view, auto shape) {
      if (view.shape != shape || view.dtype != model.config.dtype ||
          reinterpret_cast<std::uintptr_t>(view.data) % size_bytes(view.dtype))
        faults.emplace_back(spec.name);
    });
    CHECK(faults == std::vector<std::string>{});
    CHECK(weights_checksum(model.config, layer->weights) ==
          weights_checksum(model.config, model.layers[std::size_t(i)].weights));
  }
  CHECK(checkpoint->check_names().message() == "");
}

/// The status of opening the directory and reading layer 1.
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

TEST_CASE("checkpoint: a file that becomes shorter is named, and ends no process", "[checkpoint]") {
  guard_mapped_files();
  const TempDir dir;
  const Model model(small_model());
  write_checkpoint(dir.path(), model.config, model.shards(1));
  const std::string path = dir / kSingle;
  const auto size = std::filesystem::file_size(path);
  auto checkpoint = Checkpoint::open(dir.path());
  REQUIRE(checkpoint);
  const auto layer = checkpoint->layer(2);
  REQUIRE(layer);
  CHECK(checkpoint->check_files());
  CHECK(checkpoint->changes().empty());
  std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
  CHECK(checkpoint->check_files());
  CHECK(checkpoint->changes() == std::vector<std::string>{path + ": was changed while it was used"});

  std::filesystem::resize_file(path, 4096);
  const std::string said = path + ": expected the " + std::to_string(size) + " bytes that it had when it was opened, " +
                           "got 4096: it became shorter while it was used";
  CHECK(refusal_fault(checkpoint->check_files(), Code::io_error, {said}) == "");
  CHECK(refusal_fault(checkpoint->check_finite(*layer), Code::io_error, {said}) == "");
  // Zeros were read in place of the file's bytes. The file has its length again, and the answer stays.
  std::filesystem::resize_file(path, size);
  CHECK(refusal_fault(checkpoint->check_files(), Code::io_error, {path + ": could not be read while it was used"}) ==
        "");
  // What is mapped later is whole, and a signal of another's memory is another's.
  write_checkpoint(dir.path(), model.config, model.shards(1));
  check_layers(dir.path(), model);
}

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
    CHECK(layer->storage->copies.size() == (shift ? 12 : 0));
    REQUIRE(layer->storage->files.size() == 1);
    const auto* entry = layer->storage->files[0]->find("gpt_neox.layers.2.attention.dense.weight");
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
  CHECK(layer.storage->files.size() == 3);
  CHECK(weights_checksum(model.config, layer.weights) == weights_checksum(model.config, model.layers[1].weights));
}

TEST_CASE("checkpoint: a whole model has every tensor by its name") {
  const bool tied = GENERATE(false, true);
  const std::size_t shards = GENERATE(1, 3), shift = GENERATE(0, 1);
  CAPTURE(tied, shards, shift);
  const TempDir dir;
  ModelConfig m = small_model();
  m.tie_word_embeddings = tied;
  Model model(m);
  write_checkpoint(dir.path(), m, model.shards(shards), shift);
  CheckpointModel loaded;
  {
    const auto checkpoint = Checkpoint::open(dir.path());
    REQUIRE(checkpoint.status().message() == "");
    CHECK(checkpoint->config().tie_word_embeddings == tied);
    CHECK(checkpoint->check_names().message() == "");
    auto read = checkpoint->model();
    REQUIRE(read.status().message() == "");
    CHECK(checkpoint->check_finite(*read).message() == "");
    loaded = std::move(*read);  // which outlives its checkpoint
  }
  CHECK(loaded.dtype == DType::f16);
  CHECK(loaded.storage->files.size() == shards);
  CHECK(loaded.weights.layers.size() == 3);
  std::vector<std::string> names, faults;
  for_each_model_weight(m, loaded.weights, [&](const TensorSpec& spec, const auto& view, auto shape) {
    names.emplace_back(spec.name);
    const StoredTensor& stored = model.tensor(names.back());
    if (view.shape != shape || std::memcmp(view.data, stored.data, std::size_t(stored.bytes)) != 0)
      faults.push_back(names.back());
  });
  CHECK(faults == std::vector<std::string>{});
  CHECK(names.size() == model.tensors.size());
  CHECK(names.size() == 3 * 12 + 3 + (tied ? 0 : 1));
  CHECK(names.front() == "gpt_neox.embed_in.weight");
  CHECK(names[1] == "gpt_neox.layers.0.input_layernorm.weight");
  CHECK(names.back() == (tied ? "gpt_neox.final_layer_norm.bias" : "embed_out.weight"));
  const auto& head = std::get<DenseWeight>(loaded.weights.embed_out.weight).weight;
  CHECK((head.data == loaded.weights.embed_in.data) == tied);
  CHECK(head.shape == loaded.weights.embed_in.shape);
}

TEST_CASE("checkpoint: tensors in memory are read where they lie, and left as they are") {
  ModelConfig m = small_model();
  m.vocab_size = 5000;  // a tensor of many pages
  const Model model(m);
  std::vector<TensorEntry> entries;
  for (const StoredTensor& t : model.tensors) entries.push_back({t.name, t.dtype, t.shape, t.data, t.bytes});
  const auto from = [&](const std::vector<TensorEntry>& tensors, std::shared_ptr<const void> owner = {}) {
    auto made = Checkpoint::from_memory(to_hf_json(m), std::nullopt, tensors, std::move(owner), "memory");
    REQUIRE(made.status().message() == "");
    return std::move(*made);
  };
  const std::vector<Tensor> before = [&] {
    std::vector<Tensor> copies;
    for (const Tensor& t : model.others) copies.push_back(t.clone());
    return copies;
  }();
  std::weak_ptr<const void> alive;
  {
    auto owner = std::make_shared<int>(0);
    alive = owner;
    auto loaded = [&] {
      const Checkpoint checkpoint = from(entries, std::move(owner));
      CHECK(checkpoint.config().name == "small");
      CHECK(checkpoint.check_names().message() == "");
      return checkpoint.model();
    }();
    REQUIRE(loaded.status().message() == "");
    CHECK(loaded->weights.embed_in.data == entries[std::size_t(3 * 12)].data);
    CHECK(!alive.expired());
  }
  CHECK(alive.expired());
  // The pages of a file may leave the process, those of other memory must not.
  for (std::size_t i = 0; i < before.size(); ++i)
    CHECK(std::memcmp(before[i].data(), model.others[i].data(), std::size_t(before[i].size_bytes())) == 0);

  std::vector<TensorEntry> fewer(entries.begin() + 1, entries.end()), more = entries;
  CHECK(refusal_fault(from(fewer).model().status(), Code::not_found, {"memory: tensor '" + entries[0].name}) == "");
  more.push_back({"lm_head.weight", "F16", {5000, 24}, entries[0].data, 0});
  CHECK(refusal_fault(from(more).check_names(), Code::invalid_file, {"memory: tensor 'lm_head.weight'"}) == "");
  CHECK(refusal_fault(Checkpoint::from_memory("{}", std::nullopt, {}, {}, "memory").status(), Code::invalid_file,
                      {"memory: config: 'model_type' is missing"}) == "");
  CHECK(refusal_fault(Checkpoint::from_memory(to_hf_json(m), "{}", {}, {}, "memory").status(), Code::invalid_file,
                      {"memory: gptq: 'bits' is missing"}) == "");
}

TEST_CASE("checkpoint: of a tied model's embedding and head one may be stored, or both") {
  const TempDir dir;
  Model model(small_model());
  ModelConfig tied = model.config;
  tied.tie_word_embeddings = true;
  const auto is_tied = [&](std::size_t shards, const std::string& note) {
    std::filesystem::remove_all(dir.path());
    std::filesystem::create_directory(dir.path());
    write_checkpoint(dir.path(), tied, model.shards(shards));
    const auto checkpoint = Checkpoint::open(dir.path());
    REQUIRE(checkpoint.status().message() == "");
    CHECK(checkpoint->check_names().message() == "");
    const auto loaded = checkpoint->model();
    REQUIRE(loaded.status().message() == "");
    CHECK(loaded->notes == (note.empty() ? std::vector<std::string>{} : std::vector{dir.path() + ": " + note}));
    const void* head = std::get<DenseWeight>(loaded->weights.embed_out.weight).weight.data;
    CHECK((head == loaded->weights.embed_in.data) == checkpoint->config().tie_word_embeddings);
    return checkpoint->config().tie_word_embeddings;
  };
  const std::string note =
      "'tie_word_embeddings' is true, but tensor 'embed_out.weight' differs from 'gpt_neox.embed_in.weight': the head "
      "counts, as in transformers 5";
  CHECK_FALSE(is_tied(1, note));
  CHECK_FALSE(is_tied(3, note));
  model.tensor("embed_out.weight").data = model.tensor("gpt_neox.embed_in.weight").data;
  CHECK(is_tied(1, ""));
  model.erase("gpt_neox.embed_in.weight");
  CHECK(is_tied(1, ""));
}

TEST_CASE("checkpoint: names of the base model, and of transformers 5's module") {
  const TempDir dir;
  const Model model(small_model());
  const auto renamed = [&](const std::function<std::string(const std::string&)>& name_of) {
    std::vector<StoredTensor> tensors = model.tensors;
    for (StoredTensor& t : tensors) t.name = name_of(t.name);
    return tensors;
  };
  const std::string base = "gpt_neox.";
  const auto without_base = [&](const std::string& name) { return name.starts_with(base) ? name.substr(9) : name; };
  const auto new_head = [](const std::string& name) { return name == "embed_out.weight" ? "lm_head.weight" : name; };
  write_checkpoint(dir.path(), model.config, {renamed(without_base)});
  check_layers(dir.path(), model);
  CHECK(Checkpoint::open(dir.path())->model().status().message() == "");
  write_checkpoint(dir.path(), model.config, {renamed(new_head)});
  check_layers(dir.path(), model);
  CHECK(Checkpoint::open(dir.path())->model().status().message() == "");
  // One of them, not both.
  std::vector<StoredTensor> both = model.tensors;
  both.push_back(renamed(new_head).back());
  write_checkpoint(dir.path(), model.config, {both});
  CHECK(refusal_fault(Checkpoint::open(dir.path())->model().status(), Code::invalid_file,
                      {dir / kSingle, "tensors 'embed_out.weight' and 'lm_head.weight' are the same one"}) == "");
}

TEST_CASE("checkpoint: dense weights of several dtypes are cast to the config's") {
  const TempDir dir;
  const float halfway = 1 + 0x1p-8f;  // of bfloat16's steps, to even
  const std::vector<float> wide{halfway, 1 + 3 * 0x1p-8f, -0x1.fffp3f, 0x1p-140f, 0};
  const std::vector<std::uint16_t> expected{0x3f80, 0x3f82, 0xc180, 0x0000, 0};
  for (const char* stored : {"F32", "F64"})
    for (bool has_dtype : {true, false}) {
      CAPTURE(stored, has_dtype);
      ModelConfig m = small_model(DType::bf16);
      m.num_hidden_layers = 1;
      Model model(m);
      std::vector<float> floats(24);
      std::vector<double> doubles(24);
      for (std::size_t i = 0; i < wide.size(); ++i) doubles[i] = floats[i] = wide[i];
      StoredTensor& norm = model.tensor("gpt_neox.final_layer_norm.weight");
      norm = {norm.name, stored, {24}, stored == std::string("F32") ? 96 : 192, floats.data()};
      if (stored == std::string("F64")) norm.data = doubles.data();
      write_checkpoint(dir.path(), m, model.shards(1));
      if (!has_dtype) {  // then the first weight's counts
        std::string text = to_hf_json(m);
        const std::string field = "\"torch_dtype\": \"bfloat16\"";
        write_file(dir / "config.json", text.replace(text.find(field), field.size(), "\"torch_dtype\": null"));
      }
      const auto checkpoint = Checkpoint::open(dir.path());
      REQUIRE(checkpoint.status().message() == "");
      const auto loaded = checkpoint->model();
      REQUIRE(loaded.status().message() == "");
      CHECK(loaded->dtype == DType::bf16);
      const ConstAnyView<1>& gamma = loaded->weights.final_layer_norm.gamma;
      REQUIRE(gamma.dtype == DType::bf16);
      for (std::size_t i = 0; i < expected.size(); ++i)
        CHECK(static_cast<const std::uint16_t*>(gamma.data)[i] == expected[i]);
      CHECK(loaded->weights.embed_in.dtype == DType::bf16);
      CHECK(loaded->storage->copies.size() == 1);
      CHECK(loaded->notes == std::vector{dir.path() + ": tensor 'gpt_neox.final_layer_norm.weight' is " + stored +
                                         ", cast to bfloat16 as Hugging Face does"});
      CHECK(checkpoint->check_finite(*loaded).message() == "");
      // A NaN is still found, and a value beyond the dtype refused.
      floats[3] = std::numeric_limits<float>::quiet_NaN();
      doubles[3] = floats[3];
      write_checkpoint(dir.path(), m, model.shards(1));
      const auto nan = Checkpoint::open(dir.path());
      CHECK(refusal_fault(nan->check_finite(*nan->model()), Code::invalid_file,
                          {"'gpt_neox.final_layer_norm.weight': element (3): expected a finite number, got NaN"}) ==
            "");
      floats[3] = std::numeric_limits<float>::max();
      doubles[3] = floats[3];
      write_checkpoint(dir.path(), m, model.shards(1));
      CHECK(refusal_fault(Checkpoint::open(dir.path())->model().status(), Code::invalid_file,
                          {"'gpt_neox.final_layer_norm.weight': expected values within bfloat16, to which it is cast, "
                           "got a larger one in element (3)"}) == "");
    }
}

TEST_CASE("checkpoint: tensors in memory have one dtype") {
  const Model model(small_model());
  std::vector<TensorEntry> entries;
  for (const StoredTensor& t : model.tensors) entries.push_back({t.name, t.dtype, t.shape, t.data, t.bytes});
  std::find_if(entries.begin(), entries.end(), [](const TensorEntry& t) {
    return t.name == "gpt_neox.final_layer_norm.bias";
  })->stored_dtype = "BF16";
  const auto made = Checkpoint::from_memory(to_hf_json(model.config), std::nullopt, entries, {}, "memory");
  CHECK(refusal_fault(made->model().status(), Code::invalid_file,
                      {"'gpt_neox.final_layer_norm.bias'", "float16", "'gpt_neox.embed_in.weight'", "bfloat16"}) == "");
}

TEST_CASE("checkpoint: a file that could not be opened is not opened again") {
  const TempDir dir;
  const Model model(small_model());
  write_checkpoint(dir.path(), model.config, model.shards(1));
  const std::string whole = read_file(dir / kSingle);
  write_file(dir / kSingle, whole.substr(0, 1000));
  const auto checkpoint = Checkpoint::open(dir.path());
  REQUIRE(checkpoint.status().message() == "");
  const std::string refusal = checkpoint->model().status().message();
  CHECK(refusal.find("truncated") != std::string::npos);
  write_file(dir / kSingle, whole);
  CHECK(checkpoint->model().status().message() == refusal);
  CHECK(Checkpoint::open(dir.path())->model().status().message() == "");
}

TEST_CASE("checkpoint: what a model lacks or has wrong is refused by name") {
  const auto refused = [](auto change, Code code, std::initializer_list<std::string_view> parts) {
    const TempDir dir;
    Model model(small_model());
    change(model);
    write_checkpoint(dir.path(), model.config, model.shards(1));
    const auto checkpoint = Checkpoint::open(dir.path());
    REQUIRE(checkpoint.status().message() == "");
    return refusal_fault(checkpoint->model().status(), code, parts);
  };
  CHECK(refused([](Model& m) { m.erase("embed_out.weight"); }, Code::not_found,
                {"tensor 'embed_out.weight' is missing"}) == "");
  CHECK(refused([](Model& m) { m.erase("gpt_neox.layers.2.mlp.dense_4h_to_h.bias"); }, Code::not_found,
                {"tensor 'gpt_neox.layers.2.mlp.dense_4h_to_h.bias' is missing"}) == "");
  CHECK(refused(
            [](Model& m) {
              m.tensor("gpt_neox.embed_in.weight").shape = {24, 5};
            },
            Code::invalid_file, {"'gpt_neox.embed_in.weight': expected shape (5, 24), got (24, 5)"}) == "");
  CHECK(refused([](Model& m) { m.tensor("gpt_neox.final_layer_norm.bias").dtype = "I16"; }, Code::invalid_file,
                {"'gpt_neox.final_layer_norm.bias'", "expected dtype F16, BF16 or F32", "got I16"}) == "");
}

TEST_CASE("checkpoint: a NaN in the LM head is found") {
  const TempDir dir;
  Model model(small_model());
  static_cast<f16*>(const_cast<void*>(model.tensor("embed_out.weight").data))[30] = f16{0x7e00};
  write_checkpoint(dir.path(), model.config, model.shards(1));
  const auto checkpoint = Checkpoint::open(dir.path());
  const auto loaded = checkpoint->model();
  REQUIRE(loaded.status().message() == "");
  CHECK(refusal_fault(checkpoint->check_finite(*loaded), Code::invalid_file,
                      {"'embed_out.weight': element (1, 6)", "NaN"}) == "");
}

TEST_CASE("checkpoint: a shard is mapped once, from whatever thread") {
  const TempDir dir;
  const Model model(small_model());
  write_checkpoint(dir.path(), model.config, model.shards(2));
  const auto checkpoint = Checkpoint::open(dir.path());
  REQUIRE(checkpoint.status().message() == "");
  std::vector<std::future<Result<CheckpointLayer>>> loads;
  for (int i = 0; i < 8; ++i)
    loads.push_back(std::async(std::launch::async, [&, i] { return checkpoint->layer(i % 3); }));
  std::set<const SafetensorsFile*> files;
  for (int i = 0; i < 8; ++i) {
    const auto layer = loads[std::size_t(i)].get();
    REQUIRE(layer.status().message() == "");
    for (const auto& file : layer->storage->files) files.insert(file.get());
    CHECK(weights_checksum(model.config, layer->weights) ==
          weights_checksum(model.config, model.layers[std::size_t(i % 3)].weights));
  }
  CHECK(files.size() == 2);
}

TEST_CASE("checkpoint: every model in data/ loads whole") {
  std::size_t models = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(CF_DATA_DIR) + "/checkpoints")) {
    const auto checkpoint = Checkpoint::open(entry.path().string());
    REQUIRE(checkpoint.status().message() == "");
    const auto loaded = checkpoint->model();
    REQUIRE(loaded.status().message() == "");
    CHECK(checkpoint->check_finite(*loaded).message() == "");
    for (std::size_t i = 0; i < loaded->weights.layers.size(); ++i) {
      const auto layer = checkpoint->layer(std::int64_t(i));
      REQUIRE(layer.status().message() == "");
      CHECK(weights_checksum(checkpoint->config(), layer->weights) ==
            weights_checksum(checkpoint->config(), loaded->weights.layers[i]));
    }
    ++models;
  }
  CHECK(models >= 10);
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
  write_file(dir / "gptq_model-4bit-128g.safetensors", "");
  CHECK(refusal(dir.path(), Code::not_found,
                {dir.path() + ": holds 'gptq_model-4bit-128g.safetensors', expected model.safetensors or " + kIndex}) ==
        "");
  std::filesystem::remove(dir / "gptq_model-4bit-128g.safetensors");
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
      {"", {"is empty", "expected a JSON object"}},
      {lfs_pointer(3508), {"git-lfs pointer to a file of 3508 bytes", "git lfs pull"}},
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

TEST_CASE("checkpoint: a download that ended early") {
  const TempDir dir;
  const Model model(small_model());
  write_checkpoint(dir.path(), model.config, model.shards(3));
  const std::string shard = dir / shard_name(1, 3);
  const std::uintmax_t whole = std::filesystem::file_size(shard);
  for (const std::uintmax_t size : {whole - 1, whole / 2, std::uintmax_t{100}, std::uintmax_t{0}}) {
    CAPTURE(size);
    std::filesystem::resize_file(shard, size);
    CHECK(refusal_fault(layer_status(dir.path()), Code::invalid_file,
                        {shard + ": truncated: ", "the file has " + std::to_string(size)}) == "");
    if (size > 100)
      CHECK(refusal_fault(layer_status(dir.path()), Code::invalid_file,
                          {"the header asks for " + std::to_string(whole) + " bytes"}) == "");
  }
}

TEST_CASE("checkpoint: files that git-lfs has not fetched") {
  const TempDir dir;
  const Model model(small_model());
  write_checkpoint(dir.path(), model.config, model.shards(2));
  const auto pointer_fault = [&](const std::string& name) {
    const std::string path = dir / name;
    const std::string whole = std::filesystem::exists(path) ? read_file(path) : "";
    write_file(path, lfs_pointer(4831838208));
    const Status s = layer_status(dir.path());
    if (!whole.empty()) write_file(path, whole);
    if (whole.empty()) std::filesystem::remove(path);
    return refusal_fault(s, Code::invalid_file, {path + ": is a git-lfs pointer", "4831838208 bytes", "git lfs pull"});
  };
  for (const std::string& name :
       {std::string("config.json"), std::string("quantize_config.json"), kIndex, shard_name(0, 2), shard_name(1, 2)}) {
    CAPTURE(name);
    CHECK(pointer_fault(name) == "");
  }
  CHECK(layer_status(dir.path()).message() == "");
}

TEST_CASE("checkpoint: weights that are NaN or infinite") {
  const DType dtype = GENERATE(DType::f16, DType::bf16, DType::f32);
  const std::size_t shift = GENERATE(0, 1);
  CAPTURE(to_string(dtype), shift);
  const TempDir dir;
  Model model(small_model(dtype));
  const auto check = [&] {
    write_checkpoint(dir.path(), model.config, model.shards(2), shift);
    auto checkpoint = Checkpoint::open(dir.path());
    const auto layer = checkpoint->layer(1);
    REQUIRE(layer.status().message() == "");
    return checkpoint->check_finite(*layer);
  };
  CHECK(check().message() == "");

  const auto set = [&](const std::string& name, std::int64_t element, double value) {
    const StoredTensor& t = model.tensor(name);
    convert(&value, DType::f64,
            static_cast<char*>(const_cast<void*>(t.data)) + element * std::int64_t(size_bytes(dtype)), dtype, 1);
  };
  // The largest finite number is one.
  const double largest = dtype == DType::f16 ? 65504 : dtype == DType::bf16 ? 0x1.fep127 : 0x1.fffffep127;
  const std::string weight = "gpt_neox.layers.1.attention.dense.weight",
                    bias = "gpt_neox.layers.1.mlp.dense_4h_to_h.bias";
  set(weight, 0, largest);
  set(weight, 1, -largest);
  CHECK(check().message() == "");

  constexpr double infinity = std::numeric_limits<double>::infinity();
  set(bias, 23, -infinity);
  CHECK(refusal_fault(check(), Code::invalid_file,
                      {dir.path(), ".safetensors: tensor '" + bias +
                                       "': element (23): expected a finite number, got "
                                       "infinity; 1 of 24 elements are not finite"}) == "");
  set(weight, 24 * 3 + 5, std::numeric_limits<double>::quiet_NaN());
  set(weight, 24 * 3 + 6, infinity);
  set(weight, 575, infinity);
  CHECK(refusal_fault(check(), Code::invalid_file,
                      {dir.path(), ".safetensors: tensor '" + weight +
                                       "': element (3, 5): expected a finite number, "
                                       "got NaN; 3 of 576 elements are not finite"}) == "");
  // The other layers are whole.
  auto checkpoint = Checkpoint::open(dir.path());
  CHECK(checkpoint->check_finite(*checkpoint->layer(0)).message() == "");
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
  // These read every byte of the layer.
  CHECK(weights_checksum(m, layer->weights) != 0);
  CHECK(checkpoint->check_finite(*layer).message() == "");
  REQUIRE(before_bytes > 0);
  if (!kShadowMemory) {
    CHECK(opened_bytes - before_bytes < 50e6);
    CHECK(status_bytes("VmRSS") < most_bytes);
    CHECK(status_bytes("VmHWM") < most_bytes);
  }
}

namespace {

constexpr const char* kGated = CF_DATA_DIR "/checkpoints/llama-gqa8";
constexpr const char* kGatedGptq = CF_DATA_DIR "/checkpoints/llama-gptq-desc-act";

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A checkpoint of data/ in memory, whose tensors a test changes.
struct InMemory {
  std::string directory;
  std::shared_ptr<const SafetensorsFile> file;
  std::vector<TensorEntry> tensors;

  explicit InMemory(const std::string& from) : directory(from) {
    auto opened = SafetensorsFile::open(from + "/model.safetensors");
    REQUIRE(opened);
    file = std::make_shared<const SafetensorsFile>(std::move(*opened));
    tensors.assign(file->tensors().begin(), file->tensors().end());
  }
  TensorEntry& tensor(const std::string& name) {
    const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const auto& t) { return t.name == name; });
    REQUIRE(found != tensors.end());
    return *found;
  }
  /// Layer 0, with another quantize_config.json than the directory's where one is given.
  Result<CheckpointLayer> layer(std::optional<std::string> gptq = std::nullopt) const {
    CF_TRY_ASSIGN(const Checkpoint opened,
                  Checkpoint::from_memory(text_of(directory + "/config.json"), gptq, tensors, file, "memory"));
    CF_TRY_ASSIGN(CheckpointLayer layer, opened.layer(0));
    CF_TRY(opened.check_finite(layer));
    return layer;
  }
};

}  // namespace

TEST_CASE("checkpoint: q, k and v lie one below the other, gate's and up's rows in turn") {
  InMemory m(kGated);
  const auto layer = m.layer();
  INFO(layer.status().message());
  REQUIRE(layer);
  const auto is_row = [&](const LinearParams& joined, std::int64_t row, const char* module, std::int64_t of) {
    const ConstAnyView<2>& w = std::get<DenseWeight>(joined.weight).weight;
    const TensorEntry& part = m.tensor("model.layers.0." + std::string(module) + ".weight");
    const std::size_t bytes = std::size_t(part.bytes / part.shape[0]);
    return std::memcmp(static_cast<const char*>(w.data) + std::size_t(row) * bytes,
                       static_cast<const char*>(part.data) + std::size_t(of) * bytes, bytes) == 0;
  };
  const LinearParams &qkv = layer->weights.query_key_value, &mlp = layer->weights.dense_h_to_4h;
  int wrong = 0;
  for (std::int64_t i = 0; i < 512; ++i) wrong += !is_row(qkv, i, "self_attn.q_proj", i);
  for (std::int64_t i = 0; i < 64; ++i)
    wrong += !is_row(qkv, 512 + i, "self_attn.k_proj", i) + !is_row(qkv, 576 + i, "self_attn.v_proj", i);
  for (std::int64_t i = 0; i < 48; ++i)
    wrong += !is_row(mlp, 2 * i, "mlp.gate_proj", i) + !is_row(mlp, 2 * i + 1, "mlp.up_proj", i);
  CHECK(wrong == 0);
  // A matrix that is stored as the walk has it stays where it is.
  CHECK(std::get<DenseWeight>(layer->weights.dense.weight).weight.data ==
        m.tensor("model.layers.0.self_attn.o_proj.weight").data);
}

TEST_CASE("checkpoint: a part of a joined Linear that is missing, misshapen or not finite is named") {
  InMemory missing(kGated);
  std::erase_if(missing.tensors, [](const TensorEntry& t) { return t.name.ends_with("v_proj.weight"); });
  CHECK(refusal_fault(missing.layer().status(), Code::not_found, {"self_attn.v_proj.weight"}) == "");

  InMemory shape(kGated);
  std::swap(shape.tensor("model.layers.0.self_attn.q_proj.weight").data,
            shape.tensor("model.layers.0.self_attn.k_proj.weight").data);
  std::swap(shape.tensor("model.layers.0.self_attn.q_proj.weight").shape,
            shape.tensor("model.layers.0.self_attn.k_proj.weight").shape);
  CHECK(refusal_fault(shape.layer().status(), Code::invalid_file,
                      {"self_attn.q_proj.weight", "expected shape (512, 32)", "got (64, 32)"}) == "");

  InMemory nan(kGated);
  TensorEntry& up = nan.tensor("model.layers.0.mlp.up_proj.weight");
  std::vector<float> changed(static_cast<const float*>(up.data), static_cast<const float*>(up.data) + up.bytes / 4);
  changed[3 * 32 + 5] = std::numeric_limits<float>::quiet_NaN();
  up.data = changed.data();
  CHECK(refusal_fault(nan.layer().status(), Code::invalid_file, {"mlp.up_proj.weight", "(3, 5)", "NaN"}) == "");
}

TEST_CASE("checkpoint: quantised Linears that cannot be joined are refused by name") {
  InMemory m(kGatedGptq);
  REQUIRE(m.layer());
  TensorEntry& g_idx = m.tensor("model.layers.0.self_attn.k_proj.g_idx");
  std::vector<std::int32_t> other(static_cast<const std::int32_t*>(g_idx.data),
                                  static_cast<const std::int32_t*>(g_idx.data) + g_idx.shape[0]);
  std::reverse(other.begin(), other.end());
  g_idx.data = other.data();
  CHECK(refusal_fault(m.layer().status(), Code::unimplemented,
                      {"self_attn.q_proj and self_attn.k_proj have different g_idx"}) == "");

  InMemory mixed(kGatedGptq);
  const std::string config = R"({"bits":4,"group_size":16,"sym":false,"modules_in_block_to_quantize":)"
                             R"([["self_attn.q_proj","self_attn.v_proj","mlp.down_proj"]]})";
  CHECK(refusal_fault(mixed.layer(config).status(), Code::invalid_file,
                      {"self_attn.k_proj.qweight", "modules_in_block_to_quantize", "joined"}) == "");
  const std::string unknown = R"({"bits":4,"modules_in_block_to_quantize":[["attention.dense"]]})";
  CHECK(refusal_fault(mixed.layer(unknown).status(), Code::invalid_file, {"'attention.dense'", "self_attn.q_proj"}) ==
        "");
}
