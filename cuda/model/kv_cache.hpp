#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/cache_view.hpp"
#include "core/model/layer.hpp"
#include "core/model/shape.hpp"
#include "core/model/slot_pages.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"
#include "cuda/model/resident_weights.hpp"
#include "cuda/runtime/context.hpp"

namespace cf::cuda {

/// What a cache is beside a contiguous one whose sequences see all of their keys.
struct CacheKind {
  PageSizes pool{};              // all sequences' entries lie in this pool's pages
  KeyWindow stream{};            // each sequence is a stream, whose newest tokens take the places of older ones
  bool leaves_keys_out = false;  // a sequence may be longer than the model's window
};

/// The most tokens of a stream: lengths and positions are of 32 bits.
inline constexpr std::int64_t kMostStreamTokens = std::int64_t(1) << 30;

/// The keys and values of a batch of sequences, for a range of layers, with the sequences' lengths; all on a device. A
/// cache belongs to a conversation, not to weights or to a way of stepping: any executor may step it.
///
/// kv_len is the number of a sequence's valid entries after the step's new tokens are appended. extend() or
/// set_kv_len() comes before a step and says how many tokens that step appends to each sequence. Not shared between
/// threads.
class KvCache {
 public:
  /// Takes memory for keys and values of `dtype`, (batch, kv_heads, capacity, head_dim) each in every layer. Every
  /// kv_len begins as 0.
  /// Refuses a model that describes no layer, a range outside its layers, batch or capacity below 1, and a dtype other
  /// than float16, bfloat16 and float32. Code::out_of_memory says how much was needed and how much is free.
  /// In pages keys and values are (pages, kv_heads, page_entries, head_dim), and a sequence has room in the table for
  /// the pages of `capacity` entries; all of them are page 0 until set_pages().
  static Result<KvCache> create(const Context& context, const ModelSpec& model, DType dtype, LayerRange layers,
                                std::int64_t batch, std::int64_t capacity, const CacheKind& kind = {});
  /// The bytes that create() takes for all layers of a model. May be called with sizes that create() refuses.
  static double bytes(const ModelSpec& model, DType dtype, std::int64_t batch, std::int64_t capacity,
                      const CacheKind& kind = {});
  KvCache(KvCache&&) noexcept;
  KvCache& operator=(KvCache&&) noexcept;
  /// Waits for the device: the cache may be in use.
  ~KvCache();

  /// Copies a layer's entries, (batch, kv_heads, capacity, head_dim) each, and waits until they are there.
  Status set_layer(std::int64_t layer, const Tensor& k_cache, const Tensor& v_cache);
  /// Sets the kv_len that each sequence has after a step of q_len tokens, and waits until it is there. Refuses a kv_len
  /// outside q_len to what entry_limit() allows.
  Status set_kv_len(std::span<const std::int32_t> kv_len, std::int64_t q_len = 1);
  /// Adds q_len to every kv_len, on the device and without waiting. Nothing is checked: beyond the capacity a step's
  /// results are NaN and the cache stays as it is. May be captured into a graph.
  Status extend(CUstream_st* stream, std::int64_t q_len = 1);
  /// Of a cache in pages: makes copies of pages in every layer, and then brings the table up to date; all behind what is
  /// on the stream, and before what is put there next.
  Status set_pages(std::span<const PagePool::Copy> copies, std::span<const SlotPages::Cell> cells, CUstream_st* stream);
  /// For a caller that writes positions and kv_len on the device itself, before a step of one new token a sequence:
  /// (batch) each.
  View<std::int32_t, 1> writable_positions();
  View<std::int32_t, 1> writable_kv_len();

  std::int64_t batch() const;
  std::int64_t capacity() const;
  /// The entries that a sequence may have, and what says so.
  const EntryLimit& limit() const;
  std::int64_t most_entries() const { return limit().most; }
  /// A sequence's pages, (batch, pages of a sequence); empty where the cache has none.
  View<const std::int32_t, 2> page_table() const;
  DType dtype() const;
  LayerRange layers() const;
  /// The tokens that the next step appends to each sequence: what extend() or set_kv_len() was told last; 0 before the
  /// first call.
  std::int64_t q_len() const;
  /// A layer's keys and values; `layer` is within layers().
  LayerCache layer(std::int64_t layer) const;
  /// (batch)
  View<const std::int32_t, 1> kv_len() const;
  /// (batch * q_len) positions of a step's tokens: kv_len[b] - q_len + i.
  View<const std::int32_t, 1> positions(std::int64_t q_len) const;
  std::size_t device_bytes() const;
  /// A number that no other cache has.
  std::uint64_t version() const;

 private:
  struct State;
  explicit KvCache(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

}  // namespace cf::cuda
