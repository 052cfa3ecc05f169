#include "apps/model/common.hpp"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>
#include <utility>

#include "apps/cli/program.hpp"
#include "apps/cli/terminal.hpp"
#include "apps/verify/golden_walk.hpp"
#include "core/resources.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/model.hpp"
#include "golden/checkpoint/token_file.hpp"

namespace cf::apps {
namespace {

/// What the options of the CPU's models and of a GPU's have alike.
template <class Options>
Options with_cache(Options options, const ModelOptions& o, std::int64_t slots, std::int64_t capacity) {
  options.slots = slots;
  options.capacity = capacity;
  options.chunk = o.chunk_tokens();
  options.invariant = o.invariant;
  if constexpr (requires { options.gpus; }) options.gpus = o.gpus;
  options.window = o.window;
  options.sinks = o.sinks;
  options.pages = o.pages;
  options.page_entries = o.page_entries;
  return options;
}

cpu_ref::Model::Options cpu_options(const ModelOptions& o, std::int64_t slots, std::int64_t capacity) {
  return with_cache(cpu_ref::Model::Options{.activation = o.activation.value_or(DType::f32), .group = o.processes}, o,
                    slots, capacity);
}

/// Gives a preset's model the weights outside its layers, and what makes those of a layer.
void make_layers_later(const checkpoint::ModelChoice& choice, const ModelConfig& config, RunningModel& running) {
  auto outer =
      std::make_shared<OwnedModelWeights>(procedural_outer(config.spec(), config.dtype, choice.seed, choice.linears));
  running.loaded.weights = outer->weights;
  running.loaded.owner = std::move(outer);
  const int threads = omp_get_max_threads();
  running.layer_of = [config, choice, threads](std::int64_t layer) -> Result<OwnedLayerWeights> {
    return procedural_layer(config.spec(), config.dtype, layer, choice.seed, choice.linears, threads);
  };
}

DeviceModelOptions device_options(const ModelOptions& o, std::int64_t slots, std::int64_t capacity) {
  return with_cache(DeviceModelOptions{.impl = o.impl}, o, slots, capacity);
}

}  // namespace

void declare_model(CommandLine& line, ModelOptions& o, bool runs) {
  line.group("Model");
  line.text("--model", o.choice.directory, "Checkpoint directory: config.json and safetensors", "DIR");
  line.reads("--model");
  line.text("--preset", o.choice.preset, "Model with procedural weights", "NAME", checkpoint::preset_names());
  line.dtype("--dtype", o.choice.dtype, {DType::f16, DType::bf16, DType::f32},
             "Stored dtype of a preset's weights, the preset's own when left out");
  declare_quant(line, o.quant, "a preset's Linears");
  line.seed("--weights-seed", o.choice.seed, "Seed of a preset's weights");
  line.require_one("--model", "--preset");
  line.needs("--dtype", "--preset");
  line.needs("--quant", "--preset");
  line.needs("--weights-seed", "--preset");
  declare_backend(line, o, runs);
}

void declare_backend(CommandLine& line, ModelOptions& o, bool runs) {
  constexpr std::int64_t most_chunk = 1 << 20;
  o.threads = omp_get_max_threads();
  line.group("Backend");
  line.choice("--backend,--device", o.backend, {"cpu", "cuda"}, "What runs the model");
  line.choice("--impl", o.impl, {"auto", "unfused", "graph", "split", "layer", "persistent"},
              "How a step of all slots is launched, auto for the fastest that takes it (cuda)");
  line.integer("--gpus", o.gpus, {1, kMostGpus},
               "GPUs that share the model, the first ones: each holds a part of every layer (cuda)");
  line.flag("--invariant", o.invariant,
            "Give a token the same bits whatever else is in its step: its chunk, its neighbours, the number of slots");
  line.check([&line, &o](Faults& faults) {
    for (const char* option : {"--activation", "--threads"})
      if (o.cuda() && line.given(option)) faults.add(fmt::format("{}: expected with --backend cpu", option));
    if (!o.cuda() && line.given("--impl")) faults.add("--impl: expected with --backend cuda");
    if (!o.cuda() && line.given("--gpus") && !line.given("--plan")) faults.add("--gpus: expected with --backend cuda");
    if (o.cuda() && o.gpus > 1 && o.gpus > gpu_count())
      faults.add(fmt::format("--gpus: expected at most the {} of this machine, got {}", gpu_count(), o.gpus));
    if (const auto backend = choose_backend(o.backend); !backend) faults.add(backend.status());
  });
  if (!runs) return;
  line.dtype("--activation", o.activation, {DType::f32, DType::f64},
             "Activations, float32 when left out; float64 is the oracle (cpu)");
  line.integer(
      "--chunk", o.chunk, {1, most_chunk},
      "Tokens of a prompt that go through the model at once, 512 when left out, on a GPU 2048 but for streams");
  line.integer("--threads", o.threads, {1, kMostThreads}, "Threads (cpu)");
}

void declare_stream(CommandLine& line, ModelOptions& o) {
  line.integer("--window", o.window, {1, kMaxCapacity},
               "Make each sequence a stream without end: a token sees the newest N tokens, its own among them, and the "
               "sinks");
  line.integer("--sinks", o.sinks, {0, kMaxCapacity}, "The first N tokens of a stream, which every token sees");
}

void declare_serving(CommandLine& line, ModelOptions& o) {
  constexpr std::int64_t most = (std::int64_t(1) << 31) - 1;
  line.group("Serving");
  line.integer(
      "--pages", o.pages, {1, most},
      "Hold all sequences in a pool of N pages, of which each takes what it needs; when left out each slot has "
      "memory of its own");
  line.integer("--page-entries", o.page_entries, {1, most}, "Cache entries of a page, 64 when left out");
  line.flag("--share-prefixes", o.share_prefixes, "Prompts that begin alike share pages, and are read once that far");
  line.integer("--step-tokens", o.step_tokens, {0, kMaxCapacity},
               "Tokens of a step: those of all running sequences, and pieces of prompts beside them; 0 reads each "
               "prompt whole");
  line.needs("--page-entries", "--pages");
  line.needs("--share-prefixes", "--pages");
}

void declare_sampling(CommandLine& line, Sampling& sampling, std::int64_t& top_k) {
  line.group("Sampling");
  line.number("--temperature", sampling.temperature, "0 for the most likely token");
  line.integer("--top-k", top_k, {0, std::numeric_limits<int>::max()}, "Keep so many tokens, 0 for all");
  line.number("--top-p", sampling.top_p, "Keep the fewest tokens whose probabilities reach this sum");
  line.number("--min-p", sampling.min_p, "Keep tokens of at least this share of the largest probability");
  line.seed("--seed", sampling.seed, "Seed of the draws; a prompt's place decides besides");
}

DecoderOptions decoder_options(const ModelOptions& o) {
  return {.step_tokens = o.step_tokens, .share_prefixes = o.share_prefixes};
}

checkpoint::ModelChoice choice_of(const ModelOptions& o) {
  checkpoint::ModelChoice choice = o.choice;
  choice.linears = o.quant.format();
  return choice;
}

Result<RunningModel> load_for(const ModelOptions& o, std::int64_t slots, std::int64_t capacity, bool keep_weights) {
  CF_TRY(cpu_ref::start_threads("--threads, or OMP_NUM_THREADS", o.threads));
  RunningModel running;
  // Before the weights are loaded, which may take long.
  CF_TRY_ASSIGN(const checkpoint::ModelSource source, checkpoint::ModelSource::open(choice_of(o)));
  const ModelConfig& config = source.config();
  if (o.cuda()) {
    CF_TRY_ASSIGN(DeviceTimer device, DeviceTimer::create());
    running.device = std::make_shared<DeviceTimer>(std::move(device));
  } else {
    CF_TRY(check_host_memory(o, slots, capacity, config));
  }
  CF_TRY_ASSIGN(running.loaded, source.outline());
  if (running.device) {
    CF_TRY(check_device_memory(*running.device, config.name, config.spec(), running.loaded.weights,
                               device_options(o, slots, capacity)));
  } else {
    const auto needed = double(running.loaded.bytes());
    CF_TRY(check_total_memory(needed, config.name + ": the weights need " + gigabytes(needed)));
  }
  if (o.gpus > 1 && !source.is_checkpoint() && !keep_weights) {
    make_layers_later(choice_of(o), config, running);
  } else {
    std::optional<Progress> progress;
    CF_TRY(source.fill(running.loaded, [&](std::int64_t made_bytes, std::int64_t all_bytes) {
      if (!progress)
        progress.emplace((source.is_checkpoint() ? "reading " : "making the weights of ") + config.name, all_bytes);
      progress->set(made_bytes);
      return Status();
    }));
  }
  print_notes(running.loaded.notes);
  if (o.window == 0 && capacity > config.max_position_embeddings)
    say(fmt::format("positions beyond max_position_embeddings {} are used as Hugging Face does, up to {}",
                    config.max_position_embeddings, capacity));
  return running;
}

Status check_host_memory(const ModelOptions& o, std::int64_t slots, std::int64_t capacity, const ModelConfig& config) {
  return cpu_ref::Model::check_memory(config.name, config, cpu_options(o, slots, capacity));
}

Status start_model(const ModelOptions& o, std::int64_t slots, std::int64_t capacity, RunningModel& running) {
  const checkpoint::LoadedModel& l = running.loaded;
  if (running.device) {
    CF_TRY_ASSIGN(DeviceModel made, open_device_model(*running.device, l.config.name, l.config.spec(), l.weights,
                                                      device_options(o, slots, capacity), running.layer_of));
    running.model = std::move(made.runner);
    running.impl = std::move(made.impl);
    return l.check_files();
  }
  CF_TRY_ASSIGN(running.model, cpu_ref::Model::create(l.config, l.weights, l.owner, cpu_options(o, slots, capacity)));
  return {};
}

Result<RunningModel> open_model(const ModelOptions& o, std::int64_t slots, std::int64_t capacity, bool keep_weights) {
  CF_TRY_ASSIGN(RunningModel running, load_for(o, slots, capacity, keep_weights));
  CF_TRY(start_model(o, slots, capacity, running));
  if (running.device && !keep_weights) running.loaded.drop_values();
  return running;
}

Result<double> cache_bytes_of(const ModelOptions& o, std::int64_t slots, std::int64_t capacity,
                              const RunningModel& running) {
  const checkpoint::LoadedModel& l = running.loaded;
  if (!running.device) return cpu_ref::Model::bytes(l.config, cpu_options(o, slots, capacity)).cache;
  CF_TRY_ASSIGN(const DeviceModelPlan plan,
                plan_device_model(*running.device, l.config.spec(), l.weights, device_options(o, slots, capacity)));
  return plan.bytes.cache;
}

std::string describe_machine(const ModelOptions& o, const RunningModel& running) {
  if (running.device) return (o.gpus > 1 ? fmt::format("{} x ", o.gpus) : "") + running.device->info().name;
  return fmt::format("{} threads of {}", o.threads, cpu_name());
}

Result<std::vector<std::vector<std::int32_t>>> parse_prompts(const std::string& text) {
  std::vector<std::vector<std::int32_t>> prompts;
  if (text.ends_with(".npy")) {
    CF_TRY_ASSIGN(const checkpoint::TokenFile file, checkpoint::read_token_file(text));
    const std::int64_t length = file.shape.back();
    for (auto row = file.ids.begin(); row != file.ids.end(); row += length) prompts.emplace_back(row, row + length);
    return prompts;
  }
  const auto refused = [&](std::string_view part) {
    return Status::error(
        Code::invalid_argument,
        fmt::format("--prompt-ids: expected ids such as 1,2,3, prompts separated by \";\", or a .npy file, "
                    "got '{}'",
                    part));
  };
  std::string_view rest = text;
  while (true) {
    const std::string_view prompt = rest.substr(0, rest.find(';'));
    std::vector<std::int32_t> ids;
    for (std::string_view left = prompt;;) {
      const std::string_view id = left.substr(0, left.find(','));
      const auto number = parse_integer<std::int32_t>(id);
      if (!number) return refused(id);
      ids.push_back(*number);
      if (id.size() == left.size()) break;
      left.remove_prefix(id.size() + 1);
    }
    prompts.push_back(std::move(ids));
    if (prompt.size() == rest.size()) return prompts;
    rest.remove_prefix(prompt.size() + 1);
  }
}

Status parse_stop(const std::string& text, std::vector<std::int32_t>& ids) {
  ids.clear();
  if (text == "none") return {};
  Result<std::vector<std::vector<std::int32_t>>> parsed = parse_prompts(text);
  if (!parsed || parsed->size() != 1)
    return Status::error(Code::invalid_argument,
                         fmt::format("--stop: expected ids such as 0,2, or none, got '{}'", text));
  ids = std::move(parsed->front());
  return {};
}

std::optional<checkpoint::Vocabulary> vocabulary_of(const std::string& directory) {
  const std::string path = directory + "/tokenizer.json";
  if (directory.empty() || !std::filesystem::exists(path)) return std::nullopt;
  Result<checkpoint::Vocabulary> read = checkpoint::Vocabulary::open(path);
  if (read) return std::move(*read);
  // Ids do as well: a tokenizer of another kind is no reason to refuse the model.
  say("ids are printed: " + read.status().message());
  return std::nullopt;
}

}  // namespace cf::apps
