#pragma once
// Where a token that a fused op appends lies in a layer's cache.
#include <cstdint>
#include <limits>
#include <string>

#include "core/cache_tensors.hpp"
#include "core/host_device.hpp"
#include "core/status.hpp"
#include "cuda/ops/any_cache.hpp"

namespace cf::cuda {

/// The row of the first head of an appended entry, among all rows of the cache's tensor. Another head's row is
/// head * matrix_rows() behind it: a kernel asks once for a token, and not again for each element that it stores. -1, so
/// that nothing is stored, where the row sees no entries, and where its page is none of the tensor's `storages`.
CF_HD constexpr int appended_row(const AnyCacheView& cache, std::int64_t storages, int sequence, int length, int count,
                                 int nth) {
  const int entry = cache.appended_entry(length, count, nth);
  if (entry < 0) return -1;
  const AnyCacheView::MatrixRow at = cache.matrix_row(sequence, 0, entry);
  if (at.matrix < 0 || at.matrix >= storages * cache.heads()) return -1;
  return int(at.matrix * cache.matrix_rows() + at.row);
}

/// Refuses a cache whose rows have numbers beyond 32 bits.
template <class Args>
Status check_cache_rows(const Args& args) {
  const auto& [storages, heads, entries, head_dim] = args.k_cache.shape;
  const std::int64_t most = std::numeric_limits<std::int32_t>::max();
  if (storages <= most / heads / entries) return {};
  return Status::error(Code::unimplemented, std::string(Args::Op::name) + ": cuda takes a cache of up to " +
                                                std::to_string(most) + " rows of heads, got " +
                                                std::to_string(storages) + " x " + std::to_string(heads) + " x " +
                                                std::to_string(entries));
}

}  // namespace cf::cuda
