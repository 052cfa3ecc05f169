// Weights, cache, workspace and executor are four things: any of them may be used with others of the rest, and what one
// combination did not finish is reported by name.
#include <cuda_runtime_api.h>

#include <vector>

#include "core/compare.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "tests/cuda/device_session.hpp"
#include "tests/cuda/occupy.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;
using cuda::Executor;
using cuda::Impl;
using cuda::KvCache;
using cuda::LayerRange;
using cuda::ResidentWeights;
using cuda::Step;
using cuda::Workspace;

namespace {

ModelConfig small_model(std::int64_t layers = 3) {
  ModelConfig m = model_of(4, 64, 16, 512);
  m.num_hidden_layers = layers;
  m.max_position_embeddings = 64;
  m.dtype = DType::f16;
  return m;
}

template <class T>
T require_value(Result<T> result) {
  require_ok(result.status());
  return std::move(*result);
}

ResidentWeights resident(const cuda::Context& c, const ModelConfig& m, LayerRange range) {
  ResidentWeights weights = require_value(ResidentWeights::create(c, m, m.dtype, range));
  for (std::int64_t l = range.first; l < range.last; ++l)
    require_ok(weights.load_layer(l, procedural_layer(m, m.dtype, l, 7).weights));
  return weights;
}

KvCache make_cache(const cuda::Context& c, const ModelConfig& m, LayerRange range, std::int64_t batch = 1) {
  return require_value(KvCache::create(c, m, m.dtype, range, batch, 64));
}

Workspace make_workspace(const cuda::Context& c, const ModelConfig& m, std::int64_t tokens) {
  return require_value(Workspace::create(c, m, m.dtype, tokens, 64));
}

Tensor hidden_of(std::int64_t tokens, const char* name) { return activations(DType::f16, {tokens, 256}, name); }

/// The output of the last layer after the device's work is done.
Tensor output(const Workspace& workspace, const KvCache& cache, LayerRange range, std::int64_t q_len) {
  return fetch<2>(workspace.tensors(cache, range.first, range.last - 1, q_len).output);
}

struct Streams {
  Streams() {
    for (cudaStream_t& s : all) require_cuda(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  }
  ~Streams() {
    for (cudaStream_t s : all) (void)cudaStreamDestroy(s);
  }
  cudaStream_t all[2] = {};
};

}  // namespace

TEST_CASE("ownership: a prompt of 17 tokens on one stream, then a token on another, on the same weights and cache",
          "[gpu][ownership][persistent][small][library]") {
  const ModelConfig m = small_model();
  const LayerRange range{0, 3};
  cuda::Context c = context();
  const ResidentWeights weights = resident(c, m, range);
  const Streams streams;
  Workspace workspace = make_workspace(c, m, 17);
  Executor unfused(c, Impl::unfused);
  const auto prefill_and_decode = [&](Impl prefill, Impl decode) {
    KvCache cache = make_cache(c, m, range);
    // All entries are compared, also those that no step writes.
    const AnyView<4> keys = cache.layer(2).k;
    require_cuda(cudaMemset(keys.data, 0xff, std::size_t(keys.bytes())));
    require_cuda(cudaDeviceSynchronize());
    Executor first(c, prefill), second(c, decode);
    require_ok(workspace.set_hidden(hidden_of(17, "prompt")));
    require_ok(cache.extend(streams.all[0], 17));
    require_ok(first.step(weights, cache, workspace, {.q_len = 17, .stream = streams.all[0]}));
    require_ok(first.synchronize(streams.all[0]));
    std::vector<Tensor> made;
    made.push_back(output(workspace, cache, range, 17));
    require_ok(workspace.set_hidden(hidden_of(1, "token")));
    require_ok(cache.extend(streams.all[1]));
    require_ok(second.step(weights, cache, workspace, {.stream = streams.all[1]}));
    require_ok(second.synchronize(streams.all[1]));
    made.push_back(output(workspace, cache, range, 1));
    made.push_back(fetch<4>(ConstAnyView<4>(cache.layer(2).k)));
    CHECK(fetch<1>(ConstAnyView<1>(cache.kv_len())).as<std::int32_t>()[0] == 18);
    return made;
  };
  const auto expected = prefill_and_decode(Impl::unfused, Impl::unfused);
  const auto graphs = prefill_and_decode(Impl::graph, Impl::graph);
  for (std::size_t i = 0; i < 2; ++i) CHECK(same_bits(expected[i], graphs[i]));
  // The persistent kernel keeps the residual stream in float32: other bits, near by.
  const auto mixed = prefill_and_decode(Impl::graph, Impl::persistent);
  CHECK(same_bits(expected[0], mixed[0]));
  const auto error = compare(mixed[1], expected[1]);
  REQUIRE(error);
  CHECK(error->rel_l2 <= 8 * unit_roundoff(DType::f16));
}

TEST_CASE("ownership: executors and caches share one copy of the weights", "[gpu][ownership][alone]") {
  const auto preset = find_preset("pythia-410m");
  REQUIRE(preset);
  const ModelConfig& m = *preset;
  const LayerRange range{0, m.num_hidden_layers};
  cuda::Context c = context();
  ResidentWeights weights = require_value(ResidentWeights::create(c, m, m.dtype, range));
  const OwnedLayerWeights layer = procedural_layer(m, m.dtype, 0, 1);
  for (std::int64_t l = 0; l < range.last; ++l) require_ok(weights.load_layer(l, layer.weights));
  KvCache cache = make_cache(c, m, range);
  Workspace workspace = make_workspace(c, m, 1);
  require_ok(workspace.set_hidden(activations(DType::f16, {1, m.hidden_size}, "hidden")));
  require_ok(cache.set_kv_len(std::vector<std::int32_t>{1}));
  std::size_t before = 0, after = 0, total = 0;
  std::vector<Executor> executors;
  for (Impl impl : cuda::kImpls) {
    executors.emplace_back(c, impl);
    require_ok(executors.back().step(weights, cache, workspace, {}));
    require_ok(executors.back().synchronize(nullptr));
    if (impl == Impl::unfused) require_cuda(cudaMemGetInfo(&before, &total));
  }
  require_cuda(cudaMemGetInfo(&after, &total));
  // Graphs and scratch take some; a second copy of the weights would take 600 MB.
  CHECK(double(before) - double(after) < 64e6);
}

TEST_CASE("ownership: conversations in turn on one executor are what they are alone", "[gpu][ownership]") {
  const Impl impl = GENERATE(Impl::unfused, Impl::graph, Impl::persistent);
  const ModelConfig m = small_model();
  const LayerRange range{0, 3};
  cuda::Context c = context();
  const ResidentWeights weights = resident(c, m, range);
  Workspace workspace = make_workspace(c, m, 1);
  Executor executor(c, impl);
  const auto talk = [&](std::vector<KvCache*> caches, int steps) {
    std::vector<Tensor> last(caches.size());
    for (int i = 0; i < steps; ++i)
      for (std::size_t n = 0; n < caches.size(); ++n) {
        require_ok(workspace.set_hidden(hidden_of(1, n == 0 ? "first" : "second")));
        require_ok(caches[n]->extend(nullptr));
        require_ok(executor.step(weights, *caches[n], workspace, {}));
        require_ok(executor.synchronize(nullptr));
        last[n] = output(workspace, *caches[n], range, 1);
      }
    return last;
  };
  KvCache a = make_cache(c, m, range), b = make_cache(c, m, range), alone = make_cache(c, m, range);
  const auto both = talk({&a, &b}, 5);
  const auto first = talk({&alone}, 5);
  CHECK(same_bits(both[0], first[0]));
  CHECK_FALSE(same_bits(both[0], both[1]));
}

TEST_CASE("ownership: weights that lie on the device load as those of the host", "[gpu][ownership]") {
  const ModelConfig m = small_model();
  const LayerRange range{0, 3};
  cuda::Context c = context();
  const ResidentWeights source = resident(c, m, range);
  ResidentWeights copy = require_value(ResidentWeights::create(c, m, m.dtype, range));
  for (std::int64_t l = 0; l < 3; ++l) require_ok(copy.load_layer(l, source.layer(l)));
  Workspace workspace = make_workspace(c, m, 1);
  require_ok(workspace.set_hidden(hidden_of(1, "token")));
  Executor graph(c, Impl::graph);
  std::vector<Tensor> outputs;
  for (const ResidentWeights* weights : {&source, static_cast<const ResidentWeights*>(&copy)}) {
    KvCache cache = make_cache(c, m, range);
    require_ok(cache.extend(nullptr));
    require_ok(graph.step(*weights, cache, workspace, {}));
    require_ok(graph.synchronize(nullptr));
    outputs.push_back(output(workspace, cache, range, 1));
  }
  CHECK(same_bits(outputs[0], outputs[1]));
}

TEST_CASE("ownership: a whole model is resident, embedding, final norm and head with its layers", "[gpu][ownership]") {
  const bool tied = GENERATE(false, true);
  const ModelConfig m = small_model();
  ModelSpec spec = m.spec();
  spec.traits.tied_embeddings = tied;
  cuda::Context c = context();
  const Tensor embedding = activations(DType::f16, {m.vocab_size, m.hidden_size}, "embedding"),
               head = activations(DType::f16, {m.vocab_size, m.hidden_size}, "head"),
               gamma = activations(DType::f16, {m.hidden_size}, "gamma"),
               beta = activations(DType::f16, {m.hidden_size}, "beta");
  std::vector<OwnedLayerWeights> layers;
  ModelWeights host{.embed_in = embedding.view<2>(),
                    .layers = {},
                    .final_layer_norm = {gamma.view<1>(), beta.view<1>()},
                    .embed_out = {.weight = DenseWeight{tied ? embedding.view<2>() : head.view<2>()}}};
  for (std::int64_t l = 0; l < m.num_hidden_layers; ++l) {
    layers.push_back(procedural_layer(m, m.dtype, l, 7));
    host.layers.push_back(layers.back().weights);
  }
  const ResidentWeights weights = require_value(ResidentWeights::load(c, spec, m.dtype, host));
  const ModelWeights there = weights.model_weights();
  CHECK(same_bits(fetch<2>(there.embed_in), embedding));
  CHECK(same_bits(fetch<2>(std::get<DenseWeight>(there.embed_out.weight).weight), tied ? embedding : head));
  CHECK((std::get<DenseWeight>(there.embed_out.weight).weight.data == there.embed_in.data) == tied);
  CHECK(same_bits(fetch<1>(there.final_layer_norm.gamma), gamma));
  CHECK(same_bits(fetch<1>(there.final_layer_norm.beta), beta));
  REQUIRE(there.layers.size() == 3);
  CHECK(weights.is_loaded(2));

  host.layers.pop_back();
  CHECK(refusal_fault(ResidentWeights::load(c, spec, m.dtype, host).status(), Code::invalid_argument,
                      {"the model has 2 layers, expected 3"}) == "");
  host.layers.push_back(layers.back().weights);
  host.embed_in.shape[0] -= 1;
  CHECK(refusal_fault(ResidentWeights::load(c, spec, m.dtype, host).status(), Code::invalid_argument,
                      {"gpt_neox.embed_in.weight", "(36, 256)", "(37, 256)"}) == "");
}

TEST_CASE("ownership: weights in place are read where they lie", "[gpu][ownership][bad]") {
  const ModelConfig m = small_model();
  cuda::Context c = context();
  const OwnedModelWeights host = procedural_model(m, m.dtype, 7);
  const ResidentWeights source = require_value(ResidentWeights::load(c, m, m.dtype, host.weights));
  const ModelWeights there = source.model_weights();
  const ResidentWeights weights = require_value(ResidentWeights::in_place(c, m, m.dtype, there));
  CHECK(weights.device_bytes() == 0);
  CHECK(weights.is_loaded(2));
  std::vector<const void*> expected, got;
  for (const auto& [all, to] : {std::pair(there, &expected), std::pair(weights.model_weights(), &got)})
    for_each_model_weight(m, all,
                          [&, to = to](const auto&, const auto& view, const auto&) { to->push_back(view.data); });
  CHECK(got == expected);

  const auto fault = [&](const ModelWeights& w, Code code, std::initializer_list<std::string_view> parts) {
    return refusal_fault(ResidentWeights::in_place(c, m, m.dtype, w).status(), code, parts);
  };
  CHECK(fault(host.weights, Code::invalid_argument,
              {"'gpt_neox.embed_in.weight' is in the memory of the host, expected device 0"}) == "");
  ModelWeights wrong = there;
  wrong.layers[1].dense.bias.data = static_cast<const std::byte*>(wrong.layers[1].dense.bias.data) + 16;
  CHECK(fault(wrong, Code::invalid_argument,
              {"'gpt_neox.layers.1.attention.dense.bias' begins 16 bytes past a multiple of 256, expected one"}) == "");
  wrong = there;
  wrong.layers.pop_back();
  CHECK(fault(wrong, Code::invalid_argument, {"the model has 2 layers, expected 3"}) == "");
  wrong = there;
  wrong.embed_in.shape[0] -= 1;
  CHECK(fault(wrong, Code::invalid_argument, {"gpt_neox.embed_in.weight"}) == "");
  wrong = there;
  wrong.layers[0].dense.weight = GptqWeight{};
  CHECK(fault(wrong, Code::unimplemented, {"layer 0: attention.dense.weight' is quantised, expected dense"}) == "");
  wrong.layers[0].dense.weight = PackedWeight{.out = m.hidden_size, .in = m.hidden_size};
  CHECK(fault(wrong, Code::unimplemented, {"cuda takes weights packed by", "got a weight packed by nobody"}) == "");
}

TEST_CASE("ownership: packed weights in place are those that this model's steps read", "[gpu][ownership][gptq][bad]") {
  const ModelConfig m = small_model();
  cuda::Context c = context();
  const OwnedModelWeights host = procedural_model(m, m.dtype, 7, {4, 64});
  const ResidentWeights source = require_value(ResidentWeights::load(c, m, m.dtype, host.weights));
  const ModelWeights there = source.model_weights();
  const ResidentWeights weights = require_value(ResidentWeights::in_place(c, m, m.dtype, there));
  CHECK(weights.device_bytes() == 0);
  for (std::int64_t l = 0; l < m.num_hidden_layers; ++l)
    CHECK(std::get<PackedWeight>(weights.layer(l).dense.weight).data.data ==
          std::get<PackedWeight>(there.layers[std::size_t(l)].dense.weight).data.data);

  const auto fault = [&](auto&& change, std::initializer_list<std::string_view> parts) {
    ModelWeights wrong = there;
    change(wrong.layers[1]);
    return refusal_fault(ResidentWeights::in_place(c, m, m.dtype, wrong).status(), Code::invalid_argument, parts);
  };
  const auto packed = [](LinearParams& l) -> PackedWeight& { return std::get<PackedWeight>(l.weight); };
  CHECK(fault([&](LayerWeights& w) { packed(w.dense).out -= 16; },
              {"layer 1: attention.dense", "packed weight is ("}) == "");
  CHECK(fault([&](LayerWeights& w) { packed(w.dense).data.data += 4; },
              {"layer 1: attention.dense.weight' begins 16 bytes past a multiple of 256"}) == "");
  const cuda::Packed on_host = require_value(cuda::pack(host.weights.layers[1].dense.weight));
  CHECK(fault([&](LayerWeights& w) { w.dense.weight = on_host.weight; },
              {"layer 1: attention.dense.weight' is in the memory of the host"}) == "");
  // Without a hint the rows keep their order, in which ln_qkv does not read them.
  const cuda::Packed plain = require_value(cuda::pack(host.weights.layers[1].query_key_value.weight));
  CHECK(fault([&](LayerWeights& w) { packed(w.query_key_value).layout = std::get<PackedWeight>(plain.weight).layout; },
              {"layer 1: attention.query_key_value.weight' is packed in an order of rows"}) == "");
}

TEST_CASE("ownership: a range of a model's layers keeps the model's numbers", "[gpu][ownership]") {
  const ModelConfig m = small_model(6);
  cuda::Context c = context();
  ResidentWeights weights = resident(c, m, {3, 6});
  KvCache cache = make_cache(c, m, {2, 6});
  Workspace workspace = make_workspace(c, m, 1);
  require_ok(workspace.set_hidden(hidden_of(1, "token")));
  Executor unfused(c, Impl::unfused);
  require_ok(cache.extend(nullptr));
  require_ok(unfused.step(weights, cache, workspace, {.layers = LayerRange{4, 5}}));
  const auto refused = [&](const Step& step, std::initializer_list<std::string_view> parts) {
    CHECK(refusal_fault(unfused.step(weights, cache, workspace, step), Code::invalid_argument, parts) == "");
  };
  refused({.layers = LayerRange{2, 4}}, {"the weights' [3, 6)", "got [2, 4)"});
  refused({.q_len = 2}, {"q_len must be 1, what the cache was extended by, got 2"});
  CHECK(refusal_fault(weights.load_layer(2, weights.layer(3)), Code::invalid_argument,
                      {"layer must be 3 to 5, got 2"}) == "");
  LayerWeights broken = weights.layer(4);
  broken.dense.bias.shape[0] = 255;
  CHECK(refusal_fault(weights.load_layer(5, broken), Code::invalid_argument, {"layer 5: attention.dense.bias"}) == "");
  refused({}, {"layer 5 has no weights, expected load_layer() first"});
}

TEST_CASE("ownership: a step that was given up is reported once, by synchronize() or by the next step",
          "[gpu][ownership]") {
  const bool synchronized = GENERATE(true, false);
  const ModelConfig m = small_model();
  const LayerRange range{1, 3};
  cuda::Context c = context();
  const ResidentWeights weights = resident(c, m, range);
  KvCache cache = make_cache(c, m, range);
  Workspace workspace = make_workspace(c, m, 1);
  require_ok(workspace.set_hidden(hidden_of(1, "token")));
  const Streams streams;
  Executor split(c, Impl::split);
  require_ok(cache.extend(streams.all[0]));
  require_ok(split.prepare(weights, cache, workspace, {.stream = streams.all[0]}));
  // All SMs but a few are held for longer than a block waits: of a regular launch some blocks run, others do not.
  enqueue_occupy(streams.all[1], c.arch().sm_count - 8, 6000);
  require_ok(split.step(weights, cache, workspace, {.stream = streams.all[0]}));
  Status status;
  if (synchronized) {
    status = split.synchronize(streams.all[0]);
  } else {
    require_cuda(cudaStreamSynchronize(streams.all[0]));
    status = split.step(weights, cache, workspace, {.stream = streams.all[0]});
  }
  CHECK(refusal_fault(status, Code::device_error, {"layer 1: ", "was not complete within "}) == "");
  require_cuda(cudaDeviceSynchronize());
  require_ok(split.step(weights, cache, workspace, {.stream = streams.all[0]}));
  require_ok(split.synchronize(streams.all[0]));
}
