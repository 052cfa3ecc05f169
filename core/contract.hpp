#pragma once
// What every op's contract is made of. An op is a struct in core/ops/<op>.hpp with
//   name                      its one name, everywhere
//   Dims                      the sizes that its shapes are made of
//   Args                      views and scalars, shapes as trailing comments; Args::Op leads back to the op
//   dims(args)                the sizes, read off the arguments
//   tensors(dims, args, f)    f(spec, view, shape) for each tensor (core/tensor_spec.hpp): the one list that checks,
//                             tests, golden files and benchmarks read
//   check(args)               what every backend calls before it reads or writes a tensor
//   cost(dims, activation, weight)   the bytes that must move and the flops that must be done
//   budget(dims, precision, condition)   the error bound against the oracle
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/status.hpp"
#include "core/tensor_spec.hpp"
#include "core/view.hpp"

namespace cf {

/// The compulsory traffic and arithmetic of one call: each input read once, each output written once.
struct Cost {
  double bytes = 0;
  double flops = 0;
  Cost& operator+=(const Cost& o) {
    bytes += o.bytes;
    flops += o.flops;
    return *this;
  }
};

/// The types that a backend computes in and stores its outputs in.
struct Precision {
  DType compute;
  DType output;
};

/// The ratio of a reduction's largest partial sums to its result, for given inputs. Relative to the result, rounding
/// errors inside the sum are larger by this factor. It is 1 where nothing cancels. cpu_ref::condition() measures it.
struct Condition {
  double l2 = 1;   // ||largest partial sums|| / ||result||
  double max = 1;  // the largest partial sum / the largest result
};

/// An error bound of one output against the oracle.
struct Budget {
  double rel_l2 = 0;   // ||error||_2 <= rel_l2 * ||reference||_2
  double rel_max = 0;  // max |error| <= rel_max * max |reference|
  Budget& operator+=(const Budget& o) {
    rel_l2 += o.rel_l2;
    rel_max += o.rel_max;
    return *this;
  }
};

/// The bound of an output that sums `terms` products. Summation in working precision makes an error of at most
/// u * sum_j |s_j| over the partial sums s_j (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). Rounding
/// errors being independent, they add in quadrature: u * sqrt(terms) * max_j |s_j|, which is what `condition` scales.
/// The largest of many such errors stays within four standard deviations. One rounding to the output's dtype is added.
Budget reduction_budget(std::int64_t terms, Precision precision, Condition condition);

/// A tensor as the contract's checks see it.
struct TensorInfo {
  TensorSpec spec;
  const void* data;
  DType dtype;
  const std::int64_t* shape;
  const std::int64_t* expected;
  int rank;
};

/// Checks one op's tensors: each is there, aligned, of its role's dtype and of the expected shape. status() has the
/// first fault.
class TensorCheck {
 public:
  explicit TensorCheck(std::string_view op) : op_(op) {}

  template <class View>
  void operator()(const TensorSpec& spec, const View& v, std::array<std::int64_t, View::rank> expected) {
    // A variable, since nvcc does not parse the list as add()'s argument.
    const TensorInfo tensor{spec, v.data, v.dtype, v.shape.data(), expected.data(), View::rank};
    add(tensor);
  }
  const Status& status() const { return status_; }

 private:
  void add(const TensorInfo&);
  void refuse(std::string message);

  std::string op_;
  Status status_;
  std::string activation_name_, weight_name_;
  DType activation_ = DType::f32, weight_ = DType::f32;
};

/// The refusal of an op's argument: "<op>: <what>".
Status bad_argument(std::string_view op, std::string what, SourceLocation at = SourceLocation::current());

/// Refuses query heads that kv_heads does not divide: in grouped-query attention all kv heads have the same number of
/// query heads.
Status check_kv_heads(std::string_view op, std::int64_t heads, std::int64_t kv_heads);

/// Checks every tensor that Op::tensors lists.
template <class Op>
Status check_tensors(const typename Op::Args& args) {
  TensorCheck check(Op::name);
  Op::tensors(Op::dims(args), args, check);
  return check.status();
}

}  // namespace cf
