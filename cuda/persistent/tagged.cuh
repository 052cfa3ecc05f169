#pragma once
// Loads and stores of values with their tags (protocol.hpp).
#include "cuda/device/sync.cuh"
#include "cuda/persistent/protocol.hpp"

namespace cf::cuda {

__device__ inline std::uint64_t tagged_bits(float value, unsigned tag) {
  return std::uint64_t(tag) << 32 | __float_as_uint(value);
}
__device__ inline Tagged tagged(std::uint64_t bits) { return {__uint_as_float(unsigned(bits)), unsigned(bits >> 32)}; }

__device__ inline void store_tagged(Tagged* to, float value, unsigned tag) {
  store_relaxed(reinterpret_cast<std::uint64_t*>(to), tagged_bits(value, tag));
}
/// Loads two neighbouring values. Their address is a multiple of 16.
__device__ inline void load_tagged(const Tagged* from, Tagged (&two)[2]) {
  const ulonglong2 bits = load_relaxed(reinterpret_cast<const std::uint64_t*>(from));
  two[0] = tagged(bits.x), two[1] = tagged(bits.y);
}

template <class T>
__device__ void store_tagged(TaggedElement* to, T value, unsigned tag) {
  store_relaxed(to, std::uint32_t(value.bits) | tag << 16);
}
__device__ inline bool has_tag(TaggedElement e, unsigned tag) { return e >> 16 == (tag & 0xffff); }
/// True where all four elements have the tag.
__device__ inline bool have_tag(const uint4& e, unsigned tag) {
  const unsigned t = tag << 16;
  return (((e.x ^ t) | (e.y ^ t)) | ((e.z ^ t) | (e.w ^ t))) < 0x10000;
}

/// Rounds half away from zero. An infinity stays one, and a NaN a NaN.
__device__ inline TaggedNormInput tagged_norm_input(float value, unsigned tag) {
  const unsigned bits = __float_as_uint(value), rounded = isnan(value) ? 0x7fc00000u : bits + 0x80u;
  return (rounded & ~0xffu) | (tag & 0xffu);
}
__device__ inline float norm_input(TaggedNormInput word) { return __uint_as_float(word & ~0xffu); }
/// True where the lowest eight bits of each of the four words are those of the tag.
__device__ inline bool have_norm_tag(const uint4& words, unsigned tag) {
  return ((((words.x ^ tag) | (words.y ^ tag)) | ((words.z ^ tag) | (words.w ^ tag))) & 0xffu) == 0;
}

}  // namespace cf::cuda
