#pragma once
// Which rows a block of the prefill kernels has, and which keys they see. A kernel takes one of two calls:
// AttentionCall for sequences with as many queries each over one contiguous cache of all keys, or PrefillCall for the
// rest.
#include <type_traits>

#include "cuda/ops/any_cache.hpp"
#include "cuda/ops/attention/attention.cuh"
#include "cuda/ops/attention/prefill_table.hpp"

namespace cf::cuda {

/// The arguments of a prefill kernel over runs of any lengths, of a cache of any kind.
struct PrefillCall {
  const void *q, *q_sinks, *k_cache, *v_cache;  // q_sinks: null without sinks
  const std::int32_t* kv_len;
  void* y;
  float scale;
  int heads, head_dim;
  HeadGroup group;
  int window, sinks;  // window: the largest int without one
  AnyCacheView cache;
  PrefillTable table;
};
// Beside it the kernels take two tensor maps of 128 bytes, at a multiple of 64: 4096 bytes in all.
static_assert(sizeof(PrefillCall) <= 4096 - 2 * 128);

/// The maximum that a row's softmax begins with where a tile may have no key that the row sees: the weights of such a
/// tile are 0 and not NaN. It is finite, and so is its product with log2(e).
inline constexpr float kLowestScore = -1e38f;

/// The run that a block has in a call of equal runs: all of a sequence's queries.
class EqualRun {
 public:
  /// Block `block` of `blocks` that a run has.
  __device__ EqualRun(const AttentionCall& c, int sequence, int block, int blocks, int block_rows)
      : block_first((blocks - 1 - block) * block_rows), c_(c), sequence_(sequence) {}

  const int block_first;  // the block's first row
  __device__ int sequence() const { return sequence_; }
  __device__ int rows() const { return c_.rows(); }
  __device__ int query_of(int row) const { return c_.query_of(row); }
  /// The first element of a row, in q and in y.
  __device__ long row(int kv_head, int r) const { return c_.row(sequence_, kv_head, r); }
  /// How many keys query 0 sees of a cache of n entries; query i sees i more.
  __device__ int sees(int n) const { return c_.visible_keys(n, 0); }

 private:
  const AttentionCall& c_;
  int sequence_;
};

/// The run that a block has in a call of a table.
class TableRun {
 public:
  __device__ TableRun(const PrefillCall& c, int block, int block_rows)
      : TableRun(c, c.table.of_block(block), block, block_rows) {}

  const int block_first;
  __device__ int sequence() const { return run().sequence; }
  __device__ int rows() const { return run().count * c_.group.size(); }
  __device__ int query_of(int row) const { return c_.group.quotient(row); }
  __device__ long row(int kv_head, int r) const {
    const int i = query_of(r);
    return ((long(run().first_row) + i) * c_.heads + kv_head * c_.group.size() + r - i * c_.group.size()) * c_.head_dim;
  }
  __device__ int sees(int n) const { return c_.cache.visible_entries(n, run().count, 0); }
  /// The first key behind the sinks that a row sees which has `visible` keys up to its own: KeyWindow::first().
  __device__ int first_key(int visible) const { return max(visible - c_.window, min(c_.sinks, visible)); }

 private:
  // Blocks with more keys start earlier.
  __device__ TableRun(const PrefillCall& c, int run, int block, int block_rows)
      : block_first(
            ((c.table.runs.run[run].count * c.group.size() - 1) / block_rows - block + c.table.first_block[run]) *
            block_rows),
        c_(c),
        run_(run) {}
  __device__ const RunTable::Run& run() const { return c_.table.runs.run[run_]; }

  const PrefillCall& c_;
  int run_;
};

/// The run of block `block`. Without a table each sequence, blockIdx.z, has `blocks` blocks; else the table says which.
__device__ inline EqualRun run_of_block(const AttentionCall& c, int block, int blocks, int block_rows) {
  return {c, int(blockIdx.z), block, blocks, block_rows};
}
__device__ inline TableRun run_of_block(const PrefillCall& c, int block, int, int block_rows) {
  return {c, block, block_rows};
}

/// The call of a launch.
PrefillCall prefill_call(const ops::Attention::Args& a, const PrefillTable& table);

}  // namespace cf::cuda
