// Weights packed for CUDA's kernels: the layout's bits, and what is refused. No GPU is needed.
#include <algorithm>
#include <array>
#include <cstring>

#include "core/compare.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/dequantise.hpp"
#include "cuda/ops/linear/pack/pack.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/setups.hpp"

using namespace cf;
using namespace cf::cuda;
using namespace cf::test;

namespace {

/// A Linear with a quantised weight (out, in).
struct Quantised : Problem<ops::Linear> {
  Quantised(const GptqSetup& gptq, std::int64_t in, std::int64_t out)
      : Problem({.model = model_of(1, 2, 2, 2), .activation = DType::f64, .gptq = gptq}, {{1, in, out, false}, {}}) {}
  GptqWeight& weight() { return std::get<GptqWeight>(args().linear.weight); }
};

/// The matrix (out, in) that a packed weight holds, read by the words of pack/format.hpp.
Tensor unpack(const PackedWeight& w, const GptqLayout& l) {
  Tensor matrix(DType::f64, {w.out, w.in});
  const auto* const codes = reinterpret_cast<const std::uint32_t*>(w.data.data);
  const auto* const scales = codes + std::int64_t(l.row_tiles) * l.chunks * 128;
  const auto* const order = reinterpret_cast<const std::int32_t*>(scales + std::int64_t(l.row_tiles) * l.groups * 16);
  for (std::int64_t r = 0; r < w.out; ++r)
    for (std::int64_t column = 0; column < l.chunks * 64; ++column) {
      const std::int64_t k = l.has_order ? order[column] : column < w.in ? column : -1;
      if (k < 0) continue;
      const std::int64_t lane = r % 8 * 4 + column % 32 / 8, word = column % 64 / 32 * 2 + r % 16 / 8, c = column % 8;
      const auto* const tile = codes + (r / 16 * l.chunks + column / 64) * 128;
      constexpr int place_of[] = {0, 4, 2, 6, 1, 5, 3, 7};
      const std::int64_t q = tile[lane * 4 + word] >> (4 * place_of[c]) & 15;
      const std::int64_t group = column / l.columns_per_group, place = r % 8 * 2 + r % 16 / 8;
      const std::uint32_t scale = scales[(r / 16 * l.groups + group) * 16 + place];
      matrix.as<double>()[r * w.in + k] +=
          widen<double>(f16{std::uint16_t(scale)}) * (double(q) - widen<double>(f16{std::uint16_t(scale >> 16)}));
    }
  return matrix;
}

PackedWeight packed_of(const Result<Packed>& packed) {
  INFO(packed.status().message());
  REQUIRE(packed);
  REQUIRE(std::holds_alternative<PackedWeight>(packed->weight));
  return std::get<PackedWeight>(packed->weight);
}

GptqLayout layout_of(const PackedWeight& w) {
  const Result<GptqLayout> layout = gptq_layout("linear", w);
  INFO(layout.status().message());
  REQUIRE(layout);
  return *layout;
}

}  // namespace

TEST_CASE("pack: a GPTQ weight keeps the matrix, every row and every input, in either order of the rows", "[pack]") {
  for (const GptqSetup& format : std::initializer_list<GptqSetup>{{4, 32, 0, false},
                                                                  {4, 32, 1, true},
                                                                  {4, 128, 1, false},
                                                                  {4, 4096, 0, false},
                                                                  {4, 24, 0, true},
                                                                  {8, 32, 0, false},
                                                                  {8, 64, 1, true},
                                                                  {8, 4096, 1, false}})
    for (auto [in, out] : {std::pair<std::int64_t, std::int64_t>{144, 24}, {64, 16}, {24, 40}, {320, 48}}) {
      CAPTURE(format.bits, format.group_size, format.zero_offset, format.desc_act, in, out);
      Quantised q(format, in, out);
      const Tensor dense = cpu_ref::dequantise(q.weight(), DType::f64);
      for (const RopePairs& pairs : {RopePairs{}, RopePairs{8, 4}, RopePairs{8, 4, 1}}) {
        const Result<Packed> packed = pack(q.weight(), {.pairs = pairs});
        const PackedWeight w = packed_of(packed);
        const GptqLayout l = layout_of(w);
        CHECK(w.out == out);
        CHECK(w.in == in);
        CHECK(w.format.bits == format.bits);
        CHECK(w.format.group_size == format.group_size);
        CHECK(w.data.data == packed->storage.as<std::int32_t>());
        CHECK(l.pairs == pairs);
        CHECK(l.columns_per_group % 32 == 0);
        CHECK(l.row_tiles == (out + 15) / 16);
        // Codes that are in order need no order and no more room than they had.
        const bool one_group = in <= format.group_size;
        const bool plain = format.bits == 4 && (one_group || (!format.desc_act && format.group_size % 32 == 0));
        CHECK(l.has_order == !plain);
        // Each input's place leads back to the input, and is not kept where the inputs are in order.
        CHECK(l.in_order == (one_group || (!format.desc_act && format.group_size % 32 == 0)));
        CHECK(l.inverse_words() == (l.in_order ? 0 : in));
        const std::int32_t* const order = l.order(w);
        for (std::int64_t k = 0; k < l.inverse_words(); ++k) CHECK(order[order[l.order_words() + k]] == k);
        if (plain && in % 64 == 0 && out % 16 == 0) CHECK(l.code_words() == q.weight().qweight.size());
        const Tensor got = unpack(w, l);
        std::int64_t wrong = 0;
        for (std::int64_t r = 0; r < out; ++r)
          for (std::int64_t k = 0; k < in; ++k) wrong += got.at(r * in + k) != dense.at(pairs.row(r) * in + k);
        CHECK(wrong == 0);
      }
    }
}

TEST_CASE("pack: no scale is 0, where GPTQ's is and where columns have no input neither, and the matrix stays",
          "[pack]") {
  for (const GptqSetup& format : {GptqSetup{4, 32, 0, false}, GptqSetup{4, 24, 1, true}, GptqSetup{8, 32, 1, false}}) {
    CAPTURE(format.bits, format.group_size, format.desc_act);
    Quantised q(format, 144, 24);
    auto* const scales = const_cast<f16*>(q.weight().scales.data);
    for (std::int64_t i = 0; i < q.weight().scales.size(); i += 3) scales[i] = narrow<f16>(i % 2 ? 0. : -0.);
    const Tensor dense = cpu_ref::dequantise(q.weight(), DType::f64);
    const Result<Packed> packed = pack(q.weight(), {});
    const PackedWeight w = packed_of(packed);
    const GptqLayout l = layout_of(w);
    const Tensor got = unpack(w, l);
    for (std::int64_t i = 0; i < got.size(); ++i) REQUIRE(got.at(i) == dense.at(i));
    const auto* const words = reinterpret_cast<const std::uint32_t*>(l.scales(w));
    for (std::int64_t r = 0; r < w.out; ++r)
      for (std::int64_t group = 0; group < l.groups; ++group)
        REQUIRE((words[(r / 16 * l.groups + group) * 16 + r % 8 * 2 + r % 16 / 8] & 0x7fff) != 0);
  }
}

TEST_CASE("pack: the layout says whether every weight lies within float16's range", "[pack]") {
  for (auto [bits, scale, fits] : {std::tuple{4, 0.01, true},
                                   {4, 4094., true},
                                   {4, 4096., false},
                                   {4, -4096., false},
                                   {8, 255.75, true},
                                   {8, 256., false}}) {
    Quantised q({bits, 32, 0, false}, 64, 16);
    const_cast<f16*>(q.weight().scales.data)[3] = narrow<f16>(scale);
    CAPTURE(bits, scale);
    CHECK(layout_of(packed_of(pack(q.weight()))).fits_f16 == fits);
  }
}

TEST_CASE("pack: RoPE's order has every row once, a pair's two rows next to each other", "[pack]") {
  const RopePairs pairs{80, 20};
  std::vector<bool> seen(480);
  for (std::int64_t r = 0; r < 480; ++r) seen[std::size_t(pairs.row(r))] = true;
  CHECK(std::find(seen.begin(), seen.end(), false) == seen.end());
  for (std::int64_t r : {0, 4, 18, 80, 98, 240, 338}) CHECK(pairs.row(r + 1) == pairs.row(r) + 10);
  for (std::int64_t r : {20, 79, 100, 160, 161, 179, 239, 400}) CHECK(pairs.row(r) == r);
  // Separate q, k and v: four heads of q and k, two of v.
  const RopePairs separate{80, 20, 4};
  seen.assign(480, false);
  for (std::int64_t r = 0; r < 480; ++r) seen[std::size_t(separate.row(r))] = true;
  CHECK(std::find(seen.begin(), seen.end(), false) == seen.end());
  for (std::int64_t r : {0, 4, 18, 80, 98, 160, 240, 258}) CHECK(separate.row(r + 1) == separate.row(r) + 10);
  for (std::int64_t r : {20, 79, 100, 179, 260, 320, 321, 339, 400, 401}) CHECK(separate.row(r) == r);
  CHECK(rope_pairs({3, 1, ops::QkvLayout::separate}, 80, 20) == separate);
  CHECK(rope_pairs({2, 2, ops::QkvLayout::interleaved_by_head}, 80, 20) == pairs);
}

TEST_CASE("pack: the hint is that of the op's rows", "[pack]") {
  Problem<ops::LnQkv> qkv({.model = model_of(2, 80, 20, 200), .load = {.kv_len = 2}, .activation = DType::f32});
  CHECK(pack_hint(qkv.args()).pairs == RopePairs{80, 20});
  CHECK(pack_hint(ops::Linear::Args{}).pairs == RopePairs{});
  CHECK(pack_hint(ops::LnQkvHeads::Args{}).pairs == RopePairs{});
}

TEST_CASE("pack: groups of unlike sizes, and one without an input", "[pack]") {
  Quantised q({4, 32, 0, true}, 96, 16);
  auto* const g_idx = const_cast<std::int32_t*>(q.weight().g_idx.data);
  for (std::int64_t k = 0; k < 96; ++k) g_idx[k] = k % 7 ? 2 : 0;
  const Result<Packed> packed = pack(q.weight());
  const PackedWeight w = packed_of(packed);
  CHECK(compare(unpack(w, layout_of(w)), cpu_ref::dequantise(q.weight(), DType::f64))->max_abs == 0);
}

TEST_CASE("pack: dense and packed weights pass through", "[pack]") {
  const Tensor matrix(DType::f16, {16, 64});
  const Result<Packed> dense = pack(DenseWeight{matrix.view<2>()}, {.pairs = {8, 4}});
  REQUIRE(dense);
  CHECK_FALSE(dense->storage);
  CHECK(std::get<DenseWeight>(dense->weight).weight.data == matrix.data());

  Quantised q({4, 32, 0, false}, 64, 16);
  const Result<Packed> packed = pack(q.weight());
  const Result<Packed> again = pack(packed_of(packed));
  CHECK_FALSE(again->storage);
  CHECK(packed_of(again).data.data == packed_of(packed).data.data);
}

TEST_CASE("pack: a call's weight is packed in place, and a call without one stays as it is", "[pack]") {
  Quantised q({4, 32, 0, false}, 64, 16);
  ops::Linear::Args args = q.args();
  Packed packed;
  REQUIRE(pack_call(args, packed));
  CHECK(std::get<PackedWeight>(args.linear.weight).data.data == packed.storage.as<std::int32_t>());
  CHECK(args.linear.bias.data == q.args().linear.bias.data);
  ops::LayerNorm::Args norm{};
  REQUIRE(pack_call(norm, packed));
}

TEST_CASE("pack: a GPTQ weight that cannot be packed is refused", "[pack][bad]") {
  const auto refused = [](const GptqWeight& w, std::string_view part) {
    CHECK(refusal_fault(pack(w).status(), Code::invalid_argument, {part}) == "");
  };
  Quantised q({4, 32, 0, true}, 96, 16);
  const_cast<std::int32_t*>(q.weight().g_idx.data)[5] = 3;
  refused(q.weight(), "pack: 'g_idx'[5] must be 0 to 2, got 3");
  const_cast<std::int32_t*>(q.weight().g_idx.data)[5] = -1;
  refused(q.weight(), "pack: 'g_idx'[5] must be 0 to 2, got -1");
  Quantised eight({8, 32, 0, false}, 32, 8);
  const_cast<f16*>(eight.weight().scales.data)[3] = narrow<f16>(5000.0);
  refused(eight.weight(), "pack: 'scales'(0, 3) must be at most 4095 with 8 bits, got 5000");

  refused(GptqWeight{}, "pack: 'qweight' is null");
  GptqWeight w = q.weight();
  w.bits = 3;
  refused(w, "pack: GPTQ bits must be 4 or 8, got 3");
  w = q.weight();
  w.qweight.shape[0] = 11;
  refused(w, "pack: 'qweight' has shape (11, 16), expected (12, 16)");
  w = q.weight();
  w.qzeros.data = nullptr;
  refused(w, "pack: 'qzeros' is null");
}

TEST_CASE("pack: ops refuse a packed weight of another size, packer or block", "[pack][bad]") {
  Quantised q({4, 32, 0, false}, 64, 16);
  const Result<Packed> packed = pack(q.weight());
  PackedWeight w = packed_of(packed);
  const auto refused = [&](Code code, std::string_view message) {
    q.args().linear.weight = w;
    const auto before = q.bytes();
    CHECK(refusal_fault(cpu_ref::run(q.args()), code, {message}) == "");
    CHECK(q.bytes() == before);
  };
  refused(Code::unimplemented,
          "linear: cpu_ref takes dense, GPTQ or fp8 weights, got a weight packed by cf::cuda::pack()");
  w.out = 32;
  refused(Code::invalid_argument, "linear: the packed weight is (32, 64), expected (16, 64)");
  w.out = 16;
  w.data.data = nullptr;
  refused(Code::invalid_argument, "linear: 'packed' is null");

  w = packed_of(packed);
  --w.data.shape[0];
  CHECK(refusal_fault(gptq_layout("linear", w).status(), Code::invalid_argument,
                      {"linear: 'packed' has 159 words, expected 160"}) == "");
  w.packer = "another";
  CHECK(refusal_fault(gptq_layout("linear", w).status(), Code::unimplemented,
                      {"linear: cuda takes weights packed by cf::cuda::pack(), got a weight packed by another"}) == "");
  CHECK(refusal_fault(gptq_layout("linear", {}).status(), Code::unimplemented, {"got a weight packed by nobody"}) ==
        "");
}
