// The CUDA ops against the double oracle within the derived budget, guards and poison intact, the same bits on every run.
#include "core/compare.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "device_problem.hpp"
#include "setups.hpp"

using namespace cf;
using namespace cf::test;

namespace {

cuda::Context context() {
  const auto c = cuda::Context::create();
  REQUIRE(c);
  return *c;
}

/// What of a cache may not change is as it was, bit by bit; what was appended is the reference's, to one rounding.
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

/// Whether the device runs the call; what it runs is held against the oracle. What it does not run must say why.
template <class Op>
bool check_on_device(const Setup& s, const std::pair<typename Op::Dims, typename Op::Args>& sizes) {
  INFO(Op::name << ": " << describe(s));
  cuda::Context c = context();
  DeviceProblem<Op> device(s, sizes), again(s, sizes);
  if (const Status status = cuda::run(device.args(), c); status.code() == Code::unimplemented) {
    CHECK(status.message().find("cuda takes") != std::string::npos);
    return false;
  }
  Setup exact = s;
  exact.activation = DType::f64;
  Problem<Op> reference(exact, sizes), untouched(s, sizes);
  REQUIRE(cpu_ref::run(reference.args()));
  const auto condition = cpu_ref::condition(reference.args());
  REQUIRE(condition);
  const Budget budget = Op::budget(reference.dims(), {.compute = DType::f32, .output = s.activation}, *condition);

  Problem<Op>& got = device.run(c);
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
  CHECK(again.run(c).bytes() == got.bytes());
  return true;
}

/// The table of setups with weights that go with the activations.
std::vector<Setup> device_setups(DType activation) {
  std::vector<Setup> all = setups(activation);
  if (activation != DType::f32)
    for (Setup& s : all) s.weight = s.values = activation;
  return all;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("Every op on the GPU agrees with the oracle", "[gpu][ops]", ops::All) {
  for (DType activation : {DType::f16, DType::bf16, DType::f32}) {
    int ran = 0;
    for (const Setup& s : device_setups(activation))
      ran += check_on_device<TestType>(s, TestType::example(s.model, s.load));
    CHECK(ran >= 20);
  }
}

TEST_CASE("linear on the GPU: every epilogue and odd size", "[gpu][linear]") {
  using ops::Epilogue;
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (Epilogue epilogue : {Epilogue::none, Epilogue::gelu_erf, Epilogue::gelu_tanh, Epilogue::residual})
      for (std::int64_t tokens : {1, 2, 8, 9, 16, 17, 40})
        for (auto [in, out] :
             {std::pair<std::int64_t, std::int64_t>{8, 1}, {24, 7}, {256, 8}, {264, 9}, {1280, 20}, {2560, 63}}) {
          Setup s{.model = model_of(1, 2, 2, 2), .activation = activation, .seed = std::uint64_t(in)};
          s.weight = s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
          CHECK(check_on_device<ops::Linear>(
              s, {{tokens, in, out, epilogue == Epilogue::residual}, {.epilogue = epilogue}}));
        }
}

TEST_CASE("Kernels that may start before their predecessor is done compute the same bits", "[gpu][overlap]") {
  Setup s{
      .model = model_of(32, 80, 20, 1024), .load = {.batch = 2, .q_len = 1, .kv_len = 129}, .activation = DType::f16};
  s.model.max_position_embeddings = 129;
  cuda::Context apart = context(), overlapping = context();
  overlapping.set_overlap(true);
  DeviceProblem<ops::DecodeLayer> first(s), second(s);
  const auto expected = first.run(apart).bytes();
  for (int i = 0; i < 100; ++i) REQUIRE(cuda::run(second.args(), overlapping));
  require_cuda(cudaDeviceSynchronize());
  CHECK(second.fetch().bytes() == expected);
}

TEST_CASE("layernorm on the GPU agrees with the oracle", "[gpu][layernorm]") {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (std::int64_t hidden : {8, 16, 160, 248, 256, 264, 2048, 2560, 4096, 5120, 8192, 8200, 32768})
      for (std::int64_t tokens : {1, 3})
        for (Fill fill : {Fill::normal, Fill::heavy_tailed, Fill::shifted}) {
          Setup s{.model = model_of(1, 2, 2, 2), .activation = activation, .fill = fill};
          s.weight = activation == DType::bf16 ? DType::bf16 : DType::f16;
          s.values = s.weight;
          CHECK(check_on_device<ops::LayerNorm>(s, {{tokens, hidden}, {}}));
        }
}

TEST_CASE("layernorm on the GPU gives the same bits a thousand times", "[gpu][layernorm]") {
  cuda::Context c = context();
  const Setup s{.model = model_of(32, 80, 20, 2), .activation = DType::f16};
  DeviceProblem<ops::LayerNorm> p(s);
  const auto first = p.run(c).bytes();
  for (int i = 1; i < 1000; ++i) REQUIRE(cuda::run(p.args(), c));
  require_cuda(cudaDeviceSynchronize());
  CHECK(p.fetch().bytes() == first);
}

TEST_CASE("What layernorm cannot run on the GPU is refused before any launch", "[gpu][bad]") {
  cuda::Context c = context();
  const Setup s{.model = model_of(2, 80, 20, 2), .activation = DType::f16};
  const auto refused = [&](auto change, Code code, const char* part) {
    DeviceProblem<ops::LayerNorm> p(s);
    change(p.args());
    const Status status = cuda::run(p.args(), c);
    INFO(status.message());
    REQUIRE_FALSE(status);
    CHECK(status.code() == code);
    CHECK(status.message().find(part) != std::string::npos);
    require_cuda(cudaDeviceSynchronize());
  };
  using Args = ops::LayerNorm::Args;
  std::vector<f16> host(160);
  refused([](Args& a) { a.x.data = nullptr; }, Code::invalid_argument, "'x' is null");
  refused([&](Args& a) { a.x.data = host.data(); }, Code::invalid_argument, "'x' points to host memory");
  refused([](Args& a) { a.y.data = static_cast<char*>(a.y.data) + 2; }, Code::invalid_argument, "'y' is misaligned");
  refused([](Args& a) { a.norm.gamma.dtype = a.norm.beta.dtype = DType::f64; }, Code::unimplemented,
          "'gamma' has dtype float64");
  refused([](Args& a) { a.x.dtype = a.y.dtype = DType::f64; }, Code::unimplemented, "got float64");
  refused([](Args& a) { a.x.shape[1] = a.y.shape[1] = a.norm.gamma.shape[0] = a.norm.beta.shape[0] = 156; },
          Code::unimplemented, "multiple of 8");
  DeviceProblem<ops::LayerNorm> p(s);
  p.run(c);  // the context is as usable as before
}
