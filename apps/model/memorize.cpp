#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/bench/report_file.hpp"
#include "apps/cli/interrupt.hpp"
#include "apps/cli/program.hpp"
#include "apps/model/commands.hpp"
#include "apps/model/sequences.hpp"
#include "core/atomic_file.hpp"
#include "core/model/memorizer.hpp"
#include "core/model/slot_lease.hpp"
#include "golden/checkpoint/generation_config.hpp"

namespace cf::apps {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

Status bad_file(const std::string& path, std::string what) {
  return Status::error(Code::invalid_file, path + ": " + std::move(what));
}

/// Results in the order of the sequences, and the file that they are appended to: a header, then a line for each
/// sequence. The settings that the results depend on stand in a second file, whose name is the first's with .json.
class Results {
 public:
  Results(std::int64_t first, std::int64_t count, std::int64_t continuation)
      : first_(first), continuation_(continuation), made_(std::size_t(count)) {}

  /// Goes on with the lines of an earlier run, or begins a file. Refuses lines of another run.
  Status open(const std::string& path, const Json& settings);
  void put(const Memorized& m) { made_[std::size_t(m.place - first_)] = m; }
  /// Appends what is known from the head on.
  Status flush();

  /// The sequences at the head whose results are known.
  std::int64_t done() {
    while (done_ < made_.size() && made_[done_]) ++done_;
    return std::int64_t(done_);
  }
  std::int64_t memorised() const {
    return sum([&](const Memorized& m) { return m.prefix == continuation_; });
  }
  std::int64_t equal() const {
    return sum([](const Memorized& m) { return std::max(0, m.equal); });
  }

 private:
  static constexpr std::string_view kHeader = "index,accuracy,equal,prefix";
  template <class F>
  std::int64_t sum(F&& f) const {
    std::int64_t all = 0;
    for (const auto& m : made_) all += m ? std::int64_t(f(*m)) : 0;
    return all;
  }

  std::int64_t first_, continuation_;
  std::vector<std::optional<Memorized>> made_;
  std::size_t done_ = 0, written_ = 0;
  std::string path_;
};

Status Results::open(const std::string& path, const Json& settings) {
  path_ = path;
  const std::string beside = path + ".json";
  const bool is_there = ::access(path.c_str(), F_OK) == 0;
  if (std::ifstream known(beside); known) {
    const Json found = Json::parse(known, nullptr, false);
    if (found != settings)
      return bad_file(beside, "expected the settings of this run, to go on with: " + settings.dump() + ", got " +
                                  (found.is_discarded() ? "no JSON" : found.dump()));
  } else {
    if (is_there) return bad_file(path, "expected a new file, or results with their settings in " + beside);
    CF_TRY(write_file_atomically(beside, settings.dump(2) + "\n"));
  }
  if (!is_there) return write_file_atomically(path, std::string(kHeader) + "\n");
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  const std::size_t whole = text.rfind('\n') + 1;  // without a line that was cut
  std::stringstream lines(text.substr(0, whole));
  std::string line;
  std::getline(lines, line);
  const Status other = bad_file(path, fmt::format("expected the results of sequences from {} on, a line each", first_));
  if (line != kHeader) return other;
  while (std::getline(lines, line)) {
    const std::size_t comma = line.find(','), equal = line.find(',', comma + 1), prefix = line.rfind(',');
    const auto number = [&](std::size_t begin, std::size_t end) {
      return begin < end && end <= line.size() ? parse_integer<std::int64_t>(line.substr(begin, end - begin))
                                               : std::nullopt;
    };
    const auto index = number(0, comma), equal_ids = number(equal + 1, prefix),
               prefix_ids = number(prefix + 1, line.size());
    if (!index || !equal_ids || !prefix_ids || written_ == made_.size() || *index != first_ + std::int64_t(written_))
      return other;
    made_[written_++] = Memorized{*index, std::int32_t(*equal_ids), std::int32_t(*prefix_ids)};
  }
  if (::truncate(path.c_str(), off_t(whole)) != 0) return Status::error(Code::io_error, path + ": cannot be written");
  return {};
}

Status Results::flush() {
  const auto known = std::size_t(done());
  if (path_.empty() || written_ == known) return {};
  std::string lines;
  for (; written_ < known; ++written_) {
    const Memorized& m = *made_[written_];
    std::string score = m.equal < 0 ? "nan" : fmt::format("{}", float(m.equal) / float(continuation_));
    if (score.find_first_not_of("0123456789") == std::string::npos) score += ".0";  // as Python's package writes it
    lines += fmt::format("{},{},{},{}\n", m.place, score, m.equal, m.prefix);
  }
  std::ofstream file(path_, std::ios::binary | std::ios::app);
  file << lines << std::flush;
  return file ? Status() : Status::error(Code::io_error, path_ + ": cannot be written");
}

}  // namespace

Memorize::Memorize(CommandLine& line) {
  declare_model(line, model_);
  line.group("Sequences");
  line.text("--tokens", tokens_, "A .npy file of ids, or bare ids as Pythia's training data has them", "FILE");
  line.integer("--row", row_, {2, kMaxCapacity}, "Ids of a sequence in a file whose shape does not say it");
  line.choice("--id-type", id_type_, {"uint16", "int32"}, "Of bare ids");
  line.integer("--context", context_, {1, kMaxCapacity}, "Ids that are given");
  line.integer("--continuation", continuation_, {1, kMaxCapacity}, "Ids that are made and compared");
  line.integer("--first", first_, {0, std::numeric_limits<std::int64_t>::max()}, "The first sequence");
  line.integer("--count", count_, {1, std::numeric_limits<std::int64_t>::max()}, "Sequences; all when left out");
  line.integer("--slots", slots_, {1, kMaxSlots}, "Sequences at once");
  line.flag("--exact-only", exact_only_, "End a sequence at its first id that differs");
  line.text("--never", never_, "Ids that are not chosen, such as 0,2, or \"none\"; eos_token_id when left out", "IDS");
  line.group("Output");
  line.output("--csv", csv_,
              "Write index, accuracy, equal and prefix of each sequence; a run that was interrupted goes on");
  line.output("--json", json_, "Write the sums and the time as JSON");
  line.reads("--tokens");
  line.require("--tokens");
  line.example("64 sequences of a .npy file",
               "cf-model memorize --model data/checkpoints/stdlib-4m --row 64 \\\n"
               "  --tokens data/checkpoints/stdlib-4m/held_out.npy --count 64");
  line.example("Those that are continued word for word, in a report",
               "cf-model memorize --model data/checkpoints/stdlib-4m --row 32 \\\n"
               "  --tokens data/checkpoints/stdlib-4m/held_out.npy --context 16 \\\n"
               "  --continuation 8 --count 16 --exact-only --json /tmp/cf-memorized.json");
  line.notes(
      "The score is that of EleutherAI/pythia's eval_memorization.py: the share of equal ids, position by position.");
  line.check([&line, this](Faults& faults) {
    if (line.given("--never")) faults.add(parse_stop(never_, never_ids_));
  });
}

int Memorize::run(const std::string& command) {
  Result<Sequences> opened = Sequences::open(tokens_, row_, id_type_);
  if (!opened) return fail(opened.status());
  Sequences& sequences = *opened;
  const std::int64_t length = context_ + continuation_;
  if (sequences.length() < length)
    return fail(fmt::format("{}: expected sequences of at least {} ids, got {}", tokens_, length, sequences.length()));
  if (first_ >= sequences.count())
    return fail(fmt::format("--first: expected 0 to {}, got {}", sequences.count() - 1, first_));
  const std::int64_t most = sequences.count() - first_, count = count_.value_or(most);
  if (count > most) return fail(fmt::format("--count: expected 1 to {}, got {}", most, count));
  if (never_.empty() && !model_.choice.directory.empty()) {
    const Result<checkpoint::GenerationConfig> read = checkpoint::read_generation_config(model_.choice.directory);
    if (!read) return fail(read.status());
    never_ids_ = read->eos_token_ids;
  }
  const std::int64_t slots = std::min(count, slots_);
  Result<RunningModel> running = open_model(model_, slots, length, false);
  if (!running) return fail(running.status());
  const checkpoint::LoadedModel& loaded = running->loaded;
  const DType activation = running->model->activation();

  Results results(first_, count, continuation_);
  if (!csv_.empty()) {
    const Json settings = {{"program", "cf-model memorize"},
                           {"weights", loaded.description},
                           {"activation", to_string(activation)},
                           {"tokens", tokens_},
                           {"first", first_},
                           {"count", count},
                           {"context", context_},
                           {"continuation", continuation_},
                           {"exact_only", exact_only_},
                           {"never", never_ids_}};
    if (const Status ready = results.open(csv_, settings); !ready) return fail(ready);
  }
  const std::int64_t begun = results.done();
  int signal = 0;
  const Clock::time_point start = Clock::now();
  {
    const Interrupts interrupts;
    running->model->check_between([&] { return interrupts.check(); });
    Result<Memorizer> made = Memorizer::create(
        SlotLease::of_all(std::move(running->model)),
        {.context = context_, .continuation = continuation_, .exact_only = exact_only_, .never = never_ids_});
    if (!made) return fail(made.status());
    Memorizer& memorizer = *made;
    constexpr std::int64_t lines_at_once = 1024;
    std::int64_t flushed = begun;
    const auto put = [&](std::span<const Memorized> ended) -> Status {
      for (const Memorized& m : ended) results.put(m);
      CF_TRY(loaded.check_files());
      if (results.done() - flushed < lines_at_once) return {};
      flushed = results.done();
      return results.flush();
    };
    const Status worked = continue_sequences(memorizer, sequences, first_ + begun, first_ + count, length, slots, put);
    const Status flushed_rest = results.flush();
    signal = interrupts.noted();
    if (!worked && signal == 0) return fail(worked);
    if (!flushed_rest) return fail(flushed_rest);
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  const std::int64_t done = results.done();
  const double per_s = seconds > 0 ? double(done - begun) / seconds : 0;
  const double score = done > 0 ? double(results.equal()) / double(done) / double(continuation_) : 0;
  std::string line = fmt::format("{} of {} sequences: {} memorised", done, count, results.memorised());
  if (!exact_only_) line += fmt::format(", mean score {:.6g}", score);
  if (done > begun) line += fmt::format("; {} in {:.2f} s, {:.1f}/s", done - begun, seconds, per_s);
  std::puts(line.c_str());
  const Status written = write_report(json_, true, [&] {
    Json report = {
        {"program", "cf-model memorize"}, {"version", CF_VERSION}, {"commit", commit()}, {"command", command}};
    add_machine(report, model_, *running, activation);
    report["slots"] = slots;
    report["context"] = context_;
    report["continuation"] = continuation_;
    report["sequences"] = done;
    report["memorised"] = results.memorised();
    if (!exact_only_) report["mean_score"] = score;
    report["made_now"] = done - begun;
    report["seconds"] = seconds;
    report["sequences_per_s"] = per_s;
    return report.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  });
  print_notes(loaded.changes());
  if (!written) return fail(written);
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) return fail("standard output: cannot be written");
  return signal != 0 ? 128 + signal : kOk;
}

}  // namespace cf::apps
