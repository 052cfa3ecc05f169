#pragma once
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "core/weights.hpp"

namespace cf::test {

/// The paths of all golden files in data/, sorted.
inline std::vector<std::string> golden_files() {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(CF_DATA_DIR))
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

}  // namespace cf::test
