#include "core/contract.hpp"

#include <cmath>

namespace cf {
namespace {

std::string shape_string(const std::int64_t* shape, int rank) {
  std::string s = "(";
  for (int i = 0; i < rank; ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + ")";
}

std::string quoted(std::string_view name) { return std::string("'").append(name).append("'"); }

}  // namespace

Budget reduction_budget(std::int64_t terms, Precision p, Condition c) {
  const double sum = unit_roundoff(p.compute) * std::sqrt(double(terms)), store = unit_roundoff(p.output);
  return {store + sum * c.l2, store + 4 * sum * c.max};
}

Status bad_argument(std::string_view op, std::string what, SourceLocation at) {
  return Status::error(Code::invalid_argument, std::string(op) + ": " + std::move(what), at);
}

Status check_kv_heads(std::string_view op, std::int64_t heads, std::int64_t kv_heads) {
  if (kv_heads >= 1 && heads % kv_heads == 0) return {};
  return bad_argument(
      op, "heads must be a multiple of kv_heads " + std::to_string(kv_heads) + ", got " + std::to_string(heads));
}

void TensorCheck::refuse(std::string message) {
  if (status_) status_ = bad_argument(op_, std::move(message));
}

void TensorCheck::add(const TensorInfo& t) {
  if (!status_) return;
  const std::string name = quoted(t.spec.name);
  if (!t.data) {
    if (!t.spec.optional) refuse(name + " is null, expected a tensor of shape " + shape_string(t.expected, t.rank));
    return;
  }
  for (int i = 0; i < t.rank; ++i)
    if (t.shape[i] != t.expected[i] || t.shape[i] < 1)
      return refuse(name + " has shape " + shape_string(t.shape, t.rank) + ", expected " +
                    (t.expected[i] < 1 ? "sizes of at least 1" : shape_string(t.expected, t.rank)));
  if (reinterpret_cast<std::uintptr_t>(t.data) % size_bytes(t.dtype))
    return refuse(name + " is misaligned, expected a multiple of " + std::to_string(size_bytes(t.dtype)) + " bytes");

  const auto expect_same = [&](std::string& first, DType& dtype, std::string_view kind) {
    if (t.dtype == DType::i32) return refuse(name + " has dtype int32, expected a floating-point " + std::string(kind));
    if (first.empty()) {
      first = name;
      dtype = t.dtype;
    } else if (dtype != t.dtype) {
      refuse(name + " has dtype " + std::string(to_string(t.dtype)) + ", expected " + std::string(to_string(dtype)) +
             " as " + first + " has");
    }
  };
  const auto expect = [&](DType dtype) {
    if (t.dtype != dtype)
      refuse(name + " has dtype " + std::string(to_string(t.dtype)) + ", expected " + std::string(to_string(dtype)));
  };
  const Role role = t.spec.role;
  if (is_activation(role)) expect_same(activation_name_, activation_, "activation");
  if (is_weight(role)) expect_same(weight_name_, weight_, "weight");
  if (is_table(role)) expect(DType::f32);
  if (is_index(role)) expect(DType::i32);
  // Role::gptq: the view's type fixes the dtype.
}

}  // namespace cf
