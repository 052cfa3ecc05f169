#include "apps/golden_walk.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "apps/common.hpp"
#include "cpu_ref/cpu_ref.hpp"

namespace cf::apps {
namespace {

// Summation order is all that tells the oracle from Hugging Face in float64: u sqrt(K) is 1e-14 for sums of 10^4
// terms, cancellation takes two digits more, and a decade is left.
constexpr double kBudgetF64 = 1e-11;
// Float32 against float64 makes 1e-7 to 4e-7 on a layer's taps; five times that, and a hundredth of one float16 store.
constexpr double kBudgetF32 = 2e-6;

template <class Args>
Status run_site(Backend backend, const Args& args) {
  switch (backend) {
    case Backend::cpu: return cpu_ref::run(args);
  }
  return {};
}

void fill_nan(const AnyView<4>& v) {
  dispatch_float(v.dtype, [&](auto zero) {
    using T = decltype(zero);
    std::fill_n(static_cast<T*>(v.data), v.size(), narrow<T>(std::numeric_limits<double>::quiet_NaN()));
  });
}

/// The inverse of appended_rows.
void write_rows(const Tensor& rows, const AnyView<4>& cache, View<const std::int32_t, 1> kv_len) {
  const auto [batch, heads, capacity, head_dim] = cache.shape;
  const std::int64_t q_len = rows.shape()[2];
  const std::size_t bytes = std::size_t(q_len * head_dim) * size_bytes(cache.dtype);
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t to = ((b * heads + h) * capacity + kv_len.data[b] - q_len) * head_dim;
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

/// The visitor of for_each_site.
class Walk {
 public:
  Walk(const golden::GoldenFile& file, const WalkOptions& options, View<const std::int32_t, 1> kv_len)
      : file_(file), options_(options), kv_len_(kv_len), progress_(file.path(), std::int64_t(sites.size())) {}

  template <class Args>
  Status operator()(const Site& site, const Args& args) {
    if (finished_) return {};
    const bool wanted = options_.site.empty() || options_.site == site.name;
    const std::vector<SiteOutput> outputs = site_outputs(site, args);
    if (wanted || !options_.isolated) {
      for (const SiteOutput& o : outputs)
        if (!o.is_cache) fill_nan(o.data);
      if (const Status s = run_site(options_.backend, args); !s)
        return Status::error(s.code(), file_.path() + ": site " + std::string(site.name) + ": " + s.message());
    }
    if (wanted || options_.isolated)
      for (const SiteOutput& o : outputs) {
        const Result<Tensor> golden = file_.tap(std::string(golden::kReference), o.tap);
        if (!golden) return golden.status();
        if (wanted) CF_TRY(add(site, o, *golden));
        if (options_.isolated) write_tap(*golden, o, kv_len_);
      }
    finished_ = wanted && !options_.site.empty();
    progress_.set(++visited_);
    return {};
  }

  std::vector<TapResult> take() { return std::move(results_); }

 private:
  Status add(const Site& site, const SiteOutput& output, const Tensor& golden) {
    const golden::GoldenMeta& m = file_.meta();
    const Result<Comparison> error = compare(read_tap(output, m.config, m.load, kv_len_), golden);
    if (!error) return error.status();
    TapResult r{.site = std::string(site.name),
                .tap = output.tap,
                .dtype = options_.activation,
                .error = *error,
                .worst = name_coordinate(golden::tap_dims(m.config, m.load, output.tap), error->worst),
                .budget = walk_budget(options_),
                .producer_rel_l2 = {}};
    for (const golden::VariantInfo& v : file_.variants()) {
      if (v.name == golden::kReference || !std::count(v.taps.begin(), v.taps.end(), output.tap)) continue;
      const Result<Tensor> theirs = file_.tap(v.name, output.tap);
      if (!theirs) return theirs.status();
      const Result<Comparison> c = compare(*theirs, golden);
      if (!c) return c.status();
      r.producer_rel_l2[v.name] = c->rel_l2;
    }
    results_.push_back(std::move(r));
    return {};
  }

  const golden::GoldenFile& file_;
  const WalkOptions& options_;
  View<const std::int32_t, 1> kv_len_;
  Progress progress_;
  std::vector<TapResult> results_;
  std::int64_t visited_ = 0;
  bool finished_ = false;
};

Status check_site(const std::string& name) {
  std::string names;
  for (const Site& s : sites) {
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
  const auto refuse = [&](const char* why) {
    return Status::error(Code::unimplemented, "--backend " + std::string(name) + ": " + why);
  };
  if (name != "cuda") return refuse("expected cpu or cuda");
#ifdef CF_HAVE_CUDA
  return refuse("this version walks golden files on the CPU only");
#else
  return refuse("this build has no CUDA support: no nvcc was found when it was configured");
#endif
}

double walk_budget(const WalkOptions& o) {
  const double budget = o.activation == DType::f64 ? kBudgetF64 : kBudgetF32;
  return o.own_rope_table ? std::max(budget, kTableBudget) : budget;
}

Result<std::vector<TapResult>> walk_golden(const golden::GoldenFile& file, const golden::GoldenWeights& weights,
                                           const WalkOptions& options) {
  CF_TRY(check_site(options.site));
  const golden::GoldenMeta& m = file.meta();
  LayerState state(m.config, m.load, options.activation);
  CF_TRY(file.load(state));
  if (options.own_rope_table) state.fill_rope_table(m.config.rope_theta);
  const LayerTensors tensors = state.tensors();
  Walk walk(file, options, tensors.kv_len);
  CF_TRY(for_each_site(m.config, weights.weights, tensors, walk));
  return walk.take();
}

}  // namespace cf::apps
