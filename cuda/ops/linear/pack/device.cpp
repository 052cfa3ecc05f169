#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/ops/linear/pack/pack.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/runtime/memory.hpp"

namespace cf::cuda {

Result<Packed> pack(const LinearWeight& weight, const PackHint& hint, const Context& context) {
  const auto* gptq = std::get_if<GptqWeight>(&weight);
  if (!gptq) return pack(weight, hint);
  CF_TRY(check_packable(*gptq));
  GptqWeight on_host = *gptq;
  std::vector<Tensor> copies;
  Status status;
  const auto bring = [&](std::string_view name, auto& view) -> Status {
    cudaPointerAttributes where;
    CF_TRY(from_cuda(cudaPointerGetAttributes(&where, view.data),
                     "pack: cudaPointerGetAttributes of " + std::string(name)));
    if (where.type != cudaMemoryTypeDevice) return {};
    copies.emplace_back(view.dtype, Shape(view.shape.begin(), view.shape.end()));
    CF_TRY(copy_to_host(context, copies.back().data(), view.data, std::size_t(view.bytes())));
    point(view, copies.back().data(), view.shape, view.dtype);
    return {};
  };
  for_each_gptq_tensor(on_host, gptq->scales.shape[1], gptq->g_idx.size(),
                       [&](const TensorSpec& t, auto& view, const auto&) {
                         if (status) status = bring(t.name, view);
                       });
  CF_TRY(status);
  return pack(on_host, hint);
}

}  // namespace cf::cuda
