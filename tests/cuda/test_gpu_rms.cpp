// Products with quantised weights whose kernels normalise their token: the bits are those of the ops one after the
// other.
#include <cstring>

#include "cuda/ops/rms_linear/rms_linear.hpp"
#include "tests/cuda/device_check.hpp"

using namespace cf;
using namespace cf::test;

namespace {

Setup setup(DType activation, const GptqSetup& gptq, std::int64_t hidden) {
  Setup s{.model = model_of(1, 2, 2, 2), .activation = activation, .gptq = gptq, .seed = std::uint64_t(hidden)};
  s.weight = s.values = activation;
  return s;
}

/// Runs an op that is made of others.
template <class Args>
void run_fused(const Args& args, cuda::Context& c) {
  cuda::LaunchList launches(c);
  Status s = prepare(args, launches);
  if (s) s = launches.submit(c.stream());
  INFO(s.message());
  REQUIRE(s);
  require_cuda(cudaDeviceSynchronize());
}
template <class Args>
void run_op(const Args& args, cuda::Context& c) {
  const Status s = cuda::run(args, c);
  INFO(s.message());
  REQUIRE(s);
}

/// Whether a fused op has a kernel for a call.
template <class Args>
bool takes(const cuda::Arch& arch, const Args& args) {
  return Args::Op::check(args) && cuda::choose({.arch = arch}, args);
}

/// A norm of one token and the product behind it.
struct NormAndProduct {
  DeviceProblem<ops::RmsNorm> norm;
  Problem<ops::Linear> host;
  DeviceProblem<ops::Linear> linear;
  std::vector<DeviceBytes> packed;

  NormAndProduct(const Setup& s, std::int64_t hidden, const ops::Example<ops::Linear>& sizes)
      : norm(s, {{1, hidden}, {}}), host(s, sizes), linear(host) {
    linear.args().x = norm.args().y;
  }
  /// Packs the weight anew, with rows in this order.
  void pack_in(const cuda::RopePairs& pairs) {
    const Result<cuda::Packed> made = cuda::pack(host.args().linear.weight, {.pairs = pairs});
    REQUIRE(made);
    const auto* const block = static_cast<const std::byte*>(made->storage.data());
    packed.emplace_back(std::span(block, std::size_t(made->storage.size_bytes())));
    auto weight = std::get<PackedWeight>(made->weight);
    weight.data.data = reinterpret_cast<const std::int32_t*>(packed.back().data());
    linear.args().linear.weight = weight;
  }
  void run_apart(cuda::Context& c) {
    run_op(norm.args(), c);
    run_op(linear.args(), c);
  }
};

/// Whether RmsLinear gives the bits of rmsnorm and linear, for every GPU's plans. The plans must take the call.
bool same_bits(const Setup& s, std::int64_t hidden, const ops::Example<ops::Linear>& sizes) {
  bool same = true;
  for (cuda::Context& c : contexts()) {
    NormAndProduct apart(s, hidden, sizes), fused(s, hidden, sizes);
    apart.run_apart(c);
    const auto args = ops::RmsLinear::of_parts(fused.norm.args(), fused.linear.args());
    REQUIRE(takes(c.arch(), args));
    const std::vector<std::byte> before = fused.norm.fetch().bytes();
    for (int i = 0; i < 3; ++i) run_fused(args, c);
    same = same && fused.linear.fetch().bytes() == apart.linear.fetch().bytes() && fused.norm.fetch().bytes() == before;
  }
  return same;
}

}  // namespace

TEST_CASE("rms_linear on the GPU gives the bits of rmsnorm and linear, and leaves the norm's result alone",
          "[gpu][gptq][rms]") {
  for (DType activation : {DType::f16, DType::bf16})
    for (const GptqSetup& format :
         {GptqSetup{4, 64, 1, false}, GptqSetup{4, 128, 1, true}, GptqSetup{4, 1 << 14, 0, false}})
      for (std::int64_t hidden : {8, 264, 640, 2048, 2568, 3072, 3584, 4096, 5120, 8192}) {
        INFO(to_string(activation) << ", group " << format.group_size << ", hidden " << hidden);
        for (ops::Epilogue epilogue : kEpilogues)
          if (epilogue != ops::Epilogue::residual)
            CHECK(same_bits(setup(activation, format, hidden), hidden, linear_example(1, hidden, 40, epilogue)));
      }
}

TEST_CASE("rms_linear on the GPU: many rows, and activations of every kind", "[gpu][gptq][rms]") {
  for (Fill fill : {Fill::normal, Fill::heavy_tailed, Fill::shifted})
    for (const auto& [hidden, out] : {std::pair<std::int64_t, std::int64_t>{2048, 8192}, {4096, 14336}, {8192, 4096}}) {
      Setup s = setup(DType::bf16, {4, 128, 1, false}, hidden);
      s.fill = fill;
      INFO("hidden " << hidden << ", fill " << int(fill));
      CHECK(same_bits(s, hidden, linear_example(1, hidden, out, ops::Epilogue::swiglu)));
    }
}

TEST_CASE("rms_linear on the GPU: the plan takes what its kernel does", "[gpu][gptq][rms]") {
  const auto takes_call = [](const Setup& s, std::int64_t hidden, std::int64_t tokens, auto change) {
    NormAndProduct p(s, hidden, linear_example(tokens, hidden, 40));
    ops::RmsNorm::Args norm = p.norm.args();
    norm.x.shape[0] = tokens;
    auto args = ops::RmsLinear::of_parts(norm, p.linear.args());
    change(args);
    return takes(cuda::kH200, args);
  };
  const auto nothing = [](ops::RmsLinear::Args&) {};
  const Setup good = setup(DType::f16, {4, 128, 1, false}, 640);
  CHECK(takes_call(good, 640, 1, nothing));
  CHECK(takes_call(good, 8192, 1, nothing));
  CHECK_FALSE(takes_call(good, 8200, 1, nothing));  // rmsnorm's threads then have 64 elements
  CHECK_FALSE(takes_call(good, 640, 2, nothing));
  CHECK_FALSE(takes_call(setup(DType::f16, {}, 640), 640, 1, nothing));
  CHECK_FALSE(takes_call(setup(DType::f16, {4, 32, 1, false}, 640), 640, 1, nothing));
  CHECK_FALSE(takes_call(good, 640, 1, [](auto& a) { a.gamma.dtype = DType::f32; }));
  CHECK_FALSE(takes_call(good, 640, 1, [](auto& a) { a.linear.bias.dtype = DType::f32; }));
  CHECK_FALSE(takes_call(good, 640, 1, [](auto& a) { a.x.shape[1] = 648; }));
}

TEST_CASE("rms_qkv on the GPU gives the bits of rmsnorm, linear and rope_append", "[gpu][gptq][rms]") {
  struct Case {
    std::int64_t hidden, heads, kv_heads, head_dim, rotary_dim;
    std::int32_t kv_len = 9, position = 8;  // the cache and the table have room for 12
  };
  for (const Case& n :
       {Case{2048, 32, 8, 64, 64}, Case{4096, 32, 8, 128, 128}, Case{3072, 24, 8, 128, 128},
        Case{3584, 28, 4, 128, 128}, Case{264, 3, 1, 80, 20}, Case{640, 5, 5, 24, 24}, Case{640, 4, 1, 64, 64, 12, 11},
        Case{640, 4, 1, 64, 64, 13}, Case{640, 4, 1, 64, 64, 0}, Case{640, 4, 1, 64, 64, -7},
        Case{640, 4, 1, 64, 64, 9, 12}, Case{640, 4, 1, 64, 64, 9, -1}, Case{640, 4, 1, 64, 64, 1, 0}})
    for (const auto& [activation, desc_act, with_bias] :
         {std::tuple{DType::f16, false, true}, {DType::bf16, true, false}, {DType::bf16, false, true}}) {
      Setup s = setup(activation, {4, 128, 1, desc_act}, n.hidden);
      s.model = gated_model_of(ModelType::llama, n.heads, n.kv_heads, n.head_dim, n.hidden, 8);
      s.model.rotary_dim = n.rotary_dim;
      s.load = {.batch = 1, .q_len = 1, .kv_len = 9, .capacity = 12};
      INFO(describe(s) << ", kv_len " << n.kv_len << ", position " << n.position << ", bias " << with_bias);
      const std::int64_t all_heads = n.heads + 2 * n.kv_heads;
      for (cuda::Context& c : contexts()) {
        const auto result = [&](bool fuse) {
          NormAndProduct p(s, n.hidden, linear_example(1, n.hidden, all_heads * n.head_dim));
          p.pack_in({n.head_dim, n.rotary_dim, n.heads + n.kv_heads});
          if (!with_bias) p.linear.args().linear.bias = {};
          DeviceProblem<ops::RopeAppend> rope(s);
          rope.args().qkv =
              ConstAnyView<4>(p.linear.args().y.data, {1, all_heads, 1, n.head_dim}, p.linear.args().y.dtype);
          require_cuda(cudaMemcpy(const_cast<std::int32_t*>(rope.args().kv_len.data), &n.kv_len, 4, cudaMemcpyDefault));
          require_cuda(
              cudaMemcpy(const_cast<std::int32_t*>(rope.args().positions.data), &n.position, 4, cudaMemcpyDefault));
          if (fuse) {
            const auto args =
                ops::RmsQkv::of_parts(ops::RmsLinear::of_parts(p.norm.args(), p.linear.args()), rope.args());
            REQUIRE(takes(c.arch(), args));
            run_fused(args, c);
          } else {
            p.run_apart(c);
            run_op(rope.args(), c);
          }
          return rope.fetch().bytes();
        };
        const bool same = result(true) == result(false);
        CHECK(same);
      }
    }
}

TEST_CASE("rms_qkv on the GPU: the plan takes what its kernel does", "[gpu][gptq][rms]") {
  Setup s = setup(DType::f16, {4, 128, 1, false}, 640);
  s.model = gated_model_of(ModelType::llama, 4, 1, 64, 640, 8);
  s.load = {.batch = 1, .q_len = 1, .kv_len = 9, .capacity = 12};
  DeviceProblem<ops::RopeAppend> rope(s);
  const auto takes_call = [&](const cuda::RopePairs& pairs, auto change) {
    NormAndProduct p(s, 640, linear_example(1, 640, 6 * 64));
    p.pack_in(pairs);
    auto args = ops::RmsQkv::of_parts(ops::RmsLinear::of_parts(p.norm.args(), p.linear.args()), rope.args());
    change(args);
    return takes(cuda::kH200, args);
  };
  const auto nothing = [](ops::RmsQkv::Args&) {};
  CHECK(takes_call({64, 64, 5}, nothing));
  CHECK_FALSE(takes_call({}, nothing));
  CHECK_FALSE(takes_call({64, 64}, nothing));
  CHECK_FALSE(takes_call({64, 64, 4}, nothing));
  CHECK_FALSE(takes_call({64, 64, 5}, [](auto& a) { a.q.shape[1] = 5; }));
}

TEST_CASE("rms_linear and rms_qkv on the GPU: small calls for compute-sanitizer", "[gpu][gptq][rms][small]") {
  cuda::Context c = context();
  cuda::Arch one_sm = cuda::kH200;
  one_sm.sm_count = 1;
  c.set_plan_arch(one_sm);
  for (std::int64_t hidden : {264, 4160}) {
    NormAndProduct p(setup(DType::f16, {4, 128, 1, false}, hidden), hidden,
                     linear_example(1, hidden, 80, ops::Epilogue::swiglu));
    run_fused(ops::RmsLinear::of_parts(p.norm.args(), p.linear.args()), c);
    CHECK(p.linear.fetch().broken_guard() == "");
    Setup s = setup(DType::bf16, {4, 128, 1, true}, hidden);
    s.model = gated_model_of(ModelType::llama, 2, 1, 32, hidden, 8);
    s.load = {.batch = 1, .q_len = 1, .kv_len = 4, .capacity = 5};
    NormAndProduct qkv(s, hidden, linear_example(1, hidden, 128));
    qkv.pack_in({32, 32, 3});
    DeviceProblem<ops::RopeAppend> rope(s);
    rope.args().qkv = ConstAnyView<4>(qkv.linear.args().y.data, {1, 4, 1, 32}, DType::bf16);
    run_fused(ops::RmsQkv::of_parts(ops::RmsLinear::of_parts(qkv.norm.args(), qkv.linear.args()), rope.args()), c);
    CHECK(rope.fetch().broken_guard() == "");
  }
}
