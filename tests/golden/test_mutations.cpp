#include "cpu_ref/cpu_ref.hpp"
#include "tests/golden/mutations.hpp"

TEST_CASE("Every fault is caught at one tap at least, in every golden file", "[mutation]") {
  cf::test::check_gate(true, [](const auto& args) { return cf::cpu_ref::run(args); });
}
