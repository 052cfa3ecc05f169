// The suite proves that it can fail: each fault that a port of the whole model could have is put into the walk over a
// golden file, and at least one tap must leave its bound.
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "apps/verify/model_walk.hpp"
#include "apps/verify/quality.hpp"
#include "core/compare.hpp"
#include "core/model/model.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "golden/file/model_golden.hpp"
#include "tests/golden/golden_files.hpp"
#include "tests/support/catch.hpp"

namespace {

using namespace cf;

/// A golden file's run on the oracle, open to changes of its inputs and of the sites' arguments.
struct Run {
  golden::ModelGolden file;
  golden::GoldenModelWeights weights;
  ModelSpec spec;
  LayerState state;
  std::vector<Tensor> caches{}, hidden{};
  Tensor ids, final_norm, logits;

  explicit Run(const golden::ModelGolden& opened)
      : file(opened),
        weights(*opened.weights()),
        spec(opened.meta().config),
        // With room for one more entry, so that the RoPE table has a row for positions that are one too high.
        state(spec, {.q_len = opened.meta().fed(), .kv_len = opened.meta().fed(), .capacity = opened.meta().fed() + 1},
              DType::f64),
        ids(opened.ids()->clone()) {
    const std::int64_t fed = file.meta().fed();
    state.fill_rope_table(spec.traits.rope_theta, spec.traits.rope_scaling);
    if (spec.shape.rotary_dim > 0) {
      const Tensor cos = file.input("cos")->clone(), sin = file.input("sin")->clone();
      std::copy_n(cos.as<float>(), cos.size(), state.cos.as<float>());
      std::copy_n(sin.as<float>(), sin.size(), state.sin.as<float>());
    }
    for (std::int64_t i = 0; i < 2 * spec.shape.num_layers; ++i) caches.emplace_back(DType::f64, state.k_cache.shape());
    for (int i = 0; i < 2; ++i) hidden.emplace_back(DType::f64, Shape{fed, spec.shape.hidden_size});
    final_norm = Tensor(DType::f64, {fed, spec.shape.hidden_size});
    logits = Tensor(DType::f64, {fed, spec.shape.vocab_size});
  }

  /// Runs the walk; `change` may change a site's arguments. Returns the taps and the logits.
  template <class F>
  std::map<std::string, Tensor> taps(F&& change) {
    ModelTensors t;
    t.ids = {ids.as<std::int32_t>(), {file.meta().fed()}};
    t.layer = state.tensors();
    for (std::size_t i = 0; i < 2; ++i) t.hidden[i] = hidden[i].view<2>();
    std::vector<LayerCache> layers;
    for (std::size_t i = 0; i < caches.size(); i += 2) layers.push_back({caches[i].view<4>(), caches[i + 1].view<4>()});
    t.caches = layers;
    t.final_norm = final_norm.view<2>();
    t.logits = logits.view<2>();
    std::map<std::string, Tensor> taps;
    const Status status =
        for_each_model_site(spec, weights.weights, t, [&](const ModelSite& site, auto args) -> Status {
          change(site, args);
          CF_TRY(cpu_ref::run(args));
          if constexpr (requires { args.y; })
            if (site.layer < 0 || site.tap().ends_with(".output"))
              taps[site.tap()] = Tensor(DType::f64, Shape(args.y.shape.begin(), args.y.shape.end()));
          if constexpr (requires { args.y; })
            if (const auto made = taps.find(site.tap()); made != taps.end())
              convert(args.y.data, DType::f64, made->second.data(), DType::f64, args.y.size());
          return {};
        });
    INFO(status.message());
    REQUIRE(status);
    return taps;
  }
};

struct Fault {
  std::string name;
  std::function<void(Run&)> before{};                                   // changes what the walk starts from
  std::function<void(const ModelSite&, double&)> eps{};                 // changes a norm's eps
  std::function<void(const ModelSite&, ops::LayerNorm::Args&)> norm{};  // changes a LayerNorm; other models lack it
  std::function<void(const ModelSite&, ops::Linear::Args&, Tensor&)>
      head{};  // changes a product; the tensor is scratch
  bool skips_final_norm = false;
};

const std::vector<Fault>& faults() {
  static const std::vector<Fault> all{
      {.name = "final norm left out", .skips_final_norm = true},
      {.name = "final norm with a tenth of eps",
       .eps =
           [](const ModelSite& site, double& eps) {
             if (site.layer < 0) eps *= 0.1;
           }},
      {.name = "final LayerNorm without beta",
       .norm =
           [](const ModelSite& site, ops::LayerNorm::Args& a) {
             static const std::vector<float> zeros(8192);
             if (site.layer < 0) {
               // beta has gamma's dtype; zeros are zeros in every one.
               a.norm.beta.data = zeros.data();
             }
           }},
      {.name = "head rows shifted by one",
       .head =
           [](const ModelSite& site, ops::Linear::Args& a, Tensor& scratch) {
             auto* const dense = std::get_if<DenseWeight>(&a.linear.weight);
             if (site.layer >= 0 || !dense) return;
             const ConstAnyView<2> w = dense->weight;
             scratch = Tensor(w.dtype, {w.shape[0], w.shape[1]});
             const std::int64_t row = w.shape[1] * std::int64_t(size_bytes(w.dtype));
             for (std::int64_t i = 0; i < w.shape[0]; ++i)
               std::copy_n(static_cast<const char*>(w.data) + (i + 1) % w.shape[0] * row, row,
                           static_cast<char*>(scratch.data()) + i * row);
             dense->weight = scratch.view<2>();
           }},
      {.name = "embedding rows shifted by one",
       .before =
           [](Run& r) {
             for (std::int64_t i = 0; i < r.ids.size(); ++i)
               r.ids.as<std::int32_t>()[i] = std::int32_t((r.ids.as<std::int32_t>()[i] + 1) % r.spec.shape.vocab_size);
           }},
      {.name = "positions off by one after the prefill",
       .before =
           [](Run& r) {
             for (std::int64_t i = r.file.meta().prompt_len; i < r.file.meta().fed(); ++i)
               r.state.positions.as<std::int32_t>()[i] += 1;
           }},
      {.name = "the other form of residual",
       .before =
           [](Run& r) {
             r.spec.traits.residual =
                 r.spec.traits.residual == Residual::parallel ? Residual::sequential : Residual::parallel;
           }},
      {.name = "one layer left out", .before = [](Run& r) { r.weights.weights.layers.pop_back(); }},
  };
  return all;
}

/// The largest relative L2 error of a run's taps and logits against the file, with a fault or without.
double worst_error(const golden::ModelGolden& file, const Fault* fault) {
  Run run(file);
  if (fault && fault->before) fault->before(run);
  Tensor scratch;
  auto taps = run.taps([&]<class Args>(const ModelSite& site, Args& args) {
    if (!fault) return;
    if constexpr (requires { args.eps; })
      if (fault->eps) fault->eps(site, args.eps);
    if constexpr (std::is_same_v<Args, ops::LayerNorm::Args>)
      if (fault->norm) fault->norm(site, args);
    if constexpr (std::is_same_v<Args, ops::Linear::Args>) {
      if (fault->head) fault->head(site, args, scratch);
      // The head reads what the norm was to read: the last hidden state.
      if (fault->skips_final_norm && site.layer < 0)
        args.x = run.hidden[std::size_t(run.spec.shape.num_layers) % 2].view<2>();
    }
  });
  double worst = 0;
  const std::string reference(golden::kReference);
  for (const golden::VariantInfo& v : file.variants()) {
    if (v.name != reference) continue;
    for (const std::string& tap : v.taps) {
      const auto made = taps.find(tap);
      // A tap that is not made at all is a fault that everyone sees.
      if (made == taps.end()) return INFINITY;
      worst = std::max(worst, compare(made->second, *file.tap(reference, tap))->rel_l2);
    }
  }
  return std::max(worst, compare(taps.at("logits"), *file.logits(reference))->rel_l2);
}

}  // namespace

TEST_CASE("Every fault of a whole model is caught at one tap at least", "[mutation]") {
  std::size_t files = 0;
  for (const std::string& path : test::golden_files("golden_model")) {
    const auto file = golden::ModelGolden::open(path);
    REQUIRE(file);
    if (file->meta().top > 0) continue;
    ++files;
    CAPTURE(path);
    CHECK(worst_error(*file, nullptr) <= apps::kModelBudget);
    for (const Fault& fault : faults()) {
      if (fault.norm && file->meta().config.family().norm != NormKind::layernorm) continue;
      CAPTURE(fault.name);
      CHECK(worst_error(*file, &fault) > apps::kModelBudget);
    }
  }
  CHECK(files > 8);
}
