#include "cuda/model/pages.hpp"

#include <algorithm>

#include "cuda/device/sync.cuh"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// Elements of a list that are a kernel's parameter.
constexpr int kListed = 256;

struct Cells {
  SlotPages::Cell cell[kListed];
};
struct Copies {
  std::int32_t from[kListed], to[kListed], entries[kListed];
};

// Neither kernel lets its successors start early: what they change is read by kernels that are not the next ones.

__global__ void cells_kernel(const __grid_constant__ Cells cells, int count, std::int32_t* table) {
  wait_for_predecessors();
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count && cells.cell[i].page >= 0) table[cells.cell[i].index] = cells.cell[i].page;
}

/// Block (t, h, i) copies head h of copy i in tensor t. Sizes are in vectors of 16 bytes.
__global__ void copies_kernel(const __grid_constant__ Copies copies, uint4* first, std::int64_t tensor_stride,
                              std::int64_t page, std::int64_t head, int entry) {
  wait_for_predecessors();
  const int i = int(blockIdx.z), n = copies.entries[i] * entry;
  uint4* const base = first + blockIdx.x * tensor_stride + blockIdx.y * head;
  const uint4* const from = base + copies.from[i] * page;
  uint4* const to = base + copies.to[i] * page;
  for (int v = int(threadIdx.x); v < n; v += int(blockDim.x)) to[v] = from[v];
}

}  // namespace

Status enqueue_table_cells(View<std::int32_t, 2> table, std::span<const SlotPages::Cell> cells,
                           const Context& context) {
  constexpr unsigned threads = 128;
  while (!cells.empty()) {
    const std::size_t count = std::min<std::size_t>(cells.size(), kListed);
    Cells listed{};
    std::copy_n(cells.begin(), count, listed.cell);
    LaunchList launches(context);
    CF_TRY(launch("table_cells", launches, {.grid = (unsigned(count) + threads - 1) / threads, .block = threads},
                  cells_kernel, listed, int(count), table.data));
    CF_TRY(launches.submit(context.stream(), {.early = context.overlap()}));
    cells = cells.subspan(count);
  }
  return {};
}

Status enqueue_page_copies(const AnyView<4>& first, std::int64_t stride_bytes, std::int64_t tensors,
                           std::span<const PagePool::Copy> copies, const Context& context) {
  const CacheView pages(first);
  const auto vectors = [&](std::int64_t elements) {
    return elements * std::int64_t(size_bytes(first.dtype)) / std::int64_t(sizeof(uint4));
  };
  while (!copies.empty()) {
    // A page that is read by one copy and written by a later one keeps the two apart.
    std::size_t count = 0;
    Copies listed{};
    for (; count < std::min<std::size_t>(copies.size(), kListed); ++count) {
      const PagePool::Copy& c = copies[count];
      if (std::find(listed.from, listed.from + count, c.to) != listed.from + count) break;
      listed.from[count] = c.from;
      listed.to[count] = c.to;
      listed.entries[count] = std::int32_t(c.entries);
    }
    LaunchList launches(context);
    CF_TRY(launch("page_copies", launches,
                  {.grid = {unsigned(tensors), unsigned(pages.heads()), unsigned(count)}, .block = 128}, copies_kernel,
                  listed, static_cast<uint4*>(first.data), stride_bytes / std::int64_t(sizeof(uint4)),
                  vectors(pages.entry(1, 0, 0)), vectors(pages.head_stride()), int(vectors(pages.head_dim()))));
    CF_TRY(launches.submit(context.stream(), {.early = context.overlap()}));
    copies = copies.subspan(count);
  }
  return {};
}

}  // namespace cf::cuda
