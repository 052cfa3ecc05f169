// A family of models that the CUDA backend knows nothing of: its sites run one by one and as a graph.
#include <vector>

#include "core/compare.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cuda/step/graph.hpp"
#include "cuda/runtime/memory.hpp"
#include "tests/cuda/device_tensors.hpp"
#include "tests/support/toy_family.hpp"

namespace {

using namespace cf;
using namespace cf::test;

/// A toy model's tensors on the device.
struct DeviceToy {
  ToyModel model;
  std::vector<cuda::DeviceMemory> memory;

  DeviceToy(ToyModel from, const cuda::Context& context) : model(std::move(from)) {
    for_each_toy_tensor(
        model.spec, model.tokens, model.weights, model.tensors, [&](const TensorSpec& t, auto& view, auto) {
          auto block = cuda::DeviceMemory::create(context, std::size_t(view.bytes()), t.name);
          require_ok(block.status());
          require_ok(cuda::copy_to_device(context, block->data(), view.data, std::size_t(view.bytes())));
          view.data = reinterpret_cast<decltype(view.data)>(block->data());
          memory.push_back(std::move(*block));
        });
  }
  template <class F>
  Status walk(F&& f) const {
    return for_each_toy_site(model.spec, model.weights, model.tensors, f);
  }
  /// Makes the outputs NaN, so that a site that is skipped shows.
  void poison() const {
    for (const AnyView<2>& v : {model.tensors.normed, model.tensors.output})
      require_cuda(cudaMemset(v.data, 0xff, std::size_t(v.bytes())));
    require_cuda(cudaDeviceSynchronize());
  }
};

}  // namespace

TEST_CASE("A family of two sites runs on the GPU op by op and as a graph", "[gpu][small]") {
  const DType dtype = GENERATE(DType::f16, DType::bf16, DType::f32);
  const std::int64_t tokens = GENERATE(1, 5);
  CAPTURE(to_string(dtype), tokens);
  const ToySpec spec{.hidden_size = 256};
  cuda::Context c = context();
  const DeviceToy toy(ToyModel(spec, tokens, dtype, dtype), c);

  // Site by site against the oracle, which is given what the device was given.
  toy.poison();
  ToyModel oracle(spec, tokens, DType::f64, dtype);
  require_ok(toy.walk([&](const Site&, const auto& args) { return cuda::run(args, c); }));
  const Tensor normed = fetch<2>(toy.model.tensors.normed), output = fetch<2>(toy.model.tensors.output);
  const auto check = [&](const auto& args, const Tensor& got) -> Status {
    using Op = typename std::decay_t<decltype(args)>::Op;
    CF_TRY(cpu_ref::run(args));
    CF_TRY_ASSIGN(const Condition condition, cpu_ref::condition(args));
    const AnyView<2> y = args.y;
    Tensor expected(y.dtype, {y.shape[0], y.shape[1]});
    std::memcpy(expected.data(), y.data, std::size_t(expected.size_bytes()));
    CF_TRY_ASSIGN(const Comparison error, compare(got, expected));
    CAPTURE(Op::name, error.rel_l2, error.rel_max);
    CHECK(error.within(Op::budget(Op::dims(args), {DType::f32, dtype}, condition)));
    return {};
  };
  const Tensor given = normed.converted(DType::f64);
  require_ok(for_each_toy_site(spec, oracle.weights, oracle.tensors, [&](const Site& site, auto args) -> Status {
    if constexpr (std::is_same_v<decltype(args), ops::Linear::Args>) args.x = given.view<2>();
    return check(args, site.name == toy_site::norm.name ? normed : output);
  }));

  toy.poison();
  const auto graph = cuda::capture_walk(c, [&](auto&& add) { return toy.walk(add); });
  require_ok(graph.status());
  require_cuda(cudaGraphLaunch(graph->get(), c.stream()));
  CHECK(same_bits(fetch<2>(toy.model.tensors.normed), normed));
  CHECK(same_bits(fetch<2>(toy.model.tensors.output), output));
}
