#pragma once
// A problem whose caches lie in pages.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/support/op_problem.hpp"

namespace cf::test {

/// The arguments among which a call's cache is.
template <class Args>
auto& cache_args(Args& args) {
  if constexpr (requires { args.t.k_cache; })
    return args.t;
  else if constexpr (requires { args.append.k_cache; })
    return args.append;
  else
    return args;
}

/// Moves the caches of a problem into pages in random order, of which every other one is of no sequence. All that
/// belongs to no entry of a sequence is NaN; the table has no page where a sequence needs none.
template <class Op>
class Paged {
 public:
  Paged(Problem<Op>& problem, std::int64_t page_entries, std::uint64_t seed = 1) : page_entries_(page_entries) {
    auto& args = cache_args(problem.args());
    heads_ = args.k_cache.shape[1], capacity_ = args.k_cache.shape[2];
    for (std::int64_t b = 0; b < args.kv_len.size(); ++b)  // a stream's is longer than its cache
      lengths_.push_back(std::int32_t(std::min<std::int64_t>(args.kv_len.data[b], capacity_)));
    row_bytes_ = std::size_t(args.k_cache.shape[3]) * size_bytes(args.k_cache.dtype);
    const std::int64_t sequences = std::int64_t(lengths_.size()), of_each = pages_of(capacity_);
    for (const RowRun& run : runs_of(args)) has_rows_.push_back(run.sequence);
    std::int64_t used = 0;
    for (std::int64_t b : has_rows_) used += pages_of(lengths_[std::size_t(b)]);
    pages_ = 2 * used + 1;
    std::vector<std::int32_t> free;
    for (std::int32_t page = 0; page < pages_; ++page) free.push_back(page);
    std::mt19937_64 random(seed);
    std::shuffle(free.begin(), free.end(), random);
    table.assign(std::size_t(sequences * of_each), -1);
    for (std::int64_t b : has_rows_)
      for (std::int64_t i = 0; i < pages_of(lengths_[std::size_t(b)]); ++i, free.pop_back())
        table[std::size_t(b * of_each + i)] = free.back();
    const DType dtype = args.k_cache.dtype;
    const double poison = std::numeric_limits<double>::quiet_NaN();
    for (Tensor* pool : {&k, &v}) {
      *pool = Tensor(dtype, {pages_, heads_, page_entries, args.k_cache.shape[3]});
      for (std::int64_t i = 0; i < pool->size(); ++i)
        dispatch_float(dtype, [&](auto zero) { pool->as<decltype(zero)>()[i] = narrow<decltype(zero)>(poison); });
    }
    put(args.k_cache.data, k.data());
    put(args.v_cache.data, v.data());
    args.k_cache = k.view<4>();
    args.v_cache = v.view<4>();
    args.page_table = {table.data(), {sequences, of_each}};
  }

  /// Whether the pages have, bit by bit, what a contiguous cache has that the same call was made on, and nothing else
  /// has changed.
  bool same_as(Problem<Op>& contiguous) {
    auto& args = cache_args(contiguous.args());
    bool same = true;
    for (auto [pool, data] : {std::pair(&k, static_cast<const void*>(args.k_cache.data)),
                              std::pair(&v, static_cast<const void*>(args.v_cache.data))}) {
      std::vector<std::byte> expected = bytes_of(*pool);
      put(data, expected.data());
      same = same && expected == bytes_of(*pool);
      // What no entry has is the NaN of the beginning.
      std::vector<char> owned(std::size_t(pool->size()));
      for_each_entry([&](std::int64_t, std::int64_t, std::int64_t, std::int64_t row) {
        std::fill_n(owned.begin() + row * pool->shape()[3], pool->shape()[3], char(1));
      });
      for (std::int64_t i = 0; i < pool->size(); ++i) same = same && (owned[std::size_t(i)] || std::isnan(pool->at(i)));
    }
    return same;
  }

  static std::vector<std::byte> bytes_of(const Tensor& t) {
    const auto* const from = static_cast<const std::byte*>(t.data());
    return {from, from + t.size_bytes()};
  }

  std::vector<std::int32_t> table;
  Tensor k, v;

 private:
  std::int64_t pages_of(std::int64_t entries) const { return (entries + page_entries_ - 1) / page_entries_; }
  template <class Args>
  std::vector<RowRun> runs_of(const Args& args) const {
    return table_of(args.runs, std::int64_t(lengths_.size()), 1);
  }
  /// Calls f(sequence, head, entry, row of the pool) for each entry that has a page, and those of its page behind it
  /// that a contiguous cache has too.
  template <class F>
  void for_each_entry(F&& f) const {
    const std::int64_t of_each = pages_of(capacity_);
    for (std::int64_t b : has_rows_)
      for (std::int64_t e = 0; e < std::min(capacity_, pages_of(lengths_[std::size_t(b)]) * page_entries_); ++e)
        for (std::int64_t h = 0; h < heads_; ++h) {
          const std::int64_t page = table[std::size_t(b * of_each + e / page_entries_)];
          f(b, h, e, (page * heads_ + h) * page_entries_ + e % page_entries_);
        }
  }
  void put(const void* contiguous, void* pool) const {
    for_each_entry([&](std::int64_t b, std::int64_t h, std::int64_t e, std::int64_t row) {
      std::memcpy(static_cast<char*>(pool) + std::size_t(row) * row_bytes_,
                  static_cast<const char*>(contiguous) + std::size_t((b * heads_ + h) * capacity_ + e) * row_bytes_,
                  row_bytes_);
    });
  }

  std::int64_t page_entries_, heads_ = 0, capacity_ = 0, pages_ = 0;
  std::size_t row_bytes_ = 0;
  std::vector<std::int32_t> lengths_;
  std::vector<std::int64_t> has_rows_;
};

}  // namespace cf::test
