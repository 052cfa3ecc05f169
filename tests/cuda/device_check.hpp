#pragma once
// One call of an op on the GPU against the double oracle within the derived budget. Guards, poison and the part of a
// cache that may not change stay as they are; reruns have the same bits. Under the plans of every GPU that has plans.
#include <functional>

#include "cpu_ref/cpu_ref.hpp"
#include "tests/cuda/device_problem.hpp"
#include "tests/support/op_state.hpp"
#include "tests/support/setups.hpp"

namespace cf::test {

inline cuda::Context context(cudaStream_t stream = nullptr) {
  const auto c = cuda::Context::create(0, stream);
  REQUIRE(c);
  return *c;
}

/// Contexts on this device: with its own plans, and with those of an RTX 5090.
inline std::array<cuda::Context, 2> contexts(cudaStream_t stream = nullptr) {
  const cuda::Context own = context(stream);
  std::array<cuda::Context, 2> all{own, own};
  all[1].set_plan_arch(cuda::kRtx5090);
  return all;
}

/// Runs a problem of this setup on the device and compares the outputs with the oracle's. Returns whether the device
/// has a kernel for it; where there is none, the refusal must give a reason. `change` may take optional tensors away.
template <class Op>
bool check_on_device(
    const Setup& s, Problem<Op>& untouched, cuda::Scratch scratch = {},
    const std::function<void(typename Op::Args&)>& change = [](auto&) {}) {
  INFO(Op::name << ": " << describe(s));
  std::array<cuda::Context, 2> all = contexts();
  DeviceProblem<Op> device(untouched), again(untouched);
  change(device.args());
  change(again.args());
  {
    cuda::LaunchList launches(all[0], scratch);
    if (const Status status = cuda::prepare(device.args(), launches); status.code() == Code::unimplemented) {
      CHECK(status.message().find("cuda takes") != std::string::npos);
      return false;
    }
  }
  Problem<Op> reference(untouched, DType::f64);
  change(reference.args());
  REQUIRE(cpu_ref::run(reference.args()));
  const auto condition = cpu_ref::condition(reference.args());
  REQUIRE(condition);
  const Budget budget = Op::budget(reference.dims(), {.compute = DType::f32, .output = s.activation}, *condition);

  std::vector<std::byte> checked;
  for (cuda::Context& c : all) {
    INFO("planned for " << to_string(c.arch()));
    for (DeviceProblem<Op>* p : {&device, &again}) p->restore(untouched);
    Problem<Op>& got = device.run(c, scratch);
    const std::vector<std::byte> bytes = got.bytes();
    CHECK(again.run(c, scratch).bytes() == bytes);
    if (bytes == checked) continue;  // other plans, but the same bits
    checked = bytes;
    for (std::size_t i = 0; i < got.blocks().size(); ++i) {
      auto& block = got.blocks()[i];
      if (block.role == Role::state) check_state(untouched, got, reference, i, budget);
      if (block.role != Role::output) continue;
      const auto result = compare(got.tensor(block), reference.tensor(reference.blocks()[i]));
      REQUIRE(result);
      INFO(block.name << ": relative L2 " << result->rel_l2 << " (budget " << budget.rel_l2 << "), relative max "
                      << result->rel_max << " (budget " << budget.rel_max << ") at " << result->worst_coordinate);
      CHECK(result->within(budget));
    }
  }
  return true;
}

template <class Op>
bool check_on_device(const Setup& s, const std::pair<typename Op::Dims, typename Op::Args>& sizes,
                     cuda::Scratch scratch = {}) {
  Problem<Op> untouched(s, sizes);
  return check_on_device<Op>(s, untouched, scratch);
}

/// The table of setups with weights that go with the activations.
inline std::vector<Setup> device_setups(DType activation) {
  std::vector<Setup> all = setups(activation);
  if (activation != DType::f32)
    for (Setup& s : all) s.weight = s.values = activation;
  return all;
}

}  // namespace cf::test
