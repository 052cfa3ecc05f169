#pragma once
// Products whose sums have one order. Private to cpu_ref.
#include <cstdint>
#include <utility>

namespace cf::cpu_ref {

/// Beyond this many tokens a dense float32 product is bound by arithmetic, where Eigen's blocking pays. Up to it each
/// token has the bits that it has alone.
inline constexpr std::int64_t kFewTokens = 8;

/// While one lives that holds, float32 products that this thread begins give a token the same bits whatever number of
/// tokens they have. Without it, a product of many tokens has another order of sums, which is faster.
class Invariant {
 public:
  explicit Invariant(bool holds) : before_(std::exchange(current(), holds)) {}
  Invariant(const Invariant&) = delete;
  Invariant& operator=(const Invariant&) = delete;
  ~Invariant() { current() = before_; }

  static bool holds() { return current(); }

 private:
  static bool& current() {
    static thread_local bool holds = false;
    return holds;
  }
  bool before_;
};

}  // namespace cf::cpu_ref
