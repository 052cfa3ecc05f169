#include "core/model/draft.hpp"

#include <algorithm>

namespace cf {

std::vector<std::int32_t> lookup_draft(std::span<const std::int32_t> tokens, std::int64_t most,
                                       const LookupSizes& sizes) {
  const auto n = std::int64_t(tokens.size());
  if (most < 1 || sizes.shortest < 1 || n <= sizes.shortest) return {};
  const std::int32_t last = tokens.back();
  std::int64_t found = 0, alike = sizes.shortest - 1;  // where the longest occurrence ends, and its length
  for (std::int64_t end = n - 1; end > alike && alike < sizes.longest; --end) {
    if (tokens[std::size_t(end - 1)] != last) continue;
    std::int64_t length = 1;
    const std::int64_t longest = std::min(end, sizes.longest);
    while (length < longest && tokens[std::size_t(end - 1 - length)] == tokens[std::size_t(n - 1 - length)]) ++length;
    if (length > alike) found = end, alike = length;
  }
  std::vector<std::int32_t> draft;
  if (found == 0) return draft;
  for (std::int64_t i = found; i < found + most; ++i)
    draft.push_back(i < n ? tokens[std::size_t(i)] : draft[std::size_t(i - n)]);
  return draft;
}

DraftLength::DraftLength(std::int64_t most) : most_(most), length_(std::min(most, kFirst)) {}

std::int64_t DraftLength::next() {
  if (left_ == 0) return length_;
  --left_;
  return 0;
}

void DraftLength::verified(std::int64_t drafted, std::int64_t accepted) {
  if (accepted > 0) {
    // A draft may be shorter than it could be. Where all of it was accepted, it says nothing against longer ones.
    const std::int64_t least = accepted == drafted ? length_ : 1;
    length_ = std::clamp(2 * accepted, least, most_);
    pause_ = kShortestPause;
  } else if (length_ > 1) {
    length_ /= 2;
  } else {
    left_ = pause_;
    pause_ = std::min(2 * pause_, kLongestPause);
  }
}

std::int64_t exact_run_tokens(const ModelRunner& runner) {
  const auto* const exact = dynamic_cast<const ExactRuns*>(&runner);
  return exact ? exact->exact_run_tokens() : 0;
}

Drafter lookup_drafter(const LookupSizes& sizes) {
  return [sizes](std::span<const std::int32_t> tokens, std::int64_t most) -> Result<std::vector<std::int32_t>> {
    return lookup_draft(tokens, most, sizes);
  };
}

}  // namespace cf
