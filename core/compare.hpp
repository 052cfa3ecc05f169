#pragma once
#include <cstdint>
#include <string>

#include "core/contract.hpp"
#include "core/tensor.hpp"

namespace cf {

/// How far `got` is from `reference`, both widened to double.
struct Comparison {
  double max_abs = 0;                            // max |got - reference|
  double rel_l2 = 0;                             // ||got - reference||_2 / ||reference||_2; 0 where both are zero
  double rel_max = 0;                            // max_abs / max |reference|
  double mean_signed = 0;                        // mean of got - reference: a bias shows here
  double ulp_p50 = 0, ulp_p99 = 0, ulp_max = 0;  // |got - reference| in units of float16's last place at the reference
  std::int64_t non_finite = 0;                   // elements of got that are NaN or infinite
  std::int64_t worst = 0;                        // the first non-finite element, else the one of max_abs
  std::string worst_coordinate;                  // its index by dimension, "[1, 0, 17]"
  double worst_got = 0, worst_reference = 0;

  /// Whether the error is inside the budget; never with a non-finite element.
  bool within(const Budget& b) const { return non_finite == 0 && rel_l2 <= b.rel_l2 && rel_max <= b.rel_max; }
};

/// Compares two tensors of the same shape, of any floating-point dtypes. A shape that differs is refused.
Result<Comparison> compare(const Tensor& got, const Tensor& reference);

}  // namespace cf
