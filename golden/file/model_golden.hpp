#pragma once
// A golden file of a whole model holds one greedy run of one sequence in HDF5: the token ids, the logits, and the
// outputs of some layers. `dump_hf.py --whole-model` writes such files from Hugging Face, ModelGoldenWriter from this
// library's backends. The seal, the types, the numbers and the texts are those of golden_file.hpp. The schema:
//
//   attributes of /
//     schema = "cf-golden-model", schema_version = 1
//     producer, command, versions, config, model, dtype, seed
//                         as in golden_file.hpp; config has as many layers as ran
//     weights             "checkpoint" | "procedural"
//     weights_checksum    cf::weights_checksum of the whole model
//     weights_checkpoint  the checkpoint's directory, relative to this file's directory; with weights = "checkpoint"
//     prompt_len          from 1 to tokens - 1
//   /ids                  (tokens)  int32   the prompt, and behind it the ids that the run in float64 chose, each from
//                         0 to vocab_size - 1. All but the last are fed, at the positions 0 to fed - 1:
//                         fed = tokens - 1, at most max_position_embeddings. Row p of every dataset below is of
//                         position p.
//   /inputs/cos, sin      (fed, rotary_dim / 2)  float32   the producer's values; absent without RoPE
//   /logits/<variant>     (fed, vocab)  the variant's dtype   row p predicts ids[p + 1]: from prompt_len - 1 on, that
//                         is the lowest id of the largest logit in the variant "float64".
//                         Where a file does not hold all logits, every variant is a group instead:
//     ids                 (fed, top)  int32   the ids of the largest logits in the variant "float64", the largest
//                         first, of equal ones the lowest id first; the same in every variant
//     values              (fed, top)  the variant's dtype   the variant's logits of these ids
//     log_sum_exp         (fed)  float64   log(sum(exp(row))) of the variant's whole row
//                         Attributes of the dataset or group: dtype, attn_implementation, device.
//   /taps/<variant>/<tap> (fed, hidden)  the variant's dtype   "embed_in", "final_layer_norm" (beside GPT-NeoX
//                         "embed_tokens", "norm"), and "layers.N.output" of any layers. Attributes of the variant's
//                         group: the same three. /taps may be absent, and so may a variant in it.
//
// Variant "float64" is the reference; others ("float16_eager", "float16_sdpa", ...) are the producer's arithmetic in
// another dtype over the same ids, with the logits as the head makes them.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/model/weights.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"
#include "golden/file/golden_file.hpp"

namespace cf::golden {

inline constexpr std::int64_t kModelSchemaVersion = 1;

/// The schemas of golden files.
enum class GoldenSchema { layer, model };  // "cf-golden", "cf-golden-model"

/// The schema that a golden file says it has. Checks the seal and the structure of the file, nothing else.
Result<GoldenSchema> golden_schema(const std::string& path);

/// The tap of a layer's output, "layers.N.output".
std::string layer_output_tap(std::int64_t layer);

struct ModelGoldenMeta : GoldenOrigin {
  std::int64_t tokens = 0;
  std::int64_t prompt_len = 0;
  std::int64_t top = 0;  // logits of a position that the file holds; 0 for all

  /// Positions that ran.
  std::int64_t fed() const { return tokens - 1; }
};

/// The largest logits of each position.
struct TopLogits {
  Tensor ids;          // (fed, top)  i32
  Tensor values;       // (fed, top)
  Tensor log_sum_exp;  // (fed)       f64
};

/// A whole model's weights, with the owner of their memory.
struct GoldenModelWeights {
  ModelWeights weights;
  DType dtype = DType::f16;
  std::shared_ptr<const void> owner;
  std::vector<std::string> notes{};  // CheckpointModel's
};

/// A golden file of a whole model opened for reading. Every call refuses with the file and the dataset or attribute
/// named.
class ModelGolden {
 public:
  /// Checks the seal, the structure of the file, schema and version, attributes, the shapes and dtypes of all datasets,
  /// the range of every token id, and the reference's logits: finite, in their order, and such that they choose the
  /// ids. A valid seal is no promise: any content is refused or safe to use. Refuses a model of more than 2^34
  /// parameters.
  static Result<ModelGolden> open(const std::string& path);

  const std::string& path() const;
  const ModelGoldenMeta& meta() const;
  /// The variants of the logits, each with its taps.
  const std::vector<VariantInfo>& variants() const;

  Result<Tensor> ids() const;                           // (tokens)  i32
  Result<Tensor> input(const std::string& name) const;  // "cos" or "sin": (fed, rotary_dim / 2)  f32
  /// All logits, (fed, vocab). Refuses a file that holds the largest ones alone.
  Result<Tensor> logits(const std::string& variant) const;
  /// The largest logits. Refuses a file that holds all of them.
  Result<TopLogits> top_logits(const std::string& variant) const;
  Result<Tensor> tap(const std::string& variant, const std::string& tap) const;  // (fed, hidden)

  /// The model's weights, checked against weights_checksum. Where `checkpoint` is not empty they come from that
  /// directory instead of the file's source. Weights of a checkpoint that are NaN or infinite are refused, and so are
  /// procedural weights that the machine's free memory does not hold.
  Result<GoldenModelWeights> weights(const std::string& checkpoint = "") const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

/// Writes a golden file of a whole model. All content stays in memory until commit() writes the file atomically. The
/// same content gives the same bytes.
class ModelGoldenWriter {
 public:
  /// Refuses a path that cannot be written. Where meta.config_json is empty, it is made from meta.config. The sizes in
  /// `meta` are those of the tensors that are added.
  static Result<ModelGoldenWriter> create(const std::string& path, const ModelGoldenMeta& meta);
  ModelGoldenWriter(ModelGoldenWriter&&) noexcept;
  ~ModelGoldenWriter();

  Status add_ids(const Tensor& ids);
  Status add_input(const std::string& name, const Tensor& tensor);
  /// Adds a variant's logits, all or the largest; variant.taps is not used.
  Status add_logits(const VariantInfo& variant, const Tensor& logits);
  Status add_logits(const VariantInfo& variant, const TopLogits& logits);
  Status add_tap(const VariantInfo& variant, const std::string& tap, const Tensor& tensor);
  Status commit();

 private:
  struct Impl;
  explicit ModelGoldenWriter(std::unique_ptr<Impl>);
  std::unique_ptr<Impl> impl_;
};

}  // namespace cf::golden
