#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace cf {

/// What kind of thing went wrong; the message says the rest.
enum class Code { ok, invalid_argument, not_found, invalid_file, io_error, unimplemented, out_of_memory, device_error };

std::string_view to_string(Code);

/// A place in the source. (std::source_location is missing from clang 14.)
struct SourceLocation {
  const char* file = "";
  int line = 0;
  static constexpr SourceLocation current(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

/// The outcome of a call: ok, or a code with one line that names the file, tensor or argument, what was expected and
/// what came. The library never throws, aborts or exits on a caller's input; it returns one of these.
class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status error(Code code, std::string message, SourceLocation at = SourceLocation::current()) {
    Status s;
    s.code_ = code;
    s.message_ = std::move(message);
    s.at_ = at;
    return s;
  }

  explicit operator bool() const { return code_ == Code::ok; }
  Code code() const { return code_; }
  const std::string& message() const& { return message_; }
  std::string message() && { return std::move(message_); }
  const SourceLocation& where() const { return at_; }  // the line that made the error, for debugging

 private:
  Code code_ = Code::ok;
  std::string message_;
  SourceLocation at_;
};

/// A value, or the Status that says why there is none. A temporary gives its value away, so that what holds it, as
/// `for (int id : *read_ids())` does, never holds a reference into a Result that is gone.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)
  explicit operator bool() const { return value_.has_value(); }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T operator*() && { return std::move(*value_); }
  void operator*() const&& = delete;
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  const Status& status() const& { return status_; }
  Status status() && { return std::move(status_); }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace cf

/// Leaves the current function with the Status of `expr` unless it is ok.
#define CF_TRY(expr)                                                   \
  do {                                                                 \
    if (::cf::Status cf_status = (expr); !cf_status) return cf_status; \
  } while (0)

/// Gives `target`, a declaration or a variable, the value of `expr`, a Result, or leaves the current function with its
/// Status: CF_TRY_ASSIGN(const Tensor t, file.read("inputs/hidden"));
#define CF_TRY_ASSIGN(target, ...) CF_TRY_ASSIGN_AT(__LINE__, target, (__VA_ARGS__))
// __LINE__ is expanded here, before CF_TRY_ASSIGN_NAMED makes it a part of a name.
#define CF_TRY_ASSIGN_AT(line, target, expr) CF_TRY_ASSIGN_NAMED(line, target, expr)
#define CF_TRY_ASSIGN_NAMED(line, target, expr)            \
  auto cf_result_##line = expr;                            \
  if (!cf_result_##line) return cf_result_##line.status(); \
  target = std::move(*cf_result_##line)
