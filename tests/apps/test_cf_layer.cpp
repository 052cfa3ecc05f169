// cf-layer as its users meet it: what it prints, writes and refuses, how much memory it takes.
#include <sys/resource.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "apps/bench/timing.hpp"
#include "core/model/layer.hpp"
#include "core/procedural.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "golden/file/golden_file.hpp"
#include "tests/apps/run_program.hpp"
#include "tests/checkpoint/safetensors_writer.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

using namespace cf;
using namespace cf::test;
using Json = nlohmann::json;

namespace {

// The fewest runs that have a spread.
const std::string tiny = "--preset pythia-14m --runs 2 --warmup 1 ";

ProgramRun cf_layer(const std::string& arguments) {
  return run_program("'" + std::string(CF_LAYER_PROGRAM) + "' " + arguments);
}

ProgramRun cf_layer_ok(const std::string& arguments) {
  ProgramRun r = cf_layer(arguments);
  CAPTURE(arguments, r.out, r.err);
  REQUIRE(r.exit_code == 0);
  REQUIRE(r.err.empty());
  return r;
}

/// Bad input: exit code 2, nothing on stdout, this one line on stderr.
void check_refusal(const std::string& arguments, const std::string& message) {
  const ProgramRun r = cf_layer(arguments);
  CAPTURE(arguments, r.out);
  CHECK(r.exit_code == 2);
  CHECK(r.out.empty());
  CHECK(r.err == "cf-layer: " + message + "\n");
}

/// The same for a line of which the test knows the start alone.
void check_refusal_of(const std::string& arguments, const std::string& start) {
  const ProgramRun r = cf_layer(arguments);
  CAPTURE(arguments, r.out, r.err);
  CHECK(r.exit_code == 2);
  CHECK(r.out.empty());
  CHECK(r.err.starts_with("cf-layer: " + start));
  CHECK(r.error_lines() == 1);
}

std::string slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::size_t entries(const TempDir& dir) {
  return std::size_t(std::distance(std::filesystem::directory_iterator(dir.path()), {}));
}

using Rows = std::vector<std::vector<std::string>>;

/// The rows of every markdown table, with trimmed cells, without headings and rules.
Rows table_rows(const std::string& text) {
  Rows rows;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("| ") || line.starts_with("| site") || line.starts_with("| ---")) continue;
    std::vector<std::string> cells;
    std::istringstream in(line.substr(1));
    for (std::string cell; std::getline(in, cell, '|');) {
      const std::size_t from = cell.find_first_not_of(' '), to = cell.find_last_not_of(' ');
      cells.push_back(from == cell.npos ? "" : cell.substr(from, to - from + 1));
    }
    rows.push_back(cells);
  }
  return rows;
}

/// The rows of a CSV text, its header first.
Rows csv_rows(const std::string& text) {
  Rows rows(1, {""});
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"' && quoted && text[i + 1] == '"')
      rows.back().back() += text[++i];
    else if (c == '"')
      quoted = !quoted;
    else if (c == ',' && !quoted)
      rows.back().push_back("");
    else if (c == '\n' && !quoted)
      rows.push_back({""});
    else
      rows.back().back() += c;
  }
  rows.pop_back();  // what follows the last line's end
  return rows;
}

ModelConfig small_model(DType dtype) {
  ModelConfig m{.name = "small",
                .hidden_size = 160,
                .num_hidden_layers = 3,
                .num_attention_heads = 2,
                .intermediate_size = 640,
                .vocab_size = 64,
                .max_position_embeddings = 64,
                .rotary_dim = 20};
  m.dtype = dtype;
  return m;
}

/// Writes a checkpoint with procedural weights of seed 7, a shard a layer.
void write_small_checkpoint(const std::string& directory, const ModelConfig& m) {
  std::vector<OwnedLayerWeights> layers;
  std::vector<std::vector<StoredTensor>> shards;
  for (std::int64_t l = 0; l < m.num_hidden_layers; ++l) {
    layers.push_back(procedural_layer(m, m.dtype, l, 7));
    shards.push_back(layer_tensors(m, l, layers.back().weights));
  }
  write_checkpoint(directory, m, shards);
}

golden::GoldenFile open_golden(const std::string& path) {
  auto file = golden::GoldenFile::open(path);
  CAPTURE(file.status().message());
  REQUIRE(file);
  return *file;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(a.data(), b.data(), std::size_t(a.size_bytes())) == 0;
}

/// Two dumps hold the same taps, bit for bit.
void check_same_taps(const golden::GoldenFile& a, const golden::GoldenFile& b) {
  REQUIRE(a.variants().size() == 1);
  REQUIRE(b.variants().size() == 1);
  const golden::VariantInfo& variant = a.variants()[0];
  CHECK(variant.name == "cpu_float32");
  CHECK(variant.dtype == "float32");
  CHECK(variant.taps.size() == 12);
  CHECK(b.variants()[0].taps == variant.taps);
  for (const std::string& tap : variant.taps) {
    const auto x = a.tap(variant.name, tap), y = b.tap(variant.name, tap);
    CAPTURE(tap);
    REQUIRE(x);
    REQUIRE(y);
    CHECK(same_bits(*x, *y));
  }
}

/// A dump's inputs and weights, run again, give the dump's output bit for bit.
void check_dump_replays(const std::string& path) {
  const golden::GoldenFile file = open_golden(path);
  const golden::GoldenMeta& meta = file.meta();
  LayerState state(meta.config, meta.load, DType::f32);
  const Status loaded = file.load(state);
  CHECK(loaded.message() == "");
  const auto weights = file.weights();
  CHECK(weights.status().message() == "");
  REQUIRE(weights);
  const Status ran =
      cpu_ref::run(ops::DecodeLayer::Args{.model = meta.config, .weights = weights->weights, .t = state.tensors()});
  CHECK(ran.message() == "");
  const auto output = file.tap("cpu_float32", "output");
  REQUIRE(output);
  CHECK(same_bits(*output, state.output));
}

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kShadowMemory = true;
#else
constexpr bool kShadowMemory = false;
#endif

const SiteList sites = names_of(ModelType::gpt_neox).sites();

}  // namespace

TEST_CASE("the report: header, a table a configuration, a row a site and the total") {
  const ProgramRun r = cf_layer_ok(tiny + "--seed 5 --layer 2 --kv-len 16 --threads 1");
  CHECK(r.out.find("# cf-layer ") == 0);
  for (const char* part :
       {"commit ", "backend: cpu, ", ", 1 thread\n", "model: pythia-14m, procedural weights, seed 5", "float32",
        "runs: 2 after 1 of warm-up, cold", "## layer 2, kv_len 16, batch 1", "weights: float16, checksum 0x",
        "streaming read of the weights: best ", "which is the 100 % below", "| % of read, ", "| note"}) {
    CAPTURE(part);
    CHECK(r.out.find(part) != r.out.npos);
  }
  CHECK(r.out.find("check against") == r.out.npos);
  const Rows rows = table_rows(r.out);
  REQUIRE(rows.size() == sites.size() + 1);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    REQUIRE(rows[i].size() == 10);
    CHECK(rows[i][0] == (i < sites.size() ? sites[i].name : "total"));
    for (std::size_t c = 2; c < 9; ++c) CHECK(std::stod(rows[i][c]) >= 0);
    CHECK(std::stod(rows[i][3]) <= std::stod(rows[i][2]));
    CHECK(std::stod(rows[i][2]) <= std::stod(rows[i][4]));
  }
  CHECK(rows.back()[1] == "decode_layer");
}

TEST_CASE("bytes are the contracts' compulsory ones") {
  const Rows rows = table_rows(cf_layer_ok(tiny + "--layer 0 --kv-len 16 --batch 2").out);
  const double h = 128, cache_entries = 2 * 16 * h;
  // q and y, K and V in float32, kv_len.
  CHECK(std::stod(rows[4][6]) == 4 * (2 * 2 * h + 2 * cache_entries) + 4 * 2);
  // Weights in float16; hidden in and out, the cache read, the new row written.
  const double parameters = 12 * h * h + 13 * h;
  CHECK(std::stod(rows.back()[6]) == 2 * parameters + 4 * (2 * 2 * h + 2 * cache_entries + 2 * 2 * h) + 4 * 2);
}

TEST_CASE("cf-layer --json and --csv hold what the tables show, for every configuration of a sweep") {
  const TempDir dir;
  const std::string json_path = dir / "a \"b\".json", csv_path = dir / "a.csv";
  const ProgramRun r =
      cf_layer_ok(tiny + "--layer 0-1,4 --kv-len 3,1 --check --json '" + json_path + "' --csv '" + csv_path + "'");
  const Json j = Json::parse(slurp(json_path));
  CHECK(entries(dir) == 2);
  CHECK(j["program"] == "cf-layer");
  CHECK(j["command"].get<std::string>().find("--layer 0-1,4") != std::string::npos);
  CHECK(j["model"] == "pythia-14m");
  CHECK(j["weights"] == "procedural weights, seed 0");
  CHECK(j["backend"] == "cpu");
  CHECK(j["activation_dtype"] == "float32");
  CHECK(j["runs"] == 2);
  CHECK(j["warmup"] == 1);
  CHECK(j["cold"] == true);
  CHECK(j["complete"] == true);
  CHECK(j["threads"].get<int>() >= 1);
  for (const char* key : {"version", "commit", "cpu", "seed"}) CHECK(j.contains(key));

  const Json& configurations = j["configurations"];
  REQUIRE(configurations.size() == 6);
  const Rows rows = table_rows(r.out), csv = csv_rows(slurp(csv_path));
  REQUIRE(rows.size() == 60);
  REQUIRE(csv.size() == 61);
  const auto column = [&](const std::string& name) {
    const auto at = std::find(csv[0].begin(), csv[0].end(), name);
    REQUIRE(at != csv[0].end());
    return std::size_t(at - csv[0].begin());
  };
  const std::vector<std::pair<int, int>> order{{0, 3}, {0, 1}, {1, 3}, {1, 1}, {4, 3}, {4, 1}};
  std::set<std::string> checksums;
  for (std::size_t c = 0; c < 6; ++c) {
    const Json& configuration = configurations[c];
    CHECK(configuration["layer"] == order[c].first);
    CHECK(configuration["kv_len"] == order[c].second);
    CHECK(configuration["batch"] == 1);
    CHECK(configuration["q_len"] == 1);
    CHECK(configuration["weights_dtype"] == "float16");
    CHECK(configuration["read_best_gb_per_s"] >= configuration["read_median_gb_per_s"]);
    CHECK(configuration["check_ok"] == true);
    CHECK(configuration["check_rel_l2"] <= configuration["check_rel_l2_budget"]);
    checksums.insert(configuration["weights_checksum"].get<std::string>());
    REQUIRE(configuration["sites"].size() == sites.size());
    for (std::size_t s = 0; s <= sites.size(); ++s) {
      const Json& timing = s < sites.size() ? configuration["sites"][s] : configuration["total"];
      const std::vector<std::string>& row = rows[10 * c + s];
      const std::vector<std::string>& line = csv[1 + 10 * c + s];
      CAPTURE(c, s);
      REQUIRE(line.size() == csv[0].size());
      CHECK(timing["site"] == row[0]);
      CHECK(line[column("site")] == row[0]);
      CHECK(timing["op"] == row[1]);
      CHECK(timing["bytes"] == std::stoll(row[6]));
      CHECK(line[column("layer")] == std::to_string(order[c].first));
      CHECK(line[column("kv_len")] == std::to_string(order[c].second));
      CHECK(line[column("command")] == j["command"].get<std::string>());
      const struct {
        const char* key;
        std::size_t cell;
        double rounding;
      } columns[] = {{"median_us", 2, 0.05},     {"p10_us", 3, 0.05},    {"p99_us", 4, 0.05},
                     {"noise_percent", 5, 0.05}, {"gb_per_s", 7, 0.005}, {"percent_of_read", 8, 0.05}};
      for (const auto& [key, cell, rounding] : columns) {
        const double value = timing[key];
        CAPTURE(key);
        CHECK(std::abs(std::stod(row[cell]) - value) <= rounding * 1.001);
        CHECK(std::stod(line[column(key)]) == value);
      }
      const double median_us = timing["median_us"], bytes = timing["bytes"], rate = timing["gb_per_s"],
                   best = configuration["read_best_gb_per_s"];
      CHECK(std::abs(rate - bytes / median_us * 1e-3) <= 1e-9 * rate);
      CHECK(std::abs(double(timing["percent_of_read"]) - 100 * rate / best) <= 1e-9 * 100 * rate / best);
      // A note says the cause of each share above 100 %, and no other share has one.
      CHECK((timing["percent_of_read"] > 100) == !timing["limit_note"].get<std::string>().empty());
      CHECK(line[column("limit_note")] == timing["limit_note"].get<std::string>());
      CHECK(row[9] == timing["limit_note"].get<std::string>());
    }
  }
  CHECK(checksums.size() == 3);
}

TEST_CASE("a checkpoint's layers: every dtype is timed, checked and named") {
  const DType dtype = GENERATE(DType::f16, DType::bf16, DType::f32);
  const TempDir dir;
  write_small_checkpoint(dir.path(), small_model(dtype));
  const ProgramRun r =
      cf_layer_ok("--model '" + dir.path() + "' --layer 2,0 --kv-len 17 --batch 3 --runs 2 --warmup 0 --warm --check");
  const std::string name(to_string(dtype));
  CHECK(r.out.find("checkpoint " + dir.path()) != r.out.npos);
  CHECK(r.out.find("warm-up, warm\n") != r.out.npos);
  CHECK(r.out.find("weights: " + name + ", checksum 0x") != r.out.npos);
  CHECK(r.out.find("## layer 2, kv_len 17, batch 3") < r.out.find("## layer 0, kv_len 17, batch 3"));
  CHECK(r.out.find(": ok\n") != r.out.rfind(": ok\n"));
}

TEST_CASE("the header's checksum is that of the layer's weights") {
  const TempDir dir;
  const ModelConfig m = small_model(DType::f16);
  write_small_checkpoint(dir.path(), m);
  const std::string json = dir / "r.json";
  cf_layer_ok("--model '" + dir.path() + "' --layer 1 --kv-len 1 --runs 1 --json '" + json + "'");
  const std::string text = Json::parse(slurp(json))["configurations"][0]["weights_checksum"];
  CHECK(std::stoull(text, nullptr, 16) == weights_checksum(m, procedural_layer(m, m.dtype, 1, 7).weights));
}

TEST_CASE("cf-layer --check: outside the budget is exit code 1, with a line that reproduces it") {
  const TempDir dir;
  const ModelConfig m = small_model(DType::f32);
  OwnedLayerWeights layer = procedural_layer(m, m.dtype, 0, 7);
  // Squares of these are finite in float64 alone.
  for (Tensor& t : layer.storage)
    for (std::int64_t i = 0; i < t.size(); ++i) t.as<float>()[i] *= 1e18f;
  std::vector<StoredTensor> tensors = layer_tensors(m, 0, layer.weights);
  write_checkpoint(dir.path(), m, {tensors});
  const std::string json = dir / "r.json";
  const ProgramRun r =
      cf_layer("--model '" + dir.path() + "' --layer 0 --kv-len 5 --runs 1 --check --json '" + json + "'");
  CAPTURE(r.out, r.err);
  CHECK(r.exit_code == 1);
  CHECK(r.err.empty());
  CHECK(r.out.find(": FAIL\n") != r.out.npos);
  CHECK(r.out.find("reproduce: cf-layer --model " + dir.path() +
                   " --seed 0 --layer 0 --kv-len 5 --batch 1 --threads ") != r.out.npos);
  CHECK(Json::parse(slurp(json))["configurations"][0]["check_ok"] == false);
}

TEST_CASE("cf-layer --dump: the same bits on every run and any number of threads") {
  const TempDir dir;
  const std::string arguments = tiny + "--layer 3 --kv-len 33 --batch 2 --seed 11 ";
  const std::string once = dir / "1.h5", again = dir / "2.h5", threads = dir / "3.h5";
  cf_layer_ok(arguments + "--threads 1 --dump '" + once + "'");
  cf_layer_ok(arguments + "--threads 1 --dump '" + again + "'");
  cf_layer_ok(arguments + "--threads 2 --check --dump '" + threads + "'");
  const golden::GoldenFile file = open_golden(once);
  check_same_taps(file, open_golden(again));
  check_same_taps(file, open_golden(threads));
  const golden::GoldenMeta& meta = file.meta();
  CHECK(meta.model == "pythia-14m");
  CHECK(meta.layer == 3);
  CHECK(meta.seed == 11);
  CHECK(meta.load.batch == 2);
  CHECK(meta.load.q_len == 1);
  CHECK(meta.kv_len == std::vector<std::int32_t>{33, 33});
  CHECK(meta.cache == "procedural");
  CHECK(meta.weights == "procedural");
  CHECK(meta.producer.starts_with("cf-layer "));
  CHECK(meta.command.find("--dump") != std::string::npos);
  check_dump_replays(once);
}

TEST_CASE("cf-layer --dump of a checkpoint's layer names the checkpoint from where the file lies") {
  const DType dtype = GENERATE(DType::f16, DType::bf16, DType::f32);
  const int kv_len = GENERATE(1, 9);
  const TempDir dir;
  const std::string model = dir / "model", dumps = dir / "dumps";
  std::filesystem::create_directory(model);
  std::filesystem::create_directory(dumps);
  write_small_checkpoint(model, small_model(dtype));
  const std::string path = dumps + "/step.h5";
  cf_layer_ok("--model '" + model + "' --layer 1 --kv-len " + std::to_string(kv_len) + " --runs 1 --warmup 0 --dump '" +
              path + "'");
  const golden::GoldenFile file = open_golden(path);
  CHECK(file.meta().weights == "checkpoint");
  CHECK(file.meta().weights_checkpoint == "../model");
  CHECK(file.meta().dtype == dtype);
  CHECK(file.meta().cache == (kv_len == 1 ? "none" : "procedural"));
  check_dump_replays(path);
}

TEST_CASE("cf-layer --dump with procedural GPTQ weights: the file's weights and steps are those of the run") {
  const std::string group = GENERATE("32", "-1");
  const TempDir dir;
  const std::string path = dir / "step.h5";
  cf_layer_ok(tiny + "--quant gptq --group " + group + " --layer 2 --kv-len 9 --dump '" + path + "'");
  const golden::GoldenFile file = open_golden(path);
  CHECK(file.meta().weights == "procedural_gptq");
  CHECK(file.meta().linears.bits == 4);
  CHECK(file.meta().linears.group_size == std::stoll(group));
  check_dump_replays(path);
}

TEST_CASE("a golden file's format of procedural GPTQ weights is refused where there is no such format") {
  const TempDir dir;
  const std::string path = dir / "step.h5";
  const auto open_with = [&](WeightFormat linears) {
    golden::GoldenMeta meta;
    meta.model = "small";
    meta.config = small_model(DType::f16);
    meta.weights = "procedural_gptq";
    meta.linears = linears;
    auto writer = golden::GoldenWriter::create(path, meta);
    REQUIRE(writer);
    Tensor kv_len(DType::i32, {1});
    kv_len.as<std::int32_t>()[0] = 1;
    REQUIRE(writer->add_input("kv_len", kv_len));
    REQUIRE(writer->commit());
    return golden::GoldenFile::open(path).status().message();
  };
  const std::string bits = path + ": /attribute 'weights_bits': expected 4 or 8, got ",
                    groups = path + ": /attribute 'weights_group_size': expected -1 or 1 to 4194304, got ";
  CHECK(open_with({.bits = 5, .group_size = 32}) == bits + "5");
  CHECK(open_with({.bits = 0, .group_size = 32}) == bits + "0");
  CHECK(open_with({.bits = 4, .group_size = 0}) == groups + "0");
  CHECK(open_with({.bits = 8, .group_size = -2}) == groups + "-2");
  // A format that there is: the file lacks its inputs alone.
  CHECK(open_with({.bits = 8, .group_size = -1}).find("inputs/hidden") != std::string::npos);
}

TEST_CASE("cf-layer --q-len: the last tokens of a prefill are timed, checked and dumped") {
  const TempDir dir;
  const std::string path = dir / "step.h5", json_path = dir / "r.json";
  const ProgramRun r = cf_layer_ok(tiny + "--layer 1 --kv-len 23 --q-len 7 --batch 2 --check --dump '" + path +
                                   "' --json '" + json_path + "'");
  CHECK(r.out.find("## layer 1, kv_len 23, q_len 7, batch 2\n") != r.out.npos);
  const Json c = Json::parse(slurp(json_path))["configurations"][0];
  CHECK(c["kv_len"] == 23);
  CHECK(c["q_len"] == 7);
  CHECK(c["check_ok"] == true);
  // q and y of every token; K and V of every sequence, once; kv_len.
  const double h = 128;
  CHECK(c["sites"][4]["bytes"] == 4 * (2 * 14 * h + 2 * 2 * 23 * h) + 4 * 2);
  const golden::GoldenMeta meta = open_golden(path).meta();
  CHECK(meta.load.q_len == 7);
  CHECK(meta.load.batch == 2);
  CHECK(meta.kv_len == std::vector<std::int32_t>{23, 23});
  check_dump_replays(path);
  // The whole sequence at once, and one token.
  cf_layer_ok(tiny + "--layer 1 --kv-len 7 --q-len 7 --check");
  const ProgramRun one = cf_layer_ok(tiny + "--layer 1 --kv-len 7 --q-len 1 --check");
  CHECK(one.out.find("q_len") == one.out.npos);
}

TEST_CASE("a share above 100 % names its cause") {
  using apps::limit_note;
  const apps::CacheUse l2{.name = "the L2", .cache_bytes = 60e6, .layers = 10};
  CHECK(limit_note(100, 1e6, 1e6, l2) == "");
  CHECK(limit_note(7, 0, 0, l2) == "");
  // Ten layers' weights, 60 MB, are within the L2; 61 MB are not.
  CHECK(limit_note(300, 6e6, 6e6, l2) == "fits the L2");
  CHECK(limit_note(300, 6.1e6, 6.1e6, l2) == "the L2 may keep 99 % from run to run");
  // Of 240 MB a quarter may stay: the rest takes three quarters of the time, which is 133 %.
  CHECK(limit_note(133, 24e6, 24e6, l2) == "the L2 may keep 25 % from run to run");
  CHECK(limit_note(134, 24e6, 24e6, l2) == "above the probe: doubt the probe");
  // Memory moves half of the bytes. The other half are activations, which stay in the L2.
  CHECK(limit_note(200, 48e6, 24e6, l2) == "activations stay in the L2");
  CHECK(limit_note(201, 48e6, 24e6, l2) == "the L2 may keep 25 % from run to run");
  CHECK(limit_note(270, 48e6, 24e6, l2) == "above the probe: doubt the probe");
  // Of 100 MB of activations the L2 holds no more than its size for the next kernel.
  CHECK(limit_note(213, 124e6, 24e6, l2) == "the L2 may keep 25 % from run to run");
  CHECK(limit_note(214, 124e6, 24e6, l2) == "above the probe: doubt the probe");
  // Nothing but activations, and weights that are evicted before each run.
  const apps::CacheUse evicted{.name = "the caches", .cache_bytes = 60e6, .layers = 1, .evicts_weights = true};
  CHECK(limit_note(500, 1e6, 0, evicted) == "fits the caches");
  CHECK(limit_note(150, 3e6, 2e6, evicted) == "activations stay in the caches");
  CHECK(limit_note(151, 3e6, 2e6, evicted) == "above the probe: doubt the probe");
}

TEST_CASE("cf-layer: an interrupt leaves files that hold what is done") {
  const TempDir dir;
  const std::string json_path = dir / "r.json", csv_path = dir / "r.csv";
  // All of it would last much longer than the three seconds.
  const ProgramRun r =
      run_program("timeout --signal=INT 3 '" + std::string(CF_LAYER_PROGRAM) +
                  "' --preset pythia-14m --layer 1 --kv-len 1-2000 --threads 1 --runs 1 --warmup 0 --json '" +
                  json_path + "' --csv '" + csv_path + "'");
  CHECK(r.exit_code == 124);
  CHECK(entries(dir) == 2);
  const Json j = Json::parse(slurp(json_path));
  CHECK(j["complete"] == false);
  const std::size_t done = j["configurations"].size();
  CHECK(done > 1);
  CHECK(done < 2000);
  // The interrupt may come between the two files.
  const std::size_t lines = csv_rows(slurp(csv_path)).size() - 1;
  CHECK((lines == 10 * done || lines == 10 * (done - 1)));
}

TEST_CASE("cf-layer: a pipe gets its report once") {
  const ProgramRun r = run_program("'" + std::string(CF_LAYER_PROGRAM) + "' " + tiny +
                                   "--layer 1,2 --kv-len 1 --json /dev/stderr 2>&1 >/dev/null | cat");
  CHECK(Json::parse(r.out)["configurations"].size() == 2);
}

TEST_CASE("memory: one layer is resident, however many the checkpoint has") {
  const TempDir dir;
  // 50 MB a layer, 1.2 GB in all, as holes that take no room on the disk.
  ModelConfig m = small_model(DType::f32);
  m.hidden_size = 1024;
  m.intermediate_size = 4096;
  m.num_attention_heads = 16;
  m.rotary_dim = 16;
  m.num_hidden_layers = 24;
  std::vector<std::vector<StoredTensor>> shards(4);
  for (std::int64_t l = 0; l < m.num_hidden_layers; ++l)
    for (StoredTensor& t : layer_tensors(m, l)) shards[std::size_t(l % 4)].push_back(std::move(t));
  write_checkpoint(dir.path(), m, shards);
  const double layer_bytes = double(m.layer_parameters()) * 4, most_bytes = 2 * layer_bytes + 200e6;
  REQUIRE(24 * layer_bytes > 1e9);
  // Ten layers do not fit into what is allowed.
  REQUIRE(10 * layer_bytes > most_bytes);

  const ProgramRun r = cf_layer_ok("--model '" + dir.path() + "' --layer 3-12 --kv-len 16 --runs 1 --warmup 0");
  CHECK(table_rows(r.out).size() == 100);
  // The largest resident set of any program that this one has run.
  rusage children{};
  REQUIRE(getrusage(RUSAGE_CHILDREN, &children) == 0);
  const double peak_bytes = double(children.ru_maxrss) * 1024;
  CHECK(peak_bytes > layer_bytes);
  if (!kShadowMemory) CHECK(peak_bytes < most_bytes);
}

TEST_CASE("memory: RoPE's rows are those that a step uses, however many positions the model has") {
  const TempDir dir;
  ModelConfig m = small_model(DType::f32);
  m.max_position_embeddings = 1 << 26;  // 5 GB of rows
  m.name = "small\x1b[2J";
  write_small_checkpoint(dir.path(), m);
  const std::string run = "ulimit -v 1000000; '" + std::string(CF_LAYER_PROGRAM) + "' --model '" + dir.path() +
                          "' --layer 0 --threads 1 --runs 1 --warmup 0 ";
  if (kShadowMemory) return;
  const ProgramRun r = run_program(run + "--kv-len 4 --check");
  CAPTURE(r.err);
  CHECK(r.exit_code == 0);
  CHECK(r.err.empty());
  CHECK(r.out.find("- model: small\\x1b[2J, ") != r.out.npos);
  // What a step takes is asked for before it is taken: 2 * 2^26 * 2 heads * 80 * 4 bytes, for each of 64 sequences.
  const ProgramRun all = run_program(run + "--kv-len 67108864 --batch 64");
  CHECK(all.exit_code == 2);
  CHECK(all.error_lines() == 1);
  CHECK(all.err.find("--batch 64 with --kv-len 67108864: needs 550") != all.err.npos);
}

TEST_CASE("refusals: the command line") {
  const std::string layer = "--layer 1 --kv-len 2 ", preset = "--preset pythia-14m ";
  check_refusal(layer, "--model or --preset: expected one of them, got none");
  check_refusal(layer + preset + "--model /tmp", "--model or --preset: expected one of them, got both");
  check_refusal("--preset pythia-2.8b --layer 32 --kv-len 2",
                "--layer: expected 0 to 31 (layers of pythia-2.8b), got '32'");
  check_refusal(preset + "--layer 0-6 --kv-len 2", "--layer: expected 0 to 5 (layers of pythia-14m), got '0-6'");
  check_refusal(preset + "--layer 1 --kv-len 0", "--kv-len: expected 1 to 2048 (positions of pythia-14m), got '0'");
  check_refusal(preset + "--layer 1 --seq-len 128,2049",
                "--kv-len: expected 1 to 2048 (positions of pythia-14m), got '2049'");
  check_refusal(preset + "--layer 1- --kv-len 2", "--layer: expected numbers and ranges such as 0-3,7, got '1-'");
  check_refusal(preset + "--layer 1 --kv-len 2,,3", "--kv-len: expected numbers and ranges such as 0-3,7, got '2,,3'");
  check_refusal(preset + layer + "--threads 0", "--threads: expected 1 to 1024, got '0'");
  check_refusal(preset + layer + "--threads 1025", "--threads: expected 1 to 1024, got '1025'");
  check_refusal(preset + layer + "--runs 0", "--runs: expected 1 to 1000000, got '0'");
  check_refusal(preset + layer + "--warmup -1", "--warmup: expected 0 to 1000000, got '-1'");
  check_refusal(preset + layer + "--batch 0", "--batch: expected 1 to 4096, got '0'");
  check_refusal(preset + layer + "--q-len 0", "--q-len: expected 1 to 1048576, got '0'");
  check_refusal(preset + layer + "--q-len 3",
                "--kv-len: expected 3 to 2048 (from q_len to the positions of pythia-14m), got '2'");
  check_refusal(preset + layer + "--q-len 2049", "--q-len: expected 1 to 2048 (positions of pythia-14m), got '2049'");
  check_refusal_of("--preset pythia-3b " + layer, "preset 'pythia-3b' is unknown; there are pythia-14m, pythia-31m, ");
  // What a machine without a GPU answers, wherever this runs.
  const ProgramRun no_gpu =
      run_program("CUDA_VISIBLE_DEVICES= '" + std::string(CF_LAYER_PROGRAM) + "' " + preset + layer + "--backend cuda");
  CHECK(no_gpu.exit_code == 2);
  CHECK(no_gpu.out.empty());
  CHECK(no_gpu.err.starts_with("cf-layer: --backend cuda: "));
  CHECK(no_gpu.error_lines() == 1);
  check_refusal(preset + "--whole-model --kv-len 2", "--whole-model: expected with --backend cuda");
  check_refusal(preset + "--kv-len 2", "--layer or --whole-model: expected one of them, got none");
  check_refusal(preset + layer + "--first-layers 1", "--first-layers: expected with --whole-model");
  check_refusal(preset + layer + "--ablate", "--ablate: expected with --whole-model");
  check_refusal(preset + layer + "--impl graph", "--impl: expected with --backend cuda");
  check_refusal(preset + layer + "--arch-plan sm_90", "--arch-plan: expected with --backend cuda");
  check_refusal("--model " CF_DATA_DIR "/checkpoints/neox-d80 --dtype f16 " + layer, "--dtype: expected with --preset");
  check_refusal(preset + layer + "--dtype f64", "--dtype: expected float16, bfloat16 or float32, got 'f64'");
  check_refusal(preset + layer + "--backend tpu", "--backend: expected cpu or cuda, got 'tpu'");
  check_refusal(preset + "--layer 1", "--kv-len: required, not given");
  check_refusal(preset + layer + "--runs many", "--runs: expected 1 to 1000000, got 'many'");
  check_refusal(preset + layer + "--seed -1", "--seed: expected 0 to 18446744073709551615, got '-1'");
  check_refusal(preset + layer + "--seed 1.5", "--seed: expected 0 to 18446744073709551615, got '1.5'");
  check_refusal(preset + layer + "--stack", "--stack: unknown option");
  check_refusal(preset + layer + "--seq-len 3", "--kv-len: expected once, got 2 times");
  check_refusal_of("--preset pythia-12b --layer 0 --kv-len 2048 --batch 4096",
                   "--batch 4096 with --kv-len 2048: needs ");
  // Weights of all layers stay in no cache, so that no such run is warm.
  check_refusal(preset + "--whole-model --warm --kv-len 2 --runs 0",
                "--runs: expected 1 to 1000000, got '0'; --whole-model: expected with --backend cuda; "
                "--warm: expected without --whole-model: no cache holds the weights of all layers");
}

TEST_CASE("refusals: checkpoints") {
  const TempDir dir;
  const std::string layer = " --layer 1 --kv-len 2", model = dir / "model";
  const std::string arguments = "--model '" + model + "'" + layer;
  check_refusal(arguments, model + ": no such directory");
  std::filesystem::create_directory(model);
  check_refusal_of(arguments, model + "/config.json: ");
  const ModelConfig m = small_model(DType::f16);
  write_file(model + "/config.json", checkpoint::to_hf_json(m));
  check_refusal_of(arguments, model + ": holds no safetensors file");
  write_small_checkpoint(model, m);
  check_refusal_of("--model '" + model + "' --layer 3 --kv-len 2", "--layer: expected 0 to 2 ");
  check_refusal_of("--model '" + model + "' --layer 1 --kv-len 65", "--kv-len: expected 1 to 64 ");
  // A fault in the last layer of a sweep shows before the first is timed.
  const std::string shard = model + "/" + shard_name(2, 3);
  std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 1);
  check_refusal_of("--model '" + model + "' --layer 0-2 --kv-len 2", shard);
  cf_layer_ok("--model '" + model + "' --layer 0-1 --kv-len 2 --runs 1");
}

TEST_CASE("refusals: outputs that cannot be written are found before the run") {
  const TempDir dir;
  const std::string run = "--preset pythia-14m --layer 1 --kv-len 2 ";
  write_file(dir / "file", "kept");
  for (const std::string option : {"--json", "--csv", "--dump"})
    for (const std::string& path : {dir / "missing/x", dir / "file/x", dir.path()})
      check_refusal_of(run + option + " '" + path + "'", path + ": cannot be written: ");
  check_refusal("--preset pythia-14m --layer 1,2 --kv-len 2 --dump '" + (dir / "x.h5") + "'",
                "--dump: expected one configuration, got 2 from --layer and --kv-len");
  // One file cannot be two outputs.
  check_refusal(run + "--json '" + (dir / "x") + "' --csv '" + (dir / "./x") + "'",
                "--csv: expected a file of its own, got '" + (dir / "./x") + "' as for --json");
  // A refusal of anything else leaves them unwritten too.
  check_refusal("--preset pythia-14m --layer 6 --kv-len 2 --json '" + (dir / "x.json") + "' --csv '" + (dir / "x.csv") +
                    "' --dump '" + (dir / "x.h5") + "'",
                "--layer: expected 0 to 5 (layers of pythia-14m), got '6'");
  CHECK(slurp(dir / "file") == "kept");
  CHECK(entries(dir) == 1);
}

TEST_CASE("a full disk is one line and exit code 2") {
  const std::string run = tiny + "--layer 1 --kv-len 2 ";
  for (const std::string option : {"--json", "--csv", "--dump"}) {
    const ProgramRun r = cf_layer(run + option + " /dev/full");
    CAPTURE(option, r.err);
    CHECK(r.exit_code == 2);
    CHECK(r.error_lines() == 1);
    CHECK(r.err.starts_with("cf-layer: /dev/full: "));
  }
  const ProgramRun r = cf_layer(run + ">/dev/full");
  CHECK(r.exit_code == 2);
  CHECK(r.err == "cf-layer: standard output: cannot be written\n");
}

TEST_CASE("cf-layer --plan: each node's kernel on a GPU that need not be there, and why others are not used") {
  const std::string layer = "--preset pythia-2.8b --layer 3 --kv-len 64,2048 --plan";
  const std::string h200 = cf_layer_ok(layer).out;
  CHECK(h200.starts_with("pythia-2.8b, layer 3, batch 1, q_len 1, kv_len 64 on h200\n"));
  CHECK(h200.find("attention.query_key_value: ln_qkv_dense, ") != std::string::npos);
  CHECK(h200.find("    not ln_qkv_packed: takes packed GPTQ weights, got another weight\n") != std::string::npos);
  CHECK(h200.find("kv_len 2048 on h200\n") != std::string::npos);
  const std::string packed = cf_layer_ok(layer + " --quant gptq --gpu rtx5090").out;
  CHECK(packed.find("kv_len 64 on rtx5090\n") != std::string::npos);
  CHECK(packed.find("mlp.dense_4h_to_h: linear_sum, ") != std::string::npos);
  check_refusal("--preset pythia-14m --layer 0 --kv-len 8 --gpu h100", "--gpu: expected with --plan");
  const std::string shared = cf_layer_ok("--preset llama-3.1-8b --layer 0 --kv-len 64 --plan --gpus 2").out;
  for (const char* part :
       {"on one of 2 h200\n", "attention.all_reduce: all_reduce_words", "mlp.all_reduce: all_reduce_words",
        "not all_reduce_parts: takes the parts of all ranks, got this rank's"}) {
    INFO(shared << part);
    CHECK(shared.find(part) != std::string::npos);
  }
  CHECK(cf_layer("--preset llama-3.1-8b --layer 0 --kv-len 64 --plan --gpus 3").err ==
        "cf-layer: model: 3 ranks must divide num_heads, got 32\n");
  check_refusal("--preset pythia-14m --layer 0 --kv-len 8 --gpus 2", "--gpus: expected with --backend cuda or --plan");
}

TEST_CASE("help and version are no errors") {
  const ProgramRun help = cf_layer_ok("--help"), version = cf_layer_ok("--version");
  for (const char* option :
       {"--model",       "--preset",       "--seed",   "--dtype",     "--quant",   "--group",   "--layer",
        "--whole-model", "--first-layers", "--ablate", "--kv-len",    "--seq-len", "--q-len",   "--batch",
        "--backend",     "--impl",         "--runs",   "--arch-plan", "--warmup",  "--threads", "--warm",
        "--check",       "--json",         "--csv",    "--dump"}) {
    CAPTURE(option);
    CHECK(help.out.find(option) != help.out.npos);
  }
  CHECK(version.out.starts_with("cf-layer "));
}

TEST_CASE("cf-layer --quant gptq: quantised Linears are timed and checked, their bytes those of codes") {
  const TempDir dir;
  const std::string json_path = dir / "x.json";
  const ProgramRun r =
      cf_layer_ok(tiny + "--quant gptq --group 32 --seed 5 --layer 1 --kv-len 16 --check --json '" + json_path + "'");
  CHECK(r.out.find("model: pythia-14m, procedural GPTQ of 4 bits, group 32, seed 5\n") != r.out.npos);
  const Json j = Json::parse(slurp(json_path));
  CHECK(j["configurations"][0]["check_ok"] == true);
  const double h = 128, elements = 12 * h * h;
  const auto bytes = [](const Json& configuration) { return configuration["total"]["bytes"].get<double>(); };
  cf_layer_ok(tiny + "--seed 5 --layer 1 --kv-len 16 --json '" + json_path + "'");
  const Json dense = Json::parse(slurp(json_path));
  // Half a byte a code, and 2.5 bytes a group for its scale and zero, where there were two bytes an element.
  CHECK(bytes(dense["configurations"][0]) - bytes(j["configurations"][0]) == elements * (2 - 0.5 - 2.5 / 32));
  CHECK(dense["configurations"][0]["weights_checksum"] != j["configurations"][0]["weights_checksum"]);
  for (const std::string group : {"", " --group -1", " --group 128"})
    CHECK(cf_layer(tiny + "--quant gptq" + group + " --layer 0 --kv-len 3 --check").exit_code == 0);
}

TEST_CASE("cf-layer --quant fp8: a scale a row or a block, timed, checked and planned") {
  const TempDir dir;
  for (const std::string group : {"", " --group 128"}) {
    const auto r =
        cf_layer_ok(tiny + "--quant fp8" + group + " --layer 1 --kv-len 9 --check --json '" + (dir / "x.json") + "'");
    CHECK(r.out.find("procedural fp8 (e4m3), a scale for " +
                     std::string(group.empty() ? "a row" : "128 inputs of a row")) != std::string::npos);
    CHECK(cf_layer_ok(tiny + "--quant fp8" + group + " --layer 0 --kv-len 9 --plan").out.find(": gemv_fp8, ") !=
          std::string::npos);
  }
  check_refusal(tiny + "--quant fp8 --layer 0 --kv-len 9 --dump x.h5",
                "--dump: expected dense or GPTQ weights of a preset, got fp8 ones");
}

TEST_CASE("cf-layer --model: quantised and mixed checkpoints, and what contradicts itself in one") {
  const std::string data = CF_DATA_DIR "/checkpoints/";
  for (const char* name :
       {"neox-gptq-asym", "neox-gptq-sym", "neox-gptq-desc-act", "neox-gptq-v2", "neox-gptq-8bit", "neox-gptq-mixed"}) {
    const ProgramRun r =
        cf_layer_ok("--model '" + data + name + "' --layer 0,1 --kv-len 5 --batch 2 --runs 1 --warmup 0 --check");
    CHECK(r.out.find(", GPTQ of ") != r.out.npos);
  }
  const TempDir dir;
  std::filesystem::copy(data + "neox-gptq-sym", dir / "lies");
  std::string config = slurp(dir / "lies/quantize_config.json");
  config.replace(config.find("\"gptq\""), 6, "\"gptq_v2\"");
  write_file(dir / "lies/quantize_config.json", config);
  const ProgramRun r = cf_layer("--model '" + (dir / "lies") + "' --layer 1 --kv-len 5 --runs 1 --warmup 0 --check");
  CHECK(r.exit_code == 0);
  CHECK(r.err == "cf-layer: note: " + (dir / "lies/config.json") + ": 'quantization_config': differs from " +
                     (dir / "lies/quantize_config.json") + ", which counts\ncf-layer: note: " + (dir / "lies") +
                     ": tensor 'gpt_neox.layers.1.attention.query_key_value.qzeros': all are 7 with sym, which is "
                     "format 'gptq'; the config says 'gptq_v2' (and 3 more like it)\n");
}

TEST_CASE("cf-layer --quant: what does not go together") {
  const std::string end = " --layer 0 --kv-len 2";
  check_refusal("--preset pythia-14m --group 32" + end, "--group: expected with --quant");
  check_refusal("--preset pythia-14m --quant gptq --group 0" + end, "--group: expected -1 or 1 to 4194304, got '0'");
  check_refusal("--model " CF_DATA_DIR "/checkpoints/neox-d80 --quant gptq" + end, "--quant: expected with --preset");
  check_refusal("--preset pythia-14m --quant awq" + end, "--quant: expected gptq or fp8, got 'awq'");
}
