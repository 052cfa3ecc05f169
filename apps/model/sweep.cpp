#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "apps/bench/report_file.hpp"
#include "apps/cli/interrupt.hpp"
#include "apps/cli/program.hpp"
#include "apps/cli/table.hpp"
#include "apps/model/commands.hpp"
#include "apps/model/revision_runs.hpp"
#include "apps/model/sweep_rows.hpp"
#include "core/atomic_file.hpp"
#include "cpu_ref/cpu_ref.hpp"

namespace cf::apps {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begun) { return std::chrono::duration<double>(Clock::now() - begun).count(); }

/// A folder's path with its symbolic links resolved. A path that is no folder is refused later, where it is read.
std::string real_path(const fs::path& path) {
  std::error_code error;
  const fs::path real = fs::weakly_canonical(path, error);
  return error ? path.string() : real.string();
}

/// Whether a path is that of a file, or of one that is not yet there: a pipe is written once, and never read.
bool is_file_to_go_on(const std::string& path) {
  std::error_code none;
  const fs::file_status status = fs::status(path, none);
  return !path.empty() && (!fs::exists(status) || fs::is_regular_file(status));
}

/// The folders of a folder that have a config.json, in the order of their steps.
Result<std::vector<std::string>> folders_in(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    if (std::error_code none; fs::exists(it->path() / "config.json", none))
      names.push_back(it->path().filename().string());
  if (error) return Status::error(Code::io_error, directory + ": " + error.message());
  if (names.empty())
    return Status::error(Code::not_found, directory + ": expected folders of revisions, each with a config.json");
  std::ranges::sort(names, {}, [](const std::string& name) { return std::pair(checkpoint::step_of(name, -1), name); });
  return names;
}

/// Fills a revision's row.
Status measure(SweepRow& row, ReadRevision& read, RevisionRunner& runner, SweepMetrics& metrics) {
  row.load_s = read.seconds;
  row.revision.identity = std::move(read.identity);
  CF_TRY(read.status);
  const Clock::time_point begun = Clock::now();
  CF_TRY(runner.take(std::move(read.loaded)));
  row.swap_s = seconds_since(begun);
  CF_TRY_ASSIGN(row.metrics, metrics.measure(runner, row.revision.name, std::move(read.eos_token_ids)));
  return {};
}

void print_table(const std::vector<SweepRow>& rows) {
  const std::vector<std::string> names = metrics_of(rows);
  std::vector<std::string> headers{"revision", "step"};
  headers.insert(headers.end(), names.begin(), names.end());
  headers.push_back("sha256");
  Table table(headers);
  for (const SweepRow& row : rows) {
    std::vector<std::string> cells{row.revision.name, std::to_string(row.revision.step)};
    for (const std::string& name : names) {
      const double* const value = row.find(name);
      cells.push_back(value ? fmt::format("{:.6g}", *value) : "-");
    }
    cells.push_back(row.revision.identity.sha256.substr(0, 12));
    table.add(cells);
  }
  table.print(stdout);
}

}  // namespace

Sweep::Sweep(CommandLine& line) {
  line.group("Revisions");
  line.words("--revisions,--folders", revisions_, "Checkpoint directories, one a revision", "DIR");
  line.text("--model", model_folder_, "A directory whose folders are revisions, in the order of their steps", "DIR");
  for (const char* option : {"--revisions", "--model"}) line.reads(option);
  line.require_one("--revisions", "--model");
  declare_backend(line, model_);
  line.group("Metrics");
  line.words(
      "--metric", options_.names,
      "What is measured, one or more: perplexity and its error; surprisal, the mean and deviation of "
      "-log p of each id; memorization, the share of equal ids, and of sequences that are continued word for word",
      "NAME", {kPerplexity, kSurprisal, kMemorization});
  line.text("--tokens", options_.tokens, "A .npy file of token ids in one row, for perplexity and surprisal", "FILE");
  line.integer("--context", options_.context, {2, kMaxCapacity}, "Ids that a window of the text holds");
  line.integer("--stride", options_.stride, {1, kMaxCapacity},
               "Ids between the windows' starts, --context when left out");
  line.integer("--limit", options_.limit, {2, std::int64_t(1) << 40}, "Take the first ids of the text alone");
  line.text("--sequences", options_.sequences,
            "Sequences for memorization, as memorize --tokens takes them: 32 ids are given, the next 32 compared",
            "FILE");
  line.integer("--row", options_.row, {64, kMaxCapacity}, "Ids of a sequence in a file whose shape does not say it");
  line.choice("--id-type", options_.id_type, {"uint16", "int32"}, "Of bare ids");
  line.integer("--count", options_.count, {1, std::numeric_limits<std::int64_t>::max()},
               "Take the first sequences alone; all when left out");
  line.integer("--slots", options_.slots, {1, kMaxSlots}, "Sequences at once, and on a GPU windows of the text");
  line.group("Output");
  line.output("--json", json_,
              "Write all that is known of each revision, after each; a sweep that was interrupted goes on with it");
  line.output("--csv", csv_, "Write the table as CSV");
  line.text("--per-token", options_.per_token, "Write the surprisal of each id as DIR/REVISION.csv", "DIR");
  for (const char* option : {"--tokens", "--sequences"}) line.reads(option);
  line.require("--metric");
  line.example("Perplexity by step, of one revision or more",
               "cf-model sweep --revisions data/checkpoints/stdlib-4m --metric perplexity \\\n"
               "  --tokens data/checkpoints/stdlib-4m/held_out.npy --limit 256 --context 128");
  line.example("Two metrics, and all that is known of the revisions in files",
               "cf-model sweep --revisions data/checkpoints/stdlib-4m \\\n"
               "  --metric surprisal memorization --count 16 --limit 256 --context 128 \\\n"
               "  --tokens data/checkpoints/stdlib-4m/held_out.npy \\\n"
               "  --sequences data/checkpoints/stdlib-4m/held_out.npy --row 64 \\\n"
               "  --json /tmp/cf-sweep.json --csv /tmp/cf-sweep.csv");
  line.notes(
      "A revision's step is the number behind \"step\" in its name, else the last number. The next revision is read "
      "while one is measured. Each has the SHA-256 of its files and tensors in --json. A revision is named on stderr "
      "where it is damaged, has another config, shares matrices with another or has them under other names, or where "
      "its weights lie far from those of the steps before and after; the exit code is then 1.");
  line.notes(
      "The rows are those of cf_ops.sweep in Python, which also takes names of the Hugging Face hub, texts, "
      "lm-evaluation-harness and functions of yours. Python draws the plot: cf_ops.Sweep.read(\"sweep.json\")"
      ".plot(\"sweep.svg\").");
  line.check([&line, this](Faults& faults) {
    const auto wants = [&](const char* name) {
      return std::ranges::find(options_.names, name) != options_.names.end();
    };
    const bool text = wants(kPerplexity) || wants(kSurprisal), memorization = wants(kMemorization);
    if (text && !line.given("--tokens")) faults.add("--tokens: required for perplexity and surprisal, not given");
    if (memorization && !line.given("--sequences")) faults.add("--sequences: required for memorization, not given");
    for (const char* option : {"--tokens", "--context", "--stride", "--limit"})
      if (!text && memorization && line.given(option))
        faults.add(fmt::format("{}: expected with --metric perplexity or surprisal", option));
    for (const char* option : {"--sequences", "--row", "--id-type", "--count"})
      if (!memorization && text && line.given(option))
        faults.add(fmt::format("{}: expected with --metric memorization", option));
    if (line.given("--per-token") && !wants(kSurprisal)) faults.add("--per-token: expected with --metric surprisal");
    if (options_.stride && *options_.stride > options_.context)
      faults.expected("--stride", fmt::format("at most --context {}", options_.context),
                      std::to_string(*options_.stride));
    for (const auto* names : {&revisions_, &options_.names}) {
      std::set<std::string> seen;
      for (const std::string& name : *names)
        if (!seen.insert(name).second)
          faults.add(fmt::format("{}: expected each once, got {} twice",
                                 names == &options_.names ? "--metric" : "--revisions", name));
    }
  });
}

std::vector<SweepRow> Sweep::rows() const {
  std::vector<SweepRow> rows;
  for (const std::string& name : revisions_) {
    const fs::path path = model_folder_.empty() ? fs::path(name) : fs::path(model_folder_) / name;
    rows.push_back({.revision = {.name = name, .step = checkpoint::step_of(name, std::int64_t(rows.size()))},
                    .directory = real_path(path)});
  }
  return rows;
}

int Sweep::run(const std::string& command) {
  if (!model_folder_.empty()) {
    Result<std::vector<std::string>> found = folders_in(model_folder_);
    if (!found) return fail(found.status());
    revisions_ = std::move(*found);
  }
  if (!options_.per_token.empty()) {
    std::set<std::string> files;
    for (const std::string& name : revisions_)
      if (!files.insert(folder_of(name)).second)
        return fail(fmt::format("--per-token: expected folders of different names, got {} twice", folder_of(name)));
  }
  Result<SweepMetrics> opened = SweepMetrics::open(options_);
  if (!opened) return fail(opened.status());
  SweepMetrics& metrics = *opened;
  Json settings = {{"backend", model_.backend},
                   {"activation", model_.cuda() ? Json() : Json(to_string(model_.activation.value_or(DType::f32)))}};
  settings.update(metrics.settings());
  const Json about = {{"program", "cf-model sweep"},
                      {"model", model_folder_.empty() ? Json() : Json(real_path(model_folder_))},
                      {"metrics", options_.names},
                      {"settings", settings}};

  std::vector<SweepRow> rows = this->rows();
  Result<std::map<std::string, SweepRow>> kept =
      is_file_to_go_on(json_) ? read_rows(json_, about) : std::map<std::string, SweepRow>();
  if (!kept) return fail(kept.status());
  std::vector<SweepRow*> todo;
  for (SweepRow& row : rows) {
    const auto known = kept->find(row.revision.name);
    if (known == kept->end()) {
      todo.push_back(&row);
      continue;
    }
    row = std::move(known->second);
    kept->erase(known);  // what stays there was not asked for, and is written again
  }
  const auto report = [&] {
    Json json = about;
    json["version"] = CF_VERSION;
    json["commit"] = commit();
    json["command"] = command;
    json["faults"] = Json::array();
    for (const auto& fault : faults_of(rows)) json["faults"].push_back(fault.revision + ": " + fault.what);
    json["revisions"] = Json::array();
    for (const SweepRow& row : rows)
      if (row.is_done()) json["revisions"].push_back(json_of(row));
    for (const auto& [name, row] : *kept) json["revisions"].push_back(json_of(row));
    return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
  };

  if (const Status ready = cpu_ref::start_threads("--threads, or OMP_NUM_THREADS", model_.threads); !ready)
    return fail(ready);
  int signal = 0;
  {
    const Interrupts interrupts;
    const auto check = [&] { return interrupts.check(); };
    RevisionRunner runner(model_, metrics.slots(), metrics.capacity(), check);
    RevisionReader reader(!model_.cuda());
    if (!todo.empty()) reader.begin(todo.front()->directory);
    for (std::size_t i = 0; i < todo.size(); ++i) {
      std::optional<ReadRevision> read = reader.wait(check);
      if (!read) break;
      if (i + 1 < todo.size()) reader.begin(todo[i + 1]->directory);
      SweepRow made = *todo[i];
      const Clock::time_point begun = Clock::now();
      if (i == 0) print_notes(read->loaded.notes);  // those of the others say the same
      const Status measured = measure(made, *read, runner, metrics);
      if (!check()) break;
      made.run_s = seconds_since(begun);
      if (!measured) {
        made.metrics.clear();
        made.revision.error = measured.message();
        if (measured.code() == Code::device_error) runner.close();  // what a device has failed in is not gone on with
      }
      *todo[i] = std::move(made);
      say(todo[i]->in_words());
      if (is_file_to_go_on(json_))
        if (const Status written = write_file_atomically(json_, report()); !written) return fail(written);
    }
    signal = interrupts.noted();
  }
  std::erase_if(rows, [](const SweepRow& row) { return !row.is_done(); });
  print_table(rows);
  const std::vector<checkpoint::RevisionFault> faults = faults_of(rows);
  for (const checkpoint::RevisionFault& fault : faults) say(fault.revision + ": " + fault.what);
  if (const Status written = write_report(json_, true, report); !written) return fail(written);
  if (!csv_.empty())
    if (const Status written = write_file_atomically(csv_, csv_of(rows)); !written) return fail(written);
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) return fail("standard output: cannot be written");
  if (signal != 0) return 128 + signal;
  return faults.empty() ? kOk : kComparisonFailed;
}

}  // namespace cf::apps
