// Golden files, written and read back: the bits, the state they fill, and every refusal.
#include <hdf5.h>
#include <signal.h>
#include <sys/resource.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "tests/catch.hpp"
#include "tests/golden_sample.hpp"
#include "tests/refusal.hpp"

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

/// Puts a dataset without data where another may be.
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
  for_each_weight(s.meta.config, weights->weights, [&](std::string_view name, const auto& view, auto) {
    const Tensor& stored = s.weights.at(std::string(name));
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
  // Only the rows at the tokens' positions are there.
  std::vector<bool> used(64);
  for (std::int64_t t = 0; t < state.positions.size(); ++t) {
    const std::int32_t p = state.positions.as<std::int32_t>()[t];
    used[std::size_t(p)] = true;
    CHECK(state.cos.as<float>()[2 * p] == s.inputs.at("cos").as<float>()[2 * t]);
    CHECK(state.sin.as<float>()[2 * p + 1] == s.inputs.at("sin").as<float>()[2 * t + 1]);
  }
  for (int p = 0; p < 64; ++p)
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
       [](auto& s) { s.meta.config_json = "{\"model_type\": \"llama\"}"; },
       Code::invalid_file,
       {"'config'", "llama"}},
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
    return [=](hid_t file) {
      H5Adelete(file, name);
      const hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
      H5Tset_size(type, std::strlen(value));
      const hid_t id = H5Acreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
      H5Awrite(id, type, value);
      H5Aclose(id);
      H5Sclose(space);
      H5Tclose(type);
    };
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
      {"version 2", integers("schema_version", {2}), {"'schema_version'", "1 to 1", "got 2"}},
      {"a list of versions", integers("schema_version", {1, 1}), {"'schema_version'", "one integer"}},
      {"a version in words", text("schema_version", "one"), {"'schema_version'", "one integer"}},
      {"another schema", text("schema", "other"), {"'schema'", "cf-golden", "other"}},
      {"a schema by number", integers("schema", {1}), {"'schema'", "one string"}},
      {"a negative seed", integers("seed", {-1}), {"'seed'", "unsigned", "-1"}},
      {"no seed", [](hid_t file) { H5Adelete(file, "seed"); }, {"'seed'", "missing"}},
      {"big-endian", dataset(H5T_IEEE_F32BE, {2, 32}), {"/inputs/hidden", "little-endian"}},
      {"unsigned without its mark", dataset(H5T_STD_U16LE, {2, 32}), {"/inputs/hidden", "bfloat16"}},
      {"strings", dataset(H5T_C_S1, {2, 32}), {"/inputs/hidden", "little-endian"}},
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
       {"/inputs/hidden", "a link"}},
      {"a group for a dataset",
       moved([](hid_t f) { H5Gclose(H5Gcreate2(f, "inputs/hidden", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT)); }),
       {"/inputs/hidden", "expected a dataset"}},
      {"a dataset for a group",
       [](hid_t file) {
         H5Ldelete(file, "taps", H5P_DEFAULT);
         put_dataset(file, "taps", H5T_IEEE_F32LE, {2});
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
  // Fixed-length strings are as good as those of variable length.
  make_hdf5(dir / "x.h5", text("model", "another"));
  const auto file = GoldenFile::open(dir / "x.h5");
  REQUIRE(file);
  CHECK(file->meta().model == "another");
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
