#pragma once
// The caches that an op appends to, after a call on either backend.
#include <cstring>

#include "core/compare.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/op_problem.hpp"

namespace cf::test {

/// The part of a cache that may not change has its bits; what was appended is the reference's, to one rounding.
template <class Op>
void check_state(Problem<Op>& untouched, Problem<Op>& got, Problem<Op>& reference, std::size_t block,
                 const Budget& budget) {
  auto &old_block = untouched.blocks()[block], &new_block = got.blocks()[block];
  const Tensor before = untouched.tensor(old_block), after = got.tensor(new_block);
  const std::size_t size = size_bytes(before.dtype());
  Tensor mine(DType::f64, {before.size()}), theirs(DType::f64, {before.size()});
  for (std::int64_t i = 0; i < before.size(); ++i) {
    if (got.appended(i, before.shape())) {
      mine.as<double>()[i] = after.at(i);
      theirs.as<double>()[i] = load_element(reference.blocks()[block].data(), DType::f64, i);
    } else {
      const auto offset = std::size_t(i) * size;
      REQUIRE(std::memcmp(static_cast<const char*>(before.data()) + offset,
                          static_cast<const char*>(after.data()) + offset, size) == 0);
    }
  }
  const auto c = compare(mine, theirs);
  REQUIRE(c);
  INFO(new_block.name << ": relative L2 " << c->rel_l2);
  CHECK(c->within(budget));
}

}  // namespace cf::test
