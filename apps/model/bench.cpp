#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "apps/bench/model_bench.hpp"
#include "apps/bench/report_file.hpp"
#include "apps/bench/score_bench.hpp"
#include "apps/cli/program.hpp"
#include "apps/cli/sweep.hpp"
#include "apps/cli/table.hpp"
#include "apps/cli/terminal.hpp"
#include "apps/model/commands.hpp"

namespace cf::apps {
namespace {

using Json = nlohmann::ordered_json;

/// A row's figures by the names of JSON and CSV. `impl` is that of a GPU's steps, empty on the CPU.
Json fields(const std::string& impl, const ModelLoad& load, const ModelTiming& t,
            const std::optional<JoinerTiming>& joiner) {
  const double total_s = t.total_ms.median * 1e-3;
  Json j = Json::object();
  if (!impl.empty()) j["impl"] = impl;
  j.update({{"prompt_len", load.prompt_len},
            {"new_tokens", load.new_tokens},
            {"slots", load.slots},
            {"ttft_ms", t.first_token_ms.median},
            {"tpot_ms", t.time_per_token_ms},
            {"inter_token_p50_ms", t.token_ms.median},
            {"inter_token_p90_ms", t.inter_token_p90_ms},
            {"inter_token_p99_ms", t.token_ms.p99},
            {"total_ms", t.total_ms.median},
            {"tokens_per_s", t.tokens_per_s(load)},
            {"gflop", (t.prompt.flops + t.steps.flops) * 1e-9},
            {"tflop_per_s", (t.prompt.flops + t.steps.flops) * 1e-12 / total_s},
            {"prefill_tflop_per_s", t.prompt.flops * 1e-9 / t.first_token_ms.median},
            {"decode_bytes", t.steps.bytes},
            {"read_best_gb_per_s", t.best_read() * 1e-9},
            {"decode_percent_of_read", t.percent_of_read()}});
  if (joiner) {
    j["stall_ms"] = joiner->stall_ms.median;
    j["joiner_ttft_ms"] = joiner->first_token_ms.median;
  }
  return j;
}

/// The same of scores.
Json fields(std::int64_t slots, const ScoreLoad& load, const ScoreTiming& t) {
  return {{"prompt_len", load.prompt_len},
          {"scored", load.scored},
          {"slots", slots},
          {"texts", load.texts},
          {"score_ms", t.score_ms.median},
          {"prefill_ms", t.prefill_ms.median},
          {"score_ids_per_s", t.score_ids_per_s(load)},
          {"prefill_ids_per_s", t.prefill_ids_per_s(load)},
          {"percent_of_prefill", t.percent_of_prefill()}};
}

/// A column of the table: what it shows of a row's figures.
struct Column {
  const char *header, *key;
  int digits = 0;
};

std::vector<Column> columns_of(bool scores, bool has_impl, bool has_joiner) {
  if (scores)
    return {{"prompt", "prompt_len"},
            {"scored", "scored"},
            {"slots", "slots"},
            {"texts", "texts"},
            {"score ms", "score_ms", 2},
            {"prefill ms", "prefill_ms", 2},
            {"score ids/s", "score_ids_per_s"},
            {"prefill ids/s", "prefill_ids_per_s"},
            {"% of prefill", "percent_of_prefill", 1}};
  std::vector<Column> columns{{"prompt", "prompt_len"},
                              {"new", "new_tokens"},
                              {"slots", "slots"},
                              {"TTFT ms", "ttft_ms", 2},
                              {"TPOT ms", "tpot_ms", 3},
                              {"p50 ms", "inter_token_p50_ms", 3},
                              {"p90 ms", "inter_token_p90_ms", 3},
                              {"p99 ms", "inter_token_p99_ms", 3},
                              {"total ms", "total_ms", 1},
                              {"tokens/s", "tokens_per_s", 1},
                              {"GFLOP", "gflop", 2},
                              {"TFLOP/s", "tflop_per_s", 4},
                              {"% of read", "decode_percent_of_read", 1}};
  if (has_impl) columns.insert(columns.begin(), {"impl", "impl"});
  if (has_joiner) columns.insert(columns.end(), {{"stall ms", "stall_ms", 2}, {"joiner TTFT ms", "joiner_ttft_ms", 2}});
  return columns;
}

/// About so many ids are in the texts of a run where --texts is left out.
constexpr std::int64_t kScoredIds = 8192;

}  // namespace

Bench::Bench(CommandLine& line) {
  declare_model(line, model_);
  line.group("Load");
  line.text("--prompt-len", prompt_lens_,
            "Ids of a prompt: numbers and ranges, such as 16,128,512. Caches have room for the longest", "LIST");
  line.text("--new-tokens", new_tokens_, "New tokens of a prompt: numbers and ranges", "LIST");
  line.text("--slots", slots_, "Prompts that decode at once: numbers and ranges", "LIST");
  line.integer("--joiner-len", joiner_len_, {1, kMaxCapacity / 2},
               "Ids of a prompt that joins while the other slots decode: the table has how long these wait for it at "
               "most, and its time to the first id");
  line.text(
      "--score", scored_,
      "Time log-probabilities of given ids in place of new tokens, beside a prefill of the same ids: how many of a "
      "text's last ids are scored. A text is a prompt and one more id. Numbers and ranges",
      "LIST");
  line.integer("--texts", texts_, {1, 1 << 20},
               fmt::format("With --score: texts; when left out about {} ids of them", kScoredIds));
  line.integer("--runs", runs_, {1, 1'000'000}, "Timed runs of each configuration; when left out 3, on a GPU 5");
  line.integer("--warmup", warmup_, {0, 1'000'000}, "Runs before the timed ones; when left out 1, on a GPU 2");
  declare_serving(line, model_);
  line.group("Output");
  line.output("--json", json_, "Write everything as JSON, anew after each configuration");
  line.output("--csv", csv_, "Write a row for each configuration as CSV, anew after each one");
  line.example("One and four prompts at once",
               "cf-model bench --preset pythia-14m --slots 1,4 --new-tokens 8 --runs 1");
  line.example("How long a prompt of 2048 ids stops seven running sequences",
               "cf-model bench --preset pythia-2.8b --slots 8 --new-tokens 1 \\\n"
               "  --joiner-len 2048 --device cuda");
  line.needs("--texts", "--score");
  for (const char* option : {"--new-tokens", "--joiner-len"}) line.excludes("--score", option);
  line.check([this](Faults& faults) {
    const auto take = [&](const char* option, const std::string& text, std::int64_t most,
                          std::vector<std::int64_t>& to) {
      Result<std::vector<std::int64_t>> values = parse_sweep(option, text, {1, most});
      faults.add(values.status());
      if (values) to = std::move(*values);
    };
    take("--prompt-len", prompt_lens_, kMaxCapacity / 2, prompts_);
    take("--new-tokens", new_tokens_, kMaxCapacity / 2, outputs_);
    take("--slots", slots_, kMaxSlots, batches_);
    if (joiner_len_ && !batches_.empty() && std::ranges::min(batches_) == 1)
      faults.expected("--slots", "at least 2 with --joiner-len", "1");
    if (scored_.empty()) return;
    outputs_.clear();
    take("--score", scored_, kMaxCapacity / 2, outputs_);
    if (prompts_.empty() || outputs_.empty()) return;
    const std::int64_t shortest = std::ranges::min(prompts_), most = std::ranges::max(outputs_);
    if (most > shortest)
      faults.expected("--score", fmt::format("at most the {} ids of the shortest prompt", shortest),
                      std::to_string(most));
  });
}

int Bench::run(const std::string& command) {
  const bool scores = !scored_.empty();
  const std::int64_t longest = std::ranges::max(prompts_);
  // While a prompt joins, a running sequence gets a token for each piece of the prompt. A piece may be one id.
  const std::int64_t capacity = scores ? longest
                                       : std::max(longest + std::ranges::max(outputs_) - 1,
                                                  joiner_len_ ? longest + *joiner_len_ + 2 * kStepsBesideJoiner : 0);
  const std::vector<Column> columns = columns_of(scores, model_.cuda(), joiner_len_.has_value());
  std::vector<std::string> headers;
  for (const Column& c : columns) headers.push_back(c.header);
  Table table(headers);
  const std::int64_t runs = runs_.value_or(model_.cuda() ? 5 : 3), warmup = warmup_.value_or(model_.cuda() ? 2 : 1);
  Result<RunningModel> running = load_for(model_, *std::max_element(batches_.begin(), batches_.end()), capacity, false);
  if (!running) return fail(running.status());
  const checkpoint::LoadedModel& loaded = running->loaded;
  DType activation = DType::f32;
  std::vector<Json> rows;
  const auto write_files = [&](bool complete) -> Status {
    CF_TRY(write_report(json_, complete, [&] {
      Json report = {
          {"program", "cf-model bench"}, {"version", CF_VERSION}, {"commit", commit()}, {"command", command}};
      add_machine(report, model_, *running, activation);
      if (running->device) {
        report["impl"] = model_.impl;  // what was asked for; each row has its own
        report["product_library"] = product_library();
        report["product_algorithms"] = product_algorithms();
      }
      report["runs"] = runs;
      report["warmup"] = warmup;
      report["capacity"] = capacity;  // entries of a slot's cache, in all configurations
      if (joiner_len_) report["joiner_len"] = *joiner_len_;
      report["complete"] = complete;
      report["results"] = rows;
      return report.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
    }));
    return write_report(csv_, complete, [&] {
      std::string text;
      for (const Json& row : rows) {
        if (text.empty())
          for (const auto& [key, value] : row.items()) text += (text.empty() ? "" : ",") + key;
        std::string line;
        for (const auto& [key, value] : row.items())
          line += (line.empty() ? "\n" : ",") + value.dump(-1, ' ', false, Json::error_handler_t::replace);
        text += line;
      }
      return text + "\n";
    });
  };
  // The memory that holds the weights: a GPU's is read by a kernel, the CPU's by all threads.
  const auto read_rate = [&]() -> Result<double> {
    if (!running->device) return weights_read_rate(loaded.config, loaded.weights);
    CF_TRY_ASSIGN(const std::vector<double> series, running->device->read_bytes_per_s({.runs = 5, .warmup = 1}));
    return *std::max_element(series.begin(), series.end());
  };
  for (std::size_t i = 0; i < batches_.size(); ++i) {
    const std::int64_t slots = batches_[i];
    if (const Status s = start_model(model_, slots, capacity, *running); !s) return fail(s);
    // The device holds the weights from here on.
    if (running->device && i + 1 == batches_.size()) running->loaded.drop_values();
    activation = running->model->activation();
    const std::shared_ptr<SlotLease> lease = SlotLease::of_all(std::move(running->model));
    Decoder decoder(lease, decoder_options(model_));
    const auto time = [&](std::int64_t prompt_len, std::int64_t n, const std::function<void()>& done) -> Result<Json> {
      if (scores) {
        const std::int64_t texts = texts_.value_or(std::max(slots, (kScoredIds + prompt_len - 1) / prompt_len));
        const ScoreLoad load{.prompt_len = prompt_len, .scored = n, .texts = texts};
        CF_TRY_ASSIGN(const ScoreTiming timed, time_scores(lease, load, runs, warmup, done));
        return fields(slots, load, timed);
      }
      const ModelLoad load{prompt_len, n, slots};
      CF_TRY_ASSIGN(const ModelTiming timed, time_model(decoder, loaded.weights, load, runs, warmup, read_rate, done));
      std::optional<JoinerTiming> joiner;
      if (joiner_len_) {
        CF_TRY_ASSIGN(joiner, time_joiner(decoder, load, *joiner_len_, runs, warmup, done));
      }
      return fields(running->impl, load, timed, joiner);
    };
    for (std::int64_t prompt_len : prompts_)
      for (std::int64_t n : outputs_) {
        {
          std::int64_t done = 0;
          Progress progress(fmt::format("prompt {}, {} {}, {} slots", prompt_len, n, scores ? "scored" : "new", slots),
                            (warmup + runs) * (joiner_len_ ? 2 : 1));
          Result<Json> timed = time(prompt_len, n, [&] { progress.set(++done); });
          if (!timed) return fail(timed.status());
          if (const Status s = loaded.check_files(); !s) return fail(s);
          rows.push_back(std::move(*timed));
        }
        std::vector<std::string> cells;
        for (const Column& c : columns) {
          const Json& value = rows.back()[c.key];
          cells.push_back(value.is_string() ? value.get<std::string>()
                                            : fmt::format("{:.{}f}", value.get<double>(), c.digits));
        }
        table.add(cells);
        if (const Status s = write_files(false); !s) return fail(s);
      }
  }
  fmt::print("{}, {}\n\n", describe_machine(model_, *running), loaded.description);
  table.print(stdout);
  print_notes(loaded.changes());
  if (const Status s = write_files(true); !s) return fail(s);
  if (std::fflush(stdout) != 0) return fail("standard output: cannot be written");
  return kOk;
}

}  // namespace cf::apps
