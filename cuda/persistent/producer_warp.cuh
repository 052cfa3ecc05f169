#pragma once
// What the producer warp of a block does: it fills the ring with the phases' weights, keys and values, in their order,
// and never waits for activations.
#include "cuda/persistent/attention.cuh"
#include "cuda/persistent/packed.cuh"
#include "cuda/persistent/product.cuh"

namespace cf::cuda {

/// The pointers of a layer that the producer warp needs and the layer's kind, one a lane. Those of the launch's first
/// layer are kernel arguments, each read at a constant offset: an argument whose offset depends on the lane would come
/// by way of device memory, and the launch's first weights would wait for it. Those of the other layers are loaded one
/// layer ahead.
class ProducerPointers {
 public:
  __device__ explicit ProducerPointers(const PersistentArguments& arguments) : c(arguments), next_(first()) {}

  /// Makes the layer's pointers the current ones, and loads those of the next layer.
  __device__ void begin(int layer) {
    current_ = next_;
    next_ = load(layer + 1 < c.end_layer ? layer + 1 : c.first_layer);
    asm volatile("" : "+l"(next_));  // the load is not to be moved down to its use
  }
  __device__ const char* matrix(Weight w) const { return at(int(w)); }
  __device__ const char* k_cache() const { return at(kWeights); }
  __device__ const char* v_cache() const { return at(kWeights + 1); }
  __device__ int kind() const { return int(__shfl_sync(~0u, current_, kWeights + 2)); }

 private:
  static constexpr int kFirst = int(offsetof(WeightPointers, matrix) / sizeof(void*));
  static_assert(offsetof(LayerPointers, cache) / sizeof(void*) == kFirst + kWeights && kLayerPointers == kFirst + 7);

  __device__ static int lane() { return int(threadIdx.x) % 32; }
  __device__ std::uint64_t first() const {
    const void* pointer = c.first_pointers.cache.v;
    if (lane() == kWeights) pointer = c.first_pointers.cache.k;
#pragma unroll
    for (int i = 0; i < kWeights; ++i)
      if (lane() == i) pointer = c.first_pointers.weights.matrix[i];
    return lane() == kWeights + 2 ? std::uint64_t(c.first_pointers.kind) : reinterpret_cast<std::uint64_t>(pointer);
  }
  __device__ std::uint64_t load(int layer) const {
    const auto* const words = reinterpret_cast<const std::uint64_t*>(c.layer_pointers + layer);
    return words[kFirst + min(lane(), kWeights + 2)];
  }
  __device__ const char* at(int i) const { return reinterpret_cast<const char*>(__shfl_sync(~0u, current_, i)); }

  const PersistentArguments& c;
  std::uint64_t current_ = 0, next_;
};

/// Waits until the consumer warps have begun a token: all blocks have then appended the token before to the caches.
/// False where they have left.
__device__ inline bool await_token(const Block& block, int token) {
  while (block.tokens_begun() < token)
    if (block.consumer_warps() == 0) return false;
  let_copies_see();
  return true;
}

/// Streams a part of a phase's product. Where the kernel takes packed weights, dense ones have tile products.
template <Products Kind>
__device__ bool stream(RingWriter& ring, const PackedShape& packed, const Product& p, const char* matrix) {
  if constexpr (is_packed(Kind))
    if (packed.is_packed()) return stream_packed<is_tiled(Kind)>(ring, p, packed, matrix);
  return stream_product < is_tiled(Kind) || is_packed(Kind) > (ring, p, matrix);
}

template <Products Kind>
__device__ void stream_layers(const Block& block, const Ring& ring, const PersistentArguments& c) {
  RingWriter writer(ring, block.consumer_warps(), c);
  ProducerPointers pointers(c);
  const int tokens = max(c.token.count, 1);
  bool go = true;
#pragma unroll 1
  for (int token = 0; go && token < tokens; ++token)
#pragma unroll 1
    for (int layer = c.first_layer; go && layer < c.end_layer; ++layer) {
      pointers.begin(layer);
      const int start = c.deals.start(layer);
      const LayerKind& kind = c.kinds[is_packed(Kind) ? pointers.kind() : 0];
#pragma unroll 1
      for (int step = c.first_phase(layer), is_last = false; go && !is_last; ++step) {
        const PhaseSpec phase = load_phase(c, step);
        is_last = phase.is_last;
        if (phase.is_attention()) {
          writer.begin(c.plan.key_stage);
          go = (token == 0 || layer > c.first_layer || await_token(block, token)) &&
               stream_keys(writer, c, token, pointers.k_cache(), pointers.v_cache());
          continue;
        }
        writer.begin(kind.shapes[phase.matrix].stage);
        const int parts = Product::parts(c, phase, start);
#pragma unroll 1
        for (int part = 0; go && part < parts; ++part)
          go = stream<Kind>(writer, kind.packed[int(phase.weight())], Product(c, kind, phase, start, part),
                            pointers.matrix(phase.weight()));
      }
    }
  writer.drain();
}

}  // namespace cf::cuda
