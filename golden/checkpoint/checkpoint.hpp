#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/model/config.hpp"
#include "core/model/weights.hpp"
#include "core/procedural.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"
#include "golden/checkpoint/fp8_config.hpp"
#include "golden/checkpoint/gptq_config.hpp"
#include "golden/checkpoint/safetensors.hpp"

namespace cf::checkpoint {

/// From now on an access to a file of a checkpoint that has become shorter reads zeros, which check_files() tells, in
/// place of ending the process by SIGBUS. Sets the process's handler of that signal; signals at addresses outside such
/// files go to the earlier handler. Programs and the Python package call this, the library itself does not.
void guard_mapped_files();

/// The memory of tensors that were loaded together. When it is destroyed, the pages that were read of these tensors
/// leave this process; the system may keep them in its cache.
struct CheckpointStorage {
  CheckpointStorage() = default;
  CheckpointStorage(const CheckpointStorage&) = delete;
  CheckpointStorage& operator=(const CheckpointStorage&) = delete;
  ~CheckpointStorage();

  std::vector<std::shared_ptr<const SafetensorsFile>> files;  // keep the mappings alive
  std::vector<const TensorEntry*> mapped;                     // the tensors that lie in these files
  std::vector<Tensor> copies;  // of the tensors that are misaligned in their file, joined, cast or fp8
};

/// One layer's weights: views into the checkpoint's mapped files, and of Linears that the checkpoint stores in several
/// modules or transposed a copy as the walk has them. They are valid as long as a copy of this struct lives.
struct CheckpointLayer {
  std::int64_t index = 0;
  LayerWeights weights;
  DType dtype = DType::f16;  // of every weight that is not quantised
  std::shared_ptr<const CheckpointStorage> storage;
  std::vector<std::string> notes;  // contradictions in the checkpoint and how they were resolved, a line each
};

/// A whole model's weights, valid as long as a copy of this struct lives.
struct CheckpointModel {
  ModelWeights weights;
  DType dtype = DType::f16;  // of every weight that is not quantised
  std::shared_ptr<const CheckpointStorage> storage;
  std::vector<std::string> notes;
};

/// A Hugging Face checkpoint directory of a family of core/families: config.json beside model.safetensors, or
/// beside model.safetensors.index.json and its shards. open() reads the config and the index only. layer() maps the
/// shards that hold its tensors and reads their headers, but no dense weight that it need not join. A shard is mapped
/// once, whatever is asked of it.
/// layer() and model() may be called from several threads.
/// Tensors may lack the prefix of the base model ("layers.0..."), as its save_pretrained() writes them, and a head may
/// have the family's other name.
/// A GPTQ checkpoint, as AutoGPTQ and GPTQModel write it, has quantize_config.json, quant_config.json, or
/// quantization_config in config.json. The first of these counts; a note says where a later one differs. Its files may
/// have the name that model_file_base_name gives.
/// An fp8 checkpoint has the quantization_config that parse_fp8_config() reads. A Linear whose weight is F8_E4M3 is fp8,
/// and any other is dense, whatever the config's lists say.
class Checkpoint {
 public:
  /// Where tie_word_embeddings is true and the files hold an LM head that differs from the embedding, the head counts,
  /// as in transformers 5, with a note; config() then says that they are not tied.
  /// Refuses, naming the file: a directory that is missing or holds no safetensors file (where it holds .bin files, the
  /// message says how to convert them); a git-lfs pointer; an index that names an absent shard; what parse_hf_config,
  /// parse_gptq_config and parse_fp8_config refuse.
  static Result<Checkpoint> open(const std::string& directory);

  /// The same from a config.json's text, a quantize_config.json's text or none, and tensors that lie in memory, which
  /// `owner` keeps. Their dtypes are spelled as in safetensors files. Messages name `source`. Without the second text,
  /// quantization_config in the first counts. A tensor of a Linear that files store in several modules may be whole,
  /// with the Linear's name (FamilySpec::names), (out, in), and its rows in the order of stored_parts(): it is read
  /// where it lies. So is one that files store transposed. Refuses what parse_hf_config and parse_gptq_config refuse,
  /// and fp8 weights (Code::unimplemented).
  static Result<Checkpoint> from_memory(std::string_view config, std::optional<std::string_view> gptq,
                                        std::vector<TensorEntry> tensors, std::shared_ptr<const void> owner,
                                        const std::string& source);

  const std::string& directory() const { return directory_; }
  /// The names of the files that hold its tensors, and the path of a file of the directory.
  std::vector<std::string> files() const;
  std::string path_of(const std::string& name) const;
  /// Whether it was made by from_memory().
  bool in_memory() const { return in_memory_; }
  const ModelConfig& config() const { return config_; }  // its name is the directory's where config.json has none
  const std::optional<GptqConfig>& gptq() const { return gptq_; }
  const std::optional<Fp8Config>& fp8() const { return fp8_; }

  /// Layer `index`'s weights. Refuses an index beyond the model; a shard that is truncated or a git-lfs pointer; a
  /// tensor that is missing, of a wrong shape, or of a dtype other than F16, BF16, F32 and F64; tensors in memory that
  /// have different dtypes.
  /// Of a quantised Linear it refuses a dense weight, and of a dense one a quantised weight; a size that is not a
  /// multiple of the codes in a word; a g_idx outside the groups; a scale that is NaN or infinite. Modules that are
  /// joined, q_proj, k_proj and v_proj, or gate_proj and up_proj, must all be dense or all quantised, with one g_idx.
  ///
  /// Where dense weights have different dtypes, or F64, those that are not of the config's dtype (without one, of the
  /// first weight's) are cast to it, as Hugging Face does, with a note: in memory of their own, rounded to nearest
  /// even; a value that leaves the dtype's range is refused. Scales are cast to float16. Without desc_act a missing
  /// g_idx is input / group_size.
  /// fp8 Linears are read into memory of their own. Refuses what is joined of fp8 and dense modules; fp8 weights that are
  /// stored transposed; codes and scales of another shape or dtype, and a code that is NaN.
  ///
  /// The buffers in old checkpoints (attention.bias, attention.masked_bias, attention.rotary_emb.inv_freq) are not
  /// read. With sym all zeros are the middle code, so qzeros that all hold the middle code mean format v2, and qzeros
  /// that all hold one less mean v1. Otherwise the config's format counts.
  ///
  /// Dense weights are not read, so that loading stays as cheap as mapping: call check_finite() where they matter.
  Result<CheckpointLayer> layer(std::int64_t index) const;

  /// The weights of all layers, the embeddings, the final norm and the LM head, which is the embedding where
  /// tie_word_embeddings says so. Refuses what layer() refuses of any of them.
  Result<CheckpointModel> model() const;

  /// Refuses a weight that is NaN or infinite; names the tensor, the first such element and their number. Reads every
  /// floating-point weight of the layer once: 8 GB/s on one core of a Xeon, 20 ms for a layer of Pythia-2.8B, once the
  /// file is in the page cache. Call it where the weights are read anyway: before they are packed or compared.
  Status check_finite(const CheckpointLayer& layer) const;
  /// `progress` is told of each tensor that was looked at.
  Status check_finite(const CheckpointModel& model, const WeightsProgress& progress = {}) const;

  /// Reads every file's header. Refuses the first tensor whose name is not one of a model of this config, or
  /// whose shard is not the one in the index.
  Status check_names() const;

  /// Refuses, naming it, a file of weights that has become shorter since it was mapped, or that could not be read.
  /// Values that were read before a call which is ok are the files' own. layer(), model() and check_finite() end with
  /// it.
  Status check_files() const;
  /// A note for each file of weights whose size or time of modification has changed since it was mapped.
  std::vector<std::string> changes() const;

  /// Refuses dense tensors that layer() would join in memory of its own, which reads them.
  Status check_dense_whole() const;

 private:
  using File = std::shared_ptr<const SafetensorsFile>;
  struct Found {
    File file;
    const TensorEntry* entry;
  };
  struct OpenFiles;  // by name, shared by copies of the checkpoint
  class Loader;

  Checkpoint();
  Status take_config(std::string_view text, const std::string& source);
  Status read_quantisation();
  std::string single_file() const;
  std::string index_file() const;
  /// The names under which files may hold a tensor, the library's first: files of a base model lack its prefix.
  std::vector<std::string> stored_names(const std::string& name) const;
  /// The tensor and the file that holds it, or nothing. Refuses a file that cannot be read, and files that hold the
  /// tensor under two of its names.
  Result<std::optional<Found>> look_up(const std::string& name) const;
  /// The same, which must be there.
  Result<Found> find(const std::string& name) const;
  bool has(const std::string& name) const;
  /// Whether the tensors in memory have one of that name, which may be a joined Linear's.
  bool has_whole(const std::string& name) const;
  /// The file of that name, mapped at the first call.
  Result<File> file(const std::string& name) const;
  /// Marks the Linears of a layer that are quantised. Checks that each is dense or quantised as the config says, and has
  /// sizes that fit. Reads no tensor.
  Status check_kinds(std::int64_t layer, LayerWeights& weights) const;
  /// Marks the fp8 Linears of a layer, whose weights are of kFp8Packer and have no data yet.
  Status mark_fp8(std::int64_t layer, LayerWeights& weights) const;
  /// Checks the values of each quantised Linear, and tells its format from its zeros.
  Status check_values(std::int64_t layer, LayerWeights& weights, std::vector<std::string>& notes) const;
  template <class V>
  Status check_finite(const std::string& name, const V& view, DType dtype) const;

  /// Unties the embeddings where the files hold a head that differs.
  Status compare_tied();

  std::string directory_;
  std::string name_ = "model";  // of the safetensors files, before their suffix
  ModelConfig config_;
  std::optional<DType> config_dtype_;  // where config.json names one
  std::optional<GptqConfig> gptq_;     // at most one of the two
  std::optional<Fp8Config> fp8_;
  std::vector<std::string> notes_;
  bool sharded_ = false;
  bool in_memory_ = false;
  std::map<std::string, std::string> shard_of_;  // tensor name -> file name; empty with a single file
  std::shared_ptr<OpenFiles> open_files_;
};

}  // namespace cf::checkpoint
