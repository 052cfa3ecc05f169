#pragma once
// The phases of a layer as data: a table for each kind of residual, and the head. The three kinds of warps of a block
// and the host's plan read these tables; nothing else says what a phase does. Without CUDA.
#include <array>

#include "core/host_device.hpp"
#include "cuda/persistent/deal.hpp"
#include "cuda/persistent/exchange.hpp"
#include "cuda/persistent/plan.hpp"

namespace cf::cuda {

/// The phases by name. up_first and up_rest are the two parts of mlp.dense_h_to_4h: with a parallel residual neither
/// needs attention, so up_first runs while q, k and v travel from block to block, and up_rest while the context does.
/// The head is a layer of one phase: the final norm and the product of the LM head.
enum class Phase : unsigned { qkv, up_first, attention, up_rest, dense, down, head };
inline constexpr int kLayerPhases = 6, kPhases = kLayerPhases + 1;

/// Which of its rows of a matrix a block multiplies in a phase: all; those before attention, or those behind it
/// (rows_before_attention()); or all, in parts of up to head_rows.
enum class PhaseRows : unsigned { all, before_attention, behind_attention, in_parts };
/// The norms that a phase begins with, a bit each. The first one is input_layernorm or the final norm, the second one
/// post_attention_layernorm.
enum class Norms : unsigned { none = 0, first = 1, second = 2, both = 3 };
/// The activations that a phase multiplies by. The first two lie in attn_x, the others in mlp_x.
enum class Input : unsigned { first_norm, context, second_norm, mlp_act };
CF_HD constexpr bool is_in_mlp_x(Input i) { return i >= Input::second_norm; }
/// Who fetches the context or mlp.act to the block. each_consumer: each consumer warp loads its own slice to registers.
enum class Fetcher : unsigned { auxiliary, consumer, each_consumer };
/// What a phase adds to its products beside the bias.
enum class Residuals : unsigned { none, input, attn_residual };
/// Which shared memory a phase frees: the consumer warps tell the auxiliary warps that they have read it.
enum class Frees : unsigned { none, attn_x, mlp_x };

/// A phase. All warps of a block go through a layer's phases in one order.
struct PhaseSpec {
  static constexpr unsigned kNoMatrix = kMatrices;

  Phase phase : 3 = Phase::qkv;
  unsigned matrix : 3 = kNoMatrix;  // whose rows the block multiplies: a Weight, kHeadMatrix, or none in attention
  PhaseRows rows : 2 = PhaseRows::all;
  Norms norms : 2 = Norms::none;
  Input input : 2 = Input::first_norm;
  Dependency awaits : 3 = Dependency::none;  // what the phase needs of other blocks
  Fetcher fetched_by : 2 = Fetcher::auxiliary;
  // What the auxiliary warps bring at this step of theirs: the context or mlp.act. If the consumer warps fetch the
  // context, the auxiliary warps tell them here that its place is free.
  Dependency brings : 3 = Dependency::none;
  Residuals adds : 2 = Residuals::none;
  unsigned adds_kept : 1 = 0;                   // adds the rows that an earlier phase has kept
  Dependency publishes : 3 = Dependency::none;  // what it makes for other blocks; none: the block keeps its rows
  Frees frees : 2 = Frees::none;
  unsigned norms_heads : 1 = 0;  // of attention: RMSNorm of each head of q and of k, before RoPE
  unsigned is_last : 1 = 0;      // of the launch's phases of a layer

  CF_HD constexpr bool is_attention() const { return matrix == kNoMatrix; }
  /// Whose pointers, bias and kind of storage the phase has. The LM head has qkv's place in LayerPointers.
  CF_HD constexpr Weight weight() const { return Weight(matrix % kWeights); }
};
static_assert(sizeof(PhaseSpec) == 4, "a warp loads a phase in one access");
/// Whether a phase multiplies by the context or by mlp.act, which other blocks have made and no norm changes.
constexpr bool is_fetched(const PhaseSpec& p) { return p.input == Input::context || p.input == Input::mlp_act; }
static_assert(Weight(kHeadMatrix % kWeights) == Weight::qkv);

/// A layer of several tokens in one launch. Attention's dependencies are hidden: what a phase needs of other blocks,
/// but for the hidden state, is made two phases earlier.
inline constexpr std::array<PhaseSpec, kLayerPhases> kParallelLayer{{
    {.phase = Phase::qkv,
     .matrix = unsigned(Weight::qkv),
     .norms = Norms::both,
     .input = Input::first_norm,
     .awaits = Dependency::hidden,
     .publishes = Dependency::qkv,
     .frees = Frees::attn_x},
    {.phase = Phase::up_first,
     .matrix = unsigned(Weight::up),
     .rows = PhaseRows::before_attention,
     .input = Input::second_norm,
     .publishes = Dependency::mlp_act},
    {.phase = Phase::attention, .awaits = Dependency::qkv, .publishes = Dependency::context},
    {.phase = Phase::up_rest,
     .matrix = unsigned(Weight::up),
     .rows = PhaseRows::behind_attention,
     .input = Input::second_norm,
     .publishes = Dependency::mlp_act,
     .frees = Frees::mlp_x},
    {.phase = Phase::dense,
     .matrix = unsigned(Weight::dense),
     .input = Input::context,
     .awaits = Dependency::context,
     .brings = Dependency::context,
     .adds = Residuals::input},
    {.phase = Phase::down,
     .matrix = unsigned(Weight::down),
     .input = Input::mlp_act,
     .awaits = Dependency::mlp_act,
     .brings = Dependency::mlp_act,
     .adds_kept = 1,
     .publishes = Dependency::hidden},
}};
inline constexpr std::array<PhaseSpec, kLayerPhases> kSequentialLayer{{
    {.phase = Phase::qkv,
     .matrix = unsigned(Weight::qkv),
     .norms = Norms::first,
     .input = Input::first_norm,
     .awaits = Dependency::hidden,
     .publishes = Dependency::qkv,
     .frees = Frees::attn_x},
    {.phase = Phase::attention, .awaits = Dependency::qkv, .publishes = Dependency::context},
    {.phase = Phase::dense,
     .matrix = unsigned(Weight::dense),
     .input = Input::context,
     .awaits = Dependency::context,
     .brings = Dependency::context,
     .adds = Residuals::input,
     .publishes = Dependency::attn_residual},
    {.phase = Phase::up_first,
     .matrix = unsigned(Weight::up),
     .rows = PhaseRows::before_attention,
     .norms = Norms::second,
     .input = Input::second_norm,
     .awaits = Dependency::attn_residual,
     .publishes = Dependency::mlp_act},
    {.phase = Phase::up_rest,
     .matrix = unsigned(Weight::up),
     .rows = PhaseRows::behind_attention,
     .input = Input::second_norm,
     .publishes = Dependency::mlp_act,
     .frees = Frees::mlp_x},
    {.phase = Phase::down,
     .matrix = unsigned(Weight::down),
     .input = Input::mlp_act,
     .awaits = Dependency::mlp_act,
     .brings = Dependency::mlp_act,
     .adds = Residuals::attn_residual,
     .publishes = Dependency::hidden},
}};
inline constexpr PhaseSpec kHead{.phase = Phase::head,
                                 .matrix = kHeadMatrix,
                                 .rows = PhaseRows::in_parts,
                                 .norms = Norms::first,
                                 .input = Input::first_norm,
                                 .awaits = Dependency::hidden,
                                 .publishes = Dependency::choice,
                                 .is_last = 1};

/// What a launch runs of a layer. The halves are of two launches a layer: with a parallel residual the first has what
/// needs the layer's input alone; in the second, down comes before dense and runs while the context travels.
enum class LayerPart { whole, first_half, second_half };

/// A launch's phases of a layer, in order, up to the one that is_last; then the head, at kLayerPhases.
using PhaseTable = std::array<PhaseSpec, kPhases>;

/// What a table of phases depends on.
struct PhaseTraits {
  bool parallel_residual = false;
  bool tiled = false;             // of several tokens, which come to the block by the copy engine
  bool act_in_registers = false;  // PersistentPlan::act_in_registers
  bool head_norm = false;         // of a sequential residual
  bool adds_residual = true;      // the rank does, not another one
};

/// The phases of a launch.
constexpr PhaseTable phase_table(const PhaseTraits& traits, LayerPart part = LayerPart::whole) {
  const auto [parallel_residual, tiled, act_in_registers, head_norm, adds_residual] = traits;
  std::array<PhaseSpec, kLayerPhases> layer = parallel_residual ? kParallelLayer : kSequentialLayer;
  for (PhaseSpec& p : layer)
    if (p.is_attention()) p.norms_heads = head_norm;
  if (!adds_residual)
    for (PhaseSpec& p : layer) p.adds = Residuals::none;
  // The consumer warps have no other work while they wait in a layer with a sequential residual. They are more threads
  // than the auxiliary warps, so more loads are in flight at once.
  if (!parallel_residual && !tiled)
    for (PhaseSpec& p : layer) {
      if (p.input == Input::context) p.fetched_by = Fetcher::consumer;
      if (p.frees == Frees::mlp_x) p.frees = Frees::none;
      if (p.input != Input::mlp_act) continue;
      p.fetched_by = act_in_registers ? Fetcher::each_consumer : Fetcher::consumer;
      p.brings = Dependency::none;
    }
  const auto of = [&](Phase name) {
    for (const PhaseSpec& p : layer)
      if (p.phase == name) return p;
    return kHead;
  };
  PhaseTable table{};
  int count = 0;
  const auto add = [&](const PhaseSpec& p) { table[std::size_t(count++)] = p; };
  if (part == LayerPart::whole) {
    for (const PhaseSpec& p : layer) add(p);
  } else if (!parallel_residual) {
    for (int i = 0; i < kLayerPhases / 2; ++i)
      add(layer[std::size_t(part == LayerPart::first_half ? i : i + kLayerPhases / 2)]);
  } else if (part == LayerPart::first_half) {
    for (Phase p : {Phase::qkv, Phase::up_first, Phase::up_rest}) add(of(p));
  } else {
    PhaseSpec attention = of(Phase::attention), down = of(Phase::down), dense = of(Phase::dense);
    // The launch finds mlp.act complete. One token's is fetched before the context is merged.
    if (!tiled) attention.brings = down.brings, down.brings = Dependency::none;
    dense.publishes = down.publishes, down.publishes = Dependency::none;
    dense.adds_kept = down.adds_kept, down.adds_kept = 0;
    add(attention), add(down), add(dense);
  }
  table[std::size_t(count - 1)].is_last = 1;
  table[kLayerPhases] = kHead;
  return table;
}

/// Whether mlp.act of several tokens may use the context's place too: not where the context comes after mlp.act.
constexpr bool has_two_act_buffers(const PhaseTable& table) {
  for (int i = 0, after_act = 0; i < kLayerPhases; ++i) {
    if (after_act && table[std::size_t(i)].input == Input::context) return false;
    after_act = after_act || table[std::size_t(i)].input == Input::mlp_act;
    if (table[std::size_t(i)].is_last) break;
  }
  return true;
}

/// Whether kernels of these products run a phase for which `is` holds. Row products have kernels for each kind of
/// residual, the other kernels run both.
template <Products Kind, class Is>
constexpr bool any_phase(Is is) {
  for (const bool parallel : {true, false})
    for (const bool act_in_registers : {false, true}) {
      if (is_rows(Kind) && parallel != (Kind == Products::rows)) continue;
      if (act_in_registers && !is_rows(Kind)) continue;
      const PhaseTraits traits{parallel, is_tiled(Kind), act_in_registers, /*head_norm=*/!parallel};
      for (const PhaseSpec& p : phase_table(traits))
        if (is(p)) return true;
    }
  return false;
}
/// What the kernels of some products need code for.
template <Products Kind>
struct PhaseCode {
  static constexpr bool both_norms = any_phase<Kind>([](const PhaseSpec& p) { return p.norms == Norms::both; });
  static constexpr bool kept_rows = any_phase<Kind>([](const PhaseSpec& p) { return p.adds_kept != 0; });
  static constexpr bool attn_residual =
      any_phase<Kind>([](const PhaseSpec& p) { return p.publishes == Dependency::attn_residual; });
  static constexpr bool auxiliary_fetches =
      any_phase<Kind>([](const PhaseSpec& p) { return is_fetched(p) && p.fetched_by == Fetcher::auxiliary; });
  static constexpr bool consumers_fetch =
      any_phase<Kind>([](const PhaseSpec& p) { return is_fetched(p) && p.fetched_by != Fetcher::auxiliary; });
  static constexpr bool head_norm = any_phase<Kind>([](const PhaseSpec& p) { return p.norms_heads != 0; });
  static constexpr bool act_in_registers =
      any_phase<Kind>([](const PhaseSpec& p) { return p.fetched_by == Fetcher::each_consumer; });

  /// Whether the consumer warps fetch what the phase multiplies by.
  static CF_HD constexpr bool fetched_by_consumers(const PhaseSpec& p) {
    return consumers_fetch && (!auxiliary_fetches || p.fetched_by != Fetcher::auxiliary);
  }
};

}  // namespace cf::cuda
