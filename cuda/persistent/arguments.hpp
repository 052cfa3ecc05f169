#pragma once
// What the persistent kernel is launched with. Without CUDA.
#include <array>
#include <cstdint>

#include "cuda/persistent/deal.hpp"
#include "cuda/persistent/layout.hpp"
#include "cuda/persistent/plan.hpp"
#include "cuda/persistent/protocol.hpp"

namespace cf::cuda {

/// Where a launch stores the sites' outputs of its final layer, in the shapes of LayerTensors. An output whose pointer
/// is null is not stored.
struct TapPointers {
  void *attn_in, *qkv, *q, *k, *v, *context, *attn_residual, *mlp_in, *mlp_act;
};

/// What a launch of whole tokens has beside the layers: the embedding before them, and the head behind them, which is
/// the final norm, the LM head and the greedy choice. The head counts as a layer, whose first norm is the final one
/// and whose matrix in the place of qkv's is the LM head.
struct TokenArguments {
  int count = 0;                   // tokens of the launch; 0 where it runs layers alone
  int vocab = 0;                   // rows of embed_in and of the LM head
  const void* embed_in = nullptr;  // (vocab, hidden)
  void* logits = nullptr;          // (batch, vocab) of the token that was made last
  Tagged* candidates = nullptr;    // (grid, batch, 2) a block's highest order key, its halves as floats; then (2) of
                                   // block 0: whether the launch ends

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

/// A launch tells the host each choice in one word: the token's serial number above, its id below. Token n has place
/// n % kMadeTokens.
inline constexpr unsigned kMadeTokens = 256;
CF_HD constexpr std::uint64_t made_token(unsigned serial, std::int32_t id) {
  return std::uint64_t(serial) << 32 | std::uint32_t(id);
}

/// The most stop ids of a sequence that a launch looks for.
inline constexpr int kMaxStopIds = 8;
/// An id that is never chosen. It fills the places of stop ids that a sequence does not have.
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

/// Where a packed matrix's scales and its inputs' places lie, in bytes from its begin, and which columns share a scale.
/// An input has one column, or two with 8 bits: first all inputs' high codes, then the low ones. All is 0 where the
/// matrix is dense.
struct alignas(16) PackedShape {
  std::int64_t scales, places;  // (inputs) int32, each input's column; `places` is 0 where column k is input k
  int inputs, columns;
  int groups;         // scales of a row
  int group_columns;  // a multiple of 32

  CF_HD constexpr bool is_packed() const { return columns > 0; }
  /// The group of weights that a column belongs to.
  CF_HD constexpr int group(int column) const { return column / group_columns; }
  bool operator==(const PackedShape&) const = default;
};

using PackedShapes = std::array<PackedShape, kWeights>;  // by Weight

constexpr std::array<ProductShape, kMatrices> product_shapes(const PersistentDims& d, const PersistentPlan& p,
                                                             const PackedShapes& packed_shapes) {
  const auto shape = [&](int matrix, int columns, int slice_columns, int together) {
    int stage_bytes = kStageSlices * slice_columns * 2;
    if (matrix != kHeadMatrix && packed_shapes[std::size_t(matrix)].is_packed()) {
      const PackedShape& packed = packed_shapes[std::size_t(matrix)];
      columns = packed.columns;
      stage_bytes = packed_stage_bytes(slice_columns, packed.group_columns);
    }
    // A product of smaller slices has smaller stages: more of them make the same bytes.
    const int slices = (columns + slice_columns - 1) / slice_columns;
    return ProductShape{columns, std::int16_t(slice_columns), std::int8_t(slices), std::int8_t(together),
                        ring_stage(p, stage_bytes)};
  };
  return {shape(int(Weight::qkv), d.hidden, p.hidden_columns, 1),
          shape(int(Weight::up), d.hidden, p.hidden_columns, d.rows_of_act),
          shape(int(Weight::dense), d.attention, p.context_columns, 1),
          shape(int(Weight::down), d.intermediate, p.act_columns, 1),
          shape(kHeadMatrix, d.hidden, p.hidden_columns, 1)};
}

/// How a layer's weights are stored. A kernel of packed weights takes layers of up to kMaxLayerKinds kinds; the LM head
/// counts as a layer whose weights are dense.
struct LayerKind {
  std::array<ProductShape, kMatrices> shapes;  // by matrix, as LayerDeals::of
  PackedShapes packed;
  // RopePairs of the rows of qkv; 0 where rows keep their places.
  int pairs_head_dim = 0, pairs_rotary = 0, pairs_turned_heads = 0;

  bool operator==(const LayerKind&) const = default;
};
inline constexpr int kMaxLayerKinds = 8;

/// Layers are numbered from 0, as PersistentKernel::create() gets them.
struct PersistentArguments {
  PersistentPlan plan;
  PersistentLayout layout;
  PersistentDims dims;
  int capacity;    // entries of a sequence's cache
  int table_rows;  // rows of cos and sin
  LayerDeals deals;
  float attention_scale, eps;
  bool parallel_residual, rms_norm;
  Activation activation;

  PhaseOrder phases = {};
  // With several tokens: the slices of mlp.act lie in mlp_x and attn_x in turn, not in mlp_x alone.
  bool two_act_places = false;
  // Whether the product warps fetch the context and mlp.act, with one token and a sequential residual. They have no
  // other work meanwhile. They are more threads than the helper warps, so more loads are in flight at once.
  bool product_warps_fetch = false;
  bool continues = false;       // the second launch of a layer, which reads the first one's tags
  int layers = 0;               // all that launches may run; a token has one tag more than these
  int head_layer = -1;          // the number of the head, behind the last layer; -1 where there is none
  int first_layer = 0;          // of the launch
  int end_layer = 0;            // one past the launch's final layer
  const void* input = nullptr;  // (batch, hidden), or null: the residual stream of the launch before
  void* output = nullptr;       // (batch, hidden)

  const std::int32_t* positions = nullptr;     // (batch)
  const std::int32_t* kv_len = nullptr;        // (batch)
  const float *cos = nullptr, *sin = nullptr;  // (table_rows, half_rotary)

  // Scratch memory, through which blocks hand each other results. With several tokens the elements of context and
  // mlp_act have no tags: context_done and act_done say when they are complete, and the copy engine then fetches them.
  Tagged* hidden[2] = {};          // (batch, hidden): layer l reads hidden[l % 2]
  float* attn_residual = nullptr;  // (batch, hidden), of a sequential residual; who reads an element has made it
  // (batch, hidden) The elements of `hidden` and of attn_residual, as the norms read them. One norm_hidden is enough
  // for all layers: no block ends a layer before all blocks have normalised the layer's input.
  TaggedNormInput *norm_hidden = nullptr, *norm_attn_residual = nullptr;
  TaggedElement* qkv = nullptr;      // (batch, qkv_rows)
  TaggedElement* context = nullptr;  // (batch, heads, head_dim)
  TaggedElement* mlp_act = nullptr;  // (batch, intermediate)
  unsigned* context_done = nullptr;  // (batch, heads) the tag of a complete head
  unsigned* act_done = nullptr;      // (grid) the tag of a block whose rows of mlp.act are complete
  Tagged* partials = nullptr;        // (batch, heads, attention_splits, partial_floats)
  GridState* grid_state = nullptr;
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

  CF_HD constexpr PhaseOrder phases_of(int layer) const {
    return layer == head_layer ? PhaseOrder{Phase::head} : phases;
  }

  DigitPlaces digit_places = {};                                    // of packed weights
  std::array<LayerKind, kMaxLayerKinds> kinds = {};                 // by LayerPointers::kind; kind 0 is dense
  std::array<SequenceEnd, kMaxPersistentBatch> sequence_ends = {};  // of a launch that chooses
};

/// Whether the residual is parallel. A kernel of row products is compiled for one kind of residual.
template <Products Kind>
CF_HD constexpr bool has_parallel_residual(const PersistentArguments& c) {
  return is_rows(Kind) ? Kind == Products::rows : c.parallel_residual;
}
/// Whether the product warps fetch the context and mlp.act. Those of row products do with a sequential residual.
template <Products Kind>
CF_HD constexpr bool product_warps_fetch(const PersistentArguments& c) {
  return is_rows(Kind) ? Kind == Products::sequential_rows : c.product_warps_fetch;
}

}  // namespace cf::cuda
