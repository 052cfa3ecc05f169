#pragma once
// A cache as others hold it, token by token: (tokens, heads * head_dim), each row the heads side by side.
#include "core/ops/kv_append.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// Keys and values of one sequence by token. Both have one shape, rows of a multiple of 16 bytes, and begin at a
/// multiple of 16.
struct TokenRows {
  AnyView<2> k{}, v{};     // (tokens, heads * head_dim)
  std::int64_t first = 0;  // the first row that the cache does not have as an entry yet
  std::int64_t last = 0;   // the new token's row
};

/// Adds a launch in place of that of the append of one token to a cache of one sequence: it stores k and v as row
/// `last` too, and copies rows first .. last - 1 into the cache, whose entries they become. kv_len must be last + 1.
Status prepare(const ops::KvAppend::Args& a, const TokenRows& rows, LaunchList& launches);

}  // namespace cf::cuda
