#pragma once
// What the blocks of the persistent kernel say to each other, what the warps of a block say to each other, and the
// order of a layer's phases. Without CUDA.
#include <cstdint>
#include <initializer_list>

#include "core/host_device.hpp"
#include "cuda/persistent/deal.hpp"
#include "cuda/persistent/plan.hpp"

namespace cf::cuda {

/// A float that one block makes for others. Value and tag are stored and loaded in one access, so a reader that sees
/// the tag has the value: no flag, fence or counter is needed. A tag belongs to one layer of one launch.
struct alignas(8) Tagged {
  float value;
  unsigned tag;
};
/// A 16-bit element with a tag: the element's bits below, the lower half of the tag above. Every layer writes all of
/// its elements, so the tag that a reader finds is at most a launch old, and half of a tag is enough.
using TaggedElement = std::uint32_t;
/// An element of the residual stream for the norms, in half of a Tagged's bytes. The upper 24 bits are the float,
/// rounded. The lower 8 bits are the lowest 8 bits of the tag. The relative rounding error is at most 2^-16. That of
/// bfloat16 is at most 2^-8, and that of float16 2^-11. Products that add to the residual stream read the whole float.
using TaggedNormInput = std::uint32_t;
/// Every launch that ends a layer writes all of these words. A layer may take two launches, so a word's tag is at most
/// two launches old. A launch has one tag more than the kernel has layers. Eight bits tell the tags of three launches
/// apart where a kernel has at most kMaxPersistentLayers layers.
static_assert(3 * kMaxPersistentLayers + 1 < 256);

/// What a block waits for: everything of one kind that the other blocks make in one layer. `choice` is of the head: the
/// blocks' best tokens.
enum class Dependency : int { qkv, context, attn_residual, mlp_act, hidden, choice };
inline constexpr int kDependencies = 6;

/// A dependency of a layer as one number above 0.
CF_HD constexpr int dependency_code(int layer, Dependency d) { return layer * kDependencies + int(d) + 1; }
constexpr int layer_of_code(int code) { return (code - 1) / kDependencies; }
constexpr Dependency dependency_of_code(int code) { return Dependency((code - 1) % kDependencies); }

/// What one kind of warps tells another in a block. Each signal has a barrier in shared memory.
enum class Signal : int {
  // From the product warps to the helper warps.
  qkv_done,        // all rows of q, k and v are multiplied: attn_x is free
  up_done,         // all rows of mlp.dense_h_to_4h are multiplied: mlp_x is free
  act_used,        // a slice of mlp.act is in registers: its place is free
  act_used_too,    // a slice of mlp.act in attn_x is in registers; a warp may be one slice ahead of the others
  partials_ready,  // the warps' partial results of a key split are in shared memory
  // From the helper warps to the product warps.
  partials_taken,  // the partial results are merged: their place is free
  context_here,    // the context is in attn_x, or attn_x is free where the product warps fetch the context; the next
                   // layer's pointers are in shared memory
  act_here,        // mlp.act, or a slice of it, is in mlp_x
  act_here_too,    // a slice of mlp.act is in attn_x
  copied,          // from the copy engine to the helper warps: the requested tokens are in shared memory
  norms_here       // from the copy engine to the product warps: gamma and beta are in shared memory
};
inline constexpr int kSignals = 11;
/// How many arrivals complete a phase of a signal's barrier: one of each warp that signals, or of each thread that
/// expects copies.
CF_HD constexpr int arrivals(Signal s) {
  return s < Signal::partials_taken ? kProductWarps : s < Signal::norms_here ? kHelperWarps : 1;
}

/// The phases of a layer. up_first and up_rest are the two parts of mlp.dense_h_to_4h: with a parallel residual neither
/// needs attention, so up_first runs while q, k and v travel from block to block, and up_rest while the context does.
/// The head has one phase: the final norm and the product of the LM head.
enum class Phase : int { qkv, up_first, attention, up_rest, dense, down, head };
inline constexpr int kLayerPhases = 6, kPhases = kLayerPhases + 1;

/// The weight of a phase's product. The LM head's has the place of qkv's. Four bits a phase: kernels ask at the begin
/// of a phase, while other blocks wait.
CF_HD constexpr Weight weight_of(Phase p) { return Weight(0x0321010u >> (4 * int(p)) & 0xf); }
static_assert(weight_of(Phase::qkv) == Weight::qkv && weight_of(Phase::up_first) == Weight::up &&
              weight_of(Phase::up_rest) == Weight::up && weight_of(Phase::dense) == Weight::dense &&
              weight_of(Phase::down) == Weight::down && weight_of(Phase::head) == Weight::qkv);
/// The phase's matrix in tables of dealt matrices.
CF_HD constexpr int matrix_of(Phase p) { return p == Phase::head ? kHeadMatrix : int(weight_of(p)); }

/// The phases of a launch, in order. All warps of a block follow this order, and the ring brings weights and keys in
/// it. Each phase takes four bits of one register, the first phase the lowest four.
struct PhaseOrder {
  unsigned packed = 0;
  int count = 0;

  constexpr PhaseOrder() = default;
  constexpr PhaseOrder(std::initializer_list<Phase> phases) {
    for (Phase p : phases) packed |= unsigned(p) << (4 * count++);
  }
  CF_HD constexpr Phase at(int step) const { return Phase(packed >> (4 * step) & 0xf); }
  CF_HD constexpr Phase final_phase() const { return at(count - 1); }
  constexpr bool contains(Phase p) const {
    for (int step = 0; step < count; ++step)
      if (at(step) == p) return true;
    return false;
  }
};

/// One launch for whole layers.
inline constexpr PhaseOrder kParallelPhases{Phase::qkv,     Phase::up_first, Phase::attention,
                                            Phase::up_rest, Phase::dense,    Phase::down};
inline constexpr PhaseOrder kSequentialPhases{Phase::qkv,      Phase::attention, Phase::dense,
                                              Phase::up_first, Phase::up_rest,   Phase::down};
/// Two launches a layer. With a parallel residual the first has what needs the layer's input alone; in the second, down
/// comes before dense and runs while the context travels from block to block.
inline constexpr PhaseOrder kParallelSplit[2] = {{Phase::qkv, Phase::up_first, Phase::up_rest},
                                                 {Phase::attention, Phase::down, Phase::dense}};
inline constexpr PhaseOrder kSequentialSplit[2] = {{Phase::qkv, Phase::attention, Phase::dense},
                                                   {Phase::up_first, Phase::up_rest, Phase::down}};

/// What the blocks share in device memory. Between launches every member but `launches` is zero.
struct GridState {
  unsigned blocks_left;  // blocks that have left the kernel; the last one to leave clears it
  unsigned stopped;      // not 0 once a wait took too long: all blocks leave
  unsigned launches;     // launches so far; a launch of many tokens counts as one for each
};

}  // namespace cf::cuda
