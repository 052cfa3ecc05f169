#include "cuda/ops/norm/qk_norm.hpp"

namespace cf::cuda {

Result<QkNormPlan> plan_qk_norm(const Target&, const ops::QkNorm::Args& a) {
  const auto d = ops::QkNorm::dims(a);
  if (d.head_dim % 8 || d.head_dim > kMaxNormedHeadDim)
    return Status::error(Code::unimplemented, "qk_norm: cuda takes head_dim a multiple of 8 up to " +
                                                  std::to_string(kMaxNormedHeadDim) + ", got " +
                                                  std::to_string(d.head_dim));
  return QkNormPlan{.heads = d.tokens * (d.heads + 2 * d.kv_heads), .threads = 128};
}

}  // namespace cf::cuda
