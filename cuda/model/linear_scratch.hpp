#pragma once
// The scratch memory of a layer's products of many tokens. Private to cuda/model, the programs' benchmarks
// and the Python package.
#include <algorithm>

#include "core/model/layer.hpp"
#include "cuda/ops/linear/cublaslt/plan.hpp"

namespace cf::cuda {

/// The bytes of scratch memory with which every linear of a model's layers, and its LM head, takes steps of `tokens`
/// tokens as a product of many. 0 where no linear would use any. An invariant model's dense weights are all multiplied
/// as many tokens are, its packed ones never.
inline std::size_t linear_scratch_bytes(const ModelSpec& model, DType activation, std::int64_t tokens, bool quantised,
                                        bool invariant = false) {
  quantised = quantised && !invariant;
  const std::int64_t without = std::min(tokens_without_gemm(false), tokens_without_gemm(quantised));
  if (activation == DType::f32 || (tokens <= without && !invariant)) return 0;
  // A quantised weight's bias may have another dtype than the activations, and then any linear has float32 sums.
  const int parts = !quantised ? 0 : activation == DType::bf16 ? kMostGptqParts : gptq_parts(activation, 8);
  std::size_t bytes = kGemmWorkspaceBytes;
  for_each_linear(model, LayerWeights{}, [&](const Site& site, const LinearParams&, const LinearSize& size) {
    const bool has_sums = quantised || site.id == SiteId::dense_h_to_4h;
    bytes = std::max(bytes, gemm_scratch(tokens, size.in, size.out, parts, has_sums).bytes);
  });
  return bytes;
}

}  // namespace cf::cuda
