#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/view.hpp"

namespace cf {

using Shape = std::vector<std::int64_t>;

std::int64_t element_count(const Shape&);

/// Owns a host block of elements: row-major, 64-byte aligned, zero-filled. Copies are explicit, through clone().
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, Shape shape);

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  std::int64_t size() const { return size_; }
  std::int64_t size_bytes() const { return size_ * std::int64_t(cf::size_bytes(dtype_)); }
  explicit operator bool() const { return data_ != nullptr; }

  void* data() { return data_.get(); }
  const void* data() const { return data_.get(); }
  /// The elements as T, which is the type behind dtype().
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_.get());
  }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data_.get());
  }

  /// A view of the whole tensor, which must have this rank.
  template <int Rank>
  AnyView<Rank> view() {
    return {data(), extents<Rank>(), dtype_};
  }
  template <int Rank>
  ConstAnyView<Rank> view() const {
    return {data(), extents<Rank>(), dtype_};
  }

  Tensor clone() const;
  /// Every element converted to `to`, rounded once. Not for i32.
  Tensor converted(DType to) const;
  /// Element i widened to double.
  double at(std::int64_t i) const;

 private:
  template <int Rank>
  std::array<std::int64_t, Rank> extents() const {
    std::array<std::int64_t, Rank> e{};
    for (int i = 0; i < Rank && i < int(shape_.size()); ++i) e[i] = shape_[i];
    return e;
  }
  struct Free {
    void operator()(std::byte*) const;
  };
  DType dtype_ = DType::f32;
  Shape shape_;
  std::int64_t size_ = 0;
  std::unique_ptr<std::byte[], Free> data_;
};

/// Converts n elements from one floating-point dtype to another, rounding once.
void convert(const void* from, DType from_dtype, void* to, DType to_dtype, std::int64_t n);

/// Element i of a block of the given dtype, widened to double.
double load_element(const void* data, DType dtype, std::int64_t i);

/// "(2, 3)", as messages print a shape.
std::string to_string(const Shape&);

}  // namespace cf
