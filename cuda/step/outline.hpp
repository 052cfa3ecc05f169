#pragma once
// A step without memory, for plans of a GPU that need not be there. Private to cuda and the programs.
#include <cstdint>
#include <vector>

#include "core/model/program.hpp"

namespace cf::cuda {

/// A model's step whose tensors have shapes, dtypes and addresses, and at these addresses nothing. Quantised weights
/// are packed as the layer's kernels want them. Each layer has a cache of its own.
class StepOutline {
 public:
  /// `sizes` gives batch, q_len and the cache's capacity; the logits are those of `rows` tokens.
  StepOutline(const ModelSpec& model, const StepSizes& sizes, DType activation, WeightFormat linears,
              std::int64_t rows);
  StepOutline(const StepOutline&) = delete;
  StepOutline& operator=(const StepOutline&) = delete;

  /// The whole model's calls, and those of one layer.
  Result<Program> record() const { return record_model(spec, weights, tensors); }
  Result<Program> record_layer(std::int64_t layer) const;

  ModelSpec spec;
  ModelWeights weights;
  ModelTensors tensors;

 private:
  template <class V>
  void give_address(V& view);
  void pack(LinearParams& linear, const LinearSize& size, WeightFormat format, bool is_qkv);

  std::vector<LayerCache> caches_;
  std::uintptr_t next_ = 4096;
};

}  // namespace cf::cuda
