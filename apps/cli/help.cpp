#include "apps/cli/help.hpp"

#include <fmt/format.h>

#include <sstream>

namespace cf::apps {
namespace {

constexpr std::size_t kColumns = 80, kTextColumn = 28;

/// Adds the words of a text behind what the last line holds. Later lines begin in column `indent`.
void add_words(std::string& page, const std::string& text, std::size_t indent) {
  std::size_t column = page.size() - (page.rfind('\n') + 1);
  bool first = true;
  std::istringstream words(text);
  for (std::string word; words >> word; first = false) {
    if (!first && column + 1 + word.size() > kColumns) {
      page += '\n' + std::string(indent, ' ');
      column = indent;
      first = true;
    }
    page += (first ? "" : " ") + word;
    column += word.size() + !first;
  }
  page += '\n';
}

}  // namespace

std::string to_string(const HelpPage& page) {
  std::string text;
  add_words(text, page.description, 0);
  text += '\n';
  add_words(text, "Usage: " + page.usage, 7);
  for (const HelpSection& section : page.sections) {
    text += fmt::format("\n{}\n", section.title);
    for (const auto& [name, what] : section.entries) {
      // A name that leaves no room for two blanks has a line of its own.
      const std::string line = "  " + name;
      text += line;
      if (line.size() + 2 > kTextColumn)
        text += '\n' + std::string(kTextColumn, ' ');
      else
        text += std::string(kTextColumn - line.size(), ' ');
      add_words(text, what, kTextColumn);
    }
  }
  if (!page.examples.empty()) text += "\nExamples\n";
  for (const auto& [what, command] : page.examples) text += fmt::format("  # {}\n  {}\n", what, command);
  for (const std::string& note : page.notes) {
    text += '\n';
    add_words(text, note, 0);
  }
  return text;
}

}  // namespace cf::apps
