// Golden files of whole models, written and read back: the bits, the weights, and every refusal.
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "tests/golden/golden_files.hpp"
#include "tests/golden/model_sample.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;
using golden::GoldenFile;
using golden::ModelGolden;
using golden::ModelGoldenMeta;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(a.data(), b.data(), std::size_t(a.size_bytes())) == 0;
}

/// Writes a changed sample and opens it.
Status open_changed(const std::function<void(ModelSample&)>& change, std::int64_t top) {
  const TempDir dir;
  ModelSample s = make_model_sample({.top = top});
  change(s);
  check_ok(write_sample(s, dir / "x.h5"));
  return ModelGolden::open(dir / "x.h5").status();
}

}  // namespace

TEST_CASE("a model's golden file keeps every bit") {
  const DType dtype = GENERATE(DType::f16, DType::bf16, DType::f32);
  const std::int64_t top = GENERATE(0, 1, 5, 20);
  const TempDir dir;
  const ModelSample s = make_model_sample({.dtype = dtype, .top = top});
  check_ok(write_sample(s, dir / "x.h5"));
  const auto file = ModelGolden::open(dir / "x.h5");
  CAPTURE(top, file.status().message());
  REQUIRE(file);
  CHECK(same_bits(*file->ids(), s.ids));
  for (const char* name : {"cos", "sin"}) CHECK(same_bits(*file->input(name), s.inputs.at(name)));
  REQUIRE(file->variants().size() == 2);
  for (const golden::VariantInfo& v : file->variants()) {
    CAPTURE(v.name);
    CHECK(v.attn_implementation == (v.name == "float64" ? "sdpa" : "eager"));
    CHECK(v.dtype == to_string(v.name == "float64" ? DType::f64 : dtype));
    CHECK(v.device == "cpu");
    if (top == 0) {
      CHECK(same_bits(*file->logits(v.name), s.logits.at(v.name)));
      CHECK(refusal_fault(file->top_logits(v.name).status(), Code::invalid_argument,
                          {"x.h5: /logits/" + v.name, "largest logits alone, got all"}) == "");
    } else {
      const auto got = file->top_logits(v.name);
      REQUIRE(got);
      CHECK(same_bits(got->ids, s.top.at(v.name).ids));
      CHECK(same_bits(got->values, s.top.at(v.name).values));
      CHECK(same_bits(got->log_sum_exp, s.top.at(v.name).log_sum_exp));
      CHECK(refusal_fault(file->logits(v.name).status(), Code::invalid_argument,
                          {"x.h5: /logits/" + v.name, "all logits, got the " + std::to_string(top) + " largest"}) ==
            "");
    }
    CHECK(v.taps == std::vector<std::string>{"embed_in", "final_layer_norm", "layers.1.output"});
    for (const std::string& tap : v.taps) CHECK(same_bits(*file->tap(v.name, tap), s.taps.at(v.name).at(tap)));
  }
  CHECK(refusal_fault(file->tap("float64", "layers.0.output").status(), Code::not_found,
                      {"x.h5: /taps/float64/layers.0.output", "missing"}) == "");
  CHECK_FALSE(file->input("hidden"));
  const Status absent = top == 0 ? file->logits("float8").status() : file->top_logits("float8").status();
  CHECK(refusal_fault(absent, Code::not_found, {"x.h5: /logits/float8", "missing"}) == "");
}

TEST_CASE("a model's golden file keeps its attributes") {
  const TempDir dir;
  const ModelSample s = make_model_sample({.top = 3});
  check_ok(write_sample(s, dir / "x.h5"));
  const auto file = ModelGolden::open(dir / "x.h5");
  REQUIRE(file);
  const ModelGoldenMeta &m = file->meta(), &e = s.meta;
  CHECK(file->path() == dir / "x.h5");
  CHECK(m.producer == e.producer);
  CHECK(m.command == e.command);
  CHECK(m.versions == e.versions);
  CHECK(m.model == "small");
  CHECK(m.config.vocab_size == 20);
  CHECK(m.config.name == "small");
  CHECK(m.config.dtype == DType::f16);
  CHECK(m.dtype == DType::f16);
  CHECK(m.seed == e.seed);
  CHECK(m.weights == "procedural");
  CHECK(m.weights_checksum == e.weights_checksum);
  CHECK(m.tokens == 9);
  CHECK(m.fed() == 8);
  CHECK(m.prompt_len == 4);
  CHECK(m.top == 3);
}

TEST_CASE("a model's golden file needs no taps and no reference") {
  const TempDir dir;
  ModelSample s = make_model_sample();
  s.taps.erase("float16_eager");
  check_ok(write_sample(s, dir / "a.h5"));
  auto file = ModelGolden::open(dir / "a.h5");
  REQUIRE(file);
  CHECK(file->variants()[0].taps.empty());
  CHECK(file->variants()[1].taps.size() == 3);
  s.taps.clear();
  s.logits.erase("float64");
  s.ids.as<std::int32_t>()[8] = 0;  // no reference says what it must be
  check_ok(write_sample(s, dir / "b.h5"));
  file = ModelGolden::open(dir / "b.h5");
  CAPTURE(file.status().message());
  REQUIRE(file);
  CHECK(file->variants().size() == 1);
}

TEST_CASE("the same content gives the same bytes of a model's golden file") {
  const TempDir dir;
  const ModelSample s = make_model_sample({.top = 2});
  check_ok(write_sample(s, dir / "a.h5"));
  check_ok(write_sample(s, dir / "b.h5"));
  CHECK(read_file(dir / "a.h5") == read_file(dir / "b.h5"));
}

TEST_CASE("a golden file's schema is known before it is opened") {
  const TempDir dir;
  check_ok(write_sample(make_model_sample(), dir / "model.h5"));
  check_ok(write_sample(make_sample(), dir / "layer.h5"));
  CHECK(*golden::golden_schema(dir / "model.h5") == golden::GoldenSchema::model);
  CHECK(*golden::golden_schema(dir / "layer.h5") == golden::GoldenSchema::layer);
  CHECK(refusal_fault(ModelGolden::open(dir / "layer.h5").status(), Code::invalid_file,
                      {"layer.h5: /attribute 'schema'", "cf-golden-model", "got 'cf-golden'"}) == "");
  CHECK(refusal_fault(GoldenFile::open(dir / "model.h5").status(), Code::invalid_file,
                      {"model.h5: /attribute 'schema'", "got 'cf-golden-model'"}) == "");
  write_file(dir / "none.h5", "cfgold");
  CHECK(refusal_fault(golden::golden_schema(dir / "none.h5").status(), Code::invalid_file, {"no golden file"}) == "");
  CHECK_FALSE(golden::golden_schema(dir / "absent.h5"));
}

TEST_CASE("a model's weights are those of the seed, and damage is refused") {
  const DType dtype = GENERATE(DType::f16, DType::bf16, DType::f32);
  const TempDir dir;
  ModelSample s = make_model_sample({.dtype = dtype});
  check_ok(write_sample(s, dir / "x.h5"));
  const auto weights = ModelGolden::open(dir / "x.h5")->weights();
  CAPTURE(weights.status().message());
  REQUIRE(weights);
  CHECK(weights->dtype == dtype);
  CHECK(weights->weights.layers.size() == 2);
  CHECK(weights_checksum(s.meta.config, weights->weights) == s.meta.weights_checksum);

  s.meta.weights_checksum += 1;
  check_ok(write_sample(s, dir / "y.h5"));
  const auto wrong = ModelGolden::open(dir / "y.h5");
  REQUIRE(wrong);
  CHECK(refusal_fault(wrong->weights().status(), Code::invalid_file,
                      {"y.h5", "weights_checksum", std::to_string(s.meta.weights_checksum),
                       std::to_string(s.meta.weights_checksum - 1)}) == "");
}

TEST_CASE("a model's checkpoint is found beside the file, and its sizes are compared") {
  const TempDir dir;
  ModelSample s = make_model_sample();
  s.meta.weights = "checkpoint";
  s.meta.weights_checkpoint = "../absent";
  std::filesystem::create_directory(dir / "goldens");
  check_ok(write_sample(s, dir / "goldens/x.h5"));
  const auto file = ModelGolden::open(dir / "goldens/x.h5");
  REQUIRE(file);
  CHECK(file->meta().weights_checkpoint == "../absent");
  CHECK(refusal_fault(file->weights().status(), Code::not_found, {"goldens/../absent"}) == "");
  const std::string other = CF_DATA_DIR "/checkpoints/neox-d80";
  CHECK(refusal_fault(file->weights(other).status(), Code::invalid_argument,
                      {other, "expected 2 layers, hidden_size 16", "vocab_size 20, untied embeddings", "x.h5",
                       "got 2 layers, hidden_size 160"}) == "");
}

TEST_CASE("a model's golden file against the schema is refused by name") {
  using Change = std::function<void(ModelSample&)>;
  struct Case {
    const char* what;
    std::int64_t top;
    Change change;
    Code code;
    std::vector<std::string_view> parts;
  };
  const auto id = [](std::int64_t i, std::int32_t value) -> Change {
    return [=](ModelSample& s) { s.ids.as<std::int32_t>()[i] = value; };
  };
  const auto tap = [](const char* name, DType dtype, Shape shape) -> Change {
    return [=](ModelSample& s) { s.taps["float64"][name] = Tensor(dtype, shape); };
  };
  const auto top_id = [](std::int64_t i, std::int32_t value) -> Change {
    return [=](ModelSample& s) {
      for (auto& [name, top] : s.top) top.ids.as<std::int32_t>()[i] = value;
    };
  };
  const Case cases[] = {
      {"no ids", 0, [](auto& s) { s.ids = {}; }, Code::not_found, {"/ids", "missing"}},
      {"ids in two dimensions",
       0,
       [](auto& s) {
         s.ids = Tensor(DType::i32, {3, 3});
       },
       Code::invalid_file,
       {"/ids", "2 to 17", "got 0"}},
      {"ids' dtype",
       0,
       [](auto& s) { s.ids = Tensor(DType::f32, {9}); },
       Code::invalid_file,
       {"/ids", "int32 (9)", "float32 (9)"}},
      {"one id", 0, [](auto& s) { s.ids = Tensor(DType::i32, {1}); }, Code::invalid_file, {"/ids", "got 1"}},
      {"more ids than positions",
       0,
       [](auto& s) { s.ids = Tensor(DType::i32, {18}); },
       Code::invalid_file,
       {"/ids", "2 to 17", "got 18"}},
      {"an id beyond", 0, id(2, 20), Code::invalid_file, {"/ids[2]", "0 to 19", "got 20"}},
      {"an id before", 0, id(0, -1), Code::invalid_file, {"/ids[0]", "got -1"}},
      {"an id that is not chosen",
       0,
       [](auto& s) { s.ids.template as<std::int32_t>()[8] ^= 1; },
       Code::invalid_file,
       {"/ids[8]", "row 7 of /logits/float64"}},
      {"no prompt", 0, [](auto& s) { s.meta.prompt_len = 0; }, Code::invalid_file, {"'prompt_len'", "1 to 8", "got 0"}},
      {"a prompt alone", 0, [](auto& s) { s.meta.prompt_len = 9; }, Code::invalid_file, {"'prompt_len'", "got 9"}},
      {"a shorter prompt", 0, [](auto& s) { s.meta.prompt_len = 3; }, Code::invalid_file, {"/ids[3]", "got 6"}},
      {"no cos", 0, [](auto& s) { s.inputs.erase("cos"); }, Code::not_found, {"/inputs/cos", "missing"}},
      {"sin's shape",
       0,
       [](auto& s) {
         s.inputs["sin"] = Tensor(DType::f32, {9, 2});
       },
       Code::invalid_file,
       {"/inputs/sin", "float32 (8, 2)", "(9, 2)"}},
      {"dtype", 0, [](auto& s) { s.meta.dtype = DType::f64; }, Code::invalid_file, {"'dtype'", "float64"}},
      {"weights", 0, [](auto& s) { s.meta.weights = "stored"; }, Code::invalid_file, {"'weights'", "stored"}},
      {"config", 0, [](auto& s) { s.meta.config_json = "{"; }, Code::invalid_file, {"'config'"}},
      {"a model too large",
       0,
       [](auto& s) {
         s.meta.config.hidden_size = 1024;
         s.meta.config.vocab_size = 1 << 26;
       },
       Code::invalid_file,
       {"'config'", "2^34"}},
      {"no logits", 0, [](auto& s) { s.logits.clear(); }, Code::not_found, {"/logits", "missing"}},
      {"logits' shape",
       0,
       [](auto& s) {
         s.logits["float64"] = Tensor(DType::f64, {8, 19});
       },
       Code::invalid_file,
       {"/logits/float64", "(8, 20)", "(8, 19)"}},
      {"logits' dtype",
       0,
       [](auto& s) { s.logits["float16_eager"] = s.logits["float64"].clone(); },
       Code::invalid_file,
       {"/logits/float16_eager", "float16 (8, 20)", "float64"}},
      {"logits that are not finite",
       0,
       [](auto& s) { s.logits["float64"].template as<double>()[25] = kNaN; },
       Code::invalid_file,
       {"/logits/float64", "finite", "row 1"}},
      {"the variant's dtype",
       0,
       [](auto& s) { s.variants["float16_eager"].dtype = "int32"; },
       Code::invalid_file,
       {"/logits/float16_eager", "'dtype'", "int32"}},
      {"the reference's dtype",
       0,
       [](auto& s) { s.variants["float64"].dtype = "float32"; },
       Code::invalid_file,
       {"/logits/float64", "expected float64"}},
      {"taps of no variant",
       0,
       [](auto& s) { s.logits.erase("float64"); },
       Code::invalid_file,
       {"/taps", "variants of /logits", "float64"}},
      {"an unknown tap",
       0,
       tap("output", DType::f64, {8, 16}),
       Code::invalid_file,
       {"/taps/float64", "layers.N.output of 2 layers", "'output'"}},
      {"a layer beyond",
       0,
       tap("layers.2.output", DType::f64, {8, 16}),
       Code::invalid_file,
       {"/taps/float64", "layers.2.output"}},
      {"a layer with zeros before it",
       0,
       tap("layers.01.output", DType::f64, {8, 16}),
       Code::invalid_file,
       {"/taps/float64", "layers.01.output"}},
      {"tap's shape",
       0,
       tap("embed_in", DType::f64, {9, 16}),
       Code::invalid_file,
       {"/taps/float64/embed_in", "(8, 16)", "(9, 16)"}},
      {"tap's dtype",
       0,
       tap("embed_in", DType::f32, {8, 16}),
       Code::invalid_file,
       {"/taps/float64/embed_in", "float32"}},
      {"a mixture of all and some",
       2,
       [](auto& s) {
         s.logits["float64"] = Tensor(DType::f64, {8, 20});
         s.top.erase("float64");
       },
       Code::invalid_file,
       {"/logits/float64", "expected a group"}},
      {"a mixture of some and all",
       2,
       [](auto& s) {
         s.logits["float16_eager"] = Tensor(DType::f16, {8, 20});
         s.top.erase("float16_eager");
       },
       Code::invalid_file,
       {"/logits/float64", "expected a dataset"}},
      {"other counts",
       2,
       [](auto& s) {
         s.top["float64"].ids = Tensor(DType::i32, {8, 3});
       },
       Code::invalid_file,
       {"/logits/float64/ids", "(8, 2)", "(8, 3)"}},
      {"too many",
       20,
       [](auto& s) {
         s.top["float16_eager"].ids = Tensor(DType::i32, {8, 21});
       },
       Code::invalid_file,
       {"/logits/float16_eager/ids", "1 to 20", "got 21"}},
      {"values' shape",
       2,
       [](auto& s) {
         s.top["float64"].values = Tensor(DType::f64, {8, 1});
       },
       Code::invalid_file,
       {"/logits/float64/values", "(8, 2)", "(8, 1)"}},
      {"log_sum_exp's dtype",
       2,
       [](auto& s) { s.top["float16_eager"].log_sum_exp = Tensor(DType::f16, {8}); },
       Code::invalid_file,
       {"/logits/float16_eager/log_sum_exp", "float64 (8)"}},
      {"log_sum_exp that is not finite",
       2,
       [](auto& s) { s.top["float64"].log_sum_exp.template as<double>()[5] = kNaN; },
       Code::invalid_file,
       {"/logits/float64/log_sum_exp", "finite", "row 5"}},
      {"a top id beyond", 2, top_id(3, 20), Code::invalid_file, {"/logits/float16_eager/ids[3]", "0 to 19", "got 20"}},
      {"a top id twice",
       2,
       [](auto& s) {
         for (auto& [name, top] : s.top)
           top.ids.template as<std::int32_t>()[5] = top.ids.template as<std::int32_t>()[4];
       },
       Code::invalid_file,
       {"/logits/float16_eager/ids", "once in row 2"}},
      {"top ids that differ",
       2,
       [](auto& s) {
         std::int32_t* ids = s.top["float64"].ids.template as<std::int32_t>();
         std::swap(ids[6], ids[7]);
       },
       Code::invalid_file,
       {"/logits/float64/ids", "of /logits/float16_eager/ids"}},
      {"top logits that rise",
       2,
       [](auto& s) {
         double* values = s.top["float64"].values.template as<double>();
         std::swap(values[0], values[1]);
       },
       Code::invalid_file,
       {"/logits/float64/values", "largest logits first", "row 0"}},
      {"equal logits in another order",
       20,
       [](auto& s) {
         // Of two equal logits the higher id is put first.
         for (std::int64_t i = 1; i < 20; ++i)
           if (const std::int32_t* ids = s.top["float64"].ids.template as<std::int32_t>(); ids[i] < ids[i - 1]) {
             s.top["float64"].values.template as<double>()[i] = s.top["float64"].values.template as<double>()[i - 1];
             return;
           }
       },
       Code::invalid_file,
       {"/logits/float64/values", "of equal ones the lowest id", "row 0"}},
      {"top logits that choose another id",
       2,
       [](auto& s) {
         for (auto& [name, top] : s.top) {
           std::int32_t* ids = top.ids.template as<std::int32_t>() + 14;
           std::swap(ids[0], ids[1]);
         }
       },
       Code::invalid_file,
       {"/ids[8]", "row 7 of /logits/float64/values"}},
  };
  for (const Case& c : cases) {
    CAPTURE(c.what);
    const Status status = open_changed(c.change, c.top);
    CHECK(refusal_fault(status, c.code, {"x.h5: /"}) == "");
    for (std::string_view part : c.parts) CHECK(refusal_fault(status, c.code, {part}) == "");
  }
}

TEST_CASE("every golden file of a whole model in data is read, and its weights are found") {
  const std::vector<std::string> paths = golden_files("golden_model");
  CHECK_FALSE(paths.empty());
  std::int64_t positions = 0;
  for (const std::string& path : paths) {
    const auto file = ModelGolden::open(path);
    CAPTURE(path, file.status().message());
    REQUIRE(file);
    CHECK(*golden::golden_schema(path) == golden::GoldenSchema::model);
    positions += file->meta().fed();
    CHECK(file->variants().size() == 3);
    const auto weights = file->weights();
    CAPTURE(weights.status().message());
    REQUIRE(weights);
    CHECK(std::holds_alternative<DenseWeight>(weights->weights.embed_out.weight));

    // The embedding's tap is the rows that the ids name, and with learned positions the sum with theirs.
    const Tensor ids = *file->ids();
    const std::int64_t hidden = file->meta().config.hidden_size;
    for (const golden::VariantInfo& v : file->variants()) {
      if (v.taps.empty()) continue;
      const Result<Tensor> tap_read = file->tap(v.name, std::string(names_of(file->meta().config.spec()).embed_in.tap));
      INFO(tap_read.status().message());
      REQUIRE(tap_read);
      const Tensor& tap = *tap_read;
      std::int64_t other = 0;
      for (std::int64_t i = 0; i < tap.size(); ++i) {
        Tensor expected(DType::f64, {1}), rounded(tap.dtype(), {1});
        *expected.as<double>() = load_element(weights->weights.embed_in.data, weights->dtype,
                                              ids.as<std::int32_t>()[i / hidden] * hidden + i % hidden);
        if (const ConstAnyView<2>& table = weights->weights.embed_positions)
          *expected.as<double>() += load_element(table.data, weights->dtype, i);
        convert(expected.data(), DType::f64, rounded.data(), tap.dtype(), 1);
        other += tap.at(i) != rounded.at(0);
      }
      CHECK(other == 0);
    }
  }
  CHECK(positions > 1000);
}
