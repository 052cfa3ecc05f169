#include "golden/checkpoint/json.hpp"

#include <new>
#include <utility>
#include <vector>

namespace cf::checkpoint {
namespace {

/// Builds a document. Refuses two things that nlohmann::json::parse accepts: a name that an object holds twice, and
/// nesting so deep that a recursive walk of the document would run out of stack.
class JsonBuilder final : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return add(nullptr); }
  bool boolean(bool v) override { return add(v); }
  bool number_integer(number_integer_t v) override { return add(v); }
  bool number_unsigned(number_unsigned_t v) override { return add(v); }
  bool number_float(number_float_t v, const string_t&) override { return add(v); }
  bool string(string_t& v) override { return add(std::move(v)); }
  bool binary(binary_t& v) override { return add(std::move(v)); }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    const auto [member, is_new] = open_.back()->emplace(name, nullptr);
    if (!is_new) return fail("duplicate name " + quote(name));
    member_ = &*member;
    return true;
  }
  bool parse_error(std::size_t byte, const std::string&, const nlohmann::detail::exception& e) override {
    // The message begins with "[json.exception...] ", which is cut off.
    const std::string_view what = e.what();
    return fail("is not JSON at byte " + std::to_string(byte) + ": " +
                printable(what.substr(what.find(']') == what.npos ? 0 : what.find(']') + 2)));
  }

  Json document;
  std::string error;

 private:
  static constexpr std::size_t kMaxDepth = 32;

  Json& place(Json&& value) {
    if (open_.empty()) return document = std::move(value);
    if (!open_.back()->is_array()) return *member_ = std::move(value);
    open_.back()->push_back(std::move(value));
    return open_.back()->back();
  }
  bool add(Json&& value) {
    place(std::move(value));
    return true;
  }
  bool open(Json&& value) {
    if (open_.size() == kMaxDepth) return fail("is nested deeper than " + std::to_string(kMaxDepth) + " levels");
    open_.push_back(&place(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }
  bool fail(std::string what) {
    error = std::move(what);
    return false;
  }

  std::vector<Json*> open_;  // the arrays and objects that have begun and not ended, outermost first
  Json* member_ = nullptr;   // where the value of the last name goes
};

}  // namespace

std::string shown(const Json& value) {
  return value.is_structured() ? std::string("an ") + value.type_name() : printable(value.dump());
}

Result<Json> parse_json_object(std::string_view text, const std::string& source) {
  const auto refuse = [&](const std::string& what) { return Status::error(Code::invalid_file, source + ": " + what); };
  if (text.find_first_not_of(" \t\r\n") == text.npos) return refuse("is empty, expected a JSON object");
  // nlohmann's lexer takes a zero byte for the end of the text.
  if (const auto zero = text.find('\0'); zero != text.npos)
    return refuse("is not JSON at byte " + std::to_string(zero + 1) + ": a zero byte");
  try {
    JsonBuilder builder;
    if (!Json::sax_parse(text.begin(), text.end(), &builder)) return refuse(builder.error);
    if (!builder.document.is_object()) return refuse("expected a JSON object, got " + shown(builder.document));
    return std::move(builder.document);
  } catch (const std::bad_alloc&) {
    return Status::error(Code::out_of_memory, source + ": no memory for its " + std::to_string(text.size()) + " bytes");
  }
}

std::string indented(const Json& value) { return value.dump(2, ' ', false, Json::error_handler_t::replace); }
std::string one_line(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace cf::checkpoint
