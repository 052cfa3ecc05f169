#include <limits>

#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/parallel.hpp"
#include "cpu_ref/ops/real.hpp"
#include "cpu_ref/ops/widen.hpp"
#include "cpu_ref/simd/kernels.hpp"

namespace cf::cpu_ref {
namespace {

// A key and a value at a time, so that the bits do not depend on which entries lie one behind the other.

/// scores[j] = keys[j] . q, over n contiguous rows of head_dim.
void row_scores(const double* keys, const double* q, std::int64_t n, std::int64_t head_dim, double* scores) {
  const Eigen::Map<const Vector<double>> query(q, head_dim);
  for (std::int64_t j = 0; j < n; ++j)
    scores[j] = Eigen::Map<const Vector<double>>(keys + j * head_dim, head_dim).dot(query);
}
void row_scores(const float* keys, const float* q, std::int64_t n, std::int64_t head_dim, float* scores) {
  for (std::int64_t j = 0; j < n; ++j) kernels().dot_f32(keys + j * head_dim, q, head_dim, head_dim, 1, scores + j);
}
/// y += sum_j p[j] values[j], over the same.
void add_weighted_rows(const double* values, const double* p, std::int64_t n, std::int64_t head_dim, double* y) {
  Eigen::Map<Vector<double>> sum(y, head_dim);
  for (std::int64_t j = 0; j < n; ++j) sum += p[j] * Eigen::Map<const Vector<double>>(values + j * head_dim, head_dim);
}
void add_weighted_rows(const float* values, const float* p, std::int64_t n, std::int64_t head_dim, float* y) {
  for (std::int64_t j = 0; j < n; ++j) kernels().axpy(p[j], values + j * head_dim, y, head_dim);
}

/// Refuses lengths beyond max_kv_len, and pages with keys that a row sees outside the pool.
Status check_cache(const ops::Attention::Args& a, const ops::Attention::Dims& d, const std::vector<RowRun>& table) {
  CF_TRY(check_lengths(ops::Attention::name, a.kv_len, table, d.max_kv_len));
  return check_seen_pages(ops::Attention::name, a, d, table, d.window);
}

/// Calls f(first, n) for the two ranges of entries that a row with `visible` entries up to its own sees: the sinks, and
/// those of its window, or all.
template <class F>
void for_each_seen(const KeyWindow& window, std::int64_t visible, F&& f) {
  if (window.sinks > 0) f(std::int64_t(0), std::min(window.sinks, visible));
  const std::int64_t first = window.first(visible);
  f(first, visible - first);
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
  CF_TRY(check_cache(a, d, table));
  return with_real(ops::Attention::name, a.q.dtype, [&](auto zero) -> Status {
    using Real = decltype(zero);
    const Real *const keys = a.k_cache.as<const Real>().data, *const values = a.v_cache.as<const Real>().data;
    return with_cache_view(a.k_cache, a.page_table, d.window, [&](const auto& cache) {
      return parallel_for(
          std::int64_t(table.size()) * d.heads, [&] { return std::vector<Real>(std::size_t(d.seen())); },
          [&](std::vector<Real>& scores, std::int64_t i_head) {
            const RowRun& run = table[std::size_t(i_head / d.heads)];
            const std::int64_t h = i_head % d.heads;
            const std::int32_t length = a.kv_len.data[run.sequence];
            for (std::int64_t i = 0; i < run.count; ++i) {
              const std::int64_t row = ((run.first_row + i) * d.heads + h) * d.head_dim;
              Real* const y = a.y.as<Real>().data + row;
              const std::int64_t visible = cache.visible_entries(length, int(run.count), int(i));
              if (visible == 0) {
                std::fill_n(y, d.head_dim, std::numeric_limits<Real>::quiet_NaN());
                continue;
              }
              // Both walks over the keys that the row sees put them at the same places of `scores`.
              const auto for_each_stretch = [&](auto&& f) {
                std::int64_t at = 0;
                for_each_seen(d.window, visible, [&](std::int64_t first, std::int64_t n) {
                  const bool sink = first < d.window.sinks;
                  for_each_rows(cache, run.sequence, d.kv_head(h), first, n, [&](const CacheRows& rows) {
                    f(rows, sink, scores.data() + at);
                    at += rows.count;
                  });
                });
                return at;
              };
              const std::int64_t seen = for_each_stretch([&](const CacheRows& rows, bool sink, Real* s) {
                const Real* const q = (sink ? a.q_sinks : a.q).as<const Real>().data + row;
                row_scores(keys + rows.first, q, rows.count, d.head_dim, s);
              });
              Eigen::Map<Array<Real>> s(scores.data(), seen);
              s *= Real(a.scale);
              softmax<Real>(s);
              std::fill_n(y, d.head_dim, Real(0));
              for_each_stretch([&](const CacheRows& rows, bool, const Real* p) {
                add_weighted_rows(values + rows.first, p, rows.count, d.head_dim, y);
              });
            }
          });
    });
  });
}

/// The condition of the weighted sum of values, times 1 + what the scores' errors add. A score with an absolute error e
/// gives a weight with a relative error e. With unit roundoff u and the score's largest partial sum s, summing the
/// score contributes u * sqrt(head_dim) * s to e; storing the score and rounding the exponential's argument contribute
/// u * s each. The budget multiplies a condition by the root of the keys that a query sees, so the scores' share is
/// divided by that.
Result<Condition> condition(const ops::Attention::Args& a) {
  CF_TRY(ops::Attention::check(a));
  const auto d = ops::Attention::dims(a);
  const std::vector<RowRun> table = table_of(a.runs, d.batch, d.q_len);
  CF_TRY(check_cache(a, d, table));
  ConditionSum sum;
  double largest_score = 0;
  Array<double> q(d.head_dim), y(d.head_dim), magnitude(d.head_dim), p(d.seen());
  Rows<double> k, v;
  with_cache_view(a.k_cache, a.page_table, d.window, [&](const auto& cache) {
    const auto widen = [&](const ConstAnyView<4>& from, const RowRun& run, std::int64_t h, std::int64_t first,
                           std::int64_t n, double* to) {
      for_each_rows(cache, run.sequence, d.kv_head(h), first, n, [&](const CacheRows& rows) {
        widen_row(from.data, from.dtype, rows.first, rows.count * d.head_dim, to);
        to += rows.count * d.head_dim;
      });
    };
    for (const RowRun& run : table)
      for (std::int64_t h = 0; h < d.heads; ++h)
        for (std::int64_t i = 0; i < run.count; ++i) {
          const std::int64_t row = ((run.first_row + i) * d.heads + h) * d.head_dim;
          const std::int64_t visible = cache.visible_entries(a.kv_len.data[run.sequence], int(run.count), int(i));
          if (visible == 0) continue;
          k.resize(d.seen(), d.head_dim);
          v.resize(d.seen(), d.head_dim);
          std::int64_t seen = 0;
          for_each_seen(d.window, visible, [&](std::int64_t first, std::int64_t n) {
            widen(a.k_cache, run, h, first, n, k.data() + seen * d.head_dim);
            widen(a.v_cache, run, h, first, n, v.data() + seen * d.head_dim);
            const ConstAnyView<3>& from = first < d.window.sinks ? a.q_sinks : a.q;
            widen_row(from.data, from.dtype, row, d.head_dim, q.data());
            for (std::int64_t j = seen; j < seen + n; ++j) {
              double s = 0;
              for (std::int64_t c = 0; c < d.head_dim; ++c) {
                s += k(j, c) * q[c];
                largest_score = std::max(largest_score, std::abs(s) * a.scale);
              }
              p[j] = s * a.scale;
            }
            seen += n;
          });
          Eigen::Map<Array<double>> weights(p.data(), seen);
          softmax<double>(weights);
          y = (v.topRows(seen).transpose() * weights.matrix()).array();
          magnitude = (v.topRows(seen).cwiseAbs().transpose() * weights.matrix()).array();
          for (std::int64_t c = 0; c < d.head_dim; ++c) sum.add(magnitude[c], y[c]);
        }
  });
  const double scores = largest_score * (std::sqrt(double(d.head_dim)) + 2) / std::sqrt(double(d.seen()));
  const Condition values = sum.value();
  return Condition{values.l2 * (1 + scores), values.max * (1 + scores)};
}

}  // namespace cf::cpu_ref
