// cf-op: times single ops of the CUDA backend beside what the GPU's memory can do.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>

#include "apps/common.hpp"
#include "apps/op_bench.hpp"
#include "apps/sweep.hpp"

namespace cf::apps {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kMaxTokens = 1 << 20, kMaxRuns = 1'000'000, kMaxGroup = 1 << 22;

struct Options {
  std::string op, preset, batches = "1", kv_lens = "1", dtype = "float16", quant, json;
  std::optional<std::int64_t> group;  // with quant
  OpBenchOptions bench;
};

/// What the options ask for, all of it looked at before any work.
struct Plan {
  ModelConfig model;
  std::vector<Workload> loads;
  OpBenchOptions bench;
};

/// The rates of the GPU's memory in this run; the best of each is a limit.
struct Rates {
  std::vector<double> read_bytes_per_s, copy_bytes_per_s;
  static double best(const std::vector<double>& series) { return *std::max_element(series.begin(), series.end()); }
};

/// A timing with the workload that it was taken at and the rate that limits it.
struct Row {
  Workload load;
  OpTiming op;
  double limit_bytes_per_s;

  const Timing& timing() const { return op.timing; }
  const char* limit() const { return op.limited_by_copy ? "copy" : "read"; }
  double floor_us() const { return timing().bytes / limit_bytes_per_s * 1e6; }
  double percent_of_limit() const { return 100 * floor_us() / timing().time_us.median; }
};

Result<Plan> make_plan(const Options& o) {
  const auto among = [&](const std::vector<std::string_view>& ops) {
    return std::find(ops.begin(), ops.end(), o.op) != ops.end();
  };
  if (!among(op_names()))
    return Status::error(Code::invalid_argument,
                         fmt::format("op '{}' is unknown, expected one of {}", o.op, fmt::join(op_names(), ", ")));
  if (!o.quant.empty() && !among(linear_op_names()))
    return Status::error(Code::invalid_argument, fmt::format("--quant {}: expected with one of {}, got {}", o.quant,
                                                             fmt::join(linear_op_names(), ", "), o.op));
  if (o.quant.empty() && o.group) return Status::error(Code::invalid_argument, "--group: expected with --quant");
  Result<ModelConfig> model = find_preset(o.preset);
  if (!model) return model.status();
  const std::optional<DType> dtype = dtype_from_string(o.dtype);
  if (dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::f32)
    return Status::error(Code::invalid_argument,
                         fmt::format("--dtype {}: expected float16, bfloat16 or float32", o.dtype));
  const auto bounds = [](std::int64_t lowest, std::int64_t highest) {
    return Bounds{lowest, highest, fmt::format("expected {} to {}", lowest, highest)};
  };
  if (o.group && *o.group != -1)
    CF_TRY(check_bounds("--group", *o.group, {1, kMaxGroup, fmt::format("expected -1 or 1 to {}", kMaxGroup)}));
  CF_TRY(check_bounds("--layers", o.bench.layers, bounds(0, OpBenchOptions::kMaxLayers)));
  CF_TRY(check_bounds("--runs", o.bench.bench.runs, bounds(1, kMaxRuns)));
  CF_TRY(check_bounds("--warmup", o.bench.bench.warmup, bounds(0, kMaxRuns)));
  const auto batches = parse_sweep("--batch", o.batches, bounds(1, kMaxTokens));
  if (!batches) return batches.status();
  const std::int64_t longest = model->max_position_embeddings;
  const auto kv_lens = parse_sweep("--kv-len", o.kv_lens,
                                   {1, longest, fmt::format("{} has sequence lengths 1 to {}", model->name, longest)});
  if (!kv_lens) return kv_lens.status();
  if (!o.json.empty() && o.json != "-") CF_TRY(check_writable(o.json));

  Plan plan{.model = std::move(*model), .loads = {}, .bench = o.bench};
  plan.bench.dtype = *dtype;
  if (!o.quant.empty()) plan.bench.linears = {.bits = 4, .group_size = o.group.value_or(128)};
  for (std::int64_t batch : *batches)
    for (std::int64_t kv_len : *kv_lens) plan.loads.push_back({.batch = batch, .kv_len = kv_len});
  return plan;
}

std::string weights(const Plan& plan) {
  const WeightFormat& linears = plan.bench.linears;
  if (linears.bits == 0) return "procedural";
  return fmt::format("procedural, GPTQ of {} bits, {}", linears.bits,
                     linears.group_size == -1 ? "one group" : fmt::format("group {}", linears.group_size));
}

std::string report_json(const Options& o, const std::string& command, const Plan& plan, const DeviceInfo& gpu,
                        const Rates& rates, const std::vector<Row>& rows) {
  Json j = {{"program", "cf-op"},
            {"version", CF_VERSION},
            {"commit", commit()},
            {"command", command},
            {"op", o.op},
            {"model", plan.model.name},
            {"dtype", to_string(plan.bench.dtype)},
            {"weights", weights(plan)},
            {"runs", plan.bench.bench.runs},
            {"warmup", plan.bench.bench.warmup},
            {"overlap", plan.bench.overlap},
            {"read_best_gb_per_s", Rates::best(rates.read_bytes_per_s) * 1e-9},
            {"read_median_gb_per_s", spread(rates.read_bytes_per_s).median * 1e-9},
            {"copy_best_gb_per_s", Rates::best(rates.copy_bytes_per_s) * 1e-9},
            {"copy_median_gb_per_s", spread(rates.copy_bytes_per_s).median * 1e-9}};
  add_device(j, gpu);
  j["results"] = Json::array();
  for (const Row& r : rows) {
    const Timing& t = r.timing();
    j["results"].push_back({{"site", t.site},
                            {"batch", r.load.batch},
                            {"kv_len", r.load.kv_len},
                            {"layers", r.op.layers},
                            {"cold", r.op.cold},
                            {"median_us", t.time_us.median},
                            {"p10_us", t.time_us.p10},
                            {"p99_us", t.time_us.p99},
                            {"noise_percent", t.time_us.noise_percent()},
                            {"bytes", std::int64_t(t.bytes)},
                            {"gb_per_s", t.gb_per_s()},
                            {"limit", r.limit()},
                            {"floor_us", r.floor_us()},
                            {"percent_of_limit", r.percent_of_limit()}});
  }
  return j.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

void print_report(const Options& o, const Plan& plan, const DeviceInfo& gpu, const Rates& rates,
                  const std::vector<Row>& rows) {
  fmt::print("# cf-op {}, commit {}\n\n", CF_VERSION, commit());
  fmt::print("- GPU: {}, CUDA {} (driver {}), memory clock {:.0f} MHz\n", gpu.name, gpu.runtime, gpu.driver,
             gpu.memory_clock_mhz);
  fmt::print("- op: {} of {}, {}, weights {}, in a graph over the layers{}\n", o.op, plan.model.name,
             to_string(plan.bench.dtype), weights(plan),
             plan.bench.overlap ? ", each kernel may start before its predecessor is done" : "");
  fmt::print("- streaming read: best {:.1f} GB/s; copy: best {:.1f} GB/s; each the limit where the table names it\n\n",
             Rates::best(rates.read_bytes_per_s) * 1e-9, Rates::best(rates.copy_bytes_per_s) * 1e-9);
  Table table({"site", "batch", "kv_len", "layers", "cold", "median us", "p10 us", "p99 us", "bytes", "GB/s", "limit",
               "floor us", "% of limit"});
  for (const Row& r : rows) {
    const Timing& t = r.timing();
    table.add({t.site, fmt::format("{}", r.load.batch), fmt::format("{}", r.load.kv_len),
               fmt::format("{}", r.op.layers), r.op.cold ? "yes" : "no", fmt::format("{:.2f}", t.time_us.median),
               fmt::format("{:.2f}", t.time_us.p10), fmt::format("{:.2f}", t.time_us.p99),
               fmt::format("{:.0f}", t.bytes), fmt::format("{:.1f}", t.gb_per_s()), r.limit(),
               fmt::format("{:.2f}", r.floor_us()), fmt::format("{:.1f}", r.percent_of_limit())});
  }
  table.print(stdout);
}

int run(const Options& o, const std::string& command) {
  const Result<Plan> plan = make_plan(o);
  if (!plan) return fail(plan.status());
  Result<DeviceTimer> timer = DeviceTimer::create();
  if (!timer) return fail(timer.status());
  const auto read = timer->read_bytes_per_s(plan->bench.bench);
  if (!read) return fail(read.status());
  const auto copy = timer->copy_bytes_per_s(plan->bench.bench);
  if (!copy) return fail(copy.status());
  const Rates rates{*read, *copy};

  std::vector<Row> rows;
  for (const Workload& load : plan->loads) {
    const auto timings = time_op(*timer, o.op, plan->model, load, plan->bench);
    if (!timings) return fail(timings.status());
    for (const OpTiming& t : *timings)
      rows.push_back({load, t, Rates::best(t.limited_by_copy ? rates.copy_bytes_per_s : rates.read_bytes_per_s)});
  }
  const std::string json = report_json(o, command, *plan, timer->info(), rates, rows);
  if (o.json == "-")
    fmt::print("{}", json);
  else
    print_report(o, *plan, timer->info(), rates, rows);
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) return fail("standard output: cannot be written");
  if (!o.json.empty() && o.json != "-")
    if (const Status s = write_file_atomically(o.json, json); !s) return fail(s);
  return kOk;
}

int run(int argc, const char* const* argv) {
  Options o;
  CLI::App app(
      "Times single CUDA ops at a model's shapes, cold, in a graph, beside the GPU's streaming read and copy.");
  app.add_option("op", o.op, fmt::format("One of {}", fmt::join(op_names(), ", ")))->required();
  app.add_option("--preset", o.preset, "Model of the Pythia suite whose shapes are taken, such as pythia-2.8b")
      ->required();
  app.add_option("--batch,--tokens", o.batches, "Sequences, one new token each: numbers and ranges, such as 1,4,16")
      ->capture_default_str();
  app.add_option("--kv-len", o.kv_lens, "Valid cache entries, the new token's with them: numbers and ranges")
      ->capture_default_str();
  app.add_option("--layers", o.bench.layers,
                 "Sets of tensors that the graph goes through; 0: as many as hold four times the L2")
      ->capture_default_str();
  app.add_option("--dtype", o.dtype, "float16, bfloat16 or float32")->capture_default_str();
  app.add_option("--quant", o.quant, "Quantise the op's matrices: gptq, of 4 bits")->check(CLI::IsMember({"gptq"}));
  app.add_option("--group", o.group, "Inputs that share a scale with --quant, -1 for all; 128 when left out");
  app.add_option("--runs", o.bench.bench.runs, "Timed replays of the graph")->capture_default_str();
  app.add_option("--warmup", o.bench.bench.warmup, "Replays before the timed ones")->capture_default_str();
  app.add_flag("--overlap", o.bench.overlap, "Let a kernel start before its predecessor is done");
  app.add_option("--json", o.json, "Write everything as JSON; - for standard output in place of the table");
  app.set_version_flag("--version", std::string("cf-op ") + CF_VERSION);
  if (const auto end = parse(app, argc, argv)) return *end;
  try {
    return run(o, shell_command(argc, argv));
  } catch (const std::bad_alloc&) {
    return fail("not enough memory for this configuration");
  }
}

}  // namespace
}  // namespace cf::apps

int main(int argc, char** argv) { return cf::apps::run(argc, argv); }
