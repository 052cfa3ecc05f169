#pragma once
// What the ops of this backend share: the choice of arithmetic, and Eigen's names for raw memory. Private to cpu_ref.
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/cache_tensors.hpp"
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

/// Refuses pages outside the pool among those that hold entries [first(run, kv_len), kv_len) of a call's sequences, as
/// far as the cache keeps them, and calls visit(run, page) for the others.
template <class Args, class Dims, class First, class Visit>
Status check_pages(std::string_view op, const Args& a, const Dims& d, const std::vector<RowRun>& table,
                   const KeyWindow& stream, First&& first, Visit&& visit) {
  if (!d.pool) return {};
  const std::int64_t pages = a.page_table.shape[1];
  std::vector<char> used(static_cast<std::size_t>(pages));
  for (const RowRun& run : table) {
    const std::int64_t length = a.kv_len.data[run.sequence];
    if (length == kIdleLength) continue;
    std::fill(used.begin(), used.end(), char(0));
    with_cache_view(a.k_cache, a.page_table, stream, [&](const auto& view) {
      for (std::int64_t e = first(run, length); e < length; ++e) {
        if (e >= stream.sinks) e = std::max(e, length - d.capacity + stream.sinks);
        std::int64_t index = e;
        if constexpr (requires { view.stored_index(e); }) index = view.stored_index(e);
        used[std::size_t(index / d.pool.page_entries)] = 1;
      }
    });
    for (std::int64_t i = 0; i < pages; ++i) {
      if (!used[std::size_t(i)]) continue;
      const std::int32_t page = a.page_table.data[run.sequence * pages + i];
      if (page < 0 || page >= d.pool.pages)
        return bad_argument(op, "'page_table'[" + std::to_string(run.sequence) + "][" + std::to_string(i) +
                                    "] must be 0 to " + std::to_string(d.pool.pages - 1) + ", got " +
                                    std::to_string(page));
      CF_TRY(visit(run, page));
    }
  }
  return {};
}

/// The same for the pages of the keys that a call's rows see.
template <class Args, class Dims>
Status check_seen_pages(std::string_view op, const Args& a, const Dims& d, const std::vector<RowRun>& table,
                        const KeyWindow& window) {
  const auto first = [&](const RowRun& run, std::int64_t length) {
    return window.sinks > 0 ? 0 : window.first(length - run.count + 1);
  };
  return check_pages(op, a, d, table, window, first, [](const RowRun&, std::int32_t) { return Status(); });
}

/// What an append refuses of its lengths, up to `most`, and of its pages: two sequences that write to one page.
template <class Args, class Dims>
Status check_append(std::string_view op, const Args& a, const Dims& d, std::int64_t most,
                    const KeyWindow& stream = {}) {
  const std::vector<RowRun> table = table_of(a.runs, d.batch, d.q_len);
  CF_TRY(check_lengths(op, a.kv_len, table, most));
  std::vector<std::int64_t> writer(static_cast<std::size_t>(d.pool.pages), -1);
  return check_pages(
      op, a, d, table, stream, [](const RowRun& run, std::int64_t length) { return length - run.count; },
      [&](const RowRun& run, std::int32_t page) -> Status {
        std::int64_t& of = writer[std::size_t(page)];
        if (of >= 0)
          return bad_argument(op, "'page_table': expected pages of its own for a sequence's new entries, got page " +
                                      std::to_string(page) + " for sequence " + std::to_string(of) +
                                      " and for sequence " + std::to_string(run.sequence));
        of = run.sequence;
        return {};
      });
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
