#pragma once
#include <string>
#include <string_view>
#include <tuple>

#include "core/ops/all.hpp"
#include "tests/support/catch.hpp"

namespace cf::test {

/// The ops whose calls have a kernel on a GPU, whatever the weights. Those of fused.def run where a kernel takes the
/// call.
using DeviceOps = decltype(std::tuple_cat(ops::All{}, ops::Ranks{}, ops::Port{}));

/// The op types of a std::tuple.
template <class Ops>
struct OpList;

template <class... Ops>
struct OpList<std::tuple<Ops...>> {
  /// Calls enrol<Op>() for each op.
  template <class Enrol>
  static bool for_each(const Enrol& enrol) {
    (enrol.template operator()<Ops>(), ...);
    return true;
  }
};

inline std::string op_case_name(std::string_view name, std::string_view op) {
  return std::string(name).append(" - ").append(op);
}

}  // namespace cf::test

#define CF_OP_TEST_CASE_(run_case, case_name, tags, ...)                                                        \
  template <class TestType>                                                                                     \
  static void run_case();                                                                                       \
  [[maybe_unused]] static const bool run_case##_enrolled = cf::test::OpList<__VA_ARGS__>::for_each(             \
      []<class Op>() { REGISTER_TEST_CASE(run_case<Op>, cf::test::op_case_name(case_name, Op::name), tags); }); \
  template <class TestType>                                                                                     \
  static void run_case()
#define CF_OP_TEST_CASE_AT_(line, ...) CF_OP_TEST_CASE_(cf_op_case_##line, __VA_ARGS__)
#define CF_OP_TEST_CASE_ON_(line, ...) CF_OP_TEST_CASE_AT_(line, __VA_ARGS__)

/// OP_TEST_CASE("name", "[tags]", ops::All) { ... TestType ... }: one test case for each op of the std::tuple, whose
/// name is "name - <the op's name>". Catch2's own TEMPLATE_LIST_TEST_CASE numbers the types instead.
#define OP_TEST_CASE(...) CF_OP_TEST_CASE_ON_(__LINE__, __VA_ARGS__)
