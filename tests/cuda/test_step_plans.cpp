// The kernels and plans of steps, as texts: tests/plans/<preset>-<gpu>.txt. A changed heuristic is a changed text.
//   CF_WRITE_PLANS=1 build/cpu-only/tests/test_step_plans    writes the texts anew
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "core/model/config.hpp"
#include "core/model/ranks.hpp"
#include "core/procedural.hpp"
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
std::string text_of(const std::string& name, const ModelSpec& m, DType activation, const NamedArch& gpu) {
  std::string text = name + " on " + std::string(gpu.name) + ", caches of " + std::to_string(kCapacity) + " entries\n";
  for (const WeightFormat linears : {WeightFormat{}, WeightFormat{.bits = 4, .group_size = 128}}) {
    std::vector<std::string_view> before;
    for (const auto& [batch, q_len] : {std::pair{1, 1}, {4, 1}, {8, 1}, {64, 1}, {1, 512}}) {
      const bool is_first = batch == 1 && q_len == 1;
      const Result<StepPlan> plan = plan_step(
          gpu.arch, {.model = m,
                     .activation = activation,
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

/// The text of a file in tests/plans, which is written first where that is asked for.
void check_text(const std::string& file, const std::string& text) {
  const std::string path = std::string(CF_DATA_DIR) + "/../tests/plans/" + file + ".txt";
  if (std::getenv("CF_WRITE_PLANS")) std::ofstream(path) << text;
  INFO(path << ": write it anew with CF_WRITE_PLANS=1 build/cpu-only/tests/test_step_plans");
  CHECK(read(path) == text);
}

}  // namespace

TEST_CASE("A rank of Llama-3.1-70B has a part of each layer's weights, and plans", "[plans][ranks]") {
  const ModelConfig m = *find_preset("llama-3.1-70b");
  // The embedding, the head and the norms are whole on each rank.
  const std::int64_t whole = (2 * m.vocab_size + (2 * m.num_hidden_layers + 1)) * m.hidden_size;
  for (const std::int64_t ranks : {1, 2, 4, 8}) {
    INFO(ranks << " ranks");
    const auto part = m.spec().of_rank(ranks - 1, ranks);
    REQUIRE(part);
    const auto outline = outline_of_rank(m.spec(), outline_model(m.spec(), m.dtype, {}), ranks - 1, ranks);
    REQUIRE(outline);
    CHECK(weight_bytes(*part, *outline) == 2 * ((m.num_parameters() - whole) / ranks + whole));
    constexpr std::int64_t h200_bytes = 141'000'000'000;
    CHECK((weight_bytes(*part, *outline) < h200_bytes) == (ranks > 1));
  }
  for (const auto& [ranks, gpu] : {std::pair{2, "h200"}, {4, "h100"}}) {
    const auto* const named = std::ranges::find(kArchs, gpu, &NamedArch::name);
    REQUIRE(named != std::end(kArchs));
    const auto part = m.spec().of_rank(ranks - 1, ranks);
    REQUIRE(part);
    const std::string name = m.name + "-of-" + std::to_string(ranks);
    check_text(name + "-" + gpu,
               text_of(m.name + ", one of " + std::to_string(ranks) + " ranks,", *part, m.dtype, *named));
  }
}

TEST_CASE("A plan of fp8 weights has their products beside the other ops, and no fused op", "[plans]") {
  const auto kernels = [](const char* preset, std::int64_t group, std::int64_t batch, std::int64_t q_len) {
    const Result<StepPlan> plan =
        plan_step(kH200, {.model = find_preset(preset)->spec(),
                          .activation = DType::bf16,
                          .linears = {.bits = 8, .group_size = group, .is_fp8 = true},
                          .sizes = {.batch = batch, .q_len = q_len, .table_rows = kCapacity, .capacity = kCapacity}});
    INFO(plan.status().message());
    REQUIRE(plan);
    return kernels_of(*plan);
  };
  using Kernels = std::vector<std::string_view>;
  for (std::int64_t group : {-1, 128}) {
    CHECK(kernels("llama-3.1-8b", group, 1, 1) == Kernels{"rmsnorm", "gemv_fp8", "rope_append", "attention_decode",
                                                          "gemv_fp8", "rmsnorm", "gemv_fp8", "gemv_fp8"});
    CHECK(kernels("llama-3.1-8b", group, 1, 512) == Kernels{"rmsnorm", "tiles_fp8", "rope_append", "attention_wgmma",
                                                            "tiles_fp8", "rmsnorm", "tiles_fp8", "tiles_fp8"});
    CHECK(kernels("pythia-2.8b", group, 1, 1) == Kernels{"layernorm", "gemv_fp8", "rope_append", "attention_decode",
                                                         "gemv_fp8", "layernorm", "gemv_fp8", "gemv_fp8"});
  }
}

TEST_CASE("A rank's plan sums over the ranks, in one shot for few tokens and in two for many", "[plans][ranks]") {
  for (const char* preset : {"pythia-12b", "llama-3.1-8b"})
    for (const WeightFormat linears : {WeightFormat{}, WeightFormat{.bits = 4, .group_size = 128}})
      for (const auto& [tokens, kernel] :
           {std::pair{1, "all_reduce_words"}, {64, "all_reduce_words"}, {2048, "all_reduce_slices"}}) {
        INFO(preset << ", " << linears.bits << " bits, " << tokens << " tokens");
        const auto part = find_preset(preset)->spec().of_rank(1, 2);
        REQUIRE(part);
        const bool is_prompt = tokens > 64;
        const Result<StepPlan> plan = plan_step(kH100, {.model = *part,
                                                        .linears = linears,
                                                        .sizes = {.batch = is_prompt ? 1 : tokens,
                                                                  .q_len = is_prompt ? tokens : 1,
                                                                  .table_rows = 2048,
                                                                  .capacity = 2048}});
        INFO(plan.status().message());
        REQUIRE(plan);
        std::vector<std::string> sums;
        for (const PlannedNode& n : plan->nodes)
          if (std::holds_alternative<ops::AllReduce::Args>(n.node.call)) {
            CHECK(n.choice.kernel == kernel);
            sums.emplace_back(n.node.at.site.name);
          }
        const bool parallel = part->traits.residual == Residual::parallel;
        CHECK(sums == (parallel ? std::vector<std::string>{"mlp.all_reduce"}
                                : std::vector<std::string>{"attention.all_reduce", "mlp.all_reduce"}));
        CHECK(to_string(*plan).find("mlp.all_reduce: " + std::string(kernel)) != std::string::npos);
      }
}

TEST_CASE("The plans of steps are those of tests/plans", "[plans]") {
  for (const char* preset :
       {"pythia-410m", "pythia-2.8b", "pythia-12b", "llama-3.2-1b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-4b", "gpt2"})
    for (const NamedArch& gpu : kArchs) {
      const ModelConfig m = *find_preset(preset);
      check_text(m.name + "-" + std::string(gpu.name), text_of(m.name, m, m.dtype, gpu));
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

TEST_CASE("A model's program is lowered to what its weights and caches are", "[plans]") {
  for (ModelConfig m : presets())
    for (const WeightFormat linears : {WeightFormat{}, WeightFormat{.bits = 4, .group_size = 128}}) {
      if (m.family().positions == Positions::learned) continue;
      m.num_hidden_layers = 2;
      const StepOutline step(m, {.batch = 2, .q_len = 1, .table_rows = 64, .capacity = 64}, DType::f16, linears, 2);
      const Result<LoweredProgram> lowered = lower(*step.record());
      INFO(m.name << ": " << lowered.status().message());
      REQUIRE(lowered);
      REQUIRE(lowered->layers.size() == 2);
      const auto weight = [](const LinearParams& l) -> const void* {
        if (const auto* packed = std::get_if<PackedWeight>(&l.weight)) return packed->data.data;
        return std::get<DenseWeight>(l.weight).weight.data;
      };
      const auto same = [&](const LinearParams& a, const LinearParams& b) {
        return weight(a) == weight(b) && a.bias.data == b.bias.data && a.bias.shape == b.bias.shape;
      };
      const bool has_beta = m.family().norm == NormKind::layernorm;
      const auto same_norm = [&](const NormParams& a, const NormParams& b) {
        return a.gamma.data == b.gamma.data && a.gamma.shape == b.gamma.shape &&
               a.beta.data == (has_beta ? b.beta.data : nullptr);
      };
      for (std::size_t i = 0; i < 2; ++i) {
        const LayerWeights &got = lowered->layers[i].weights, &expected = step.weights.layers[i];
        CHECK(same_norm(got.input_layernorm, expected.input_layernorm));
        CHECK(same_norm(got.post_attention_layernorm, expected.post_attention_layernorm));
        CHECK(got.q_norm.gamma.data == expected.q_norm.gamma.data);
        CHECK(got.k_norm.gamma.data == expected.k_norm.gamma.data);
        CHECK(same(got.query_key_value, expected.query_key_value));
        CHECK(same(got.dense, expected.dense));
        CHECK(same(got.dense_h_to_4h, expected.dense_h_to_4h));
        CHECK(same(got.dense_4h_to_h, expected.dense_4h_to_h));
        CHECK(lowered->layers[i].cache.k.data == step.tensors.caches[i].k.data);
        CHECK(lowered->layers[i].cache.v.data == step.tensors.caches[i].v.data);
        CHECK(lowered->layers[i].cache.k.shape == step.tensors.caches[i].k.shape);
        CHECK(!lowered->layers[i].page_table);
      }
      REQUIRE(lowered->ends);
      CHECK(lowered->ends->embed_in.data == step.weights.embed_in.data);
      CHECK(lowered->ends->embed_in.shape == step.weights.embed_in.shape);
      CHECK(same_norm(lowered->ends->final_layer_norm, step.weights.final_layer_norm));
      CHECK(lowered->ends->embed_out.data == weight(step.weights.embed_out));
      CHECK(!lowered->ends->ids);

      const Result<LoweredProgram> layer = lower(*step.record_layer(1));
      REQUIRE(layer);
      CHECK(layer->layers.size() == 1);
      CHECK(!layer->ends);
      CHECK(same(layer->layers[0].weights.dense, step.weights.layers[1].dense));
    }
}

TEST_CASE("A program with caches in pages is lowered with their table", "[plans]") {
  ModelConfig m = *find_preset("pythia-410m");
  m.num_hidden_layers = 2;
  StepOutline step(m, {.batch = 2, .q_len = 1, .table_rows = 64, .capacity = 64}, DType::f16, {}, 2);
  const std::int32_t pages[2]{};
  step.tensors.layer.page_table = {pages, {2, 1}};
  const Result<LoweredProgram> lowered = lower(*step.record());
  REQUIRE(lowered);
  REQUIRE(lowered->layers.size() == 2);
  for (const PersistentLayer& l : lowered->layers) {
    CHECK(l.page_table.data == pages);
    CHECK(l.page_table.shape == step.tensors.layer.page_table.shape);
  }
}

TEST_CASE("A program that the persistent kernel does not make is refused by the node's name, with the reason",
          "[plans]") {
  const auto outline = [](const char* preset) {
    ModelConfig m = *find_preset(preset);
    m.num_hidden_layers = 1;
    return std::make_unique<StepOutline>(m, StepSizes{.batch = 1, .q_len = 1, .table_rows = 64, .capacity = 64},
                                         DType::f16, WeightFormat{}, 1);
  };
  const auto refusal = [](const Result<Program>& program) {
    const Status refused = lower(*program).status();
    CHECK(refused.code() == Code::unimplemented);
    return refused.message();
  };
  const std::string has = ": the persistent kernel has ";
  const auto pythia = outline("pythia-410m");
  CHECK(refusal(fuse({.arch = kH200}, *pythia->record_layer(0))) ==
        "persistent: gpt_neox.layers.0.attention.query_key_value" + has + "no phase for ln_qkv");
  CHECK(refusal(outline("gpt2")->record()) ==
        "persistent: transformer.wte" + has + "rotary position embeddings, no table of learned ones");

  // The refusal of a program whose call at one site is changed.
  const auto with = [&](SiteId site, auto change) {
    Program program = *pythia->record();
    for (Node& node : program.nodes)
      if (node.at.site.id == site)
        std::visit(
            [&](auto& args) {
              if constexpr (std::is_invocable_v<decltype(change), decltype(args)>) change(args);
            },
            node.call);
    return refusal(program);
  };
  const std::string head = "persistent: embed_out" + has;
  const ConstAnyView<1> bias = pythia->weights.layers[0].dense.bias;
  CHECK(with(SiteId::embed_out, [](ops::Linear::Args& a) { a.linear.weight = PackedWeight{}; }) ==
        head + "a dense LM head, no quantised one");
  CHECK(with(SiteId::embed_out, [](ops::Linear::Args& a) { a.linear.weight = GptqWeight{}; }) ==
        head + "a dense LM head, no quantised one");
  CHECK(with(SiteId::embed_out, [&](ops::Linear::Args& a) { a.linear.bias = bias; }) ==
        head + "an LM head without a bias");
  const std::string attention = "persistent: gpt_neox.layers.0.attention.";
  CHECK(with(SiteId::kv_append, [](ops::KvAppend::Args& a) { a.window = {.keys = 32, .sinks = 4}; }) ==
        attention + "kv_append" + has + "a cache of all keys, no stream's");
  CHECK(with(SiteId::context, [](ops::Attention::Args& a) { a.window = {.keys = 32}; }) ==
        attention + "context" + has + "all keys, no window");
  Program headless = *pythia->record();
  headless.nodes.pop_back();
  CHECK(refusal(headless) ==
        "persistent: the persistent kernel has an embedding, a final norm and an LM head together, or none of them");
}

TEST_CASE("Appends of runs that differ, to pages and to streams' caches, have the kernels of runs", "[plans]") {
  const StepOutline step(*find_preset("llama-3.2-1b"), {.batch = 4, .q_len = 2, .table_rows = 512, .capacity = 512},
                         DType::f16, {}, 1);
  const Program layer = *step.record_layer(0);
  const auto call_of = [&]<class Args>(std::type_identity<Args>) {
    for (const Node& n : layer.nodes)
      if (const auto* args = std::get_if<Args>(&n.call)) return *args;
    return Args{};
  };
  const auto append = call_of(std::type_identity<ops::KvAppend::Args>());
  const auto rope = call_of(std::type_identity<ops::Rope::Args>());
  const auto both = ops::RopeAppend::of_parts(rope, append);
  const auto kernel_of = [](auto args, auto&& change) {
    change(args);
    const Result<Choice> choice = choose({.arch = kH200}, args);
    return choice ? std::string(choice->kernel) + ": " + choice->planned.text() : choice.status().message();
  };
  const auto plain = [](auto&) {};
  CHECK(kernel_of(append, plain).starts_with("kv_append: "));
  CHECK(kernel_of(both, plain).starts_with("rope_append: "));
  const std::int32_t pages[4 * 8] = {};
  const auto in_pages = [&](auto& args) { args.page_table = {pages, {4, 8}}; };
  CHECK(kernel_of(append, in_pages).starts_with("kv_append_runs: "));
  CHECK(kernel_of(append, in_pages).ends_with(", 4 runs, 1 launches"));
  CHECK(kernel_of(both, in_pages).starts_with("rope_append_runs: "));
  CHECK(kernel_of(append, [](auto& args) { args.window = {.keys = 60, .sinks = 4}; }).starts_with("kv_append_runs: "));
  const std::vector<RowRun> equal{{0, 0, 2}, {1, 2, 2}, {2, 4, 2}, {3, 6, 2}}, mixed{{3, 0, 1}, {0, 1, 7}};
  const auto with = [](const std::vector<RowRun>& runs) { return [&](auto& args) { args.runs = runs; }; };
  CHECK(kernel_of(append, with(equal)).starts_with("kv_append: "));
  CHECK(kernel_of(both, with(equal)).starts_with("rope_append: "));
  CHECK(kernel_of(append, with(mixed)).ends_with(", 2 runs, 1 launches"));
  CHECK(kernel_of(both, with(mixed)).starts_with("rope_append_runs: "));
  // A group of its own has its pages, too.
  const std::vector<RowRun> alone{{2, 0, 8}};
  CHECK(kernel_of(append, [&](auto& args) {
          in_pages(args);
          args.runs = alone;
        }).ends_with(", 1 runs, 1 launches"));
}

TEST_CASE("The fused products append to pages, whose rows of heads have 32-bit numbers", "[plans]") {
  const StepOutline step(*find_preset("pythia-2.8b"), {.batch = 1, .q_len = 1, .table_rows = 64, .capacity = 64},
                         DType::f16, {}, 1);
  const Result<StepPlan> plan = plan_graph({.arch = kH200}, *step.record_layer(0));
  REQUIRE(plan);
  auto args = std::get<ops::LnQkv::Args>(plan->nodes.front().node.call);
  const std::int32_t page = 0;
  args.page_table = {&page, {1, 1}};
  args.k_cache.shape = args.v_cache.shape = {1 << 20, 32, 63, 80};
  const Result<Choice> choice = choose({.arch = kH200}, args);
  INFO(choice.status().message());
  REQUIRE(choice);
  CHECK(choice->kernel == "ln_qkv_dense");
  args.k_cache.shape[2] = args.v_cache.shape[2] = 64;
  CHECK(choose({.arch = kH200}, args).status().message() ==
        "ln_qkv: cuda takes a cache of up to 2147483647 rows of heads, got 1048576 x 32 x 64");
}

TEST_CASE("Attention of few queries has the decode kernels, whatever the cache and the runs", "[plans]") {
  const StepOutline step(*find_preset("pythia-2.8b"), {.batch = 4, .q_len = 1, .table_rows = 512, .capacity = 512},
                         DType::f16, {}, 1);
  ops::Attention::Args call{};
  const Program layer = *step.record_layer(0);
  for (const Node& n : layer.nodes)
    if (const auto* args = std::get_if<ops::Attention::Args>(&n.call)) call = *args;
  const auto kernel_of = [&](auto&& change) {
    ops::Attention::Args args = call;
    change(args);
    const Result<Choice> choice = choose({.arch = kH200}, args);
    return choice ? std::string(choice->kernel) + ": " + choice->planned.text() : choice.status().message();
  };
  const std::string plain = kernel_of([](auto&) {});
  CHECK(plain.starts_with("attention_decode: "));
  const std::int32_t pages[4 * 8] = {};
  const auto in_pages_of = [&](std::int64_t entries) {
    return [&pages, entries](auto& args) {
      args.k_cache.shape[2] = args.v_cache.shape[2] = entries;
      args.page_table = {pages, {4, 8}};
    };
  };
  CHECK(kernel_of(in_pages_of(64)) == plain);
  CHECK(kernel_of(in_pages_of(1024)) == plain);
  CHECK(kernel_of(in_pages_of(65)) == "attention: cuda takes pages of a multiple of 64 entries up to 1024, got 65");
  CHECK(kernel_of([&](auto& args) { args.max_kv_len = 60; }) ==
        kernel_of([&](auto& args) { args.window = {.keys = 60}; }));
  CHECK(kernel_of([&](auto& args) {
          args.window = {.keys = 508, .sinks = 4};
          args.q_sinks = args.q;
        }).starts_with("attention_decode: "));
  const std::vector<RowRun> runs{{3, 0, 1}, {0, 1, 3}};
  CHECK(kernel_of([&](auto& args) { args.runs = runs; }).starts_with("attention_decode_runs: "));
  CHECK(kernel_of([&](auto& args) { args.runs = runs; }).ends_with(", 2 runs, 1 launches"));
}

TEST_CASE("A step of runs has few launches of attention, and no op that would read a weight for each", "[plans]") {
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
      CHECK(n.choice.kernel == (plan == &prompt ? "one for each group of runs" : "attention_decode_runs"));
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
      CHECK(text.starts_with("attention_wgmma: "));
      CHECK(text.find("; attention_decode: ") != std::string::npos);
    }
}

TEST_CASE("Attention takes prompts of many lengths, pages and windows by the prompts' lengths, whatever is beside them",
          "[plans]") {
  const auto text_of = [](const Target& target, std::int64_t head_dim, const std::vector<RowRun>& runs,
                          std::int64_t page, const KeyWindow& window, std::int64_t max_kv_len) {
    static const std::byte memory{};
    const void* const data = &memory;
    void* const written = const_cast<std::byte*>(&memory);
    const std::int64_t sequences = 8, rows = runs.back().first_row + runs.back().count;
    const std::array<std::int64_t, 4> storage =
        page ? extents(sequences * 4, 2, page, head_dim) : extents(sequences, 2, 2048, head_dim);
    ops::Attention::Args a{.q = {data, {rows, 4, head_dim}, DType::f16},
                           .k_cache = {data, storage, DType::f16},
                           .v_cache = {data, storage, DType::f16},
                           .kv_len = {static_cast<const std::int32_t*>(data), {sequences}},
                           .y = {written, {rows, 4, head_dim}, DType::f16},
                           .max_kv_len = max_kv_len,
                           .runs = runs,
                           .window = window};
    if (page) a.page_table = {static_cast<const std::int32_t*>(data), {sequences, 4}};
    if (window.sinks) a.q_sinks = a.q;
    const Result<Choice> choice = choose(target, a);
    if (!choice) return choice.status().message();
    const std::string text = choice->planned.text();
    return choice->kernel == "one for each group of runs" ? text : std::string(choice->kernel) + ": " + text;
  };
  const Target h200{.arch = kH200}, rtx5090{.arch = kRtx5090};
  // Two query heads a kv head: 32 queries fill a warpgroup.
  const std::vector<RowRun> prompts{{0, 0, 100}, {3, 100, 32}, {1, 132, 600}},
      mixed{{0, 0, 100}, {3, 100, 1}, {1, 101, 31}, {4, 132, 600}, {6, 732, 20}, {5, 752, 2}}, lone{{2, 0, 100}};
  const auto starts = [](const std::string& text, const std::string& with) {
    INFO(text);
    CHECK(text.starts_with(with));
  };
  starts(text_of(h200, 80, prompts, 0, {}, 2048), "attention_wgmma_runs: 1 launches, 3 runs, 24 blocks a kv head, ");
  starts(text_of(h200, 80, prompts, 64, {}, 256), "attention_wgmma_runs: 1 launches, 3 runs");
  starts(text_of(h200, 256, prompts, 0, {}, 2048), "attention_prefill_runs: 1 launches, 3 runs");
  starts(text_of(rtx5090, 80, prompts, 0, {}, 2048), "attention_prefill_runs: 1 launches, 3 runs");
  starts(text_of(h200, 80, lone, 0, {}, 2048), "attention_wgmma: ");
  starts(text_of(h200, 80, lone, 64, {}, 256), "attention_wgmma_runs: 1 launches, 1 runs");
  starts(text_of(h200, 80, lone, 0, {.keys = 99}, 2048), "attention_wgmma_runs: 1 launches, 1 runs");
  starts(text_of(h200, 80, lone, 0, {.keys = 2048}, 2048), "attention_wgmma: ");  // sees all keys
  starts(text_of(h200, 80, lone, 0, {.keys = 99, .sinks = 4}, 2048), "attention_prefill_runs: 1 launches, 1 runs");
  starts(text_of(h200, 80, lone, 0, {.keys = 99}, 9999), "attention_prefill_runs: 1 launches, 1 runs");
  starts(text_of(h200, 256, lone, 0, {.keys = 99}, 9999), "attention_decode: ");
  const std::string of_mixed = text_of(h200, 80, mixed, 0, {}, 2048);
  INFO(of_mixed);
  CHECK(of_mixed.starts_with("attention_wgmma_runs: 1 launches, 2 runs"));
  CHECK(of_mixed.find("; attention_prefill_runs: 1 launches, 2 runs") != std::string::npos);
  CHECK(of_mixed.find("; attention_decode_runs: ") != std::string::npos);
  // A lone long prompt keeps its kernel, and those beside it theirs.
  const std::vector<RowRun> one_long{{0, 0, 100}, {3, 100, 1}, {1, 101, 1}, {4, 102, 20}, {6, 122, 22}, {5, 144, 2}};
  const std::string of_one_long = text_of(h200, 80, one_long, 0, {}, 2048);
  INFO(of_one_long);
  CHECK(of_one_long.starts_with("attention_prefill_runs: 1 launches, 2 runs"));
  CHECK(of_one_long.find("; attention_decode_runs: ") != std::string::npos);
  CHECK(of_one_long.find("3 runs, 1 launches; attention_wgmma: ") != std::string::npos);
  CHECK(text_of(h200, 80, lone, 96, {}, 256) ==
        "attention: cuda takes pages of a multiple of 64 entries up to 1024, got 96");
}
