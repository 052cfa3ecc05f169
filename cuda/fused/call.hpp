#pragma once
// What the persistent kernel is launched with. Private to cuda.
#include <cstdint>

#include "core/layer.hpp"
#include "core/model_config.hpp"
#include "cuda/decode_stack.hpp"
#include "cuda/fused/deal.hpp"

namespace cf::cuda {

/// What blocks make for each other goes through device memory with a tag, which no other layer and launch has, in one
/// access: who reads the tag has the value that was stored with it, and needs no flag, fence or counter.
struct alignas(8) Tagged {
  float value;
  unsigned tag;
};
/// The same of a 16-bit element: its bits below, the lower half of the tag above. Every layer writes all of what it
/// passes on, so that an old tag is no older than a launch. What several tokens have most of, the context and mlp.act,
/// goes without tags, half as large, for the copy engine; there a word says when a head's or a block's part is done.
using TaggedElement = std::uint32_t;

/// What a block of the kernel waits for in the work of the others: everything of one kind in one layer.
enum class Dependency : int { qkv, context, attn_residual, mlp_act, hidden };
inline constexpr int kDependencies = 5;

/// What a block's warps tell each other. The products' warps tell: attn_x is free, mlp_x is, a piece of mlp.act is used up,
/// the warps' shares of a part of a head are there. The helpers tell: those are taken, the context is there, a piece of
/// mlp.act is, in either of its places. Copies tell that the norms' weights are there, and what the helpers asked for.
enum class Signal : int {
  qkv_done,
  up_done,
  act_used,
  part_done,
  part_taken,
  context_here,
  act_here,
  act_here_too,
  copied,
  norm_here
};
inline constexpr int kSignals = 10;
CF_HD constexpr int tellers(Signal s) {
  return s < Signal::part_taken ? kProductWarps : s < Signal::norm_here ? kHelperWarps : 1;
}

/// What a layer does one after the other, and the ring brings one after the other. In a parallel residual the MLP's first
/// product needs no attention: a part of it hides what q, k and v take from block to block, the rest what the context does.
enum class Phase : int { qkv, up_first, attention, up_rest, dense, down };
inline constexpr int kPhases = 6;
/// The phases of a launch.
struct PhaseOrder {
  unsigned phases;  // four bits each, the first lowest
  int count;

  CF_HD constexpr Phase at(int step) const { return Phase(phases >> (4 * step) & 0xf); }
  CF_HD constexpr Phase last() const { return at(count - 1); }
  CF_HD constexpr bool has(Phase p) const {
    for (int step = 0; step < count; ++step)
      if (at(step) == p) return true;
    return false;
  }
};
/// Of a layer.
inline constexpr PhaseOrder kParallelPhases{0x543210, 6}, kSequentialPhases{0x531420, 6};
/// The same layers in two launches. A parallel residual's first takes what needs the layer's input alone; in its second
/// down comes before dense and hides what the context takes from block to block.
inline constexpr PhaseOrder kParallelHalves[2] = {{0x310, 3}, {0x452, 3}},
                            kSequentialHalves[2] = {{0x420, 3}, {0x531, 3}};

/// The blocks' common memory. Between launches all zero but for the count: the last block to leave cleans up.
struct DecodeFlags {
  unsigned left;      // blocks that are done
  unsigned stopped;   // a wait took too long: all blocks leave
  unsigned launches;  // so far, never reset
};

/// A model's and a stack's sizes, as the kernel counts.
struct DecodeDims {
  int hidden, heads, head_dim, half_rotary, intermediate, batch, capacity, table_rows;
};

inline DecodeDims decode_dims(const ModelConfig& m, std::int64_t batch, std::int64_t capacity,
                              std::int64_t table_rows) {
  return {.hidden = int(m.hidden_size),
          .heads = int(m.num_attention_heads),
          .head_dim = int(m.head_dim()),
          .half_rotary = int(m.rotary_dim / 2),
          .intermediate = int(m.intermediate_size),
          .batch = int(batch),
          .capacity = int(capacity),
          .table_rows = int(table_rows)};
}

/// Where tokens are several, each of the products' warps has so many lines of a slice's columns, at most.
inline constexpr int kLineColumns = 64, kMaxLines = kMaxSliceColumns / kLineColumns / kProductWarps;
CF_HD constexpr int warp_lines(int slice_columns) {
  constexpr int columns = kProductWarps * kLineColumns;
  return (slice_columns + columns - 1) / columns;
}

/// Of the rows of the MLP's first product so many come before attention: whole stages of single rows.
CF_HD constexpr int first_rows(const DecodeStackPlan& p, int rows) {
  return rows * p.up_eighths / 8 / kStageSlices * kStageSlices;
}

/// Floats of a part of a head: its maximum, the sum of its weights, its weighted values.
CF_HD constexpr int floats_a_part(int head_dim) { return head_dim + 2; }

/// Where what lies in a block's shared memory, in bytes.
struct DecodeLayout {
  int barriers, notice, lengths, angles, fresh, values, states, gathered, inbox, moments, norm_weights, attn_x, mlp_x,
      residual, sums, ring, bytes;
  int inbox_bytes;
  int hidden_row, act_row;  // from one token to the next, of hidden and of what there is of mlp.act at once
};

CF_HD constexpr DecodeLayout decode_layout(const DecodeDims& d, const DecodeStackPlan& p) {
  DecodeLayout l{};
  int at = 0;
  const auto place = [&](int bytes) {
    const int begin = at;
    at += (bytes + 127) / 128 * 128;
    return begin;
  };
  const int skew = p.narrow_columns ? 0 : 64;  // the same columns of two tokens lie in different banks
  l.hidden_row = (d.hidden * 2 + 127) / 128 * 128 + skew;
  // Of one token mlp.act lies in shared memory whole, of several slice by slice.
  l.act_row = ((p.narrow_columns ? d.intermediate : p.act_columns) * 2 + 127) / 128 * 128 + skew;
  l.barriers = place((2 * p.stages + kSignals) * 8);
  l.notice = place(16);
  l.lengths = place(d.batch * 4);
  l.angles = place(d.batch * 2 * d.half_rotary * 4);  // cos, then sin, of each sequence's new position
  l.fresh = place(3 * d.head_dim * 2);                // q, k and v of a head's new token
  l.values = place(kProductWarps * ((d.head_dim + 15) / 16 * 16) * 4);
  l.states = place(kProductWarps * 8);
  l.gathered = place(p.attention_splits > 1 ? p.attention_splits * floats_a_part(d.head_dim) * 4 : 0);
  // What the other blocks of a cluster send: apart for each part that the block has in a layer.
  const int parts = (d.batch * d.heads * p.attention_splits + p.grid - 1) / p.grid;
  l.inbox_bytes = p.cluster_merge ? parts * p.attention_splits * floats_a_part(d.head_dim) * int(sizeof(Tagged)) : 0;
  l.inbox = place(l.inbox_bytes);
  l.moments = place(2 * kProductWarps * 12);
  l.norm_weights = place(p.shared_norms ? 4 * d.hidden * 2 : 0);  // gamma and beta of both norms
  const int token_bytes = d.batch * (l.hidden_row > l.act_row ? l.hidden_row : l.act_row);
  l.attn_x = place(p.narrow_columns ? d.batch * l.hidden_row : token_bytes);
  l.mlp_x = place(token_bytes);
  l.residual = place(p.out_rows * d.batch * 4);
  l.sums = place((kProductWarps * p.own_rows + p.sums) * d.batch * (p.narrow_columns ? 8 : 1) * 4);
  l.ring = place(p.stages * p.stage_bytes);
  l.bytes = at + 512;  // what is loaded of a slice's last columns may lie beyond them
  return l;
}

/// Pointers of one layer; those of the next lie `layer_stride` bytes on.
struct LayerPointers {
  const char *gamma[2], *beta[2];   // input_layernorm, post_attention_layernorm
  const char *weight[4], *bias[4];  // by Weight; a bias may be null
  char *k_cache, *v_cache;
};

/// Where the last layer's sites go that leave no trace otherwise, as LayerTensors has them; null for nowhere.
struct DecodeTaps {
  void *attn_in, *qkv, *q, *k, *v, *context, *attn_residual, *mlp_in, *act;
};

struct DecodeCall {
  DecodeStackPlan plan;
  DecodeLayout layout;
  DecodeDims dims;
  LayerDeals deals;
  float scale, eps;
  bool parallel_residual, gelu_tanh;
  PhaseOrder phases;
  bool alternates;  // slices of mlp.act lie where the context was too: every second one of several tokens'
  bool continues;   // the layer that the launch before began, by the tags of that launch
  LayerPointers first_layer;
  long layer_stride;
  int layers;                          // of the stack
  int first, last;                     // layers of the launch
  const void* input;                   // (batch, hidden), or null: hidden[first % 2] is there already
  void* output;                        // (batch, hidden)
  Tagged* hidden[2];                   // (batch, hidden): layer l reads hidden[l % 2]
  Tagged* attn_residual;               // (batch, hidden), for a sequential residual's second norm
  TaggedElement *qkv, *context, *act;  // as LayerTensors has them; of several tokens the last two are plain elements
  unsigned *context_done, *act_done;   // of several tokens: each head's tag, each block's
  Tagged* parts;                       // (batch, heads, attention_splits, floats_a_part)
  DecodeFlags* flags;
  unsigned* report;  // in host memory: the dependency that was not met, 0 for none
  const std::int32_t *positions, *kv_len;
  const float *cos, *sin;
  std::uint64_t wait_limit_ns;
  DecodeTaps taps;
  unsigned delay_seed;  // for tests: blocks dawdle at random; 0 for not
  int withheld;         // for tests: what no block publishes, as in `report`
};

}  // namespace cf::cuda
