// How often a step of all slots reads each weight, by the ops that it is made of and the launches of each: for every
// Pythia model, as sites one by one and as a graph, on each device. Nothing runs, and no GPU is needed.
#include <algorithm>
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
#include "cuda/model/layer_ops.hpp"
#include "cuda/ops/attention/attention.hpp"
#include "cuda/ops/linear/cublaslt/plan.hpp"
#include "cuda/ops/linear/gemv/plan.hpp"
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/ops/linear/tiles/plan.hpp"
#include "cuda/ops/linear/wgmma/plan.hpp"
#include "cuda/ops/ln_qkv/ln_qkv.hpp"
#include "tests/support/catch.hpp"

using namespace cf;
using namespace cf::cuda;

namespace {

/// A model's step whose tensors have shapes and addresses, and at these addresses nothing.
class Step {
 public:
  Step(const ModelConfig& config, std::int64_t slots, DType dtype, WeightFormat linears)
      : spec(config.spec()), weights(outline_model(spec, dtype, linears)) {
    for_each_model_weight(spec, weights, [&](const TensorSpec&, auto& view, const auto&) { place(view); });
    for (LayerWeights& w : weights.layers)
      for_each_linear(spec, w, [&](const Site& site, LinearParams& l, const LinearSize& size) {
        if (linears.bits == 0) return;
        l.weight = packed(size, linears, site.id == SiteId::query_key_value ? qkv_pairs(spec) : RopePairs{});
      });
    tie_embeddings(spec, weights);
    const std::int64_t capacity = 64;
    for_each_activation(
        spec.shape, {.batch = slots, .q_len = 1, .table_rows = capacity, .capacity = capacity},
        [&](const TensorSpec&, auto& view, const auto& shape) {
          point(view, nullptr, shape, dtype);
          place(view);
        },
        tensors.layer);
    tensors.layer.max_kv_len = capacity;
    tensors.ids.shape = {slots};
    const auto matrix = [&](AnyView<2>& view, std::int64_t columns) {
      view = {nullptr, {slots, columns}, dtype};
      place(view);
    };
    for (AnyView<2>& h : tensors.hidden) matrix(h, spec.shape.hidden_size);
    matrix(tensors.final_norm, spec.shape.hidden_size);
    matrix(tensors.logits, spec.shape.vocab_size);
    caches.assign(weights.layers.size(), {tensors.layer.k_cache, tensors.layer.v_cache});
    tensors.caches = caches;
  }

  ModelSpec spec;
  ModelWeights weights;
  ModelTensors tensors;
  std::vector<LayerCache> caches;

 private:
  template <class V>
  void place(V& view) {
    view.data = reinterpret_cast<typename V::element*>(next_);
    next_ += std::uintptr_t(view.bytes() + 255) / 256 * 256;
  }

  PackedWeight packed(const LinearSize& size, WeightFormat format, const RopePairs& pairs) {
    const auto groups = std::int32_t((size.in + format.group_size - 1) / format.group_size);
    const GptqLayout layout{.row_tiles = std::int32_t((size.out + kGptqRows - 1) / kGptqRows),
                            .chunks = std::int32_t((size.in + kGptqColumns - 1) / kGptqColumns),
                            .groups = groups,
                            .columns_per_group = std::int32_t(format.group_size),
                            .fits_f16 = true,
                            .pairs = pairs};
    PackedWeight w{.packer = kCudaPacker, .format = format, .out = size.out, .in = size.in, .data = {}, .layout = {}};
    w.data.shape = {layout.words()};
    place(w.data);
    std::memcpy(w.layout.data(), &layout, sizeof layout);
    return w;
  }

  std::uintptr_t next_ = 4096;
};

/// The launches of an op's call that read its weights. `library` says whether cuBLASLt is there.
template <class Args>
Result<std::int64_t> launches_of(const Arch&, const Args&, bool) {
  return std::int64_t(1);  // rows of one token, or no weights
}

Result<std::int64_t> launches_of(const Arch& arch, const ops::Linear::Args& a, bool library) {
  const auto d = ops::Linear::dims(a);
  const auto* packed = std::get_if<PackedWeight>(&a.linear.weight);
  if (is_linear_wgmma(arch, d.tokens, d.in, d.rows(), a.x.dtype, packed != nullptr)) return std::int64_t(1);
  if (is_linear_tiles(arch, d.tokens, d.in, d.out, a.x.dtype, packed != nullptr, a.epilogue)) return std::int64_t(1);
  if (packed) {
    CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(ops::Linear::name, *packed));
    if (is_gptq_wgmma(arch, d.tokens, d.in, d.rows(), a.x.dtype, packed->format.bits, layout.has_order))
      return (d.tokens + kGptqWgmmaTile - 1) / kGptqWgmmaTile;
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

Result<std::int64_t> launches_of(const Arch& arch, const cuda::LinearSum::Args& a, bool) {
  REQUIRE(linear_sum_plan(arch, a).second.tokens == a.first.x.shape[0]);
  return std::int64_t(1);
}

Result<std::int64_t> launches_of(const Arch& arch, const cuda::RmsLinear::Args& a, bool) {
  REQUIRE(rms_linear_plan(arch, a).tokens == a.norm.x.shape[0]);
  return std::int64_t(1);
}
Result<std::int64_t> launches_of(const Arch& arch, const cuda::RmsQkv::Args& a, bool) {
  REQUIRE(rms_qkv_plan(arch, a).tokens == a.norm.x.shape[0]);
  return std::int64_t(1);
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

/// Of a step whose layers are walked site by site, or are those of a graph.
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
  CF_TRY(for_each_model_site(s.spec, s.weights, s.tensors, [&](const ModelSite& site, const auto& args) -> Status {
    if (site.site.id == SiteId::embed_in) {
      // The table is read by rows. Behind it come the layers of a graph.
      for (const LayerWeights& w : s.weights.layers)
        if (graph) {
          LayerTensors t = s.tensors.layer;
          t.hidden = s.tensors.hidden[0];
          CF_TRY(for_each_layer_op(arch, s.spec, w, t, [&](const auto& op, const LaunchMode&) { return add(op); }));
        }
      return {};
    }
    return graph && site.layer >= 0 ? Status() : add(args);
  }));
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
          // An RTX 5090's blocks have no shared memory for 16 tokens beside a quantised weight's tiles, nor have an
          // H200's beside those of so many rows.
          const bool is_short = arch.compute_capability == 120 || m.spec().mlp_rows() > 32768;
          for (const std::int64_t slots : {1, 3, 8, 16, 64}) {
            const bool on_hopper = arch.has_wgmma();
            const std::int64_t a_launch = format.bits ? (on_hopper && slots > 16 ? 64 : is_short ? 8 : 16) : 16;
            const Step step(m, slots, dtype, format);
            for (const bool graph : {false, true})
              for (const bool library : {false, true}) {
                CAPTURE(m.name, arch.compute_capability, to_string(dtype), format.bits, slots, graph, library);
                const auto [least, most] = range_of(step, arch, graph, library);
                CHECK(least == 1);  // the norms'
                // Hopper's tensor cores and cuBLASLt take all slots: of dense weights of 16 bits from 9 on. Hopper's
                // take all of quantised ones from 17 on.
                const bool takes_all = (library || on_hopper) && format.bits == 0 && dtype != DType::f32;
                CHECK(most == (takes_all ? 1 : (slots + a_launch - 1) / a_launch));
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
    int ln_qkv = 0, rope_append = 0, ops = 0;
    REQUIRE(for_each_layer_op(kH200, step.spec, step.weights.layers[0], step.tensors.layer,
                              [&]<class Args>(const Args&, const LaunchMode&) {
                                ln_qkv += std::is_same_v<Args, ops::LnQkv::Args>;
                                rope_append += std::is_same_v<Args, ops::RopeAppend::Args>;
                                ++ops;
                                return Status();
                              }));
    CAPTURE(slots);
    CHECK(ln_qkv == int(few));
    CHECK(rope_append == int(!few));
    CHECK(ops == int(sites.size()) - (few ? 3 : 1));
  }
}

TEST_CASE("a graph's step makes attention.dense and mlp.dense_4h_to_h of quantised weights in one launch",
          "[plans][model]") {
  // A cluster has no blocks left for the columns of Pythia-6.9B's several tokens, and a sequential residual is read
  // between the two.
  struct Case {
    const char* preset;
    bool parallel;
    std::int64_t slots;
    bool sums;
  };
  for (const auto& [preset, parallel, slots, sums] :
       {Case{"pythia-2.8b", true, 1, true}, Case{"pythia-2.8b", true, 8, true}, Case{"pythia-2.8b", true, 9, false},
        Case{"pythia-2.8b", false, 1, false}, Case{"pythia-1.4b", true, 4, true}, Case{"pythia-410m", true, 1, true},
        Case{"pythia-6.9b", true, 1, true}, Case{"pythia-6.9b", true, 2, false}}) {
    ModelConfig m = *find_preset(preset);
    m.num_hidden_layers = 1;
    m.use_parallel_residual = parallel;
    for (const WeightFormat format : {WeightFormat{.bits = 4, .group_size = 128}, WeightFormat{}}) {
      const Step step(m, slots, DType::f16, format);
      int summed = 0, linears = 0;
      const LayerTensors& tensors = step.tensors.layer;
      REQUIRE(for_each_layer_op(
          kH200, step.spec, step.weights.layers[0], tensors, [&]<class Args>(const Args& args, const LaunchMode&) {
            linears += std::is_same_v<Args, ops::Linear::Args> || std::is_same_v<Args, ops::LnQkv::Args>;
            if constexpr (std::is_same_v<Args, LinearSum::Args>) {
              ++summed;
              CHECK(args.first.y.data == tensors.attn_residual.data);
              CHECK(args.second.y.data == tensors.output.data);
            }
            return Status();
          }));
      CAPTURE(preset, parallel, slots, format.bits, linears);
      CHECK(summed == int(sums && format.bits));
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
          int rms_norm = 0, rope_append = 0, rms_qkv = 0, rms_linear = 0, ops = 0;
          REQUIRE(for_each_layer_op(arch, step.spec, step.weights.layers[0], step.tensors.layer,
                                    [&]<class Args>(const Args& args, const LaunchMode&) {
                                      rms_norm += std::is_same_v<Args, ops::RmsNorm::Args>;
                                      rope_append += std::is_same_v<Args, ops::RopeAppend::Args>;
                                      ++ops;
                                      GptqPlan plan{};
                                      if constexpr (std::is_same_v<Args, RmsQkv::Args>) {
                                        ++rms_qkv;
                                        plan = rms_qkv_plan(arch, args);
                                        CHECK(args.rope.q.data == step.tensors.layer.q.data);
                                      }
                                      if constexpr (std::is_same_v<Args, RmsLinear::Args>) {
                                        ++rms_linear;
                                        plan = rms_linear_plan(arch, args);
                                        CHECK(args.linear.y.data == step.tensors.layer.mlp_act.data);
                                      }
                                      CHECK(plan.smem_bytes <= arch.smem_per_block_bytes);
                                      return Status();
                                    }));
          CAPTURE(preset, arch.compute_capability, slots, format.bits, format.group_size);
          const bool normalises = slots == 1 && format.bits && format.group_size == 128;
          CHECK(rms_norm == (normalises ? 0 : 2));
          CHECK(rope_append == int(!normalises));
          CHECK(rms_qkv == int(normalises));
          CHECK(rms_linear == int(normalises));
          CHECK(ops == int(names_of(step.spec).sites().size()) - (normalises ? 4 : 1));
        }
  }
}

TEST_CASE("products that normalise their token take no calls that do not fit each other", "[plans][model]") {
  ModelConfig m = *find_preset("llama-3.2-1b");
  m.num_hidden_layers = 1;
  const Step step(m, 1, DType::bf16, {.bits = 4, .group_size = 128});
  RmsQkv::Args qkv;
  RmsLinear::Args up;
  REQUIRE(for_each_layer_op(kH200, step.spec, step.weights.layers[0], step.tensors.layer,
                            [&]<class Args>(const Args& args, const LaunchMode&) {
                              if constexpr (std::is_same_v<Args, RmsQkv::Args>) qkv = args;
                              if constexpr (std::is_same_v<Args, RmsLinear::Args>) up = args;
                              return Status();
                            }));
  const auto takes_qkv = [&](auto change) {
    RmsQkv::Args a = qkv;
    change(a);
    return rms_qkv_plan(kH200, a).grid > 0;
  };
  const auto takes_up = [&](auto change) {
    RmsLinear::Args a = up;
    change(a);
    return rms_linear_plan(kH200, a).grid > 0;
  };
  CHECK(takes_qkv([](auto&) {}));
  CHECK(takes_up([](auto&) {}));
  // A norm of another tensor, of other sizes, or of another dtype.
  for (const auto change :
       {+[](ops::RmsNorm::Args& n) { n.y.data = nullptr; }, +[](ops::RmsNorm::Args& n) { n.x.shape[1] += 8; },
        +[](ops::RmsNorm::Args& n) { n.x.shape[0] = 2; }, +[](ops::RmsNorm::Args& n) { n.gamma.dtype = DType::f32; }}) {
    CHECK_FALSE(takes_qkv([&](auto& a) { change(a.norm); }));
    CHECK_FALSE(takes_up([&](auto& a) { change(a.norm); }));
  }
  // Sizes that no kernel of 16 bytes an access takes.
  CHECK_FALSE(takes_up([](auto& a) { a.norm.x.shape[1] = a.linear.x.shape[1] = 2044; }));
  CHECK_FALSE(takes_qkv([](auto& a) {
    a.rope.qkv.shape[3] = a.rope.q.shape[2] = 4;
    a.linear.y.shape[1] = a.rope.qkv.shape[1] * 4;
  }));
  // Heads that are not those of the product, or of several tokens.
  CHECK_FALSE(takes_qkv([](auto& a) { a.linear.y.shape[1] += 64; }));
  CHECK_FALSE(takes_qkv([](auto& a) { ++a.rope.q.shape[1]; }));
  CHECK_FALSE(takes_qkv([](auto& a) { a.rope.qkv.shape[0] = 2; }));
  CHECK_FALSE(takes_qkv([](auto& a) { a.rope.qkv.data = nullptr; }));
  CHECK_FALSE(takes_qkv([](auto& a) { a.rope.layout = ops::QkvLayout::interleaved_by_head; }));
}

TEST_CASE("quantised layers of RMSNorm share all of an SM's memory unless lone heads' clusters are the largest",
          "[plans][model]") {
  for (const auto& [name, kv_len, shares] : {std::tuple{"llama-3.2-1b", 512, true},
                                             {"llama-3.2-3b", 512, false},
                                             {"llama-3.1-8b", 512, true},
                                             {"llama-3.2-1b", 2048, true},
                                             {"llama-3.2-3b", 2048, true},
                                             {"llama-3.1-8b", 2048, true}}) {
    CAPTURE(name, kv_len);
    ModelConfig m = *find_preset(name);
    m.num_hidden_layers = 1;
    Step step(m, 1, DType::bf16, {.bits = 4, .group_size = 128});
    LayerTensors& t = step.tensors.layer;
    t.max_kv_len = kv_len;
    const AttentionPlan plan = attention_plan(kH200, t);
    CHECK((plan.share_heads > 1 || plan.splits < kMaxSplits) == shares);
    int ops = 0;
    REQUIRE(for_each_layer_op(kH200, step.spec, step.weights.layers[0], t,
                              [&, shares = shares]<class Args>(const Args&, const LaunchMode& mode) {
                                ++ops;
                                CHECK(mode.shared_percent == (shares ? 100 : 0));
                                CHECK(mode.leaves_room == shares);
                                return Status();
                              }));
    CHECK(ops == 5);
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
    Step step(m, slots, DType::f16, {.bits = bits, .group_size = 128});
    step.tensors.layer.max_kv_len = kv_len;
    CAPTURE(preset, bits, slots, kv_len);
    int attentions = 0, sharing = 0;
    REQUIRE(for_each_layer_op(kH200, step.spec, step.weights.layers[0], step.tensors.layer,
                              [&, early = early]<class Args>(const Args&, const LaunchMode& mode) {
                                if constexpr (std::is_same_v<Args, ops::Attention::Args>) {
                                  ++attentions;
                                  CHECK(mode.early == early);
                                  CHECK(mode.after_waiting == early);
                                } else {
                                  CHECK_FALSE(mode.after_waiting);
                                }
                                sharing += mode.shares_sms;
                                return Status();
                              }));
    CHECK(attentions == 1);
    CHECK(sharing == int(shares_sms));  // the MLP's first product
  }
}
