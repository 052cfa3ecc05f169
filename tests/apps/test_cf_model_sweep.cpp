// cf-model sweep: a metric over the revisions of a model, and what is wrong with them.
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "golden/checkpoint/safetensors.hpp"
#include "golden/checkpoint/sha256.hpp"
#include "golden/checkpoint/token_file.hpp"
#include "tests/apps/run_cf_model.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/taken.hpp"
#include "tests/support/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::test;
using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

/// Folders of revisions: neox-tanh's weights, float32, of which each step changes every element a little.
class Revisions {
 public:
  Revisions() {
    std::vector<std::int32_t> ids(80), rows(6 * 70);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = std::int32_t((i + 1) * 37 % 128);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = std::int32_t(i * i % 127);
    REQUIRE(checkpoint::write_token_file(dir / "ids.npy", ids, {80}));
    REQUIRE(checkpoint::write_token_file(dir / "rows.npy", rows, {6, 70}));
  }

  /// Makes the folder of a step below a folder. `spoilt`: its last element is NaN.
  std::string make(const std::string& name, int step, bool spoilt = false) {
    const std::string directory = dir / name;
    fs::create_directories(directory);
    fs::copy(CF_DATA_DIR "/checkpoints/neox-tanh", directory);
    const std::string path = directory + "/model.safetensors";
    std::string bytes = read_file(path);
    {
      const auto file = taken(checkpoint::SafetensorsFile::open(path));
      const char* const begin = static_cast<const char*>(file.tensors().front().data);
      for (const checkpoint::TensorEntry& t : file.tensors()) {
        REQUIRE(t.stored_dtype == "F32");
        const std::size_t at =
            bytes.size() - buffer_bytes(file) + std::size_t(static_cast<const char*>(t.data) - begin);
        auto* const elements = bytes.data() + at;
        for (std::int64_t i = 0; i < t.bytes / 4; ++i) {
          float x;
          std::memcpy(&x, elements + 4 * i, 4);
          x += 0.001f * float(step) * float(i % 7 - 3);
          std::memcpy(elements + 4 * i, &x, 4);
        }
      }
    }
    if (spoilt) bytes.replace(bytes.size() - 4, 4, 4, '\xff');
    write_file(path, bytes);
    return directory;
  }

  /// The options of two metrics of the CPU in double.
  std::string metrics() const {
    return " --metric perplexity memorization --activation float64 --context 40 --tokens '" + (dir / "ids.npy") +
           "' --sequences '" + (dir / "rows.npy") + "' ";
  }

  const TempDir dir;

 private:
  static std::size_t buffer_bytes(const checkpoint::SafetensorsFile& file) {
    std::size_t bytes = 0;
    for (const checkpoint::TensorEntry& t : file.tensors()) bytes += std::size_t(t.bytes);
    return bytes;
  }
};

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::map<std::string, Json> metrics_by_name(const Json& report) {
  std::map<std::string, Json> metrics;
  for (const Json& row : report.at("revisions")) metrics[row.at("name")] = row.at("metrics");
  return metrics;
}

}  // namespace

TEST_CASE("cf-model sweep measures each revision as eval and memorize do, with its checksums", "[cf_model][sweep]") {
  Revisions r;
  for (int step : {8, 0, 4}) r.make("m/step" + std::to_string(step), step);
  r.make("m/not-one", 1);
  fs::remove(r.dir / "m/not-one/config.json");
  const std::string json = r.dir / "s.json", csv = r.dir / "s.csv";
  const auto run = cf_model_ok("sweep --model '" + (r.dir / "m") + "'" + r.metrics() + "--json '" + json + "' --csv '" +
                               csv + "' --per-token '" + (r.dir / "nats") + "' --metric surprisal");
  const Json report = Json::parse(read_file(json));
  CHECK(report["faults"].empty());
  REQUIRE(report["revisions"].size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    const Json& row = report["revisions"][i];
    CAPTURE(row.dump());
    const std::string directory = r.dir / "m/step" + std::to_string(4 * i);
    CHECK(row["name"] == "step" + std::to_string(4 * i));
    CHECK(row["step"] == 4 * i);
    CHECK(row["directory"] == fs::canonical(directory).string());
    CHECK(row["config"]["hidden_size"] == 64);
    const std::string content = read_file(directory + "/model.safetensors");
    CHECK(row["files"]["model.safetensors"] == content.size());
    CHECK(row["files_sha256"]["model.safetensors"] == checkpoint::sha256_of(content.data(), content.size()));
    CHECK(row["tensors"].size() == 24);
    CHECK(row["error"].is_null());
    const std::string model = " --model '" + directory + "' --activation float64 ", other = r.dir / "other.json";
    cf_model_ok("eval" + model + "--context 40 --tokens '" + (r.dir / "ids.npy") + "' --json '" + other + "'");
    const Json figures = Json::parse(read_file(other))["figures"]["float64"];
    CHECK(double(row["metrics"]["perplexity"]) == Approx(double(figures["perplexity"]["mean"])).epsilon(1e-10));
    CHECK(double(row["metrics"]["perplexity.error"]) == Approx(double(figures["perplexity"]["error"])).epsilon(1e-10));
    CHECK(double(row["metrics"]["surprisal.mean"]) == Approx(double(figures["nll"]["mean"])).epsilon(1e-10));
    const auto lines = lines_of(read_file(r.dir / "nats/step" + std::to_string(4 * i) + ".csv"));
    REQUIRE(lines.size() == 81);
    CHECK(lines[1] == "0,37,nan");
    CHECK(lines[41].ends_with(",nan"));  // the first id of the second window
    double sum = 0;
    for (std::size_t line = 2; line < lines.size(); ++line)
      if (line != 41) sum += std::stod(lines[line].substr(lines[line].rfind(',') + 1));
    CHECK(sum / 78 == Approx(double(row["metrics"]["surprisal.mean"])).epsilon(1e-8));
    cf_model_ok("memorize" + model + "--tokens '" + (r.dir / "rows.npy") + "' --json '" + other + "'");
    const Json memorized = Json::parse(read_file(other));
    CHECK(row["metrics"]["memorization.accuracy"] == memorized["mean_score"]);
    CHECK(double(row["metrics"]["memorization.exact"]) == double(memorized["memorised"]) / 6);
  }
  const auto table = lines_of(read_file(csv));
  REQUIRE(table.size() == 4);
  CHECK(table[0] ==
        "revision,step,perplexity,perplexity.error,memorization.accuracy,memorization.exact,surprisal.mean,"
        "surprisal.std,sha256,directory,error");
  CHECK(table[3].starts_with("step8,8,"));
  CHECK(lines_of(run.out).size() == 5);
  CHECK(run.out.find("step4") != std::string::npos);
}

TEST_CASE("cf-model sweep names a corrupted revision, a cut one and a copy, and goes on where it was",
          "[cf_model][sweep]") {
  Revisions r;
  std::string folders, good;
  for (int step : {0, 2, 4, 6}) good += " '" + r.make("step" + std::to_string(step), step) + "'";
  folders = good + " '" + r.make("step8", 8, true) + "' '" + r.make("step10", 2) + "' '" + r.make("step12", 12) + "'";
  fs::resize_file(r.dir / "step12/model.safetensors", 1000);
  const std::string json = r.dir / "s.json";
  const std::string command = "sweep" + r.metrics() + "--json '" + json + "' --revisions";
  const auto run = cf_model(command + folders);
  CAPTURE(run.err, run.out);
  CHECK(run.exit_code == 1);
  CHECK(lines_of(run.out).size() == 9);
  const Json report = Json::parse(read_file(json));
  REQUIRE(report["faults"].size() == 3);
  const std::string spoilt = report["faults"][0], cut = report["faults"][1];
  CHECK(spoilt.starts_with(r.dir / "step8: "));
  CHECK(spoilt.find("expected a finite number, got NaN; 1 of ") != std::string::npos);
  CHECK(cut.find("step12/model.safetensors: truncated: the header asks for") != std::string::npos);
  CHECK(report["faults"][2] == (r.dir / "step10") + ": all tensors are those of " + (r.dir / "step2"));
  for (const Json& fault : report["faults"])
    CHECK(run.err.find("cf-model: " + std::string(fault) + "\n") != std::string::npos);
  CHECK(report["revisions"][4]["sha256"].get<std::string>().size() == 64);
  CHECK(report["revisions"][4]["metrics"].empty());
  CHECK(report["revisions"][5]["metrics"] == report["revisions"][1]["metrics"]);

  // Rows without an error are kept: their figures stay though they are no model's.
  Json half = report;
  half["revisions"].erase(2);
  half["revisions"][1]["metrics"]["perplexity"] = 12.5;
  write_file(json, half.dump());
  CHECK(cf_model(command + folders).exit_code == 1);
  const Json again = Json::parse(read_file(json));
  REQUIRE(again["revisions"].size() == 7);
  CHECK(again["revisions"][1]["metrics"]["perplexity"] == 12.5);
  CHECK(again["revisions"][2]["metrics"] == report["revisions"][2]["metrics"]);
  CHECK(again["revisions"][4]["error"] == report["revisions"][4]["error"]);
  // Fewer revisions are no fault of the others, which stay in the file.
  CHECK(cf_model(command + good).exit_code == 0);
  CHECK(Json::parse(read_file(json))["revisions"].size() == 5);

  const std::string before = read_file(json);
  check_cf_model_refusal(command + good + " --limit 40",
                         "s.json: expected a sweep with settings {\"backend\":\"cpu\",");
  check_cf_model_refusal(command + good + " --metric surprisal",
                         "s.json: expected a sweep with metrics [\"perplexity\",");
  CHECK(read_file(json) == before);
  write_file(json, "{");
  check_cf_model_refusal(command + good, "s.json: expected a sweep as JSON, to go on with");
  half["revisions"][0].erase("tensors");
  write_file(json, half.dump());
  check_cf_model_refusal(command + good, "s.json: expected the rows of a sweep");
}

TEST_CASE("cf-model sweep that a signal ends keeps whole rows, and the same command ends it", "[cf_model][sweep]") {
  Revisions r;
  std::string folders;
  for (int step : {0, 1, 2, 3, 4, 5, 6, 7}) folders += " '" + r.make("step" + std::to_string(step), step) + "'";
  const std::string json = r.dir / "s.json", whole = r.dir / "whole.json";
  const std::string command = "sweep" + r.metrics() + "--json '" + json + "' --revisions" + folders;
  // The signal comes once a row is there, wherever the sweep is then: it may have ended.
  const auto run = run_program("'" CF_MODEL_PROGRAM "' " + command + " & pid=$!; until [ -s '" + json +
                               "' ]; do sleep 0.01; done; kill -TERM $pid; wait $pid");
  CAPTURE(run.err);
  CHECK((run.exit_code == 143 || run.exit_code == 0));
  const Json some = Json::parse(read_file(json));
  CHECK(some["revisions"].size() >= 1);
  for (const Json& row : some["revisions"]) CHECK(row["metrics"].size() == 4);
  cf_model_ok(command);
  cf_model_ok("sweep" + r.metrics() + "--json '" + whole + "' --revisions" + folders);
  CHECK(metrics_by_name(Json::parse(read_file(json))) == metrics_by_name(Json::parse(read_file(whole))));
}

TEST_CASE("cf-model sweep refuses what it cannot measure, in one line", "[cf_model][sweep]") {
  Revisions r;
  const std::string folder = r.make("step1", 1), ids = " --tokens '" + (r.dir / "ids.npy") + "'";
  const std::string one = "sweep --revisions '" + folder + "' ";
  check_cf_model_refusal("sweep --metric perplexity" + ids, "--revisions or --model: expected one of them, got none");
  check_cf_model_refusal(one + ids, "--metric: required, not given");
  check_cf_model_refusal(one + "--metric blimp" + ids,
                         "--metric: expected perplexity, surprisal or memorization, got 'blimp'");
  check_cf_model_refusal(one + "--metric perplexity", "--tokens: required for perplexity and surprisal, not given");
  check_cf_model_refusal(one + "--metric memorization", "--sequences: required for memorization, not given");
  check_cf_model_refusal(one + "--metric perplexity --row 64" + ids, "--row: expected with --metric memorization");
  check_cf_model_refusal(one + "--metric perplexity --per-token x" + ids,
                         "--per-token: expected with --metric surprisal");
  check_cf_model_refusal(one + "'" + folder + "' --metric perplexity" + ids, "--revisions: expected each once");
  check_cf_model_refusal(one + "--metric memorization --sequences '" + (r.dir / "rows.npy") + "' --count 7",
                         "--count: expected 1 to 6, got 7");
  check_cf_model_refusal("sweep --model '" + (r.dir / "step1") + "' --metric perplexity" + ids,
                         "step1: expected folders of revisions, each with a config.json");
  check_cf_model_refusal("sweep --model '" + (r.dir / "none") + "' --metric perplexity" + ids, "none: No such file");
  // What is wrong with one revision alone is in its row.
  const auto run =
      cf_model("sweep --metric perplexity" + ids + " --revisions '" + folder + "' '" + (r.dir / "none") + "'");
  CHECK(run.exit_code == 1);
  CHECK(run.err.find("none: no such directory") != std::string::npos);
}
