// What every program says of itself: --help in 80 columns, examples that run, --version, completion in bash.
#include <filesystem>
#include <sstream>
#include <vector>

#include "core/model/config.hpp"
#include "tests/apps/run_program.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

using namespace cf;
using namespace cf::test;

namespace {

const std::vector<std::string> programs{"cf-golden", "cf-layer", "cf-model", "cf-op"};
const std::vector<std::string> pages{
    "cf-golden",      "cf-golden info", "cf-golden run",     "cf-golden compare", "cf-layer",      "cf-model",
    "cf-model info",  "cf-model bench", "cf-model generate", "cf-model stream",   "cf-model eval", "cf-model memorize",
    "cf-model sweep", "cf-op"};

/// Runs a command line in a folder, that of the sources when left out, where the programs are on the PATH.
ProgramRun run(const std::string& command, const std::string& folder = CF_SOURCE_DIR) {
  return run_program("cd '" + folder + "' && PATH='" CF_PROGRAM_DIR "':$PATH && " + command);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

/// The command lines of a page's examples.
std::vector<std::string> examples_of(const std::string& page) {
  std::vector<std::string> examples;
  const std::size_t begin = page.find("\nExamples\n");
  for (const std::string& line : lines_of(page.substr(begin == page.npos ? page.size() : begin + 10))) {
    if (line.empty()) break;
    if (line.starts_with("  # "))
      examples.emplace_back();
    else
      examples.back() += (examples.back().empty() ? "" : "\n") + line;
  }
  return examples;
}

/// The words that bash offers for the last one.
std::vector<std::string> completed(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) line += " '" + word + "'";
  const ProgramRun r =
      run("bash -c '. apps/cli/completion.bash; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); "
          "_cf_ops \"$1\"; printf \"%s\\n\" \"${COMPREPLY[@]}\"' bash" +
          line);
  CAPTURE(line, r.err);
  REQUIRE(r.exit_code == 0);
  REQUIRE(r.err.empty());
  return r.out == "\n" ? std::vector<std::string>() : lines_of(r.out);
}

using Words = std::vector<std::string>;

}  // namespace

TEST_CASE("help has 80 columns, options in groups, every preset and two examples", "[help]") {
  for (const std::string& page : pages) {
    CAPTURE(page);
    const ProgramRun r = run(page + " --help");
    REQUIRE(r.exit_code == 0);
    CHECK(r.err.empty());
    CHECK(has(r.out, "\nUsage: " + page + " "));
    for (const std::string& line : lines_of(r.out)) {
      CAPTURE(line);
      CHECK(line.size() <= 80);
    }
    CHECK(examples_of(r.out).size() == 2);
    CHECK_FALSE(has(r.out, "\nOptions\n"));
    if (has(r.out, "--backend")) CHECK(has(r.out, "--backend, --device "));
    if (!has(r.out, "--preset NAME  ")) continue;
    for (const ModelConfig& preset : presets()) CHECK(has(r.out, preset.name));
  }
}

TEST_CASE("the examples of the help run", "[help]") {
  // Examples write files, and none of them belongs to the sources.
  const TempDir folder;
  std::filesystem::create_directory_symlink(CF_SOURCE_DIR "/data", folder / "data");
  for (const std::string& page : pages) {
    for (const std::string& example : examples_of(run(page + " --help").out)) {
      CAPTURE(example);
      CHECK(example.starts_with("  " + page));
      const bool needs_gpu = has(example, "cuda") || has(example, "cf-op"), needs_files = has(example, " cpu.h5");
      if (!needs_gpu && !needs_files) {
        const ProgramRun r = run(example, folder.path());
        CAPTURE(r.err);
        CHECK(r.exit_code == 0);
        continue;
      }
      // Everything else in the example must be right.
      const ProgramRun r = run(example + " --what");
      CAPTURE(r.err);
      CHECK(r.exit_code == 2);
      const std::string program = example.substr(2, example.find(' ', 2) - 2);
      const std::string unknown = program + ": --what: unknown option";
      CHECK((r.err == unknown + "\n" || r.err.starts_with(unknown + "; --backend cuda: ")));
    }
  }
}

TEST_CASE("a program that needs a command prints its help when it gets none, as bad usage", "[help]") {
  for (const char* program : {"cf-golden", "cf-model"}) {
    const ProgramRun r = run(program);
    CHECK(r.exit_code == 2);
    CHECK(r.out.empty());
    CHECK(r.err == run(std::string(program) + " --help").out);
  }
}

TEST_CASE("every program has a version", "[help]") {
  for (const std::string& program : programs) {
    const ProgramRun r = run(program + " --version");
    CHECK(r.exit_code == 0);
    CHECK(r.out == program + " " CF_VERSION "\n");
  }
}

TEST_CASE("help that cannot be written is no success", "[help]") {
  for (const char* command : {"cf-model --help", "cf-model info --help", "cf-op --version"}) {
    const ProgramRun r = run(std::string(command) + " >/dev/full");
    CHECK(r.exit_code == 2);
    CHECK(has(r.err, ": standard output: cannot be written\n"));
    CHECK(r.error_lines() == 1);
  }
}

TEST_CASE("bash completes commands, options and values", "[completion]") {
  CHECK(completed({"cf-model", ""}) ==
        Words{"generate", "stream", "eval", "memorize", "sweep", "bench", "info", "--help", "--version"});
  CHECK(completed({"cf-model", "ge"}) == Words{"generate"});
  CHECK(completed({"cf-model", "generate", "--pr"}) == Words{"--preset", "--processes", "--prompt-ids", "--prompt"});
  CHECK(completed({"cf-model", "info", "--preset", "pythia-2"}) == Words{"pythia-2.8b"});
  CHECK(completed({"cf-model", "info", "--preset", "=", "qwen2"}) == Words{"qwen2.5-7b"});
  CHECK(completed({"cf-model", "info", "--backend", "="}) == Words{"cpu", "cuda"});
  CHECK(completed({"cf-model", "eval", "--feed", "t"}) == Words{"token"});
  CHECK(completed({"cf-layer", "--device", ""}) == Words{"cpu", "cuda"});
  CHECK(completed({"cf-layer", "--dtype", "b"}) == Words{"bfloat16"});
  CHECK(completed({"cf-layer", "--first"}) == Words{"--first-layers"});
  CHECK(completed({"cf-op", "linear", "--backend", ""}) == Words{"cuda"});
  CHECK(completed({"cf-op", "attent"}) == Words{"attention"});
  CHECK(completed({"cf-golden", "run", "x.h5", "--iso"}) == Words{"--isolated"});
  CHECK(completed({"cf-layer", "--model", "data"}).empty());  // bash completes files
  Words presets_known;
  for (const ModelConfig& preset : presets()) presets_known.push_back(preset.name);
  CHECK(completed({"cf-layer", "--preset", ""}) == presets_known);
}
