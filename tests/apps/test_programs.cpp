// What programs do with signals, streams, names, files and memory: each ends as its report says, in one line, and no
// input is lost.
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "golden/checkpoint/token_file.hpp"
#include "tests/apps/run_program.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::test;
namespace fs = std::filesystem;
using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

const std::string kModel = "'" CF_MODEL_PROGRAM "' ", kLayer = "'" CF_LAYER_PROGRAM "' ",
                  kGolden = "'" CF_GOLDEN_PROGRAM "' ", kCheckpoints = CF_DATA_DIR "/checkpoints/";

std::string quoted(const std::string& word) { return "'" + word + "'"; }

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

/// A child process that runs a command in place of a shell.
class Child {
 public:
  explicit Child(const std::string& command) : pid_(::fork()) {
    if (pid_ == 0) {
      ::execl("/bin/sh", "sh", "-c", ("exec " + command).c_str(), nullptr);
      ::_exit(127);
    }
    REQUIRE(pid_ > 0);
  }
  void signal(int number) const { REQUIRE(::kill(pid_, number) == 0); }
  bool runs() const {
    siginfo_t info{};
    return ::waitid(P_PID, id_t(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
  }
  /// Waits until it is one of the programs, and has a handler of the signal.
  void wait_for_handler(int number) const {
    for (bool handled = false; runs() && !handled; sleep_ms(20)) {
      std::ifstream status("/proc/" + std::to_string(pid_) + "/status");
      std::string word;
      status >> word >> word;  // "Name: cf-model"
      if (!word.starts_with("cf-")) continue;
      while (status >> word)
        if (word == "SigCgt:" && status >> word) handled = std::stoull(word, nullptr, 16) >> (number - 1) & 1;
    }
  }
  /// Its end: the exit code, or minus the signal.
  int wait() const {
    int status = 0;
    REQUIRE(::waitpid(pid_, &status, 0) == pid_);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }

 private:
  pid_t pid_;
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// n ids below 100.
std::vector<std::int32_t> ids(int n) {
  std::vector<std::int32_t> made;
  for (int i = 0; i < n; ++i) made.push_back(i % 100);
  return made;
}

/// A copy of a checkpoint that may be written to.
std::string copy_of(const std::string& checkpoint, const std::string& to) {
  fs::copy(kCheckpoints + checkpoint, to);
  for (const fs::directory_entry& file : fs::directory_iterator(to))
    fs::permissions(file, fs::perms::owner_write, fs::perm_options::add);
  return to;
}

void check_refused(const std::string& command, const std::vector<std::string>& parts) {
  const ProgramRun r = run_program(command);
  CAPTURE(command, r.out, r.err);
  CHECK(r.exit_code == 2);
  CHECK(r.out.empty());
  CHECK(r.error_lines() == 1);
  for (const std::string& part : parts) CHECK(r.err.find(part) != std::string::npos);
}

}  // namespace

TEST_CASE("a signal ends a prompt within a second, and the report holds what was made", "[programs]") {
  const TempDir dir;
  const std::string tokens = dir / "t.npy";
  REQUIRE(checkpoint::write_token_file(tokens, ids(30000), {30000}));
  const std::string model = " --preset pythia-14m --threads 1 ";
  // All three go on for minutes.
  const std::vector<std::string> commands{
      "generate" + model + "--prompt-ids " + quoted(tokens),
      "eval --oracle --context 30000" + model + "--tokens " + quoted(tokens),
      "eval --oracle --feed prompt --context 30000 --chunk 2000" + model + "--tokens " + quoted(tokens)};
  const std::vector<int> signals{SIGINT, SIGTERM, SIGHUP};
  for (std::size_t i = 0; i < commands.size(); ++i) {
    CAPTURE(commands[i], signals[i]);
    const std::string report = dir / ("r" + std::to_string(i));
    const Child child(kModel + commands[i] + " --json " + quoted(report) + " >/dev/null 2>" + quoted(dir / "err"));
    child.wait_for_handler(signals[i]);
    sleep_ms(500);
    REQUIRE(child.runs());
    const Clock::time_point start = Clock::now();
    child.signal(signals[i]);
    CHECK(child.wait() == 128 + signals[i]);
    CHECK(seconds_since(start) < 10);  // a second, on a machine that has nothing else to do
    const Json made = Json::parse(read_file(report));
    if (i == 0)
      CHECK(made["sequences"][0]["finish"] == "interrupted");
    else
      CHECK(made["complete"] == false);
  }
}

TEST_CASE("a hang-up that nohup ignores ends nothing", "[programs]") {
  const TempDir dir;
  const Child child("sh -c 'trap \"\" HUP; exec " CF_MODEL_PROGRAM " generate --preset pythia-14m --prompt-ids 1" +
                    std::string(" --max-new-tokens 40000 >") + (dir / "out") + " 2>/dev/null'");
  child.wait_for_handler(SIGTERM);
  child.signal(SIGHUP);
  sleep_ms(300);
  CHECK(child.runs());
  child.signal(SIGTERM);
  CHECK(child.wait() == 128 + SIGTERM);
}

TEST_CASE("outputs never replace inputs, nor what lies in the model's folder", "[programs]") {
  const TempDir dir;
  const std::string m = copy_of("llama-gqa8", dir / "M"), golden = dir / "g.h5", ids_file = dir / "t.npy";
  REQUIRE(checkpoint::write_token_file(ids_file, ids(20), {20}));
  fs::copy_file(CF_DATA_DIR "/golden/llama-gqa8-kv17-b2.h5", golden);
  fs::permissions(golden, fs::perms::owner_write, fs::perm_options::add);
  fs::create_symlink("M/config.json", dir / "link");
  fs::create_hard_link(dir / "M/model.safetensors", dir / "hard");
  fs::create_symlink("M", dir / "other");
  // Weights in a store that the folder only links to, as the hub's cache has them.
  fs::create_directory(dir / "linked");
  for (const char* name : {"config.json", "model.safetensors"})
    fs::create_symlink(dir / ("M/" + std::string(name)), dir / ("linked/" + std::string(name)));
  const auto state = [&] {
    std::string all;
    for (const std::string& path : {dir / "M/config.json", dir / "M/model.safetensors", golden, ids_file})
      all += read_file(path);
    return all;
  };
  const std::string before = state();
  const std::string generate = kModel + "generate --prompt-ids 1,2 --max-new-tokens 2 --model ";
  const std::string own = "expected a file of its own, got ";
  for (const std::string name : {"M/model.safetensors", "M/config.json", "M/../M/config.json", "other/config.json",
                                 "link", "hard", "linked/config.json"})
    check_refused(generate + quoted(m) + " --json " + quoted(dir / name),
                  {"--json: " + own + quoted(dir / name) + ", which is one of --model " + m});
  check_refused(generate + quoted(dir / "linked") + " --json " + quoted(dir / "M/model.safetensors"), {own});
  check_refused(
      kModel + "generate --model " + quoted(m) + " --prompt-ids " + quoted(ids_file) + " --json " + quoted(ids_file),
      {own + quoted(ids_file) + " as for --prompt-ids"});
  check_refused(kModel + "eval --model " + quoted(m) + " --tokens " + quoted(ids_file) + " --json " + quoted(ids_file),
                {own + quoted(ids_file) + " as for --tokens"});
  check_refused(kModel + "eval --model " + quoted(m) + " --reference " + quoted(golden) + " --json " + quoted(golden),
                {own + quoted(golden) + " as for --reference"});
  check_refused(kModel + "bench --model " + quoted(m) + " --csv " + quoted(m + "/config.json"), {"--csv: " + own});
  for (const std::string option : {"--json", "--csv", "--dump"})
    check_refused(
        kLayer + "--layer 0 --kv-len 2 --model " + quoted(m) + " " + option + " " + quoted(m + "/model.safetensors"),
        {option + ": " + own});
  check_refused(
      kGolden + "run " + quoted(golden) + " --model " + quoted(m) + " --json " + quoted(m + "/model.safetensors"),
      {"--json: " + own});
  // The checkpoint that a golden file names.
  for (const char* folder : {"a/golden", "a/checkpoints"}) fs::create_directories(dir / folder);
  fs::copy(m, dir / "a/checkpoints/llama-gqa8", fs::copy_options::recursive);
  fs::copy_file(golden, dir / "a/golden/g.h5");
  check_refused(kGolden + "run " + quoted(dir / "a/golden/g.h5") + " --json " +
                    quoted(dir / "a/checkpoints/llama-gqa8/model.safetensors"),
                {"--json: " + own, "which is one of " + (dir / "a/golden/g.h5") + "'s weights "});
  CHECK(read_file(dir / "a/checkpoints/llama-gqa8/model.safetensors") == read_file(dir / "M/model.safetensors"));
  CHECK(state() == before);
  // What is no input is written, beside the inputs too.
  CHECK(run_program(generate + quoted(m) + " --json " + quoted(dir / "r.json")).exit_code == 0);
}

TEST_CASE("words that are not UTF-8 are in the report with other bytes", "[programs]") {
  const TempDir dir;
  const std::string m = copy_of("llama-gqa8", dir / "m\xe9"), report = dir / "o\xe9.json", ids_file = dir / "t.npy";
  REQUIRE(checkpoint::write_token_file(ids_file, ids(20), {20}));
  for (const std::string command : {"generate --prompt-ids 1,2 --max-new-tokens 2",
                                    "bench --prompt-len 2 --new-tokens 2 --runs 1 --warmup 0", "eval --tokens "}) {
    const ProgramRun r = run_program(kModel + command + (command.ends_with(" ") ? quoted(ids_file) : "") + " --model " +
                                     quoted(m) + " --json " + quoted(report));
    CAPTURE(command, r.err);
    CHECK(r.exit_code == 0);
    const Json made = Json::parse(read_file(report));
    CHECK(made["command"].get<std::string>().find("/o\xef\xbf\xbd.json'") != std::string::npos);
    CHECK(made["weights"].get<std::string>().ends_with("/m\xef\xbf\xbd"));
    fs::remove(report);
  }
}

TEST_CASE("a report needs no stderr, and help needs stdout", "[programs]") {
  const TempDir dir;
  const std::string report = dir / "o.json";
  for (const std::string to : {"2>/dev/full", "2>&-", "2>&- 0<&-"}) {
    const ProgramRun r =
        run_program(kModel + "generate --model " + quoted(kCheckpoints + "llama-gqa8") +
                    " --prompt-ids 1,2 --max-new-tokens 600 --stop none --json " + quoted(report) + " " + to);
    CAPTURE(to);
    CHECK(r.exit_code == 0);
    CHECK(Json::parse(read_file(report))["sequences"][0]["ids"].size() == 600);
    fs::remove(report);
  }
  for (const std::string& program : {kModel, kLayer, kGolden})
    for (const std::string to : {">/dev/full", ">&-"}) {
      const ProgramRun r = run_program(program + "--help " + to);
      CAPTURE(program, to, r.err);
      CHECK(r.exit_code == 2);
      CHECK(r.err.ends_with(": standard output: cannot be written\n"));
      CHECK(r.error_lines() == 1);
    }
}

TEST_CASE("a file that becomes shorter while it is read is named, one that changes is noted", "[programs]") {
  const TempDir dir;
  const std::string m = copy_of("stdlib-4m", dir / "M"), weights = m + "/model.safetensors", out = dir / "out",
                    err = dir / "err";
  const auto size = fs::file_size(weights);
  const auto change = [&](const std::string& command, auto&& f) {
    fs::copy_file(kCheckpoints + "stdlib-4m/model.safetensors", weights, fs::copy_options::overwrite_existing);
    fs::remove(out);
    const Child child(command + " >" + quoted(out) + " 2>" + quoted(err));
    while (child.runs() && !(fs::exists(out) && fs::file_size(out) > 0)) sleep_ms(20);
    REQUIRE(child.runs());
    f();
    return child.wait();
  };
  const std::string said = weights + ": expected the " + std::to_string(size) + " bytes that it had when it was opened";
  const std::string generate = kModel + "generate --stop none --prompt-ids 1 --model " + quoted(m) + " --ids ";
  CHECK(change(generate + "--max-new-tokens 100000", [&] { fs::resize_file(weights, 4096); }) == 2);
  CHECK(read_file(err).find(said + ", got 4096") != std::string::npos);
  CHECK(change(kLayer + "--layer 0-3 --kv-len 1-500 --runs 10 --model " + quoted(m),
               [&] { fs::resize_file(weights, 100000); }) == 2);
  CHECK(read_file(err).find(said + ", got 100000") != std::string::npos);
  CHECK(change(generate + "--max-new-tokens 1500",
               [&] { fs::last_write_time(weights, fs::file_time_type::clock::now()); }) == 0);
  CHECK(read_file(err).find("note: " + weights + ": was changed while it was used\n") != std::string::npos);
}

TEST_CASE("threads that no one means, and stacks too small for them, are one line", "[programs]") {
  const std::string m = quoted(kCheckpoints + "llama-gqa8"), golden = CF_DATA_DIR "/golden/llama-gqa8-kv17-b2.h5";
  for (const std::string& command : {kModel + "generate --prompt-ids 1 --model " + m,
                                     kLayer + "--layer 0 --kv-len 2 --model " + m, kGolden + "run " + quoted(golden)}) {
    check_refused("OMP_NUM_THREADS=10000 " + command, {"OMP_NUM_THREADS: expected 1 to 1024, got 10000"});
    check_refused("OMP_NUM_THREADS=2 OMP_STACKSIZE=16K " + command,
                  {"OMP_STACKSIZE: expected stacks of at least 512 KiB"});
  }
}

TEST_CASE("memory that ends anywhere is one line", "[programs]") {
  const std::string held_out = kCheckpoints + "stdlib-4m/held_out.npy";
  bool refused = false, passed = false;
  for (int kib = 45000; kib <= 105000; kib += 3000) {
    const std::string limited = "ulimit -v " + std::to_string(kib) + "; OMP_NUM_THREADS=2 " + kModel;
    // Shared libraries, and what they do before main(), need some memory of their own.
    if (run_program(limited + "--version").exit_code != 0) continue;
    const ProgramRun r = run_program(limited + "eval --oracle --model " + quoted(kCheckpoints + "stdlib-4m") +
                                     " --tokens " + quoted(held_out) + " --limit 60 --context 40");
    CAPTURE(kib, r.exit_code, r.err);
    CHECK((r.exit_code == 0 || (r.exit_code == 2 && r.error_lines() == 1)));
    (r.exit_code == 0 ? passed : refused) = true;
  }
  CHECK(refused);
  CHECK(passed);
}

TEST_CASE("a model that does not fit a process's memory is refused before it is made", "[programs]") {
  check_refused("ulimit -v 700000; OMP_NUM_THREADS=1 " + kModel + "generate --preset pythia-410m --prompt-ids 1,2",
                {"pythia-410m: the weights need 0.81 GB, expected at most the 0.", " GB of memory that are free"});
  const ProgramRun r = run_program("ulimit -v 700000; OMP_NUM_THREADS=1 " + kModel + "info --preset pythia-410m");
  CHECK(r.exit_code == 0);
  CHECK(r.out.find("| 0 of 2048 entries") != std::string::npos);
}
