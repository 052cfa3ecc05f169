// cf-model's options for many sequences at once, and its streams.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "golden/checkpoint/token_file.hpp"
#include "tests/apps/run_cf_model.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/held_port.hpp"
#include "tests/support/taken.hpp"
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

TEST_CASE("cf-model generate in two processes prints one's ids once, and names a process that differs", "[cf_model]") {
  const std::string program = "'" + std::string(CF_MODEL_PROGRAM) + "' generate --processes ";
  const std::string common = "--threads 1 --activation float64 --stop none --max-new-tokens 9 --prompt-ids '1,2,3;5' ";
  const TempDir dir;
  const auto both = [&](const std::string& first, const std::string& second) {
    const HeldPort port;
    const std::string variables =
        " WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(port.port()) + " " + program;
    return run_program("RANK=1" + variables + second + " >'" + (dir / "out") + "' 2>'" + (dir / "err") + "' & RANK=0" +
                       variables + first + "; code=$?; wait $! && exit $code || exit $((10 * $? + code))");
  };
  const std::string expected = cf_model_ok("generate " + model + common).out;
  const ProgramRun r = both(model + common + "--json '" + (dir / "x.json") + "'", model + common);
  CAPTURE(r.err, read_file(dir / "err"));
  CHECK(r.exit_code == 0);
  CHECK(sorted_lines(r.out) == sorted_lines(expected));
  CHECK(read_file(dir / "out").empty());
  CHECK(read_file(dir / "err").empty());
  CHECK(Json::parse(read_file(dir / "x.json"))["processes"] == 2);

  const ProgramRun differ = both(model + common, model + common + "--chunk 7 ");
  const std::string line = "cf-model: ranks: rank 1 has 'chunk 7', expected 'chunk 512' as rank 0 has\n";
  CHECK(differ.exit_code == 22);
  CHECK(differ.out.empty());
  CHECK(differ.err == line);
  CHECK(read_file(dir / "err") == line);

  const ProgramRun missing = both(model + common, "--model /no/such " + common);
  CHECK(missing.exit_code == 22);
  CHECK(missing.err.starts_with("cf-model: ranks: rank 1: /no/such"));
  CHECK(missing.error_lines() == 1);

  check_cf_model_refusal("generate --processes " + model + common, "WORLD_SIZE: expected an integer of 1 to 1024");
}

TEST_CASE("cf-model generate takes hundreds of slots", "[cf_model]") {
  std::string prompts = "1";
  for (int i = 1; i < 200; ++i) prompts += ";" + std::to_string(i % 100 + 1);
  const std::string common = "generate " + model + "--stop none --max-new-tokens 3 --prompt-ids '" + prompts + "' ";
  CHECK(sorted_lines(cf_model_ok(common + "--slots 200 --pages 200 --page-entries 4").out) ==
        sorted_lines(cf_model_ok(common).out));
}

TEST_CASE("cf-model generate makes the same ids with drafts, and counts them", "[cf_model][draft]") {
  const std::string stdlib = "generate --model '" CF_DATA_DIR "/checkpoints/stdlib-4m' --ids --stop none ";
  const std::string prompts = "--prompt-ids '486,500,525,555,278,302;5,6,7,5,6,7,5,6;100' --max-new-tokens 24 ";
  const TempDir dir;
  const std::string json = dir / "report.json";
  for (const char* how : {"", "--temperature 0.7 --top-k 20 --seed 3 ", "--slots 2 --pages 40 --page-entries 4 "}) {
    CAPTURE(how);
    const std::vector<std::string> expected = sorted_lines(cf_model_ok(stdlib + prompts + how).out);
    for (const char* draft : {"--draft lookup ", "--draft lookup --draft-len 2 ", "--draft lookup --invariant "}) {
      CAPTURE(draft);
      const auto run = cf_model_ok(stdlib + prompts + how + draft + "--json '" + json + "'");
      CHECK(sorted_lines(run.out) == expected);
      CHECK(run.err.find("\ndrafts: ") != std::string::npos);
      const Json report = Json::parse(read_file(json));
      CHECK(report["draft"]["by"] == "lookup");
      std::int64_t drafted = 0, accepted = 0;
      for (const Json& s : report["sequences"]) {
        const Json& d = s["drafts"];
        CHECK(d["accepted"] <= d["drafted"]);
        CHECK(d["steps"] <= d["drafted"]);
        drafted += d["drafted"].get<std::int64_t>();
        accepted += d["accepted"].get<std::int64_t>();
      }
      CHECK(drafted > 0);
      CHECK(run.err.find(std::to_string(drafted) + " ids in ") != std::string::npos);
      CHECK(run.err.find(std::to_string(accepted) + " accepted") != std::string::npos);
    }
  }
  const std::string one = stdlib + "--prompt-ids 1,2 ";
  check_cf_model_refusal(one + "--draft-len 3", "--draft-len: expected with --draft");
  check_cf_model_refusal(one + "--draft lookup --draft-len 8", "--draft-len: expected 1 to 7, got '8'");
  check_cf_model_refusal(one + "--draft ngram", "--draft: expected ");
  check_cf_model_refusal(one + "--draft lookup --slots 9",
                         "draft: expected a model that gives a token the same bits in a step of any size");
  check_cf_model_refusal(one + "--draft lookup --activation float64",
                         "draft: expected a model that gives a token the same bits in a step of any size");
  CHECK(cf_model_ok(one + "--draft lookup --slots 9 --invariant --max-new-tokens 4").out ==
        cf_model_ok(one + "--max-new-tokens 4").out);
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

TEST_CASE("cf-model memorize goes on where it was interrupted, and bare ids are those of a .npy file",
          "[cf_model][memorize]") {
  const TempDir dir;
  const std::string tokens = std::string(CF_DATA_DIR) + "/checkpoints/stdlib-4m/held_out.npy";
  const std::string common = "memorize --model '" + std::string(CF_DATA_DIR) + "/checkpoints/stdlib-4m' ";
  const std::string run = common + "--tokens '" + tokens + "' --row 32 --context 8 --continuation 16 --count 12 ";
  const std::string csv = dir / "m.csv", report = dir / "m.json";
  const std::string made = cf_model_ok(run + "--slots 5 --csv '" + csv + "' --json '" + report + "'").out;
  CHECK(made.starts_with("12 of 12 sequences: "));
  const std::string whole = read_file(csv);
  CHECK(whole.starts_with("index,accuracy,equal,prefix\n0,"));
  CHECK(std::ranges::count(whole, '\n') == 13);
  const Json found = Json::parse(read_file(report));
  CHECK(found["sequences"] == 12);
  CHECK(found["made_now"] == 12);
  CHECK(found["sequences_per_s"].get<double>() > 0);
  // A line was cut: it and those behind it are made again.
  write_file(csv, whole.substr(0, whole.size() / 2));
  CHECK(cf_model_ok(run + "--slots 2 --csv '" + csv + "'").out.starts_with("12 of 12 sequences: "));
  CHECK(read_file(csv) == whole);
  CHECK(cf_model_ok(run + "--csv '" + csv + "' --json '" + report + "'").out.find("/s") == std::string::npos);
  CHECK(Json::parse(read_file(report))["made_now"] == 0);
  check_cf_model_refusal(run + "--exact-only --csv '" + csv + "'", "m.csv.json: expected the settings of this run");
  write_file(csv, "index,accuracy,equal,prefix\n1,0.5,8,8\n");
  check_cf_model_refusal(run + "--csv '" + csv + "'", "m.csv: expected the results of sequences from 0 on");

  // The same ids without a header, as 16 bits.
  const checkpoint::TokenFile ids = taken(checkpoint::read_token_file(tokens, 12 * 32));
  std::string bytes;
  for (std::int32_t id : ids.ids) {
    bytes += char(id & 255);
    bytes += char(id >> 8);
  }
  write_file(dir / "ids.bin", bytes);
  const std::string bare = common + "--tokens '" + (dir / "ids.bin") + "' --context 8 --continuation 16 ";
  const std::string other = dir / "bare.csv";
  cf_model_ok(bare + "--row 32 --csv '" + other + "'");
  CHECK(read_file(other) == whole);
  cf_model_ok(bare + "--row 32 --first 3 --count 4 --exact-only");
  check_cf_model_refusal(bare, "ids.bin: expected --row");
  check_cf_model_refusal(bare + "--row 25", "ids.bin: expected sequences of 25 ids, got 384 ids");
  check_cf_model_refusal(bare + "--row 12", "ids.bin: expected sequences of at least 24 ids, got 12");
  check_cf_model_refusal(bare + "--row 32 --first 12", "--first: expected 0 to 11, got 12");
  check_cf_model_refusal(bare + "--row 32 --count 13", "--count: expected 1 to 12, got 13");
  check_cf_model_refusal(bare + "--row 32 --id-type int32 --never 2048", "never[0]: expected an id of 0 to 2047");
}
