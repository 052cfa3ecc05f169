#include "apps/verify/golden_walk.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "apps/cli/terminal.hpp"
#include "apps/verify/device_ops.hpp"
#include "core/cache_view.hpp"
#include "core/resources.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/dequantise.hpp"

namespace cf::apps {
namespace {

// The oracle and Hugging Face in float64 differ in their order of summation alone. For a sum of K = 10^4 terms u
// sqrt(K) is 1e-14; cancellation costs two digits, and one digit is margin.
constexpr double kBudgetF64 = 1e-11;
// The taps of a layer in float32 were measured 1e-7 to 4e-7 from float64. The bound is five times that, and a hundredth
// of the error of one float16 store.
constexpr double kBudgetF32 = 2e-6;

/// A copy of a site's arguments whose activations are float64, for the oracle. It owns the activations.
template <class Args>
class Widened {
 public:
  explicit Widened(const Args& from) : args_(from) {
    OpOf<Args>::tensors(OpOf<Args>::dims(from), args_, [&]<class V>(const TensorSpec& t, V& view, const auto& shape) {
      if constexpr (std::is_void_v<std::remove_const_t<typename V::element>>)
        if (view.data && is_activation(t.role)) widen(view, shape);
    });
  }
  const Args& args() const { return args_; }

 private:
  template <class V, class Extents>
  void widen(V& view, const Extents& shape) {
    Tensor wide(DType::f64, Shape(shape.begin(), shape.end()));
    convert(view.data, view.dtype, wide.data(), DType::f64, wide.size());
    view.data = wide.data();
    view.dtype = DType::f64;
    storage_.push_back(std::move(wide));
  }

  Args args_;
  std::vector<Tensor> storage_;
};

void fill_nan(const AnyView<4>& v) {
  dispatch_float(v.dtype, [&](auto zero) {
    using T = decltype(zero);
    std::fill_n(static_cast<T*>(v.data), v.size(), narrow<T>(std::numeric_limits<double>::quiet_NaN()));
  });
}

/// Writes the rows that appended_rows() reads.
void write_rows(const Tensor& rows, const AnyView<4>& cache, View<const std::int32_t, 1> kv_len) {
  const CacheView view(cache);
  const std::int64_t heads = view.heads(), q_len = rows.shape()[2];
  const std::size_t bytes = std::size_t(q_len * view.head_dim()) * size_bytes(cache.dtype);
  for (std::int64_t b = 0; b < cache.shape[0]; ++b)
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t to = view.rows(b, h, kv_len.data[b] - q_len, q_len).first;
      std::memcpy(static_cast<char*>(cache.data) + std::size_t(to) * size_bytes(cache.dtype),
                  static_cast<const char*>(rows.data()) + std::size_t(b * heads + h) * bytes, bytes);
    }
}

void write_tap(const Tensor& golden, const SiteOutput& output, View<const std::int32_t, 1> kv_len) {
  const Tensor t = golden.converted(output.data.dtype);
  if (output.is_cache)
    write_rows(t, output.data, kv_len);
  else
    std::memcpy(output.data.data, t.data(), std::size_t(t.size_bytes()));
}

bool has_tap(const golden::VariantInfo& variant, const std::string& tap) {
  return std::ranges::find(variant.taps, tap) != variant.taps.end();
}

/// The visitor of for_each_site. With WalkImpl::unfused it runs each site; with WalkImpl::layer the outputs hold the
/// layer's results before the walk.
class Walk {
 public:
  /// `device` is null for the CPU backend.
  Walk(const golden::GoldenFile& file, const WalkOptions& options, View<const std::int32_t, 1> kv_len,
       DeviceOps* device)
      : file_(file),
        options_(options),
        kv_len_(kv_len),
        device_(device),
        drift_(options.own_rope_table ? kTableBudget : 0),
        progress_(file.path(), std::int64_t(names_of(file.meta().config).sites().size())) {}

  template <class Args>
  Status operator()(const Site& site, const Args& args) {
    if (finished_) return {};
    const bool wanted = options_.site.empty() || options_.site == site.name;
    const std::vector<SiteOutput> outputs = site_outputs(site, args);
    std::vector<double> budgets(outputs.size(), walk_budget(options_));
    if (wanted || !options_.isolated) {
      const auto named = [&](const Status& s) {
        return Status::error(s.code(), file_.path() + ": site " + std::string(site.name) + ": " + s.message());
      };
      // Derived before the run, which appends to the cache that the budgets depend on.
      if (device_)
        if (const Status s = derive_budgets(site, args, budgets); !s) return named(s);
      if (options_.impl == WalkImpl::unfused)
        if (const Status s = device_ ? device_->run(args) : cpu_ref::run(args); !s) return named(s);
    }
    if constexpr (std::is_same_v<Args, ops::Linear::Args>)
      if (wanted) CF_TRY(add_weight(site, args));
    if (wanted || options_.isolated)
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        CF_TRY_ASSIGN(const Tensor golden, file_.tap(std::string(golden::kReference), outputs[i].tap));
        if (wanted) CF_TRY(add(site, outputs[i], golden, budgets[i]));
        if (options_.isolated) write_tap(golden, outputs[i], kv_len_);
      }
    finished_ = wanted && !options_.site.empty();
    progress_.set(++visited_);
    return {};
  }

  std::vector<TapResult> take() { return std::move(results_); }

 private:
  /// The GPU's bound for each output of a site. The op's budget bounds the distance to the oracle on the same inputs.
  /// Isolated, the inputs are Hugging Face's float64 taps rounded to the activations' dtype. The oracle runs on the
  /// rounded inputs, too, and its own distance to the tap is added (the triangle inequality). Chained, the inputs carry
  /// the errors of the sites before: to first order a site's error is that of its inputs plus its own, as in
  /// DecodeLayer::budget.
  template <class Args>
  Status derive_budgets(const Site& site, const Args& args, std::vector<double>& budgets) {
    const Widened<Args> wide(args);
    CF_TRY(cpu_ref::run(wide.args()));
    CF_TRY_ASSIGN(const Condition condition, cpu_ref::condition(wide.args()));
    using Op = OpOf<Args>;
    const double own =
        Op::budget(Op::dims(args), {.compute = DType::f32, .output = options_.activation}, condition).rel_l2;
    drift_ += own;
    if (!options_.isolated) {
      budgets.assign(budgets.size(), drift_);
      return {};
    }
    const golden::GoldenMeta& m = file_.meta();
    const std::vector<SiteOutput> outputs = site_outputs(site, wide.args());
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      CF_TRY_ASSIGN(const Tensor golden, file_.tap(std::string(golden::kReference), outputs[i].tap));
      CF_TRY_ASSIGN(const Comparison rounded, compare(read_tap(outputs[i], m.config, m.load, kv_len_), golden));
      budgets[i] = rounded.rel_l2 + own * (1 + rounded.rel_l2);
    }
    return {};
  }

  Status add(const Site& site, const SiteOutput& output, const Tensor& golden, double budget) {
    const golden::GoldenMeta& m = file_.meta();
    return add(site, output.tap, read_tap(output, m.config, m.load, kv_len_), golden, budget);
  }

  /// Compares a quantised weight as the CPU dequantises it, which takes no rounding, where the file holds it. A GPU
  /// dequantises inside its products and does not show the weight.
  Status add_weight(const Site& site, const ops::Linear::Args& args) {
    const auto* gptq = std::get_if<GptqWeight>(&args.linear.weight);
    if (!gptq || device_) return {};
    const std::string tap = golden::weight_tap(site.name);
    const auto holds_it = [&](const golden::VariantInfo& v) { return v.name == golden::kReference && has_tap(v, tap); };
    if (std::ranges::none_of(file_.variants(), holds_it)) return {};
    CF_TRY_ASSIGN(const Tensor golden, file_.tap(std::string(golden::kReference), tap));
    const DType dtype = options_.activation == DType::f64 ? DType::f64 : DType::f32;
    return add(site, tap, cpu_ref::dequantise(*gptq, dtype), golden, 0);
  }

  Status add(const Site& site, const std::string& tap, const Tensor& got, const Tensor& golden, double budget) {
    const golden::GoldenMeta& m = file_.meta();
    CF_TRY_ASSIGN(const Comparison error, compare(got, golden));
    TapResult r{.site = std::string(site.name),
                .tap = tap,
                .dtype = options_.activation,
                .error = error,
                .worst = name_coordinate(golden::tap_dims(m.config, m.load, tap), error.worst),
                .budget = budget,
                .producer_rel_l2 = {}};
    for (const golden::VariantInfo& v : file_.variants()) {
      if (v.name == golden::kReference || !has_tap(v, tap)) continue;
      CF_TRY_ASSIGN(const Tensor theirs, file_.tap(v.name, tap));
      CF_TRY_ASSIGN(const Comparison c, compare(theirs, golden));
      r.producer_rel_l2[v.name] = c.rel_l2;
    }
    results_.push_back(std::move(r));
    return {};
  }

  const golden::GoldenFile& file_;
  const WalkOptions& options_;
  View<const std::int32_t, 1> kv_len_;
  DeviceOps* device_;
  double drift_;  // chained: the sum of the budgets of the sites so far
  Progress progress_;
  std::vector<TapResult> results_;
  std::int64_t visited_ = 0;
  bool finished_ = false;
};

Status check_site(const ModelSpec& m, const std::string& name) {
  std::string names;
  for (const Site& s : names_of(m).sites()) {
    if (name.empty() || name == s.name) return {};
    names += (names.empty() ? "" : ", ") + std::string(s.name);
  }
  return Status::error(Code::invalid_argument, "--site: expected one of " + names + ", got '" + name + "'");
}

}  // namespace

Tensor read_tap(const SiteOutput& output, const ModelConfig& config, const Workload& load,
                View<const std::int32_t, 1> kv_len) {
  if (output.is_cache) return appended_rows(output.data, kv_len, load.q_len);
  Shape shape;
  for (const golden::TapDim& d : golden::tap_dims(config, load, output.tap)) shape.push_back(d.size);
  Tensor t(output.data.dtype, std::move(shape));
  std::memcpy(t.data(), output.data.data, std::size_t(t.size_bytes()));
  return t;
}

std::string name_coordinate(const std::vector<golden::TapDim>& dims, std::int64_t index) {
  std::string name;
  for (auto d = dims.rbegin(); d != dims.rend(); index /= d++->size)
    name = std::string(d->name) + "=" + std::to_string(index % d->size) + (name.empty() ? "" : ", ") + name;
  return name;
}

Result<Backend> choose_backend(std::string_view name) {
  if (name == "cpu") return Backend::cpu;
  const auto refuse = [&](Code code, const std::string& why) {
    return Status::error(code, "--backend " + std::string(name) + ": " + why);
  };
  if (name != "cuda") return refuse(Code::unimplemented, "expected cpu or cuda");
  if (const Result<DeviceOps> device = DeviceOps::create(); !device)
    return refuse(device.status().code(), device.status().message());
  return Backend::cuda;
}

double TapResult::error_over_budget() const {
  if (error.non_finite) return INFINITY;
  return error.rel_l2 == 0 ? 0 : error.rel_l2 / budget;
}

double walk_budget(const WalkOptions& o) {
  const double budget = o.activation == DType::f64 ? kBudgetF64 : kBudgetF32;
  return o.own_rope_table ? std::max(budget, kTableBudget) : budget;
}

Status check_taps(const golden::GoldenFile& file, const WalkOptions& o) {
  const golden::GoldenMeta& m = file.meta();
  CF_TRY(check_site(m.config, o.site));
  golden::VariantInfo reference;
  for (const golden::VariantInfo& v : file.variants())
    if (v.name == golden::kReference) reference = v;
  bool finished = false;
  return for_each_site(m.config, LayerWeights{}, LayerTensors{}, [&](const Site& site, const auto& args) -> Status {
    const bool wanted = o.site.empty() || o.site == site.name;
    if (finished || !(wanted || o.isolated)) return {};
    for (const SiteOutput& output : site_outputs(site, args))
      if (!has_tap(reference, output.tap)) return file.tap(std::string(golden::kReference), output.tap).status();
    finished = wanted && !o.site.empty();
    return {};
  });
}

Result<std::vector<TapResult>> walk_golden(const golden::GoldenFile& file, const golden::GoldenWeights& weights,
                                           const WalkOptions& options) {
  if (options.impl == WalkImpl::layer && (options.backend != Backend::cuda || options.isolated))
    return Status::error(Code::invalid_argument, "WalkImpl::layer: expected with Backend::cuda, and not isolated");
  const golden::GoldenMeta& m = file.meta();
  CF_TRY(check_taps(file, options));
  const double bytes = LayerState::bytes(m.config, m.load, options.activation);
  CF_TRY(check_free_memory(bytes, file.path() + ": the step needs " + gigabytes(bytes)));
  LayerState state(m.config, m.load, options.activation);
  CF_TRY(file.load(state));
  if (options.own_rope_table) state.fill_rope_table(m.config.rope_theta, m.config.rope_scaling);
  const LayerTensors tensors = state.tensors();
  std::optional<DeviceOps> device;
  if (options.backend == Backend::cuda) {
    CF_TRY_ASSIGN(DeviceOps created, DeviceOps::create());
    device = std::move(created);
  }
  CF_TRY(for_each_site(m.config, weights.weights, tensors, [](const Site& site, const auto& args) -> Status {
    for (const SiteOutput& o : site_outputs(site, args))
      if (!o.is_cache) fill_nan(o.data);
    return {};
  }));
  if (options.impl == WalkImpl::layer)
    if (const Status s = device->run_layer({.model = m.config, .weights = weights.weights, .t = tensors}); !s)
      return Status::error(s.code(), file.path() + ": " + s.message());
  Walk walk(file, options, tensors.kv_len, device ? &*device : nullptr);
  CF_TRY(for_each_site(m.config, weights.weights, tensors, walk));
  return walk.take();
}

}  // namespace cf::apps
