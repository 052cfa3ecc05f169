#pragma once
// Copies and loads from device memory other than plain ones. PTX, one instruction a function.
#include <cstdint>

#include "cuda/device/address.cuh"
#include "cuda/device/overwrite.cuh"

namespace cf::cuda {

/// Loads 16 bytes that are read once: L1 does not keep them.
__device__ inline uint4 load_streaming(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

/// Brings the line of an address into the L2.
__device__ inline void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

/// Bulk copy: the copy engine brings `bytes` bytes from device memory to shared memory and counts them at the barrier.
/// The size and both addresses are multiples of 16.
__device__ inline void copy_bulk(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ inline void copy_bulk(void* to, const void* from, int bytes, std::uint64_t* barrier) {
  copy_bulk(shared_address(to), from, bytes, shared_address(barrier));
}

/// Bulk prefetch: asks the copy engine to bring `bytes` bytes from device memory into the L2. Nothing tells when they
/// are there. The size and the address are multiples of 16.
__device__ inline void prefetch_bulk(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
/// prefetch_bulk() by one elected lane of the warp. All lanes call.
__device__ inline void request_prefetch(const void* from, int bytes) {
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "@elected cp.async.bulk.prefetch.L2.global [%0], %1;\n"
      "}" ::"l"(from),
      "r"(bytes)
      : "memory");
}

/// One lane of the warp arrives at the barrier, whose phase then waits for `bytes` bytes too, and requests the bulk
/// copy that brings them. All lanes call. One elected lane is what the copy engine takes without a loop over the lanes.
__device__ inline void request_bulk(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "@elected mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %2;\n"
      "@elected cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n"
      "}" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

/// The copy engine brings a tile of a matrix to shared memory, from this column and row on, and counts its bytes at the
/// barrier: those beyond the matrix, too. `map` is a kernel's argument that make_tensor_map() made.
__device__ inline void copy_tensor_tile(void* to, const void* map, int column, int row, int matrix,
                                        std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(shared_address(barrier))
      : "memory");
}

/// copy_tensor_tile() to the blocks of the cluster whose ranks are the bits of `ranks`: to the same offset in the
/// shared memory of each, and counted at the barrier that each has at the same offset.
__device__ inline void copy_tensor_tile_to(std::uint16_t ranks, void* to, const void* map, int column, int row,
                                           int matrix, std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(shared_address(barrier)), "h"(ranks)
      : "memory");
}

/// Brings a kernel's tensor map to where the copy engine looks for it.
__device__ inline void prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

/// cp.async: begins the copy of 16 bytes from device memory to shared memory, past the registers. Both addresses are
/// multiples of 16.
__device__ inline void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

/// Ends a group of this thread's copy_async(): those since the group before it, which may be none.
__device__ inline void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until all copy groups of this thread have arrived except the newest `Left`.
template <int Left>
__device__ void wait_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

/// Waits until all of this thread's copy_async() have arrived.
__device__ inline void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace cf::cuda
