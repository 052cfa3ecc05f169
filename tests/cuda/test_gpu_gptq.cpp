// Products with quantised weights on the GPU, against the oracle on the weights as checkpoints store them.
#include <cmath>
#include <cstring>

#include "tests/cuda/device_check.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

Setup setup(DType activation, const GptqSetup& gptq, std::uint64_t seed = 1) {
  Setup s{.model = model_of(1, 2, 2, 2), .activation = activation, .gptq = gptq, .seed = seed};
  s.weight = s.values = activation;
  return s;
}

/// Says of a call's packed weight that its rows are in another order.
template <class Args>
void set_pairs(Args& args, const cuda::RopePairs& pairs) {
  auto& packed = std::get<PackedWeight>(args.linear.weight);
  Result<cuda::GptqLayout> layout = cuda::gptq_layout("test", packed);
  REQUIRE(layout);
  layout->pairs = pairs;
  std::memcpy(packed.layout.data(), &*layout, sizeof *layout);
}

}  // namespace

TEST_CASE("linear on the GPU: every format of GPTQ weights", "[gpu][gptq]") {
  const std::vector<GptqSetup> formats{{4, 32, 0, false}, {4, 32, 1, true},  {4, 64, 1, false},
                                       {4, 64, 0, true},  {4, 96, 1, false}, {4, 128, 1, false},
                                       {4, 128, 0, true}, {4, 24, 1, false}, {4, 1 << 14, 0, false},
                                       {8, 32, 1, false}, {8, 128, 0, true}, {8, 1 << 14, 1, false}};
  for (DType activation : {DType::f16, DType::bf16})
    for (const GptqSetup& format : formats)
      for (std::int64_t tokens : {1, 16})
        for (auto [in, out] : {std::pair<std::int64_t, std::int64_t>{64, 16}, {264, 40}, {640, 72}}) {
          INFO("in " << in << ", out " << out << ", tokens " << tokens);
          for (ops::Epilogue epilogue : {ops::Epilogue::none, ops::Epilogue::swiglu})
            CHECK(check_on_device<ops::Linear>(setup(activation, format, std::uint64_t(in)),
                                               linear_example(tokens, in, out, epilogue)));
        }
}

TEST_CASE("linear on the GPU: GPTQ weights with every epilogue, number of tokens and size", "[gpu][gptq]") {
  for (ops::Epilogue epilogue : kEpilogues)
    for (std::int64_t tokens : {1, 2, 3, 8, 9, 16, 17, 40})
      for (auto [in, out] : {std::pair<std::int64_t, std::int64_t>{8, 8}, {32, 24}, {2560, 160}, {5120, 48}}) {
        INFO("in " << in << ", out " << out << ", tokens " << tokens << ", epilogue " << int(epilogue));
        CHECK(check_on_device<ops::Linear>(setup(DType::f16, {4, 128, 1, false}, std::uint64_t(tokens)),
                                           linear_example(tokens, in, out, epilogue)));
      }
}

TEST_CASE("linear on the GPU: one token with GPTQ weights, slices of every length and the groups that they touch",
          "[gpu][gptq]") {
  for (DType activation : {DType::f16, DType::bf16})
    for (std::int64_t group : {64, 128, 192, 256, 1 << 14})
      for (bool desc_act : {false, true})
        for (std::int64_t in : {1088, 2112, 2624, 3072, 3520, 3840, 4096, 4160}) {
          INFO("in " << in << ", group " << group);
          CHECK(check_on_device<ops::Linear>(setup(activation, {4, group, 1, desc_act}, std::uint64_t(in)),
                                             linear_example(1, in, 40, ops::Epilogue::none)));
        }
}

TEST_CASE("linear on the GPU: up to 32 tokens with GPTQ weights, slices of every length, in pairs of chunks and not",
          "[gpu][gptq]") {
  for (DType activation : {DType::f16, DType::bf16})
    for (std::int64_t group : {64, 128, 192, 1 << 14})
      for (bool desc_act : {false, true})
        for (std::int64_t in : {72, 192, 520, 1088, 1600, 2560, 4160, 12288, 12352}) {
          if (in > 4160 && (desc_act || group > 128)) continue;  // the oracle takes these long
          for (const std::int64_t tokens : {9 + in / 8 % 8, 17 + in / 8 % 16}) {
            INFO("in " << in << ", group " << group << ", tokens " << tokens);
            CHECK(check_on_device<ops::Linear>(setup(activation, {4, group, 1, desc_act}, std::uint64_t(in)),
                                               linear_example(tokens, in, 40, ops::Epilogue::residual)));
          }
        }
  // Parts of four chunks, in clusters of one block to eight.
  for (DType activation : {DType::f16, DType::bf16})
    for (std::int64_t in : {2048, 4096, 8192, 10240, 14336, 16384})
      for (ops::Epilogue epilogue : {ops::Epilogue::residual, ops::Epilogue::swiglu}) {
        const bool gated = epilogue == ops::Epilogue::swiglu;
        for (const std::int64_t tokens : {gated ? 16 : 11, gated ? 32 : 27}) {
          INFO("in " << in << ", tokens " << tokens);
          CHECK(
              check_on_device<ops::Linear>(setup(activation, {4, in == 8192 ? 256 : 128, 1, false}, std::uint64_t(in)),
                                           linear_example(tokens, in, 40, epilogue)));
        }
      }
  // Launches of 32 tokens and one of what is left: without scratch memory no other kernel takes columns with an order.
  for (std::int64_t tokens : {17, 31, 33, 64})
    for (const GptqSetup& format : {GptqSetup{4, 128, 1, true}, GptqSetup{8, 128, 1, false}})
      CHECK(check_on_device<ops::Linear>(setup(DType::f16, format, std::uint64_t(tokens)),
                                         linear_example(tokens, 648, 40, ops::Epilogue::none)));
}

TEST_CASE("linear on the GPU: GPTQ weights with a bias of another type than the activations", "[gpu][gptq]") {
  for (DType activation : {DType::f16, DType::bf16})
    for (DType bias : {DType::f16, DType::bf16, DType::f32})
      for (std::int64_t tokens : {1, 2, 8, 16}) {
        Setup s = setup(activation, {4, 128, 1, false});
        s.weight = bias;
        INFO("tokens " << tokens);
        for (ops::Epilogue epilogue : {ops::Epilogue::residual, ops::Epilogue::swiglu})
          CHECK(check_on_device<ops::Linear>(s, linear_example(tokens, 640, 72, epilogue)));
      }
}

TEST_CASE("linear on the GPU: GPTQ weights of so many rows that a thread finishes several elements", "[gpu][gptq]") {
  for (std::int64_t tokens : {1, 8, 16, 32})
    for (std::int64_t out : {20480, 50304})
      for (ops::Epilogue epilogue : {ops::Epilogue::residual, ops::Epilogue::swiglu})
        CHECK(check_on_device<ops::Linear>(setup(DType::f16, {4, 128, 1, false}),
                                           linear_example(tokens, 128, out, epilogue)));
}

TEST_CASE("linear on the GPU: GPTQ weights as long as a cluster takes", "[gpu][gptq]") {
  for (std::int64_t in : {2568, 5128, 10240, 20480})
    CHECK(check_on_device<ops::Linear>(setup(DType::f16, {4, 128, 0, false}), {{3, in, 32, false}, {}}));
  // So many elements that a cluster's blocks share them out.
  for (auto [tokens, in, out] :
       {std::array<std::int64_t, 3>{16, 5128, 5120}, {8, 5128, 9728}, {32, 10240, 2560}, {25, 5120, 5120}})
    for (ops::Epilogue epilogue : {ops::Epilogue::residual, ops::Epilogue::swiglu})
      CHECK(check_on_device<ops::Linear>(setup(DType::f16, {4, 128, 0, false}),
                                         linear_example(tokens, in, out, epilogue)));
  // One column more is said to be too many.
  CHECK_FALSE(check_on_device<ops::Linear>(setup(DType::f16, {4, 128, 0, false}), {{1, 20488, 16, false}, {}}));
}

TEST_CASE("linear on the GPU: GPTQ weights with heavy-tailed activations", "[gpu][gptq]") {
  for (DType activation : {DType::f16, DType::bf16})
    for (Fill fill : {Fill::heavy_tailed, Fill::shifted})
      for (const GptqSetup& format : {GptqSetup{4, 128, 1, false}, GptqSetup{4, 64, 0, true}})
        for (std::int64_t tokens : {1, 2, 9}) {
          Setup s = setup(activation, format);
          s.fill = fill;
          INFO("tokens " << tokens << ", group " << format.group_size);
          for (std::int64_t in : {2560, 4096})
            CHECK(check_on_device<ops::Linear>(s, linear_example(tokens, in, 160, ops::Epilogue::none)));
        }
}

TEST_CASE("linear on the GPU: GPTQ weights and one token of any magnitude", "[gpu][gptq]") {
  cuda::Context c = context();
  constexpr std::int64_t in = 640, out = 72;
  // The powers of two by which no number of the type becomes infinite or loses bits.
  const std::vector<int> of_float16{1, 3, 6}, of_bfloat16{-80, -40, -1, 1, 15, 40, 100};
  for (auto [dtype, desc_act] : {std::pair{DType::bf16, false}, {DType::bf16, true}, {DType::f16, false}}) {
    const bool is_half = dtype == DType::f16;
    const int exponent = is_half ? 1 << 10 : 1 << 7;  // the exponent's lowest bit
    const auto infinity = std::uint16_t(is_half ? 0x7c00 : 0x7f80), nan = std::uint16_t(is_half ? 0x7e00 : 0x7fc0);
    INFO(to_string(dtype));
    DeviceProblem<ops::Linear> p(setup(dtype, {4, 128, 1, desc_act}), {{1, in, out, false}, {}});
    p.args().linear.bias = {};
    std::vector<std::uint16_t> x(in), changed(in);
    require_cuda(cudaMemcpy(x.data(), p.args().x.data, 2 * in, cudaMemcpyDefault));
    const auto y_of = [&](const std::vector<std::uint16_t>& of) {
      require_cuda(cudaMemcpy(const_cast<void*>(p.args().x.data), of.data(), 2 * in, cudaMemcpyDefault));
      require_cuda(cudaDeviceSynchronize());
      Problem<ops::Linear>& host = p.run(c);
      return host.tensor(host.blocks().back());
    };
    // A power of two times the token gives the same power of two times the product, bit by bit.
    for (std::uint16_t& value : x)  // float16's subnormal numbers have no exponent to add to
      if ((value & infinity) == 0) value = 0;
    const Tensor y = y_of(x);
    for (int power : is_half ? of_float16 : of_bfloat16) {
      for (std::size_t i = 0; i < x.size(); ++i)
        changed[i] = x[i] & 0x7fff ? std::uint16_t(x[i] + power * exponent) : x[i];
      const Tensor got = y_of(changed);
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < out; ++i) wrong += got.at(i) != std::ldexp(y.at(i), power);
      INFO("2^" << power);
      CHECK(wrong == 0);
    }
    // Zeros, an infinity, a NaN.
    for (std::uint16_t special : {std::uint16_t(0), infinity, nan}) {
      changed = x;
      if (special == 0)
        changed.assign(x.size(), 0);
      else
        changed[123] = special;
      const Tensor got = y_of(changed);
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < out; ++i) wrong += special == 0 ? got.at(i) != 0 : std::isfinite(got.at(i));
      INFO("special " << special);
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("linear on the GPU: swiglu refuses GPTQ weights whose rows are in RoPE's order", "[gpu][gptq][bad]") {
  DeviceProblem<ops::Linear> p(setup(DType::f16, {4, 32, 0, false}), linear_example(1, 64, 16, ops::Epilogue::swiglu));
  set_pairs(p.args(), {8, 4});
  cuda::Context c = context();
  CHECK(refusal_fault(cuda::run(p.args(), c), Code::unimplemented,
                      {"linear: cuda takes rows that are packed in order with Epilogue::swiglu"}) == "");
}

TEST_CASE("linear on the GPU: GPTQ weights give the same bits a thousand times", "[gpu][gptq]") {
  cuda::Context c = context();
  for (auto [tokens, desc_act] : {std::pair<std::int64_t, bool>{1, true}, {9, true}, {16, false}})
    for (auto [in, out] : {std::pair<std::int64_t, std::int64_t>{2560, 512}, {10240, 256}}) {
      DeviceProblem<ops::Linear> p(setup(DType::f16, {4, 128, 1, desc_act}), {{tokens, in, out, false}, {}});
      const auto first = p.run(c).bytes();
      for (int i = 1; i < 1000; ++i) REQUIRE(cuda::run(p.args(), c));
      CHECK(p.fetch().bytes() == first);
    }
}

TEST_CASE("linear on the GPU: GPTQ weights on Hopper's tensor cores, their tiles, groups, sizes, epilogues",
          "[gpu][gptq][wgmma]") {
  using ops::Epilogue;
  for (DType activation : {DType::f16, DType::bf16})
    for (std::int64_t group : {32, 64, 96, 128, 1 << 14})
      for (std::int64_t tokens : {17, 32, 33, 63, 64, 65, 128})
        for (auto [in, out] : {std::pair<std::int64_t, std::int64_t>{32, 8}, {264, 136}, {640, 72}, {2560, 264}}) {
          if (in > 640 && (tokens == 63 || group == 64)) continue;  // the oracle takes these long
          const Epilogue epilogue = tokens % 2 ? Epilogue::residual : group > 96 ? Epilogue::gelu_erf : Epilogue::none;
          INFO("in " << in << ", out " << out << ", group " << group << ", tokens " << tokens);
          const Setup s = setup(activation, {4, group, int(tokens % 2), false}, std::uint64_t(in + tokens));
          CHECK(check_on_device<ops::Linear>(
              s, {{tokens, in, out, epilogue == Epilogue::residual}, {.epilogue = epilogue}}));
        }
}

TEST_CASE("linear on the GPU: GPTQ weights on Hopper's tensor cores give the same bits a thousand times",
          "[gpu][gptq][wgmma]") {
  cuda::Context c = context();
  for (auto [tokens, in, out] : {std::array<std::int64_t, 3>{33, 2560, 520}, {128, 10240, 264}}) {
    DeviceProblem<ops::Linear> p(setup(DType::f16, {4, 128, 1, false}), {{tokens, in, out, false}, {}});
    const auto first = p.run(c).bytes();
    for (int i = 1; i < 1000; ++i) REQUIRE(cuda::run(p.args(), c));
    CHECK(p.fetch().bytes() == first);
  }
}

TEST_CASE("ln_qkv on the GPU: every format of GPTQ weights", "[gpu][gptq][ln_qkv]") {
  for (DType activation : {DType::f16, DType::bf16})
    for (const GptqSetup& format : {GptqSetup{4, 32, 0, false}, GptqSetup{4, 128, 1, true},
                                    GptqSetup{4, 1 << 14, 0, false}, GptqSetup{8, 64, 1, false}})
      for (const Workload& load : {Workload{1, 1, 9, 12}, Workload{3, 2, 7, 9}, Workload{17, 1, 5, 5}})
        for (const ModelConfig& m : {model_of(2, 80, 20, 200), model_of(5, 64, 64, 136)}) {
          Setup s{.model = m, .load = load, .activation = activation, .gptq = format};
          s.weight = s.values = activation;
          CHECK(check_on_device<ops::LnQkv>(s, ops::example<ops::LnQkv>(s.model, s.load)));
        }
}

TEST_CASE("ln_qkv on the GPU: GPTQ weights of the suite's sizes, the same bits a hundred times",
          "[gpu][gptq][ln_qkv]") {
  for (const ModelConfig& m : {model_of(32, 80, 20, 8), model_of(8, 256, 64, 8), model_of(32, 128, 32, 8)}) {
    Setup s{.model = m,
            .load = {.batch = 1, .q_len = 1, .kv_len = 3},
            .activation = DType::f16,
            .gptq = {4, 128, 1, false}};
    CHECK(check_on_device<ops::LnQkv>(s, ops::example<ops::LnQkv>(s.model, s.load)));
    cuda::Context c = context();
    DeviceProblem<ops::LnQkv> p(s);
    const auto first = p.run(c).bytes();
    for (int i = 1; i < 100; ++i) REQUIRE(cuda::run(p.args(), c));
    CHECK(p.fetch().bytes() == first);
  }
}

TEST_CASE("ln_qkv_heads on the GPU: dense weights, every format of GPTQ weights, heads and kv heads",
          "[gpu][gptq][ln_qkv]") {
  for (DType activation : {DType::f16, DType::bf16})
    for (const GptqSetup& format : {GptqSetup{}, GptqSetup{4, 32, 0, false}, GptqSetup{4, 128, 1, true},
                                    GptqSetup{4, 1 << 14, 0, false}, GptqSetup{8, 64, 1, false}})
      for (const auto& [batch, q_len] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {2, 3}, {17, 1}})
        for (const auto& [heads, kv_heads, head_dim] :
             {std::array<std::int64_t, 3>{2, 2, 80}, {8, 2, 64}, {5, 1, 24}}) {
          INFO("batch " << batch << ", q_len " << q_len << ", heads " << heads << ", kv_heads " << kv_heads);
          CHECK(check_on_device<ops::LnQkvHeads>(setup(activation, format, std::uint64_t(batch)),
                                                 {{batch, q_len, 320, heads, kv_heads, head_dim}, {}}));
        }
}

TEST_CASE("ln_qkv_heads on the GPU: what it cannot do it says", "[gpu][gptq][bad]") {
  cuda::Context c = context();
  const auto refused = [&](const Setup& s, auto change, std::string_view message) {
    DeviceProblem<ops::LnQkvHeads> p(s, {{1, 2, 64, 4, 2, 8}, {}});
    change(p.args());
    CHECK(refusal_fault(cuda::run(p.args(), c), Code::unimplemented, {message}) == "");
  };
  using Args = ops::LnQkvHeads::Args;
  refused(
      setup(DType::f32, {4, 32, 0, false}), [](Args&) {},
      "ln_qkv_heads: cuda takes float16 or bfloat16 activations with GPTQ weights, got float32");
  refused(
      setup(DType::f16, {4, 32, 0, false}),
      [](Args& a) {
        set_pairs(a, {8, 4});
      },
      "ln_qkv_heads: cuda takes packed GPTQ weights with rows in their own order");
}

namespace {

/// Plans for one SM: few blocks, each with much to do.
cuda::Context of_one_sm() {
  cuda::Context c = context();
  cuda::Arch one_sm = cuda::kH200;
  one_sm.sm_count = 1;
  c.set_plan_arch(one_sm);
  return c;
}
void check_linear(const GptqSetup& format, const ops::Linear::Dims& dims, cuda::Context& c) {
  DeviceProblem<ops::Linear> p(setup(DType::f16, format), {dims, {}});
  const Problem<ops::Linear>& got = p.run(c);
  CHECK(std::isfinite(got.tensor(p.blocks().back()).at(0)));
}
template <class Op>
void check_ln_qkv(std::int64_t tokens, cuda::Context& c) {
  Setup s = setup(DType::f16, {4, 128, 0, true});
  s.model = model_of(1, 32, 8, 8);
  s.load = {.batch = tokens, .q_len = 1, .kv_len = 4, .capacity = 5};
  DeviceProblem<Op> p(s);
  CHECK(p.run(c).broken_guard() == "");
}

}  // namespace

// Of every kernel's accesses the fewest, for a tool that follows each of them: a cluster's blocks, rings that come
// round, one token and several.
TEST_CASE("GPTQ weights on the GPU: small products for compute-sanitizer", "[gpu][gptq][small]") {
  cuda::Context c = of_one_sm();
  for (std::int64_t tokens : {1, 2, 9})
    for (const auto& [in, out, group] :
         {std::array<std::int64_t, 3>{2568, 16, 128}, {2568, 144, 128}, {2560, 80, 128}, {64, 80, 32}, {64, 80, 64}}) {
      check_linear({4, group, 1, false}, {tokens, in, out, false}, c);
    }
  check_linear({4, 128, 1, false}, {16, 4096, 80, false}, c);  // parts of four chunks
  for (std::int64_t tokens : {1, 2}) {
    check_ln_qkv<ops::LnQkv>(tokens, c);
    check_ln_qkv<ops::LnQkvHeads>(tokens, c);
  }
}

// On Hopper's tensor cores: warps give stages of codes back by one lane.
TEST_CASE("GPTQ weights on the GPU: small products of more tokens for compute-sanitizer", "[gpu][gptq][small][lane]") {
  cuda::Context c = of_one_sm();
  check_linear({4, 32, 1, false}, {17, 136, 72, false}, c);
  check_linear({4, 128, 1, false}, {40, 1032, 136, false}, c);
}

TEST_CASE("linear on the GPU: what it cannot do with GPTQ weights it says", "[gpu][gptq][bad]") {
  cuda::Context c = context();
  const auto refused = [&](const Setup& s, auto change, Code code, const char* part) {
    DeviceProblem<ops::Linear> p(s, {{2, 64, 32, false}, {}});
    change(p.args());
    const Status status = cuda::run(p.args(), c);
    INFO(status.message());
    REQUIRE_FALSE(status);
    CHECK(status.code() == code);
    CHECK(status.message().find(part) != std::string::npos);
  };
  using Args = ops::Linear::Args;
  const auto packed = [](Args& a) -> PackedWeight& { return std::get<PackedWeight>(a.linear.weight); };
  const Setup half = setup(DType::f16, {4, 32, 0, true});
  refused(
      setup(DType::f32, {4, 32, 0, false}), [](Args&) {}, Code::unimplemented,
      "takes float16 or bfloat16 activations with GPTQ weights, got float32");
  refused(
      half, [](Args& a) { a.linear.weight = GptqWeight{.group_size = 32}; }, Code::invalid_argument,
      "'qweight' is null");
  refused(
      half, [&](Args& a) { packed(a).data.data = nullptr; }, Code::invalid_argument, "'packed' is null");
  refused(
      half, [&](Args& a) { --packed(a).data.shape[0]; }, Code::invalid_argument,
      "linear: 'packed' has 447 words, expected 448");
  refused(
      half, [&](Args& a) { packed(a).out = 16; }, Code::invalid_argument,
      "linear: the packed weight is (16, 64), expected (32, 64)");
  refused(
      half, [&](Args& a) { packed(a).packer = "another"; }, Code::unimplemented,
      "linear: cuda takes weights packed by cf::cuda::pack(), got a weight packed by another");
  const Tensor host(DType::i32, {384});
  refused(
      half, [&](Args& a) { packed(a).data.data = host.as<std::int32_t>(); }, Code::invalid_argument,
      "'packed' points to host memory");
  DeviceProblem<ops::LnQkv> p(
      {.model = model_of(2, 80, 20, 200), .load = {.kv_len = 2}, .activation = DType::f16, .gptq = {4, 32, 0, false}});
  set_pairs(p.args(), {});
  CHECK(cuda::run(p.args(), c).message() ==
        "ln_qkv: cuda takes packed GPTQ weights with rows in the order of its heads' pairs");
}

TEST_CASE("pack on the GPU: GPTQ tensors of device memory give the block of the host's", "[gpu][gptq][pack]") {
  Problem<ops::Linear> p(setup(DType::f16, {4, 32, 1, true}), {{1, 264, 40, false}, {}});
  const GptqWeight& host = std::get<GptqWeight>(p.args().linear.weight);
  GptqWeight device = host;
  std::vector<DeviceBytes> memory;
  for_each_gptq_tensor(device, 40, 264, [&](const TensorSpec&, auto& view, const auto&) {
    memory.emplace_back(std::span(reinterpret_cast<const std::byte*>(view.data), std::size_t(view.bytes())));
    view.data = reinterpret_cast<decltype(view.data)>(memory.back().data());
  });
  GptqWeight both = device;
  both.g_idx = host.g_idx;
  const cuda::Context c = context();
  const Result<cuda::Packed> expected = cuda::pack(host, {.pairs = {8, 4}});
  REQUIRE(expected);
  for (const GptqWeight& source : {host, device, both}) {
    const Result<cuda::Packed> got = cuda::pack(source, {.pairs = {8, 4}}, c);
    INFO(got.status().message());
    REQUIRE(got);
    REQUIRE(got->storage.size_bytes() == expected->storage.size_bytes());
    CHECK(std::memcmp(got->storage.data(), expected->storage.data(), std::size_t(got->storage.size_bytes())) == 0);
  }
  device.scales.shape[0] = 3;
  CHECK(refusal_fault(cuda::pack(device, {}, c).status(), Code::invalid_argument,
                      {"pack: 'scales' has shape (3, 40)"}) == "");
}
