#pragma once
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/ops/run.hpp"

namespace cf::cuda {

/// Two calls of linear with packed GPTQ weights, the second of which adds what the first makes, in one launch:
///   first.y = first.residual + W x + b
///   second.y = first.y + W' x' + b'
/// first.y is rounded to its dtype before it is added, so that the bits are those of the two calls one after the other.
/// One launch instead of two saves 2 to 3 us of waiting, which a layer of int4 weights has no other work to hide.
struct LinearSum {
  static constexpr std::string_view name = "linear";
  struct Dims {};
  struct Args {
    using Op = LinearSum;
    ops::Linear::Args first, second;
  };

  static Dims dims(const Args&) { return {}; }
  /// The tensors of the first call, then those of the second.
  template <class A, class F>
  static void tensors(const Dims&, A& a, F&& f) {
    ops::Linear::tensors(ops::Linear::dims(a.first), a.first, f);
    ops::Linear::tensors(ops::Linear::dims(a.second), a.second, f);
  }
};

/// Rows of a token that the launch finishes at once.
inline constexpr int kLinearSumRows = 2;

/// The plan of the launch. Its grids are 0 where the calls are no sum that one launch makes: then each is launched by
/// itself.
GptqSumPlan linear_sum_plan(const Arch& arch, const LinearSum::Args& a);

/// Adds the launch. Its plan's grids must not be 0.
Status prepare(const LinearSum::Args& a, LaunchList& launches);

}  // namespace cf::cuda
