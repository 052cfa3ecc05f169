// Which GPUs a test sees of those that CTest has given to it.
#include "tests/cuda/gpus_of_test.hpp"

#include <map>

#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/taken.hpp"

using namespace cf;
using namespace cf::test;

namespace {

using Variables = std::map<std::string, std::string>;

Result<std::string> gpus_of(const Variables& variables) {
  return gpus_of_test([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

}  // namespace

TEST_CASE("Without a resource spec file, and without a group of GPUs, a test sees what is there", "[gpus]") {
  CHECK(taken(gpus_of({})) == "");
  CHECK(taken(gpus_of({{"CUDA_VISIBLE_DEVICES", "2,3"}})) == "");
  CHECK(taken(gpus_of({{"CTEST_RESOURCE_GROUP_COUNT", "0"}})) == "");
  CHECK(taken(gpus_of({{"CTEST_RESOURCE_GROUP_COUNT", "1"}, {"CTEST_RESOURCE_GROUP_0", "licences"}})) == "");
}

TEST_CASE("A test sees the GPUs of its groups, each once and in order", "[gpus]") {
  CHECK(taken(gpus_of({{"CTEST_RESOURCE_GROUP_COUNT", "1"}, {"CTEST_RESOURCE_GROUP_0_GPUS", "id:3,slots:1"}})) == "3");
  const Variables groups = {{"CTEST_RESOURCE_GROUP_COUNT", "3"},
                            {"CTEST_RESOURCE_GROUP_0_GPUS", "id:10,slots:5"},
                            {"CTEST_RESOURCE_GROUP_1_GPUS", "id:2,slots:5;id:0,slots:1"},
                            {"CTEST_RESOURCE_GROUP_2_GPUS", "id:2,slots:1"},
                            {"CTEST_RESOURCE_GROUP_3_GPUS", "id:7,slots:1"}};
  CHECK(taken(gpus_of(groups)) == "0,2,10");
}

TEST_CASE("The ids of groups count the GPUs that are listed", "[gpus]") {
  const Variables groups = {{"CUDA_VISIBLE_DEVICES", "5,GPU-8a1,1"},
                            {"CTEST_RESOURCE_GROUP_COUNT", "2"},
                            {"CTEST_RESOURCE_GROUP_0_GPUS", "id:1,slots:8"},
                            {"CTEST_RESOURCE_GROUP_1_GPUS", "id:0,slots:8"}};
  CHECK(taken(gpus_of(groups)) == "5,GPU-8a1");
}

TEST_CASE("Groups that are not CTest's are refused by the variable's name", "[gpus]") {
  const auto refused = [](const Variables& variables, std::string_view what) {
    return refusal_fault(gpus_of(variables).status(), Code::invalid_argument, {what});
  };
  CHECK(refused({{"CTEST_RESOURCE_GROUP_COUNT", "one"}}, "CTEST_RESOURCE_GROUP_COUNT: expected a number, got 'one'") ==
        "");
  for (const char* given : {"id:,slots:1", "0,slots:1", "id:x", "id:-1,slots:1", "id:1x,slots:1"})
    CHECK(refused({{"CTEST_RESOURCE_GROUP_COUNT", "1"}, {"CTEST_RESOURCE_GROUP_0_GPUS", given}},
                  std::string("CTEST_RESOURCE_GROUP_0_GPUS: expected id:N,slots:M, got '") + given + "'") == "");
  CHECK(
      refused({{"CUDA_VISIBLE_DEVICES", "0,1"},
               {"CTEST_RESOURCE_GROUP_COUNT", "1"},
               {"CTEST_RESOURCE_GROUP_0_GPUS", "id:2,slots:1"}},
              "CTEST_RESOURCE_GROUP_0_GPUS: expected one of the 2 GPUs of CUDA_VISIBLE_DEVICES, got 'id:2,slots:1'") ==
      "");
}
