#pragma once
// What was measured of a GPU, as numbers that launch plans choose by. A file for each GPU holds its numbers and says
// which record each comes from.
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

namespace cf::cuda {

/// How far a warp's copies of packed weights run ahead of its products.
struct GptqAhead {
  int stages;          // of the ring, at most
  int early;           // stages that are asked for before the activations are there
  int many_tiles = 0;  // for so many tiles a block or more
};

/// The persistent kernel is faster than the graph for up to `most_slots` slots of a model whose hidden_size is at least
/// `least_hidden`.
struct PersistentBound {
  std::int64_t most_slots, least_hidden;
};

/// A class of step sizes: `first` to `last` tokens. Within it a row's bits do not depend on the number of rows: where a
/// plan could change the order of a row's sums, it is made for `planned_as` tokens.
struct StepClass {
  std::int64_t first, last, planned_as;
};
inline constexpr std::int64_t kAnyTokens = std::numeric_limits<std::int64_t>::max();

/// An exchange in two shots of parts of up to `most_bytes` has `blocks` blocks.
struct ExchangeBlocks {
  std::int64_t most_bytes;
  int blocks;
};

struct Tuning {
  std::string_view measured_on;  // the GPU that the numbers were measured on

  // The classes of step sizes, in their order. The last one has no bound.
  std::array<StepClass, 3> step_classes;

  constexpr const StepClass& class_of(std::int64_t tokens) const {
    std::size_t i = 0;
    while (tokens > step_classes[i].last) ++i;
    return step_classes[i];
  }
  /// Whether a row's bits do not depend on the size of its step at all.
  constexpr bool is_invariant() const { return step_classes.front().last == kAnyTokens; }

  // Which of linear's kernels multiplies: cuda/ops/linear/kernels.def.
  std::int64_t gemv_tokens;          // the most tokens of gemv, where another kernel takes more
  std::int64_t packed_tokens;        // the same of packed, before cuBLASLt takes more
  std::int64_t fp8_tokens;           // the same of gemv_fp8, before tiles_fp8 takes more
  std::int64_t wgmma_tokens;         // the most tokens of wgmma with dense weights
  std::int64_t packed_wgmma_first;   // the fewest tokens of wgmma with packed weights,
  std::int64_t packed_wgmma_tokens;  // and the most

  // linear's gemv: cuda/ops/linear/gemv/plan.hpp.
  int gemv_blocks_per_sm;  // of up to eight tokens on Hopper; kernels are compiled with it

  // linear's packed kernel: cuda/ops/linear/packed/plan.hpp.
  GptqAhead packed_ahead;          // few tiles, or several tokens
  GptqAhead packed_ahead_of_many;  // one token and many tiles
  GptqAhead packed_ahead_of_sum;   // of LinearSum's two products in one launch
  int packed_turns;                // warps of a part, which take a block's tiles in turn; kernels are compiled with it
  std::int64_t packed_divided_rows;  // the most rows of a matrix whose columns tiles_packed divides in halves
  std::int64_t packed_wide_tokens;   // the most tokens of the wide kernel, where wgmma takes the call, too
  int packed_clusters_elevenths;     // of the larger clusters that there are blocks for, those that the device holds

  // attention: cuda/ops/attention/attention.hpp.
  std::int64_t prefill_queries;     // the fewest queries a sequence of the prefill kernels
  std::int64_t unshared_elements;   // of a kv head's keys: up to so many, each query head loads them by itself
  std::int64_t few_splits_entries;  // the largest cache where a GQA tile has no more splits than a lone head
  int split_blocks_on_two_sms;      // the most blocks for two SMs that keys are split into
  std::int64_t two_tile_sequences;  // the most sequences in contiguous caches whose crowds have rings of two tiles

  // How a layer's kernels run beside each other in the graph: cuda/step/choose.cpp.
  std::int64_t ln_qkv_tokens;       // the most tokens of ln_qkv in the place of its parts
  std::int64_t shared_sms_entries;  // the largest cache of a layer whose kernels share SMs
  int dense_shared_percent;         // LaunchMode::shared_percent for dense weights

  // Exchanges between ranks: cuda/comm/peers.hpp, cuda/ops/ranks/exchange_plan.hpp.
  std::int64_t one_shot_bytes;                    // the most that a rank sends to all others in one shot
  std::array<ExchangeBlocks, 2> two_shot_blocks;  // of small parts; larger ones have kMostExchangeBlocks

  // Whether steps run in the persistent kernel: any of the bounds for the model's kind of residual. Models of packed
  // weights run in the graph.
  std::array<PersistentBound, 2> persistent_parallel, persistent_sequential;

  // The persistent kernel: cuda/persistent/plan.cpp.
  int bytes_in_flight;        // of weights, an SM
  int ahead_stages;           // the most that are prefetched into the L2 while the ring is full
  int ahead_bytes_per_clock;  // the rate of these prefetches
  int up_eighths;             // eighths of a block's rows of mlp.dense_h_to_4h that come before attention
  int packed_up_eighths;      // the same of one token with packed weights
  // In caches of up to this many entries each query head loads its keys by itself; in larger ones the heads of a kv
  // head share one load. For one sequence, and for several.
  std::int64_t unshared_entries, unshared_entries_of_many;
};

}  // namespace cf::cuda
