// fp8 weights on the CPU: what their bits mean, the product, the checkpoints that hold them, and what is refused.
#include "core/fp8.hpp"

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <random>

#include "core/compare.hpp"
#include "core/model/model.hpp"
#include "core/model/ranks.hpp"
#include "core/model/runner.hpp"
#include "core/procedural.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/dequantise.hpp"
#include "cpu_ref/model.hpp"
#include "cpu_ref/ops/invariant.hpp"
#include "golden/checkpoint/checkpoint.hpp"
#include "golden/checkpoint/model_source.hpp"
#include "tests/checkpoint/safetensors_writer.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/setups.hpp"
#include "tests/support/temp_dir.hpp"

using namespace cf;
using namespace cf::checkpoint;
using namespace cf::test;

namespace {

/// The non-negative float8 numbers times 512, by their bits, as torch 2.15 prints them:
/// torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double() * 512
constexpr std::array<int, 127> kTorch{
    0,      1,      2,      3,      4,      5,      6,     7,     8,     9,     10,    11,    12,     13,     14,
    15,     16,     18,     20,     22,     24,     26,    28,    30,    32,    36,    40,    44,     48,     52,
    56,     60,     64,     72,     80,     88,     96,    104,   112,   120,   128,   144,   160,    176,    192,
    208,    224,    240,    256,    288,    320,    352,   384,   416,   448,   480,   512,   576,    640,    704,
    768,    832,    896,    960,    1024,   1152,   1280,  1408,  1536,  1664,  1792,  1920,  2048,   2304,   2560,
    2816,   3072,   3328,   3584,   3840,   4096,   4608,  5120,  5632,  6144,  6656,  7168,  7680,   8192,   9216,
    10240,  11264,  12288,  13312,  14336,  15360,  16384, 18432, 20480, 22528, 24576, 26624, 28672,  30720,  32768,
    36864,  40960,  45056,  49152,  53248,  57344,  61440, 65536, 73728, 81920, 90112, 98304, 106496, 114688, 122880,
    131072, 147456, 163840, 180224, 196608, 212992, 229376};

/// The value of code `bits`, which is no NaN, by that table.
double value_of(e4m3 x) { return (x.bits & 0x80 ? -1 : 1) * double(kTorch[x.bits & 0x7f]) / 512; }

/// Codes that are no NaN, about half of them small.
e4m3 random_code(std::mt19937& random) {
  const auto bits = std::uint8_t(random() & (random() & 1 ? 0xff : 0x9f));
  return {is_nan({bits}) ? std::uint8_t(bits - 1) : bits};
}

OwnedFp8 random_fp8(std::int64_t out, std::int64_t in, std::int64_t group_size, std::uint32_t seed) {
  std::mt19937 random(seed);
  OwnedFp8 w(out, in, group_size);
  for (std::int64_t i = 0; i < out * in; ++i) w.codes()[i] = random_code(random);
  for (std::int64_t i = 0; i < out * w.view().groups(); ++i) w.scales()[i] = float(1 + random() % 1000) * 0x1.3p-14f;
  return w;
}

/// A Linear of the given sizes with an fp8 weight, or with the same weight dequantised to a dense one.
struct Product : Problem<ops::Linear> {
  Product(const OwnedFp8& w, std::int64_t tokens, ops::Epilogue epilogue, DType activation)
      : Problem({.model = model_of(1, 2, 2, 2), .activation = activation, .weight = DType::f32, .values = DType::f32},
                linear_example(tokens, w.weight.in, w.weight.out / ops::rows_of_output(epilogue), epilogue)) {
    args().linear.weight = w.weight;
    args().linear.bias = {};
  }
  PackedWeight& weight() { return std::get<PackedWeight>(args().linear.weight); }
};

Tensor result(Product& p) {
  const AnyView<2>& y = p.args().y;
  Tensor t(y.dtype, {y.shape[0], y.shape[1]});
  std::memcpy(t.data(), y.data, std::size_t(y.bytes()));
  return t;
}

/// A small Llama or Qwen whose rows are no multiples of a block.
ModelConfig small_model() {
  ModelConfig m = gated_model_of(ModelType::llama, 3, 1, 48, 136, 140);
  m.num_hidden_layers = 2;
  m.dtype = DType::bf16;
  m.vocab_size = 5;
  return m;
}

constexpr const char* kBlocks =
    R"({"quant_method":"fp8","fmt":"e4m3","activation_scheme":"dynamic","weight_block_size":[128,128]})";
constexpr const char* kFbgemm =
    R"({"quant_method":"fbgemm_fp8","activation_scale_ub":1200.0,"modules_to_not_convert":["lm_head"]})";

/// What llm-compressor writes, with one strategy for weights.
std::string compressed(const std::string& strategy, const std::string& more = "") {
  const std::string float8 = R"("type":"float","num_bits":8,"symmetric":true,"group_size":null,"actorder":null,)";
  return R"({"quant_method":"compressed-tensors","format":"float-quantized","quantization_status":"compressed",)"
         R"("ignore":["lm_head"],"kv_cache_scheme":null,"sparsity_config":{},"transform_config":{},)"
         R"("config_groups":{"group_0":{"targets":["Linear"],"output_activations":null,"weights":{)" +
         float8 + R"("dynamic":false,"strategy":")" + strategy + "\"" + more + R"(},"input_activations":{)" + float8 +
         R"("dynamic":true,"strategy":"token"}}}})";
}

/// A checkpoint with fp8 Linears and bfloat16 or float32 scales.
struct Fp8Model {
  ModelConfig config = small_model();
  std::string text;  // of quantization_config
  Fp8Config fp8;
  std::list<Tensor> memory;  // fp8 codes lie in Tensors of words
  std::vector<StoredTensor> tensors;

  explicit Fp8Model(std::string quantization, std::vector<std::string> dense = {}, DType scale_dtype = DType::bf16)
      : text(std::move(quantization)), fp8(*parse_fp8_config(text, "f")) {
    std::mt19937 random(3);
    ModelWeights shapes;
    shapes.layers.resize(std::size_t(config.num_hidden_layers));
    for_each_model_weight(config, shapes, [&](const TensorSpec& spec, auto&, auto shape) {
      if (std::string(spec.name).find("_proj") == std::string::npos) add_dense(std::string(spec.name), shape);
    });
    for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
      for_each_linear(config.spec(), shapes.layers[std::size_t(layer)],
                      [&](const Site& site, const LinearParams&, const LinearSize& size) {
                        for (const StoredPart& part : stored_parts(config.spec(), site, size).parts) {
                          const std::string module =
                              config.family().names.layer(layer) + std::string(part.module) + ".";
                          if (std::find(dense.begin(), dense.end(), module) != dense.end())
                            add_dense(module + "weight", Shape{part.rows, size.in});
                          else
                            add_fp8(module, part.rows, size.in, scale_dtype, random);
                        }
                      });
  }
  StoredTensor& tensor(const std::string& name) {
    return *std::find_if(tensors.begin(), tensors.end(), [&](const StoredTensor& t) { return t.name == name; });
  }
  void write(const std::string& directory) const {
    write_checkpoint(directory, config, {tensors});
    std::string json = checkpoint::to_hf_json(config);
    json.insert(json.rfind('}'), ",\"quantization_config\":" + text);
    write_file(directory + "/config.json", json);
  }
  /// The matrix of a stored module, (rows, in).
  std::vector<double> matrix(const std::string& module) {
    const StoredTensor& w = tensor(module + "weight");
    const StoredTensor& s = tensor(module + fp8.scale_name);
    const std::int64_t rows = w.shape[0], in = w.shape[1], columns = s.shape.size() == 2 ? s.shape[1] : 1;
    const DType dtype = s.dtype == "F32" ? DType::f32 : DType::bf16;
    std::vector<double> elements;
    for (std::int64_t n = 0; n < rows; ++n)
      for (std::int64_t k = 0; k < in; ++k) {
        const std::int64_t scale = fp8.scales == Fp8Scales::tensor    ? 0
                                   : fp8.scales == Fp8Scales::channel ? n
                                                                      : n / 128 * columns + k / 128;
        elements.push_back(value_of(static_cast<const e4m3*>(w.data)[n * in + k]) * load_element(s.data, dtype, scale));
      }
    return elements;
  }

 private:
  template <class S>
  void add_dense(const std::string& name, const S& shape) {
    Tensor& t = memory.emplace_back(config.dtype, Shape(shape.begin(), shape.end()));
    fill_procedural(t.data(), t.dtype(), 0, t.size(), ProceduralKind::weight, 7, name);
    tensors.push_back({name, "BF16", t.shape(), t.size_bytes(), t.data()});
  }
  void add_fp8(const std::string& module, std::int64_t rows, std::int64_t in, DType scale_dtype, std::mt19937& random) {
    Tensor& codes = memory.emplace_back(DType::i32, Shape{(rows * in + 3) / 4});
    for (std::int64_t i = 0; i < rows * in; ++i) static_cast<e4m3*>(codes.data())[i] = random_code(random);
    tensors.push_back({module + "weight", "F8_E4M3", {rows, in}, rows * in, codes.data()});
    const Shape shape = fp8.scales == Fp8Scales::tensor    ? Shape{1}
                        : fp8.scales == Fp8Scales::channel ? Shape{rows, 1}
                                                           : Shape{(rows + 127) / 128, (in + 127) / 128};
    Tensor& scales = memory.emplace_back(scale_dtype, shape);
    for (std::int64_t i = 0; i < scales.size(); ++i) {
      const double s = double(1 + random() % 100) * 0x1p-14;
      if (scale_dtype == DType::f32)
        scales.as<float>()[i] = float(s * 1.001);
      else
        scales.as<bf16>()[i] = narrow<bf16>(s);
    }
    tensors.push_back({module + fp8.scale_name, stored_dtype(scale_dtype), shape, scales.size_bytes(), scales.data()});
  }
};

Result<CheckpointLayer> load_layer(const std::string& directory, std::int64_t layer = 1) {
  CF_TRY_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(directory));
  return checkpoint.layer(layer);
}

const std::string kLayer = "model.layers.1.";

}  // namespace

TEST_CASE("fp8: all 256 numbers are torch's, exactly", "[fp8]") {
  std::int64_t wrong = 0;
  for (int bits = 0; bits < 256; ++bits) {
    const e4m3 x{std::uint8_t(bits)};
    const bool is_last = (bits & 0x7f) == 0x7f;
    CHECK(is_nan(x) == is_last);
    if (is_last) continue;
    wrong += widen<double>(x) != value_of(x) || double(widen<float>(x)) != value_of(x);
    wrong += std::signbit(widen<float>(x)) != (bits >= 0x80);
  }
  CHECK(wrong == 0);
  static_assert(widen<double>(e4m3{0x7e}) == 448 && widen<double>(e4m3{0x81}) == -0x1p-9);
}

TEST_CASE("fp8: every element of the matrix is code * scale of its group", "[fp8]") {
  for (std::int64_t group : {1, 7, 16, 40, 45}) {
    const OwnedFp8 w = random_fp8(9, 45, group, 5);
    const Fp8Weight view = w.view();
    const Tensor exact = cpu_ref::dequantise(view, DType::f64), rounded = cpu_ref::dequantise(view, DType::f32);
    REQUIRE(view.groups() == (45 + group - 1) / group);
    std::int64_t wrong = 0;
    for (std::int64_t n = 0; n < 9; ++n)
      for (std::int64_t k = 0; k < 45; ++k) {
        const double expected = value_of(view.codes[n * 45 + k]) * double(view.scales[n * view.groups() + k / group]);
        wrong += exact.at(n * 45 + k) != expected || rounded.at(n * 45 + k) != double(float(expected));
      }
    CHECK(wrong == 0);
  }
}

TEST_CASE("fp8: the product is that of the dequantised dense matrix", "[fp8]") {
  for (ops::Epilogue epilogue : {ops::Epilogue::none, ops::Epilogue::swiglu})
    for (DType activation : {DType::f64, DType::f32})
      for (std::int64_t tokens : {1, 3, 9, 65}) {
        CAPTURE(to_string(activation), tokens, int(epilogue));
        const OwnedFp8 w = random_fp8(40, 133, 128, 6);
        Product quantised(w, tokens, epilogue, activation), dense(w, tokens, epilogue, activation);
        // In double both are exact; in float the dense one holds what the product rounds its weights to.
        const Tensor matrix = cpu_ref::dequantise(w.view(), activation);
        dense.args().linear.weight = DenseWeight{matrix.view<2>()};
        REQUIRE(cpu_ref::run(quantised.args()));
        REQUIRE(cpu_ref::run(dense.args()));
        const Tensor a = result(quantised), b = result(dense);
        CHECK(std::memcmp(a.data(), b.data(), std::size_t(a.size_bytes())) == 0);
        const auto of_fp8 = cpu_ref::condition(quantised.args()), of_dense = cpu_ref::condition(dense.args());
        REQUIRE(of_fp8);
        REQUIRE(of_dense);
        if (activation == DType::f64) CHECK((of_fp8->l2 == of_dense->l2 && of_fp8->max == of_dense->max));

        // And within the budget of the oracle.
        if (activation == DType::f64) continue;
        Product oracle(w, tokens, epilogue, DType::f64);
        REQUIRE(cpu_ref::run(oracle.args()));
        const auto c = compare(a, result(oracle));
        REQUIRE(c);
        const Budget budget =
            ops::Linear::budget(ops::Linear::dims(quantised.args()), {activation, activation}, *of_fp8);
        CHECK(c->rel_l2 <= budget.rel_l2);
        CHECK(c->rel_max <= budget.rel_max);
      }
}

TEST_CASE("fp8: an invariant product gives a token the same bits beside others", "[fp8]") {
  const cpu_ref::Invariant invariant(true);
  const OwnedFp8 w = random_fp8(24, 70, 32, 8);
  Product all(w, 21, ops::Epilogue::none, DType::f32);
  REQUIRE(cpu_ref::run(all.args()));
  const Tensor expected = result(all);
  for (std::int64_t token : {0, 7, 8, 20}) {
    Product one(w, 1, ops::Epilogue::none, DType::f32);
    one.args().x.data = all.args().x.as<const float>().data + token * 70;
    REQUIRE(cpu_ref::run(one.args()));
    CHECK(std::memcmp(result(one).data(), expected.as<float>() + token * 24, 24 * sizeof(float)) == 0);
  }
}

TEST_CASE("fp8: what no weight has is refused", "[fp8][bad]") {
  const OwnedFp8 w = random_fp8(16, 64, 32, 1);
  const auto refused = [&](auto change, Code code, std::string_view part) {
    Product p(w, 2, ops::Epilogue::none, DType::f32);
    change(p.weight());
    const auto before = p.bytes();
    CHECK(refusal_fault(cpu_ref::run(p.args()), code, {part}) == "");
    CHECK(p.bytes() == before);
  };
  refused([](PackedWeight& p) { p.format.group_size = 0; }, Code::invalid_argument,
          "linear: fp8 group_size must be at least 1, got 0");
  refused([](PackedWeight& p) { p.format.group_size = 64; }, Code::invalid_argument,
          "linear: the fp8 weight has 288 words, expected 272");
  refused([](PackedWeight& p) { p.out = 8; }, Code::invalid_argument, "is (8, 64), expected (16, 64)");
  refused([](PackedWeight& p) { p.packer = "another"; }, Code::unimplemented,
          "linear: cpu_ref takes dense, GPTQ or fp8 weights, got a weight packed by another");
}

TEST_CASE("fp8: configs as published checkpoints have them", "[fp8]") {
  const auto parse = [](const std::string& text) {
    CAPTURE(text);
    CHECK(is_fp8_config(text));
    const auto c = parse_fp8_config(text, "f");
    CHECK(c.status().message() == "");
    REQUIRE(c);
    return *c;
  };
  CHECK(parse(kBlocks) == Fp8Config{Fp8Scales::block, "weight_scale_inv"});
  // DeepSeek-V3.1's and Qwen3-FP8's further fields.
  CHECK(
      parse(R"({"quant_method":"fp8","weight_block_size":[128,128],"scale_fmt":"ue8m0","ignored_layers":["lm_head"]})")
          .scales == Fp8Scales::block);
  CHECK(parse(kFbgemm) == Fp8Config{Fp8Scales::channel, "weight_scale"});
  CHECK(parse(compressed("channel")) == Fp8Config{Fp8Scales::channel, "weight_scale"});
  CHECK(parse(compressed("tensor")) == Fp8Config{Fp8Scales::tensor, "weight_scale"});
  for (const char* sizes : {"[128,128]", "\"128x128\""})
    CHECK(parse(compressed("block", std::string(",\"block_structure\":") + sizes)) ==
          Fp8Config{Fp8Scales::block, "weight_scale"});
  CHECK_FALSE(is_fp8_config(R"({"quant_method":"gptq","bits":4})"));
  CHECK_FALSE(is_fp8_config("{"));
  CHECK_FALSE(is_fp8_config(R"({"quant_method":8})"));
}

TEST_CASE("fp8: a config that is not supported is refused by name", "[fp8][bad]") {
  const auto with = [](std::string text, const std::string& from, const std::string& to) {
    REQUIRE(text.find(from) != text.npos);
    return text.replace(text.find(from), from.size(), to);
  };
  const std::string channel = compressed("channel"), path = "'config_groups.group_0.";
  const std::vector<std::pair<std::string, std::string>> table{
      {"", "is empty"},
      {"{}", "'quant_method' is missing"},
      {R"({"quant_method":"awq"})", "'quant_method' is 'awq', expected 'fp8', 'fbgemm_fp8' or 'compressed-tensors'"},
      {R"({"quant_method":"fp8"})", "'weight_block_size' is missing, expected [128, 128]"},
      {with(kBlocks, "[128,128]", "null"), "'weight_block_size' is null, expected [128, 128]"},
      {with(kBlocks, "[128,128]", "[64,128]"), "'weight_block_size' is [64, 128], expected [128, 128]"},
      {with(kBlocks, "[128,128]", "[128]"), "'weight_block_size' is [128], expected [128, 128]"},
      {with(kBlocks, "dynamic", "static"), "'activation_scheme' is 'static', expected 'dynamic'"},
      {with(kBlocks, "\"dynamic\"", "3"), "'activation_scheme' is 3, expected a string"},
      {with(kBlocks, "e4m3", "e5m2"), "'fmt' is 'e5m2', expected 'e4m3' or 'float8_e4m3fn'"},
      {with(kBlocks, "{", R"({"scale_fmt":"e5m3",)"), "'scale_fmt' is 'e5m3', expected 'float' or 'ue8m0'"},
      {with(channel, "float-quantized", "pack-quantized"), "'format' is 'pack-quantized', expected 'float-quantized'"},
      {with(channel, "\"float\"", "\"int\""), path + "weights.type' is 'int', expected 'float'"},
      {with(channel, "\"num_bits\":8", "\"num_bits\":4"), path + "weights.num_bits' is 4, expected 8"},
      {with(channel, "true", "false"), path + "weights.symmetric' is false, expected true"},
      {with(channel, "\"channel\"", "\"group\""),
       path + "weights.strategy' is \"group\", expected 'tensor', 'channel'"},
      {compressed("block"), path + "weights.block_structure' is null, expected [128, 128]"},
      {compressed("block", R"(,"block_structure":[1,128])"), "block_structure' is [1, 128], expected [128, 128]"},
      {with(channel, R"("dynamic":true)", R"("dynamic":false)"),
       path + "input_activations.dynamic' is false, expected true: static scales of activations are not supported"},
      {with(channel, R"("dynamic":true)", R"("dynamic":"local")"), "input_activations.dynamic' is \"local\""},
      {with(channel, R"("output_activations":null)", R"("output_activations":{"num_bits":8})"),
       path + "output_activations' is an object, expected nothing: it is not supported"},
      {with(channel, R"("kv_cache_scheme":null)", R"("kv_cache_scheme":{"num_bits":8})"), "'kv_cache_scheme' is"},
      {with(channel, R"("sparsity_config":{})", R"("sparsity_config":{"format":"sparse-24-bitmask"})"),
       "'sparsity_config' is"},
      {with(channel, R"("transform_config":{})", R"("transform_config":{"R1":{}})"), "'transform_config' is"},
      {with(channel, "\"group_0\":", "\"group_1\":{},\"group_0\":"), "'config_groups' has 2 groups"},
      {R"({"quant_method":"compressed-tensors"})", "'config_groups' is missing"},
      {R"({"quant_method":"compressed-tensors","config_groups":{"g":{}}})", "'config_groups.g.weights' is missing"}};
  for (const auto& [text, part] : table) {
    CAPTURE(text);
    CHECK(refusal_fault(parse_fp8_config(text, "f").status(), Code::invalid_file, {"f: ", part}) == "");
  }
}

TEST_CASE("fp8: a checkpoint's Linears are what its tensors say, in every layout", "[fp8]") {
  struct Layout {
    std::string config;
    DType scale_dtype;
  };
  const std::string blocks = compressed("block", R"(,"block_structure":[128,128])");
  for (const Layout& layout : std::vector<Layout>{{kBlocks, DType::bf16},
                                                  {kBlocks, DType::f32},
                                                  {blocks, DType::bf16},
                                                  {compressed("channel"), DType::bf16},
                                                  {compressed("tensor"), DType::f32},
                                                  {kFbgemm, DType::f32}}) {
    CAPTURE(layout.config, to_string(layout.scale_dtype));
    // The first layer's attention stays dense.
    std::vector<std::string> dense;
    for (const char* part : {"q_proj.", "k_proj.", "v_proj."})
      dense.push_back("model.layers.0.self_attn." + std::string(part));
    Fp8Model model(layout.config, dense, layout.scale_dtype);
    const TempDir dir;
    model.write(dir.path());
    const auto opened = Checkpoint::open(dir.path());
    CHECK(opened.status().message() == "");
    REQUIRE(opened);
    CHECK(opened->check_names().message() == "");
    REQUIRE(opened->fp8());
    for (std::int64_t i = 0; i < 2; ++i) {
      const auto layer = opened->layer(i);
      CHECK(layer.status().message() == "");
      REQUIRE(layer);
      CHECK(layer->dtype == DType::bf16);
      CHECK(layer->notes.empty());
      CHECK(opened->check_finite(*layer));
      for_each_linear(
          model.config.spec(), layer->weights, [&](const Site& site, const LinearParams& l, const LinearSize& size) {
            const bool is_dense = i == 0 && site.id == SiteId::query_key_value;
            CHECK(is_fp8(l.weight) != is_dense);
            if (is_dense) return;
            const Tensor w = cpu_ref::dequantise(fp8_of(std::get<PackedWeight>(l.weight)), DType::f64);
            const StoredParts stored = stored_parts(model.config.spec(), site, size);
            std::int64_t wrong = 0;
            for (std::size_t p = 0; p < stored.parts.size(); ++p) {
              const std::vector<double> part =
                  model.matrix(model.config.family().names.layer(i) + std::string(stored.parts[p].module) + ".");
              for (std::int64_t n = 0; n < stored.parts[p].rows; ++n) {
                const double* const row = w.as<double>() + stored.joined_row(p, n) * size.in;
                wrong += !std::equal(row, row + size.in, part.begin() + n * size.in);
              }
            }
            CHECK(wrong == 0);
          });
    }
  }
}

TEST_CASE("fp8: a model's source says and counts what it is, and runs", "[fp8]") {
  Fp8Model model(kBlocks);
  const TempDir dir;
  model.write(dir.path());
  const auto source = ModelSource::open({.directory = dir.path()});
  REQUIRE(source);
  CHECK(source->linears().is_fp8);
  CHECK(source->linears().group_size == 128);
  CHECK(source->description() == "checkpoint " + dir.path() + ", fp8 (e4m3), a scale for a block of 128 x 128");
  auto loaded = source->load();
  CHECK(loaded.status().message() == "");
  REQUIRE(loaded);
  const ModelSpec spec = model.config.spec();
  std::int64_t expected = weight_bytes(spec, loaded->weights);
  for_each_linear(spec, loaded->weights.layers[0], [&](const Site&, const LinearParams&, const LinearSize& size) {
    expected += 2 * size.out * (size.in + 4 * ((size.in + 127) / 128));
  });
  CHECK(loaded->bytes() == expected);

  // The checksum knows the codes.
  const auto sum = weights_checksum(spec, loaded->weights.layers[1]);
  CHECK(sum != weights_checksum(spec, loaded->weights.layers[0]));
  auto& codes = const_cast<std::int32_t*>(std::get<PackedWeight>(loaded->weights.layers[1].dense.weight).data.data)[0];
  codes ^= 1;
  CHECK(sum != weights_checksum(spec, loaded->weights.layers[1]));
  codes ^= 1;

  // A model of it gives the logits of the dense model with the dequantised matrices.
  std::list<Tensor> matrices;
  ModelWeights dense = loaded->weights;
  for_each_model_weight(spec, dense, [&]<class V>(const TensorSpec&, V& view, auto shape) {
    if constexpr (std::is_void_v<std::remove_const_t<typename V::element>>) {
      Tensor& t = matrices.emplace_back(DType::f64, Shape(shape.begin(), shape.end()));
      convert(view.data, view.dtype, t.data(), DType::f64, t.size());
      point(view, t.data(), shape, DType::f64);
    }
  });
  for (LayerWeights& layer : dense.layers)
    for_each_linear(spec, layer, [&](const Site&, LinearParams& l, const LinearSize&) {
      const Tensor& w =
          matrices.emplace_back(cpu_ref::dequantise(fp8_of(std::get<PackedWeight>(l.weight)), DType::f64));
      l.weight = DenseWeight{w.view<2>()};
    });
  const std::vector<std::int32_t> ids{1, 4, 2, 0, 3};
  const auto logits = [&](const ModelWeights& weights, DType activation) {
    auto made = cpu_ref::Model::create(spec, weights, {}, {.slots = 1, .capacity = 16, .activation = activation});
    CHECK(made.status().message() == "");
    Tensor all(activation, {std::int64_t(ids.size()), spec.shape.vocab_size});
    if (made) CHECK((*made)->forward(0, 0, ids, all.view<2>()).message() == "");
    return all;
  };
  const Tensor oracle = logits(loaded->weights, DType::f64), of_dense = logits(dense, DType::f64);
  CHECK(std::memcmp(oracle.data(), of_dense.data(), std::size_t(oracle.size_bytes())) == 0);
  const auto c = compare(logits(loaded->weights, DType::f32), oracle);
  REQUIRE(c);
  CHECK(c->rel_l2 < 1e-4);

  // Other weights may take its place where they are fp8 too.
  CHECK(check_swap(spec, loaded->weights, spec, loaded->weights));
  CHECK(refusal_fault(check_swap(spec, loaded->weights, spec, dense), Code::invalid_argument,
                      {"is dense, expected fp8, group 128"}) == "");
  CHECK(refusal_fault(layer_of_rank(spec, loaded->weights.layers[0], 0, 1).status(), Code::unimplemented,
                      {"ranks: self_attn.qkv_proj: an fp8 weight is not cut"}) == "");

  // A damaged weight is refused before a model is made of it.
  ModelWeights damaged = loaded->weights;
  std::get<PackedWeight>(damaged.layers[1].dense.weight).data.shape[0] -= 1;
  CHECK(refusal_fault(check_model_weights(spec, damaged), Code::invalid_argument,
                      {"model: 'model.layers.1.self_attn.o_proj.weight': the fp8 weight has"}) == "");
  loaded->drop_values();
  CHECK(std::get<PackedWeight>(loaded->weights.layers[1].dense.weight).data.data == nullptr);
  CHECK(loaded->bytes() == expected);
}

TEST_CASE("fp8: tensors that do not fit are refused by name", "[fp8][bad]") {
  const std::string q = kLayer + "self_attn.q_proj.weight", gate = kLayer + "mlp.gate_proj.weight";
  const auto refused = [&](const std::function<void(Fp8Model&)>& change, std::initializer_list<std::string_view> parts,
                           const std::string& config = kBlocks, Code code = Code::invalid_file) {
    Fp8Model model(config);
    change(model);
    const TempDir dir;
    model.write(dir.path());
    CHECK(refusal_fault(load_layer(dir.path()).status(), code, parts) == "");
  };
  const auto shape = [](StoredTensor& t, Shape to) {
    const std::int64_t each = t.bytes / element_count(t.shape);
    t.shape = std::move(to);
    t.bytes = each * element_count(t.shape);
  };
  refused([&](Fp8Model& m) { std::erase_if(m.tensors, [&](auto& t) { return t.name == gate + "_scale_inv"; }); },
          {gate + "_scale_inv", "is missing"}, kBlocks, Code::not_found);
  refused([&](Fp8Model& m) { shape(m.tensor(q), {136, 144}); }, {q, "expected shape (144, 136), got (136, 144)"});
  refused([&](Fp8Model& m) { shape(m.tensor(q + "_scale_inv"), {1, 2}); }, {"expected shape (2, 2), got (1, 2)"});
  refused(
      [&](Fp8Model& m) {
        shape(m.tensor(q + "_scale"), {1, 1});
      },
      {"expected shape (144, 1), got (1, 1)"}, compressed("channel"));
  refused([&](Fp8Model& m) { m.tensor(q + "_scale_inv").dtype = "I16"; }, {"expected dtype F32, BF16 or F16, got I16"});
  refused([&](Fp8Model& m) { m.tensor(q).dtype = "F8_E5M2"; },
          {q, "expected dtype F8_E4M3 of an fp8 weight, got F8_E5M2"});
  refused([&](Fp8Model& m) { m.tensor(kLayer + "self_attn.v_proj.weight").dtype = "I8"; },
          {"v_proj", "expected dtype F8_E4M3 as the Linears have that it is joined with, got I8"});
  for (std::uint8_t nan : {0x7f, 0xff})
    refused(
        [&](Fp8Model& m) {
          auto* const codes = static_cast<std::uint8_t*>(const_cast<void*>(m.tensor(q).data));
          codes[136 + 5] = codes[300] = nan;
        },
        {q, "element (1, 5): expected a finite number, got NaN; 2 of 19584 elements are not finite"});
  refused(
      [&](Fp8Model& m) {
        static_cast<bf16*>(const_cast<void*>(m.tensor(q + "_scale_inv").data))[1] = narrow<bf16>(HUGE_VAL);
      },
      {q + "_scale_inv", "element 1: expected a finite number, got infinity"});
}

TEST_CASE("fp8: weights without a config, in memory, and configs in other files", "[fp8][bad]") {
  Fp8Model model(kBlocks);
  const TempDir dir;
  model.write(dir.path());
  write_file(dir / "config.json", checkpoint::to_hf_json(model.config));
  CHECK(refusal_fault(load_layer(dir.path()).status(), Code::invalid_file,
                      {"expected dtype F16, BF16 or F32, got F8_E4M3"}) == "");
  write_file(dir / "quant_config.json", kBlocks);
  CHECK(load_layer(dir.path()));
  write_file(dir / "quant_config.json", compressed("group"));
  CHECK(refusal_fault(load_layer(dir.path()).status(), Code::invalid_file, {"quant_config.json", "strategy"}) == "");
  CHECK(refusal_fault(Checkpoint::from_memory(checkpoint::to_hf_json(model.config), kBlocks, {}, {}, "memory").status(),
                      Code::unimplemented, {"memory: fp8 weights are read from a checkpoint's files"}) == "");
}
