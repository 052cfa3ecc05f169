#pragma once
// Eight consecutive elements in registers as float32, read and written with 16-byte accesses.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/dtype.hpp"

namespace cf::cuda {

inline constexpr int kVec = 8;

__device__ inline void unpack(const uint4& raw, float (&x)[kVec], f16) {
  const __half2* h = reinterpret_cast<const __half2*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = __half22float2(h[i]);
    x[2 * i] = f.x;
    x[2 * i + 1] = f.y;
  }
}
__device__ inline void unpack(const uint4& raw, float (&x)[kVec], bf16) {
  const __nv_bfloat162* h = reinterpret_cast<const __nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = __bfloat1622float2(h[i]);
    x[2 * i] = f.x;
    x[2 * i + 1] = f.y;
  }
}
__device__ inline void pack(const float (&x)[kVec], uint4& raw, f16) {
  __half2* h = reinterpret_cast<__half2*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) h[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
}
__device__ inline void pack(const float (&x)[kVec], uint4& raw, bf16) {
  __nv_bfloat162* h = reinterpret_cast<__nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) h[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
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

/// Eight elements of a weight whose dtype is known at run time; the branch is the same for a whole launch.
__device__ inline void load_vec(const void* p, DType dtype, long i, float (&x)[kVec]) {
  if (dtype == DType::f16)
    load_vec(static_cast<const f16*>(p) + i, x);
  else if (dtype == DType::bf16)
    load_vec(static_cast<const bf16*>(p) + i, x);
  else
    load_vec(static_cast<const float*>(p) + i, x);
}

}  // namespace cf::cuda
