#pragma once
// What the persistent kernel is launched with. Private to cuda.
#include <cstdint>

#include "core/layer.hpp"
#include "cuda/decode_stack.hpp"
#include "cuda/fused/deal.hpp"

namespace cf::cuda {

/// A value with a tag, in one access: who reads the tag has the value that was stored with it.
struct alignas(8) Tagged {
  float value;
  unsigned tag;
};

/// What a block of the kernel waits for in the work of the others: everything of one kind in one layer.
enum class Dependency : int { qkv, context, attn_residual, mlp_act, hidden };
inline constexpr int kDependencies = 5;

/// What a block's warps tell each other. The products' warps tell: q, k and v are done, mlp.act is done, a part of mlp.act in
/// shared memory is used up. The helpers tell: the context, a part of mlp.act is in shared memory.
enum class Signal : int { qkv_done, act_done, act_used, context_here, act_here };
inline constexpr int kSignals = 5;

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

/// Where what lies in a block's shared memory, in bytes.
struct DecodeLayout {
  int barriers, notice, lengths, angles, fresh, values, states, moments, attn_x, mlp_x, sums, cache, ring, bytes;
  int hidden_row, act_row;  // from one token to the next, of hidden and of the resident slices of mlp.act
};

CF_HD constexpr DecodeLayout decode_layout(const DecodeDims& d, const DecodeStackPlan& p) {
  DecodeLayout l{};
  int at = 0;
  const auto place = [&](int bytes) {
    const int begin = at;
    at += (bytes + 127) / 128 * 128;
    return begin;
  };
  l.hidden_row = (d.hidden * 2 + 127) / 128 * 128;
  l.act_row = (d.intermediate / p.act_slices * p.act_resident * 2 + 127) / 128 * 128;
  l.barriers = place((2 * p.stages + p.cache_stages + kSignals) * 8);
  l.notice = place(16);
  l.lengths = place(d.batch * 4);
  l.angles = place(d.batch * 2 * d.half_rotary * 4);  // cos, then sin, of each sequence's new position
  l.fresh = place(3 * d.head_dim * 2);                // q, k and v of a head's new token
  l.values = place(kHelperWarps * (d.head_dim + 15) / 16 * 16 * 4);
  l.states = place(kHelperWarps * 8);
  l.moments = place(2 * kProductWarps * 12);
  l.attn_x = place(d.batch * l.hidden_row);
  l.mlp_x = place(d.batch * (l.hidden_row > l.act_row ? l.hidden_row : l.act_row));
  l.sums = place(p.sums * d.batch * (p.narrow_columns ? 8 : 1) * 4);
  l.cache = place(p.cache_stages * p.cache_keys * d.head_dim * 4);
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
  void *attn_in, *q, *k, *v, *attn_residual, *mlp_in;
};

struct DecodeCall {
  DecodeStackPlan plan;
  DecodeLayout layout;
  DecodeDims dims;
  LayerDeals deals;
  float scale, eps;
  bool parallel_residual, gelu_tanh;
  LayerPointers first_layer;
  long layer_stride;
  int layers;                 // of the stack
  int first, last;            // layers of the launch
  const void* input;          // (batch, hidden), or null: hidden[first % 2] is there already
  void* output;               // (batch, hidden)
  Tagged* hidden[2];          // (batch, hidden): layer l reads hidden[l % 2]
  float* attn_residual;       // (batch, hidden)
  void *qkv, *context, *act;  // as LayerTensors has them
  float* splits;              // (batch * heads * attention_splits, head_dim + 2)
  unsigned* arrivals;         // (batch * heads): splits that are done
  unsigned* done;             // (layers, kDependencies): parts that are done
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
