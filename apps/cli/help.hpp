#pragma once
// The page that --help prints, at most 80 columns wide.
#include <string>
#include <vector>

namespace cf::apps {

/// A list under a title: options of one kind, commands, or the columns of a table. `name` may hold an option's value,
/// such as "--batch INT".
struct HelpSection {
  struct Entry {
    std::string name, text;
  };
  std::string title;
  std::vector<Entry> entries{};
};

/// A command line to copy, and what it does.
struct HelpExample {
  std::string what, command;
};

struct HelpPage {
  std::string description, usage;
  std::vector<HelpSection> sections{};
  std::vector<HelpExample> examples{};
  std::vector<std::string> notes{};  // paragraphs
};

/// The page's text. Paragraphs and entries are broken between words; an example's command is left whole.
std::string to_string(const HelpPage& page);

}  // namespace cf::apps
