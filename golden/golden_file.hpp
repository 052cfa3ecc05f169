#pragma once
// A golden file: one step of one layer, with what went in and what every site made ("taps"), in HDF5. Written by
// dump_hf.py from Hugging Face and by GoldenWriter from our own backends, in one schema:
//
//   attributes of /
//     schema = "cf-golden", schema_version = 1
//     producer          the program that wrote it
//     command           its command line
//     versions          JSON: library versions
//     config            JSON: the model's config.json (either naming generation)
//     model, layer      the model's name, the layer's index
//     dtype             "float16" | "bfloat16" | "float32": the stored type of hidden, cache and weights
//     seed              of everything random or procedural in the file
//     batch, q_len      q_len new tokens for each of batch sequences; tokens = batch * q_len
//     cache             "prefill" | "random" (both stored) | "procedural" | "none" (kv_len = q_len everywhere)
//     cache_checksum    of the procedural K bytes plus 3 times that of the V bytes; with cache = "procedural"
//     weights           "stored" | "checkpoint" | "procedural"
//     weights_checksum  cf::weights_checksum of the layer, whatever their source
//     weights_checkpoint  the checkpoint's directory relative to this file's; with weights = "checkpoint"
//   /inputs/hidden      (tokens, hidden)                        stored dtype
//   /inputs/kv_len      (batch)             int32               valid entries after the append
//   /inputs/positions   (tokens)            int32
//   /inputs/cos, sin    (tokens, rotary_dim / 2)  float32       as the producer used them, a row a token
//   /inputs/k_cache, v_cache  (batch, heads, max(kv_len) - q_len, head_dim)  stored dtype: the entries before the append;
//                       rows that a shorter sequence does not have are zero. Procedural ones are elements
//                       0 .. of the tensors "k_cache" and "v_cache" of this shape, kind activation (core/procedural.hpp)
//   /weights/<name>     by the name below gpt_neox.layers.N, with weights = "stored"
//   /taps/<variant>/<tap>   variant "float64" is the reference; others ("float16_eager", "float16_sdpa", ...) are the
//                       producer's own arithmetic. Group attributes: dtype, attn_implementation, device.
//                       Taps are those of core/layer.hpp, in its shapes; kv_append's are appended_rows().
//                       Names starting "hf." are Hugging Face's module outputs that are no tap of ours.
//
// float16 is HDF5's IEEE half; bfloat16 is uint16 with the attribute dtype = "bfloat16" on the dataset. Checksums and
// seeds are 64-bit unsigned attributes.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/contract.hpp"
#include "core/layer.hpp"
#include "core/model_config.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"
#include "core/weights.hpp"

namespace cf::golden {

inline constexpr std::int64_t kSchemaVersion = 1;

struct GoldenMeta {
  std::string producer, command, versions, config_json, model;
  ModelConfig config;  // parsed from config_json, with dtype = the file's
  std::int64_t layer = 0;
  DType dtype = DType::f16;
  std::uint64_t seed = 0;
  Workload load;                     // kv_len is the largest of the sequences'
  std::vector<std::int32_t> kv_len;  // (batch)
  std::string cache = "none";
  std::uint64_t cache_checksum = 0;
  std::string weights = "stored";
  std::uint64_t weights_checksum = 0;
  std::string weights_checkpoint;
};

struct VariantInfo {
  std::string name, dtype, attn_implementation, device;
  std::vector<std::string> taps;
};

/// A layer's weights with whatever keeps their memory alive.
struct GoldenWeights {
  LayerWeights weights;
  DType dtype = DType::f16;
  std::shared_ptr<void> owner;
};

/// A golden file opened for reading. Every call refuses with the file and the dataset or attribute named.
class GoldenFile {
 public:
  /// Checks schema, version, attributes, and the shapes and dtypes of all inputs.
  static Result<GoldenFile> open(const std::string& path);

  const std::string& path() const;
  const GoldenMeta& meta() const;
  const std::vector<VariantInfo>& variants() const;

  /// An input, or a tap of a variant, as stored. A missing one is refused by name.
  Result<Tensor> input(const std::string& name) const;
  Result<Tensor> tap(const std::string& variant, const std::string& tap) const;

  /// Fills a state made for meta().config and meta().load: hidden, lengths, positions, the old cache entries, and a RoPE
  /// table that holds the file's cos and sin at the tokens' positions. Cache entries and table rows that no one may read
  /// are NaN.
  Status load(LayerState& state) const;

  /// The layer's weights, checked against weights_checksum. `checkpoint` replaces the file's own checkpoint directory
  /// where it is not empty.
  Result<GoldenWeights> weights(const std::string& checkpoint = "") const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

/// Writes a golden file: collects, then commits under a temporary name that is renamed. Without a commit nothing stays.
class GoldenWriter {
 public:
  static Result<GoldenWriter> create(const std::string& path, const GoldenMeta& meta);
  GoldenWriter(GoldenWriter&&) noexcept;
  ~GoldenWriter();

  Status add_input(const std::string& name, const Tensor& tensor);
  Status add_weight(const std::string& name, const Tensor& tensor);
  Status add_tap(const VariantInfo& variant, const std::string& tap, const Tensor& tensor);
  Status commit();

 private:
  struct Impl;
  explicit GoldenWriter(std::unique_ptr<Impl>);
  std::unique_ptr<Impl> impl_;
};

}  // namespace cf::golden
