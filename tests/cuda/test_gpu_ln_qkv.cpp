// ln_qkv on the GPU gives the bits of the four ops that it is made of.
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/ops/linear/wgmma/packed_plan.hpp"
#include "tests/cuda/device_check.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

/// A problem's blocks after the four ops ran apart.
std::vector<std::byte> apart(DeviceProblem<ops::LnQkv>& p, DType activation, cuda::Context& c) {
  const auto d = p.dims();
  const auto elements = [&](std::int64_t n) { return std::vector<std::byte>(std::size_t(n) * size_bytes(activation)); };
  const DeviceBytes z(elements(d.tokens() * d.hidden)), w(elements(d.tokens() * d.out()));
  const AnyView<2> z_view(z.data(), {d.tokens(), d.hidden}, activation);
  const AnyView<4> w_view(w.data(), {d.tokens(), d.heads, 3, d.head_dim}, activation);
  const Status s =
      ops::LnQkv::for_each_part(p.args(), z_view, w_view, [&](const auto& args) { return cuda::run(args, c); });
  INFO(s.message());
  REQUIRE(s);
  return p.fetch().bytes();
}

/// Over rows in one warp's part or less, in whole ones, in a last one that is not whole, and the longest.
void check_bits(DType activation, const GptqSetup& gptq) {
  struct Sizes {
    std::int64_t hidden, heads, head_dim, rotary_dim;
  };
  cuda::Context c = context();
  for (const Sizes& n : {Sizes{8, 1, 8, 2}, Sizes{160, 2, 80, 20}, Sizes{256, 4, 64, 64}, Sizes{520, 5, 104, 26},
                         Sizes{2560, 1, 80, 20}, Sizes{4104, 1, 64, 16}, Sizes{8192, 1, 32, 8}})
    for (const Workload& load : {Workload{1, 1, 30, 31}, Workload{1, 3, 30, 31}, Workload{4, 1, 31, 31},
                                 Workload{9, 1, 30, 31}, Workload{6, 3, 30, 31}}) {
      Setup s{.model = model_of(n.heads, n.head_dim, n.rotary_dim, 8),
              .load = load,
              .activation = activation,
              .gptq = gptq};
      s.weight = s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
      INFO(describe(s) << ", hidden " << n.hidden);
      auto sizes = ops::example<ops::LnQkv>(s.model, s.load);
      sizes.first.hidden = n.hidden;
      DeviceProblem<ops::LnQkv> fused(s, sizes), parts(s, sizes);
      if (load.batch == 4) fused.args().linear.bias.data = parts.args().linear.bias.data = nullptr;
      const auto* const packed = std::get_if<PackedWeight>(&parts.args().linear.weight);
      const auto is_wide = [&] {
        const Result<cuda::GptqLayout> layout = cuda::gptq_layout("linear", *packed);
        REQUIRE(layout);
        return cuda::gptq_is_wide(c.arch(), cuda::gptq_sizes(*layout, load.tokens()), load.tokens());
      };
      // There linear's sums have another order.
      const std::int64_t tokens = load.batch * load.q_len, out = sizes.first.out();
      if (cuda::is_linear_wgmma(c.arch(), tokens, n.hidden, out, activation, gptq.bits) ||
          (gptq.bits == 4 && !gptq.desc_act && cuda::is_wgmma_packed(c.arch(), tokens, n.hidden, out, activation)) ||
          (packed && is_wide())) {
        CHECK(check_on_device<ops::LnQkv>(s, sizes));
        continue;
      }
      const auto expected = apart(parts, activation, c);
      const bool same = fused.run(c).bytes() == expected;
      CHECK(same);
    }
}

}  // namespace

TEST_CASE("ln_qkv on the GPU gives the bits of layernorm, linear, rope and kv_append", "[gpu][ln_qkv]") {
  for (DType activation : {DType::f16, DType::bf16, DType::f32}) check_bits(activation, {});
}

TEST_CASE("ln_qkv on the GPU gives the bits of its parts with GPTQ weights too", "[gpu][ln_qkv][gptq]") {
  check_bits(DType::f16, {4, 128, 1, false});
  check_bits(DType::bf16, {4, 32, 0, true});
}

TEST_CASE("ln_qkv on the GPU refuses a hidden that no block holds", "[gpu][ln_qkv][bad]") {
  const Setup s{.model = model_of(1, 64, 16, 8), .load = {1, 1, 2, 2}, .activation = DType::f16};
  auto sizes = ops::example<ops::LnQkv>(s.model, s.load);
  sizes.first.hidden = 8200;
  DeviceProblem<ops::LnQkv> p(s, sizes);
  cuda::Context c = context();
  CHECK(refusal_fault(cuda::run(p.args(), c), Code::unimplemented,
                      {"ln_qkv: cuda takes hidden up to 8192", "got 8200"}) == "");
}
