#pragma once
// PTX, one line a wrapper: overlap of dependent kernels, streaming loads, tensor cores.
#include <cstdint>

#include "core/dtype.hpp"

namespace cf::cuda {

/// Waits until the kernels before this one on the stream are complete and their writes visible. Before it, only what no
/// kernel of the stream writes may be read: weights. A no-op in a launch without programmatic serialization.
__device__ inline void wait_for_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// Allows the next kernel's blocks to start where this one's leave room.
__device__ inline void let_successor_start() { asm volatile("griddepcontrol.launch_dependents;"); }

/// 16 bytes that are read once: not kept in L1.
__device__ inline uint4 load_streaming(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

/// d += a * b on tensor cores, float32 sums. a is 16 x 16 row-major, b 16 x 8 column-major, d 16 x 8; with g = lane / 4
/// and t = lane % 4 a lane holds a[g][2t..], a[g + 8][2t..], a[g][2t + 8..], a[g + 8][2t + 8..], b[2t..][g],
/// b[2t + 8..][g] and d[g][2t..], d[g + 8][2t..], two elements each.
__device__ inline void mma(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                           std::uint32_t b0, std::uint32_t b1, f16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void mma(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                           std::uint32_t b0, std::uint32_t b1, bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace cf::cuda
