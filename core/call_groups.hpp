#pragma once
// A call of runs that differ, as calls that a kernel with one q_len for all takes.
#include <cstddef>
#include <type_traits>

#include "core/cache_view.hpp"
#include "core/contract.hpp"
#include "core/row_runs.hpp"

namespace cf {

/// Whether a table has several groups.
inline bool differ(RowRuns runs) { return row_groups(runs).size() > 1; }

/// Elements [first, first + count) of a view's first dimension.
template <class V, int Rank>
View<V, Rank> part_of(View<V, Rank> view, std::int64_t first, std::int64_t count) {
  const std::int64_t before = view.shape[0] > 0 ? first * (view.size() / view.shape[0]) : 0;
  if constexpr (std::is_void_v<std::remove_const_t<V>>) {
    using Byte = std::conditional_t<std::is_const_v<V>, const std::byte, std::byte>;
    view.data = static_cast<Byte*>(view.data) + before * std::int64_t(size_bytes(view.dtype));
  } else {
    view.data += before;
  }
  view.shape[0] = count;
  return view;
}

/// A group's part of an op's call: its rows of the tensors that have a row for each token, and its
/// sequences of the caches and of kv_len. Every sequence of the part has as many rows. An op whose tensors lie
/// otherwise has a part_of() of its own.
template <class Args>
Args part_of(const Args& args, const RowGroup& group) {
  using Op = typename Args::Op;
  if constexpr (requires { Op::part_of(args, group); }) {
    return Op::part_of(args, group);
  } else {
    Args part = args;
    Op::tensors(Op::dims(args), part, [&]<class V>(const TensorSpec& t, V& view, const auto&) {
      if (t.role == Role::length || t.role == Role::page_table) {
        view = part_of(view, group.sequence, group.sequences);
      } else if (t.role == Role::input || t.role == Role::output || t.role == Role::position) {
        view = part_of(view, group.first_row, group.rows());
      } else if (t.role == Role::state || t.role == Role::cache) {
        if constexpr (V::rank == 4 && std::is_void_v<std::remove_const_t<typename V::element>>)
          if (!args.page_table) view = cache_of(view, group.sequence, group.sequences);  // pages are no one sequence's
      }
    });
    part.runs = {};
    return part;
  }
}

/// Calls f with the part of each group of a call's runs, in order, and stops at the first Status that is not ok.
template <class Args, class F>
Status for_each_group(const Args& args, F&& f) {
  for (const RowGroup& group : row_groups(args.runs)) CF_TRY(f(part_of(args, group)));
  return {};
}

}  // namespace cf
