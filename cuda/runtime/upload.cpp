#include "cuda/runtime/upload.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "cuda/runtime/check.hpp"

namespace cf::cuda {
namespace {

// Pinned buffers that several threads fill: faster than the driver's own copies of pageable memory.
constexpr std::size_t kBufferBytes = std::size_t(32) << 20;
constexpr std::size_t kThreadBytes = std::size_t(2) << 20;  // less is not worth a thread
constexpr std::size_t kMostThreads = 8;

/// memcpy() by several threads.
void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t parts = std::clamp<std::size_t>(bytes / kThreadBytes, 1, std::min(cores, kMostThreads));
  const auto begin = [&](std::size_t part) { return bytes / parts * part; };
  const auto run = [&](std::size_t part) {
    const std::size_t end = part + 1 == parts ? bytes : begin(part + 1);
    std::memcpy(to + begin(part), from + begin(part), end - begin(part));
  };
  std::vector<std::jthread> threads;
  for (std::size_t part = 1; part < parts; ++part) threads.emplace_back(run, part);
  run(0);
}

}  // namespace

Result<Upload> Upload::create(const Context& context) {
  Upload upload(context);
  for (Buffer& b : upload.buffers_) {
    CF_TRY_ASSIGN(b.memory, make_pinned<std::byte>(kBufferBytes));
    cudaEvent_t event = nullptr;
    CF_TRY(from_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate"));
    b.taken.reset(event);
  }
  return upload;
}

Status Upload::turn() {
  CF_TRY(from_cuda(cudaEventRecord(buffers_[buffer_].taken.get(), context_.stream()), "cudaEventRecord"));
  buffer_ = 1 - buffer_;
  used_ = 0;
  return from_cuda(cudaEventSynchronize(buffers_[buffer_].taken.get()), "cudaEventSynchronize");
}

Status Upload::add(void* device, const void* from, std::size_t bytes) {
  auto* to = static_cast<std::byte*>(device);
  const auto* source = static_cast<const std::byte*>(from);
  while (bytes > 0) {
    if (used_ == kBufferBytes) CF_TRY(turn());
    const std::size_t count = std::min(bytes, kBufferBytes - used_);
    std::byte* const staged = buffers_[buffer_].memory.get() + used_;
    copy(staged, source, count);
    CF_TRY(from_cuda(cudaMemcpyAsync(to, staged, count, cudaMemcpyHostToDevice, context_.stream()), "cudaMemcpyAsync"));
    used_ += count;
    to += count;
    source += count;
    bytes -= count;
  }
  return {};
}

Status Upload::finish() { return from_cuda(cudaStreamSynchronize(context_.stream()), "cudaStreamSynchronize"); }

}  // namespace cf::cuda
