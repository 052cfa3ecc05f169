#pragma once
// The walk over a golden file: a backend runs every site of the layer, and its outputs are compared with the file's
// taps.
#include <array>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/compare.hpp"
#include "core/model/layer.hpp"
#include "core/ops/all.hpp"
#include "core/status.hpp"
#include "golden/file/golden_file.hpp"

namespace cf::apps {

namespace detail {
#define CF_OP(Op) std::type_identity<ops::Op> op_of(const ops::Op::Args&);
#include "core/ops/ops.def"
#undef CF_OP
}  // namespace detail

/// The op that a site's arguments belong to.
template <class Args>
using OpOf = typename decltype(detail::op_of(std::declval<const Args&>()))::type;

/// A tensor that a site writes. The tap of a cache holds the appended rows alone.
struct SiteOutput {
  std::string tap;
  bool is_cache;
  AnyView<4> data;  // of a cache (batch, heads, capacity, head_dim), of any other output (1, 1, 1, elements)
};

namespace detail {
/// Collects outputs and states from an op's list of tensors.
struct OutputList {
  std::vector<SiteOutput> outputs;

  template <class View>
  void operator()(const TensorSpec& t, const View& v, std::array<std::int64_t, View::rank>) {
    if constexpr (std::is_same_v<View, AnyView<4>>)
      if (t.role == Role::state) outputs.push_back({std::string(t.name), true, v});
    if constexpr (std::is_same_v<View, AnyView<View::rank>>)
      if (t.role == Role::output) outputs.push_back({std::string(t.name), false, reshape<4>(v, {1, 1, 1, v.size()})});
  }
};
}  // namespace detail

/// The outputs and states of a site, in the order of its contract. A single one has the name of the site's tap, several
/// have "tap.name".
template <class Args>
std::vector<SiteOutput> site_outputs(const Site& site, const Args& args) {
  detail::OutputList list;
  OpOf<Args>::tensors(OpOf<Args>::dims(args), args, list);
  for (SiteOutput& o : list.outputs) o.tap = output_tap(std::string(site.tap), o.tap, list.outputs.size());
  return std::move(list.outputs);
}

/// A copy of a site's output, in the shape of its tap.
Tensor read_tap(const SiteOutput& output, const ModelConfig& config, const Workload& load,
                View<const std::int32_t, 1> kv_len);

/// The name of an element, "token=0, head=3, d=17".
std::string name_coordinate(const std::vector<golden::TapDim>& dims, std::int64_t index);

/// What runs an op.
enum class Backend { cpu, cuda };

/// The backend of that name. Refuses another name, and a backend that this build or machine cannot run.
Result<Backend> choose_backend(std::string_view name);

/// How the sites are launched: each site as an op of its own, or the whole layer as one launch of the persistent
/// kernel.
enum class WalkImpl { unfused, layer };

/// How a golden file is walked.
struct WalkOptions {
  Backend backend = Backend::cpu;
  DType activation = DType::f64;
  bool isolated = true;         // every site reads the file's tensors; false: the first site alone, and errors add up
  std::string site{};           // compare this site alone; empty for all
  bool own_rope_table = false;  // the library's cos and sin in place of the file's
  WalkImpl impl = WalkImpl::unfused;  // layer: with Backend::cuda alone, and not isolated
};

/// The relative L2 error of a float32 RoPE table, and of what is computed with it, against the table of another
/// producer: the angles differ by a rounding.
inline constexpr double kTableBudget = 1e-6;

/// The bound on the relative L2 error of the CPU backend's taps against Hugging Face's float64. That of the CUDA
/// backend is derived for each tap, from its op's budget and the file's inputs.
double walk_budget(const WalkOptions& options);

/// A tap of the walk, compared with the file's reference.
struct TapResult {
  std::string site, tap;
  DType dtype = DType::f64;
  Comparison error;
  std::string worst;  // the coordinate of the worst element, "token=0, head=3, d=17"
  double budget = 0;
  std::map<std::string, double> producer_rel_l2;  // variant -> relative L2 error of its tap against the reference

  bool ok() const { return error.non_finite == 0 && error.rel_l2 <= budget; }
  /// The relative L2 error over its budget. At most 1 where ok(); infinite with an element that is not finite, and with
  /// an error where the budget is 0.
  double error_over_budget() const;
};

/// Refuses a site that the layer does not have, and a file without a tap that the walk needs; dequantised weights may
/// be missing. Asks for it before the weights are made, which may take memory and time.
Status check_taps(const golden::GoldenFile& file, const WalkOptions& options);

/// Runs the walk. Refuses what check_taps() refuses, and a step that the machine's free memory does not hold.
/// WalkImpl::layer refuses what the persistent kernel does not take, with Code::unimplemented.
Result<std::vector<TapResult>> walk_golden(const golden::GoldenFile& file, const golden::GoldenWeights& weights,
                                           const WalkOptions& options);

}  // namespace cf::apps
