#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "apps/bench/device_model.hpp"
#include "apps/bench/step_plan.hpp"
#include "apps/cli/program.hpp"
#include "apps/cli/table.hpp"
#include "apps/model/commands.hpp"
#include "core/resources.hpp"
#include "cpu_ref/model.hpp"

namespace cf::apps {
namespace {

/// The most slots whose needs are within `free` bytes.
std::int64_t slots_that_fit(const std::function<double(std::int64_t)>& needs, double free) {
  std::int64_t fits = 0, above = 1;
  for (; above < (std::int64_t(1) << 30) && needs(above) <= free; above *= 2) fits = above;
  while (above - fits > 1) {
    const std::int64_t middle = fits + (above - fits) / 2;
    (needs(middle) <= free ? fits : above) = middle;
  }
  return fits;
}

/// What a model takes with so many slots of so many entries.
using Needs = std::function<Result<DeviceModelBytes>(std::int64_t slots, std::int64_t entries)>;

/// What each of some GPUs with so much memory takes of a model, and how many slots of so many entries fit; or why so
/// many GPUs cannot share it.
std::string on_each(const Needs& needs, std::int64_t entries, double memory) {
  const Result<DeviceModelBytes> one = needs(1, entries), twice = needs(2, entries);
  for (const Status& s : {one.status(), twice.status()})
    if (!s) return s.message();
  const std::int64_t slots = slots_that_fit([&](std::int64_t n) { return needs(n, entries)->total(); }, memory);
  const double slot = twice->cache - one->cache;
  return fmt::format("{} of weights, {:.1f} kB of cache a token, {} a slot, {} of activations: {}",
                     gigabytes(one->weights), slot * 1e-3 / double(entries), gigabytes(slot), gigabytes(one->workspace),
                     slots == 0 ? "does not fit" : fmt::format("{} slots fit", std::min(slots, kMaxSlots)));
}

/// The impls of a GPU's steps: "persistent for 1 to 8 slots, graph for 9 to 64".
Result<std::string> impls_by_slots(const std::function<Result<std::string>(std::int64_t)>& impl_of) {
  std::string text, current;
  std::int64_t first = 1;
  for (std::int64_t slots = 1; slots <= kMaxSlots + 1; ++slots) {
    std::string impl;
    if (slots <= kMaxSlots) {
      CF_TRY_ASSIGN(impl, impl_of(slots));
    }
    if (slots > 1 && impl != current) {
      const std::string range = first == slots - 1 ? std::to_string(first) : fmt::format("{} to {}", first, slots - 1);
      text += fmt::format("{}{} for {} slots", text.empty() ? "" : ", ", current, range);
      first = slots;
    }
    current = std::move(impl);
  }
  return text;
}

/// Prints the kernels of a token: those of the first layer, which are those of every layer, and those outside.
int print_plan(const ModelSpec& spec, const checkpoint::LoadedModel& outline, const std::string& name,
               const std::string& gpu, std::int64_t positions) {
  WeightFormat linears;
  for_each_linear(spec, outline.weights.layers.front(), [&](const Site&, const LinearParams& l, const LinearSize&) {
    if (const WeightFormat format = format_of(l.weight); format.bits) linears = format;
  });
  const std::int64_t entries = std::min<std::int64_t>(positions, 2048);
  const Result<std::string> text =
      step_plan_text(gpu, {.model = spec,
                           .dtype = outline.config.dtype,
                           .linears = linears,
                           .sizes = {.batch = 1, .q_len = 1, .table_rows = entries, .capacity = entries},
                           .ends = true});
  if (!text) return fail(text.status());
  fmt::print("{}, one token, a cache of {} entries, layer 0 of {} on {}\n{}", name, entries, spec.shape.num_layers, gpu,
             *text);
  return std::fflush(stdout) == 0 ? kOk : fail("standard output: cannot be written");
}

}  // namespace

Info::Info(CommandLine& line) {
  declare_model(line, model_, false);
  line.integer("--capacity", capacity_, {1, kMaxCapacity},
               "Cache entries of a slot, as many as the model has positions when left out");
  line.integer("--gpu-memory", gpu_memory_, {1, 1 << 20},
               "Memory in GB of a GPU that need not be there: says on how many like it the model fits");
  line.flag("--plan", plan_, "Print the kernels of a step of one token on a GPU, and why others are not used");
  line.choice("--gpu", gpu_, plan_gpus(), "The GPU of --plan, which need not be there");
  line.needs("--gpu", "--plan");
  for (const char* option : {"--capacity", "--gpu-memory"}) line.excludes("--plan", option);
  line.example("What a checkpoint takes", "cf-model info --model data/checkpoints/stdlib-4m");
  line.example("On how many GPUs of 140 GB a model fits",
               "cf-model info --preset llama-3.1-70b --gpu-memory 140 --capacity 8192");
}

int Info::run() {
  const Result<checkpoint::ModelSource> source = checkpoint::ModelSource::open(choice_of(model_));
  if (!source) return fail(source.status());
  const ModelConfig& m = source->config();
  Table table({"what", "value"});
  const auto add = [&](std::string what, std::string value) { table.add({std::move(what), std::move(value)}); };
  add("model", m.name);
  add("layers", std::to_string(m.num_hidden_layers));
  add("hidden_size", std::to_string(m.hidden_size));
  add("heads", fmt::format("{} of {}, {} turned by RoPE", checkpoint::heads_of(m), m.head_dim(), m.rotary_dim));
  add("intermediate_size", std::to_string(m.intermediate_size));
  add("vocab_size", fmt::format("{}{}", m.vocab_size, m.tie_word_embeddings ? ", tied" : ""));
  add("max_position_embeddings", std::to_string(m.max_position_embeddings));
  const auto full = std::ranges::count(m.full_layers, true);
  if (m.sliding_window)
    add("sliding_window", fmt::format("{} keys that a token sees{}", m.sliding_window,
                                      full ? fmt::format(", and all keys in {} layers", full) : ""));
  add("residual", m.use_parallel_residual ? "parallel" : "sequential");
  add("activation", std::string(to_string(m.hidden_act)));
  add("parameters", fmt::format("{:.3f} M", double(m.num_parameters()) * 1e-6));
  const Result<checkpoint::LoadedModel> outline = source->outline();
  if (!outline) return fail(outline.status());
  print_notes(outline->notes);
  const ModelSpec spec = m.spec();
  if (plan_) {
    const Result<ModelSpec> part = spec.of_rank(0, model_.gpus);
    if (!part) return fail(part.status());
    return print_plan(*part, *outline, m.name, gpu_, m.most_positions());
  }
  std::optional<DeviceTimer> device;
  if (model_.cuda()) {
    Result<DeviceTimer> created = DeviceTimer::create();
    if (!created) return fail(created.status());
    device = std::move(*created);
  }
  const auto plan = [&](std::int64_t slots, std::int64_t capacity, std::int64_t gpus) {
    return plan_device_model(
        *device, spec, outline->weights,
        {.slots = slots, .capacity = capacity, .gpus = gpus, .impl = model_.impl, .invariant = model_.invariant});
  };
  const auto on_gpus = [&](std::int64_t gpus) -> Needs {
    return [&, gpus](std::int64_t slots, std::int64_t capacity) {
      return device_model_bytes(spec, outline->weights,
                                {.slots = slots, .capacity = capacity, .gpus = gpus, .invariant = model_.invariant});
    };
  };
  const Needs on_host = [&](std::int64_t slots, std::int64_t capacity) -> Result<DeviceModelBytes> {
    const cpu_ref::ModelBytes b = cpu_ref::Model::bytes(spec, {.slots = slots, .capacity = capacity});
    return DeviceModelBytes{double(outline->bytes()), b.cache, b.workspace};
  };
  const Needs needs = device ? on_gpus(model_.gpus) : on_host;
  // A slot's capacity is what was asked for, else the model's number of positions.
  const std::int64_t entries = capacity_.value_or(m.most_positions());
  const Result<DeviceModelBytes> one = needs(1, entries), twice = needs(1, 2 * entries);
  for (const Status& s : {one.status(), twice.status()})
    if (!s) return fail(s);
  const DType activation = device ? outline->config.dtype : cpu_ref::Model::Options{}.activation;
  add("weights",
      fmt::format("{:.1f} MB, {}, {}", one->weights * 1e-6, to_string(outline->config.dtype), outline->description));
  add(fmt::format("cache, {}", to_string(activation)),
      fmt::format("{:.1f} kB a token, {:.1f} MB a slot of {}", (twice->cache - one->cache) * 1e-3 / double(entries),
                  one->cache * 1e-6, entries));
  add(fmt::format("activations, {}", to_string(activation)),
      fmt::format("{:.1f} MB for prompts in chunks of {}", one->workspace * 1e-6, model_.chunk_tokens()));
  double free = free_memory_bytes();
  if (device) {
    add("GPU", fmt::format("{}, {:.1f} MB", device->info().name, double(device->info().memory_bytes) * 1e-6));
    const Result<double> free_there = free_device_bytes(*device);
    if (!free_there) return fail(free_there.status());
    free = *free_there;
    const Result<std::string> impls = impls_by_slots([&](std::int64_t slots) -> Result<std::string> {
      CF_TRY_ASSIGN(const DeviceModelPlan p, plan(slots, entries, model_.gpus));
      return p.impl;
    });
    if (!impls) return fail(impls.status());
    add("impl", *impls);
    add("products of many tokens", product_library());
    const Result<DeviceModelPlan> of_one = plan(1, entries, model_.gpus);
    if (!of_one) return fail(of_one.status());
    add("a row's bits are the same", fmt::format("in steps of {} tokens", of_one->step_classes));
    add("in attention", fmt::format("in runs of {} tokens", of_one->run_classes));
    if (!model_.invariant) {
      add("in attention of the shortest runs",
          fmt::format("beside others, {} in all, in caches of {} entries", of_one->query_classes, entries));
      add("in the LM head", fmt::format("for {} rows whose logits are asked for", of_one->step_classes));
      if (impls->find("persistent") != impls->npos)
        add("in the persistent impl", "in steps without prompts; beside a prompt tokens go through the graph");
    }
  }
  add("free memory", fmt::format("{:.1f} MB", free * 1e-6));
  // What was planned for one slot can be planned for more.
  const std::int64_t slots = slots_that_fit([&](std::int64_t n) { return needs(n, entries)->total(); }, free);
  add(model_.gpus > 1 ? fmt::format("slots that fit on {} GPUs", model_.gpus) : "slots that fit",
      fmt::format("{} of {} entries", slots, entries));
  if (gpu_memory_)
    if (const Status known = on_gpus(1)(1, entries).status(); !known) return fail("--gpu-memory: " + known.message());
  const double gpu_memory = gpu_memory_ ? double(*gpu_memory_) * 1e9 : free;
  for (std::int64_t gpus = 1; (device || gpu_memory_) && gpus <= kMostGpus; gpus *= 2)
    add(gpus == 1 ? "on one GPU" : fmt::format("on each of {} GPUs", gpus),
        on_each(on_gpus(gpus), entries, gpu_memory));
  table.print(stdout);
  if (std::fflush(stdout) != 0) return fail("standard output: cannot be written");
  return kOk;
}

}  // namespace cf::apps
