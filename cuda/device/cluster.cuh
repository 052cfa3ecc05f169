#pragma once
// Thread-block clusters: a block's place in its cluster, and an inbox in one block's shared memory, to which the other
// blocks of the cluster send what that block merges.
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

/// Waits until all threads of the cluster's blocks have come here, each thread after its publish_barriers(). All of
/// them see the published barriers; no other access is ordered.
__device__ inline void wait_for_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

/// Stores v into the shared memory of a block of the cluster. `barrier`, an mbarrier of that block, counts the bytes as
/// they arrive. Both addresses are from shared_address_in(); `to` is a multiple of 16.
__device__ inline void store_async(std::uint32_t to, const float (&v)[4], std::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to),
               "r"(barrier), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

/// Values that the blocks of a cluster send into one block's shared memory; only the receiving block waits for them.
/// The inbox costs one barrier of the cluster. A block arrives at that barrier in open(), and waits for it only before
/// its first send. A block may leave when it has sent its values; a block that sends none may
/// leave at any time. An inbox serves one launch and clusters of two blocks or more.
class ClusterInbox {
 public:
  /// `arrived` is a barrier in the block's shared memory, at the same offset in every block.
  __device__ explicit ClusterInbox(std::uint64_t* arrived) : arrived_(arrived) {}

  /// Prepares the barrier. All threads of all blocks of the cluster call this, when the kernel starts or as soon as the
  /// block has no other use for the memory that it receives values in.
  __device__ void open() {
    if (threadIdx.x == 0) {
      init_barrier(arrived_, 1);
      publish_barriers();
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }

  /// Waits until every block has opened its inbox. All threads of a block call this before the block's first send or
  /// receive. A block that only receives does not need this call, but compute-sanitizer's racecheck hangs when a block
  /// leaves without it.
  __device__ void connect() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

  /// Writes v to block `rank`, at the offset that `to` has in this block's shared memory. `to` is aligned to v's size.
  __device__ void send(unsigned rank, float* to, float v) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %2, [%1];" ::"r"(shared_address_in(rank, to)),
        "r"(shared_address_in(rank, arrived_)), "f"(v)
        : "memory");
  }
  __device__ void send(unsigned rank, float* to, const float (&v)[4]) {
    store_async(shared_address_in(rank, to), v, shared_address_in(rank, arrived_));
  }

  /// Waits until this block has been sent `bytes` bytes in all. All threads of the block call.
  __device__ void receive(int bytes) {
    if (threadIdx.x == 0) arrive_expecting(arrived_, bytes);
    wait_cluster_barrier(arrived_, 0);
  }

 private:
  friend class ClusterOutbox;
  std::uint64_t* arrived_;
};

/// An array in another block's inbox, for many sends to it.
class ClusterOutbox {
 public:
  /// `to` is an array in this block's shared memory. The values go to the same offset in block `rank`'s.
  __device__ ClusterOutbox(const ClusterInbox& inbox, unsigned rank, float* to)
      : to_(shared_address_in(rank, to)), arrived_(shared_address_in(rank, inbox.arrived_)) {}

  /// Writes element i.
  __device__ void send(int i, float v) const {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %2, [%1];" ::"r"(to_ + 4 * std::uint32_t(i)),
        "r"(arrived_), "f"(v)
        : "memory");
  }

 private:
  std::uint32_t to_, arrived_;
};

}  // namespace cf::cuda
