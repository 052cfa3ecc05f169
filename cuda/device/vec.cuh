#pragma once
// Eight consecutive elements in registers as float32, read and written with 16-byte accesses.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/dtype.hpp"

namespace cf::cuda {

inline constexpr int kVec = 8;

/// Elements of T in one access.
template <class T>
inline constexpr int kLane = 16 / int(sizeof(T));

__device__ inline float2 unpack(std::uint32_t pair, f16) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}
__device__ inline float2 unpack(std::uint32_t pair, bf16) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}
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
__device__ inline std::uint32_t pack(float first, float second, f16) {
  const __half2 pair = __floats2half2_rn(first, second);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ inline std::uint32_t pack(float first, float second, bf16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
template <class T>
__device__ void pack(const float (&x)[kVec], uint4& raw, T type) {
  raw = {pack(x[0], x[1], type), pack(x[2], x[3], type), pack(x[4], x[5], type), pack(x[6], x[7], type)};
}
__device__ inline void pack(const float (&x)[4], uint4& raw, float) {
  reinterpret_cast<float4&>(raw) = *reinterpret_cast<const float4*>(x);
}

__device__ inline float to_float(f16 x) { return __half2float(reinterpret_cast<const __half&>(x)); }
__device__ inline float to_float(bf16 x) { return __bfloat162float(reinterpret_cast<const __nv_bfloat16&>(x)); }
__device__ inline float to_float(float x) { return x; }

/// Rounds to nearest even.
template <class T>
__device__ T from_float(float x) {
  if constexpr (dtype_of<T> == DType::f16)
    return {__half_as_ushort(__float2half_rn(x))};
  else if constexpr (dtype_of<T> == DType::bf16)
    return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
  else
    return x;
}

/// 16 bytes as stored.
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
template <class T>
__device__ void store_vec(T* p, const float (&x)[kVec]) {
  uint4 raw;
  pack(x, raw, T{});
  *reinterpret_cast<uint4*>(p) = raw;
}
template <>
__device__ inline void store_vec(float* p, const float (&x)[kVec]) {
  *reinterpret_cast<float4*>(p) = *reinterpret_cast<const float4*>(x);
  *reinterpret_cast<float4*>(p + 4) = *reinterpret_cast<const float4*>(x + 4);
}

__device__ inline void store_vec(float* p, const float (&x)[4]) {
  *reinterpret_cast<float4*>(p) = *reinterpret_cast<const float4*>(x);
}

/// x += p[0..N), N = 1, 2 or 4 and p aligned to all of them.
template <int N>
__device__ void add_few(const float* p, float (&x)[N]) {
  alignas(16) float v[N];
  if constexpr (N == 1) v[0] = *p;
  if constexpr (N == 2) *reinterpret_cast<float2*>(v) = *reinterpret_cast<const float2*>(p);
  if constexpr (N == 4) *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(p);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] += v[i];
}

/// Two or four elements of 16 bits, aligned to all of them.
template <class T>
__device__ void store_few(T* p, const float (&x)[2]) {
  *reinterpret_cast<std::uint32_t*>(p) = pack(x[0], x[1], T{});
}
template <class T>
__device__ void store_few(T* p, const float (&x)[4]) {
  *reinterpret_cast<uint2*>(p) = {pack(x[0], x[1], T{}), pack(x[2], x[3], T{})};
}

/// Eight elements of a weight whose dtype is known at run time; the branch is the same for a whole launch.
__device__ inline void load_vec(const void* p, DType dtype, long i, float (&x)[kVec]) {
  if (dtype == DType::f16)
    load_vec(static_cast<const f16*>(p) + i, x);
  else if (dtype == DType::bf16)
    load_vec(static_cast<const bf16*>(p) + i, x);
  else
    load_vec(static_cast<const float*>(p) + i, x);
}

/// Calls f with a value of the type behind such a dtype.
template <class F>
__device__ void with_weight(DType dtype, F f) {
  if (dtype == DType::f16)
    f(f16{});
  else if (dtype == DType::bf16)
    f(bf16{});
  else
    f(float{});
}

/// N elements of a weight as stored: a load that nothing waits for until they are unpacked.
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

/// One element of such a dtype, as it lies in memory, and its value.
__device__ inline std::uint32_t load_bits(const void* p, DType dtype, long i) {
  if (dtype == DType::f32) return static_cast<const std::uint32_t*>(p)[i];
  return static_cast<const std::uint16_t*>(p)[i];
}
__device__ inline float from_bits(std::uint32_t bits, DType dtype) {
  if (dtype == DType::f32) return __uint_as_float(bits);
  return dtype == DType::f16 ? to_float(f16{std::uint16_t(bits)}) : to_float(bf16{std::uint16_t(bits)});
}
__device__ inline float load_scalar(const void* p, DType dtype, long i) {
  return from_bits(load_bits(p, dtype, i), dtype);
}
__device__ inline void store_scalar(void* p, DType dtype, long i, float v) {
  if (dtype == DType::f16)
    static_cast<f16*>(p)[i] = from_float<f16>(v);
  else if (dtype == DType::bf16)
    static_cast<bf16*>(p)[i] = from_float<bf16>(v);
  else
    static_cast<float*>(p)[i] = v;
}

}  // namespace cf::cuda
