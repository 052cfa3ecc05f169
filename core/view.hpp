#pragma once
#include <array>
#include <cstdint>
#include <type_traits>

#include "core/dtype.hpp"

namespace cf {

/// A contiguous, row-major, non-owning block of memory, on the host or on a device.
template <class T, int Rank>
struct View {
  static constexpr int rank = Rank;
  using element = T;

  T* data = nullptr;
  std::array<std::int64_t, Rank> shape{};

  constexpr std::int64_t size() const {
    std::int64_t n = 1;
    for (std::int64_t d : shape) n *= d;
    return n;
  }
  static constexpr DType dtype = dtype_of<T>;
  std::int64_t bytes() const { return size() * std::int64_t(size_bytes(dtype)); }
  explicit constexpr operator bool() const { return data != nullptr; }
  template <class U>
  requires(!std::is_const_v<T> && std::is_same_v<U, const T>) constexpr operator View<U, Rank>() const {
    return {data, shape};
  }
};

/// The same with an element type that is known at run time: `View<void, 2>`, or `View<const void, 2>` to read only.
template <class V, int Rank>
requires std::is_void_v<V>
struct View<V, Rank> {
  static constexpr int rank = Rank;
  using element = V;

  V* data = nullptr;
  std::array<std::int64_t, Rank> shape{};
  DType dtype = DType::f32;

  constexpr View() = default;
  constexpr View(V* d, std::array<std::int64_t, Rank> s, DType t) : data(d), shape(s), dtype(t) {}
  template <class T>
  requires(!std::is_void_v<T> && (std::is_const_v<V> || !std::is_const_v<T>)) constexpr View(View<T, Rank> v)
      : data(v.data), shape(v.shape), dtype(dtype_of<T>) {}

  constexpr std::int64_t size() const {
    std::int64_t n = 1;
    for (std::int64_t d : shape) n *= d;
    return n;
  }
  std::int64_t bytes() const { return size() * std::int64_t(size_bytes(dtype)); }
  explicit constexpr operator bool() const { return data != nullptr; }
  template <class U>
  requires(!std::is_const_v<V> && std::is_same_v<U, const void>) constexpr operator View<U, Rank>() const {
    return {data, shape, dtype};
  }

  /// The view with element type T. `dtype` must be T's, which every op's check() makes sure of.
  template <class T>
  View<T, Rank> as() const {
    return {static_cast<T*>(data), shape};
  }
};

template <int Rank>
using AnyView = View<void, Rank>;
template <int Rank>
using ConstAnyView = View<const void, Rank>;

/// The dtype of a view type's elements where it is fixed at compile time, else `otherwise`.
template <class V>
constexpr DType dtype_of_view(DType otherwise) {
  if constexpr (std::is_void_v<std::remove_const_t<typename V::element>>)
    return otherwise;
  else
    return V::dtype;
}

/// Sets a view's pointer and shape, and its dtype where that is not fixed at compile time.
template <class V>
void point(V& view, std::conditional_t<std::is_const_v<typename V::element>, const void, void>* data,
           std::array<std::int64_t, V::rank> shape, DType dtype) {
  view.data = static_cast<typename V::element*>(data);
  view.shape = shape;
  if constexpr (std::is_void_v<std::remove_const_t<typename V::element>>) view.dtype = dtype;
}

/// The same elements under another shape of the same size.
template <int To, class V, int From>
constexpr View<V, To> reshape(View<V, From> v, std::array<std::int64_t, To> shape) {
  View<V, To> r;
  r.data = v.data;
  r.shape = shape;
  if constexpr (std::is_void_v<V>) r.dtype = v.dtype;
  return r;
}

}  // namespace cf
