// cf-layer: times one layer of a model, site by site, and checks it.
#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>

#include "apps/bench/device_bench.hpp"
#include "apps/bench/layer_bench.hpp"
#include "apps/bench/layer_report.hpp"
#include "apps/bench/report_file.hpp"
#include "apps/bench/step_plan.hpp"
#include "apps/cli/options.hpp"
#include "apps/cli/program.hpp"
#include "apps/cli/quant.hpp"
#include "apps/cli/sweep.hpp"
#include "apps/cli/terminal.hpp"
#include "apps/verify/golden_walk.hpp"
#include "core/procedural.hpp"
#include "core/resources.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "golden/checkpoint/hf_config.hpp"
#include "golden/checkpoint/model_source.hpp"

namespace cf::apps {
namespace {

namespace fs = std::filesystem;
using checkpoint::LoadedLayer;
using checkpoint::ModelSource;

constexpr std::int64_t kMaxBatch = 4096, kMaxRuns = 1'000'000, kMaxTokens = 1 << 20;

struct Options {
  std::string model, preset, layers, first_layers, kv_lens, backend = "cpu", json, csv, dump;
  std::optional<DType> dtype;
  QuantOptions quant;
  std::uint64_t seed = 0;
  std::int64_t batch = 1, q_len = 1, threads = omp_get_max_threads();
  BenchOptions bench;
  DeviceOptions device;
  bool check = false, whole_model = false, ablate = false, plan = false;
  std::string gpu = "h200";  // with plan

  bool cuda() const { return backend == "cuda"; }
};

/// The model that the options name.
checkpoint::ModelChoice choice_of(const Options& o) {
  checkpoint::ModelChoice choice{.directory = o.model, .preset = o.preset, .dtype = o.dtype, .seed = o.seed};
  choice.linears = o.quant.format();
  return choice;
}

/// The configurations that the options ask for.
struct Plan {
  std::optional<ModelSource> source{};
  std::vector<std::int64_t> layers{}, first_layers{}, kv_lens{};  // an empty first_layers stands for all layers
  std::unique_ptr<DeviceBench> device{};                          // with --backend cuda
  DType activation = kActivation;                                 // on a GPU the dtype of the stored weights
  std::vector<std::string> notes{};                               // of the checkpoint
  /// A layer that was loaded to be checked, for the next load() of it.
  std::optional<std::pair<std::int64_t, LoadedLayer>> held{};

  /// A layer's weights. May be called from several threads.
  Result<LoadedLayer> load(std::int64_t layer) const {
    if (held && held->first == layer) return held->second;
    return source->layer(layer);
  }
};

/// Refuses options that another option rules out.
void check_together(const Options& o, const CommandLine& line, Faults& faults) {
  if (!o.cuda())
    for (const char* option : {"--whole-model", "--impl", "--arch-plan"})
      if (line.given(option)) faults.add(fmt::format("{}: expected with --backend cuda", option));
  if (!o.cuda() && !o.plan && line.given("--gpus")) faults.add("--gpus: expected with --backend cuda or --plan");
  if (o.device.gpus > 1 && !o.plan)
    for (const char* option : {"--dump", "--ablate"})
      if (line.given(option)) faults.add(fmt::format("{}: expected without --gpus", option));
  if (o.bench.warm && o.whole_model)
    faults.add("--warm: expected without --whole-model: no cache holds the weights of all layers");
  if (o.quant.format().is_fp8 && !o.dump.empty())
    faults.add("--dump: expected dense or GPTQ weights of a preset, got fp8 ones");
  if (o.cuda() && !o.dump.empty() && o.device.impls != "unfused")
    faults.add("--dump: expected with --impl unfused, the only one to keep every site's output");
}

/// Opens the model, and takes the options whose bounds are the model's sizes.
void take_model(const Options& o, Plan& plan, Faults& faults) {
  Result<ModelSource> source = ModelSource::open(choice_of(o));
  if (!source) return faults.add(source.status());
  const ModelConfig& m = source->config();
  const auto take = [&](const char* option, const std::string& text, const Range& range,
                        std::vector<std::int64_t>& values) {
    if (text.empty()) return;
    Result<std::vector<std::int64_t>> taken = parse_sweep(option, text, range);
    faults.add(taken.status());
    if (taken) values = std::move(*taken);
  };
  take("--layer", o.whole_model ? "0" : o.layers, {0, m.num_hidden_layers - 1, "layers of " + m.name}, plan.layers);
  take("--first-layers", o.first_layers, {1, m.num_hidden_layers, "layers of " + m.name}, plan.first_layers);
  const Range positions{1, m.most_positions(), "positions of " + m.name};
  if (!positions.holds(o.q_len))
    faults.expected("--q-len", positions.text(), std::to_string(o.q_len));
  else
    take("--kv-len", o.kv_lens,
         {o.q_len, m.most_positions(),
          o.q_len == 1 ? positions.note : fmt::format("from q_len to the positions of {}", m.name)},
         plan.kv_lens);
  plan.source.emplace(std::move(*source));
  const std::size_t count = plan.layers.size() * plan.kv_lens.size();
  if (!o.dump.empty() && count > 1)
    faults.add(fmt::format("--dump: expected one configuration, got {} from --layer and --kv-len", count));
}

/// Refuses a step that this machine's free memory does not hold. The oracle holds it once more in float64.
Status check_memory(const ModelSource& source, const Options& o, std::int64_t longest) {
  const ModelConfig& m = source.config();
  const Workload load{.batch = o.batch, .q_len = o.q_len, .kv_len = longest};
  double needed = LayerState::bytes(m, load, kActivation);
  if (o.check) needed += LayerState::bytes(m, load, DType::f64);
  if (!source.is_checkpoint()) needed += double(m.layer_parameters()) * double(size_bytes(m.dtype));
  return check_free_memory(needed,
                           fmt::format("--batch {} with --kv-len {}: needs {}", o.batch, longest, gigabytes(needed)));
}

DeviceBenchRequest device_request(const Options& o, const Plan& plan) {
  DeviceBenchRequest request{.config = plan.source->config(),
                             .load = [&](std::int64_t layer) { return plan.load(layer); },
                             .whole_model = o.whole_model,
                             .first_layers = plan.first_layers,
                             .kv_lens = plan.kv_lens,
                             .batch = o.batch,
                             .q_len = o.q_len,
                             .seed = o.seed,
                             .bench = o.bench,
                             .check = o.check,
                             .ablate = o.ablate,
                             .device = o.device};
  request.config.dtype = plan.activation;
  return request;
}

/// Refuses, before any output, what would fail later: layers that cannot be loaded, too little memory, and on a GPU
/// what an implementation does not take.
Status check_run(const Options& o, Plan& plan) {
  ModelSource& source = *plan.source;
  CF_TRY(check_memory(source, o, *std::max_element(plan.kv_lens.begin(), plan.kv_lens.end())));
  CF_TRY(cpu_ref::start_threads("--threads, or OMP_NUM_THREADS", o.threads));
  if (source.is_checkpoint())
    for (std::int64_t layer : plan.layers) {
      CF_TRY_ASSIGN(LoadedLayer loaded, source.layer(layer));
      plan.notes.insert(plan.notes.end(), loaded.notes.begin(), loaded.notes.end());
      if (o.cuda()) plan.activation = loaded.dtype;
      if (layer == plan.layers.front()) plan.held = {layer, std::move(loaded)};
    }
  if (!o.cuda()) return {};
  if (!source.is_checkpoint()) plan.activation = source.config().dtype;
  CF_TRY_ASSIGN(plan.device, DeviceBench::create(device_request(o, plan)));
  for (std::int64_t layer : plan.layers) {
    CF_TRY(plan.device->check(layer));
    if (!source.is_checkpoint()) break;  // the others have the same sizes and formats
  }
  return {};
}

/// The checkpoint's directory as seen from the dump's.
std::string relative_checkpoint(const std::string& directory, const std::string& dump) {
  std::error_code none;
  const fs::path from = fs::absolute(dump, none).parent_path();
  return fs::relative(directory, from, none).string();
}

/// Writes --dump's file: the step's inputs, and the taps that the walk makes.
Status write_dump(const Options& o, const ModelSource& source, const RunInfo& run, const LayerReport& report,
                  LayerState& inputs, const SiteWalk& walk) {
  golden::GoldenMeta meta;
  meta.producer = fmt::format("cf-layer {}", run.version);
  meta.command = run.command;
  meta.versions = fmt::format(R"({{"cf": "{}", "commit": "{}"}})", run.version, run.commit);
  meta.model = source.config().name;
  meta.config = source.config();
  meta.config.dtype = report.weights_dtype;
  meta.config_json = checkpoint::to_hf_json(meta.config);
  meta.layer = report.layer;
  meta.dtype = report.weights_dtype;
  meta.seed = o.seed;
  meta.load = report.load;
  meta.kv_len.assign(std::size_t(report.load.batch), std::int32_t(report.load.kv_len));
  meta.weights_checksum = report.weights_checksum;
  if (source.is_checkpoint()) {
    meta.weights = "checkpoint";
    meta.weights_checkpoint = relative_checkpoint(o.model, o.dump);
  } else {
    meta.linears = source.linears();
    meta.weights = meta.linears.bits ? "procedural_gptq" : "procedural";
  }
  const std::string dtype(to_string(run.activation));
  return dump_layer(o.dump, std::move(meta),
                    {.name = fmt::format("{}_{}", run.backend, dtype),
                     .dtype = dtype,
                     .attn_implementation = o.cuda() ? "cuda" : "cpu_ref",
                     .device = run.device ? run.device->name : run.cpu,
                     .taps = {}},
                    inputs, walk);
}

/// Times, checks and dumps one configuration on the CPU; `label` heads its progress bar.
Result<LayerReport> measure(const Options& o, const ModelSource& source, const RunInfo& run, LayerReport report,
                            const LoadedLayer& weights, const std::string& label) {
  const ModelConfig& m = source.config();
  Progress progress(label, o.bench.warmup + o.bench.runs + (o.check ? 1 : 0));
  LayerState state(m, report.load, kActivation);
  fill_inputs(m, report.load, o.seed, weights.dtype, state);
  std::int64_t done = 0;
  CF_TRY_ASSIGN(report.timing, time_layer(m, weights.weights, state, o.bench, [&] { progress.set(++done); }));
  if (o.check) {
    LayerState oracle(m, report.load, DType::f64);
    fill_inputs(m, report.load, o.seed, weights.dtype, oracle);
    CF_TRY_ASSIGN(report.check, check_layer(m, weights.weights, state.output, {kActivation, kActivation}, oracle));
  }
  CF_TRY(source.check_files());
  if (!o.dump.empty()) CF_TRY(write_dump(o, source, run, report, state, cpu_walk(m, weights.weights, state)));
  return report;
}

/// The command that runs this one configuration's check again.
std::string reproduce_line(const Options& o, const LayerReport& r) {
  std::vector<std::string> words{"cf-layer"};
  const auto add = [&](const char* option, std::string value) {
    words.insert(words.end(), {option, std::move(value)});
  };
  o.model.empty() ? add("--preset", o.preset) : add("--model", o.model);
  if (o.dtype) add("--dtype", std::string(to_string(*o.dtype)));
  if (!o.quant.name.empty()) add("--quant", o.quant.name);
  if (o.quant.group) add("--group", std::to_string(*o.quant.group));
  add("--seed", std::to_string(o.seed));
  add("--layer", std::to_string(r.layer));
  add("--kv-len", std::to_string(r.load.kv_len));
  if (r.load.q_len > 1) add("--q-len", std::to_string(r.load.q_len));
  add("--batch", std::to_string(r.load.batch));
  if (r.device) {
    add("--backend", o.backend);
    add("--impl", r.device->impl);
    if (!o.device.arch_plan.empty()) add("--arch-plan", o.device.arch_plan);
    if (o.device.gpus > 1) add("--gpus", std::to_string(o.device.gpus));
  } else {
    add("--threads", std::to_string(o.threads));
  }
  words.push_back("--check");
  return shell_command(words);
}

/// Measures all configurations on the CPU, one after the other, with one layer in memory at a time.
Status measure_on_cpu(const Options& o, Plan& plan, const RunInfo& info,
                      const std::function<Status(const LayerReport&)>& report) {
  ModelSource& source = *plan.source;
  const std::size_t count = plan.layers.size() * plan.kv_lens.size();
  std::size_t place = 0;
  for (std::int64_t layer : plan.layers) {
    std::optional<Progress> loading(std::in_place, fmt::format("loading layer {}", layer), 1);
    CF_TRY_ASSIGN(const LoadedLayer weights, plan.load(layer));
    plan.held.reset();
    const std::uint64_t checksum = weights_checksum(source.config(), weights.weights);
    loading.reset();
    for (std::int64_t kv_len : plan.kv_lens) {
      const LayerReport todo{.layer = layer,
                             .load = {.batch = o.batch, .q_len = o.q_len, .kv_len = kv_len},
                             .weights_dtype = weights.dtype,
                             .weights_checksum = checksum,
                             .timing = {},
                             .check = {},
                             .device = {}};
      const std::string label = fmt::format("layer {}, kv_len {} ({} of {})", layer, kv_len, ++place, count);
      CF_TRY_ASSIGN(const LayerReport measured, measure(o, source, info, todo, weights, label));
      CF_TRY(report(measured));
    }
  }
  return {};
}

/// Measures all configurations on a GPU, with as many layers in its memory as make each layer's weights cold.
Status measure_on_device(const Plan& plan, const DeviceBenchSink& sink) {
  for (std::int64_t layer : plan.layers) CF_TRY(plan.device->time(layer, sink));
  return {};
}

/// Prints the kernels of each layer and kv_len on a GPU that need not be there. A cache has kv_len entries.
int print_plans(const Options& o, const Plan& plan) {
  const ModelConfig& m = plan.source->config();
  const Result<ModelSpec> part = m.spec().of_rank(0, o.device.gpus);
  if (!part) return fail(part.status());
  const std::string gpus = o.device.gpus > 1 ? fmt::format("one of {} {}", o.device.gpus, o.gpu) : o.gpu;
  for (std::int64_t layer : plan.layers)
    for (std::int64_t kv_len : plan.kv_lens) {
      const Result<std::string> text = step_plan_text(
          o.gpu, {.model = *part,
                  .dtype = m.dtype,
                  .linears = plan.source->linears(),
                  .sizes = {.batch = o.batch, .q_len = o.q_len, .table_rows = kv_len, .capacity = kv_len},
                  .layer = layer});
      if (!text) return fail(text.status());
      fmt::print("{}, layer {}, batch {}, q_len {}, kv_len {} on {}\n{}", m.name, layer, o.batch, o.q_len, kv_len, gpus,
                 *text);
    }
  return std::fflush(stdout) == 0 ? kOk : fail("standard output: cannot be written");
}

int run(const Options& o, Plan& plan, const std::string& command) {
  if (o.plan) return print_plans(o, plan);
  if (const Status s = check_run(o, plan); !s) return fail(s);
  print_notes(plan.notes);
  const ModelSource& source = *plan.source;
  RunInfo info{.version = CF_VERSION,
               .commit = std::string(commit()),
               .command = command,
               .cpu = cpu_name(),
               .backend = o.backend,
               .model = source.config().name,
               .weights = source.description(),
               .threads = o.threads,
               .seed = o.seed,
               .activation = plan.activation,
               .bench = o.bench,
               .device = {},
               .launch_plan = {}};
  if (plan.device) {
    info.device = plan.device->device().info;
    info.launch_plan = plan.device->device().launch_plan;
  }
  print_header(stdout, info);

  std::vector<LayerReport> reports;
  std::vector<AblationReport> ablations;
  bool ok = true;
  // The files hold after each configuration what is done, so that neither an error nor an interrupt loses it.
  const auto write_files = [&](bool complete) -> Status {
    std::fflush(stdout);
    CF_TRY(write_report(o.json, complete, [&] { return report_json(info, reports, ablations, complete); }));
    return write_report(o.csv, complete, [&] { return report_csv(info, reports); });
  };
  DeviceBenchSink sink;
  sink.report = [&](const LayerReport& report) {
    print_report(stdout, info, report);
    if (report.check && !report.check->ok()) {
      ok = false;
      fmt::print("reproduce: {}\n", reproduce_line(o, report));
    }
    reports.push_back(report);
    return write_files(false);
  };
  sink.ablation = [&](const AblationReport& report) {
    print_ablation(stdout, info, report);
    ok = ok && report.ok();
    ablations.push_back(report);
    return write_files(false);
  };
  if (!o.dump.empty())
    sink.dump = [&](const LayerReport& report, LayerState& inputs, const SiteWalk& walk) {
      return write_dump(o, source, info, report, inputs, walk);
    };
  if (const Status s = plan.device ? measure_on_device(plan, sink) : measure_on_cpu(o, plan, info, sink.report); !s)
    return fail(s);
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) return fail("standard output: cannot be written");
  print_notes(source.changes());
  if (const Status s = write_files(true); !s) return fail(s);
  return ok ? kOk : kComparisonFailed;
}

int run(int argc, const char* const* argv) {
  Options o;
  Plan plan;
  CommandLine line("Times one layer of a model, site by site, beside a plain read of its weights, and checks it.",
                   std::string("cf-layer ") + CF_VERSION);
  line.group("Model");
  line.text("--model", o.model, "Checkpoint directory: config.json and safetensors", "DIR");
  line.reads("--model");
  line.text("--preset", o.preset, "Model with procedural weights", "NAME", checkpoint::preset_names());
  line.seed("--seed", o.seed, "Seed of procedural weights and activations");
  line.dtype("--dtype", o.dtype, {DType::f16, DType::bf16, DType::f32},
             "Stored dtype of a preset's weights, the preset's own when left out");
  declare_quant(line, o.quant, "a preset's Linears");
  line.group("Step");
  line.text("--layer", o.layers, "Layers: numbers and ranges, such as 0-3,7", "LIST");
  line.flag("--whole-model", o.whole_model, "Time all layers back to back (cuda)");
  line.text("--first-layers", o.first_layers,
            "With --whole-model, so many layers from the first on: numbers and ranges, such as 1,2,4,8-32", "LIST");
  line.flag("--ablate", o.ablate, "With --whole-model, time variants of the persistent kernel, too");
  line.text("--kv-len,--seq-len", o.kv_lens,
            "Valid cache entries after the new tokens are appended: numbers and ranges, such as 128,512,2048", "LIST");
  line.integer("--q-len", o.q_len, {1, kMaxTokens}, "New tokens of each sequence; more than 1 is a prefill");
  line.integer("--batch", o.batch, {1, kMaxBatch}, "Sequences");
  line.group("Backend");
  line.choice("--backend,--device", o.backend, {"cpu", "cuda"}, "What runs the layer");
  line.text("--impl", o.device.impls,
            "How a step is launched: a list of unfused, graph, split, layer and persistent (cuda); graph when left out",
            "LIST");
  line.text("--arch-plan", o.device.arch_plan, "Launch plans of another GPU (cuda)", "ARCH", {"sm_90", "sm_120"});
  line.flag(
      "--plan", o.plan,
      "Time nothing: print the kernel of each node of a graph's step, its plan, and why other kernels are not used");
  line.choice("--gpu", o.gpu, plan_gpus(), "The GPU of --plan, which need not be there");
  line.integer("--gpus", o.device.gpus, {1, 8}, "GPUs that share each layer: each holds a part of it");
  line.group("Timing");
  line.integer("--runs", o.bench.runs, {1, kMaxRuns}, "Timed runs");
  line.integer("--warmup", o.bench.warmup, {0, kMaxRuns}, "Runs before the timed ones");
  line.integer("--threads", o.threads, {1, kMostThreads}, "Threads");
  line.flag("--warm", o.bench.warm, "Leave weights and cache in the processor's caches between runs");
  line.group("Output");
  line.flag("--check", o.check, "Compare with the float64 oracle; exit code 1 outside the budget");
  line.output("--json", o.json, "Write everything as JSON, anew after each configuration");
  line.output("--csv", o.csv, "Write a row for each site as CSV, anew after each configuration");
  line.output("--dump", o.dump, "Write the step with all taps as a golden file (one configuration)");
  line.example("A layer at two lengths on the CPU, compared with the oracle",
               "cf-layer --preset pythia-160m --layer 0 --kv-len 128,512 --runs 5 --check");
  line.example("All layers on a GPU", "cf-layer --preset pythia-2.8b --whole-model --kv-len 2048 --device cuda");
  line.require_one("--model", "--preset");
  line.require_one("--layer", "--whole-model");
  line.require("--kv-len");
  line.needs("--dtype", "--preset");
  line.needs("--quant", "--preset");
  line.needs("--first-layers", "--whole-model");
  line.needs("--ablate", "--whole-model");
  line.needs("--gpu", "--plan");
  line.excludes("--dump", "--whole-model");
  line.check([&](Faults& faults) {
    check_together(o, line, faults);
    if (const auto backend = choose_backend(o.backend); !backend) faults.add(backend.status());
    if (line.given("--model") != line.given("--preset")) take_model(o, plan, faults);
  });
  if (const auto exit_code = line.parse(argc, argv)) return *exit_code;
  return run(o, plan, shell_command(argc, argv));
}

}  // namespace
}  // namespace cf::apps

int main(int argc, char** argv) {
  cf::checkpoint::guard_mapped_files();
  return cf::apps::run_main([&] { return cf::apps::run(argc, argv); });
}
