#include <limits>

#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/parallel.hpp"
#include "cpu_ref/ops/real.hpp"
#include "cpu_ref/ops/widen.hpp"
#include "cpu_ref/simd/kernels.hpp"

namespace cf::cpu_ref {
namespace {

/// scores[j] = keys[j] . q and y = sum_j p[j] values[j], over n contiguous rows of head_dim.
void row_scores(const double* keys, const double* q, std::int64_t n, std::int64_t head_dim, double* scores) {
  Eigen::Map<Vector<double>>(scores, n) =
      Eigen::Map<const Rows<double>>(keys, n, head_dim) * Eigen::Map<const Vector<double>>(q, head_dim);
}
void row_scores(const float* keys, const float* q, std::int64_t n, std::int64_t head_dim, float* scores) {
  for (std::int64_t j = 0; j < n; ++j) kernels().dot_f32(keys + j * head_dim, q, head_dim, head_dim, 1, scores + j);
}
void weighted_rows(const double* values, const double* p, std::int64_t n, std::int64_t head_dim, double* y) {
  Eigen::Map<Vector<double>>(y, head_dim) =
      Eigen::Map<const Rows<double>>(values, n, head_dim).transpose() * Eigen::Map<const Vector<double>>(p, n);
}
void weighted_rows(const float* values, const float* p, std::int64_t n, std::int64_t head_dim, float* y) {
  std::fill(y, y + head_dim, 0.f);
  for (std::int64_t j = 0; j < n; ++j) kernels().axpy(p[j], values + j * head_dim, y, head_dim);
}

template <class Real>
void softmax(Eigen::Map<Array<Real>> s) {
  s = (s - s.maxCoeff()).exp();
  s /= s.sum();
}

}  // namespace

Status run(const ops::Attention::Args& a) {
  CF_TRY(ops::Attention::check(a));
  const auto d = ops::Attention::dims(a);
  const std::vector<RowRun> table = table_of(a.runs, d.batch, d.q_len);
  CF_TRY(check_lengths(ops::Attention::name, a.kv_len, table, d.max_kv_len));
  return with_real(ops::Attention::name, a.q.dtype, [&](auto zero) -> Status {
    using Real = decltype(zero);
    const CacheView cache(a.k_cache);
    return parallel_for(
        std::int64_t(table.size()) * d.heads, [&] { return std::vector<Real>(std::size_t(d.max_kv_len)); },
        [&](std::vector<Real>& scores, std::int64_t i_head) {
          const RowRun& run = table[std::size_t(i_head / d.heads)];
          const std::int64_t h = i_head % d.heads;
          const std::int32_t length = a.kv_len.data[run.sequence];
          const std::int64_t first = cache.rows(run.sequence, d.kv_head(h), 0, length).first;
          const Real* keys = a.k_cache.as<const Real>().data + first;
          const Real* values = a.v_cache.as<const Real>().data + first;
          for (std::int64_t i = 0; i < run.count; ++i) {
            const std::int64_t row = ((run.first_row + i) * d.heads + h) * d.head_dim;
            Real* const y = a.y.as<Real>().data + row;
            const std::int64_t n = cache.visible_entries(length, int(run.count), int(i));
            if (n == 0) {
              std::fill_n(y, d.head_dim, std::numeric_limits<Real>::quiet_NaN());
              continue;
            }
            row_scores(keys, a.q.as<const Real>().data + row, n, d.head_dim, scores.data());
            Eigen::Map<Array<Real>> s(scores.data(), n);
            s *= Real(a.scale);
            softmax<Real>(s);
            weighted_rows(values, scores.data(), n, d.head_dim, y);
          }
        });
  });
}

/// The condition of the weighted sum of values, times 1 + what the scores' errors add. A score with an absolute error e
/// gives a weight with a relative error e. With unit roundoff u and the score's largest partial sum s, summing the
/// score contributes u * sqrt(head_dim) * s to e; storing the score and rounding the exponential's argument contribute
/// u * s each. The budget multiplies a condition by sqrt(max_kv_len), so the scores' share is divided by that.
Result<Condition> condition(const ops::Attention::Args& a) {
  CF_TRY(ops::Attention::check(a));
  const auto d = ops::Attention::dims(a);
  const std::vector<RowRun> table = table_of(a.runs, d.batch, d.q_len);
  CF_TRY(check_lengths(ops::Attention::name, a.kv_len, table, d.max_kv_len));
  ConditionSum sum;
  double largest_score = 0;
  Array<double> q(d.head_dim), y(d.head_dim), magnitude(d.head_dim);
  Rows<double> k, v;
  for (const RowRun& run : table)
    for (std::int64_t h = 0; h < d.heads; ++h) {
      const std::int64_t most = a.kv_len.data[run.sequence];
      if (most == kIdleLength) continue;
      const std::int64_t first = CacheView(a.k_cache).rows(run.sequence, d.kv_head(h), 0, most).first;
      k.resize(most, d.head_dim);
      v.resize(most, d.head_dim);
      widen_row(a.k_cache.data, a.k_cache.dtype, first, k.size(), k.data());
      widen_row(a.v_cache.data, a.v_cache.dtype, first, v.size(), v.data());
      for (std::int64_t i = 0; i < run.count; ++i) {
        const std::int64_t n = most - run.count + i + 1;
        widen_row(a.q.data, a.q.dtype, ((run.first_row + i) * d.heads + h) * d.head_dim, d.head_dim, q.data());
        Array<double> p(n);
        for (std::int64_t j = 0; j < n; ++j) {
          double s = 0;
          for (std::int64_t c = 0; c < d.head_dim; ++c) {
            s += k(j, c) * q[c];
            largest_score = std::max(largest_score, std::abs(s) * a.scale);
          }
          p[j] = s * a.scale;
        }
        softmax<double>(Eigen::Map<Array<double>>(p.data(), n));
        y = (v.topRows(n).transpose() * p.matrix()).array();
        magnitude = (v.topRows(n).cwiseAbs().transpose() * p.matrix()).array();
        for (std::int64_t c = 0; c < d.head_dim; ++c) sum.add(magnitude[c], y[c]);
      }
    }
  const double scores = largest_score * (std::sqrt(double(d.head_dim)) + 2) / std::sqrt(double(d.max_kv_len));
  const Condition values = sum.value();
  return Condition{values.l2 * (1 + scores), values.max * (1 + scores)};
}

}  // namespace cf::cpu_ref
