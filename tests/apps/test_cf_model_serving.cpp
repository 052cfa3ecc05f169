// cf-model's options for many sequences at once, and its streams.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/apps/run_cf_model.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::test;
using Json = nlohmann::json;

const std::string model = "--model '" CF_DATA_DIR "/checkpoints/neox-d80' ";

/// The lines of a text in the order of the alphabet: prompts are printed as they end.
std::vector<std::string> sorted_lines(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

}  // namespace

TEST_CASE("cf-model generate gives the same ids from pages, in pieces of prompts and with the same bits",
          "[cf_model]") {
  const std::string common = "generate " + model + "--stop none --max-new-tokens 9 --prompt-ids ";
  const std::string prompts = "'1,2,3,4,5,6,7,8,9;1,2,3,4,5,6,7,8,10;5;3,3,3' ";
  const std::vector<std::string> expected = sorted_lines(cf_model_ok(common + prompts).out);
  for (const char* more : {"--step-tokens 3", "--step-tokens 3 --invariant", "--pages 40 --page-entries 4",
                           // Pages for no more than one sequence: the others wait.
                           "--pages 5 --page-entries 4 --share-prefixes",
                           "--pages 40 --page-entries 4 --share-prefixes --step-tokens 5"}) {
    CAPTURE(more);
    CHECK(sorted_lines(cf_model_ok(common + prompts + more).out) == expected);
  }
  check_cf_model_refusal(common + prompts + "--pages 4 --page-entries 4",
                         "capacity: expected at most 16 entries, those of 4 pages, got 17");
  check_cf_model_refusal(common + "1 --page-entries 4", "--page-entries: expected with --pages");
  check_cf_model_refusal(common + "1 --pages 0", "--pages: expected 1 to ");
  check_cf_model_refusal(common + "1 --invariant --activation float64", "invariant: expected activations of float32");
}

TEST_CASE("cf-model generate takes hundreds of slots", "[cf_model]") {
  std::string prompts = "1";
  for (int i = 1; i < 200; ++i) prompts += ";" + std::to_string(i % 100 + 1);
  const std::string common = "generate " + model + "--stop none --max-new-tokens 3 --prompt-ids '" + prompts + "' ";
  CHECK(sorted_lines(cf_model_ok(common + "--slots 200 --pages 200 --page-entries 4").out) ==
        sorted_lines(cf_model_ok(common).out));
}

TEST_CASE("cf-model stream goes on behind its window in a cache that does not grow", "[cf_model][stream]") {
  const TempDir dir;
  const std::string stream = "stream " + model + "--prompt-ids 1,2,3 --window 12 --sinks 4 --chunk 5 ";
  const std::string made =
      cf_model_ok(stream + "--max-new-tokens 300 --every 100 --json '" + (dir / "x.json") + "'").out;
  // The same of the decoder.
  CHECK(cf_model_ok("generate " + model +
                    "--prompt-ids 1,2,3 --window 12 --sinks 4 --chunk 5 --stop none --max-new-tokens 300")
            .out == made);
  const Json report = Json::parse(read_file(dir / "x.json"));
  CHECK(report["new_tokens"] == 300);
  CHECK(report["cache_entries"] == 4 + 12 + 5 - 1);
  CHECK(report["cache_bytes"].get<double>() > 0);
  REQUIRE(report["stretches"].size() == 3);
  for (const Json& stretch : report["stretches"]) CHECK(stretch["tokens"] == 100);
  // A stop id ends it, and is its last.
  std::vector<std::string> ids;
  for (std::size_t begin = 0, end; begin < made.size(); begin = end + 1) {
    end = made.find_first_of(",\n", begin);
    ids.push_back(made.substr(begin, end - begin));
  }
  const std::string stopped = cf_model_ok(stream + "--stop " + ids[20]).out;
  CHECK(made.starts_with(stopped.substr(0, stopped.size() - 1)));
  CHECK(stopped.ends_with(ids[20] + "\n"));
  // It is not the text of a model that sees all tokens.
  CHECK(cf_model_ok("generate " + model + "--prompt-ids 1,2,3 --stop none --max-new-tokens 300").out != made);
}

TEST_CASE("cf-model stream refuses what is no stream", "[cf_model][stream]") {
  check_cf_model_refusal("stream " + model, "--prompt-ids: required, not given");
  check_cf_model_refusal("stream " + model + "--prompt-ids '1;2'", "--prompt-ids: expected one prompt, got '1;2'");
  check_cf_model_refusal("stream " + model + "--prompt-ids 1,128", "ids[1]: expected an id of 0 to 127, got 128");
  check_cf_model_refusal("stream " + model + "--prompt-ids 1 --window 0", "--window: expected 1 to ");
  check_cf_model_refusal("stream --preset gpt2 --prompt-ids 1",
                         "window, sinks: expected a model with RoPE, got one without");
  check_cf_model_refusal("generate " + model + "--prompt-ids 1 --sinks 4", "--sinks: expected with --window");
  check_cf_model_refusal("generate " + model + "--prompt-ids 1 --window 8 --pages 4", "expected none for streams");
}
