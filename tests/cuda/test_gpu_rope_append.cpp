// rope_append on the GPU gives the bits of the two ops that it is made of.
#include "tests/cuda/device_check.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

/// A problem's blocks after the two ops ran apart.
std::vector<std::byte> apart(DeviceProblem<ops::RopeAppend>& p, DType activation, cuda::Context& c) {
  const auto d = p.dims();
  const std::vector<std::byte> none(std::size_t(d.tokens() * d.heads * d.head_dim) * size_bytes(activation));
  const DeviceBytes k(none), v(none);
  const auto view = [&](const DeviceBytes& of) {
    return AnyView<3>(of.data(), {d.tokens(), d.heads, d.head_dim}, activation);
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

TEST_CASE("rope_append on the GPU gives the bits of its parts for indices out of bounds, too",
          "[gpu][rope_append][bad]") {
  const DType activation = GENERATE(DType::f16, DType::bf16, DType::f32);
  for (const Workload& load : {Workload{3, 1, 30, 31}, Workload{3, 4, 30, 31}, Workload{3, 257, 300, 310}}) {
    Setup s{.model = model_of(32, 80, 20, 8), .load = load, .activation = activation};
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

TEST_CASE("rope_append on the GPU refuses a cache of fewer heads than qkv has", "[gpu][rope_append][bad]") {
  const Setup s{.model = model_of(4, 64, 16, 8), .load = {2, 1, 2, 2}, .activation = DType::f16};
  DeviceProblem<ops::RopeAppend> p(s);
  p.args().k_cache.shape[1] = 2;
  cuda::Context c = context();
  CHECK(refusal_fault(cuda::run(p.args(), c), Code::invalid_argument,
                      {"rope_append: 'k_cache' has shape (2, 2, 2, 64), expected (2, 4, 2, 64)"}) == "");
}
