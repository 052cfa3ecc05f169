// The programs' GPU side: every golden file against Hugging Face's float64, the timer, and cf-layer as its users meet it.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "apps/device_timer.hpp"
#include "apps/golden_walk.hpp"
#include "cuda/cuda.hpp"
#include "cuda/memory.hpp"
#include "tests/catch.hpp"
#include "tests/golden_files.hpp"
#include "tests/run_program.hpp"

using namespace cf;
using namespace cf::test;
using Json = nlohmann::json;

namespace {

std::string quoted(const std::string& word) { return "'" + word + "'"; }

/// cf-layer's JSON for these arguments; it must end well.
Json cf_layer_json(const std::string& arguments) {
  const TempDir dir;
  const std::string path = dir / "r.json";
  const ProgramRun r =
      run_program(quoted(CF_LAYER_PROGRAM) + " --backend cuda " + arguments + " --json " + quoted(path));
  CAPTURE(arguments, r.out, r.err);
  REQUIRE(r.exit_code == 0);
  REQUIRE(r.err.empty());
  std::ifstream file(path);
  return Json::parse(file);
}

/// One line on stderr that starts so, exit code 2, nothing on stdout.
void check_refusal(const std::string& arguments, const std::string& start) {
  const ProgramRun r = run_program(quoted(CF_LAYER_PROGRAM) + " --backend cuda " + arguments);
  CAPTURE(arguments, r.out, r.err);
  CHECK(r.exit_code == 2);
  CHECK(r.out.empty());
  CHECK(r.err.starts_with("cf-layer: " + start));
  CHECK(r.error_lines() == 1);
}

}  // namespace

TEST_CASE("every golden file in data: the GPU meets Hugging Face's float64 at every tap", "[gpu][golden]") {
  const std::vector<std::string> paths = golden_files();
  REQUIRE_FALSE(paths.empty());
  for (const std::string& path : paths) {
    const auto file = golden::GoldenFile::open(path);
    CAPTURE(path, file.status().message());
    REQUIRE(file);
    const auto weights = file->weights();
    CAPTURE(weights.status().message());
    REQUIRE(weights);
    std::vector<DType> activations{file->meta().dtype};
    // The kernels take GPTQ weights with 16-bit activations alone.
    if (quantised_linears(weights->weights) == 0) activations.push_back(DType::f32);
    for (DType activation : activations)
      for (bool isolated : {true, false}) {
        CAPTURE(to_string(activation), isolated);
        const auto rows = apps::walk_golden(
            *file, *weights, {.backend = apps::Backend::cuda, .activation = activation, .isolated = isolated});
        CAPTURE(rows.status().message());
        REQUIRE(rows);
        CHECK(rows->size() == 12);
        for (const apps::TapResult& r : *rows) {
          CAPTURE(r.tap, r.worst, r.error.rel_l2, r.budget);
          CHECK(r.ok());
          // Site by site the bound is that of few roundings: no fault hides in what is measured of the inputs' own.
          if (isolated && size_bytes(activation) == 2) CHECK(r.budget < 4 * unit_roundoff(activation));
        }
      }
  }
}

TEST_CASE("the timer: rates are a memory's, a graph's work is done, and an error ends the capture", "[gpu][timer]") {
  auto timer = apps::DeviceTimer::create();
  REQUIRE(timer);
  CHECK_FALSE(timer->info().name.empty());
  CHECK(timer->info().memory_clock_mhz > 0);
  CHECK(timer->info().l2_bytes > 0);
  const apps::BenchOptions options{.runs = 300, .warmup = 2};
  for (const auto& rates : {timer->read_bytes_per_s({.runs = 5}), timer->copy_bytes_per_s({.runs = 5})}) {
    REQUIRE(rates);
    REQUIRE(rates->size() == 5);
    const apps::Spread s = apps::spread(*rates);
    // Between a workstation's GPU and ten times the fastest.
    CHECK(s.median > 100e9);
    CHECK(s.median < 50e12);
  }

  // A layernorm's output, poisoned, is there after the replays.
  cuda::Context& c = timer->context();
  constexpr std::int64_t hidden = 2560;
  const auto memory = cuda::DeviceMemory::create(c, 4 * hidden * sizeof(float), "the test's tensors");
  REQUIRE(memory);
  std::vector<float> host(4 * hidden, 1.0f);
  host[0] = 3;
  std::fill(host.begin() + 3 * hidden, host.end(), NAN);
  REQUIRE(cuda::copy_to_device(c, memory->data(), host.data(), memory->bytes()));
  auto* const data = reinterpret_cast<float*>(memory->data());
  ops::LayerNorm::Args args{
      .x = View<const float, 2>{data, {1, hidden}},
      .norm = {View<const float, 1>{data + hidden, {hidden}}, View<const float, 1>{data + 2 * hidden, {hidden}}},
      .y = View<float, 2>{data + 3 * hidden, {1, hidden}},
      .eps = 1e-5};
  const auto series = timer->time_graph_us(options, [&] { return cuda::run(args, c); });
  REQUIRE(series);
  CHECK(series->size() == 300);
  for (double time_us : *series) CHECK(time_us > 0);
  REQUIRE(cuda::copy_to_host(c, host.data(), memory->data(), memory->bytes()));
  for (std::int64_t i = 0; i < hidden; ++i) CHECK(std::isfinite(host[std::size_t(3 * hidden + i)]));

  // What cannot be captured is an error, and the stream is as usable as before.
  ops::LayerNorm::Args broken = args;
  broken.y.data = nullptr;
  CHECK_FALSE(timer->time_graph_us(options, [&] { return cuda::run(broken, c); }));
  CHECK(timer->time_us({.runs = 1}, [&] { return cuda::run(args, c); }));
}

TEST_CASE("cf-layer on the GPU: sites, layer and device in its JSON, the check passed", "[gpu][cf-layer]") {
  const Json j = cf_layer_json(
      "--preset pythia-160m --layer 11,0 --seq-len 17,40 --batch 2 --impl unfused,graph --check --runs 20");
  CHECK(j["backend"] == "cuda");
  CHECK(j["activation_dtype"] == "float16");
  CHECK(j["commit"].is_string());
  for (const char* key : {"gpu", "cuda_driver", "cuda_runtime", "launch_plan", "command"}) {
    CAPTURE(key);
    CHECK_FALSE(j[key].get<std::string>().empty());
  }
  CHECK(j["memory_clock_mhz"] > 0);
  const Json& configurations = j["configurations"];
  REQUIRE(configurations.size() == 8);
  for (std::size_t i = 0; i < 8; ++i) {
    const Json& c = configurations[i];
    CAPTURE(c.dump());
    CHECK(c["layer"] == (i < 4 ? 11 : 0));
    CHECK(c["seq_len"] == (i / 2 % 2 ? 40 : 17));
    CHECK(c["capacity"] == 40);
    CHECK(c["impl"] == (i % 2 ? "graph" : "unfused"));
    CHECK(c["resident_layers"] == 12);
    CHECK(c["check_ok"] == true);
    CHECK_FALSE(c.contains("stack"));
    CHECK(c["read_best_gb_per_s"] >= c["read_median_gb_per_s"]);
    REQUIRE(c["sites"].size() == sites.size());
    for (std::size_t s = 0; s < sites.size(); ++s) {
      CHECK(c["sites"][s]["site"] == sites[s].name);
      CHECK(c["sites"][s]["median_us"] > 0);
      CHECK(c["sites"][s]["bytes"] > 0);
    }
    CHECK(c["total"]["p10_us"] <= c["total"]["median_us"]);
    CHECK(c["total"]["median_us"] <= c["total"]["p99_us"]);
  }
  // The cache that is read counts with its valid entries.
  CHECK(configurations[4]["sites"][4]["bytes"] < configurations[6]["sites"][4]["bytes"]);
  CHECK(configurations[0]["weights_checksum"] != configurations[4]["weights_checksum"]);
}

TEST_CASE("cf-layer on the GPU: the whole stack, cold, is no faster than memory", "[gpu][cf-layer]") {
  const Json j = cf_layer_json("--preset pythia-410m --stack --seq-len 128 --check --runs 30");
  REQUIRE(j["configurations"].size() == 1);
  const Json& c = j["configurations"][0];
  CAPTURE(c.dump());
  CHECK(c["impl"] == "graph");
  CHECK(c["resident_layers"] == 24);
  CHECK(c["check_ok"] == true);
  const double layer_us = c["total"]["median_us"], stack_us = c["stack"]["median_us"];
  CHECK(std::abs(stack_us - 24 * layer_us) < 1e-6 * stack_us);
  CHECK(c["stack"]["bytes"] == 24 * c["total"]["bytes"].get<std::int64_t>());
  // 604 MB a step do not fit an L2; the 100 % is the best of 30 reads.
  CHECK(c["stack"]["percent_of_read"] < 105);
}

TEST_CASE("cf-layer on the GPU: the persistent kernel's parts another way", "[gpu][cf-layer]") {
  const Json j =
      cf_layer_json("--preset pythia-160m --stack --impl split,stack --ablate --seq-len 40 --check --runs 5");
  REQUIRE(j["configurations"].size() == 2);
  REQUIRE(j["ablations"].size() == 1);
  const Json& a = j["ablations"][0];
  CAPTURE(a.dump());
  CHECK(a["seq_len"] == 40);
  CHECK(a["resident_layers"] == 12);
  CHECK(a["variants"][0]["variant"] == "the plan's own choice");
  CHECK(a["variants"][0]["ratio"] == 1);
  std::set<std::string> parts;
  for (const Json& v : a["variants"]) {
    parts.insert(v["part"].get<std::string>());
    CHECK(v["plan"].get<std::string>().find(" blocks, ") != std::string::npos);
    CHECK(v["median_us"] > 0);
    CHECK(v["ratio"] > 0);
    CHECK(v["ok"] == true);
  }
  for (const char* part :
       {"bytes in flight", "ring", "dependencies", "attention splits", "attention merge", "launches"}) {
    CAPTURE(part);
    CHECK(parts.contains(part));
  }
}

TEST_CASE("cf-layer on the GPU: the first layers of a stack take their share of its time", "[gpu][cf-layer]") {
  const Json j = cf_layer_json("--preset pythia-410m --stack --stack-layers 24,6 --impl stack --seq-len 128 --runs 30");
  REQUIRE(j["configurations"].size() == 2);
  const Json &whole = j["configurations"][0], &quarter = j["configurations"][1];
  CAPTURE(whole.dump(), quarter.dump());
  CHECK(whole["step_layers"] == 24);
  CHECK(quarter["step_layers"] == 6);
  CHECK(quarter["resident_layers"] == 24);
  CHECK(4 * quarter["stack"]["bytes"].get<std::int64_t>() == whole["stack"]["bytes"]);
  const double ratio = whole["stack"]["median_us"].get<double>() / quarter["stack"]["median_us"].get<double>();
  CHECK(ratio > 2);
  CHECK(ratio < 6);
}

TEST_CASE("cf-layer on the GPU: other dtypes and another GPU's plans", "[gpu][cf-layer]") {
  const std::string tiny = "--preset pythia-14m --layer 1 --seq-len 33 --check --runs 3 ";
  CHECK(cf_layer_json(tiny + "--dtype bf16")["activation_dtype"] == "bfloat16");
  CHECK(cf_layer_json(tiny + "--dtype f32")["activation_dtype"] == "float32");
  CHECK(cf_layer_json(tiny + "--warm")["configurations"][0]["resident_layers"] == 1);
  const std::string plan = cf_layer_json(tiny + "--arch-plan sm_120")["launch_plan"];
  CHECK(plan.find("170 SMs") != plan.npos);
  const Json checkpoint = cf_layer_json("--model " + quoted(CF_DATA_DIR "/checkpoints/neox-bf16") +
                                        " --layer 0 --seq-len 9 --check --runs 3");
  CHECK(checkpoint["activation_dtype"] == "bfloat16");
}

TEST_CASE("cf-layer on the GPU: refusals", "[gpu][cf-layer][bad]") {
  const std::string preset = "--preset pythia-14m --seq-len 2 ";
  check_refusal(preset, "--layer is required, or --stack for all layers");
  check_refusal(preset + "--layer 0 --stack", "--layer: excludes --stack");
  check_refusal(preset + "--stack --stack-layers 1,7", "--stack-layers 7: pythia-14m has stacks of 1 to 6");
  check_refusal(preset + "--layer 0 --impl graph,fast",
                "--impl 'graph,fast': expected a list of unfused, graph, split, fused and stack, got 'fast'");
  check_refusal(preset + "--layer 0 --arch-plan sm_80", "--arch-plan sm_80: expected sm_90 or sm_120");
  check_refusal(preset + "--layer 0 --ablate", "--ablate: expected with --stack");
  check_refusal(preset + "--layer 0 --dump x.h5", "--dump: expected with --backend cpu");
}
