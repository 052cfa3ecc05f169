// Caches in pages, windows and streams: the same bits as a contiguous cache's, and what a formula says by itself.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "cpu_ref/cpu_ref.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/mixed_steps.hpp"
#include "tests/support/op_test_case.hpp"
#include "tests/support/paged.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

using WithCache = std::tuple<ops::KvAppend, ops::RopeAppend, ops::Attention, ops::LnQkv, ops::RmsQkv, ops::DecodeLayer>;

ModelConfig model_for(std::string_view op) {
  return op == ops::RmsQkv::name ? gated_model_of(ModelType::llama, 4, 2, 16, 48, 40) : model_of(2, 16, 8, 24);
}

template <class Args>
void require_run(const Args& args) {
  const Status s = cpu_ref::run(args);
  INFO(s.message());
  REQUIRE(s);
}

template <class Op>
std::int32_t* data_of(Problem<Op>& p, std::string_view name) {
  for (auto& b : p.blocks())
    if (b.name == name) return static_cast<std::int32_t*>(b.data());
  return nullptr;
}

template <class Op>
void check_pages(const Setup& s, std::int64_t page_entries) {
  INFO(Op::name << ": " << describe(s) << ", pages of " << page_entries);
  Problem<Op> contiguous(s), in_pages(s);
  Paged<Op> pages(in_pages, page_entries, s.seed);
  require_run(in_pages.args());
  require_run(contiguous.args());
  for (std::size_t i = 0; i < contiguous.blocks().size(); ++i)
    if (const auto& block = contiguous.blocks()[i]; block.role == Role::output) {
      INFO(block.name);
      CHECK(block.memory == in_pages.blocks()[i].memory);
    }
  CHECK(pages.same_as(contiguous));
  REQUIRE(in_pages.broken_guard().empty());
}

}  // namespace

OP_TEST_CASE("A cache in pages gives the bits of a contiguous one, of any lengths", "[ops][pages]", WithCache) {
  const std::int64_t page = 16;
  for (std::int64_t kv_len :
       {std::int64_t(1), page - 1, page, page + 1, std::int64_t(63), std::int64_t(64), std::int64_t(65)}) {
    Setup s{.model = model_for(TestType::name),
            .load = {.batch = 3, .q_len = 1, .kv_len = kv_len, .capacity = kv_len + 2},
            .activation = kv_len % 2 ? DType::f32 : DType::f64,
            .seed = std::uint64_t(kv_len)};
    s.model.max_position_embeddings = 128;
    for (std::int64_t page_entries : {std::int64_t(1), std::int64_t(5), page, std::int64_t(64)})
      check_pages<TestType>(s, page_entries);
    if (kv_len < 3) continue;
    s.load.q_len = 3;
    check_pages<TestType>(s, page);
  }
}

OP_TEST_CASE("Runs of any number and length write to pages of their own", "[ops][pages][runs]", WithCache) {
  check_pages<TestType>(mixed_setup(model_for(TestType::name), DType::f64), 16);
  for (std::int64_t count : {1, 2, 300}) {
    Setup s{.model = model_for(TestType::name),
            .load = {.batch = count + 1, .q_len = 1, .kv_len = 40, .capacity = 41},
            .activation = DType::f32};
    for (std::int64_t i = 0; i < count; ++i) s.runs.push_back({.sequence = count - i, .first_row = i});
    check_pages<TestType>(s, 16);
  }
  // Counts about the end of a page and of 64 rows, beside each other.
  for (std::int64_t page : {16, 64}) {
    Setup s{.model = model_for(TestType::name),
            .load = {.batch = 8, .q_len = 65, .kv_len = 84, .capacity = 85},
            .activation = DType::f64};
    s.model.max_position_embeddings = s.load.capacity;
    std::int64_t row = 0, sequence = s.load.batch;
    for (std::int64_t count :
         {std::int64_t(1), std::int64_t(63), std::int64_t(64), std::int64_t(65), page - 1, page, page + 1}) {
      s.runs.push_back({.sequence = --sequence, .first_row = row, .count = count});
      row += count;
    }
    check_pages<TestType>(s, page);
  }
}

OP_TEST_CASE("A sequence whose pages are NaN spoils its own rows alone", "[ops][pages][runs]",
             std::tuple<ops::Attention, ops::DecodeLayer>) {
  const RowRun spoiled{.sequence = 0, .first_row = 1, .count = 5};
  const Setup s{.model = model_for(TestType::name),
                .load = {.batch = 5, .q_len = 20, .kv_len = 33, .capacity = 35},
                .activation = DType::f64,
                .runs = {{2, 0, 1}, spoiled, {3, 6, 20}, {1, 26, 3}}};
  Problem<TestType> sound(s), beside(s);
  Paged<TestType> pages(sound, 8), poisoned(beside, 8);
  const auto result_of = [&](Problem<TestType>& p) {
    require_run(p.args());
    return p.tensor(
        *std::ranges::find_if(p.blocks(), [](const auto& b) { return b.name == "y" || b.name == "output"; }));
  };
  const std::int64_t in_page = poisoned.k.size() / poisoned.k.shape()[0];
  for (std::int64_t i = 0; i < 5; ++i)  // those of 33 entries
    for (Tensor* pool : {&poisoned.k, &poisoned.v})
      std::fill_n(pool->template as<double>() + poisoned.table[std::size_t(i)] * in_page, in_page, std::nan(""));
  const Tensor expected = result_of(sound), got = result_of(beside);
  REQUIRE(got.shape()[0] == 29);
  const std::int64_t in_row = got.size() / got.shape()[0];
  for (std::int64_t i = 0; i < got.size(); ++i) {
    const std::int64_t row = i / in_row - spoiled.first_row;
    const bool is_spoiled = row >= 0 && row < spoiled.count;
    if (is_spoiled ? !std::isnan(got.at(i)) : got.at(i) != expected.at(i)) FAIL_CHECK("element " << i);
  }
}

TEST_CASE("Rows become entries of pages as of a contiguous cache", "[ops][pages][append_rows]") {
  Setup s{.model = gated_model_of(ModelType::llama, 4, 2, 16, 48, 40), .load = {.batch = 1}, .activation = DType::f64};
  for (std::int64_t kv_len : {1, 2, 15, 16, 17, 18, 19, 33}) {
    s.load.kv_len = kv_len, s.load.capacity = kv_len + 2, s.seed = std::uint64_t(kv_len);
    for (std::int64_t page_entries : {1, 5, 16, 64}) check_pages<ops::AppendRows>(s, page_entries);
  }
  const auto refused = [&](std::int32_t number, std::int32_t page) {
    Problem<ops::AppendRows> p(s);  // entries 30 to 32
    Paged<ops::AppendRows> pages(p, 16);
    pages.table[std::size_t(number)] = page;
    const std::vector<std::byte> before = p.bytes(), k = pages.bytes_of(pages.k);
    const std::string fault = refusal_fault(
        cpu_ref::run(p.args()), Code::invalid_argument,
        {"append_rows: 'page_table'[0][" + std::to_string(number) + "] must be 0 to 6, got " + std::to_string(page)});
    return p.bytes() == before && k == pages.bytes_of(pages.k) ? fault : "wrote something";
  };
  CHECK(refused(1, -1) == "");
  CHECK(refused(2, 7) == "");
  // A cache of which nothing is written is no tensor of the call, nor is its table.
  Problem<ops::AppendRows> p(s);
  Paged<ops::AppendRows> pages(p, 16);
  p.args().rows.first = p.args().rows.last, p.args().is_appended = true;
  p.args().append.page_table.shape[1] = 1;
  require_run(p.args());
}

OP_TEST_CASE("Pages that a call cannot use are refused by name, and nothing is written", "[bad][pages]", WithCache) {
  const Setup s{.model = model_for(TestType::name),
                .load = {.batch = 3, .q_len = 1, .kv_len = 9, .capacity = 11},
                .activation = DType::f64};
  const std::string name(TestType::name);
  const bool reads = name == "attention" || name == "decode_layer", writes = name != "attention";
  const auto refused = [&](auto&& change, std::initializer_list<std::string_view> parts) {
    Problem<TestType> p(s);
    Paged<TestType> pages(p, 4);
    change(pages, cache_args(p.args()));
    const std::vector<std::byte> before = p.bytes();
    const std::vector<std::byte> k = pages.bytes_of(pages.k);
    const std::string fault = refusal_fault(cpu_ref::run(p.args()), Code::invalid_argument, parts);
    return p.bytes() == before && k == pages.bytes_of(pages.k) ? fault : "wrote something";
  };
  // The newest entry, 8, lies in the third page of the first sequence.
  for (std::int32_t bad : {-1, 13, INT32_MAX})
    CHECK(refused([&](auto& pages, auto&) { pages.table[2] = bad; },
                  {name + ": 'page_table'[0][2] must be 0 to 12, got " + std::to_string(bad)}) == "");
  if (reads)
    CHECK(refused([&](auto& pages, auto&) { pages.table[0] = 13; },
                  {name + ": 'page_table'[0][0] must be 0 to 12, got 13"}) == "");
  if (writes)
    CHECK(refused([&](auto& pages, auto&) { pages.table[4] = pages.table[2]; },
                  {name + ": 'page_table'", "for sequence 0 and for sequence 1"}) == "");
  CHECK(refused([&](auto&, auto& args) { args.page_table.shape[0] = 2; },
                {name + ": 'page_table' has shape (2, 3), expected (3, 3)"}) == "");
  CHECK(refused([&](auto&, auto& args) { args.k_cache.shape[2] = 0; }, {name, "'k_cache'", "at least 1"}) == "");
  CHECK(refused([&](auto&, auto& args) { args.v_cache.shape[0] = 12; }, {name, "'v_cache'", "expected (13, "}) == "");
  CHECK(refused([&](auto&, auto& args) { move_pointer(args.page_table, 1); }, {name, "'page_table' is misaligned"}) ==
        "");
}

TEST_CASE("A page may be several sequences' as long as none of them writes to it", "[ops][pages]") {
  Setup s{.model = model_of(2, 16, 8, 24),
          .load = {.batch = 2, .q_len = 1, .kv_len = 9, .capacity = 11},
          .activation = DType::f64};
  Problem<ops::Attention> p(s);
  Paged<ops::Attention> pages(p, 4);
  std::copy_n(pages.table.begin(), 3, pages.table.begin() + 3);  // the second has the first one's keys
  data_of(p, "kv_len")[1] = 9;
  auto* const q = p.args().q.as<const double>().data;
  std::copy_n(q, 32, const_cast<double*>(q) + 32);
  require_run(p.args());
  const double* const y = p.args().y.as<double>().data;
  CHECK(std::equal(y, y + 32, y + 32));
}

namespace {

/// The formula by itself: row i of sequence b sees the keys that `sees` says.
template <class Sees>
std::vector<double> attention_by_mask(const ops::Attention::Args& a, Sees&& sees) {
  const auto d = ops::Attention::dims(a);
  std::vector<double> y(std::size_t(d.tokens() * d.heads * d.head_dim));
  const double *k = a.k_cache.as<const double>().data, *v = a.v_cache.as<const double>().data;
  for (const RowRun& run : table_of(a.runs, d.batch, d.q_len))
    for (std::int64_t i = 0; i < run.count; ++i)
      for (std::int64_t h = 0; h < d.heads; ++h) {
        const std::int64_t row = ((run.first_row + i) * d.heads + h) * d.head_dim,
                           position = a.kv_len.data[run.sequence] - run.count + i;
        double sum = 0;
        for (std::int64_t j = 0; j <= position; ++j) {
          if (!sees(position, j)) continue;
          const double* const q = (j < a.window.sinks ? a.q_sinks : a.q).as<const double>().data + row;
          const std::int64_t at = ((run.sequence * d.kv_heads + d.kv_head(h)) * d.capacity + j) * d.head_dim;
          const double weight = std::exp(a.scale * std::inner_product(q, q + d.head_dim, k + at, 0.0));
          sum += weight;
          for (std::int64_t c = 0; c < d.head_dim; ++c) y[std::size_t(row + c)] += weight * v[at + c];
        }
        for (std::int64_t c = 0; c < d.head_dim; ++c) y[std::size_t(row + c)] /= sum;
      }
  return y;
}

double largest_difference(const std::vector<double>& a, const double* b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::isnan(b[i]) ? 1e300 : std::abs(a[i] - b[i]));
  return most;
}

}  // namespace

TEST_CASE("A window has a row's own key and the window - 1 before it", "[ops][window]") {
  Setup s{.model = model_of(4, 16, 8, 24), .load = {.batch = 2, .q_len = 7, .kv_len = 40}, .kv_heads = 2};
  s.activation = DType::f64;
  for (std::int64_t window : {1, 2, 7, 8, 33, 34, 39, 40, 41, 1000}) {
    INFO("window " << window);
    Problem<ops::Attention> p(s), untouched(s);
    p.args().window.keys = window;
    const std::vector<double> expected = attention_by_mask(
        untouched.args(), [&](std::int64_t position, std::int64_t j) { return j > position - window; });
    // The keys before the window of a step's first row are not read.
    for (auto& b : p.blocks()) {
      if (b.role != Role::cache) continue;
      auto* const data = static_cast<double*>(b.data());
      for (std::int64_t i = 0; i < element_count(b.shape); ++i)
        if (i / 16 % 40 + window <= kv_len_of(s.load, i / (2 * 40 * 16)) - 7) data[i] = std::nan("");
    }
    require_run(p.args());
    CHECK(largest_difference(expected, p.args().y.as<double>().data) < 1e-12);
    const auto condition = cpu_ref::condition(p.args());
    REQUIRE(condition);
    CHECK(std::isfinite(condition->l2));
  }
}

TEST_CASE("Sinks are seen beside the window, with a query of their own", "[ops][window]") {
  Setup s{.model = model_of(4, 16, 8, 24), .load = {.batch = 2, .q_len = 5, .kv_len = 23}};
  s.activation = DType::f64;
  for (std::int64_t sinks : {1, 4, 22, 30})
    for (std::int64_t window : {1, 6, 19, 40}) {
      INFO("sinks " << sinks << ", window " << window);
      Problem<ops::Attention> p(s);
      ops::Attention::Args a = p.args();
      a.window = {.keys = window, .sinks = sinks};
      CHECK(refusal_fault(cpu_ref::run(a), Code::invalid_argument, {"attention: 'q_sinks' is null"}) == "");
      a.q_sinks = a.q;
      require_run(a);
      CHECK(largest_difference(
                attention_by_mask(p.args(), [&](std::int64_t position,
                                                std::int64_t j) { return j > position - window || j < sinks; }),
                a.y.as<double>().data) < 1e-12);
    }
}

TEST_CASE("A window below 0, sinks without one and a stream's cache that is too small are refused", "[bad][window]") {
  const Setup s{.model = model_of(2, 16, 8, 24), .load = {.batch = 2, .q_len = 3, .kv_len = 9, .capacity = 11}};
  const auto refusal = [&]<class Op>(std::type_identity<Op>, const KeyWindow& window) {
    Problem<Op> p(s);
    p.args().window = window;
    return cpu_ref::run(p.args());
  };
  const std::type_identity<ops::Attention> attention;
  const std::type_identity<ops::KvAppend> append;
  for (const KeyWindow& bad : {KeyWindow{-1, 0}, {0, 1}, {5, -1}}) {
    CHECK(refusal_fault(refusal(attention, bad), Code::invalid_argument, {"attention: window must be 0 or more"}) ==
          "");
    CHECK(refusal_fault(refusal(append, bad), Code::invalid_argument, {"kv_append: window must be 0 or more"}) == "");
  }
  CHECK(bool(refusal(append, {5, 4})));
  CHECK(refusal_fault(refusal(append, {6, 4}), Code::invalid_argument,
                      {"kv_append: capacity must be at least sinks + window + q_len - 1 = 12 of a stream, got 11"}) ==
        "");
  Problem<ops::Attention> p(s);
  p.args().max_kv_len = 12;
  p.args().window = {.keys = 10};
  CHECK(refusal_fault(cpu_ref::run(p.args()), Code::invalid_argument, {"max_kv_len must be q_len 3 to capacity 11"}) ==
        "");
}

namespace {

constexpr std::int64_t kHeads = 4, kKvHeads = 2, kHeadDim = 10, kHalf = 3;  // elements 6 to 9 are not rotated

/// A head's vector, rotated by a position: angles in double.
std::vector<double> turned(const double* x, double position) {
  std::vector<double> y(x, x + kHeadDim);
  for (std::int64_t i = 0; i < kHalf; ++i) {
    const double angle = position * std::pow(10000.0, -double(i) / double(kHalf));
    y[std::size_t(i)] = x[i] * std::cos(angle) - x[i + kHalf] * std::sin(angle);
    y[std::size_t(i + kHalf)] = x[i + kHalf] * std::cos(angle) + x[i] * std::sin(angle);
  }
  return y;
}

void turn_all(const std::vector<double>& from, std::size_t first, Tensor& to, const std::vector<double>& positions) {
  const std::int64_t heads = to.shape()[1];
  for (std::size_t t = 0; t < positions.size(); ++t)
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto at = std::size_t((std::int64_t(t) * heads + h) * kHeadDim);
      const std::vector<double> y = turned(&from[first * std::size_t(heads * kHeadDim) + at], positions[t]);
      std::copy(y.begin(), y.end(), to.as<double>() + at);
    }
}

}  // namespace

namespace {

/// What of a stream's calls may be wrong.
struct StreamFault {
  double sink_position = 0;     // added to the position that a query has for the sinks
  std::int64_t keys = 0;        // added to the window
  std::int64_t kept_sinks = 0;  // added to the sinks that the cache keeps
};

/// The largest error of a stream's steps, of `tokens` each, against StreamingLLM as its paper has it: keys are kept
/// before RoPE, and each step rotates those that the cache has by their numbers in it. What runs rotates a key once, by
/// its position in the stream, and the query twice.
double stream_error(std::int64_t tokens, bool in_pages, const StreamFault& fault = {}) {
  const KeyWindow stream{.keys = 13, .sinks = 3};
  const std::int64_t length = 8 * (stream.keys + stream.sinks), page = 5;
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  const auto draw = [&](std::int64_t heads) {
    std::vector<double> x(std::size_t(length * heads * kHeadDim));
    for (double& e : x) e = normal(random);
    return x;
  };
  const std::vector<double> q = draw(kHeads), k = draw(kKvHeads), v = draw(kKvHeads);
  const double scale = 1 / std::sqrt(double(kHeadDim));
  // The places of a ring behind the sinks are taken in turn.
  const std::int64_t pages = (stream_entries(stream, tokens + 1) + page - 1) / page, capacity = pages * page;
  std::vector<std::int32_t> table;
  for (std::int64_t i = 0; i < pages; ++i) table.push_back(std::int32_t(pages - 1 - i));
  const View<const std::int32_t, 2> page_table{in_pages ? table.data() : nullptr, {1, pages}};
  const Shape shape = in_pages ? Shape{pages, kKvHeads, page, kHeadDim} : Shape{1, kKvHeads, capacity, kHeadDim};
  const Shape queries{tokens, kHeads, kHeadDim}, keys{tokens, kKvHeads, kHeadDim};
  Tensor k_cache(DType::f64, shape), v_cache(DType::f64, shape), q_now(DType::f64, queries),
      q_sinks(DType::f64, queries), y(DType::f64, queries), k_now(DType::f64, keys), v_now(DType::f64, keys);
  double most = 0;
  for (std::int64_t first = 0; first + tokens <= length; first += tokens) {
    std::vector<double> positions, places;
    for (std::int64_t t = first; t < first + tokens; ++t) {
      positions.push_back(double(t));
      places.push_back(double(std::min(t, stream.sinks + stream.keys - 1)) + fault.sink_position);
    }
    turn_all(q, std::size_t(first), q_now, positions);
    turn_all(q, std::size_t(first), q_sinks, places);
    turn_all(k, std::size_t(first), k_now, positions);
    std::copy_n(v.begin() + first * kKvHeads * kHeadDim, v_now.size(), v_now.as<double>());
    const std::int32_t kv_len = std::int32_t(first + tokens);
    require_run(ops::KvAppend::Args{.k = k_now.view<3>(),
                                    .v = v_now.view<3>(),
                                    .kv_len = {&kv_len, {1}},
                                    .k_cache = k_cache.view<4>(),
                                    .v_cache = v_cache.view<4>(),
                                    .page_table = page_table,
                                    .window = {.keys = stream.keys, .sinks = stream.sinks + fault.kept_sinks}});
    require_run(ops::Attention::Args{.q = q_now.view<3>(),
                                     .k_cache = k_cache.view<4>(),
                                     .v_cache = v_cache.view<4>(),
                                     .kv_len = {&kv_len, {1}},
                                     .y = y.view<3>(),
                                     .scale = scale,
                                     .max_kv_len = kv_len,
                                     .page_table = page_table,
                                     .window = {.keys = stream.keys + fault.keys, .sinks = stream.sinks},
                                     .q_sinks = q_sinks.view<3>()});
    for (std::int64_t t = first; t < first + tokens; ++t) {
      // The oracle's cache at this step: the tokens that it has, rotated by their numbers in it.
      std::vector<std::int64_t> kept;
      for (std::int64_t j = 0; j <= t; ++j)
        if (j < stream.sinks || j > t - stream.keys) kept.push_back(j);
      for (std::int64_t h = 0; h < kHeads; ++h) {
        const std::int64_t kv_head = h / (kHeads / kKvHeads);
        const std::vector<double> query = turned(&q[std::size_t((t * kHeads + h) * kHeadDim)], double(kept.size()) - 1);
        std::vector<double> context(kHeadDim);
        double sum = 0;
        for (std::size_t place = 0; place < kept.size(); ++place) {
          const auto at = std::size_t((kept[place] * kKvHeads + kv_head) * kHeadDim);
          const std::vector<double> key = turned(&k[at], double(place));
          const double weight = std::exp(scale * std::inner_product(query.begin(), query.end(), key.begin(), 0.0));
          sum += weight;
          for (std::size_t c = 0; c < std::size_t(kHeadDim); ++c) context[c] += weight * v[at + c];
        }
        for (double& e : context) e /= sum;
        most = std::max(most, largest_difference(context, y.as<double>() + ((t - first) * kHeads + h) * kHeadDim));
      }
    }
  }
  return most;
}

}  // namespace

TEST_CASE("A stream's step is attention over keys that are rotated anew by their places in the cache",
          "[ops][window][stream]") {
  for (std::int64_t tokens : {1, 4})
    for (bool in_pages : {false, true}) CHECK(stream_error(tokens, in_pages) < 1e-13);
}

TEST_CASE("Faults of pages, windows and sinks are caught", "[mutation][pages][window][stream]") {
  const Setup s{.model = model_of(4, 16, 8, 24),
                .load = {.batch = 3, .q_len = 2, .kv_len = 40, .capacity = 44},
                .kv_heads = 2,
                .activation = DType::f64};
  const KeyWindow window{.keys = 11, .sinks = 3};
  const std::int64_t page = 4, pages_each = 44 / page;
  // The error of attention in pages, with sinks and a window, where `change` puts a fault into the call.
  const auto error = [&](auto&& change) {
    Problem<ops::Attention> p(s), contiguous(s);
    Paged<ops::Attention> pages(p, page);
    Tensor q_sinks(DType::f64, {6, 4, 16});
    for (std::int64_t i = 0; i < q_sinks.size(); ++i) q_sinks.as<double>()[i] = std::sin(double(3 * i));
    for (ops::Attention::Args* a : {&p.args(), &contiguous.args()}) {
      a->window = window;
      a->q_sinks = q_sinks.view<3>();
    }
    change(p.args(), pages.table, data_of(p, "kv_len"));
    if (!cpu_ref::run(p.args())) return 1e300;  // what is refused is caught
    const auto sees = [&](std::int64_t position, std::int64_t j) {
      return j > position - window.keys || j < window.sinks;
    };
    return largest_difference(attention_by_mask(contiguous.args(), sees), p.args().y.as<double>().data);
  };
  using Args = ops::Attention::Args;
  using Table = std::vector<std::int32_t>;
  CHECK(error([](Args&, Table&, std::int32_t*) {}) < 1e-12);
  // A page off by one, in each sequence.
  for (std::int64_t b = 0; b < 3; ++b)
    CHECK(error([&](Args&, Table& table, std::int32_t*) {
            const auto row = table.begin() + b * pages_each;
            std::rotate(row, row + 1, row + pages_each);
          }) > 1e-3);
  // A neighbour's length.
  CHECK(error([](Args&, Table&, std::int32_t* kv_len) { kv_len[0] = kv_len[1]; }) > 1e-3);
  // A stale entry of the table: a page that has become another sequence's, among the window's and among the sinks'.
  for (std::int64_t i : {std::int64_t(0), std::int64_t(8)})
    CHECK(error([&](Args&, Table& table, std::int32_t*) {
            table[std::size_t(i)] = table[std::size_t(pages_each + i)];
          }) > 1e-3);
  // A window off by one, and a sink too many or too few.
  for (std::int64_t by : {-1, 1}) {
    CHECK(error([&](Args& a, Table&, std::int32_t*) { a.window.keys += by; }) > 1e-3);
    CHECK(error([&](Args& a, Table&, std::int32_t*) { a.window.sinks += by; }) > 1e-3);
    CHECK(stream_error(1, false, {.keys = by}) > 1e-3);
    CHECK(stream_error(1, false, {.kept_sinks = by}) > 1e-3);
    // A sink rotated by the wrong position.
    CHECK(stream_error(1, true, {.sink_position = double(by)}) > 1e-3);
  }
  CHECK(error([](Args& a, Table&, std::int32_t*) { a.q_sinks = a.q; }) > 1e-3);
}

TEST_CASE("rope makes q a second time for the sinks, by rows of their own", "[ops][stream]") {
  const Setup s{.model = model_of(2, 16, 8, 24), .load = {.batch = 2, .q_len = 3, .kv_len = 9}};
  Setup exact = s;
  exact.activation = DType::f64;
  Problem<ops::Rope> p(exact), alone(exact);
  const std::vector<std::int32_t> other{4, 0, 2, 2, 1, 3};
  Tensor q_sinks(DType::f64, {6, 2, 16});
  ops::Rope::Args args = p.args();
  args.q_sinks = q_sinks.view<3>();
  CHECK(refusal_fault(cpu_ref::run(args), Code::invalid_argument, {"rope: 'sink_positions' is null"}) == "");
  args.sink_positions = {other.data(), {6}};
  require_run(args);
  require_run(alone.args());
  CHECK(p.bytes() == alone.bytes());
  alone.args().positions = args.sink_positions;
  require_run(alone.args());
  CHECK(std::memcmp(q_sinks.data(), alone.args().q.data, std::size_t(q_sinks.size_bytes())) == 0);
  std::vector<std::int32_t> bad = other;
  bad[5] = 9;
  args.sink_positions.data = bad.data();
  CHECK(refusal_fault(cpu_ref::run(args), Code::invalid_argument,
                      {"rope: 'sink_positions'[5] must be 0 to 8, got 9"}) == "");
}
