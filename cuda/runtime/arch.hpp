#pragma once
#include <string>
#include <string_view>

#include "cuda/tuning/h100.hpp"
#include "cuda/tuning/h200.hpp"
#include "cuda/tuning/invariant.hpp"
#include "cuda/tuning/rtx5090.hpp"

namespace cf::cuda {

/// Questions to a device's compute capability, and to kCompiledFor in a kernel.
constexpr bool is_hopper(int compute_capability) { return compute_capability == 90; }
constexpr bool is_blackwell(int compute_capability) { return compute_capability >= 120; }

/// What launch plans are made from: the limits of a device, as values. Plans are pure functions of these limits, so
/// that the plans for one GPU can be tested and run on another.
struct Arch {
  int compute_capability;  // 90 or 120
  int sm_count;
  int smem_per_block_bytes;  // dynamic shared memory that one block may opt in to
  int smem_per_sm_bytes;
  int threads_per_sm;
  int registers_per_sm;
  int l2_bytes;
  int max_cluster_blocks;               // portable thread-block cluster size
  int largest_cluster_blocks;           // with what a kernel must be allowed: allow_cluster()
  const Tuning* tuning = &kH200Tuning;  // the measured numbers that plans choose by

  /// Whether the device has Hopper's tensor cores: wgmma, with registers that warpgroups give each other.
  constexpr bool has_wgmma() const { return is_hopper(compute_capability); }
  /// Whether blocks form clusters, which reach into each other's shared memory, and have a copy engine.
  constexpr bool has_clusters() const { return compute_capability >= 90; }
};

/// The measured numbers of a GPU, by its name as CUDA gives it. A GPU without a file has the H200's.
constexpr const Tuning& tuning_of(std::string_view gpu) {
  const auto is = [&](std::string_view name) { return gpu.find(name) != std::string_view::npos; };
  return is("H100") ? kH100Tuning : is("RTX 5090") ? kRtx5090Tuning : kH200Tuning;
}

inline constexpr Arch kH100{.compute_capability = 90,
                            .sm_count = 132,
                            .smem_per_block_bytes = 232448,
                            .smem_per_sm_bytes = 233472,
                            .threads_per_sm = 2048,
                            .registers_per_sm = 65536,
                            .l2_bytes = 50 << 20,
                            .max_cluster_blocks = 8,
                            .largest_cluster_blocks = 16,
                            .tuning = &kH100Tuning};

inline constexpr Arch kH200{.compute_capability = 90,
                            .sm_count = 132,
                            .smem_per_block_bytes = 232448,
                            .smem_per_sm_bytes = 233472,
                            .threads_per_sm = 2048,
                            .registers_per_sm = 65536,
                            .l2_bytes = 60 << 20,
                            .max_cluster_blocks = 8,
                            .largest_cluster_blocks = 16,
                            .tuning = &kH200Tuning};
inline constexpr Arch kRtx5090{.compute_capability = 120,
                               .sm_count = 170,
                               .smem_per_block_bytes = 101376,
                               .smem_per_sm_bytes = 102400,
                               .threads_per_sm = 1536,
                               .registers_per_sm = 65536,
                               .l2_bytes = 96 << 20,
                               .max_cluster_blocks = 8,
                               .largest_cluster_blocks = 8,
                               .tuning = &kRtx5090Tuning};

/// The device with plans whose rows' bits do not depend on the size of a step.
constexpr Arch invariant_arch(Arch arch) {
  arch.tuning = &kInvariantTuning;
  return arch;
}

/// The dynamic shared memory, in bytes, that each of `blocks` blocks of an SM can have. Each block also takes some
/// bytes for the system: the difference between an SM's memory and that of its largest block.
constexpr int smem_per_block_bytes(const Arch& arch, int blocks) {
  return arch.smem_per_sm_bytes / blocks - (arch.smem_per_sm_bytes - arch.smem_per_block_bytes);
}

std::string to_string(const Arch&);

}  // namespace cf::cuda
