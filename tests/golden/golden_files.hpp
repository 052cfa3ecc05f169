#pragma once
#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "core/weights.hpp"
#include "golden/file/golden_file.hpp"

namespace cf::test {

/// The paths of all golden files of a folder of data/, sorted. Those of layers are in "golden", those of whole models
/// in "golden_model".
inline std::vector<std::string> golden_files(const std::string& folder = "golden") {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(CF_DATA_DIR "/" + folder))
    if (entry.path().extension() == ".h5") paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());
  return paths;
}

/// How many of a layer's Linears hold GPTQ weights.
inline std::size_t quantised_linears(const LayerWeights& w) {
  std::size_t n = 0;
  for (const LinearParams* l : {&w.query_key_value, &w.dense, &w.dense_h_to_4h, &w.dense_4h_to_h})
    n += std::holds_alternative<GptqWeight>(l->weight);
  return n;
}

/// What the persistent kernel says that it takes where it does not take a golden file; empty where it must.
inline std::string_view fused_refusal(const golden::GoldenMeta& m, const LayerWeights& w) {
  if (m.load.q_len > 1) return "one new token a sequence, got ";
  if (m.config.family().positions == Positions::learned) return "rotary position embeddings, got ";
  if (size_bytes(m.dtype) != 2) return "float16 or bfloat16, got ";
  if (quantised_linears(w) > 0) return "dense or packed weights, got quantised ones";
  return {};
}

}  // namespace cf::test
