#include <cstring>

#include "core/cache_view.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/ops/real.hpp"

namespace cf::cpu_ref {

Status run(const ops::KvAppend::Args& a) {
  CF_TRY(ops::KvAppend::check(a));
  const auto d = ops::KvAppend::dims(a);
  CF_TRY(check_index(ops::KvAppend::name, "kv_len", a.kv_len, d.q_len, d.capacity));
  const CacheView rows(a.k_cache);
  const std::int64_t element_bytes = std::int64_t(size_bytes(a.k.dtype)), row_bytes = d.head_dim * element_bytes;
  const auto append = [&](const void* from, void* cache) {
    for (std::int64_t b = 0; b < d.batch; ++b)
      for (std::int64_t i = 0; i < d.q_len; ++i)
        for (std::int64_t h = 0; h < d.kv_heads; ++h) {
          const std::int64_t source = (b * d.q_len + i) * d.kv_heads + h;
          const int entry = rows.appended_entry(a.kv_len.data[b], int(d.q_len), int(i));
          std::memcpy(static_cast<char*>(cache) + rows.entry(b, h, entry) * element_bytes,
                      static_cast<const char*>(from) + source * row_bytes, std::size_t(row_bytes));
        }
  };
  append(a.k.data, a.k_cache.data);
  append(a.v.data, a.v_cache.data);
  return {};
}

/// A copy sums nothing.
Result<Condition> condition(const ops::KvAppend::Args& a) {
  CF_TRY(ops::KvAppend::check(a));
  return Condition{};
}

}  // namespace cf::cpu_ref
