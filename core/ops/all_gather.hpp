#pragma once
#include "core/contract.hpp"

namespace cf::ops {

/// What the ranks of a model have of each token, side by side in the order of the ranks:
///   y[t, r * width + i] = x[r,t,i]
/// x holds the parts of all ranks, or this rank's part alone: then the other ranks make the same call, and who runs it
/// brings their parts.
/// Source: torch.distributed.all_gather_into_tensor, along the last dimension.
/// Refuses ranks below 1, and x with parts of neither one rank nor of all.
struct AllGather {
  static constexpr std::string_view name = "all_gather";
  struct Dims {
    std::int64_t parts, ranks, tokens, width;
  };
  struct Args {
    using Op = AllGather;
    ConstAnyView<3> x{};  // (parts, tokens, width)  parts: ranks, or 1
    AnyView<2> y{};       // (tokens, ranks * width)
    std::int64_t ranks = 1;
  };

  static Dims dims(const Args& a) { return {a.x.shape[0], a.ranks, a.y.shape[0], a.x.shape[2]}; }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "x"}, a.x, extents(d.parts, d.tokens, d.width));
    f(TensorSpec{Role::output, "y"}, a.y, extents(d.tokens, d.ranks * d.width));
  }
  static Status check(const Args& a) {
    CF_TRY(check_tensors<AllGather>(a));
    if (a.ranks < 1) return bad_argument(name, "ranks must be at least 1, got " + std::to_string(a.ranks));
    if (const std::int64_t parts = a.x.shape[0]; parts != 1 && parts != a.ranks)
      return bad_argument(name, "'x' must have one part or the parts of " + std::to_string(a.ranks) + " ranks, got " +
                                    std::to_string(parts));
    return {};
  }
  /// Every rank's part is read, wherever it lies.
  static Cost cost(const Dims& d, DType activation, DType) {
    return {2 * double(d.ranks) * double(d.tokens) * double(d.width) * double(size_bytes(activation)), 0};
  }
  /// A copy: the bits are the input's.
  static Budget budget(const Dims&, Precision, Condition = {}) { return {}; }
};

}  // namespace cf::ops
