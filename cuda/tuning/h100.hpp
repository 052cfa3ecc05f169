#pragma once
// NVIDIA H100. Its numbers are the H200's: they were not measured again.
#include "cuda/tuning/h200.hpp"

namespace cf::cuda {

inline constexpr Tuning kH100Tuning = kH200Tuning;

}  // namespace cf::cuda
