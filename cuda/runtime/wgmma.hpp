#pragma once
// Private to cuda.

namespace cf::cuda {

/// Whether this build's code for Hopper's tensor cores (wgmma) runs on a device: the device has compute capability 9.0,
/// and the build has code for sm_90a. On any other device the kernels that use them are empty.
bool runs_wgmma(int device);

}  // namespace cf::cuda
