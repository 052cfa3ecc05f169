#pragma once
// What the blocks of a thread-block cluster do together, through distributed shared memory: the reduce and gather of
// ClusterFusion (Luo et al. 2025, arXiv:2508.18850), and an inbox to which blocks send what one of them merges.
#include <cooperative_groups.h>

#include <cstdint>

#include "cuda/device/address.cuh"
#include "cuda/device/barrier.cuh"

namespace cf::cuda {

/// The block's rank in its cluster. A block that was launched without a cluster is a cluster of its own.
__device__ inline int cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}

/// The cluster's index in the grid along x.
__device__ inline int cluster_index() {
  std::uint32_t index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return int(index);
}

/// Makes `values` in every block of a cluster of `size` blocks (1, 2, 4 or 8) the element-wise combination of all
/// blocks' values. The combination is a tree that depends on the ranks alone, so every block gets the same bits: in
/// round i a block combines its value with that of the block whose rank differs in bit i, the lower rank's value on the
/// left. `mine` holds the values and `other` is scratch. Both are the block's shared memory, n floats each, at the same
/// offset in every block. All threads of all blocks call.
template <class Combine>
__device__ void cluster_reduce(float* mine, float* other, int n, unsigned size, Combine combine) {
  auto cluster = cooperative_groups::this_cluster();
  const unsigned rank = cluster.block_rank();
  for (unsigned bit = 1; bit < size; bit *= 2) {
    cluster.sync();  // every block has written `mine` and has read `other`
    const float* peer = cluster.map_shared_rank(mine, rank ^ bit);
    for (unsigned i = threadIdx.x; i < unsigned(n); i += blockDim.x) {
      const float a = mine[i], b = peer[i];
      other[i] = rank & bit ? combine(b, a) : combine(a, b);
    }
    cluster.sync();  // every peer has read `mine`
    for (unsigned i = threadIdx.x; i < unsigned(n); i += blockDim.x) mine[i] = other[i];
  }
  cluster.sync();
}

/// all[r * n + i] = element i of rank r's `mine`, for every rank r, in every block of the cluster. All threads of all
/// blocks call.
__device__ inline void cluster_gather(const float* mine, float* all, int n, unsigned size) {
  auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  for (unsigned i = threadIdx.x; i < size * unsigned(n); i += blockDim.x)
    all[i] = cluster.map_shared_rank(const_cast<float*>(mine), i / unsigned(n))[i % unsigned(n)];
  cluster.sync();  // no block leaves or overwrites `mine` while another block reads it
}

/// Values that the blocks of a cluster send into one block's shared memory; only the receiving block waits for them.
/// The inbox costs one barrier of the cluster. A block arrives at that barrier when the kernel starts and waits for it
/// only before its first send, long after. A block may leave when it has sent its values; a block that sends none may
/// leave at any time. An inbox serves one launch and clusters of two blocks or more.
class ClusterInbox {
 public:
  /// `arrived` is a barrier in the block's shared memory, at the same offset in every block.
  __device__ explicit ClusterInbox(std::uint64_t* arrived) : arrived_(arrived) {}

  /// Prepares the barrier. All threads of all blocks of the cluster call this when the kernel starts.
  __device__ void open() {
    if (threadIdx.x == 0) {
      init_barrier(arrived_, 1);
      publish_barriers();
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }

  /// Waits until every block has opened its inbox. All threads of a block call this before the block's first send or
  /// receive. A block that only receives could go without, but compute-sanitizer's racecheck waits for ever for a block
  /// that leaves without this call.
  __device__ void connect() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

  /// Writes v to block `rank`, at the offset that `to` has in this block's shared memory. `to` is aligned to v's size.
  __device__ void send(unsigned rank, float* to, float v) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %2, [%1];" ::"r"(shared_address_in(rank, to)),
        "r"(shared_address_in(rank, arrived_)), "f"(v)
        : "memory");
  }
  __device__ void send(unsigned rank, float* to, const float (&v)[4]) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
                     shared_address_in(rank, to)),
                 "r"(shared_address_in(rank, arrived_)), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
  }

  /// Waits until this block has been sent `bytes` bytes in all. All threads of the block call.
  __device__ void receive(int bytes) {
    if (threadIdx.x == 0) arrive_expecting(arrived_, bytes);
    wait_cluster_barrier(arrived_, 0);
  }

 private:
  std::uint64_t* arrived_;
};

}  // namespace cf::cuda
