#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/model_config.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"
#include "core/weights.hpp"
#include "golden/gptq_config.hpp"
#include "golden/safetensors.hpp"

namespace cf::golden {

/// One layer's weights: views into the checkpoint's mapped files, valid as long as the Checkpoint they came from or a
/// copy of this struct lives.
struct CheckpointLayer {
  LayerWeights weights;
  DType dtype = DType::f16;            // of every weight that is not quantised
  std::vector<SafetensorsFile> files;  // keeps the mappings alive
  std::vector<Tensor> copies;          // tensors that the file holds misaligned
  std::vector<std::string> notes;      // where the checkpoint contradicts itself, and what was made of it; a line each
};

/// A Hugging Face GPT-NeoX checkpoint directory: config.json beside model.safetensors, or beside
/// model.safetensors.index.json and its shards. Opening reads the config, the index and nothing else; a shard is mapped
/// when a tensor of it is asked for, and only the tensors asked for are touched. GPTQ checkpoints, as AutoGPTQ and
/// GPTQModel write them, say so in quantize_config.json, else in quant_config.json, else in config.json's
/// quantization_config. Where several say it the first counts, and that they differ is noted.
class Checkpoint {
 public:
  /// Refuses, naming what was looked for: a directory that is missing or holds no safetensors file (with how to
  /// convert, where only .bin files are there); an index that names an absent shard; what parse_hf_config and
  /// parse_gptq_config refuse.
  static Result<Checkpoint> open(const std::string& directory);

  const std::string& directory() const { return directory_; }
  const ModelConfig& config() const { return config_; }  // named after the directory where config.json has no name
  const std::optional<GptqConfig>& gptq() const { return gptq_; }

  /// Layer `index`'s weights. Refuses an index beyond the model, tensors that are missing or twice in their file, of a
  /// wrong shape, or of dtypes other than F16, BF16, F32 or not all the same. The buffers that old checkpoints hold
  /// beside the weights (attention.bias, attention.masked_bias, attention.rotary_emb.inv_freq) are never asked for. Of
  /// a quantised Linear it refuses a dense tensor in its place, and the reverse; a size that no whole words hold; a
  /// g_idx outside the groups; scales that are no numbers. Whether zeros are stored or zeros less one is read off them
  /// where sym fixes them: all of them are then the middle code or the one below. Elsewhere the config's format counts.
  Result<CheckpointLayer> layer(std::int64_t index);

  /// Reads every file's header: whether each tensor's name belongs to a GPT-NeoX model of this config, and whether each
  /// is in the one shard that the index says. The first that is not is named.
  Status check_names();

 private:
  struct Found {
    const SafetensorsFile* file;
    const TensorEntry* entry;
  };
  /// The tensor and the file that holds it.
  Result<Found> find(const std::string& name);
  bool has(const std::string& name);
  /// The file of that name, mapped on first use.
  Result<const SafetensorsFile*> file(const std::string& name);

  std::string directory_;
  ModelConfig config_;
  std::optional<GptqConfig> gptq_;
  std::vector<std::string> notes_;
  bool sharded_ = false;
  std::map<std::string, std::string> shard_of_;        // tensor name -> file name; empty with a single file
  std::map<std::string, SafetensorsFile> open_files_;  // by file name
};

}  // namespace cf::golden
