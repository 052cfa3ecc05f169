// The persistent kernel: each layer the oracle's within its budget, the same bits on every run whatever the blocks'
// timing, in one launch or many, and an error instead of a hang. On layers that the test itself holds on the device.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core/compare.hpp"
#include "core/model/examples.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cuda/model/extend.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/persistent/arguments.hpp"
#include "cuda/persistent/persistent_kernel.hpp"
#include "cuda/persistent/variants.hpp"
#include "tests/cuda/device_layers.hpp"
#include "tests/cuda/occupy.hpp"
#include "tests/cuda/persistent_setups.hpp"
#include "tests/cuda/persistent_taps.hpp"
#include "tests/support/grouped.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/setups.hpp"

using namespace cf;
using namespace cf::test;
using cuda::PersistentKernel;

namespace {

using Layer = ops::DecodeLayer;

}  // namespace

TEST_CASE("persistent: the plans of an RTX 5090 have more blocks than an H200 has SMs, and row and tile products",
          "[gpu][persistent]") {
  std::set<cuda::Products> products;
  for (const ModelConfig& m : pythia_presets()) {
    const auto plan = cuda::plan_persistent(planned(Plans::rtx5090).arch(), cuda::persistent_model(m, m.dtype), 1);
    REQUIRE(plan);
    CHECK((plan->grid > cuda::kH200.sm_count || plan->grid == m.hidden_size));  // Pythia-14M has 128 rows
    CHECK(plan->smem_bytes <= cuda::kRtx5090.smem_per_block_bytes);
    products.insert(plan->products);
  }
  CHECK(products == std::set{cuda::Products::rows, cuda::Products::tiles});
}

namespace {

/// Every tap of a layer, and what it appends to the cache, against the double oracle.
void check_taps(const HostLayers& host, int kv_len, Plans plans, const cuda::PersistentChoices& choices = {}) {
  const cuda::Context c = planned(plans);
  DeviceLayers on(c, host);
  PersistentKernel kernel = kernel_of(plans, c, on, choices);
  CAPTURE(to_string(kernel.plan()));
  compare_taps(kernel, c, on, host, kv_len, [](std::string_view tap, const Comparison& error, const Budget& budget) {
    CAPTURE(tap, error.rel_l2, budget.rel_l2, error.rel_max, budget.rel_max, error.worst_coordinate);
    CHECK(error.within(budget));
  });
}

}  // namespace

CF_FOR_PLANS_AND_DTYPES("persistent: every tap of a layer is the oracle's within its budget", "[gpu][persistent]") {
  const bool parallel = GENERATE(true, false);
  for (const ModelConfig& shape :
       {model_of(4, 32, 8, 96), model_of(4, 64, 16, 512), model_of(3, 80, 20, 200), model_of(4, 96, 24, 1536),
        model_of(2, 128, 128, 1000), model_of(2, 256, 64, 4096), model_of(3, 8, 2, 24)})
    for (const auto& [batch, kv_len] : {std::pair<std::int64_t, int>{1, 1}, {1, 2}, {1, 290}, {3, 17}, {8, 290}}) {
      ModelConfig m = shape;
      m.dtype = dtype;
      m.use_parallel_residual = parallel;
      if (batch == 3) {
        m.hidden_act = Activation::gelu_tanh;
        m.attention_bias = false;
      }
      CAPTURE(to_string(plans), m.name, batch, kv_len, parallel, to_string(dtype));
      check_taps({m, {.batch = batch, .capacity = 291}}, kv_len, plans);
    }
}

CF_FOR_PLANS_AND_DTYPES(
    "persistent: every tap of a layer of Llama, Mistral, Qwen2 and Qwen3 is the oracle's within its budget",
    "[gpu][persistent][grouped]") {
  using enum ModelType;
  std::vector<ModelConfig> models;
  // 1, 3, 4, 7 and 8 query heads for each kv head, of 64 and of 128 elements. These heads do not make up hidden_size.
  for (const auto& [heads, kv_heads] : kGroupedHeads)
    for (std::int64_t head_dim : {64, 128})
      models.push_back(gated_model_of(qwen2, heads, kv_heads, head_dim, 256, 320));
  // Heads that do: row products of which none is sliced, down alone or all, but for the pairs' shared sums; odd tiles.
  models.push_back(gated_model_of(llama, 16, 4, 64, 1024, 1024));
  models.push_back(gated_model_of(mistral, 8, 1, 128, 1024, 4096));
  models.push_back(gated_model_of(llama, 32, 32, 64, 2048, 2048));
  models.push_back(gated_model_of(qwen2, 14, 2, 64, 896, 1000));
  models.push_back(gated_model_of(llama, 3, 1, 8, 24, 40));
  // Row products of which dense's rows are sliced otherwise than those of hidden.
  models.push_back(gated_model_of(llama, 16, 4, 128, 1024, 2048));
  models.push_back(gated_model_of(llama, 8, 2, 128, 2048, 2048));
  // Row products of slices of three lengths, whose last chunks are not whole: no row is sliced; hidden's and down's
  // are.
  models.push_back(gated_model_of(llama, 9, 3, 128, 1160, 2264));
  models.push_back(gated_model_of(qwen2, 20, 4, 128, 2608, 5008));
  // The consumer warps load mlp.act to registers. The last chunk of each slice is smaller than the others.
  models.push_back(gated_model_of(llama, 8, 2, 128, 1024, 11008));
  // Heads with norms of their own, lone or in GQA tiles: tile and row products, and mlp.act in registers.
  models.push_back(gated_model_of(qwen3, 4, 4, 64, 256, 320));
  models.push_back(gated_model_of(qwen3, 6, 2, 80, 256, 320));
  models.push_back(gated_model_of(qwen3, 16, 2, 128, 1024, 3072));
  models.push_back(gated_model_of(qwen3, 8, 8, 256, 1024, 2048));
  models.push_back(gated_model_of(qwen3, 32, 8, 128, 2560, 11008));
  ModelConfig biased = gated_model_of(llama, 4, 2, 64, 256, 512);
  biased.attention_bias = biased.mlp_bias = true;
  biased.rope_scaling = {.kind = ops::RopeScaling::Kind::llama3,
                         .factor = 8,
                         .low_freq_factor = 1,
                         .high_freq_factor = 4,
                         .original_max_positions = 32};
  models.push_back(biased);
  for (ModelConfig& m : models)
    for (const auto& [batch, kv_len] : {std::pair<std::int64_t, int>{1, 1}, {1, 2}, {1, 290}, {3, 17}, {8, 290}}) {
      // The widest of several tokens leave no room for a ring on an RTX 5090.
      if (const auto plan = cuda::plan_persistent(planned(plans).arch(), cuda::persistent_model(m, dtype), batch);
          !plan && plans == Plans::rtx5090 && batch > 1) {
        CHECK(refusal_fault(plan.status(), Code::unimplemented, {"B of shared memory"}) == "");
        continue;
      }
      m.dtype = dtype;
      CAPTURE(to_string(plans), m.name, m.hidden_size, m.kv_heads(), batch, kv_len, to_string(dtype));
      check_taps({m, {.batch = batch, .capacity = 291}}, kv_len, plans, {.shares_keys = dtype == DType::bf16});
    }
}

namespace {

/// check_taps() for packed weights, whose smallest group has `group_size` columns; -1 stands for a whole row. An RTX
/// 5090 has no room for the ring of some wide layers with several tokens. There it checks the refusal.
void check_packed_taps(const HostLayers& host, std::int64_t group_size, int kv_len, Plans plans) {
  cuda::PersistentModel model = cuda::persistent_model(host.config, host.config.dtype);
  model.packed = true;
  if (group_size > 0) model.packed_group = int(std::min<std::int64_t>(group_size, 128));
  const auto plan = cuda::plan_persistent(planned(plans).arch(), model, host.load.batch);
  if (plan || plans == Plans::own || host.load.batch == 1)
    check_taps(host, kv_len, plans);
  else
    CHECK(refusal_fault(plan.status(), Code::unimplemented, {"B of shared memory"}) == "");
}

/// A parallel residual, a sequential one, and a gated layer. Of 2688 intermediate columns, 21 times 128 in two slices,
/// the last slice is smaller.
std::vector<ModelConfig> packed_models(std::int64_t parallel_intermediate) {
  ModelConfig sequential = model_of(12, 64, 16, 2688);
  sequential.use_parallel_residual = false;
  return {model_of(12, 64, 16, parallel_intermediate), sequential,
          gated_model_of(ModelType::qwen2, 6, 2, 128, 384, 3072)};
}

}  // namespace

CF_FOR_PLANS_AND_DTYPES("persistent: every tap of a layer of packed weights is the oracle's within its budget",
                        "[gpu][persistent][packed]") {
  using enum ModelType;
  std::vector<ModelConfig> models;
  for (bool parallel : {true, false})
    // Rows of one slice, of several, and of several of which the last is smaller.
    for (ModelConfig m : {model_of(4, 64, 16, 512), model_of(8, 80, 20, 2560), model_of(16, 128, 32, 1408),
                          model_of(32, 80, 20, 10240)}) {
      m.use_parallel_residual = parallel;
      models.push_back(m);
    }
  models.push_back(gated_model_of(llama, 8, 2, 64, 512, 1024));
  models.push_back(gated_model_of(qwen2, 8, 4, 128, 256, 384));  // heads that do not make up hidden_size
  models.push_back(gated_model_of(qwen3, 8, 4, 64, 256, 384));
  for (ModelConfig& m : models)
    for (std::int64_t group_size : {128, 256, -1})
      for (const auto& [batch, kv_len] : {std::pair<std::int64_t, int>{1, 1}, {1, 2}, {1, 290}, {3, 17}, {8, 290}}) {
        if (group_size == 256 && (m.hidden_size % 256 || m.intermediate_size % 256)) continue;
        m.dtype = dtype;
        CAPTURE(to_string(plans), m.name, m.hidden_size, m.use_parallel_residual, group_size, batch, kv_len,
                to_string(dtype));
        const WeightFormat linears{.bits = 4, .group_size = group_size};
        check_packed_taps({m, {.batch = batch, .capacity = 291}, "", linears}, group_size, kv_len, plans);
      }
}

CF_FOR_PLANS_AND_DTYPES(
    "persistent: taps of packed weights with small groups, 8 bits or an act-order are within their budgets",
    "[gpu][persistent][packed]") {
  const bool shuffled = GENERATE(false, true);
  // Groups of 96 columns begin and end inside the 128 columns of digits, and inside slices.
  for (ModelConfig m : packed_models(1536))
    for (const WeightFormat& linears :
         {WeightFormat{4, 32}, WeightFormat{4, 64}, WeightFormat{4, 96}, WeightFormat{4, 128}, WeightFormat{8, 32},
          WeightFormat{8, 128}, WeightFormat{8, 96}, WeightFormat{8, -1}})
      for (const auto& [batch, kv_len] : {std::pair<std::int64_t, int>{1, 290}, {4, 17}, {7, 290}}) {
        m.dtype = dtype;
        CAPTURE(to_string(plans), m.hidden_size, m.intermediate_size, linears.bits, linears.group_size, shuffled, batch,
                kv_len, to_string(dtype));
        HostLayers host(m, {.batch = batch, .capacity = 291}, "", linears);
        if (shuffled) host.shuffle_groups();
        check_packed_taps(host, linears.group_size, kv_len, plans);
      }
}

CF_FOR_PLANS_AND_DTYPES("persistent: taps of packed weights beside dense ones are within their budgets",
                        "[gpu][persistent][packed][mixed]") {
  const bool shuffled = GENERATE(false, true);
  for (ModelConfig m : packed_models(2688))
    for (unsigned dense = 1; dense < 15; ++dense)  // a bit for each Linear; one at least is packed
      for (const auto& [batch, kv_len] : {std::pair<std::int64_t, int>{1, 290}, {4, 17}}) {
        m.dtype = dtype;
        CAPTURE(to_string(plans), m.hidden_size, m.intermediate_size, shuffled, batch, kv_len, to_string(dtype), dense);
        constexpr WeightFormat formats[]{{4, 128}, {8, 32}, {4, 96}, {4, 64}};
        HostLayers host(m, {.batch = batch, .capacity = 291});
        for (std::size_t i = 0; i < 4; ++i)
          if (!(dense >> i & 1)) host.set_format(0, HostLayers::kLinears[i], formats[i]);
        if (shuffled) host.shuffle_groups();
        check_packed_taps(host, 32, kv_len, plans);
      }
}

TEST_CASE("persistent: packed weights that the kernel does not multiply by are refused by name",
          "[gpu][persistent][packed][small]") {
  const cuda::Context c = planned(Plans::own);
  const auto refused = [&](const ModelConfig& m, std::int64_t batch, WeightFormat linears, const char* what) {
    const HostLayers host(m, {.batch = batch, .capacity = 20}, "", linears);
    DeviceLayers on(c, host);
    const auto kernel =
        PersistentKernel::create(c, cuda::persistent_model(m, m.dtype), on.layers, on.sequences(), on.rope());
    return refusal_fault(kernel.status(), Code::unimplemented, {what});
  };
  const ModelConfig m = small_model(DType::f16, 1);
  CHECK(refused(m, 1, {.bits = 4, .group_size = 48},
                "groups of equally many columns, a multiple of 32, got 6 groups of up to 64 of the 256 columns of "
                "'attention.query_key_value.weight'") == "");
  CHECK(refused(model_of(4, 64, 16, 576), 1, {.bits = 4, .group_size = -1}, "intermediate a multiple of 128") == "");

  constexpr WeightFormat ways[]{{4, 32}, {4, 64}, {4, 128}, {4, -1}, {8, 32}, {8, 64}, {8, 128}, {8, -1}};
  for (std::int64_t layers : {7, 8}) {
    HostLayers host(small_model(DType::f16, layers), {.batch = 1, .capacity = 20});
    for (std::size_t l = 0; l < std::size_t(layers); ++l) host.set_format(l, &LayerWeights::dense, ways[l]);
    DeviceLayers on(c, host);
    const Status status =
        PersistentKernel::create(c, cuda::persistent_model(host.config, m.dtype), on.layers, on.sequences(), on.rope())
            .status();
    if (layers == 7)
      require_ok(status);
    else
      CHECK(refusal_fault(status, Code::unimplemented, {"layers packed in up to 7 ways, got more"}) == "");
  }
}

CF_FOR_PLANS_AND_DTYPES(
    "persistent: heads that share their keys attend to each key, at the ends of tiles, stages and splits",
    "[gpu][persistent][grouped]") {
  struct Heads {
    std::int64_t heads, kv_heads, head_dim;
    int gqa_heads;
  };
  // GQA tiles of 2, 3, 7 and 8 heads; two tiles of a group, of 8 and of 6 heads; a group of which no two heads fit into
  // a tile; heads that are too wide for tiles.
  for (const Heads& h :
       {Heads{16, 8, 64, 2}, Heads{24, 8, 64, 3}, Heads{7, 1, 80, 7}, Heads{21, 3, 64, 7}, Heads{8, 1, 128, 8},
        Heads{32, 2, 64, 8}, Heads{12, 1, 128, 6}, Heads{11, 1, 64, 1}, Heads{2, 1, 256, 1}}) {
    // From 1024 columns on a plan takes row products.
    const std::int64_t columns = h.heads * h.head_dim, hidden = columns < 1024 ? 256 : columns;
    ModelConfig m = gated_model_of(ModelType::llama, h.heads, h.kv_heads, h.head_dim, hidden, hidden);
    m.dtype = dtype;
    const auto plan = cuda::plan_persistent(planned(plans).arch(), cuda::persistent_model(m, dtype), 1);
    REQUIRE(plan);
    CHECK(plan->gqa_heads == h.gqa_heads);
    CHECK(cuda::is_rows(plan->products) == (hidden >= 1024));
    const HostLayers one(m, {.batch = 1, .capacity = 530}), three(m, {.batch = 3, .capacity = 530}),
        many_keys(m, {.batch = 1, .capacity = 4100});
    const auto check = [&](const HostLayers& host, int kv_len, const cuda::PersistentChoices& choices) {
      CAPTURE(to_string(plans), h.heads, h.kv_heads, h.head_dim, host.load.batch, kv_len, to_string(dtype));
      check_taps(host, kv_len, plans, choices);
    };
    // The newest key ends a tile, and begins one, a split's first one.
    for (int kv_len : {16, 17, 33, 512, 513}) check(one, kv_len, {});
    // Keys that are just not split, and just are; as many splits as the plan allows, some of them without keys.
    for (int kv_len : {5, 128, 129, 289}) check(one, kv_len, {});
    check(many_keys, 4100, {});
    // With few splits a warp has several tiles, a split several stages, and a block merges several heads of a GQA tile.
    for (int splits : {1, 2, 3})
      for (int kv_len : {15, 97, 289}) check(one, kv_len, {.attention_splits = splits});
    check(one, 289, {.attention_splits = 2, .tile_products = true});
    // A block has several splits of the keys, of one sequence or of several.
    for (int kv_len : {97, 529}) {
      check(one, kv_len, {.blocks = 12, .attention_splits = 7});
      check(three, kv_len, {.blocks = 12, .attention_splits = 4});
    }
    check(three, 289, {.blocks = 12});
  }
}

TEST_CASE("persistent: a cache of 131072 entries is read to its end", "[gpu][persistent][long]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  constexpr std::int64_t capacity = 131072;
  std::vector<ModelConfig> models{gated_model_of(ModelType::llama, 4, 1, 64, 256, 320), small_model(DType::f16, 1)};
  for (ModelConfig& m : models) {
    m.dtype = DType::bf16;
    m.num_hidden_layers = 1;
    m.max_position_embeddings = capacity;
    const HostLayers host(m, {.batch = 1, .capacity = capacity});
    for (int kv_len : {131071, 131072}) {
      CAPTURE(to_string(plans), m.name, kv_len);
      check_taps(host, kv_len, plans);
    }
  }
}

namespace {

/// One layer's step by the persistent kernel and by the ops one by one, at each kv_len: each is within the budget of
/// what both should be.
void check_against_unfused(const ModelConfig& m, const Workload& load, std::initializer_list<int> kv_lens,
                           Linears linears = Linears::dense) {
  const HostLayers host = host_layers(m, load, linears);
  const Layer::Dims dims = ops::example<Layer>(m, {.batch = load.batch, .kv_len = load.capacity}).first;
  const Budget one = Layer::budget(dims, {DType::f32, m.dtype}), budget{2 * one.rel_l2, 2 * one.rel_max};
  for (Plans plans : kPlans) {
    cuda::Context c = planned(plans);
    DeviceLayers on(c, host);
    PersistentKernel kernel = kernel_of(plans, c, on);
    for (int kv_len : kv_lens) {
      on.set_kv_len(lengths(load, kv_len));
      require_ok(cuda::run(Layer::Args{.model = host.config, .weights = on.layers[0].weights, .t = on.tensors(0)}, c));
      const Tensor expected = fetch<2>(on.tensors(0).output);
      on.scrub_output();
      require_ok(run(kernel, c, on));
      const auto error = compare(fetch<2>(on.tensors(0).output), expected);
      REQUIRE(error);
      CAPTURE(to_string(plans), m.name, load.batch, kv_len, error->rel_l2, budget.rel_l2, error->rel_max,
              budget.rel_max);
      CHECK(error->within(budget));
    }
  }
}

/// Whether the kernel refuses a preset by name.
bool is_refused(const ModelConfig& preset) {
  return preset.family().positions == Positions::learned || preset.hidden_size > cuda::kMaxPersistentHidden;
}

}  // namespace

TEST_CASE("persistent: agrees with the ops one by one over all presets", "[gpu][persistent][presets]") {
  for (const ModelConfig& preset : presets()) {
    if (is_refused(preset)) continue;
    ModelConfig m = preset;
    m.num_hidden_layers = 1;
    m.max_position_embeddings = 2048;
    check_against_unfused(m, {.batch = 1, .capacity = 2048}, {1, 2, 17, 127, 128, 129, 1023, 1024, 1025, 2047, 2048});
  }
}

TEST_CASE("persistent: packed layers agree with the ops one by one over presets",
          "[gpu][persistent][presets][packed]") {
  for (const ModelConfig& preset : presets()) {
    if (is_refused(preset)) continue;
    ModelConfig m = preset;
    cuda::PersistentModel packed = cuda::persistent_model(m, m.dtype);
    packed.packed = true;
    if (const auto plan = cuda::plan_persistent(planned(Plans::own).arch(), packed, 1); !plan) {
      CHECK(refusal_fault(plan.status(), Code::unimplemented, {"with packed weights"}) == "");
      continue;
    }
    m.num_hidden_layers = 1;
    m.max_position_embeddings = 2048;
    for (Linears linears : {Linears::packed, Linears::mixed})
      check_against_unfused(m, {.batch = 1, .capacity = 2048}, {1, 17, 129, 1024, 2048}, linears);
  }
}

TEST_CASE("persistent: agrees with the ops one by one whichever way it takes products", "[gpu][persistent]") {
  // Slices of 2560 and of 2048 columns have row products of their own.
  for (ModelConfig m : {model_of(32, 80, 20, 2560), model_of(16, 128, 32, 2048)})
    for (bool parallel : {true, false})
      for (DType dtype : {DType::f16, DType::bf16})
        for (std::int64_t batch : {1, 2, 3}) {
          m.use_parallel_residual = parallel;
          m.dtype = dtype;
          check_against_unfused(m, {.batch = batch, .capacity = 300}, {1, 130, 300});
        }
  for (ModelConfig m : {gated_model_of(ModelType::llama, 20, 5, 128, 2560, 5120),
                        gated_model_of(ModelType::mistral, 32, 8, 128, 4096, 8192),
                        gated_model_of(ModelType::qwen2, 28, 4, 128, 3584, 18944),
                        gated_model_of(ModelType::llama, 32, 2, 64, 2048, 4096)})
    for (DType dtype : {DType::f16, DType::bf16})
      for (std::int64_t batch : {1, 2, 3}) {
        m.dtype = dtype;
        check_against_unfused(m, {.batch = batch, .capacity = 300}, {1, 130, 300});
      }
  // Slices of any length: 1152 columns without down's, 2304 of down's.
  for (bool parallel : {true, false}) {
    ModelConfig m = model_of(18, 64, 16, 4608);
    m.use_parallel_residual = parallel;
    check_against_unfused(m, {.batch = 1, .capacity = 300}, {1, 130, 300});
  }
}

namespace {

/// All layers in one launch, one launch a layer and two: the same output and caches.
void check_launches(Plans plans, const ModelConfig& m, std::int64_t batch, Linears linears = Linears::dense) {
  const Workload load{.batch = batch, .capacity = 40};
  const HostLayers host = host_layers(m, load, linears);
  const cuda::Context c = planned(plans);
  DeviceLayers on(c, host);
  PersistentKernel kernel = kernel_of(plans, c, on);
  for (int kv_len : {1, 33, 40}) {
    CAPTURE(to_string(plans), m.name, to_string(m.dtype), m.use_parallel_residual, m.hidden_size, batch, kv_len);
    on.set_kv_len(lengths(load, kv_len));
    on.reset();
    require_ok(run(kernel, c, on));
    const auto expected = on.results();
    for (Launches launches : {Launches::layer, Launches::split}) {
      CAPTURE(to_string(launches));
      on.reset();
      on.scrub_output();
      require_ok(run(kernel, c, on, launches));
      CHECK(same_bits(on.results(), expected));
    }
  }
}

}  // namespace

TEST_CASE("persistent: one launch, one a layer and two a layer give the same bits",
          "[gpu][persistent][launches][small]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  const Kind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  for (DType dtype : {DType::f16, DType::bf16})
    for (std::int64_t batch : {1, 2, 4, 8}) check_launches(plans, small_model(dtype, 3, kind), batch);
  for (std::int64_t batch : {1, 2, 8})
    for (Linears linears : {Linears::packed, Linears::mixed})
      check_launches(plans, small_model(DType::f16, 5, kind), batch, linears);
}

TEST_CASE("persistent: so they do whichever rows are sliced", "[gpu][persistent][launches]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  const Kind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  // None, only those of down, all; and a tile product.
  for (ModelConfig m : {model_of_kind(kind, 16, 64, 16, 1024), model_of_kind(kind, 32, 80, 20, 10240),
                        model_of_kind(kind, 32, 128, 32, 4096), model_of_kind(kind, 4, 64, 16, 4096)}) {
    m.num_hidden_layers = 2;
    check_launches(plans, m, 1);
  }
  // Only those of dense, and all but those of dense; slices of any length.
  for (ModelConfig m : {gated_model_of(ModelType::llama, 16, 2, 128, 1024, 1024),
                        gated_model_of(ModelType::llama, 16, 2, 64, 2048, 4096),
                        gated_model_of(ModelType::qwen2, 20, 4, 128, 2608, 5008)}) {
    m.num_hidden_layers = 2;
    check_launches(plans, m, 1);
  }
}

TEST_CASE("persistent: 66 layers are one launch or one a layer, with the same bits", "[gpu][persistent][launches]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  ModelConfig m = model_of(2, 32, 8, 96);
  m.num_hidden_layers = 66;
  check_launches(plans, m, 1);
}

namespace {

/// One launch's bits, asked again `runs` times while blocks are delayed at random. before(i) comes before the i-th.
template <class Before>
void check_delayed(Plans plans, Kind kind, std::int64_t layers, std::int64_t batch, unsigned runs, Launches launches,
                   Before before, Linears linears = Linears::dense, std::int64_t intermediate = 2560) {
  ModelConfig m = model_of_kind(kind, 32, 80, 20, intermediate);
  m.num_hidden_layers = layers;
  CAPTURE(to_string(plans), to_string(kind), to_string(linears), batch);
  const Workload load{.batch = batch, .capacity = 130};
  const HostLayers host = host_layers(m, load, linears);
  const cuda::Context c = planned(plans);
  DeviceLayers on(c, host);
  on.set_kv_len(lengths(load, 129));
  PersistentKernel kernel = kernel_of(plans, c, on);
  require_ok(run(kernel, c, on));
  const auto expected = on.results();
  for (unsigned i = 1; i <= runs; ++i) {
    require_ok(kernel.set_probe({.delay_seed = i % 4 ? 0 : i}));
    before(i);
    on.scrub_output();
    require_ok(run(kernel, c, on, launches));
    if (i % 10 == 0) REQUIRE(test::same_bits(fetch<2>(on.tensors(0).output), expected[0]));
  }
  CHECK(same_bits(on.results(), expected));
}

}  // namespace

TEST_CASE("persistent: two launches a layer give the same bits with delayed blocks", "[gpu][persistent][launches]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  const Kind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  check_delayed(plans, kind, 3, 1, 100, Launches::split, [](unsigned) {});
}

TEST_CASE("persistent: layers narrower than the GPU end, with delayed blocks too", "[gpu][persistent][launches]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  const Linears linears = GENERATE(Linears::dense, Linears::packed);
  ModelConfig m = linears == Linears::dense ? model_of(3, 8, 2, 24) : small_model(DType::f16);
  m.num_hidden_layers = 20;
  CAPTURE(to_string(plans), to_string(linears));
  const Workload load{.batch = 1, .capacity = 40};
  const HostLayers host = host_layers(m, load, linears);
  const cuda::Context c = planned(plans);
  DeviceLayers on(c, host);
  on.set_kv_len(lengths(load, 33));
  PersistentKernel kernel = kernel_of(plans, c, on);
  require_ok(run(kernel, c, on));
  const auto expected = on.results();
  for (unsigned seed = 1; seed <= 500; ++seed) {
    CAPTURE(seed);
    on.reset();
    require_ok(kernel.set_probe({.delay_seed = seed}));
    require_ok(run(kernel, c, on));
    require_cuda(cudaDeviceSynchronize());
    require_ok(kernel.take_report());
  }
  CHECK(same_bits(on.results(), expected));
}

CF_FOR_PLANS("persistent: a thousand runs give the same bits, with delayed blocks and other work on the GPU",
             "[gpu][persistent]") {
  const Kind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  cudaStream_t other = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  const auto occupy = [&](unsigned i) {
    if (i % 50 == 0) enqueue_occupy(other, 16, 1);
  };
  check_delayed(plans, kind, 4, 2, 1000, Launches::persistent, occupy);
  for (std::int64_t sequences : {1, 5})
    for (Linears linears : {Linears::packed, Linears::mixed})
      check_delayed(plans, kind, 4, sequences, 1000, Launches::persistent, occupy, linears);
  // Of one sequence the pairs of SwiGLU share their sums.
  if (kind == Kind::gated) check_delayed(plans, kind, 4, 1, 1000, Launches::persistent, occupy);
  // Each warp loads its own slice of mlp.act to registers.
  if (kind != Kind::parallel)
    check_delayed(plans, kind, 3, 1, 1000, Launches::persistent, occupy, Linears::dense, 10304);
  require_cuda(cudaStreamSynchronize(other));
  require_cuda(cudaStreamDestroy(other));
}

namespace {

/// Every variant of the plan that the device makes: the plan's own bits, or within twice a layer's budget of its
/// output.
void check_variants(Plans plans, const ModelConfig& m, std::int64_t batch) {
  const Workload load{.batch = batch, .capacity = 300};
  const HostLayers host(m, load);
  const cuda::Context c = planned(plans);
  DeviceLayers on(c, host);
  on.set_kv_len(lengths(load, 300));
  PersistentKernel own = kernel_of(plans, c, on);
  require_ok(run(own, c, on));
  const auto expected = on.results();
  const Budget one =
      Layer::budget(ops::example<Layer>(m, {.batch = batch, .kv_len = load.capacity}).first, {DType::f32, m.dtype});
  for (const cuda::PersistentVariant& v : cuda::persistent_variants(own.plan())) {
    on.reset();
    on.scrub_output();
    PersistentKernel kernel = kernel_of(plans, c, on, v.choices);
    CAPTURE(to_string(plans), m.name, batch, v.choice, v.value, to_string(kernel.plan()));
    require_ok(run(kernel, c, on));
    if (cuda::same_bits(kernel.plan(), own.plan())) {
      CHECK(same_bits(on.results(), expected));
      on.reset();
      on.scrub_output();
      require_ok(run(kernel, c, on, Launches::split));
      CHECK(same_bits(on.results(), expected));
    } else {
      const auto error = compare(fetch<2>(on.tensors(0).output), expected[0]);
      REQUIRE(error);
      CAPTURE(error->rel_l2, one.rel_l2, error->rel_max, one.rel_max);
      CHECK(error->within({2 * one.rel_l2, 2 * one.rel_max}));
    }
  }
}

}  // namespace

TEST_CASE("persistent: plans that choose otherwise compute the same", "[gpu][persistent][variants]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  for (Kind kind : kKinds) {
    check_variants(plans, model_of_kind(kind, 32, 80, 20, 10240), 1);
    check_variants(plans, small_model(DType::bf16, 1, kind), 1);
  }
  check_variants(plans, small_model(DType::f16, 1), 3);
  check_variants(plans, small_model(DType::f16, 1, Kind::gated), 3);
  check_variants(plans, gated_model_of(ModelType::llama, 8, 2, 128, 1024, 11008), 1);
}

TEST_CASE("persistent: waits for SMs that another kernel holds", "[gpu][persistent]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  const Launches launches = GENERATE(Launches::persistent, Launches::split);
  const HostLayers host(small_model(DType::f16), {.batch = 1, .capacity = 20});
  cudaStream_t stream = nullptr, other = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  require_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  {
    const cuda::Context c = planned(plans, stream);
    DeviceLayers on(c, host);
    on.set_kv_len({17});
    PersistentKernel kernel = kernel_of(plans, c, on);
    require_ok(run(kernel, c, on));
    const auto expected = on.results();
    enqueue_occupy(other, 40, 100);
    require_ok(run(kernel, c, on, launches));
    CHECK(same_bits(on.results(), expected));
    require_ok(kernel.take_report());
  }
  require_cuda(cudaStreamDestroy(stream));
  require_cuda(cudaStreamDestroy(other));
}

TEST_CASE("persistent: what no block publishes is an error that names the model's layer, and the next launch is sound",
          "[gpu][persistent][report]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  const Kind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const std::int64_t batch = GENERATE(1, 4);
  const bool act_in_registers = GENERATE(false, true);
  if (act_in_registers && (batch > 1 || kind == Kind::parallel)) return;
  ModelConfig m = act_in_registers ? model_of_kind(kind, 16, 64, 16, 10304) : small_model(DType::f16, 3, kind);
  m.num_hidden_layers = 3;
  const ModelNames names = names_of(m.spec());
  const Workload load{.batch = batch, .capacity = 20};
  const HostLayers host(m, load);
  const cuda::Context c = planned(plans);
  DeviceLayers on(c, host);
  on.set_kv_len(lengths(load, 17));
  PersistentKernel kernel = kernel_of(plans, c, on, {}, /*first_model_layer=*/7);
  REQUIRE(kernel.plan().act_in_registers == act_in_registers);
  require_ok(run(kernel, c, on));
  const auto expected = on.results();
  const std::string blocks = "all " + std::to_string(kernel.plan().grid) + " blocks";
  // With two launches a layer, the second lacks a result of the first. The report names what was missing first.
  for (Launches launches : {Launches::persistent, Launches::layer, Launches::split})
    for (const Site& of :
         {names.query_key_value, names.context, names.dense, names.dense_h_to_4h, names.dense_4h_to_h}) {
      if (kind == Kind::parallel && of.id == SiteId::dense) continue;  // no block waits for it
      // The next launch finds the whole hidden state, since only its epochs are withheld.
      if (launches != Launches::persistent && of.id == SiteId::dense_4h_to_h) continue;
      const std::string site(of.name);
      CAPTURE(to_string(plans), to_string(kind), batch, to_string(launches), site);
      require_ok(kernel.set_probe({.withheld_layer = 1, .withheld_site = site, .wait_limit_ms = 20}));
      // The launches of one run may report before its last one is enqueued, which then is not.
      const Status enqueued = run(kernel, c, on, launches);
      require_cuda(cudaDeviceSynchronize());
      require_ok(kernel.set_probe({}));
      const Status reported = enqueued ? kernel.take_report() : enqueued;
      CHECK(refusal_fault(reported, Code::device_error, {"persistent: layer 8: " + site, " ms, ", blocks}) == "");
      // A launch behind the stopped one may have reported what it lacked in turn.
      if (!enqueued) (void)kernel.take_report();
      require_ok(kernel.take_report());
      require_ok(run(kernel, c, on, launches));
      CHECK(same_bits(on.results(), expected));
    }
  CHECK(refusal_fault(kernel.set_probe({.withheld_layer = 0, .withheld_site = "input_layernorm"}),
                      Code::invalid_argument, {"'input_layernorm'"}) == "");
}

namespace {

/// Launches of whole tokens, whose sequences begin with different ids and lengths.
struct TokenLaunches {
  TokenLaunches(Plans plans, const ModelConfig& m, std::int64_t batch, Linears linears)
      : load{.batch = batch, .capacity = 60},
        host(host_layers(m, load, linears)),
        c(planned(plans)),
        on(c, host),
        ends(c, host, on),
        kernel(kernel_of_tokens(plans, c, on, ends)),
        first_lengths(lengths(load, 40)) {
    for (std::int64_t b = 0; b < batch; ++b) first_ids.push_back(std::int32_t(17 * b + 5));
  }

  void begin() {
    on.reset();
    on.set_kv_len(first_lengths);
    ends.set_ids(first_ids);
  }
  /// Runs a launch, and returns the number of its first token.
  unsigned run(std::int64_t tokens, std::span<const cuda::PersistentEnd> sequence_ends = {}) {
    const auto number = kernel.enqueue_tokens(c.stream(), tokens, ends.logits, sequence_ends);
    require_ok(number.status());
    require_cuda(cudaDeviceSynchronize());
    require_ok(kernel.take_report());
    return *number;
  }
  /// The sequences' lengths, `tokens` tokens further.
  std::vector<std::int32_t> lengths_after(std::int64_t tokens) const {
    std::vector<std::int32_t> after = first_lengths;
    for (std::int32_t& n : after) n += std::int32_t(tokens);
    return after;
  }

  Workload load;
  HostLayers host;
  cuda::Context c;
  DeviceLayers on;
  DeviceEnds ends;
  PersistentKernel kernel;
  std::vector<std::int32_t> first_ids{}, first_lengths;
};

/// Whether sequence b of a cache has the entries of `after` from `first` on, `count` of them, and those of `before`
/// else.
bool has_appended(const Tensor& cache, std::int64_t b, std::int64_t first, std::int64_t count, const Tensor& before,
                  const Tensor& after) {
  const Shape& shape = cache.shape();  // (batch, kv_heads, capacity, head_dim)
  const std::size_t bytes = std::size_t(shape[3]) * 2;
  bool has = true;
  for (std::int64_t head = 0; head < shape[1]; ++head)
    for (std::int64_t entry = 0; entry < shape[2]; ++entry) {
      const std::size_t at = std::size_t((b * shape[1] + head) * shape[2] + entry) * bytes;
      const Tensor& expected = entry < first || entry >= first + count ? before : after;
      has = has && std::memcmp(static_cast<const char*>(cache.data()) + at,
                               static_cast<const char*>(expected.data()) + at, bytes) == 0;
    }
  return has;
}

}  // namespace

CF_FOR_PLANS("persistent: many tokens of one launch are those of one launch each, with delayed blocks too",
             "[gpu][persistent][tokens]") {
  const Kind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const std::int64_t batch = GENERATE(1, 3, 8), layers = GENERATE(2, 3);
  const DType dtype = GENERATE(DType::f16, DType::bf16);
  const Linears linears = GENERATE(from_range(std::begin(kLinears), std::end(kLinears)));
  constexpr std::int64_t tokens = 12;
  CAPTURE(to_string(plans), to_string(kind), batch, layers, to_string(dtype), to_string(linears));
  TokenLaunches of(plans, small_model(dtype, layers, kind), batch, linears);

  of.begin();
  std::vector<std::vector<std::int32_t>> expected;
  for (std::int64_t t = 0; t < tokens; ++t) {
    require_ok(of.kernel.enqueue_token(of.c.stream(), of.ends.logits));
    require_cuda(cudaDeviceSynchronize());
    require_ok(of.kernel.take_report());
    expected.push_back(of.ends.best());
    if (t + 1 == tokens) break;
    of.on.set_kv_len(of.lengths_after(t + 1));
    of.ends.set_ids(expected.back());
  }
  const Tensor logits = fetch<2>(of.ends.logits);
  const std::vector<Tensor> caches = of.on.results();

  for (unsigned seed = 0; seed < 20; ++seed) {
    CAPTURE(seed);
    of.begin();
    require_ok(of.kernel.set_probe({.delay_seed = seed}));
    const unsigned number = of.run(tokens);
    for (std::int64_t t = 0; t < tokens; ++t)
      for (std::int64_t b = 0; b < batch; ++b)
        CHECK(of.kernel.made(number + unsigned(t), b) == expected[std::size_t(t)][std::size_t(b)]);
    CHECK(test::same_bits(fetch<2>(of.ends.logits), logits));
    CHECK(of.ends.words_of(of.ends.ends.chosen) == expected.back());
    CHECK(of.ends.words_of(of.ends.ends.ids) == expected[tokens - 2]);
    CHECK(of.ends.words_of(of.ends.ends.kv_len) == of.lengths_after(tokens - 1));
    CHECK(same_bits(of.on.results(), caches));
  }
  CHECK(!of.kernel.made(1 << 20, 0));
}

TEST_CASE("persistent: a launch ends its sequences at stop ids and limits, with delayed blocks too",
          "[gpu][persistent][tokens]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  const Kind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const std::int64_t batch = GENERATE(1, 3, 8);
  const Linears linears = GENERATE(Linears::dense, Linears::packed);
  constexpr std::int64_t tokens = 12;
  CAPTURE(to_string(plans), to_string(kind), batch, to_string(linears));
  TokenLaunches of(plans, small_model(DType::f16, 2, kind), batch, linears);
  of.begin();
  const std::vector<Tensor> untouched = of.on.results();
  const unsigned free_run = of.run(tokens);
  std::vector<std::vector<std::int32_t>> expected(static_cast<std::size_t>(batch));  // by sequence
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t t = 0; t < tokens; ++t)
      expected[std::size_t(b)].push_back(of.kernel.made(free_run + unsigned(t), b).value());
  const std::vector<Tensor> all_appended = of.on.results();

  // Every second sequence ends at a stop id, the others at a limit. Sequence 1 has ended before the launch: its first
  // token is a stop id.
  std::vector<std::vector<std::int32_t>> stop_ids(expected.size());
  std::vector<cuda::PersistentEnd> limits(expected.size());
  std::vector<std::int64_t> runs;  // tokens of each sequence
  for (std::size_t b = 0; b < expected.size(); ++b) {
    const std::vector<std::int32_t>& ids = expected[b];
    std::int64_t run = 2 + std::int64_t(b);
    if (b == 1) {
      stop_ids[b] = {1, of.first_ids[b]};
      run = 0;
    } else if (b % 2 == 0) {
      stop_ids[b] = {2, 3, ids[std::size_t(run) - 1]};
      run = std::find(ids.begin(), ids.end(), stop_ids[b].back()) - ids.begin() + 1;
      for (std::int32_t never : {2, 3}) REQUIRE(std::find(ids.begin(), ids.begin() + run, never) == ids.begin() + run);
    } else {
      limits[b].tokens = run;
    }
    runs.push_back(run);
    limits[b].stop_ids = stop_ids[b];
  }
  // With all ends the launch ends with its last sequence. Where one sequence has none it makes all its tokens.
  for (const bool one_goes_on : {false, true}) {
    CAPTURE(one_goes_on);
    std::vector<cuda::PersistentEnd> given = limits;
    std::vector<std::int64_t> of_each = runs;
    if (one_goes_on) given.back() = {}, of_each.back() = tokens;
    const std::int64_t made = *std::max_element(of_each.begin(), of_each.end());
    for (unsigned seed = 0; seed < 6; ++seed) {
      CAPTURE(seed);
      of.begin();
      require_ok(of.kernel.set_probe({.delay_seed = seed}));
      const unsigned number = of.run(tokens, given);
      const std::vector<std::int32_t> kv_len = of.ends.words_of(of.ends.ends.kv_len);
      const std::vector<Tensor> results = of.on.results();
      for (std::int64_t b = 0; b < batch; ++b) {
        CAPTURE(b);
        const std::int64_t run = of_each[std::size_t(b)], first = of.first_lengths[std::size_t(b)] - 1;
        for (std::int64_t t = 0; t < run; ++t)
          CHECK(of.kernel.made(number + unsigned(t), b) == expected[std::size_t(b)][std::size_t(t)]);
        CHECK(of.kernel.made(number + unsigned(made) - 1, b).has_value());
        if (made < tokens) CHECK(!of.kernel.made(number + unsigned(made), b));
        CHECK(kv_len[std::size_t(b)] == (one_goes_on && b + 1 == batch ? first + tokens : kIdleLength));
        // Behind a sequence's last token nothing is appended.
        for (std::size_t i = 1; i < results.size(); ++i)
          CHECK(has_appended(results[i], b, first, run, untouched[i], all_appended[i]));
      }
    }
  }
  const auto refused = [&](std::span<const cuda::PersistentEnd> given) {
    return of.kernel.enqueue_tokens(of.c.stream(), 1, of.ends.logits, given).status();
  };
  const std::vector<cuda::PersistentEnd> many(std::size_t(batch) + 1);
  CHECK(refusal_fault(refused(many), Code::invalid_argument, {"none or", std::to_string(batch + 1)}) == "");
  const std::vector<std::int32_t> ids(PersistentKernel::most_stop_ids() + 1);
  limits[0].stop_ids = ids;
  CHECK(refusal_fault(refused(limits), Code::invalid_argument, {"stop ids must be at most 8, got 9"}) == "");
}

TEST_CASE("persistent: a launch of many tokens ends where the host asks for no more", "[gpu][persistent][tokens]") {
  const std::int64_t batch = GENERATE(1, 4);
  const ModelConfig m = small_model(DType::f16);
  const Workload load{.batch = batch, .capacity = 200};
  const HostLayers host(m, load);
  const cuda::Context c = planned(Plans::own);
  DeviceLayers on(c, host);
  DeviceEnds ends(c, host, on);
  PersistentKernel kernel = kernel_of_tokens(Plans::own, c, on, ends);
  on.set_kv_len(lengths(load, 40));
  ends.set_ids(std::vector<std::int32_t>(std::size_t(batch), 7));
  const std::int64_t most = PersistentKernel::most_tokens();
  const auto number = kernel.enqueue_tokens(c.stream(), most, ends.logits);
  require_ok(number.status());
  while (!kernel.made(*number + 2, 0)) {
  }
  kernel.end_before(*number + 3);
  require_cuda(cudaDeviceSynchronize());
  require_ok(kernel.take_report());
  std::int32_t made = 0;
  while (made < most && kernel.made(*number + unsigned(made), 0)) ++made;
  CHECK(made >= 3);
  // The state is that of the last token that was made.
  std::vector<std::int32_t> last = lengths(load, 40);
  for (std::int32_t& n : last) n += made - 1;
  CHECK(ends.words_of(ends.ends.kv_len) == last);
  CHECK(ends.words_of(ends.ends.chosen)[0] == *kernel.made(*number + unsigned(made) - 1, 0));
  CHECK(refusal_fault(kernel.enqueue_tokens(c.stream(), most + 1, ends.logits).status(), Code::invalid_argument,
                      {"1 to " + std::to_string(most), std::to_string(most + 1)}) == "");
  CHECK(refusal_fault(kernel.enqueue_token(c.stream(), AnyView<2>(ends.logits.data, {batch, 8}, DType::f16)),
                      Code::invalid_argument, {"logits"}) == "");
  PersistentKernel without = kernel_of(Plans::own, c, on);
  CHECK(refusal_fault(without.enqueue_token(c.stream(), ends.logits), Code::invalid_argument, {"whole model"}) == "");
}

TEST_CASE("persistent: a choice that no block publishes is an error, and the next launch is sound",
          "[gpu][persistent][report][tokens]") {
  const ModelConfig m = small_model(DType::f16, 3, GENERATE(Kind::parallel, Kind::gated));
  const std::string_view head = names_of(m.spec()).embed_out.name;
  const Workload load{.batch = 1, .capacity = 60};
  const HostLayers host(m, load);
  const cuda::Context c = planned(Plans::own);
  DeviceLayers on(c, host);
  DeviceEnds ends(c, host, on);
  PersistentKernel kernel = kernel_of_tokens(Plans::own, c, on, ends);
  on.set_kv_len({40});
  ends.set_ids({7});
  require_ok(kernel.set_probe({.withheld_layer = 3, .withheld_site = head, .wait_limit_ms = 20}));
  require_ok(kernel.enqueue_tokens(c.stream(), 4, ends.logits).status());
  require_cuda(cudaDeviceSynchronize());
  CHECK(refusal_fault(kernel.take_report(), Code::device_error,
                      {"persistent: " + std::string(head) + " was not complete"}) == "");
  require_ok(kernel.set_probe({}));
  on.set_kv_len({40});
  const auto number = kernel.enqueue_tokens(c.stream(), 4, ends.logits);
  require_ok(number.status());
  require_cuda(cudaDeviceSynchronize());
  require_ok(kernel.take_report());
  CHECK(kernel.made(*number + 3, 0).has_value());
}

TEST_CASE("persistent: a report that nobody has taken stops the next launch, once", "[gpu][persistent][report]") {
  const HostLayers host(small_model(DType::f16), {.batch = 1, .capacity = 20});
  const cuda::Context c = planned(Plans::own);
  DeviceLayers on(c, host);
  on.set_kv_len({17});
  PersistentKernel kernel = kernel_of(Plans::own, c, on);
  require_ok(run(kernel, c, on));
  const auto expected = on.results();
  for (Launches launches : {Launches::persistent, Launches::split}) {
    require_ok(kernel.set_probe({.withheld_layer = 2, .withheld_site = "attention.context", .wait_limit_ms = 20}));
    require_ok(run(kernel, c, on));
    require_cuda(cudaDeviceSynchronize());
    require_ok(kernel.set_probe({}));
    on.scrub_output();
    const Tensor scrubbed = fetch<2>(on.tensors(0).output);
    CHECK(refusal_fault(run(kernel, c, on, launches), Code::device_error,
                        {"layer 2: attention.context was not complete within 25 ms"}) == "");
    CHECK(test::same_bits(fetch<2>(on.tensors(0).output), scrubbed));  // nothing was launched
    require_ok(run(kernel, c, on, launches));
    CHECK(same_bits(on.results(), expected));
  }
}

namespace {

Status advance(const cuda::Context& c, DeviceLayers& on) { return cuda::enqueue_extend(on.positions, on.kv_len, 1, c); }

}  // namespace

TEST_CASE("persistent: kernels with threads and streams of their own do not meet", "[gpu][persistent]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  const HostLayers host(small_model(DType::f16), {.batch = 1, .capacity = 64});
  constexpr int steps = 64;
  const auto decode = [&](const cuda::Context& c, DeviceLayers& on, PersistentKernel& kernel) {
    for (int i = 0; i < steps; ++i) {
      if (!run(kernel, c, on)) return false;
      if (i + 1 < steps && !advance(c, on)) return false;
    }
    return cudaStreamSynchronize(c.stream()) == cudaSuccess && bool(kernel.take_report());
  };
  const cuda::Context alone = planned(plans);
  DeviceLayers reference(alone, host);
  reference.set_kv_len({1});
  PersistentKernel reference_kernel = kernel_of(plans, alone, reference);
  REQUIRE(decode(alone, reference, reference_kernel));
  const auto expected = reference.results();
  cudaStream_t streams[2] = {};
  for (cudaStream_t& s : streams) require_cuda(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  {
    const cuda::Context contexts[2] = {planned(plans, streams[0]), planned(plans, streams[1])};
    DeviceLayers on[2] = {{contexts[0], host}, {contexts[1], host}};
    for (DeviceLayers& d : on) d.set_kv_len({1});
    PersistentKernel kernels[2] = {kernel_of(plans, contexts[0], on[0]), kernel_of(plans, contexts[1], on[1])};
    bool ok[2] = {};
    std::thread threads[2];
    for (int i = 0; i < 2; ++i) threads[i] = std::thread([&, i] { ok[i] = decode(contexts[i], on[i], kernels[i]); });
    for (std::thread& t : threads) t.join();
    for (int i = 0; i < 2; ++i) {
      REQUIRE(ok[i]);
      CHECK(same_bits(on[i].results(), expected));
    }
  }
  for (cudaStream_t s : streams) require_cuda(cudaStreamDestroy(s));
}

TEST_CASE("persistent: steps can be captured into a graph, beyond a full cache too", "[gpu][persistent]") {
  const Plans plans = GENERATE(Plans::own, Plans::rtx5090);
  const Launches launches = GENERATE(Launches::persistent, Launches::split);
  constexpr int steps = 20;
  const HostLayers host(small_model(DType::f16), {.batch = 1, .capacity = steps});
  cudaStream_t stream = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  {
    const cuda::Context c = planned(plans, stream);
    DeviceLayers captured(c, host), plain(c, host);
    for (DeviceLayers* d : {&captured, &plain}) d->set_kv_len({1});
    PersistentKernel captured_kernel = kernel_of(plans, c, captured), kernel = kernel_of(plans, c, plain);
    require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    require_ok(run(captured_kernel, c, captured, launches));
    require_ok(advance(c, captured));
    cudaGraph_t graph = nullptr;
    require_cuda(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t exec = nullptr;
    require_cuda(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < steps; ++i) {
      require_cuda(cudaGraphLaunch(exec, stream));
      require_ok(run(kernel, c, plain));
      require_ok(advance(c, plain));
    }
    require_cuda(cudaStreamSynchronize(stream));
    for (PersistentKernel* k : {&captured_kernel, &kernel}) require_ok(k->take_report());
    require_cuda(cudaGraphExecDestroy(exec));
    require_cuda(cudaGraphDestroy(graph));
    CHECK(same_bits(captured.results(), plain.results()));
    // The cache is full: the next step leaves it alone, and has nothing to attend to.
    const auto full = plain.results();
    require_ok(run(kernel, c, plain));
    const auto beyond = plain.results();
    CHECK(std::isnan(beyond[0].at(0)));
    for (std::size_t i = 1; i < full.size(); ++i) CHECK(test::same_bits(beyond[i], full[i]));
  }
  require_cuda(cudaStreamDestroy(stream));
}

TEST_CASE("persistent: what the kernel does not take is refused by name", "[gpu][persistent][bad]") {
  const cuda::Context c = planned(Plans::own);
  const HostLayers host(small_model(DType::f16), {.batch = 2, .capacity = 8});
  DeviceLayers on(c, host);
  const cuda::PersistentModel good = cuda::persistent_model(host.config, host.config.dtype);
  struct Call {
    cuda::PersistentModel model;
    std::vector<cuda::PersistentLayer> layers;
    cuda::PersistentSequences sequences;
    cuda::RopeTable rope;
  };
  const auto refused = [&](auto change, Code code, std::initializer_list<std::string_view> parts) {
    Call call{good, on.layers, on.sequences(), on.rope()};
    change(call);
    return refusal_fault(
        PersistentKernel::create(c, call.model, call.layers, call.sequences, call.rope, {.first_model_layer = 5})
            .status(),
        code, parts);
  };
  const auto unimplemented = Code::unimplemented, invalid = Code::invalid_argument;
  CHECK(refused([](Call& a) { a.model.dtype = DType::f32; }, unimplemented, {"float16", "got float32"}) == "");
  CHECK(refused([](Call& a) { a.sequences.kv_len.shape[0] = a.sequences.positions.shape[0] = 9; }, unimplemented,
                {"1 to 8 sequences, got 9"}) == "");
  CHECK(refused([](Call& a) { a.sequences.positions.shape[0] = 4; }, unimplemented,
                {"one new token a sequence, got 4 for 2"}) == "");
  CHECK(refused([](Call& a) { a.layers.clear(); }, invalid, {"expected at least 1"}) == "");
  CHECK(refused([](Call& a) { a.layers.resize(85, a.layers[0]); }, unimplemented,
                {"up to 84 layers, the LM head among them, got 85"}) == "");
  CHECK(refused([](Call& a) { a.layers.resize(84, a.layers[0]); }, unimplemented, {}) == "was accepted");
  CHECK(refused([](Call& a) { a.layers[1].weights.dense.weight = GptqWeight{}; }, unimplemented,
                {"dense or packed weights, got quantised ones"}) == "");
  CHECK(refused([](Call& a) { a.layers[2].weights.input_layernorm.beta.data = nullptr; }, invalid,
                {"persistent: layer 7: 'input_layernorm.bias' is null"}) == "");
  CHECK(refused([](Call& a) { std::get<DenseWeight>(a.layers[1].weights.dense_4h_to_h.weight).weight.shape[1] = 8; },
                invalid, {"layer 6: 'mlp.dense_4h_to_h.weight' has shape (256, 8), expected (256, 512)"}) == "");
  CHECK(refused([](Call& a) { a.layers[1].cache.k.shape[2] = 7; }, invalid, {"layer 6: 'k_cache' has shape"}) == "");
  CHECK(refused([](Call& a) { a.layers[1].cache.k.dtype = DType::f32; }, unimplemented, {"got float16"}) == "");
  CHECK(refused([](Call& a) { a.rope.sin.shape[1] = 4; }, invalid, {"'sin' has shape"}) == "");
  CHECK(refused([&](Call& a) { a.layers[0].cache.v.data = const_cast<void*>(host.hidden.data()); }, invalid,
                {"layer 5: 'v_cache' points to host memory"}) == "");

  // Llama's layers by their own names.
  const HostLayers gated_host(small_model(DType::f16, 3, Kind::gated), {.batch = 2, .capacity = 8});
  DeviceLayers gated(c, gated_host);
  const auto gated_refused = [&](auto change, std::initializer_list<std::string_view> parts) {
    Call call{cuda::persistent_model(gated.config(), DType::f16), gated.layers, gated.sequences(), gated.rope()};
    change(call);
    return refusal_fault(PersistentKernel::create(c, call.model, call.layers, call.sequences, call.rope).status(),
                         invalid, parts);
  };
  CHECK(gated_refused([](Call& a) { a.layers[2].weights.input_layernorm.gamma.data = nullptr; },
                      {"persistent: layer 2: 'input_layernorm.weight' is null"}) == "");
  CHECK(gated_refused(
            [](Call& a) { std::get<DenseWeight>(a.layers[1].weights.dense_h_to_4h.weight).weight.shape[0] /= 2; },
            {"layer 1: 'mlp.gate_up_proj.weight' has shape (512, 256), expected (1024, 256)"}) == "");
  CHECK(gated_refused(
            [](Call& a) { std::get<DenseWeight>(a.layers[0].weights.query_key_value.weight).weight.shape[0] = 768; },
            {"'self_attn.qkv_proj.weight' has shape (768, 256), expected (384, 256)"}) == "");
  CHECK(gated_refused([](Call& a) { a.layers[1].cache.k.shape[1] = 4; },
                      {"layer 1: 'k_cache' has shape (2, 4, 8, 64), expected (2, 1, 8, 64)"}) == "");
  CHECK(gated_refused([](Call& a) { a.model.kv_heads = 3; }, {"heads must be a multiple of kv_heads 3, got 4"}) == "");

  PersistentKernel kernel = kernel_of(Plans::own, c, on);
  const LayerTensors t = on.tensors(0);
  const auto step = [&](std::int64_t first, std::int64_t last, const AnyView<2>& output) {
    return kernel.enqueue(c.stream(), first, last, t.hidden, output);
  };
  CHECK(refusal_fault(step(1, 1, t.output), invalid, {"range within [0, 3), got [1, 1)"}) == "");
  CHECK(refusal_fault(step(0, 4, t.output), invalid, {"range within [0, 3), got [0, 4)"}) == "");
  CHECK(refusal_fault(kernel.enqueue_split(c.stream(), 3, t.hidden, t.output), invalid, {"got [3, 4)"}) == "");
  CHECK(refusal_fault(step(0, 3, {}), invalid, {"'output' is null"}) == "");
  CHECK(refusal_fault(step(0, 3, {t.output.data, {1, 256}, DType::f16}), invalid, {"'output' has shape (1, 256)"}) ==
        "");
}
