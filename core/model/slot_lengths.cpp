#include "core/model/slot_lengths.hpp"

#include <utility>

namespace cf {
namespace {

Status refused(std::string what) { return Status::error(Code::invalid_argument, "model: " + std::move(what)); }

}  // namespace

Status check_ids(std::string_view owner, std::string_view what, std::span<const std::int32_t> ids,
                 std::int64_t vocab_size) {
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= vocab_size)
      return Status::error(Code::invalid_argument, std::string(owner) + ": " + std::string(what) + "[" +
                                                       std::to_string(i) + "]: expected an id of 0 to " +
                                                       std::to_string(vocab_size - 1) + ", got " +
                                                       std::to_string(ids[i]));
  return {};
}

Status SlotLengths::check(std::int64_t slot, std::int64_t first, std::int64_t tokens) const {
  if (slot < 0 || slot >= slots())
    return refused("slot: expected 0 to " + std::to_string(slots() - 1) + ", got " + std::to_string(slot));
  const std::string name = "slot " + std::to_string(slot) + ": ";
  if (tokens < 1) return refused(name + "expected at least one id, got none");
  const std::int64_t length = (*this)[slot];
  if (first < 0 || first > length)
    return refused(name + "expected a first position of 0 to " + std::to_string(length) + ", its entries, got " +
                   std::to_string(first));
  if (first + tokens > most())
    return refused(name + "expected at most " + std::to_string(most()) + " entries, " + std::string(limit_.name) +
                   ", got " + std::to_string(first + tokens));
  return {};
}

Status SlotLengths::check(std::span<const Run> runs) const {
  if (runs.empty()) return refused("runs: expected at least one, got none");
  std::vector<bool> seen(lengths_.size());
  for (const Run& r : runs) {
    CF_TRY(check(r.sequence, r.first_position, r.count));
    if (seen[std::size_t(r.sequence)])
      return refused("slot " + std::to_string(r.sequence) + ": expected one run a step, got two");
    seen[std::size_t(r.sequence)] = true;
  }
  return {};
}

}  // namespace cf
