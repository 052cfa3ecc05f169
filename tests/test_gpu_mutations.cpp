// The mutation gate on the GPU: every site of the walk, faulty or not, runs there. In float32 its kernels take no GPTQ
// weights, whose faults are put into a walk of float16.
#include "apps/device_ops.hpp"
#include "mutations.hpp"

using namespace cf;
using namespace cf::test;

TEST_CASE("Every fault on the GPU is caught at one tap at least, in every golden file", "[gpu][mutation]") {
  auto device = apps::DeviceOps::create();
  REQUIRE(device);
  check_gate(false, [&](const auto& args) { return device->run(args); });
}

// A tap's budget is that of the walk without a fault: the faulty one's oracle has the fault too.
TEST_CASE("Every fault of GPTQ weights on the GPU is caught at one tap at least", "[gpu][mutation][gptq]") {
  const apps::WalkOptions options{.backend = apps::Backend::cuda, .activation = DType::f16};
  std::map<std::string, int> files_caught;
  int files = 0;
  for (const std::string& path : golden_files()) {
    const auto file = golden::GoldenFile::open(path);
    REQUIRE(file);
    const auto weights = file->weights();
    REQUIRE(weights);
    if (quantised_linears(weights->weights) == 0 || file->meta().dtype != DType::f16) continue;
    ++files;
    const auto sound = apps::walk_golden(*file, *weights, options);
    INFO(path << " " << sound.status().message());
    REQUIRE(sound);
    for (const apps::TapResult& tap : *sound) CHECK(tap.ok());
    for (const Fault& fault : faults()) {
      if (!fault.quantised) continue;
      Fault::Scratch scratch;
      golden::GoldenWeights faulty = *weights;
      for_each_linear(file->meta().config, faulty.weights, [&](std::string_view, LinearParams& linear, auto...) {
        if (auto* gptq = std::get_if<GptqWeight>(&linear.weight)) fault.gptq(*gptq, scratch);
      });
      const auto walked = apps::walk_golden(*file, faulty, options);
      INFO(fault.name << ": " << walked.status().message());
      REQUIRE(walked);
      REQUIRE(walked->size() == sound->size());
      bool is_caught = false;
      for (std::size_t i = 0; i < sound->size(); ++i) {
        const Comparison& error = (*walked)[i].error;
        is_caught = is_caught || error.non_finite || error.rel_l2 > (*sound)[i].budget;
      }
      files_caught[fault.name] += is_caught;
    }
  }
  REQUIRE(files >= 4);
  for (const Fault& fault : faults()) {
    INFO("fault: " << fault.name);
    CHECK((!fault.quantised || files_caught[fault.name] > 0));
  }
}
