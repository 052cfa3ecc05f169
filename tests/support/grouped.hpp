#pragma once
// Grouped-query attention beside the same attention without groups.
#include <utility>
#include <vector>

#include "tests/support/op_problem.hpp"
#include "tests/support/setups.hpp"

namespace cf::test {

/// `heads` query heads over `kv_heads` kv heads.
inline Setup grouped_setup(std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim, const Workload& load,
                           DType activation) {
  return {.model = model_of(heads, head_dim, 2, 2),
          .load = load,
          .kv_heads = kv_heads,
          .activation = activation,
          .values = activation == DType::bf16 ? DType::bf16 : DType::f16};
}

/// Heads and kv_heads of each ratio that models have: 1, 3, 4, 7 and 8.
inline const std::vector<std::pair<std::int64_t, std::int64_t>> kGroupedHeads{{3, 3}, {6, 2}, {4, 1}, {14, 2}, {24, 3}};

/// The problem Problem<ops::Attention>(s) with a kv head for every query head: query head h has a copy of kv head
/// h / (heads / kv_heads).
inline Problem<ops::Attention> with_repeated_heads(const Setup& s) {
  Setup repeated = s;
  repeated.kv_heads = 0;
  Problem<ops::Attention> from(s), to(repeated);
  const std::int64_t heads = from.dims().heads, ratio = heads / from.dims().kv_heads;
  for (std::size_t i = 0; i < from.blocks().size(); ++i) {
    auto &source = from.blocks()[i], &target = to.blocks()[i];
    const bool cache = source.role == Role::cache;
    const std::size_t parts = cache ? std::size_t(from.dims().batch * heads) : 1, bytes = target.bytes() / parts;
    for (std::size_t part = 0; part < parts; ++part) {
      const std::size_t of = cache ? part / std::size_t(ratio) : part;  // heads = ratio * kv_heads, batch included
      std::memcpy(static_cast<std::byte*>(target.data()) + part * bytes,
                  static_cast<const std::byte*>(source.data()) + of * bytes, bytes);
    }
  }
  return to;
}

}  // namespace cf::test
