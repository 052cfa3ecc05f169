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
#include "apps/model/text_score.hpp"
#include "apps/verify/quality.hpp"
#include "core/model/slot_lease.hpp"
#include "cpu_ref/model.hpp"
#include "golden/file/model_golden.hpp"

namespace cf::apps {
namespace {

using Json = nlohmann::ordered_json;

/// Calls f(i, logits) for every position i of a window that counts, with the logits that predict id i + 1.
Status for_each_prediction(ModelRunner& model, std::span<const std::int32_t> ids, std::int64_t skipped, bool by_token,
                           std::int64_t chunk, const std::function<Status(std::int64_t, const Tensor&)>& f) {
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
    const double needed = double(part.size()) * double(vocab) * double(size_bytes(model.activation()));
    CF_TRY(check_free_memory(needed, fmt::format("the logits of {} ids need {}", part.size(), gigabytes(needed))));
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

/// Row `row` of a matrix, widened.
std::vector<double> widened(const Tensor& rows, std::int64_t row) {
  const std::int64_t columns = rows.shape()[1];
  std::vector<double> values;
  for (std::int64_t i = 0; i < columns; ++i) values.push_back(rows.at(row * columns + i));
  return values;
}

/// The logits of every position of a golden file, of one variant.
class VariantLogits {
 public:
  static Result<VariantLogits> read(const golden::ModelGolden& file, const std::string& variant) {
    VariantLogits v;
    if (file.meta().top == 0) {
      CF_TRY_ASSIGN(v.all_, file.logits(variant));
    } else {
      CF_TRY_ASSIGN(v.top_, file.top_logits(variant));
    }
    return v;
  }
  /// Calls f(row) with the logits of a position.
  template <class F>
  void with_row(std::int64_t position, F&& f) const {
    if (all_) return f(LogitsRow{.values = widened(all_, position)});
    const std::int64_t top = top_.ids.shape()[1];
    const std::vector<double> values = widened(top_.values, position);
    f(LogitsRow{.values = values,
                .ids = std::span(top_.ids.as<std::int32_t>() + position * top, std::size_t(top)),
                .log_sum_exp = top_.log_sum_exp.at(position)});
  }

 private:
  Tensor all_;
  golden::TopLogits top_;
};

Json json_of(const Mean& m) { return {{"mean", m.mean}, {"error", m.error}}; }

/// A column of figures: whose they are, and what was seen.
struct Column {
  std::string name;
  Quality quality;
};

/// A row of the table: its name, its key in JSON, what finds the figure of a column, and whether the figure has an
/// error.
struct Figure {
  const char *name, *key;
  std::function<std::optional<Mean>(const Quality&)> of;
  bool has_error = false;
};

const std::vector<Figure>& figures() {
  const auto plain = [](auto f) { return [f](const Quality& q) -> std::optional<Mean> { return Mean{f(q), 0}; }; };
  // Of the divergence, where there is a reference.
  const auto apart = [](auto f) {
    return [f](const Quality& q) -> std::optional<Mean> {
      if (!q.divergence) return std::nullopt;
      return Mean{f(*q.divergence, double(q.positions)), 0};
    };
  };
  const auto kl_percentile = [&](double fraction) {
    return apart([fraction](const Divergence& d, double) {
      std::vector<double> sorted = d.kl;
      std::sort(sorted.begin(), sorted.end());
      return percentile(sorted, fraction);
    });
  };
  // A series of which a reference's largest logits may say nothing.
  const auto known = [](auto series, auto f) {
    return [series, f](const Quality& q) -> std::optional<Mean> {
      if (!q.divergence || series(q).empty()) return std::nullopt;
      return f(q);
    };
  };
  const auto change = [](const Quality& q) { return q.divergence->probability_change; };
  static const std::vector<Figure> all{
      {"positions", "positions", plain([](const Quality& q) { return double(q.positions); })},
      {"perplexity", "perplexity",
       [](const Quality& q) { return q.knows_all() ? std::optional(q.perplexity()) : std::nullopt; }, true},
      {"mean -log p of the next id", "nll",
       [](const Quality& q) { return q.knows_all() ? std::optional(mean_of(q.nll)) : std::nullopt; }, true},
      {"reference's perplexity", "reference_perplexity",
       [](const Quality& q) {
         return q.knows_all() && q.reference_nll.size() == q.nll.size() ? std::optional(q.reference_perplexity())
                                                                        : std::nullopt;
       },
       true},
      {"log of the perplexities' ratio", "log_perplexity_ratio",
       known([](const Quality& q) { return q.nll_change; }, [](const Quality& q) { return mean_of(q.nll_change); }),
       true},
      {"KL divergence, mean", "kl",
       known([](const Quality& q) { return q.divergence->kl; },
             [](const Quality& q) { return mean_of(q.divergence->kl); }),
       true},
      {"KL divergence, max", "kl_max", kl_percentile(1)},
      {"KL divergence, 99.9 %", "kl_p99_9", kl_percentile(0.999)},
      {"KL divergence, 99 %", "kl_p99", kl_percentile(0.99)},
      {"KL divergence, 90 %", "kl_p90", kl_percentile(0.9)},
      {"KL divergence, median", "kl_median", kl_percentile(0.5)},
      {"KL divergence, 10 %", "kl_p10", kl_percentile(0.1)},
      {"KL divergence, min", "kl_min", kl_percentile(0)},
      {"change of the next id's probability, RMS", "probability_change_rms",
       known(change,
             [change](const Quality& q) {
               double squares = 0;
               for (double c : change(q)) squares += c * c;
               return Mean{std::sqrt(squares / double(change(q).size())), 0};
             })},
      {"change of the next id's probability, max", "probability_change_max",
       known(change,
             [change](const Quality& q) {
               double most = 0;
               for (double c : change(q)) most = std::max(most, std::abs(c));
               return Mean{most, 0};
             })},
      {"logits, mean absolute error", "logits_mae",
       apart([](const Divergence& d, double) { return d.absolute / double(d.logits); })},
      {"logits, largest error", "logits_max_error", apart([](const Divergence& d, double) { return d.largest; })},
      {"logits, relative L2", "logits_rel_l2", apart([](const Divergence& d, double) { return d.rel_l2(); })},
      {"same most likely id, %", "top_1_percent",
       apart([](const Divergence& d, double n) { return 100 * double(d.top_1) / n; })},
      {"ids shared by the 5 most likely, %", "top_5_percent",
       apart([](const Divergence& d, double n) { return 100 * d.top_5 / n; })},
      {"ids shared by the 10 most likely, %", "top_10_percent",
       apart([](const Divergence& d, double n) { return 100 * d.top_10 / n; })},
      {"first other most likely id, at position", "first_divergence",
       [](const Quality& q) -> std::optional<Mean> {
         if (!q.divergence || !q.divergence->diverged) return std::nullopt;
         return Mean{double(*q.divergence->diverged), 0};
       }},
      {"the reference's margin there", "first_divergence_margin",
       [](const Quality& q) -> std::optional<Mean> {
         if (!q.divergence || !q.divergence->diverged) return std::nullopt;
         return Mean{q.divergence->margin, 0};
       }},
  };
  return all;
}

/// A table with a column for each series, and the same as JSON by their names.
Json print_figures(const std::vector<Column>& columns) {
  std::vector<std::string> headers{"what"};
  for (const Column& c : columns) headers.push_back(c.name);
  Table table(headers);
  Json json = Json::object();
  for (const Figure& f : figures()) {
    std::vector<std::string> cells{f.name};
    bool any = false;
    for (const Column& c : columns) {
      const std::optional<Mean> value = f.of(c.quality);
      any = any || value;
      cells.push_back(!value        ? "-"
                      : f.has_error ? fmt::format("{:.6g} +- {:.2g}", value->mean, value->error)
                                    : fmt::format("{:.6g}", value->mean));
      if (value) json[c.name][f.key] = f.has_error ? json_of(*value) : Json(value->mean);
    }
    if (any) table.add(cells);
  }
  table.print(stdout);
  return json;
}

}  // namespace

Evaluate::Evaluate(CommandLine& line) {
  declare_model(line, model_);
  line.group("Text");
  line.text("--tokens", tokens_, "A .npy file of token ids in one row", "FILE");
  line.text("--reference", reference_,
            "A golden file of the whole model in place of --tokens: its ids are scored, beside Hugging Face's own runs",
            "FILE");
  line.integer("--context", context_, {2, kMaxCapacity}, "Ids that a window holds");
  line.integer("--stride", stride_, {1, kMaxCapacity}, "Ids between the windows' starts, --context when left out");
  line.integer("--limit", limit_, {2, std::int64_t(1) << 40}, "Take the first ids alone");
  line.choice("--feed", feed_, {"token", "prompt"},
              "Ids one by one, as a decoder takes them, or by chunks, as prompts");
  line.integer("--slots", slots_, {1, kMaxSlots},
               "With --feed prompt: windows that are read at once; no more than one where logits are compared");
  line.flag("--oracle", oracle_, "Compare every position with the float64 oracle");
  line.group("Output");
  line.output("--json", json_, "Write all figures as JSON");
  for (const char* option : {"--tokens", "--reference"}) line.reads(option);
  line.example("Perplexity of the first ids of a text",
               "cf-model eval --model data/checkpoints/stdlib-4m --limit 200 \\\n"
               "      --tokens data/checkpoints/stdlib-4m/held_out.npy");
  line.example("The same beside the float64 oracle, in windows that overlap by half",
               "cf-model eval --model data/checkpoints/stdlib-4m --limit 200 --oracle \\\n"
               "      --context 128 --stride 64 --tokens data/checkpoints/stdlib-4m/held_out.npy");
  line.require_one("--tokens", "--reference");
  for (const char* option : {"--context", "--stride", "--oracle"}) line.excludes("--reference", option);
  for (const char* option : {"--oracle", "--reference"}) line.excludes("--slots", option);
  line.check([this](Faults& faults) {
    if (slots_ && feed_ != "prompt") faults.add("--slots: expected with --feed prompt");
    if (stride_ && *stride_ > context_)
      faults.expected("--stride", fmt::format("at most --context {}", context_), std::to_string(*stride_));
    if (oracle_ && model_.activation == DType::f64) faults.add("--oracle: expected with --activation float32");
  });
}

Result<std::vector<std::int32_t>> Evaluate::read_ids(const ModelConfig& config) {
  std::vector<std::int32_t> ids;
  const std::string& path = reference_.empty() ? tokens_ : reference_;
  if (reference_.empty()) {
    CF_TRY_ASSIGN(ids, read_text(tokens_, limit_));
  } else {
    CF_TRY_ASSIGN(const golden::ModelGolden file, golden::ModelGolden::open(reference_));
    CF_TRY_ASSIGN(const Tensor read, file.ids());
    ids.assign(read.as<std::int32_t>(), read.as<std::int32_t>() + read.size());
    if (limit_ && *limit_ < std::int64_t(ids.size())) ids.resize(std::size_t(*limit_));
  }
  CF_TRY(check_text(path, ids, config.vocab_size));
  return ids;
}

int Evaluate::run(const std::string& command) {
  const Result<checkpoint::ModelSource> opened = checkpoint::ModelSource::open(choice_of(model_));
  if (!opened) return fail(opened.status());
  const Result<std::vector<std::int32_t>> read = read_ids(opened->config());
  if (!read) return fail(read.status());
  const std::vector<std::int32_t>& ids = *read;
  const std::string& source = reference_.empty() ? tokens_ : reference_;
  const std::int64_t count = std::int64_t(ids.size());
  // A golden file's run is one window.
  const std::int64_t context = reference_.empty() ? std::min(context_, count) : count;
  const std::int64_t stride = std::min(stride_.value_or(context), context);

  // A window's last id is scored and not fed.
  const std::int64_t capacity = std::max<std::int64_t>(1, context - 1);
  Result<RunningModel> running = open_model(model_, slots_.value_or(1), capacity, oracle_);
  if (!running) return fail(running.status());
  const DType activation = running->model->activation();
  std::vector<Column> columns{{std::string(to_string(activation)), {}}};
  std::unique_ptr<cpu_ref::Model> oracle;
  if (oracle_) {
    Result<std::unique_ptr<cpu_ref::Model>> made =
        cpu_ref::Model::create(running->loaded.config, running->loaded.weights, running->loaded.owner,
                               {.capacity = capacity, .chunk = model_.chunk_tokens(), .activation = DType::f64});
    if (!made) return fail(made.status());
    oracle = std::move(*made);
  }
  std::optional<VariantLogits> reference;
  if (!reference_.empty()) {
    const Result<golden::ModelGolden> file = golden::ModelGolden::open(reference_);
    if (!file) return fail(file.status());
    Result<VariantLogits> logits = VariantLogits::read(*file, std::string(golden::kReference));
    if (!logits) return fail(logits.status());
    reference = std::move(*logits);
    for (const golden::VariantInfo& v : file->variants()) {
      if (v.name == golden::kReference) continue;
      const Result<VariantLogits> theirs = VariantLogits::read(*file, v.name);
      if (!theirs) return fail(theirs.status());
      Column column{v.name, {}};
      for (std::int64_t i = 0; i + 1 < count; ++i)
        theirs->with_row(i, [&](const LogitsRow& row) {
          reference->with_row(i, [&](const LogitsRow& r) { column.quality.add(row, ids[std::size_t(i + 1)], r); });
        });
      columns.push_back(std::move(column));
    }
  }

  int signal = 0;
  {
    const Interrupts interrupts;
    for (ModelRunner* model : {running->model.get(), static_cast<ModelRunner*>(oracle.get())})
      if (model) model->check_between([&] { return interrupts.check(); });
    const auto check = [&]() -> Status {
      CF_TRY(running->loaded.check_files());
      return interrupts.check();
    };
    Progress progress("scoring", count);
    Quality& quality = columns.front().quality;
    const std::vector<Window> windows = windows_of(count, context, stride);
    // Where no logits are compared, those of prompts need not be kept.
    const bool scores = !oracle && !reference && feed_ == "prompt";
    if (scores) {
      const auto add = [&](std::int64_t, double log_prob) { quality.add(log_prob); };
      const auto tell = [&](std::int64_t done) { progress.set(done); };
      const Status s =
          score_windows(SlotLease::of_all(std::move(running->model)), ids, windows, source, check, tell, add);
      signal = interrupts.noted();
      if (!s && !signal) return fail(s);
    }
    for (const Window& w : scores ? std::vector<Window>() : windows) {
      // The last id of a window is the target of the one before, and predicts nothing that is scored.
      const auto fed = std::span(ids).subspan(std::size_t(w.first), std::size_t(w.last - w.first - 1));
      const std::int64_t skipped = std::max<std::int64_t>(0, w.scored - w.first - 1);
      std::vector<Tensor> expected;
      Status s;
      if (oracle)
        s = for_each_prediction(*oracle, fed, skipped, false, model_.chunk_tokens(),
                                [&](std::int64_t, const Tensor& row) {
                                  expected.push_back(row.clone());
                                  return check();
                                });
      if (s)
        s = for_each_prediction(
            *running->model, fed, skipped, feed_ == "token", model_.chunk_tokens(),
            [&](std::int64_t i, const Tensor& row) -> Status {
              CF_TRY(check());
              const std::int32_t next = ids[std::size_t(w.first + i + 1)];
              const std::vector<double> ours = widened(row);
              if (oracle)
                quality.add({.values = ours}, next, {.values = widened(expected[std::size_t(i - skipped)])});
              else if (reference)
                reference->with_row(i, [&](const LogitsRow& r) { quality.add({.values = ours}, next, r); });
              else
                quality.add({.values = ours}, next);
              progress.set(w.first + i);
              if (!std::isfinite(quality.nll.back()))
                return Status::error(Code::invalid_argument,
                                     fmt::format("{}: the logits behind id {} are not finite", source, w.first + i));
              return {};
            });
      signal = interrupts.noted();
      if (!s && !signal) return fail(s);
      if (signal) break;
    }
  }
  const Json values = print_figures(columns);
  const Status written = write_report(json_, true, [&] {
    Json report = {{"program", "cf-model eval"}, {"version", CF_VERSION}, {"commit", commit()}, {"command", command}};
    add_machine(report, model_, *running, activation);
    report["tokens"] = source;
    report["context"] = context;
    report["stride"] = stride;
    report["feed"] = feed_;
    report["reference"] = oracle_ ? "the float64 oracle" : reference_.empty() ? "" : "float64";
    report["complete"] = signal == 0;
    report["figures"] = values;
    return report.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  });
  print_notes(running->loaded.changes());
  if (!written) return fail(written);
  if (std::fflush(stdout) != 0) return fail("standard output: cannot be written");
  return signal ? 128 + signal : kOk;
}

}  // namespace cf::apps
