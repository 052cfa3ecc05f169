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

/// A barrier in shared memory that counts arrivals and bytes.
using Mbarrier = std::uint64_t;

__device__ inline std::uint32_t smem_address(const void* p) { return std::uint32_t(__cvta_generic_to_shared(p)); }
__device__ inline void mbarrier_init(Mbarrier& b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(&b)), "r"(arrivals));
}
/// Makes the initialised barriers known to the copy engine.
__device__ inline void mbarrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void mbarrier_arrive(Mbarrier& b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(&b)) : "memory");
}
/// Arrives, and lets the phase wait for so many bytes too.
__device__ inline void mbarrier_expect(Mbarrier& b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(&b)), "r"(bytes) : "memory");
}
/// Waits until the phase of that parity is complete. Its arrivals come from threads of this block and the copy engine,
/// which answer whatever other blocks do.
__device__ inline void mbarrier_wait(Mbarrier& b, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(smem_address(&b)),
      "r"(parity)
      : "memory");
}

/// Copies bytes (a multiple of 16, both ends 16-byte aligned) from global to shared memory; `b` counts them.
__device__ inline void bulk_load(void* to, const void* from, int bytes, Mbarrier& b) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_address(to)),
      "l"(from), "r"(bytes), "r"(smem_address(&b))
      : "memory");
}

/// A barrier among the first `threads` threads of a block that call it, a multiple of 32.
template <int Threads>
__device__ void sync_threads(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(Threads) : "memory");
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
