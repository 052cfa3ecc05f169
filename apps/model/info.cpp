#include <fmt/format.h>

#include <algorithm>

#include "apps/cli/program.hpp"
#include "apps/cli/table.hpp"
#include "apps/model/commands.hpp"

namespace cf::apps {

Info::Info(CommandLine& line) { declare_model(line, model_, false); }

int Info::run() {
  const ModelChoice choice = choice_of(model_);
  const Result<ModelConfig> opened = config_of(choice);
  if (!opened) return fail(opened.status());
  const ModelConfig& m = *opened;
  Table table({"what", "value"});
  const auto add = [&](std::string what, std::string value) { table.add({std::move(what), std::move(value)}); };
  add("model", m.name);
  add("layers", std::to_string(m.num_hidden_layers));
  add("hidden_size", std::to_string(m.hidden_size));
  add("heads", fmt::format("{} of {}, {} turned by RoPE", m.num_attention_heads, m.head_dim(), m.rotary_dim));
  add("intermediate_size", std::to_string(m.intermediate_size));
  add("vocab_size", fmt::format("{}{}", m.vocab_size, m.tie_word_embeddings ? ", tied" : ""));
  add("max_position_embeddings", std::to_string(m.max_position_embeddings));
  add("residual", m.use_parallel_residual ? "parallel" : "sequential");
  add("activation", std::string(to_string(m.hidden_act)));
  add("parameters", fmt::format("{:.3f} M", double(m.num_parameters()) * 1e-6));
  double weights = double(m.num_parameters()) * double(size_bytes(m.dtype));
  std::string format(to_string(m.dtype));
  // A checkpoint says what its tensors take; a preset's follow from its sizes.
  if (!choice.directory.empty()) {
    const Result<LoadedModel> loaded = load_model(choice);
    if (!loaded) return fail(loaded.status());
    weights = double(loaded->bytes());
    format = fmt::format("{}, {}", to_string(loaded->dtype), loaded->description);
  } else if (choice.linears.bits) {
    ModelWeights marked;
    double dense = 0, quantised = 0;
    marked.layers.resize(1);
    for_each_linear(m, marked.layers[0], [&](std::string_view, const LinearParams&, const LinearSize& size) {
      const std::int64_t group = choice.linears.group_size == -1 ? size.in : choice.linears.group_size;
      dense += double(size.out) * double(size.in) * double(size_bytes(m.dtype));
      quantised += WeightFormat{choice.linears.bits, group}.bytes(size.out, size.in, m.dtype);
    });
    weights += double(m.num_hidden_layers) * (quantised - dense);
    format += ", " + describe(choice.linears);
  }
  add("weights", fmt::format("{:.1f} MB, {}", weights * 1e-6, format));
  // One slot that reaches as far as the model's positions.
  const cpu_ref::Model::Options one{.capacity = m.max_position_embeddings};
  const cpu_ref::ModelBytes bytes = cpu_ref::Model::bytes(m, one);
  const double slot = bytes.cache;
  add("cache, float32", fmt::format("{:.1f} kB a token, {:.1f} MB a slot of {}", slot * 1e-3 / double(one.capacity + 1),
                                    slot * 1e-6, one.capacity));
  add("activations, float32",
      fmt::format("{:.1f} MB for prompts in chunks of {}", bytes.workspace * 1e-6, one.chunk));
  const double free = free_memory_bytes(), rest = free - weights - bytes.workspace;
  add("free memory", fmt::format("{:.1f} MB", free * 1e-6));
  add("slots that fit",
      fmt::format("{} of {} entries", std::max<std::int64_t>(0, std::int64_t(rest / slot)), one.capacity));
  table.print(stdout);
  if (std::fflush(stdout) != 0) return fail("standard output: cannot be written");
  return kOk;
}

}  // namespace cf::apps
