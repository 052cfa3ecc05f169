#pragma once
// Private to cuda and cf-layer. The persistent kernel's plan: a pure function of values, compiled with or without nvcc.
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/dtype.hpp"
#include "core/host_device.hpp"
#include "core/model/shape.hpp"
#include "core/status.hpp"
#include "cuda/device/gqa_tile.hpp"
#include "cuda/runtime/arch.hpp"

namespace cf::cuda {

/// The activations in a group of digits, which have one factor. Packed weights are multiplied by digits.
inline constexpr int kDigitColumns = 128;

/// The name that errors begin with.
inline constexpr std::string_view kPersistentName = "persistent";

/// What the persistent kernel needs to know of a model: the sizes that one rank holds, the layer's arithmetic, and the
/// dtype of weights and activations.
struct PersistentModel {
  ModelType family;  // whose names errors use
  std::int64_t hidden_size;
  std::int64_t heads;
  std::int64_t kv_heads;  // divides heads
  std::int64_t head_dim;
  std::int64_t rotary_dim;
  std::int64_t intermediate_size;
  double attention_scale;
  double layer_norm_eps;
  bool use_parallel_residual;
  bool adds_residual;  // the rank adds the residual and the biases of attention.dense and mlp.dense_4h_to_h
  Activation hidden_act;
  NormKind norm;
  ops::QkvLayout qkv_layout;
  DType dtype;
  bool head_norm = false;          // RMSNorm of each head of q and of k, before RoPE
  bool learned_positions = false;  // a vector for the position is added to the embedding; refused
  std::int64_t ranks = 1;          // that share the model
  // Of layers whose matrices are packed by cuda::pack().
  bool packed = false;
  int packed_group = kDigitColumns;  // the fewest columns of a group of weights, a multiple of 32
};

inline PersistentModel persistent_model(const ModelSpec& m, DType dtype) {
  return {.family = m.traits.family,
          .hidden_size = m.shape.hidden_size,
          .heads = m.shape.num_heads,
          .kv_heads = m.shape.num_kv_heads,
          .head_dim = m.shape.head_dim,
          .rotary_dim = m.shape.rotary_dim,
          .intermediate_size = m.shape.intermediate_size,
          .attention_scale = m.attention_scale(),
          .layer_norm_eps = m.traits.layer_norm_eps,
          .use_parallel_residual = m.traits.residual == Residual::parallel,
          .adds_residual = m.adds_residual,
          .hidden_act = m.traits.activation,
          .norm = m.traits.norm,
          .qkv_layout = m.shape.qkv_layout,
          .dtype = dtype,
          .head_norm = m.shape.head_norm,
          .learned_positions = m.traits.positions == Positions::learned,
          .ranks = m.ranks};
}

/// The warps of a block. Consumer warps multiply by the weights and attend to keys. Auxiliary warps merge partial
/// attention results and fetch what other blocks have made. The producer warp copies weights, keys and values into the
/// ring. Three warps a scheduler leave each thread 168 registers.
inline constexpr int kConsumerWarps = 8, kAuxiliaryWarps = 3, kProducerWarps = 1;
inline constexpr int kConsumerThreads = 32 * kConsumerWarps, kAuxiliaryThreads = 32 * kAuxiliaryWarps;
inline constexpr int kBlockThreads = kConsumerThreads + kAuxiliaryThreads + 32 * kProducerWarps;

inline constexpr int kMaxPersistentBatch = 8, kMaxPersistentHeadDim = 256;
/// The most layers of a kernel. The LM head counts as a layer. The epochs of NormWord set this bound.
inline constexpr int kMaxPersistentLayers = 84;
/// A thread normalises up to three vectors of eight elements of a row.
inline constexpr std::int64_t kMaxPersistentHidden = 3 * 8 * kConsumerThreads;

/// A stage of the ring holds a slice of each of four rows. A slice has at most kMaxSliceColumns columns.
inline constexpr int kStageSlices = 4, kMaxSliceColumns = 2560;
/// The most stages that the ring has room for. Each has a lane of the producer warp.
inline constexpr int kMaxRingStages = 32;
/// The most slices of a row: ProductShape has a byte for their number.
inline constexpr int kMaxSlices = 127;
/// Keys of a tile of attention.
inline constexpr int kTileKeys = 16;
/// So many keys have one split, twice as many have two, and so on. To merge splits takes longer than to attend to fewer
/// keys.
inline constexpr int kSplitKeys = 128;
/// Heads of more elements have no GQA tiles: registers do not hold the sums of several such heads beside what else a
/// warp keeps.
inline constexpr int kMaxGqaHeadDim = 128;
/// How a block multiplies its rows by the tokens. Each way has kernels of its own.
enum class Products : int {
  rows,             // one token, a parallel residual: a warp multiplies whole slices of rows
  sequential_rows,  // the same for a sequential residual
  tiles,            // up to eight tokens: all consumer warps multiply tiles of rows
  packed,           // one token, packed weights in tiles of sixteen rows
  packed_tiles      // up to eight tokens, packed weights in tiles of sixteen rows
};
/// Whether a plan has row products. Each kind of residual has kernels of its own, without the other kind's code: a
/// layer runs through more code than the instruction cache holds (data/bench/TRIALS.md, instruction-cache).
CF_HD constexpr bool is_rows(Products p) { return p == Products::rows || p == Products::sequential_rows; }
/// Whether a plan of these products takes packed weights. Weights beside them that are not packed, such as the LM head,
/// have tile products.
CF_HD constexpr bool is_packed(Products p) { return p == Products::packed || p == Products::packed_tiles; }
/// Whether a plan of these products takes several tokens.
CF_HD constexpr bool is_tiled(Products p) { return p == Products::tiles || p == Products::packed_tiles; }
/// A row product takes a slice in chunks of 256 columns, and keeps the slice's activations in registers. A slice whose
/// last chunk may be smaller has kMinRowChunks chunks at least.
inline constexpr int kChunkColumns = 256, kMinRowChunks = 5, kMaxRowChunks = kMaxSliceColumns / kChunkColumns;
/// The columns of slices of whole chunks for which the row product has faster loops.
inline constexpr std::array kWholeSliceColumns{2560, 2048, 1024};
/// The most columns of a slice of packed weights.
inline constexpr int kMaxPackedColumns = kMaxSliceColumns;
/// The head_dims that the kernel for packed weights takes: up to kMaxPackedHeadDim, and kWidePackedHeadDim, for which
/// DiagonalTile needs few registers. The kernel has no registers left for the tiles of other heads.
inline constexpr int kMaxPackedHeadDim = 80, kWidePackedHeadDim = 128;
CF_HD constexpr int row_chunks(int slice_columns) { return (slice_columns + kChunkColumns - 1) / kChunkColumns; }

/// Where a block's partial results of attention lie in shared memory. Tokens may lie there at other times: their
/// memory is free from the end of q, k and v until the block fetches the context.
enum class PartialsIn {
  own,     // in memory that nothing else has
  attn_x,  // in that of input_layernorm's output and, later, of the context
  mlp_x    // in that of the MLP's tokens, which a sequential residual has after the context alone
};

/// A kind of stages. The ring is cut into slots for them, side by side from its first byte on. A stage lies in a slot
/// of `lines` lines.
struct RingStage {
  static constexpr int kLineBytes = 128;
  static constexpr int kInverseBits = 20;

  std::int16_t lines;
  std::int8_t slots;      // that the ring has
  std::int8_t in_flight;  // stages that may be in flight
  int inverse;            // 2^kInverseBits / lines, rounded up

  CF_HD constexpr int bytes() const { return lines * kLineBytes; }
  /// The slot of a stage whose predecessor, of any kind, ends at byte `at` of the ring: the first slot that does not
  /// begin before `at`, or the ring's first slot where there is none. `at` is rounded down to whole lines.
  CF_HD constexpr int first_slot(int at) const {
    const int slot = (at / kLineBytes + lines - 1) * inverse >> kInverseBits;
    return slot < slots ? slot : 0;
  }
  bool operator==(const RingStage&) const = default;
};

/// A divisor from 1 to 4096. quotient() multiplies and shifts: a kernel's division of integers takes many instructions.
struct Divisor {
  std::uint64_t inverse = 0;  // 2^40 / number, rounded up

  constexpr Divisor() = default;
  constexpr explicit Divisor(int number) : inverse(((std::uint64_t(1) << 40) + number - 1) / number) {}
  /// dividend / number, of a dividend from 0 to 2^23; of one up to 2^29 where the number is 64 to 1024.
  CF_HD constexpr int quotient(int dividend) const { return int(std::uint64_t(dividend) * inverse >> 40); }
};
/// The divisors of kernels. Each has the name of the plan's member that it divides by.
struct Divisors {
  Divisor attention_splits, gqa_tiles, group_gqa_tiles, head_rows;
};

/// How the persistent kernel is laid out on a device. Every plan computes the same, but for the order of its sums.
struct PersistentPlan {
  int grid;  // blocks, one an SM, all resident at once; each has rows of hidden
  Products products;
  int hidden_slices;      // slices of a row of hidden columns, a power of two
  int context_slices;     // slices of a row of heads * head_dim columns, a power of two
  int act_slices;         // slices of a row of intermediate columns, a multiple of hidden_slices
  int hidden_columns;     // columns of a slice of a hidden row
  int context_columns;    // columns of a slice of the context
  int act_columns;        // columns of a slice of an intermediate row
  bool act_in_registers;  // each consumer warp loads its slice of mlp.act to registers; else mlp.act is in mlp_x
  bool shared_norms;      // of a tile product: gamma and beta are copied to shared memory
  int ring_bytes;
  int stage_bytes;       // of the largest stage
  int stages;            // stages of stage_bytes that the ring has room for
  int bytes_in_flight;   // bytes that are requested and have not arrived, at most
  int stages_in_flight;  // the same in stages of stage_bytes
  RingStage key_stage;   // of keys and values
  int ahead_stages;      // stages of dense weights that are prefetched into the L2 while the ring is full, at most
  int ahead_clocks;      // the SM's clocks from one prefetched KiB to the next
  int up_eighths;        // eighths of a block's rows of mlp.dense_h_to_4h that come before attention
  int head_rows;  // rows of the LM head that a block multiplies at once: as many as the partial sums have room for
  int gqa_heads;  // query heads of a GQA tile, which attend together to keys that are loaded once: gqa_tile_heads(), or
                  // 1 beyond kMaxGqaHeadDim and where keys are not shared
  int group_gqa_tiles;   // GQA tiles of a group: these have the same keys
  int gqa_tiles;         // of a token's query heads
  int attention_splits;  // parts that the keys of a GQA tile are split into, at most
  Divisors divisors;
  PartialsIn partials_in;
  int stage_keys;   // keys that a stage holds together with their values, a multiple of sixteen
  int out_rows;     // rows of hidden that a block owns, at most
  int warp_rows;    // rows that a warp owns, at most, in products whose rows are not sliced; 0 without such
  int shared_sums;  // partial sums of a token that a block's consumer warps share
  int smem_bytes;   // dynamic shared memory of a block
};

/// Stages of `bytes` bytes: of a product, or of keys and values.
constexpr RingStage ring_stage(const PersistentPlan& p, int bytes) {
  // Small stages have larger slots than they need: the ring holds kMaxRingStages stages at most.
  constexpr int line = RingStage::kLineBytes;
  const int least = (p.ring_bytes + kMaxRingStages - 1) / kMaxRingStages,
            lines = ((bytes > least ? bytes : least) + line - 1) / line;
  const int slots = p.ring_bytes / line / lines, stages = p.bytes_in_flight / bytes;
  return {std::int16_t(lines), std::int8_t(slots),
          std::int8_t(stages < 1           ? 1
                      : stages > slots - 2 ? slots - 2
                                           : stages),
          ((1 << RingStage::kInverseBits) + lines - 1) / lines};
}

/// Values that replace the plan's own choices. An empty one leaves the choice to the plan.
struct PersistentChoices {
  std::optional<int> blocks = {};            // 1 to the blocks that the plan has without it
  std::optional<int> stages = {};            // 3 to what fits
  std::optional<int> stages_in_flight = {};  // 1 to two fewer than the ring has
  std::optional<int> ahead_stages = {};      // 0 to 32. 0 prefetches nothing
  std::optional<int> up_eighths = {};        // 0 to 8. 0 hides no wait for q, k and v; 8 hides no wait for the context
  std::optional<int> attention_splits = {};  // 1 to 32, to the blocks, or to as many as there is room to gather
  std::optional<bool> shares_keys = {};      // whether the query heads of a group share its keys, as far as they can
  bool tile_products = false;                // for one token too
};

/// The choices for `batch` sequences with caches of `capacity` entries: heads share keys in large caches, unless
/// shares_keys is chosen already. By the capacity and not by kv_len, so that bits do not depend on how launches are
/// cut.
inline PersistentChoices for_capacity(const Arch& arch, PersistentChoices choices, std::int64_t batch,
                                      std::int64_t capacity) {
  const std::int64_t unshared = batch == 1 ? arch.tuning->unshared_entries : arch.tuning->unshared_entries_of_many;
  if (!choices.shares_keys) choices.shares_keys = capacity > unshared;
  return choices;
}

/// Plans the persistent kernel for `batch` sequences of one new token each. A pure function of its arguments.
/// Code::unimplemented, with the reason, for a norm of each head of q and k beside a parallel residual, learned
/// positions, a layer without RoPE, packed weights on several ranks, a dtype other than float16 and bfloat16, a hidden_size, head_dim or intermediate_size that is not a multiple of 8, a head_dim beyond 256, a
/// hidden_size beyond 6144, more than 8 sequences, and shared memory that does not hold a ring of three stages. Packed
/// weights are also refused with a head_dim above 80 that is not 128, with columns that are not a multiple of 128, and
/// with rows that are not a multiple of 16. Code::invalid_argument for sizes that no layer has and for choices out of
/// their bounds.
Result<PersistentPlan> plan_persistent(const Arch& arch, const PersistentModel& model, std::int64_t batch,
                                       const PersistentChoices& choices = {});

/// Refuses, as Code::unimplemented, a plan of more blocks than a device of `sm_count` SMs holds at once. An SM holds
/// `blocks_per_sm` blocks.
Status check_resident(const PersistentPlan& plan, int sm_count, int blocks_per_sm);

std::string to_string(Products);
std::string to_string(const PersistentPlan&);

}  // namespace cf::cuda
