// Attention on the GPU: every split, ring and tile boundary against the oracle.
#include "cuda/ops/attention/attention.hpp"

#include <algorithm>

#include "cuda/step/graph.hpp"
#include "tests/cuda/device_check.hpp"
#include "tests/support/grouped.hpp"

using namespace cf;
using namespace cf::test;

namespace {

Setup attention_setup(std::int64_t heads, std::int64_t head_dim, const Workload& load, DType activation) {
  Setup s{.model = model_of(heads, head_dim, 2, 2), .load = load, .activation = activation};
  if (activation == DType::bf16) s.values = DType::bf16;
  s.seed = std::uint64_t(load.kv_len + head_dim);
  return s;
}

bool agrees(const Setup& s) { return check_on_device<ops::Attention>(s, example_of<ops::Attention>(s)); }
/// The same with the plan of a large cache: the heads of a group share their keys, although these are few.
bool agrees_shared(Setup s) {
  s.load.capacity = std::max<std::int64_t>(s.load.cache_capacity(),
                                           2 * context().arch().tuning->unshared_elements / s.model.head_dim());
  Problem<ops::Attention> untouched(s, example_of<ops::Attention>(s));
  return check_on_device<ops::Attention>(s, untouched, {}, [](auto& a) { a.max_kv_len = a.k_cache.shape[2]; });
}

constexpr cuda::AttentionPlan decode_plan(std::int64_t batch, std::int64_t heads, std::int64_t kv_heads,
                                          std::int64_t head_dim, std::int64_t kv_len, DType activation = DType::f16) {
  return cuda::attention_plan(cuda::kH200,
                              {.batch = batch,
                               .q_len = 1,
                               .heads = heads,
                               .kv_heads = kv_heads,
                               .head_dim = head_dim,
                               .capacity = kv_len,
                               .max_kv_len = kv_len},
                              activation);
}
// One query a head of Pythia-2.8B.
static_assert(decode_plan(1, 32, 32, 80, 2048).splits == 4);
static_assert(decode_plan(1, 32, 32, 80, 128).splits == 1);
static_assert(decode_plan(1, 32, 32, 80, 128).gqa_heads == 1);
// Sixteen sequences fill the device without splits.
static_assert(decode_plan(16, 32, 32, 80, 2048).splits == 1);
// A group of seven heads is one GQA tile, and one of sixteen is two. In float32 each head attends by itself.
static_assert(decode_plan(1, 14, 2, 128, 2048).gqa_heads == 7);
static_assert(decode_plan(1, 16, 1, 128, 2048).gqa_heads == 8);
static_assert(decode_plan(1, 16, 1, 128, 2048, DType::f32).gqa_heads == 1);

/// Heads and kv_heads of groups of 1, 2, 3, 4, 7, 8 and 16.
const std::vector<std::pair<std::int64_t, std::int64_t>> kGroups{{3, 3},  {4, 2},  {6, 2}, {4, 1},
                                                                 {14, 2}, {16, 2}, {16, 1}};

/// So many heads that a prefill's blocks on Hopper's tensor cores have two warpgroups each. With few heads they have
/// one.
constexpr std::int64_t kManyHeads = 132;
static_assert(cuda::wgmma_plan(cuda::kH200, 80, 64, kManyHeads).warpgroups == 2 &&
              cuda::wgmma_plan(cuda::kH200, 80, 130, 17 * 8).warpgroups == 2 &&
              cuda::wgmma_plan(cuda::kH200, 80, 512, 2 * 3).warpgroups == 1);
// So many rows of grouped heads that they have two, too.
static_assert(cuda::wgmma_plan(cuda::kH200, 80, 128 * 2, 66).warpgroups == 2 &&
              cuda::wgmma_plan(cuda::kH200, 80, 130 * 3, 44).warpgroups == 2);

/// rope_append, and attention to the caches that it appends to.
class AppendAndAttend {
 public:
  explicit AppendAndAttend(const Setup& s) : append(s), y_(bytes_of_y(append.dims(), s.activation)) {
    const auto& a = append.args();
    attend = {.q = a.q,
              .k_cache = a.k_cache,
              .v_cache = a.v_cache,
              .kv_len = a.kv_len,
              .y = AnyView<3>(y_.data(), {a.q.shape[0], a.q.shape[1], a.q.shape[2]}, s.activation),
              .scale = 0.125,
              .max_kv_len = a.k_cache.shape[2]};
  }
  DeviceProblem<ops::RopeAppend> append;
  ops::Attention::Args attend;

  std::vector<std::byte> fetch_y() const {
    require_cuda(cudaDeviceSynchronize());
    std::vector<std::byte> y(y_.size());
    y_.fetch(y.data());
    return y;
  }
  /// Writes other tokens' q, k and v.
  void bring_qkv(std::span<const std::byte> qkv) {
    require_cuda(cudaMemcpy(const_cast<void*>(append.args().qkv.data), qkv.data(), qkv.size(), cudaMemcpyDefault));
    require_cuda(cudaDeviceSynchronize());
  }

 private:
  static std::vector<std::byte> bytes_of_y(const ops::RopeAppend::Dims& d, DType activation) {
    return std::vector<std::byte>(std::size_t(d.tokens() * d.heads * d.head_dim) * size_bytes(activation));
  }
  DeviceBytes y_;
};

}  // namespace

// A case takes as long as the oracle and the inputs take. So one head_dim goes through every boundary, the others
// through few.
TEST_CASE("attention on the GPU: decoding at every boundary of keys, head_dim and batch", "[gpu][attention]") {
  for (DType activation : {DType::f16, DType::bf16, DType::f32}) {
    for (std::int64_t kv_len : {1, 2, 17, 127, 128, 129, 1023, 1024, 1025, 2047, 2048})
      CHECK(agrees(attention_setup(1, 80, {1, 1, kv_len, kv_len + kv_len % 3}, activation)));
    for (std::int64_t head_dim : {8, 32, 64, 72, 80, 96, 128, 256})
      for (std::int64_t kv_len : {1, 65, 129, 1025})
        CHECK(agrees(attention_setup(1, head_dim, {kv_len > 129 ? 1 : 3, 1, kv_len, kv_len + 2}, activation)));
    CHECK(agrees(attention_setup(1, 80, {16, 1, 2048, 0}, activation)));
  }
}

TEST_CASE("attention on the GPU: so many heads that keys are not split, or split unevenly", "[gpu][attention]") {
  for (std::int64_t heads : {32, 40, 300})
    for (std::int64_t kv_len : {65, 130}) CHECK(agrees(attention_setup(heads, 80, {1, 1, kv_len, 0}, DType::f16)));
}

TEST_CASE("attention on the GPU: peaked and heavy-tailed inputs", "[gpu][attention]") {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (Fill fill : {Fill::heavy_tailed, Fill::peaked, Fill::shifted})
      for (const Workload& load : {Workload{2, 1, 700, 0}, Workload{1, 70, 200, 0}}) {
        Setup s = attention_setup(2, 80, load, activation);
        s.fill = fill;
        CHECK(agrees(s));
      }
}

TEST_CASE("attention on the GPU: prefill with and without a past", "[gpu][attention]") {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (std::int64_t past : {0, 1, 77}) {
      const auto load = [&](std::int64_t q_len) {
        return Workload{past == 77 ? 3 : 1, q_len, q_len + past, q_len + past + 5};
      };
      for (std::int64_t q_len : {2, 15, 16, 64, 65, 200})
        CHECK(agrees(attention_setup(2, 80, load(q_len), activation)));
      for (std::int64_t head_dim : {8, 32, 64, 72, 96, 128, 256})
        for (std::int64_t q_len : {3, 70}) CHECK(agrees(attention_setup(2, head_dim, load(q_len), activation)));
    }
}

// From 64 queries on an H200 takes its own tensor cores: 64 queries a warpgroup, tiles of 64 keys.
TEST_CASE("attention on the GPU: a long prefill at every boundary of queries and keys", "[gpu][attention]") {
  for (DType activation : {DType::f16, DType::bf16}) {
    for (std::int64_t q_len : {63, 64, 65, 127, 128, 129, 192, 200, 512})
      for (std::int64_t past : {0, 1, 63, 64, 101}) {
        const std::int64_t kv_len = q_len + past;
        CHECK(agrees(attention_setup(1, 80, {1, q_len, kv_len, kv_len + past % 64}, activation)));
      }
    for (std::int64_t head_dim : {8, 64, 72, 80, 96, 128})
      for (const Workload& load : {Workload{3, 64, 67, 200}, Workload{2, 129, 129, 129}, Workload{3, 65, 330, 333},
                                   Workload{1, 70, 1111, 1200}})
        CHECK(agrees(attention_setup(2, head_dim, load, activation)));
  }
}

TEST_CASE("attention on the GPU: a long prefill of many heads", "[gpu][attention]") {
  for (DType activation : {DType::f16, DType::bf16})
    for (std::int64_t head_dim : {64, 80, 128})
      for (const Workload& load : {Workload{1, 64, 64, 64}, Workload{1, 65, 100, 120}, Workload{1, 128, 191, 191},
                                   Workload{1, 129, 129, 140}, Workload{1, 130, 300, 320}})
        CHECK(agrees(attention_setup(kManyHeads, head_dim, load, activation)));
}

TEST_CASE("attention on the GPU: a long prefill with peaked and heavy-tailed inputs", "[gpu][attention]") {
  for (DType activation : {DType::f16, DType::bf16})
    for (Fill fill : {Fill::heavy_tailed, Fill::peaked, Fill::shifted}) {
      Setup few = attention_setup(2, 128, {2, 130, 290, 300}, activation),
            many = attention_setup(kManyHeads, 80, {1, 130, 290, 300}, activation);
      few.fill = many.fill = fill;
      CHECK(agrees(few));
      CHECK(agrees(many));
    }
}

TEST_CASE("attention on the GPU: a long prefill - small", "[gpu][attention][small]") {
  for (std::int64_t head_dim : {80, 128})
    for (const Workload& load : {Workload{1, 64, 64, 64}, Workload{2, 65, 131, 200}})
      CHECK(agrees(attention_setup(1, head_dim, load, DType::f16)));
  CHECK(agrees(attention_setup(kManyHeads, 64, {1, 65, 70, 75}, DType::bf16)));
}

TEST_CASE("attention on the GPU: grouped query heads agree with the oracle", "[gpu][attention][grouped]") {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (auto [heads, kv_heads] : kGroupedHeads)
      for (std::int64_t head_dim : {64, 80, 128, 256})
        for (const Workload& load :
             {Workload{2, 1, 129, 140}, Workload{1, 3, 40, 41}, Workload{2, 33, 70, 70}, Workload{2, 66, 140, 150}})
          CHECK(agrees(grouped_setup(heads, kv_heads, head_dim, load, activation)));
}

TEST_CASE("attention on the GPU: decoding of grouped query heads at every boundary of keys",
          "[gpu][attention][grouped]") {
  for (auto [heads, kv_heads] : kGroups) {
    for (std::int64_t kv_len : {1, 2, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2048})
      CHECK(agrees_shared(grouped_setup(heads, kv_heads, 128, {kv_len > 129 ? 1 : 3, 1, kv_len, kv_len + kv_len % 3},
                                        kv_len % 2 ? DType::f16 : DType::bf16)));
    for (std::int64_t head_dim : {64, 72, 256})
      for (std::int64_t kv_len : {1, 65, 1025})
        CHECK(agrees_shared(
            grouped_setup(heads, kv_heads, head_dim, {kv_len == 65 ? 3 : 1, 1, kv_len, kv_len + 2}, DType::f16)));
    // Several tokens a sequence.
    for (std::int64_t q_len : {2, 7, 15})
      for (std::int64_t kv_len : {15, 300})
        CHECK(agrees_shared(
            grouped_setup(heads, kv_heads, 80, {kv_len > 130 ? 1 : 3, q_len, kv_len, kv_len + 1}, DType::bf16)));
  }
}

TEST_CASE("attention on the GPU: so many GQA tiles that keys are not split, or split unevenly",
          "[gpu][attention][grouped]") {
  for (auto [heads, kv_heads] : {std::pair<std::int64_t, std::int64_t>{96, 24}, {200, 100}, {147, 21}})
    for (std::int64_t kv_len : {65, 130, 321})
      CHECK(agrees_shared(grouped_setup(heads, kv_heads, 64, {1, 1, kv_len, 0}, DType::f16)));
}

TEST_CASE("attention on the GPU: prefill of grouped query heads with and without a past", "[gpu][attention][grouped]") {
  for (auto [heads, kv_heads] : kGroups)
    for (std::int64_t past : {0, 77}) {
      const auto load = [&](std::int64_t q_len) {
        return Workload{q_len < 20 ? 3 : 1, q_len, q_len + past, q_len + past + 5};
      };
      for (std::int64_t q_len : {16, 17, 64, 65, 200})
        CHECK(agrees(grouped_setup(heads, kv_heads, 80, load(q_len), DType::f16)));
      for (std::int64_t head_dim : {64, 128, 256})
        CHECK(agrees(grouped_setup(heads, kv_heads, head_dim, load(17), DType::bf16)));
    }
}

TEST_CASE("attention on the GPU: a long prefill of many grouped query heads", "[gpu][attention][grouped]") {
  for (std::int64_t head_dim : {64, 80, 128}) {
    CHECK(agrees(grouped_setup(kManyHeads, 66, head_dim, {1, 128, 191, 191}, DType::f16)));
    CHECK(agrees(grouped_setup(kManyHeads, 44, head_dim, {1, 130, 150, 170}, DType::bf16)));
  }
}

TEST_CASE("attention on the GPU: grouped query heads with peaked and heavy-tailed inputs",
          "[gpu][attention][grouped]") {
  for (auto [heads, kv_heads] : {std::pair<std::int64_t, std::int64_t>{8, 2}, {7, 1}})
    for (DType activation : {DType::f16, DType::bf16})
      for (Fill fill : {Fill::heavy_tailed, Fill::peaked, Fill::shifted})
        for (const Workload& load : {Workload{2, 1, 700, 0}, Workload{1, 10, 200, 0}, Workload{1, 70, 200, 0}}) {
          Setup s = grouped_setup(heads, kv_heads, 80, load, activation);
          s.fill = fill;
          CHECK(agrees_shared(s));
        }
}

TEST_CASE("attention on the GPU: grouped query heads - small", "[gpu][attention][grouped][small]") {
  for (auto [heads, kv_heads] : {std::pair<std::int64_t, std::int64_t>{4, 1}, {7, 1}, {16, 1}})
    for (const Workload& load : {Workload{1, 1, 300, 300}, Workload{2, 1, 65, 70}, Workload{1, 17, 70, 80}})
      for (std::int64_t head_dim : {64, 128})
        CHECK(agrees_shared(grouped_setup(heads, kv_heads, head_dim, load, DType::f16)));
}

// A query's bits follow from the kernel, its tiles and their splits. These are the same for these loads with groups and
// without.
TEST_CASE("attention on the GPU: grouped query heads give the bits of repeated kv heads", "[gpu][attention][grouped]") {
  cuda::Context c = context();
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (auto [heads, kv_heads] : kGroupedHeads)
      for (const auto& [head_dim, load] : {std::pair<std::int64_t, Workload>{80, {1, 1, 1, 0}},
                                           {80, {3, 1, 100, 110}},
                                           {80, {1, 1, 900, 910}},
                                           {80, {1, 70, 200, 0}},
                                           {256, {1, 1, 700, 710}},
                                           {256, {2, 20, 90, 90}}}) {
        const Setup s = grouped_setup(heads, kv_heads, head_dim, load, activation);
        DeviceProblem<ops::Attention> grouped(s), repeated(with_repeated_heads(s));
        INFO(describe(s));
        REQUIRE(cuda::attention_plan(c.arch(), grouped.dims(), activation).splits ==
                cuda::attention_plan(c.arch(), repeated.dims(), activation).splits);
        Problem<ops::Attention>&got = grouped.run(c), &expected = repeated.run(c);
        CHECK(bool(got.blocks().back().memory == expected.blocks().back().memory));  // y and its guards
      }
}

TEST_CASE("attention on the GPU: older keys come before the newest is appended", "[gpu][attention][small][reruns]") {
  cuda::Context c = context();
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (auto [heads, kv_heads, head_dim] :
         {std::array<std::int64_t, 3>{2, 2, 80}, {4, 1, 64}, {6, 2, 128}, {2, 1, 256}})
      // Places of the newest key: it is the only one, the first or the last of a run, of a tile and of a split, and
      // behind the tiles that the ring holds at first.
      for (const Workload& load : {Workload{1, 1, 1, 4}, Workload{2, 1, 2, 700}, Workload{1, 1, 16, 16},
                                   Workload{1, 1, 17, 20}, Workload{3, 1, 128, 140}, Workload{1, 1, 129, 2048},
                                   Workload{1, 1, 1025, 1030}, Workload{1, 1, 2048, 2048}}) {
        Setup s{.model = gated_model_of(ModelType::llama, heads, kv_heads, head_dim, heads * head_dim, 8),
                .load = load,
                .activation = activation};
        s.model.max_position_embeddings = 2048;
        s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
        INFO(describe(s));
        AppendAndAttend step(s);
        std::vector<std::byte> inputs[2];
        for (const auto& block : step.append.blocks())
          if (block.name == "qkv")
            inputs[0].assign(block.memory.begin() + Problem<ops::RopeAppend>::guard_bytes,
                             block.memory.end() - Problem<ops::RopeAppend>::guard_bytes);
        REQUIRE(!inputs[0].empty());
        inputs[1] = inputs[0];
        std::rotate(inputs[1].begin(), inputs[1].begin() + std::ptrdiff_t(size_bytes(activation)), inputs[1].end());

        std::vector<std::byte> expected[2];
        for (int i = 0; i < 2; ++i) {
          step.bring_qkv(inputs[i]);
          REQUIRE(cuda::run(step.append.args(), c));
          REQUIRE(cuda::run(step.attend, c));
          expected[i] = step.fetch_y();
        }
        REQUIRE_FALSE(bool(expected[0] == expected[1]));

        const auto graph = cuda::capture_dataflow(c, [&](cuda::DataflowCapture& capture) {
          const Status appended = capture.run(step.append.args(), {.early = true});
          return appended ? capture.run(step.attend, {.early = true, .after_waiting = true}) : appended;
        });
        INFO(graph.status().message());
        REQUIRE(graph);
        int wrong = 0;
        for (int i = 0; i < 20; ++i) {
          step.bring_qkv(inputs[i % 2]);
          require_cuda(cudaGraphLaunch(graph->get(), c.stream()));
          wrong += step.fetch_y() != expected[i % 2];
        }
        CHECK(wrong == 0);
        step.append.fetch();
      }
}

TEST_CASE("attention on the GPU: a plan for the cache's capacity gives the bits of one for kv_len",
          "[gpu][attention]") {
  cuda::Context c = context();
  for (DType activation : {DType::f16, DType::f32})
    for (std::int64_t kv_heads : {4, 1})
      for (std::int64_t kv_len : {1, 17, 64, 65, 128, 129, 500}) {
        Setup s = attention_setup(4, 80, {1, 1, kv_len, 2048}, activation);
        s.kv_heads = kv_heads;
        DeviceProblem<ops::Attention> of_kv_len(s), of_capacity(s);
        of_capacity.args().max_kv_len = 2048;
        INFO(describe(s));
        CHECK(bool(of_capacity.run(c).bytes() == of_kv_len.run(c).bytes()));  // not expanded, byte by byte
      }
}

TEST_CASE("attention on the GPU: a kv_len that the cache has no room for gives NaN and reads nothing",
          "[gpu][attention][bad]") {
  cuda::Context c = context();
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (const auto& [kv_heads, q_len] :
         {std::pair<std::int64_t, std::int64_t>{2, 1}, {2, 3}, {2, 70}, {1, 1}, {1, 3}, {1, 20}, {1, 70}})
      for (std::int32_t bad : {0, -1, int(q_len) - 1, 131, 1 << 30, INT32_MIN, INT32_MAX}) {
        Setup s = attention_setup(2, 80, {3, q_len, 130, 130}, activation);
        s.kv_heads = kv_heads;
        DeviceProblem<ops::Attention> good(s), p(s);
        // The middle one of three sequences.
        require_cuda(cudaMemcpy(const_cast<std::int32_t*>(p.args().kv_len.data) + 1, &bad, 4, cudaMemcpyHostToDevice));
        const auto output = [&](DeviceProblem<ops::Attention>& problem) {
          Problem<ops::Attention>& host = problem.run(c);
          return host.tensor(host.blocks().back());
        };
        const Tensor expected = output(good), got = output(p);
        INFO(describe(s) << ", kv_len " << bad);
        const std::int64_t sequence = got.size() / 3;
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < got.size(); ++i)
          wrong += i / sequence == 1 ? !std::isnan(got.at(i)) : got.at(i) != expected.at(i);
        CHECK(wrong == 0);
      }
}

TEST_CASE("attention on the GPU gives the same bits a thousand times", "[gpu][attention]") {
  cuda::Context c = context();
  for (const Workload& load : {Workload{1, 1, 2048, 0}, Workload{1, 1, 300, 0}, Workload{1, 130, 200, 0},
                               Workload{17, 130, 200, 210}})  // blocks of two warpgroups
    for (const auto& [activation, kv_heads] : {std::pair{DType::f16, 8}, {DType::f16, 2}, {DType::f32, 8}}) {
      Setup s = attention_setup(8, 80, load, activation);
      s.kv_heads = kv_heads;
      DeviceProblem<ops::Attention> p(s);
      const auto first = p.run(c).bytes();
      for (int i = 1; i < 1000; ++i) {
        REQUIRE(cuda::run(p.args(), c));
        if (i % 100 == 0) REQUIRE(bool(p.fetch().bytes() == first));
      }
      require_cuda(cudaDeviceSynchronize());
      CHECK(bool(p.fetch().bytes() == first));
    }
}
