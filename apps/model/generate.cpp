#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "apps/bench/report_file.hpp"
#include "apps/cli/interrupt.hpp"
#include "apps/cli/program.hpp"
#include "apps/cli/terminal.hpp"
#include "apps/model/commands.hpp"
#include "apps/verify/model_walk.hpp"
#include "core/model/decoder.hpp"
#include "golden/checkpoint/generation_config.hpp"
#include "golden/checkpoint/vocabulary.hpp"

namespace cf::apps {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// One prompt on its way.
struct Job {
  std::size_t prompt;
  std::optional<Clock::time_point> started{};  // when it got a slot
  double first_s = 0, last_s = 0;              // from then to the first id and to the last
  std::vector<std::int32_t> ids{};
  Finish finish = Finish::running;
  std::string fault{};
  DraftCounts drafts{};
  checkpoint::Utf8Stream text{};
};

std::string finish_name(const Job& j) {
  return j.finish == Finish::running ? "interrupted" : std::string(to_string(j.finish));
}

/// Text needs a tokenizer's rules, which are Python's: the line that names the command for these words.
std::string python_command(const std::string& directory, const std::string& prompt) {
  if (directory.empty()) return "--prompt: expected with --model: a preset has no tokenizer";
  // The error is one line: a prompt of several lines is named by the word TEXT.
  const bool fits = std::none_of(prompt.begin(), prompt.end(), [](unsigned char c) { return c < ' '; });
  return "--prompt: Python encodes text, expected --prompt-ids here, or the command " +
         shell_command({"python3", "-m", "cf_ops", "generate", "--model", directory, "--prompt",
                        fits ? prompt : std::string("TEXT")});
}

/// Joins the group of processes that torchrun's environment variables describe.
Result<std::shared_ptr<RankGroup>> join_group() {
  constexpr double patience_s = 300;  // some processes load their weights later than others
  CF_TRY_ASSIGN(const RankEnvironment environment, rank_environment());
  CF_TRY_ASSIGN(std::unique_ptr<RankGroup> group,
                RankGroup::join(environment, {.join_s = patience_s, .patience_s = patience_s}));
  return std::shared_ptr<RankGroup>(std::move(group));
}

/// What continues prompts prints. A single prompt's text or ids come as they are made; several prompts have a line each
/// when they end.
class Output {
 public:
  Output(bool streams, bool is_silent, std::optional<checkpoint::Vocabulary> vocabulary)
      : streams_(streams), is_silent_(is_silent), vocabulary_(std::move(vocabulary)) {}

  void add(Job& job, std::int32_t id) {
    const bool first = job.ids.empty();
    job.ids.push_back(id);
    if (!streams_) return;
    if (vocabulary_)
      print(job.text.put(vocabulary_->bytes(id)));
    else
      print(fmt::format("{}{}", first ? "" : ",", id));
  }
  void end(Job& job) {
    if (streams_) return print((vocabulary_ ? job.text.finish() : "") + "\n");
    print(fmt::format("{}: {}\n", job.prompt, vocabulary_ ? text_of(job) : fmt::format("{}", fmt::join(job.ids, ","))));
  }
  std::optional<std::string> text(const Job& job) const {
    return vocabulary_ ? std::optional(text_of(job)) : std::nullopt;
  }

 private:
  std::string text_of(const Job& job) const { return vocabulary_->text(job.ids); }
  void print(const std::string& text) const {
    if (is_silent_) return;
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }
  bool streams_, is_silent_;
  std::optional<checkpoint::Vocabulary> vocabulary_;
};

}  // namespace

Generate::Generate(CommandLine& line) {
  declare_model(line, model_);
  line.flag("--processes", processes_,
            "Share the model with other processes of this command, as torchrun's RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT say; rank 0 prints (cpu)");
  line.group("Prompts");
  line.text("--prompt-ids", prompt_ids_,
            "Prompts: ids such as 1,2,3, several separated by \";\", or a .npy file whose rows are prompts", "IDS");
  line.text("--prompt", prompt_, "A text; names the Python command, which encodes it");
  line.integer("--max-new-tokens", max_new_tokens_, {1, kMaxCapacity}, "New tokens of each prompt");
  line.integer("--slots", slots_, {1, kMaxSlots},
               "Prompts that decode at once, when left out as many as there are, up to 64; the others wait");
  line.integer("--capacity", capacity_, {1, kMaxCapacity},
               "Cache entries of a slot; when left out, what the longest prompt and its new tokens need");
  line.text("--stop", stop_,
            "Ids that end a sequence, such as 0,2, or \"none\"; the checkpoint's eos_token_id when left out", "IDS");
  declare_stream(line, model_);
  line.needs("--sinks", "--window");
  line.excludes("--check", "--window");
  line.excludes("--check", "--processes");
  declare_serving(line, model_);
  line.group("Drafts");
  line.choice(
      "--draft", draft_, {"lookup"},
      "What drafts ids that a step verifies together: lookup goes on as the text did behind its last ids' latest "
      "occurrence. The ids are the same as without; on a GPU with --invariant, on the CPU up to 8 slots or with it");
  line.integer("--draft-len", draft_len_, {1, kMostDraft},
               "Ids of a draft, at most; 7 when left out. Drafts are shorter and rare where few of them are right");
  line.needs("--draft-len", "--draft");
  declare_sampling(line, sampling_, top_k_);
  line.number("--repetition-penalty", sampling_.repetition_penalty,
              "Divide or multiply the logits of ids that were seen");
  line.group("Output");
  line.flag("--ids", print_ids_, "Print ids although the checkpoint has a vocabulary");
  line.flag("--check", check_,
            "Compare the logits of every prompt with the float64 oracle; exit code 1 outside the budget");
  line.output("--json", json_, "Write prompts, ids, text and times as JSON");
  line.reads("--prompt-ids");
  line.require("--prompt-ids", "--prompt");
  line.example("Continue token ids and print text",
               "cf-model generate --model data/checkpoints/stdlib-4m --prompt-ids 486,856,8");
  line.example("Draw the continuations of two prompts",
               "cf-model generate --preset pythia-14m --prompt-ids '1,2;3' --temperature 0.8");
  line.check([&line, this](Faults& faults) {
    sampling_.top_k = int(top_k_);
    faults.add(sampling_.validate());
    if (!prompt_.empty()) faults.add(python_command(model_.choice.directory, prompt_));
    if (line.given("--prompt-ids")) {
      Result<std::vector<std::vector<std::int32_t>>> parsed = parse_prompts(prompt_ids_);
      faults.add(parsed.status());
      if (parsed) prompts_ = std::move(*parsed);
    }
    if (processes_ && model_.cuda()) faults.add("--processes: expected with --backend cpu");
    if (check_ && model_.activation == DType::f64) faults.add("--check: expected with --activation float32");
    if (line.given("--stop")) faults.add(parse_stop(stop_, stop_ids_));
  });
}

int Generate::run(const std::string& command) {
  if (processes_) {
    Result<std::shared_ptr<RankGroup>> joined = join_group();
    if (!joined) return fail(joined.status());
    model_.processes = *std::move(joined);
  }
  const bool is_silent = model_.processes && model_.processes->rank() > 0;
  // The other processes hear why this one has ended.
  const auto give_up = [this](const Status& status) {
    if (model_.processes) model_.processes->fail(status);
    return fail(status);
  };
  std::optional<checkpoint::Vocabulary> vocabulary;
  if (!print_ids_) vocabulary = vocabulary_of(model_.choice.directory);
  if (!model_.choice.directory.empty() && stop_.empty()) {
    const Result<checkpoint::GenerationConfig> read = checkpoint::read_generation_config(model_.choice.directory);
    if (!read) return give_up(read.status());
    stop_ids_ = read->eos_token_ids;
  }
  std::size_t longest = 0;
  for (const auto& prompt : prompts_) longest = std::max(longest, prompt.size());
  const std::int64_t slots = slots_.value_or(std::min<std::int64_t>(kSlots, std::int64_t(prompts_.size())));
  // The last token is not appended.
  const std::int64_t capacity = capacity_.value_or(std::int64_t(longest) + max_new_tokens_ - 1);
  const Clock::time_point opened = Clock::now();
  Result<RunningModel> running = open_model(model_, slots, capacity, check_);
  if (!running) return give_up(running.status());
  const double load_s = seconds_since(opened);
  const checkpoint::LoadedModel& loaded = running->loaded;
  ModelRunner& runner = *running->model;  // the decoder's
  Decoder decoder(std::move(running->model), decoder_options(model_));

  Output output(prompts_.size() == 1, is_silent, std::move(vocabulary));
  std::map<Decoder::Sequence, Job> jobs;
  std::vector<Job> done;
  const auto add = [&](Job& job, std::int32_t id) {
    job.last_s = seconds_since(*job.started);
    if (job.ids.empty()) job.first_s = job.last_s;
    output.add(job, id);
  };
  const auto collect = [&](Decoder::Sequence sequence) {
    Job job = std::move(jobs.at(sequence));
    jobs.erase(sequence);
    job.finish = *decoder.finish(sequence);
    job.fault = decoder.status(sequence).message();
    job.drafts = *decoder.drafts(sequence);
    output.end(job);
    done.push_back(std::move(job));
    return decoder.drop(sequence);
  };
  for (std::size_t i = 0; i < prompts_.size(); ++i) {
    SequenceOptions options{.sampling = sampling_,
                            .id = i,
                            .stop = stop_ids_,
                            .max_new_tokens = max_new_tokens_,
                            .draft_tokens = draft_len_};
    if (!draft_.empty()) options.draft = lookup_drafter();
    const Result<Decoder::Sequence> added = decoder.add(prompts_[i], std::move(options));
    if (!added) return fail(fmt::format("prompt {}: {}", i, added.status().message()));
    jobs.emplace(*added, Job{.prompt = i});
  }
  const Clock::time_point start = Clock::now();
  int signal = 0;
  {
    const Interrupts interrupts;
    runner.check_between([&] { return interrupts.check(); });
    while (decoder.active() && !interrupts.noted()) {
      const Clock::time_point step_start = Clock::now();
      const Result<std::vector<Decoder::Emitted>> emitted = decoder.decode(1);
      if (const Status s = loaded.check_files(); !s) return fail(s);
      if (!emitted && !interrupts.noted()) return fail(emitted.status());
      // Where a signal ended the call, some sequences have an id of it all the same.
      for (auto& [sequence, job] : jobs) {
        if (*decoder.waits(sequence)) continue;
        if (!job.started) job.started = step_start;
        const std::vector<std::int32_t> ids = *decoder.ids(sequence);
        while (job.ids.size() < ids.size()) add(job, ids[job.ids.size()]);
      }
      for (Decoder::Sequence sequence : decoder.ended())
        if (const Status s = collect(sequence); !s) return fail(s);
    }
    signal = interrupts.noted();
    runner.check_between({});
  }
  // Where a signal ended the work, the report has the prompts that had begun.
  std::erase_if(jobs, [&](const auto& entry) { return *decoder.waits(entry.first); });
  while (!jobs.empty())
    if (const Status s = collect(jobs.begin()->first); !s) return fail(s);

  const double total_s = seconds_since(start);
  std::size_t tokens = 0;
  double first_s = 0, later_s = 0, later = 0;
  for (const Job& job : done) {
    tokens += job.ids.size();
    first_s += job.first_s / double(done.size());
    later_s += job.last_s - job.first_s;
    later += double(job.ids.size()) - (job.ids.empty() ? 0 : 1);
  }
  const std::string summary = fmt::format(
      "{} prompts, {} new tokens in {:.2f} s: first token after {:.1f} ms on average{}, {:.1f} tokens/s\n", done.size(),
      tokens, total_s, 1e3 * first_s, later > 0 ? fmt::format(", then {:.2f} ms a token", 1e3 * later_s / later) : "",
      double(tokens) / total_s);
  if (!is_silent) std::fputs(summary.c_str(), stderr);
  if (!draft_.empty() && !is_silent) {
    DraftCounts all;
    for (const Job& job : done) {
      all.steps += job.drafts.steps;
      all.drafted += job.drafts.drafted;
      all.accepted += job.drafts.accepted;
    }
    std::fputs(fmt::format("drafts: {} ids in {} steps, {} accepted\n", all.drafted, all.steps, all.accepted).c_str(),
               stderr);
  }
  std::sort(done.begin(), done.end(), [](const Job& a, const Job& b) { return a.prompt < b.prompt; });
  bool failed = false;
  for (const Job& job : done) {
    if (job.fault.empty()) continue;
    failed = true;
    if (!is_silent || !model_.processes->status()) say(fmt::format("prompt {}: {}", job.prompt, job.fault));
  }
  bool passed = true;
  if (check_ && signal == 0)
    for (const Job& job : done) {
      if (job.ids.empty()) continue;
      const Result<GenerationCheck> check =
          check_generation(runner, loaded.weights, loaded.owner, prompts_[job.prompt], job.ids, sampling_);
      if (!check) return fail(check.status());
      fmt::print(
          "check of prompt {} against the float64 oracle: relative L2 {:.2e} (budget {:.2e}), {} of {} greedy ids "
          "are the oracle's{}: {}\n",
          job.prompt, check->error.rel_l2, check->budget.rel_l2, check->same, check->chosen,
          check->excused ? fmt::format(", {} as close as the budget", check->excused) : "",
          check->ok() ? "ok" : in_colour(kFail, stdout));
      if (!check->ok()) fmt::print("reproduce: {}\n", command);
      passed = passed && check->ok();
    }
  const Status written = write_report(is_silent ? "" : json_, true, [&] {
    Json sequences = Json::array();
    for (const Job& job : done) {
      Json j = {{"prompt", prompts_[job.prompt]},
                {"ids", job.ids},
                {"finish", finish_name(job)},
                {"first_token_s", job.first_s},
                {"total_s", job.last_s}};
      if (!draft_.empty())
        j["drafts"] = {{"steps", job.drafts.steps}, {"drafted", job.drafts.drafted}, {"accepted", job.drafts.accepted}};
      if (const auto text = output.text(job)) j["text"] = *text;
      if (!job.fault.empty()) j["fault"] = job.fault;
      sequences.push_back(std::move(j));
    }
    Json report = {
        {"program", "cf-model generate"}, {"version", CF_VERSION}, {"commit", commit()}, {"command", command}};
    add_machine(report, model_, *running, runner.activation());
    if (model_.processes) report["processes"] = model_.processes->ranks();
    report["sampling"] = to_string(sampling_);
    if (!draft_.empty()) report["draft"] = {{"by", draft_}, {"most_ids", draft_len_}};
    report["slots"] = slots;
    report["capacity"] = capacity;
    report["load_s"] = load_s;
    report["total_s"] = total_s;
    report["sequences"] = std::move(sequences);
    return report.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  });
  print_notes(loaded.changes());
  if (!written) return fail(written);
  if (std::ferror(stdout)) return fail("standard output: cannot be written");
  if (signal != 0) return 128 + signal;
  return failed ? kBadInput : passed ? kOk : kComparisonFailed;
}

}  // namespace cf::apps
