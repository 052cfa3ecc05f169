#include "apps/verify/model_walk.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "apps/verify/device_runner.hpp"
#include "apps/verify/quality.hpp"
#include "core/model/taps.hpp"
#include "core/resources.hpp"
#include "cpu_ref/model.hpp"

namespace cf::apps {
namespace {

using cpu_ref::Model;
using golden::ModelGolden;

/// A tap's rows over all positions, and the bound that its sites give it.
struct Made {
  std::string site;
  Tensor rows;
  Condition condition{};
};

/// The names of taps that the file has.
std::vector<std::string> reference_taps(const ModelGolden& file) {
  for (const golden::VariantInfo& v : file.variants())
    if (v.name == golden::kReference) return v.taps;
  return {};
}

/// The CPU backend with the file's RoPE table.
Result<std::unique_ptr<Model>> make_cpu_model(const ModelGolden& file, const golden::GoldenModelWeights& weights,
                                              DType activation, std::int64_t chunk) {
  const ModelSpec spec = file.meta().config;
  const std::int64_t fed = file.meta().fed();
  const Model::Options options{.capacity = fed, .chunk = chunk, .activation = activation};
  CF_TRY(Model::check_memory(file.path(), spec, options));
  CF_TRY_ASSIGN(std::unique_ptr<Model> model, Model::create(spec, weights.weights, weights.owner, options));
  if (spec.shape.rotary_dim == 0) return model;
  CF_TRY_ASSIGN(const Tensor cos, file.input("cos"));
  CF_TRY_ASSIGN(const Tensor sin, file.input("sin"));
  const std::array<std::int64_t, 2> table{fed, spec.shape.rotary_dim / 2};
  CF_TRY(model->set_rope_table({cos.as<float>(), table}, {sin.as<float>(), table}));
  return model;
}

/// Runs the file's ids, and collects the rows of the taps and of the logits. `total` is the sum of the conditions of
/// the sites so far, where the runner measures them.
Result<std::map<std::string, Made>> run(const ModelGolden& file, ModelRunner& runner, bool one_by_one,
                                        const Condition& total) {
  const ModelSpec& spec = runner.model();
  const DType activation = runner.activation();
  const std::int64_t fed = file.meta().fed();
  CF_TRY_ASSIGN(const Tensor ids, file.ids());
  std::map<std::string, Made> made;
  std::map<std::string, TapRows> taps;
  for (const std::string& tap : reference_taps(file))
    taps[tap].rows = Tensor(activation, {fed, spec.shape.hidden_size});
  taps["logits"].rows = Tensor(activation, {fed, spec.shape.vocab_size});
  runner.watch([&](const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors) -> Status {
    if (taps.contains(site.tap())) made[site.tap()] = {.site = site.name(), .rows = {}, .condition = total};
    return append_taps(runner, site, tensors, taps);
  });
  const std::span<const std::int32_t> all(ids.as<std::int32_t>(), std::size_t(fed));
  Tensor logits(activation, {fed, spec.shape.vocab_size});
  if (!one_by_one) CF_TRY(runner.forward(0, 0, all, logits.view<2>()));
  for (std::int64_t i = 0; one_by_one && i < fed; ++i) {
    const ModelRunner::Token token{.slot = 0, .id = all[std::size_t(i)], .position = i};
    CF_TRY(runner.step(std::span(&token, 1)));
  }
  runner.watch({});
  for (auto& [name, tap] : taps) made.at(name).rows = std::move(tap.rows);
  return made;
}

/// The same in a walk's backend.
Result<std::map<std::string, Made>> run(const ModelGolden& file, const golden::GoldenModelWeights& weights,
                                        const ModelWalkOptions& o) {
  const golden::ModelGoldenMeta& m = file.meta();
  const std::int64_t chunk = o.chunk > 0 ? o.chunk : m.fed();
  // The logits of every position, and those of the oracle.
  const double logits = double(m.fed()) * double(m.config.vocab_size) * 4 * double(size_bytes(DType::f64));
  CF_TRY(check_free_memory(logits, file.path() + ": the logits need " + gigabytes(logits)));
  if (o.backend == Backend::cpu) {
    CF_TRY_ASSIGN(const std::unique_ptr<Model> model, make_cpu_model(file, weights, o.activation, chunk));
    return run(file, *model, o.one_by_one, {});
  }
  if (const DType stored = weights.weights.embed_in.dtype; o.activation != stored)
    return Status::error(Code::invalid_argument, file.path() + ": expected activations of " +
                                                     std::string(to_string(stored)) + " on a GPU, the weights', got " +
                                                     std::string(to_string(o.activation)));
  CF_TRY_ASSIGN(const std::unique_ptr<ModelRunner> runner,
                make_device_runner(m.model, m.config, weights.weights, m.fed(), chunk));
  return run(file, *runner, o.one_by_one, {});
}

/// The conditions of the taps' sites, which the oracle measures.
Result<std::map<std::string, Made>> measure(const ModelGolden& file, const golden::GoldenModelWeights& weights) {
  CF_TRY_ASSIGN(const std::unique_ptr<Model> oracle, make_cpu_model(file, weights, DType::f64, file.meta().fed()));
  Condition total{0, 0};
  oracle->measure(&total);
  return run(file, *oracle, false, total);
}

/// The columns of `rows` that each row's ids name.
Tensor chosen_columns(const Tensor& rows, const Tensor& ids) {
  Tensor chosen(DType::f64, ids.shape());
  const std::int64_t top = ids.shape()[1];
  for (std::int64_t i = 0; i < ids.size(); ++i)
    chosen.as<double>()[i] = rows.at(i / top * rows.shape()[1] + ids.as<std::int32_t>()[i]);
  return chosen;
}

std::vector<double> row_of(const Tensor& rows, std::int64_t row) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < rows.shape()[1]; ++i) values.push_back(rows.at(row * rows.shape()[1] + i));
  return values;
}

}  // namespace

bool ModelWalk::ok() const {
  return same + excused == chosen && std::all_of(taps.begin(), taps.end(), [](const TapResult& r) { return r.ok(); });
}

Result<ModelWalk> walk_model(const ModelGolden& file, const golden::GoldenModelWeights& weights,
                             const ModelWalkOptions& options) {
  const golden::ModelGoldenMeta& m = file.meta();
  const DType activation = options.activation;
  CF_TRY_ASSIGN(auto made, run(file, weights, options));
  if (activation != DType::f64) {
    CF_TRY_ASSIGN(auto measured, measure(file, weights));
    for (auto& [tap, rows] : made) rows.condition = measured.at(tap).condition;
  }
  const auto budget_of = [&](const Made& rows) -> Budget {
    if (activation == DType::f64) return {kModelBudget, kModelBudget};
    Budget b = model_budget(m.config, activation, rows.condition);
    const double tables = options.backend == Backend::cuda ? kTableBudget * double(m.config.num_hidden_layers) : 0;
    return b += {tables, tables};
  };
  ModelWalk walk;
  Tensor reference_logits, reference_ids;
  for (auto& [tap, rows] : made) {
    TapResult r;
    r.site = rows.site;
    r.tap = tap;
    r.dtype = activation;
    r.budget = budget_of(rows).rel_l2;
    std::map<std::string, Tensor> variants;
    Tensor ours = rows.rows.clone();
    for (const golden::VariantInfo& v : file.variants()) {
      if (tap == "logits" && m.top > 0) {
        CF_TRY_ASSIGN(golden::TopLogits top, file.top_logits(v.name));
        ours = chosen_columns(rows.rows, top.ids);
        reference_ids = std::move(top.ids);
        variants[v.name] = std::move(top.values);
      } else if (tap == "logits") {
        CF_TRY_ASSIGN(variants[v.name], file.logits(v.name));
      } else if (std::find(v.taps.begin(), v.taps.end(), tap) != v.taps.end()) {
        CF_TRY_ASSIGN(variants[v.name], file.tap(v.name, tap));
      }
    }
    const Tensor& reference = variants.at(std::string(golden::kReference));
    CF_TRY_ASSIGN(r.error, compare(ours, reference));
    const char* const column = tap == "logits" ? (m.top > 0 ? "rank" : "id") : "i";
    r.worst = name_coordinate({{"position", m.fed()}, {column, reference.shape()[1]}}, r.error.worst);
    for (const auto& [name, tensor] : variants) {
      if (name == golden::kReference) continue;
      CF_TRY_ASSIGN(const Comparison theirs, compare(tensor, reference));
      r.producer_rel_l2[name] = theirs.rel_l2;
    }
    if (tap == "logits") reference_logits = reference.clone();
    walk.taps.push_back(std::move(r));
  }

  const Made& logits = made.at("logits");
  const double bound = budget_of(logits).rel_max;
  CF_TRY_ASSIGN(const Tensor ids, file.ids());
  for (std::int64_t p = m.prompt_len - 1; p < m.fed(); ++p) {
    ++walk.chosen;
    const std::int32_t ours = best_id(row_of(logits.rows, p)), theirs = ids.as<std::int32_t>()[p + 1];
    if (ours == theirs) {
      ++walk.same;
      continue;
    }
    const std::vector<double> reference = row_of(reference_logits, p);
    double most = 0, margin = INFINITY;
    for (double v : reference) most = std::max(most, std::abs(v));
    for (std::size_t i = 0; i < reference.size(); ++i) {
      const auto id = reference_ids ? reference_ids.as<std::int32_t>()[p * m.top + std::int64_t(i)] : std::int32_t(i);
      if (id == ours) margin = *std::max_element(reference.begin(), reference.end()) - reference[i];
    }
    walk.excused += margin <= 2 * bound * most;
  }
  return walk;
}

Result<GenerationCheck> check_generation(ModelRunner& runner, const ModelWeights& weights,
                                         std::shared_ptr<const void> owner, std::span<const std::int32_t> prompt,
                                         std::span<const std::int32_t> ids, const Sampling& sampling) {
  const auto count = std::int64_t(ids.size());
  if (count < 1) return Status::error(Code::invalid_argument, "check: expected at least one new id, got none");
  const ModelSpec& model = runner.model();
  const DType activation = runner.activation();
  const std::int64_t vocab = model.shape.vocab_size, fed = std::int64_t(prompt.size()) + count - 1;
  // Feeds the ids to a model, whose logits become rows: row i chooses ids[i].
  const auto feed = [&](ModelRunner& to, Tensor& rows, auto&& before_each) -> Status {
    to.release(0);
    for (std::int64_t i = 0; i < count; ++i) {
      before_each();
      if (i == 0) {
        CF_TRY(to.prefill(0, 0, prompt));
      } else {
        const ModelRunner::Token token{
            .slot = 0, .id = ids[std::size_t(i - 1)], .position = std::int64_t(prompt.size()) + i - 1};
        CF_TRY(to.step(std::span(&token, 1)));
      }
      CF_TRY_ASSIGN(const Tensor row, to.logits(0));
      convert(row.data(), row.dtype(), static_cast<char*>(rows.data()) + i * row.size_bytes(), rows.dtype(), vocab);
    }
    to.release(0);
    return {};
  };
  Tensor ours(activation, {count, vocab}), theirs(DType::f64, {count, vocab});
  CF_TRY(feed(runner, ours, [] {}));
  CF_TRY_ASSIGN(const std::unique_ptr<Model> oracle,
                Model::create(model, weights, owner, {.capacity = fed, .chunk = fed, .activation = DType::f64}));
  Condition of_pass{0, 0}, largest{0, 0};
  oracle->measure(&of_pass);
  const auto keep_largest = [&] {
    largest = {std::max(largest.l2, of_pass.l2), std::max(largest.max, of_pass.max)};
    of_pass = {0, 0};
  };
  CF_TRY(feed(*oracle, theirs, keep_largest));
  keep_largest();
  GenerationCheck check;
  check.budget = model_budget(model, activation, largest);
  CF_TRY_ASSIGN(check.error, compare(ours, theirs));
  if (!sampling.greedy() || sampling.repetition_penalty != 1) return check;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::vector<double> reference = row_of(theirs, i);
    const std::int32_t best = best_id(reference);
    double most = 0;
    for (double v : reference) most = std::max(most, std::abs(v));
    ++check.chosen;
    if (best == ids[std::size_t(i)])
      ++check.same;
    else if (reference[std::size_t(best)] - reference[std::size_t(ids[std::size_t(i)])] <=
             2 * check.budget.rel_max * most)
      ++check.excused;
  }
  return check;
}

}  // namespace cf::apps
