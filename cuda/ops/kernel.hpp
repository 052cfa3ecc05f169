#pragma once
// How an op's kernel is chosen: the op has a list of kernels, best first, and the first that takes a call runs it.
// Without CUDA's headers: a choice is a pure function and needs no GPU. Private to cuda.
#include <algorithm>
#include <any>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/call_groups.hpp"
#include "core/ops/all.hpp"
#include "core/status.hpp"
#include "cuda/runtime/arch.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "cuda/runtime/refusals.hpp"

namespace cf::cuda {

/// What a plan depends on beside the call.
struct Target {
  Arch arch;
  Scratch scratch{};
  bool has_wgmma = true;                     // the device runs this build's code for Hopper's tensor cores
  bool (*has_gemm)() = [] { return true; };  // whether cuBLASLt is there. A call, as it loads the library
};

/// A call that a kernel has planned. The plan is made once: prepare() holds it.
struct Planned {
  std::any plan;                               // the kernel's own Plan
  std::function<std::string()> text;           // the plan
  std::function<Status(LaunchList&)> prepare;  // adds the plan's launches
};

/// One way to run an op.
template <class Args>
struct Kernel {
  std::string_view name;
  /// The plan of a call that the op's check() took, or why there is none. Code::not_found: the kernel leaves the call
  /// to a faster one behind it in the list (not_taken()). Code::unimplemented: the kernel has no code for this call.
  Result<Planned> (*plan)(const Target&, const Args&);
  /// Whether the kernel has tables of runs: it may take runs that differ.
  bool takes_runs = false;
};

/// For the plan of a kernel that takes one contiguous cache of all keys: refuses pages, a window that leaves keys out,
/// a stream's ring, and queries of their own for its sinks.
template <class Args>
Status check_cache(const Args& args) {
  const auto refuse = [](const std::string& takes, const std::string& got) {
    return Status::error(Code::unimplemented, std::string(Args::Op::name) + ": cuda takes " + takes + ", got " + got);
  };
  if constexpr (requires { args.page_table; })
    if (args.page_table) return refuse("a contiguous cache", "pages");
  if constexpr (requires { args.q_sinks; })
    if (args.q_sinks) return refuse("queries for all keys alike", "q_sinks");
  if constexpr (requires { args.window; }) {
    std::int64_t most = std::numeric_limits<std::int32_t>::max();
    if constexpr (requires { args.max_kv_len; }) most = args.max_kv_len;
    if (args.window && args.window.keys < most)
      return refuse("a cache of all keys", "a window of " + std::to_string(args.window.keys));
  }
  return {};
}

/// For the plan of a kernel that takes as many rows of each sequence, in order: leaves runs to others. choose() gives
/// such a kernel the groups of a call's runs one by one.
template <class Args>
Status check_equal_runs(const Args& args) {
  if (args.runs.empty()) return {};
  return not_taken("as many rows of each sequence", std::to_string(args.runs.size()) + " runs");
}

/// A kernel made of a function that plans and one that launches. `plan_of`(target, args) returns a Result<Plan>;
/// `launch`(args, plan, launches) adds the launches; to_string(plan) prints the plan. A plan with tables takes runs.
template <class Args, auto plan_of, auto launch>
constexpr Kernel<Args> make_kernel(std::string_view name) {
  using Plan = std::remove_cvref_t<decltype(*plan_of(std::declval<const Target&>(), std::declval<const Args&>()))>;
  constexpr bool has_tables = requires(const Plan& p) { p.tables; };
  return {name,
          [](const Target& target, const Args& args) -> Result<Planned> {
            CF_TRY_ASSIGN(const auto plan, plan_of(target, args));
            return Planned{plan, [plan] { return to_string(plan); },
                           [args, plan](LaunchList& launches) { return launch(args, plan, launches); }};
          },
          has_tables};
}

/// A kernel that did not take a call.
struct PassedOver {
  std::string_view kernel;
  std::string reason;
};

/// The kernel that takes a call, and those before it in the list.
struct Choice {
  std::string_view kernel;
  Planned planned;
  std::vector<PassedOver> passed_over;
};

/// The first kernel of a list that takes a call. Where none does, the call is refused with one kernel's reason: that of
/// the last kernel which has no code for it, or of the list's last kernel where each left the call to another one.
template <class Args>
Result<Choice> choose_from(std::span<const Kernel<Args>> kernels, const Target& target, const Args& args) {
  Choice choice;
  const std::string name(Args::Op::name);
  Status refusal = Status::error(Code::not_found, "has no kernel");
  for (const Kernel<Args>& kernel : kernels) {
    Result<Planned> planned = kernel.plan(target, args);
    if (planned) {
      choice.kernel = kernel.name;
      choice.planned = *std::move(planned);
      return choice;
    }
    const Status why = planned.status();
    if (why.code() != Code::unimplemented && why.code() != Code::not_found) return why;
    if (why.code() == Code::unimplemented || refusal.code() == Code::not_found) refusal = why;
    choice.passed_over.push_back({kernel.name, why.message()});
  }
  if (refusal.code() == Code::unimplemented) return refusal;
  return Status::error(Code::unimplemented, name + ": cuda " + refusal.message());
}

/// An op's kernels, best first.
#define CF_OP(Op) std::span<const Kernel<ops::Op::Args>> kernels_of(const ops::Op::Args&);
#include "core/ops/fused.def"
#include "core/ops/ops.def"
#include "core/ops/ranks.def"
#undef CF_OP

/// Groups that go to one kernel together, and those that are left, the longest runs first.
struct SomeGroups {
  std::vector<RowGroup> taken, left;
};

/// Divides groups, the longest runs first, into those that a kernel takes together and the others. The kernel takes
/// runs from some length on, or none: what is longer has gone to kernels before it in the list. `planned` becomes the
/// kernel's plan for what it takes.
template <class Args>
SomeGroups take_groups(const Kernel<Args>& kernel, const Target& target, const Args& args,
                       const std::vector<RowGroup>& groups, Planned& planned) {
  std::vector<RowRun> runs;
  std::vector<std::size_t> before{0};  // runs of the groups before each
  for (const RowGroup& g : groups) {
    for (std::int64_t i = 0; i < g.sequences; ++i)
      runs.push_back({.sequence = g.sequence + i, .first_row = g.first_row + i * g.count, .count = g.count});
    before.push_back(runs.size());
  }
  std::size_t taken = 0, refused = groups.size() + 1;  // numbers of groups
  for (std::size_t n = groups.size(); n > taken; n = (taken + refused) / 2) {
    Args part = args;
    part.runs = RowRuns(runs).first(before[n]);
    if (Result<Planned> all = kernel.plan(target, part)) {
      planned = *std::move(all);
      taken = n;
    } else {
      refused = n;
    }
  }
  const auto end = groups.begin() + std::ptrdiff_t(taken);
  return {{groups.begin(), end}, {end, groups.end()}};
}

/// The choices for a call of runs: one for the groups that a kernel takes together, and one for each other group of
/// equal runs. The choice for a lone group is that group's own: there may be a better kernel for equal runs.
template <class Args>
Result<Choice> choose_for_groups(const Target& target, const Args& args) {
  std::vector<Choice> groups;
  std::vector<RowGroup> left = row_groups(args.runs), alone;
  std::stable_sort(left.begin(), left.end(), [](const RowGroup& a, const RowGroup& b) { return a.count > b.count; });
  for (const Kernel<Args>& kernel : kernels_of(args)) {
    if (!kernel.takes_runs || left.size() < 2) continue;
    Planned planned;
    SomeGroups some = take_groups(kernel, target, args, left, planned);
    if (some.taken.size() > 1)
      groups.push_back({.kernel = kernel.name, .planned = std::move(planned), .passed_over = {}});
    else
      alone.insert(alone.end(), some.taken.begin(), some.taken.end());
    left = std::move(some.left);
  }
  alone.insert(alone.end(), left.begin(), left.end());
  for (const RowGroup& group : alone) {
    const Args part = part_of(args, group);
    CF_TRY_ASSIGN(Choice choice, choose_from(kernels_of(part), target, part));
    groups.push_back(std::move(choice));
  }
  if (groups.size() == 1) return std::move(groups.front());
  const auto all = std::make_shared<const std::vector<Choice>>(std::move(groups));  // plans with tables are large
  const auto text = [all] {
    std::string text;
    for (const Choice& c : *all) text += (text.empty() ? "" : "; ") + std::string(c.kernel) + ": " + c.planned.text();
    return text;
  };
  const auto prepare = [all](LaunchList& launches) -> Status {
    for (const Choice& c : *all) CF_TRY(c.planned.prepare(launches));
    return {};
  };
  return Choice{.kernel = "one for each group of runs", .planned = {{}, text, prepare}, .passed_over = {}};
}

/// Chooses a kernel for a call that the op's check() took. Runs that differ go to one kernel where there is one that
/// takes them all, else to a kernel for each group.
template <class Args>
Result<Choice> choose(const Target& target, const Args& args) {
  if constexpr (requires { args.runs; }) {
    if (differ(args.runs)) {
      Result<Choice> all = choose_from(kernels_of(args), target, args);
      if (all || all.status().code() != Code::unimplemented) return all;
    }
    if (!args.runs.empty()) return choose_for_groups(target, args);
  }
  return choose_from(kernels_of(args), target, args);
}

}  // namespace cf::cuda
