#include <cuda_runtime_api.h>

#include "cuda/runtime/check.hpp"

namespace cf::cuda {

std::string to_string(const Arch& a) {
  return "compute capability " + std::to_string(a.compute_capability / 10) + "." +
         std::to_string(a.compute_capability % 10) + ", " + std::to_string(a.sm_count) + " SMs, " +
         std::to_string(a.smem_per_block_bytes) + " B of shared memory a block, " + std::to_string(a.l2_bytes >> 20) +
         " MiB of L2";
}

Status from_cuda(cudaError_t error, std::string_view what, SourceLocation at) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();
  return Status::error(error == cudaErrorMemoryAllocation ? Code::out_of_memory : Code::device_error,
                       std::string(what) + ": " + cudaGetErrorString(error), at);
}

Result<Arch> arch_of(const cudaDeviceProp& p, int device) {
  const int cc = 10 * p.major + p.minor;
  if (cc != 90 && cc != 120)
    return Status::error(Code::device_error, "device " + std::to_string(device) + " (" + p.name +
                                                 ") has compute capability " + std::to_string(p.major) + "." +
                                                 std::to_string(p.minor) + ", expected 9.0 or 12.0");
  Arch arch{.compute_capability = cc,
            .sm_count = p.multiProcessorCount,
            .smem_per_block_bytes = int(p.sharedMemPerBlockOptin),
            .smem_per_sm_bytes = int(p.sharedMemPerMultiprocessor),
            .threads_per_sm = p.maxThreadsPerMultiProcessor,
            .registers_per_sm = p.regsPerMultiprocessor,
            .l2_bytes = p.l2CacheSize,
            .max_cluster_blocks = 8,
            .largest_cluster_blocks = 8,
            .tuning = &tuning_of(p.name)};
  if (arch.has_wgmma()) arch.largest_cluster_blocks = 16;
  return arch;
}

Result<Context> Context::create(int device, CUstream_st* stream) {
  int count = 0;
  CF_TRY(from_cuda(cudaGetDeviceCount(&count), "no CUDA device"));
  if (device < 0 || device >= count)
    return Status::error(Code::device_error,
                         "no CUDA device " + std::to_string(device) + ", there are " + std::to_string(count));
  cudaDeviceProp p;
  CF_TRY(from_cuda(cudaGetDeviceProperties(&p, device), "cudaGetDeviceProperties"));
  CF_TRY_ASSIGN(const Arch arch, arch_of(p, device));
  CF_TRY(from_cuda(cudaSetDevice(device), "cudaSetDevice"));
  Context c;
  c.device_ = device;
  c.stream_ = stream;
  c.arch_ = arch;
  return c;
}

void DeviceCheck::look(const TensorSpec& t, const void* data, DType dtype) {
  if (status_ && data) status_ = examine(t, data, dtype);
}

Status DeviceCheck::examine(const TensorSpec& t, const void* data, DType dtype) const {
  const std::string tensor = "'" + std::string(t.name) + "'";
  if (is_weight(t.role) && dtype == DType::f64)
    return Status::error(
        Code::unimplemented,
        std::string(op_) + ": " + tensor + " has dtype float64, cuda takes float16, bfloat16 or float32 weights");
  const bool is_single = is_op_ && (is_table(t.role) || is_index(t.role));
  const std::size_t alignment = is_single ? size_bytes(dtype) : alignment_bytes_;
  if (reinterpret_cast<std::uintptr_t>(data) % alignment)
    return bad_argument(op_, tensor + " is misaligned, expected a multiple of " + std::to_string(alignment) + " bytes");
  if (trusts_addresses_) return {};
  cudaPointerAttributes where;
  CF_TRY(
      from_cuda(cudaPointerGetAttributes(&where, data), std::string(op_) + ": cudaPointerGetAttributes of " + tensor));
  if (where.type != cudaMemoryTypeDevice && where.type != cudaMemoryTypeManaged)
    return bad_argument(op_, tensor + " points to host memory, expected memory of device " + std::to_string(device_));
  if (where.device != device_)
    return bad_argument(op_, tensor + " lies on device " + std::to_string(where.device) + ", expected device " +
                                 std::to_string(device_));
  return {};
}

}  // namespace cf::cuda
