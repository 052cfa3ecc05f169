#include <algorithm>
#include <utility>

#include "cuda/serve/model_state.hpp"

namespace cf::cuda {

Status Model::State::update_pages(std::span<const PagePool::Copy> copies) {
  return cache.set_pages(copies, pages.take_changes(), stream.get());
}

Status Model::State::reserve(std::span<const Run> runs) {
  if (!pages) return {};
  pipeline.give_up();
  Result<std::vector<PagePool::Copy>> copies = pages.reserve(runs);
  if (!copies && copies.status().code() == Code::out_of_memory) {
    drop_pages_ahead(pages);
    copies = pages.reserve(runs);
  }
  CF_TRY(copies.status());
  // New entries are valid once they are made.
  for (const Run& r : runs) pipeline.cut(r.sequence, r.first_position);
  return update_pages(*copies);
}

void Model::State::drop_pages_ahead(SlotPages& of) const {
  for (std::int64_t slot = 0; slot < options.slots; ++slot) of.truncate(slot, pipeline.lengths()[slot]);
}

Result<bool> Model::State::try_reserve(std::span<const Run> runs) {
  if (!pages) return true;
  const Result<std::vector<PagePool::Copy>> copies = pages.reserve(runs);
  if (!copies && copies.status().code() == Code::out_of_memory) return false;
  CF_TRY(copies.status());
  CF_TRY(update_pages(*copies));
  return true;
}

Result<bool> Model::State::make_room(std::span<const Token> next) {
  if (!pages) return true;
  // A step continues every slot that the one before had. One that is not asked for may have given its pages away.
  const bool same = std::ranges::count(stepping, true) == std::int64_t(next.size()) &&
                    std::ranges::all_of(next, [&](const Token& t) { return bool(stepping[std::size_t(t.slot)]); });
  if (!same) return false;
  std::vector<Run> runs;
  for (const Token& t : next) runs.push_back({.sequence = t.slot, .first_position = t.position});
  return try_reserve(runs);
}

std::int64_t Model::page_entries() const { return state_->pages ? state_->options.page_entries : 0; }
std::int64_t Model::free_pages() const { return state_->pages.free_pages(); }

Status Model::check_room(std::span<const Run> runs) const {
  const State& s = *state_;
  const Status room = s.pages.check(runs);
  if (room || room.code() != Code::out_of_memory) return room;
  // A step that runs ahead holds pages that run() takes back.
  SlotPages without = s.pages;
  s.drop_pages_ahead(without);
  return without.check(runs);
}

Status Model::fork(std::int64_t from, std::int64_t to, std::int64_t n) {
  State& s = *state_;
  if (!s.pages) return ModelRunner::fork(from, to, n);
  if (from >= 0 && from < slots() && n > length(from))
    return bad_argument(kModelName, "fork: expected 0 to " + std::to_string(length(from)) + " entries of slot " +
                                        std::to_string(from) + ", got " + std::to_string(n));
  CF_TRY(s.pages.fork(from, to, n));
  s.pipeline.adopt(to, n);
  return s.update_pages({});
}

void Model::release(std::int64_t slot) {
  State& s = *state_;
  s.pipeline.release(slot);
  s.pages.release(slot);
}

}  // namespace cf::cuda
