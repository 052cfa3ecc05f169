#pragma once
// What the commands of cf-model share: the model that they run, and its prompts.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/bench/device_model.hpp"
#include "apps/bench/device_timer.hpp"
#include "apps/cli/options.hpp"
#include "apps/cli/program.hpp"
#include "apps/cli/quant.hpp"
#include "core/model/decoder.hpp"
#include "core/ranks/group.hpp"
#include "core/sampling.hpp"
#include "core/status.hpp"
#include "golden/checkpoint/model_source.hpp"
#include "golden/checkpoint/vocabulary.hpp"

namespace cf::apps {

/// kSlots: prompts that decode at once where nothing else is said.
inline constexpr std::int64_t kMaxSlots = 1024, kSlots = 64, kMaxCapacity = 1 << 20, kMostGpus = 8;

/// The options that choose a model and how it runs.
struct ModelOptions {
  checkpoint::ModelChoice choice;
  QuantOptions quant;
  std::string backend = "cpu", impl = "auto";
  std::optional<DType> activation;  // the CPU's; a GPU's is the weights' dtype
  std::int64_t threads = 1;
  std::optional<std::int64_t> chunk;
  // As cpu_ref::Model::Options and DecoderOptions have them.
  std::int64_t window = 0, sinks = 0;
  std::int64_t pages = 0, page_entries = 64;
  bool invariant = false;
  std::optional<std::int64_t> step_tokens;
  bool share_prefixes = false;

  std::int64_t gpus = 1;                 // that share the model
  std::shared_ptr<RankGroup> processes;  // those that share the model on the CPU; none without

  bool cuda() const { return backend == "cuda"; }
  /// Every chunk reads all weights. A larger one takes more memory for activations, and a stream's cache has room for one
  /// beside its window.
  std::int64_t chunk_tokens() const { return chunk.value_or(cuda() && window == 0 ? 2048 : 512); }
};

/// Declares --model, --preset, --dtype, --quant, --group, --weights-seed, and what declare_backend() declares.
void declare_model(CommandLine& line, ModelOptions& o, bool runs = true);

/// Declares --backend, --impl, --gpus and --invariant; with `runs` --activation, --chunk and --threads, too. Refuses
/// options of the other backend, and a backend that is not there.
void declare_backend(CommandLine& line, ModelOptions& o, bool runs = true);

/// Declares --window and --sinks, for which every sequence is a stream.
void declare_stream(CommandLine& line, ModelOptions& o);

/// Declares what many sequences at once are served by: --pages, --page-entries, --share-prefixes and --step-tokens.
void declare_serving(CommandLine& line, ModelOptions& o);

/// Declares the options of drawing, without the repetition penalty. The caller copies `top_k` into the sampling.
void declare_sampling(CommandLine& line, Sampling& sampling, std::int64_t& top_k);

/// The decoder's part of the options.
DecoderOptions decoder_options(const ModelOptions& o);

/// What the options say beside each other.
checkpoint::ModelChoice choice_of(const ModelOptions& o);

/// A model with what runs it. Its parts end in the order that they need.
struct RunningModel {
  checkpoint::LoadedModel loaded;       // on the CPU `model` reads these weights, on a GPU a copy of its own
  LayerOf layer_of;                     // makes the layers that `loaded` has no values of; none where it has all
  std::shared_ptr<DeviceTimer> device;  // null on the CPU
  std::string impl;                     // of a GPU's steps
  std::unique_ptr<ModelRunner> model;
};

/// Loads the model; its runner is made by start_model(). Prints the checkpoint's notes, and on a line of stderr that
/// positions go beyond max_position_embeddings. Of a preset that several GPUs share, the layers have no values unless the
/// weights are kept: `layer_of` makes them one by one, since the host may hold no more than one GPU. Refuses what
/// ModelSource::load() refuses, and so many slots and entries that the free memory does not hold them.
Result<RunningModel> load_for(const ModelOptions& o, std::int64_t slots, std::int64_t capacity, bool keep_weights);

/// Refuses a model on the CPU whose cache and activations the free memory does not hold.
Status check_host_memory(const ModelOptions& o, std::int64_t slots, std::int64_t capacity, const ModelConfig& config);

/// Makes the model's runner: takes memory for its cache and activations, on a GPU for its weights, too. The runner
/// that was there before is freed by its owner. Refuses what the runner's create() refuses.
Status start_model(const ModelOptions& o, std::int64_t slots, std::int64_t capacity, RunningModel& running);

/// Both of them. Where a GPU runs the model and `keep_weights` is false, the host's weights keep their shapes alone.
Result<RunningModel> open_model(const ModelOptions& o, std::int64_t slots, std::int64_t capacity, bool keep_weights);

/// The bytes of the model's cache.
Result<double> cache_bytes_of(const ModelOptions& o, std::int64_t slots, std::int64_t capacity,
                              const RunningModel& running);

/// The hardware that runs the model, in words: "2 threads of <CPU>", or the GPU's name.
std::string describe_machine(const ModelOptions& o, const RunningModel& running);

/// Adds the hardware that runs the model to a report, a JSON object.
template <class Json>
void add_machine(Json& report, const ModelOptions& o, const RunningModel& running, DType activation) {
  report["backend"] = o.backend;
  if (running.device) {
    add_device(report, running.device->info());
    report["impl"] = running.impl;
    if (o.gpus > 1) report["gpus"] = o.gpus;
  } else {
    report["cpu"] = cpu_name();
    report["threads"] = o.threads;
  }
  report["model"] = running.loaded.config.name;
  report["weights"] = running.loaded.description;
  report["activation_dtype"] = to_string(activation);
}

/// The prompts of --prompt-ids: "1,2,3", several separated by ";", or a .npy file of token ids whose rows are prompts.
Result<std::vector<std::vector<std::int32_t>>> parse_prompts(const std::string& text);

/// The ids of --stop: "0,2", or "none".
Status parse_stop(const std::string& text, std::vector<std::int32_t>& ids);

/// The vocabulary of a checkpoint's tokenizer.json, where there is one that this library reads. Says on stderr why ids
/// are printed where it does not.
std::optional<checkpoint::Vocabulary> vocabulary_of(const std::string& directory);

}  // namespace cf::apps
