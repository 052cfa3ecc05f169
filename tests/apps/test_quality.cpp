#include <algorithm>
#include <cmath>
#include <vector>

#include "apps/verify/quality.hpp"
#include "tests/support/catch.hpp"

namespace {

using namespace cf::apps;
using Row = std::vector<double>;

Row log_of(Row p) {
  for (double& v : p) v = std::log(v);
  return p;
}

}  // namespace

TEST_CASE("quality: perplexity is the inverse of the geometric mean of the ids' probabilities", "[quality]") {
  Quality q;
  // A constant added to all logits changes nothing.
  Row shifted = log_of({0.5, 0.25, 0.25});
  for (double& v : shifted) v += 700;
  q.add({.values = shifted}, 0);
  q.add({.values = log_of({0.125, 0.75, 0.125})}, 2);
  CHECK(q.positions == 2);
  CHECK(q.perplexity().mean == Approx(4));
  // Of log 2 and log 8 the deviation is log 4 / sqrt 2, and the mean's error log 2.
  CHECK(q.perplexity().error == Approx(4 * std::log(2.0)));
  CHECK_FALSE(q.divergence);
}

TEST_CASE("quality: the divergence from a reference, by position", "[quality]") {
  Quality q;
  const Row p = log_of({0.5, 0.3, 0.2}), r = log_of({0.3, 0.5, 0.2});
  q.add({.values = p}, 0, {.values = p});
  q.add({.values = r}, 0, {.values = p});
  REQUIRE(q.divergence);
  const Divergence& d = *q.divergence;
  CHECK(d.kl[0] == Approx(0).margin(1e-15));
  CHECK(d.kl[1] == Approx(0.5 * std::log(0.5 / 0.3) + 0.3 * std::log(0.3 / 0.5)));
  CHECK(d.probability_change[1] == Approx(-0.2));
  CHECK(d.top_1 == 1);
  CHECK(d.top_5 == Approx(2));
  CHECK(d.diverged == 1);
  CHECK(d.margin == Approx(std::log(0.5 / 0.3)));
  CHECK(d.logits == 6);
  CHECK(d.largest == Approx(std::log(0.5 / 0.3)));
  CHECK(d.absolute == Approx(2 * std::log(0.5 / 0.3)));
  CHECK(mean_of(q.nll_change).mean == Approx(std::log(0.5 / 0.3) / 2));
  CHECK(q.reference_perplexity().mean == Approx(2));
}

TEST_CASE("quality: a reference's largest logits with the log of the sum stand for all", "[quality]") {
  Row p, mine;
  double p_total = 0, q_total = 0;
  for (int i = 0; i < 40; ++i) {
    p.push_back(std::sin(i * 1.3) * 3);
    mine.push_back(p.back() + 0.1 * std::cos(i * 0.7));
    p_total += std::exp(p.back());
    q_total += std::exp(mine.back());
  }
  // The twelve largest.
  std::vector<std::int32_t> ids;
  Row values;
  for (int rank = 0; rank < 12; ++rank) {
    std::int32_t best = -1;
    for (std::int32_t i = 0; i < 40; ++i)
      if (std::find(ids.begin(), ids.end(), i) == ids.end() && (best < 0 || p[std::size_t(i)] > p[std::size_t(best)]))
        best = i;
    ids.push_back(best);
    values.push_back(p[std::size_t(best)]);
  }
  double expected = 0, p_rest = 1, q_rest = 1;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const double a = std::exp(values[i]) / p_total, b = std::exp(mine[std::size_t(ids[i])]) / q_total;
    expected += a * std::log(a / b);
    p_rest -= a;
    q_rest -= b;
  }
  expected += p_rest * std::log(p_rest / q_rest);
  Quality all, few;
  all.add({.values = mine}, ids[3], {.values = p});
  few.add({.values = mine}, ids[3], {.values = values, .ids = ids, .log_sum_exp = std::log(p_total)});
  CHECK(few.divergence->kl[0] == Approx(expected));
  CHECK(few.divergence->kl[0] <= all.divergence->kl[0]);
  CHECK(few.reference_nll == std::vector<double>{all.reference_nll[0]});
  CHECK(few.divergence->top_1 == all.divergence->top_1);
  CHECK(few.divergence->top_10 == Approx(all.divergence->top_10));
  // What the reference leaves out has no probability there.
  std::int32_t left_out = 0;
  while (std::find(ids.begin(), ids.end(), left_out) != ids.end()) ++left_out;
  few.add({.values = mine}, left_out, {.values = values, .ids = ids, .log_sum_exp = std::log(p_total)});
  CHECK(few.nll.size() == 2);
  CHECK(few.reference_nll.size() == 1);
  // Our own row may hold the same ids alone.
  Row our_values;
  for (std::int32_t id : ids) our_values.push_back(mine[std::size_t(id)]);
  Quality both;
  both.add({.values = our_values, .ids = ids, .log_sum_exp = std::log(q_total)}, ids[3],
           {.values = values, .ids = ids, .log_sum_exp = std::log(p_total)});
  CHECK(both.divergence->kl[0] == Approx(expected));
  CHECK(both.nll[0] == Approx(few.nll[0]));
  both.add({.values = our_values, .ids = ids, .log_sum_exp = std::log(q_total)}, left_out);
  CHECK(both.positions == 2);
  CHECK(both.nll.size() == 1);
}

TEST_CASE("quality: of equal logits the lowest id is the most likely one", "[quality]") {
  CHECK(best_id(Row{1, 3, 3, 2}) == 1);
  Quality q;
  q.add({.values = Row{0, 1, 1}}, 0, {.values = Row{0, 1, 1}});
  CHECK(q.divergence->top_1 == 1);
  q.add({.values = Row{0, 1, 1}}, 0, {.values = Row{0, 1, 1.5}});
  CHECK(q.divergence->diverged == 1);
  CHECK(q.divergence->margin == Approx(0.5));
}
