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

/// kv_append of one token to a cache of one sequence whose rows others hold, too: it stores k and v as row `last` as
/// well, and copies rows first .. last - 1 into the cache, whose entries they become. kv_len must be last + 1.
struct AppendRows {
  static constexpr std::string_view name = ops::KvAppend::name;
  struct Dims {};
  struct Args {
    using Op = AppendRows;
    ops::KvAppend::Args append;
    TokenRows rows;
    bool is_appended = false;  // the cache has the new token's entry, which is not written again then

    bool writes_cache() const { return !is_appended || rows.first < rows.last; }
  };

  static Dims dims(const Args&) { return {}; }
  /// The append's tensors, but for a cache that is not written, and the rows.
  template <class A, class F>
  static void tensors(const Dims&, A& a, F&& f) {
    ops::KvAppend::tensors(ops::KvAppend::dims(a.append), a.append,
                           [&](const TensorSpec& t, auto& view, const auto& shape) {
                             if (t.role != Role::state || a.writes_cache()) f(t, view, shape);
                           });
    f(TensorSpec{Role::state, "k_rows"}, a.rows.k, a.rows.k.shape);
    f(TensorSpec{Role::state, "v_rows"}, a.rows.v, a.rows.k.shape);
  }
};

/// Adds the launch.
Status prepare(const AppendRows::Args& a, LaunchList& launches);

}  // namespace cf::cuda
