// The command line of a program: what its options accept, and all faults of it in one line.
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>

#include "apps/cli/options.hpp"
#include "apps/cli/program.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

using namespace cf;
using namespace cf::apps;
using cf::test::read_file;
using cf::test::TempDir;
using cf::test::write_file;

namespace {

/// What a call printed on stderr.
template <class Call>
std::string stderr_of(Call&& call) {
  const TempDir dir;
  std::fflush(stderr);
  const int saved = ::dup(STDERR_FILENO);
  REQUIRE(std::freopen((dir / "err").c_str(), "w", stderr));
  call();
  std::fflush(stderr);
  REQUIRE(::dup2(saved, STDERR_FILENO) == STDERR_FILENO);
  ::close(saved);
  return read_file(dir / "err");
}

/// The variables of a program with an option of every kind, and its command line.
struct Program {
  std::string model, backend = "cpu", json, csv;
  std::int64_t batch = 1;
  std::optional<std::int64_t> group;
  std::uint64_t seed = 0;
  std::optional<DType> dtype;
  bool check = false, warm = false;
  std::vector<std::string> paths;

  /// The faults of a command line, without the program's name; empty where the program goes on.
  std::string faults(std::vector<std::string> words) {
    CommandLine line("Does nothing.", "1.0");
    line.text("--model", model, "A directory");
    line.choice("--backend", backend, {"cpu", "cuda"}, "A backend");
    line.integer("--batch,--tokens", batch, {1, 4096}, "Sequences");
    line.integer("--group", group, {1, 8, "inputs", -1}, "Inputs of a group");
    line.seed("--seed", seed, "A seed");
    line.dtype("--dtype", dtype, {DType::f16, DType::f32}, "A dtype");
    line.flag("--check", check, "A flag");
    line.flag("--warm", warm, "Another flag");
    line.output("--json", json, "JSON", true);
    line.output("--csv", csv, "CSV");
    line.files("files", paths, 0, 2, "Files");
    line.require("--model");
    line.needs("--group", "--dtype");
    line.excludes("--warm", "--check");
    line.check([&](Faults& f) {
      if (batch == 13) f.expected("--batch", "luck", "13");
    });
    return parse(line, std::move(words));
  }

  static std::string parse(CommandLine& line, std::vector<std::string> words) {
    words.insert(words.begin(), "program");
    std::vector<const char*> argv;
    for (const std::string& word : words) argv.push_back(word.c_str());
    std::optional<int> exit_code;
    std::string text = stderr_of([&] { exit_code = line.parse(int(argv.size()), argv.data()); });
    CHECK(exit_code == (text.empty() ? std::nullopt : std::optional(kBadInput)));
    if (text.empty()) return "";
    CHECK(text.starts_with(program_name() + ": "));
    CHECK(text.ends_with("\n"));
    return text.substr(program_name().size() + 2, text.size() - program_name().size() - 3);
  }
};

std::string faults(std::vector<std::string> words) {
  words.insert(words.end(), {"--model", "m"});
  return Program().faults(std::move(words));
}

}  // namespace

TEST_CASE("an option of words takes all up to the next option, each time that it is given", "[options]") {
  std::vector<std::string> folders, metrics;
  std::int64_t batch = 1;
  const auto faults = [&](std::vector<std::string> words) {
    folders.clear();
    metrics.clear();
    CommandLine line("Does nothing.");
    line.words("--folders,--dirs", folders, "Folders", "DIR");
    line.words("--metric", metrics, "Metrics", "NAME", {"one", "two"});
    line.integer("--batch", batch, {1, 9}, "Sequences");
    line.require("--folders");
    return Program::parse(line, std::move(words));
  };
  using Words = std::vector<std::string>;
  CHECK(faults({"--folders", "a", "b", "--metric", "two", "--batch", "3", "--dirs", "c"}) == "");
  CHECK(folders == Words{"a", "b", "c"});
  CHECK(metrics == Words{"two"});
  CHECK(batch == 3);
  CHECK(faults({"--metric=one", "--folders", "a"}) == "");
  CHECK(metrics == Words{"one"});
  CHECK(faults({"--folders", "a", "", "--metric", "one", "three"}) ==
        "--folders: expected a text, got ''; --metric: expected one or two, got 'three'");
  CHECK(faults({"--batch", "2"}) == "--folders: required, not given");
}

TEST_CASE("options take their values") {
  const TempDir dir;
  Program p;
  REQUIRE(p.faults({"--model=m", "--backend", "cuda", "--tokens", "4096", "--group", "-1", "a.h5", "--seed",
                    "18446744073709551615", "--dtype", "fp32", "--check", "--json", dir / "x.json", "b.h5"}) == "");
  CHECK(p.model == "m");
  CHECK(p.backend == "cuda");
  CHECK(p.batch == 4096);
  CHECK(p.group == -1);
  CHECK(p.seed == 18446744073709551615u);
  CHECK(p.dtype == DType::f32);
  CHECK(p.check);
  CHECK_FALSE(p.warm);
  CHECK(p.json == dir / "x.json");
  CHECK(p.paths == std::vector<std::string>{"a.h5", "b.h5"});
  CHECK_FALSE(std::filesystem::exists(p.json));
}

TEST_CASE("options that are left out keep their variables") {
  Program p;
  REQUIRE(p.faults({"--model", "m"}) == "");
  CHECK(p.batch == 1);
  CHECK_FALSE(p.group);
  CHECK_FALSE(p.dtype);
  CHECK(p.paths.empty());
}

TEST_CASE("an option refuses what it does not accept") {
  for (const char* value : {"abc", "0", "4097", "", "1.5", "+1", " 1", "1 ", "0x10", "1e3", "9223372036854775808",
                            "99999999999999999999", "-1"})
    CHECK(faults({"--batch", value}) == "--batch: expected 1 to 4096, got '" + std::string(value) + "'");
  CHECK(faults({"--tokens=0"}) == "--batch: expected 1 to 4096, got '0'");
  CHECK(faults({"--group", "0", "--dtype", "f16"}) == "--group: expected -1 or 1 to 8 (inputs), got '0'");
  for (const char* value : {"18446744073709551616", "-1", "", "1.0", "seed"})
    CHECK(faults({"--seed", value}) == "--seed: expected 0 to 18446744073709551615, got '" + std::string(value) + "'");
  CHECK(faults({"--backend", "tpu"}) == "--backend: expected cpu or cuda, got 'tpu'");
  CHECK(faults({"--dtype", "bf16"}) == "--dtype: expected float16 or float32, got 'bf16'");
  CHECK(faults({"--dtype", "f8"}) == "--dtype: expected float16 or float32, got 'f8'");
  CHECK(faults({"--check=maybe"}) == "--check: expected no value, got 'maybe'");
  Program refused;
  CHECK(refused.faults({"--model", "m", "--check=false"}) == "--check: expected no value, got 'false'");
  CHECK_FALSE(refused.check);
  CHECK(faults({"--json", ""}) == "--json: expected a file's path, got ''");
  CHECK(faults({"--json=", "--batch", "2"}) == "--json: expected a file's path, got ''");
  CHECK(faults({""}) == "files: expected a file's path, got ''");
  CHECK(Program().faults({"--model", ""}) == "--model: expected a text, got ''");
  CHECK(Program().faults({"--model", "m", "--seed"}) == "--seed: expected 0 to 18446744073709551615, got ''");
  CHECK(faults({"--batch", "1", "--batch", "2"}) == "--batch: expected once, got 2 times");
  CHECK(faults({"a", "b", "c"}) == "files: expected 0 to 2, got 3");
}

TEST_CASE("unknown options are named, the nearest known one beside them") {
  CHECK(faults({"--jsn", "x"}) == "--jsn: unknown option, did you mean --json?");
  CHECK(faults({"--token=2"}) == "--token=2: unknown option, did you mean --tokens?");
  CHECK(faults({"--what"}) == "--what: unknown option");
  CHECK(faults({"-b", "2"}) == "-b: unknown option");
}

TEST_CASE("options that belong together, or do not") {
  CHECK(Program().faults({}) == "--model: required, not given");
  CHECK(faults({"--group", "2"}) == "--group: expected with --dtype");
  CHECK(faults({"--warm", "--check"}) == "--warm: expected without --check");
  CHECK(faults({"--batch", "13"}) == "--batch: expected luck, got '13'");
  CommandLine line("Does nothing.");
  std::string model, preset;
  line.text("--model", model, "");
  line.text("--preset", preset, "");
  line.require_one("--model", "--preset");
  CHECK(Program::parse(line, {}) == "--model or --preset: expected one of them, got none");
  CHECK(Program::parse(line, {"--model", "m", "--preset", "p"}) ==
        "--model or --preset: expected one of them, got both");
  CHECK(Program::parse(line, {"--preset", "p"}) == "");
}

TEST_CASE("a file is written once, and never one that is read") {
  const TempDir dir;
  const std::string x = dir / "x";
  CHECK(faults({"--json", x, "--csv", x}) == "--csv: expected a file of its own, got '" + x + "' as for --json");
  const std::string other = dir.path() + "/./x";
  CHECK(faults({"--json", x, "--csv", other}) ==
        "--csv: expected a file of its own, got '" + other + "' as for --json");
  write_file(x, "text");
  std::filesystem::create_symlink(x, dir / "link");
  CHECK(faults({x, "--json", dir / "link"}) ==
        "--json: expected a file of its own, got '" + (dir / "link") + "' as for files");
  CHECK(faults({"--json", dir / "no/x"}).find(dir / "no/x") == 0);
  CHECK(faults({"--json", "-", "--csv", dir / "y"}) == "");
  CHECK(read_file(x) == "text");
}

TEST_CASE("a file of a directory that is read is never written") {
  const TempDir dir;
  std::filesystem::create_directories(dir / "m/inner");
  for (const char* name : {"m/a", "m/inner/b", "apart"}) write_file(dir / name, "text");
  std::filesystem::create_symlink("m", dir / "link");
  std::filesystem::create_hard_link(dir / "m/a", dir / "hard");
  const auto faults_of = [&](const std::string& directory, const std::string& output) {
    std::string model, json;
    CommandLine line("Does nothing.");
    line.text("--model", model, "A directory");
    line.reads("--model");
    line.output("--json", json, "JSON");
    return Program::parse(line, {"--model", dir / directory, "--json", dir / output});
  };
  for (const char* directory : {"m", "m/", "m/../m", "link"})
    for (const char* output : {"m/a", "m/inner/b", "link/a", "m/../m/a", "hard"})
      CHECK(faults_of(directory, output) == "--json: expected a file of its own, got '" + (dir / output) +
                                                "', which is one of --model " + (dir / directory));
  CHECK(faults_of("apart", "apart") ==
        "--json: expected a file of its own, got '" + (dir / "apart") + "' as for --model");
  for (const char* output : {"apart", "new", "m/new"}) CHECK(faults_of("m", output) == "");
  CHECK(faults_of("absent", "m/a") == "");
}

TEST_CASE("all faults of a command line are one line") {
  CHECK(
      Program().faults({"--batch", "abc", "--jsn", "x", "--seed", "-1", "--group", "9", "--csv", ""}) ==
      "--jsn: unknown option, did you mean --json?; --batch: expected 1 to 4096, got 'abc'; --group: expected -1 or 1 "
      "to 8 (inputs), got '9'; --seed: expected 0 to 18446744073709551615, got '-1'; --csv: expected a file's path, "
      "got ''; --model: required, not given; --group: expected with --dtype");
}

TEST_CASE("subcommands") {
  CommandLine line("Does nothing.");
  std::vector<std::string> paths;
  CommandLine& info = line.subcommand("info", "Prints");
  info.files("file", paths, 1, 1, "A file");
  std::vector<std::string> many;
  CommandLine& read = line.subcommand("read", "Reads");
  read.files("files", many, 1, CommandLine::kMany, "Files");
  std::int64_t runs = 0;
  CommandLine& run = line.subcommand("run", "Runs");
  run.integer("--runs", runs, {1, 2}, "Runs");
  CHECK(Program::parse(line, {"--what"}) == "--what: unknown option; subcommand: expected info, read or run, got none");
  CHECK(Program::parse(line, {"walk"}) == "subcommand: expected info, read or run, got 'walk'");
  CHECK(Program::parse(line, {"--what", "info", "x"}) == "--what: unknown option");
  CHECK(Program::parse(line, {"info"}) == "file: expected 1, got 0");
  CHECK(Program::parse(line, {"info", "x", "y"}) == "file: expected 1, got 2");
  CHECK(Program::parse(line, {"read"}) == "files: expected 1 or more, got 0");
  CHECK(Program::parse(line, {"info", "--run"}) == "--run: unknown option");
  CHECK(Program::parse(line, {"run", "--runs", "3", "x"}) ==
        "x: unexpected argument; --runs: expected 1 to 2, got '3'");
  CHECK(Program::parse(line, {"info", "run"}) == "");
  CHECK(info.chosen());
  CHECK_FALSE(run.chosen());
  CHECK(paths == std::vector<std::string>{"run"});
}

TEST_CASE("a program of subcommands that is called without a word prints its help as bad usage") {
  CommandLine line("Does nothing.");
  line.subcommand("info", "Prints");
  const char* const program = "program";
  std::optional<int> exit_code;
  const std::string text = stderr_of([&] { exit_code = line.parse(1, &program); });
  CHECK(exit_code == kBadInput);
  CHECK(text.starts_with("Does nothing.\n\nUsage: " + program_name() + " COMMAND [options]\n\nCommands\n  info "));
}

TEST_CASE("a page of help is broken between words at 80 columns") {
  const HelpPage page{.description = "Does nothing.",
                      .usage = "program [options]",
                      .sections = {{.title = "Options",
                                    .entries = {{"--batch INT", std::string(50, 'a') + " b c"},
                                                {"--a-name-that-fills-its-column INT", "Text"}}}},
                      .examples = {{.what = "Nothing", .command = "program --batch 1"}},
                      .notes = {std::string(78, 'd') + " e f"}};
  const std::string indent(28, ' ');
  CHECK(to_string(page) == "Does nothing.\n\nUsage: program [options]\n\nOptions\n  --batch INT               " +
                               std::string(50, 'a') + " b\n" + indent + "c\n  --a-name-that-fills-its-column INT\n" +
                               indent + "Text\n\nExamples\n  # Nothing\n  program --batch 1\n\n" +
                               std::string(78, 'd') + " e\nf\n");
}

TEST_CASE("dtypes have one name and short forms of it") {
  for (DType d : {DType::f16, DType::bf16, DType::f32, DType::f64}) CHECK(parse_dtype(to_string(d)) == d);
  CHECK(parse_dtype("f16") == DType::f16);
  CHECK(parse_dtype("fp16") == DType::f16);
  CHECK(parse_dtype("bf16") == DType::bf16);
  CHECK(parse_dtype("f32") == DType::f32);
  CHECK(parse_dtype("fp64") == DType::f64);
  CHECK_FALSE(parse_dtype("half"));
  CHECK_FALSE(parse_dtype(""));
}

TEST_CASE("running out of memory or threads is one line and bad input") {
  int code = 0;
  CHECK(stderr_of([&] { code = run_main([]() -> int { throw std::bad_alloc(); }); }) ==
        program_name() + ": not enough memory\n");
  CHECK(code == kBadInput);
  const auto out_of_threads = []() -> int {
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  };
  const std::string line = stderr_of([&] { code = run_main(out_of_threads); });
  CHECK(line.find("Resource temporarily unavailable") != line.npos);
  CHECK(std::count(line.begin(), line.end(), '\n') == 1);
  CHECK(code == kBadInput);
  CHECK(stderr_of([&] { code = run_main([]() -> int { throw std::logic_error("a fault\nof two lines"); }); }) ==
        program_name() + ": a fault of two lines\n");
  CHECK(code == kBadInput);
  CHECK(run_main([] { return 7; }) == 7);
}

// AddressSanitizer needs more address space than the limit leaves.
#if !defined(__SANITIZE_ADDRESS__)
TEST_CASE("threads that cannot be started are refused before OpenMP starts them") {
  CHECK(check_threads("--threads", 1));
  CHECK(check_threads("--threads", 8));
  rlimit saved;
  REQUIRE(::getrlimit(RLIMIT_AS, &saved) == 0);
  const rlimit small{.rlim_cur = 1 << 28, .rlim_max = saved.rlim_max};  // of about 30 stacks of 8 MiB
  REQUIRE(::setrlimit(RLIMIT_AS, &small) == 0);
  const Status status = check_threads("--threads", 512);
  REQUIRE(::setrlimit(RLIMIT_AS, &saved) == 0);
  CAPTURE(status.message());
  CHECK(status.code() == Code::out_of_memory);
  CHECK(status.message().starts_with("--threads: expected a number of threads that this process can start, got 512; "));
  CHECK(status.message().find("Resource temporarily unavailable") != std::string::npos);
}
#endif
