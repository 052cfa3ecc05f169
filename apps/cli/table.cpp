#include "apps/cli/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "apps/cli/terminal.hpp"

namespace cf::apps {
namespace {

bool is_number(const std::string& cell) {
  char* end = nullptr;
  std::strtod(cell.c_str(), &end);
  return end != cell.c_str() && (*end == '\0' || std::string_view(end) == "%");
}

void make_visible(std::vector<std::string>& cells) {
  for (std::string& cell : cells) cell = visible(cell);
}

}  // namespace

Table::Table(std::vector<std::string> headers) : headers_(std::move(headers)) { make_visible(headers_); }

void Table::add(std::vector<std::string> cells) {
  make_visible(cells);
  rows_.push_back(std::move(cells));
}

void Table::print(std::FILE* out) const {
  std::string header = "|", rule = "|", body;
  std::vector<std::size_t> widths;
  std::vector<bool> numeric;
  for (std::size_t c = 0; c < headers_.size(); ++c) {
    std::size_t width = std::max<std::size_t>(headers_[c].size(), 3);
    bool numbers = !rows_.empty();
    for (const auto& row : rows_) {
      width = std::max(width, row[c].size());
      numbers = numbers && (row[c].empty() || row[c] == "-" || is_number(row[c]));
    }
    widths.push_back(width);
    numeric.push_back(numbers);
  }
  const auto cell = [&](const std::string& text, std::size_t c) {
    std::string padded = numeric[c] ? fmt::format("{:>{}}", text, widths[c]) : fmt::format("{:<{}}", text, widths[c]);
    if (text == kFail) padded = in_colour(padded, out);
    return " " + padded + " |";
  };
  for (std::size_t c = 0; c < headers_.size(); ++c) {
    header += cell(headers_[c], c);
    rule += numeric[c] ? fmt::format(" {:->{}}: |", "", widths[c] - 1) : fmt::format(" {:->{}} |", "", widths[c]);
  }
  for (const auto& row : rows_) {
    body += '|';
    for (std::size_t c = 0; c < headers_.size(); ++c) body += cell(row[c], c);
    body += '\n';
  }
  // Unlike fmt::print, fputs does not throw where the stream cannot be written.
  std::fputs((header + '\n' + rule + '\n' + body).c_str(), out);
}

}  // namespace cf::apps
