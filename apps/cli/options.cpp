#include "apps/cli/options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <numeric>

#include "apps/cli/program.hpp"

namespace cf::apps {
namespace {

/// How many characters must be inserted, removed or replaced to turn a into b.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t(0));
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] != b[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

/// ", did you mean NAME?" with the nearest of the names. Empty where all names are more than two edits away.
std::string hint(std::string_view text, const std::vector<std::string>& names) {
  const auto nearer = [&](const std::string& a, const std::string& b) {
    return edit_distance(text, a) < edit_distance(text, b);
  };
  const auto nearest = std::min_element(names.begin(), names.end(), nearer);
  if (nearest == names.end() || edit_distance(text, *nearest) > 2) return "";
  return fmt::format(", did you mean {}?", *nearest);
}

bool is_same_file(const std::string& a, const std::string& b) {
  std::error_code none;
  const auto path = [&](const std::string& p) { return std::filesystem::weakly_canonical(p, none); };
  return a == b || std::filesystem::equivalent(a, b, none) || (path(a) == path(b) && !path(a).empty());
}

/// Whether the file at `path` is one of the directory's, by itself or by a link of either kind.
bool is_file_of(const std::string& directory, const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code none;
  if (!fs::is_directory(directory, none) || !fs::is_regular_file(path, none)) return false;
  const fs::path folder = fs::canonical(directory, none), file = fs::canonical(path, none);
  if (std::mismatch(folder.begin(), folder.end(), file.begin(), file.end()).first == folder.end()) return true;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    if (fs::equivalent(it->path(), path, none)) return true;
  return false;
}

/// "--batch" of "--batch,--tokens".
std::string first_name(const std::string& names) { return names.substr(0, names.find(',')); }

/// "--batch, --tokens" of "--batch,--tokens".
std::string spaced(std::string names) {
  for (std::size_t comma = 0; (comma = names.find(',', comma)) != names.npos; comma += 2) names.replace(comma, 1, ", ");
  return names;
}

int print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) return fail("standard output: cannot be written");
  return kOk;
}

}  // namespace

void Faults::expected(std::string_view option, std::string_view what, std::string_view value) {
  add(fmt::format("{}: expected {}, got '{}'", option, what, value));
}

Status check_apart(std::string_view option, const std::string& output, std::string_view reader,
                   const std::string& directory) {
  if (!is_file_of(directory, output)) return {};
  return Status::error(Code::invalid_argument,
                       fmt::format("{}: expected a file of its own, got '{}', which is one of {} {}", option, output,
                                   reader, directory));
}

void Faults::add(const Status& status) {
  if (!status) add(status.message());
}

std::string Faults::line() const { return fmt::format("{}", fmt::join(faults_, "; ")); }

std::string Range::text() const {
  return fmt::format("{}{} to {}{}", also ? fmt::format("{} or ", *also) : "", lowest, highest,
                     note.empty() ? "" : fmt::format(" ({})", note));
}

std::optional<DType> parse_dtype(std::string_view name) {
  if (name == "f16" || name == "fp16") return DType::f16;
  if (name == "bf16") return DType::bf16;
  if (name == "f32" || name == "fp32") return DType::f32;
  if (name == "f64" || name == "fp64") return DType::f64;
  return dtype_from_string(name);
}

std::string list_of(const std::vector<std::string>& names) {
  if (names.size() < 2) return names.empty() ? "nothing" : names[0];
  return fmt::format("{} or {}", fmt::join(names.begin(), names.end() - 1, ", "), names.back());
}

std::string list_of(const std::vector<DType>& dtypes) {
  std::vector<std::string> names;
  for (DType d : dtypes) names.emplace_back(to_string(d));
  return list_of(names);
}

struct CommandLine::State {
  struct Option {
    std::string name;  // the first of its names
    CLI::Option* parsed;
    Accept accept;  // none for a flag
    bool* flag = nullptr;
    std::string kind{};                // of its value
    std::vector<std::string> known{};  // values that completion offers
    bool many = false;                 // of words()
  };
  struct Path {
    std::string option, path;
  };

  std::unique_ptr<CLI::App> own;  // none for a subcommand, which its parent's CLI::App owns
  CLI::App* app;
  std::vector<std::unique_ptr<CommandLine>> subcommands{};
  std::vector<Option> options{};
  std::vector<std::string> reads{};  // names of options
  std::vector<std::function<void(Faults&)>> checks{};
  std::string title = "Options";  // of the section of --help that options go to
  HelpPage page{};
  std::vector<std::string> needed{};      // words of the usage
  std::vector<Path> outputs{}, inputs{};  // the files of the command line, collected as the options take their values

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const CLI::Option* o : app->get_options())
      for (const std::string& name : o->get_lnames()) names.push_back("--" + name);
    return names;
  }
  /// "--batch INT".
  std::string with_kind(const std::string& name) const {
    for (const Option& o : options)
      if (o.name == name && !o.kind.empty()) return name + " " + o.kind;
    return name;
  }
};

CommandLine::CommandLine(const std::string& description, const std::string& version)
    : CommandLine([&] {
        auto app = std::make_unique<CLI::App>(description);
        CLI::App* const parser = app.get();
        return std::make_unique<State>(State{.own = std::move(app), .app = parser});
      }()) {
  if (!version.empty()) state_->app->set_version_flag("--version", version);
}
CommandLine::CommandLine(std::unique_ptr<State> state) : state_(std::move(state)) { state_->app->allow_extras(); }
CommandLine::~CommandLine() = default;

CommandLine& CommandLine::subcommand(const std::string& name, const std::string& description) {
  CLI::App* const app = state_->app->add_subcommand(name, description);
  state_->app->require_subcommand(0, 1);
  state_->subcommands.push_back(
      std::unique_ptr<CommandLine>(new CommandLine(std::make_unique<State>(State{.own = nullptr, .app = app}))));
  return *state_->subcommands.back();
}

bool CommandLine::chosen() const { return state_->app->parsed(); }

bool CommandLine::given(std::string_view name) const {
  for (const State::Option& o : state_->options)
    if (o.name == name) return o.parsed->count() > 0;
  return false;
}

void CommandLine::show(const std::string& name, const std::string& help) {
  std::vector<HelpSection>& sections = state_->page.sections;
  const auto same = [this](const HelpSection& s) { return s.title == state_->title; };
  auto section = std::find_if(sections.begin(), sections.end(), same);
  if (section == sections.end()) section = sections.insert(section, {.title = state_->title});
  section->entries.push_back({name, help});
}

void CommandLine::option(const std::string& name, const std::string& kind, const std::string& default_value,
                         const std::string& help, Accept accept, std::vector<std::string> known) {
  CLI::Option* const parsed = state_->app->add_option(name, help);
  parsed->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  state_->options.push_back({.name = first_name(name),
                             .parsed = parsed,
                             .accept = std::move(accept),
                             .kind = name.starts_with("-") ? kind : "",
                             .known = std::move(known)});
  show(spaced(name) + (name.starts_with("-") ? " " + kind : ""),
       help + (default_value.empty() ? "" : fmt::format(" (default {})", default_value)));
}

void CommandLine::text(const std::string& name, std::string& value, const std::string& help, const std::string& kind,
                       const std::vector<std::string>& known) {
  const auto accept = [&value](const std::string& text) -> std::string {
    if (text.empty()) return "a text";
    value = text;
    return "";
  };
  option(name, kind, value, known.empty() ? help : help + ": " + list_of(known), accept, known);
}

void CommandLine::words(const std::string& name, std::vector<std::string>& values, const std::string& help,
                        const std::string& kind, const std::vector<std::string>& known) {
  const auto accept = [&values, known](const std::string& text) {
    if (text.empty()) return std::string("a text");
    if (!known.empty() && std::find(known.begin(), known.end(), text) == known.end()) return list_of(known);
    values.push_back(text);
    return std::string();
  };
  option(name, kind + "...", "", help, accept, known);
  state_->options.back().many = true;
  state_->options.back().parsed->expected(-1);
}

void CommandLine::choice(const std::string& name, std::string& value, const std::vector<std::string>& choices,
                         const std::string& help) {
  const std::string kind = fmt::format("{}", fmt::join(choices, "|"));
  const bool fits = kind.size() <= 30;  // on the option's own line of --help
  const auto accept = [&value, choices](const std::string& text) {
    if (std::find(choices.begin(), choices.end(), text) == choices.end()) return list_of(choices);
    value = text;
    return std::string();
  };
  option(name, fits ? kind : "NAME", value, fits ? help : help + ": " + list_of(choices), accept, choices);
}

void CommandLine::integer(const std::string& name, std::int64_t& value, const Range& range, const std::string& help) {
  option(name, "INT", std::to_string(value), help, [&value, range](const std::string& text) {
    const auto number = parse_integer<std::int64_t>(text);
    if (!number || !range.holds(*number)) return range.text();
    value = *number;
    return std::string();
  });
}

void CommandLine::integer(const std::string& name, std::optional<std::int64_t>& value, const Range& range,
                          const std::string& help) {
  option(name, "INT", value ? std::to_string(*value) : "", help, [&value, range](const std::string& text) {
    const auto number = parse_integer<std::int64_t>(text);
    if (!number || !range.holds(*number)) return range.text();
    value = number;
    return std::string();
  });
}

void CommandLine::number(const std::string& name, double& value, const std::string& help) {
  option(name, "NUMBER", fmt::format("{}", value), help, [&value](const std::string& text) {
    double number = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    if (error != std::errc() || stop != end || !std::isfinite(number)) return std::string("a number such as 0.7");
    value = number;
    return std::string();
  });
}

void CommandLine::seed(const std::string& name, std::uint64_t& value, const std::string& help) {
  option(name, "INT", std::to_string(value), help, [&value](const std::string& text) {
    const auto number = parse_integer<std::uint64_t>(text);
    if (!number) return fmt::format("0 to {}", ~std::uint64_t(0));
    value = *number;
    return std::string();
  });
}

void CommandLine::dtype(const std::string& name, std::optional<DType>& value, const std::vector<DType>& dtypes,
                        const std::string& help) {
  const auto accept = [&value, dtypes](const std::string& text) {
    const auto dtype = parse_dtype(text);
    if (!dtype || std::find(dtypes.begin(), dtypes.end(), *dtype) == dtypes.end()) return list_of(dtypes);
    value = dtype;
    return std::string();
  };
  std::vector<std::string> known;
  for (DType d : dtypes) known.emplace_back(to_string(d));
  option(name, "DTYPE", value ? std::string(to_string(*value)) : "",
         help + (help.empty() ? "" : ": ") + list_of(dtypes), accept, known);
}

void CommandLine::flag(const std::string& name, bool& value, const std::string& help) {
  state_->options.push_back({first_name(name), state_->app->add_flag(name, help), nullptr, &value});
  show(spaced(name), help);
}

void CommandLine::output(const std::string& name, std::string& path, const std::string& help, bool dash) {
  option(name, "FILE", "", help, [this, &path, dash, name = first_name(name)](const std::string& text) -> std::string {
    if (text.empty()) return "a file's path";
    path = text;
    if (!dash || text != "-") state_->outputs.push_back({name, text});
    return "";
  });
}

void CommandLine::reads(const std::string& name) { state_->reads.push_back(name); }

void CommandLine::files(const std::string& name, std::vector<std::string>& paths, std::size_t least, std::size_t most,
                        const std::string& help) {
  CLI::Option* const parsed = state_->app->add_option(name, help);
  parsed->expected(-1)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  state_->needed.push_back(most == 1 ? name : name + "...");
  show(name, help);
  check([this, name, &paths, least, most, parsed](Faults& faults) {
    paths = parsed->results();
    // The word behind an unknown option may be its value: with such an option the number of files is not known.
    const bool counted = state_->app->remaining().empty();
    if (counted && (paths.size() < least || paths.size() > most))
      faults.add(fmt::format("{}: expected {}{}, got {}", name, least,
                             most == least   ? ""
                             : most == kMany ? " or more"
                                             : fmt::format(" to {}", most),
                             paths.size()));
    for (const std::string& path : paths) {
      if (path.empty()) faults.expected(name, "a file's path", path);
      state_->inputs.push_back({name, path});
    }
  });
}

void CommandLine::require(const std::string& name, const std::string& other) {
  state_->needed.push_back(state_->with_kind(name));
  check([this, name, other](Faults& faults) {
    if (!given(name) && !given(other)) faults.add(name + ": required, not given");
  });
}

void CommandLine::require_one(const std::string& a, const std::string& b) {
  state_->needed.push_back(fmt::format("({} | {})", state_->with_kind(a), state_->with_kind(b)));
  check([this, a, b](Faults& faults) {
    if (given(a) == given(b))
      faults.add(fmt::format("{} or {}: expected one of them, got {}", a, b, given(a) ? "both" : "none"));
  });
}

void CommandLine::needs(const std::string& name, const std::string& other) {
  check([this, name, other](Faults& faults) {
    if (given(name) && !given(other)) faults.add(fmt::format("{}: expected with {}", name, other));
  });
}

void CommandLine::excludes(const std::string& a, const std::string& b) {
  check([this, a, b](Faults& faults) {
    if (given(a) && given(b)) faults.add(fmt::format("{}: expected without {}", a, b));
  });
}

void CommandLine::check(std::function<void(Faults&)> check) { state_->checks.push_back(std::move(check)); }

void CommandLine::group(const std::string& title) { state_->title = title; }

void CommandLine::section(HelpSection section) { state_->page.sections.push_back(std::move(section)); }

void CommandLine::example(const std::string& what, const std::string& command) {
  state_->page.examples.push_back({what, command});
}

void CommandLine::notes(const std::string& text) { state_->page.notes.push_back(text); }

HelpPage CommandLine::page() const {
  const State& s = *state_;
  HelpPage page = s.page;
  page.description = s.app->get_description();
  page.usage = s.app->get_parent() ? s.app->get_parent()->get_name() + " " + s.app->get_name() : s.app->get_name();
  if (!s.subcommands.empty()) {
    page.usage += " COMMAND [options]";
    HelpSection commands{.title = "Commands"};
    for (const auto& line : s.subcommands)
      commands.entries.push_back({line->state_->app->get_name(), line->state_->app->get_description()});
    page.sections.insert(page.sections.begin(), std::move(commands));
    page.notes.push_back(fmt::format("{} COMMAND --help shows a command's options.", s.app->get_name()));
  } else {
    for (const std::string& word : s.needed) page.usage += " " + word;
    page.usage += " [options]";
  }
  HelpSection other{.title = "Other", .entries = {{"-h, --help", "Print this help"}}};
  if (s.app->get_version_ptr()) other.entries.push_back({"--version", "Print the version"});
  page.sections.push_back(std::move(other));
  return page;
}

std::string CommandLine::completions(const std::vector<std::string>& words) const {
  const State* s = state_.get();
  const std::string* before = nullptr;  // the last word but one
  for (std::size_t i = 0; i + 1 < words.size(); ++i) {
    if (words[i] == "=") continue;  // bash has split --option=value
    before = &words[i];
    for (const auto& line : s->subcommands)
      if (line->state_->app->get_name() == words[i]) s = line->state_.get();
  }
  const auto lines = [](const std::vector<std::string>& values) {
    return values.empty() ? "" : fmt::format("{}\n", fmt::join(values, "\n"));
  };
  std::string text;
  for (const State::Option& o : s->options) {
    if (before && !o.kind.empty() && o.parsed->check_name(*before)) return lines(o.known);
    if (o.kind.empty()) text += lines(o.known);  // of a word that belongs to no option
  }
  for (const auto& line : s->subcommands) text += line->state_->app->get_name() + "\n";
  return text + lines(s->names());
}

void CommandLine::collect(Faults& faults) {
  State& s = *state_;
  s.outputs.clear();
  s.inputs.clear();
  for (const std::string& word : s.app->remaining())
    if (word.starts_with("-"))
      faults.add(fmt::format("{}: unknown option{}", word, hint(word.substr(0, word.find('=')), s.names())));
    else if (s.subcommands.empty())
      faults.add(fmt::format("{}: unexpected argument", word));
  for (const State::Option& o : s.options) {
    const auto& values = o.parsed->results();
    if (values.empty()) continue;
    if (std::find(s.reads.begin(), s.reads.end(), o.name) != s.reads.end())
      for (const std::string& path : values) s.inputs.push_back({o.name, path});
    if (!o.accept) {
      const auto value = std::find_if(values.begin(), values.end(), [](const auto& v) { return v != "true"; });
      if (value == values.end())
        *o.flag = true;
      else
        faults.expected(o.name, "no value", *value);
    } else if (values.size() > 1 && !o.many) {
      faults.add(fmt::format("{}: expected once, got {} times", o.name, values.size()));
    } else {
      for (const std::string& value : values)
        if (const std::string expected = o.accept(value); !expected.empty()) faults.expected(o.name, expected, value);
    }
  }
  for (const auto& check : s.checks) check(faults);
  for (auto output = s.outputs.begin(); output != s.outputs.end(); ++output) {
    std::vector<State::Path> others(s.inputs);
    others.insert(others.end(), s.outputs.begin(), output);
    const auto same = std::find_if(others.begin(), others.end(),
                                   [&](const State::Path& other) { return is_same_file(other.path, output->path); });
    if (same != others.end())
      faults.add(fmt::format("{}: expected a file of its own, got '{}' as for {}", output->option, output->path,
                             same->option));
    else
      faults.add(check_writable(output->path));
    for (const State::Path& input : s.inputs)
      faults.add(check_apart(output->option, output->path, input.option, input.path));
  }

  if (s.subcommands.empty()) return;
  const auto chosen =
      std::find_if(s.subcommands.begin(), s.subcommands.end(), [](const auto& line) { return line->chosen(); });
  if (chosen != s.subcommands.end()) return (*chosen)->collect(faults);
  std::vector<std::string> names;
  for (const auto& line : s.subcommands) names.push_back(line->state_->app->get_name());
  const auto words = s.app->remaining();
  const auto word = std::find_if(words.begin(), words.end(), [](const std::string& w) { return !w.starts_with("-"); });
  if (word == words.end())
    faults.add(fmt::format("subcommand: expected {}, got none", list_of(names)));
  else
    faults.expected("subcommand", list_of(names), *word);
}

std::optional<int> CommandLine::parse(int argc, const char* const* argv) {
  // CLI11 takes the words from the last to the first, and the next word as the value of "--name=": that empty value
  // becomes a word of its own.
  std::vector<std::string> words;
  for (int i = argc - 1; i > 0; --i) {
    const std::string word = argv[i];
    const bool empty_value = word.starts_with("--") && word.find('=') == word.size() - 1;
    if (empty_value) words.emplace_back();
    words.push_back(empty_value ? word.substr(0, word.size() - 1) : word);
  }
  CLI::App& app = *state_->app;
  app.name(program_name());
  if (argc == 1 && !state_->subcommands.empty()) {
    std::fputs(to_string(page()).c_str(), stderr);
    return kBadInput;
  }
  if (argc > 1 && std::string_view(argv[1]) == "--complete") return print(completions({argv + 2, argv + argc}));
  try {
    try {
      app.parse(std::vector(words));
    } catch (const CLI::ArgumentMismatch&) {
      // The last word is an option that lacks its value. An empty one in its place is refused with the other faults.
      words.insert(words.begin(), "");
      app.parse(std::move(words));
    }
  } catch (const CLI::CallForVersion& e) {
    return print(e.what() + std::string("\n"));
  } catch (const CLI::CallForHelp&) {
    const auto& lines = state_->subcommands;
    const auto chosen = std::find_if(lines.begin(), lines.end(), [](const auto& line) { return line->chosen(); });
    return print(to_string((chosen == lines.end() ? *this : **chosen).page()));
  } catch (const CLI::ParseError& e) {
    return fail(e.what());
  }
  Faults faults;
  collect(faults);
  if (faults.empty()) return std::nullopt;
  return fail(faults.line());
}

}  // namespace cf::apps
