#pragma once
// What the blocks of the persistent kernel make for each other: words in device memory, each a value with its epoch.
// Without CUDA.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/host_device.hpp"
#include "cuda/comm/peers.hpp"
#include "cuda/persistent/plan.hpp"

namespace cf::cuda {

/// A float with its epoch. Value and epoch are stored and loaded in one access, so a reader that sees the epoch has the
/// value: no flag, fence or counter is needed. An epoch belongs to one layer of one token.
struct alignas(8) FloatWord {
  float value;
  unsigned epoch;
};
/// A 16-bit element with an epoch: the element's bits below, the lower half of the epoch above. Every layer writes all
/// of its elements, so the epoch that a reader finds is at most a launch old, and half of an epoch is enough.
using ElementWord = std::uint32_t;
/// An element of the residual stream for the norms, in half of a FloatWord's bytes. The upper 24 bits are the float,
/// rounded. The lower 8 bits are the lowest 8 bits of the epoch. The relative rounding error is at most 2^-16. That of
/// bfloat16 is at most 2^-8, and that of float16 2^-11. Products that add to the residual stream read the whole float.
using NormWord = std::uint32_t;

/// What a block waits for: everything of one kind that the other blocks make in one layer. `choice` is of the head: the
/// blocks' best tokens.
enum class Dependency : unsigned { qkv, context, attn_residual, mlp_act, hidden, choice, none };
inline constexpr int kDependencies = 6;

/// A dependency of a layer as one number above 0.
CF_HD constexpr int dependency_code(int layer, Dependency d) { return layer * kDependencies + int(d) + 1; }
/// The same with the rank that has not made it; -1 for none.
CF_HD constexpr int report_code(int dependency_code, int late_rank) { return dependency_code | (late_rank + 1) << 16; }
constexpr int late_rank_of(unsigned report) { return int(report >> 16) - 1; }
constexpr int code_of(unsigned report) { return int(report & 0xffff); }
constexpr int layer_of_code(int code) { return (code - 1) / kDependencies; }
constexpr Dependency dependency_of_code(int code) { return Dependency((code - 1) % kDependencies); }

/// What the blocks share in device memory beside the words. Between launches every member but `launches` is zero.
struct GridState {
  unsigned blocks_left;  // blocks that have left the kernel; the last one to leave clears it
  unsigned stopped;      // not 0 once a wait took too long: all blocks leave
  unsigned launches;     // launches so far; a launch of many tokens counts as one for each
};

/// Who reads an array of words. All readers are blocks of this GPU; what all blocks read is what a GPU that has a part
/// of the model's rows will have to send to the others.
enum class Readers {
  writer,    // the block that has written the word
  gqa_tile,  // the blocks that attend to the same keys
  all        // every block
};
/// An array of words: what it is for, the bits of its epochs, and its readers.
struct WordSpec {
  Dependency of;
  int epoch_bits;  // 0 where another word says that these are complete
  Readers readers;
};

/// Every launch that ends a layer writes all words. A layer may take two launches, so a word's epoch is at most two
/// launches old. Eight bits tell the epochs of three launches of one token apart.
static_assert(3 * kMaxPersistentLayers + 1 < 256);

/// The words that blocks make for each other, where they lie, and which epoch they have. exchange.cuh stores and loads
/// them. With several tokens the elements of `context` and `mlp_act` have no epochs: context_done and act_done say when
/// they are complete, and the copy engine then fetches them.
struct Exchange {
  FloatWord* hidden[2] = {};       // (batch, hidden): layer l reads hidden[l % 2]
  float* attn_residual = nullptr;  // (batch, hidden), of a sequential residual
  // (batch, hidden) The elements of `hidden` and of attn_residual, as the norms read them. One norm_hidden is enough
  // for all layers: no block ends a layer before all blocks have normalised the layer's input.
  NormWord *norm_hidden = nullptr, *norm_attn_residual = nullptr;
  ElementWord* qkv = nullptr;        // (batch, qkv_rows)
  ElementWord* context = nullptr;    // (batch, heads, head_dim)
  ElementWord* mlp_act = nullptr;    // (batch, intermediate)
  unsigned* context_done = nullptr;  // (batch, heads) the epoch of a complete head
  unsigned* act_done = nullptr;      // (grid) the epoch of a block whose rows of mlp.act are complete
  FloatWord* partials = nullptr;     // (batch, heads, attention_splits, partial_floats)
  // (grid, batch, 2) A block's highest order key, its halves as floats; then (2) of block 0: whether the launch ends.
  FloatWord* candidates = nullptr;
  GridState* grid_state = nullptr;
  int token_epochs = 0;  // a token has one for each layer, and one for what the last layer makes

  /// The epoch of what a launch's first token reads in layer 0. `continues`: it reads what the launch before has made.
  CF_HD constexpr unsigned first_epoch(unsigned launches, bool continues) const {
    return (launches - continues) * unsigned(token_epochs) + 1;
  }
  /// The epoch of everything that a layer reads. What the layer makes has the same epoch, but for the hidden state,
  /// which has the next layer's.
  CF_HD constexpr unsigned epoch(unsigned first, int token, int layer) const {
    return first + unsigned(token * token_epochs + layer);
  }
};

/// The sizes that an exchange depends on.
struct ExchangeSizes {
  std::int64_t batch, hidden, qkv_rows, heads, head_dim, intermediate;
  std::int64_t grid, splits, partial_floats;
  bool tiled;  // several tokens come to a block by the copy engine
  bool has_head;
  bool of_ranks = false;  // the residual stream's words are those of RankExchange
};

/// Calls f(pointer, count, spec) for each array of words of an exchange.
template <class F>
constexpr void for_each_words(Exchange& x, const ExchangeSizes& s, F f) {
  const std::int64_t residual = s.batch * s.hidden, heads = s.batch * s.heads;
  if (!s.of_ranks) {
    for (FloatWord*& of_layer : x.hidden) f(of_layer, residual, WordSpec{Dependency::hidden, 32, Readers::writer});
    f(x.attn_residual, residual, WordSpec{Dependency::attn_residual, 0, Readers::writer});
    f(x.norm_hidden, residual, WordSpec{Dependency::hidden, 8, Readers::all});
    f(x.norm_attn_residual, residual, WordSpec{Dependency::attn_residual, 8, Readers::all});
  }
  f(x.qkv, s.batch * s.qkv_rows, WordSpec{Dependency::qkv, 16, Readers::gqa_tile});
  f(x.context, heads * s.head_dim, WordSpec{Dependency::context, s.tiled ? 0 : 16, Readers::all});
  f(x.mlp_act, s.batch * s.intermediate, WordSpec{Dependency::mlp_act, s.tiled ? 0 : 16, Readers::all});
  f(x.context_done, heads, WordSpec{Dependency::context, 32, Readers::all});
  f(x.act_done, s.grid, WordSpec{Dependency::mlp_act, 32, Readers::all});
  f(x.partials, heads * s.splits * s.partial_floats, WordSpec{Dependency::context, 32, Readers::gqa_tile});
  if (s.has_head) f(x.candidates, 2 * (s.grid * s.batch + 1), WordSpec{Dependency::choice, 32, Readers::all});
}

/// Gives an exchange its memory, each array at a multiple of 256 bytes, and returns the bytes that this takes. Without
/// memory it only counts them.
inline std::size_t allocate_words(Exchange& x, const ExchangeSizes& sizes, std::byte* memory) {
  std::size_t end = 0;
  const auto allocate = [&](auto*& p, std::int64_t count) {
    p = memory ? reinterpret_cast<std::remove_reference_t<decltype(p)>>(memory + end) : nullptr;
    end += (std::size_t(count) * sizeof(*p) + 255) / 256 * 256;
  };
  for_each_words(x, sizes, [&](auto*& p, std::int64_t count, const WordSpec&) { allocate(p, count); });
  allocate(x.grid_state, 1);
  return end;
}

/// What the kernels of one rank keep in the rank's area. `grid` takes the place of Exchange::grid_state: there the
/// other ranks can stop it. Its `launches` are those of all kernels of the rank, and as many on every rank.
struct RankState {
  GridState grid;
  unsigned exchanges;  // layers that these launches have run
};

/// Each launch on ranks takes so many epochs, however few layers its kernel has: kernels of a group share their words.
inline constexpr int kRankEpochs = kMaxPersistentLayers + 1;
/// A layer's words overwrite those of two layers before, which are at most two launches old.
static_assert(3 * kRankEpochs < 256);

/// How a launch finds the words of RankExchange. All threads of a block are told.
struct RankNotice {
  unsigned first_epoch;   // of layer 0
  unsigned first_number;  // of the exchange in layer 0, counted over all launches

  static CF_HD constexpr RankNotice begin(const RankState& s, int first_layer) {
    return {s.grid.launches * kRankEpochs + 1, s.exchanges - unsigned(first_layer)};
  }
  /// The epoch of the words that a layer reads: what it makes for the next layer has the next one.
  CF_HD constexpr unsigned epoch(int layer) const { return first_epoch + unsigned(layer); }
  /// Where the words lie that a layer makes.
  CF_HD constexpr int buffer(Dependency d, int made_in) const {
    return int((first_number + unsigned(made_in)) & 1) + (d == Dependency::attn_residual ? 2 : 0);
  }
};

/// The words that ranks make for each other: parts of the residual stream, which is their sum. A rank stores the words
/// of its rows into every rank's area (Peers), and whoever reads the residual stream sums the words in the order of the
/// ranks: all ranks have the same bits.
///
/// Words lie in one of two buffers in turn, layer after layer and launch after launch. A rank that stores the words of
/// a layer has seen all words of the layer before from every rank; and a block stores any of these after all of its
/// warps have read those of the layer before that, which lie in the same buffer.
struct RankExchange {
  int rank = 0, ranks = 1;
  std::byte* areas[kMostRanks] = {};  // by rank, at this rank's addresses
  unsigned* launches = nullptr;       // of this kernel: the words that stay on the rank count these

  static constexpr std::int64_t kStateBytes = 256, kPart = std::int64_t(kMaxPersistentBatch) * kMaxPersistentHidden;
  static constexpr int kBuffers = 4;  // RankNotice::buffer(): two of `hidden`, two of attn_residual
  static constexpr std::int64_t bytes(std::int64_t of_ranks) {
    return kStateBytes + kBuffers * of_ranks * kPart * std::int64_t(sizeof(FloatWord) + sizeof(NormWord));
  }
  CF_HD RankState* state(int of) const { return reinterpret_cast<RankState*>(areas[of]); }
  /// What rank `from` has stored in rank `of`'s area: (batch, hidden).
  CF_HD FloatWord* floats(int of, int buffer, int from) const {
    return reinterpret_cast<FloatWord*>(areas[of] + kStateBytes) + (buffer * ranks + from) * kPart;
  }
  CF_HD NormWord* norms(int of, int buffer, int from) const {
    return reinterpret_cast<NormWord*>(floats(of, kBuffers, 0)) + (buffer * ranks + from) * kPart;
  }
};
static_assert(sizeof(RankState) <= RankExchange::kStateBytes);

}  // namespace cf::cuda
