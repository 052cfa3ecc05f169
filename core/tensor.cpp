#include "core/tensor.hpp"

#include <cstring>
#include <new>
#include <string>
#include <type_traits>

namespace cf {
namespace {
constexpr std::size_t kAlignment = 64;
}

std::int64_t element_count(const Shape& shape) {
  std::int64_t n = 1;
  for (std::int64_t d : shape) n *= d;
  return n;
}

std::string to_string(const Shape& shape) {
  std::string s = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + ")";
}

void Tensor::Free::operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{kAlignment}); }

Tensor::Tensor(DType dtype, Shape shape) : dtype_(dtype), shape_(std::move(shape)), size_(element_count(shape_)) {
  // One cache line more than needed, so that an empty tensor has an address, too.
  const std::size_t bytes = std::size_t(size_bytes()) + kAlignment;
  data_.reset(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{kAlignment})));
  std::memset(data_.get(), 0, bytes);
}

Tensor Tensor::clone() const {
  Tensor t(dtype_, shape_);
  std::memcpy(t.data(), data(), std::size_t(size_bytes()));
  return t;
}

Tensor Tensor::converted(DType to) const {
  Tensor t(to, shape_);
  convert(data(), dtype_, t.data(), to, size_);
  return t;
}

double Tensor::at(std::int64_t i) const { return load_element(data(), dtype_, i); }

double load_element(const void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::i32) return static_cast<const std::int32_t*>(data)[i];
  double x = 0;
  dispatch_float(dtype, [&](auto zero) { x = widen<double>(static_cast<const decltype(zero)*>(data)[i]); });
  return x;
}

void convert(const void* from, DType from_dtype, void* to, DType to_dtype, std::int64_t n) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, std::size_t(n) * size_bytes(to_dtype));
    return;
  }
  dispatch_float(from_dtype, [&](auto source) {
    dispatch_float(to_dtype, [&](auto target) {
      using From = decltype(source);
      using To = decltype(target);
      const From* in = static_cast<const From*>(from);
      To* out = static_cast<To*>(to);
      for (std::int64_t i = 0; i < n; ++i) out[i] = narrow<To>(widen<double>(in[i]));
    });
  });
}

}  // namespace cf
