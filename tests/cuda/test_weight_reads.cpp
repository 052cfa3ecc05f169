// How often a step of all slots reads each weight, by the ops that it is made of and the launches of each: for every
// Pythia model, as sites one by one and as a graph, on each device. Nothing runs, and no GPU is needed.
#include <algorithm>
#include <any>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/model/config.hpp"
#include "core/model/model.hpp"
#include "core/procedural.hpp"
#include "cuda/ops/attention/attention.hpp"
#include "cuda/ops/linear/cublaslt/plan.hpp"
#include "cuda/ops/linear/gemv/plan.hpp"
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/ops/linear/tiles/plan.hpp"
#include "cuda/ops/linear/wgmma/packed_plan.hpp"
#include "cuda/ops/ln_qkv/ln_qkv.hpp"
#include "cuda/step/choose.hpp"
#include "cuda/step/outline.hpp"
#include "tests/support/catch.hpp"

using namespace cf;
using namespace cf::cuda;

namespace {

/// The outline of a model's step.
struct Step : StepOutline {
  Step(const ModelConfig& m, std::int64_t slots, DType dtype, WeightFormat linears, std::int64_t capacity = 64)
      : StepOutline(m.spec(), {.batch = slots, .q_len = 1, .table_rows = capacity, .capacity = capacity}, dtype,
                    linears, slots) {}
};

/// The first layer as a graph has it.
StepPlan graph_of(const StepOutline& step, const Arch& arch) {
  Result<Program> program = step.record_layer(0);
  REQUIRE(program);
  Result<StepPlan> plan = plan_graph({.arch = arch}, *std::move(program));
  INFO(plan.status().message());
  REQUIRE(plan);
  return *std::move(plan);
}

/// The number of nodes whose call is of an op.
template <class Op>
int count(const StepPlan& plan) {
  return int(std::ranges::count_if(
      plan.nodes, [](const PlannedNode& n) { return std::holds_alternative<typename Op::Args>(n.node.call); }));
}

/// The launches of an op's call that read its weights. `library` says whether cuBLASLt is there.
template <class Args>
Result<std::int64_t> launches_of(const Arch&, const Args&, bool) {
  return std::int64_t(1);  // rows of one token, no weights, or a fused op's kernel, which takes all tokens at once
}

Result<std::int64_t> launches_of(const Arch& arch, const ops::Linear::Args& a, bool library) {
  const auto d = ops::Linear::dims(a);
  const auto* packed = std::get_if<PackedWeight>(&a.linear.weight);
  if (is_linear_wgmma(arch, d.tokens, d.in, d.rows(), a.x.dtype, packed != nullptr)) return std::int64_t(1);
  if (is_linear_tiles(arch, d.tokens, d.in, d.out, a.x.dtype, packed != nullptr, a.epilogue)) return std::int64_t(1);
  if (packed) {
    CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(ops::Linear::name, *packed));
    // Columns in another order than the inputs' need scratch memory.
    if ((library || !layout.has_order) && (is_wgmma_packed(arch, d.tokens, d.in, d.rows(), a.x.dtype) ||
                                           is_tiles_packed(arch, d.tokens, d.in, d.rows(), a.x.dtype)))
      return std::int64_t(1);
  }
  if (library && is_gemm(arch, d.tokens, d.in, a.x.dtype, packed != nullptr)) return std::int64_t(1);
  std::int64_t launches = 0, tokens = 0;
  if (packed) {
    CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(ops::Linear::name, *packed));
    CF_TRY(for_each_gptq_launch(arch, gptq_sizes(layout, d.tokens), d.tokens,
                                [&](std::int64_t first, const GptqPlan& plan) {
                                  CHECK(first == tokens);
                                  tokens += plan.tokens;
                                  ++launches;
                                  return Status();
                                }));
  } else {
    CF_TRY(for_each_gemv_launch(d.tokens, [&](std::int64_t first, std::int64_t count) {
      CHECK(first == tokens);
      tokens += count;
      ++launches;
      return Status();
    }));
  }
  CHECK(tokens == d.tokens);
  return launches;
}

Result<std::int64_t> launches_of(const Arch& arch, const ops::LnQkv::Args& a, bool) {
  const auto d = ops::LnQkv::dims(a);
  const auto bytes = std::int64_t(size_bytes(a.norm.gamma.dtype));
  std::int64_t tokens = 0;  // of a launch
  if (const auto* packed = std::get_if<PackedWeight>(&a.linear.weight)) {
    CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(ops::LnQkv::name, *packed));
    tokens = ln_qkv_gptq_plan(arch, gptq_sizes(layout, d.tokens()), d.hidden, d.tokens(), bytes).product.tokens;
  } else {
    tokens = ln_qkv_plan(arch, d.hidden, d.out(), d.tokens(), std::int64_t(size_bytes(a.x.dtype)), bytes).tokens;
  }
  REQUIRE(tokens > 0);
  return (d.tokens() + tokens - 1) / tokens;
}

/// How often each weight is read, by its address.
using Reads = std::map<const void*, std::int64_t>;

/// The reads of a step whose layers run site by site, or as a graph.
Result<Reads> reads_of(const Step& s, const Arch& arch, bool graph, bool library) {
  Reads reads;
  const auto add = [&](const auto& args) -> Status {
    using Op = typename std::remove_cvref_t<decltype(args)>::Op;
    CF_TRY_ASSIGN(const std::int64_t launches, launches_of(arch, args, library));
    Op::tensors(Op::dims(args), args, [&](const TensorSpec& t, const auto& view, const auto&) {
      if ((is_weight(t.role) || t.role == Role::gptq) && view) reads[view.data] += launches;
    });
    return {};
  };
  CF_TRY_ASSIGN(Program program, s.record());
  if (graph) program = fuse({.arch = arch}, std::move(program));
  for (const Node& node : program.nodes)
    if (node.at.site.id != SiteId::embed_in) CF_TRY(std::visit(add, node.call));  // the table is read by rows
  return reads;
}

/// The least and the most reads of a weight. Requires that every weight but the table of the embedding is read.
std::pair<std::int64_t, std::int64_t> range_of(const Step& s, const Arch& arch, bool graph, bool library) {
  const Result<Reads> reads = reads_of(s, arch, graph, library);
  INFO(reads.status().message());
  REQUIRE(reads);
  std::vector<const void*> expected;
  const auto expect = [&](const auto& view) { expected.push_back(view.data); };
  const auto expect_norm = [&](const NormParams& n) {
    expect(n.gamma);
    if (n.beta) expect(n.beta);
  };
  for (const LayerWeights& w : s.weights.layers) {
    expect_norm(w.input_layernorm);
    expect_norm(w.post_attention_layernorm);
    for (const NormParams& n : {w.q_norm, w.k_norm})
      if (n.gamma) expect_norm(n);
    for_each_linear(s.spec, w, [&](const Site&, const LinearParams& l, const LinearSize& size) {
      if (const auto* packed = std::get_if<PackedWeight>(&l.weight))
        expect(packed->data);
      else
        expect(std::get<DenseWeight>(l.weight).weight);
      if (size.has_bias) expect(l.bias);
    });
  }
  expect_norm(s.weights.final_layer_norm);
  expect(std::get<DenseWeight>(s.weights.embed_out.weight).weight);
  CHECK(reads->size() == expected.size());
  std::int64_t least = INT64_MAX, most = 0;
  for (const void* weight : expected) {
    const auto found = reads->find(weight);
    REQUIRE(found != reads->end());
    least = std::min(least, found->second);
    most = std::max(most, found->second);
  }
  return {least, most};
}

const SiteList sites = names_of(ModelType::gpt_neox).sites();

}  // namespace

TEST_CASE("a step on a GPU reads each weight once for all slots, or once for all that a launch takes",
          "[plans][model]") {
  for (ModelConfig m : presets()) {
    m.num_hidden_layers = 2;
    for (const Arch& arch : {kH200, kRtx5090})
      for (const DType dtype : {DType::f16, DType::bf16, DType::f32})
        for (const WeightFormat format : {WeightFormat{}, WeightFormat{.bits = 4, .group_size = 128}}) {
          if (dtype == DType::f32 && format.bits) continue;  // the kernels take GPTQ weights with 16 bits alone
          if (m.intermediate_size > 20480 && format.bits)
            continue;  // more columns than the kernels of GPTQ weights take
          for (const std::int64_t slots : {1, 3, 8, 16, 64}) {
            const bool on_hopper = arch.has_wgmma();
            // The wide kernel takes 16 tokens of matrices of up to 12,288 columns, and of 16,384 in quads of chunks.
            const bool is_wide = on_hopper && (m.intermediate_size <= 12288 ||
                                               (m.intermediate_size <= 16384 && m.intermediate_size % 2048 == 0));
            const std::int64_t a_launch = format.bits ? (on_hopper && slots > 16 ? 64 : is_wide ? 16 : 8) : 16;
            const Step step(m, slots, dtype, format);
            for (const bool graph : {false, true})
              for (const bool library : {false, true}) {
                CAPTURE(m.name, arch.compute_capability, to_string(dtype), format.bits, slots, graph, library);
                const auto [least, most] = range_of(step, arch, graph, library);
                CHECK(least == 1);  // the norms'
                // Hopper's tensor cores and cuBLASLt take all slots: of dense weights of 16 bits from 9 on. Hopper's
                // take all of quantised ones from 17 on. Neither takes an LM head of an odd number of rows, as GPT-2's.
                const bool odd_head = m.vocab_size % 8 != 0 && on_hopper && !library;
                const bool takes_all = (library || on_hopper) && format.bits == 0 && dtype != DType::f32;
                const std::int64_t by_tiles = takes_all ? 1 : (slots + a_launch - 1) / a_launch;
                CHECK(most == (odd_head ? std::max(by_tiles, (slots + 15) / 16) : by_tiles));
              }
          }
        }
  }
}

TEST_CASE("a graph's step has ln_qkv in the place of four sites for few slots, and rope_append of two for more",
          "[plans][model]") {
  ModelConfig m = *find_preset("pythia-2.8b");
  m.num_hidden_layers = 1;
  for (const auto& [slots, few] : {std::pair{1, true}, {3, true}, {8, false}, {16, false}, {64, false}}) {
    const Step step(m, slots, DType::f16, {});
    const StepPlan plan = graph_of(step, kH200);
    const int ln_qkv = count<ops::LnQkv>(plan), rope_append = count<ops::RopeAppend>(plan),
              ops = int(plan.nodes.size());
    CAPTURE(slots);
    CHECK(ln_qkv == int(few));
    CHECK(rope_append == int(!few));
    const int summed = count<ops::LinearSum>(plan);
    CHECK(summed == int(slots > 8));
    CHECK(ops == int(names_of(step.spec).sites().size()) - (few ? 3 : 1) - summed);
  }
}

TEST_CASE("a graph's step makes attention.dense and mlp.dense_4h_to_h in one launch", "[plans][model]") {
  // Packed weights have the fused product for up to eight tokens, but not those of Pythia-6.9B: their columns need
  // more blocks than a cluster has. Dense weights have it for the numbers of tokens that the wgmma kernel takes. A
  // layer with a sequential residual has it for neither: the residual is read between the two products.
  struct Case {
    const char* preset;
    bool parallel;
    std::int64_t slots;
    bool packed, dense;
  };
  for (const auto& [preset, parallel, slots, packed, dense] :
       {Case{"pythia-2.8b", true, 1, true, false}, Case{"pythia-2.8b", true, 8, true, false},
        Case{"pythia-2.8b", true, 9, false, true}, Case{"pythia-2.8b", true, 64, false, true},
        Case{"pythia-2.8b", true, 128, false, true}, Case{"pythia-2.8b", true, 129, false, false},
        Case{"pythia-2.8b", false, 1, false, false}, Case{"pythia-2.8b", false, 16, false, false},
        Case{"pythia-1.4b", true, 4, true, false}, Case{"pythia-410m", true, 1, true, false},
        Case{"pythia-410m", true, 16, false, true}, Case{"pythia-6.9b", true, 1, true, false},
        Case{"pythia-6.9b", true, 2, false, false}}) {
    ModelConfig m = *find_preset(preset);
    m.num_hidden_layers = 1;
    m.use_parallel_residual = parallel;
    for (const WeightFormat format : {WeightFormat{.bits = 4, .group_size = 128}, WeightFormat{}}) {
      const Step step(m, slots, DType::f16, format);
      const StepPlan plan = graph_of(step, kH200);
      const int summed = count<ops::LinearSum>(plan), linears = count<ops::Linear>(plan) + count<ops::LnQkv>(plan);
      for (const PlannedNode& n : plan.nodes)
        if (const auto* sum = std::get_if<ops::LinearSum::Args>(&n.node.call)) {
          CHECK(sum->sum.data == step.tensors.layer.attn_residual.data);
          CHECK(sum->y.data == step.tensors.hidden[1].data);
        }
      CAPTURE(preset, parallel, slots, format.bits, linears);
      CHECK(summed == int(format.bits ? packed : dense));
      CHECK(linears + 2 * summed == 4);
    }
  }
}

TEST_CASE("a graph's step of RMSNorm and separate q, k and v: kernels of quantised products normalise one token",
          "[plans][model]") {
  for (const char* preset : {"llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "qwen2.5-7b"}) {
    ModelConfig m = *find_preset(preset);
    m.num_hidden_layers = 1;
    for (const Arch& arch : {kH200, kRtx5090})
      for (const std::int64_t slots : {1, 3, 64})
        for (const WeightFormat format :
             {WeightFormat{}, WeightFormat{.bits = 4, .group_size = 128}, WeightFormat{.bits = 4, .group_size = 32}}) {
          const Step step(m, slots, DType::f16, format);
          const StepPlan planned = graph_of(step, arch);
          for (const PlannedNode& n : planned.nodes) {
            if (const auto* plan = std::any_cast<GptqPlan>(&n.choice.planned.plan))
              CHECK(plan->smem_bytes <= arch.smem_per_block_bytes);
            if (const auto* qkv = std::get_if<ops::RmsQkv::Args>(&n.node.call))
              CHECK(qkv->q.data == step.tensors.layer.q.data);
            if (const auto* up = std::get_if<ops::RmsLinear::Args>(&n.node.call))
              CHECK(up->y.data == step.tensors.layer.mlp_act.data);
          }
          CAPTURE(preset, arch.compute_capability, slots, format.bits, format.group_size);
          const bool normalises = slots == 1 && format.bits && format.group_size == 128;
          CHECK(count<ops::RmsNorm>(planned) == (normalises ? 0 : 2));
          CHECK(count<ops::RopeAppend>(planned) == int(!normalises));
          CHECK(count<ops::RmsQkv>(planned) == int(normalises));
          CHECK(count<ops::RmsLinear>(planned) == int(normalises));
          CHECK(int(planned.nodes.size()) == int(names_of(step.spec).sites().size()) - (normalises ? 4 : 1));
        }
  }
}

TEST_CASE("products that normalise their token take the calls that their kernels take", "[plans][model]") {
  ModelConfig m = *find_preset("llama-3.2-1b");
  m.num_hidden_layers = 1;
  const Step step(m, 1, DType::bf16, {.bits = 4, .group_size = 128});
  ops::RmsQkv::Args qkv;
  ops::RmsLinear::Args up;
  for (const PlannedNode& n : graph_of(step, kH200).nodes) {
    if (const auto* args = std::get_if<ops::RmsQkv::Args>(&n.node.call)) qkv = *args;
    if (const auto* args = std::get_if<ops::RmsLinear::Args>(&n.node.call)) up = *args;
  }
  const auto reason = [&](auto args, auto change) {
    change(args);
    return choose({.arch = kH200}, args).status().message();
  };
  const auto check = [&](auto change, std::string_view words) {
    INFO(reason(qkv, change) << "; " << reason(up, change));
    CHECK(reason(qkv, change).find(words) != std::string::npos);
    CHECK(reason(up, change).find(words) != std::string::npos);
  };
  CHECK(reason(qkv, [](auto&) {}).empty());
  CHECK(reason(up, [](auto&) {}).empty());
  check([](auto& a) { a.x.shape[0] = 2; }, "takes one token, got 2");
  check([](auto& a) { a.gamma.dtype = DType::f32; }, "takes a gamma of the activations' dtype");
  check([](auto& a) { a.x.shape[1] = 2044; }, "takes hidden a multiple of 8, got 2044");
  check([](auto& a) { a.x.shape[1] = 8200; }, "eight elements a thread, got 8200");
  check([](auto& a) { a.linear.weight = DenseWeight{}; }, "takes packed GPTQ weights");
  check([](auto& a) { a.linear.bias = {&a, {8}, DType::f32}; }, "a bias of y's dtype");
  // Rows in the order of other heads.
  CHECK_FALSE(reason(qkv, [](auto& a) { ++a.q.shape[1]; }).empty());
  CHECK_FALSE(reason(qkv, [](auto& a) { a.cos.shape[1] -= 8; }).empty());
  CHECK_FALSE(reason(up, [&](auto& a) { a.linear = qkv.linear; }).empty());
}

TEST_CASE("quantised layers of RMSNorm share all of an SM's memory unless lone heads' clusters are the largest",
          "[plans][model]") {
  for (const auto& [name, kv_len, together] : {std::tuple{"llama-3.2-1b", 512, true},
                                               {"llama-3.2-3b", 512, false},
                                               {"llama-3.1-8b", 512, true},
                                               {"llama-3.2-1b", 2048, true},
                                               {"llama-3.2-3b", 2048, true},
                                               {"llama-3.1-8b", 2048, true}}) {
    CAPTURE(name, kv_len);
    ModelConfig m = *find_preset(name);
    m.num_hidden_layers = 1;
    const Step step(m, 1, DType::bf16, {.bits = 4, .group_size = 128}, kv_len);
    const StepPlan planned = graph_of(step, kH200);
    for (const PlannedNode& n : planned.nodes)
      if (const auto* plan = std::any_cast<AttentionPlan>(&n.choice.planned.plan))
        CHECK((plan->gqa_heads > 1 || plan->splits < kMaxSplits) == together);
    for (const PlannedNode& n : planned.nodes) {
      CHECK(n.mode.shared_percent == (together ? 100 : 0));
      CHECK(n.mode.leaves_room == together);
    }
    CHECK(planned.nodes.size() == 5);
  }
}

TEST_CASE("a graph's attention starts early once its predecessor has waited, and late where that would be slower",
          "[plans][model]") {
  struct Case {
    const char* preset;
    int bits;
    std::int64_t slots, kv_len;
    bool early, shares_sms;
  };
  // ln_qkv of packed weights stands before attention for up to four slots. For one slot of up to 1,024 entries it
  // shares SMs with the MLP's first product, but not in Pythia-6.9B, whose slices are long. Otherwise attention starts
  // late, unless its keys are split.
  for (const auto& [preset, bits, slots, kv_len, early, shares_sms] :
       {Case{"pythia-2.8b", 0, 1, 64, true, false}, Case{"pythia-2.8b", 0, 8, 2048, true, false},
        Case{"pythia-2.8b", 4, 1, 128, true, true}, Case{"pythia-2.8b", 4, 1, 1024, true, true},
        Case{"pythia-2.8b", 4, 1, 1025, true, false}, Case{"pythia-2.8b", 4, 4, 2048, false, false},
        Case{"pythia-2.8b", 4, 8, 128, true, false}, Case{"pythia-410m", 4, 1, 1024, true, true},
        Case{"pythia-6.9b", 4, 1, 64, false, false}, Case{"pythia-6.9b", 4, 1, 129, true, false},
        Case{"llama-3.1-8b", 0, 1, 64, true, false}, Case{"llama-3.1-8b", 4, 1, 64, true, false}}) {
    ModelConfig m = *find_preset(preset);
    m.num_hidden_layers = 1;
    const Step step(m, slots, DType::f16, {.bits = bits, .group_size = 128}, kv_len);
    CAPTURE(preset, bits, slots, kv_len);
    int attentions = 0, sharing = 0;
    for (const PlannedNode& n : graph_of(step, kH200).nodes) {
      if (std::holds_alternative<ops::Attention::Args>(n.node.call)) {
        ++attentions;
        CHECK(n.mode.early == early);
        CHECK(n.mode.after_waiting == early);
      } else {
        CHECK_FALSE(n.mode.after_waiting);
      }
      sharing += n.mode.shares_sms;
    }
    CHECK(attentions == 1);
    CHECK(sharing == int(shares_sms));  // the MLP's first product
  }
}
