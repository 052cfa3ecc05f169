// On the GPU: appends to caches in pages and to streams' caches, and runs of any number in one launch.
#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <tuple>
#include <type_traits>

#include "core/page_pool.hpp"
#include "cuda/model/pages.hpp"
#include "cuda/port/run.hpp"
#include "tests/cuda/device_pages.hpp"
#include "tests/cuda/device_tensors.hpp"
#include "tests/support/mixed_steps.hpp"
#include "tests/support/op_test_case.hpp"
#include "tests/support/taken.hpp"

using namespace cf;
using namespace cf::test;

namespace {

using Appends = std::tuple<ops::KvAppend, ops::RopeAppend>;

std::vector<ModelConfig> models() {
  return {model_of(2, 80, 20, 24), gated_model_of(ModelType::llama, 8, 2, 128, 64, 40)};
}

/// `count` runs of 1 to `most` rows in random order, behind up to kv_len entries, and sequences without a run between
/// them.
Setup runs_of(const ModelConfig& model, DType activation, std::int64_t count, std::int64_t most,
              std::int64_t kv_len = 70) {
  Setup s{.model = model,
          .load = {.batch = count + count / 3 + 1, .q_len = most, .kv_len = kv_len, .capacity = kv_len + 3},
          .activation = activation,
          .seed = std::uint64_t(count)};
  s.model.max_position_embeddings = kv_len + 3;
  s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
  std::vector<std::int64_t> sequences(std::size_t(s.load.batch));
  std::iota(sequences.begin(), sequences.end(), 0);
  std::mt19937_64 random(s.seed);
  std::shuffle(sequences.begin(), sequences.end(), random);
  std::int64_t row = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t n = 1 + std::int64_t(random() % std::uint64_t(most));
    s.runs.push_back({.sequence = sequences[std::size_t(i)], .first_row = row, .count = n});
    row += n;
  }
  return s;
}

template <class Op>
std::int32_t* lengths_of(Problem<Op>& p) {
  for (auto& b : p.blocks())
    if (b.role == Role::length) return static_cast<std::int32_t*>(b.data());
  return nullptr;
}

/// How many launches a call is.
template <class Args>
std::size_t launches_of(const Args& args, const cuda::Context& c) {
  cuda::LaunchList launches(c);
  require_ok(cuda::prepare(args, launches));
  return launches.size();
}

}  // namespace

OP_TEST_CASE("On the GPU a launch appends up to 256 runs of any counts", "[gpu][runs]", Appends) {
  for (DType activation : {DType::f16, DType::f32})
    for (const ModelConfig& model : models())
      for (std::int64_t count : {2, 3, 65, 256, 257, 300})
        for (std::int64_t most : {1, 4}) {
          if (count != 65 && (activation == DType::f32 || most != 1 + 3 * (count % 2))) continue;
          const Setup s = runs_of(model, activation, count, most);
          INFO(TestType::name << ": " << describe(s) << ", runs " << count);
          cuda::Context c = context();
          DeviceProblem<TestType> together(s), apart(s);
          CHECK(launches_of(together.args(), c) == (count > 256 ? 2u : 1u));
          const std::vector<std::byte> got = together.run(c).bytes();
          require_ok(each_by_itself(apart.args(), [&](const auto& part) { return cuda::run(part, c); }));
          const bool same = got == apart.fetch().bytes();
          CHECK(same);
          if (count == 65) CHECK(check_on_device<TestType>(s, example_of<TestType>(s)));
        }
}

OP_TEST_CASE("On the GPU pages of any length are appended to as a contiguous cache is", "[gpu][pages]", Appends) {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (std::int64_t page : {64, 128})
      for (std::int64_t kv_len :
           {std::int64_t(1), std::int64_t(63), std::int64_t(64), std::int64_t(65), page - 1, page, page + 1, 2 * page})
        for (std::int64_t q_len : {1, 3}) {
          if (kv_len < q_len) continue;
          Setup s{.model = models()[std::size_t(kv_len % 2)],
                  .load = {.batch = 3, .q_len = q_len, .kv_len = kv_len, .capacity = kv_len + 2},
                  .activation = activation,
                  .seed = std::uint64_t(kv_len)};
          s.model.max_position_embeddings = 300;
          s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
          check_pages_on_device<TestType>(s, page);
        }
}

TEST_CASE("On the GPU rows become entries of pages as of a contiguous cache", "[gpu][pages][append_rows]") {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (std::int64_t page : {64, 128})
      for (std::int64_t kv_len : {std::int64_t(1), std::int64_t(65), page - 1, page, page + 1, page + 2, 2 * page}) {
        Setup s{.model = models()[std::size_t(kv_len % 2)],
                .load = {.batch = 1, .q_len = 1, .kv_len = kv_len, .capacity = kv_len + 2},
                .activation = activation,
                .seed = std::uint64_t(kv_len)};
        s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
        check_pages_on_device<ops::AppendRows>(s, page);
      }
}

OP_TEST_CASE("On the GPU runs of any number and length append to pages of their own", "[gpu][pages][runs]", Appends) {
  for (const ModelConfig& model : models()) {
    check_pages_on_device<TestType>(mixed_setup(model, DType::f16), 64);
    for (std::int64_t count : {1, 2, 300}) check_pages_on_device<TestType>(runs_of(model, DType::f16, count, 3), 64);
  }
}

OP_TEST_CASE("On the GPU steps of 1 to 300 runs of up to 65 rows agree with the oracle at every boundary of a page",
             "[gpu][pages][runs]", std::tuple<ops::KvAppend, ops::RopeAppend, ops::Attention>) {
  constexpr bool is_attention = std::is_same_v<TestType, ops::Attention>;
  const ModelConfig model = model_of(2, 80, 20, 24);
  for (std::int64_t page : {64, 128})
    for (std::int64_t most : {1, 63, 64, 65})
      for (std::int64_t count : {1, 2, 7, 40, 300}) {
        if (count == 300 && most > 1) continue;
        // Lengths of 1 or more about a page's end, and of more than two pages.
        for (std::int64_t kv_len : {page - 1, page, page + 1, 2 * page + 1}) {
          if (kv_len < most || (count > 7 && kv_len != page + 1) || (count == 40 && page > 64)) continue;
          // Contiguous caches have other kernels for equal runs.
          check_pages_on_device<TestType>(runs_of(model, DType::f16, count, most, kv_len), page,
                                          {.same_bits = !is_attention});
        }
      }
}

TEST_CASE("On the GPU the fused products append to pages", "[gpu][pages][ln_qkv]") {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (const auto& [batch, q_len] : {std::pair{1, 1}, {3, 1}, {16, 1}, {2, 3}})
      for (std::int64_t kv_len : {3, 64, 65, 129}) {
        Setup s{.model = model_of(4, 64, 16, 24),
                .load = {.batch = batch, .q_len = q_len, .kv_len = kv_len, .capacity = kv_len + 2},
                .activation = activation,
                .weight = activation,
                .values = activation == DType::bf16 ? DType::bf16 : DType::f16};
        s.model.max_position_embeddings = 131;
        check_pages_on_device<ops::LnQkv>(s, 64);
        if (activation == DType::f32) continue;
        s.gptq = {.bits = 4};
        check_pages_on_device<ops::LnQkv>(s, 64);
        if (batch * q_len > 1) continue;
        s.model = gated_model_of(ModelType::llama, 8, 2, 64, 512, 24);
        s.model.max_position_embeddings = 131;
        check_pages_on_device<ops::RmsQkv>(s, 64);
      }
}

TEST_CASE("On the GPU a layer's caches may lie in pages", "[gpu][pages]") {
  for (DType activation : {DType::f16, DType::bf16})
    for (const ModelConfig& model : {model_of(2, 80, 20, 40), gated_model_of(ModelType::llama, 4, 2, 64, 64, 40)})
      for (std::int64_t q_len : {1, 3})
        for (std::int64_t kv_len : {63, 64, 65, 129}) {
          Setup s{.model = model,
                  .load = {.batch = 3, .q_len = q_len, .kv_len = kv_len, .capacity = kv_len + 2},
                  .activation = activation,
                  .weight = activation,
                  .values = activation};
          s.model.max_position_embeddings = 131;
          check_pages_on_device<ops::DecodeLayer>(s, 64, {.same_bits = false});
        }
}

OP_TEST_CASE("On the GPU an idle sequence and a page outside the pool are not written", "[gpu][pages][bad][small]",
             Appends) {
  Setup s{.model = model_of(2, 80, 20, 24),
          .load = {.batch = 4, .q_len = 2, .kv_len = 70, .capacity = 72},
          .activation = DType::f16};
  s.model.max_position_embeddings = 72;
  cuda::Context c = context();
  Problem<TestType> untouched(s);
  lengths_of(untouched)[1] = kIdleLength;
  DeviceProblem<TestType> contiguous(untouched);
  PagedDeviceProblem<TestType> paged(untouched, 64);
  Problem<TestType>& expected = contiguous.run(c);
  paged.run(c);
  CHECK(paged.same_as(expected));
  // A table of pages that do not exist.
  for (std::int32_t bad : {INT32_MIN, -1, 1000, INT32_MAX}) {
    PagedDeviceProblem<TestType> broken(untouched, 64);
    const std::vector<std::int32_t> table(std::size_t(2 * 4), bad);
    const DeviceBytes device_table(std::as_bytes(std::span(table)));
    broken.args().page_table.data = reinterpret_cast<const std::int32_t*>(device_table.data());
    broken.run(c);
    CHECK(broken.same_as(untouched));
  }
}

namespace {

/// Appends to a stream's cache of 128 entries, contiguous where `page` is 0: what the host's append leaves.
void check_stream(DType activation, std::int64_t page, std::int64_t q_len, std::int32_t length) {
  const KeyWindow window{.keys = 60, .sinks = 4};
  const Setup s{.model = gated_model_of(ModelType::llama, 4, 2, 80, 64, 40),
                .load = {.batch = 3, .q_len = q_len, .kv_len = 128, .capacity = 128},
                .activation = activation};
  INFO(describe(s) << ", pages of " << page << ", length " << length);
  cuda::Context c = context();
  Problem<ops::KvAppend> untouched(s);
  for (std::int32_t b = 0; b < 3; ++b) lengths_of(untouched)[b] = length - b;
  lengths_of(untouched)[1] = kIdleLength;
  Problem<ops::KvAppend> expected(untouched);
  expected.args().window = window;
  require_ok(cpu_ref::run(expected.args()));
  if (page) {
    PagedDeviceProblem<ops::KvAppend> paged(untouched, page);
    paged.args().window = window;
    paged.run(c);
    CHECK(paged.same_as(expected));
  } else {
    DeviceProblem<ops::KvAppend> stream(untouched);
    stream.args().window = window;
    const bool same = stream.run(c).bytes() == expected.bytes();
    CHECK(same);
  }
}

}  // namespace

TEST_CASE("On the GPU a stream's new entries take the oldest ones' places behind the sinks", "[gpu][stream]") {
  for (DType activation : {DType::f16, DType::f32})
    for (std::int64_t page : {0, 64})
      for (std::int64_t q_len : {1, 5})
        for (std::int32_t length : {9, 127, 128, 129, 250, 1000, 1 << 30, INT32_MAX})
          check_stream(activation, page, q_len, length);
}

TEST_CASE("On the GPU rope makes q a second time for the sinks, by rows of their own", "[gpu][stream]") {
  for (DType activation : {DType::f16, DType::bf16, DType::f32})
    for (const ModelConfig& model : models())
      for (std::int64_t q_len : {1, 5, 70}) {
        Setup s{.model = model, .load = {.batch = 3, .q_len = q_len, .kv_len = 73}, .activation = activation};
        s.model.max_position_embeddings = 73;
        s.values = activation == DType::bf16 ? DType::bf16 : DType::f16;
        INFO(describe(s));
        cuda::Context c = context();
        DeviceProblem<ops::Rope> both(s), alone(s), for_sinks(s);
        const Tensor zeros(activation, {3 * q_len, both.dims().heads, both.dims().head_dim});
        std::vector<std::int32_t> rows(std::size_t(3 * q_len));
        for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = std::int32_t((7 * i + 2) % 73);
        const DeviceBytes q_sinks(Paged<ops::KvAppend>::bytes_of(zeros)), positions(std::as_bytes(std::span(rows)));
        both.args().q_sinks = {q_sinks.data(), both.args().q.shape, activation};
        both.args().sink_positions = {reinterpret_cast<const std::int32_t*>(positions.data()), {3 * q_len}};
        for_sinks.args().positions = both.args().sink_positions;
        const std::vector<std::byte> got = both.run(c).bytes();
        const bool same = got == alone.run(c).bytes();
        CHECK(same);
        for_sinks.run(c);
        CHECK(same_bits(fetch<3>(both.args().q_sinks), fetch<3>(for_sinks.args().q)));
        // A position that is off by one is found out.
        for (std::int32_t& row : rows) row = (row + 1) % 73;
        const DeviceBytes wrong(std::as_bytes(std::span(rows)));
        for_sinks.args().positions.data = reinterpret_cast<const std::int32_t*>(wrong.data());
        for_sinks.run(c);
        CHECK(!same_bits(fetch<3>(both.args().q_sinks), fetch<3>(for_sinks.args().q)));
      }
}

TEST_CASE("On the GPU a fork that writes to a page which it shares, or to one that was not copied, is found out",
          "[gpu][mutation][pages]") {
  enum class Fault { none, writes_to_shared_page, copies_nothing };
  constexpr std::int64_t kPage = 64, kPages = 4, kHeads = 2, kHeadDim = 16, kShared = 100;
  constexpr std::array<std::uint16_t, 2> kAppended{0xfff0, 0xffff};  // by the fork's owner and by the fork
  cuda::Context c = context();
  for (Fault fault : {Fault::none, Fault::writes_to_shared_page, Fault::copies_nothing}) {
    CAPTURE(int(fault));
    PagePool pool(2, kPages, kPage);
    const auto table = [&] {
      std::vector<std::int32_t> cells(4, 0);
      for (std::int64_t s : {0, 1}) std::ranges::copy(pool.table(s), cells.begin() + 2 * s);
      return cells;
    };
    const PagePool::Write first{.sequence = 0, .first = 0, .count = kShared};
    CHECK(taken(pool.reserve(std::span(&first, 1))).empty());
    require_ok(pool.fork(0, 1, kShared));
    const std::vector<std::int32_t> shared = table();
    // Both go on at the same entry.
    const std::vector<PagePool::Write> next{{.sequence = 0, .first = kShared}, {.sequence = 1, .first = kShared}};
    const std::vector<PagePool::Copy> copies = taken(pool.reserve(next));
    REQUIRE(copies.size() == 1);
    const std::vector<std::int32_t> cells = fault == Fault::writes_to_shared_page ? shared : table();
    // The elements of keys and values all differ, so that each shows where it was read.
    std::vector<std::uint16_t> numbers(std::size_t(kPages * kHeads * kPage * kHeadDim)), rows;
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = std::uint16_t(i);
    for (std::uint16_t value : kAppended) rows.insert(rows.end(), std::size_t(kHeads * kHeadDim), value);
    const std::vector<std::int32_t> lengths(2, kShared + 1);
    const auto bytes = [](const auto& values) { return DeviceBytes(std::as_bytes(std::span(values))); };
    const DeviceBytes k = bytes(numbers), v = bytes(numbers), appended = bytes(rows), of_table = bytes(cells),
                      kv_len = bytes(lengths);
    const ops::KvAppend::Args args{.k = {appended.data(), {2, kHeads, kHeadDim}, DType::f16},
                                   .v = {appended.data(), {2, kHeads, kHeadDim}, DType::f16},
                                   .kv_len = {reinterpret_cast<const std::int32_t*>(kv_len.data()), {2}},
                                   .k_cache = {k.data(), {kPages, kHeads, kPage, kHeadDim}, DType::f16},
                                   .v_cache = {v.data(), {kPages, kHeads, kPage, kHeadDim}, DType::f16},
                                   .page_table = {reinterpret_cast<const std::int32_t*>(of_table.data()), {2, 2}}};
    if (fault == Fault::none)
      for (const AnyView<4>& cache : {args.k_cache, args.v_cache})
        require_ok(cuda::enqueue_page_copies(cache, 0, 1, copies, c));
    require_ok(cuda::run(args, c));
    require_cuda(cudaDeviceSynchronize());
    int wrong = 0;  // elements of the two sequences
    for (const DeviceBytes* cache : {&k, &v}) {
      std::vector<std::uint16_t> got(numbers.size());
      cache->fetch(got.data());
      for (std::int64_t s : {0, 1})
        for (std::int64_t e = 0; e <= kShared; ++e)
          for (std::int64_t i = 0; i < kHeads * kHeadDim; ++i) {
            const auto place = [&](std::int32_t page) {
              return std::size_t(((page * kHeads + i / kHeadDim) * kPage + e % kPage) * kHeadDim + i % kHeadDim);
            };
            const std::uint16_t expected =
                e < kShared ? numbers[place(shared[std::size_t(2 * s + e / kPage)])] : kAppended[std::size_t(s)];
            wrong += got[place(cells[std::size_t(2 * s + e / kPage)])] != expected;
          }
    }
    CAPTURE(wrong);
    CHECK((wrong > 0) == (fault != Fault::none));
  }
}

OP_TEST_CASE("On the GPU runs append to pages - small", "[gpu][pages][runs][small]", Appends) {
  check_pages_on_device<TestType>(runs_of(model_of(2, 80, 20, 24), DType::f16, 5, 3), 64);
}

TEST_CASE("On the GPU a stream and a fused product append to pages - small", "[gpu][pages][stream][small]") {
  check_stream(DType::f16, 64, 5, 250);
  Setup s{.model = model_of(2, 80, 20, 24),
          .load = {.batch = 2, .q_len = 1, .kv_len = 65, .capacity = 67},
          .activation = DType::f16};
  s.model.max_position_embeddings = 67;
  check_pages_on_device<ops::LnQkv>(s, 64);
}
