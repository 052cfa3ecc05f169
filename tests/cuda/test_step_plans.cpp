// The kernels and plans of steps, as texts: tests/plans/<preset>-<gpu>.txt. A changed heuristic is a changed text.
//   CF_WRITE_PLANS=1 build/cpu-only/tests/test_step_plans    writes the texts anew
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "core/model/config.hpp"
#include "cuda/step/lower.hpp"
#include "cuda/step/outline.hpp"
#include "cuda/step/print.hpp"
#include "tests/support/catch.hpp"

using namespace cf;
using namespace cf::cuda;

namespace {

constexpr std::int64_t kCapacity = 512;

std::string read(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// The kernels of a plan, in order.
std::vector<std::string_view> kernels_of(const StepPlan& plan) {
  std::vector<std::string_view> kernels;
  for (const PlannedNode& n : plan.nodes) kernels.push_back(n.choice.kernel);
  return kernels;
}

/// Weights of 16 and of 4 bits: one token with the reasons, and without them more slots and a prompt where their
/// kernels differ from those before.
std::string text_of(const ModelConfig& m, const NamedArch& gpu) {
  std::string text =
      m.name + " on " + std::string(gpu.name) + ", caches of " + std::to_string(kCapacity) + " entries\n";
  for (const WeightFormat linears : {WeightFormat{}, WeightFormat{.bits = 4, .group_size = 128}}) {
    std::vector<std::string_view> before;
    for (const auto& [batch, q_len] : {std::pair{1, 1}, {4, 1}, {8, 1}, {64, 1}, {1, 512}}) {
      const bool is_first = batch == 1 && q_len == 1;
      const Result<StepPlan> plan = plan_step(
          gpu.arch, {.model = m.spec(),
                     .activation = m.dtype,
                     .linears = linears,
                     .sizes = {.batch = batch, .q_len = q_len, .table_rows = kCapacity, .capacity = kCapacity},
                     .ends = is_first});
      const std::string title = "\n" + std::to_string(linears.bits ? linears.bits : 16) + " bits, " +
                                std::to_string(batch) + " x " + std::to_string(q_len) + " tokens\n";
      if (!plan) {
        text += title + "refused: " + plan.status().message() + "\n";
        continue;
      }
      std::vector<std::string_view> kernels = kernels_of(*plan);
      if (kernels == before) continue;
      text += title + to_string(*plan, is_first);
      before = std::move(kernels);
    }
  }
  return text;
}

}  // namespace

TEST_CASE("The plans of steps are those of tests/plans", "[plans]") {
  const std::string folder = std::string(CF_DATA_DIR) + "/../tests/plans/";
  for (const char* preset :
       {"pythia-410m", "pythia-2.8b", "pythia-12b", "llama-3.2-1b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-4b", "gpt2"})
    for (const NamedArch& gpu : kArchs) {
      const std::string path = folder + preset + "-" + std::string(gpu.name) + ".txt";
      const std::string text = text_of(*find_preset(preset), gpu);
      if (std::getenv("CF_WRITE_PLANS")) std::ofstream(path) << text;
      INFO(path << ": write it anew with CF_WRITE_PLANS=1 build/cpu-only/tests/test_step_plans");
      CHECK(read(path) == text);
    }
}

TEST_CASE("A kernel that does not take a call says why, and the last without code for it is the op's refusal",
          "[plans]") {
  const StepOutline step(*find_preset("pythia-2.8b"), {.batch = 1, .q_len = 1, .table_rows = 64, .capacity = 64},
                         DType::f16, {}, 1);
  const Result<StepPlan> plan = plan_graph({.arch = kH200}, *step.record_layer(0));
  REQUIRE(plan);
  const PlannedNode& first = plan->nodes.front();
  CHECK(first.choice.kernel == "ln_qkv_dense");
  REQUIRE(first.choice.passed_over.size() == 1);
  CHECK(first.choice.passed_over[0].kernel == "ln_qkv_packed");
  CHECK(first.choice.passed_over[0].reason == "takes packed GPTQ weights, got another weight");
  auto args = std::get<ops::LnQkv::Args>(first.node.call);
  std::get<DenseWeight>(args.linear.weight).weight.dtype = DType::bf16;
  CHECK(choose({.arch = kH200}, args).status().message() ==
        "ln_qkv: cuda takes float16 activations with weights of the same dtype, got bfloat16");
  args.linear.weight = GptqWeight{};
  CHECK(choose({.arch = kH200}, args).status().message().find("packed by") != std::string::npos);
}

TEST_CASE("A program is lowered to the persistent kernel's layers, or the node without a phase is named", "[plans]") {
  for (const char* preset : {"pythia-410m", "llama-3.2-1b"}) {
    ModelConfig m = *find_preset(preset);
    m.num_hidden_layers = 2;
    const StepOutline step(m, {.batch = 1, .q_len = 1, .table_rows = 64, .capacity = 64}, DType::f16, {}, 1);
    const Result<std::vector<PersistentLayer>> layers = lower(*step.record());
    INFO(preset << ": " << layers.status().message());
    REQUIRE(layers);
    REQUIRE(layers->size() == 2);
    for (std::size_t i = 0; i < 2; ++i) {
      const PersistentLayer& got = (*layers)[i];
      const LayerWeights& expected = step.weights.layers[i];
      const auto weight = [](const LinearParams& l) { return std::get<DenseWeight>(l.weight).weight.data; };
      CHECK(got.weights.input_layernorm.gamma.data == expected.input_layernorm.gamma.data);
      CHECK(got.weights.input_layernorm.beta.data == expected.input_layernorm.beta.data);
      CHECK(got.weights.post_attention_layernorm.gamma.data == expected.post_attention_layernorm.gamma.data);
      CHECK(weight(got.weights.query_key_value) == weight(expected.query_key_value));
      CHECK(weight(got.weights.dense) == weight(expected.dense));
      CHECK(weight(got.weights.dense_h_to_4h) == weight(expected.dense_h_to_4h));
      CHECK(weight(got.weights.dense_4h_to_h) == weight(expected.dense_4h_to_h));
      CHECK(got.cache.k.data == step.tensors.caches[i].k.data);
      CHECK(got.cache.v.data == step.tensors.caches[i].v.data);
    }
  }
  const StepOutline step(*find_preset("pythia-410m"), {.batch = 1, .q_len = 1, .table_rows = 64, .capacity = 64},
                         DType::f16, {}, 1);
  const Status refused = lower(fuse({.arch = kH200}, *step.record_layer(3))).status();
  CHECK(refused.code() == Code::unimplemented);
  CHECK(refused.message() ==
        "persistent: gpt_neox.layers.3.attention.query_key_value: the persistent kernel has no phase for ln_qkv");
}

TEST_CASE("A step of runs has launches for each group of them, and no op that would read a weight for each",
          "[plans]") {
  const ModelConfig m = *find_preset("pythia-2.8b");
  const auto plan_of = [&](const std::vector<RowRun>& runs, std::int64_t q_len, std::int64_t tokens) {
    StepOutline step(m, {.batch = 4, .q_len = q_len, .table_rows = 512, .capacity = 512, .mixed = tokens}, DType::f16,
                     {}, 1);
    step.tensors.layer.runs = runs;
    const Status refused = lower(*step.record_layer(0)).status();
    CHECK(refused.code() == Code::unimplemented);
    CHECK(refused.message().find("the persistent kernel has one new token of each sequence, no runs") !=
          std::string::npos);
    return plan_graph({.arch = kH200}, *step.record_layer(0));
  };
  const std::vector<RowRun> mixed{{2, 0, 1}, {3, 1, 1}, {0, 2, 300}}, few{{2, 0, 1}, {0, 1, 2}};
  const Result<StepPlan> prompt = plan_of(mixed, 300, 302), tokens = plan_of(few, 2, 3);
  for (const Result<StepPlan>* plan : {&prompt, &tokens}) {
    INFO((*plan).status().message());
    REQUIRE(*plan);
    int attentions = 0;
    for (const PlannedNode& n : (*plan)->nodes) {
      CHECK(!std::holds_alternative<ops::LnQkv::Args>(n.node.call));
      if (!std::holds_alternative<ops::Attention::Args>(n.node.call)) continue;
      ++attentions;
      CHECK(n.choice.kernel == "one for each group of runs");
      CHECK(!n.mode.after_waiting);
    }
    CHECK(attentions == 1);
  }
  // Equal runs are planned as a call without runs.
  const Result<StepPlan> equal = plan_of({{1, 0, 1}, {2, 1, 1}}, 1, 2);
  REQUIRE(equal);
  CHECK(equal->nodes.front().choice.kernel == "ln_qkv_dense");
  for (const PlannedNode& n : equal->nodes)
    if (std::holds_alternative<ops::Attention::Args>(n.node.call)) CHECK(n.mode.after_waiting);
  for (const PlannedNode& n : prompt->nodes)
    if (std::holds_alternative<ops::Attention::Args>(n.node.call)) {
      const std::string text = n.choice.planned.text();
      INFO(text);
      CHECK(text.starts_with("attention_decode: "));
      CHECK(text.find("; attention_wgmma: ") != std::string::npos);
    }
}
