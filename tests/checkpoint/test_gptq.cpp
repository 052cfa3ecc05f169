// GPTQ weights on the CPU: what their bits mean, the product, the checkpoints that hold them, and what is refused.
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "core/compare.hpp"
#include "core/procedural.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/dequantise.hpp"
#include "golden/checkpoint/checkpoint.hpp"
#include "tests/checkpoint/safetensors_writer.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/setups.hpp"
#include "tests/support/temp_dir.hpp"

using namespace cf;
using namespace cf::checkpoint;
using namespace cf::test;

namespace {

const std::vector<GptqSetup> kFormats{{4, 32, 0, false}, {4, 32, 1, true},  {4, 128, 1, false}, {4, 4096, 0, false},
                                      {4, 24, 0, true},  {8, 32, 0, false}, {8, 64, 1, true},   {8, 4096, 1, false}};

/// A Linear of the given sizes with a quantised weight.
struct Product : Problem<ops::Linear> {
  Product(const GptqSetup& gptq, std::int64_t tokens, std::int64_t in, std::int64_t out, DType activation)
      : Problem({.model = model_of(1, 2, 2, 2), .activation = activation, .gptq = gptq},
                {{tokens, in, out, false}, {.epilogue = ops::Epilogue::gelu_erf}}) {}
  GptqWeight& weight() { return std::get<GptqWeight>(args().linear.weight); }
};

/// A bit field of a little-endian string of bits, which is what packed words are.
std::int32_t bit_field(const void* data, std::int64_t first, int bits) {
  std::int32_t value = 0;
  for (int b = 0; b < bits; ++b)
    value |= (static_cast<const unsigned char*>(data)[(first + b) / 8] >> (first + b) % 8 & 1) << b;
  return value;
}

ModelConfig small_model(DType dtype = DType::f16) {
  return {.name = "small",
          .hidden_size = 64,
          .num_hidden_layers = 2,
          .num_attention_heads = 2,
          .intermediate_size = 96,
          .vocab_size = 5,
          .rotary_dim = 4,
          .dtype = dtype};
}

const std::string kAttention = "gpt_neox.layers.1.attention.dense.";

/// A quantised checkpoint of procedural weights, whose zeros are changed where `zeros` is given.
struct GptqModel {
  ModelConfig config;
  std::vector<OwnedLayerWeights> layers;
  std::vector<StoredTensor> tensors;
  std::string quantize_config;

  explicit GptqModel(WeightFormat format = {4, 32}, ModelConfig m = small_model(),
                     std::optional<std::uint32_t> zeros = std::nullopt)
      : config(std::move(m)) {
    for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) {
      layers.push_back(procedural_layer(config, config.dtype, i, 7, format));
      if (zeros)
        for_each_linear(config, layers.back().weights, [&](const Site&, LinearParams& l, auto...) {
          const auto& q = std::get<GptqWeight>(l.weight).qzeros;
          std::fill_n(const_cast<std::int32_t*>(q.data), q.size(), std::int32_t(*zeros));
        });
      for (StoredTensor& t : layer_tensors(config, i, layers.back().weights)) tensors.push_back(std::move(t));
    }
    quantize_config = "{\"bits\":" + std::to_string(format.bits) +
                      ",\"group_size\":" + std::to_string(format.group_size) +
                      ",\"desc_act\":false,\"sym\":false,\"checkpoint_format\":\"gptq_v2\"}";
  }
  void write(const std::string& directory, std::size_t shards = 1) const {
    std::vector<std::vector<StoredTensor>> dealt(shards);
    for (std::size_t i = 0; i < tensors.size(); ++i) dealt[i % shards].push_back(tensors[i]);
    write_checkpoint(directory, config, dealt);
    write_file(directory + "/quantize_config.json", quantize_config);
  }
  StoredTensor& tensor(const std::string& name) {
    return *std::find_if(tensors.begin(), tensors.end(), [&](const StoredTensor& t) { return t.name == name; });
  }
  GptqWeight& dense(std::size_t layer) { return std::get<GptqWeight>(layers[layer].weights.dense.weight); }
};

/// Replaces text that is there.
std::string replaced(std::string text, const std::string& from, const std::string& to) {
  REQUIRE(text.find(from) != text.npos);
  return text.replace(text.find(from), from.size(), to);
}

Result<CheckpointLayer> load_layer(const std::string& directory, std::int64_t layer = 1) {
  CF_TRY_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(directory));
  return checkpoint.layer(layer);
}

}  // namespace

TEST_CASE("gptq: every element of the matrix is scale * (code - zero) of its group, exactly", "[gptq]") {
  for (const GptqSetup& format : kFormats) {
    CAPTURE(format.bits, format.group_size, format.zero_offset, format.desc_act);
    const std::int64_t in = 144, out = 24;
    Product p(format, 1, in, out, DType::f64);
    const GptqWeight& w = p.weight();
    const Tensor got = cpu_ref::dequantise(w, DType::f64), narrow_got = cpu_ref::dequantise(w, DType::f32);
    std::int64_t wrong = 0;
    for (std::int64_t n = 0; n < out; ++n)
      for (std::int64_t k = 0; k < in; ++k) {
        // Column n of qweight as one string of bits; row g of qzeros lies as one in memory.
        const std::int64_t codes = 32 / format.bits, g = w.g_idx.data[k];
        const std::int32_t q = bit_field(w.qweight.data + k / codes * out + n, k % codes * format.bits, format.bits);
        const std::int32_t z = bit_field(w.qzeros.data, (g * out + n) * format.bits, format.bits) + format.zero_offset;
        const double expected = widen<double>(w.scales.data[g * out + n]) * (q - z);
        wrong += got.at(n * in + k) != expected || narrow_got.at(n * in + k) != expected;
      }
    CHECK(wrong == 0);
  }
}

TEST_CASE("gptq: a stored zero of 15 is 16 in format v1", "[gptq]") {
  Product p({4, 32, 1, false}, 1, 32, 8, DType::f64);
  std::memset(const_cast<std::int32_t*>(p.weight().qzeros.data), 0xff, std::size_t(p.weight().qzeros.bytes()));
  std::memset(const_cast<std::int32_t*>(p.weight().qweight.data), 0, std::size_t(p.weight().qweight.bytes()));
  CHECK(cpu_ref::dequantise(p.weight(), DType::f64).at(0) == -16 * widen<double>(p.weight().scales.data[0]));
}

/// A product's result.
Tensor result(Product& p) {
  const AnyView<2>& y = p.args().y;
  Tensor t(y.dtype, {y.shape[0], y.shape[1]});
  std::memcpy(t.data(), y.data, std::size_t(y.bytes()));
  return t;
}

TEST_CASE("gptq: the product is that of the dequantised dense matrix", "[gptq]") {
  for (const GptqSetup& format : kFormats)
    for (DType activation : {DType::f64, DType::f32})
      for (std::int64_t tokens : {1, 3, 8, 9, 65, 256, 257}) {
        CAPTURE(format.bits, format.group_size, format.desc_act, to_string(activation), tokens);
        Product quantised(format, tokens, 136, 40, activation), dense(format, tokens, 136, 40, activation);
        const Tensor w = cpu_ref::dequantise(dense.weight(), DType::f32), bias(DType::f32, {40});
        dense.args().linear.weight = DenseWeight{w.view<2>()};
        quantised.args().linear.bias = dense.args().linear.bias = bias.view<1>();
        REQUIRE(cpu_ref::run(quantised.args()));
        REQUIRE(cpu_ref::run(dense.args()));
        CHECK(quantised.tensor(quantised.blocks().back()).size_bytes() > 0);
        const auto a = cpu_ref::condition(quantised.args()), b = cpu_ref::condition(dense.args());
        REQUIRE(a);
        REQUIRE(b);
        if (activation == DType::f64 || tokens > 256) {
          CHECK(quantised.bytes() == dense.bytes());
        } else {
          // Few tokens in float32 have a loop of their own, whose sums have another order: each is within its budget.
          const auto c = compare(result(quantised), result(dense));
          REQUIRE(c);
          const Budget budget = ops::Linear::budget(ops::Linear::dims(dense.args()), {activation, activation}, *a);
          CHECK(c->rel_l2 <= 2 * budget.rel_l2);
          CHECK(c->rel_max <= 2 * budget.rel_max);
        }
        CHECK(a->l2 == b->l2);
        CHECK(a->max == b->max);
      }
}

TEST_CASE("gptq: ln_qkv_heads is its formula, element by element, with fewer kv heads than heads", "[gptq]") {
  const std::int64_t batch = 2, q_len = 3, hidden = 64, heads = 4, head_dim = 8;
  for (std::int64_t kv_heads : {1, 2, 4}) {
    Problem<ops::LnQkvHeads> p({.model = model_of(1, 2, 2, 2), .activation = DType::f64, .gptq = {4, 32, 1, true}},
                               {{batch, q_len, hidden, heads, kv_heads, head_dim}, {}});
    const ops::LnQkvHeads::Args& a = p.args();
    REQUIRE(cpu_ref::run(a));
    const Tensor w = cpu_ref::dequantise(std::get<GptqWeight>(a.linear.weight), DType::f64);
    const auto at = [](const auto& view, std::int64_t i) { return load_element(view.data, view.dtype, i); };
    double largest = 0;
    std::int64_t part_row = 0;
    for (const AnyView<4>& out : {a.q, a.k, a.v}) {
      for (std::int64_t b = 0; b < batch; ++b)
        for (std::int64_t s = 0; s < q_len; ++s) {
          const std::int64_t x = (b * q_len + s) * hidden;
          double mean = 0, variance = 0;
          for (std::int64_t k = 0; k < hidden; ++k) mean += at(a.x, x + k) / double(hidden);
          for (std::int64_t k = 0; k < hidden; ++k) variance += std::pow(at(a.x, x + k) - mean, 2) / double(hidden);
          for (std::int64_t h = 0; h < out.shape[1]; ++h)
            for (std::int64_t d = 0; d < head_dim; ++d) {
              const std::int64_t row = part_row + h * head_dim + d;
              double sum = at(a.linear.bias, row);
              for (std::int64_t k = 0; k < hidden; ++k) {
                const double z = (at(a.x, x + k) - mean) / std::sqrt(variance + a.eps);
                sum += w.at(row * hidden + k) * (z * at(a.norm.gamma, k) + at(a.norm.beta, k));
              }
              const double got = at(out, ((b * out.shape[1] + h) * q_len + s) * head_dim + d);
              largest = std::max(largest, std::abs(got - sum));
            }
        }
      part_row += out.shape[1] * head_dim;
    }
    CHECK(largest < 1e-12);
  }
}

TEST_CASE("gptq: what ln_qkv_heads does not take is refused", "[gptq][bad]") {
  const auto refused = [](auto change, std::initializer_list<std::string_view> parts) {
    Problem<ops::LnQkvHeads> p({.model = model_of(1, 2, 2, 2), .activation = DType::f32, .gptq = {4, 32, 0, false}},
                               {{1, 2, 64, 4, 2, 8}, {}});
    change(p.args());
    const auto before = p.bytes();
    CHECK(refusal_fault(cpu_ref::run(p.args()), Code::invalid_argument, parts) == "");
    CHECK(p.bytes() == before);
  };
  using Args = ops::LnQkvHeads::Args;
  const auto weight = [](Args& a) -> GptqWeight& { return std::get<GptqWeight>(a.linear.weight); };
  refused([](Args& a) { a.eps = 0; }, {"ln_qkv_heads: eps must be positive, got 0"});
  refused([](Args& a) { a.q.shape[1] = 2; }, {"'qweight' has shape (8, 64), expected (8, 48)"});
  refused([&](Args& a) { weight(a).bits = 2; }, {"ln_qkv_heads: GPTQ bits must be 4 or 8, got 2"});
  refused([&](Args& a) { weight(a).group_size = 16; }, {"'qzeros' has shape (2, 8), expected (4, 8)"});
  refused([](Args& a) { a.v.shape[1] = 4; }, {"'v' has shape (1, 4, 2, 8), expected (1, 2, 2, 8)"});
  refused([&](Args& a) { const_cast<std::int32_t*>(weight(a).g_idx.data)[3] = 2; },
          {"ln_qkv_heads: 'g_idx'[3] must be 0 to 1, got 2"});
  Problem<ops::LnQkvHeads> p({.model = model_of(1, 2, 2, 2), .activation = DType::f32}, {{1, 2, 64, 3, 2, 8}, {}});
  CHECK(refusal_fault(cpu_ref::run(p.args()), Code::invalid_argument,
                      {"ln_qkv_heads: heads must be a multiple of kv_heads 2, got 3"}) == "");
}

TEST_CASE("gptq: what a product must read is codes, zeros and scales", "[gptq]") {
  Product p({4, 128, 0, false}, 1, 256, 64, DType::f32), q({4, 128, 0, false}, 1, 256, 64, DType::f32);
  q.args().linear.weight = DenseWeight{};
  const auto cost = [](Product& of) {
    return ops::Linear::cost(ops::Linear::dims(of.args()), DType::f16, DType::f16).bytes;
  };
  CHECK(cost(q) - cost(p) == 256 * 64 * 2 - (256 * 64 / 2 + 2 * 64 * 2 + 2 * 64 / 2));
}

TEST_CASE("gptq: what no weight has is refused", "[gptq][bad]") {
  const auto refused = [](auto change, std::initializer_list<std::string_view> parts) {
    Product p({4, 32, 0, false}, 2, 64, 16, DType::f32);
    change(p);
    const auto before = p.bytes();
    CHECK(refusal_fault(cpu_ref::run(p.args()), Code::invalid_argument, parts) == "");
    CHECK(p.bytes() == before);
  };
  refused([](Product& p) { p.weight().bits = 3; }, {"linear: GPTQ bits must be 4 or 8, got 3"});
  refused([](Product& p) { p.weight().group_size = 0; }, {"linear: GPTQ group_size must be at least 1, got 0"});
  refused([](Product& p) { p.args().x.shape[1] = 60; },
          {"linear: in must be a multiple of the 8 codes in a word, got 60"});
  refused([](Product& p) { p.args().y.shape[1] = 12; }, {"linear: out must be a multiple of the 8 codes", "got 12"});
  refused([](Product& p) { p.weight().group_size = 64; }, {"'qzeros' has shape (2, 2), expected (1, 2)"});
  for (std::int32_t g : {-1, 2})
    refused([=](Product& p) { const_cast<std::int32_t*>(p.weight().g_idx.data)[5] = g; },
            {"linear: 'g_idx'[5] must be 0 to 1, got " + std::to_string(g)});
}

TEST_CASE("gptq: a config in every spelling", "[gptq]") {
  const auto parse = [](const std::string& text) {
    const auto c = parse_gptq_config(text, "f");
    CAPTURE(text);
    CHECK(c.status().message() == "");
    REQUIRE(c);
    return *c;
  };
  const GptqConfig defaults = parse(R"({"bits": 4})");
  CHECK(defaults.group_size == 128);
  CHECK_FALSE(defaults.desc_act);
  CHECK(defaults.sym);
  CHECK_FALSE(defaults.v2);
  CHECK(defaults.modules.size() == 4);
  // As AutoGPTQ and GPTQModel write them, what they say of how the codes were found included.
  const GptqConfig full = parse(
      R"({"bits":8,"group_size":-1,"desc_act":true,"sym":false,"quant_method":"gptq","checkpoint_format":"gptq_v2",)"
      R"("pack_dtype":"int32","damp_percent":0.01,"static_groups":false,"true_sequential":true,"lm_head":false,)"
      R"("dynamic":{},"rotation":null,"adapter":null,"is_marlin_format":false,"model_name_or_path":null,)"
      R"("modules_in_block_to_quantize":[["mlp.dense_h_to_4h"],["attention.dense"]],"meta":{"quantizer":["x:1"]}})");
  CHECK(full.bits == 8);
  CHECK(full.group_size == -1);
  CHECK(full.desc_act);
  CHECK_FALSE(full.sym);
  CHECK(full.v2);
  CHECK(full.modules == std::vector<std::string>{"mlp.dense_h_to_4h", "attention.dense"});
  CHECK(parse(R"({"bits":4,"method":"gptq","format":"gptq_v2"})").v2);
  CHECK(parse(R"({"bits":4,"modules_in_block_to_quantize":null,"checkpoint_format":null})").modules.size() == 4);
}

TEST_CASE("gptq: a config that is not supported is refused by name", "[gptq][bad]") {
  struct Bad {
    std::string text;
    std::vector<std::string_view> parts;
  };
  const std::vector<Bad> table{
      {"", {"is empty"}},
      {"[]", {"expected a JSON object"}},
      {"{}", {"'bits' is missing"}},
      {R"({"bits":3})", {"'bits' is 3, expected 4 or 8"}},
      {R"({"bits":"4"})", {"'bits' is \"4\", expected a 64-bit integer"}},
      {R"({"bits":4294967300})", {"'bits' is 4294967300"}},
      {R"({"bits":4,"group_size":0})", {"'group_size' is 0, expected -1 or 1"}},
      {R"({"bits":4,"group_size":-2})", {"'group_size' is -2"}},
      {R"({"bits":4,"desc_act":1})", {"'desc_act' is 1, expected true or false"}},
      {R"({"bits":4,"quant_method":"awq"})", {"'quant_method' is 'awq', expected 'gptq'"}},
      {R"({"bits":4,"quant_method":"gptq","method":"awq"})", {"'method' is \"awq\"", "as 'quant_method' is"}},
      {R"({"bits":4,"checkpoint_format":"marlin"})", {"'checkpoint_format' is 'marlin', expected 'gptq' or 'gptq_v2'"}},
      {R"({"bits":4,"format":"gptq","checkpoint_format":"gptq_v2"})", {"'format' is \"gptq\""}},
      {R"({"bits":4,"pack_dtype":"int8"})", {"'pack_dtype' is 'int8', expected 'int32'"}},
      {R"({"bits":4,"dynamic":{"-:.*mlp":{}}})",
       {"'dynamic' has the rule '-:.*mlp', which changes 'gpt_neox.layers.0.mlp.dense_h_to_4h'"}},
      {R"({"bits":4,"dynamic":{".*dense$":{"bits":8}}})", {"which changes 'gpt_neox.layers.0.attention.dense'"}},
      {R"({"bits":4,"dynamic":{"+:gpt_neox\\.layers\\.0\\.":{"group_size":32}}})",
       {"which changes 'gpt_neox.layers.0."}},
      {R"({"bits":4,"dynamic":{"-:lm_head":{},"+:(":{"bits":8}}})", {"has the rule '+:(', expected a regular"}},
      {R"({"bits":4,"dynamic":{"-:(a{9}){9}":{}}})", {"without {}"}},
      {R"({"bits":4,"dynamic":{"-:)" + std::string(129, 'a') + R"(":{}}})", {"of at most 128 characters"}},
      {R"({"bits":4,"dynamic":["lm_head"]})", {"'dynamic' is an array, expected an object of rules"}},
      {R"({"bits":4,"rotation":"hadamard"})", {"'rotation' is \"hadamard\"", "not supported"}},
      {R"({"bits":4,"lm_head":true})", {"'lm_head' is true", "not supported"}},
      {R"({"bits":4,"is_marlin_format":true})", {"'is_marlin_format' is true", "not supported"}},
      {R"({"bits":4,"modules_in_block_to_quantize":["mlp.up"]})",
       {"'modules_in_block_to_quantize' is 'mlp.up'", "'attention.query_key_value'"}},
      {R"({"bits":4,"modules_in_block_to_quantize":{}})", {"'modules_in_block_to_quantize' is an object"}},
  };
  for (const Bad& bad : table) {
    CAPTURE(bad.text);
    const Status s = parse_gptq_config(bad.text, "f").status();
    CHECK(refusal_fault(s, Code::invalid_file, {"f: "}) == "");
    for (std::string_view part : bad.parts) CHECK(refusal_fault(s, Code::invalid_file, {part}) == "");
  }
}

TEST_CASE("gptq: a checkpoint's quantised layer is what was written", "[gptq]") {
  const WeightFormat format = GENERATE(WeightFormat{4, 32}, WeightFormat{4, 128}, WeightFormat{8, 32});
  const DType dtype = GENERATE(DType::f16, DType::bf16);
  const std::size_t shards = GENERATE(1, 3);
  // A Conv1D, whose dense weight is stored transposed, is packed as a Linear is.
  ModelConfig config = GENERATE(small_model(), learned_model_of(2, 32, 96));
  config.dtype = dtype;
  config.num_hidden_layers = 2;
  const TempDir dir;
  const GptqModel model(format, config);
  model.write(dir.path(), shards);
  auto checkpoint = Checkpoint::open(dir.path());
  REQUIRE(checkpoint.status().message() == "");
  REQUIRE(checkpoint->gptq());
  CHECK(checkpoint->gptq()->bits == format.bits);
  for (std::int64_t i : {1, 0}) {
    const auto layer = checkpoint->layer(i);
    REQUIRE(layer.status().message() == "");
    CHECK(layer->notes == std::vector<std::string>{});
    CHECK(layer->dtype == dtype);
    CHECK(weights_checksum(model.config, layer->weights) ==
          weights_checksum(model.config, model.layers[std::size_t(i)].weights));
    const auto& w = std::get<GptqWeight>(layer->weights.dense_4h_to_h.weight);
    CHECK(w.bits == format.bits);
    CHECK(w.group_size == format.group_size);
    CHECK(w.zero_offset == 0);
  }
  CHECK(checkpoint->check_names().message() == "");
}

TEST_CASE("gptq: group_size -1 is one group of all inputs", "[gptq]") {
  const TempDir dir;
  GptqModel model({4, 96});
  // Of the intermediate size 96 one group and of the hidden 64 too, whose group then is 64.
  model.quantize_config = replaced(model.quantize_config, "\"group_size\":96", "\"group_size\":-1");
  model.write(dir.path());
  const auto layer = load_layer(dir.path());
  REQUIRE(layer.status().message() == "");
  CHECK(std::get<GptqWeight>(layer->weights.dense.weight).group_size == 64);
  CHECK(std::get<GptqWeight>(layer->weights.dense_4h_to_h.weight).group_size == 96);
}

TEST_CASE("gptq: the config is found where it may be, and what differs is noted", "[gptq]") {
  const TempDir dir;
  const GptqModel model;
  model.write(dir.path());
  const std::string inner = model.quantize_config, config = to_hf_json(model.config);
  const auto with = [&](const std::string& quantisation) {
    return replaced(config, "{", "{\"quantization_config\":" + quantisation + ",");
  };
  // In config.json alone.
  std::filesystem::remove(dir / "quantize_config.json");
  write_file(dir / "config.json", with(inner));
  CHECK(load_layer(dir.path()).status().message() == "");
  // quant_config.json says the same as config.json; then config.json names another format.
  write_file(dir / "quant_config.json", inner);
  CHECK(load_layer(dir.path())->notes.empty());
  write_file(dir / "config.json", with(replaced(inner, "gptq_v2", "gptq")));
  auto layer = load_layer(dir.path());
  REQUIRE(layer.status().message() == "");
  REQUIRE(layer->notes.size() == 1);
  CHECK(layer->notes[0] == (dir / "config.json") + ": 'quantization_config': differs from " +
                               (dir / "quant_config.json") + ", which counts");
  CHECK(std::get<GptqWeight>(layer->weights.dense.weight).zero_offset == 0);
  // quantize_config.json comes first.
  write_file(dir / "quantize_config.json", replaced(inner, "gptq_v2", "gptq"));
  layer = load_layer(dir.path());
  REQUIRE(layer.status().message() == "");
  CHECK(layer->notes.size() == 1);
  CHECK(std::get<GptqWeight>(layer->weights.dense.weight).zero_offset == 1);
  // Another method is refused wherever it stands.
  write_file(dir / "config.json", with(R"({"quant_method":"bitsandbytes","bits":4})"));
  CHECK(refusal_fault(load_layer(dir.path()).status(), Code::invalid_file,
                      {"'quantization_config': 'quant_method' is 'bitsandbytes', expected 'gptq'"}) == "");
}

TEST_CASE("gptq: v1 or v2 is read off the zeros where sym fixes them, else off the config", "[gptq]") {
  struct Case {
    const char* what;
    int bits;
    std::optional<std::uint32_t> zeros;
    bool sym, said_v2;
    std::int32_t offset;
    std::size_t notes;  // of a layer's four Linears
  };
  const Case cases[] = {
      {"sym, v1 as said", 4, 0x77777777u, true, false, 1, 0},
      {"sym, v2 as said", 4, 0x88888888u, true, true, 0, 0},
      {"sym, v1 said to be v2", 4, 0x77777777u, true, true, 1, 4},
      {"sym, v2 said to be v1", 4, 0x88888888u, true, false, 0, 4},
      {"sym of 8 bits, v1 said to be v2", 8, 0x7f7f7f7fu, true, true, 1, 4},
      {"sym of 8 bits, v2 as said", 8, 0x80808080u, true, true, 0, 0},
      {"asym with all 7: the field is trusted", 4, 0x77777777u, false, true, 0, 0},
      {"asym, v1", 4, std::nullopt, false, false, 1, 0},
      {"said to be sym with mixed zeros", 4, std::nullopt, true, true, 0, 4},
      {"said to be sym with all 5", 4, 0x55555555u, true, false, 1, 4},
  };
  for (const Case& c : cases) {
    CAPTURE(c.what);
    const TempDir dir;
    GptqModel model({c.bits, 32}, small_model(), c.zeros);
    if (c.sym) model.quantize_config = replaced(model.quantize_config, "\"sym\":false", "\"sym\":true");
    if (!c.said_v2) model.quantize_config = replaced(model.quantize_config, "gptq_v2", "gptq");
    model.write(dir.path());
    const auto layer = load_layer(dir.path());
    REQUIRE(layer.status().message() == "");
    CHECK(std::get<GptqWeight>(layer->weights.query_key_value.weight).zero_offset == c.offset);
    CHECK(layer->notes.size() == c.notes);
    for (const std::string& note : layer->notes) {
      CAPTURE(note);
      CHECK(note.find("qzeros'") != note.npos);
      const std::string said = c.said_v2 ? "'gptq_v2'" : "'gptq'";
      CHECK(note.find((c.offset == (c.said_v2 ? 0 : 1) ? "the config's format " : "the config says ") + said) !=
            note.npos);
    }
  }
}

TEST_CASE("gptq: g_idx counts whatever desc_act says, and a contradiction is noted", "[gptq]") {
  const TempDir dir;
  GptqModel model;
  auto* g_idx = const_cast<std::int32_t*>(model.dense(1).g_idx.data);
  std::swap(g_idx[0], g_idx[63]);
  model.write(dir.path());
  const auto layer = load_layer(dir.path());
  REQUIRE(layer.status().message() == "");
  REQUIRE(layer->notes.size() == 1);
  CHECK(layer->notes[0] == dir.path() + ": tensor '" + kAttention +
                               "g_idx': expected input / group_size without desc_act, got others; g_idx counts");
  CHECK(std::get<GptqWeight>(layer->weights.dense.weight).g_idx.data[0] == 1);
  model.quantize_config = replaced(model.quantize_config, "\"desc_act\":false", "\"desc_act\":true");
  model.write(dir.path());
  CHECK(load_layer(dir.path())->notes.empty());
}

TEST_CASE("gptq: rules that change no Linear of a layer are accepted", "[gptq]") {
  // re.match() looks at a name's beginning.
  for (const char* rules :
       {"{}", R"({"-:lm_head":{}})", R"({"-:.*embed_out.*":{},"-:mlp":{}})", R"({"+:.*":{"bits":4,"group_size":128}})",
        R"({".*dense.*":{"sym":true,"desc_act":false}})", R"({"-:gpt_neox\\.layers\\.(2|13)\\..*":{}})"}) {
    CAPTURE(rules);
    const std::string text = R"({"bits":4,"dynamic":)" + std::string(rules) + "}";
    CHECK(parse_gptq_config(text, "f", ModelType::gpt_neox, 2).status().message() == "");
  }
  const std::string third = R"({"bits":4,"dynamic":{"-:gpt_neox\\.layers\\.2\\.":{}}})";
  CHECK(parse_gptq_config(third, "f", ModelType::gpt_neox, 2));
  CHECK(refusal_fault(parse_gptq_config(third, "f", ModelType::gpt_neox, 3).status(), Code::invalid_file,
                      {"which changes 'gpt_neox.layers.2.attention.query_key_value'"}) == "");
  // Work that no real model asks for.
  CHECK(refusal_fault(parse_gptq_config(third, "f", ModelType::gpt_neox, 1 << 16).status(), Code::invalid_file,
                      {"'dynamic' has 1 rules for 65536 layers, expected fewer"}) == "");
  // Without a bound on time, which no test has, this pattern would take years.
  CHECK(parse_gptq_config(R"({"bits":4,"dynamic":{"-:(([a-z_.0-9]*)*)*!":{}}})", "f").status().message() == "");
}

TEST_CASE("gptq: files may have the name that the config gives, sharded ones too", "[gptq]") {
  GptqModel model;
  model.quantize_config = replaced(model.quantize_config, "{", R"({"model_file_base_name":"gptq_model-4bit",)");
  for (std::size_t shards : {1, 2}) {
    const TempDir dir;
    model.write(dir.path(), shards);
    const std::string suffix = shards == 1 ? ".safetensors" : ".safetensors.index.json";
    CHECK(load_layer(dir.path()).status().message() == "");
    std::filesystem::rename(dir / ("model" + suffix), dir / ("gptq_model-4bit" + suffix));
    CHECK(load_layer(dir.path()).status().message() == "");
    // A name that leads out of the directory does not count.
    write_file(dir / "quantize_config.json", replaced(model.quantize_config, "gptq_model-4bit", "../model"));
    CHECK(refusal_fault(load_layer(dir.path()).status(), Code::not_found, {dir.path(), "expected model.safetensors"}) ==
          "");
  }
}

TEST_CASE("gptq: scales of another dtype are cast, and without desc_act g_idx may be left out", "[gptq]") {
  const TempDir dir;
  GptqModel model;
  model.write(dir.path());
  const std::uint64_t expected = weights_checksum(model.config, load_layer(dir.path())->weights);
  std::erase_if(model.tensors, [](const StoredTensor& t) { return t.name.ends_with("g_idx"); });
  StoredTensor& scales = model.tensor(kAttention + "scales");
  std::vector<float> wide;
  for (std::int64_t i = 0; i < element_count(scales.shape); ++i)
    wide.push_back(widen<float>(static_cast<const f16*>(scales.data)[i]));
  scales.dtype = "F32";
  scales.data = wide.data();
  scales.bytes *= 2;
  model.write(dir.path());
  const auto layer = load_layer(dir.path());
  REQUIRE(layer.status().message() == "");
  CHECK(weights_checksum(model.config, layer->weights) == expected);
  REQUIRE(layer->notes.size() == 1);
  CHECK(layer->notes[0].find("scales' is F32, cast to float16 as Hugging Face does") != std::string::npos);
}

TEST_CASE("gptq: Linears that the config does not name are dense", "[gptq]") {
  const TempDir dir;
  GptqModel model;
  const OwnedLayerWeights plain = procedural_layer(model.config, model.config.dtype, 1, 9);
  std::erase_if(model.tensors, [](const StoredTensor& t) {
    return t.name.find(".dense.") != t.name.npos && !t.name.ends_with("bias");
  });
  for (std::int64_t i : {0, 1})
    for (StoredTensor& t : layer_tensors(model.config, i, plain.weights))
      if (t.name.ends_with(".dense.weight")) model.tensors.push_back(std::move(t));
  model.quantize_config = replaced(model.quantize_config, "{",
                                   R"({"modules_in_block_to_quantize":[["attention.query_key_value"],)"
                                   R"(["mlp.dense_h_to_4h"],["mlp.dense_4h_to_h"]],)");
  model.write(dir.path());
  const auto layer = load_layer(dir.path());
  REQUIRE(layer.status().message() == "");
  CHECK(std::holds_alternative<GptqWeight>(layer->weights.query_key_value.weight));
  const auto* dense = std::get_if<DenseWeight>(&layer->weights.dense.weight);
  REQUIRE(dense);
  CHECK(dense->weight.dtype == DType::f16);
  CHECK(Checkpoint::open(dir.path())->check_names().message() == "");
  // Such a layer runs.
  LayerState state(model.config, {.kv_len = 3}, DType::f64);
  const Status ran =
      cpu_ref::run(ops::DecodeLayer::Args{.model = model.config, .weights = layer->weights, .t = state.tensors()});
  CHECK(ran.message() == "");
}

TEST_CASE("gptq: tensors that do not fit are refused by name", "[gptq][bad]") {
  const TempDir dir;
  GptqModel model;
  const auto refusal = [&](Code code, std::initializer_list<std::string_view> parts) {
    model.write(dir.path());
    return refusal_fault(load_layer(dir.path()).status(), code, parts);
  };
  const auto named = [](const std::string& part) { return "'" + kAttention + part + "'"; };
  SECTION("a packing of another width") {
    model.tensor(kAttention + "qweight").shape = {16, 32};
    CHECK(refusal(Code::invalid_file, {named("qweight"), "expected shape (8, 64)", "got (16, 32)"}) == "");
  }
  SECTION("groups of another size") {
    model.tensor(kAttention + "scales").shape = {1, 128};
    CHECK(refusal(Code::invalid_file, {named("scales"), "expected shape (2, 64)", "got (1, 128)"}) == "");
  }
  SECTION("zeros of another width") {
    model.tensor(kAttention + "qzeros").shape = {4, 4};
    CHECK(refusal(Code::invalid_file, {named("qzeros"), "expected shape (2, 8)", "got (4, 4)"}) == "");
  }
  SECTION("packed words of another type") {
    model.tensor(kAttention + "qweight").dtype = "F32";
    CHECK(refusal(Code::invalid_file, {named("qweight"), "expected dtype I32", "got F32"}) == "");
  }
  SECTION("scales of another type") {
    model.tensor(kAttention + "scales").dtype = "I16";
    CHECK(refusal(Code::invalid_file, {named("scales"), "expected dtype F16", "got I16"}) == "");
  }
  SECTION("no g_idx with desc_act") {
    model.quantize_config = replaced(model.quantize_config, "\"desc_act\":false", "\"desc_act\":true");
    std::erase_if(model.tensors, [](const StoredTensor& t) { return t.name == kAttention + "g_idx"; });
    CHECK(refusal(Code::not_found, {named("g_idx"), "is missing"}) == "");
  }
  SECTION("g_idx outside the groups") {
    const_cast<std::int32_t*>(model.dense(1).g_idx.data)[7] = 2;
    CHECK(refusal(Code::invalid_file, {named("g_idx"), "element 7", "expected 0 to 1", "got 2"}) == "");
    const_cast<std::int32_t*>(model.dense(1).g_idx.data)[7] = -1;
    CHECK(refusal(Code::invalid_file, {named("g_idx"), "element 7", "expected 0 to 1", "got -1"}) == "");
  }
  SECTION("scales that are no numbers") {
    const_cast<f16*>(model.dense(1).scales.data)[64 + 3].bits = 0x7e00;
    CHECK(refusal(Code::invalid_file,
                  {named("scales"), "element (1, 3)", "expected a finite number", "got NaN; 1 of "}) == "");
    const_cast<f16*>(model.dense(1).scales.data)[64 + 3].bits = 0xfc00;
    CHECK(refusal(Code::invalid_file, {named("scales"), "element (1, 3)", "got infinity"}) == "");
  }
  SECTION("a dense tensor where a quantised one is due") {
    StoredTensor& t = model.tensor(kAttention + "qweight");
    t = {kAttention + "weight", "F16", {64, 64}, 64 * 64 * 2};
    CHECK(refusal(Code::invalid_file, {named("qweight"), "expected a quantised weight, got the dense weight"}) == "");
  }
  SECTION("a quantised tensor where a dense one is due") {
    model.quantize_config =
        replaced(model.quantize_config, "{", R"({"modules_in_block_to_quantize":["mlp.dense_h_to_4h"],)");
    CHECK(refusal(Code::invalid_file, {"expected a dense weight of a Linear that is not quantised", "got qweight"}) ==
          "");
    std::filesystem::remove(dir / "quantize_config.json");
    CHECK(refusal_fault(load_layer(dir.path()).status(), Code::invalid_file,
                        {"attention.query_key_value.weight': expected a dense weight, got qweight"}) == "");
  }
}

TEST_CASE("gptq: sizes that no whole words hold are refused", "[gptq][bad]") {
  const TempDir dir;
  const GptqModel model;
  model.write(dir.path());
  ModelConfig odd = model.config;
  odd.intermediate_size = 100;
  write_file(dir / "config.json", to_hf_json(odd));
  CHECK(refusal_fault(load_layer(dir.path()).status(), Code::invalid_file,
                      {"'gpt_neox.layers.1.mlp.dense_h_to_4h.qweight'", "multiples of the 8 codes in a word",
                       "got (100, 64)"}) == "");
}

TEST_CASE("gptq: procedural weights are spread as dense ones are", "[gptq]") {
  const ModelConfig m = *find_preset("pythia-14m");
  for (WeightFormat format : {WeightFormat{4, 128}, WeightFormat{8, 32}}) {
    CAPTURE(format.bits);
    const OwnedLayerWeights w = procedural_layer(m, m.dtype, 1, 3, format);
    const Tensor dense = cpu_ref::dequantise(std::get<GptqWeight>(w.weights.dense_h_to_4h.weight), DType::f64);
    double sum = 0, squares = 0;
    for (std::int64_t i = 0; i < dense.size(); ++i) sum += dense.at(i), squares += dense.at(i) * dense.at(i);
    CHECK(std::abs(sum / double(dense.size())) < 2e-4);
    CHECK(std::abs(std::sqrt(squares / double(dense.size())) / 0.018 - 1) < 0.05);
    CHECK(weights_checksum(m, w.weights) == weights_checksum(m, procedural_layer(m, m.dtype, 1, 3, format).weights));
    CHECK(weights_checksum(m, w.weights) != weights_checksum(m, procedural_layer(m, m.dtype, 2, 3, format).weights));
  }
}
