#include "cuda/runtime/wgmma.hpp"

#include <cuda_runtime_api.h>

namespace cf::cuda {

bool runs_wgmma([[maybe_unused]] int device) {
#ifdef CF_HAVE_SM_90A
  int major = 0, minor = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
#else
  return false;
#endif
}

}  // namespace cf::cuda
