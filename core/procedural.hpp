#pragma once
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "core/model/weights.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"

namespace cf {

/// Values made from a hash, so that a full-size layer needs no file. Element i of the tensor `name` under `seed` is
///   key  = mix(fnv1a64(name) ^ mix(seed)),  r = mix(key + (i + 1) * 0x9e3779b97f4a7c15)
///   n    = sum of the four 9-bit fields of r's low 36 bits, minus 1022          (bell-shaped,
///          -1022 .. 1022, sigma 296)
/// with mix = splitmix64's finaliser (Steele, Lea, Flood 2014), and then by kind
///   weight      n * 2^-14           sigma 0.018; also biases and embeddings
///   gain        1 + (n >> 3) * 2^-10   within 1 +- 0.125; LayerNorm's gamma
///   activation  n * 2^-8            sigma 1.15; hidden states and cache entries
/// All are exact in float16; bfloat16 rounds them once. golden/tools/procedural.py writes the same bits.
enum class ProceduralKind { weight, gain, activation };

/// Fills `count` elements of `out`, starting with element `first` of the named tensor.
void fill_procedural(void* out, DType dtype, std::int64_t first, std::int64_t count, ProceduralKind kind,
                     std::uint64_t seed, std::string_view name);

/// A 64-bit checksum of bytes: sum over the little-endian 8-byte words w_i (the last padded with zeros) of
/// mix(w_i + (i + 1) * 0x9e3779b97f4a7c15), plus the length in bytes. It detects damaged and
/// exchanged data; it is not cryptographic.
std::uint64_t checksum(const void* data, std::size_t bytes);

/// The procedural weights of layer `layer`: each tensor is named "layers.N.<name>", of dtype f16, bf16 or f32. With a
/// format of 4 or 8 bits every Linear is a GPTQ weight (zero_offset 0; a group_size of -1 is one group of all inputs),
/// with r = mix(key + (i + 1) * 0x9e3779b97f4a7c15) as above, or fp8:
///   qweight  word i is r's low half: codes are uniform
///   qzeros   each code is one of the two integers next to the codes' mean; a bit of r chooses
///   scales   (1 + (n >> 3) * 2^-10) * 2^-(4 + bits): weights of sigma 0.018
///   g_idx    k / group_size
///   weight   fp8 alone: the float8 (e4m3) number nearest to n * 2^-2
///   weight_scale  fp8 alone, one for each row and group: (1 + (n >> 3) * 2^-10) * 2^-12. The weights have sigma 0.018
/// Values of large dense tensors are made on `threads` threads, 1 or more.
OwnedLayerWeights procedural_layer(const ModelSpec& m, DType dtype, std::int64_t layer, std::uint64_t seed,
                                   WeightFormat linears = {}, int threads = 1);

/// The procedural weights of a model. A tensor's name is that of checkpoints without its base ("gpt_neox.", "model."):
/// the layers are those of procedural_layer(), and beside them are the embedding's, the last norm's and, where the
/// embeddings are not tied, the LM head's. Those of GPT-NeoX are "embed_in.weight", "final_layer_norm.weight",
/// "final_layer_norm.bias" and "embed_out.weight". Joined matrices are made as they are joined.
OwnedModelWeights procedural_model(const ModelSpec& m, DType dtype, std::uint64_t seed, WeightFormat linears = {});

/// Called with the bytes that are made so far and with those of all weights. An error ends the work.
using WeightsProgress = std::function<Status(std::int64_t made_bytes, std::int64_t all_bytes)>;
/// The same, which calls `progress` after each tensor: large models take a minute. Returns its error.
Result<OwnedModelWeights> procedural_model(const ModelSpec& m, DType dtype, std::uint64_t seed, WeightFormat linears,
                                           const WeightsProgress& progress);

/// The same without its layers' values: what lies outside the layers, beside outline_model()'s views of them.
OwnedModelWeights procedural_outer(const ModelSpec& m, DType dtype, std::uint64_t seed, WeightFormat linears = {});

/// The views of procedural_model()'s weights without memory: formats, dtypes and shapes, from which bytes are counted.
ModelWeights outline_model(const ModelSpec& m, DType dtype, WeightFormat linears = {});

/// The checksum of a layer's weights: the sum over for_each_weight, and behind it over fp8 Linears in the order of
/// for_each_linear, of checksum(bytes) times (its place + 1).
std::uint64_t weights_checksum(const ModelSpec& m, const LayerWeights& w);
/// The same of a whole model's weights, over for_each_model_weight and the fp8 Linears of all layers.
std::uint64_t weights_checksum(const ModelSpec& m, const ModelWeights& w);

}  // namespace cf
