// How a Linear is made of the parts that checkpoints store.
#include <cstdint>
#include <vector>

#include "golden/checkpoint/join_parts.hpp"
#include "tests/support/catch.hpp"

using namespace cf;
using namespace cf::checkpoint;

namespace {

/// A matrix whose element (r, c) of part p is 10000 p + 100 r + c, joined by transposition of its parts.
template <class T>
std::vector<T> joined_transposes(const StoredParts& stored, std::int64_t columns, std::int64_t all_rows) {
  std::vector<T> whole(std::size_t(all_rows * columns), T(-1));
  for (std::size_t p = 0; p < stored.parts.size(); ++p) {
    const std::int64_t rows = stored.parts[p].rows;
    std::vector<T> part(std::size_t(rows * columns));
    for (std::int64_t c = 0; c < columns; ++c)
      for (std::int64_t r = 0; r < rows; ++r)
        part[std::size_t(c * rows + r)] = T(10000 * std::int64_t(p) + 100 * r + c);
    transpose_part(stored, p, part.data(), whole.data(), columns, sizeof(T));
  }
  return whole;
}

template <class T>
void check_transposes() {
  for (const bool interleaved : {false, true})
    for (const std::int64_t columns : {1, 7, 33, 64}) {
      const std::int64_t rows_of_last = interleaved ? 37 : 5;
      const StoredParts stored{{{"a", 37}, {"b", rows_of_last}}, interleaved, true};
      const std::vector<T> whole = joined_transposes<T>(stored, columns, 37 + rows_of_last);
      std::int64_t wrong = 0;
      for (std::size_t p = 0; p < 2; ++p)
        for (std::int64_t r = 0; r < stored.parts[p].rows; ++r)
          for (std::int64_t c = 0; c < columns; ++c)
            wrong +=
                whole[std::size_t(stored.joined_row(p, r) * columns + c)] != T(10000 * std::int64_t(p) + 100 * r + c);
      CAPTURE(interleaved, columns, sizeof(T));
      CHECK(wrong == 0);
    }
}

}  // namespace

TEST_CASE("Parts that are stored as (in, out) are transposed to their rows of the matrix", "[checkpoint]") {
  check_transposes<std::uint16_t>();
  check_transposes<std::uint32_t>();
  check_transposes<std::uint64_t>();
}

TEST_CASE("A Linear is whole where its only part is stored as it is", "[checkpoint]") {
  CHECK(StoredParts{{{"a", 2}}}.is_whole());
  CHECK_FALSE(StoredParts{{{"a", 2}}, false, true}.is_whole());
  CHECK_FALSE(StoredParts{{{"a", 2}, {"b", 2}}}.is_whole());
}
