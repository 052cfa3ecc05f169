// The CUDA ops against the double oracle within the derived budget, guards and poison intact, the same bits on every
// run.
#include "tests/cuda/device_check.hpp"
#include "tests/support/op_test_case.hpp"

using namespace cf;
using namespace cf::test;

namespace {

constexpr std::int64_t kLongKvLen = 100;

/// The table of setups whose kv_len is below kLongKvLen, or the rest. The number of those that ran.
template <class Op>
int check_setups(DType activation, bool is_long) {
  int ran = 0;
  for (const Setup& s : device_setups(activation))
    if ((s.load.kv_len >= kLongKvLen) == is_long) ran += check_on_device<Op>(s, example_of<Op>(s));
  return ran;
}

}  // namespace

OP_TEST_CASE("Every op on the GPU agrees with the oracle", "[gpu][ops][small]", ops::All) {
  for (DType activation : {DType::f16, DType::bf16, DType::f32}) CHECK(check_setups<TestType>(activation, false) >= 15);
}

OP_TEST_CASE("Every op on the GPU agrees with the oracle at long kv_len", "[gpu][ops]", ops::All) {
  for (DType activation : {DType::f16, DType::bf16, DType::f32}) CHECK(check_setups<TestType>(activation, true) >= 5);
}

OP_TEST_CASE("No op on the GPU keeps device memory", "[gpu][alone]", ops::All) {
  cuda::Context c = context();
  const Setup s{
      .model = model_of(2, 80, 20, 200), .load = {.batch = 2, .q_len = 1, .kv_len = 33}, .activation = DType::f16};
  DeviceProblem<TestType> p(s);
  p.run(c);  // loads the kernels
  std::size_t before = 0, after = 0, total = 0;
  require_cuda(cudaMemGetInfo(&before, &total));
  for (int i = 0; i < 20; ++i) {
    cuda::Context another = context();
    p.run(another);
  }
  require_cuda(cudaMemGetInfo(&after, &total));
  CHECK(after == before);
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
