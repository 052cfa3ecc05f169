// Where a cache's entries lie, and which of them a step writes and reads.
#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "core/cache_view.hpp"
#include "core/tensor.hpp"
#include "core/tensor_spec.hpp"
#include "cuda/ops/any_cache.hpp"
#include "tests/support/catch.hpp"

using namespace cf;

TEST_CASE("Every entry of a cache has a place of its own within the tensor", "[cache]") {
  const std::int64_t sequences = 3, heads = 2, capacity = 5, head_dim = 8;
  Tensor t(DType::f32, {sequences, heads, capacity, head_dim});
  const CacheView cache(t.view<4>());
  CHECK(cache.heads() == heads);
  CHECK(cache.capacity() == capacity);
  CHECK(cache.head_dim() == head_dim);
  std::set<std::int64_t> places;
  for (std::int64_t s = 0; s < sequences; ++s)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t e = 0; e < capacity; ++e) {
        const std::int64_t at = cache.entry(s, h, e);
        CHECK(at >= 0);
        CHECK(at + head_dim <= t.size());
        CHECK(at % head_dim == 0);
        places.insert(at);
        // The other ways to an entry lead to the same place.
        CHECK(cache.entry(s, 0, e) + h * cache.head_stride() == at);
        const auto [matrix, row] = cache.matrix_row(s, h, e);
        CHECK((matrix * cache.matrix_rows() + row) * head_dim == at);
        CHECK(matrix < cache.matrices(sequences));
        CHECK(cache.in_units_of(4).entry(s, h, e) * 4 == at);
      }
  CHECK(std::int64_t(places.size()) == sequences * heads * capacity);
}

TEST_CASE("Every entry of a cache in pages has a place of its own within the tensor", "[cache]") {
  const std::int64_t sequences = 3, heads = 2, page_entries = 4, head_dim = 8, pages_each = 2;
  const std::vector<std::int32_t> table{4, 0, 6, 1, 2, 5};
  Tensor t(DType::f32, {7, heads, page_entries, head_dim});
  const PagedCacheView cache(t.view<4>(), {table.data(), {sequences, pages_each}});
  CHECK(cache.heads() == heads);
  CHECK(cache.capacity() == pages_each * page_entries);
  CHECK(cache.head_dim() == head_dim);
  std::set<std::int64_t> places;
  for (std::int64_t s = 0; s < sequences; ++s)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t e = 0; e < cache.capacity(); ++e) {
        const std::int64_t at = cache.entry(s, h, e), page = table[std::size_t(s * pages_each + e / page_entries)];
        CHECK(at == ((page * heads + h) * page_entries + e % page_entries) * head_dim);
        places.insert(at);
        CHECK(cache.entry(s, 0, e) + h * cache.head_stride() == at);
        CHECK(cache.in_units_of(4).entry(s, h, e) * 4 == at);
        for (std::int64_t n = 1; e + n <= cache.capacity(); ++n) {
          const CacheRows rows = cache.rows(s, h, e, n);
          CHECK(rows.first == at);
          CHECK(rows.count == std::min(n, page_entries - e % page_entries));
        }
      }
  CHECK(std::int64_t(places.size()) == sequences * heads * cache.capacity());
  CHECK(cache.visible_entries(8, 3, 2) == 8);
  CHECK(cache.appended_entry(9, 1, 0) == -1);
}

TEST_CASE("A stream's new entries take the places behind the sinks in turn", "[cache]") {
  const RingView ring(CacheView(1, 7, 1), 2);
  std::vector<std::int64_t> places;
  for (std::int64_t e = 0; e < 18; ++e) places.push_back(ring.entry(0, 0, e));
  CHECK(places == std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 6, 2, 3, 4, 5, 6, 2});
  std::vector<std::int64_t> walked;
  for_each_rows(ring, 0, 0, 5, 9, [&](const CacheRows& rows) {
    for (std::int64_t i = 0; i < rows.count; ++i) walked.push_back(rows.first + i);
  });
  CHECK(walked == std::vector<std::int64_t>{5, 6, 2, 3, 4, 5, 6, 2, 3});
  CHECK(ring.visible_entries(1000, 1, 0) == 1000);
  CHECK(ring.appended_entry(1000, 4, 1) == 997);
  CHECK(ring.visible_entries(3, 4, 0) == 0);
}

TEST_CASE("A window's first key behind the sinks", "[cache]") {
  const auto first = [](std::int64_t keys, std::int64_t sinks, std::int64_t visible) {
    return KeyWindow{.keys = keys, .sinks = sinks}.first(visible);
  };
  CHECK(first(0, 0, 9) == 0);
  CHECK(first(4, 0, 3) == 0);
  CHECK(first(4, 0, 4) == 0);
  CHECK(first(4, 0, 5) == 1);
  CHECK(first(4, 2, 1) == 1);
  CHECK(first(4, 2, 6) == 2);
  CHECK(first(4, 2, 7) == 3);
}

TEST_CASE("Rows of a cache lie one behind the other", "[cache]") {
  const CacheView cache(2, 7, 16);
  for (std::int64_t first = 0; first < 7; ++first)
    for (std::int64_t n = 1; first + n <= 7; ++n) {
      const CacheView::Rows rows = cache.rows(1, 1, first, n);
      CHECK(rows.count == n);
      for (std::int64_t i = 0; i < rows.count; ++i)
        CHECK(rows.first + i * cache.head_dim() == cache.entry(1, 1, first + i));
    }
}

TEST_CASE("The kernels' one view says what the view of each kind of cache says", "[cache]") {
  const std::int64_t sequences = 3, heads = 2, head_dim = 8, pages = 7;
  const std::vector<std::int32_t> table{4, 0, 6, 1, 2, 5};
  for (const bool in_pages : {false, true})
    for (const KeyWindow stream : {KeyWindow{}, KeyWindow{.keys = 3}, KeyWindow{.keys = 3, .sinks = 2}}) {
      const Tensor t(DType::f16, {in_pages ? pages : sequences, heads, in_pages ? 4 : 9, head_dim});
      const ConstAnyView<4> storage = t.view<4>();
      const View<const std::int32_t, 2> of_pages =
          in_pages ? View<const std::int32_t, 2>{table.data(), {sequences, 2}} : View<const std::int32_t, 2>{};
      const cuda::AnyCacheView any(storage, of_pages, stream);
      CAPTURE(in_pages, stream.keys, stream.sinks);
      CHECK(any.in_pages() == in_pages);
      CHECK(any.is_stream() == bool(stream));
      with_cache_view(storage, of_pages, stream, [&](const auto& view) {
        CHECK(any.capacity() == view.capacity());
        CHECK(any.heads() == view.heads());
        CHECK(any.head_dim() == view.head_dim());
        CHECK(any.head_stride() == view.head_stride());
        const std::int64_t entries = stream ? 4 * view.capacity() : view.capacity();
        for (std::int64_t s = 0; s < sequences; ++s)
          for (std::int64_t h = 0; h < heads; ++h)
            for (std::int64_t e = 0; e < entries; ++e) {
              const std::int64_t at = view.entry(s, h, e);
              CHECK(any.entry(s, h, e) == at);
              CHECK(any.in_units_of(4).entry(s, h, e) * 4 == at);
              const auto [matrix, row] = any.matrix_row(s, h, e);
              CHECK((matrix * any.matrix_rows() + row) * head_dim == at);
              CHECK((matrix >= 0 && matrix < any.matrices(t.shape()[0])));
              for (std::int64_t n : {1, 2, 5, 20}) {
                const CacheRows got = any.rows(s, h, e, n), expected = view.rows(s, h, e, n);
                CHECK(got.first == expected.first);
                CHECK(got.count == expected.count);
              }
            }
        for (int length : {INT32_MIN, -1, 0, 1, 2, 7, 8, 9, 10, 1000, INT32_MAX})
          for (int count : {1, 3})
            for (int nth = 0; nth < count; ++nth) {
              CHECK(any.visible_entries(length, count, nth) == view.visible_entries(length, count, nth));
              CHECK(any.appended_entry(length, count, nth) == view.appended_entry(length, count, nth));
            }
      });
    }
  for (std::int64_t taken : {64, 128, 192, 1024}) CHECK(cuda::is_page_size(taken));
  for (std::int64_t refused : {-64, 0, 1, 16, 65, 1088, 2048}) CHECK_FALSE(cuda::is_page_size(refused));
}

TEST_CASE("A large cache's entries are beyond 32 bits", "[cache]") {
  const CacheView cache(32, 131072, 128);
  CHECK(cache.entry(63, 31, 131071) == ((std::int64_t(63) * 32 + 31) * 131072 + 131071) * 128);
}

TEST_CASE("The cache of some sequences begins with the first of them", "[cache]") {
  Tensor t(DType::f16, {4, 2, 3, 8});
  const AnyView<4> all = t.view<4>();
  const AnyView<4> two = cache_of(all, 1, 2);
  CHECK(two.shape == extents(2, 2, 3, 8));
  for (std::int64_t s = 0; s < 2; ++s)
    CHECK(static_cast<f16*>(two.data) + CacheView(two).entry(s, 1, 2) ==
          static_cast<f16*>(all.data) + CacheView(all).entry(s + 1, 1, 2));
  const ConstAnyView<4> last = cache_of(ConstAnyView<4>(all), 3, 1);
  CHECK(static_cast<const f16*>(last.data) == static_cast<const f16*>(all.data) + CacheView(all).entry(3, 0, 0));
}

TEST_CASE("A step's rows end at their sequence's length, and none has an entry that the cache has no room for",
          "[cache]") {
  const CacheView cache(1, 6, 8);
  for (int count : {1, 3})
    for (int nth = 0; nth < count; ++nth) {
      for (int length : {count, 5, 6}) {
        CHECK(cache.appended_entry(length, count, nth) == length - count + nth);
        CHECK(cache.visible_entries(length, count, nth) == length - count + nth + 1);
      }
      for (int bad : {INT32_MIN, -1, int(kIdleLength), count - 1, 7, 6 + count, INT32_MAX}) {
        CHECK(cache.appended_entry(bad, count, nth) == -1);
        CHECK(cache.visible_entries(bad, count, nth) == 0);
      }
    }
}
