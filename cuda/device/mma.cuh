#pragma once
// Tensor cores: products of fragments, and their loads from shared memory. PTX, one instruction a function.
// In every comment g = lane / 4 and t = lane % 4.
#include <cstdint>

#include "core/dtype.hpp"

namespace cf::cuda {

/// Loads four 8 x 8 matrices of 16-bit elements from shared memory. Lane i passes the shared address of row i % 8 of
/// matrix i / 8. A lane gets elements 2t and 2t + 1 of row g of each matrix.
__device__ inline uint4 load_matrices(std::uint32_t row) {
  uint4 m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
               : "r"(row)
               : "memory");
  return m;
}

/// load_matrices() of the transposed matrices: a lane gets element g of rows 2t and 2t + 1 of each matrix.
__device__ inline uint4 load_matrices_transposed(std::uint32_t row) {
  uint4 m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
               : "r"(row)
               : "memory");
  return m;
}

/// d += a * b with float32 sums. a is 16 x 16 row-major, b is 16 x 8 column-major, d is 16 x 8. Each register of a and
/// b holds two elements:
///   a0 = a[g][2t..]  a1 = a[g + 8][2t..]  a2 = a[g][2t + 8..]  a3 = a[g + 8][2t + 8..]
///   b0 = b[2t..][g]  b1 = b[2t + 8..][g]
///   d[0..1] = d[g][2t..]  d[2..3] = d[g + 8][2t..]
__device__ inline void mma(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                           std::uint32_t b0, std::uint32_t b1, f16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// The same for bfloat16.
__device__ inline void mma(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                           std::uint32_t b0, std::uint32_t b1, bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// d += a * b of integers: a is 16 x 32 of unsigned bytes, b is 32 x 8 of signed ones. Each register of a and b holds
/// four bytes:
///   a0 = a[g][4t..]  a1 = a[g + 8][4t..]  a2 = a[g][4t + 16..]  a3 = a[g + 8][4t + 16..]
///   b0 = b[4t..][g]  b1 = b[4t + 16..][g]
///   d[0..1] = d[g][2t..]  d[2..3] = d[g + 8][2t..]
__device__ inline void mma_bytes(int (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                                 std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace cf::cuda
