// The drafts that a lookup makes of a sequence's own tokens.
#include <cstdint>
#include <random>
#include <vector>

#include "core/model/draft.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/taken.hpp"

namespace {

using namespace cf;
using Ids = std::vector<std::int32_t>;

/// The lookup as its comment says it, n by n.
Ids by_definition(const Ids& tokens, std::int64_t most, const LookupSizes& sizes) {
  const auto size = std::int64_t(tokens.size());
  for (std::int64_t n = std::min(sizes.longest, size - 1); n >= std::max<std::int64_t>(1, sizes.shortest); --n)
    for (std::int64_t end = size - 1; end >= n; --end) {
      if (!std::equal(tokens.end() - n, tokens.end(), tokens.begin() + end - n)) continue;
      Ids all = tokens;
      for (std::int64_t i = 0; i < most; ++i) all.push_back(all[std::size_t(end + i)]);
      return {all.begin() + size, all.end()};
    }
  return {};
}

}  // namespace

TEST_CASE("A lookup goes on as the sequence did behind the last tokens' latest occurrence", "[draft]") {
  const Ids tokens{1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 1, 2, 3};
  CHECK(lookup_draft(tokens, 4) == Ids{5, 6, 7, 1});
  CHECK(lookup_draft(tokens, 1) == Ids{5});
  // The longest of the last tokens come first, even where fewer were seen later.
  CHECK(lookup_draft(Ids{1, 2, 3, 4, 2, 3, 5, 1, 2, 3}, 2) == Ids{4, 2});
  CHECK(lookup_draft(Ids{1, 2, 3, 4, 2, 3, 5, 1, 2, 3}, 2, {.longest = 2}) == Ids{5, 1});
  CHECK(lookup_draft(Ids{7, 2, 3, 4, 8, 2, 3}, 2) == Ids{4, 8});
  CHECK(lookup_draft(Ids{7, 1, 3, 4, 8, 2, 3}, 2) == Ids{});
  CHECK(lookup_draft(Ids{7, 1, 3, 4, 8, 2, 3}, 2, {.shortest = 1}) == Ids{4, 8});
}

TEST_CASE("A draft that reaches the end of the sequence goes on as a period", "[draft]") {
  CHECK(lookup_draft(Ids{4, 4, 4}, 5) == Ids{4, 4, 4, 4, 4});
  CHECK(lookup_draft(Ids{8, 1, 2, 1, 2, 1, 2}, 5) == Ids{1, 2, 1, 2, 1});
}

TEST_CASE("A lookup finds nothing in few tokens, and where nothing is asked for", "[draft]") {
  CHECK(lookup_draft(Ids{}, 4).empty());
  CHECK(lookup_draft(Ids{1}, 4).empty());
  CHECK(lookup_draft(Ids{1, 1}, 4).empty());
  CHECK(lookup_draft(Ids{1, 1}, 4, {.shortest = 1}) == Ids{1, 1, 1, 1});
  CHECK(lookup_draft(Ids{1, 1, 1}, 0).empty());
  CHECK(lookup_draft(Ids{1, 1, 1}, -1).empty());
  CHECK(lookup_draft(Ids{1, 1, 1}, 4, {.longest = 1, .shortest = 2}).empty());
  CHECK(lookup_draft(Ids{1, 1, 1}, 4, {.longest = 0, .shortest = 0}).empty());
  CHECK(lookup_draft(Ids{1, 1, 1}, 2, {.longest = 1000}) == Ids{1, 1});
}

TEST_CASE("A lookup is what its definition says", "[draft]") {
  std::mt19937 random(3);
  int found = 0;
  for (int round = 0; round < 3000; ++round) {
    Ids tokens;
    for (std::uint32_t n = random() % 24; n > 0; --n) tokens.push_back(std::int32_t(random() % 4));
    const std::int64_t most = random() % 9, shortest = 1 + random() % 4, longest = random() % 7;
    const LookupSizes sizes{.longest = longest, .shortest = shortest};
    const Ids draft = lookup_draft(tokens, most, sizes);
    CAPTURE(tokens, most, shortest, longest);
    REQUIRE(draft == by_definition(tokens, most, sizes));
    REQUIRE(test::taken(lookup_drafter(sizes)(tokens, most)) == draft);
    found += !draft.empty();
  }
  CHECK(found > 500);
}

namespace {

/// The lengths of the next `steps` steps' drafts where no id is accepted.
std::vector<std::int64_t> lengths_of_wrong(DraftLength& length, int steps) {
  std::vector<std::int64_t> lengths;
  for (int step = 0; step < steps; ++step) {
    lengths.push_back(length.next());
    if (lengths.back() > 0) length.verified(lengths.back(), 0);
  }
  return lengths;
}
using Lengths = std::vector<std::int64_t>;

}  // namespace

TEST_CASE("Drafts whose ids are accepted get longer, up to the most", "[draft]") {
  for (std::int64_t most = 1; most <= kMostDraft; ++most) {
    DraftLength length(most);
    Lengths lengths;
    for (int step = 0; step < 5; ++step) {
      lengths.push_back(length.next());
      length.verified(lengths.back(), lengths.back());
    }
    CAPTURE(most);
    CHECK(lengths == Lengths{std::min<std::int64_t>(2, most), std::min<std::int64_t>(4, most), most, most, most});
  }
}

TEST_CASE("A draft is twice as long as what was accepted of the last one", "[draft]") {
  DraftLength length;
  length.verified(2, 2), length.verified(4, 4);
  CHECK(length.next() == 7);
  length.verified(7, 5);
  CHECK(length.next() == 7);
  length.verified(7, 3);
  CHECK(length.next() == 6);
  length.verified(6, 1);
  CHECK(length.next() == 2);
  length.verified(2, 1);
  CHECK(length.next() == 2);
  // Short drafts, such as those before the end of a sequence, say nothing against longer ones where they are right.
  length.verified(2, 2), length.verified(4, 4), length.verified(1, 1);
  CHECK(length.next() == 7);
}

TEST_CASE("Drafts without an accepted id get shorter, then rare, and come back with the first one", "[draft]") {
  DraftLength length;
  length.verified(2, 2), length.verified(4, 4);
  CHECK(lengths_of_wrong(length, 17) == Lengths{7, 3, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1});
  // The pauses between them.
  Lengths pauses;
  for (int step = 0, pause = 0; step < 300; ++step) {
    const std::int64_t next = length.next();
    ++pause;
    if (next == 0) continue;
    REQUIRE(next == 1);
    length.verified(1, 0);
    pauses.push_back(pause - 1);
    pause = 0;
  }
  CHECK(pauses == Lengths{16, 32, 64, 64, 64});
  while (length.next() == 0) continue;
  length.verified(1, 1);
  CHECK(lengths_of_wrong(length, 8) == Lengths{2, 1, 0, 0, 0, 0, 1, 0});
}

TEST_CASE("Drafts that no one makes do not change the next one's length", "[draft]") {
  DraftLength length;
  for (int step = 0; step < 50; ++step) REQUIRE(length.next() == 2);
  CHECK(lengths_of_wrong(length, 6) == Lengths{2, 1, 0, 0, 0, 0});
  for (int step = 0; step < 50; ++step) REQUIRE(length.next() == 1);
}
