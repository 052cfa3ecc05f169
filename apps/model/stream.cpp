#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "apps/bench/report_file.hpp"
#include "apps/cli/interrupt.hpp"
#include "apps/cli/program.hpp"
#include "apps/model/commands.hpp"

namespace cf::apps {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// The bytes of this process that are in memory, as Linux counts them; elsewhere 0.
double resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  double all = 0, resident = 0;
  statm >> all >> resident;
  return resident * double(sysconf(_SC_PAGESIZE));
}

/// Some new tokens in a row: how long they took, and what the process had in memory behind them.
struct Stretch {
  std::int64_t tokens = 0;
  double seconds = 0, resident_bytes = 0;
  double tokens_per_s() const { return double(tokens) / seconds; }
};

void print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

}  // namespace

Stream::Stream(CommandLine& line) {
  model_.window = 2044;
  model_.sinks = 4;
  declare_model(line, model_);
  line.group("Stream");
  line.text("--prompt-ids", prompt_ids_, "The prompt: ids such as 1,2,3, or a .npy file of one prompt", "IDS");
  declare_stream(line, model_);
  line.integer("--max-new-tokens", max_new_tokens_, {1, std::numeric_limits<std::int64_t>::max()},
               "New tokens; when left out the stream goes on until a signal ends it");
  line.text("--stop", stop_, "Ids that end the stream, such as 0,2, or \"none\"", "IDS");
  declare_sampling(line, sampling_, top_k_);
  line.group("Output");
  line.flag("--ids", print_ids_, "Print ids although the checkpoint has a vocabulary");
  line.integer("--every", every_, {1, kMaxCapacity}, "Tokens of a stretch whose time --json has");
  line.output("--json", json_, "Write sizes, and time and memory of each stretch, as JSON");
  line.reads("--prompt-ids");
  line.require("--prompt-ids");
  line.example("Draw tokens of a preset", "cf-model stream --preset pythia-14m --prompt-ids 1 --max-new-tokens 64");
  line.example("A text, in memory for 68 tokens and a chunk of a prompt",
               "cf-model stream --model data/checkpoints/stdlib-4m --prompt-ids 486 \\\n"
               "  --window 64 --max-new-tokens 300");
  line.check([&line, this](Faults& faults) {
    sampling_.top_k = int(top_k_);
    faults.add(sampling_.validate());
    faults.add(parse_stop(stop_, stop_ids_));
    if (!line.given("--prompt-ids")) return;
    Result<std::vector<std::vector<std::int32_t>>> parsed = parse_prompts(prompt_ids_);
    faults.add(parsed.status());
    if (!parsed) return;
    if (parsed->size() != 1)
      faults.expected("--prompt-ids", "one prompt", prompt_ids_);
    else
      prompt_ = std::move(parsed->front());
  });
}

int Stream::run(const std::string& command) {
  std::optional<checkpoint::Vocabulary> vocabulary;
  if (!print_ids_) vocabulary = vocabulary_of(model_.choice.directory);
  Result<RunningModel> running = open_model(model_, 1, 1, false);  // a stream's capacity follows from its window
  if (!running) return fail(running.status());
  const checkpoint::LoadedModel& loaded = running->loaded;
  ModelRunner& runner = *running->model;
  const std::int64_t most = max_new_tokens_.value_or(std::numeric_limits<std::int64_t>::max());

  checkpoint::Utf8Stream text;
  std::int64_t made = 0;
  Stretch stretch;
  std::vector<Stretch> stretches;
  int signal = 0;
  double total_s = 0;
  {
    const Interrupts interrupts;
    runner.check_between([&] { return interrupts.check(); });
    Clock::time_point start = Clock::now();
    const auto end_stretch = [&] {
      stretch.seconds = seconds_since(start);
      stretch.resident_bytes = resident_bytes();
      total_s += stretch.seconds;
      stretches.push_back(std::exchange(stretch, {}));
      start = Clock::now();
    };
    Status failed = runner.prefill(0, 0, prompt_);
    while (failed && !interrupts.noted()) {
      const ModelRunner::Draw draw{.slot = 0,
                                   .sampling = sampling_,
                                   .sequence = 0,
                                   .position = runner.length(0),
                                   .history = {},
                                   .left = most - made - 1,
                                   .stop = stop_ids_};
      const Result<std::int32_t> id = runner.choose(std::span(&draw, 1)).front();
      failed = id.status();
      if (!id) break;
      print(vocabulary ? text.put(vocabulary->bytes(*id)) : fmt::format("{}{}", made == 0 ? "" : ",", *id));
      ++made;
      if (++stretch.tokens == every_) end_stretch();
      if (made == most || std::find(stop_ids_.begin(), stop_ids_.end(), *id) != stop_ids_.end()) break;
      const ModelRunner::Token next{.slot = 0, .id = *id, .position = draw.position};
      failed = runner.step(std::span(&next, 1));
      if (failed) failed = loaded.check_files();
    }
    if (stretch.tokens > 0) end_stretch();
    signal = interrupts.noted();
    runner.check_between({});
    if (!failed && signal == 0) return fail(failed);
  }
  print((vocabulary ? text.finish() : "") + "\n");
  const std::int64_t entries = runner.capacity();
  const Result<double> cache_bytes = cache_bytes_of(model_, 1, 1, *running);
  if (!cache_bytes) return fail(cache_bytes.status());
  std::string summary = fmt::format("{} new tokens in {:.2f} s, {:.1f} tokens/s", made, total_s,
                                    total_s > 0 ? double(made) / total_s : 0.0);
  if (stretches.size() > 1)
    summary += fmt::format(": {:.1f} among the first {}, {:.1f} among the last {}", stretches.front().tokens_per_s(),
                           stretches.front().tokens, stretches.back().tokens_per_s(), stretches.back().tokens);
  std::fputs(fmt::format("{}; a cache of {} entries, {:.1f} MB, {:.1f} MB of the process in memory\n", summary, entries,
                         *cache_bytes * 1e-6, resident_bytes() * 1e-6)
                 .c_str(),
             stderr);
  const Status written = write_report(json_, true, [&] {
    Json report = {{"program", "cf-model stream"}, {"version", CF_VERSION}, {"commit", commit()}, {"command", command}};
    add_machine(report, model_, *running, runner.activation());
    report["sampling"] = to_string(sampling_);
    report["window"] = model_.window;
    report["sinks"] = model_.sinks;
    report["cache_entries"] = entries;
    report["cache_bytes"] = *cache_bytes;
    report["prompt_len"] = prompt_.size();
    report["new_tokens"] = made;
    report["total_s"] = total_s;
    report["stretches"] = Json::array();
    for (const Stretch& s : stretches)
      report["stretches"].push_back(
          {{"tokens", s.tokens}, {"seconds", s.seconds}, {"resident_bytes", s.resident_bytes}});
    return report.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  });
  print_notes(loaded.changes());
  if (!written) return fail(written);
  if (std::ferror(stdout)) return fail("standard output: cannot be written");
  return signal != 0 ? 128 + signal : kOk;
}

}  // namespace cf::apps
