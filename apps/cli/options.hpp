#pragma once
// A program's command line: what each option accepts, and every fault of a command line in one line on stderr.
#include <charconv>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/cli/help.hpp"
#include "core/dtype.hpp"
#include "core/status.hpp"

namespace cf::apps {

/// The faults of a command line, in the order in which they were found.
class Faults {
 public:
  /// Adds "option: expected what, got 'value'".
  void expected(std::string_view option, std::string_view what, std::string_view value);
  /// Adds a fault in the caller's words, "option: what is wrong".
  void add(std::string fault) { faults_.push_back(std::move(fault)); }
  /// Adds the message of an error; a status that is ok adds nothing.
  void add(const Status& status);
  bool empty() const { return faults_.empty(); }
  /// All faults, joined with "; "; empty without faults.
  std::string line() const;

 private:
  std::vector<std::string> faults_;
};

/// The integers that an option accepts.
struct Range {
  std::int64_t lowest, highest;
  std::string note{};                  // what the bounds come from, for example "layers of pythia-2.8b"; may be empty
  std::optional<std::int64_t> also{};  // one more value, outside the bounds

  bool holds(std::int64_t value) const { return (value >= lowest && value <= highest) || value == also; }
  /// "-1 or 1 to 4096 (inputs of a group)".
  std::string text() const;
};

/// The decimal integer that the whole text is. Nothing for any other text and for an integer that T does not hold.
template <class T>
std::optional<T> parse_integer(std::string_view text) {
  T value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (text.empty() || error != std::errc() || stop != end) return std::nullopt;
  return value;
}

/// The dtype with that name or short form: float16 (f16, fp16), bfloat16 (bf16), float32 (f32, fp32), float64 (f64,
/// fp64), int32. Nothing for any other text.
std::optional<DType> parse_dtype(std::string_view name);

/// The names of dtypes or choices as a message lists them: "a, b or c".
std::string list_of(const std::vector<std::string>& names);
std::string list_of(const std::vector<DType>& dtypes);

/// Refuses an output that is a file of a directory which the program reads, by itself or by a link of either kind.
/// `reader` is what the message calls that which names the directory.
Status check_apart(std::string_view option, const std::string& output, std::string_view reader,
                   const std::string& directory);

/// The options of a program or of one of its subcommands. Every option is declared with the variable that takes its
/// value; a value that the option refuses leaves the variable as it was. `name` is "--batch"; "--batch,--tokens" for an
/// option of two names, which messages call by the first; "op" for the word that belongs to no option. An option that
/// is not a flag takes one value, at most once, but for words(). parse() collects all faults: unknown options, missing
/// ones, refused values, and what the checks add.
///
/// The options of a program appear in its --help in the order of their declarations, under the title that group() gave
/// last. For completion, `--complete WORDS` prints what the last word may become.
///
///     CommandLine line("Times one layer.", "cf-layer 1.0");
///     line.group("Step");
///     line.integer("--batch", o.batch, {1, 4096}, "Sequences");
///     line.output("--json", o.json, "Write everything as JSON");
///     line.require("--batch");
///     line.check([&](Faults& faults) { if (o.batch == 13) faults.expected("--batch", "luck", "13"); });
///     if (const auto exit_code = line.parse(argc, argv)) return *exit_code;
class CommandLine {
 public:
  /// Without a version the program has no --version.
  explicit CommandLine(const std::string& description, const std::string& version = "");
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;
  ~CommandLine();

  /// A subcommand, which lives as long as this. A program with subcommands expects one of them.
  CommandLine& subcommand(const std::string& name, const std::string& description);
  /// Whether the command line names this subcommand.
  bool chosen() const;
  /// Whether the command line has this option, whose first name is `name`, with an accepted or a refused value.
  bool given(std::string_view name) const;

  /// Puts the options that are declared from here on under this title in --help.
  void group(const std::string& title);
  /// Any text that is not empty. `kind` says in --help what it is. Completion offers the `known` values, which --help
  /// lists.
  void text(const std::string& name, std::string& value, const std::string& help, const std::string& kind = "TEXT",
            const std::vector<std::string>& known = {});
  /// One or more texts behind the option: all words up to the next option, of each time that it is given. Where some
  /// are `known`, no other is accepted.
  void words(const std::string& name, std::vector<std::string>& values, const std::string& help,
             const std::string& kind, const std::vector<std::string>& known = {});
  /// One of the choices.
  void choice(const std::string& name, std::string& value, const std::vector<std::string>& choices,
              const std::string& help);
  /// A decimal integer: digits, and at most a minus sign before them.
  void integer(const std::string& name, std::int64_t& value, const Range& range, const std::string& help);
  void integer(const std::string& name, std::optional<std::int64_t>& value, const Range& range,
               const std::string& help);
  /// A decimal number such as 0.7 or 1e-3 that is finite.
  void number(const std::string& name, double& value, const std::string& help);
  /// A decimal integer of 64 bits without a sign.
  void seed(const std::string& name, std::uint64_t& value, const std::string& help);
  /// One of these dtypes, by a name that parse_dtype() knows.
  void dtype(const std::string& name, std::optional<DType>& value, const std::vector<DType>& dtypes,
             const std::string& help);
  void flag(const std::string& name, bool& value, const std::string& help);
  /// A file that the program writes. Refuses an empty path, a path that cannot be written, and a file that another
  /// option or argument names or that lies in a directory which one that reads() has named. `dash` accepts "-", for
  /// standard output.
  void output(const std::string& name, std::string& path, const std::string& help, bool dash = false);
  static constexpr std::size_t kMany = std::size_t(-1);  // any number of files
  /// Says that the program reads the file or directory that the option's value names.
  void reads(const std::string& name);
  /// The words of the command line that belong to no option, as `least` to `most` files that the program reads. Refuses
  /// an empty path.
  void files(const std::string& name, std::vector<std::string>& paths, std::size_t least, std::size_t most,
             const std::string& help);

  /// Refuses a command line without the option, unless it has the `other` one.
  void require(const std::string& name, const std::string& other = "");
  /// Refuses a command line with none or both of the options.
  void require_one(const std::string& a, const std::string& b);
  /// Refuses `name` without the option `other`.
  void needs(const std::string& name, const std::string& other);
  /// Refuses a command line with both options.
  void excludes(const std::string& a, const std::string& b);
  /// Calls `check` when all options have taken their values, to add what is wrong with them together. `check` is called
  /// although there are faults, so that one run shows all of them: given() tells an option that was refused from one
  /// that was left out.
  void check(std::function<void(Faults&)> check);

  /// Adds a list below the options that --help shows, an example of the command, and a paragraph below these.
  void section(HelpSection section);
  void example(const std::string& what, const std::string& command);
  void notes(const std::string& text);

  /// Parses the command line. Returns the exit code where the program ends here: kOk after --help or --version,
  /// kBadInput after one line on stderr with all faults; nothing where the program goes on. A program with subcommands
  /// that is called without a word prints its help on stderr, which is bad usage, too.
  std::optional<int> parse(int argc, const char* const* argv);

 private:
  struct State;
  explicit CommandLine(std::unique_ptr<State>);
  /// `accept` takes the value, or returns what the option expects.
  using Accept = std::function<std::string(const std::string& value)>;
  void option(const std::string& name, const std::string& kind, const std::string& default_value,
              const std::string& help, Accept accept, std::vector<std::string> known = {});
  /// Adds a line to the section of --help that the options go to.
  void show(const std::string& name, const std::string& help);
  HelpPage page() const;
  /// What the last of the words may become, a line each.
  std::string completions(const std::vector<std::string>& words) const;
  void collect(Faults& faults);

  std::unique_ptr<State> state_;
};

}  // namespace cf::apps
