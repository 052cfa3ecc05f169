// The persistent kernel on ranks that share a model: each layer the whole model's oracle's within its budget, the same
// bits on all ranks and on every run, and one report instead of a hang. On one GPU, whose SMs the ranks divide, and on
// several.
#include <cuda_runtime_api.h>

#include <cstring>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/compare.hpp"
#include "core/model/ranks.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cuda/comm/communicator.hpp"
#include "cuda/model/session.hpp"
#include "cuda/persistent/persistent_kernel.hpp"
#include "cuda/runtime/stream.hpp"
#include "tests/cuda/device_layers.hpp"
#include "tests/cuda/gpus.hpp"
#include "tests/cuda/persistent_setups.hpp"
#include "tests/cuda/persistent_taps.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/setups.hpp"
#include "tests/support/taken.hpp"

using namespace cf;
using namespace cf::test;
using cuda::Communicator;
using cuda::PersistentKernel;

namespace {

using Layer = ops::DecodeLayer;

/// The heads of a cache (batch, kv_heads, capacity, head_dim) that a rank holds.
Tensor heads_of_rank(const Tensor& whole, std::int64_t rank, std::int64_t ranks) {
  const Shape& s = whole.shape();
  const std::int64_t heads = s[1] / ranks, head_bytes = whole.size_bytes() / (s[0] * s[1]);
  Tensor part(whole.dtype(), {s[0], heads, s[2], s[3]});
  for (std::int64_t b = 0; b < s[0]; ++b)
    std::memcpy(static_cast<std::byte*>(part.data()) + b * heads * head_bytes,
                static_cast<const std::byte*>(whole.data()) + (b * s[1] + rank * heads) * head_bytes,
                std::size_t(heads * head_bytes));
  return part;
}

/// A rank's part of some layers, on its GPU, and the kernel that runs them.
struct Rank {
  cuda::Context context;
  cuda::Stream stream;
  cuda::Session session;
  cuda::DeviceMemory output;
  PersistentKernel kernel;
};

Status on_rank(const Rank& r) { return cuda::from_cuda(cudaSetDevice(r.context.device()), "cudaSetDevice"); }

PersistentKernel kernel_of_session(const cuda::Session& session, cuda::PersistentChoices choices = {},
                                   std::int64_t first_model_layer = 0) {
  std::vector<cuda::PersistentLayer> layers;
  for (std::int64_t l = session.layers().first; l < session.layers().last; ++l)
    layers.push_back({session.weights.layer(l), session.cache.layer(l)});
  const LayerTensors t = session.tensors(0);
  return taken(PersistentKernel::create(
      session.context(), cuda::persistent_model(session.model(), session.weights.dtype()), layers,
      {t.positions, t.kv_len}, {t.cos, t.sin}, {.choices = choices, .first_model_layer = first_model_layer}));
}

/// Layers that ranks share. One thread drives all ranks.
class RankedLayers {
 public:
  RankedLayers(std::span<const int> devices, const HostLayers& h, bool shares_keys = true,
               std::int64_t first_model_layer = 0)
      : host(h),
        communicator(taken(Communicator::create(
            devices, {.part_bytes = 1 << 20,
                      .patience_s = 4,
                      .area_bytes = PersistentKernel::rank_area_bytes(std::int64_t(devices.size()))}))) {
    const auto count = std::int64_t(devices.size()), layers = std::int64_t(host.weights.size());
    for (std::int64_t r = 0; r < count; ++r) {
      require_cuda(cudaSetDevice(devices[std::size_t(r)]));
      cuda::Stream stream = taken(cuda::make_stream());
      const cuda::Context c = communicator->context(int(r)).on_stream(stream.get());
      const ModelSpec part = taken(host.config.spec().of_rank(r, count));
      cuda::Session session = taken(cuda::Session::create(c, part, {0, layers}, host.load, host.config.dtype,
                                                          host.config.dtype, host.weights[0].weights));
      for (std::int64_t l = 0; l < layers; ++l) {
        const auto i = std::size_t(l);
        const OwnedLayerWeights weights = taken(layer_of_rank(host.config.spec(), host.weights[i].weights, r, count));
        require_ok(session.weights.load_layer(l, weights.weights));
        require_ok(session.cache.set_layer(l, heads_of_rank(host.k_caches[i], r, count),
                                           heads_of_rank(host.v_caches[i], r, count)));
      }
      require_ok(session.workspace.set_hidden(host.hidden));
      cuda::DeviceMemory output = taken(cuda::DeviceMemory::create(c, std::size_t(host.hidden.size_bytes()), "output"));
      PersistentKernel kernel = kernel_of_session(session, {.shares_keys = shares_keys}, first_model_layer);
      ranks.push_back({c, std::move(stream), std::move(session), std::move(output), std::move(kernel)});
    }
    synchronize();
  }
  ~RankedLayers() {
    synchronize();
    while (!ranks.empty()) {
      (void)on_rank(ranks.back());
      ranks.pop_back();
    }
    (void)cudaSetDevice(0);
  }

  std::size_t count() const { return ranks.size(); }
  void set_kv_len(const std::vector<std::int32_t>& lengths) {
    for (Rank& r : ranks) {
      require_ok(on_rank(r));
      require_ok(r.session.set_kv_len(lengths));
      require_cuda(cudaDeviceSynchronize());
    }
  }
  ConstAnyView<2> input(const Rank& r) const { return r.session.tensors(0).hidden; }
  AnyView<2> output(Rank& r) const {
    const Shape& s = host.hidden.shape();
    return {r.output.data(), {s[0], s[1]}, host.config.dtype};
  }
  /// Launches layers [first, last) of one rank, which read the host's hidden state.
  Status launch(Rank& r, std::int64_t first, std::int64_t last) {
    CF_TRY(on_rank(r));
    require_cuda(cudaMemsetAsync(r.output.data(), 0xff, r.output.bytes(), r.stream.get()));
    return r.kernel.enqueue(r.stream.get(), first, last, input(r), output(r));
  }
  /// Launches layers of all ranks, and waits for them. `from`: the rank that is launched first.
  Status run(std::int64_t first, std::int64_t last, std::size_t from = 0) {
    for (std::size_t i = 0; i < count(); ++i) CF_TRY(launch(ranks[(from + i) % count()], first, last));
    synchronize();
    for (Rank& r : ranks) CF_TRY(r.kernel.take_report());
    return {};
  }
  void synchronize() {
    for (Rank& r : ranks) {
      (void)on_rank(r);
      require_cuda(cudaStreamSynchronize(r.stream.get()));
    }
  }
  /// What a rank's launch has written.
  Tensor made(std::size_t rank) {
    require_ok(on_rank(ranks[rank]));
    return fetch<2>(output(ranks[rank]));
  }
  /// The first rank's output. All ranks have its bits.
  Tensor made_by_all() {
    Tensor first = made(0);
    for (std::size_t r = 1; r < count(); ++r) {
      CAPTURE(r);
      CHECK(test::same_bits(made(r), first));
    }
    return first;
  }

  const HostLayers& host;
  std::unique_ptr<Communicator> communicator;
  std::vector<Rank> ranks;
};

/// The double oracle of a layer of the whole model.
struct Expected {
  Expected(const HostLayers& host, std::size_t layer, const std::vector<std::int32_t>& kv_len, const Tensor& hidden)
      : state(host.config, {.batch = host.load.batch, .kv_len = host.load.capacity, .capacity = host.load.capacity},
              DType::f64) {
    const ModelConfig& m = host.config;
    state.hidden = hidden.converted(DType::f64);
    state.k_cache = host.k_caches[layer].converted(DType::f64);
    state.v_cache = host.v_caches[layer].converted(DType::f64);
    state.fill_rope_table(m.rope_theta, m.rope_scaling);
    state.set_kv_len(kv_len);
    const Layer::Args args{.model = m, .weights = host.weights[layer].weights, .t = state.tensors()};
    require_ok(cpu_ref::run(args));
    budget = Layer::budget(Layer::dims(args), {DType::f32, m.dtype}, taken(cpu_ref::condition(args)));
  }
  LayerState state;
  Budget budget;
};

void check_within(const Tensor& got, const Tensor& expected, const Budget& budget) {
  const auto error = compare(got, expected);
  REQUIRE(error);
  CAPTURE(error->rel_l2, budget.rel_l2, error->rel_max, budget.rel_max, error->worst_coordinate);
  CHECK(error->non_finite == 0);
  CHECK(error->within(budget));
}

/// Each layer by itself, then all layers up to each one in one launch.
void check_layers(const ModelConfig& m, std::int64_t batch, std::span<const int> devices, int kv_len,
                  bool shares_keys = true) {
  const HostLayers host(m, {.batch = batch, .capacity = std::max(kv_len, 20)});
  RankedLayers on(devices, host, shares_keys);
  CAPTURE(devices.size(), devices.back(), m.name, to_string(m.dtype), batch, kv_len, shares_keys,
          to_string(on.ranks[0].kernel.plan()));
  const std::vector<std::int32_t> kv_lens = lengths(host.load, kv_len);
  on.set_kv_len(kv_lens);
  Tensor hidden = host.hidden.converted(DType::f64);
  for (std::int64_t l = 0; l < m.num_hidden_layers; ++l) {
    CAPTURE(l);
    const auto i = std::size_t(l);
    const Expected alone(host, i, kv_lens, host.hidden);
    require_ok(on.run(l, l + 1, i % on.count()));
    check_within(on.made_by_all(), alone.state.output, alone.budget);
    for (std::size_t r = 0; r < on.count(); ++r) {
      CAPTURE(r);
      require_ok(on_rank(on.ranks[r]));
      const LayerCache cache = on.ranks[r].session.cache.layer(l);
      const auto rank = std::int64_t(r), ranks = std::int64_t(on.count());
      check_within(fetch<4>(cache.k), heads_of_rank(alone.state.k_cache, rank, ranks), alone.budget);
      check_within(fetch<4>(cache.v), heads_of_rank(alone.state.v_cache, rank, ranks), alone.budget);
    }
    // A layer hands its error on, and adds its own.
    const Expected chained(host, i, kv_lens, hidden);
    hidden = chained.state.output.clone();
    Budget budget = chained.budget;
    budget.rel_l2 *= double(l + 1), budget.rel_max *= double(l + 1);
    require_ok(on.run(0, l + 1));
    check_within(on.made_by_all(), hidden, budget);
  }
}

ModelConfig ranked_model(Kind kind, std::int64_t heads, std::int64_t head_dim, std::int64_t intermediate, DType dtype,
                         std::int64_t layers) {
  ModelConfig m = model_of_kind(kind, heads, head_dim, head_dim / 4, intermediate);
  m.num_hidden_layers = layers;
  m.dtype = dtype;
  return m;
}

void check_kinds(int ranks, bool on_one) {
  if (!on_one && lacks_gpus(ranks)) return;
  const std::vector<int> devices = devices_of(ranks, on_one);
  for (Kind kind : kKinds)
    for (DType dtype : {DType::f16, DType::bf16})
      for (std::int64_t batch : {1, 3, 8})
        check_layers(ranked_model(kind, 16, 64, 2048, dtype, 3), batch, devices, batch == 3 ? 17 : 290);
  // Row products: of slices of one length, and of whole rows.
  for (Kind kind : kKinds) {
    if (ranks == 4) check_layers(ranked_model(kind, 64, 64, 16384, DType::f16, 1), 1, devices, 40);
    if (ranks == 4) continue;
    check_layers(ranked_model(kind, 32, 64, 8192, DType::f16, 2), 1, devices, 40);
    check_layers(ranked_model(kind, 32, 64, 2048, DType::bf16, 2), 1, devices, 40, false);
  }
}

void check_reruns(int ranks, bool on_one, int runs) {
  if (!on_one && lacks_gpus(ranks)) return;
  std::mt19937 random(1);
  for (Kind kind : kKinds)
    for (std::int64_t batch : {1, 3}) {
      const HostLayers host(ranked_model(kind, 32, 64, 8192, DType::f16, 3), {.batch = batch, .capacity = 64});
      RankedLayers on(devices_of(ranks, on_one), host);
      CAPTURE(ranks, on_one, to_string(kind), batch);
      on.set_kv_len(lengths(host.load, 40));
      // Launches of few layers and of many follow each other in any order.
      std::vector<Tensor> expected;
      for (std::int64_t last = 1; last <= 3; ++last) {
        require_ok(on.run(0, last));
        expected.push_back(on.made_by_all());
      }
      for (int run = 0; run < runs; ++run) {
        CAPTURE(run);
        const bool delayed = run % 4 == 0;
        for (Rank& r : on.ranks) require_ok(r.kernel.set_probe({.delay_seed = delayed ? unsigned(random()) | 1 : 0}));
        const auto last = std::int64_t(1 + random() % 3);
        require_ok(on.run(0, last, random() % on.count()));
        const Tensor made = on.made_by_all();
        REQUIRE(test::same_bits(made, expected[std::size_t(last - 1)]));
      }
    }
}

/// Many launches that nobody waits for: the ranks' launches overlap, and the last one's bits are the first one's.
void check_queues(int ranks, bool on_one) {
  if (!on_one && lacks_gpus(ranks)) return;
  const HostLayers host(ranked_model(Kind::gated, 32, 64, 8192, DType::f16, 3), {.batch = 1, .capacity = 64});
  RankedLayers on(devices_of(ranks, on_one), host);
  on.set_kv_len({40});
  require_ok(on.run(0, 3));
  const Tensor expected = on.made_by_all();
  for (int odd : {0, 1}) {
    for (int i = 0; i < 200 + odd; ++i)
      for (Rank& r : on.ranks) require_ok(on.launch(r, i % 3, i % 3 + 1));
    require_ok(on.run(0, 3));
    CHECK(test::same_bits(on.made_by_all(), expected));
  }
}

}  // namespace

TEST_CASE("persistent on ranks of one GPU: every layer is the oracle's within its budget, alike on all ranks",
          "[gpu][ranks][persistent][small]") {
  check_kinds(2, true);
  check_kinds(4, true);
}

TEST_CASE("persistent on several GPUs: every layer is the oracle's within its budget, alike on all ranks",
          "[gpu][ranks][persistent]") {
  check_kinds(2, false);
  check_kinds(4, false);
}

TEST_CASE("persistent on ranks: layers of Pythia-12B's and Llama-3.1-8B's sizes", "[gpu][ranks][persistent]") {
  for (bool on_one : {true, false}) {
    if (!on_one && lacks_gpus(2)) return;
    check_layers(ranked_model(Kind::parallel, 40, 128, 20480, DType::f16, 1), 1, devices_of(2, on_one), 128);
    ModelConfig llama = gated_model_of(ModelType::llama, 32, 8, 128, 4096, 14336);
    check_layers(llama, 1, devices_of(2, on_one), 128);
  }
}

TEST_CASE("persistent on ranks makes the same bits on every run, whichever rank is late", "[gpu][ranks][persistent]") {
  check_reruns(2, true, 100);
  check_reruns(2, false, 400);
  check_reruns(4, false, 100);
}

TEST_CASE("persistent on ranks: launches that follow each other do not meet", "[gpu][ranks][persistent]") {
  check_queues(2, true);
  check_queues(2, false);
  check_queues(4, false);
}

TEST_CASE("persistent on ranks: a withheld word is one report, which names rank, layer and site",
          "[gpu][ranks][persistent][report]") {
  struct Case {
    std::size_t rank;  // that withholds
    std::int64_t layer;
    std::string_view site, expected;
  };
  const Case cases[] = {
      {0, 1, "mlp.dense_4h_to_h", "layer 6: mlp.dense_4h_to_h of rank 0 was not complete within 40 ms"},
      {1, 1, "mlp.dense_4h_to_h", "layer 6: mlp.dense_4h_to_h of rank 1 was not complete within 40 ms"},
      {1, 2, "mlp.dense_4h_to_h", "layer 7: mlp.dense_4h_to_h of rank 1 was not complete within 40 ms"},
      {1, 0, "attention.dense", "layer 5: attention.dense of rank 1 was not complete within 30 ms"},
      {1, 0, "attention.context", "rank 1: layer 5: attention.context was not complete within 25 ms"}};
  for (bool on_one : {true, false}) {
    if (!on_one && lacks_gpus(2)) return;
    for (const Case& c : cases) {
      const bool parallel = c.site != "attention.dense";
      CAPTURE(on_one, c.rank, c.layer, c.site);
      const HostLayers host(ranked_model(parallel ? Kind::parallel : Kind::sequential, 16, 64, 2048, DType::f16, 3),
                            {.batch = 1, .capacity = 40});
      RankedLayers on(devices_of(2, on_one), host, true, 5);
      on.set_kv_len({20});
      require_ok(on.run(0, 3));
      for (std::size_t r = 0; r < 2; ++r)
        require_ok(on.ranks[r].kernel.set_probe({.withheld_layer = r == c.rank ? c.layer : -1,
                                                 .withheld_site = r == c.rank ? c.site : std::string_view(),
                                                 .wait_limit_ms = 20}));
      const Status report = on.run(0, 3);
      CHECK(refusal_fault(report, Code::device_error, {"persistent: rank ", c.expected, " of every rank"}) == "");
      // It stays, on all ranks: nothing more is launched.
      for (Rank& r : on.ranks) CHECK(on.launch(r, 0, 3).message() == report.message());
    }
  }
}

TEST_CASE("persistent on ranks: a rank that never starts is named, and the others end",
          "[gpu][ranks][persistent][report]") {
  for (bool on_one : {true, false})
    for (std::size_t missing : {0, 1}) {
      if (!on_one && lacks_gpus(2)) return;
      CAPTURE(on_one, missing);
      const HostLayers host(ranked_model(Kind::parallel, 16, 64, 2048, DType::f16, 3), {.batch = 1, .capacity = 40});
      RankedLayers on(devices_of(2, on_one), host);
      on.set_kv_len({20});
      require_ok(on.run(0, 3));
      for (Rank& r : on.ranks) require_ok(r.kernel.set_probe({.wait_limit_ms = 20}));
      require_ok(on.launch(on.ranks[1 - missing], 0, 3));
      on.synchronize();
      const std::string expected = "persistent: rank " + std::to_string(1 - missing) +
                                   ": layer 0: mlp.dense_4h_to_h of rank " + std::to_string(missing) +
                                   " was not complete within 40 ms";
      CHECK(refusal_fault(on.launch(on.ranks[missing], 0, 3), Code::device_error, {expected}) == "");
      CHECK(refusal_fault(on.ranks[1 - missing].kernel.take_report(), Code::device_error, {expected}) == "");
    }
}

TEST_CASE("persistent on ranks: what the kernel does not take is refused by name", "[gpu][ranks][persistent][bad]") {
  const HostLayers host(ranked_model(Kind::parallel, 16, 64, 2048, DType::f16, 2), {.batch = 1, .capacity = 40});
  RankedLayers on(devices_of(2, true), host);
  Rank& r = on.ranks[0];
  const auto unimplemented = Code::unimplemented, invalid = Code::invalid_argument;
  CHECK(refusal_fault(r.kernel.enqueue(r.stream.get(), 0, 2, {}, on.output(r)), invalid, {"'input' is null"}) == "");
  CHECK(refusal_fault(r.kernel.enqueue_split(r.stream.get(), 0, on.input(r), on.output(r)), unimplemented,
                      {"whole layers on several GPUs, got halves"}) == "");
  const auto refused = [&](auto change, Code code, std::string_view what) {
    std::vector<cuda::PersistentLayer> layers{{r.session.weights.layer(0), r.session.cache.layer(0)}};
    const LayerTensors t = r.session.tensors(0);
    cuda::Context c = r.context;
    cuda::PersistentModel m = cuda::persistent_model(r.session.model(), DType::f16);
    cuda::PersistentOptions o;
    change(c, m, o);
    return refusal_fault(PersistentKernel::create(c, m, layers, {t.positions, t.kv_len}, {t.cos, t.sin}, o).status(),
                         code, {what});
  };
  CHECK(refused([](auto&, auto&, auto&) {}, unimplemented, "") == "was accepted");
  CHECK(refused([](auto& c, auto&, auto&) { c.set_peers(nullptr); }, invalid,
                "expected the context of one of 2 ranks, got one of 1") == "");
  CHECK(refused([](auto&, auto& m, auto&) { m.ranks = 4; }, invalid, "one of 4 ranks, got one of 2") == "");
  CHECK(refused([](auto&, auto&, auto& o) { o.ends.emplace(); }, unimplemented,
                "layers alone on several GPUs, got a whole model") == "");
  CHECK(refused([](auto&, auto& m, auto&) { m.use_parallel_residual = false; }, unimplemented,
                "ranks that share an area, got another batch, hidden_size or residual") == "");
  const auto without = taken(Communicator::create(devices_of(2, true), {.part_bytes = 16}));
  CHECK(refused([&](auto& c, auto&, auto&) { c.set_peers(without->context(0).peers()); }, unimplemented,
                "B that all ranks reach, got one of 0 B") == "");
}
