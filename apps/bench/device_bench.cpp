#include "apps/bench/device_bench.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <future>
#include <thread>

#include "apps/bench/layer_bench.hpp"
#include "apps/cli/terminal.hpp"
#include "core/procedural.hpp"
#include "cuda/model/session.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/persistent/persistent_kernel.hpp"
#include "cuda/persistent/variants.hpp"
#include "cuda/runtime/memory.hpp"
#include "cuda/runtime/range.hpp"

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

std::int64_t first_layer(const DeviceBenchRequest& r) { return r.whole_model ? 0 : r.layer; }

/// A session of `layers` layers for the request, with the weight formats of `like`. Its layers are slots: slot i holds
/// layer first_layer() + i of the model, and layer 0 follows the last.
Result<cuda::Session> make_session(const DeviceBenchRequest& r, DeviceTimer& timer, const LayerWeights& like,
                                   std::int64_t layers) {
  const std::int64_t capacity = *std::max_element(r.kv_lens.begin(), r.kv_lens.end());
  return cuda::Session::create(timer.context(), r.config, {0, layers},
                               {.batch = r.batch, .q_len = r.q_len, .kv_len = capacity, .capacity = capacity},
                               r.config.dtype, r.config.dtype, like);
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

/// A request's layers on the device.
class Bench {
 public:
  Bench(const DeviceBenchRequest& request, DeviceTimer& timer, cuda::Session session)
      : r_(request), timer_(timer), session_(std::move(session)) {}

  /// Loads layer `first` and those after it; layer 0 follows the last. Several threads make procedural weights.
  Status load(std::int64_t first) {
    const std::size_t window = std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 16);
    std::deque<std::future<Result<golden::GoldenWeights>>> ahead;
    Progress progress("loading layers", layers());
    for (std::int64_t next = 0, slot = 0; slot < layers(); ++slot) {
      for (; next < layers() && ahead.size() < window; ++next)
        ahead.push_back(std::async(std::launch::async, r_.load, (first + next) % r_.config.num_hidden_layers));
      CF_TRY_ASSIGN(const golden::GoldenWeights weights, ahead.front().get());
      ahead.pop_front();
      CF_TRY(session_.weights.load_layer(slot, weights.weights));
      if (slot == 0) weights_ = weights;
      progress.set(slot + 1);
    }
    return {};
  }

  const LayerWeights& first_weights() const { return weights_.weights; }

  /// Fills hidden and every layer's cache for a step at that kv_len.
  Status fill(std::int64_t kv_len) {
    load_ = {.batch = r_.batch, .q_len = r_.q_len, .kv_len = kv_len, .capacity = session_.cache.capacity()};
    const LayerState state = inputs(r_.config.dtype);
    CF_TRY(session_.workspace.set_hidden(state.hidden));
    for (std::int64_t l = 0; l < layers(); ++l) CF_TRY(session_.cache.set_layer(l, state.k_cache, state.v_cache));
    return session_.set_kv_len(std::vector<std::int32_t>(std::size_t(load_.batch), std::int32_t(load_.kv_len)));
  }
  const Workload& workload() const { return load_; }

  /// Steps the first layer, and waits for it. An error names the implementation.
  Status try_step(Impl impl) {
    const Status status = [&]() -> Status {
      CF_TRY(session_.step(impl, cuda::LayerRange{0, 1}));
      return session_.synchronize();
    }();
    if (status) return {};
    return Status::error(status.code(), "--impl " + std::string(to_string(impl)) + ": " + status.message());
  }

  /// Times the sites and the streaming read, which all implementations share.
  Status time_sites(LayerTiming& result) {
    for (const Site& site : names_of(r_.config).sites()) {
      const cuda::Range range(site.name.data());  // a literal, which ends in a zero byte
      Timing timing{.site = std::string(site.name), .op = {}, .time_us = {}};
      CF_TRY(walk(site, counted(0), 0, [&]<class Args>(const Args& args) -> Status {
        using Op = typename Args::Op;
        timing.op = Op::name;
        timing.bytes = Op::cost(Op::dims(args), r_.config.dtype, r_.config.dtype).bytes;
        timing.own_bytes = timing.bytes - activation_bytes(args);
        return {};
      }));
      const auto all_layers = [&]() -> Status {
        for (std::int64_t l = 0; l < layers(); ++l)
          CF_TRY(walk(site, session_.tensors(l), l, [&](const auto& args) { return run(args); }));
        return {};
      };
      CF_TRY_ASSIGN(const std::vector<double> series, timer_.time_graph_us(r_.bench, all_layers));
      timing.time_us = spread(a_layer(series, layers()));
      result.sites.push_back(std::move(timing));
    }
    CF_TRY_ASSIGN(std::vector<double> read, timer_.read_bytes_per_s(r_.bench));
    result.read_bytes_per_s = std::move(read);
    return {};
  }

  /// Times a step through the first `layers` layers.
  Status time_step(Impl impl, std::int64_t layers, LayerTiming& result) {
    using Layer = ops::DecodeLayer;
    CF_TRY_ASSIGN(const std::vector<double> series, timer_.time_us(r_.bench, [&] {
      return session_.step(impl, cuda::LayerRange{0, layers});
    }));
    const Layer::Args args{.model = r_.config, .weights = session_.weights.layer(0), .t = counted(0)};
    const double bytes = Layer::cost(Layer::dims(args), r_.config.dtype, r_.config.dtype).bytes;
    const double own_bytes = own_bytes_of(result.sites), count = double(layers);
    result.total = {"total", std::string(Layer::name), spread(a_layer(series, layers)), bytes, own_bytes};
    if (r_.whole_model)
      result.step = Timing{std::to_string(layers) + " layers", std::string(Layer::name), spread(series), bytes * count,
                           own_bytes * count};
    return {};
  }

  /// The host's time to put a step through the first `layers` layers onto an idle stream, in microseconds. A step of
  /// hundreds of launches fits the driver's queue, so that the host does not wait for the device.
  Result<Spread> time_host(Impl impl, std::int64_t layers) {
    std::vector<double> series_us;
    for (std::int64_t run = 0; run < r_.bench.runs; ++run) {
      CF_TRY(session_.synchronize());
      const auto begin = std::chrono::steady_clock::now();
      CF_TRY(session_.step(impl, cuda::LayerRange{0, layers}));
      series_us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    }
    CF_TRY(session_.synchronize());
    return spread(std::move(series_us));
  }

  /// Runs a site with the scratch memory that it has in a step.
  template <class Args>
  Status run(const Args& args) {
    const cuda::Context& context = timer_.context();
    cuda::LaunchList launches(context, session_.workspace.scratch());
    CF_TRY(cuda::prepare(args, launches));
    return launches.submit(context.stream(), {.early = context.overlap()});
  }

  /// Checks the first layer's step against the oracle on the same inputs.
  Result<LayerCheck> check(Impl impl) {
    CF_TRY(session_.step(impl, cuda::LayerRange{0, 1}));
    CF_TRY(session_.synchronize());
    CF_TRY_ASSIGN(const Tensor output, fetch_output(0));
    LayerState oracle = inputs(DType::f64);
    return check_layer(r_.config, first_weights(), output, {DType::f32, r_.config.dtype}, oracle);
  }

  /// The first layer's inputs, of that dtype.
  LayerState inputs(DType dtype) const {
    LayerState state(r_.config, load_, dtype);
    fill_inputs(r_.config, load_, r_.seed, r_.config.dtype, state);
    return state;
  }

  /// Runs the first layer site by site. `add` sees each site's outputs in host memory.
  Status walk_taps(const AddTap& add) {
    return for_each_site(
        r_.config, session_.weights.layer(0), session_.tensors(0), [&](const Site& site, const auto& args) {
          CF_TRY(run(args));
          for (SiteOutput output : site_outputs(site, args)) {
            Tensor host(output.data.dtype, {output.data.size()});
            CF_TRY(
                cuda::copy_to_host(timer_.context(), host.data(), output.data.data, std::size_t(output.data.bytes())));
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
                          .resident_layers = layers(),
                          .layer_bytes = timing.total.bytes,
                          .layer_own_bytes = timing.total.own_bytes,
                          .read_best_bytes_per_s = timing.best_read(),
                          .variants = {}};
    std::optional<Tensor> expected;
    for (Candidate& c : candidates) {
      if (!c.step) continue;
      CF_TRY(c.step());
      CF_TRY_ASSIGN(Tensor output, fetch_output(layers() - 1));
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
      if (c.step) c.report.time_us = spread(a_layer(std::move(c.series), layers()));
      result.variants.push_back(std::move(c.report));
    }
    return result;
  }

  std::int64_t layers() const { return session_.layers().count(); }

 private:
  /// A variant of the persistent kernel.
  struct Candidate {
    VariantReport report;
    bool same_bits = true;              // its output must have the bits of the plan's own
    std::function<Status()> step = {};  // empty for a variant that is refused
    std::vector<double> series = {};
  };
  Result<std::vector<Candidate>> make_candidates() {
    using cuda::PersistentKernel;
    CF_TRY_ASSIGN(const PersistentKernel own, make_kernel(session_));
    std::vector<Candidate> all;
    const auto add = [&](std::string part, std::string name) -> Candidate& {
      Candidate& c = all.emplace_back();
      c.report.part = std::move(part);
      c.report.name = std::move(name);
      return c;
    };
    for (const cuda::PersistentVariant& v : cuda::persistent_variants(own.plan())) {
      Candidate& c = add(v.choice, v.value);
      Result<PersistentKernel> made = make_kernel(session_, v.choices);
      c.report.plan = made ? to_string(made->plan()) : made.status().message();
      if (!made) continue;
      c.same_bits = cuda::same_bits(made->plan(), own.plan());
      c.step = [this, kernel = std::make_shared<PersistentKernel>(std::move(*made))] {
        return kernel->enqueue(timer_.context().stream(), 0, layers(), session_.tensors(0).hidden,
                               session_.tensors(layers() - 1).output);
      };
    }
    for (const auto& [impl, name] : {std::pair{Impl::layer, "one a layer"}, {Impl::split, "two a layer"}}) {
      Candidate& c = add("launches", name);
      c.report.plan = to_string(own.plan());
      c.step = [this, impl = impl] { return session_.step(impl); };
    }
    return all;
  }

  Result<Tensor> fetch_output(std::int64_t layer) {
    const ConstAnyView<2> made = session_.tensors(layer).output;
    Tensor output(made.dtype, Shape(made.shape.begin(), made.shape.end()));
    CF_TRY(cuda::copy_to_host(timer_.context(), output.data(), made.data, std::size_t(output.size_bytes())));
    return output;
  }
  /// A layer's tensors, from which a cost is counted. A step moves only valid cache entries, so max_kv_len is the
  /// step's own; the session's is the capacity.
  LayerTensors counted(std::int64_t layer) const {
    LayerTensors t = session_.tensors(layer);
    t.max_kv_len = load_.kv_len;
    return t;
  }
  /// Calls f(args) for the `wanted` site of the walk.
  template <class F>
  Status walk(const Site& wanted, const LayerTensors& t, std::int64_t layer, F&& f) const {
    return for_each_site(r_.config, session_.weights.layer(layer), t, [&](const Site& site, const auto& args) {
      return site.name == wanted.name ? f(args) : Status();
    });
  }
  static std::vector<double> a_layer(std::vector<double> series, std::int64_t layers) {
    for (double& time_us : series) time_us /= double(layers);
    return series;
  }

  const DeviceBenchRequest& r_;
  DeviceTimer& timer_;
  cuda::Session session_;
  golden::GoldenWeights weights_;  // the first layer's
  Workload load_;
};

}  // namespace

Result<DeviceDescription> describe_device(const DeviceOptions& options) {
  CF_TRY(parse_impls(options.impls).status());
  CF_TRY_ASSIGN(DeviceTimer timer, make_timer(options));
  return DeviceDescription{timer.info(), to_string(timer.context().arch())};
}

Status check_on_device(const DeviceBenchRequest& r) {
  CF_TRY_ASSIGN(const std::vector<Impl> impls, parse_impls(r.device.impls));
  CF_TRY_ASSIGN(DeviceTimer timer, make_timer(r.device));
  CF_TRY_ASSIGN(const golden::GoldenWeights like, r.load(first_layer(r)));
  const std::int64_t resident = resident_layers(r, like.weights, timer.info().l2_bytes);
  if (!r.procedural)
    for (std::int64_t slot = 1; slot < resident; ++slot)
      CF_TRY(r.load((first_layer(r) + slot) % r.config.num_hidden_layers).status());
  // Takes all memory, and gives it back.
  CF_TRY(make_session(r, timer, like.weights, resident).status());
  CF_TRY_ASSIGN(cuda::Session one, make_session(r, timer, like.weights, 1));
  Bench bench(r, timer, std::move(one));
  CF_TRY(bench.load(first_layer(r)));
  CF_TRY(bench.fill(r.kv_lens.front()));
  for (Impl impl : impls) CF_TRY(bench.try_step(impl));
  return r.ablate ? bench.try_step(Impl::persistent) : Status();
}

Status bench_on_device(const DeviceBenchRequest& r, const DeviceBenchSink& sink) {
  CF_TRY_ASSIGN(const std::vector<Impl> impls, parse_impls(r.device.impls));
  CF_TRY_ASSIGN(DeviceTimer timer, make_timer(r.device));
  const std::int64_t first = first_layer(r);
  CF_TRY_ASSIGN(const golden::GoldenWeights like, r.load(first));
  CF_TRY_ASSIGN(cuda::Session session,
                make_session(r, timer, like.weights, resident_layers(r, like.weights, timer.info().l2_bytes)));
  Bench bench(r, timer, std::move(session));
  CF_TRY(bench.load(first));
  const std::uint64_t checksum = weights_checksum(r.config, bench.first_weights());

  std::vector<std::pair<Impl, std::int64_t>> steps;
  for (Impl impl : impls)
    for (std::int64_t layers : r.first_layers.empty() ? std::vector{bench.layers()} : r.first_layers)
      steps.emplace_back(impl, layers);

  for (std::int64_t kv_len : r.kv_lens) {
    CF_TRY(bench.fill(kv_len));
    LayerTiming timing;
    CF_TRY(bench.time_sites(timing));
    for (const auto& [impl, layers] : steps) {
      CF_TRY(bench.time_step(impl, layers, timing));
      CF_TRY_ASSIGN(const Spread host_us, bench.time_host(impl, layers));
      LayerReport done{.layer = first,
                       .load = bench.workload(),
                       .weights_dtype = r.config.dtype,
                       .weights_checksum = checksum,
                       .timing = timing,
                       .check = {},
                       .device = DeviceRun{.impl = std::string(to_string(impl)),
                                           .resident_layers = bench.layers(),
                                           .step_layers = layers,
                                           .host_us = host_us}};
      if (r.check) {
        CF_TRY_ASSIGN(LayerCheck check, bench.check(impl));
        done.check = std::move(check);
      }
      if (sink.dump) {
        LayerState inputs = bench.inputs(r.config.dtype);
        CF_TRY(sink.dump(done, inputs, [&](const AddTap& add) { return bench.walk_taps(add); }));
      }
      CF_TRY(sink.report(done));
    }
    if (r.ablate) {
      CF_TRY_ASSIGN(const AblationReport ablated, bench.ablate(timing));
      CF_TRY(sink.ablation(ablated));
    }
  }
  return {};
}

}  // namespace cf::apps
