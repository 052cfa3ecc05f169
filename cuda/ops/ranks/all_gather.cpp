#include "cuda/ops/ranks/all_gather.hpp"

namespace cf::cuda {
namespace {

std::int64_t row_bytes(const ops::AllGather::Args& a) { return a.x.shape[2] * std::int64_t(size_bytes(a.x.dtype)); }

}  // namespace

Result<ExchangePlan> plan_all_gather_parts(const Target&, const ops::AllGather::Args& a) {
  if (a.x.shape[0] != a.ranks) return not_taken("the parts of all ranks", "this rank's");
  if (row_bytes(a) % kLaneBytes)
    return Status::error(Code::unimplemented, "all_gather: cuda takes rows of a multiple of " +
                                                  std::to_string(kLaneBytes) + " bytes, got " +
                                                  std::to_string(row_bytes(a)));
  return plan_items(a.x.bytes() / kLaneBytes, 256, 0);
}

Result<ExchangePlan> plan_all_gather_words(const Target&, const ops::AllGather::Args& a) {
  CF_TRY_ASSIGN(const std::int64_t lanes, lanes_of(a, row_bytes(a)));
  return plan_words(a, lanes);
}

Result<ExchangePlan> plan_all_gather_slices(const Target& target, const ops::AllGather::Args& a) {
  CF_TRY_ASSIGN(const std::int64_t lanes, lanes_of(a, row_bytes(a)));
  return plan_slices(target, lanes);
}

}  // namespace cf::cuda
