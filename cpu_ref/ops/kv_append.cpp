#include <cstring>
#include <limits>

#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/real.hpp"

namespace cf::cpu_ref {
namespace {

constexpr std::int64_t kLongest = std::numeric_limits<std::int32_t>::max();  // kv_len of a stream

}  // namespace

Status run(const ops::KvAppend::Args& a) {
  CF_TRY(ops::KvAppend::check(a));
  const auto d = ops::KvAppend::dims(a);
  const std::vector<RowRun> table = table_of(a.runs, d.batch, d.q_len);
  CF_TRY(check_append(ops::KvAppend::name, a, d, d.window ? kLongest : d.capacity, d.window));
  const auto element_bytes = std::int64_t(size_bytes(a.k.dtype)), row_bytes = d.head_dim * element_bytes;
  with_cache_view(a.k_cache, a.page_table, d.window, [&](const auto& view) {
    const auto append = [&](const void* from, void* cache) {
      for (const RowRun& run : table)
        for (std::int64_t i = 0; i < run.count; ++i) {
          const int entry = view.appended_entry(a.kv_len.data[run.sequence], int(run.count), int(i));
          if (entry < 0) break;
          for (std::int64_t h = 0; h < d.kv_heads; ++h)
            std::memcpy(static_cast<char*>(cache) + view.entry(run.sequence, h, entry) * element_bytes,
                        static_cast<const char*>(from) + ((run.first_row + i) * d.kv_heads + h) * row_bytes,
                        std::size_t(row_bytes));
        }
    };
    append(a.k.data, a.k_cache.data);
    append(a.v.data, a.v_cache.data);
  });
  return {};
}

/// A copy sums nothing.
Result<Condition> condition(const ops::KvAppend::Args& a) {
  CF_TRY(ops::KvAppend::check(a));
  return Condition{};
}

}  // namespace cf::cpu_ref
