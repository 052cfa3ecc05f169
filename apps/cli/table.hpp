#pragma once
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace cf::apps {

/// A markdown table whose columns are padded to one width. A column of numbers is aligned to the right; "-" and empty
/// cells count as numbers. A cell that says FAIL is red on a terminal. Control characters are escaped.
class Table {
 public:
  explicit Table(std::vector<std::string> headers);
  /// A row of as many cells as there are headers.
  void add(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  void print(std::FILE* out) const;

 private:
  std::vector<std::string> headers_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace cf::apps
