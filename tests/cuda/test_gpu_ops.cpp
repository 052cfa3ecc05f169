// The CUDA ops against the double oracle within the derived budget, guards and poison intact, the same bits on every
// run.
#include <cmath>
#include <limits>

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

OP_TEST_CASE("Every op on the GPU agrees with the oracle", "[gpu][ops][small]", DeviceOps) {
  for (DType activation : {DType::f16, DType::bf16, DType::f32}) CHECK(check_setups<TestType>(activation, false) >= 15);
}

OP_TEST_CASE("Every op on the GPU agrees with the oracle at long kv_len", "[gpu][ops]", DeviceOps) {
  for (DType activation : {DType::f16, DType::bf16, DType::f32}) CHECK(check_setups<TestType>(activation, true) >= 5);
}

OP_TEST_CASE("Every fused op on the GPU agrees with the oracle where a kernel takes it", "[gpu][ops][gptq][small]",
             ops::Fused) {
  int ran = 0;
  for (DType activation : {DType::f16, DType::bf16})
    for (Fill fill : {Fill::normal, Fill::heavy_tailed})
      for (const auto& [heads, kv_heads, head_dim, hidden] :
           {std::tuple<int, int, int, int>{4, 2, 64, 256}, {5, 5, 80, 400}, {8, 2, 128, 1024}}) {
        Setup s{.model = gated_model_of(ModelType::llama, heads, kv_heads, head_dim, hidden, 512),
                .load = {.batch = 1, .q_len = 1, .kv_len = 9, .capacity = 12},
                .activation = activation,
                .fill = fill,
                .gptq = {4, 128, 1, false}};
        s.weight = s.values = activation;
        ran += check_on_device<TestType>(s, example_of<TestType>(s));
      }
  CHECK(ran >= 6);
}

OP_TEST_CASE("No op on the GPU keeps device memory", "[gpu][alone]", DeviceOps) {
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
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (ops::Epilogue epilogue : kEpilogues)
      for (std::int64_t tokens : {1, 2, 8, 9, 16, 17, 40})
        for (auto [in, out] :
             {std::pair<std::int64_t, std::int64_t>{8, 1}, {24, 7}, {256, 8}, {264, 9}, {1280, 20}, {2560, 63}}) {
          Setup s{.model = model_of(1, 2, 2, 2), .activation = activation, .seed = std::uint64_t(in)};
          s.weight = s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
          CHECK(check_on_device<ops::Linear>(s, linear_example(tokens, in, out, epilogue)));
        }
}

OP_TEST_CASE("Norms on the GPU agree with the oracle", "[gpu][layernorm]", std::tuple<ops::LayerNorm, ops::RmsNorm>) {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (std::int64_t hidden : {8, 16, 160, 248, 256, 264, 2048, 2560, 4096, 5120, 8192, 8200, 32768})
      for (std::int64_t tokens : {1, 3})
        for (Fill fill : {Fill::normal, Fill::heavy_tailed, Fill::shifted}) {
          Setup s{.model = model_of(1, 2, 2, 2), .activation = activation, .fill = fill};
          s.weight = activation == DType::bf16 ? DType::bf16 : DType::f16;
          s.values = s.weight;
          CHECK(check_on_device<TestType>(s, {{tokens, hidden}, {}}));
        }
}

TEST_CASE("embedding on the GPU: a table of learned positions", "[gpu][ops]") {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (DType weight : {DType::f16, DType::bf16, DType::f32})
      for (std::int64_t hidden : {8, 768, 2056}) {
        Setup s{.model = model_of(1, 2, 2, 2),
                .load = {.batch = 3, .q_len = 2, .kv_len = 9},
                .activation = activation,
                .weight = weight};
        s.values = weight == DType::bf16 ? DType::bf16 : DType::f16;
        CHECK(check_on_device<ops::Embedding>(s, {{6, 37, hidden, 12}, {}}));
      }
}

TEST_CASE("qk_norm on the GPU: every layout, head size and number of heads", "[gpu][ops]") {
  using ops::QkvLayout;
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (const auto& [heads, kv_heads, layout] : {std::tuple{32, 8, QkvLayout::separate},
                                                  {1, 1, QkvLayout::separate},
                                                  {7, 1, QkvLayout::separate},
                                                  {3, 3, QkvLayout::interleaved_by_head}})
      for (std::int64_t head_dim : {8, 64, 80, 96, 128, 256})
        for (Fill fill : {Fill::normal, Fill::heavy_tailed, Fill::shifted}) {
          Setup s{.model = model_of(1, 2, 2, 2), .activation = activation, .fill = fill};
          s.weight = s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
          for (std::int64_t tokens : {1, 5})
            CHECK(check_on_device<ops::QkNorm>(
                s, {{tokens, heads, kv_heads, head_dim, layout}, {.layout = layout, .kv_heads = kv_heads}}));
        }
}

TEST_CASE("rope and rope_append on the GPU without a table part the product", "[gpu][ops]") {
  using ops::QkvLayout;
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (const QkvLayout layout : {QkvLayout::separate, QkvLayout::interleaved_by_head})
      for (std::int64_t batch : {1, 3, 700}) {
        Setup s{.model = model_of(12, 64, 8, 8), .load = {.batch = batch, .q_len = 1, .kv_len = 5}};
        s.activation = activation;
        s.weight = s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
        CHECK(check_on_device<ops::Rope>(s, {{batch, 12, 12, 64, 0, 0, layout}, {.layout = layout}}));
        CHECK(check_on_device<ops::RopeAppend>(s, {{batch, 1, 12, 12, 64, 0, 0, 6, layout}, {.layout = layout}}));
      }
}

TEST_CASE("swiglu on the GPU: gates from -200 to 200, of zero and of NaN, in every kernel of linear", "[gpu][linear]") {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (std::int64_t tokens : {1, 12, 40}) {
      // A weight of zeros leaves the biases, which are the gate's and the up row's sums.
      const std::int64_t in = 8, out = 512;
      Setup s{.model = model_of(1, 2, 2, 2), .activation = activation};
      s.weight = s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
      Problem<ops::Linear> p(s, linear_example(tokens, in, out, ops::Epilogue::swiglu));
      for (auto& block : p.blocks())
        if (block.name == "weight" || block.name == "bias")
          dispatch_float(block.dtype, [&](auto zero) {
            using T = decltype(zero);
            for (std::int64_t i = 0; i < element_count(block.shape); ++i) {
              const double gate = (double(i / 2) - double(out) / 2) * 200 / (double(out) / 2);
              static_cast<T*>(block.data())[i] = narrow<T>(block.name == "weight" ? 0 : i % 2 ? 1.5 : gate);
            }
          });
      CHECK(check_on_device<ops::Linear>(s, p));
      // A NaN of the first token stays in that token's elements, and reaches no other token's.
      for (auto& block : p.blocks())
        if (block.name == "x")
          dispatch_float(block.dtype, [&](auto zero) {
            using T = decltype(zero);
            static_cast<T*>(block.data())[0] = narrow<T>(std::numeric_limits<double>::quiet_NaN());
          });
      DeviceProblem<ops::Linear> device(p);
      cuda::Context c = context();
      Problem<ops::Linear>& got = device.run(c);
      const Tensor y = got.tensor(got.blocks().back());
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < y.size(); ++i) wrong += std::isnan(y.at(i)) != (i < out);
      INFO(to_string(activation) << ", tokens " << tokens);
      CHECK(wrong == 0);
    }
}
