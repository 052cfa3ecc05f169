#pragma once
// What the ops of this backend share: the choice of arithmetic, and Eigen's names for raw memory. Private to cpu_ref.
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/cache_view.hpp"
#include "core/contract.hpp"
#include "core/row_runs.hpp"
#include "core/tensor.hpp"

namespace cf::cpu_ref {

template <class Real>
using Vector = Eigen::Matrix<Real, Eigen::Dynamic, 1>;
template <class Real>
using Array = Eigen::Array<Real, Eigen::Dynamic, 1>;
template <class Real>
using Rows = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Calls f(double{}) for the oracle, f(float{}) for the fast backend. Refuses other dtypes.
template <class F>
Status with_real(std::string_view op, DType activation, F&& f) {
  if (activation == DType::f64) return f(double{});
  if (activation == DType::f32) return f(float{});
  return Status::error(Code::unimplemented, std::string(op) + ": cpu_ref takes float32 or float64 activations, got " +
                                                std::string(to_string(activation)));
}

/// Refuses a value of an index tensor outside least .. most.
inline Status check_index(std::string_view op, std::string_view name, View<const std::int32_t, 1> v, std::int64_t least,
                          std::int64_t most) {
  for (std::int64_t i = 0; i < v.size(); ++i)
    if (v.data[i] < least || v.data[i] > most)
      return bad_argument(op, "'" + std::string(name) + "'[" + std::to_string(i) + "] must be " +
                                  std::to_string(least) + " to " + std::to_string(most) + ", got " +
                                  std::to_string(v.data[i]));
  return {};
}

/// Refuses a kv_len of a sequence with rows that is neither its number of rows to `most` nor kIdleLength.
inline Status check_lengths(std::string_view op, View<const std::int32_t, 1> kv_len, const std::vector<RowRun>& table,
                            std::int64_t most) {
  for (const RowRun& run : table)
    if (const std::int32_t n = kv_len.data[run.sequence]; n != kIdleLength && (n < run.count || n > most))
      return bad_argument(op, "'kv_len'[" + std::to_string(run.sequence) + "] must be " + std::to_string(run.count) +
                                  " to " + std::to_string(most) + ", got " + std::to_string(n) + " (" +
                                  std::to_string(kIdleLength) + " is idle)");
  return {};
}
/// The same for the rows of a call.
template <class Dims>
Status check_lengths(std::string_view op, View<const std::int32_t, 1> kv_len, RowRuns runs, const Dims& d,
                     std::int64_t most) {
  return check_lengths(op, kv_len, table_of(runs, d.batch, d.q_len), most);
}

/// Accumulates a Condition. One thread calls add() once for each output element. NaN, as in an idle sequence's rows,
/// takes no part.
class ConditionSum {
 public:
  void add(double largest_partial, double result) {
    if (std::isnan(result)) return;
    partial2_ += largest_partial * largest_partial;
    result2_ += result * result;
    largest_partial_ = std::max(largest_partial_, std::abs(largest_partial));
    largest_result_ = std::max(largest_result_, std::abs(result));
  }
  /// At least 1: a result is its own last partial sum.
  Condition value() const {
    const auto ratio = [](double a, double b) { return b > 0 ? std::max(1.0, a / b) : 1.0; };
    return {ratio(std::sqrt(partial2_), std::sqrt(result2_)), ratio(largest_partial_, largest_result_)};
  }

 private:
  double partial2_ = 0, result2_ = 0, largest_partial_ = 0, largest_result_ = 0;
};

}  // namespace cf::cpu_ref
