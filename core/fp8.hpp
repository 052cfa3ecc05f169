#pragma once
#include <bit>
#include <cstdint>
#include <string_view>

#include "core/contract.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"
#include "core/weights.hpp"

namespace cf {

/// A float8 with 4 bits of exponent and 3 of mantissa as stored bits: torch.float8_e4m3fn, "F8_E4M3" in safetensors.
/// Bits 6 to 3 are the exponent field e, bits 2 to 0 the mantissa m, and bit 7 is the sign. The value is
/// +-(8 + m) 2^(e - 10) where e > 0, and +-m 2^-9 where e = 0. The largest is 448.
/// There is no infinity; 0x7f and 0xff are NaN. Source: Micikevicius et al. 2022 (arXiv:2209.05433).
struct e4m3 {
  std::uint8_t bits;
};

constexpr bool is_nan(e4m3 x) { return (x.bits & 0x7f) == 0x7f; }

/// Exact, but for NaN, which becomes +-480.
template <class Real>
constexpr Real widen(e4m3 x) {
  // The exponent's 4 bits are the lowest of a float's 8, whose bias is larger by 120.
  const std::uint32_t bits = std::uint32_t(x.bits & 0x80) << 24 | std::uint32_t(x.bits & 0x7f) << 20;
  return Real(std::bit_cast<float>(bits) * 0x1p120f);
}

/// A matrix of float8 numbers, as published checkpoints have it once its scales are spread over its rows:
///   W[n,k] = codes[n,k] * scales[n, k / group_size]
/// A scale a channel is one group of all inputs. Of blocks of 128 x 128 the groups have 128 inputs, and the 128 rows of
/// a block have the same scale, which is stored for each: in joined matrices the rows of different blocks alternate.
/// Activations are not quantised. A product of a weight and an activation is that of W in the compute type:
/// ops::Linear, whose weight is fp8_of()'s, refuses a group_size below 1 and a block of another size than check_fp8()
/// expects.
struct Fp8Weight {
  std::int64_t out = 0, in = 0;
  std::int64_t group_size = 0;    // the last group may be shorter
  const e4m3* codes = nullptr;    // (out, in)
  const float* scales = nullptr;  // (out, groups)

  constexpr std::int64_t groups() const { return (in + group_size - 1) / group_size; }
};

/// An fp8 matrix travels as a PackedWeight of this packer: `data` is the codes, filled up to a whole word with zeros,
/// and behind them the scales; `format` is 8 bits of fp8 with the group_size.
inline constexpr std::string_view kFp8Packer = "fp8";

/// An fp8 matrix in memory of its own, of zeros at first.
struct OwnedFp8 {
  OwnedFp8(std::int64_t out, std::int64_t in, std::int64_t group_size);

  Fp8Weight view() const;
  e4m3* codes() { return static_cast<e4m3*>(storage.data()); }
  float* scales() { return const_cast<float*>(view().scales); }

  PackedWeight weight;
  Tensor storage;
};

/// An fp8 matrix without values: `data` has its size alone.
PackedWeight fp8_outline(std::int64_t out, std::int64_t in, std::int64_t group_size);

bool is_fp8(const LinearWeight& weight);

/// Refuses a weight of kFp8Packer whose group_size is below 1, or whose `data` has another size than its matrix.
Status check_fp8(std::string_view op, const PackedWeight& weight);

/// The matrix of a weight that check_fp8() accepts.
Fp8Weight fp8_of(const PackedWeight& weight);

}  // namespace cf
