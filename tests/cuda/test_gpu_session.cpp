// Layers resident on a device: every way to step them gives the same bits, each layer's step is the oracle's within its
// budget, and memory is taken once, in full view, and given back.
#include <cuda_runtime_api.h>

#include <cstring>
#include <set>
#include <string_view>
#include <vector>

#include "core/compare.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cuda/ops/linear/cublaslt/plan.hpp"
#include "cuda/runtime/memory.hpp"
#include "tests/cuda/device_session.hpp"
#include "tests/support/grouped.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/setups.hpp"

using namespace cf;
using namespace cf::test;
using cuda::Impl;
using cuda::LayerRange;
using cuda::Session;

namespace {

ModelConfig small_model(DType dtype, std::int64_t layers = 3) {
  ModelConfig m = model_of(4, 64, 16, 512);
  m.num_hidden_layers = layers;
  m.max_position_embeddings = 64;
  m.dtype = dtype;
  return m;
}

/// The same with RMSNorm, SwiGLU and separate q, k and v. Of such a model the heads need not make up hidden_size.
ModelConfig small_gated_model(DType dtype, std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim,
                              ModelType type = ModelType::qwen2) {
  ModelConfig m = gated_model_of(type, heads, kv_heads, head_dim, 256, 320);
  m.num_hidden_layers = 3;
  m.max_position_embeddings = 64;
  m.dtype = dtype;
  return m;
}

/// What a session of procedural layers was given.
struct Inputs {
  std::vector<OwnedLayerWeights> weights;
  std::vector<Tensor> k_caches, v_caches;
  Tensor hidden;
};

Inputs inputs(const ModelConfig& m, const Workload& load, DType activation, WeightFormat linears = {}) {
  Inputs in;
  const Shape cache{load.batch, m.kv_heads(), load.cache_capacity(), m.head_dim()};
  for (std::int64_t l = 0; l < m.num_hidden_layers; ++l) {
    in.weights.push_back(procedural_layer(m, m.dtype, l, 7, linears));
    in.k_caches.push_back(activations(activation, cache, "k" + std::to_string(l)));
    in.v_caches.push_back(activations(activation, cache, "v" + std::to_string(l)));
  }
  in.hidden = activations(activation, {load.tokens(), m.hidden_size}, "hidden");
  return in;
}

Session make_session(const cuda::Context& c, const ModelConfig& m, const Workload& load, DType activation,
                     const Inputs& in) {
  Result<Session> session =
      Session::create(c, m, {0, m.num_hidden_layers}, load, activation, m.dtype, in.weights[0].weights);
  require_ok(session.status());
  for (std::int64_t l = 0; l < m.num_hidden_layers; ++l) {
    require_ok(session->weights.load_layer(l, in.weights[std::size_t(l)].weights));
    require_ok(session->cache.set_layer(l, in.k_caches[std::size_t(l)], in.v_caches[std::size_t(l)]));
  }
  require_ok(session->workspace.set_hidden(in.hidden));
  return std::move(*session);
}

/// f(role, view) for all that every step writes: attn_in and qkv are left out, which ln_qkv and RmsQkv do not write, k
/// and v, which rope_append does not write, and mlp_in, which RmsLinear does not write.
template <class F>
void for_each_written(const Session& session, F&& f) {
  std::set<std::string_view> unwritten{"attn_in", "qkv", "k", "v"};
  if (session.model().traits.norm == NormKind::rmsnorm &&
      std::holds_alternative<PackedWeight>(session.weights.layer(0).dense_h_to_4h.weight))
    unwritten.insert("mlp_in");
  for (std::int64_t l = 0; l < session.layers().last; ++l) {
    const bool last = l == session.layers().last - 1;
    const LayerTensors tensors = session.tensors(l);
    for_each_activation(
        {}, {},
        [&]<class V>(const TensorSpec& t, const V& view, auto) {
          if constexpr (std::is_same_v<V, AnyView<V::rank>>)
            if (t.role == Role::state || (last && is_written(t.role) && !unwritten.contains(t.name))) f(t.role, view);
        },
        tensors);
  }
}

/// The bytes of all that every step writes.
std::vector<std::byte> bytes(const Session& session) {
  std::vector<std::byte> all;
  for_each_written(session, [&]<int Rank>(Role, const AnyView<Rank>& v) {
    const Tensor t = fetch<Rank>(v);
    const auto* data = static_cast<const std::byte*>(t.data());
    all.insert(all.end(), data, data + t.size_bytes());
  });
  return all;
}

/// Makes NaN of every site's output, so that a step that skips one shows.
void poison(const Session& session) {
  require_cuda(cudaDeviceSynchronize());
  for_each_written(session, [&](Role role, const auto& v) {
    if (role == Role::output) require_cuda(cudaMemset(v.data, 0xff, std::size_t(v.bytes())));
  });
  require_cuda(cudaDeviceSynchronize());
}

std::size_t free_bytes() {
  std::size_t free = 0, total = 0;
  require_cuda(cudaMemGetInfo(&free, &total));
  return free;
}

/// Steps a session of `in` layer by layer and holds each against the oracle, within the layer's budget.
void check_layers(Session& session, const Inputs& in, const Workload& load, DType activation,
                  const std::vector<std::int32_t>& kv_len, Impl impl) {
  const ModelSpec& m = session.model();
  for (std::int64_t l = 0; l < session.layers().last; ++l) {
    // The device's own input: what a layer is given is exact, so that each is held against its own budget.
    LayerState oracle(m, load, DType::f64);
    oracle.hidden = fetch<2>(session.tensors(l).hidden).converted(DType::f64);
    oracle.k_cache = in.k_caches[std::size_t(l)].converted(DType::f64);
    oracle.v_cache = in.v_caches[std::size_t(l)].converted(DType::f64);
    oracle.fill_rope_table(m.traits.rope_theta, m.traits.rope_scaling);
    oracle.set_kv_len(kv_len);
    require_ok(session.step(impl, LayerRange{l, l + 1}));

    using Layer = ops::DecodeLayer;
    const Layer::Args args{.model = m, .weights = in.weights[std::size_t(l)].weights, .t = oracle.tensors()};
    require_ok(cpu_ref::run(args));
    const auto condition = cpu_ref::condition(args);
    REQUIRE(condition);
    const Budget budget = Layer::budget(Layer::dims(args), {DType::f32, activation}, *condition);
    const auto error = compare(fetch<2>(session.tensors(l).output), oracle.output);
    REQUIRE(error);
    CAPTURE(l, error->rel_l2, budget.rel_l2, error->rel_max, budget.rel_max);
    CHECK(error->within(budget));
  }
}

}  // namespace

TEST_CASE("session: one graph gives the unfused step's bits at every position", "[gpu][session]") {
  const DType activation = GENERATE(DType::f16, DType::bf16, DType::f32);
  const bool overlap = GENERATE(false, true), parallel = GENERATE(true, false);
  const int more = GENERATE(0, 2);  // sequences: five tokens take other kernels
  ModelConfig m = small_model(activation);
  m.use_parallel_residual = parallel;
  const Workload load{.batch = 3 + more, .q_len = 1, .capacity = 40};
  cuda::Context c = context();
  c.set_overlap(overlap);
  Session session = make_session(c, m, load, activation, inputs(m, load, activation));
  for (auto kv_len : std::vector<std::vector<std::int32_t>>{{1, 1, 1}, {2, 40, 17}, {33, 3, 32}, {40, 40, 40}}) {
    kv_len.resize(std::size_t(load.batch), 7);
    CAPTURE(kv_len[0], overlap, parallel, more);
    require_ok(session.set_kv_len(kv_len));
    poison(session);
    require_ok(session.step(Impl::unfused));
    const auto expected = bytes(session);
    poison(session);
    CHECK_FALSE((bytes(session) == expected));
    require_ok(session.step(Impl::graph));
    CHECK((bytes(session) == expected));
    // Layer by layer it is the same walk.
    poison(session);
    for (std::int64_t l = 0; l < session.layers().last; ++l)
      require_ok(session.step(l == 1 ? Impl::graph : Impl::unfused, LayerRange{l, l + 1}));
    CHECK((bytes(session) == expected));
  }
}

TEST_CASE("session: the branches of a large layer's graph do not disturb each other", "[gpu][session]") {
  const DType dtype = DType::f16;
  ModelConfig m = model_of(32, 80, 20, 10240);
  m.num_hidden_layers = 4;
  m.dtype = dtype;
  const Workload load{.batch = 1, .q_len = 1, .kv_len = 129, .capacity = 129};
  const OwnedLayerWeights weights = procedural_layer(m, m.dtype, 0, 7);
  const Tensor cache = activations(dtype, {1, 32, 129, 80}, "cache");
  cuda::Context c = context();
  Result<Session> session = Session::create(c, m, {0, m.num_hidden_layers}, load, dtype, m.dtype);
  require_ok(session.status());
  for (std::int64_t l = 0; l < session->layers().last; ++l) {
    require_ok(session->weights.load_layer(l, weights.weights));
    require_ok(session->cache.set_layer(l, cache, cache));
  }
  require_ok(session->workspace.set_hidden(activations(dtype, {1, m.hidden_size}, "hidden")));
  require_ok(session->set_kv_len(std::vector<std::int32_t>{129}));
  require_ok(session->step(Impl::unfused));
  const auto expected = bytes(*session);
  for (int i = 0; i < 20; ++i) {
    poison(*session);
    for (int n = 0; n < 10; ++n) require_ok(session->step(Impl::graph));
    REQUIRE((bytes(*session) == expected));
  }
}

TEST_CASE("session: every layer's step is the oracle's within its budget", "[gpu][session]") {
  const DType activation = GENERATE(DType::f16, DType::bf16, DType::f32);
  const Impl impl = GENERATE(Impl::unfused, Impl::graph);
  const bool parallel = GENERATE(true, false);
  ModelConfig m = small_model(activation);
  m.use_parallel_residual = parallel;
  const std::int64_t q_len = GENERATE(1, 3);
  const std::vector<std::int32_t> kv_len{33, 17};
  const Workload load{.batch = 2, .q_len = q_len, .capacity = 40};
  const Inputs in = inputs(m, load, activation);
  cuda::Context c = context();
  Session session = make_session(c, m, load, activation, in);
  require_ok(session.set_kv_len(kv_len));
  check_layers(session, in, load, activation, kv_len, impl);
}

TEST_CASE(
    "session: layers with RMSNorm, SwiGLU and grouped heads: one graph gives the unfused step's bits, and the "
    "oracle's numbers",
    "[gpu][session][grouped]") {
  const DType activation = GENERATE(DType::f16, DType::bf16, DType::f32);
  const auto [heads, kv_heads] = GENERATE(from_range(kGroupedHeads.begin(), kGroupedHeads.end()));
  const std::int64_t head_dim = GENERATE(64, 128);
  // Few tokens; more than ln_qkv would take; several of a sequence; many, one of a sequence and many.
  const auto [batch, q_len] =
      GENERATE(std::pair{1, 1}, std::pair{5, 1}, std::pair{2, 3}, std::pair{40, 1}, std::pair{2, 24});
  ModelConfig m =
      small_gated_model(activation, heads, kv_heads, head_dim, q_len == 1 ? ModelType::qwen2 : ModelType::llama);
  m.rope_scaling = {.kind = ops::RopeScaling::Kind::llama3,
                    .factor = 8,
                    .low_freq_factor = 1,
                    .high_freq_factor = 4,
                    .original_max_positions = 16};
  const std::vector<std::int32_t> kv_len(std::size_t(batch), 33);
  const Workload load{.batch = batch, .q_len = q_len, .capacity = 40};
  const Inputs in = inputs(m, load, activation);
  cuda::Context c = context();
  c.set_overlap(true);
  Session session = make_session(c, m, load, activation, in);
  require_ok(session.set_kv_len(kv_len));
  CAPTURE(to_string(activation), heads, kv_heads, head_dim, batch, q_len);
  poison(session);
  require_ok(session.step(Impl::unfused));
  const auto expected = bytes(session);
  for (int i = 0; i < 3; ++i) {
    poison(session);
    require_ok(session.step(Impl::graph));
    CHECK((bytes(session) == expected));
  }
  check_layers(session, in, load, activation, kv_len, Impl::graph);
}

TEST_CASE(
    "session: quantised layers with RMSNorm, SwiGLU and grouped heads, as a graph and launch by launch, are the "
    "oracle's",
    "[gpu][session][gptq][grouped]") {
  const DType activation = GENERATE(DType::f16, DType::bf16);
  const WeightFormat linears = GENERATE(WeightFormat{4, 128}, WeightFormat{4, 32}, WeightFormat{8, 64});
  const auto [batch, q_len] = GENERATE(std::pair{1, 1}, std::pair{3, 1}, std::pair{12, 1}, std::pair{2, 40});
  const ModelConfig m = small_gated_model(activation, 6, 2, 64);
  const std::vector<std::int32_t> kv_len(std::size_t(batch), 40);
  const Workload load{.batch = batch, .q_len = q_len, .capacity = 40};
  const Inputs in = inputs(m, load, activation, linears);
  cuda::Context c = context();
  Session session = make_session(c, m, load, activation, in);
  require_ok(session.set_kv_len(kv_len));
  CAPTURE(to_string(activation), linears.bits, linears.group_size, batch, q_len);
  require_ok(session.step(Impl::unfused));
  const auto expected = bytes(session);
  poison(session);
  require_ok(session.step(Impl::graph));
  CHECK((bytes(session) == expected));
  check_layers(session, in, load, activation, kv_len, Impl::graph);
}

TEST_CASE("session: every step of the persistent kernel through layers of Llama and Qwen2 is the oracle's",
          "[gpu][session][grouped][persistent]") {
  const DType activation = GENERATE(DType::f16, DType::bf16);
  const Impl impl = GENERATE(Impl::split, Impl::layer, Impl::persistent);
  const auto [heads, kv_heads] = GENERATE(from_range(kGroupedHeads.begin(), kGroupedHeads.end()));
  const std::int64_t batch = GENERATE(1, 3, 8);
  const ModelConfig m =
      small_gated_model(activation, heads, kv_heads, 64, batch == 1 ? ModelType::llama : ModelType::qwen2);
  std::vector<std::int32_t> kv_len{33, 17, 40, 1, 2, 16, 32, 39};
  kv_len.resize(std::size_t(batch));
  const Workload load{.batch = batch, .q_len = 1, .capacity = 40};
  const Inputs in = inputs(m, load, activation);
  Session session = make_session(context(), m, load, activation, in);
  require_ok(session.set_kv_len(kv_len));
  CAPTURE(to_string(activation), to_string(impl), heads, kv_heads, batch);
  check_layers(session, in, load, activation, kv_len, impl);
}

TEST_CASE("session: biases that a model lacks are refused", "[gpu][session][bad]") {
  const ModelConfig m = small_gated_model(DType::f16, 4, 1, 64, ModelType::llama);
  const Workload load{.batch = 1, .q_len = 1, .capacity = 40};
  const Inputs in = inputs(m, load, DType::f16);
  Session session = make_session(context(), m, load, DType::f16, in);
  const Tensor bias = activations(DType::f16, {m.hidden_size}, "bias");
  for (auto [linear, name] : {std::pair{&LayerWeights::query_key_value, "self_attn.qkv_proj"},
                              {&LayerWeights::dense, "self_attn.o_proj"},
                              {&LayerWeights::dense_h_to_4h, "mlp.gate_up_proj"},
                              {&LayerWeights::dense_4h_to_h, "mlp.down_proj"}}) {
    LayerWeights changed = in.weights[1].weights;
    (changed.*linear).bias = bias.view<1>();
    CHECK(refusal_fault(session.weights.load_layer(1, changed), Code::invalid_argument,
                        {"layer 1: ", name, "has a bias, expected none"}) == "");
  }
}

TEST_CASE("session: quantised and mixed layers, as a graph, launch by launch and persistent, are the oracle's",
          "[gpu][session][gptq]") {
  const DType activation = GENERATE(DType::f16, DType::bf16);
  const bool mixed = GENERATE(false, true);
  const std::int64_t batch = GENERATE(1, 3);
  const ModelConfig m = small_model(activation);
  const std::vector<std::int32_t> kv_len(std::size_t(batch), 17);
  const Workload load{.batch = batch, .q_len = 1, .capacity = 40};
  Inputs in = inputs(m, load, activation, {4, 128});
  const Inputs dense = inputs(m, load, activation);
  if (mixed)
    for (std::size_t l = 0; l < 3; ++l) in.weights[l].weights.dense = dense.weights[l].weights.dense;
  cuda::Context c = context();
  Session session = make_session(c, m, load, activation, in);
  require_ok(session.set_kv_len(kv_len));
  require_ok(session.step(Impl::unfused));
  const auto expected = bytes(session);
  poison(session);
  require_ok(session.step(Impl::graph));
  CHECK(bytes(session) == expected);
  for (Impl impl : {Impl::graph, Impl::persistent}) check_layers(session, in, load, activation, kv_len, impl);

  const auto refused = [&](auto change, std::initializer_list<std::string_view> parts) {
    LayerWeights changed = in.weights[1].weights;
    change(changed);
    CHECK(refusal_fault(session.weights.load_layer(1, changed), Code::invalid_argument, parts) == "");
  };
  refused([&](LayerWeights& w) { w.dense_h_to_4h = dense.weights[1].weights.dense_h_to_4h; },
          {"'layer 1: mlp.dense_h_to_4h.weight' is dense, expected a GPTQ weight"});
  refused([](LayerWeights& w) { std::get<GptqWeight>(w.dense_4h_to_h.weight).group_size = 64; },
          {"layer 1: mlp.dense_4h_to_h", "'qzeros' has shape (4, 32), expected (8, 32)"});
  require_ok(session.weights.load_layer(1, in.weights[1].weights));
  require_ok(session.step(Impl::graph));
}

TEST_CASE("session: steps of many tokens, as a graph and launch by launch, are the oracle's", "[gpu][session][gemm]") {
  const DType activation = GENERATE(DType::f16, DType::bf16);
  const WeightFormat linears = GENERATE(WeightFormat{}, WeightFormat{4, 128}, WeightFormat{8, 64});
  const bool parallel = GENERATE(true, false);
  // 64 sequences of one token, and two of 24.
  const auto [batch, q_len] = GENERATE(std::pair{64, 1}, std::pair{2, 24});
  ModelConfig m = small_model(activation);
  m.use_parallel_residual = parallel;
  const std::vector<std::int32_t> kv_len(std::size_t(batch), 33);
  const Workload load{.batch = batch, .q_len = q_len, .capacity = 40};
  const Inputs in = inputs(m, load, activation, linears);
  cuda::Context c = context();
  c.set_overlap(true);
  Session session = make_session(c, m, load, activation, in);
  CHECK(session.workspace.scratch().bytes >= cuda::kGemmWorkspaceBytes);
  CHECK(session.workspace.scratch().bytes < session.workspace.device_bytes());
  require_ok(session.set_kv_len(kv_len));
  require_ok(session.step(Impl::unfused));
  const auto expected = bytes(session);
  for (int i = 0; i < 20; ++i) {
    poison(session);
    require_cuda(cudaMemset(session.workspace.scratch().data, 0xff, session.workspace.scratch().bytes));
    require_ok(session.step(i % 4 ? Impl::graph : Impl::unfused));
    REQUIRE(bytes(session) == expected);
  }
  check_layers(session, in, load, activation, kv_len, Impl::graph);
}

TEST_CASE("session: a thousand steps of a graph are a thousand unfused steps, bit by bit", "[gpu][session]") {
  const ModelConfig m = small_model(DType::f16, 2);
  const Workload load{.batch = 2, .q_len = 1, .capacity = 1000};
  const Inputs in = inputs(m, load, DType::f16);
  cuda::Context c = context();
  Session unfused = make_session(c, m, load, DType::f16, in), graph = make_session(c, m, load, DType::f16, in);
  for (int i = 0; i < 1000; ++i) {
    require_ok(unfused.step(Impl::unfused));
    require_ok(graph.step(Impl::graph));
    if (i == 999) break;
    require_ok(unfused.extend());
    require_ok(graph.extend());
  }
  const auto expected = bytes(unfused);
  CHECK(bytes(graph) == expected);
  // The lengths were kept right: a session that is told them ends with the same output.
  require_ok(unfused.set_kv_len(std::vector<std::int32_t>{1000, 1000}));
  require_ok(unfused.step(Impl::unfused));
  CHECK(bytes(unfused) == expected);
  // The cache is full: the next step reads nothing of it and leaves it alone.
  require_ok(graph.extend());
  require_ok(graph.step(Impl::graph));
  for (std::int64_t l = 0; l < 2; ++l) {
    const Tensor full = fetch<4>(graph.tensors(l).k_cache), same = fetch<4>(unfused.tensors(l).k_cache);
    CHECK(std::memcmp(full.data(), same.data(), std::size_t(full.size_bytes())) == 0);
  }
  CHECK(std::isnan(fetch<2>(graph.tensors(1).output).at(0)));
}

TEST_CASE("session: steps and extend() can be captured into a graph of the caller's", "[gpu][session]") {
  const ModelConfig m = small_model(DType::f16);
  const Workload load{.batch = 1, .q_len = 1, .capacity = 20};
  const Inputs in = inputs(m, load, DType::f16);
  cudaStream_t stream = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  {
    cuda::Context c = context(stream);
    Session captured = make_session(c, m, load, DType::f16, in), plain = make_session(c, m, load, DType::f16, in);
    replay_beside(stream, 20, captured, Impl::unfused, plain, Impl::graph);
    CHECK(bytes(captured) == bytes(plain));
  }
  require_cuda(cudaStreamDestroy(stream));
}

TEST_CASE("session: two side by side, each on its stream, do not meet", "[gpu][session]") {
  const ModelConfig m = small_model(DType::f16);
  const Workload load{.batch = 1, .q_len = 1, .capacity = 64};
  const Inputs in = inputs(m, load, DType::f16);
  Inputs other = inputs(m, load, DType::f16);
  other.hidden = activations(DType::f16, other.hidden.shape(), "another");
  cudaStream_t streams[2] = {};
  for (cudaStream_t& s : streams) require_cuda(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  {
    cuda::Context first_context = context(streams[0]), second_context = context(streams[1]);
    const auto alone = [&](const Inputs& i) {
      Session s = make_session(first_context, m, load, DType::f16, i);
      for (int n = 0; n < 64; ++n) {
        require_ok(s.step(Impl::graph));
        if (n < 63) require_ok(s.extend());
      }
      return bytes(s);
    };
    const auto first_alone = alone(in), second_alone = alone(other);
    CHECK(first_alone != second_alone);
    Session first = make_session(first_context, m, load, DType::f16, in),
            second = make_session(second_context, m, load, DType::f16, other);
    for (int n = 0; n < 64; ++n) {
      require_ok(first.step(Impl::graph));
      require_ok(second.step(n % 2 ? Impl::graph : Impl::unfused));
      if (n == 63) break;
      require_ok(first.extend());
      require_ok(second.extend());
    }
    CHECK(bytes(first) == first_alone);
    CHECK(bytes(second) == second_alone);
  }
  for (cudaStream_t s : streams) require_cuda(cudaStreamDestroy(s));
}

TEST_CASE("session: moved, it steps on with its graphs, and memory follows its owner", "[gpu][session][alone]") {
  const ModelConfig m = small_model(DType::f16);
  const Workload load{.batch = 1, .q_len = 1, .capacity = 8};
  const Inputs in = inputs(m, load, DType::f16);
  cuda::Context c = context();
  Session first = make_session(c, m, load, DType::f16, in);
  require_ok(first.step(Impl::graph));
  const auto expected = bytes(first);
  Session second = std::move(first);
  poison(second);
  require_ok(second.step(Impl::graph));
  CHECK(bytes(second) == expected);

  // Large enough to be seen in the device's free memory.
  const Workload large{.batch = 1, .q_len = 1, .capacity = 200'000};
  Result<Session> replaced = Session::create(c, m, {0, 3}, large, DType::f16, DType::f16);
  require_ok(replaced.status());
  const std::size_t before = free_bytes();
  *replaced = std::move(second);
  CHECK(free_bytes() > before);
  poison(*replaced);
  require_ok(replaced->step(Impl::graph));
  CHECK(bytes(*replaced) == expected);
}

TEST_CASE("session: a model takes its weights, its cache and at most 64 MB, and gives all of it back",
          "[gpu][session][alone]") {
  const auto preset = find_preset("pythia-410m");
  REQUIRE(preset);
  const ModelConfig& m = *preset;
  const Workload load{.batch = 1, .q_len = 1, .capacity = 2048};
  const OwnedLayerWeights weights = procedural_layer(m, m.dtype, 0, 1);
  const double expected_bytes =
      double(m.num_hidden_layers) * (double(m.layer_parameters()) * 2 + 2 * double(load.capacity * m.hidden_size) * 2);
  cuda::Context c = context();
  require_cuda(cudaDeviceSynchronize());
  const auto step_and_measure = [&] {
    const std::size_t before = free_bytes();
    Result<Session> session = Session::create(c, m, {0, m.num_hidden_layers}, load, DType::f16, m.dtype);
    require_ok(session.status());
    for (std::int64_t l = 0; l < session->layers().last; ++l)
      require_ok(session->weights.load_layer(l, weights.weights));
    require_ok(session->workspace.set_hidden(activations(DType::f16, {1, m.hidden_size}, "hidden")));
    for (Impl impl : {Impl::unfused, Impl::graph}) require_ok(session->step(impl));
    require_cuda(cudaDeviceSynchronize());
    const double used_bytes = double(before) - double(free_bytes());
    CAPTURE(used_bytes, expected_bytes);
    CHECK(used_bytes >= expected_bytes);
    CHECK(used_bytes <= expected_bytes + 64e6);
    CHECK(double(session->device_bytes()) <= expected_bytes + 64e6);
  };
  step_and_measure();
  const std::size_t after_first = free_bytes();
  step_and_measure();
  CHECK(free_bytes() == after_first);
}

TEST_CASE("session: one that does not fit is refused in one line, and nothing is kept", "[gpu][session][alone]") {
  const auto preset = find_preset("pythia-12b");
  REQUIRE(preset);
  cuda::Context c = context();
  const std::size_t before = free_bytes();
  const auto refused = Session::create(c, *preset, {0, preset->num_hidden_layers}, {.batch = 4096, .capacity = 2048},
                                       DType::f16, DType::f16);
  CHECK(refusal_fault(
            refused.status(), Code::out_of_memory,
            {"cache of 4096 x 2048 entries in 36 layers: needs ", " GB of device memory, ", " GB are free"}) == "");
  CHECK(free_bytes() >= before);  // the driver may give back what it held in reserve
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  const ModelConfig m = small_model(DType::f16);
  const Workload load{.batch = 1, .q_len = 1, .capacity = 8};
  Session session = make_session(c, m, load, DType::f16, inputs(m, load, DType::f16));
  require_ok(session.step(Impl::graph));
  CHECK(std::isfinite(fetch<2>(session.tensors(2).output).at(0)));
}

TEST_CASE("session: what cannot be is refused by name", "[gpu][session][bad]") {
  cuda::Context c = context();
  const ModelConfig m = small_model(DType::f16);
  const Workload load{.batch = 2, .q_len = 1, .capacity = 8};
  const auto create = [&](const ModelConfig& config, std::int64_t layers, const Workload& w, DType activation) {
    return Session::create(c, config, {0, layers}, w, activation, DType::f16).status();
  };
  ModelConfig broken = m;
  broken.rotary_dim = 3;
  CHECK(refusal_fault(create(broken, 3, load, DType::f16), Code::invalid_argument, {"rotary_dim", "3"}) == "");
  CHECK(refusal_fault(create(m, 0, load, DType::f16), Code::invalid_argument,
                      {"must be a range within [0, 3), got [0, 0)"}) == "");
  CHECK(refusal_fault(create(m, 4, load, DType::f16), Code::invalid_argument,
                      {"must be a range within [0, 3), got [0, 4)"}) == "");
  CHECK(refusal_fault(create(m, 3, {.batch = 0, .capacity = 8}, DType::f16), Code::invalid_argument, {"batch"}) == "");
  CHECK(refusal_fault(create(m, 3, {.q_len = 9, .capacity = 8}, DType::f16), Code::invalid_argument,
                      {"q_len must be 1 to capacity 8, got 9"}) == "");
  CHECK(refusal_fault(create(m, 3, load, DType::f64), Code::unimplemented, {"got float64"}) == "");

  const Inputs in = inputs(m, load, DType::f16);
  Result<Session> session = Session::create(c, m, {0, 3}, load, DType::f16, DType::f16);
  require_ok(session.status());
  const LayerWeights& weights = in.weights[0].weights;
  CHECK(refusal_fault(session->step(Impl::graph), Code::invalid_argument, {"layer 0 has no weights"}) == "");
  CHECK(refusal_fault(session->weights.load_layer(3, weights), Code::invalid_argument,
                      {"layer must be 0 to 2, got 3"}) == "");
  const auto refused = [&](auto change, Code code, std::initializer_list<std::string_view> parts) {
    LayerWeights changed = weights;
    change(changed);
    CHECK(refusal_fault(session->weights.load_layer(1, changed), code, parts) == "");
    CHECK(refusal_fault(session->step(Impl::unfused, LayerRange{1, 2}), Code::invalid_argument,
                        {"layer 1 has no weights"}) == "");
  };
  refused([](LayerWeights& w) { w.dense.bias.data = nullptr; }, Code::invalid_argument,
          {"layer 1: attention.dense.bias", "null"});
  refused([](LayerWeights& w) { w.input_layernorm.gamma.shape[0] = 255; }, Code::invalid_argument,
          {"layer 1: input_layernorm.weight", "(255)", "(256)"});
  refused([](LayerWeights& w) { w.dense_4h_to_h.bias.dtype = DType::bf16; }, Code::invalid_argument,
          {"layer 1: mlp.dense_4h_to_h.bias", "bfloat16", "float16"});
  refused([](LayerWeights& w) { w.dense.weight = GptqWeight{}; }, Code::invalid_argument,
          {"'layer 1: attention.dense.weight' is quantised, expected a dense weight"});

  CHECK(refusal_fault(session->workspace.set_hidden(Tensor(DType::f16, {2, 255})), Code::invalid_argument,
                      {"'hidden' has shape (2, 255), expected (2, 256)"}) == "");
  CHECK(refusal_fault(session->workspace.set_hidden(Tensor(DType::f32, {2, 256})), Code::invalid_argument,
                      {"'hidden' has dtype float32, expected float16"}) == "");
  CHECK(refusal_fault(session->workspace.set_hidden(Tensor(DType::f16, {512})), Code::invalid_argument,
                      {"'hidden'", "rank 2"}) == "");
  CHECK(refusal_fault(session->cache.set_layer(0, in.k_caches[0], Tensor(DType::f16, {2, 4, 7, 64})),
                      Code::invalid_argument, {"'v_cache' has shape (2, 4, 7, 64), expected (2, 4, 8, 64)"}) == "");
  CHECK(refusal_fault(session->set_kv_len(std::vector<std::int32_t>{1}), Code::invalid_argument, {"kv_len", "2"}) ==
        "");
  CHECK(refusal_fault(session->set_kv_len(std::vector<std::int32_t>{1, 9}), Code::invalid_argument,
                      {"kv_len[1] must be q_len 1 to capacity 8, got 9"}) == "");
  CHECK(refusal_fault(session->set_kv_len(std::vector<std::int32_t>{0, 1}), Code::invalid_argument, {"kv_len[0]"}) ==
        "");
  for (const auto& [first, last] : {std::pair{0, 4}, {-1, 2}, {2, 2}, {2, 1}})
    CHECK(refusal_fault(session->step(Impl::graph, LayerRange{first, last}), Code::invalid_argument, {"[0, 3)"}) == "");

  // All of it left the session usable.
  for (std::int64_t l = 0; l < 3; ++l) require_ok(session->weights.load_layer(l, in.weights[std::size_t(l)].weights));
  require_ok(session->workspace.set_hidden(in.hidden));
  require_ok(session->step(Impl::graph));
  CHECK(std::isfinite(fetch<2>(session->tensors(2).output).at(0)));
}
