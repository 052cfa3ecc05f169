// Decode attention on the GPU to caches of every kind: pages, windows, sinks and streams, of up to 1024 sequences, and
// of runs.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/call_groups.hpp"
#include "cuda/step/graph.hpp"
#include "tests/cuda/device_pages.hpp"
#include "tests/support/grouped.hpp"
#include "tests/support/mixed_steps.hpp"

using namespace cf;
using namespace cf::test;

namespace {

using Lengths = std::vector<std::int32_t>;

/// Calls of so many sequences, with caches of `capacity` entries, all of which have values.
Setup decode_setup(std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim, std::size_t batch,
                   std::int64_t capacity, DType activation, std::int64_t q_len = 1) {
  const std::int64_t full = std::max(q_len, capacity) + 3 * std::int64_t(batch);
  Setup s = grouped_setup(heads, kv_heads, head_dim, {std::int64_t(batch), q_len, full, capacity}, activation);
  s.seed = std::uint64_t(capacity + head_dim);
  return s;
}

/// A problem of sequences of these lengths. An element that no query may read is NaN: those of keys behind a sequence's
/// length, and of keys that its windows leave out. A length beyond the capacity is a stream's.
Problem<ops::Attention> decode_problem(const Setup& s, const Lengths& lengths, const KeyWindow& window = {},
                                       std::int64_t max_kv_len = 0) {
  auto sizes = example_of<ops::Attention>(s);
  sizes.first.window = sizes.second.window = window;
  const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  sizes.first.max_kv_len = sizes.second.max_kv_len = std::max({longest, max_kv_len, s.load.q_len});
  Problem<ops::Attention> p(s, sizes);
  const std::int64_t capacity = sizes.first.capacity, kv_heads = sizes.first.kv_heads, head_dim = sizes.first.head_dim;
  for (auto& block : p.blocks()) {
    if (block.role == Role::length) std::copy(lengths.begin(), lengths.end(), static_cast<std::int32_t*>(block.data()));
    if (block.role != Role::cache) continue;
    dispatch_float(block.dtype, [&](auto zero) {
      using T = decltype(zero);
      for (std::size_t b = 0; b < lengths.size(); ++b) {
        std::vector<char> seen(std::size_t(capacity), 0);
        const RingView kept(CacheView(kv_heads, capacity, head_dim), window.sinks);
        const std::int64_t count = count_of(s, std::int64_t(b));
        for (std::int64_t n = std::max<std::int64_t>(1, lengths[b] - count + 1); n <= lengths[b]; ++n)
          for (std::int64_t j = 0; j < n; ++j) {
            if (window && j >= window.sinks && j < window.first(n)) j = window.first(n);
            seen[std::size_t(kept.stored_index(j))] = 1;
          }
        for (std::int64_t row = 0; row < kv_heads * capacity; ++row)
          if (!seen[std::size_t(row % capacity)])
            std::fill_n(static_cast<T*>(block.data()) + (std::int64_t(b) * kv_heads * capacity + row) * head_dim,
                        head_dim, narrow<T>(std::numeric_limits<double>::quiet_NaN()));
      }
    });
  }
  return p;
}

std::string describe(const Setup& s, const KeyWindow& window) {
  return describe(s) + ", window " + std::to_string(window.keys) + ", sinks " + std::to_string(window.sinks);
}

/// In a table on the device, takes away the pages that no query of the problem reads.
void forget_unseen_pages(const Problem<ops::Attention>& untouched, const Lengths& lengths,
                         const ops::Attention::Args& args) {
  const std::int64_t pages = args.page_table.shape[1], entries = args.k_cache.shape[2];
  const KeyWindow window = args.window;
  const std::int64_t q_len = untouched.dims().q_len;
  for (std::size_t b = 0; b < lengths.size(); ++b)
    for (std::int64_t i = 0; i < pages && lengths[b] <= pages * entries; ++i) {
      const std::int64_t begin = i * entries, end = begin + entries;
      const std::int64_t first = window.first(std::max<std::int64_t>(0, lengths[b] - q_len + 1));
      const bool seen = begin < lengths[b] && (end > first || begin < window.sinks);
      const std::int32_t nowhere = INT32_MIN + std::int32_t(i);
      if (!seen)
        require_cuda(cudaMemcpy(const_cast<std::int32_t*>(args.page_table.data) + std::int64_t(b) * pages + i, &nowhere,
                                4, cudaMemcpyHostToDevice));
    }
}

const std::vector<std::byte>& y_of(Problem<ops::Attention>& p) { return p.blocks().back().memory; }

/// Runs a problem in pages, in another order for each GPU's plans: the bits are those of its contiguous cache.
void check_pages(const Setup& s, const Lengths& lengths, Problem<ops::Attention>& untouched, std::int64_t page) {
  INFO(describe(s, untouched.args().window) << ", pages of " << page);
  std::uint64_t seed = 1;
  for (cuda::Context& c : contexts()) {
    INFO("planned for " << to_string(c.arch()));
    DeviceProblem<ops::Attention> contiguous(untouched);
    PagedDeviceProblem<ops::Attention> paged(untouched, page, seed++);
    forget_unseen_pages(untouched, lengths, paged.args());
    const std::vector<std::byte> expected = y_of(contiguous.run(c));
    for (int i = 0; i < 2; ++i) CHECK(bool(y_of(paged.run(c)) == expected));
  }
}

/// Runs a problem contiguously, where it agrees with the oracle, and in pages of these sizes.
void check_decode(const Setup& s, const Lengths& lengths, std::initializer_list<std::int64_t> pages,
                  const KeyWindow& window = {}, std::int64_t max_kv_len = 0) {
  Problem<ops::Attention> untouched = decode_problem(s, lengths, window, max_kv_len);
  INFO(describe(s, window));
  CHECK(check_on_device<ops::Attention>(s, untouched));
  for (std::int64_t page : pages) check_pages(s, lengths, untouched, page);
}

/// Checks a graph of an append and the attention behind it, which loads the older keys while the append runs: y has the
/// bits of the two calls one after the other. `input` is what the append adds to the cache.
template <class Append>
void check_older_keys_first(const Append& append, const ops::Attention::Args& attend, void* input,
                            const std::vector<std::byte>& values, cuda::Context& c) {
  std::vector<std::byte> inputs[2] = {values, values}, expected[2];
  std::rotate(inputs[1].begin(), inputs[1].begin() + std::ptrdiff_t(size_bytes(attend.q.dtype)), inputs[1].end());
  const auto bring = [&](int i) {
    require_cuda(cudaMemcpy(input, inputs[i].data(), values.size(), cudaMemcpyDefault));
    require_cuda(cudaDeviceSynchronize());
  };
  const auto y = [&] {
    require_cuda(cudaDeviceSynchronize());
    std::vector<std::byte> bytes(std::size_t(attend.y.bytes()));
    require_cuda(cudaMemcpy(bytes.data(), attend.y.data, bytes.size(), cudaMemcpyDefault));
    return bytes;
  };
  for (int i = 0; i < 2; ++i) {
    bring(i);
    REQUIRE(cuda::run(append, c));
    REQUIRE(cuda::run(attend, c));
    expected[i] = y();
  }
  REQUIRE_FALSE(bool(expected[0] == expected[1]));
  const auto graph = cuda::capture_dataflow(c, [&](cuda::DataflowCapture& capture) {
    const Status appended = capture.run(append, {.early = true});
    return appended ? capture.run(attend, {.early = true, .after_waiting = true}) : appended;
  });
  INFO(graph.status().message());
  REQUIRE(graph);
  int wrong = 0;
  for (int i = 0; i < 20; ++i) {
    bring(i % 2);
    require_cuda(cudaGraphLaunch(graph->get(), c.stream()));
    wrong += y() != expected[i % 2];
  }
  CHECK(wrong == 0);
}

/// The elements of a problem's block.
template <class Op>
std::vector<std::byte> values_of(Problem<Op>& p, std::string_view name) {
  for (const auto& block : p.blocks())
    if (block.name == name)
      return {block.memory.begin() + Problem<Op>::guard_bytes, block.memory.end() - Problem<Op>::guard_bytes};
  return {};
}

/// Lengths around a window and around its sum with the sinks, and longer ones.
Lengths lengths_around(const KeyWindow& w, std::int64_t capacity) {
  Lengths all;
  for (std::int64_t n : {std::int64_t(1), std::int64_t(4), std::int64_t(5), w.keys, w.keys + 1, w.keys + w.sinks,
                         w.keys + w.sinks + 1, w.keys + 65, w.keys + 131, capacity - 1, capacity})
    if (n >= 1 && n <= capacity) all.push_back(std::int32_t(n));
  return all;
}

}  // namespace

TEST_CASE("decode attention in pages of any size: the bits of a contiguous cache, at every length",
          "[gpu][attention]") {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (std::int64_t page : {64, 128, 256})
      for (std::int64_t head_dim : {8, 64, 80, 128, 256}) {
        const std::int32_t entries = std::int32_t(page);
        const Lengths lengths{1, 63, 64, 65, entries - 1, entries, entries + 1, 2 * entries + 70};
        check_decode(decode_setup(2, 2, head_dim, lengths.size(), 2 * page + 70, activation), lengths, {page});
      }
}

// With 15 tokens a sequence there are so many queries that their keys are not split.
TEST_CASE("decode attention in pages: tables of more pages than a warp holds at once", "[gpu][attention]") {
  for (DType activation : {DType::f16, DType::f32})
    for (std::int64_t q_len : {1, 15}) {
      const Lengths lengths{2049, 4200};
      check_decode(decode_setup(7, 7, 64, lengths.size(), 4200, activation, q_len), lengths, {64});
    }
}

TEST_CASE("decode attention in pages: grouped query heads", "[gpu][attention][grouped]") {
  const Lengths lengths{1, 65, 255, 256, 257, 600};
  for (auto [heads, kv_heads] : kGroupedHeads)
    for (std::int64_t head_dim : {80, 128})
      for (std::int64_t max_kv_len : {600, 1024})  // with the larger one the heads of a group share their keys
        check_decode(decode_setup(heads, kv_heads, head_dim, lengths.size(), 1024, DType::bf16), lengths,
                     {head_dim == 80 ? 64 : 256}, {}, max_kv_len);
}

TEST_CASE("decode attention in pages: several tokens a sequence", "[gpu][attention]") {
  for (DType activation : {DType::f16, DType::f32})
    for (std::int64_t q_len : {2, 7})
      for (const KeyWindow& window : {KeyWindow{}, KeyWindow{.keys = 60, .sinks = 4}}) {
        const Lengths lengths{std::int32_t(q_len), 63, 64, 65, 66, 130, 200};
        check_decode(decode_setup(4, 2, 80, lengths.size(), 256, activation, q_len), lengths, {64}, window);
      }
}

TEST_CASE("decode attention: windows and sinks at every boundary", "[gpu][attention][window]") {
  const std::vector<KeyWindow> all{{1, 0}, {63, 0}, {64, 0}, {65, 0}, {1, 4}, {63, 4}, {64, 4}, {65, 4}, {65, 130}},
      few{{64, 0}, {65, 4}, {65, 130}};
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (std::int64_t head_dim : {64, 80, 128, 256})
      for (const KeyWindow& window : head_dim == 80 ? all : few) {
        const Lengths lengths = lengths_around(window, 300);
        check_decode(decode_setup(2, 2, head_dim, lengths.size(), 300, activation), lengths, {64}, window);
      }
}

TEST_CASE("decode attention: a window of thousands of keys, of lone heads and of grouped ones",
          "[gpu][attention][window]") {
  for (auto [activation, kv_heads] : {std::pair<DType, std::int64_t>{DType::f16, 4}, {DType::f16, 1}, {DType::f32, 2}})
    for (std::int64_t sinks : {0, 4}) {
      const KeyWindow window{.keys = 2044, .sinks = sinks};
      const Lengths lengths{1, 5, 2044, 2045, 2048, 2049, 2300};
      check_decode(decode_setup(4, kv_heads, 80, lengths.size(), 2300, activation), lengths, {sinks ? 64 : 256},
                   window);
    }
}

TEST_CASE("decode attention: streams whose rings have gone round several times", "[gpu][attention][stream]") {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (std::int64_t head_dim : {64, 80, 128, 256})
      for (const KeyWindow& window : {KeyWindow{60, 4}, KeyWindow{128, 0}, KeyWindow{121, 7}, KeyWindow{1, 3}})
        for (std::int64_t q_len : {1, 3}) {
          if (head_dim != 80 && (activation == DType::bf16 || q_len > 1)) continue;
          const std::int64_t capacity = (stream_entries(window, q_len) + 63) / 64 * 64;
          const auto c = std::int32_t(capacity);
          const Lengths lengths{3, 63, c - 1, c, c + 1, c + 60, c + 61, 3 * c + 17, 7 * c - 5, 1 << 30};
          check_decode(decode_setup(2, 2, head_dim, lengths.size(), capacity, activation, q_len), lengths, {64},
                       window);
        }
  const KeyWindow window{.keys = 2044, .sinks = 4};
  for (std::int64_t kv_heads : {4, 1}) {
    const Lengths lengths{2047, 2048, 2049, 5000, 100000};
    check_decode(decode_setup(4, kv_heads, 80, lengths.size(), 2048, DType::f16), lengths, {64, 256}, window);
  }
}

TEST_CASE("decode attention: sinks are seen by queries of their own", "[gpu][attention][window]") {
  cuda::Context c = context();
  for (DType activation : {DType::f16, DType::f32}) {
    const Lengths lengths{3, 4, 5, 70, 200};
    const Setup s = decode_setup(2, 2, 80, lengths.size(), 200, activation);
    Problem<ops::Attention> untouched = decode_problem(s, lengths, {.keys = 60, .sinks = 4});
    DeviceProblem<ops::Attention> own(untouched), same(untouched);
    same.args().q_sinks = same.args().q;
    const bool equal = y_of(own.run(c)) == y_of(same.run(c));
    CHECK_FALSE(equal);
  }
}

TEST_CASE("decode attention: 1 to 1024 sequences in pages, most of them idle, each as if it were alone",
          "[gpu][attention]") {
  cuda::Context c = context();
  for (DType activation : {DType::f16, DType::f32})
    for (std::size_t batch : {1, 64, 65, 257, 1024})
      for (const KeyWindow& window : {KeyWindow{}, KeyWindow{.keys = 20, .sinks = 4}}) {
        Lengths lengths(batch, kIdleLength);
        for (std::size_t b = 0; b < batch; ++b)
          if (b % 3 == 0) lengths[b] = std::int32_t(1 + 7 * b % 64);
        const Setup s = decode_setup(2, 1, 64, batch, 64, activation);
        INFO(describe(s, window));
        Problem<ops::Attention> untouched = decode_problem(s, lengths, window, 64);
        DeviceProblem<ops::Attention> contiguous(untouched);
        PagedDeviceProblem<ops::Attention> paged(untouched, 64);
        forget_unseen_pages(untouched, lengths, paged.args());
        Problem<ops::Attention>&expected = contiguous.run(c), &got = paged.run(c);
        CHECK(bool(y_of(got) == y_of(expected)));
        CHECK(bool(y_of(paged.run(c)) == y_of(expected)));

        const Tensor y = got.tensor(got.blocks().back());
        const std::int64_t row = y.size() / std::int64_t(batch);
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < y.size(); ++i)
          wrong += std::isnan(y.at(i)) != (lengths[std::size_t(i / row)] == kIdleLength);
        CHECK(wrong == 0);

        // A call of one sequence alone. It may split its keys otherwise, but without sinks 64 keys are one tile.
        if (window) continue;
        for (std::size_t b : {std::size_t(0), batch / 2 / 3 * 3, (batch - 1) / 3 * 3}) {
          DeviceProblem<ops::Attention> all(untouched);
          const ops::Attention::Args one =
              part_of(all.args(), RowGroup{.sequence = std::int64_t(b), .first_row = std::int64_t(b)});
          REQUIRE(cuda::run(one, c));
          const Tensor alone = all.fetch().tensor(all.blocks().back());
          for (std::int64_t i = 0; i < row; ++i)
            wrong += alone.at(std::int64_t(b) * row + i) != y.at(std::int64_t(b) * row + i);
        }
        CHECK(wrong == 0);
      }
}

TEST_CASE("decode attention: runs of any counts and sequences in one launch", "[gpu][attention][runs]") {
  cuda::Context c = context();
  for (DType activation : {DType::f16, DType::f32})
    for (std::int64_t count : {2, 65, 256, 300})
      for (std::int64_t most : {1, 4})
        for (const KeyWindow& window : {KeyWindow{}, KeyWindow{.keys = 20, .sinks = 4}}) {
          const std::int64_t batch = count + count / 3 + 1;
          Setup s = decode_setup(2, 1, 64, std::size_t(batch), 64, activation, most);
          std::vector<std::int64_t> sequences(std::size_t(batch), 0);
          std::iota(sequences.begin(), sequences.end(), 0);
          std::mt19937_64 random(std::uint64_t(count + most));
          std::shuffle(sequences.begin(), sequences.end(), random);
          Lengths lengths(std::size_t(batch), kIdleLength);
          for (std::int64_t i = 0, row = 0; i < count; row += s.runs.back().count, ++i) {
            const auto n = std::int64_t(1 + random() % std::uint64_t(most));
            s.runs.push_back({.sequence = sequences[std::size_t(i)], .first_row = row, .count = n});
            lengths[std::size_t(sequences[std::size_t(i)])] = std::int32_t(n + std::int64_t(random() % (65 - n)));
          }
          INFO(describe(s, window) << ", runs " << count);
          REQUIRE(differ(s.runs));
          Problem<ops::Attention> untouched = decode_problem(s, lengths, window, 64);
          DeviceProblem<ops::Attention> together(untouched), apart(untouched);
          PagedDeviceProblem<ops::Attention> paged(untouched, 64);
          cuda::LaunchList launches(c);
          REQUIRE(cuda::prepare(together.args(), launches));
          CHECK(launches.size() == (count > 256 ? 2 : 1));
          Problem<ops::Attention>& got = together.run(c);
          CHECK(bool(y_of(paged.run(c)) == y_of(got)));
          if (count == 65) CHECK(check_on_device<ops::Attention>(s, untouched));
          if (window) continue;  // 64 keys are one tile, which no plan splits; the sinks are another
          const Status each = each_by_itself(apart.args(), [&](const auto& part) { return cuda::run(part, c); });
          INFO(each.message());
          REQUIRE(each);
          CHECK(bool(y_of(apart.fetch()) == y_of(got)));
        }
}

TEST_CASE("decode attention in pages: a kv_len without room, and pages outside the pool, give NaN",
          "[gpu][attention][bad]") {
  cuda::Context c = context();
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (std::int64_t kv_heads : {2, 1}) {
      const Lengths lengths{100, 128, 128};
      const Setup s = decode_setup(2, kv_heads, 80, lengths.size(), 128, activation);
      INFO(describe(s));
      Problem<ops::Attention> untouched = decode_problem(s, lengths);
      PagedDeviceProblem<ops::Attention> good(untouched, 64);
      Problem<ops::Attention>& good_host = good.run(c);
      const Tensor expected = good_host.tensor(good_host.blocks().back());
      const std::int64_t row = expected.size() / 3;
      // Of the middle one of three sequences.
      const auto check_nan = [&](PagedDeviceProblem<ops::Attention>& p) {
        Problem<ops::Attention>& host = p.run(c);
        const Tensor got = host.tensor(host.blocks().back());
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < got.size(); ++i)
          wrong += i / row == 1 ? !std::isnan(got.at(i)) : got.at(i) != expected.at(i);
        CHECK(wrong == 0);
      };
      for (std::int32_t bad : {0, -1, 129, 1 << 30, INT32_MIN, INT32_MAX}) {
        INFO("kv_len " << bad);
        PagedDeviceProblem<ops::Attention> p(untouched, 64);
        require_cuda(cudaMemcpy(const_cast<std::int32_t*>(p.args().kv_len.data) + 1, &bad, 4, cudaMemcpyHostToDevice));
        check_nan(p);
      }
      for (std::int64_t i : {2, 3})  // the pages of the middle sequence
        for (std::int32_t bad : {-1, INT32_MIN, INT32_MAX, std::int32_t(good.args().k_cache.shape[0])}) {
          INFO("page " << bad << " at " << i);
          PagedDeviceProblem<ops::Attention> p(untouched, 64);
          require_cuda(
              cudaMemcpy(const_cast<std::int32_t*>(p.args().page_table.data) + i, &bad, 4, cudaMemcpyHostToDevice));
          check_nan(p);
        }
    }
}

TEST_CASE("decode attention in pages: older keys come before the newest is appended",
          "[gpu][attention][small][reruns]") {
  cuda::Context c = context();
  for (DType activation : {DType::f16, DType::f32})
    for (auto [heads, kv_heads, head_dim] : {std::array<std::int64_t, 3>{2, 2, 80}, {4, 1, 64}, {2, 1, 256}})
      for (const Workload& load : {Workload{1, 1, 1, 4}, Workload{2, 1, 2, 700}, Workload{1, 1, 17, 20},
                                   Workload{3, 1, 128, 140}, Workload{1, 1, 129, 2048}, Workload{1, 1, 2048, 2048}}) {
        Setup s{.model = gated_model_of(ModelType::llama, heads, kv_heads, head_dim, heads * head_dim, 8),
                .load = load,
                .activation = activation};
        s.model.max_position_embeddings = 2048;
        INFO(describe(s));
        Problem<ops::RopeAppend> untouched(s);
        PagedDeviceProblem<ops::RopeAppend> step(untouched, 64);
        const ops::RopeAppend::Args& a = step.args();
        const DeviceBytes y(std::vector<std::byte>(std::size_t(a.q.bytes())));
        check_older_keys_first(a,
                               {.q = a.q,
                                .k_cache = a.k_cache,
                                .v_cache = a.v_cache,
                                .kv_len = a.kv_len,
                                .y = AnyView<3>(y.data(), a.q.shape, activation),
                                .scale = 0.125,
                                .max_kv_len = cache_capacity(a),
                                .page_table = a.page_table},
                               const_cast<void*>(a.qkv.data), values_of(untouched, "qkv"), c);
      }
}

TEST_CASE("decode attention of streams: older keys come before the newest takes the oldest one's place",
          "[gpu][attention][stream][small][reruns]") {
  cuda::Context c = context();
  const KeyWindow window{.keys = 60, .sinks = 4};
  for (DType activation : {DType::f16, DType::f32})
    for (bool in_pages : {false, true})
      for (std::int32_t length : {1, 4, 5, 64, 65, 128, 1000}) {
        const Setup s = decode_setup(4, 2, 80, 2, 64, activation);
        INFO(describe(s, window) << ", length " << length << (in_pages ? ", in pages" : ""));
        auto sizes = example_of<ops::KvAppend>(s);
        sizes.first.window = sizes.second.window = window;
        Problem<ops::KvAppend> untouched(s, sizes);
        for (auto& block : untouched.blocks())
          if (block.role == Role::length) std::fill_n(static_cast<std::int32_t*>(block.data()), 2, length);
        DeviceProblem<ops::KvAppend> contiguous(untouched);
        PagedDeviceProblem<ops::KvAppend> paged(untouched, 64);
        const ops::KvAppend::Args& a = in_pages ? paged.args() : contiguous.args();
        Problem<ops::Attention> queries(s);
        const DeviceBytes q(values_of(queries, "q")), y(values_of(queries, "y"));
        const std::array<std::int64_t, 3> shape{2, 4, 80};
        check_older_keys_first(a,
                               {.q = {q.data(), shape, activation},
                                .k_cache = a.k_cache,
                                .v_cache = a.v_cache,
                                .kv_len = a.kv_len,
                                .y = AnyView<3>(y.data(), shape, activation),
                                .scale = 0.125,
                                .max_kv_len = 1 << 30,
                                .page_table = a.page_table,
                                .window = window,
                                .q_sinks = {q.data(), shape, activation}},
                               const_cast<void*>(a.v.data), values_of(untouched, "v"), c);
      }
}

TEST_CASE("attention refuses pages of a size that no kernel takes, by name", "[gpu][attention][bad]") {
  cuda::Context c = context();
  for (DType activation : {DType::f16, DType::f32})
    for (std::int64_t page : {1, 63, 96, 1088}) {
      const Lengths lengths{40, 90};
      const Setup s = decode_setup(2, 2, 80, lengths.size(), 90, activation);
      PagedDeviceProblem<ops::Attention> paged(decode_problem(s, lengths), page);
      cuda::LaunchList launches(c);
      const Status refused = cuda::prepare(paged.args(), launches);
      INFO(refused.message());
      CHECK(refused.code() == Code::unimplemented);
      CHECK(refused.message() ==
            "attention: cuda takes pages of a multiple of 64 entries up to 1024, got " + std::to_string(page));
    }
}

TEST_CASE("decode attention in pages, with a window and sinks - small", "[gpu][attention][small]") {
  const KeyWindow window{.keys = 60, .sinks = 4};
  const Lengths lengths{1, 64, 65, 130, 200};
  for (DType activation : {DType::f16, DType::f32})
    for (std::int64_t kv_heads : {2, 1}) {
      check_decode(decode_setup(2, kv_heads, 80, lengths.size(), 200, activation), lengths, {64});
      check_decode(decode_setup(2, kv_heads, 80, lengths.size(), 64, activation), lengths, {64}, window);
    }
}
