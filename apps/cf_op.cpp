// cf-op: times single ops of the CUDA backend beside what the GPU's memory can do.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "apps/bench/op_bench.hpp"
#include "apps/bench/report_file.hpp"
#include "apps/cli/options.hpp"
#include "apps/cli/program.hpp"
#include "apps/cli/quant.hpp"
#include "apps/cli/sweep.hpp"
#include "apps/cli/table.hpp"
#include "golden/checkpoint/model_source.hpp"

namespace cf::apps {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kMaxTokens = 1 << 20, kMaxRuns = 1'000'000;

struct Options {
  std::string preset, batches = "1", kv_lens = "1", backend = "cuda", json;
  std::optional<DType> dtype;
  QuantOptions quant;
  OpBenchRequest request;
};

/// One timing, its workload and its roofline.
struct Row {
  Workload load;
  OpTiming op;
  double roofline_bytes_per_s;

  const Timing& timing() const { return op.timing; }
  const char* roofline() const { return op.roofline_is_copy ? "copy" : "read"; }
  double floor_us() const { return timing().bytes / roofline_bytes_per_s * 1e6; }
  double percent_of_limit() const { return 100 * floor_us() / timing().time_us.median; }
  std::string limit_note(const DeviceInfo& gpu) const {
    return apps::limit_note(percent_of_limit(), timing().bytes, timing().own_bytes,
                            {.name = "the L2", .cache_bytes = double(gpu.l2_bytes), .layers = double(op.layers)});
  }
};

/// What has been measured so far.
struct Report {
  DeviceInfo gpu{};
  MemoryRates rates{};
  std::vector<Row> rows{};
};

double best(const std::vector<double>& series) { return *std::max_element(series.begin(), series.end()); }

/// Finds the model, and takes the options whose bounds are the model's sizes.
void take_model(Options& o, Faults& faults) {
  OpBenchRequest& r = o.request;
  Result<ModelConfig> model = find_preset(o.preset);
  if (!model) return faults.add(model.status());
  r.model = std::move(*model);
  r.dtype = o.dtype.value_or(DType::f16);
  r.linears = o.quant.format();
  const auto batches = parse_sweep("--batch", o.batches, {1, kMaxTokens});
  const auto kv_lens =
      parse_sweep("--kv-len", o.kv_lens, {1, r.model.max_position_embeddings, "positions of " + r.model.name});
  faults.add(batches.status());
  faults.add(kv_lens.status());
  if (!batches || !kv_lens) return;
  for (std::int64_t batch : *batches)
    for (std::int64_t kv_len : *kv_lens) r.loads.push_back({.batch = batch, .kv_len = kv_len});
}

std::vector<std::string> names(const std::vector<std::string_view>& ops) { return {ops.begin(), ops.end()}; }

std::string weights(const OpBenchRequest& r) {
  return r.linears.bits == 0 ? "procedural" : "procedural, " + checkpoint::describe(r.linears);
}

std::string report_json(const OpBenchRequest& r, const std::string& command, const Report& report, bool complete) {
  const MemoryRates& rates = report.rates;
  Json j = {{"program", "cf-op"},
            {"version", CF_VERSION},
            {"commit", commit()},
            {"command", command},
            {"op", r.op},
            {"model", r.model.name},
            {"dtype", to_string(r.dtype)},
            {"weights", weights(r)},
            {"runs", r.bench.runs},
            {"warmup", r.bench.warmup},
            {"overlap", r.overlap},
            {"read_best_gb_per_s", best(rates.read_bytes_per_s) * 1e-9},
            {"read_median_gb_per_s", spread(rates.read_bytes_per_s).median * 1e-9},
            {"copy_best_gb_per_s", best(rates.copy_bytes_per_s) * 1e-9},
            {"copy_median_gb_per_s", spread(rates.copy_bytes_per_s).median * 1e-9}};
  add_device(j, report.gpu);
  j["l2_bytes"] = report.gpu.l2_bytes;
  j["complete"] = complete;
  j["results"] = Json::array();
  for (const Row& row : report.rows) {
    const Timing& t = row.timing();
    j["results"].push_back({{"site", t.site},
                            {"batch", row.load.batch},
                            {"kv_len", row.load.kv_len},
                            {"layers", row.op.layers},
                            {"cold", row.op.cold},
                            {"median_us", t.time_us.median},
                            {"p10_us", t.time_us.p10},
                            {"p99_us", t.time_us.p99},
                            {"noise_percent", t.time_us.noise_percent()},
                            {"bytes", std::int64_t(t.bytes)},
                            {"gb_per_s", t.gb_per_s()},
                            {"limit", row.roofline()},
                            {"floor_us", row.floor_us()},
                            {"percent_of_limit", row.percent_of_limit()},
                            {"limit_note", row.limit_note(report.gpu)}});
  }
  return j.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

void print_report(const OpBenchRequest& r, const Report& report) {
  const DeviceInfo& gpu = report.gpu;
  const double read = best(report.rates.read_bytes_per_s) * 1e-9, copy = best(report.rates.copy_bytes_per_s) * 1e-9;
  fmt::print("# cf-op {}, commit {}\n\n", CF_VERSION, commit());
  fmt::print("- GPU: {}, CUDA {} (driver {}), memory clock {:.0f} MHz\n", gpu.name, gpu.runtime, gpu.driver,
             gpu.memory_clock_mhz);
  fmt::print("- op: {} of {}, {}, weights {}, in a graph over the layers{}\n\n", r.op, r.model.name, to_string(r.dtype),
             weights(r), r.overlap ? ", each kernel may start before its predecessor is done" : "");
  Table table({"site", "batch", "kv_len", "layers", "cold", "median us", "p10 us", "p99 us", "bytes", "GB/s", "limit",
               "floor us", fmt::format("% of read, {:.1f} GB/s, or copy, {:.1f} GB/s", read, copy), "note"});
  for (const Row& row : report.rows) {
    const Timing& t = row.timing();
    table.add({t.site, fmt::format("{}", row.load.batch), fmt::format("{}", row.load.kv_len),
               fmt::format("{}", row.op.layers), row.op.cold ? "yes" : "no", fmt::format("{:.2f}", t.time_us.median),
               fmt::format("{:.2f}", t.time_us.p10), fmt::format("{:.2f}", t.time_us.p99),
               fmt::format("{:.0f}", t.bytes), fmt::format("{:.1f}", t.gb_per_s()), row.roofline(),
               fmt::format("{:.2f}", row.floor_us()), fmt::format("{:.1f}", row.percent_of_limit()),
               row.limit_note(gpu)});
  }
  table.print(stdout);
}

int run(const Options& o, const std::string& command) {
  const bool to_stdout = o.json == "-";
  Report report;
  const auto json = [&](bool complete) { return report_json(o.request, command, report, complete); };
  const OpBenchSink sink{
      .device =
          [&](const DeviceInfo& gpu, const MemoryRates& rates) {
            report.gpu = gpu;
            report.rates = rates;
          },
      .timed = [&](const Workload& load, const std::vector<OpTiming>& sites) -> Status {
        const MemoryRates& rates = report.rates;
        for (const OpTiming& t : sites)
          report.rows.push_back({load, t, best(t.roofline_is_copy ? rates.copy_bytes_per_s : rates.read_bytes_per_s)});
        return to_stdout ? Status() : write_report(o.json, false, [&] { return json(false); });
      }};
  const Status status = bench_ops(o.request, sink);
  // An error in the middle of a sweep does not lose what was measured before it.
  if (!report.rows.empty()) {
    if (to_stdout)
      fmt::print("{}", json(bool(status)));
    else
      print_report(o.request, report);
    if (std::fflush(stdout) != 0 || std::ferror(stdout)) return fail("standard output: cannot be written");
  }
  if (!status) return fail(status);
  if (!to_stdout)
    if (const Status s = write_report(o.json, true, [&] { return json(true); }); !s) return fail(s);
  return kOk;
}

int run(int argc, const char* const* argv) {
  Options o;
  OpBenchRequest& r = o.request;
  CommandLine line(
      "Times single CUDA ops at a model's shapes, cold, in a graph, beside the GPU's streaming read and copy.",
      std::string("cf-op ") + CF_VERSION);
  line.group("Op");
  line.choice("op", r.op, names(op_names()), "The op that is timed");
  line.text("--preset", o.preset, "Model whose shapes are taken", "NAME", checkpoint::preset_names());
  line.text("--batch,--tokens", o.batches, "Sequences, one new token each: numbers and ranges, such as 1,4,16", "LIST");
  line.text("--kv-len,--seq-len", o.kv_lens,
            "Valid cache entries after the new token is appended: numbers and ranges, such as 128,512,2048", "LIST");
  line.integer("--layers", r.layers, {0, OpBenchRequest::kMaxLayers},
               "Sets of tensors that the graph goes through; 0 for as many as hold four times the L2");
  line.dtype("--dtype", o.dtype, {DType::f16, DType::bf16, DType::f32}, "Dtype of the tensors, float16 when left out");
  declare_quant(line, o.quant, "the op's matrices");
  line.group("Timing");
  line.choice("--backend,--device", o.backend, {"cuda"}, "What runs the op");
  line.integer("--runs", r.bench.runs, {1, kMaxRuns}, "Timed replays of the graph");
  line.integer("--warmup", r.bench.warmup, {0, kMaxRuns}, "Replays before the timed ones");
  line.flag("--overlap", r.overlap, "Let a kernel start before its predecessor is done");
  line.group("Output");
  line.output("--json", o.json, "Write everything as JSON; - for standard output in place of the table", true);
  line.example("A step's Linears at the shapes of Pythia-2.8B", "cf-op linear --preset pythia-2.8b");
  line.example("Attention over a batch and two lengths",
               "cf-op attention --preset llama-3.1-8b --batch 8 --kv-len 512,2048");
  line.require("op");
  line.require("--preset");
  line.check([&](Faults& faults) {
    const std::vector<std::string> linears = names(linear_op_names());
    if (!o.quant.name.empty() && !r.op.empty() && std::find(linears.begin(), linears.end(), r.op) == linears.end())
      faults.add(fmt::format("--quant: expected with {}, got {}", list_of(linears), r.op));
    if (line.given("--preset")) take_model(o, faults);
  });
  if (const auto exit_code = line.parse(argc, argv)) return *exit_code;
  return run(o, shell_command(argc, argv));
}

}  // namespace
}  // namespace cf::apps

int main(int argc, char** argv) {
  return cf::apps::run_main([&] { return cf::apps::run(argc, argv); });
}
