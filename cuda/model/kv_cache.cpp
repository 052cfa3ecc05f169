#include "cuda/model/kv_cache.hpp"

#include <cuda_runtime_api.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda/model/arena.hpp"
#include "cuda/model/extend.hpp"
#include "cuda/model/pages.hpp"
#include "cuda/runtime/check.hpp"

namespace cf::cuda {
namespace {

constexpr std::string_view kName = "kv_cache";

/// What a cache holds.
struct CacheTensors {
  std::vector<LayerCache> layers;
  View<std::int32_t, 1> kv_len{}, positions{};
  View<std::int32_t, 2> page_table{};

  void allocate(Arena& arena, const ModelShape& shape, DType dtype, std::int64_t batch, std::int64_t capacity,
                const PageSizes& pool) {
    for (LayerCache& layer : layers)
      for (AnyView<4>* v : {&layer.k, &layer.v})
        arena.allocate(
            *v,
            extents(pool ? pool.pages : batch, shape.num_kv_heads, pool ? pool.page_entries : capacity, shape.head_dim),
            dtype);
    arena.allocate(kv_len, extents(batch), DType::i32);
    arena.allocate(positions, extents(batch * capacity), DType::i32);
    if (pool)
      arena.allocate(page_table, extents(batch, (capacity + pool.page_entries - 1) / pool.page_entries), DType::i32);
  }
};

EntryLimit limit_of(const ModelSpec& m, std::int64_t capacity, const CacheKind& kind) {
  if (kind.stream) return {kMostStreamTokens, "the most tokens of a stream on a GPU"};
  return entry_limit(m, capacity, kind.leaves_keys_out);
}

}  // namespace

struct KvCache::State : CacheTensors {
  State(const Context& c, const ModelSpec& m, DType d, LayerRange r, std::int64_t b, std::int64_t n, const CacheKind& k)
      : CacheTensors{.layers = std::vector<LayerCache>(std::size_t(r.count()))},
        context(c),
        shape(m.shape),
        dtype(d),
        range(r),
        batch(b),
        capacity(n),
        kind(k),
        limit(limit_of(m, n, k)) {}
  ~State() { (void)cudaDeviceSynchronize(); }

  std::size_t lay_out(std::byte* block) {
    Arena arena(block);
    allocate(arena, shape, dtype, batch, capacity, kind.pool);
    return arena.bytes();
  }

  Context context;
  ModelShape shape;
  DType dtype;
  LayerRange range;
  std::int64_t batch, capacity, q_len = 0;
  CacheKind kind;
  EntryLimit limit;
  DeviceMemory memory;
  std::uint64_t version = next_version();
};

KvCache::KvCache(std::unique_ptr<State> state) : state_(std::move(state)) {}
KvCache::KvCache(KvCache&&) noexcept = default;
KvCache& KvCache::operator=(KvCache&&) noexcept = default;
KvCache::~KvCache() = default;

Result<KvCache> KvCache::create(const Context& context, const ModelSpec& model, DType dtype, LayerRange layers,
                                std::int64_t batch, std::int64_t capacity, const CacheKind& kind) {
  CF_TRY(model.validate());
  if (layers.first < 0 || layers.first >= layers.last || layers.last > model.shape.num_layers)
    return bad_argument(kName, "layers [first, last) must be a range within [0, " +
                                   std::to_string(model.shape.num_layers) + "), got [" + std::to_string(layers.first) +
                                   ", " + std::to_string(layers.last) + ")");
  // The bounds keep every product of sizes far inside 64 bits.
  constexpr std::int64_t most = 1 << 26;
  for (const auto& [name, size] : {std::pair{"batch", batch}, {"capacity", capacity}})
    if (size < 1 || size > most)
      return bad_argument(
          kName, std::string(name) + " must be 1 to " + std::to_string(most) + ", got " + std::to_string(size));
  CF_TRY(with_activation(kName, dtype, [](auto) { return Status(); }));

  CF_TRY(SlotPages::check(kind.pool, capacity, kind.stream));

  auto state = std::make_unique<State>(context, model, dtype, layers, batch, capacity, kind);
  CF_TRY_ASSIGN(DeviceMemory memory,
                DeviceMemory::create(context, state->lay_out(nullptr),
                                     "cache of " + std::to_string(kind.pool ? kind.pool.pages : batch) + " x " +
                                         std::to_string(kind.pool ? kind.pool.page_entries : capacity) +
                                         " entries in " + std::to_string(layers.count()) + " layers"));
  state->memory = std::move(memory);
  state->lay_out(state->memory.data());
  CF_TRY(from_cuda(cudaMemset(state->kv_len.data, 0, std::size_t(state->kv_len.bytes())), "cudaMemset"));
  if (kind.pool)
    CF_TRY(from_cuda(cudaMemset(state->page_table.data, 0, std::size_t(state->page_table.bytes())), "cudaMemset"));
  return KvCache(std::move(state));
}

double KvCache::bytes(const ModelSpec& model, DType dtype, std::int64_t batch, std::int64_t capacity,
                      const CacheKind& kind) {
  CacheTensors tensors{.layers = std::vector<LayerCache>(std::size_t(model.shape.num_layers))};
  Arena arena(nullptr);
  tensors.allocate(arena, model.shape, dtype, batch, capacity, kind.pool);
  return arena.measured();
}

Status KvCache::set_layer(std::int64_t layer, const Tensor& k_cache, const Tensor& v_cache) {
  State& s = *state_;
  if (!s.range.contains(layer))
    return bad_argument(kName, "layer must be " + std::to_string(s.range.first) + " to " +
                                   std::to_string(s.range.last - 1) + ", got " + std::to_string(layer));
  const LayerCache& to = s.layers[std::size_t(layer - s.range.first)];
  CF_TRY(copy_in<4>(s.context, kName, "k_cache", to.k, k_cache));
  return copy_in<4>(s.context, kName, "v_cache", to.v, v_cache);
}

Status KvCache::set_kv_len(std::span<const std::int32_t> kv_len, std::int64_t q_len) {
  State& s = *state_;
  if (q_len < 1 || q_len > s.capacity)
    return bad_argument(kName,
                        "q_len must be 1 to capacity " + std::to_string(s.capacity) + ", got " + std::to_string(q_len));
  if (std::int64_t(kv_len.size()) != s.batch)
    return bad_argument(kName, "kv_len has " + std::to_string(kv_len.size()) + " elements, expected one for each of " +
                                   std::to_string(s.batch) + " sequences");
  std::vector<std::int32_t> positions;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    const std::int32_t n = kv_len[std::size_t(b)];
    if (n < q_len || n > s.limit.most)
      return bad_argument(kName, "kv_len[" + std::to_string(b) + "] must be q_len " + std::to_string(q_len) + " to " +
                                     std::string(s.limit.most == s.capacity ? "capacity" : s.limit.name) + " " +
                                     std::to_string(s.limit.most) + ", got " + std::to_string(n));
    for (std::int64_t i = 0; i < q_len; ++i) positions.push_back(std::int32_t(n - q_len + i));
  }
  CF_TRY(copy_to_device(s.context, s.kv_len.data, kv_len.data(), kv_len.size_bytes()));
  CF_TRY(copy_to_device(s.context, s.positions.data, positions.data(), positions.size() * sizeof(std::int32_t)));
  s.q_len = q_len;
  return {};
}

Status KvCache::extend(CUstream_st* stream, std::int64_t q_len) {
  State& s = *state_;
  if (q_len < 1 || q_len > s.capacity)
    return bad_argument(kName,
                        "q_len must be 1 to capacity " + std::to_string(s.capacity) + ", got " + std::to_string(q_len));
  CF_TRY(enqueue_extend(s.positions, s.kv_len, std::int32_t(q_len), s.context.on_stream(stream)));
  s.q_len = q_len;
  return {};
}

Status KvCache::set_pages(std::span<const PagePool::Copy> copies, std::span<const SlotPages::Cell> cells,
                          CUstream_st* stream) {
  const State& s = *state_;
  const Context context = s.context.on_stream(stream);
  if (!copies.empty()) {
    const LayerCache& first = s.layers.front();
    // Keys and values of the layers lie one behind the other, as allocate() lays them out.
    const auto stride = static_cast<const std::byte*>(first.v.data) - static_cast<const std::byte*>(first.k.data);
    CF_TRY(enqueue_page_copies(first.k, stride, 2 * std::int64_t(s.layers.size()), copies, context));
  }
  return enqueue_table_cells(s.page_table, cells, context);
}

View<std::int32_t, 1> KvCache::writable_positions() {
  state_->q_len = 1;
  return {state_->positions.data, {state_->batch}};
}
View<std::int32_t, 1> KvCache::writable_kv_len() {
  state_->q_len = 1;
  return state_->kv_len;
}

std::int64_t KvCache::batch() const { return state_->batch; }
std::int64_t KvCache::capacity() const { return state_->capacity; }
const EntryLimit& KvCache::limit() const { return state_->limit; }
View<const std::int32_t, 2> KvCache::page_table() const { return {state_->page_table.data, state_->page_table.shape}; }
DType KvCache::dtype() const { return state_->dtype; }
LayerRange KvCache::layers() const { return state_->range; }
std::int64_t KvCache::q_len() const { return state_->q_len; }
LayerCache KvCache::layer(std::int64_t layer) const { return state_->layers[std::size_t(layer - state_->range.first)]; }
View<const std::int32_t, 1> KvCache::kv_len() const { return state_->kv_len; }
View<const std::int32_t, 1> KvCache::positions(std::int64_t q_len) const {
  return {state_->positions.data, {state_->batch * q_len}};
}
std::size_t KvCache::device_bytes() const { return state_->memory.bytes(); }
std::uint64_t KvCache::version() const { return state_->version; }

}  // namespace cf::cuda
