#pragma once
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

namespace cf::test {

/// The paths of all golden files in data/, sorted.
inline std::vector<std::string> golden_files() {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(CF_DATA_DIR))
    if (entry.path().extension() == ".h5") paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace cf::test
