// rope_append on the GPU gives the bits of the two ops that it is made of.
#include <cstring>

#include "tests/cuda/device_check.hpp"
#include "tests/support/grouped.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

/// A problem's blocks after the two ops ran apart.
std::vector<std::byte> apart(DeviceProblem<ops::RopeAppend>& p, DType activation, cuda::Context& c) {
  const auto d = p.dims();
  const std::vector<std::byte> none(std::size_t(d.tokens() * d.kv_heads * d.head_dim) * size_bytes(activation));
  const DeviceBytes k(none), v(none);
  const auto view = [&](const DeviceBytes& of) {
    return AnyView<3>(of.data(), {d.tokens(), d.kv_heads, d.head_dim}, activation);
  };
  const Status s =
      ops::RopeAppend::for_each_part(p.args(), view(k), view(v), [&](const auto& args) { return cuda::run(args, c); });
  INFO(s.message());
  REQUIRE(s);
  return p.fetch().bytes();
}

/// Writes one element of an index tensor.
void set_index(DeviceProblem<ops::RopeAppend>& p, std::string_view name, std::int64_t at, std::int32_t value) {
  for (std::size_t i = 0; i < p.blocks().size(); ++i)
    if (p.blocks()[i].name == name)
      require_cuda(cudaMemcpy(p.memory()[i].data() + Problem<ops::RopeAppend>::guard_bytes + at * sizeof value, &value,
                              sizeof value, cudaMemcpyDefault));
}

struct Sizes {
  std::int64_t heads, head_dim, rotary_dim;
};

}  // namespace

TEST_CASE("rope_append on the GPU gives the bits of rope and kv_append", "[gpu][rope_append]") {
  const DType activation = GENERATE(DType::f16, DType::bf16, DType::f32);
  // Heads of 16 bytes; pairs at an odd distance; all of a head rotated; a last group of one head; many tokens, which
  // have four heads a thread.
  for (const Sizes& n : {Sizes{1, 8, 2}, Sizes{2, 80, 20}, Sizes{4, 64, 64}, Sizes{5, 104, 26}, Sizes{32, 80, 20},
                         Sizes{3, 256, 64}, Sizes{40, 128, 32}})
    for (const Workload& load : {Workload{1, 1, 31, 31}, Workload{3, 1, 30, 40}, Workload{64, 1, 60, 64},
                                 Workload{2, 9, 30, 31}, Workload{1, 300, 300, 300}, Workload{3, 257, 300, 310}}) {
      Setup s{.model = model_of(n.heads, n.head_dim, n.rotary_dim, 8), .load = load, .activation = activation};
      s.model.max_position_embeddings = 310;
      s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
      INFO(describe(s));
      for (cuda::Context& c : contexts()) {
        DeviceProblem<ops::RopeAppend> fused(s), parts(s);
        const auto expected = apart(parts, activation, c);
        const bool same = fused.run(c).bytes() == expected;
        CHECK(same);
      }
    }
}

TEST_CASE("rope and rope_append on the GPU: separate q, k and v agree with the oracle, and with each other bit by bit",
          "[gpu][rope_append][grouped]") {
  const DType activation = GENERATE(DType::f16, DType::bf16, DType::f32);
  // Every ratio of heads that models have; whole heads of several sizes, and a part of one.
  for (auto [heads, kv_heads] : kGroupedHeads)
    for (const auto& [head_dim, rotary_dim] :
         std::vector<std::pair<std::int64_t, std::int64_t>>{{8, 8}, {64, 64}, {80, 20}, {104, 104}, {128, 128}})
      for (const Workload& load :
           {Workload{1, 1, 31, 31}, Workload{17, 1, 60, 64}, Workload{2, 9, 30, 31}, Workload{3, 257, 300, 310}}) {
        if (heads * load.tokens() > 4096 && head_dim % 64) continue;  // takes the oracle long
        Setup s{.model = gated_model_of(ModelType::llama, heads, kv_heads, head_dim, heads * head_dim, 8),
                .load = load,
                .activation = activation};
        s.model.rotary_dim = rotary_dim;
        s.model.max_position_embeddings = 310;
        s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
        INFO(describe(s));
        CHECK(check_on_device<ops::Rope>(s, example_of<ops::Rope>(s)));
        CHECK(check_on_device<ops::KvAppend>(s, example_of<ops::KvAppend>(s)));
        CHECK(check_on_device<ops::RopeAppend>(s, example_of<ops::RopeAppend>(s)));
        for (cuda::Context& c : contexts()) {
          DeviceProblem<ops::RopeAppend> fused(s), parts(s);
          const auto expected = apart(parts, activation, c);
          const bool same = fused.run(c).bytes() == expected;
          CHECK(same);
        }
      }
}

TEST_CASE("rope_append on the GPU: separate q, k and v have the bits of interleaved ones", "[gpu][rope_append]") {
  cuda::Context c = context();
  const DType activation = GENERATE(DType::f16, DType::bf16, DType::f32);
  for (const Workload& load : {Workload{2, 1, 31, 31}, Workload{3, 257, 300, 310}}) {
    Setup interleaved{.model = model_of(6, 80, 20, 8), .load = load, .activation = activation};
    interleaved.model.max_position_embeddings = 310;
    Setup separate = interleaved;
    separate.model = gated_model_of(ModelType::llama, 6, 6, 80, 480, 8);
    separate.model.rotary_dim = 20;
    separate.model.max_position_embeddings = 310;
    interleaved.values = separate.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
    Problem<ops::RopeAppend> from(interleaved), to(separate);
    for (std::size_t i = 0; i < from.blocks().size(); ++i) {
      auto &source = from.blocks()[i], &target = to.blocks()[i];
      REQUIRE(source.bytes() == target.bytes());
      if (source.name != "qkv") {
        std::memcpy(target.data(), source.data(), source.bytes());
        continue;
      }
      const std::size_t row = 80 * size_bytes(activation);
      const auto* const rows = static_cast<const std::byte*>(source.data());
      for (std::int64_t token = 0; token < load.tokens(); ++token)
        for (std::int64_t head = 0; head < 6; ++head)
          for (std::int64_t part = 0; part < 3; ++part)
            std::memcpy(static_cast<std::byte*>(target.data()) + std::size_t(token * 18 + part * 6 + head) * row,
                        rows + std::size_t((token * 6 + head) * 3 + part) * row, row);
    }
    DeviceProblem<ops::RopeAppend> of_heads(from), of_parts(to);
    Problem<ops::RopeAppend>&expected = of_heads.run(c), &got = of_parts.run(c);
    INFO(describe(interleaved));
    for (std::size_t i = 0; i < got.blocks().size(); ++i)
      if (got.blocks()[i].written()) CHECK(bool(got.blocks()[i].memory == expected.blocks()[i].memory));
  }
}

TEST_CASE("rope_append on the GPU gives the bits of its parts for indices out of bounds, too",
          "[gpu][rope_append][bad]") {
  const DType activation = GENERATE(DType::f16, DType::bf16, DType::f32);
  const bool is_separate = GENERATE(false, true);
  for (const Workload& load : {Workload{3, 1, 30, 31}, Workload{3, 4, 30, 31}, Workload{3, 257, 300, 310}}) {
    Setup s{.model = model_of(32, 80, 20, 8), .load = load, .activation = activation};
    if (is_separate) s.model = gated_model_of(ModelType::llama, 28, 4, 64, 1792, 8);
    s.model.max_position_embeddings = 310;
    s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
    cuda::Context c = context();
    for (std::int32_t bad :
         {INT32_MIN, -1, 0, std::int32_t(load.q_len) - 1, std::int32_t(load.capacity) + 1, INT32_MAX})
      for (const char* name : {"kv_len", "positions"}) {
        INFO(describe(s) << ", " << name << "[1] = " << bad);
        DeviceProblem<ops::RopeAppend> fused(s), parts(s);
        for (auto* p : {&fused, &parts}) set_index(*p, name, 1, bad);
        const auto expected = apart(parts, activation, c);
        const bool same = fused.run(c).bytes() == expected;
        CHECK(same);
      }
  }
}

TEST_CASE("rope_append on the GPU refuses separate q, k and v of other heads than q and the cache have",
          "[gpu][rope_append][bad]") {
  const Setup s{
      .model = gated_model_of(ModelType::llama, 4, 2, 64, 256, 8), .load = {2, 1, 2, 2}, .activation = DType::f16};
  DeviceProblem<ops::RopeAppend> p(s);
  p.args().k_cache.shape[1] = p.args().v_cache.shape[1] = 1;
  cuda::Context c = context();
  CHECK(refusal_fault(cuda::run(p.args(), c), Code::invalid_argument,
                      {"rope_append: 'qkv' has shape (2, 8, 1, 64), expected (2, 6, 1, 64)"}) == "");
}

TEST_CASE("rope_append on the GPU refuses a cache of fewer heads than qkv has", "[gpu][rope_append][bad]") {
  const Setup s{.model = model_of(4, 64, 16, 8), .load = {2, 1, 2, 2}, .activation = DType::f16};
  DeviceProblem<ops::RopeAppend> p(s);
  p.args().k_cache.shape[1] = 2;
  cuda::Context c = context();
  CHECK(refusal_fault(cuda::run(p.args(), c), Code::invalid_argument,
                      {"rope_append: 'k_cache' has shape (2, 2, 2, 64), expected (2, 4, 2, 64)"}) == "");
}
