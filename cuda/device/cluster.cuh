#pragma once
// Reduce and gather across a thread-block cluster through distributed shared memory: the collectives that
// ClusterFusion (Luo et al. 2025, arXiv:2508.18850) builds its fused layers from.
#include <cooperative_groups.h>

namespace cf::cuda {

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

}  // namespace cf::cuda
