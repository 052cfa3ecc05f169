#pragma once
// Layers on the device whose caches lie in pages.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "tests/cuda/device_layers.hpp"

namespace cf::test {

/// The layers of a DeviceLayers with the host's caches in pages: in random order, and between pages that are no
/// sequence's. These are NaN, and the table names one of them where a sequence of `lengths` entries needs no page.
class PagedLayers {
 public:
  PagedLayers(const cuda::Context& c, DeviceLayers& on, const HostLayers& host, std::int64_t page_entries,
              const std::vector<std::int32_t>& lengths, std::uint64_t seed = 1)
      : layers(on.layers), context_(c), host_(host), page_entries_(page_entries), lengths_(lengths) {
    const std::int64_t batch = host.load.batch;
    of_each_ = (host.load.cache_capacity() + page_entries - 1) / page_entries;
    std::int64_t used = 0;
    for (std::int32_t n : lengths) used += pages_of(n);
    pages_ = 2 * used + 1;
    std::vector<std::int32_t> order(static_cast<std::size_t>(pages_));
    std::iota(order.begin(), order.end(), 0);
    std::mt19937_64 random(seed);
    std::shuffle(order.begin(), order.end(), random);
    foreign_ = order.back();
    table.assign(std::size_t(batch * of_each_), foreign_);
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t i = 0; i < pages_of(lengths[std::size_t(b)]); ++i) {
        table[std::size_t(b * of_each_ + i)] = order[std::size_t(--used)];
        owned_.push_back({b, i, table[std::size_t(b * of_each_ + i)]});
      }
    const ModelShape shape = host.config.spec().shape;
    const auto pool = extents(pages_, shape.num_kv_heads, page_entries, shape.head_dim);
    on_device_ = static_cast<std::int32_t*>(on.allocate(std::int64_t(table.size()) * 4));
    for (cuda::PersistentLayer& l : layers) {
      for (AnyView<4>* v : {&l.cache.k, &l.cache.v}) {
        *v = AnyView<4>(nullptr, pool, host.config.dtype);
        v->data = on.allocate(v->bytes());
      }
      l.page_table = {on_device_, {batch, of_each_}};
    }
    reset();
  }

  /// Brings the caches back to the host's, and the table to `table`.
  void reset() {
    for (std::size_t l = 0; l < layers.size(); ++l) {
      bring(layers[l].cache.k, host_.k_caches[l]);
      bring(layers[l].cache.v, host_.v_caches[l]);
    }
    set_table(table);
  }
  void set_table(const std::vector<std::int32_t>& cells) {
    require_ok(cuda::copy_to_device(context_, on_device_, cells.data(), cells.size() * 4));
  }
  /// Keys and values of all layers as contiguous caches. Entries that have no page are the host's.
  std::vector<Tensor> caches() const {
    std::vector<Tensor> all;
    for (std::size_t l = 0; l < layers.size(); ++l) {
      all.push_back(gathered(layers[l].cache.k, host_.k_caches[l]));
      all.push_back(gathered(layers[l].cache.v, host_.v_caches[l]));
    }
    return all;
  }
  /// Whether no page but the sequences' own has changed.
  bool kept_others() const {
    std::vector<bool> is_owned(static_cast<std::size_t>(pages_));
    for (const Owned& o : owned_) is_owned[std::size_t(o.page)] = true;
    bool kept = true;
    for (const cuda::PersistentLayer& l : layers)
      for (const AnyView<4>& v : {l.cache.k, l.cache.v}) {
        const Tensor pool = fetch<4>(v);
        const auto* const bytes = static_cast<const unsigned char*>(pool.data());
        const std::size_t page_bytes = std::size_t(pool.size_bytes() / pages_);
        for (std::size_t page = 0; page < is_owned.size(); ++page)
          kept = kept && (is_owned[page] || std::all_of(bytes + page * page_bytes, bytes + (page + 1) * page_bytes,
                                                        [](unsigned char byte) { return byte == kPoison; }));
      }
    return kept;
  }
  /// A page that is no sequence's.
  std::int32_t foreign() const { return foreign_; }

  std::vector<cuda::PersistentLayer> layers;
  std::vector<std::int32_t> table;  // (batch, pages of a sequence)

 private:
  static constexpr unsigned char kPoison = 0xff;  // of which float16's and bfloat16's elements are NaN
  struct Owned {
    std::int64_t sequence, number;
    std::int32_t page;
  };
  std::int64_t pages_of(std::int64_t entries) const { return (entries + page_entries_ - 1) / page_entries_; }
  /// Calls f(byte of a contiguous cache, byte of the pool, bytes) for each piece of a head that has a page.
  template <class F>
  void for_each_piece(const Tensor& contiguous, F&& f) const {
    const Shape& shape = contiguous.shape();  // (batch, kv_heads, capacity, head_dim)
    const std::int64_t heads = shape[1], capacity = shape[2];
    const auto row_bytes = std::size_t(shape[3]) * 2;
    for (const Owned& o : owned_) {
      const std::int64_t first = o.number * page_entries_, count = std::min(page_entries_, capacity - first);
      for (std::int64_t h = 0; h < heads; ++h)
        f(std::size_t((o.sequence * heads + h) * capacity + first) * row_bytes,
          std::size_t((o.page * heads + h) * page_entries_) * row_bytes, std::size_t(count) * row_bytes);
    }
  }
  void bring(const AnyView<4>& pool, const Tensor& from) {
    std::vector<unsigned char> bytes(std::size_t(pool.bytes()), kPoison);
    for_each_piece(from, [&](std::size_t contiguous, std::size_t paged, std::size_t count) {
      std::memcpy(bytes.data() + paged, static_cast<const char*>(from.data()) + contiguous, count);
    });
    require_ok(cuda::copy_to_device(context_, pool.data, bytes.data(), bytes.size()));
  }
  Tensor gathered(const AnyView<4>& pool, const Tensor& like) const {
    const Tensor from = fetch<4>(pool);
    Tensor to = like.clone();
    for_each_piece(to, [&](std::size_t contiguous, std::size_t paged, std::size_t count) {
      std::memcpy(static_cast<char*>(to.data()) + contiguous, static_cast<const char*>(from.data()) + paged, count);
    });
    return to;
  }

  cuda::Context context_;
  const HostLayers& host_;
  std::int64_t page_entries_, of_each_ = 0, pages_ = 0;
  std::vector<std::int32_t> lengths_;
  std::vector<Owned> owned_;
  std::int32_t foreign_ = 0;
  std::int32_t* on_device_ = nullptr;
};

}  // namespace cf::test
