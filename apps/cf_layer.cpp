// cf-layer: times one layer of a GPT-NeoX model, site by site, and checks it.
#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <new>

#include "apps/common.hpp"
#include "apps/device_bench.hpp"
#include "apps/golden_walk.hpp"
#include "apps/layer_bench.hpp"
#include "apps/layer_report.hpp"
#include "apps/sweep.hpp"
#include "core/procedural.hpp"
#include "golden/checkpoint.hpp"
#include "golden/hf_config.hpp"

namespace cf::apps {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxThreads = 1024, kMaxBatch = 4096, kMaxRuns = 1'000'000, kMaxGroup = 1 << 22;

struct Options {
  std::string model, preset, dtype, quant, layers, stack_layers, seq_lens, backend = "cpu", json, csv, dump;
  std::optional<std::int64_t> group;  // with quant
  std::uint64_t seed = 0;
  std::int64_t batch = 1, threads = omp_get_max_threads();
  BenchOptions bench;
  DeviceOptions device;
  bool check = false, stack = false, ablate = false;
};

/// Where layers come from. One at a time is in memory: a checkpoint is opened anew for each and unmapped with it.
class Source {
 public:
  static Result<Source> open(const Options& o) {
    if (o.model.empty() == o.preset.empty())
      return Status::error(Code::invalid_argument, std::string("expected one of --model and --preset, got ") +
                                                       (o.model.empty() ? "none" : "both"));
    if (o.model.empty()) {
      Result<ModelConfig> preset = find_preset(o.preset);
      if (!preset) return preset.status();
      if (!o.dtype.empty())
        preset->dtype = o.dtype == "f16" ? DType::f16 : o.dtype == "bf16" ? DType::bf16 : DType::f32;
      WeightFormat linears;
      if (!o.quant.empty()) linears = {.bits = 4, .group_size = o.group.value_or(128)};
      return Source(o, std::move(*preset), linears);
    }
    if (!o.quant.empty())
      return Status::error(Code::invalid_argument,
                           fmt::format("--quant {}: expected with --preset; a checkpoint has its own", o.quant));
    if (!o.dtype.empty())
      return Status::error(Code::invalid_argument,
                           fmt::format("--dtype {}: expected with --preset; a checkpoint has its own", o.dtype));
    const Result<golden::Checkpoint> checkpoint = golden::Checkpoint::open(o.model);
    if (!checkpoint) return checkpoint.status();
    const auto& gptq = checkpoint->gptq();
    return Source(o, checkpoint->config(), gptq ? WeightFormat{gptq->bits, gptq->group_size} : WeightFormat{});
  }

  const ModelConfig& config() const { return config_; }
  bool is_checkpoint() const { return !directory_.empty(); }
  /// What the weights are, for the report.
  std::string description() const {
    const std::string format = linears_.bits == 0 ? ""
                               : linears_.group_size == -1
                                   ? fmt::format("GPTQ of {} bits, one group", linears_.bits)
                                   : fmt::format("GPTQ of {} bits, group {}", linears_.bits, linears_.group_size);
    if (is_checkpoint()) return "checkpoint " + directory_ + (format.empty() ? "" : ", " + format);
    return fmt::format("procedural {}, seed {}", format.empty() ? "weights" : format, seed_);
  }
  const std::string& directory() const { return directory_; }

  Result<golden::GoldenWeights> load(std::int64_t layer) const {
    if (!is_checkpoint()) {
      auto owned = std::make_shared<OwnedLayerWeights>(procedural_layer(config_, layer, seed_, linears_));
      return golden::GoldenWeights{owned->weights, config_.dtype, owned};
    }
    Result<golden::Checkpoint> checkpoint = golden::Checkpoint::open(directory_);
    if (!checkpoint) return checkpoint.status();
    Result<golden::CheckpointLayer> loaded = checkpoint->layer(layer);
    if (!loaded) return loaded.status();
    auto owned = std::make_shared<golden::CheckpointLayer>(std::move(*loaded));
    return golden::GoldenWeights{owned->weights, owned->dtype, owned, owned->notes};
  }

 private:
  Source(const Options& o, ModelConfig config, WeightFormat linears)
      : directory_(o.model), seed_(o.seed), config_(std::move(config)), linears_(linears) {}

  std::string directory_;
  std::uint64_t seed_;
  ModelConfig config_;
  WeightFormat linears_;
};

/// What the options ask for, all of it looked at before any work.
struct Plan {
  Source source;
  std::vector<std::int64_t> layers, stack_layers, seq_lens;  // stack_layers: empty for all
  std::optional<DeviceDescription> device{};                 // with --backend cuda
  std::vector<std::string> notes{};                          // of the checkpoint
};

/// Refuses a step that this machine's memory cannot hold.
Status check_memory(const Source& source, const Options& o, std::int64_t longest) {
  const ModelConfig& m = source.config();
  // The cache and, several times over, a token's activations; the oracle holds them once more in float64.
  const double elements = double(o.batch) * (2 * double(longest) * double(m.hidden_size) + 12 * double(m.hidden_size) +
                                             double(m.intermediate_size));
  const double weights = source.is_checkpoint() ? 0 : double(m.layer_parameters()) * double(size_bytes(m.dtype));
  const double needed = elements * double(size_bytes(kActivation) + (o.check ? size_bytes(DType::f64) : 0)) + weights;
  const double memory = double(::sysconf(_SC_PHYS_PAGES)) * double(::sysconf(_SC_PAGE_SIZE));
  if (needed <= memory) return {};
  return Status::error(Code::out_of_memory,
                       fmt::format("--batch {} with --seq-len {}: needs {:.1f} GB of memory, expected at most this "
                                   "machine's {:.1f} GB",
                                   o.batch, longest, needed * 1e-9, memory * 1e-9));
}

/// Refuses options that one backend has and the other was asked for.
Status check_backend_options(const Options& o, Backend backend) {
  const bool cuda = backend == Backend::cuda;
  const auto refuse = [&](const char* option, const char* why) {
    return Status::error(Code::invalid_argument, fmt::format("{}: {}", option, why));
  };
  if (!cuda && o.stack) return refuse("--stack", "expected with --backend cuda");
  if (o.ablate && !o.stack) return refuse("--ablate", "expected with --stack");
  if (!cuda && !o.device.impls.empty()) return refuse("--impl", "expected with --backend cuda");
  if (!cuda && !o.device.arch_plan.empty()) return refuse("--arch-plan", "expected with --backend cuda");
  if (cuda && !o.dump.empty()) return refuse("--dump", "expected with --backend cpu");
  if (!o.quant.empty() && !o.dump.empty()) return refuse("--dump", "excludes --quant: golden files hold dense weights");
  if (o.quant.empty() && o.group) return refuse("--group", "expected with --quant");
  if (o.group && *o.group != -1 && (*o.group < 1 || *o.group > kMaxGroup))
    return refuse("--group", fmt::format("expected -1 or 1 to {}, got {}", kMaxGroup, *o.group).c_str());
  if (o.stack && !o.layers.empty()) return refuse("--layer", "excludes --stack, which times all layers");
  if (!o.stack && !o.stack_layers.empty()) return refuse("--stack-layers", "expected with --stack");
  if (!o.stack && o.layers.empty())
    return Status::error(Code::invalid_argument, "--layer is required, or --stack for all layers");
  return {};
}

Result<Plan> make_plan(const Options& o) {
  const Result<Backend> backend = choose_backend(o.backend);
  if (!backend) return backend.status();
  CF_TRY(check_backend_options(o, *backend));
  std::optional<DeviceDescription> device;
  if (*backend == Backend::cuda) {
    Result<DeviceDescription> described = describe_device(o.device);
    if (!described) return described.status();
    device = std::move(*described);
  }
  const auto bounded = [](const char* option, std::int64_t value, std::int64_t lowest, std::int64_t highest) {
    return check_bounds(option, value, {lowest, highest, fmt::format("expected {} to {}", lowest, highest)});
  };
  CF_TRY(bounded("--threads", o.threads, 1, kMaxThreads));
  CF_TRY(bounded("--batch", o.batch, 1, kMaxBatch));
  CF_TRY(bounded("--runs", o.bench.runs, 1, kMaxRuns));
  CF_TRY(bounded("--warmup", o.bench.warmup, 0, kMaxRuns));
  Result<Source> source = Source::open(o);
  if (!source) return source.status();

  const ModelConfig& m = source->config();
  const auto sweep = [&](const char* option, const std::string& text, std::int64_t lowest, std::int64_t highest,
                         const char* what) {
    return parse_sweep(option, text,
                       {lowest, highest, fmt::format("{} has {} {} to {}", m.name, what, lowest, highest)});
  };
  Result<std::vector<std::int64_t>> layers =
      sweep("--layer", o.stack ? "0" : o.layers, 0, m.num_hidden_layers - 1, "layers");
  if (!layers) return layers.status();
  std::vector<std::int64_t> stack_layers;
  if (!o.stack_layers.empty()) {
    Result<std::vector<std::int64_t>> counts =
        sweep("--stack-layers", o.stack_layers, 1, m.num_hidden_layers, "stacks of");
    if (!counts) return counts.status();
    stack_layers = std::move(*counts);
  }
  Result<std::vector<std::int64_t>> seq_lens =
      sweep("--seq-len", o.seq_lens, 1, m.max_position_embeddings, "sequence lengths");
  if (!seq_lens) return seq_lens.status();
  CF_TRY(check_memory(*source, o, *std::max_element(seq_lens->begin(), seq_lens->end())));

  if (const std::size_t count = layers->size() * seq_lens->size(); !o.dump.empty() && count != 1)
    return Status::error(
        Code::invalid_argument,
        fmt::format("--dump {}: expected one configuration, got {} from --layer and --seq-len", o.dump, count));
  for (const std::string& file : {o.json, o.csv, o.dump})
    if (!file.empty()) CF_TRY(check_writable(file));
  // A fault in the last layer shows before the first is timed.
  std::vector<std::string> notes;
  if (source->is_checkpoint())
    for (std::int64_t layer : *layers) {
      const auto loaded = source->load(layer);
      if (!loaded) return loaded.status();
      notes.insert(notes.end(), loaded->notes.begin(), loaded->notes.end());
    }
  return Plan{std::move(*source),   std::move(*layers), std::move(stack_layers),
              std::move(*seq_lens), std::move(device),  std::move(notes)};
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name"))
      if (const std::size_t colon = line.find(": "); colon != line.npos) return line.substr(colon + 2);
  return "unknown CPU";
}

/// The checkpoint's directory as seen from the dump's.
std::string relative_checkpoint(const std::string& directory, const std::string& dump) {
  std::error_code none;
  const fs::path from = fs::absolute(dump, none).parent_path();
  return fs::relative(directory, from, none).string();
}

Status write_dump(const Options& o, const Source& source, const RunInfo& run, const LayerReport& report,
                  const golden::GoldenWeights& weights, LayerState& state) {
  golden::GoldenMeta meta;
  meta.producer = fmt::format("cf-layer {}", run.version);
  meta.command = run.command;
  meta.versions = fmt::format(R"({{"cf": "{}", "commit": "{}"}})", run.version, run.commit);
  meta.model = source.config().name;
  meta.config = source.config();
  meta.config.dtype = weights.dtype;
  meta.config_json = golden::to_hf_json(meta.config);
  meta.layer = report.layer;
  meta.dtype = weights.dtype;
  meta.seed = o.seed;
  meta.load = report.load;
  meta.kv_len.assign(std::size_t(report.load.batch), std::int32_t(report.load.kv_len));
  meta.weights = source.is_checkpoint() ? "checkpoint" : "procedural";
  meta.weights_checksum = report.weights_checksum;
  if (source.is_checkpoint()) meta.weights_checkpoint = relative_checkpoint(source.directory(), o.dump);
  return dump_layer(o.dump, std::move(meta), run.cpu, weights.weights, state);
}

/// Times, checks and dumps one configuration; `label` heads its progress bar.
Result<LayerReport> measure(const Options& o, const Source& source, const RunInfo& run, LayerReport report,
                            const golden::GoldenWeights& weights, const std::string& label) {
  const ModelConfig& m = source.config();
  Progress progress(label, o.bench.warmup + o.bench.runs + (o.check ? 1 : 0));
  LayerState state(m, report.load, kActivation);
  fill_inputs(m, report.load, o.seed, weights.dtype, state);
  std::int64_t done = 0;
  Result<LayerTiming> timing = time_layer(m, weights.weights, state, o.bench, [&] { progress.set(++done); });
  if (!timing) return timing.status();
  report.timing = std::move(*timing);
  if (o.check) {
    LayerState oracle(m, report.load, DType::f64);
    fill_inputs(m, report.load, o.seed, weights.dtype, oracle);
    Result<LayerCheck> check = check_layer(m, weights.weights, state.output, {kActivation, kActivation}, oracle);
    if (!check) return check.status();
    report.check = std::move(*check);
  }
  if (!o.dump.empty()) CF_TRY(write_dump(o, source, run, report, weights, state));
  return report;
}

/// The command that runs this one configuration's check again.
std::string reproduce_line(const Options& o, const LayerReport& r) {
  std::vector<std::string> words{"cf-layer"};
  const auto add = [&](const char* option, std::string value) {
    words.insert(words.end(), {option, std::move(value)});
  };
  o.model.empty() ? add("--preset", o.preset) : add("--model", o.model);
  if (!o.dtype.empty()) add("--dtype", o.dtype);
  if (!o.quant.empty()) add("--quant", o.quant);
  if (o.group) add("--group", std::to_string(*o.group));
  add("--seed", std::to_string(o.seed));
  add("--layer", std::to_string(r.layer));
  add("--seq-len", std::to_string(r.load.kv_len));
  add("--batch", std::to_string(r.load.batch));
  if (r.device) {
    add("--backend", o.backend);
    add("--impl", r.device->impl);
    if (!o.device.arch_plan.empty()) add("--arch-plan", o.device.arch_plan);
  } else {
    add("--threads", std::to_string(o.threads));
  }
  words.push_back("--check");
  return shell_command(words);
}

/// Measures all configurations on the CPU, one after the other, with one layer in memory at a time.
Status measure_on_cpu(const Options& o, const Plan& plan, const RunInfo& info,
                      const std::function<void(LayerReport)>& report) {
  const Source& source = plan.source;
  const std::size_t count = plan.layers.size() * plan.seq_lens.size();
  std::size_t place = 0;
  for (std::int64_t layer : plan.layers) {
    std::optional<Progress> loading(std::in_place, fmt::format("loading layer {}", layer), 1);
    const Result<golden::GoldenWeights> weights = source.load(layer);
    if (!weights) return weights.status();
    const std::uint64_t checksum = weights_checksum(source.config(), weights->weights);
    loading.reset();
    for (std::int64_t seq_len : plan.seq_lens) {
      const LayerReport todo{.layer = layer,
                             .load = {.batch = o.batch, .kv_len = seq_len},
                             .weights_dtype = weights->dtype,
                             .weights_checksum = checksum,
                             .timing = {},
                             .check = {},
                             .device = {}};
      const std::string label = fmt::format("layer {}, seq_len {} ({} of {})", layer, seq_len, ++place, count);
      Result<LayerReport> measured = measure(o, source, info, todo, *weights, label);
      if (!measured) return measured.status();
      report(std::move(*measured));
    }
  }
  return {};
}

/// The same on a GPU, each layer among as many others as keep it cold.
Status measure_on_device(const Options& o, const Plan& plan, const RunInfo& info,
                         const std::function<void(LayerReport)>& report,
                         const std::function<void(AblationReport)>& ablation) {
  DeviceBenchRequest request{.config = plan.source.config(),
                             .load = [&](std::int64_t layer) { return plan.source.load(layer); },
                             .stack = o.stack,
                             .stack_layers = plan.stack_layers,
                             .seq_lens = plan.seq_lens,
                             .batch = o.batch,
                             .seed = o.seed,
                             .bench = o.bench,
                             .check = o.check,
                             .ablate = o.ablate,
                             .device = o.device};
  request.config.dtype = info.activation;
  for (std::int64_t layer : plan.layers) {
    request.layer = layer;
    CF_TRY(bench_on_device(request, report, ablation));
  }
  return {};
}

/// The dtype of the activations: on a GPU that of the stored weights.
Result<DType> activation_dtype(const Plan& plan) {
  if (!plan.device) return kActivation;
  if (!plan.source.is_checkpoint()) return plan.source.config().dtype;
  const Result<golden::GoldenWeights> weights = plan.source.load(plan.layers.front());
  if (!weights) return weights.status();
  return weights->dtype;
}

int run(const Options& o, const std::string& command) {
  const Result<Plan> plan = make_plan(o);
  if (!plan) return fail(plan.status());
  const Result<DType> activation = activation_dtype(*plan);
  if (!activation) return fail(activation.status());
  print_notes(plan->notes);
  const Source& source = plan->source;
  omp_set_num_threads(int(o.threads));
  RunInfo info{.version = CF_VERSION,
               .commit = std::string(commit()),
               .command = command,
               .cpu = cpu_name(),
               .backend = o.backend,
               .model = source.config().name,
               .weights = source.description(),
               .threads = o.threads,
               .seed = o.seed,
               .activation = *activation,
               .bench = o.bench,
               .device = {},
               .launch_plan = {}};
  if (plan->device) {
    info.device = plan->device->info;
    info.launch_plan = plan->device->launch_plan;
  }
  print_header(stdout, info);

  std::vector<LayerReport> reports;
  std::vector<AblationReport> ablations;
  bool ok = true;
  const auto add = [&](LayerReport report) {
    print_report(stdout, info, report);
    if (report.check && !report.check->ok()) {
      ok = false;
      fmt::print("reproduce: {}\n", reproduce_line(o, report));
    }
    std::fflush(stdout);
    reports.push_back(std::move(report));
  };
  const auto add_ablation = [&](AblationReport report) {
    print_ablation(stdout, report);
    ok = ok && report.ok();
    std::fflush(stdout);
    ablations.push_back(std::move(report));
  };
  if (const Status s =
          plan->device ? measure_on_device(o, *plan, info, add, add_ablation) : measure_on_cpu(o, *plan, info, add);
      !s)
    return fail(s);
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) return fail("standard output: cannot be written");
  if (!o.json.empty())
    if (const Status s = write_file_atomically(o.json, report_json(info, reports, ablations)); !s) return fail(s);
  if (!o.csv.empty())
    if (const Status s = write_file_atomically(o.csv, report_csv(info, reports)); !s) return fail(s);
  return ok ? kOk : kComparisonFailed;
}

int run(int argc, const char* const* argv) {
  Options o;
  CLI::App app("Times one layer of a GPT-NeoX model, site by site, beside a plain read of its weights, and checks it.");
  app.add_option("--model", o.model, "Checkpoint directory: config.json and safetensors");
  app.add_option("--preset", o.preset, "Model of the Pythia suite with procedural weights, such as pythia-2.8b");
  // CLI11 2.1 wraps a negative number around.
  app.add_option("--seed", o.seed, "Seed of procedural weights and activations")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--dtype", o.dtype, "Stored dtype of a preset's weights; f16 when left out")
      ->check(CLI::IsMember({"f16", "bf16", "f32"}));
  app.add_option("--quant", o.quant, "Quantise a preset's Linears: gptq, of 4 bits")->check(CLI::IsMember({"gptq"}));
  app.add_option("--group", o.group, "Inputs that share a scale with --quant, -1 for all; 128 when left out");
  app.add_option("--layer", o.layers, "Layers: numbers and ranges, such as 0-3,7");
  app.add_flag("--stack", o.stack, "All layers back to back (cuda)");
  app.add_flag("--ablate", o.ablate, "Also with parts of the persistent kernel's design another way (cuda, --stack)");
  app.add_option(
      "--stack-layers", o.stack_layers,
      "With --stack, so many layers from the first on in place of all: numbers and ranges, such as 1,2,4,8-32");
  app.add_option("--seq-len", o.seq_lens,
                 "Valid cache entries after the new token is appended: numbers and ranges, such as 128,512,2048")
      ->required();
  app.add_option("--batch", o.batch, "Sequences, one new token each")->capture_default_str();
  app.add_option("--backend", o.backend, "cpu or cuda")->capture_default_str();
  app.add_option(
      "--impl", o.device.impls,
      "How a step is launched: a list of unfused, graph, split, fused and stack (cuda); graph when left out");
  app.add_option("--arch-plan", o.device.arch_plan, "Launch plans of another GPU: sm_90 or sm_120 (cuda)");
  app.add_option("--runs", o.bench.runs, "Timed runs")->capture_default_str();
  app.add_option("--warmup", o.bench.warmup, "Runs before the timed ones")->capture_default_str();
  app.add_option("--threads", o.threads, "Threads")->capture_default_str();
  app.add_flag("--warm", o.bench.warm, "Leave weights and cache in the processor's caches between runs");
  app.add_flag("--check", o.check, "Compare with the float64 oracle; exit code 1 outside the budget");
  app.add_option("--json", o.json, "Write everything as JSON");
  app.add_option("--csv", o.csv, "Write a row a site as CSV");
  app.add_option("--dump", o.dump, "Write the step with all taps as a golden file (one configuration)");
  app.set_version_flag("--version", std::string("cf-layer ") + CF_VERSION);
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
