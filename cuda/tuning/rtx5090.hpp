#pragma once
// NVIDIA GeForce RTX 5090. Its numbers are the H200's: nobody has measured this GPU. What it cannot run at all, such as
// Hopper's tensor cores, plans know from Arch.
#include "cuda/tuning/h200.hpp"

namespace cf::cuda {

inline constexpr Tuning kRtx5090Tuning = kH200Tuning;

}  // namespace cf::cuda
