#pragma once
// PTX, one line a wrapper: overlap of dependent kernels, streaming loads, asynchronous copies, tensor cores,
// the exponential unit.
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

/// 2^x, to two units in the last place; below 2^-126 it is 0.
__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// True in one lane of a warp, all of whose lanes call: what the compiler knows to be one thread, so that it issues
/// bulk copies without a loop over lanes.
__device__ inline bool elected() {
  std::uint32_t yes;
  asm volatile(
      "{\n"
      ".reg .pred yes;\n"
      "elect.sync _|yes, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, yes;\n"
      "}"
      : "=r"(yes));
  return yes;
}

/// An address in shared memory as PTX counts it.
__device__ inline std::uint32_t shared_address(const void* p) { return std::uint32_t(__cvta_generic_to_shared(p)); }

/// A barrier in shared memory completes a phase with its `arrivals`-th arrival. Phases are 0, 1, 0, ...
__device__ inline void init_barrier(std::uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
/// Makes the thread's new barriers known to the copy engine and to the cluster.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
/// Arrives; the phase is complete only after `bytes` more have been written by what names the barrier.
__device__ inline void arrive_expecting(std::uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
/// The copy engine brings `bytes` from global to shared memory and counts them at the barrier: multiples of 16, as both
/// addresses are.
__device__ inline void copy_bulk(void* to, const void* from, int bytes, std::uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
/// Waits until the phase is complete; what the block and the copy engine wrote before is then visible.
__device__ inline void wait_barrier(std::uint64_t* barrier, int phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

/// Four 8 x 8 matrices of 16-bit elements from shared memory, of which lane i names the address of row i % 8 of matrix
/// i / 8. With g = lane / 4 and t = lane % 4 a lane gets elements 2t and 2t + 1 of row g of each.
__device__ inline uint4 load_matrices(std::uint32_t row) {
  uint4 m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
               : "r"(row)
               : "memory");
  return m;
}

/// The same, transposed: a lane gets elements g of rows 2t and 2t + 1.
__device__ inline uint4 load_matrices_transposed(std::uint32_t row) {
  uint4 m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
               : "r"(row)
               : "memory");
  return m;
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
