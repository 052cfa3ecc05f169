// Prefill attention on the GPU over runs of any lengths: in one launch, of caches in pages, with windows, sinks and
// streams' rings. Against the oracle, and bit by bit against each run by itself and against a contiguous cache.
#include <cmath>
#include <numeric>
#include <optional>
#include <random>

#include "core/call_groups.hpp"
#include "tests/cuda/device_pages.hpp"
#include "tests/cuda/device_tensors.hpp"
#include "tests/support/mixed_steps.hpp"

using namespace cf;
using namespace cf::test;

namespace {

using Attention = ops::Attention;

/// A run's new tokens, and the entries of its sequence before them.
struct Prompt {
  std::int64_t count, past = 0;
};

struct Sizes {
  std::int64_t heads, kv_heads, head_dim;
  DType activation = DType::f16;
  KeyWindow window{};
  std::int64_t capacity = 0;  // 0: room for the longest
};

/// A call of these prompts, of sequences in random order with others between them. Keys and values that no row sees are
/// NaN.
Problem<Attention> call_of(const Sizes& sizes, const std::vector<Prompt>& prompts) {
  const auto n = std::int64_t(prompts.size());
  Setup s{.model = model_of(sizes.heads, sizes.head_dim, 2, 2),
          .load = {.batch = n + n / 3 + 1},
          .kv_heads = sizes.kv_heads,
          .activation = sizes.activation,
          .seed = std::uint64_t(n)};
  s.values = sizes.activation == DType::bf16 ? DType::bf16 : DType::f16;
  std::vector<std::int64_t> sequences(std::size_t(s.load.batch));
  std::iota(sequences.begin(), sequences.end(), 0);
  std::mt19937_64 random(s.seed);
  std::shuffle(sequences.begin(), sequences.end(), random);
  std::int64_t row = 0, longest = 0;
  s.load.q_len = 0;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    s.runs.push_back({.sequence = sequences[i], .first_row = row, .count = prompts[i].count});
    row += prompts[i].count;
    s.load.q_len = std::max(s.load.q_len, prompts[i].count);
    longest = std::max(longest, prompts[i].count + prompts[i].past);
  }
  s.load.capacity = s.load.kv_len = sizes.capacity ? sizes.capacity : longest;
  auto example = example_of<Attention>(s);
  example.first.window = example.second.window = sizes.window;
  example.first.max_kv_len = example.second.max_kv_len = longest;
  Problem<Attention> p(s, example);
  std::normal_distribution<float> normal;
  const std::int64_t capacity = s.load.capacity, entry = sizes.head_dim, sequence = sizes.kv_heads * capacity * entry;
  for (auto& b : p.blocks())
    dispatch_float(b.role == Role::cache ? b.dtype : DType::f32, [&](auto zero) {
      using T = decltype(zero);
      if (b.role == Role::cache)
        std::fill_n(static_cast<T*>(b.data()), element_count(b.shape), narrow<T>(std::nan("")));
      for (std::size_t i = 0; i < prompts.size(); ++i) {
        const std::int64_t length = prompts[i].count + prompts[i].past, of_first_row = prompts[i].past + 1;
        if (b.role == Role::length) static_cast<std::int32_t*>(b.data())[sequences[i]] = std::int32_t(length);
        if (b.role != Role::cache) continue;
        for (std::int64_t e = 0; e < length; ++e) {
          if (e >= sizes.window.sinks && e < sizes.window.first(of_first_row)) continue;
          const std::int64_t place =
              e < capacity ? e : sizes.window.sinks + (e - sizes.window.sinks) % (capacity - sizes.window.sinks);
          for (std::int64_t h = 0; h < sizes.kv_heads; ++h)
            for (std::int64_t c = 0; c < entry; ++c)
              static_cast<T*>(b.data())[sequences[i] * sequence + (h * capacity + place) * entry + c] =
                  narrow<T>(double(normal(random)));
        }
      }
    });
  return p;
}

std::string describe(const Sizes& s, const std::vector<Prompt>& prompts) {
  std::string text = std::to_string(s.heads) + " heads, " + std::to_string(s.kv_heads) + " kv heads of " +
                     std::to_string(s.head_dim) + ", " + std::string(to_string(s.activation)) + ", window " +
                     std::to_string(s.window.keys) + " and " + std::to_string(s.window.sinks) + " sinks, prompts";
  for (std::size_t i = 0; i < prompts.size() && i < 8; ++i)
    text += " " + std::to_string(prompts[i].count) + "+" + std::to_string(prompts[i].past);
  return text + (prompts.size() > 8 ? " ..." : "");
}

const std::vector<std::byte>& y_of(Problem<Attention>& p) { return p.blocks().back().memory; }  // with its guards

/// The call agrees with the oracle, and has the same bits again, run by run, and of a cache in pages.
void check_prompts(const Sizes& sizes, const std::vector<Prompt>& prompts, std::int64_t page = 64) {
  INFO(describe(sizes, prompts) << ", pages of " << page);
  Problem<Attention> untouched = call_of(sizes, prompts), reference(untouched, DType::f64);
  require_ok(cpu_ref::run(reference.args()));
  const auto condition = cpu_ref::condition(reference.args());
  require_ok(condition.status());
  const Budget budget =
      Attention::budget(reference.dims(), {.compute = DType::f32, .output = sizes.activation}, *condition);
  for (cuda::Context& c : contexts()) {
    INFO("planned for " << to_string(c.arch()));
    DeviceProblem<Attention> together(untouched), again(untouched), apart(untouched);
    Problem<Attention>& got = together.run(c);
    CHECK(bool(y_of(got) == y_of(again.run(c))));
    require_ok(each_by_itself(apart.args(), [&](const auto& part) { return cuda::run(part, c); }));
    CHECK(bool(y_of(got) == y_of(apart.fetch())));
    for (std::uint64_t seed : {1, 2}) {
      PagedDeviceProblem<Attention> paged(untouched, page, seed);
      CHECK(bool(y_of(got) == y_of(paged.run(c))));
    }
    const auto result = compare(got.tensor(got.blocks().back()), reference.tensor(reference.blocks().back()));
    require_ok(result.status());
    INFO("relative L2 " << result->rel_l2 << " (budget " << budget.rel_l2 << "), relative max " << result->rel_max
                        << " (budget " << budget.rel_max << ") at " << result->worst_coordinate);
    CHECK(result->within(budget));
  }
}

std::size_t launches_of(const Attention::Args& args, const cuda::Context& c) {
  cuda::LaunchList launches(c);
  require_ok(cuda::prepare(args, launches));
  return launches.size();
}

/// Prompts of the lengths around a tile's, with and without a past.
const std::vector<Prompt> kMixed{{64, 0}, {1, 30}, {65, 1}, {300, 0}, {63, 64}, {128, 65}, {17, 0}, {1, 0}, {64, 100}};

}  // namespace

TEST_CASE("prefill attention on the GPU: prompts of many lengths are each what it is by itself", "[gpu][prefill]") {
  for (DType activation : {DType::f16, DType::bf16}) {
    for (std::int64_t head_dim : {64, 80, 96, 128, 256}) check_prompts({2, 2, head_dim, activation}, kMixed);
    for (auto [heads, kv_heads] : {std::pair<std::int64_t, std::int64_t>{4, 2}, {8, 1}, {7, 1}})
      check_prompts({heads, kv_heads, 80, activation}, {{16, 0}, {64, 9}, {33, 70}, {2, 5}, {130, 0}}, 128);
  }
}

TEST_CASE("prefill attention on the GPU: so many heads that blocks have two warpgroups", "[gpu][prefill]") {
  for (std::int64_t head_dim : {64, 80, 128})
    check_prompts({66, 66, head_dim, DType::f16}, {{128, 0}, {129, 64}, {250, 1}, {120, 63}});
}

TEST_CASE("prefill attention on the GPU: 1 to 300 prompts", "[gpu][prefill]") {
  cuda::Context c = context();
  for (std::size_t n : {1, 2, 64, 300}) {
    std::vector<Prompt> prompts;
    for (std::size_t i = 0; i < n; ++i) prompts.push_back({std::int64_t(64 + 7 * i % 40), std::int64_t(i % 3 * 20)});
    check_prompts({1, 1, 64}, prompts);
    DeviceProblem<Attention> p(call_of({1, 1, 64}, prompts));
    CHECK(launches_of(p.args(), c) == (n > 256 ? 2u : 1u));
  }
  // Prompts in a launch, and those of few tokens in another.
  DeviceProblem<Attention> some(call_of({1, 1, 64}, {{70, 0}, {1, 5}, {64, 0}, {1, 7}, {20, 0}, {90, 3}, {30, 1}}));
  CHECK(launches_of(some.args(), c) <= 4);
}

TEST_CASE("prefill attention on the GPU: pages of every size that kernels take, and no others",
          "[gpu][prefill][pages]") {
  for (std::int64_t page : {64, 128, 192, 1024}) {
    check_prompts({2, 1, 80}, {{64, 0}, {63, 1}, {20, 44}, {65, 127}, {128, 1}}, page);
    check_prompts({2, 2, 64, DType::bf16}, {{page, 0}, {page - 1, 0}, {page + 1, 0}}, page);
  }
  cuda::Context c = context();
  for (std::int64_t page : {16, 96}) {
    PagedDeviceProblem<Attention> paged(call_of({2, 2, 64}, {{70, 0}}), page);
    const Status status = cuda::run(paged.args(), c);
    CHECK(status.code() == Code::unimplemented);
    CHECK(status.message().find("cuda takes pages of a multiple of 64 entries up to 1024, got " +
                                std::to_string(page)) != std::string::npos);
  }
}

TEST_CASE("prefill attention on the GPU: windows within a tile and across tiles", "[gpu][prefill][window]") {
  for (DType activation : {DType::f16, DType::bf16})
    for (std::int64_t keys : {1, 7, 63, 64, 65, 100, 256})
      check_prompts({2, 1, 80, activation, {.keys = keys}}, {{130, 0}, {64, 300}, {65, 63}, {20, 100}, {3, 40}});
  for (std::int64_t head_dim : {64, 128, 256})
    for (std::int64_t keys : {5, 90})
      check_prompts({4, 1, head_dim, DType::f16, {.keys = keys}}, {{70, 0}, {40, 129}, {129, 191}});
  check_prompts({66, 66, 80, DType::f16, {.keys = 50}}, {{256, 0}, {250, 77}});
}

TEST_CASE("prefill attention on the GPU: sinks have queries of their own", "[gpu][prefill][window]") {
  for (DType activation : {DType::f16, DType::bf16})
    for (const KeyWindow& window : {KeyWindow{.keys = 1, .sinks = 1}, KeyWindow{.keys = 30, .sinks = 4},
                                    KeyWindow{.keys = 100, .sinks = 65}, KeyWindow{.keys = 1000, .sinks = 4}})
      for (std::int64_t head_dim : {64, 80, 128, 256})
        check_prompts({2, 1, head_dim, activation, window}, {{130, 0}, {20, 3}, {64, 200}, {2, 64}});
}

TEST_CASE("prefill attention on the GPU: a stream's ring", "[gpu][prefill][window][stream]") {
  for (const KeyWindow& window : {KeyWindow{.keys = 60}, KeyWindow{.keys = 60, .sinks = 4}})
    for (std::int64_t head_dim : {80, 128})
      // The capacity is a multiple of a page, as that of a cache in pages is.
      check_prompts({2, 1, head_dim, DType::f16, window, 192}, {{70, 0}, {128, 500}, {20, 100}, {64, 135}, {1, 999}});
}

TEST_CASE("prefill attention on the GPU: an idle sequence's rows are NaN, and the others do not see it",
          "[gpu][prefill]") {
  for (cuda::Context& c : contexts()) {
    Problem<Attention> all = call_of({2, 2, 80}, {{64, 0}, {70, 5}, {20, 0}, {100, 30}});
    DeviceProblem<Attention> expected(all);
    const RowRun idle = all.args().runs[1];
    for (std::int32_t bad : {int(kIdleLength), -1, 69, INT32_MIN, INT32_MAX}) {
      for (auto& b : all.blocks())
        if (b.role == Role::length) static_cast<std::int32_t*>(b.data())[idle.sequence] = bad;
      DeviceProblem<Attention> some(all);
      Problem<Attention>&got = some.run(c), &want = expected.run(c);
      const Tensor y = got.tensor(got.blocks().back()), of_all = want.tensor(want.blocks().back());
      std::int64_t wrong = 0;
      for (std::int64_t e = 0; e < y.size(); ++e) {
        const std::int64_t row = e / (2 * 80);
        const bool is_idle = row >= idle.first_row && row < idle.first_row + idle.count;
        wrong += is_idle ? !std::isnan(y.at(e)) : y.at(e) != of_all.at(e);
      }
      INFO("kv_len " << bad);
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("prefill attention on the GPU gives runs of any lengths the same bits a hundred times", "[gpu][prefill]") {
  cuda::Context c = context();
  for (const KeyWindow& window : {KeyWindow{}, KeyWindow{.keys = 90}}) {
    PagedDeviceProblem<Attention> p(call_of({33, 33, 80, DType::f16, window}, kMixed), 64);
    const std::vector<std::byte> first = y_of(p.run(c));
    for (int i = 0; i < 100; ++i) REQUIRE(bool(y_of(p.run(c)) == first));
  }
}

TEST_CASE("prefill attention on the GPU: pages and windows - small", "[gpu][prefill][pages][small]") {
  check_prompts({1, 1, 64, DType::f16}, {{64, 0}, {20, 50}, {65, 1}});
  check_prompts({1, 1, 80, DType::f16, {.keys = 40}}, {{66, 60}, {20, 50}});
  check_prompts({2, 1, 64, DType::bf16, {.keys = 40, .sinks = 4}}, {{66, 60}, {2, 50}});
}

// What is wrong in the calls: the table of pages, a length, the window, the sinks. Of steps that decode, and that the
// two prefill kernels take.
TEST_CASE("On the GPU faults of pages, windows and sinks leave attention's budget", "[gpu][mutation][pages][window]") {
  for (cuda::Context& c : contexts())
    for (std::int64_t count : {2, 20, 70})
      for (const KeyWindow& window : {KeyWindow{}, KeyWindow{.keys = 11}, KeyWindow{.keys = 11, .sinks = 3}}) {
        const std::vector<Prompt> prompts{{count, 200}, {count, 190}, {count, 150}};
        Problem<Attention> untouched = call_of({4, 2, 64, DType::f16, window}, prompts);
        // Entries that no row sees become numbers: a fault that reads them must be found without NaN.
        for (auto& b : untouched.blocks())
          if (b.role == Role::cache)
            for (std::int64_t i = 0; i < element_count(b.shape); ++i)
              if (f16& e = static_cast<f16*>(b.data())[i]; std::isnan(widen<double>(e)))
                e = narrow<f16>(std::sin(double(i)));
        Problem<Attention> reference(untouched, DType::f64);
        require_ok(cpu_ref::run(reference.args()));
        const auto condition = cpu_ref::condition(reference.args());
        require_ok(condition.status());
        const Budget budget =
            Attention::budget(reference.dims(), {.compute = DType::f32, .output = DType::f16}, *condition);
        const auto pages_each = std::size_t((untouched.dims().capacity + 63) / 64);
        // Whether the call with a fault is outside the budget.
        const auto is_caught = [&](auto&& change) {
          Problem<Attention> host(untouched);
          Paged<Attention> pages(host, 64);
          std::vector<std::int32_t> table = pages.table, lengths;
          for (auto& b : untouched.blocks())
            if (b.role == Role::length) {
              const auto* const data = static_cast<const std::int32_t*>(b.data());
              lengths.assign(data, data + element_count(b.shape));
            }
          PagedDeviceProblem<Attention> device(untouched, 64);
          change(device.args(), table, lengths);
          const DeviceBytes device_table(std::as_bytes(std::span(table))),
              device_lengths(std::as_bytes(std::span(lengths)));
          device.args().page_table.data = reinterpret_cast<const std::int32_t*>(device_table.data());
          device.args().kv_len.data = reinterpret_cast<const std::int32_t*>(device_lengths.data());
          Problem<Attention>& got = device.run(c);
          const auto result = compare(got.tensor(got.blocks().back()), reference.tensor(reference.blocks().back()));
          require_ok(result.status());
          return !result->within(budget);
        };
        using Args = Attention::Args;
        using Numbers = std::vector<std::int32_t>;
        const auto first = std::size_t(untouched.args().runs[0].sequence),
                   second = std::size_t(untouched.args().runs[1].sequence);
        CAPTURE(count, window.keys, window.sinks, to_string(c.arch()));
        CHECK_FALSE(is_caught([](Args&, Numbers&, Numbers&) {}));
        // Two pages of a sequence in each other's place, a page of another sequence, a neighbour's length.
        CHECK(is_caught([&](Args&, Numbers& table, Numbers&) {
          std::swap(table[first * pages_each + 2], table[first * pages_each + 3]);
        }));
        CHECK(is_caught(
            [&](Args&, Numbers& table, Numbers&) { table[first * pages_each + 3] = table[second * pages_each + 2]; }));
        CHECK(is_caught([&](Args&, Numbers&, Numbers& lengths) { lengths[first] = lengths[second]; }));
        if (!window) continue;
        for (int by : {-1, 1}) CHECK(is_caught([&](Args& a, Numbers&, Numbers&) { a.window.keys += by; }));
        if (window.sinks == 0) continue;
        for (int by : {-1, 1}) CHECK(is_caught([&](Args& a, Numbers&, Numbers&) { a.window.sinks += by; }));
        CHECK(is_caught([&](Args& a, Numbers&, Numbers&) { a.q_sinks = a.q; }));
      }
}
