#pragma once
// The layer's walk over a golden file: every site run by a backend and compared with the file's taps.
#include <array>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/compare.hpp"
#include "core/layer.hpp"
#include "core/ops/all.hpp"
#include "core/status.hpp"
#include "golden/golden_file.hpp"

namespace cf::apps {

namespace detail {
#define CF_OP(Op) std::type_identity<ops::Op> op_of(const ops::Op::Args&);
#include "core/ops/ops.def"
#undef CF_OP
}  // namespace detail

/// The op that a site's arguments belong to.
template <class Args>
using OpOf = typename decltype(detail::op_of(std::declval<const Args&>()))::type;

/// What a site writes, under the name of its tap. Of a cache the tap holds the appended rows alone.
struct SiteOutput {
  std::string tap;
  bool is_cache;
  AnyView<4> data;  // an output's shape is its tap's; here all its elements, but a cache's four dimensions
};

namespace detail {
/// Collects outputs and states from an op's list of tensors.
struct OutputList {
  std::vector<SiteOutput> outputs;

  template <class View>
  void operator()(Role role, std::string_view name, const View& v, std::array<std::int64_t, View::rank>, bool = false) {
    if constexpr (std::is_same_v<View, AnyView<4>>)
      if (role == Role::state) outputs.push_back({std::string(name), true, v});
    if constexpr (std::is_same_v<View, AnyView<View::rank>>)
      if (role == Role::output) outputs.push_back({std::string(name), false, reshape<4>(v, {1, 1, 1, v.size()})});
  }
};
}  // namespace detail

/// The outputs and states of a site, in the order of its contract. One is named by the site's tap, several
/// "tap.output".
template <class Args>
std::vector<SiteOutput> site_outputs(const Site& site, const Args& args) {
  detail::OutputList list;
  OpOf<Args>::tensors(OpOf<Args>::dims(args), args, list);
  for (SiteOutput& o : list.outputs)
    o.tap = list.outputs.size() == 1 ? std::string(site.tap) : std::string(site.tap) + "." + o.tap;
  return std::move(list.outputs);
}

/// A copy of what a site made, in its tap's shape.
Tensor read_tap(const SiteOutput& output, const ModelConfig& config, const Workload& load,
                View<const std::int32_t, 1> kv_len);

/// The name of an element, "token=0, head=3, d=17".
std::string name_coordinate(const std::vector<golden::TapDim>& dims, std::int64_t index);

enum class Backend { cpu, cuda };

/// The backend of that name. Refuses one that this build or machine cannot run, with the reason.
Result<Backend> choose_backend(std::string_view name);

/// How a golden file is walked.
struct WalkOptions {
  Backend backend = Backend::cpu;
  DType activation = DType::f64;
  bool isolated = true;         // every site reads golden inputs; else only the first does, and errors add up
  std::string site{};           // this site alone; empty for all
  bool own_rope_table = false;  // the library's cos and sin in place of the file's
  bool fused = false;           // all sites by one persistent kernel: for cuda, and not isolated
};

/// How far RoPE's float32 tables of two makers, and what is computed with them, may be apart in relative L2: a rounding
/// of the angle.
inline constexpr double kTableBudget = 1e-6;

/// The bound on a tap's relative L2 error against Hugging Face's float64 for the CPU backend. The CUDA backend's is
/// derived for each tap, from its contract's budget and the inputs at hand.
double walk_budget(const WalkOptions& options);

/// One tap, compared with the reference.
struct TapResult {
  std::string site, tap;
  DType dtype = DType::f64;
  Comparison error;
  std::string worst;  // the worst element by name
  double budget = 0;
  std::map<std::string, double> producer_rel_l2;  // of the file's other variants against its reference

  bool ok() const { return error.non_finite == 0 && error.rel_l2 <= budget; }
};

/// Runs the walk. Refuses a site that the layer does not have, taps that the file does not, and fused what the persistent
/// kernel does not take (Code::unimplemented).
Result<std::vector<TapResult>> walk_golden(const golden::GoldenFile& file, const golden::GoldenWeights& weights,
                                           const WalkOptions& options);

}  // namespace cf::apps
