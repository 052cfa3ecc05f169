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

void TensorCheck::refuse(std::string message) {
  if (status_) status_ = bad_argument(op_, std::move(message));
}

void TensorCheck::add(const TensorInfo& t) {
  if (!status_) return;
  const std::string name = quoted(t.name);
  if (!t.data) {
    if (!t.optional) refuse(name + " is null, expected a tensor of shape " + shape_string(t.expected, t.rank));
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
  switch (t.role) {
    case Role::input:
    case Role::output:
    case Role::state: return expect_same(activation_name_, activation_, "activation");
    case Role::weight: return expect_same(weight_name_, weight_, "weight");
    case Role::table:
      if (t.dtype != DType::f32) refuse(name + " has dtype " + std::string(to_string(t.dtype)) + ", expected float32");
      return;
    case Role::index:
      if (t.dtype != DType::i32) refuse(name + " has dtype " + std::string(to_string(t.dtype)) + ", expected int32");
      return;
    case Role::gptq: return;  // their views have no other dtype
  }
}

}  // namespace cf
