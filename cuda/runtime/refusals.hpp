#pragma once
// What plans refuse. Without CUDA's headers. Private to cuda.
#include <string>
#include <string_view>

#include "core/dtype.hpp"
#include "core/status.hpp"

namespace cf::cuda {

/// Refuses a size that is not a multiple of 8: kernels read 16 bytes at a time, eight elements of a 16-bit type.
inline Status check_multiple_of_8(std::string_view op, std::string_view name, std::int64_t size) {
  if (size % 8 == 0) return {};
  return Status::error(Code::unimplemented, std::string(op) + ": cuda takes " + std::string(name) +
                                                " a multiple of 8, got " + std::to_string(size));
}

/// Refuses weights of another dtype than the activations': tensor cores multiply elements of one dtype.
inline Status check_weight_dtype(std::string_view op, DType activation, DType weight) {
  if (weight == activation) return {};
  return Status::error(Code::unimplemented, std::string(op) + ": cuda takes " + std::string(to_string(activation)) +
                                                " activations with weights of the same dtype, got " +
                                                std::string(to_string(weight)));
}

/// Calls f with the C++ type of a 16- or 32-bit floating-point dtype; anything else is unimplemented.
template <class F>
Status with_activation(std::string_view op, DType dtype, F&& f) {
  switch (dtype) {
    case DType::f16: return f(f16{});
    case DType::bf16: return f(bf16{});
    case DType::f32: return f(float{});
    default:
      return Status::error(Code::unimplemented, std::string(op) +
                                                    ": cuda takes float16, bfloat16 or float32 activations, got " +
                                                    std::string(to_string(dtype)));
  }
}

/// Refuses activations that with_activation() refuses.
inline Status check_activation(std::string_view op, DType dtype) {
  return with_activation(op, dtype, [](auto) { return Status(); });
}

/// Why a kernel leaves a call to others: the kernel is for other calls. It is no refusal of the op's.
inline Status not_taken(std::string_view takes, const std::string& got) {
  return Status::error(Code::not_found, "takes " + std::string(takes) + ", got " + got);
}

}  // namespace cf::cuda
