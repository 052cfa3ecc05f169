#pragma once
#include <utility>

#include "core/status.hpp"
#include "tests/support/catch.hpp"

namespace cf::test {

/// The value of a result; the test ends where there is none.
template <class T>
T taken(Result<T> r) {
  INFO(r.status().message());
  REQUIRE(r);
  return std::move(*r);
}

}  // namespace cf::test
