#pragma once
#include <cstdint>

namespace cf {

/// How much work a step of a model is: q_len new tokens for each of batch sequences; kv_len counts a sequence's valid
/// cache entries after the new tokens are appended, so the last new token's position is kv_len - 1.
struct Workload {
  std::int64_t batch = 1;
  std::int64_t q_len = 1;
  std::int64_t kv_len = 1;
  std::int64_t capacity = 0;  // entries that the cache has room for; 0 means kv_len

  std::int64_t tokens() const { return batch * q_len; }
  std::int64_t cache_capacity() const { return capacity ? capacity : kv_len; }
};

}  // namespace cf
