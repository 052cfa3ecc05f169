#include "cuda/runtime/memory.hpp"

#include <cuda_runtime_api.h>

#include <cstdio>

#include "cuda/runtime/check.hpp"

namespace cf::cuda {
namespace {

std::string gigabytes(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f GB", double(bytes) * 1e-9);
  return text;
}

Status copy(const Context& context, void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  CF_TRY(from_cuda(cudaMemcpyAsync(to, from, bytes, kind, context.stream()), "cudaMemcpyAsync"));
  return from_cuda(cudaStreamSynchronize(context.stream()), "cudaStreamSynchronize");
}

}  // namespace

void DeviceMemory::Free::operator()(std::byte* p) const { (void)cudaFree(p); }

Result<DeviceMemory> DeviceMemory::create(const Context& context, std::size_t bytes, std::string_view what) {
  CF_TRY(from_cuda(cudaSetDevice(context.device()), "cudaSetDevice"));
  void* data = nullptr;
  if (Status s = from_cuda(cudaMalloc(&data, bytes), what); !s) {
    if (s.code() != Code::out_of_memory) return s;
    std::size_t free_bytes = 0, total_bytes = 0;
    CF_TRY(from_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo"));
    return Status::error(Code::out_of_memory, std::string(what) + ": needs " + gigabytes(bytes) +
                                                  " of device memory, " + gigabytes(free_bytes) + " of " +
                                                  gigabytes(total_bytes) + " are free");
  }
  DeviceMemory memory;
  memory.data_.reset(static_cast<std::byte*>(data));
  memory.bytes_ = bytes;
  return memory;
}

Status copy_to_device(const Context& context, void* device, const void* host, std::size_t bytes) {
  return copy(context, device, host, bytes, cudaMemcpyDefault);  // the source may be device memory
}

Status copy_to_host(const Context& context, void* host, const void* device, std::size_t bytes) {
  return copy(context, host, device, bytes, cudaMemcpyDeviceToHost);
}

}  // namespace cf::cuda
