#pragma once
// How blocks store words for each other, and load them (exchange.hpp).
#include "cuda/device/peer.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/persistent/exchange.hpp"

namespace cf::cuda {

__device__ inline std::uint64_t word_bits(float value, unsigned epoch) {
  return std::uint64_t(epoch) << 32 | __float_as_uint(value);
}
__device__ inline FloatWord float_word(std::uint64_t bits) {
  return {__uint_as_float(unsigned(bits)), unsigned(bits >> 32)};
}

__device__ inline void store_word(FloatWord* to, float value, unsigned epoch) {
  store_relaxed(reinterpret_cast<std::uint64_t*>(to), word_bits(value, epoch));
}
/// Loads two neighbouring values. Their address is a multiple of 16.
__device__ inline void load_words(const FloatWord* from, FloatWord (&two)[2]) {
  const ulonglong2 bits = load_relaxed(reinterpret_cast<const std::uint64_t*>(from));
  two[0] = float_word(bits.x), two[1] = float_word(bits.y);
}

template <class T>
__device__ void store_word(ElementWord* to, T value, unsigned epoch) {
  store_relaxed(to, std::uint32_t(value.bits) | epoch << 16);
}
__device__ inline bool has_epoch(ElementWord e, unsigned epoch) { return e >> 16 == (epoch & 0xffff); }
/// True where all four elements have the epoch.
__device__ inline bool have_epoch(const uint4& e, unsigned epoch) {
  const unsigned t = epoch << 16;
  return (((e.x ^ t) | (e.y ^ t)) | ((e.z ^ t) | (e.w ^ t))) < 0x10000;
}

/// Rounds half away from zero. An infinity stays one, and a NaN a NaN.
__device__ inline NormWord norm_word(float value, unsigned epoch) {
  const unsigned bits = __float_as_uint(value), rounded = isnan(value) ? 0x7fc00000u : bits + 0x80u;
  return (rounded & ~0xffu) | (epoch & 0xffu);
}
__device__ inline float norm_value(NormWord word) { return __uint_as_float(word & ~0xffu); }
/// True where the lowest eight bits of each of the four words are those of the epoch.
__device__ inline bool have_norm_epoch(const uint4& words, unsigned epoch) {
  return ((((words.x ^ epoch) | (words.y ^ epoch)) | ((words.z ^ epoch) | (words.w ^ epoch))) & 0xffu) == 0;
}

/// Publishes an element of the hidden state that layer `layer` reads, for the products and for the norms.
__device__ inline void publish_hidden(const Exchange& x, int layer, long at, float value, unsigned epoch) {
  store_word(x.hidden[layer % 2] + at, value, epoch);
  store_relaxed(x.norm_hidden + at, norm_word(value, epoch));
}
/// Publishes an element of attn_residual, for this block's products and for the norms.
__device__ inline void publish_attn_residual(const Exchange& x, long at, float value, unsigned epoch) {
  __stcg(x.attn_residual + at, value);
  store_relaxed(x.norm_attn_residual + at, norm_word(value, epoch));
}

/// Publishes this rank's part of an element of the residual stream to all ranks: to itself last, the others are further
/// away.
__device__ inline void publish_part(const RankExchange& x, int buffer, long at, float value, unsigned epoch) {
  const std::uint64_t word = word_bits(value, epoch);
  const NormWord rounded = norm_word(value, epoch);
#pragma unroll 1
  for (int turn = 1, to = x.rank; turn <= x.ranks; ++turn) {
    to = to + 1 == x.ranks ? 0 : to + 1;
    store_to_peer(x.norms(to, buffer, x.rank) + at, rounded);
    store_to_peer(reinterpret_cast<std::uint64_t*>(x.floats(to, buffer, x.rank) + at), word);
  }
}
/// A rank's part of an element, with its epoch.
__device__ inline FloatWord load_part(const RankExchange& x, int buffer, int from, long at) {
  return float_word(load_of_peer(reinterpret_cast<const std::uint64_t*>(x.floats(x.rank, buffer, from) + at)));
}

}  // namespace cf::cuda
