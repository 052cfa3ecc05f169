#include <utility>

#include "cuda/serve/model_state.hpp"

namespace cf::cuda {

Status TapCopies::add(const Context& context, const ModelRunner::SiteTensor& tensor, void* to) {
  const auto bytes = std::size_t(tensor.bytes());
  if (bytes == 0) return {};
  if (!stream_) {
    CF_TRY_ASSIGN(stream_, make_stream());
    for (Buffer& b : buffers_) {
      CF_TRY_ASSIGN(b.filled, make_event());
      CF_TRY_ASSIGN(b.free, make_event());
    }
  }
  Buffer& buffer = buffers_[next_++ % buffers_.size()];
  if (bytes > buffer.memory.bytes()) {
    CF_TRY(from_cuda(cudaEventSynchronize(buffer.free.get()), "cudaEventSynchronize"));
    buffer.memory = {};
    CF_TRY_ASSIGN(buffer.memory, DeviceMemory::create(context, bytes, "a tap of " + tensor.name));
  }
  CUstream_st* const main = context.stream();
  CF_TRY(from_cuda(cudaStreamWaitEvent(main, buffer.free.get()), "cudaStreamWaitEvent"));
  CF_TRY(copy_async(buffer.memory.data(), tensor.data, bytes, cudaMemcpyDeviceToDevice, main));
  CF_TRY(from_cuda(cudaEventRecord(buffer.filled.get(), main), "cudaEventRecord"));
  CF_TRY(from_cuda(cudaStreamWaitEvent(stream_.get(), buffer.filled.get()), "cudaStreamWaitEvent"));
  CF_TRY(copy_async(to, buffer.memory.data(), bytes, cudaMemcpyDeviceToHost, stream_.get()));
  return from_cuda(cudaEventRecord(buffer.free.get(), stream_.get()), "cudaEventRecord");
}

Result<ModelRunner::Await> TapCopies::made() const {
  if (!stream_) return ModelRunner::Await([] { return Status(); });
  CF_TRY_ASSIGN(Event made, make_event());
  CF_TRY(from_cuda(cudaEventRecord(made.get(), stream_.get()), "cudaEventRecord"));
  return ModelRunner::Await([made = std::shared_ptr<CUevent_st>(std::move(made))] {
    return from_cuda(cudaEventSynchronize(made.get()), "cudaEventSynchronize");
  });
}

Status Model::fetch(const SiteTensor& tensor, void* to) {
  return copy_to_host(state_->context, to, tensor.data, std::size_t(tensor.bytes()));
}

Result<std::shared_ptr<std::byte[]>> Model::host_memory(std::size_t bytes) {
  CF_TRY_ASSIGN(Pinned<std::byte> memory, make_pinned<std::byte>(bytes));
  return std::shared_ptr<std::byte[]>(std::move(memory));
}

Status Model::fetch_later(const SiteTensor& tensor, void* to) {
  return state_->tap_copies.add(state_->context, tensor, to);
}

Result<ModelRunner::Await> Model::fetched() { return state_->tap_copies.made(); }

}  // namespace cf::cuda
