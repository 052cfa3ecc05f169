// Golden files, written and read back: the bits, the state they fill, and every refusal.
#include <hdf5.h>
#include <signal.h>
#include <sys/resource.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <random>

#include "core/resources.hpp"
#include "tests/golden/golden_sample.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;
using golden::GoldenFile;
using golden::GoldenMeta;
using golden::GoldenWriter;

namespace {

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(a.data(), b.data(), std::size_t(a.size_bytes())) == 0;
}

/// Every 16-bit pattern, NaNs and subnormals among them, as the dtype's elements.
Tensor all_patterns(DType dtype) {
  Tensor t(dtype, {65536 * 2 / std::int64_t(size_bytes(dtype))});
  for (int i = 0; i < 65536; ++i) t.as<std::uint16_t>()[i] = std::uint16_t(i);
  return t;
}

/// Writes a changed sample and opens it.
Status open_changed(const std::function<void(GoldenSample&)>& change, const SampleOptions& options = {}) {
  const TempDir dir;
  GoldenSample s = make_sample(options);
  change(s);
  check_ok(write_sample(s, dir / "x.h5"));
  return GoldenFile::open(dir / "x.h5").status();
}

/// A file that HDF5 itself wrote, changed by f, and sealed.
void make_hdf5(const std::string& path, const std::function<void(hid_t)>& f) {
  check_ok(write_sample(make_sample(), path));
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
  REQUIRE(file >= 0);
  f(file);
  REQUIRE(H5Fclose(file) >= 0);
  std::string bytes = read_file(path);
  seal(bytes);
  write_file(path, bytes);
}

/// Adds a string attribute, of variable length or padded with `padding`.
void put_text(hid_t file, const char* name, const char* value, bool is_variable, H5T_str_t padding = H5T_STR_NULLPAD) {
  if (H5Aexists(file, name) > 0) H5Adelete(file, name);
  const hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
  H5Tset_size(type, is_variable ? H5T_VARIABLE : std::strlen(value));
  if (!is_variable) H5Tset_strpad(type, padding);
  const hid_t id = H5Acreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
  REQUIRE(H5Awrite(id, type, is_variable ? static_cast<const void*>(&value) : value) >= 0);
  H5Aclose(id);
  H5Sclose(space);
  H5Tclose(type);
}

/// Puts a dataset, without data, in the place of another if there is one.
void put_dataset(
    hid_t file, const char* name, hid_t type, std::vector<hsize_t> dims,
    const std::function<void(hid_t)>& change_creation = [](hid_t) {}) {
  if (H5Lexists(file, name, H5P_DEFAULT) > 0) H5Ldelete(file, name, H5P_DEFAULT);
  const hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
  change_creation(creation);
  const hid_t space = H5Screate_simple(int(dims.size()), dims.data(), nullptr);
  const hid_t id = H5Dcreate2(file, name, type, space, H5P_DEFAULT, creation, H5P_DEFAULT);
  REQUIRE(id >= 0);
  H5Dclose(id);
  H5Sclose(space);
  H5Pclose(creation);
}

}  // namespace

TEST_CASE("a golden file keeps every bit of every dtype") {
  const DType dtype = GENERATE(DType::f16, DType::bf16, DType::f32);
  const TempDir dir;
  GoldenSample s = make_sample({.dtype = dtype});
  for (DType d : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32})
    s.taps["float16_eager"]["hf.patterns_" + std::string(to_string(d))] = all_patterns(d);
  s.taps["float16_eager"]["hf.empty"] = Tensor(DType::f32, {0, 3});
  check_ok(write_sample(s, dir / "x.h5"));

  const auto file = GoldenFile::open(dir / "x.h5");
  CAPTURE(file.status().message());
  REQUIRE(file);
  for (const auto& [name, tensor] : s.inputs) {
    CAPTURE(name);
    CHECK(same_bits(*file->input(name), tensor));
  }
  std::size_t taps = 0;
  for (const auto& variant : file->variants())
    for (const std::string& tap : variant.taps) {
      CAPTURE(variant.name, tap);
      CHECK(same_bits(*file->tap(variant.name, tap), s.taps.at(variant.name).at(tap)));
      ++taps;
    }
  CHECK(taps == s.taps["float64"].size() + s.taps["float16_eager"].size());

  const auto weights = file->weights();
  REQUIRE(weights);
  CHECK(weights->dtype == dtype);
  for_each_weight(s.meta.config, weights->weights, [&](const TensorSpec& t, const auto& view, auto) {
    const Tensor& stored = s.weights.at(std::string(t.name));
    CHECK(std::memcmp(view.data, stored.data(), std::size_t(stored.size_bytes())) == 0);
  });
}

TEST_CASE("a golden file keeps its attributes") {
  const TempDir dir;
  const GoldenSample s = make_sample({.cache = "procedural", .weights = "procedural", .parallel_residual = false});
  check_ok(write_sample(s, dir / "x.h5"));
  const auto file = GoldenFile::open(dir / "x.h5");
  REQUIRE(file);
  const GoldenMeta &m = file->meta(), &e = s.meta;
  CHECK(m.producer == e.producer);
  CHECK(m.command == e.command);
  CHECK(m.versions == e.versions);
  CHECK(m.model == "small");
  CHECK(m.config.hidden_size == 32);
  CHECK(m.config.rotary_dim == 4);
  CHECK_FALSE(m.config.use_parallel_residual);
  CHECK(m.layer == 1);
  CHECK(m.dtype == DType::f16);
  CHECK(m.config.dtype == DType::f16);
  CHECK(m.seed == e.seed);
  CHECK(m.load.batch == 2);
  CHECK(m.load.q_len == 1);
  CHECK(m.load.kv_len == 5);
  CHECK(m.kv_len == e.kv_len);
  CHECK(m.cache == "procedural");
  CHECK(m.cache_checksum == e.cache_checksum);
  CHECK(m.weights == "procedural");
  CHECK(m.weights_checksum == e.weights_checksum);
  REQUIRE(file->variants().size() == 2);
  CHECK(file->variants()[0].name == "float16_eager");
  CHECK(file->variants()[0].dtype == "float16");
  CHECK(file->variants()[0].attn_implementation == "eager");
  CHECK(file->variants()[1].device == "cpu");
}

TEST_CASE("the same content gives the same bytes") {
  const TempDir dir;
  const GoldenSample s = make_sample();
  check_ok(write_sample(s, dir / "a.h5"));
  check_ok(write_sample(s, dir / "b.h5"));
  CHECK(read_file(dir / "a.h5") == read_file(dir / "b.h5"));
}

TEST_CASE("load fills what the layer reads, and NaN where it must not look") {
  const std::string cache = GENERATE("random", "procedural");
  const std::int64_t q_len = GENERATE(1, 2);
  const TempDir dir;
  const GoldenSample s = make_sample({.cache = cache, .q_len = q_len, .kv_len = {7, 2, 4}});
  check_ok(write_sample(s, dir / "x.h5"));
  const auto file = GoldenFile::open(dir / "x.h5");
  REQUIRE(file);
  Workload load = file->meta().load;
  load.capacity = 9;
  LayerState state(file->meta().config, load, DType::f32);
  check_ok(file->load(state));

  CHECK(state.tensors().max_kv_len == 7);
  CHECK(same_bits(state.hidden, s.inputs.at("hidden").converted(DType::f32)));
  CHECK(same_bits(state.kv_len, s.inputs.at("kv_len")));
  CHECK(same_bits(state.positions, s.inputs.at("positions")));
  const std::int64_t rows = 7 - q_len, heads = 4, d = 8;
  for (const char* name : {"k_cache", "v_cache"}) {
    const auto stored = file->input(name);
    REQUIRE(stored);
    const Tensor &old = *stored, &filled = name[0] == 'k' ? state.k_cache : state.v_cache;
    CHECK(same_bits(old, procedural_tensor(DType::f16, {3, heads, rows, d}, name, s.meta.seed)));
    for (std::int64_t i = 0; i < filled.size(); ++i) {
      const std::int64_t element = i % d, entry = i / d % 9, head = i / d / 9 % heads, b = i / d / 9 / heads;
      const double x = filled.at(i);
      if (entry < s.meta.kv_len[std::size_t(b)] - q_len)
        CHECK(x == old.at(((b * heads + head) * rows + entry) * d + element));
      else
        CHECK(std::isnan(x));
    }
  }
  // Only the rows at the tokens' positions are there, in a table for the cache's entries.
  REQUIRE(state.cos.shape() == Shape{9, 2});
  std::vector<bool> used(9);
  for (std::int64_t t = 0; t < state.positions.size(); ++t) {
    const std::int32_t p = state.positions.as<std::int32_t>()[t];
    used[std::size_t(p)] = true;
    CHECK(state.cos.as<float>()[2 * p] == s.inputs.at("cos").as<float>()[2 * t]);
    CHECK(state.sin.as<float>()[2 * p + 1] == s.inputs.at("sin").as<float>()[2 * t + 1]);
  }
  for (int p = 0; p < 9; ++p)
    if (!used[std::size_t(p)]) CHECK(std::isnan(state.cos.as<float>()[2 * p]));

  ModelConfig other = file->meta().config;
  other.hidden_size = 64;
  LayerState misfit(other, file->meta().load, DType::f32);
  CHECK(refusal_fault(file->load(misfit), Code::invalid_argument, {"x.h5", "state"}) == "");
}

TEST_CASE("a first token needs no cache in the file") {
  const std::string cache = GENERATE("none", "random", "procedural");
  const TempDir dir;
  const GoldenSample s = make_sample({.cache = cache, .q_len = 3, .kv_len = {3, 3}});
  CHECK(s.inputs.count("k_cache") == 0);
  check_ok(write_sample(s, dir / "x.h5"));
  const auto file = GoldenFile::open(dir / "x.h5");
  CAPTURE(file.status().message());
  REQUIRE(file);
  CHECK(file->input("k_cache")->shape() == Shape{2, 4, 0, 8});
  LayerState state(file->meta().config, file->meta().load, DType::f64);
  CHECK(file->load(state));
}

TEST_CASE("weights of each source are the layer's, and damage is refused") {
  const TempDir dir;
  const std::string source = GENERATE("stored", "procedural");
  GoldenSample s = make_sample({.weights = source});
  check_ok(write_sample(s, dir / "x.h5"));
  const auto weights = GoldenFile::open(dir / "x.h5")->weights();
  REQUIRE(weights);
  CHECK(weights_checksum(s.meta.config, weights->weights) == s.meta.weights_checksum);

  s.meta.weights_checksum += 1;
  check_ok(write_sample(s, dir / "y.h5"));
  const auto wrong = GoldenFile::open(dir / "y.h5");
  REQUIRE(wrong);
  CHECK(refusal_fault(wrong->weights().status(), Code::invalid_file,
                      {"y.h5", "weights_checksum", std::to_string(s.meta.weights_checksum),
                       std::to_string(s.meta.weights_checksum - 1)}) == "");
  CHECK(refusal_fault(wrong->weights(dir / "nowhere").status(), Code::not_found, {"nowhere"}) == "");
}

TEST_CASE("stored weights of a family that stores them in parts are joined, as a checkpoint's are") {
  const std::string data = CF_DATA_DIR;
  const auto file = GoldenFile::open(data + "/golden/llama-gqa1-biases-stored.h5");
  REQUIRE(file);
  const GoldenMeta& m = file->meta();
  const auto stored = file->weights(), loaded = file->weights(data + "/checkpoints/llama-gqa1-biases");
  CAPTURE(stored.status().message(), loaded.status().message());
  REQUIRE(stored);
  REQUIRE(loaded);
  std::map<std::string, Tensor> joined;
  for_each_weight(m.config, stored->weights, [&](const TensorSpec& t, const auto& view, const auto& shape) {
    Tensor copy(m.dtype, Shape(shape.begin(), shape.end()));
    std::memcpy(copy.data(), view.data, std::size_t(view.bytes()));
    joined[std::string(t.name)] = std::move(copy);
  });
  std::size_t tensors = 0;
  for_each_weight(m.config, loaded->weights, [&](const TensorSpec& t, const auto& view, const auto&) {
    CAPTURE(t.name);
    CHECK(std::memcmp(view.data, joined.at(std::string(t.name)).data(), std::size_t(view.bytes())) == 0);
    ++tensors;
  });
  CHECK(tensors == 10);  // two norms, four Linears with their biases

  // The same weights by the walk's names, and without one part of a Linear.
  const auto written = [&](const std::string& path, const std::map<std::string, Tensor>& weights) {
    auto writer = GoldenWriter::create(path, m);
    REQUIRE(writer);
    for (const char* input : {"hidden", "kv_len", "positions", "cos", "sin", "k_cache", "v_cache"})
      check_ok(writer->add_input(input, *file->input(input)));
    for (const auto& [name, tensor] : weights) check_ok(writer->add_weight(name, tensor));
    for (const golden::VariantInfo& v : file->variants())
      check_ok(writer->add_tap(v, "output", *file->tap(v.name, "output")));
    check_ok(writer->commit());
    return GoldenFile::open(path);
  };
  const TempDir dir;
  const auto whole = written(dir / "whole.h5", joined);
  REQUIRE(whole);
  CHECK(whole->weights().status().message() == "");
  joined.erase("self_attn.qkv_proj.bias");
  CHECK(refusal_fault(written(dir / "x.h5", joined).status(), Code::not_found,
                      {"x.h5", "/weights/self_attn.q_proj.bias", "missing"}) == "");
  joined["self_attn.q_proj.bias"] = Tensor(m.dtype, {3});
  CHECK(refusal_fault(written(dir / "y.h5", joined).status(), Code::invalid_file,
                      {"y.h5", "/weights/self_attn.q_proj.bias", "got " + std::string(to_string(m.dtype)) + " (3)"}) ==
        "");
}

TEST_CASE("a step's memory does not grow with the positions that the model has") {
  GoldenSample s = make_sample();
  const double few = LayerState::bytes(s.meta.config, s.meta.load, DType::f64);
  s.meta.config.max_position_embeddings = 1 << 26;
  CHECK(LayerState::bytes(s.meta.config, s.meta.load, DType::f64) == few);
  const TempDir dir;
  check_ok(write_sample(s, dir / "x.h5"));
  const auto file = GoldenFile::open(dir / "x.h5");
  REQUIRE(file);
  LayerState state(file->meta().config, file->meta().load, DType::f64);
  CHECK(state.cos.shape() == Shape{5, 2});
  CHECK(file->load(state).message() == "");
  // A position that the cache has no entry for has no row.
  s.inputs["positions"].as<std::int32_t>()[1] = 5;
  check_ok(write_sample(s, dir / "y.h5"));
  CHECK(refusal_fault(GoldenFile::open(dir / "y.h5")->load(state), Code::invalid_file,
                      {"y.h5: /inputs/positions[1]: expected a position of the cache's entries, below 5, got 5"}) ==
        "");
}

TEST_CASE("procedural weights and caches that the free memory does not hold are refused") {
  GoldenSample s = make_sample({.dtype = DType::f32, .cache = "procedural", .weights = "procedural"});
  s.weights.clear();
  ModelConfig& m = s.meta.config;
  const TempDir dir;
  SECTION("weights") {
    m.hidden_size = 1020;
    m.intermediate_size = 1 << 22;
    s.inputs["hidden"] = Tensor(DType::f32, {2, 1020});
    s.taps.clear();
    s.taps["float64"]["hf.more"] = Tensor(DType::f64, {1});
    check_ok(write_sample(s, dir / "x.h5"));
    const auto file = GoldenFile::open(dir / "x.h5");
    REQUIRE(file);
    if (free_memory_bytes() < 34e9)
      CHECK(refusal_fault(file->weights().status(), Code::out_of_memory,
                          {"x.h5", "the procedural weights need 34.26 GB", "memory that are free"}) == "");
  }
  SECTION("cache") {
    m.max_position_embeddings = 1 << 26;
    const std::int32_t longest = (1 << 26) - 7;
    s.meta.kv_len[0] = s.inputs["kv_len"].as<std::int32_t>()[0] = longest;
    s.meta.load.kv_len = longest;
    s.inputs["positions"].as<std::int32_t>()[0] = longest - 1;
    check_ok(write_sample(s, dir / "x.h5"));
    const auto file = GoldenFile::open(dir / "x.h5");
    REQUIRE(file);
    if (free_memory_bytes() < 34e9)
      CHECK(refusal_fault(file->input("k_cache").status(), Code::out_of_memory,
                          {"x.h5", "the procedural cache needs 34.36 GB"}) == "");
  }
}

TEST_CASE("a checkpoint's weights are found beside the file") {
  const TempDir dir;
  GoldenSample s = make_sample({.weights = "checkpoint"});
  s.meta.weights_checkpoint = "../absent";
  std::filesystem::create_directory(dir / "goldens");
  check_ok(write_sample(s, dir / "goldens/x.h5"));
  const auto file = GoldenFile::open(dir / "goldens/x.h5");
  REQUIRE(file);
  CHECK(file->meta().weights_checkpoint == "../absent");
  CHECK(refusal_fault(file->weights().status(), Code::not_found, {"goldens/../absent"}) == "");
}

TEST_CASE("a procedural cache that does not match its checksum is refused") {
  const TempDir dir;
  GoldenSample s = make_sample({.cache = "procedural"});
  s.meta.cache_checksum ^= 4;
  check_ok(write_sample(s, dir / "x.h5"));
  const auto file = GoldenFile::open(dir / "x.h5");
  REQUIRE(file);
  const Status status = file->input("v_cache").status();
  CHECK(refusal_fault(status, Code::invalid_file, {"x.h5", "cache_checksum", "expected", "got"}) == "");
  LayerState state(file->meta().config, file->meta().load, DType::f32);
  CHECK(file->load(state).message() == status.message());
}

TEST_CASE("content against the schema is refused by name") {
  using Change = std::function<void(GoldenSample&)>;
  struct Case {
    const char* what;
    Change change;
    Code code;
    std::vector<std::string_view> parts;
  };
  const auto input = [](const char* name, DType dtype, Shape shape) -> Change {
    return [=](GoldenSample& s) { s.inputs[name] = Tensor(dtype, shape); };
  };
  const auto element = [](const char* name, std::int64_t i, std::int32_t value) -> Change {
    return [=](GoldenSample& s) { s.inputs[name].as<std::int32_t>()[i] = value; };
  };
  const Case cases[] = {
      {"no hidden", [](auto& s) { s.inputs.erase("hidden"); }, Code::not_found, {"/inputs/hidden", "missing"}},
      {"no kv_len", [](auto& s) { s.inputs.erase("kv_len"); }, Code::not_found, {"/inputs/kv_len", "missing"}},
      {"no sin", [](auto& s) { s.inputs.erase("sin"); }, Code::not_found, {"/inputs/sin", "missing"}},
      {"no cache", [](auto& s) { s.inputs.erase("v_cache"); }, Code::not_found, {"/inputs/v_cache", "missing"}},
      {"hidden's shape",
       input("hidden", DType::f16, {2, 31}),
       Code::invalid_file,
       {"/inputs/hidden", "float16 (2, 32)", "float16 (2, 31)"}},
      {"hidden's dtype",
       input("hidden", DType::f32, {2, 32}),
       Code::invalid_file,
       {"/inputs/hidden", "float16 (2, 32)", "float32 (2, 32)"}},
      {"cos in double", input("cos", DType::f64, {2, 2}), Code::invalid_file, {"/inputs/cos", "float32 (2, 2)"}},
      {"cache's shape",
       input("k_cache", DType::f16, {2, 4, 5, 8}),
       Code::invalid_file,
       {"/inputs/k_cache", "(2, 4, 4, 8)", "(2, 4, 5, 8)"}},
      {"kv_len's count", input("kv_len", DType::i32, {3}), Code::invalid_file, {"/inputs/kv_len", "int32 (2)"}},
      {"kv_len zero", element("kv_len", 1, 0), Code::invalid_file, {"/inputs/kv_len[1]", "1 to 64", "got 0"}},
      {"kv_len beyond", element("kv_len", 0, 65), Code::invalid_file, {"/inputs/kv_len[0]", "1 to 64", "got 65"}},
      {"position beyond", element("positions", 1, 64), Code::invalid_file, {"/inputs/positions[1]", "0 to 63"}},
      {"position before", element("positions", 0, -1), Code::invalid_file, {"/inputs/positions[0]", "got -1"}},
      {"layer", [](auto& s) { s.meta.layer = 2; }, Code::invalid_file, {"'layer'", "0 to 1", "got 2"}},
      {"dtype", [](auto& s) { s.meta.dtype = DType::f64; }, Code::invalid_file, {"'dtype'", "bfloat16", "float64"}},
      {"batch", [](auto& s) { s.meta.load.batch = 0; }, Code::invalid_file, {"'batch'", "got 0"}},
      {"huge batch", [](auto& s) { s.meta.load.batch = 1 << 30; }, Code::invalid_file, {"'batch'", "got 1073741824"}},
      {"q_len", [](auto& s) { s.meta.load.q_len = -3; }, Code::invalid_file, {"'q_len'", "got -3"}},
      {"cache's kind",
       [](auto& s) { s.meta.cache = "frozen"; },
       Code::invalid_file,
       {"'cache'", "prefill, random, procedural, none", "frozen"}},
      {"cache none", [](auto& s) { s.meta.cache = "none"; }, Code::invalid_file, {"kv_len", "'none'", "got 5"}},
      {"weights' kind", [](auto& s) { s.meta.weights = "lost"; }, Code::invalid_file, {"'weights'", "lost"}},
      {"config", [](auto& s) { s.meta.config_json = "{"; }, Code::invalid_file, {"'config'"}},
      {"model_type",
       [](auto& s) { s.meta.config_json = "{\"model_type\": \"gemma\"}"; },
       Code::invalid_file,
       {"'config'", "gemma"}},
      {"a layer too large",
       [](auto& s) {
         s.meta.config.hidden_size = 1 << 17;
         s.meta.config.intermediate_size = 1 << 19;
         s.meta.config.num_attention_heads = 1 << 14;
       },
       Code::invalid_file,
       {"'config'", "2^33"}},
      {"no weight",
       [](auto& s) { s.weights.erase("mlp.dense_4h_to_h.bias"); },
       Code::not_found,
       {"/weights/mlp.dense_4h_to_h.bias", "missing"}},
      {"weight's shape",
       [](auto& s) {
         s.weights["attention.dense.weight"] = Tensor(DType::f16, {32, 31});
       },
       Code::invalid_file,
       {"/weights/attention.dense.weight", "(32, 32)", "(32, 31)"}},
      {"tap's shape",
       [](auto& s) {
         s.taps["float64"]["attention.context"] = Tensor(DType::f64, {2, 32});
       },
       Code::invalid_file,
       {"/taps/float64/attention.context", "(2, 4, 8)", "(2, 32)"}},
      {"tap's dtype",
       [](auto& s) {
         s.taps["float64"]["output"] = Tensor(DType::f32, {2, 32});
       },
       Code::invalid_file,
       {"/taps/float64/output", "float64 (2, 32)", "float32"}},
      {"variant's dtype",
       [](auto& s) { s.variants["float64"].dtype = "int32"; },
       Code::invalid_file,
       {"/taps/float64", "'dtype'", "int32"}},
      {"reference's dtype",
       [](auto& s) {
         s.variants["float64"].dtype = "float32";
         for (auto& [name, tap] : s.taps["float64"]) tap = tap.converted(DType::f32);
       },
       Code::invalid_file,
       {"/taps/float64", "expected float64"}},
      {"no taps", [](auto& s) { s.taps.clear(); }, Code::not_found, {"/taps", "missing"}},
  };
  for (const Case& c : cases) {
    CAPTURE(c.what);
    const Status status = open_changed(c.change);
    CHECK(refusal_fault(status, c.code, {"x.h5: /"}) == "");
    for (std::string_view part : c.parts) CHECK(refusal_fault(status, c.code, {part}) == "");
  }
}

TEST_CASE("what is not in the file is refused when it is asked for") {
  const TempDir dir;
  GoldenSample s = make_sample();
  s.taps["float64"].erase("mlp.act");
  check_ok(write_sample(s, dir / "x.h5"));
  const auto file = GoldenFile::open(dir / "x.h5");
  REQUIRE(file);
  CHECK(refusal_fault(file->tap("float64", "mlp.act").status(), Code::not_found,
                      {"x.h5", "/taps/float64/mlp.act", "missing"}) == "");
  CHECK(refusal_fault(file->tap("float8", "mlp.act").status(), Code::not_found, {"/taps/float8"}) == "");
  CHECK(refusal_fault(file->input("nothing").status(), Code::not_found, {"/inputs/nothing"}) == "");
}

TEST_CASE("rows of one position that differ are refused") {
  const TempDir dir;
  GoldenSample s = make_sample({.kv_len = {5, 5}});
  check_ok(write_sample(s, dir / "same.h5"));
  s.inputs["cos"].as<float>()[3] += 0.5f;
  check_ok(write_sample(s, dir / "x.h5"));
  LayerState state(s.meta.config, s.meta.load, DType::f32);
  CHECK(GoldenFile::open(dir / "same.h5")->load(state));
  CHECK(refusal_fault(GoldenFile::open(dir / "x.h5")->load(state), Code::invalid_file,
                      {"x.h5", "/inputs/cos", "row 1", "position 4"}) == "");
}

TEST_CASE("a file cut anywhere, grown, or with any bit turned is refused") {
  const TempDir dir;
  check_ok(write_sample(make_sample(), dir / "x.h5"));
  const std::string whole = read_file(dir / "x.h5");
  const auto fault = [&](std::string_view bytes, std::initializer_list<std::string_view> parts) {
    write_file(dir / "y.h5", bytes);
    return refusal_fault(GoldenFile::open(dir / "y.h5").status(), Code::invalid_file, parts);
  };
  CHECK(fault("", {"y.h5", "no golden file"}) == "");
  CHECK(fault(whole.substr(0, 7), {"y.h5", "no golden file"}) == "");
  for (std::size_t length : {8, 9, 511}) CHECK(fault(whole.substr(0, length), {"y.h5", "truncated"}) == "");
  for (std::size_t length = 512; length < whole.size(); length += 1 + whole.size() / 211)
    CHECK(fault(whole.substr(0, length), {"y.h5", "truncated", "expected " + std::to_string(whole.size() - 512),
                                          "got " + std::to_string(length - 512)}) == "");
  CHECK(fault(whole.substr(0, whole.size() - 1), {"truncated"}) == "");
  CHECK(fault(whole + '\0', {"extended"}) == "");
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::string damaged = whole;
    damaged[8 + random() % (whole.size() - 8)] ^= char(1 << random() % 8);
    CHECK(fault(damaged, {"y.h5"}) == "");
  }
  CHECK(GoldenFile::open(dir / "x.h5"));
}

TEST_CASE("what is no golden file is refused") {
  const TempDir dir;
  CHECK(refusal_fault(GoldenFile::open(dir / "absent.h5").status(), Code::not_found, {"absent.h5"}) == "");
  CHECK(refusal_fault(GoldenFile::open(dir.path()).status(), Code::invalid_file, {dir.path(), "directory"}) == "");
  CHECK(refusal_fault(GoldenFile::open("/dev/null").status(), Code::invalid_file, {"/dev/null"}) == "");
  std::string text(4096, 'x');
  seal(text);
  write_file(dir / "text.h5", text);
  CHECK(refusal_fault(GoldenFile::open(dir / "text.h5").status(), Code::invalid_file, {"text.h5", "HDF5"}) == "");
}

TEST_CASE("a sealed file of another schema or make is refused") {
  struct Case {
    const char* what;
    std::function<void(hid_t)> change;
    std::vector<std::string_view> parts;
  };
  const auto text = [](const char* name, const char* value) {
    return [=](hid_t file) { put_text(file, name, value, false); };
  };
  const auto integers = [](const char* name, std::vector<std::int64_t> values) {
    return [=](hid_t file) {
      H5Adelete(file, name);
      const hsize_t n = values.size();
      const hid_t space = n == 1 ? H5Screate(H5S_SCALAR) : H5Screate_simple(1, &n, nullptr);
      const hid_t id = H5Acreate2(file, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT);
      H5Awrite(id, H5T_NATIVE_INT64, values.data());
      H5Aclose(id);
      H5Sclose(space);
    };
  };
  const auto dataset = [](hid_t type, std::vector<hsize_t> dims) {
    return [=](hid_t file) { put_dataset(file, "inputs/hidden", type, dims); };
  };
  const auto moved = [](const std::function<void(hid_t)>& link) {
    return [=](hid_t file) {
      H5Lmove(file, "inputs/hidden", file, "elsewhere", H5P_DEFAULT, H5P_DEFAULT);
      link(file);
    };
  };
  const Case cases[] = {
      {"version 0", integers("schema_version", {0}), {"'schema_version'", "1 to 2", "got 0"}},
      {"version 3", integers("schema_version", {3}), {"'schema_version'", "1 to 2", "got 3"}},
      {"a list of versions", integers("schema_version", {1, 1}), {"'schema_version'", "one integer"}},
      {"a version in words", text("schema_version", "one"), {"'schema_version'", "one integer"}},
      {"another schema", text("schema", "other"), {"'schema'", "cf-golden", "other"}},
      {"a schema by number", integers("schema", {1}), {"'schema'", "one string"}},
      {"a negative seed", integers("seed", {-1}), {"'seed'", "unsigned", "-1"}},
      {"no seed", [](hid_t file) { H5Adelete(file, "seed"); }, {"'seed'", "missing"}},
      {"big-endian", dataset(H5T_IEEE_F32BE, {2, 32}), {"/inputs/hidden", "little-endian"}},
      {"unsigned without its mark", dataset(H5T_STD_U16LE, {2, 32}), {"/inputs/hidden", "bfloat16"}},
      {"strings", dataset(H5T_C_S1, {2, 32}), {"/inputs/hidden", "little-endian"}},
      {"a string of variable length in schema 2",
       [](hid_t file) { put_text(file, "model", "small", true); },
       {"'model'", "fixed length in schema 2", "variable"}},
      {"a string padded with spaces",
       [](hid_t file) { put_text(file, "model", "small", false, H5T_STR_SPACEPAD); },
       {"'model'", "one string"}},
      {"a number that is no integer",
       [](hid_t file) {
         const hid_t space = H5Screate(H5S_SCALAR);
         H5Aclose(H5Acreate2(file, "epsilon", H5T_IEEE_F64LE, space, H5P_DEFAULT, H5P_DEFAULT));
         H5Sclose(space);
       },
       {"'epsilon'", "one string or one integer"}},
      {"a shape without data", dataset(H5T_IEEE_F32LE, {2, 32}), {"/inputs/hidden", "needs 256 bytes", "got 0"}},
      {"a huge shape", dataset(H5T_IEEE_F32LE, {1ull << 28, 1ull << 28}), {"/inputs/hidden", "in the file"}},
      {"a shape beyond 64 bits",
       [](hid_t file) {
         put_dataset(file, "inputs/hidden", H5T_IEEE_F32LE, {1ull << 40, 1ull << 20, 1ull << 20}, [](hid_t creation) {
           const hsize_t chunk[] = {1, 1, 1};
           H5Pset_chunk(creation, 3, chunk);
         });
       },
       {"/inputs/hidden", "64 bits"}},
      {"chunks",
       [](hid_t file) {
         put_dataset(file, "inputs/hidden", H5T_IEEE_F32LE, {2, 32}, [](hid_t creation) {
           const hsize_t chunk[] = {1, 32};
           H5Pset_chunk(creation, 2, chunk);
         });
       },
       {"/inputs/hidden", "contiguous in this file"}},
      {"a filter",
       [](hid_t file) {
         put_dataset(file, "inputs/hidden", H5T_IEEE_F32LE, {2, 32}, [](hid_t creation) {
           const hsize_t chunk[] = {1, 32};
           H5Pset_chunk(creation, 2, chunk);
           H5Pset_shuffle(creation);
         });
       },
       {"/inputs/hidden", "unfiltered in this file"}},
      {"data in the object header",
       [](hid_t file) {
         put_dataset(file, "inputs/hidden", H5T_IEEE_F32LE, {2, 32},
                     [](hid_t creation) { H5Pset_layout(creation, H5D_COMPACT); });
       },
       {"/inputs/hidden", "contiguous in this file"}},
      {"a cycle of groups",
       [](hid_t file) { H5Lcreate_hard(file, "/taps", file, "taps/taps", H5P_DEFAULT, H5P_DEFAULT); },
       {"/taps/taps", "uses twice"}},
      {"a dataset with two names",
       [](hid_t file) { H5Lcreate_hard(file, "inputs/cos", file, "inputs/cosine", H5P_DEFAULT, H5P_DEFAULT); },
       {"/inputs/cosine", "uses twice"}},
      {"groups in groups",
       [](hid_t file) {
         std::string group = "deep";
         for (int i = 0; i < 9; ++i, group += "/deep")
           H5Gclose(H5Gcreate2(file, group.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
       },
       {"/deep/deep", "at most 8 deep"}},
      {"a group of another format",
       [](hid_t file) {
         const hid_t creation = H5Pcreate(H5P_GROUP_CREATE);
         H5Pset_link_creation_order(creation, H5P_CRT_ORDER_TRACKED);
         H5Gclose(H5Gcreate2(file, "new", H5P_DEFAULT, creation, H5P_DEFAULT));
         H5Pclose(creation);
       },
       {"/new", "expected"}},
      {"a type with a name",
       [](hid_t file) {
         const hid_t type = H5Tcopy(H5T_IEEE_F32LE);
         H5Tcommit2(file, "type", type, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
         H5Tclose(type);
       },
       {"/type", "expected a group of symbol tables or a dataset"}},
      {"data in another file",
       [](hid_t file) {
         put_dataset(file, "inputs/hidden", H5T_IEEE_F32LE, {2, 32},
                     [](hid_t creation) { H5Pset_external(creation, "/etc/passwd", 0, 256); });
       },
       {"/inputs/hidden", "in this file"}},
      {"a soft link",
       moved([](hid_t f) { H5Lcreate_soft("/elsewhere", f, "inputs/hidden", H5P_DEFAULT, H5P_DEFAULT); }),
       {"/inputs/hidden", "a link"}},
      {"an external link",
       moved([](hid_t f) { H5Lcreate_external("y.h5", "/elsewhere", f, "inputs/hidden", H5P_DEFAULT, H5P_DEFAULT); }),
       {"/inputs", "expected a group of symbol tables"}},
      {"a group for a dataset",
       moved([](hid_t f) { H5Gclose(H5Gcreate2(f, "inputs/hidden", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT)); }),
       {"/inputs/hidden", "expected a dataset"}},
      {"a dataset for a group",
       [](hid_t file) {
         H5Ldelete(file, "taps", H5P_DEFAULT);
         put_dataset(file, "taps", H5T_IEEE_F32LE, {0});
       },
       {"/taps", "expected a group"}},
  };
  const TempDir dir;
  for (const Case& c : cases) {
    CAPTURE(c.what);
    make_hdf5(dir / "x.h5", c.change);
    const Status status = GoldenFile::open(dir / "x.h5").status();
    REQUIRE_FALSE(status);
    for (std::string_view part : c.parts) CHECK(refusal_fault(status, status.code(), {"x.h5: /", part}) == "");
  }
  for (const H5T_str_t padding : {H5T_STR_NULLPAD, H5T_STR_NULLTERM}) {
    make_hdf5(dir / "x.h5", [&](hid_t file) { put_text(file, "model", "another", false, padding); });
    const auto file = GoldenFile::open(dir / "x.h5");
    REQUIRE(file);
    CHECK(file->meta().model == "another");
  }
}

TEST_CASE("a group of many members is read in the order of names") {
  const TempDir dir;
  GoldenSample s = make_sample();
  // More than one symbol table node, and more than one b-tree node, hold.
  constexpr std::int32_t members = 500;
  for (std::int32_t i = 0; i < members; ++i) {
    Tensor t(DType::i32, {1});
    t.as<std::int32_t>()[0] = i;
    s.taps["float64"]["hf." + std::to_string(10000 + i)] = std::move(t);
  }
  check_ok(write_sample(s, dir / "x.h5"));
  const auto file = GoldenFile::open(dir / "x.h5");
  CAPTURE(file.status().message());
  REQUIRE(file);
  const std::vector<std::string>& taps = file->variants()[1].taps;
  CHECK(taps.size() == s.taps["float64"].size());
  CHECK(std::is_sorted(taps.begin(), taps.end()));
  for (std::int32_t i = 0; i < members; i += 7)
    CHECK(file->tap("float64", "hf." + std::to_string(10000 + i))->as<std::int32_t>()[0] == i);
}

TEST_CASE("HDF5 reads what the writer writes, and finds nothing of variable length") {
  const TempDir dir;
  GoldenSample s = make_sample({.dtype = DType::bf16});
  s.meta.model = "";
  check_ok(write_sample(s, dir / "x.h5"));
  CHECK(GoldenFile::open(dir / "x.h5")->meta().model == "");
  const hid_t file = H5Fopen((dir / "x.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  REQUIRE(file >= 0);
  int texts = 0;
  const auto visit = [](hid_t object, const char* name, const H5O_info_t*, void* count) -> herr_t {
    const hid_t owner = H5Oopen(object, name, H5P_DEFAULT);
    const auto check = [](hid_t at, const char* attribute, const H5A_info_t*, void* texts) -> herr_t {
      const hid_t id = H5Aopen(at, attribute, H5P_DEFAULT), type = H5Aget_type(id);
      CHECK(H5Tis_variable_str(type) == 0);
      if (H5Tget_class(type) == H5T_STRING) ++*static_cast<int*>(texts);
      H5Tclose(type);
      H5Aclose(id);
      return 0;
    };
    H5Aiterate2(owner, H5_INDEX_NAME, H5_ITER_INC, nullptr, check, count);
    H5Oclose(owner);
    return 0;
  };
  REQUIRE(H5Ovisit(file, H5_INDEX_NAME, H5_ITER_INC, visit, &texts) >= 0);
  // Of the file, of two variants, and one for each bfloat16 dataset.
  CHECK(texts == 9 + 2 * 3 + 15);

  const Tensor& k = s.inputs.at("k_cache");
  Tensor got(DType::bf16, k.shape());
  const hid_t dataset = H5Dopen2(file, "inputs/k_cache", H5P_DEFAULT);
  REQUIRE(H5Dread(dataset, H5T_STD_U16LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, got.data()) >= 0);
  CHECK(same_bits(got, k));
  H5Dclose(dataset);
  H5Fclose(file);
}

TEST_CASE("a text that no attribute can hold is refused") {
  const TempDir dir;
  GoldenSample s = make_sample();
  s.meta.command = std::string(65'000, 'x');
  check_ok(write_sample(s, dir / "x.h5"));
  CHECK(GoldenFile::open(dir / "x.h5")->meta().command == s.meta.command);
  s.meta.command += "y";
  CHECK(refusal_fault(write_sample(s, dir / "y.h5"), Code::invalid_argument,
                      {"y.h5", "'command'", "at most 65000 bytes", "got 65001"}) == "");
  s.meta.command = std::string("a\0b", 3);
  CHECK(refusal_fault(write_sample(s, dir / "y.h5"), Code::invalid_argument, {"y.h5", "'command'", "zero byte at 1"}) ==
        "");
  CHECK(entries(dir.path()) == 1);
}

TEST_CASE("texts that attributes share are not copied for each") {
  const TempDir dir;
  make_hdf5(dir / "x.h5", [](hid_t file) {
    put_text(file, "long", std::string(30000, 'A').c_str(), true);
    for (int i = 0; i < 9; ++i) put_text(file, ("t" + std::to_string(i)).c_str(), "A", true);
  });
  std::string bytes = read_file(dir / "x.h5");
  // A text's length, its heap's address and its number there. All become the long one.
  const auto number = [&](std::size_t at, std::size_t count) {
    std::uint64_t value = 0;
    std::memcpy(&value, bytes.data() + at, count);
    return value;
  };
  std::vector<std::size_t> texts;
  for (std::size_t at = 512; at + 16 <= bytes.size(); ++at)
    if (const std::uint64_t heap = number(at + 4, 8);
        number(at, 4) > 0 && heap < bytes.size() - 512 && bytes.compare(512 + heap, 4, "GCOL") == 0)
      texts.push_back(at);
  REQUIRE(texts.size() == 10);
  const std::string longest =
      bytes.substr(*std::ranges::max_element(texts, {}, [&](std::size_t at) { return number(at, 4); }), 16);
  for (std::size_t at : texts) bytes.replace(at, 16, longest);
  seal(bytes);
  write_file(dir / "x.h5", bytes);
  CHECK(refusal_fault(GoldenFile::open(dir / "x.h5").status(), Code::invalid_file,
                      {"x.h5: /attribute 't", "texts of at most " + std::to_string(bytes.size() - 512) + " bytes"}) ==
        "");
}

TEST_CASE("files of schema 1 are read") {
  const std::string old = CF_DATA_DIR "/../tests/golden/schema_1/", checkpoint = CF_DATA_DIR "/checkpoints/neox-bf16";
  SECTION("written by dump_hf.py: the same as the file of schema 2 made of it") {
    const auto a = GoldenFile::open(old + "neox-bf16-kv1-b1.h5");
    const auto b = GoldenFile::open(CF_DATA_DIR "/golden/neox-bf16-kv1-b1.h5");
    CAPTURE(a.status().message());
    REQUIRE(a);
    REQUIRE(b);
    CHECK(a->meta().command == b->meta().command);
    CHECK(a->meta().versions == b->meta().versions);
    CHECK(a->meta().config_json == b->meta().config_json);
    CHECK(a->meta().weights_checksum == b->meta().weights_checksum);
    for (const char* input : {"hidden", "kv_len", "positions", "cos", "sin"}) {
      CAPTURE(input);
      CHECK(same_bits(*a->input(input), *b->input(input)));
    }
    REQUIRE(a->variants().size() == b->variants().size());
    for (std::size_t i = 0; i < a->variants().size(); ++i) {
      const golden::VariantInfo &v = a->variants()[i], &w = b->variants()[i];
      CHECK(v.name == w.name);
      CHECK(v.device == w.device);
      CHECK(v.taps == w.taps);
      for (const std::string& tap : v.taps) CHECK(same_bits(*a->tap(v.name, tap), *b->tap(v.name, tap)));
    }
    CHECK(a->weights(checkpoint).status().message() == "");
  }
  SECTION("written by cf-layer: its checksums hold") {
    const auto file = GoldenFile::open(old + "layer.h5");
    CAPTURE(file.status().message());
    REQUIRE(file);
    CHECK(file->meta().model == "neox-bf16");
    CHECK(file->meta().cache == "procedural");
    CHECK(file->input("k_cache").status().message() == "");
    CHECK(file->weights().status().message() == "");
    REQUIRE(file->variants().size() == 1);
    CHECK(file->variants()[0].taps.size() == 12);
    LayerState state(file->meta().config, file->meta().load, DType::f32);
    CHECK(file->load(state).message() == "");
  }
}

namespace {
int handled = 0;
herr_t handler(hid_t, void*) { return ++handled, 0; }
}  // namespace

TEST_CASE("the caller's HDF5 error handler stays, and is not called") {
  const TempDir dir;
  std::string text(4096, 'x');
  seal(text);
  write_file(dir / "text.h5", text);
  int mark = 0;
  H5E_auto2_t saved = nullptr;
  void* saved_data = nullptr;
  H5Eget_auto2(H5E_DEFAULT, &saved, &saved_data);
  H5Eset_auto2(H5E_DEFAULT, handler, &mark);
  handled = 0;
  CHECK_FALSE(GoldenFile::open(dir / "text.h5"));
  check_ok(write_sample(make_sample(), dir / "x.h5"));
  const auto file = GoldenFile::open(dir / "x.h5");
  CHECK_FALSE(file->tap("float64", "absent"));
  H5E_auto2_t now = nullptr;
  void* data = nullptr;
  H5Eget_auto2(H5E_DEFAULT, &now, &data);
  CHECK(now == handler);
  CHECK(data == &mark);
  CHECK(handled == 0);
  H5Eset_auto2(H5E_DEFAULT, saved, saved_data);
}

TEST_CASE("without a commit nothing is written, and a tap is written once") {
  const TempDir dir;
  const GoldenSample s = make_sample();
  {
    auto writer = GoldenWriter::create(dir / "x.h5", s.meta);
    REQUIRE(writer);
    check_ok(writer->add_input("hidden", s.inputs.at("hidden")));
    CHECK(refusal_fault(writer->add_input("hidden", s.inputs.at("hidden")), Code::invalid_argument,
                        {"x.h5", "/inputs/hidden", "already"}) == "");
  }
  CHECK(entries(dir.path()) == 0);
}

TEST_CASE("an output that cannot be written is refused, and nothing stays") {
  const TempDir dir;
  const GoldenSample s = make_sample();
  write_file(dir / "file", "x");
  std::filesystem::create_directory(dir / "directory");
  const auto fault = [&](const std::string& path) {
    return refusal_fault(write_sample(s, path), Code::io_error, {path, "cannot be written"});
  };
  CHECK(fault(dir / "absent/x.h5") == "");
  CHECK(fault(dir / "file/x.h5") == "");
  CHECK(fault(dir / "directory") == "");
  CHECK(fault("/dev/full") == "");
  CHECK(entries(dir.path()) == 2);
  CHECK(entries(dir / "directory") == 0);
}

TEST_CASE("a disk that fills up leaves the old file as it was") {
  const TempDir dir;
  const GoldenSample s = make_sample();
  write_file(dir / "x.h5", "the old file");
  struct rlimit saved {};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &saved) == 0);
  const auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  struct rlimit small = saved;
  small.rlim_cur = 4096;
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  const Status status = write_sample(s, dir / "x.h5");
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &saved) == 0);
  ::signal(SIGXFSZ, old_handler);
  CHECK(refusal_fault(status, Code::io_error, {"x.h5", "cannot be written", "File too large"}) == "");
  CHECK(read_file(dir / "x.h5") == "the old file");
  CHECK(entries(dir.path()) == 1);
}

TEST_CASE("a symbolic link keeps pointing to the file that is replaced") {
  const TempDir dir;
  const GoldenSample s = make_sample();
  write_file(dir / "target.h5", "old");
  std::filesystem::create_symlink(dir / "target.h5", dir / "link.h5");
  check_ok(write_sample(s, dir / "link.h5"));
  CHECK(std::filesystem::is_symlink(dir / "link.h5"));
  CHECK(GoldenFile::open(dir / "target.h5"));
  CHECK(entries(dir.path()) == 2);
}

TEST_CASE("every output of the walk has its tap's dimensions") {
  const GoldenSample s = make_sample({.q_len = 2});
  CHECK(s.taps.at("float64").size() == 12);
  for (const auto& [name, tap] : s.taps.at("float64")) {
    CAPTURE(name);
    Shape shape;
    for (const golden::TapDim& d : golden::tap_dims(s.meta.config, s.meta.load, name)) shape.push_back(d.size);
    CHECK(shape == tap.shape());
  }
  CHECK(golden::tap_dims(s.meta.config, s.meta.load, "hf.attention").empty());
  CHECK(golden::tap_dims(s.meta.config, s.meta.load, "attention.rotary_emb").empty());
  CHECK(apps::name_coordinate(golden::tap_dims(s.meta.config, s.meta.load, "attention.context"), 32 + 3 * 8 + 5) ==
        "token=1, head=3, d=5");
}
