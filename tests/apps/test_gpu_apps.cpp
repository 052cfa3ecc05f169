// The programs' GPU side: every golden file against Hugging Face's float64, the timer, and cf-layer as its users meet
// it.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "apps/bench/device_probe.hpp"
#include "apps/bench/device_timer.hpp"
#include "apps/verify/device_ops.hpp"
#include "apps/verify/golden_walk.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/memory.hpp"
#include "tests/apps/run_program.hpp"
#include "tests/golden/golden_files.hpp"
#include "tests/support/catch.hpp"

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

/// Expects a note on the cause with each share above 100 %, and with no other.
void check_notes(const Json& timings) {
  for (const Json& t : timings) {
    CAPTURE(t.dump());
    CHECK((t["percent_of_read"] > 100) == !t["limit_note"].get<std::string>().empty());
  }
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

const SiteList sites = names_of(ModelType::gpt_neox).sites();

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
        CHECK(rows->size() == (file->meta().config.family().head_norm ? 13u : 12u));
        for (const apps::TapResult& r : *rows) {
          CAPTURE(r.tap, r.worst, r.error.rel_l2, r.budget);
          CHECK(r.ok());
          // Site by site the bound has room for few roundings, so that no fault hides behind the error of the inputs.
          if (isolated && size_bytes(activation) == 2) CHECK(r.budget < 4 * unit_roundoff(activation));
        }
      }
  }
}

TEST_CASE("the probes: a copy is a copy, and by SMs it is not much slower than a read", "[gpu][timer]") {
  auto timer = apps::DeviceTimer::create();
  REQUIRE(timer);
  cuda::Context& c = timer->context();
  // Ends within a block's part.
  constexpr std::size_t bytes = (1 << 20) + 16, guard = 64;
  const auto from = cuda::DeviceMemory::create(c, bytes, "the source"),
             to = cuda::DeviceMemory::create(c, bytes + guard, "the copy");
  REQUIRE(from);
  REQUIRE(to);
  std::vector<std::uint8_t> source(bytes), copy(bytes + guard, 0xaa);
  for (std::size_t i = 0; i < bytes; ++i) source[i] = std::uint8_t(i * 2654435761u >> 24);
  REQUIRE(cuda::copy_to_device(c, from->data(), source.data(), bytes));
  REQUIRE(cuda::copy_to_device(c, to->data(), copy.data(), bytes + guard));
  apps::enqueue_stream_copy(c.stream(), from->data(), to->data(), bytes);
  REQUIRE(cuda::copy_to_host(c, copy.data(), to->data(), bytes + guard));
  CHECK(std::equal(source.begin(), source.end(), copy.begin()));
  CHECK(std::count(copy.begin() + bytes, copy.end(), 0xaa) == std::ptrdiff_t(guard));

  const auto read = timer->read_bytes_per_s({.runs = 20}), copied = timer->copy_bytes_per_s({.runs = 20});
  REQUIRE(read);
  REQUIRE(copied);
  // The copy engine reaches six tenths of the read, which would make every kernel that writes exceed the limit.
  const double ratio = apps::spread(*copied).median / apps::spread(*read).median;
  CHECK(ratio > 0.8);
  CHECK(ratio < 1.1);
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
      "--preset pythia-160m --layer 11,0 --kv-len 17,40 --batch 2 --impl unfused,graph --check --runs 20");
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
    CHECK(c["kv_len"] == (i / 2 % 2 ? 40 : 17));
    CHECK(c["capacity"] == 40);
    CHECK(c["impl"] == (i % 2 ? "graph" : "unfused"));
    CHECK(c["resident_layers"] == 12);
    CHECK(c["check_ok"] == true);
    CHECK_FALSE(c.contains("step"));
    check_notes(c["sites"]);
    check_notes(Json::array({c["total"]}));
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
  const Json j = cf_layer_json("--preset pythia-410m --whole-model --kv-len 128 --check --runs 30");
  REQUIRE(j["configurations"].size() == 1);
  const Json& c = j["configurations"][0];
  CAPTURE(c.dump());
  CHECK(c["impl"] == "graph");
  CHECK(c["resident_layers"] == 24);
  CHECK(c["check_ok"] == true);
  const double layer_us = c["total"]["median_us"], stack_us = c["step"]["median_us"];
  CHECK(std::abs(stack_us - 24 * layer_us) < 1e-6 * stack_us);
  CHECK(c["step"]["bytes"] == 24 * c["total"]["bytes"].get<std::int64_t>());
  // 604 MB a step do not fit an L2; the 100 % is the best of 30 reads.
  CHECK(c["step"]["percent_of_read"] < 105);
}

TEST_CASE("cf-layer on the GPU: the persistent kernel's parts another way", "[gpu][cf-layer]") {
  const Json j =
      cf_layer_json("--preset pythia-160m --whole-model --impl split,persistent --ablate --kv-len 40 --check --runs 5");
  REQUIRE(j["configurations"].size() == 2);
  REQUIRE(j["ablations"].size() == 1);
  const Json& a = j["ablations"][0];
  CAPTURE(a.dump());
  CHECK(a["kv_len"] == 40);
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
  for (const char* part : {"bytes in flight", "ring", "dependencies", "attention splits", "launches"}) {
    CAPTURE(part);
    CHECK(parts.contains(part));
  }
}

TEST_CASE("cf-layer on the GPU: the first layers of a stack take their share of its time", "[gpu][cf-layer]") {
  const Json j =
      cf_layer_json("--preset pythia-410m --whole-model --first-layers 24,6 --impl persistent --kv-len 128 --runs 30");
  REQUIRE(j["configurations"].size() == 2);
  const Json &whole = j["configurations"][0], &quarter = j["configurations"][1];
  CAPTURE(whole.dump(), quarter.dump());
  CHECK(whole["step_layers"] == 24);
  CHECK(quarter["step_layers"] == 6);
  CHECK(quarter["resident_layers"] == 24);
  CHECK(4 * quarter["step"]["bytes"].get<std::int64_t>() == whole["step"]["bytes"]);
  const double ratio = whole["step"]["median_us"].get<double>() / quarter["step"]["median_us"].get<double>();
  CHECK(ratio > 2);
  CHECK(ratio < 6);
}

TEST_CASE("cf-layer on the GPU: other dtypes and another GPU's plans", "[gpu][cf-layer]") {
  const std::string tiny = "--preset pythia-14m --layer 1 --kv-len 33 --check --runs 3 ";
  CHECK(cf_layer_json(tiny + "--dtype bf16")["activation_dtype"] == "bfloat16");
  CHECK(cf_layer_json(tiny + "--dtype f32")["activation_dtype"] == "float32");
  CHECK(cf_layer_json(tiny + "--warm")["configurations"][0]["resident_layers"] == 1);
  CHECK(cf_layer_json(tiny + "--dtype float16")["activation_dtype"] == "float16");
  const std::string plan = cf_layer_json(tiny + "--arch-plan sm_120")["launch_plan"];
  CHECK(plan.find("170 SMs") != plan.npos);
  const Json checkpoint = cf_layer_json("--model " + quoted(CF_DATA_DIR "/checkpoints/neox-bf16") +
                                        " --layer 0 --kv-len 9 --check --runs 3");
  CHECK(checkpoint["activation_dtype"] == "bfloat16");
}

TEST_CASE("cf-layer on the GPU: a prefill is timed and checked", "[gpu][cf-layer]") {
  const Json j = cf_layer_json(
      "--preset pythia-160m --layer 3 --kv-len 23,40 --q-len 7 --batch 2 --impl unfused,graph --check --runs 3");
  REQUIRE(j["configurations"].size() == 4);
  for (const Json& c : j["configurations"]) {
    CAPTURE(c.dump());
    CHECK(c["q_len"] == 7);
    CHECK(c["check_ok"] == true);
    check_notes(c["sites"]);
  }
}

TEST_CASE("cf-layer on the GPU: a dump holds every site's output, that of the CPU within a rounding of float16",
          "[gpu][cf-layer]") {
  for (const std::string arguments : {"--kv-len 17 --batch 2", "--kv-len 23 --q-len 7", "--kv-len 9 --quant gptq"}) {
    CAPTURE(arguments);
    const TempDir dir;
    const std::string gpu_path = dir / "gpu.h5", cpu_path = dir / "cpu.h5",
                      common = "--preset pythia-160m --layer 1 --runs 2 " + arguments + " ";
    cf_layer_json(common + "--impl unfused --dump " + quoted(gpu_path));
    REQUIRE(run_program(quoted(CF_LAYER_PROGRAM) + " " + common + "--dump " + quoted(cpu_path)).exit_code == 0);
    const auto gpu = golden::GoldenFile::open(gpu_path), cpu = golden::GoldenFile::open(cpu_path);
    CAPTURE(gpu.status().message(), cpu.status().message());
    REQUIRE(gpu);
    REQUIRE(cpu);
    const golden::VariantInfo &variant = gpu->variants()[0], &reference = cpu->variants()[0];
    CHECK(variant.name == "cuda_float16");
    CHECK(variant.dtype == "float16");
    CHECK(variant.taps.size() == 12);
    CHECK(variant.taps == reference.taps);
    CHECK(gpu->meta().weights_checksum == cpu->meta().weights_checksum);
    for (const std::string& tap : variant.taps) {
      const auto got = gpu->tap(variant.name, tap), expected = cpu->tap(reference.name, tap);
      CAPTURE(tap);
      REQUIRE(got);
      REQUIRE(expected);
      const auto error = compare(*got, *expected);
      REQUIRE(error);
      CHECK(error->non_finite == 0);
      // A float16 layer's distance from a float32 one: a few roundings of 2^-11, and not the same bits.
      CHECK(error->rel_l2 < 4e-3);
      CHECK(error->rel_l2 > 0);
    }
    // The inputs are the CPU's, bit for bit.
    for (const char* name : {"hidden", "kv_len", "positions", "cos", "sin", "k_cache"}) {
      const auto a = gpu->input(name), b = cpu->input(name);
      CAPTURE(name);
      REQUIRE(a);
      REQUIRE(b);
      CHECK(compare(*a, *b)->max_abs == 0);
    }
  }
}

TEST_CASE("cf-layer on the GPU: refusals", "[gpu][cf-layer][bad]") {
  const std::string preset = "--preset pythia-14m --kv-len 2 ";
  check_refusal(preset, "--layer or --whole-model: expected one of them, got none");
  check_refusal(preset + "--layer 0 --whole-model", "--layer or --whole-model: expected one of them, got both");
  check_refusal(preset + "--whole-model --first-layers 1,7",
                "--first-layers: expected 1 to 6 (layers of pythia-14m), got '7'");
  check_refusal(preset + "--whole-model --warm",
                "--warm: expected without --whole-model: no cache holds the weights of all layers");
  check_refusal(preset + "--layer 0 --impl graph,fast",
                "--impl 'graph,fast': expected a list of unfused, graph, split, layer and persistent, got 'fast'");
  check_refusal(preset + "--layer 0 --arch-plan sm_80", "--arch-plan sm_80: expected sm_90 or sm_120");
  check_refusal(preset + "--layer 0 --ablate", "--ablate: expected with --whole-model");
  check_refusal(preset + "--layer 0 --dump x.h5",
                "--dump: expected with --impl unfused, the only one to keep every site's output");
  check_refusal(preset + "--layer 0 --impl graph --dump x.h5",
                "--dump: expected with --impl unfused, the only one to keep every site's output");
}

TEST_CASE("cf-layer on the GPU: what an implementation does not take is refused before any output",
          "[gpu][cf-layer][bad]") {
  const auto device = cuda::Context::create();
  REQUIRE(device);
  const std::string sms = std::to_string(device->arch().sm_count);
  const std::string uneven =
      "groups of equally many columns, a multiple of 32, got 3 groups of up to 64 of the 128 columns of "
      "'attention.query_key_value.weight'";
  for (const std::string impl : {"split", "layer", "persistent"}) {
    const std::string kernel = "--impl " + impl + ": persistent: cuda takes ",
                      impls = "--layer 0 --impl unfused," + impl + " ", tiny = "--preset pythia-14m " + impls;
    check_refusal(tiny + "--kv-len 9 --q-len 2", kernel + "one new token a sequence, got 2 for 1");
    check_refusal(tiny + "--kv-len 9 --batch 9", kernel + "1 to 8 sequences, got 9");
    check_refusal(tiny + "--kv-len 9 --dtype f32", kernel + "float16 or bfloat16, got float32");
    check_refusal(tiny + "--kv-len 9 --quant gptq --group 48", kernel + uneven);
    // The plan of an RTX 5090 has a block for each of 170 SMs; a model of fewer rows would have fewer.
    if (device->arch().sm_count < cuda::kRtx5090.sm_count)
      check_refusal("--preset pythia-70m " + impls + "--kv-len 9 --arch-plan sm_120",
                    kernel + "at most the " + sms + " blocks that the device holds at once, 1 on each of " + sms +
                        " SMs, got 170");
  }
  check_refusal("--preset pythia-14m --whole-model --kv-len 9 --ablate --quant gptq --group 48",
                "--impl persistent: persistent: cuda takes " + uneven);
  check_refusal("--preset pythia-12b --whole-model --kv-len 2048 --batch 4096", "");
  // A layer that is on the GPU beside the one that is asked for.
  const TempDir dir;
  const std::string model = dir / "model";
  std::filesystem::copy(CF_DATA_DIR "/checkpoints/neox-d64-sharded", model, std::filesystem::copy_options::recursive);
  const std::string shard = model + "/model-00003-of-00003.safetensors";
  std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 1);
  check_refusal("--model " + quoted(model) + " --layer 0 --kv-len 9", shard);
}

TEST_CASE("cf-layer and cf-op name their sites for profilers", "[gpu][cf-layer]") {
  const TempDir dir;
  const auto ranges = [&](const std::string& program) {
    const std::string path = dir / "ranges";
    const ProgramRun r =
        run_program("NVTX_INJECTION64_PATH=" CF_NVTX_TOOL " CF_NVTX_RANGES=" + quoted(path) + " " + program);
    CAPTURE(program, r.err);
    REQUIRE(r.exit_code == 0);
    std::ifstream file(path);
    std::map<std::string, int> counts;
    for (std::string line; std::getline(file, line);) ++counts[line];
    std::filesystem::remove(path);
    return counts;
  };
  const std::string layer =
      quoted(CF_LAYER_PROGRAM) + " --backend cuda --preset pythia-14m --layer 0 --kv-len 9 --warmup 0 ";
  const auto few = ranges(layer + "--impl unfused --runs 2"), many = ranges(layer + "--impl unfused --runs 12");
  for (const Site& site : sites) {
    const std::string name(site.name);
    CAPTURE(name);
    REQUIRE(few.contains(name));
    // Ten runs more launch each site ten times more for each resident layer.
    CHECK(many.at(name) >= few.at(name) + 10);
  }
  const auto op = ranges(quoted(CF_OP_PROGRAM) + " linear --preset pythia-14m --layers 1 --runs 1");
  for (const char* name :
       {"attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "layer"}) {
    CAPTURE(name);
    CHECK(op.contains(name));
  }
}
