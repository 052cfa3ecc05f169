// The mutation gate on the GPU: every site of the walk, faulty or not, runs there. The kernels of float32 take no GPTQ
// weights, so a walk of float16 gets the faults of GPTQ weights. The persistent kernel gets the faults of what a layer
// starts from. It also gets those of GPTQ weights, in layers of the sizes that it takes packed.
#include <optional>

#include "apps/verify/device_ops.hpp"
#include "tests/cuda/persistent_taps.hpp"
#include "tests/golden/mutations.hpp"

using namespace cf;
using namespace cf::test;

TEST_CASE("Every fault on the GPU is caught at one tap at least, in every golden file", "[gpu][mutation]") {
  auto device = apps::DeviceOps::create();
  REQUIRE(device);
  check_gate(false, [&](const auto& args) { return device->run(args); });
}

// A tap's budget is that of the walk without a fault, because the oracle of a faulty walk has the fault too.
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
      if (!fault.gptq) continue;
      Fault::Scratch scratch;
      golden::GoldenWeights faulty = *weights;
      for_each_linear(file->meta().config, faulty.weights, [&](const Site&, LinearParams& linear, auto...) {
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

TEST_CASE("Every fault in what the persistent kernel starts from is caught at one tap at least, in most golden files",
          "[gpu][mutation][fused]") {
  auto device = apps::DeviceOps::create();
  REQUIRE(device);
  std::map<std::string, int> files_caught, files_concerned;
  int files = 0;
  for (const std::string& path : gate_files(false)) {
    const auto file = golden::GoldenFile::open(path);
    REQUIRE(file);
    const auto weights = file->weights();
    REQUIRE(weights);
    if (!fused_refusal(file->meta(), weights->weights).empty()) continue;
    ++files;
    const DType dtype = file->meta().dtype;
    const auto sound = apps::walk_golden(*file, *weights,
                                         {.backend = apps::Backend::cuda,
                                          .activation = dtype,
                                          .isolated = false,
                                          .own_rope_table = true,
                                          .impl = apps::WalkImpl::layer});
    INFO(path << " " << sound.status().message());
    REQUIRE(sound);
    std::map<std::string, double> budgets;
    for (const apps::TapResult& tap : *sound) budgets[tap.tap] = tap.budget;
    // Empty where the kernel refuses the faulty layer: it has no norm of heads beside a parallel residual.
    const auto is_caught = [&](const Fault& fault) -> std::optional<bool> {
      FaultyStep step(*file, *weights, fault, dtype);
      const Status run = device->run_layer({.model = step.config, .weights = step.weights, .t = step.state.tensors()});
      INFO(fault.name << ": " << run.message());
      if (run.code() == Code::unimplemented) return {};
      REQUIRE(run);
      const auto budget_of = [&](const std::string& tap) { return budgets.at(tap); };
      return !taps_outside(*file, step, budget_of, [](const auto&) { return Status(); }).empty();
    };
    CHECK(is_caught({.name = "no fault"}) == false);
    for (const Fault& fault : faults())
      if (fault.before && !fault.fine && (!fault.concerns || fault.concerns(file->meta().config)))
        if (const std::optional<bool> caught = is_caught(fault)) {
          ++files_concerned[fault.name];
          files_caught[fault.name] += *caught;
        }
  }
  CHECK(files >= 4);
  CHECK(files_caught.size() >= 7);
  for (const auto& [fault, caught] : files_caught) {
    INFO("fault: " << fault);
    CHECK(2 * caught > files_concerned[fault]);  // one entry of a hundred may weigh less than a rounding
  }
}

// The kernel has the faulty weights, the oracle the sound ones.
TEST_CASE("Every fault of GPTQ weights leaves the persistent kernel's budget at one tap at least",
          "[gpu][mutation][fused][packed]") {
  const cuda::Context c = context();
  const WeightFormat linears = GENERATE(WeightFormat{4, 128}, WeightFormat{4, 32}, WeightFormat{8, 128});
  const bool shuffled = GENERATE(false, true);
  const DType dtype = GENERATE(DType::f16, DType::bf16);
  for (ModelConfig m : {model_of(4, 64, 16, 512), gated_model_of(ModelType::llama, 8, 2, 64, 512, 1024)})
    for (const std::int64_t batch : {1, 3}) {
      m.dtype = dtype;
      const auto layers = [&] {
        HostLayers host(m, {.batch = batch, .capacity = 40}, "", linears);
        if (shuffled) host.shuffle_groups();
        return host;
      };
      const HostLayers sound = layers();
      const auto taps_outside = [&](const Fault& fault) {
        HostLayers faulty = layers();
        Fault::Scratch scratch;
        int changed = 0;
        for (LinearParams LayerWeights::*linear : HostLayers::kLinears)
          if (auto* gptq = std::get_if<GptqWeight>(&(faulty.weights[0].weights.*linear).weight)) {
            if (fault.gptq) fault.gptq(*gptq, scratch);
            ++changed;
          }
        REQUIRE(changed == 4);
        DeviceLayers on(c, faulty);
        auto kernel =
            cuda::PersistentKernel::create(c, cuda::persistent_model(m, m.dtype), on.layers, on.sequences(), on.rope());
        require_ok(kernel.status());
        REQUIRE(cuda::is_packed(kernel->plan().products));
        int outside = 0;
        compare_taps(*kernel, c, on, sound, 33, [&](std::string_view, const Comparison& error, const Budget& budget) {
          outside += error.non_finite || !error.within(budget);
        });
        return outside;
      };
      CAPTURE(m.name, batch, linears.bits, linears.group_size, shuffled, to_string(dtype));
      CHECK(taps_outside({.name = "no fault"}) == 0);
      for (const Fault& fault : faults()) {
        if (!fault.gptq || (!shuffled && fault.name == "GPTQ g_idx is ignored")) continue;
        if (fault.fine && (dtype == DType::bf16 || linears.bits == 8)) continue;
        INFO("fault: " << fault.name);
        CHECK(taps_outside(fault) > 0);
      }
    }
}
