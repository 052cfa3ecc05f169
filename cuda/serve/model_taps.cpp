#include <utility>

#include "cuda/serve/model_state.hpp"

namespace cf::cuda {

Status TapCopies::add(const Context& context, const ModelRunner::SiteTensor& tensor, void* to) {
  const auto bytes = std::size_t(tensor.bytes());
  if (bytes == 0) return {};
  if (!stream_) {
    CF_TRY_ASSIGN(stream_, make_stream());
    for (Place& p : places_) {
      CF_TRY_ASSIGN(p.filled, make_event());
      CF_TRY_ASSIGN(p.free, make_event());
    }
  }
  Place& place = places_[next_++ % places_.size()];
  if (bytes > place.memory.bytes()) {
    CF_TRY(from_cuda(cudaEventSynchronize(place.free.get()), "cudaEventSynchronize"));
    place.memory = {};
    CF_TRY_ASSIGN(place.memory, DeviceMemory::create(context, bytes, "a tap of " + tensor.name));
  }
  CUstream_st* const main = context.stream();
  CF_TRY(from_cuda(cudaStreamWaitEvent(main, place.free.get()), "cudaStreamWaitEvent"));
  CF_TRY(copy_async(place.memory.data(), tensor.data, bytes, cudaMemcpyDeviceToDevice, main));
  CF_TRY(from_cuda(cudaEventRecord(place.filled.get(), main), "cudaEventRecord"));
  CF_TRY(from_cuda(cudaStreamWaitEvent(stream_.get(), place.filled.get()), "cudaStreamWaitEvent"));
  CF_TRY(copy_async(to, place.memory.data(), bytes, cudaMemcpyDeviceToHost, stream_.get()));
  return from_cuda(cudaEventRecord(place.free.get(), stream_.get()), "cudaEventRecord");
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
