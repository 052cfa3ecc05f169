// Which kernel multiplies: the first that takes the call, in the order of README.md's table.
#include "core/ops/linear.hpp"

#include "cuda/ops/linear/cublaslt/cublaslt.hpp"
#include "cuda/ops/linear/gemv/gemv.hpp"
#include "cuda/ops/linear/packed/packed.hpp"
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/ops/linear/tiles/tiles.hpp"
#include "cuda/ops/linear/wgmma/wgmma.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/check.hpp"

namespace cf::cuda {

Status prepare(const ops::Linear::Args& a, LaunchList& launches) {
  CF_TRY(check_call(a, launches));
  const auto d = ops::Linear::dims(a);
  if (const auto* packed = std::get_if<PackedWeight>(&a.linear.weight)) {
    CF_TRY_ASSIGN(const bool multiplies_rows, prepare_linear_wgmma(a, *packed, launches));
    if (multiplies_rows) return {};
    CF_TRY_ASSIGN(const bool added, prepare_gemm(a, launches));
    return added ? Status() : prepare_packed(a, *packed, launches);
  }
  const auto* dense = std::get_if<DenseWeight>(&a.linear.weight);
  if (!dense) return unpacked_gptq(ops::Linear::name);
  CF_TRY(check_multiple_of_8(ops::Linear::name, "in", d.in));
  return with_activation(ops::Linear::name, a.x.dtype, [&](auto) -> Status {
    if (a.x.dtype != DType::f32) CF_TRY(check_weight_dtype(ops::Linear::name, a.x.dtype, dense->weight.dtype));
    CF_TRY_ASSIGN(const bool multiplies_rows, prepare_linear_wgmma(a, launches));
    if (multiplies_rows) return {};
    CF_TRY_ASSIGN(const bool multiplies_tiles, prepare_linear_tiles(a, launches));
    if (multiplies_tiles) return {};
    CF_TRY_ASSIGN(const bool added, prepare_gemm(a, launches));
    return added ? Status() : prepare_gemv(a, launches);
  });
}

}  // namespace cf::cuda
