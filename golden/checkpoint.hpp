#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/model_config.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"
#include "core/weights.hpp"
#include "golden/safetensors.hpp"

namespace cf::golden {

/// One layer's weights: views into the checkpoint's mapped files, valid as long as the Checkpoint they came from or a
/// copy of this struct lives.
struct CheckpointLayer {
  LayerWeights weights;
  DType dtype = DType::f16;            // of every weight
  std::vector<SafetensorsFile> files;  // keeps the mappings alive
  std::vector<Tensor> copies;          // tensors that the file holds misaligned
};

/// A Hugging Face GPT-NeoX checkpoint directory: config.json beside model.safetensors, or beside
/// model.safetensors.index.json and its shards. Opening reads the config, the index and nothing else; a shard is mapped
/// when a tensor of it is asked for, and only the tensors asked for are touched.
class Checkpoint {
 public:
  /// Refuses, naming what was looked for: a directory that is missing or holds no safetensors file (with how to convert,
  /// where only .bin files are there); an index that names an absent shard; what parse_hf_config refuses.
  static Result<Checkpoint> open(const std::string& directory);

  const std::string& directory() const { return directory_; }
  const ModelConfig& config() const { return config_; }  // named after the directory where config.json has no name

  /// Layer `index`'s weights. Refuses an index beyond the model, tensors that are missing or twice in their file, of a
  /// wrong shape, or of dtypes other than F16, BF16, F32 or not all the same. The buffers that old checkpoints
  /// hold beside the weights (attention.bias, attention.masked_bias, attention.rotary_emb.inv_freq) are never asked for.
  Result<CheckpointLayer> layer(std::int64_t index);

  /// Reads every file's header: whether each tensor's name belongs to a GPT-NeoX model of this config, and whether each is
  /// in the one shard that the index says. The first that is not is named.
  Status check_names();

 private:
  struct Found {
    const SafetensorsFile* file;
    const TensorEntry* entry;
  };
  /// The tensor and the file that holds it.
  Result<Found> find(const std::string& name);
  /// The file of that name, mapped on first use.
  Result<const SafetensorsFile*> file(const std::string& name);

  std::string directory_;
  ModelConfig config_;
  bool sharded_ = false;
  std::map<std::string, std::string> shard_of_;        // tensor name -> file name; empty with a single file
  std::map<std::string, SafetensorsFile> open_files_;  // by file name
};

}  // namespace cf::golden
