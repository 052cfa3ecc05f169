// The mutation gate on the GPU: every site of the walk, faulty or not, runs there in float32, with which
// the kernels take no GPTQ weights.
#include "apps/device_ops.hpp"
#include "mutations.hpp"

TEST_CASE("Every fault on the GPU is caught at one tap at least, in every golden file", "[gpu][mutation]") {
  auto device = cf::apps::DeviceOps::create();
  REQUIRE(device);
  cf::test::check_gate(false, [&](const auto& args) { return device->run(args); });
}
