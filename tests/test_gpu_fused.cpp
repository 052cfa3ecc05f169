// The persistent kernel: each layer the oracle's within its budget, the same bits on every run whatever the blocks' timing,
// one launch or many, and an error instead of a hang.
#include <cuda_runtime_api.h>

#include <cstring>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

#include "core/compare.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cuda/decode_stack.hpp"
#include "cuda/decode_variants.hpp"
#include "device_stack.hpp"
#include "occupy.hpp"
#include "refusal.hpp"
#include "setups.hpp"

using namespace cf;
using namespace cf::test;
using cuda::DecodeStack;
using cuda::Impl;
using cuda::Stack;

namespace {

using Layer = ops::DecodeLayer;

/// A context with the device's own plans or, where an SM holds two blocks of the kernel, with those of an RTX 5090.
cuda::Context planned(cudaStream_t stream = nullptr) {
  cuda::Context c = context(stream);
#ifdef CF_DECODE_BLOCKS_PER_SM
  c.set_plan_arch(cuda::kRtx5090);
#endif
  return c;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && std::memcmp(a.data(), b.data(), std::size_t(a.size_bytes())) == 0;
}

struct Model {
  ModelConfig config;
  Workload load;
  std::vector<OwnedLayerWeights> weights;
  std::vector<Tensor> k_caches, v_caches;
  Tensor hidden;

  Model(const ModelConfig& m, const Workload& w) : config(m), load(w) {
    config.max_position_embeddings = std::max(m.max_position_embeddings, w.cache_capacity());
    const Shape cache{w.batch, m.num_attention_heads, w.cache_capacity(), m.head_dim()};
    for (std::int64_t l = 0; l < m.num_hidden_layers; ++l) {
      weights.push_back(procedural_layer(m, l, 7));
      k_caches.push_back(activations(m.dtype, cache, "k" + std::to_string(l)));
      v_caches.push_back(activations(m.dtype, cache, "v" + std::to_string(l)));
    }
    hidden = activations(m.dtype, {w.tokens(), m.hidden_size}, "hidden");
  }
  Stack stack(const cuda::Context& c) const {
    Result<Stack> s = Stack::create(c, config, config.num_hidden_layers, load, config.dtype);
    require_ok(s.status());
    for (std::int64_t l = 0; l < s->layers(); ++l) require_ok(s->load_layer(l, weights[std::size_t(l)].weights));
    reset(*s);
    return std::move(*s);
  }
  /// What a step starts from: the caches without its appends.
  void reset(Stack& s) const {
    for (std::int64_t l = 0; l < s.layers(); ++l)
      require_ok(s.set_cache(l, k_caches[std::size_t(l)], v_caches[std::size_t(l)]));
    require_ok(s.set_hidden(hidden));
  }
};

/// The stack's last output, then all its caches.
std::vector<Tensor> results(const Stack& s) {
  std::vector<Tensor> all;
  all.push_back(fetch<2>(s.tensors(s.layers() - 1).output));
  for (std::int64_t l = 0; l < s.layers(); ++l) {
    all.push_back(fetch<4>(s.tensors(l).k_cache));
    all.push_back(fetch<4>(s.tensors(l).v_cache));
  }
  return all;
}
bool same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!same_bits(a[i], b[i])) return false;
  return a.size() == b.size();
}

std::vector<std::int32_t> lengths(const Workload& w, std::int32_t kv_len) {
  std::vector<std::int32_t> n;
  for (std::int64_t b = 0; b < w.batch; ++b) n.push_back(std::max(1, kv_len - 3 * std::int32_t(b)));
  return n;
}

/// The kernel on a stack's memory, with what only tests may ask of it.
DecodeStack kernel_of(const cuda::Context& c, const Stack& s, const cuda::DecodeChoices& choices = {}) {
  Result<DecodeStack> d = DecodeStack::create(c, s, choices);
  require_ok(d.status());
  return std::move(*d);
}
Status run(DecodeStack& d, const cuda::Context& c, const Stack& s) {
  return d.enqueue(c.stream(), 0, s.layers(), s.tensors(0).hidden, s.tensors(s.layers() - 1).output);
}
Status run_split(DecodeStack& d, const cuda::Context& c, const Stack& s) {
  for (std::int64_t l = 0; l < s.layers(); ++l)
    CF_TRY(d.enqueue_split(c.stream(), l, l == 0 ? s.tensors(0).hidden : ConstAnyView<2>(), s.tensors(l).output));
  return {};
}

ModelConfig small_model(DType dtype, std::int64_t layers = 3) {
  ModelConfig m = model_of(4, 64, 16, 512);
  m.num_hidden_layers = layers;
  m.dtype = dtype;
  return m;
}

}  // namespace

#ifdef CF_DECODE_BLOCKS_PER_SM
TEST_CASE("fused: the plans of an RTX 5090 have more blocks than an H200 has SMs, and hold activations both ways",
          "[gpu][fused]") {
  std::set<int> narrow_columns;
  for (const ModelConfig& m : pythia_presets()) {
    const auto plan = cuda::plan_decode_stack(planned().arch(), m, 1);
    REQUIRE(plan);
    CHECK(plan->grid > cuda::kH200.sm_count);
    CHECK(plan->smem_bytes <= cuda::kRtx5090.smem_per_block_bytes);
    narrow_columns.insert(plan->narrow_columns);
  }
  CHECK(narrow_columns == std::set<int>{0, 1024, 2048, 2560});
}
#endif

TEST_CASE("fused: every tap of a layer is the oracle's within its budget", "[gpu][fused]") {
  const DType dtype = GENERATE(DType::f16, DType::bf16);
  const bool parallel = GENERATE(true, false);
  for (const ModelConfig& shape : {model_of(4, 32, 8, 96), model_of(4, 64, 16, 512), model_of(3, 80, 20, 200),
                                   model_of(2, 128, 128, 1000), model_of(2, 256, 64, 4096), model_of(3, 8, 2, 24)})
    for (const auto& [batch, kv_len] : {std::pair<std::int64_t, int>{1, 1}, {1, 2}, {1, 130}, {3, 17}, {8, 66}}) {
      ModelConfig m = shape;
      m.dtype = dtype;
      m.use_parallel_residual = parallel;
      if (batch == 3) {
        m.hidden_act = Activation::gelu_tanh;
        m.attention_bias = false;
      }
      CAPTURE(m.name, batch, kv_len, parallel, to_string(dtype));
      const Workload load{.batch = batch, .capacity = 131};
      const Model model(m, load);
      cuda::Context c = planned();
      Stack stack = model.stack(c);
      require_ok(stack.set_kv_len(lengths(load, kv_len)));
      DecodeStack kernel = kernel_of(c, stack);
      require_ok(kernel.set_probe({.taps = true}));
      require_ok(run(kernel, c, stack));

      LayerState oracle(model.config, {.batch = batch, .kv_len = 131, .capacity = 131}, DType::f64);
      oracle.hidden = model.hidden.converted(DType::f64);
      oracle.k_cache = model.k_caches[0].converted(DType::f64);
      oracle.v_cache = model.v_caches[0].converted(DType::f64);
      oracle.fill_rope_table(m.rope_theta);
      oracle.set_kv_len(lengths(load, kv_len));
      const Layer::Args args{.config = &model.config, .weights = model.weights[0].weights, .t = oracle.tensors()};
      require_ok(cpu_ref::run(args));
      const auto condition = cpu_ref::condition(args);
      REQUIRE(condition);
      const Budget budget = Layer::budget(Layer::dims(args), {DType::f32, dtype}, *condition);
      const LayerTensors got = stack.tensors(0);
      const auto check = [&]<int Rank>(const char* name, const AnyView<Rank>& tap, const Tensor& expected) {
        const auto error = compare(fetch<Rank>(tap), expected);
        REQUIRE(error);
        CAPTURE(name, error->rel_l2, budget.rel_l2, error->rel_max, budget.rel_max, error->worst_coordinate);
        CHECK(error->within(budget));
      };
      check("attn_in", got.attn_in, oracle.attn_in);
      check("qkv", got.qkv, oracle.qkv);
      check("q", got.q, oracle.q);
      check("k", got.k, oracle.k);
      check("v", got.v, oracle.v);
      check("context", got.context, oracle.context);
      check("attn_residual", got.attn_residual, oracle.attn_residual);
      check("mlp_in", got.mlp_in, oracle.mlp_in);
      check("mlp_act", got.mlp_act, oracle.mlp_act);
      check("output", got.output, oracle.output);
      // The append, and nothing else, has changed the cache.
      check("appended keys", got.k_cache, oracle.k_cache);
      check("appended values", got.v_cache, oracle.v_cache);
    }
}

namespace {

/// One layer's step by both, at each kv_len: each is within the budget of what both should be.
void check_against_unfused(const ModelConfig& m, const Workload& load, std::initializer_list<int> kv_lens) {
  const Model model(m, load);
  cuda::Context c = planned();
  Stack stack = model.stack(c);
  const Layer::Dims dims = Layer::example(m, {.batch = load.batch, .kv_len = load.capacity}).first;
  const Budget one = Layer::budget(dims, {DType::f32, m.dtype}), budget{2 * one.rel_l2, 2 * one.rel_max};
  for (int kv_len : kv_lens) {
    require_ok(stack.set_kv_len(lengths(load, kv_len)));
    require_ok(stack.step(Impl::unfused));
    const Tensor expected = fetch<2>(stack.tensors(0).output);
    require_cuda(cudaMemset(stack.tensors(0).output.data, 0xff, std::size_t(expected.size_bytes())));
    require_ok(stack.step(Impl::fused));
    const auto error = compare(fetch<2>(stack.tensors(0).output), expected);
    REQUIRE(error);
    CAPTURE(m.name, load.batch, kv_len, error->rel_l2, budget.rel_l2, error->rel_max, budget.rel_max);
    CHECK(error->within(budget));
  }
}

}  // namespace

TEST_CASE("fused: agrees with unfused over all presets", "[gpu][fused][presets]") {
  for (const ModelConfig& preset : pythia_presets()) {
    ModelConfig m = preset;
    m.num_hidden_layers = 1;
    check_against_unfused(m, {.batch = 1, .capacity = 2048}, {1, 2, 17, 127, 128, 129, 1023, 1024, 1025, 2047, 2048});
  }
}

TEST_CASE("fused: agrees with unfused whichever way it takes products", "[gpu][fused]") {
  // Slices of 2560 and of 2048 columns have kernels of their own for one sequence.
  for (ModelConfig m : {model_of(32, 80, 20, 2560), model_of(16, 128, 32, 2048)})
    for (bool parallel : {true, false})
      for (DType dtype : {DType::f16, DType::bf16})
        for (std::int64_t batch : {1, 2, 3}) {
          m.use_parallel_residual = parallel;
          m.dtype = dtype;
          check_against_unfused(m, {.batch = batch, .capacity = 300}, {1, 130, 300});
        }
}

namespace {

/// All layers in one launch, one launch a layer and two: the same output and caches.
void check_launches(const ModelConfig& m, std::int64_t batch) {
  const Workload load{.batch = batch, .capacity = 40};
  const Model model(m, load);
  cuda::Context c = planned();
  Stack stack = model.stack(c);
  for (int kv_len : {1, 33, 40}) {
    CAPTURE(m.name, to_string(m.dtype), m.use_parallel_residual, batch, kv_len);
    require_ok(stack.set_kv_len(lengths(load, kv_len)));
    model.reset(stack);
    require_ok(stack.step(Impl::stack));
    const auto expected = results(stack);
    for (Impl impl : {Impl::fused, Impl::split}) {
      CAPTURE(to_string(impl));
      model.reset(stack);
      require_ok(stack.step(impl));
      CHECK(same_bits(results(stack), expected));
    }
  }
}

}  // namespace

TEST_CASE("fused: one launch, one a layer and two a layer give the same bits", "[gpu][fused][launches][small]") {
  const bool parallel = GENERATE(true, false);
  for (DType dtype : {DType::f16, DType::bf16}) {
    ModelConfig m = small_model(dtype);
    m.use_parallel_residual = parallel;
    for (std::int64_t batch : {1, 2, 4, 8}) check_launches(m, batch);
  }
}

TEST_CASE("fused: so they do whichever rows are cut", "[gpu][fused][launches]") {
  const bool parallel = GENERATE(true, false);
  // None, only those of down, all; and in tiles.
  for (ModelConfig m : {model_of(16, 64, 16, 1024), model_of(32, 80, 20, 10240), model_of(32, 128, 32, 4096),
                        model_of(4, 64, 16, 4096)}) {
    m.num_hidden_layers = 2;
    m.use_parallel_residual = parallel;
    check_launches(m, 1);
  }
}

namespace {

/// One launch's bits, asked of again(kernel, context, stack) so many times while blocks dawdle at random. before(i) comes
/// before the i-th.
template <class Again, class Before>
void check_dawdling(bool parallel, std::int64_t layers, std::int64_t batch, unsigned runs, Again again, Before before) {
  ModelConfig m = model_of(32, 80, 20, 2560);
  m.num_hidden_layers = layers;
  m.use_parallel_residual = parallel;
  const Workload load{.batch = batch, .capacity = 130};
  const Model model(m, load);
  cuda::Context c = planned();
  Stack stack = model.stack(c);
  require_ok(stack.set_kv_len(lengths(load, 129)));
  DecodeStack kernel = kernel_of(c, stack);
  require_ok(run(kernel, c, stack));
  const auto expected = results(stack);
  const AnyView<2> output = stack.tensors(layers - 1).output;
  for (unsigned i = 1; i <= runs; ++i) {
    require_ok(kernel.set_probe({.delay_seed = i % 4 ? 0 : i}));
    before(i);
    require_cuda(cudaMemset(output.data, 0xff, std::size_t(output.bytes())));
    require_ok(again(kernel, c, stack));
    if (i % 10 == 0) REQUIRE(same_bits(fetch<2>(output), expected[0]));
  }
  CHECK(same_bits(results(stack), expected));
}

}  // namespace

TEST_CASE("fused: two launches a layer give the same bits with blocks that dawdle", "[gpu][fused][launches]") {
  const bool parallel = GENERATE(true, false);
  check_dawdling(parallel, 3, 1, 100, run_split, [](unsigned) {});
}

namespace {

/// Every variant of the plan that the device makes: the plan's own bits, or within twice a layer's budget of its output.
void check_variants(const ModelConfig& m, std::int64_t batch) {
  const Workload load{.batch = batch, .capacity = 300};
  const Model model(m, load);
  cuda::Context c = planned();
  Stack stack = model.stack(c);
  require_ok(stack.set_kv_len(lengths(load, 300)));
  DecodeStack own = kernel_of(c, stack);
  require_ok(run(own, c, stack));
  const auto expected = results(stack);
  const Budget one =
      Layer::budget(Layer::example(m, {.batch = batch, .kv_len = load.capacity}).first, {DType::f32, m.dtype});
  for (const cuda::DecodeVariant& v : cuda::decode_variants(c.arch(), own.plan())) {
    model.reset(stack);
    DecodeStack kernel = kernel_of(c, stack, v.choices);
    CAPTURE(m.name, batch, v.part, v.name, to_string(kernel.plan()));
    require_ok(run(kernel, c, stack));
    if (v.same_bits) {
      CHECK(same_bits(results(stack), expected));
      model.reset(stack);
      require_ok(run_split(kernel, c, stack));
      CHECK(same_bits(results(stack), expected));
    } else {
      const auto error = compare(results(stack)[0], expected[0]);
      REQUIRE(error);
      CAPTURE(error->rel_l2, one.rel_l2, error->rel_max, one.rel_max);
      CHECK(error->within({2 * one.rel_l2, 2 * one.rel_max}));
    }
  }
}

}  // namespace

TEST_CASE("fused: plans that choose otherwise compute the same", "[gpu][fused][variants]") {
  for (bool parallel : {true, false})
    for (ModelConfig m : {model_of(32, 80, 20, 10240), small_model(DType::bf16, 1)}) {
      m.use_parallel_residual = parallel;
      check_variants(m, 1);
    }
  check_variants(small_model(DType::f16, 1), 3);
}

TEST_CASE("fused: a head's parts meet in a cluster's shared memory, many layers and runs long",
          "[gpu][fused][variants]") {
  // One part a block, and several.
  for (const auto& [heads, batch, splits] :
       {std::tuple<std::int64_t, std::int64_t, int>{8, 1, 8}, {32, 1, 4}, {32, 2, 4}, {5, 4, 2}}) {
    ModelConfig m = model_of(heads, 64, 16, 512);
    m.num_hidden_layers = 4;
    const Workload load{.batch = batch, .capacity = 130};
    const Model model(m, load);
    cuda::Context c = planned();
    Stack stack = model.stack(c);
    require_ok(stack.set_kv_len(lengths(load, 129)));
    DecodeStack own = kernel_of(c, stack, {.attention_splits = splits});
    DecodeStack kernel = kernel_of(c, stack, {.attention_splits = splits, .cluster_merge = true});
    CAPTURE(heads, batch, splits, to_string(kernel.plan()));
    CHECK(kernel.plan().grid % splits == 0);
    require_ok(run(own, c, stack));
    const auto expected = results(stack);
    for (unsigned i = 1; i <= 100; ++i) {
      require_ok(kernel.set_probe({.delay_seed = i % 4 ? 0 : i}));
      require_ok(run(kernel, c, stack));
      if (i % 10 == 0) REQUIRE(same_bits(results(stack), expected));
    }
    // Blocks that have given up leave together, and the next launch is sound.
    require_ok(kernel.set_probe({.withheld_layer = 1, .withheld_site = "attention.context", .wait_limit_ms = 20}));
    require_ok(run(kernel, c, stack));
    require_cuda(cudaDeviceSynchronize());
    require_ok(kernel.set_probe({}));
    CHECK(refusal_fault(run(kernel, c, stack), Code::device_error, {"layer 1: attention.context"}) == "");
    require_ok(run(kernel, c, stack));
    CHECK(same_bits(results(stack), expected));
  }
}

TEST_CASE("fused: a thousand runs give the same bits, with blocks that dawdle and other work on the GPU",
          "[gpu][fused]") {
  const bool parallel = GENERATE(true, false);
  cudaStream_t other = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  check_dawdling(parallel, 4, 2, 1000, run, [&](unsigned i) {
    if (i % 50 == 0) enqueue_occupy(other, 16, 1);
  });
  require_cuda(cudaStreamSynchronize(other));
  require_cuda(cudaStreamDestroy(other));
}

TEST_CASE("fused: waits for SMs that another kernel holds", "[gpu][fused]") {
  const Impl impl = GENERATE(Impl::stack, Impl::split);
  const Workload load{.batch = 1, .capacity = 20};
  const Model model(small_model(DType::f16), load);
  cudaStream_t stream = nullptr, other = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  require_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  {
    cuda::Context c = planned(stream);
    Stack stack = model.stack(c);
    require_ok(stack.set_kv_len(std::vector<std::int32_t>{17}));
    require_ok(stack.step(Impl::stack));
    const auto expected = results(stack);
    enqueue_occupy(other, 40, 100);
    require_ok(stack.step(impl));
    CHECK(same_bits(results(stack), expected));
    require_ok(stack.step(impl));  // and nothing was reported
  }
  require_cuda(cudaStreamDestroy(stream));
  require_cuda(cudaStreamDestroy(other));
}

TEST_CASE("fused: what no block does is an error that names it, and the next launch is sound", "[gpu][fused]") {
  const bool parallel = GENERATE(true, false);
  const std::int64_t batch = GENERATE(1, 4);
  ModelConfig m = small_model(DType::f16);
  m.use_parallel_residual = parallel;
  const Workload load{.batch = batch, .capacity = 20};
  const Model model(m, load);
  cuda::Context c = planned();
  Stack stack = model.stack(c);
  require_ok(stack.set_kv_len(lengths(load, 17)));
  DecodeStack kernel = kernel_of(c, stack);
  require_ok(run(kernel, c, stack));
  const auto expected = results(stack);
  const std::string blocks = "all " + std::to_string(kernel.plan().grid) + " blocks";
  for (const char* site :
       {"attention.query_key_value", "attention.context", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}) {
    CAPTURE(site);
    require_ok(kernel.set_probe({.withheld_layer = 1, .withheld_site = site, .wait_limit_ms = 20}));
    require_ok(run(kernel, c, stack));
    require_cuda(cudaDeviceSynchronize());
    require_ok(kernel.set_probe({}));
    CHECK(refusal_fault(run(kernel, c, stack), Code::device_error, {"layer 1: ", site, blocks}) == "");
    require_ok(run(kernel, c, stack));
    CHECK(same_bits(results(stack), expected));
  }
  if (!parallel) {
    require_ok(kernel.set_probe({.withheld_layer = 0, .withheld_site = "attention.dense", .wait_limit_ms = 20}));
    require_ok(run(kernel, c, stack));
    require_cuda(cudaDeviceSynchronize());
    CHECK(refusal_fault(run(kernel, c, stack), Code::device_error, {"layer 0: attention.dense"}) == "");
  }
  // Of two launches a layer the second lacks what the first has not made; what was missing first is named.
  for (const char* site : {"attention.query_key_value", "attention.context", "mlp.dense_h_to_4h", "attention.dense"}) {
    if (parallel && site == std::string("attention.dense")) continue;  // nobody waits for it
    CAPTURE(site);
    require_ok(kernel.set_probe({.withheld_layer = 1, .withheld_site = site, .wait_limit_ms = 20}));
    require_ok(run_split(kernel, c, stack));
    require_cuda(cudaDeviceSynchronize());
    require_ok(kernel.set_probe({}));
    CHECK(refusal_fault(run_split(kernel, c, stack), Code::device_error, {"layer 1: ", site, blocks}) == "");
    require_ok(run_split(kernel, c, stack));
    CHECK(same_bits(results(stack), expected));
  }
  CHECK(refusal_fault(kernel.set_probe({.withheld_layer = 0, .withheld_site = "input_layernorm"}),
                      Code::invalid_argument, {"'input_layernorm'"}) == "");
}

TEST_CASE("fused: stacks with threads and streams of their own do not meet", "[gpu][fused]") {
  const Workload load{.batch = 1, .capacity = 64};
  const Model model(small_model(DType::f16), load);
  constexpr int steps = 64;
  const auto decode = [&](const cuda::Context& c, Stack& stack) {
    for (int i = 0; i < steps; ++i) {
      if (!stack.step(Impl::stack)) return false;
      if (i + 1 < steps && !stack.advance()) return false;
    }
    return cudaStreamSynchronize(c.stream()) == cudaSuccess;
  };
  cuda::Context alone = planned();
  Stack reference = model.stack(alone);
  REQUIRE(decode(alone, reference));
  const auto expected = results(reference);
  cudaStream_t streams[2] = {};
  for (cudaStream_t& s : streams) require_cuda(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  {
    cuda::Context contexts[2] = {planned(streams[0]), planned(streams[1])};
    Stack stacks[2] = {model.stack(contexts[0]), model.stack(contexts[1])};
    bool ok[2] = {};
    std::thread threads[2];
    for (int i = 0; i < 2; ++i) threads[i] = std::thread([&, i] { ok[i] = decode(contexts[i], stacks[i]); });
    for (std::thread& t : threads) t.join();
    for (int i = 0; i < 2; ++i) {
      REQUIRE(ok[i]);
      CHECK(same_bits(results(stacks[i]), expected));
    }
  }
  for (cudaStream_t s : streams) require_cuda(cudaStreamDestroy(s));
}

TEST_CASE("fused: steps and advance() can be captured into a graph", "[gpu][fused]") {
  const Impl impl = GENERATE(Impl::stack, Impl::split);
  const Workload load{.batch = 1, .capacity = 20};
  const Model model(small_model(DType::f16), load);
  cudaStream_t stream = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  {
    cuda::Context c = planned(stream);
    Stack captured = model.stack(c), plain = model.stack(c);
    replay_beside(stream, 20, captured, impl, plain, Impl::stack);
    CHECK(same_bits(results(captured), results(plain)));
    // The cache is full: the next step leaves it alone, and has nothing to attend to.
    const auto full = results(plain);
    require_ok(plain.step(Impl::stack));
    const auto beyond = results(plain);
    CHECK(std::isnan(beyond[0].at(0)));
    for (std::size_t i = 1; i < full.size(); ++i) CHECK(same_bits(beyond[i], full[i]));
  }
  require_cuda(cudaStreamDestroy(stream));
}

TEST_CASE("fused: what the kernel does not take is refused by name, and the stack goes on", "[gpu][fused][bad]") {
  cuda::Context c = planned();
  const auto refused = [&](DType dtype, const Workload& load, std::initializer_list<std::string_view> parts) {
    const Model model(small_model(dtype), load);
    Stack stack = model.stack(c);
    for (Impl impl : {Impl::split, Impl::fused, Impl::stack})
      CHECK(refusal_fault(stack.step(impl), Code::unimplemented, parts) == "");
    require_ok(stack.step(Impl::unfused));
  };
  refused(DType::f32, {.batch = 1, .capacity = 8}, {"float16", "got float32"});
  refused(DType::f16, {.batch = 9, .capacity = 8}, {"1 to 8 sequences, got 9"});
  refused(DType::f16, {.batch = 1, .q_len = 2, .capacity = 8}, {"one new token a sequence"});
}
