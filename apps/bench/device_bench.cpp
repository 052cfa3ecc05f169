#include "apps/bench/device_bench.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <future>
#include <thread>

#include "apps/bench/layer_bench.hpp"
#include "apps/cli/terminal.hpp"
#include "core/model/ranks.hpp"
#include "core/procedural.hpp"
#include "cuda/comm/communicator.hpp"
#include "cuda/model/session.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/persistent/persistent_kernel.hpp"
#include "cuda/persistent/variants.hpp"
#include "cuda/runtime/memory.hpp"
#include "cuda/runtime/range.hpp"
#include "cuda/runtime/stream.hpp"

namespace cf::apps {
namespace {

using cuda::Impl;

Result<std::vector<Impl>> parse_impls(const std::string& text) {
  std::vector<Impl> impls;
  if (text.empty()) impls.push_back(Impl::graph);
  for (std::size_t from = 0; !text.empty() && from <= text.size();) {
    const std::size_t comma = std::min(text.find(',', from), text.size());
    const std::string name = text.substr(from, comma - from);
    from = comma + 1;
    const auto impl = cuda::impl_from_string(name);
    if (!impl)
      return Status::error(
          Code::invalid_argument,
          "--impl '" + text + "': expected a list of unfused, graph, split, layer and persistent, got '" + name + "'");
    impls.push_back(*impl);
  }
  return impls;
}

/// The timer, with a context that makes the launch plans that the options ask for.
Result<DeviceTimer> make_timer(const DeviceOptions& options) {
  CF_TRY_ASSIGN(DeviceTimer timer, DeviceTimer::create());
  if (options.arch_plan == "sm_90")
    timer.context().set_plan_arch(cuda::kH200);
  else if (options.arch_plan == "sm_120")
    timer.context().set_plan_arch(cuda::kRtx5090);
  else if (!options.arch_plan.empty())
    return Status::error(Code::invalid_argument, "--arch-plan " + options.arch_plan + ": expected sm_90 or sm_120");
  return timer;
}

/// How many layers are resident: enough to make every product's weights cold. Those of the smallest product,
/// attention.dense, then take twice the L2.
std::int64_t resident_layers(const DeviceBenchRequest& r, const LayerWeights& like, std::size_t l2_bytes) {
  if (r.whole_model) return r.config.num_hidden_layers;
  if (r.bench.warm) return 1;
  const double product_bytes =
      format_of(like.dense.weight).bytes(r.config.hidden_size, r.config.hidden_size, r.config.dtype);
  return std::min(r.config.num_hidden_layers, std::int64_t(2 * double(l2_bytes) / product_bytes) + 1);
}

/// A persistent kernel of its own for the session's layers.
Result<cuda::PersistentKernel> make_kernel(const cuda::Session& session, const cuda::PersistentChoices& choices = {}) {
  std::vector<cuda::PersistentLayer> layers;
  for (std::int64_t l = session.layers().first; l < session.layers().last; ++l)
    layers.push_back({session.weights.layer(l), session.cache.layer(l)});
  const LayerTensors t = session.tensors(session.layers().first);
  return cuda::PersistentKernel::create(session.context(),
                                        cuda::persistent_model(session.model(), session.weights.dtype()), layers,
                                        {t.positions, t.kv_len}, {t.cos, t.sin}, {.choices = choices});
}

/// The ranks that share layers with the first GPU's: what joins them, and the others' streams and layers. Calls for a rank
/// are made on its GPU.
class OtherRanks {
 public:
  /// Gives the first rank's context its peers.
  static Result<OtherRanks> create(std::int64_t gpus, std::int64_t part_bytes, cuda::Context& first) {
    OtherRanks made;
    if (gpus == 1) return made;
    std::vector<int> devices;
    for (int d = 0; d < int(gpus); ++d) devices.push_back(d);
    CF_TRY_ASSIGN(made.communicator_,
                  cuda::Communicator::create(devices, {.part_bytes = part_bytes,
                                                       .area_bytes = cuda::PersistentKernel::rank_area_bytes(gpus)}));
    first.set_peers(made.communicator_->context(0).peers());
    for (int rank = 1; rank < int(gpus); ++rank) {
      const On on(rank);
      CF_TRY_ASSIGN(cuda::Stream stream, cuda::make_stream());
      cuda::Context context = made.communicator_->context(rank).on_stream(stream.get());
      context.set_plan_arch(first.arch());
      context.set_overlap(first.overlap());
      made.ranks_.push_back({context, std::move(stream), {}});
    }
    return made;
  }
  OtherRanks(OtherRanks&&) noexcept = default;
  OtherRanks& operator=(OtherRanks&&) noexcept = default;
  ~OtherRanks() { reset(); }

  /// Calls f(rank, context, session) for each, on its GPU.
  template <class F>
  Status each(F&& f) {
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      const On on(int(i) + 1);
      CF_TRY(f(std::int64_t(i) + 1, ranks_[i].context, ranks_[i].session));
    }
    return {};
  }
  Status synchronize() {
    CF_TRY(each([](auto, auto&, auto& session) { return session->synchronize(); }));
    return communicator_ ? communicator_->status() : Status();
  }
  void reset() {
    (void)each([](auto, auto&, auto& session) {
      session.reset();
      return Status();
    });
  }

 private:
  /// Makes a GPU the thread's for as long as this object lives, and then the first one.
  struct On {
    explicit On(int device) { (void)cudaSetDevice(device); }
    On(const On&) = delete;
    On& operator=(const On&) = delete;
    ~On() { (void)cudaSetDevice(0); }
  };
  struct Rank {
    cuda::Context context;
    cuda::Stream stream;
    std::optional<cuda::Session> session;
  };
  OtherRanks() = default;

  std::unique_ptr<cuda::Communicator> communicator_;
  std::vector<Rank> ranks_;
};

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

class Bench final : public DeviceBench {
 public:
  Bench(DeviceBenchRequest request, std::vector<Impl> impls, DeviceTimer timer, OtherRanks others, ModelSpec part)
      : r_(std::move(request)),
        impls_(std::move(impls)),
        timer_(std::move(timer)),
        device_{timer_.info(), to_string(timer_.context().arch())},
        others_(std::move(others)),
        part_(part) {
    if (ranks() > 1) device_.launch_plan += ", a part of each layer on each of " + std::to_string(ranks()) + " GPUs";
  }

  const DeviceDescription& device() const override { return device_; }
  Status check(std::int64_t layer) override;
  Status time(std::int64_t layer, const DeviceBenchSink& sink) override;

 private:
  /// Brings a layer to the device where it is not there yet. There is room for layers beside it, which make its weights
  /// cold.
  Status bring(std::int64_t layer) {
    if (session_ && layer == layer_) return {};
    CF_TRY_ASSIGN(weights_, r_.load(layer));
    layer_ = layer;
    if (!session_ || !resident().contains(layer)) {
      session_.reset();  // its memory is free before the next one takes its own
      others_.reset();
      const std::int64_t all = r_.config.num_hidden_layers,
                         count = resident_layers(r_, weights_.weights, timer_.info().l2_bytes),
                         first = std::min(layer, all - count),
                         capacity = *std::max_element(r_.kv_lens.begin(), r_.kv_lens.end());
      const Workload load{.batch = r_.batch, .q_len = r_.q_len, .kv_len = capacity, .capacity = capacity};
      const auto open = [&](const ModelSpec& part, const cuda::Context& context,
                            std::optional<cuda::Session>& session) -> Status {
        CF_TRY_ASSIGN(cuda::Session made, cuda::Session::create(context, part, {first, first + count}, load,
                                                                r_.config.dtype, r_.config.dtype, weights_.weights));
        session.emplace(std::move(made));
        return {};
      };
      CF_TRY(open(part_, timer_.context(), session_));
      CF_TRY(others_.each([&](std::int64_t rank, const cuda::Context& context, auto& session) -> Status {
        CF_TRY_ASSIGN(const ModelSpec part, r_.config.spec().of_rank(rank, ranks()));
        return open(part, context, session);
      }));
    }
    return session_->weights.is_loaded(layer) ? Status() : load_layer(layer, weights_.weights);
  }

  std::int64_t ranks() const { return r_.device.gpus; }

  /// Gives each rank its part of a layer.
  Status load_layer(std::int64_t layer, const LayerWeights& weights) {
    if (ranks() == 1) return session_->weights.load_layer(layer, weights);
    const auto load = [&](std::int64_t rank, cuda::Session& session) -> Status {
      CF_TRY_ASSIGN(const OwnedLayerWeights part, layer_of_rank(r_.config, weights, rank, ranks()));
      return session.weights.load_layer(layer, part.weights);
    };
    CF_TRY(load(0, *session_));
    return others_.each([&](std::int64_t rank, const auto&, auto& session) { return load(rank, *session); });
  }

  /// Puts a step of all ranks onto their streams. `input` takes the place of what the first layer reads.
  Status step(Impl impl, std::optional<cuda::LayerRange> layers = {}, const ConstAnyView<2>& input = {}) {
    const auto input_of = [&](const cuda::Session& session) {
      return input ? ConstAnyView<2>(session.tensors(resident().first).hidden) : input;
    };
    // All ranks are prepared before one of them waits for the others.
    if (ranks() > 1) {
      CF_TRY(session_->prepare(impl, layers, input));
      CF_TRY(others_.each([&](std::int64_t, const auto&, auto& session) {
        return session->prepare(impl, layers, input_of(*session));
      }));
    }
    CF_TRY(others_.each(
        [&](std::int64_t, const auto&, auto& session) { return session->step(impl, layers, input_of(*session)); }));
    return session_->step(impl, layers, input);
  }
  Status synchronize() {
    CF_TRY(session_->synchronize());
    return others_.synchronize();
  }

  /// Loads the resident layers that are not there yet. Several threads make procedural weights.
  Status load_the_others() {
    std::vector<std::int64_t> missing;
    for (std::int64_t l = resident().first; l < resident().last; ++l)
      if (!session_->weights.is_loaded(l)) missing.push_back(l);
    if (missing.empty()) return {};
    const std::size_t window = std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 16);
    std::deque<std::future<Result<checkpoint::LoadedLayer>>> ahead;
    Progress progress("loading layers", std::int64_t(missing.size()));
    for (std::size_t next = 0, at = 0; at < missing.size(); ++at) {
      for (; next < missing.size() && ahead.size() < window; ++next)
        ahead.push_back(std::async(std::launch::async, r_.load, missing[next]));
      CF_TRY_ASSIGN(const checkpoint::LoadedLayer weights, ahead.front().get());
      ahead.pop_front();
      CF_TRY(load_layer(missing[at], weights.weights));
      progress.set(std::int64_t(at) + 1);
    }
    return {};
  }

  /// Fills hidden and every layer's cache for a step at that kv_len.
  Status fill(std::int64_t kv_len) {
    load_ = {.batch = r_.batch, .q_len = r_.q_len, .kv_len = kv_len, .capacity = session_->cache.capacity()};
    const LayerState state = inputs(r_.config.dtype);
    const auto fill_rank = [&](std::int64_t rank, cuda::Session& session) -> Status {
      CF_TRY(session.workspace.set_hidden(state.hidden));
      const Tensor k = heads_of_rank(state.k_cache, rank, ranks()), v = heads_of_rank(state.v_cache, rank, ranks());
      for (std::int64_t l = resident().first; l < resident().last; ++l) CF_TRY(session.cache.set_layer(l, k, v));
      return session.set_kv_len(std::vector<std::int32_t>(std::size_t(load_.batch), std::int32_t(load_.kv_len)));
    };
    CF_TRY(fill_rank(0, *session_));
    return others_.each([&](std::int64_t rank, const auto&, auto& session) { return fill_rank(rank, *session); });
  }

  /// Steps the layer alone, and waits for it.
  Status step_layer(Impl impl) {
    CF_TRY(step(impl, cuda::LayerRange{layer_, layer_ + 1}, tensors().hidden));
    return synchronize();
  }
  /// The same. An error names the implementation.
  Status try_step(Impl impl) {
    const Status status = step_layer(impl);
    if (status) return {};
    return Status::error(status.code(), "--impl " + std::string(to_string(impl)) + ": " + status.message());
  }

  /// Times the sites and the streaming read, which all implementations share.
  Status time_sites(LayerTiming& result) {
    for (const Site& site : names_of(r_.config).sites()) {
      const cuda::Range range(site.name.data());  // a literal, which ends in a zero byte
      Timing timing{.site = std::string(site.name), .op = {}, .time_us = {}};
      CF_TRY(walk(site, counted(), layer_, [&]<class Args>(const Args& args) -> Status {
        using Op = typename Args::Op;
        timing.op = Op::name;
        timing.bytes = Op::cost(Op::dims(args), r_.config.dtype, r_.config.dtype).bytes;
        timing.own_bytes = timing.bytes - activation_bytes(args);
        return {};
      }));
      const auto all_layers = [&]() -> Status {
        for (std::int64_t l = resident().first; l < resident().last; ++l)
          CF_TRY(walk(site, session_->tensors(l), l, [&](const auto& args) { return run(args); }));
        return {};
      };
      CF_TRY_ASSIGN(const std::vector<double> series, timer_.time_graph_us(r_.bench, all_layers));
      timing.time_us = spread(a_layer(series, resident().count()));
      result.sites.push_back(std::move(timing));
    }
    CF_TRY_ASSIGN(std::vector<double> read, timer_.read_bytes_per_s(r_.bench));
    result.read_bytes_per_s = std::move(read);
    return {};
  }

  /// Times a step through the first `layers` resident layers.
  Status time_step(Impl impl, std::int64_t layers, LayerTiming& result) {
    using Layer = ops::DecodeLayer;
    CF_TRY_ASSIGN(const std::vector<double> series,
                  timer_.time_us(r_.bench, [&] { return step(impl, first_layers(layers)); }));
    CF_TRY(synchronize());
    const Layer::Args args{.model = part_, .weights = session_->weights.layer(layer_), .t = counted()};
    const double bytes = Layer::cost(Layer::dims(args), r_.config.dtype, r_.config.dtype).bytes;
    const double own_bytes = own_bytes_of(result.sites), count = double(layers);
    result.total = {"total", std::string(Layer::name), spread(a_layer(series, layers)), bytes, own_bytes};
    if (r_.whole_model)
      result.step = Timing{std::to_string(layers) + " layers", std::string(Layer::name), spread(series), bytes * count,
                           own_bytes * count};
    return {};
  }

  /// The host's time to put a step through the first `layers` resident layers onto an idle stream, in microseconds. A
  /// step of hundreds of launches fits the driver's queue, so that the host does not wait for the device.
  Result<Spread> time_host(Impl impl, std::int64_t layers) {
    std::vector<double> series_us;
    for (std::int64_t run = 0; run < r_.bench.runs; ++run) {
      CF_TRY(synchronize());
      const auto begin = std::chrono::steady_clock::now();
      CF_TRY(step(impl, first_layers(layers)));
      series_us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    }
    CF_TRY(synchronize());
    return spread(std::move(series_us));
  }

  /// Runs a site with the scratch memory that it has in a step.
  template <class Args>
  Status run(const Args& args) {
    const cuda::Context& context = timer_.context();
    cuda::LaunchList launches(context, session_->workspace.scratch());
    CF_TRY(cuda::prepare(args, launches));
    return launches.submit(context.stream(), {.early = context.overlap()});
  }

  /// Checks the layer's step against the oracle on the same inputs.
  Result<LayerCheck> compare_step(Impl impl) {
    CF_TRY(step_layer(impl));
    CF_TRY_ASSIGN(const Tensor output, fetch_output(layer_));
    LayerState oracle = inputs(DType::f64);
    return check_layer(r_.config, weights_.weights, output, {DType::f32, r_.config.dtype}, oracle);
  }

  /// The layer's inputs, of that dtype.
  LayerState inputs(DType dtype) const {
    LayerState state(r_.config, load_, dtype);
    fill_inputs(r_.config, load_, r_.seed, r_.config.dtype, state);
    return state;
  }

  /// Runs the layer site by site. `add` sees each site's outputs in host memory.
  Status walk_taps(const AddTap& add) {
    return for_each_site(part_, session_->weights.layer(layer_), tensors(), [&](const Site& site, const auto& args) {
      CF_TRY(run(args));
      for (SiteOutput output : site_outputs(site, args)) {
        Tensor host(output.data.dtype, {output.data.size()});
        CF_TRY(cuda::copy_to_host(timer_.context(), host.data(), output.data.data, std::size_t(output.data.bytes())));
        output.data.data = host.data();
        CF_TRY(add(output));
      }
      return Status();
    });
  }

  /// Times the variants of the persistent kernel's plan and its launches. All variants are timed in turn, several times
  /// over: a change of the GPU's clocks then meets all of them.
  Result<AblationReport> ablate(const LayerTiming& timing) {
    CF_TRY_ASSIGN(std::vector<Candidate> candidates, make_candidates());
    AblationReport result{.load = load_,
                          .resident_layers = resident().count(),
                          .layer_bytes = timing.total.bytes,
                          .layer_own_bytes = timing.total.own_bytes,
                          .read_best_bytes_per_s = timing.best_read(),
                          .variants = {}};
    std::optional<Tensor> expected;
    for (Candidate& c : candidates) {
      if (!c.step) continue;
      CF_TRY(c.step());
      CF_TRY_ASSIGN(Tensor output, fetch_output(resident().last - 1));
      if (!expected) expected.emplace(output.clone());
      CF_TRY_ASSIGN(const Comparison error, compare(output, *expected));
      c.report.rel_l2 = error.rel_l2;
      c.report.same_bits = std::memcmp(output.data(), expected->data(), std::size_t(expected->size_bytes())) == 0;
      c.report.ok = c.report.same_bits || !c.same_bits;
    }
    constexpr std::int64_t rounds = 4;
    BenchOptions part = r_.bench;
    part.runs = (r_.bench.runs + rounds - 1) / rounds;
    for (std::int64_t round = 0; round < rounds; ++round)
      for (Candidate& c : candidates) {
        if (!c.step) continue;
        CF_TRY_ASSIGN(const auto series, timer_.time_us(part, c.step));
        c.series.insert(c.series.end(), series.begin(), series.end());
      }
    for (Candidate& c : candidates) {
      if (c.step) c.report.time_us = spread(a_layer(std::move(c.series), resident().count()));
      result.variants.push_back(std::move(c.report));
    }
    return result;
  }

  cuda::LayerRange resident() const { return session_->layers(); }
  cuda::LayerRange first_layers(std::int64_t layers) const { return {resident().first, resident().first + layers}; }

  /// A variant of the persistent kernel.
  struct Candidate {
    VariantReport report;
    bool same_bits = true;              // its output must have the bits of the plan's own
    std::function<Status()> step = {};  // empty for a variant that is refused
    std::vector<double> series = {};
  };
  Result<std::vector<Candidate>> make_candidates() {
    using cuda::PersistentKernel;
    CF_TRY_ASSIGN(const PersistentKernel own, make_kernel(*session_));
    std::vector<Candidate> all;
    const auto add = [&](std::string part, std::string name) -> Candidate& {
      Candidate& c = all.emplace_back();
      c.report.part = std::move(part);
      c.report.name = std::move(name);
      return c;
    };
    for (const cuda::PersistentVariant& v : cuda::persistent_variants(own.plan())) {
      Candidate& c = add(v.choice, v.value);
      Result<PersistentKernel> made = make_kernel(*session_, v.choices);
      c.report.plan = made ? to_string(made->plan()) : made.status().message();
      if (!made) continue;
      c.same_bits = cuda::same_bits(made->plan(), own.plan());
      c.step = [this, kernel = std::make_shared<PersistentKernel>(std::move(*made))] {
        return kernel->enqueue(timer_.context().stream(), 0, resident().count(),
                               session_->tensors(resident().first).hidden,
                               session_->tensors(resident().last - 1).output);
      };
    }
    for (const auto& [impl, name] : {std::pair{Impl::layer, "one a layer"}, {Impl::split, "two a layer"}}) {
      Candidate& c = add("launches", name);
      c.report.plan = to_string(own.plan());
      c.step = [this, impl = impl] { return session_->step(impl); };
    }
    return all;
  }

  Result<Tensor> fetch_output(std::int64_t layer) {
    const ConstAnyView<2> made = session_->tensors(layer).output;
    Tensor output(made.dtype, Shape(made.shape.begin(), made.shape.end()));
    CF_TRY(cuda::copy_to_host(timer_.context(), output.data(), made.data, std::size_t(output.size_bytes())));
    return output;
  }
  /// The layer's tensors in a step of its own, which reads what the first resident layer reads.
  LayerTensors tensors() const {
    LayerTensors t = session_->tensors(layer_);
    t.hidden = session_->tensors(resident().first).hidden;
    return t;
  }
  /// The same, from which a cost is counted. A step moves only valid cache entries, so max_kv_len is the step's own;
  /// the session's is the capacity.
  LayerTensors counted() const {
    LayerTensors t = tensors();
    t.max_kv_len = load_.kv_len;
    return t;
  }
  /// Calls f(args) for the `wanted` site of the walk.
  template <class F>
  Status walk(const Site& wanted, const LayerTensors& t, std::int64_t layer, F&& f) const {
    return for_each_site(part_, session_->weights.layer(layer), t, [&](const Site& site, const auto& args) {
      return site.name == wanted.name ? f(args) : Status();
    });
  }
  static std::vector<double> a_layer(std::vector<double> series, std::int64_t layers) {
    for (double& time_us : series) time_us /= double(layers);
    return series;
  }

  const DeviceBenchRequest r_;
  const std::vector<Impl> impls_;
  DeviceTimer timer_;
  DeviceDescription device_;
  OtherRanks others_;
  ModelSpec part_;                        // what the first GPU holds of the model
  std::optional<cuda::Session> session_;  // the resident layers
  std::int64_t layer_ = 0;                // the one of them that is checked and reported
  checkpoint::LoadedLayer weights_;       // its weights
  Workload load_;
};

Status Bench::check(std::int64_t layer) {
  CF_TRY(bring(layer));
  CF_TRY(fill(r_.kv_lens.front()));
  for (Impl impl : impls_) CF_TRY(try_step(impl));
  if (r_.ablate) CF_TRY(try_step(Impl::persistent));
  return load_the_others();
}

Status Bench::time(std::int64_t layer, const DeviceBenchSink& sink) {
  CF_TRY(bring(layer));
  CF_TRY(load_the_others());
  const std::uint64_t checksum = weights_checksum(r_.config, weights_.weights);
  std::vector<std::pair<Impl, std::int64_t>> steps;
  for (Impl impl : impls_)
    for (std::int64_t layers : r_.first_layers.empty() ? std::vector{resident().count()} : r_.first_layers)
      steps.emplace_back(impl, layers);

  for (std::int64_t kv_len : r_.kv_lens) {
    CF_TRY(fill(kv_len));
    LayerTiming timing;
    CF_TRY(time_sites(timing));
    for (const auto& [impl, layers] : steps) {
      CF_TRY(time_step(impl, layers, timing));
      CF_TRY_ASSIGN(const Spread host_us, time_host(impl, layers));
      LayerReport done{.layer = layer,
                       .load = load_,
                       .weights_dtype = r_.config.dtype,
                       .weights_checksum = checksum,
                       .timing = timing,
                       .check = {},
                       .device = DeviceRun{.impl = std::string(to_string(impl)),
                                           .resident_layers = resident().count(),
                                           .step_layers = layers,
                                           .host_us = host_us}};
      if (r_.check) {
        CF_TRY_ASSIGN(LayerCheck check, compare_step(impl));
        done.check = std::move(check);
      }
      if (sink.dump) {
        LayerState inputs = this->inputs(r_.config.dtype);
        CF_TRY(sink.dump(done, inputs, [&](const AddTap& add) { return walk_taps(add); }));
      }
      CF_TRY(sink.report(done));
    }
    if (r_.ablate) {
      CF_TRY_ASSIGN(const AblationReport ablated, ablate(timing));
      CF_TRY(sink.ablation(ablated));
    }
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<DeviceBench>> DeviceBench::create(DeviceBenchRequest request) {
  CF_TRY_ASSIGN(std::vector<Impl> impls, parse_impls(request.device.impls));
  CF_TRY_ASSIGN(DeviceTimer timer, make_timer(request.device));
  const ModelConfig& m = request.config;
  const std::int64_t gpus = request.device.gpus;
  CF_TRY_ASSIGN(const ModelSpec part, m.spec().of_rank(0, gpus));
  CF_TRY_ASSIGN(
      OtherRanks others,
      OtherRanks::create(gpus, request.batch * request.q_len * m.hidden_size * std::int64_t(size_bytes(m.dtype)),
                         timer.context()));
  return std::unique_ptr<DeviceBench>(
      std::make_unique<Bench>(std::move(request), std::move(impls), std::move(timer), std::move(others), part));
}

}  // namespace cf::apps
