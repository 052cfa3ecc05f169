#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/compare.hpp"
#include "core/fp8.hpp"
#include "core/model/config.hpp"
#include "core/model/examples.hpp"
#include "core/model/layer.hpp"
#include "core/model/model.hpp"
#include "core/procedural.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;

namespace {

/// The nearest of all finite values of a 16-bit type, ties to the even bit pattern, by looking at every one.
template <class T>
std::uint16_t nearest_by_search(double x) {
  std::uint16_t best = 0;
  double best_distance = std::numeric_limits<double>::infinity();
  for (unsigned bits = 0; bits < 0x8000; ++bits) {
    const double v = widen<double>(T{std::uint16_t(bits)});
    if (!std::isfinite(v)) break;
    const double distance = std::abs(v - std::abs(x));
    if (distance < best_distance || (distance == best_distance && bits % 2 == 0))
      best = std::uint16_t(bits), best_distance = distance;
  }
  return std::uint16_t(best | (std::signbit(x) ? 0x8000 : 0));
}

}  // namespace

TEMPLATE_TEST_CASE("16-bit floats survive the way to double and back", "[dtype]", f16, bf16) {
  int nans = 0;
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const TestType v{std::uint16_t(bits)};
    const double d = widen<double>(v);
    if (std::isnan(d)) {
      ++nans;
      REQUIRE(std::isnan(widen<double>(narrow<TestType>(d))));
    } else {
      REQUIRE(narrow<TestType>(d).bits == bits);
      REQUIRE(double(widen<float>(v)) == d);
    }
  }
  REQUIRE(nans == 2 * ((1 << (dtype_of<TestType> == DType::f16 ? 10 : 7)) - 1));
}

TEMPLATE_TEST_CASE("Rounding to 16 bits is to nearest even", "[dtype]", f16, bf16) {
  const double unit = unit_roundoff(dtype_of<TestType>);
  for (double x : {0.0, 1.0, 1 + unit, 1 + unit * 1.0000001, 1 + 3 * unit, -2.5, 3.14159, 1e-5, 6.1e-5, 5.9e-8, 2.9e-8,
                   1e-7 / 3, 65504.0 * 0.999, 1.0 / 3, -1e-3})
    CHECK(narrow<TestType>(x).bits == nearest_by_search<TestType>(x));
}

TEST_CASE("float16's special values", "[dtype]") {
  CHECK(widen<float>(f16{0x3c00}) == 1.0f);
  CHECK(widen<float>(f16{0x0001}) == 0x1p-24f);
  CHECK(widen<float>(f16{0x7bff}) == 65504.0f);
  CHECK(std::isinf(widen<float>(f16{0xfc00})));
  CHECK(narrow<f16>(65519.99).bits == 0x7bff);
  CHECK(narrow<f16>(65520.0).bits == 0x7c00);
  CHECK(narrow<f16>(-1e300).bits == 0xfc00);
  CHECK(narrow<f16>(0x1p-25).bits == 0);  // a tie, to even
  CHECK(narrow<f16>(0x1.000001p-25).bits == 1);
  CHECK(narrow<f16>(-0.0).bits == 0x8000);
  CHECK(widen<float>(bf16{0x3f80}) == 1.0f);
  // Through float this would round twice, to 1 + 2^-10 instead of 1: the value lies just below the tie.
  CHECK(narrow<f16>(1 + 0x1p-11 - 0x1p-40).bits == 0x3c00);
  CHECK(narrow<f16>(1 + 0x1p-11 + 0x1p-40).bits == 0x3c01);
}

TEST_CASE("dtype names lead back to dtypes", "[dtype]") {
  for (DType d : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32})
    CHECK(dtype_from_string(to_string(d)) == d);
  CHECK_FALSE(dtype_from_string("float8"));
}

TEST_CASE("Pythia presets have the published numbers of parameters", "[config]") {
  const std::pair<const char*, std::int64_t> published[] = {
      {"pythia-14m", 14067712},    {"pythia-31m", 30494720},   {"pythia-70m", 70426624},    {"pythia-160m", 162322944},
      {"pythia-410m", 405334016},  {"pythia-1b", 1011781632},  {"pythia-1.4b", 1414647808}, {"pythia-2.8b", 2775208960},
      {"pythia-6.9b", 6857302016}, {"pythia-12b", 11846072320}};
  REQUIRE(pythia_presets().size() == std::size(published));
  for (const auto& [name, parameters] : published) {
    const auto m = find_preset(name);
    REQUIRE(m);
    CHECK(m->num_parameters() == parameters);
    CHECK(m->validate());
    CHECK(m->rotary_dim * 4 == m->head_dim());
  }
  const auto missing = find_preset("pythia-3b");
  REQUIRE_FALSE(missing);
  CHECK(missing.status().code() == Code::not_found);
  CHECK(missing.status().message().find("'pythia-3b'") != std::string::npos);
  CHECK(missing.status().message().find("pythia-2.8b") != std::string::npos);
}

TEST_CASE("Presets beside Pythia's have the published numbers of parameters", "[config]") {
  // llama-2.8b-shape is published nowhere: its parameters are counted by hand.
  const std::pair<const char*, std::int64_t> published[] = {
      {"llama-2-7b", 6738415616},      {"llama-3.2-1b", 1235814400},   {"llama-3.2-3b", 3212749824},
      {"llama-3.1-8b", 8030261248},    {"llama-3.1-70b", 70553706496}, {"llama-2.8b-shape", 2779548160},
      {"qwen2.5-7b", 7615616512},      {"qwen3-0.6b", 596049920},      {"qwen3-1.7b", 1720574976},
      {"qwen3-4b", 4022468096},        {"qwen3-8b", 8190735360},       {"gpt2", 124439808},
      {"stablelm-3b-4e1t", 2795443200}};
  REQUIRE(presets().size() == pythia_presets().size() + std::size(published) + 1);  // and GPT-NeoX-20B
  for (const auto& [name, parameters] : published) {
    CAPTURE(name);
    const auto m = find_preset(name);
    REQUIRE(m);
    CHECK(m->num_parameters() == parameters);
    CHECK(m->validate());
    const ModelSpec s = m->spec();
    CHECK(check_model(s));
    const bool gpt2 = m->model_type == ModelType::gpt2, stablelm = m->model_type == ModelType::stablelm;
    CHECK(s.traits.norm == (gpt2 || stablelm ? NormKind::layernorm : NormKind::rmsnorm));
    CHECK(s.traits.residual == Residual::sequential);
    CHECK(s.traits.positions == (gpt2 ? Positions::learned : Positions::rope));
    CHECK(s.shape.rotary_dim == (gpt2 ? 0 : stablelm ? s.shape.head_dim / 4 : s.shape.head_dim));
    CHECK(s.shape.head_norm == (m->model_type == ModelType::qwen3));
    CHECK(s.traits.qkv_bias == (gpt2 || m->model_type == ModelType::qwen2));
    CHECK(s.traits.dense_bias == gpt2);
  }
}

TEST_CASE("GPT-NeoX-20B's heads of 96 rotate a quarter", "[config]") {
  const auto m = find_preset("gpt-neox-20b");
  REQUIRE(m);
  CHECK(m->num_parameters() == 20554567680);
  CHECK(m->validate());
  CHECK(check_model(m->spec()));
  CHECK(m->head_dim() == 96);
  CHECK(m->rotary_dim == 24);
  CHECK(m->hidden_act == Activation::gelu_tanh);
  CHECK(m->spec().traits.residual == Residual::parallel);
}

TEST_CASE("A tied LM head is counted once", "[config]") {
  ModelConfig m = *find_preset("pythia-70m");
  const std::int64_t untied = m.num_parameters();
  m.tie_word_embeddings = true;
  CHECK(m.num_parameters() == untied - m.vocab_size * m.hidden_size);
  CHECK(m.spec().traits.tied_embeddings);
}

TEST_CASE("A config's spec has its sizes and its arithmetic", "[config]") {
  ModelConfig m = *find_preset("pythia-2.8b");
  m.use_parallel_residual = false;
  m.attention_bias = false;
  m.hidden_act = Activation::gelu_tanh;
  m.layer_norm_eps = 1e-6;
  m.rope_theta = 5000;
  const ModelSpec expected{.shape = {.hidden_size = 2560,
                                     .num_layers = 32,
                                     .num_heads = 32,
                                     .num_kv_heads = 32,
                                     .head_dim = 80,
                                     .intermediate_size = 10240,
                                     .vocab_size = 50304,
                                     .rotary_dim = 20,
                                     .max_positions = 2048},
                           .traits = {.layer_norm_eps = 1e-6,
                                      .activation = Activation::gelu_tanh,
                                      .residual = Residual::sequential,
                                      .qkv_bias = false,
                                      .dense_bias = false,
                                      .rope_theta = 5000}};
  CHECK(m.spec() == expected);
  CHECK(expected.adds_residual);
  CHECK(expected.shape.qkv_size() == 3 * 2560);
  CHECK(expected.attention_scale() == 1 / std::sqrt(80.0));
  CHECK(check_model(expected));
  m.num_attention_heads = 0;  // no size is divided by it
  CHECK(m.spec().shape.head_dim == 0);
  CHECK_FALSE(m.spec().validate());
}

TEST_CASE("A model that no layer has is refused by name", "[config]") {
  const auto refused = [](auto change, Code code, std::initializer_list<std::string_view> parts) {
    ModelSpec m = find_preset("pythia-70m")->spec();
    change(m);
    return test::refusal_fault(check_model(m), code, parts);
  };
  constexpr Code bad = Code::invalid_argument;
  CHECK(refused([](ModelSpec& m) { m.shape.num_layers = 0; }, bad, {"num_layers must be 1 to", "got 0"}) == "");
  CHECK(refused([](ModelSpec& m) { m.shape.head_dim = -8; }, bad, {"head_dim must be 1 to", "got -8"}) == "");
  CHECK(refused([](ModelSpec& m) { m.shape.num_kv_heads = 3; }, bad, {"num_kv_heads must divide num_heads 8"}) == "");
  CHECK(refused([](ModelSpec& m) { m.shape.num_kv_heads = 2; }, Code::invalid_argument,
                {"kv_heads must be heads 8", "interleaved by head", "got 2"}) == "");
  CHECK(refused([](ModelSpec& m) { m.shape.rotary_dim = 66; }, bad, {"rotary_dim must be even, 2 to head_dim 64"}) ==
        "");
  CHECK(refused([](ModelSpec& m) { m.traits.layer_norm_eps = 0; }, bad, {"layer_norm_eps must be positive"}) == "");
  CHECK(refused([](ModelSpec& m) { m.traits.rope_theta = -1; }, bad, {"rope_theta must be positive"}) == "");
}

TEST_CASE("A config that describes no layer is refused by name", "[config]") {
  const auto refusal = [](auto change) {
    ModelConfig m = *find_preset("pythia-70m");
    change(m);
    const Status s = m.validate();
    return s ? std::string("accepted") : s.message();
  };
  const auto names = [](const std::string& message, std::initializer_list<const char*> parts) {
    for (const char* p : parts)
      if (message.find(p) == std::string::npos) return false;
    return true;
  };
  CHECK(names(refusal([](ModelConfig& m) { m.hidden_size = 0; }), {"hidden_size", "got 0"}));
  CHECK(names(refusal([](ModelConfig& m) { m.num_attention_heads = 7; }), {"num_attention_heads", "7", "512"}));
  CHECK(names(refusal([](ModelConfig& m) { m.rotary_dim = 17; }), {"rotary_dim", "17"}));
  CHECK(names(refusal([](ModelConfig& m) { m.rotary_dim = 66; }), {"rotary_dim", "64", "66"}));
  CHECK(names(refusal([](ModelConfig& m) { m.layer_norm_eps = 0; }), {"layer_norm_eps"}));
  CHECK(names(refusal([](ModelConfig& m) { m.rope_theta = std::nan(""); }), {"rope_theta"}));
  CHECK(names(refusal([](ModelConfig& m) { m.intermediate_size = std::int64_t(1) << 60; }), {"intermediate_size"}));
  CHECK(names(refusal([](ModelConfig& m) { m.dtype = DType::f64; }), {"dtype", "float64"}));
}

TEST_CASE("Comparison finds the worst element and names it", "[compare]") {
  Tensor reference(DType::f64, {2, 3}), got(DType::f32, {2, 3});
  for (int i = 0; i < 6; ++i) reference.as<double>()[i] = i + 1, got.as<float>()[i] = float(i + 1);
  got.as<float>()[4] += 0.5f;
  const auto c = compare(got, reference);
  REQUIRE(c);
  CHECK(c->max_abs == 0.5);
  CHECK(c->worst_coordinate == "[1, 1]");
  CHECK(c->worst_got == 5.5);
  CHECK(c->worst_reference == 5);
  CHECK(c->rel_max == 0.5 / 6);
  CHECK(std::abs(c->rel_l2 - 0.5 / std::sqrt(91.0)) < 1e-15);
  CHECK(std::abs(c->mean_signed - 0.5 / 6) < 1e-15);
  CHECK(c->ulp_max == 0.5 / 0x1p-8);  // 5 lies in [4, 8), where float16 steps by 2^-8
  CHECK(c->ulp_p50 == 0);
  CHECK(c->within({.rel_l2 = 0.1, .rel_max = 0.1}));
  CHECK_FALSE(c->within({.rel_l2 = 0.01, .rel_max = 0.1}));
  CHECK_FALSE(c->within({.rel_l2 = 0.1, .rel_max = 0.01}));
}

TEST_CASE("A NaN or an infinity is never within a budget", "[compare]") {
  for (double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    Tensor reference(DType::f64, {4}), got(DType::f64, {4});
    got.as<double>()[2] = bad;
    const auto c = compare(got, reference);
    REQUIRE(c);
    CHECK(c->non_finite == 1);
    CHECK(c->worst_coordinate == "[2]");
    CHECK_FALSE(c->within({.rel_l2 = 1e300, .rel_max = 1e300}));
  }
}

TEST_CASE("A NaN in the reference is never within a budget", "[compare]") {
  Tensor reference(DType::f64, {4}), got(DType::f64, {4});
  reference.as<double>()[1] = std::nan("");
  const auto c = compare(got, reference);
  REQUIRE(c);
  CHECK_FALSE(c->within({.rel_l2 = 1e300, .rel_max = 1e300}));
}

TEST_CASE("Tensors of different shapes are not compared", "[compare]") {
  const auto c = compare(Tensor(DType::f32, {2, 3}), Tensor(DType::f32, {3, 2}));
  REQUIRE_FALSE(c);
  CHECK(c.status().message() == "shapes differ: got (2, 3), expected (3, 2)");
}

TEST_CASE("Procedural values are exact in float16, bell-shaped and of the stated spread", "[procedural]") {
  for (auto [kind, mean, sigma] : {std::tuple{ProceduralKind::weight, 0.0, 0x1p-14 * 295.6},
                                   std::tuple{ProceduralKind::activation, 0.0, 0x1p-8 * 295.6},
                                   std::tuple{ProceduralKind::gain, 1.0, 0x1p-13 * 295.6}}) {
    const std::int64_t n = 1 << 16;
    Tensor f(DType::f32, {n}), h(DType::f16, {n});
    fill_procedural(f.data(), DType::f32, 0, n, kind, 7, "x");
    fill_procedural(h.data(), DType::f16, 0, n, kind, 7, "x");
    double sum = 0, sum2 = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      REQUIRE(f.at(i) == h.at(i));
      sum += f.at(i);
      sum2 += f.at(i) * f.at(i);
    }
    const double m = sum / double(n), s = std::sqrt(sum2 / double(n) - m * m);
    CHECK(std::abs(m - mean) < 4 * sigma / 256 + 0x1p-10);  // n >> 3 rounds down by half a step on average
    CHECK(std::abs(s / sigma - 1) < 0.02);
  }
}

TEST_CASE("Procedural values depend on seed, name and index alone", "[procedural]") {
  const auto values = [](std::uint64_t seed, const char* name, std::int64_t first, std::int64_t n) {
    Tensor t(DType::f16, {n});
    fill_procedural(t.data(), DType::f16, first, n, ProceduralKind::weight, seed, name);
    std::vector<std::uint16_t> v;
    for (std::int64_t i = 0; i < n; ++i) v.push_back(t.as<f16>()[i].bits);
    return v;
  };
  const auto whole = values(1, "a", 0, 100), tail = values(1, "a", 60, 40);
  CHECK(std::equal(tail.begin(), tail.end(), whole.begin() + 60));
  CHECK(values(2, "a", 0, 100) != whole);
  CHECK(values(1, "b", 0, 100) != whole);
}

TEST_CASE("Procedural values and checksums are those that golden/tools/procedural.py makes", "[procedural]") {
  // tests/golden/test_dump_hf.py expects the same numbers of golden/tools/procedural.py.
  struct Expected {
    DType dtype;
    ProceduralKind kind;
    std::uint64_t seed, sum;
  };
  for (const Expected& e : {Expected{DType::f16, ProceduralKind::weight, 7, 17163320938103917729u},
                            Expected{DType::f16, ProceduralKind::gain, 0, 13312910661308580303u},
                            Expected{DType::f16, ProceduralKind::activation, ~0ull, 6327421334972817765u},
                            Expected{DType::bf16, ProceduralKind::weight, 7, 8553580632210245799u},
                            Expected{DType::bf16, ProceduralKind::gain, 7, 16142940147729106682u},
                            Expected{DType::f32, ProceduralKind::weight, ~0ull, 13599590972232306018u},
                            Expected{DType::f32, ProceduralKind::activation, 7, 13781937127083469527u}}) {
    Tensor t(e.dtype, {100001});
    fill_procedural(t.data(), e.dtype, 3, t.size(), e.kind, e.seed, "layers.3.mlp.dense_4h_to_h.weight");
    CHECK(checksum(t.data(), std::size_t(t.size_bytes())) == e.sum);
  }
  CHECK(checksum("golden", 6) == 13826274397845189753u);
  ModelConfig m = *find_preset("pythia-14m");
  const auto layer_sum = [&](std::int64_t layer, std::uint64_t seed) {
    return weights_checksum(m, procedural_layer(m, m.dtype, layer, seed).weights);
  };
  CHECK(layer_sum(5, 42) == 12371719754337072618u);
  m.dtype = DType::bf16;
  CHECK(layer_sum(5, 42) == 13790096683530865694u);
  m.dtype = DType::f32;
  CHECK(layer_sum(5, 42) == 1056189333991289875u);
  m.dtype = DType::f16;
  m.attention_bias = false;
  CHECK(layer_sum(0, 1) == 11688534671166767482u);
}

TEST_CASE("A procedural model's checksum is that of golden/tools/procedural.py's", "[procedural]") {
  // tests/golden/test_dump_hf.py expects the same numbers of golden/tools/procedural.py.
  struct Expected {
    std::int64_t layers;
    std::uint64_t seed;
    DType dtype;
    bool tied;
    WeightFormat linears;
    std::uint64_t sum;
  };
  for (const Expected& e : {Expected{2, 7, DType::f16, false, {}, 5040128787465765401u},
                            Expected{1, 7, DType::bf16, false, {}, 1981259006726477557u},
                            Expected{1, 0, DType::f32, true, {}, 5696743861741765792u},
                            Expected{1, 3, DType::f16, false, {4, 128}, 5976509386906160943u},
                            Expected{2, 3, DType::bf16, false, {8, -1}, 8527875017976013586u}}) {
    ModelConfig m = *find_preset("pythia-14m");
    m.num_hidden_layers = e.layers;
    m.tie_word_embeddings = e.tied;
    const OwnedModelWeights model = procedural_model(m, e.dtype, e.seed, e.linears);
    CAPTURE(e.sum);
    CHECK(weights_checksum(m, model.weights) == e.sum);
    // The outline has the same formats, dtypes and shapes, and no values.
    const ModelWeights outline = outline_model(m, e.dtype, e.linears);
    std::vector<std::pair<DType, Shape>> tensors;
    const auto add = [&](const TensorSpec&, const auto& view, const auto&) {
      tensors.push_back({view.dtype, {view.shape.begin(), view.shape.end()}});
    };
    for_each_model_weight(m, model.weights, add);
    const std::vector<std::pair<DType, Shape>> expected = std::move(tensors);
    tensors.clear();
    for_each_model_weight(m, outline, add);
    CHECK(tensors == expected);
    for_each_model_weight(m, outline, [](const TensorSpec&, const auto& view, const auto&) { CHECK(!view); });
    CHECK(weight_bytes(m, outline) == weight_bytes(m, model.weights));
    std::int64_t stored = 0;
    for (const Tensor& t : model.storage) stored += t.size_bytes();
    CHECK(weight_bytes(m, outline) == stored);
  }
}

TEST_CASE("A procedural model's layers can be made one by one, on any number of threads, beside what lies outside them",
          "[procedural]") {
  ModelConfig m = *find_preset("pythia-70m");
  m.num_hidden_layers = 2;
  for (const WeightFormat linears : {WeightFormat{}, WeightFormat{.bits = 4, .group_size = 128},
                                     WeightFormat{.bits = 8, .group_size = -1, .is_fp8 = true}}) {
    const OwnedModelWeights whole = procedural_model(m, DType::f16, 5, linears);
    const OwnedModelWeights outer = procedural_outer(m, DType::f16, 5, linears);
    CHECK(check_outer_weights(m, outer.weights));
    CHECK_FALSE(check_model_weights(m, outer.weights));
    CHECK(weight_bytes(m, outer.weights) == weight_bytes(m, whole.weights));
    std::vector<OwnedLayerWeights> layers;
    OwnedModelWeights joined{outer.weights, {}};
    for (std::int64_t l = 0; l < 2; ++l)
      joined.weights.layers[std::size_t(l)] =
          layers.emplace_back(procedural_layer(m, DType::f16, l, 5, linears, l == 0 ? 3 : 16)).weights;
    CHECK(weights_checksum(m, joined.weights) == weights_checksum(m, whole.weights));
  }
}

TEST_CASE("Procedural fp8 weights are as large as dense ones, and without NaN", "[procedural]") {
  ModelConfig m = *find_preset("pythia-14m");
  for (std::int64_t group : {-1, 128, 48}) {
    const OwnedLayerWeights made =
        procedural_layer(m, DType::f16, 0, 3, {.bits = 8, .group_size = group, .is_fp8 = true});
    const ModelSpec spec = m.spec();
    for_each_linear(spec, made.weights, [&](const Site& site, const LinearParams& l, const LinearSize& size) {
      INFO(site.name << ", group " << group);
      REQUIRE(is_fp8(l.weight));
      const auto& packed = std::get<PackedWeight>(l.weight);
      REQUIRE(check_fp8("test", packed));
      const Fp8Weight w = fp8_of(packed);
      CHECK(w.groups() == (group == -1 ? 1 : (size.in + group - 1) / group));
      double squares = 0;
      std::int64_t nans = 0;
      for (std::int64_t i = 0; i < w.out * w.in; ++i) {
        const double value =
            widen<double>(w.codes[i]) * double(w.scales[i / w.in * w.groups() + i % w.in / w.group_size]);
        squares += value * value;
        nans += is_nan(w.codes[i]);
      }
      CHECK(nans == 0);
      CHECK(std::sqrt(squares / double(w.out * w.in)) == Approx(0.018).epsilon(0.03));
      CHECK(packed.data.bytes() <= std::int64_t(format_of(l.weight).bytes(w.out, w.in, DType::f16)) + 3);
    });
  }
}

TEST_CASE("A procedural model tells its progress tensor by tensor, and an error ends it", "[procedural]") {
  ModelConfig m = *find_preset("pythia-14m");
  m.num_hidden_layers = 2;
  m.vocab_size = 16;
  for (const WeightFormat& linears : {WeightFormat{}, WeightFormat{4, 128}, WeightFormat{8, 128, true}}) {
    const OwnedModelWeights expected = procedural_model(m, m.dtype, 5, linears);
    const std::int64_t bytes = weight_bytes(m, expected.weights) + packed_bytes(m, expected.weights);
    std::vector<std::int64_t> told;
    const auto made = procedural_model(m, m.dtype, 5, linears, [&](std::int64_t made_bytes, std::int64_t all_bytes) {
      CHECK(all_bytes == bytes);
      told.push_back(made_bytes);
      return Status();
    });
    REQUIRE(made);
    CHECK(weights_checksum(m, made->weights) == weights_checksum(m, expected.weights));
    CHECK(told.size() == expected.storage.size());
    CHECK(std::is_sorted(told.begin(), told.end()));
    CHECK(told.back() == bytes);
    int calls = 0;
    const auto ended = procedural_model(m, m.dtype, 5, linears, [&](std::int64_t, std::int64_t) {
      return ++calls < 3 ? Status() : Status::error(Code::io_error, "enough");
    });
    REQUIRE(!ended);
    CHECK(ended.status().message() == "enough");
    CHECK(calls == 3);
  }
}

TEST_CASE("Large tensors of a procedural model are made on threads, and told of in order and on the caller's",
          "[procedural]") {
  ModelConfig m = *find_preset("pythia-14m");
  m.num_hidden_layers = 8;
  m.vocab_size = 4096;
  m.hidden_size = 256;
  m.intermediate_size = 2048;
  const auto caller = std::this_thread::get_id();
  std::vector<std::int64_t> told;
  const auto made = procedural_model(m, m.dtype, 5, {}, [&](std::int64_t made_bytes, std::int64_t) {
    CHECK(std::this_thread::get_id() == caller);
    told.push_back(made_bytes);
    return Status();
  });
  REQUIRE(made);
  CHECK(std::is_sorted(told.begin(), told.end()));
  CHECK(told.back() == weight_bytes(m, made->weights));
  for (std::int64_t n = 0; n < m.num_hidden_layers; ++n)
    CHECK(weights_checksum(m, made->weights.layers[std::size_t(n)]) ==
          weights_checksum(m, procedural_layer(m, m.dtype, n, 5).weights));
  const auto& embedding = made->weights.embed_in;
  std::vector<std::byte> expected(std::size_t(embedding.bytes()));
  fill_procedural(expected.data(), m.dtype, 0, m.vocab_size * m.hidden_size, ProceduralKind::weight, 5,
                  "embed_in.weight");
  CHECK(std::memcmp(expected.data(), embedding.data, expected.size()) == 0);
  // An error ends the work while threads are at it.
  const auto ended = procedural_model(
      m, m.dtype, 5, {}, [](std::int64_t, std::int64_t) { return Status::error(Code::io_error, "enough"); });
  REQUIRE(!ended);
  CHECK(ended.status().message() == "enough");
}

TEST_CASE("A procedural model of another family has the checksum of golden/tools/procedural.py's", "[procedural]") {
  // tests/golden/test_dump_hf.py expects the same numbers of golden/tools/procedural.py.
  struct Expected {
    const char* preset;
    DType dtype;
    std::uint64_t seed, sum;
  };
  for (const Expected& e : {Expected{"llama-3.2-1b", DType::f16, 7, 10242718634212766589u},
                            Expected{"qwen2.5-7b", DType::bf16, 3, 2072485581779247481u}}) {
    CAPTURE(e.preset);
    ModelConfig m = *find_preset(e.preset);
    m.hidden_size = 128;
    m.num_hidden_layers = 2;
    m.num_attention_heads = 4;
    m.num_key_value_heads = 2;
    m.rotary_dim = 32;
    m.intermediate_size = 96;
    m.vocab_size = 64;
    CHECK(m.validate());
    CHECK(weights_checksum(m, procedural_model(m, e.dtype, e.seed).weights) == e.sum);
  }
}

TEST_CASE("A procedural model has the layers that procedural_layer() makes, and a head", "[procedural]") {
  ModelConfig m = *find_preset("pythia-14m");
  m.num_hidden_layers = 2;
  m.vocab_size = 16;
  for (const bool tied : {false, true}) {
    m.tie_word_embeddings = tied;
    const OwnedModelWeights model = procedural_model(m, m.dtype, 5);
    REQUIRE(model.weights.layers.size() == 2);
    for (std::int64_t n : {0, 1})
      CHECK(weights_checksum(m, model.weights.layers[std::size_t(n)]) ==
            weights_checksum(m, procedural_layer(m, m.dtype, n, 5).weights));
    const auto& head = std::get<DenseWeight>(model.weights.embed_out.weight).weight;
    CHECK(head.shape == model.weights.embed_in.shape);
    CHECK((head.data == model.weights.embed_in.data) == tied);
    CHECK((std::memcmp(head.data, model.weights.embed_in.data, std::size_t(head.bytes())) == 0) == tied);
  }
}

TEST_CASE("The checksum sees every byte, the order and the length", "[procedural]") {
  std::vector<std::uint8_t> bytes(37);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::uint8_t(i * 7);
  std::set<std::uint64_t> seen{checksum(bytes.data(), bytes.size())};
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    auto changed = bytes;
    changed[i] ^= 1;
    seen.insert(checksum(changed.data(), changed.size()));
  }
  for (std::size_t n = 0; n < bytes.size(); ++n) seen.insert(checksum(bytes.data(), n));
  auto swapped = bytes;
  std::swap_ranges(swapped.begin(), swapped.begin() + 8, swapped.begin() + 8);
  seen.insert(checksum(swapped.data(), swapped.size()));
  CHECK(seen.size() == 1 + 37 + 37 + 1);
}

TEST_CASE("The RoPE table is the angle's cosine and sine to float32 rounding", "[rope]") {
  constexpr std::int64_t rows = 2048, half = 10;
  Tensor cos(DType::f32, {rows, half}), sin(DType::f32, {rows, half});
  ops::rope_table({cos.as<float>(), {rows, half}}, {sin.as<float>(), {rows, half}}, 10000);
  double worst = 0;
  for (std::int64_t p = 0; p < rows; ++p)
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle = double(p) * std::pow(10000.0, -double(i) / double(half));
      // The angle is float32: the exponent's rounding weighs ln(theta) times the exponent, and the power, the quotient
      // and the product round once each. Cosine and sine round once more.
      const double roundings = std::log(10000.0) * double(i) / double(half) + 3;
      const double bound = angle * roundings * 0x1p-24 + 0x1p-23;
      worst = std::max({worst, std::abs(cos.at(p * half + i) - std::cos(angle)) / bound,
                        std::abs(sin.at(p * half + i) - std::sin(angle)) / bound});
    }
  CHECK(worst < 1);
  CHECK(cos.at(0) == 1);
  CHECK(sin.at(0) == 0);
}

namespace {

// LlamaRotaryEmbedding.inv_freq of transformers 5.17 and torch 2.11 for theta 500000, low_freq_factor 1,
// high_freq_factor 4 and original_max_position_embeddings 8192: head_dim 128 with factor 8, and 64 with factor 32.
constexpr float kFactor8[] = {
    0x1p+0f,         0x1.a11582p-1f,  0x1.53c38cp-1f,  0x1.14c708p-1f,  0x1.c2ef78p-2f,  0x1.6f56fap-2f,
    0x1.2b3dc6p-2f,  0x1.e788c2p-3f,  0x1.8d276p-3f,   0x1.43874p-3f,   0x1.078d4p-3f,   0x1.ad6338p-4f,
    0x1.5dc95ap-4f,  0x1.1cf13p-4f,   0x1.d03ccep-5f,  0x1.7a2d08p-5f,  0x1.34119p-5f,   0x1.f5ea7ep-6f,
    0x1.98de92p-6f,  0x1.4d1272p-6f,  0x1.0f5386p-6f,  0x1.ba0dd8p-7f,  0x1.681adap-7f,  0x1.2558fep-7f,
    0x1.ddee9ep-8f,  0x1.8554ecp-8f,  0x1.3d2804p-8f,  0x1.025c6ap-8f,  0x1.a4ee4p-9f,   0x1.1bfa0cp-9f,
    0x1.67a23ap-10f, 0x1.c12f3cp-11f, 0x1.132ba4p-11f, 0x1.47e21p-12f,  0x1.765ba4p-13f, 0x1.90d10cp-14f,
    0x1.46831ap-14f, 0x1.09fb7ep-14f, 0x1.b15902p-15f, 0x1.610332p-15f, 0x1.1f91fp-15f,  0x1.d484dep-16f,
    0x1.7da9e8p-16f, 0x1.36e8eap-16f, 0x1.fa8b86p-17f, 0x1.9ca3eap-17f, 0x1.5024d6p-17f, 0x1.11d41ep-17f,
    0x1.be2188p-18f, 0x1.6b6d0ep-18f, 0x1.280d96p-18f, 0x1.e257p-19f,   0x1.88ec2p-19f,  0x1.4014d2p-19f,
    0x1.04be68p-19f, 0x1.a8d01p-20f,  0x1.5a0f4ep-20f, 0x1.19e8p-20f,   0x1.cb4a9ap-21f, 0x1.76258ep-21f,
    0x1.30c94ep-21f, 0x1.f09184p-22f, 0x1.94836p-22f,  0x1.4985fep-22f};
constexpr float kFactor32[] = {0x1p+0f,         0x1.53c38cp-1f,  0x1.c2ef78p-2f,  0x1.2b3dc6p-2f,  0x1.8d276p-3f,
                               0x1.078d4p-3f,   0x1.5dc95ap-4f,  0x1.d03ccep-5f,  0x1.34119p-5f,   0x1.98de92p-6f,
                               0x1.0f5386p-6f,  0x1.681adap-7f,  0x1.ddee9ep-8f,  0x1.3d2804p-8f,  0x1.a4ee4p-9f,
                               0x1.524f36p-10f, 0x1.c26c4p-12f,  0x1.9731eep-14f, 0x1.46831ap-16f, 0x1.b15902p-17f,
                               0x1.1f91fp-17f,  0x1.7da9e8p-18f, 0x1.fa8b86p-19f, 0x1.5024d6p-19f, 0x1.be2188p-20f,
                               0x1.280d96p-20f, 0x1.88ec2p-21f,  0x1.04be68p-21f, 0x1.5a0f4ep-22f, 0x1.cb4a9ap-23f,
                               0x1.30c94ep-23f, 0x1.94836p-24f};

}  // namespace

TEST_CASE("RoPE's table scaled as Llama 3's is transformers' to float32 rounding", "[rope]") {
  constexpr std::int64_t rows = 16384;
  for (const auto& [factor, inv_freq] : {std::pair{8.0, std::span<const float>(kFactor8)}, {32.0, kFactor32}}) {
    const auto half = std::int64_t(inv_freq.size());
    Tensor cos(DType::f32, {rows, half}), sin(DType::f32, {rows, half});
    ops::rope_table({cos.as<float>(), {rows, half}}, {sin.as<float>(), {rows, half}}, 500000,
                    {.kind = ops::RopeScaling::Kind::llama3,
                     .factor = factor,
                     .low_freq_factor = 1,
                     .high_freq_factor = 4,
                     .original_max_positions = 8192});
    double worst = 0;
    for (std::int64_t p = 0; p < rows; p += p < 4 ? 1 : 511)
      for (std::int64_t i = 0; i < half; ++i) {
        const double angle = double(p) * double(inv_freq[std::size_t(i)]);
        // The power may round differently by a unit, which the scaling's few operations pass on.
        const double bound = angle * 6 * 0x1p-24 + 0x1p-23;
        worst = std::max({worst, std::abs(cos.at(p * half + i) - std::cos(angle)) / bound,
                          std::abs(sin.at(p * half + i) - std::sin(angle)) / bound});
      }
    CAPTURE(factor);
    CHECK(worst < 1);
  }
}

TEST_CASE("A step's tensors have the shapes and dtypes of the one list", "[layer]") {
  ModelConfig m = *find_preset("pythia-70m");
  m.max_position_embeddings = 1 << 26;
  const Workload load{.batch = 2, .q_len = 3, .kv_len = 11, .capacity = 12};
  LayerState state(m, load, DType::bf16);
  const LayerTensors views = state.tensors();
  std::vector<std::string> names;
  for_each_activation(
      m.spec().shape, step_sizes(load),
      [&](const TensorSpec& t, const Tensor& tensor, const auto& view, auto shape) {
        names.emplace_back(t.name);
        INFO(t.name);
        CHECK(tensor.shape() == Shape(shape.begin(), shape.end()));
        CHECK(view.shape == shape);
        CHECK(view.data == tensor.data());
        CHECK(tensor.dtype() == (is_activation(t.role) ? DType::bf16 : is_table(t.role) ? DType::f32 : DType::i32));
        CHECK(view.dtype == tensor.dtype());
      },
      state, views);
  CHECK(names == std::vector<std::string>{"hidden", "positions", "kv_len", "cos", "sin", "k_cache", "v_cache",
                                          "attn_in", "qkv", "q", "k", "v", "context", "attn_residual", "mlp_in",
                                          "mlp_act", "output"});
  CHECK(state.qkv.shape() == Shape{6, 8, 3, 64});
  CHECK(state.k_cache.shape() == Shape{2, 8, 12, 64});
  CHECK(state.cos.shape() == Shape{12, 8});  // a row for every entry of the cache, however many positions the model has
  CHECK(views.max_kv_len == 11);
}

TEST_CASE("The appended rows of a cache are those that end at kv_len", "[layer]") {
  Tensor cache(DType::f32, {2, 1, 4, 1});
  for (int i = 0; i < 8; ++i) cache.as<float>()[i] = float(i);
  const std::int32_t kv_len[] = {3, 4};
  const Tensor rows = appended_rows(cache.view<4>(), {kv_len, {2}}, 2);
  CHECK(rows.shape() == Shape{2, 1, 2, 1});
  CHECK((rows.at(0) == 1 && rows.at(1) == 2 && rows.at(2) == 6 && rows.at(3) == 7));
}

TEST_CASE("A layer's compulsory bytes are its weights, its cache and its hidden states", "[cost]") {
  const ModelConfig m = *find_preset("pythia-2.8b");
  const auto [d, args] = ops::example<ops::DecodeLayer>(m, {.kv_len = 128});
  const Cost c = ops::DecodeLayer::cost(d, DType::f16, DType::f16);
  const double weights = 2.0 * double(m.layer_parameters());
  CHECK(std::abs(weights - 157.3e6) < 0.1e6);
  // 128 entries of K and V read, one of each written, and hidden in and out; kv_len is four bytes.
  CHECK(c.bytes == weights + 2 * 2560 * 2 * 128 + 2 * 2560 * 2 + 4 + 2 * 2560 * 2);
  CHECK(c.flops > 2.0 * 12 * 2560 * 2560);
}

TEST_CASE("Every op has a name of its own", "[ops]") {
  std::set<std::string_view> names;
#define CF_OP(Op) names.insert(ops::Op::name);
#include "core/ops/fused.def"
#include "core/ops/ops.def"
#include "core/ops/port.def"
#include "core/ops/ranks.def"
#undef CF_OP
  CHECK(names.size() == std::tuple_size_v<ops::Contracts>);
}

namespace {

Result<std::unique_ptr<int>> made(int value) {
  if (value < 0) return Status::error(Code::invalid_argument, "value must be at least 0, got " + std::to_string(value));
  return std::make_unique<int>(value);
}

/// The sum of two values of a type that can only be moved. `steps` counts the values that were made.
Result<std::unique_ptr<int>> sum(int a, int b, int& steps) {
  CF_TRY_ASSIGN(auto x, made(a));
  ++steps;
  CF_TRY_ASSIGN(const std::unique_ptr<int> y, made(b));
  ++steps;
  *x += *y;
  CF_TRY_ASSIGN(x, made(*x));
  return x;
}

Status first_of(Result<std::pair<int, std::string>> pair, int& first) {
  CF_TRY_ASSIGN(const auto both, Result<std::pair<int, std::string>>(std::move(pair)));
  first = both.first;
  return {};
}

}  // namespace

static_assert(std::is_same_v<decltype(*std::declval<Result<std::string>&>()), std::string&>);
static_assert(std::is_same_v<decltype(*std::declval<const Result<std::string>&>()), const std::string&>);
static_assert(std::is_same_v<decltype(*std::declval<Result<std::string>>()), std::string>);
template <class R>
concept Dereferenced = requires(R&& result) {
  *std::forward<R>(result);
};
static_assert(Dereferenced<Result<std::string>> && !Dereferenced<const Result<std::string>>);
static_assert(std::is_same_v<decltype(std::declval<Result<std::string>>().status()), Status>);
static_assert(std::is_same_v<decltype(std::declval<Status>().message()), std::string>);

TEST_CASE("A temporary Result outlives the loop over its value", "[status]") {
  const auto squares = []() -> Result<std::vector<int>> { return std::vector{1, 4, 9, 16}; };
  std::vector<int> seen;
  for (int square : *squares()) seen.push_back(square);
  CHECK(seen == std::vector{1, 4, 9, 16});
  const std::string message(100, 'x');
  std::string copy;
  for (char c : Result<int>(Status::error(Code::io_error, message)).status().message()) copy += c;
  CHECK(copy == message);
}

TEST_CASE("CF_TRY_ASSIGN hands a value on, or leaves with the Status", "[status]") {
  int steps = 0;
  const auto five = sum(2, 3, steps);
  REQUIRE(five);
  CHECK(**five == 5);
  CHECK(steps == 2);
  steps = 0;
  CHECK(test::refusal_fault(sum(-1, 3, steps).status(), Code::invalid_argument, {"got -1"}) == "");
  CHECK(steps == 0);
  CHECK(test::refusal_fault(sum(1, -3, steps).status(), Code::invalid_argument, {"got -3"}) == "");
  CHECK(steps == 1);
  int first = 0;
  CHECK(first_of(std::pair<int, std::string>(7, "x"), first));
  CHECK(first == 7);
  CHECK(test::refusal_fault(first_of(Status::error(Code::io_error, "read: no"), first), Code::io_error, {"read: no"}) ==
        "");
}
