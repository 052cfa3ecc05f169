#pragma once
// Consecutive elements in registers as float32, loaded and stored with accesses of up to 16 bytes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/dtype.hpp"
#include "cuda/device/address.cuh"

namespace cf::cuda {

inline constexpr int kVec = 8;  // elements of a vector

/// How many elements of T 16 bytes hold.
template <class T>
inline constexpr int kLane = 16 / int(sizeof(T));

// Conversions between floats and stored elements. A 32-bit word holds a pair of 16-bit elements, the first in its low
// half.

/// The two elements of a pair. The last argument's type is the elements' type.
__device__ inline float2 unpack(std::uint32_t pair, f16) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}
__device__ inline float2 unpack(std::uint32_t pair, bf16) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}
/// Converts the elements of 16 bytes to floats.
template <class T>
__device__ void unpack(const uint4& raw, float (&x)[kVec], T type) {
  const std::uint32_t pairs[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = unpack(pairs[i], type);
    x[2 * i] = f.x;
    x[2 * i + 1] = f.y;
  }
}
__device__ inline void unpack(const uint4& raw, float (&x)[4], float) {
  *reinterpret_cast<float4*>(x) = reinterpret_cast<const float4&>(raw);
}

/// Two floats as a pair of T, rounded to nearest even.
template <class T>
__device__ std::uint32_t pack_pair(float first, float second) {
  if constexpr (dtype_of<T> == DType::f16) {
    const __half2 pair = __floats2half2_rn(first, second);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

/// Eight floats as 16 bytes of T, rounded to nearest even.
template <class T>
__device__ uint4 pack_vec(const float (&x)[kVec]) {
  return {pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3]), pack_pair<T>(x[4], x[5]), pack_pair<T>(x[6], x[7])};
}

/// The value of a stored element.
__device__ inline float to_float(f16 x) { return __half2float(reinterpret_cast<const __half&>(x)); }
__device__ inline float to_float(bf16 x) { return __bfloat162float(reinterpret_cast<const __nv_bfloat16&>(x)); }
__device__ inline float to_float(float x) { return x; }

/// A float as an element of T, rounded to nearest even.
template <class T>
__device__ T from_float(float x) {
  if constexpr (dtype_of<T> == DType::f16)
    return {__half_as_ushort(__float2half_rn(x))};
  else if constexpr (dtype_of<T> == DType::bf16)
    return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
  else
    return x;
}

/// Loads 16 bytes as stored.
template <class T>
__device__ uint4 load_raw(const T* p) {
  return *reinterpret_cast<const uint4*>(p);
}

/// x[0..8) = p[0..8), p 16-byte aligned.
template <class T>
__device__ void load_vec(const T* p, float (&x)[kVec]) {
  unpack(*reinterpret_cast<const uint4*>(p), x, T{});
}
template <>
__device__ inline void load_vec(const float* p, float (&x)[kVec]) {
  *reinterpret_cast<float4*>(x) = *reinterpret_cast<const float4*>(p);
  *reinterpret_cast<float4*>(x + 4) = *reinterpret_cast<const float4*>(p + 4);
}
/// p[0..8) = x[0..8), rounded to nearest even; p 16-byte aligned.
template <class T>
__device__ void store_vec(T* p, const float (&x)[kVec]) {
  *reinterpret_cast<uint4*>(p) = pack_vec<T>(x);
}
template <>
__device__ inline void store_vec(float* p, const float (&x)[kVec]) {
  *reinterpret_cast<float4*>(p) = *reinterpret_cast<const float4*>(x);
  *reinterpret_cast<float4*>(p + 4) = *reinterpret_cast<const float4*>(x + 4);
}
__device__ inline void store_vec(float* p, const float (&x)[4]) {
  *reinterpret_cast<float4*>(p) = *reinterpret_cast<const float4*>(x);
}

/// store_vec() to device memory in exactly one access. The compiler may split the access of store_vec() where it cannot
/// prove the address's alignment.
template <class T>
__device__ void store_vec_whole(T* p, const float (&x)[kVec]) {
  static_assert(sizeof(T) == 2);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
               "r"(pack_pair<T>(x[0], x[1])), "r"(pack_pair<T>(x[2], x[3])), "r"(pack_pair<T>(x[4], x[5])),
               "r"(pack_pair<T>(x[6], x[7]))
               : "memory");
}
/// Stores two floats to shared memory in exactly one access. The address is a multiple of eight bytes.
__device__ inline void store_pair_shared(float* p, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared_address(p)), "f"(first), "f"(second) : "memory");
}

/// x[0..N) += p[0..N). N is 1, 2 or 4; p is aligned to N elements.
template <int N>
__device__ void add_few(const float* p, float (&x)[N]) {
  alignas(16) float v[N];
  if constexpr (N == 1) v[0] = *p;
  if constexpr (N == 2) *reinterpret_cast<float2*>(v) = *reinterpret_cast<const float2*>(p);
  if constexpr (N == 4) *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(p);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] += v[i];
}

/// p[0..N) = x[0..N), rounded to nearest even; elements of 16 bits, p aligned to N of them.
template <class T>
__device__ void store_few(T* p, const float (&x)[1]) {
  *p = from_float<T>(x[0]);
}
template <class T>
__device__ void store_few(T* p, const float (&x)[2]) {
  *reinterpret_cast<std::uint32_t*>(p) = pack_pair<T>(x[0], x[1]);
}
template <class T>
__device__ void store_few(T* p, const float (&x)[4]) {
  *reinterpret_cast<uint2*>(p) = {pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3])};
}

/// x[0..8) = p[i..i + 8) of a dtype that is known at run time. All threads of a launch take the same branch.
__device__ inline void load_vec(const void* p, DType dtype, long i, float (&x)[kVec]) {
  if (dtype == DType::f16)
    load_vec(static_cast<const f16*>(p) + i, x);
  else if (dtype == DType::bf16)
    load_vec(static_cast<const bf16*>(p) + i, x);
  else
    load_vec(static_cast<const float*>(p) + i, x);
}

/// Calls f with a value of the type behind a dtype.
template <class F>
__device__ void with_weight(DType dtype, F f) {
  if (dtype == DType::f16)
    f(f16{});
  else if (dtype == DType::bf16)
    f(bf16{});
  else
    f(float{});
}

/// N elements as stored. Nothing waits for their load until unpack() converts them.
template <int N>
struct StoredWeight {
  alignas(16) std::uint32_t words[N];

  template <class T>
  __device__ void load(const T* p) {
    if constexpr (N * sizeof(T) == 4) {
      words[0] = *reinterpret_cast<const std::uint32_t*>(p);
    } else if constexpr (N * sizeof(T) == 8) {
      *reinterpret_cast<uint2*>(words) = *reinterpret_cast<const uint2*>(p);
    } else {
#pragma unroll
      for (int i = 0; i < N * int(sizeof(T)) / 16; ++i)
        reinterpret_cast<uint4*>(words)[i] = reinterpret_cast<const uint4*>(p)[i];
    }
  }
  template <class T>
  __device__ void unpack(float (&x)[N], T type) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (sizeof(T) == 4) {
        x[i] = __uint_as_float(words[i]);
      } else {
        const float2 f = cf::cuda::unpack(words[i / 2], type);
        x[i] = i % 2 ? f.y : f.x;
      }
    }
  }
};

/// The bits of element i. Nothing waits for the load until from_bits() converts them.
__device__ inline std::uint32_t load_bits(const void* p, DType dtype, long i) {
  if (dtype == DType::f32) return static_cast<const std::uint32_t*>(p)[i];
  return static_cast<const std::uint16_t*>(p)[i];
}
/// The value of an element's bits.
__device__ inline float from_bits(std::uint32_t bits, DType dtype) {
  if (dtype == DType::f32) return __uint_as_float(bits);
  return dtype == DType::f16 ? to_float(f16{std::uint16_t(bits)}) : to_float(bf16{std::uint16_t(bits)});
}
/// Element i = v, rounded to nearest even.
__device__ inline void store_scalar(void* p, DType dtype, long i, float v) {
  if (dtype == DType::f16)
    static_cast<f16*>(p)[i] = from_float<f16>(v);
  else if (dtype == DType::bf16)
    static_cast<bf16*>(p)[i] = from_float<bf16>(v);
  else
    static_cast<float*>(p)[i] = v;
}

/// a - b of two pairs of 16-bit numbers, each rounded once.
__device__ inline std::uint32_t difference(std::uint32_t a, std::uint32_t b, f16) {
  std::uint32_t d;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ inline std::uint32_t difference(std::uint32_t a, std::uint32_t b, bf16) {
  std::uint32_t d;
  asm("sub.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

/// word & mask | bits, in one instruction. The compiler makes two of it where both constants would be immediates.
__device__ inline std::uint32_t and_or(std::uint32_t word, std::uint32_t mask, std::uint32_t bits) {
  std::uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(word), "r"(mask), "r"(bits));
  return d;
}

}  // namespace cf::cuda
