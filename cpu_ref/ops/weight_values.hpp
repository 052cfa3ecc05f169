#pragma once
// What ops check of a quantised weight beside its tensors' shapes. Private to cpu_ref.
#include <string>

#include "core/fp8.hpp"
#include "cpu_ref/ops/real.hpp"

namespace cf::cpu_ref {

/// Refuses a quantised weight of the module that an op's own checks let pass: one that another backend packed, an fp8
/// weight of another size, and a g_idx that names a group which does not exist.
inline Status check_weight_values(std::string_view op, const LinearWeight& weight, std::string_view module = "") {
  if (const auto* packed = std::get_if<PackedWeight>(&weight)) {
    const std::string where = std::string(op) + (module.empty() ? "" : ": " + std::string(module));
    if (is_fp8(weight)) return check_fp8(where, *packed);
    return Status::error(
        Code::unimplemented,
        where + ": cpu_ref takes dense, GPTQ or fp8 weights, got a weight packed by " + std::string(packed->packer));
  }
  const auto* gptq = std::get_if<GptqWeight>(&weight);
  if (!gptq) return {};
  const std::string g_idx = module.empty() ? "g_idx" : std::string(module) + ".g_idx";
  return check_index(op, g_idx, gptq->g_idx, 0, gptq->scales.shape[0] - 1);
}

}  // namespace cf::cpu_ref
