// The CUDA ops against the double oracle within the derived budget, guards and poison intact, the same bits on every run.
#include "device_check.hpp"

using namespace cf;
using namespace cf::test;

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
