#include "cuda/ops/embedding/embedding.hpp"

#include "cuda/runtime/refusals.hpp"

namespace cf::cuda {

Result<EmbeddingPlan> plan_embedding(const Target&, const ops::Embedding::Args& a) {
  const auto d = ops::Embedding::dims(a);
  CF_TRY(check_multiple_of_8(ops::Embedding::name, "hidden", d.hidden));
  CF_TRY(check_activation(ops::Embedding::name, a.y.dtype));
  return EmbeddingPlan{.blocks = int(d.tokens), .threads = 256};
}

}  // namespace cf::cuda
