#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

namespace cf {

/// IEEE binary16 and bfloat16 as stored bits, layout-compatible with CUDA's `__half` and `__nv_bfloat16`.
struct f16 {
  std::uint16_t bits;
};
struct bf16 {
  std::uint16_t bits;
};

/// Element types. f64 belongs to the oracle, i32 to positions, lengths and token ids.
enum class DType : std::uint8_t { f16, bf16, f32, f64, i32 };

constexpr std::size_t size_bytes(DType d) {
  switch (d) {
    case DType::f16:
    case DType::bf16: return 2;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f64: return 8;
  }
  return 0;
}

/// Unit roundoff u: rounding to nearest changes a value by at most u times itself.
constexpr double unit_roundoff(DType d) {
  switch (d) {
    case DType::f16: return 0x1p-11;
    case DType::bf16: return 0x1p-8;
    case DType::f32: return 0x1p-24;
    case DType::f64: return 0x1p-53;
    case DType::i32: return 0;
  }
  return 0;
}

constexpr std::string_view to_string(DType d) {
  switch (d) {
    case DType::f16: return "float16";
    case DType::bf16: return "bfloat16";
    case DType::f32: return "float32";
    case DType::f64: return "float64";
    case DType::i32: return "int32";
  }
  return "?";
}

/// The inverse of to_string; empty for any other name.
constexpr std::optional<DType> dtype_from_string(std::string_view name) {
  for (DType d : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32})
    if (to_string(d) == name) return d;
  return std::nullopt;
}

template <class T>
struct dtype_of_t;
template <>
struct dtype_of_t<f16> {
  static constexpr DType value = DType::f16;
};
template <>
struct dtype_of_t<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of_t<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of_t<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of_t<std::int32_t> {
  static constexpr DType value = DType::i32;
};
template <class T>
inline constexpr DType dtype_of = dtype_of_t<std::remove_const_t<T>>::value;

namespace detail {

/// Rounds to a 16-bit float of the given mantissa width, to nearest even, straight from double: going through float
/// would round twice.
template <int MantissaBits>
constexpr std::uint16_t encode16(double x) {
  constexpr int exponent_bits = 15 - MantissaBits, bias = (1 << (exponent_bits - 1)) - 1, min_exponent = 1 - bias;
  constexpr std::uint16_t infinity = std::uint16_t(((1 << exponent_bits) - 1) << MantissaBits);
  const auto bits = std::bit_cast<std::uint64_t>(x);
  const auto sign = std::uint16_t(bits >> 63 << 15);
  const int exponent = int(bits >> 52 & 0x7ff) - 1023;
  const std::uint64_t fraction = bits & ((1ull << 52) - 1);
  if (exponent == 1024) return std::uint16_t(sign | infinity | (fraction ? 1u << (MantissaBits - 1) : 0u));
  if (exponent > bias) return std::uint16_t(sign | infinity);
  if (exponent < min_exponent - MantissaBits - 1) return sign;
  const int shift = 52 - MantissaBits + (exponent < min_exponent ? min_exponent - exponent : 0);
  const std::uint64_t significand = fraction | 1ull << 52, half = 1ull << (shift - 1);
  const std::uint64_t rest = significand & ((half << 1) - 1);
  std::uint64_t q = significand >> shift;
  q += rest > half || (rest == half && (q & 1));
  // A carry out of the mantissa moves into the exponent by itself, up to infinity.
  if (exponent >= min_exponent) q += std::uint64_t(exponent + bias - 1) << MantissaBits;
  return std::uint16_t(sign | q);
}

template <int MantissaBits>
constexpr float decode16(std::uint16_t bits) {
  constexpr int exponent_bits = 15 - MantissaBits, bias = (1 << (exponent_bits - 1)) - 1;
  const std::uint32_t sign = std::uint32_t(bits >> 15) << 31, fraction = bits & ((1u << MantissaBits) - 1);
  const std::uint32_t exponent = bits >> MantissaBits & ((1u << exponent_bits) - 1);
  if (exponent == (1u << exponent_bits) - 1)
    return std::bit_cast<float>(sign | 0x7f800000u | fraction << (23 - MantissaBits));
  if (exponent == 0) {
    // Subnormal: fraction * 2^(1 - bias - MantissaBits), exact in float (for bfloat16 it is float's own subnormal).
    if constexpr (exponent_bits == 8) return std::bit_cast<float>(sign | fraction << (23 - MantissaBits));
    constexpr float step = std::bit_cast<float>(std::uint32_t(127 + 1 - bias - MantissaBits) << 23 & 0x7f800000u);
    return (sign ? -1.f : 1.f) * float(fraction) * step;
  }
  return std::bit_cast<float>(sign | (exponent + 127 - bias) << 23 | fraction << (23 - MantissaBits));
}

}  // namespace detail

/// Exact widening of a stored value to the arithmetic type Real (float or double).
template <class Real, class T>
constexpr Real widen(T x) {
  return Real(x);
}
template <class Real>
constexpr Real widen(f16 x) {
  return Real(detail::decode16<10>(x.bits));
}
template <class Real>
constexpr Real widen(bf16 x) {
  return Real(detail::decode16<7>(x.bits));
}

/// Rounds once, to nearest even, to the stored type T.
template <class T>
constexpr T narrow(double x) {
  if constexpr (dtype_of<T> == DType::f16)
    return f16{detail::encode16<10>(x)};
  else if constexpr (dtype_of<T> == DType::bf16)
    return bf16{detail::encode16<7>(x)};
  else
    return T(x);
}

/// Calls f with a value-initialised object of the C++ type behind a floating-point dtype; `false` for i32.
template <class F>
constexpr bool dispatch_float(DType d, F&& f) {
  switch (d) {
    case DType::f16: f(f16{}); return true;
    case DType::bf16: f(bf16{}); return true;
    case DType::f32: f(float{}); return true;
    case DType::f64: f(double{}); return true;
    case DType::i32: return false;
  }
  return false;
}

}  // namespace cf
