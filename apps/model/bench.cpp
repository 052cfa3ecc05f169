#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "apps/bench/model_bench.hpp"
#include "apps/bench/report_file.hpp"
#include "apps/cli/program.hpp"
#include "apps/cli/sweep.hpp"
#include "apps/cli/table.hpp"
#include "apps/cli/terminal.hpp"
#include "apps/model/commands.hpp"

namespace cf::apps {
namespace {

using Json = nlohmann::ordered_json;

struct Row {
  std::string impl;  // of a GPU's steps; empty on the CPU
  ModelLoad load;
  ModelTiming timing;
  std::optional<JoinerTiming> joiner{};
};

/// A row's figures by the names of JSON and CSV.
Json fields(const Row& r) {
  const ModelTiming& t = r.timing;
  const double total_s = t.total_ms.median * 1e-3;
  Json j = Json::object();
  if (!r.impl.empty()) j["impl"] = r.impl;
  j.update({{"prompt_len", r.load.prompt_len},
            {"new_tokens", r.load.new_tokens},
            {"slots", r.load.slots},
            {"ttft_ms", t.first_token_ms.median},
            {"tpot_ms", t.time_per_token_ms},
            {"inter_token_p50_ms", t.token_ms.median},
            {"inter_token_p90_ms", t.inter_token_p90_ms},
            {"inter_token_p99_ms", t.token_ms.p99},
            {"total_ms", t.total_ms.median},
            {"tokens_per_s", t.tokens_per_s(r.load)},
            {"gflop", (t.prompt.flops + t.steps.flops) * 1e-9},
            {"tflop_per_s", (t.prompt.flops + t.steps.flops) * 1e-12 / total_s},
            {"prefill_tflop_per_s", t.prompt.flops * 1e-9 / t.first_token_ms.median},
            {"decode_bytes", t.steps.bytes},
            {"read_best_gb_per_s", t.best_read() * 1e-9},
            {"decode_percent_of_read", t.percent_of_read()}});
  if (r.joiner) {
    j["stall_ms"] = r.joiner->stall_ms.median;
    j["joiner_ttft_ms"] = r.joiner->first_token_ms.median;
  }
  return j;
}

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
  line.integer("--runs", runs_, {1, 1'000'000}, "Timed runs of each configuration; when left out 3, on a GPU 5");
  line.integer("--warmup", warmup_, {0, 1'000'000}, "Runs before the timed ones; when left out 1, on a GPU 2");
  declare_serving(line, model_);
  line.group("Output");
  line.output("--json", json_, "Write everything as JSON, anew after each configuration");
  line.output("--csv", csv_, "Write a row for each configuration as CSV, anew after each one");
  line.example("One and four prompts at once",
               "cf-model bench --preset pythia-14m --slots 1,4 --new-tokens 8 --runs 1");
  line.example("A prompt of 1024 ids on a GPU", "cf-model bench --preset pythia-2.8b --prompt-len 1024 --device cuda");
  line.example("How long a prompt of 2048 ids stops seven running sequences",
               "cf-model bench --preset pythia-2.8b --slots 8 --new-tokens 1 --joiner-len 2048 --device cuda");
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
  });
}

int Bench::run(const std::string& command) {
  const std::int64_t longest = std::ranges::max(prompts_);
  // Whoever decodes while a prompt joins gets a token for each piece of it, which may be one id.
  const std::int64_t capacity = std::max(longest + std::ranges::max(outputs_) - 1,
                                         joiner_len_ ? longest + *joiner_len_ + 2 * kStepsBesideJoiner : 0);
  std::vector<std::string> headers{"prompt", "new",      "slots",    "TTFT ms", "TPOT ms", "p50 ms",   "p90 ms",
                                   "p99 ms", "total ms", "tokens/s", "GFLOP",   "TFLOP/s", "% of read"};
  if (model_.cuda()) headers.insert(headers.begin(), "impl");
  if (joiner_len_) headers.insert(headers.end(), {"stall ms", "joiner TTFT ms"});
  Table table(headers);
  const std::int64_t runs = runs_.value_or(model_.cuda() ? 5 : 3), warmup = warmup_.value_or(model_.cuda() ? 2 : 1);
  Result<RunningModel> running = load_for(model_, *std::max_element(batches_.begin(), batches_.end()), capacity);
  if (!running) return fail(running.status());
  const checkpoint::LoadedModel& loaded = running->loaded;
  DType activation = DType::f32;
  std::vector<Row> rows;
  const auto write_files = [&](bool complete) -> Status {
    CF_TRY(write_report(json_, complete, [&] {
      Json results = Json::array();
      for (const Row& r : rows) results.push_back(fields(r));
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
      report["results"] = std::move(results);
      return report.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
    }));
    return write_report(csv_, complete, [&] {
      std::string text;
      for (const Row& r : rows) {
        const Json row = fields(r);
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
    Decoder decoder(std::move(running->model), decoder_options(model_));
    activation = decoder.activation();
    for (std::int64_t prompt_len : prompts_)
      for (std::int64_t new_tokens : outputs_) {
        Row row{.impl = running->impl, .load = {prompt_len, new_tokens, slots}, .timing = {}};
        {
          std::int64_t done = 0;
          Progress progress(fmt::format("prompt {}, {} new, {} slots", prompt_len, new_tokens, slots),
                            (warmup + runs) * (joiner_len_ ? 2 : 1));
          const auto count = [&] { progress.set(++done); };
          Result<ModelTiming> timed = time_model(decoder, loaded.weights, row.load, runs, warmup, read_rate, count);
          if (!timed) return fail(timed.status());
          if (joiner_len_) {
            Result<JoinerTiming> joined = time_joiner(decoder, row.load, *joiner_len_, runs, warmup, count);
            if (!joined) return fail(joined.status());
            row.joiner = *joined;
          }
          if (const Status s = loaded.check_files(); !s) return fail(s);
          row.timing = std::move(*timed);
        }
        const Json f = fields(row);
        const auto cell = [&](const char* key, int digits) { return fmt::format("{:.{}f}", double(f[key]), digits); };
        std::vector<std::string> cells{std::to_string(prompt_len),
                                       std::to_string(new_tokens),
                                       std::to_string(slots),
                                       cell("ttft_ms", 2),
                                       cell("tpot_ms", 3),
                                       cell("inter_token_p50_ms", 3),
                                       cell("inter_token_p90_ms", 3),
                                       cell("inter_token_p99_ms", 3),
                                       cell("total_ms", 1),
                                       cell("tokens_per_s", 1),
                                       cell("gflop", 2),
                                       cell("tflop_per_s", 4),
                                       cell("decode_percent_of_read", 1)};
        if (!row.impl.empty()) cells.insert(cells.begin(), row.impl);
        if (row.joiner) cells.insert(cells.end(), {cell("stall_ms", 2), cell("joiner_ttft_ms", 2)});
        table.add(cells);
        rows.push_back(std::move(row));
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
