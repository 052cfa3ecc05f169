#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>

#include "apps/bench/report_file.hpp"
#include "apps/cli/interrupt.hpp"
#include "apps/cli/program.hpp"
#include "apps/cli/table.hpp"
#include "apps/cli/terminal.hpp"
#include "apps/model/commands.hpp"
#include "apps/verify/quality.hpp"
#include "golden/checkpoint/token_file.hpp"

namespace cf::apps {
namespace {

using Json = nlohmann::ordered_json;

/// A part of a text that goes through the model alone: ids [first, last), whose predictions from the one of id `scored` on
/// count.
struct Window {
  std::int64_t first, last, scored;
};

/// Windows of `context` ids, `stride` apart; each scores what the one before has not. The first id has no prediction.
/// Source: transformers, docs/source/en/perplexity.md.
std::vector<Window> windows_of(std::int64_t count, std::int64_t context, std::int64_t stride) {
  std::vector<Window> windows;
  for (std::int64_t first = 0, scored = 1; scored < count; first += stride) {
    const std::int64_t last = std::min(first + context, count);
    windows.push_back({first, last, scored});
    scored = last;
  }
  return windows;
}

/// Calls f(i, logits) for every position i of a window that counts, with the logits that predict id i + 1.
Status for_each_prediction(cpu_ref::Model& model, std::span<const std::int32_t> ids, std::int64_t skipped,
                           bool by_token, std::int64_t chunk,
                           const std::function<Status(std::int64_t, const Tensor&)>& f) {
  model.release(0);
  const std::int64_t vocab = model.model().shape.vocab_size;
  if (by_token) {
    for (std::int64_t i = 0; i < std::int64_t(ids.size()); ++i) {
      const ModelRunner::Token token{.slot = 0, .id = ids[std::size_t(i)], .position = i};
      CF_TRY(model.step(std::span(&token, 1)));
      if (i < skipped) continue;
      CF_TRY_ASSIGN(const Tensor row, model.logits(0));
      CF_TRY(f(i, row));
    }
    return {};
  }
  for (std::int64_t first = 0; first < std::int64_t(ids.size()); first += chunk) {
    const auto part = ids.subspan(std::size_t(first), std::min(std::size_t(chunk), ids.size() - std::size_t(first)));
    Tensor rows(model.activation(), {std::int64_t(part.size()), vocab});
    CF_TRY(model.forward(0, first, part, rows.view<2>()));
    for (std::int64_t i = std::max<std::int64_t>(0, skipped - first); i < std::int64_t(part.size()); ++i) {
      Tensor row(rows.dtype(), {vocab});
      convert(static_cast<const char*>(rows.data()) + i * row.size_bytes(), rows.dtype(), row.data(), row.dtype(),
              vocab);
      CF_TRY(f(first + i, row));
    }
  }
  return {};
}

std::vector<double> widened(const Tensor& row) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < row.size(); ++i) values.push_back(row.at(i));
  return values;
}

Json json_of(const Mean& m) { return {{"mean", m.mean}, {"error", m.error}}; }

}  // namespace

Evaluate::Evaluate(CommandLine& line) {
  declare_model(line, model_);
  line.text("--tokens", tokens_, "A .npy file of token ids in one row");
  line.integer("--context", context_, {2, kMaxCapacity}, "Ids that a window holds");
  line.integer("--stride", stride_, {1, kMaxCapacity}, "Ids between the windows' starts, --context when left out");
  line.integer("--limit", limit_, {2, std::int64_t(1) << 40}, "Take the file's first ids alone");
  line.choice("--feed", feed_, {"token", "prompt"},
              "Ids one by one, as a decoder takes them, or by chunks, as prompts");
  line.flag("--oracle", oracle_, "Compare every position with the float64 oracle");
  line.output("--json", json_, "Write all figures as JSON");
  line.require("--tokens");
  line.check([this](Faults& faults) {
    if (stride_ && *stride_ > context_)
      faults.expected("--stride", fmt::format("at most --context {}", context_), std::to_string(*stride_));
    if (oracle_ && model_.activation == DType::f64) faults.add("--oracle: expected with --activation float32");
  });
}

int Evaluate::run(const std::string& command) {
  const Result<checkpoint::TokenFile> read = checkpoint::read_token_file(tokens_);
  if (!read) return fail(read.status());
  if (read->shape.size() > 1 && read->shape[0] != 1)
    return fail(fmt::format("{}: expected ids in one row, got {} rows", tokens_, read->shape[0]));
  std::vector<std::int32_t> ids = read->ids;
  if (limit_ && *limit_ < std::int64_t(ids.size())) ids.resize(std::size_t(*limit_));
  if (ids.size() < 2) return fail(fmt::format("{}: expected at least 2 ids, got {}", tokens_, ids.size()));
  const std::int64_t count = std::int64_t(ids.size()), context = std::min(context_, count);
  const std::int64_t stride = std::min(stride_.value_or(context), context);
  const Result<ModelConfig> config = config_of(choice_of(model_));
  if (!config) return fail(config.status());
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= config->vocab_size)
      return fail(fmt::format("{}: id {}: expected 0 to {}, got {}", tokens_, i, config->vocab_size - 1, ids[i]));

  Result<RunningModel> running = open_model(model_, 1, context);
  if (!running) return fail(running.status());
  std::unique_ptr<cpu_ref::Model> oracle;
  if (oracle_) {
    Result<std::unique_ptr<cpu_ref::Model>> made =
        cpu_ref::Model::create(running->loaded.config, running->loaded.weights, running->loaded.owner,
                               {.capacity = context, .chunk = model_.chunk, .activation = DType::f64});
    if (!made) return fail(made.status());
    oracle = std::move(*made);
  }

  Quality quality;
  int signal = 0;
  {
    const Interrupts interrupts;
    Progress progress("scoring", count);
    for (const Window& w : windows_of(count, context, stride)) {
      // The last id of a window is the target of the one before, and predicts nothing that is scored.
      const auto fed = std::span(ids).subspan(std::size_t(w.first), std::size_t(w.last - w.first - 1));
      const std::int64_t skipped = std::max<std::int64_t>(0, w.scored - w.first - 1);
      std::vector<Tensor> reference;
      if (oracle) {
        const Status s =
            for_each_prediction(*oracle, fed, skipped, false, model_.chunk, [&](std::int64_t, const Tensor& row) {
              reference.push_back(row.clone());
              return Status();
            });
        if (!s) return fail(s);
      }
      const Status s = for_each_prediction(
          *running->model, fed, skipped, feed_ == "token", model_.chunk,
          [&](std::int64_t i, const Tensor& row) -> Status {
            const std::int32_t next = ids[std::size_t(w.first + i + 1)];
            const std::vector<double> ours = widened(row);
            if (oracle)
              quality.add(ours, next, {.values = widened(reference[std::size_t(i - skipped)])});
            else
              quality.add(ours, next);
            progress.set(w.first + i);
            if (!std::isfinite(quality.nll.back()))
              return Status::error(Code::invalid_argument,
                                   fmt::format("{}: the logits behind id {} are not finite", tokens_, w.first + i));
            if (interrupts.noted())
              return Status::error(Code::io_error, fmt::format("interrupted after {} positions", quality.positions()));
            return {};
          });
      signal = interrupts.noted();
      if (!s && !signal) return fail(s);
      if (signal) break;
    }
  }
  if (quality.positions() == 0) return 128 + signal;

  Table table({"what", "value", "+-"});
  Json figures = {{"positions", quality.positions()}};
  const auto add = [&](const char* name, const char* key, double value, std::optional<double> error = {}) {
    table.add({name, fmt::format("{:.6g}", value), error ? fmt::format("{:.3g}", *error) : "-"});
    figures[key] = error ? json_of({value, *error}) : Json(value);
  };
  const auto add_mean = [&](const char* name, const char* key, const Mean& m) { add(name, key, m.mean, m.error); };
  table.add({"positions", std::to_string(quality.positions()), "-"});
  add_mean("perplexity", "perplexity", quality.perplexity());
  add_mean("mean -log p of the next id", "nll", mean_of(quality.nll));
  if (quality.divergence) {
    const Divergence& d = *quality.divergence;
    const auto n = double(quality.positions());
    add_mean("reference's perplexity", "reference_perplexity", quality.reference_perplexity());
    add_mean("log of the perplexities' ratio", "log_perplexity_ratio", mean_of(quality.nll_change));
    add_mean("KL divergence, mean", "kl", mean_of(d.kl));
    std::vector<double> kl = d.kl, change = d.probability_change;
    std::sort(kl.begin(), kl.end());
    std::sort(change.begin(), change.end());
    for (const auto& [name, key, fraction] : {std::tuple{"KL divergence, max", "kl_max", 1.0},
                                              {"KL divergence, 99.9 %", "kl_p99_9", 0.999},
                                              {"KL divergence, 99 %", "kl_p99", 0.99},
                                              {"KL divergence, 90 %", "kl_p90", 0.9},
                                              {"KL divergence, median", "kl_median", 0.5},
                                              {"KL divergence, 10 %", "kl_p10", 0.1},
                                              {"KL divergence, min", "kl_min", 0.0}})
      add(name, key, percentile(kl, fraction));
    std::vector<double> squares;
    for (double c : change) squares.push_back(c * c);
    add("change of the next id's probability, RMS", "probability_change_rms", std::sqrt(mean_of(squares).mean));
    add("change of the next id's probability, max", "probability_change_max", std::max(-change.front(), change.back()));
    add("logits, mean absolute error", "logits_mae", d.absolute / double(d.logits));
    add("logits, largest error", "logits_max_error", d.largest);
    add("logits, relative L2", "logits_rel_l2", d.rel_l2());
    add("same most likely id, %", "top_1_percent", 100 * double(d.top_1) / n);
    add("ids shared by the 5 most likely, %", "top_5_percent", 100 * d.top_5 / n);
    add("ids shared by the 10 most likely, %", "top_10_percent", 100 * d.top_10 / n);
    if (d.diverged) {
      table.add({"first other most likely id, at position", std::to_string(*d.diverged), "-"});
      figures["first_divergence"] = *d.diverged;
      add("the reference's margin there", "first_divergence_margin", d.margin);
    }
  }
  table.print(stdout);
  const Status written = write_report(json_, true, [&] {
    const Json report = {{"program", "cf-model eval"},
                         {"version", CF_VERSION},
                         {"commit", commit()},
                         {"command", command},
                         {"cpu", cpu_name()},
                         {"threads", model_.threads},
                         {"model", running->loaded.config.name},
                         {"weights", running->loaded.description},
                         {"activation_dtype", to_string(model_.activation.value_or(DType::f32))},
                         {"tokens", tokens_},
                         {"context", context},
                         {"stride", stride},
                         {"feed", feed_},
                         {"reference", oracle_ ? "the float64 oracle" : ""},
                         {"complete", signal == 0},
                         {"figures", figures}};
    return report.dump(2) + "\n";
  });
  if (!written) return fail(written);
  if (std::fflush(stdout) != 0) return fail("standard output: cannot be written");
  return signal ? 128 + signal : kOk;
}

}  // namespace cf::apps
