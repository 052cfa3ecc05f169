#include <cmath>
#include <cstring>
#include <vector>

#include "core/compare.hpp"
#include "core/model/config.hpp"
#include "core/model/layer.hpp"
#include "core/procedural.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/setups.hpp"
#include "tests/support/toy_family.hpp"

namespace {

using namespace cf;
using namespace cf::test;

void require_ok(const Status& s) {
  INFO(s.message());
  REQUIRE(s);
}

}  // namespace

TEST_CASE("A family of two sites runs on the CPU as plain loops have it", "[walk]") {
  const DType activation = GENERATE(DType::f64, DType::f32), weight = GENERATE(DType::f16, DType::f32);
  const std::int64_t hidden = GENERATE(8, 37), tokens = GENERATE(1, 3);
  CAPTURE(to_string(activation), to_string(weight), hidden, tokens);
  const ToySpec spec{.hidden_size = hidden, .norm_eps = 1e-3};
  ToyModel toy(spec, tokens, activation, weight);
  std::vector<std::string> names;
  require_ok(for_each_toy_site(spec, toy.weights, toy.tensors, [&](const Site& site, const auto& args) {
    names.emplace_back(site.name);
    return cpu_ref::run(args);
  }));
  CHECK(names == std::vector<std::string>{"norm", "linear"});

  enum { x, gamma, beta, matrix, bias, normed, output };
  const auto at = [&](int tensor, std::int64_t i) { return toy.storage[std::size_t(tensor)].at(i); };
  const double tolerance = activation == DType::f64 ? 1e-12 : 1e-5;
  for (std::int64_t t = 0; t < tokens; ++t) {
    double mean = 0, variance = 0;
    for (std::int64_t h = 0; h < hidden; ++h) mean += at(x, t * hidden + h) / double(hidden);
    for (std::int64_t h = 0; h < hidden; ++h) {
      const double from_mean = at(x, t * hidden + h) - mean;
      variance += from_mean * from_mean / double(hidden);
    }
    std::vector<double> y;
    for (std::int64_t h = 0; h < hidden; ++h) {
      y.push_back((at(x, t * hidden + h) - mean) / std::sqrt(variance + spec.norm_eps) * at(gamma, h) + at(beta, h));
      CHECK(std::abs(at(normed, t * hidden + h) - y.back()) < tolerance);
    }
    for (std::int64_t o = 0; o < hidden; ++o) {
      double sum = at(bias, o) + at(x, t * hidden + o);
      for (std::int64_t h = 0; h < hidden; ++h) sum += y[std::size_t(h)] * at(matrix, o * hidden + h);
      CHECK(std::abs(at(output, t * hidden + o) - sum) < tolerance);
    }
  }
}

TEST_CASE("A walk stops at the first site that refuses", "[walk]") {
  ToyModel toy({.hidden_size = 8, .norm_eps = 0}, 1, DType::f64, DType::f16);
  int sites = 0;
  const Status s = for_each_toy_site(toy.spec, toy.weights, toy.tensors, [&](const Site&, const auto& args) {
    ++sites;
    return cpu_ref::run(args);
  });
  CHECK(refusal_fault(s, Code::invalid_argument, {"layernorm: eps must be positive"}) == "");
  CHECK(sites == 1);
}

namespace {

/// A rank's part of a layer's dense float64 weights: the rows of its heads and of its part of the MLP, and the columns
/// that go with them.
OwnedLayerWeights part_of(const ModelSpec& whole, const LayerWeights& from, const ModelSpec& part, std::int64_t rank) {
  OwnedLayerWeights owned;
  owned.weights = from;  // norms, and the biases of summed products, are every rank's
  const auto cut = [&](ConstAnyView<2> m, std::int64_t rows, std::int64_t columns) {
    const std::int64_t first_row = rows < m.shape[0] ? rank * rows : 0;
    const std::int64_t first_column = columns < m.shape[1] ? rank * columns : 0;
    Tensor t(m.dtype, {rows, columns});
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c)
        t.as<double>()[r * columns + c] = m.as<const double>().data[(first_row + r) * m.shape[1] + first_column + c];
    owned.storage.push_back(std::move(t));
    return owned.storage.back().view<2>();
  };
  std::vector<const LinearParams*> sources;
  for_each_linear(whole, from, [&](const Site&, const LinearParams& l, auto...) { sources.push_back(&l); });
  std::size_t i = 0;
  for_each_linear(part, owned.weights, [&](const Site&, LinearParams& l, const LinearSize& size) {
    const LinearParams& source = *sources[i++];
    const ConstAnyView<2> matrix = std::get<DenseWeight>(source.weight).weight;
    l.weight = DenseWeight{cut(matrix, size.out, size.in)};
    if (source.bias && size.out < source.bias.shape[0])
      l.bias = reshape<1>(cut(reshape<2>(source.bias, {source.bias.shape[0], 1}), size.out, 1), {size.out});
  });
  return owned;
}

}  // namespace

TEST_CASE("Ranks that share a layer sum up to the whole: heads, MLP and one residual", "[walk]") {
  const std::int64_t ranks = GENERATE(1, 2, 4);
  const bool parallel = GENERATE(true, false), biases = GENERATE(true, false);
  CAPTURE(ranks, parallel, biases);
  ModelConfig m = model_of(4, 6, 2, 24);
  m.use_parallel_residual = parallel;
  m.attention_bias = biases;
  const ModelSpec whole = m.spec();
  const Workload load{.batch = 2, .q_len = 1, .kv_len = 5};
  OwnedLayerWeights weights;  // in float64, so that nothing but the order of sums differs
  for_each_weight(whole, weights.weights, [&](const TensorSpec& t, auto& view, auto shape) {
    Tensor made(DType::f64, Shape(shape.begin(), shape.end()));
    fill_procedural(made.data(), DType::f64, 0, made.size(),
                    t.role == Role::gain ? ProceduralKind::gain : ProceduralKind::weight, 1, t.name);
    point(view, made.data(), shape, DType::f64);
    weights.storage.push_back(std::move(made));
  });

  const auto state_of = [&](const ModelSpec& part, std::int64_t rank) {
    LayerState state(part, load, DType::f64);
    state.fill_rope_table(part.traits.rope_theta);
    const auto fill = [](Tensor& t, const std::string& name) {
      fill_procedural(t.data(), DType::f64, 0, t.size(), ProceduralKind::activation, 1, name);
    };
    fill(state.hidden, "hidden");
    fill(state.k_cache, "k" + std::to_string(rank));
    fill(state.v_cache, "v" + std::to_string(rank));
    return state;
  };
  LayerState expected = state_of(whole, 0);  // its cache is put together from the ranks' below
  std::vector<ModelSpec> parts;
  std::vector<OwnedLayerWeights> part_weights;
  std::vector<LayerState> states;
  ModelShape sum{};
  for (std::int64_t r = 0; r < ranks; ++r) {
    const auto part = whole.of_rank(r, ranks);
    require_ok(part.status());
    parts.push_back(*part);
    part_weights.push_back(part_of(whole, weights.weights, *part, r));
    states.push_back(state_of(*part, r));
    sum.num_heads += part->shape.num_heads;
    sum.num_kv_heads += part->shape.num_kv_heads;
    sum.intermediate_size += part->shape.intermediate_size;
    CHECK(part->shape.hidden_size == whole.shape.hidden_size);
    CHECK(part->shape.head_dim == whole.shape.head_dim);
    CHECK(part->adds_residual == (r == 0));
    const std::int64_t block = part->shape.num_kv_heads * load.kv_len * part->shape.head_dim;
    for (auto [from, to] :
         {std::pair{&states.back().k_cache, &expected.k_cache}, {&states.back().v_cache, &expected.v_cache}})
      for (std::int64_t b = 0; b < load.batch; ++b)
        std::memcpy(to->as<double>() + (b * ranks + r) * block, from->as<double>() + b * block,
                    std::size_t(block) * sizeof(double));
  }
  CHECK(sum.num_heads == whole.shape.num_heads);
  CHECK(sum.num_kv_heads == whole.shape.num_kv_heads);
  CHECK(sum.intermediate_size == whole.shape.intermediate_size);

  require_ok(for_each_site(whole, weights.weights, expected.tensors(),
                           [](const Site&, const auto& args) { return cpu_ref::run(args); }));
  // A sum over the ranks, in place of what communicates between them.
  const auto add_up = [&](Tensor LayerState::*tensor) {
    Tensor total = (states[0].*tensor).clone();
    for (std::size_t r = 1; r < states.size(); ++r)
      for (std::int64_t i = 0; i < total.size(); ++i) total.as<double>()[i] += (states[r].*tensor).at(i);
    return total;
  };
  // Walks one half of the layer's sites on every rank.
  const auto walk = [&](bool first_half) {
    for (std::size_t r = 0; r < states.size(); ++r) {
      bool in_first_half = true;
      require_ok(for_each_site(parts[r], part_weights[r].weights, states[r].tensors(),
                               [&](const Site& site, const auto& args) {
                                 if (site.id == SiteId::post_attention_layernorm) in_first_half = false;
                                 return in_first_half == first_half ? cpu_ref::run(args) : Status();
                               }));
    }
  };
  walk(true);
  if (!parallel) {
    const Tensor attn_residual = add_up(&LayerState::attn_residual);
    for (LayerState& s : states) s.attn_residual = attn_residual.clone();
  }
  walk(false);
  const auto error = compare(add_up(&LayerState::output), expected.output);
  REQUIRE(error);
  CAPTURE(error->rel_l2);
  CHECK(error->within({.rel_l2 = 1e-13, .rel_max = 1e-13}));
}

TEST_CASE("A part of a model that ranks cannot have is refused", "[walk]") {
  const ModelSpec whole = model_of(4, 6, 2, 24).spec();
  CHECK(refusal_fault(whole.of_rank(2, 2).status(), Code::invalid_argument, {"rank 2 of 2"}) == "");
  CHECK(refusal_fault(whole.of_rank(0, 0).status(), Code::invalid_argument, {"rank 0 of 0"}) == "");
  CHECK(refusal_fault(whole.of_rank(0, 3).status(), Code::invalid_argument, {"3 ranks", "num_heads", "got 4"}) == "");
  ModelSpec odd = whole;
  odd.shape.intermediate_size = 25;
  CHECK(refusal_fault(odd.of_rank(0, 2).status(), Code::invalid_argument, {"intermediate_size", "got 25"}) == "");
  odd = whole;
  odd.shape.num_kv_heads = 3;
  CHECK(refusal_fault(odd.of_rank(0, 1).status(), Code::invalid_argument, {"num_kv_heads must divide num_heads 4"}) ==
        "");
}
