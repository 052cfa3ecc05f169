#pragma once
// NVIDIA GeForce RTX 5090. Its numbers are the H200's: nobody has measured this GPU. Arch says what it cannot run, such
// as wgmma.
#include "cuda/tuning/h200.hpp"

namespace cf::cuda {

inline constexpr Tuning kRtx5090Tuning = kH200Tuning;

}  // namespace cf::cuda
