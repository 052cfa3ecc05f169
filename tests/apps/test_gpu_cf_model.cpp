// cf-model on a GPU as its users meet it: the ids that it makes are the oracle's, whatever steps them, and what it
// prints, writes and refuses.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "golden/checkpoint/token_file.hpp"
#include "golden/file/model_golden.hpp"
#include "tests/apps/run_cf_model.hpp"
#include "tests/golden/golden_files.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::test;
using Json = nlohmann::json;

const std::string checkpoints = CF_DATA_DIR "/checkpoints/", d80 = "--model '" + checkpoints + "neox-d80' ";
const std::vector<std::string> kImplNames{"unfused", "graph", "split", "layer", "persistent"};

/// The command on a GPU, which must end well.
ProgramRun on_gpu(const std::string& arguments) { return cf_model_ok(arguments + " --backend cuda"); }

/// The JSON that the command writes.
Json json_of(const std::string& arguments, bool gpu = true) {
  const TempDir dir;
  const std::string path = dir / "r.json";
  const ProgramRun r = cf_model(arguments + (gpu ? " --backend cuda" : "") + " --json '" + path + "'");
  CAPTURE(arguments, r.out, r.err);
  REQUIRE(r.exit_code == 0);
  return Json::parse(read_file(path));
}

void check_refusal(const std::string& arguments, const std::string& text) {
  check_cf_model_refusal(arguments + " --backend cuda", text);
}

std::string list_of(const std::vector<std::int32_t>& ids) {
  std::string text;
  for (std::int32_t id : ids) text += (text.empty() ? "" : ",") + std::to_string(id);
  return text;
}

bool is_impl(const Json& name) {
  return std::find(kImplNames.begin(), kImplNames.end(), name.get<std::string>()) != kImplNames.end();
}

void check_machine(const Json& report) {
  CHECK(report["backend"] == "cuda");
  for (const char* key : {"gpu", "cuda_driver", "cuda_runtime", "commit", "command", "model", "weights"}) {
    CAPTURE(key);
    CHECK_FALSE(report[key].get<std::string>().empty());
  }
  CHECK_FALSE(report.contains("threads"));
}

}  // namespace

TEST_CASE("cf-model on the GPU: every checkpoint's ids and logits are the oracle's within the budget",
          "[gpu][cf-model]") {
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoints)) {
    const std::string path = entry.path().string();
    CAPTURE(path);
    ++found;
    const TempDir dir;
    const ProgramRun r = cf_model("generate --model '" + path +
                                  "' --stop none --max-new-tokens 12 --prompt-ids '1,2,3;4;127,0,5,6,7,8,9,10,11' "
                                  "--check --backend cuda --json '" +
                                  (dir / "x.json") + "'");
    CAPTURE(r.out, r.err);
    REQUIRE(r.exit_code == 0);
    for (const char* prompt : {"0", "1", "2"})
      CHECK(r.out.find("check of prompt " + std::string(prompt) + " against the float64 oracle: relative L2 ") !=
            std::string::npos);
    const Json report = Json::parse(read_file(dir / "x.json"));
    check_machine(report);
    CHECK(is_impl(report["impl"]));
    const auto config = Json::parse(read_file(path + "/config.json"));
    CHECK(report["activation_dtype"] == config[config.contains("dtype") ? "dtype" : "torch_dtype"]);
    REQUIRE(report["sequences"].size() == 3);
    for (const Json& sequence : report["sequences"]) {
      CHECK(sequence["ids"].size() == 12);
      CHECK(sequence["finish"] == "length");
    }
  }
  CHECK(found > 10);
}

TEST_CASE("cf-model on the GPU: every impl steps to the oracle's ids, those of one arithmetic to the same",
          "[gpu][cf-model]") {
  std::map<std::string, std::string> printed;
  for (const std::string& impl : kImplNames) {
    CAPTURE(impl);
    const std::string common = "generate " + d80 +
                               "--stop none --max-new-tokens 20 --slots 3 --prompt-ids '1,2,3;4;5,6,7,8;9,10' "
                               "--impl " +
                               impl;
    printed[impl] = on_gpu(common + " --check").out;
    CHECK(json_of(common)["impl"] == impl);
  }
  CHECK(printed["unfused"] == printed["graph"]);
  CHECK(printed["split"] == printed["layer"]);
  // The persistent impl's final LayerNorm reads the residual stream in float32. That of split and layer reads the
  // stream after its rounding to 16 bits, so their logits differ.
  const auto ids = [](const std::string& text) { return text.substr(0, text.find("check of prompt")); };
  CHECK(ids(printed["persistent"]).find("3: ") != std::string::npos);
  CHECK(ids(printed["persistent"]) == ids(printed["layer"]));
}

TEST_CASE("cf-model on the GPU: the same prompt gives the same ids, and a seed the same draws", "[gpu][cf-model]") {
  const std::string greedy = "generate " + d80 + "--stop none --max-new-tokens 30 --prompt-ids 1,2,3 ";
  CHECK(on_gpu(greedy).out == on_gpu(greedy).out);
  // One chunk of a prompt or many change its sums' order, which the check allows for, but not in an invariant model.
  on_gpu(greedy + "--chunk 2 --check");
  CHECK(on_gpu(greedy + "--chunk 2 --invariant").out == on_gpu(greedy + "--slots 9 --invariant").out);
  const std::string sampled =
      greedy + "--temperature 2 --top-k 40 --top-p 0.95 --min-p 0.001 --repetition-penalty 1.1 ";
  const std::string first = on_gpu(sampled + "--seed 3").out;
  CHECK(on_gpu(sampled + "--seed 3").out == first);
  CHECK(on_gpu(sampled + "--seed 4").out != first);
  on_gpu(sampled + "--check");
}

TEST_CASE("cf-model on the GPU: more prompts than slots wait, and the first has the ids that it has alone",
          "[gpu][cf-model]") {
  const std::string common = "generate " + d80 + "--stop none --max-new-tokens 9 --slots 2 --check ";
  const Json report = json_of(common + "--prompt-ids '1,2,3;4;5,6,7,8,9,10,11;3,3,3;8'");
  REQUIRE(report["sequences"].size() == 5);
  CHECK(report["slots"] == 2);
  for (const Json& sequence : report["sequences"]) CHECK(sequence["ids"].size() == 9);
  const std::vector<std::int32_t> first = report["sequences"][0]["ids"];
  CHECK(on_gpu(common + "--prompt-ids 1,2,3").out.starts_with(list_of(first) + "\n"));
}

TEST_CASE("cf-model on the GPU: a full cache ends a sequence with what was made", "[gpu][cf-model]") {
  const auto r =
      cf_model("generate " + d80 + "--stop none --max-new-tokens 20 --capacity 8 --prompt-ids 1,2,3 --backend cuda");
  CAPTURE(r.out, r.err);
  CHECK(r.exit_code == 2);
  CHECK(std::count(r.out.begin(), r.out.end(), ',') == 5);
  CHECK(r.err.find("the cache's capacity of 8 entries is reached after 6 new tokens") != std::string::npos);
}

TEST_CASE("cf-model on the GPU ends cleanly with what was made when it is interrupted", "[gpu][cf-model]") {
  const TempDir dir;
  // The signal comes once there is a first id, however fast the machine is.
  const std::string out = dir / "out.txt";
  const auto r = run_program("'" + std::string(CF_MODEL_PROGRAM) +
                             "' generate --backend cuda --preset pythia-14m --max-new-tokens 400000 --prompt-ids 1,2 "
                             "--json '" +
                             (dir / "x.json") + "' >'" + out + "' & while kill -0 $! && ! [ -s '" + out +
                             "' ]; do sleep 0.1; done; kill -INT $!; wait $!");
  const std::string printed = read_file(out);
  CAPTURE(r.err);
  CHECK(r.exit_code == 130);
  const Json report = Json::parse(read_file(dir / "x.json"));
  const std::vector<std::int32_t> ids = report["sequences"][0]["ids"];
  CHECK(report["sequences"][0]["finish"] == "interrupted");
  CHECK(printed == list_of(ids) + "\n");
}

// The last rounding to 16 bits moves logits by at most u of themselves, and which way is luck: where both were equally
// far before it, ours may end up to u above Hugging Face's. Luck evens out: over all files together ours may not be
// further at all.
TEST_CASE("cf-model eval on the GPU: 16 bits are no further from float64 than Hugging Face's own", "[gpu][cf-model]") {
  double ours_squared = 0, theirs_squared = 0;
  int compared = 0;
  for (const std::string& path : golden_files("golden_model")) {
    const auto file = golden::ModelGolden::open(path);
    CAPTURE(path, file.status().message());
    REQUIRE(file);
    const std::string name = std::filesystem::path(path).stem().string();
    const std::string model = checkpoints + name.substr(0, name.rfind('-'));
    if (!std::filesystem::exists(model)) continue;
    for (const char* feed : {"token", "prompt"}) {
      CAPTURE(feed);
      const Json report = json_of("eval --model '" + model + "' --reference '" + path + "' --chunk 100 --feed " + feed);
      check_machine(report);
      const std::string dtype = report["activation_dtype"];
      REQUIRE(report["figures"].contains(dtype));
      const Json& ours = report["figures"][dtype];
      CHECK(ours["positions"] == file->meta().fed());
      const double u = unit_roundoff(*dtype_from_string(dtype)), error = ours["logits_rel_l2"];
      for (const auto& [variant, theirs] : report["figures"].items()) {
        if (variant == dtype || !variant.starts_with(dtype)) continue;
        CAPTURE(variant);
        const double their_error = theirs["logits_rel_l2"];
        CHECK(error <= their_error + u);
        if (dtype == "float32") continue;
        ours_squared += std::pow(error / u, 2);
        theirs_squared += std::pow(their_error / u, 2);
        ++compared;
      }
      // A logit's error moves the log of a probability by at most twice itself, on the CPU and on the GPU.
      if (file->meta().top > 0 || feed == std::string("token")) continue;
      const Json cpu =
          json_of("eval --model '" + model + "' --reference '" + path + "' --feed prompt", false)["figures"]["float32"];
      CHECK(cpu["positions"] == ours["positions"]);
      CHECK(std::abs(double(cpu["nll"]["mean"]) - double(ours["nll"]["mean"])) <=
            2 * (double(cpu["logits_max_error"]) + double(ours["logits_max_error"])));
    }
  }
  CHECK(compared > 20);
  CHECK(ours_squared <= theirs_squared);
}

TEST_CASE("cf-model eval on the GPU: trained models are no further from float64 than Hugging Face on held-out text",
          "[gpu][cf-model]") {
  // The models are those of golden/tools/train_small.py and their GPTQ twins. Each bound is Hugging Face's distance
  // from float64 on the same ids: the run float16:eager of golden/tools/eval_hf.py.
  struct Trained {
    const char* name;
    double kl, rel_l2;
  };
  for (const Trained& t :
       {Trained{"stdlib-4m", 3.60e-6, 8.06e-4}, Trained{"stdlib-4m-gptq", 3.70e-6, 8.29e-4},
        Trained{"stdlib-llama-2m", 1.93e-6, 5.43e-4}, Trained{"stdlib-llama-2m-gptq", 2.05e-6, 5.59e-4}})
    for (const char* feed : {"token", "prompt"}) {
      CAPTURE(t.name, feed);
      const Json report =
          json_of("eval --model '" + checkpoints + t.name + "' --tokens '" + checkpoints +
                  "stdlib-4m/held_out.npy' --context 512 --limit 2048 --oracle --feed " + std::string(feed));
      check_machine(report);
      const Json& figures = report["figures"]["float16"];
      CHECK(figures["positions"] == 4 * 511);
      CHECK(double(figures["kl"]["mean"]) <= t.kl);
      CHECK(double(figures["logits_rel_l2"]) <= t.rel_l2);
      // What 16 bits cost each id has a mean of zero.
      const Json& ratio = figures["log_perplexity_ratio"];
      CHECK(std::abs(double(ratio["mean"])) <= 5 * double(ratio["error"]));
    }
}

TEST_CASE("cf-model eval on the GPU: windows and the oracle are the CPU's", "[gpu][cf-model]") {
  const TempDir dir;
  std::vector<std::int32_t> ids;
  for (int i = 0; i < 150; ++i) ids.push_back((i * 37 + i * i) % 128);
  REQUIRE(checkpoint::write_token_file(dir / "text.npy", ids, {150}));
  const std::string common = "eval " + d80 + "--tokens '" + (dir / "text.npy") + "' --context 50 --stride 10 --oracle ";
  const Json gpu = json_of(common)["figures"]["float16"], cpu = json_of(common, false)["figures"]["float32"];
  CHECK(gpu["positions"] == cpu["positions"]);
  CHECK(std::abs(double(gpu["nll"]["mean"]) - double(cpu["nll"]["mean"])) <=
        2 * (double(gpu["logits_max_error"]) + double(cpu["logits_max_error"])));
  CHECK(double(gpu["logits_rel_l2"]) > 0);
  // The same oracle: its own perplexity has the same bits.
  CHECK(gpu["reference_perplexity"] == cpu["reference_perplexity"]);
}

TEST_CASE("cf-model bench on the GPU: table, JSON and CSV", "[gpu][cf-model]") {
  const auto [out, report] =
      run_bench("--backend cuda --preset pythia-160m --prompt-len 4,130 --new-tokens 1,3 --slots 1,9");
  check_machine(report);
  CHECK(report["impl"] == "auto");
  CHECK(out.starts_with(report["gpu"].get<std::string>() + ", procedural weights"));
  CHECK(report["activation_dtype"] == "float16");
  CHECK(report["runs"] == 5);
  CHECK(report["warmup"] == 2);
  CHECK(report["capacity"] == 130 + 3 - 1);
  // Those of prompts of 130 ids, asked for 192; on Hopper the steps of 9 slots need no library.
  CHECK(report["product_library"].get<std::string>().find("cublasLt") != std::string::npos);
  CHECK(std::any_of(report["product_algorithms"].begin(), report["product_algorithms"].end(),
                    [](const Json& a) { return a.get<std::string>().starts_with("192 tokens, "); }));
  REQUIRE(report["results"].size() == 8);
  for (const Json& row : report["results"]) {
    CAPTURE(row.dump());
    const std::int64_t tokens = row["new_tokens"];
    CHECK(is_impl(row["impl"]));
    CHECK(double(row["prefill_tflop_per_s"]) > 0);
    CHECK((tokens == 1 ? row["decode_bytes"] == 0 : row["decode_bytes"] > 0));
    CHECK((tokens == 1 ? row["decode_percent_of_read"] == 0 : row["decode_percent_of_read"] > 0));
    // Between a workstation's GPU and ten times the fastest.
    CHECK(double(row["read_best_gb_per_s"]) > 100);
    CHECK(double(row["read_best_gb_per_s"]) < 50e3);
  }
  // A step of the whole model, cold, is no faster than memory; the 100 % is the best of several reads.
  const Json cold = json_of("bench --preset pythia-410m --prompt-len 16 --new-tokens 8 --runs 2 --warmup 1");
  CHECK(cold["runs"] == 2);
  CHECK(cold["results"][0]["decode_percent_of_read"] < 105);
  // A prompt that joins is read in pieces: no step of the others takes as long as its first id.
  const auto joined = run_bench(
      "--backend cuda --preset pythia-160m --prompt-len 4 --new-tokens 1 --slots 9 --joiner-len 1500 --runs 2");
  const Json& row = joined.report["results"][0];
  CHECK(double(row["stall_ms"]) > 0);
  CHECK(double(row["stall_ms"]) < double(row["joiner_ttft_ms"]));
}

TEST_CASE("cf-model bench --score on the GPU", "[gpu][cf-model]") {
  const Json report = json_of("bench --preset pythia-160m --prompt-len 40,600 --score 1,40 --slots 1,9 --texts 20");
  check_machine(report);
  REQUIRE(report["results"].size() == 8);
  for (const Json& row : report["results"]) {
    CAPTURE(row.dump());
    CHECK(double(row["score_ms"]) > 0);
    CHECK(double(row["percent_of_prefill"]) > 0);
  }
}

TEST_CASE("cf-model info on the GPU: bytes, memory, slots and the impl that auto chooses", "[gpu][cf-model]") {
  const std::string out = on_gpu("info " + d80).out;
  CAPTURE(out);
  // Keys and values of 160 numbers in two layers, two bytes each.
  for (const char* part :
       {"cache, float16", "1.3 kB a token", "activations, float16", "GPU", "free memory", "slots that fit", "| impl",
        "graph for 1 to 1024 slots", "| products of many tokens", "libcublasLt", "| a row's bits are the same",
        "in steps of 1 to 8, 9 to 128, 129 or more tokens", "| in attention",
        "for 1 to 8, 9 to 128, 129 or more rows whose logits are asked for"})
    CHECK(out.find(part) != std::string::npos);
  const std::string invariant = on_gpu("info --invariant " + d80).out;
  CHECK(invariant.find("in steps of 1 or more tokens") != std::string::npos);
  CHECK(invariant.find("in runs of 1 or more tokens") != std::string::npos);
  CHECK(on_gpu("info --preset pythia-2.8b").out.find("persistent for 1 to 4 slots, graph for 5 to 1024 slots") !=
        std::string::npos);
  CHECK(on_gpu("info --preset pythia-2.8b --quant gptq").out.find("GPTQ of 4 bits, group 128") != std::string::npos);
  // float32 weights leave one impl for any number of slots.
  CHECK(on_gpu("info --preset pythia-14m --dtype f32").out.find("graph for 1 to 1024 slots") != std::string::npos);
  CHECK(on_gpu("info --preset pythia-14m --impl unfused").out.find("unfused for 1 to 1024 slots") != std::string::npos);
}

TEST_CASE("cf-model memorize on the GPU: an invariant model's results do not depend on the slots",
          "[gpu][cf-model][memorize]") {
  const TempDir dir;
  const std::string trained = CF_DATA_DIR "/checkpoints/stdlib-4m";
  const std::string common = "memorize --model '" + trained + "' --tokens '" + trained +
                             "/held_out.npy' --row 64 --count 40 --invariant --csv '";
  on_gpu(common + (dir / "one.csv") + "' --slots 1");
  on_gpu(common + (dir / "many.csv") + "' --slots 16");
  const std::string made = read_file(dir / "one.csv");
  CHECK(std::ranges::count(made, '\n') == 41);
  CHECK(read_file(dir / "many.csv") == made);
}

TEST_CASE("cf-model on the GPU refuses bad input in one line", "[gpu][cf-model][bad]") {
  const std::string generate = "generate " + d80;
  check_refusal(generate + "--prompt-ids 1 --activation float32", "--activation: expected with --backend cpu");
  check_refusal(generate + "--prompt-ids 1 --threads 2", "--threads: expected with --backend cpu");
  check_refusal(generate + "--prompt-ids 1 --impl layer --invariant",
                "invariant: expected the impl graph or unfused, got layer");
  check_refusal(generate + "--prompt-ids 1 --impl fast", "--impl: expected auto, unfused, graph, split, layer");
  check_refusal(generate + "--prompt-ids 1,128", "prompt[1]: expected an id of 0 to 127, got 128");
  check_refusal(generate + "--prompt-ids 1,-1", "prompt[1]: expected an id of 0 to 127, got -1");
  check_refusal(generate + "--prompt-ids 1 --stop 128", "stop[0]: expected an id of 0 to 127, got 128");
  check_refusal(generate + "--prompt-ids 1,2,3 --capacity 2", "expected at most 2 ids, the cache's capacity, got 3");
  // Before the weights are made.
  check_refusal("generate --preset pythia-12b --prompt-ids 1 --slots 64 --capacity 1000000",
                "pythia-12b: 64 slots of 1000000 entries need ");
  check_refusal("bench --preset pythia-12b --prompt-len 500000 --new-tokens 1 --slots 1,64", " for activations, ");
  for (const std::string impl : {"split", "layer", "persistent"}) {
    const std::string named = "--impl " + impl + ": ",
                      tiny = "generate --preset pythia-14m --prompt-ids 1 --impl " + impl;
    check_refusal(tiny + " --slots 9", named);
    check_refusal(tiny + " --dtype f32", named);
  }
  check_refusal("generate --model /nowhere --prompt-ids 1", "/nowhere");
}
