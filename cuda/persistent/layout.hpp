#pragma once
// The shared memory of a block. Without CUDA: the plan depends on it.
#include "core/host_device.hpp"
#include "cuda/ops/linear/pack/format.hpp"
#include "cuda/persistent/deal.hpp"
#include "cuda/persistent/exchange.hpp"
#include "cuda/persistent/plan.hpp"
#include "cuda/persistent/signals.hpp"

namespace cf::cuda {

/// Pointers to the weights of one layer, which a launch does not write.
struct WeightPointers {
  const char* gamma[2];  // input_layernorm, post_attention_layernorm
  const char* beta[2];
  const char* head_gamma[2];   // of the norms of each head of q and of k; null for none
  const char* bias[kWeights];  // by Weight; null for none
  const char* matrix[kWeights];
};
/// Pointers to the KV cache of one layer.
struct CachePointers {
  char *k, *v;
};
struct LayerPointers {
  WeightPointers weights;
  CachePointers cache;
  std::int64_t kind;  // which of PersistentArguments::kinds the layer has
};
inline constexpr int kLayerPointers = int(sizeof(LayerPointers) / sizeof(void*));

/// What all threads of a block are told while the launch runs.
struct BlockNotice {
  int stopped;           // 1 where a wait took too long: all warps leave
  int consumer_warps;    // that have not left: at 0 nobody empties the ring any more
  int tokens_begun;      // tokens that the consumer warps have begun after the launch's first
  int asked_to_end;      // of block 0: 1 where the host wants no more tokens
  int asked_all_to_end;  // 1 where block 0 has said so
  unsigned first_epoch;  // the epoch of layer 0 in this launch
};

/// Where the heads of q, k and v begin among a token's rows of qkv: head h of q at h * q_step, head g of k at
/// k_first + g * kv_step, head g of v at v_first + g * kv_step.
struct QkvOffsets {
  int q_step, k_first, v_first, kv_step;
};

/// The sizes of the model and of the batch, as the kernel's integers.
struct PersistentDims {
  int hidden, heads, kv_heads, head_dim, half_rotary, intermediate, batch;
  int attention;    // heads * head_dim: the context's elements, which are dense's columns
  int group;        // query heads that share a head of k and v
  int qkv_rows;     // of qkv's matrix
  int rows_of_act;  // of up's matrix for an element of mlp.act: 2 with SwiGLU, else 1
  QkvOffsets qkv_offsets;

  /// `packed`: the layers' weights are packed codes, and their rows are dealt in tiles.
  constexpr LayerRows rows(bool packed = false) const {
    return {.qkv = qkv_rows,
            .act = intermediate,
            .rows_of_act = rows_of_act,
            .out = hidden,
            .together = packed ? kGptqRows : 1};
  }
};

inline PersistentDims persistent_dims(const PersistentModel& m, std::int64_t batch) {
  const ops::QkvHeads qkv{m.heads, m.kv_heads, m.qkv_layout};
  const auto offset = [&](int part, std::int64_t head) { return int(qkv.index(part, head) * m.head_dim); };
  return {.hidden = int(m.hidden_size),
          .heads = int(m.heads),
          .kv_heads = int(m.kv_heads),
          .head_dim = int(m.head_dim),
          .half_rotary = int(m.rotary_dim / 2),
          .intermediate = int(m.intermediate_size),
          .batch = int(batch),
          .attention = int(m.heads * m.head_dim),
          .group = int(m.heads / m.kv_heads),
          .qkv_rows = int((m.heads + 2 * m.kv_heads) * m.head_dim),
          .rows_of_act = m.hidden_act == Activation::swiglu ? 2 : 1,
          .qkv_offsets = {.q_step = offset(0, 1) - offset(0, 0),
                          .k_first = offset(1, 0),
                          .v_first = offset(2, 0),
                          .kv_step = offset(1, 1) - offset(1, 0)}};
}

/// A tile product divides a slice's columns among the consumer warps in lines of 64 columns. A warp has kMaxLines lines
/// at most.
inline constexpr int kLineColumns = 64, kMaxLines = kMaxSliceColumns / kLineColumns / kConsumerWarps;
CF_HD constexpr int warp_lines(int slice_columns) {
  constexpr int columns = kConsumerWarps * kLineColumns;
  return (slice_columns + columns - 1) / columns;
}

/// How many of a block's `rows` rows of mlp.dense_h_to_4h come before attention: as many as fill whole stages, and
/// so whole pairs.
CF_HD constexpr int rows_before_attention(const PersistentPlan& p, int rows) {
  const int unit = is_packed(p.products) ? kGptqRows : kStageSlices;  // a power of two
  return rows * p.up_eighths / 8 & -unit;
}

/// The bytes of the largest stage of packed weights. A stage holds the codes and scales of sixteen rows in one slice.
/// `group_columns` is the size of the smallest group. A slice begins at a multiple of kDigitColumns columns.
constexpr int packed_stage_bytes(int slice_columns, int group_columns) {
  const int ends = kDigitColumns % group_columns ? 2 : 1;  // groups that begin or end in other slices
  return slice_columns * kGptqRows / 2 +
         (slice_columns / (group_columns < kDigitColumns ? group_columns : kDigitColumns) + ends) * kGptqGroupBytes;
}

/// Floats of a partial attention result: the maximum of the scores, the sum of the weights, head_dim weighted values.
CF_HD constexpr int partial_floats(int head_dim) { return head_dim + 2; }
/// Elements of T from one query of a GQA tile to the next. A warp reads eight queries in one access. The padding puts
/// the eight into different banks of shared memory.
CF_HD constexpr int query_stride(int head_dim, int gqa_heads) { return head_dim + (gqa_heads > 1 ? 8 : 0); }
/// Floats from a warp's weighted values of one query to those of the next: head_dim rounded up to a multiple of 16, and
/// the same kind of padding.
CF_HD constexpr int values_stride(int head_dim, int gqa_heads) {
  return (head_dim + 15) / 16 * 16 + (gqa_heads > 1 ? 4 : 0);
}
/// The most partial results of a GQA tile that one block merges. With n splits, the block of split s merges every n-th
/// head of the GQA tile, beginning with head s. Each of these heads has n partial results.
constexpr int merged_partials(const PersistentPlan& p) {
  int most = 0;
  for (int splits = 1; splits <= p.attention_splits; ++splits) {
    const int partials = (p.gqa_heads + splits - 1) / splits * splits;
    most = partials > most ? partials : most;
  }
  return most;
}

/// The offsets of the parts of a block's shared memory, and some sizes, in bytes. Offsets are multiples of 4 or more, as
/// the parts' elements need it, and of 128 from `angles` on.
struct PersistentLayout {
  int barriers;        // two of each stage, then one of each signal; at offset 0, which TileTokens relies on
  int notice;          // BlockNotice
  int layer_pointers;  // (2) LayerPointers: layer l's at index l % 2
  int lengths;         // (batch) kv_len of the launch's first token; kIdleLength where the sequence has ended
  int positions;       // (batch) of the launch's first token
  int newest_pages;    // (batch) the page of the newest entry; in a contiguous cache the sequence
  int ids;             // (batch) the token that is run, where the launch makes whole tokens
  int best;            // (batch) the highest order key among the block's rows of the LM head
  int warp_states;     // (consumer warps, gqa_heads) each warp's maximum and sum of weights
  int best_of_warps;   // (batch, consumer warps) the highest order key among the blocks' that a warp has read; in the
                       // memory of warp_states: attention and the choice of a token never run at once
  int angles;          // (batch, 2, half_rotary) cos, then sin, of the new token's position
  int new_token;       // (gqa_heads, query_stride) q, then (2, head_dim) k and v of a GQA tile's new token
  // At the PartialsIn:
  int warp_values;   // (consumer warps, gqa_heads, values_stride) each warp's weighted values
  int gathered;      // (merged heads, splits, partial_floats) the partial results of the heads that the block merges
  int moments;       // (2, consumer warps) each warp's Welford state
  int norm_weights;  // (2, 2, hidden) gamma and beta of both norms, with shared_norms
  int attn_x;        // (batch, hidden_row) input_layernorm's output, then the context
  int mlp_x;         // (batch, max(hidden_row, act_row)) post_attention_layernorm's output, then mlp.act; attn_x where
                     // mlp.act is in registers: the context has been used then
  int residual;      // (batch, out_rows) a block's rows of dense or down, whichever comes first; the output adds them
  int sums;          // partial sums of the products
  int ring;          // (ring_bytes)

  int hidden_row;  // bytes from one token to the next, of hidden and of the context
  int act_row;     // the same of mlp.act: the whole row of one token, a slice of each of several tokens
  int bytes;       // of all
};

/// A warp's state of a norm (Welford): count, mean, sum of squared deviations.
inline constexpr int kMomentsBytes = 12;
/// A warp's state of a softmax: maximum, sum.
inline constexpr int kSoftmaxStateBytes = 8;
static_assert(kSoftmaxStateBytes == sizeof(std::uint64_t));  // those of an order key
/// The factor of a group's digits, and their sum.
inline constexpr int kDigitScaleBytes = 8;

/// With packed weights: where the DigitScales of the tokens in attn_x and in mlp_x lie, behind mlp_x. The next token's
/// lie `row` bytes further. These are no members of the layout: with two members more nvcc 13.0 spills registers of
/// kernels that do not read them.
struct DigitOffsets {
  int attn, mlp, row, end;
};
constexpr DigitOffsets digit_offsets(const PersistentDims& d, const PersistentPlan& p, const PersistentLayout& l) {
  if (!is_packed(p.products)) return {};
  const int x_row = l.hidden_row > l.act_row ? l.hidden_row : l.act_row;
  const int row = (x_row / 2 / kDigitColumns * kDigitScaleBytes + 127) / 128 * 128, attn = l.mlp_x + d.batch * x_row,
            mlp = attn + d.batch * row;
  return {attn, mlp, row, mlp + d.batch * row};
}

constexpr PersistentLayout persistent_layout(const PersistentDims& d, const PersistentPlan& p, bool of_ranks = false) {
  PersistentLayout l{};
  int end = 0;
  const auto allocate = [&](int bytes, int alignment = 128) {
    const int begin = (end + alignment - 1) / alignment * alignment;
    end = begin + bytes;
    return begin;
  };
  const bool tiles = is_tiled(p.products), packed = is_packed(p.products);
  const int skew = tiles ? 64 : 0;  // the same columns of two tokens lie in different banks
  l.hidden_row = ((d.hidden > d.attention ? d.hidden : d.attention) * 2 + 127) / 128 * 128 + skew;
  l.act_row = p.act_in_registers ? 0 : ((tiles ? p.act_columns : d.intermediate) * 2 + 127) / 128 * 128 + skew;
  const int token_bytes = d.batch * (l.hidden_row > l.act_row ? l.hidden_row : l.act_row);
  const int values_bytes = kConsumerWarps * p.gqa_heads * values_stride(d.head_dim, p.gqa_heads) * 4,
            gathered_bytes = p.attention_splits > 1 ? merged_partials(p) * partial_floats(d.head_dim) * 4 : 0;

  // Small parts lie close together: wasted bytes could cost the ring a stage.
  l.barriers = allocate((2 * kMaxRingStages + kSignals) * 8);
  l.notice = allocate(int(sizeof(BlockNotice) + (of_ranks ? sizeof(RankNotice) : 0)), 8);  // one behind the other
  l.layer_pointers = allocate(2 * int(sizeof(LayerPointers)), 16);
  for (int* words : {&l.lengths, &l.positions, &l.newest_pages, &l.ids}) *words = allocate(d.batch * 4, 4);
  l.best = allocate(d.batch * 8, 8);
  l.warp_states = allocate(kConsumerWarps * (p.gqa_heads > d.batch ? p.gqa_heads : d.batch) * 8, 16);
  l.best_of_warps = l.warp_states;
  l.angles = allocate(d.batch * 2 * d.half_rotary * 4);
  l.new_token = allocate((p.gqa_heads * query_stride(d.head_dim, p.gqa_heads) + 2 * d.head_dim) * 2);
  const auto add_partials = [&] {
    l.warp_values = allocate(values_bytes);
    l.gathered = allocate(gathered_bytes);
  };
  // Places tokens. Where the plan says so, the partial results of attention have the same memory.
  const auto add_tokens = [&](int bytes, PartialsIn at) {
    const int begin = allocate(bytes), end_of_tokens = end;
    if (p.partials_in != at) return begin;
    end = begin;
    add_partials();
    if (end < end_of_tokens) end = end_of_tokens;
    return begin;
  };
  if (p.partials_in == PartialsIn::own) add_partials();
  l.moments = allocate(2 * kConsumerWarps * kMomentsBytes);
  l.norm_weights = allocate(p.shared_norms ? 4 * d.hidden * 2 : 0);
  l.attn_x = add_tokens(tiles ? token_bytes : d.batch * l.hidden_row, PartialsIn::attn_x);
  l.mlp_x = p.act_in_registers ? l.attn_x : add_tokens(token_bytes, PartialsIn::mlp_x);
  allocate(packed ? digit_offsets(d, p, l).end - end : 0);
  l.residual = allocate(p.out_rows * d.batch * 4);
  l.sums = allocate((kConsumerWarps * p.warp_rows + p.shared_sums) * d.batch * (tiles || packed ? 1 : 8) * 4);
  l.ring = allocate(p.ring_bytes);
  l.bytes = (end + 127) / 128 * 128;
  if (!is_rows(p.products)) l.bytes += 512;  // a tile product may load so many bytes beyond a slice's columns
  return l;
}

}  // namespace cf::cuda
