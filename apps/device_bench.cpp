#include "apps/device_bench.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <future>
#include <thread>

#include "apps/common.hpp"
#include "apps/layer_bench.hpp"
#include "core/procedural.hpp"
#include "cuda/decode_variants.hpp"
#include "cuda/memory.hpp"
#include "cuda/stack.hpp"

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
          "--impl '" + text + "': expected a list of unfused, graph, split, fused and stack, got '" + name + "'");
    impls.push_back(*impl);
  }
  return impls;
}

/// The timer with the plans that the options ask for.
Result<DeviceTimer> make_timer(const DeviceOptions& options) {
  Result<DeviceTimer> timer = DeviceTimer::create();
  if (!timer) return timer.status();
  if (options.arch_plan == "sm_90")
    timer->context().set_plan_arch(cuda::kH200);
  else if (options.arch_plan == "sm_120")
    timer->context().set_plan_arch(cuda::kRtx5090);
  else if (!options.arch_plan.empty())
    return Status::error(Code::invalid_argument, "--arch-plan " + options.arch_plan + ": expected sm_90 or sm_120");
  return timer;
}

/// How many layers make a product's weights cold each time: those of the smallest, attention.dense, twice the L2.
std::int64_t resident_layers(const DeviceBenchRequest& r, const LayerWeights& like, std::size_t l2_bytes) {
  if (r.stack) return r.config.num_hidden_layers;
  if (r.bench.warm) return 1;
  const double product_bytes =
      format_of(like.dense.weight).bytes(r.config.hidden_size, r.config.hidden_size, r.config.dtype);
  return std::min(r.config.num_hidden_layers, std::int64_t(2 * double(l2_bytes) / product_bytes) + 1);
}

/// What is on the device while a request is worked on.
class Bench {
 public:
  Bench(const DeviceBenchRequest& request, DeviceTimer& timer, cuda::Stack stack)
      : r_(request), timer_(timer), stack_(std::move(stack)) {}

  /// Loads `first` and the layers after it, the model's first following its last. Procedural ones are made side by
  /// side.
  Status load(std::int64_t first) {
    const std::size_t window = std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 16);
    std::deque<std::future<Result<golden::GoldenWeights>>> ahead;
    Progress progress("loading layers", stack_.layers());
    for (std::int64_t next = 0, slot = 0; slot < stack_.layers(); ++slot) {
      for (; next < stack_.layers() && ahead.size() < window; ++next)
        ahead.push_back(std::async(std::launch::async, r_.load, (first + next) % r_.config.num_hidden_layers));
      const Result<golden::GoldenWeights> weights = ahead.front().get();
      ahead.pop_front();
      if (!weights) return weights.status();
      CF_TRY(stack_.load_layer(slot, weights->weights));
      if (slot == 0) weights_ = *weights;
      progress.set(slot + 1);
    }
    return {};
  }

  const LayerWeights& first_weights() const { return weights_.weights; }

  Status fill(const Workload& load) {
    load_ = load;
    LayerState state(r_.config, load, r_.config.dtype);
    fill_inputs(r_.config, load, r_.seed, r_.config.dtype, state);
    CF_TRY(stack_.set_hidden(state.hidden));
    for (std::int64_t l = 0; l < stack_.layers(); ++l) CF_TRY(stack_.set_cache(l, state.k_cache, state.v_cache));
    return stack_.set_kv_len(std::vector<std::int32_t>(std::size_t(load.batch), std::int32_t(load.kv_len)));
  }

  /// The sites' times and the streaming read, which do not depend on how a step is launched.
  Status time_sites(LayerTiming& result) {
    for (const Site& site : sites) {
      Timing timing{.site = std::string(site.name), .op = {}, .time_us = {}, .bytes = 0};
      CF_TRY(walk(site, counted(0), 0, [&]<class Args>(const Args& args) -> Status {
        using Op = typename Args::Op;
        timing.op = Op::name;
        timing.bytes = Op::cost(Op::dims(args), r_.config.dtype, r_.config.dtype).bytes;
        return {};
      }));
      const auto series = timer_.time_graph_us(r_.bench, [&]() -> Status {
        for (std::int64_t l = 0; l < stack_.layers(); ++l)
          CF_TRY(walk(site, stack_.tensors(l), l, [&](const auto& args) { return cuda::run(args, timer_.context()); }));
        return {};
      });
      if (!series) return series.status();
      timing.time_us = spread(a_layer(*series, stack_.layers()));
      result.sites.push_back(std::move(timing));
    }
    Result<std::vector<double>> read = timer_.read_bytes_per_s(r_.bench);
    if (!read) return read.status();
    result.read_bytes_per_s = std::move(*read);
    return {};
  }

  /// A step through the first `layers`.
  Status time_step(Impl impl, std::int64_t layers, LayerTiming& result) {
    using Layer = ops::DecodeLayer;
    const auto series = timer_.time_us(r_.bench, [&] { return stack_.step(impl, 0, layers); });
    if (!series) return series.status();
    const Layer::Args args{.config = &r_.config, .weights = stack_.weights(0), .t = counted(0)};
    const double bytes = Layer::cost(Layer::dims(args), r_.config.dtype, r_.config.dtype).bytes;
    result.total = {"total", std::string(Layer::name), spread(a_layer(*series, layers)), bytes};
    if (r_.stack)
      result.stack = Timing{"stack of " + std::to_string(layers) + " layers", std::string(Layer::name), spread(*series),
                            bytes * double(layers)};
    return {};
  }

  /// The first layer's step against the oracle on the same inputs.
  Result<LayerCheck> check(Impl impl) {
    if (Status s = stack_.step(impl, 0, 1); !s) return s;
    const Result<Tensor> output = fetch_output(0);
    if (!output) return output.status();
    LayerState oracle(r_.config, load_, DType::f64);
    fill_inputs(r_.config, load_, r_.seed, r_.config.dtype, oracle);
    return check_layer(r_.config, first_weights(), *output, {DType::f32, r_.config.dtype}, oracle);
  }

  /// The persistent kernel's parts and launches. Variants are timed one after the other, and all of them again: what the
  /// GPU's clocks do in the meantime, they do to all.
  Result<AblationReport> ablate(const LayerTiming& timing) {
    Result<std::vector<Candidate>> candidates = make_candidates();
    if (!candidates) return candidates.status();
    AblationReport result{.load = load_,
                          .resident_layers = layers(),
                          .layer_bytes = timing.total.bytes,
                          .read_best_bytes_per_s = timing.best_read(),
                          .variants = {}};
    std::optional<Tensor> expected;
    for (Candidate& c : *candidates) {
      if (!c.step) continue;
      if (Status s = c.step(); !s) return s;
      Result<Tensor> output = fetch_output(layers() - 1);
      if (!output) return output.status();
      if (!expected) expected.emplace(output->clone());
      const Result<Comparison> error = compare(*output, *expected);
      if (!error) return error.status();
      c.report.rel_l2 = error->rel_l2;
      c.report.same_bits = std::memcmp(output->data(), expected->data(), std::size_t(expected->size_bytes())) == 0;
      c.report.ok = c.report.same_bits || !c.same_bits;
    }
    constexpr std::int64_t rounds = 4;
    BenchOptions part = r_.bench;
    part.runs = (r_.bench.runs + rounds - 1) / rounds;
    for (std::int64_t round = 0; round < rounds; ++round)
      for (Candidate& c : *candidates) {
        if (!c.step) continue;
        const auto series = timer_.time_us(part, c.step);
        if (!series) return series.status();
        c.series.insert(c.series.end(), series->begin(), series->end());
      }
    for (Candidate& c : *candidates) {
      if (c.step) c.report.time_us = spread(a_layer(std::move(c.series), stack_.layers()));
      result.variants.push_back(std::move(c.report));
    }
    return result;
  }

  std::int64_t layers() const { return stack_.layers(); }

 private:
  /// A variant of the persistent kernel that is to be timed; one that is refused has no step.
  struct Candidate {
    VariantReport report;
    bool same_bits = true;  // asked for
    std::function<Status()> step = {};
    std::vector<double> series = {};
  };
  Result<std::vector<Candidate>> make_candidates() {
    using cuda::DecodeStack;
    const Result<DecodeStack> own = DecodeStack::create(timer_.context(), stack_);
    if (!own) return own.status();
    std::vector<Candidate> all;
    const auto add = [&](std::string part, std::string name) -> Candidate& {
      Candidate& c = all.emplace_back();
      c.report.part = std::move(part);
      c.report.name = std::move(name);
      return c;
    };
    std::vector<cuda::DecodeVariant> variants = cuda::decode_variants(timer_.context().arch(), own->plan());
    for (std::size_t i = 0; i < variants.size(); ++i) {
      const cuda::DecodeVariant v = variants[i];
      Candidate& c = add(v.part, v.name);
      c.same_bits = v.same_bits;
      Result<DecodeStack> made = DecodeStack::create(timer_.context(), stack_, v.choices);
      c.report.plan = made ? to_string(made->plan()) : made.status().message();
      if (!made) continue;
      const cuda::DecodeStackPlan plan = made->plan();
      if (plan.cluster_merge && plan.grid < own->plan().grid)  // the SMs that clusters leave out count, too
        variants.insert(variants.begin() + std::ptrdiff_t(i) + 1,
                        {v.part,
                         std::to_string(plan.attention_splits) + " splits, in device memory, as many blocks",
                         {.blocks = plan.grid, .attention_splits = plan.attention_splits},
                         v.same_bits});
      c.step = [this, kernel = std::make_shared<DecodeStack>(std::move(*made))] {
        return kernel->enqueue(timer_.context().stream(), 0, layers(), stack_.tensors(0).hidden,
                               stack_.tensors(layers() - 1).output);
      };
    }
    for (const auto& [impl, name] : {std::pair{Impl::fused, "one a layer"}, {Impl::split, "two a layer"}}) {
      Candidate& c = add("launches", name);
      c.report.plan = to_string(own->plan());
      c.step = [this, impl = impl] { return stack_.step(impl); };
    }
    return all;
  }

  Result<Tensor> fetch_output(std::int64_t layer) {
    const ConstAnyView<2> made = stack_.tensors(layer).output;
    Tensor output(made.dtype, Shape(made.shape.begin(), made.shape.end()));
    if (Status s = cuda::copy_to_host(timer_.context(), output.data(), made.data, std::size_t(output.size_bytes())); !s)
      return s;
    return output;
  }
  /// A layer's tensors for its cost: the stack's plan for a full cache, the traffic is that of the valid entries.
  LayerTensors counted(std::int64_t layer) const {
    LayerTensors t = stack_.tensors(layer);
    t.max_kv_len = load_.kv_len;
    return t;
  }
  /// Calls f(args) for the one site of the walk.
  template <class F>
  Status walk(const Site& wanted, const LayerTensors& t, std::int64_t layer, F&& f) const {
    return for_each_site(r_.config, stack_.weights(layer), t, [&](const Site& site, const auto& args) {
      return site.name == wanted.name ? f(args) : Status();
    });
  }
  static std::vector<double> a_layer(std::vector<double> series, std::int64_t layers) {
    for (double& time_us : series) time_us /= double(layers);
    return series;
  }

  const DeviceBenchRequest& r_;
  DeviceTimer& timer_;
  cuda::Stack stack_;
  golden::GoldenWeights weights_;  // of the first layer, for the oracle
  Workload load_;
};

}  // namespace

Result<DeviceDescription> describe_device(const DeviceOptions& options) {
  if (const Result<std::vector<Impl>> impls = parse_impls(options.impls); !impls) return impls.status();
  Result<DeviceTimer> timer = make_timer(options);
  if (!timer) return timer.status();
  return DeviceDescription{timer->info(), to_string(timer->context().arch())};
}

Status bench_on_device(const DeviceBenchRequest& r, const std::function<void(const LayerReport&)>& report,
                       const std::function<void(const AblationReport&)>& ablation) {
  const Result<std::vector<Impl>> impls = parse_impls(r.device.impls);
  if (!impls) return impls.status();
  Result<DeviceTimer> timer = make_timer(r.device);
  if (!timer) return timer.status();
  const std::int64_t capacity = *std::max_element(r.seq_lens.begin(), r.seq_lens.end());
  const std::int64_t first = r.stack ? 0 : r.layer;
  const Result<golden::GoldenWeights> like = r.load(first);
  if (!like) return like.status();
  Result<cuda::Stack> stack =
      cuda::Stack::create(timer->context(), r.config, resident_layers(r, like->weights, timer->info().l2_bytes),
                          {.batch = r.batch, .kv_len = capacity, .capacity = capacity}, r.config.dtype, like->weights);
  if (!stack) return stack.status();
  Bench bench(r, *timer, std::move(*stack));
  CF_TRY(bench.load(first));
  const std::uint64_t checksum = weights_checksum(r.config, bench.first_weights());

  std::vector<std::pair<Impl, std::int64_t>> steps;
  for (Impl impl : *impls)
    for (std::int64_t layers : r.stack_layers.empty() ? std::vector{bench.layers()} : r.stack_layers)
      steps.emplace_back(impl, layers);

  for (std::int64_t seq_len : r.seq_lens) {
    const Workload load{.batch = r.batch, .kv_len = seq_len, .capacity = capacity};
    CF_TRY(bench.fill(load));
    LayerTiming timing;
    CF_TRY(bench.time_sites(timing));
    for (const auto& [impl, layers] : steps) {
      CF_TRY(bench.time_step(impl, layers, timing));
      LayerReport done{
          .layer = first,
          .load = load,
          .weights_dtype = r.config.dtype,
          .weights_checksum = checksum,
          .timing = timing,
          .check = {},
          .device = DeviceRun{
              .impl = std::string(to_string(impl)), .resident_layers = bench.layers(), .step_layers = layers}};
      if (r.check) {
        Result<LayerCheck> check = bench.check(impl);
        if (!check) return check.status();
        done.check = std::move(*check);
      }
      report(done);
    }
    if (r.ablate) {
      const Result<AblationReport> ablated = bench.ablate(timing);
      if (!ablated) return ablated.status();
      ablation(*ablated);
    }
  }
  return {};
}

}  // namespace cf::apps
