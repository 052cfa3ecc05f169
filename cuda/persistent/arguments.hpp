#pragma once
// What the persistent kernel is launched with. Without CUDA.
#include <array>
#include <cstdint>

#include "cuda/persistent/deal.hpp"
#include "cuda/persistent/exchange.hpp"
#include "cuda/persistent/layout.hpp"
#include "cuda/persistent/phases.hpp"
#include "cuda/persistent/plan.hpp"

namespace cf::cuda {

/// Where a launch stores the sites' outputs of its final layer, in the shapes of LayerTensors. An output whose pointer
/// is null is not stored.
struct TapPointers {
  void *attn_in, *qkv, *qkv_normed, *q, *k, *v, *context, *attn_residual, *mlp_in, *mlp_act;
};

/// What a launch of whole tokens has beside the layers: the embedding before them, and the head behind them, which is
/// the final norm, the LM head and the greedy choice. The head counts as a layer, whose first norm is the final one
/// and whose matrix in the place of qkv's is the LM head.
struct TokenArguments {
  int count = 0;                   // tokens of the launch; 0 where it runs layers alone
  int vocab = 0;                   // rows of embed_in and of the LM head
  const void* embed_in = nullptr;  // (vocab, hidden)
  void* logits = nullptr;          // (batch, vocab) of the token that was made last

  // A launch of one token reads the sequences' state and leaves it as it is. A launch that chooses leaves the state of
  // the last token that it made. A sequence that has ended is left idle.
  bool chooses = false;
  std::int32_t* ids = nullptr;        // (batch)
  std::int32_t* positions = nullptr;  // (batch)
  std::int32_t* kv_len = nullptr;     // (batch)
  std::int32_t* chosen = nullptr;     // (batch) the tokens chosen last
  // In host memory, with one address for host and device.
  std::uint64_t* made = nullptr;         // (kMadeTokens, kMaxPersistentBatch) see made_token()
  unsigned first_serial = 0;             // of the launch's first token
  const unsigned* end_serial = nullptr;  // tokens from this serial number on are not wanted
};

/// A launch tells the host each choice in one word: the token's serial number above, its id below. Token n has word
/// n % kMadeTokens.
inline constexpr unsigned kMadeTokens = 256;
CF_HD constexpr std::uint64_t made_token(unsigned serial, std::int32_t id) {
  return std::uint64_t(serial) << 32 | std::uint32_t(id);
}

/// The most stop ids of a sequence that a launch looks for.
inline constexpr int kMaxStopIds = 8;
/// An id that is never chosen. It stands for stop ids that a sequence does not have.
inline constexpr std::int32_t kNoStopId = -2;
/// Where a launch that chooses ends a sequence by itself.
struct SequenceEnd {
  int tokens = 0;  // the sequence ends behind so many tokens of the launch
  std::array<std::int32_t, kMaxStopIds> stop_ids{};

  CF_HD constexpr bool stops_at(std::int32_t id) const {
    bool found = false;
    for (std::int32_t stop : stop_ids) found = found || stop == id;
    return found;
  }
};

/// How a product's rows are cut into slices. The struct has 16 bytes: a kernel reads it in one access.
struct alignas(16) ProductShape {
  int columns;
  std::int16_t slice_columns;
  std::int8_t slices;
  std::int8_t together;  // rows of one element
  RingStage stage;

  bool operator==(const ProductShape&) const = default;
};

/// Where a packed matrix's scales and its inputs' columns lie, in bytes from its begin, and which columns share a
/// scale. An input has one column, or two with 8 bits: first all inputs' high codes, then the low ones. All is 0 where
/// the matrix is dense.
struct alignas(16) PackedShape {
  std::int64_t scales;
  std::int64_t input_columns;  // (inputs) int32, each input's column; 0 where column k is input k
  int inputs, columns;
  int groups;         // scales of a row
  int group_columns;  // a multiple of 32

  CF_HD constexpr bool is_packed() const { return columns > 0; }
  /// The group of weights that a column belongs to.
  CF_HD constexpr int group(int column) const { return column / group_columns; }
  bool operator==(const PackedShape&) const = default;
};

using PackedShapes = std::array<PackedShape, kWeights>;  // by Weight

/// The shape of each matrix's product: its columns are what the phase multiplies by.
constexpr std::array<ProductShape, kMatrices> product_shapes(const PersistentDims& d, const PersistentPlan& p,
                                                             const PackedShapes& packed_shapes) {
  std::array<ProductShape, kMatrices> shapes{};
  const auto add = [&](const PhaseSpec& phase) {
    if (phase.is_attention()) return;
    int columns = d.hidden, slice_columns = p.hidden_columns;
    if (phase.input == Input::context) columns = d.attention, slice_columns = p.context_columns;
    if (phase.input == Input::mlp_act) columns = d.intermediate, slice_columns = p.act_columns;
    int stage_bytes = kStageSlices * slice_columns * 2;
    if (phase.matrix != kHeadMatrix && packed_shapes[phase.matrix].is_packed()) {
      const PackedShape& packed = packed_shapes[phase.matrix];
      columns = packed.columns;
      stage_bytes = packed_stage_bytes(slice_columns, packed.group_columns);
    }
    // A product of smaller slices has smaller stages: more of them make the same bytes.
    const int slices = (columns + slice_columns - 1) / slice_columns,
              together = phase.publishes == Dependency::mlp_act ? d.rows_of_act : 1;
    shapes[phase.matrix] = {columns, std::int16_t(slice_columns), std::int8_t(slices), std::int8_t(together),
                            ring_stage(p, stage_bytes)};
  };
  for (const PhaseSpec& phase : kSequentialLayer) add(phase);
  add(kHead);
  return shapes;
}

/// How a layer's weights are stored. A kernel of packed weights takes layers of up to kMaxLayerKinds kinds; the LM head
/// counts as a layer whose weights are dense.
struct LayerKind {
  std::array<ProductShape, kMatrices> shapes;  // by matrix, as LayerDeals::of
  PackedShapes packed;
  // RopePairs of the rows of qkv; 0 where rows keep their order.
  int pairs_head_dim = 0, pairs_rotary = 0, pairs_turned_heads = 0;

  bool operator==(const LayerKind&) const = default;
};
inline constexpr int kMaxLayerKinds = 8;

/// Where the entries of a cache in pages lie, as PagedCacheView says. A contiguous cache has no table: all entries of a
/// sequence are in one page, whose number is the sequence's.
struct PersistentPages {
  const std::int32_t* table = nullptr;  // (batch, of_sequence)
  int of_sequence = 1;                  // pages that a sequence may have
  int entries = 0;                      // of a page
  Divisor by_entries{};                 // without a table every quotient is 0
};

/// Layers are numbered from 0, as PersistentKernel::create() gets them.
struct PersistentArguments {
  PersistentPlan plan;
  PersistentLayout layout;
  PersistentDims dims;
  int capacity;    // entries of a sequence's cache
  int table_rows;  // rows of cos and sin
  LayerDeals deals;
  float attention_scale, eps;
  bool rms_norm;
  Activation activation;

  PhaseTable phases = {};
  // With several tokens: the slices of mlp.act lie in mlp_x and attn_x in turn, not in mlp_x alone.
  bool two_act_buffers = false;
  bool continues = false;       // the second launch of a layer, which reads the first one's epochs
  int layers = 0;               // all that launches may run; a token has one epoch more than these
  int head_layer = -1;          // the number of the head, behind the last layer; -1 where there is none
  int first_layer = 0;          // of the launch
  int end_layer = 0;            // one past the launch's final layer
  const void* input = nullptr;  // (batch, hidden), or null: the residual stream of the launch before
  void* output = nullptr;       // (batch, hidden)

  const std::int32_t* positions = nullptr;     // (batch)
  const std::int32_t* kv_len = nullptr;        // (batch)
  const float *cos = nullptr, *sin = nullptr;  // (table_rows, half_rotary)

  Exchange exchange = {};            // in scratch memory
  std::uint16_t* no_beta = nullptr;  // (hidden) of RMSNorm: zeros, which nobody writes

  TokenArguments token = {};

  unsigned* report = nullptr;       // in host memory: the dependency_code() of what did not come in time; 0 for none
  std::uint64_t wait_limit_ns = 0;  // how long a block waits for others
  TapPointers taps = {};            // for tests
  unsigned delay_seed = 0;          // for tests: the seed of the blocks' random delays; 0 for none
  int withheld = 0;                 // for tests: the dependency_code() of what no block publishes; 0 for none

  // The pointers of first_layer are arguments, so that a block has them when it begins. Those of the other layers lie
  // in device memory and are loaded one layer ahead.
  LayerPointers first_pointers = {};
  const LayerPointers* layer_pointers = nullptr;  // (layers) in device memory

  /// The index in `phases` of a layer's first phase.
  CF_HD constexpr int first_phase(int layer) const { return layer == head_layer ? kLayerPhases : 0; }

  DigitOffsets digit_offsets = {};                                  // of packed weights
  std::array<LayerKind, kMaxLayerKinds> kinds = {};                 // by LayerPointers::kind; kind 0 is dense
  std::array<SequenceEnd, kMaxPersistentBatch> sequence_ends = {};  // of a launch that chooses
  PersistentPages pages = {};
  RankExchange ranks = {};  // of a kernel on ranks
};

}  // namespace cf::cuda
