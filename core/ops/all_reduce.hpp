#pragma once
#include "core/contract.hpp"

namespace cf::ops {

/// The sum of what the ranks of a model have, in the order of the ranks:
///   y[t,i] = x[0,t,i] + x[1,t,i] + ... + x[ranks - 1,t,i]
/// summed from the left in the compute type and rounded once. The order is fixed, so that y has the same bits on all
/// ranks. x holds the parts of all ranks, or this rank's part alone: then the other ranks make the same call, and who
/// runs it brings their parts. x and y may be the same memory where x is one part.
/// A part has the activations' dtype, as the product that makes it stores it: each rank rounds its part once, where one
/// rank alone rounds the whole sum once.
/// Source: torch.distributed.all_reduce with ReduceOp.SUM.
/// Refuses ranks below 1, and x with parts of neither one rank nor of all.
struct AllReduce {
  static constexpr std::string_view name = "all_reduce";
  struct Dims {
    std::int64_t parts, ranks, tokens, width;
  };
  struct Args {
    using Op = AllReduce;
    ConstAnyView<3> x{};  // (parts, tokens, width)  parts: ranks, or 1
    AnyView<2> y{};       // (tokens, width)
    std::int64_t ranks = 1;
  };

  static Dims dims(const Args& a) { return {a.x.shape[0], a.ranks, a.y.shape[0], a.y.shape[1]}; }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "x"}, a.x, extents(d.parts, d.tokens, d.width));
    f(TensorSpec{Role::output, "y"}, a.y, extents(d.tokens, d.width));
  }
  static Status check(const Args& a) {
    CF_TRY(check_tensors<AllReduce>(a));
    if (a.ranks < 1) return bad_argument(name, "ranks must be at least 1, got " + std::to_string(a.ranks));
    if (const std::int64_t parts = a.x.shape[0]; parts != 1 && parts != a.ranks)
      return bad_argument(name, "'x' must have one part or the parts of " + std::to_string(a.ranks) + " ranks, got " +
                                    std::to_string(parts));
    return {};
  }
  /// Every rank's part is read, wherever it lies.
  static Cost cost(const Dims& d, DType activation, DType) {
    const double elements = double(d.tokens) * double(d.width);
    return {elements * double(d.ranks + 1) * double(size_bytes(activation)), elements * double(d.ranks - 1)};
  }
  static Budget budget(const Dims& d, Precision p, Condition c = {}) { return reduction_budget(d.ranks, p, c); }
};

}  // namespace cf::ops
