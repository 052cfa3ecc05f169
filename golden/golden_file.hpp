#pragma once
// A golden file: one step of one layer, with what went in and what every site made ("taps"), in HDF5. Written by
// dump_hf.py from Hugging Face and by GoldenWriter from our own backends, in one schema:
//
//   the first 512 bytes are HDF5's user block, the seal over all that follows:
//     bytes 0-7     "cfgolden"
//     bytes 8-15    u64 little-endian: the length in bytes of the file behind the block
//     bytes 16-23   u64 little-endian: cf::checksum (core/procedural.hpp) of those bytes
//     bytes 24-511  zeros
//   It is verified before HDF5 parses anything: a truncated or damaged file is refused as such. A writer leaves the
//   block empty (h5py: userblock_size=512), closes the file, and fills it in before the file gets its final name.
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
//   /inputs/kv_len      (batch)             int32               valid entries after the append: q_len to the model's
//                       max_position_embeddings
//   /inputs/positions   (tokens)            int32               below max_position_embeddings
//   /inputs/cos, sin    (tokens, rotary_dim / 2)  float32       as the producer used them, a row a token; tokens at the
//                       same position have the same row
//   /inputs/k_cache, v_cache  (batch, heads, max(kv_len) - q_len, head_dim)  stored dtype: the entries before the append;
//                       rows that a shorter sequence does not have are zero. Absent where there are no such entries.
//                       Procedural ones are not stored: they are elements 0 .. of the tensors "k_cache" and "v_cache"
//                       of this whole shape, kind activation (core/procedural.hpp)
//   /weights/<name>     by the name below gpt_neox.layers.N, with weights = "stored"
//   /taps/<variant>/<tap>   variant "float64" is the reference; others ("float16_eager", "float16_sdpa", ...) are the
//                       producer's own arithmetic. Group attributes: dtype, attn_implementation, device.
//                       Taps are those of tap_dims(), in its shapes; kv_append's are appended_rows().
//                       Of GPTQ weights also weight_tap()s, exact in float64.
//                       Names starting "hf." are Hugging Face's module outputs that are no tap of ours.
//
// float16 is HDF5's IEEE half; bfloat16 is uint16 with the attribute dtype = "bfloat16" on the dataset. All numbers are
// little-endian. Checksums and seeds are 64-bit unsigned attributes. Links are hard and data lies in the file itself.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/contract.hpp"
#include "core/layer.hpp"
#include "core/model_config.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"
#include "core/weights.hpp"

namespace cf::golden {

inline constexpr std::int64_t kSchemaVersion = 1;
inline constexpr std::string_view kReference = "float64";  // the variant that others are measured against

struct GoldenMeta {
  std::string producer, command, versions, config_json, model;
  ModelConfig config;  // parsed from config_json, with dtype = the file's
  std::int64_t layer = 0;
  DType dtype = DType::f16;
  std::uint64_t seed = 0;
  Workload load;                     // kv_len is the largest of the sequences', also the capacity
  std::vector<std::int32_t> kv_len;  // (batch)
  std::string cache = "none";
  std::uint64_t cache_checksum = 0;
  std::string weights = "stored";
  std::uint64_t weights_checksum = 0;
  std::string weights_checkpoint;
};

/// A dimension of a tap: its name, as a coordinate is printed, and its size.
struct TapDim {
  std::string_view name;
  std::int64_t size;
};

/// The tap of a quantised Linear's weight, dequantised: (out, in). `module` is the Linear's site.
std::string weight_tap(std::string_view module);

/// The dimensions of a tap; empty for a name that is neither a weight_tap() nor a tap of core/layer.hpp.
std::vector<TapDim> tap_dims(const ModelConfig& config, const Workload& load, std::string_view tap);

/// One group of taps: the arithmetic that made them.
struct VariantInfo {
  std::string name, dtype, attn_implementation, device;
  std::vector<std::string> taps;
};

/// A layer's weights with whatever keeps their memory alive.
struct GoldenWeights {
  LayerWeights weights;
  DType dtype = DType::f16;
  std::shared_ptr<void> owner;
  std::vector<std::string> notes{};  // CheckpointLayer's
};

/// A golden file opened for reading. Every call refuses with the file and the dataset or attribute named.
class GoldenFile {
 public:
  /// Checks the seal, schema, version, attributes, the shapes and dtypes of inputs and taps, the ranges of kv_len and
  /// positions. Refuses a layer or step of more than 2^33 elements, so that no file asks for more memory than a machine
  /// has.
  static Result<GoldenFile> open(const std::string& path);

  const std::string& path() const;
  const GoldenMeta& meta() const;
  const std::vector<VariantInfo>& variants() const;

  /// An input as stored, or made and verified where the cache is procedural; a tap of a variant as stored. A missing
  /// one is refused by name.
  Result<Tensor> input(const std::string& name) const;
  Result<Tensor> tap(const std::string& variant, const std::string& tap) const;

  /// Fills a state made for meta().config and meta().load: hidden, lengths, positions, the old cache entries, and a
  /// RoPE table that holds the file's cos and sin at the tokens' positions. Cache entries and table rows that no one
  /// may read are NaN.
  Status load(LayerState& state) const;

  /// The layer's weights, checked against weights_checksum. Where `checkpoint` is not empty they come from that
  /// directory, whatever source the file names.
  Result<GoldenWeights> weights(const std::string& checkpoint = "") const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

/// Writes a golden file: collects in memory, then commits under a temporary name that is renamed. Without a commit
/// nothing is written. The same content gives the same bytes.
class GoldenWriter {
 public:
  /// Refuses a path that could not be written. meta.config_json may be empty: it is made from meta.config then.
  static Result<GoldenWriter> create(const std::string& path, const GoldenMeta& meta);
  GoldenWriter(GoldenWriter&&) noexcept;
  ~GoldenWriter();

  Status add_input(const std::string& name, const Tensor& tensor);
  Status add_weight(const std::string& name, const Tensor& tensor);
  /// variant.taps is not read.
  Status add_tap(const VariantInfo& variant, const std::string& tap, const Tensor& tensor);
  Status commit();

 private:
  struct Impl;
  explicit GoldenWriter(std::unique_ptr<Impl>);
  std::unique_ptr<Impl> impl_;
};

}  // namespace cf::golden
