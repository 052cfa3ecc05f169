#pragma once
// cf-model as a child process, and what the tests of its backends ask of it alike.
#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/apps/run_program.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

namespace cf::test {

inline ProgramRun cf_model(const std::string& arguments) {
  return run_program("'" + std::string(CF_MODEL_PROGRAM) + "' " + arguments);
}

/// The same of a command that must end well.
inline ProgramRun cf_model_ok(const std::string& arguments) {
  ProgramRun r = cf_model(arguments);
  CAPTURE(arguments, r.out, r.err);
  REQUIRE(r.exit_code == 0);
  return r;
}

/// Bad input: exit code 2, nothing on stdout, one line on stderr that contains the text.
inline void check_cf_model_refusal(const std::string& arguments, const std::string& text) {
  const ProgramRun r = cf_model(arguments);
  CAPTURE(arguments, r.out, r.err);
  CHECK(r.exit_code == 2);
  CHECK(r.out.empty());
  CHECK(r.error_lines() == 1);
  CHECK(r.err.starts_with("cf-model: "));
  CHECK(r.err.find(text) != std::string::npos);
}

/// What `cf-model bench` prints, and the report that it writes as JSON. The CSV has a line more than there are results.
struct BenchRun {
  std::string out;
  nlohmann::json report;
};

inline BenchRun run_bench(const std::string& arguments) {
  const TempDir dir;
  const std::string json = dir / "x.json", csv = dir / "x.csv";
  BenchRun run{.out = cf_model_ok("bench " + arguments + " --json '" + json + "' --csv '" + csv + "'").out,
               .report = nlohmann::json::parse(read_file(json))};
  CHECK(run.report["complete"] == true);
  const std::string lines = read_file(csv);
  CHECK(std::count(lines.begin(), lines.end(), '\n') == std::int64_t(run.report["results"].size()) + 1);
  for (const nlohmann::json& row : run.report["results"]) {
    CAPTURE(row.dump());
    const double ttft = row["ttft_ms"], total = row["total_ms"], tpot = row["tpot_ms"];
    const std::int64_t tokens = row["new_tokens"], slots = row["slots"];
    CHECK(ttft > 0);
    CHECK(total >= ttft);
    CHECK((tokens == 1 ? tpot == 0 : tpot > 0));
    CHECK(double(row["tokens_per_s"]) == Approx(1e3 * double(tokens * slots) / total));
    CHECK(double(row["gflop"]) > 0);
  }
  return run;
}

}  // namespace cf::test
