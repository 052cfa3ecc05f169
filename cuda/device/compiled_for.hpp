#pragma once

namespace cf::cuda {

/// The compute capability that the compiler makes device code for: 90 or 120. In host code, where launch bounds are
/// read but not used, 90.
#ifdef __CUDA_ARCH__
inline constexpr int kCompiledFor = __CUDA_ARCH__ / 10;
#else
inline constexpr int kCompiledFor = 90;
#endif

}  // namespace cf::cuda
