#pragma once
// A cache as others hold it, token by token: (tokens, heads * head_dim), each row the heads side by side.
#include "core/view.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// Keys and values by token. Both have one shape, rows of a multiple of 16 bytes, and begin at a multiple of 16.
struct TokenRows {
  AnyView<2> k{}, v{};  // (tokens, heads * head_dim)
};

/// Adds the launch that copies the first `tokens` rows into a cache of one sequence, k_cache and v_cache (1, heads,
/// capacity, head_dim) of the same dtype, as entries 0 .. tokens - 1.
Status add_turned_rows(const TokenRows& rows, std::int64_t tokens, const AnyView<4>& k_cache, const AnyView<4>& v_cache,
                       LaunchList& launches);
/// Adds the launch that copies one token's k and v (1, heads, head_dim) to row `token`.
Status add_stored_row(const AnyView<3>& k, const AnyView<3>& v, const TokenRows& rows, std::int64_t token,
                      LaunchList& launches);

}  // namespace cf::cuda
