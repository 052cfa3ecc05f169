#pragma once
// What every op's contract is made of. An op is a struct in core/ops/<op>.hpp with
//   name                      its one name, everywhere
//   Dims                      the sizes that its shapes are made of
//   Args                      views and scalars, shapes as trailing comments; Args::Op leads back to the op
//   dims(args)                the sizes, read off the arguments
//   example(config, load)     the sizes for one layer of a model under a workload, with Args that hold the scalars
//   tensors(dims, args, f)    f(role, name, view, shape) for each tensor: the one list that checks, tests, golden
//                             files and benchmarks read
//   check(args)               what a backend asks before it touches anything
//   cost(dims, activation, weight)   the bytes that must move and the flops that must be done
//   budget(dims, precision, condition)   the error bound against the oracle
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/model_config.hpp"
#include "core/status.hpp"
#include "core/view.hpp"

namespace cf {

/// What a tensor is to its op. Inputs, states and outputs share one dtype, the activation's; weights share another.
enum class Role {
  input,   // activations that are read
  output,  // activations that are written, every element
  state,   // activations that are read and written in part: the KV cache
  weight,  // parameters as stored: f16, bf16 or f32 (or f64, for tests)
  table,   // float32 whatever the activations are: cos and sin
  index,   // int32: positions, lengths, token ids
  gptq,    // parts of a quantised weight, each of its one dtype: packed int32 and float16 scales
};

/// A tensor's expected shape, as Op::tensors hands it on.
template <class... Size>
constexpr std::array<std::int64_t, sizeof...(Size)> extents(Size... size) {
  return {std::int64_t(size)...};
}

/// How much work a call is: q_len new tokens for each of batch sequences; kv_len counts a sequence's valid cache
/// entries after the new tokens are appended, so the last new token's position is kv_len - 1.
struct Workload {
  std::int64_t batch = 1;
  std::int64_t q_len = 1;
  std::int64_t kv_len = 1;
  std::int64_t capacity = 0;  // entries that the cache has room for; 0 means kv_len

  std::int64_t tokens() const { return batch * q_len; }
  std::int64_t cache_capacity() const { return capacity ? capacity : kv_len; }
};

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

/// How much larger the partial sums of a reduction are than its result, for the inputs at hand: the factor by which
/// rounding inside the sum shows in the result. 1 where nothing cancels. Measured by cpu_ref::condition().
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
/// The largest of many such errors lies within four of their standard deviations' bound. One rounding to the output's
/// dtype comes on top.
Budget reduction_budget(std::int64_t terms, Precision precision, Condition condition);

/// A tensor as the contract's checks see it.
struct TensorInfo {
  Role role;
  std::string_view name;
  const void* data;
  DType dtype;
  const std::int64_t* shape;
  const std::int64_t* expected;
  int rank;
  bool optional;
};

/// The check of one op's tensors: each is there, aligned, of its role's dtype and of the expected shape. The first
/// fault stays in status().
class TensorCheck {
 public:
  explicit TensorCheck(std::string_view op) : op_(op) {}

  template <class View>
  void operator()(Role role, std::string_view name, const View& v, std::array<std::int64_t, View::rank> expected,
                  bool optional = false) {
    const TensorInfo tensor{role, name, v.data, v.dtype, v.shape.data(), expected.data(), View::rank, optional};
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

/// "layernorm: what", as every contract's refusal reads.
Status bad_argument(std::string_view op, std::string what, SourceLocation at = SourceLocation::current());

/// Checks every tensor that Op::tensors lists.
template <class Op>
Status check_tensors(const typename Op::Args& args) {
  TensorCheck check(Op::name);
  Op::tensors(Op::dims(args), args, check);
  return check.status();
}

}  // namespace cf
