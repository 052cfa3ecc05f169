#pragma once
// A golden file holds one step of one layer in HDF5: the inputs, and the output of every site ("taps"). dump_hf.py
// writes golden files from Hugging Face, GoldenWriter from this library's backends. The schema:
//
//   seal: the first 512 bytes, HDF5's user block, cover all bytes after them
//     bytes 0-7     "cfgolden"
//     bytes 8-15    u64 little-endian: the number of bytes after the seal
//     bytes 16-23   u64 little-endian: cf::checksum (core/procedural.hpp) of these bytes
//     bytes 24-511  zeros
//   The reader checks the seal first, so that a truncated or damaged file is refused as such. A writer leaves the block
//   empty (h5py: userblock_size=512), closes the file, fills the block in, and renames the file to its final name.
//
//   attributes of /
//     schema = "cf-golden", schema_version = 2
//     producer          the program that wrote it
//     command           its command line
//     versions          JSON: library versions
//     config            JSON: the model's config.json, in the names of transformers 4.x or 5.x
//     model, layer      the model's name, the layer's index
//     dtype             "float16" | "bfloat16" | "float32": the stored type of hidden, cache and weights
//     seed              of all random and procedural values in the file
//     batch, q_len      each of `batch` sequences has q_len new tokens; tokens = batch * q_len
//     cache             "prefill" | "random" (both stored) | "procedural" | "none" (kv_len = q_len everywhere)
//     cache_checksum    checksum of K's bytes plus 3 times the checksum of V's; with cache = "procedural"
//     weights           "stored" | "checkpoint" | "procedural" | "procedural_gptq"
//     weights_checksum  cf::weights_checksum of the layer, for every source
//     weights_checkpoint  the checkpoint's directory, relative to this file's directory; with weights = "checkpoint"
//     weights_bits, weights_group_size   of every Linear's GPTQ weight: 4 or 8, and the inputs that share a scale, -1
//                       for all; with weights = "procedural_gptq"
//   /inputs/hidden      (tokens, hidden)                        stored dtype
//   /inputs/kv_len      (batch)             int32               valid cache entries after the append: from q_len to
//                       max_position_embeddings
//   /inputs/positions   (tokens)            int32               below max_position_embeddings
//   /inputs/cos, sin    (tokens, rotary_dim / 2)  float32       the producer's values; tokens at the same position have
//                       the same row. Absent without RoPE
//   /inputs/k_cache, v_cache  (batch, heads, max(kv_len) - q_len, head_dim)  stored dtype: the entries before the
//                       append. The rows beyond a shorter sequence's entries are zero. Absent where
//                       max(kv_len) = q_len. With cache = "procedural" they are absent too: they are the tensors
//                       "k_cache" and "v_cache" of this shape, of kind activation (core/procedural.hpp)
//   /weights/<name>     with weights = "stored", by the name below the layer that checkpoints have. What the walk
//                       joins (q_proj, k_proj and v_proj; gate_proj and up_proj) may also be whole, by the walk's name.
//                       What checkpoints store as (in, out) is so here, too
//   /taps/<variant>/<tap>   variant "float64" is the reference; others ("float16_eager", "float16_sdpa", ...) are the
//                       producer's arithmetic in another dtype. Group attributes: dtype, attn_implementation, device.
//                       The taps of a site have the shapes of tap_dims(); kv_append's are appended_rows().
//                       weight_tap()s hold dequantised GPTQ weights, exact in float64; a file may lack them.
//                       Names that begin with "hf." are outputs of Hugging Face's modules which are not taps of a site.
//
// float16 is HDF5's IEEE half; bfloat16 is uint16 with the attribute dtype = "bfloat16" on the dataset. All numbers are
// little-endian, attributes are 64-bit integers and UTF-8 strings, checksums and seeds are unsigned. hdf5_reader.hpp
// says which part of HDF5 a file may use.
//
// Versions: in schema 1 strings have a variable length and lie in global heaps; in schema 2 all have a fixed length, of
// at most 65000 bytes. Both are read, schema 2 is written; convert_golden.py rewrites files of schema 1.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/contract.hpp"
#include "core/model/config.hpp"
#include "core/model/layer.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"
#include "core/weights.hpp"

namespace cf::golden {

inline constexpr std::int64_t kSchemaVersion = 2, kOldestSchemaVersion = 1;  // the version written, the oldest read
inline constexpr std::string_view kReference = "float64";  // the variant with which others are compared

/// The attributes that golden files of every schema have.
struct GoldenOrigin {
  std::string producer, command, versions, config_json, model;
  ModelConfig config;  // parsed from config_json, with dtype = the file's
  DType dtype = DType::f16;
  std::uint64_t seed = 0;
  std::string weights = "stored";
  std::uint64_t weights_checksum = 0;
  std::string weights_checkpoint;
};

struct GoldenMeta : GoldenOrigin {
  std::int64_t layer = 0;
  Workload load;                     // its kv_len is the largest of all sequences, which is the capacity too
  std::vector<std::int32_t> kv_len;  // (batch)
  std::string cache = "none";
  std::uint64_t cache_checksum = 0;
  WeightFormat linears{};  // with weights = "procedural_gptq"
};

/// A dimension of a tap: its name, which coordinates are printed with, and its size.
struct TapDim {
  std::string_view name;
  std::int64_t size;
};

/// The tap of a quantised Linear's weight, dequantised: (out, in). `module` is the Linear's site.
std::string weight_tap(std::string_view module);

/// The dimensions of a tap; empty for a name that is neither a weight_tap() nor a tap of core/model/layer.hpp.
std::vector<TapDim> tap_dims(const ModelConfig& config, const Workload& load, std::string_view tap);

/// One group of taps: the arithmetic that made them.
struct VariantInfo {
  std::string name, dtype, attn_implementation, device;
  std::vector<std::string> taps;
};

/// A layer's weights, with the owner of their memory.
struct GoldenWeights {
  LayerWeights weights;
  DType dtype = DType::f16;
  std::shared_ptr<const void> owner;
  std::vector<std::string> notes{};  // CheckpointLayer's
};

/// A golden file opened for reading. Every call refuses with the file and the dataset or attribute named.
class GoldenFile {
 public:
  /// Checks the seal, the structure of the file, schema and version, attributes, the shapes and dtypes of inputs and
  /// taps, the ranges of kv_len and positions. A valid seal is no promise: any content is refused or safe to use.
  /// Refuses a layer or a step of more than 2^33 elements.
  static Result<GoldenFile> open(const std::string& path);

  const std::string& path() const;
  const GoldenMeta& meta() const;
  const std::vector<VariantInfo>& variants() const;

  /// An input or a tap as stored. A procedural cache is made, where the free memory holds it, and checked against
  /// cache_checksum.
  Result<Tensor> input(const std::string& name) const;
  Result<Tensor> tap(const std::string& variant, const std::string& tap) const;

  /// Fills a state made for meta().config and meta().load: hidden, lengths, positions, the cache entries before the
  /// append, and a RoPE table with the file's cos and sin at the tokens' positions. All other cache entries and table
  /// rows become NaN. Refuses positions beyond the table, which has as many rows as the cache has entries.
  Status load(LayerState& state) const;

  /// The layer's weights, checked against weights_checksum. Where `checkpoint` is not empty they come from that
  /// directory instead of the file's source. Weights of a checkpoint that are NaN or infinite are refused, and so are
  /// procedural weights that the machine's free memory does not hold.
  Result<GoldenWeights> weights(const std::string& checkpoint = "") const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

/// Writes a golden file. All content stays in memory until commit() writes the file atomically. The same content gives
/// the same bytes.
class GoldenWriter {
 public:
  /// Refuses a path that cannot be written. Where meta.config_json is empty, it is made from meta.config.
  static Result<GoldenWriter> create(const std::string& path, const GoldenMeta& meta);
  GoldenWriter(GoldenWriter&&) noexcept;
  ~GoldenWriter();

  Status add_input(const std::string& name, const Tensor& tensor);
  Status add_weight(const std::string& name, const Tensor& tensor);
  /// Adds a tap to a variant's group; variant.taps is not used.
  Status add_tap(const VariantInfo& variant, const std::string& tap, const Tensor& tensor);
  Status commit();

 private:
  struct Impl;
  explicit GoldenWriter(std::unique_ptr<Impl>);
  std::unique_ptr<Impl> impl_;
};

}  // namespace cf::golden
