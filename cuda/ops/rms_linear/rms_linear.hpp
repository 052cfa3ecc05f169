#pragma once
#include "core/ops/rope_append.hpp"
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/ops/norm/layernorm.hpp"
#include "cuda/ops/run.hpp"

namespace cf::cuda {

// Products with packed GPTQ weights whose kernels normalise the one token themselves, in every block. The bits are
// those of the ops one after the other. The tensors between the ops are not written. On an H200 the layers of Llama
// models are 1 to 5 % faster with fewer launches: data/bench/TRIALS.md, old-and-new-llama-gptq.

/// Calls f for an op's tensors but for the one of this name.
template <class Args, class F>
void tensors_without(std::string_view name, Args& args, F& f) {
  using Op = typename Args::Op;
  Op::tensors(Op::dims(args), args, [&](const TensorSpec& t, auto& view, const auto& shape) {
    if (t.name != name) f(t, view, shape);
  });
}

/// linear.y = Linear(RmsNorm(norm.x)): linear.x is norm.y.
struct RmsLinear {
  static constexpr std::string_view name = "rms_linear";
  struct Dims {};
  struct Args {
    using Op = RmsLinear;
    ops::RmsNorm::Args norm;
    ops::Linear::Args linear;
  };

  static Dims dims(const Args&) { return {}; }
  template <class A, class F>
  static void tensors(const Dims&, A& a, F&& f) {
    tensors_without("y", a.norm, f);
    tensors_without("x", a.linear, f);
  }
};

/// rope.q and the caches' new entries = RopeAppend(Linear(RmsNorm(norm.x))): linear.x is norm.y, and rope.qkv is
/// linear.y. The weight's rows are in the order of RopePairs.
struct RmsQkv {
  static constexpr std::string_view name = "rms_qkv";
  struct Dims {};
  struct Args {
    using Op = RmsQkv;
    ops::RmsNorm::Args norm;
    ops::Linear::Args linear;
    ops::RopeAppend::Args rope;
  };

  static Dims dims(const Args&) { return {}; }
  template <class A, class F>
  static void tensors(const Dims&, A& a, F&& f) {
    tensors_without("y", a.norm, f);
    const auto but_y = [&](const TensorSpec& t, auto& view, const auto& shape) {
      if (t.name != "y") f(t, view, shape);
    };
    tensors_without("x", a.linear, but_y);
    tensors_without("qkv", a.rope, f);
  }
};

/// Rows that a launch finishes at once.
inline constexpr int kRmsRows = 2;
/// The most parts of a row: rmsnorm's warps at eight elements a thread.
inline constexpr int kRmsParts = max_layernorm_threads(8) / 32;

/// The static shared memory of a block, in bytes: a float for each part of the row, and two integers of RmsQkv.
inline constexpr int kRmsStaticBytes = (kRmsParts + 2) * int(sizeof(float));

/// The plan of the launch. Its grid is 0 where one launch does not take the calls, as where they do not fit each other:
/// then each is launched by itself.
GptqPlan rms_linear_plan(const Arch& arch, const RmsLinear::Args& a);
GptqPlan rms_qkv_plan(const Arch& arch, const RmsQkv::Args& a);

/// Adds the launch. Refuses what the ops refuse. The plan's grid must not be 0.
Status prepare(const RmsLinear::Args& a, LaunchList& launches);
Status prepare(const RmsQkv::Args& a, LaunchList& launches);

}  // namespace cf::cuda
