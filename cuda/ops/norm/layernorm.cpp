#include "cuda/ops/norm/layernorm.hpp"

#include "cuda/runtime/refusals.hpp"

namespace cf::cuda {
namespace {

/// `inputs`: the number of tensors that the normalised row is the sum of.
Result<LayerNormPlan> plan_of(const Target& target, std::string_view op, const ConstAnyView<2>& x, int inputs) {
  const auto [tokens, hidden] = x.shape;
  if (hidden % 8 || hidden > kMaxLayerNormHidden)
    return Status::error(Code::unimplemented, std::string(op) + ": cuda takes hidden a multiple of 8 up to " +
                                                  std::to_string(kMaxLayerNormHidden) + ", got " +
                                                  std::to_string(hidden));
  CF_TRY(check_activation(op, x.dtype));
  return layernorm_plan(target.arch, tokens, hidden, inputs);
}

}  // namespace

Result<LayerNormPlan> plan_layernorm(const Target& target, const ops::LayerNorm::Args& a) {
  return plan_of(target, ops::LayerNorm::name, a.x, 1);
}
Result<LayerNormPlan> plan_rmsnorm(const Target& target, const ops::RmsNorm::Args& a) {
  return plan_of(target, ops::RmsNorm::name, a.x, 1);
}
Result<LayerNormPlan> plan_layernorm_residual(const Target& target, const ops::LayerNormResidual::Args& a) {
  return plan_of(target, ops::LayerNormResidual::name, a.x, 1);
}
Result<LayerNormPlan> plan_residual_layernorm(const Target& target, const ops::ResidualLayerNorm::Args& a) {
  return plan_of(target, ops::ResidualLayerNorm::name, a.x, kResidualLayerNormInputs);
}

}  // namespace cf::cuda
