#include "core/compare.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace cf {
namespace {

/// The distance between float16 numbers at x: 2^(e - 10) where 2^e <= |x| < 2^(e + 1), and 2^-24 among the subnormals.
double ulp16(double x) {
  const int exponent = x == 0 ? -14 : std::max(std::ilogb(x), -14);
  return std::ldexp(1.0, exponent - 10);
}

std::string coordinate(std::int64_t i, const Shape& shape) {
  std::string s;
  for (std::size_t d = shape.size(); d-- > 0; i /= shape[d])
    s = std::to_string(i % shape[d]) + (s.empty() ? "" : ", ") + s;
  return "[" + s + "]";
}

}  // namespace

Result<Comparison> compare(const Tensor& got, const Tensor& reference) {
  if (got.shape() != reference.shape())
    return Status::error(Code::invalid_argument,
                         "shapes differ: got " + to_string(got.shape()) + ", expected " + to_string(reference.shape()));
  Comparison c;
  double error2 = 0, norm2 = 0, largest = 0, sum = 0;
  std::vector<double> ulps;
  ulps.reserve(std::size_t(got.size()));
  for (std::int64_t i = 0; i < got.size(); ++i) {
    const double g = got.at(i), r = reference.at(i);
    if (!std::isfinite(g)) {
      if (c.non_finite++ == 0) c.worst = i;
      continue;
    }
    const double e = g - r;
    if (std::abs(e) > c.max_abs) {
      c.max_abs = std::abs(e);
      if (c.non_finite == 0) c.worst = i;
    }
    error2 += e * e;
    norm2 += r * r;
    sum += e;
    largest = std::max(largest, std::abs(r));
    ulps.push_back(std::abs(e) / ulp16(r));
  }
  const auto ratio = [](double e, double n) { return e == 0 ? 0 : e / n; };
  c.rel_l2 = ratio(std::sqrt(error2), std::sqrt(norm2));
  c.rel_max = ratio(c.max_abs, largest);
  if (!ulps.empty()) {
    c.mean_signed = sum / double(ulps.size());
    const auto percentile = [&](double p) {
      const auto k = ulps.begin() + std::ptrdiff_t(p * double(ulps.size() - 1));
      std::nth_element(ulps.begin(), k, ulps.end());
      return *k;
    };
    c.ulp_p50 = percentile(0.5);
    c.ulp_p99 = percentile(0.99);
    c.ulp_max = *std::max_element(ulps.begin(), ulps.end());
  }
  if (got.size() > 0) {
    c.worst_coordinate = coordinate(c.worst, got.shape());
    c.worst_got = got.at(c.worst);
    c.worst_reference = reference.at(c.worst);
  }
  return c;
}

}  // namespace cf
