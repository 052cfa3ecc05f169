#include "cuda/ops/linear/packed/sum.hpp"

namespace cf::cuda {
namespace {

const PackedWeight* packed_weight(const ops::Linear::Args& a) { return std::get_if<PackedWeight>(&a.linear.weight); }

}  // namespace

GptqSumPlan linear_sum_plan(const Arch& arch, const LinearSum::Args& a) {
  GptqSumPlan none{};
  const PackedWeight* const weights[] = {packed_weight(a.first), packed_weight(a.second)};
  if (!weights[0] || !weights[1] || a.second.residual.data != a.first.y.data || size_bytes(a.first.y.dtype) != 2 ||
      a.second.y.dtype != a.first.y.dtype || a.second.y.shape != a.first.y.shape ||
      a.second.epilogue != ops::Epilogue::residual ||
      (a.first.epilogue != ops::Epilogue::none && a.first.epilogue != ops::Epilogue::residual))
    return none;
  const Result<GptqLayout> first = gptq_layout(LinearSum::name, *weights[0]),
                           second = gptq_layout(LinearSum::name, *weights[1]);
  if (!first || !second || !gptq_is_plain(a.first, *first, {}, kLinearSumRows) ||
      !gptq_is_plain(a.second, *second, {}, kLinearSumRows))
    return none;
  const std::int64_t tokens = a.first.x.shape[0];
  return gptq_sum_plan(arch, gptq_sizes(*first, tokens), gptq_sizes(*second, tokens), tokens);
}

}  // namespace cf::cuda
