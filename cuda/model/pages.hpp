#pragma once
// What changes in a cache of pages between steps, on the device. Private to cuda/model.
#include <cstdint>
#include <span>

#include "core/cache_view.hpp"
#include "core/model/layer.hpp"
#include "core/model/slot_pages.hpp"
#include "cuda/runtime/context.hpp"

namespace cf::cuda {

/// Brings cells of a table up to date, behind what is on the context's stream and before what is put there next. Where
/// a cell is -1 the table keeps an earlier page, which nothing reads: so every cell of it is a page of the pool.
Status enqueue_table_cells(View<std::int32_t, 2> table, std::span<const SlotPages::Cell> cells, const Context& context);

/// Copies the first entries of pages to other ones, in the order of `copies`, in each of `tensors` tensors of the shape
/// of `first`, (pages, kv_heads, page_entries, head_dim), which lie `stride_bytes` apart.
Status enqueue_page_copies(const AnyView<4>& first, std::int64_t stride_bytes, std::int64_t tensors,
                           std::span<const PagePool::Copy> copies, const Context& context);

}  // namespace cf::cuda
