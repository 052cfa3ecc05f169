#pragma once
// Collectives across a thread-block cluster through distributed shared memory: the reduce and gather that ClusterFusion
// (Luo et al. 2025, arXiv:2508.18850) builds its fused layers from, and an inbox for what one block merges alone.
#include <cooperative_groups.h>

#include <cstdint>

#include "cuda/device/async.cuh"

namespace cf::cuda {

/// A block's place in its cluster, and its cluster's along x. A block launched without is a cluster of its own.
__device__ inline int cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}
__device__ inline int cluster_index() {
  std::uint32_t index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return int(index);
}

/// All blocks of a cluster of `size` (1, 2, 4, 8) end with the same `values`: their element-wise combination, in a tree
/// whose shape depends on the ranks alone, so that every block gets the same bits. In round i a block combines with the
/// one whose rank differs in bit i; the lower rank's value stands left. `mine` and `other` are the block's own shared
/// memory, n floats each, at the same offset in every block; all threads of all blocks call.
template <class Combine>
__device__ void cluster_reduce(float* mine, float* other, int n, unsigned size, Combine combine) {
  auto cluster = cooperative_groups::this_cluster();
  const unsigned rank = cluster.block_rank();
  for (unsigned bit = 1; bit < size; bit *= 2) {
    cluster.sync();  // mine is written, and other's last reader is done
    const float* peer = cluster.map_shared_rank(mine, rank ^ bit);
    for (unsigned i = threadIdx.x; i < unsigned(n); i += blockDim.x) {
      const float a = mine[i], b = peer[i];
      other[i] = rank & bit ? combine(b, a) : combine(a, b);
    }
    cluster.sync();  // every peer has read mine
    for (unsigned i = threadIdx.x; i < unsigned(n); i += blockDim.x) mine[i] = other[i];
  }
  cluster.sync();
}

/// all[r * n + i] = element i of rank r's `mine`, for every rank r of the cluster, in every block.
__device__ inline void cluster_gather(const float* mine, float* all, int n, unsigned size) {
  auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  for (unsigned i = threadIdx.x; i < size * unsigned(n); i += blockDim.x)
    all[i] = cluster.map_shared_rank(const_cast<float*>(mine), i / unsigned(n))[i % unsigned(n)];
  cluster.sync();  // no block leaves or overwrites while another reads
}

/// What blocks of a cluster send to one of them, which alone waits for it. The only barrier of the cluster begins at
/// the kernel's start and is waited for when there is something to send, long after; then a block that sends may leave,
/// and so may one that sends nothing, at any time. For one use a launch, of clusters of two blocks at least.
class ClusterInbox {
 public:
  /// `arrived` is in the block's shared memory.
  __device__ explicit ClusterInbox(std::uint64_t* arrived) : arrived_(arrived) {}

  /// At the kernel's start; all threads of all blocks of the cluster call.
  __device__ void open() {
    if (threadIdx.x == 0) {
      init_barrier(arrived_, 1);
      publish_barriers();
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }

  /// Before a block's first send or receive, by all of its threads. One that receives need not, but compute-sanitizer's
  /// racecheck waits for ever for a block that leaves without.
  __device__ void connect() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

  /// Writes v at `to`, an address in this block's shared memory, aligned to all of v, into the same place of block
  /// `rank`'s.
  __device__ void send(unsigned rank, float* to, float v) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %2, [%1];" ::"r"(address_in(rank, to)),
        "r"(address_in(rank, arrived_)), "f"(v)
        : "memory");
  }
  __device__ void send(unsigned rank, float* to, const float (&v)[4]) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
                     address_in(rank, to)),
                 "r"(address_in(rank, arrived_)), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
  }

  /// Waits until `bytes` in all have been sent to this block; all of its threads call.
  __device__ void receive(int bytes) {
    if (threadIdx.x == 0) arrive_expecting(arrived_, bytes);
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(arrived_))
        : "memory");
  }

 private:
  /// What lies there in this block's shared memory, in block `rank`'s.
  __device__ static std::uint32_t address_in(unsigned rank, const void* p) {
    std::uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
    return there;
  }

  std::uint64_t* arrived_;
};

}  // namespace cf::cuda
