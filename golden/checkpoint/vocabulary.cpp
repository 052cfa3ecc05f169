#include "golden/checkpoint/vocabulary.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "golden/checkpoint/json_fields.hpp"
#include "golden/checkpoint/mapped_file.hpp"

namespace cf::checkpoint {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

/// The byte that a character of a token stands for, by the character's code point; -1 for a character that stands for
/// none. The printable bytes of Latin-1 stand for themselves. The n-th of the other bytes has the code point 256 + n.
constexpr auto kByteOf = [] {
  const auto is_printable = [](int b) { return (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b != 0xad); };
  constexpr int others = 68;
  std::array<int, 256 + others> byte_of{};
  byte_of.fill(-1);
  int next = 256;
  for (int b = 0; b < 256; ++b) byte_of[std::size_t(is_printable(b) ? b : next++)] = b;
  return byte_of;
}();

/// The bytes that a token of model.vocab stands for; nothing where one of its characters stands for no byte.
std::optional<std::string> spelled_bytes(std::string_view token) {
  std::string bytes;
  for (std::size_t i = 0; i < token.size(); ++i) {
    auto code = static_cast<unsigned char>(token[i]) + 0u;
    // Characters of more than two bytes lie beyond the table.
    if (code >= 0x80) {
      if (code >> 5 != 0b110 || i + 1 == token.size()) return std::nullopt;
      code = (code & 0x1f) << 6 | (static_cast<unsigned char>(token[++i]) & 0x3f);
    }
    if (code >= kByteOf.size() || kByteOf[code] < 0) return std::nullopt;
    bytes += char(kByteOf[code]);
  }
  return bytes;
}

/// How a character of UTF-8 continues, by its first byte: table 3-7 of the Unicode Standard.
struct Lead {
  std::size_t bytes;          // of the whole character; 0 where none begins so
  unsigned char first, last;  // what its second byte may be; later ones are 0x80 to 0xbf
};
constexpr Lead lead(unsigned char b) {
  if (b < 0x80) return {1, 0x80, 0xbf};
  if (b < 0xc2 || b > 0xf4) return {0, 0x80, 0xbf};
  const unsigned char first = b == 0xe0 ? 0xa0 : b == 0xf0 ? 0x90 : 0x80;
  const unsigned char last = b == 0xed ? 0x9f : b == 0xf4 ? 0x8f : 0xbf;
  return {std::size_t(b < 0xe0 ? 2 : b < 0xf0 ? 3 : 4), first, last};
}

/// A member of an object; null where there is none.
const Json* member(const Json& object, const char* name) {
  const auto it = object.find(name);
  return it == object.end() ? nullptr : &*it;
}

/// Refuses a tokenizer that is not byte-level BPE.
Status check_kind(const Json& document, const std::string& source) {
  Fields fields(document, source);
  const auto check = [&](const char* name, const std::string& expected) {
    const auto got = fields.required<std::string>(name);
    if (got != expected) fields.refuse(name, "is " + quote(got) + ", expected " + quote(expected));
  };
  const Json* model = member(document, "model");
  const bool is_untyped_bpe = model && !member(*model, "type") && member(*model, "merges");
  if (!is_untyped_bpe) check("model.type", "BPE");
  check("decoder.type", "ByteLevel");
  if (fields.get("model.byte_fallback", false)) fields.refuse("model.byte_fallback", "is true, expected false");
  return fields.status();
}

}  // namespace

Result<Vocabulary> Vocabulary::open(const std::string& tokenizer_json) {
  CF_TRY_ASSIGN(const MappedFile file, map_file(tokenizer_json));
  return parse(file.text(), tokenizer_json);
}

Result<Vocabulary> Vocabulary::parse(std::string_view json, const std::string& source) {
  CF_TRY_ASSIGN(const Json document, parse_json_object(json, source));
  CF_TRY(check_kind(document, source));
  const auto refuse = [&](const std::string& what) { return Status::error(Code::invalid_file, source + ": " + what); };

  Vocabulary v;
  const auto add = [&](const char* field, const std::string& token, const Json& id, std::string bytes,
                       bool is_special) -> Status {
    const auto refuse_id = [&](const std::string& expected) {
      return refuse(quote(field) + ": token " + quote(token) + ": expected an id " + expected);
    };
    std::int64_t n = -1;
    if (!read(id, n) || n < 0 || n >= kMaxIds)
      return refuse_id("of 0 to " + std::to_string(kMaxIds - 1) + ", got " + shown(id));
    const auto [at, is_new] = v.tokens_.try_emplace(std::int32_t(n), Token{std::move(bytes), is_special});
    if (!is_new)
      return refuse_id("of its own, got " + std::to_string(n) + ", which " + quote(at->second.bytes) + " has");
    v.size_ = std::max(v.size_, n + 1);
    return {};
  };

  std::unordered_map<std::string, std::int64_t> added_ids;
  if (const Json* added_tokens = member(document, "added_tokens")) {
    if (!added_tokens->is_array()) return refuse("'added_tokens' is " + shown(*added_tokens) + ", expected a list");
    for (const Json& added : *added_tokens) {
      const std::string where = "'added_tokens': element " + std::to_string(&added - &added_tokens->front());
      if (!added.is_object()) return refuse(where + ": expected an object of id and content, got " + shown(added));
      Fields fields(added, source + ": " + where);
      const auto content = fields.required<std::string>("content");
      const auto id = fields.required<std::int64_t>("id");
      const bool is_special = fields.get("special", false);
      CF_TRY(fields.status());
      CF_TRY(add("added_tokens", content, id, content, is_special));
      added_ids.emplace(content, id);
    }
  }

  const Json* vocab = member(*member(document, "model"), "vocab");
  if (!vocab) return refuse("'model.vocab' is missing, expected an object of token to id");
  if (!vocab->is_object()) return refuse("'model.vocab' is " + shown(*vocab) + ", expected an object of token to id");
  for (const auto& [token, id] : vocab->items()) {
    // A file may list an added token here, too.
    if (const auto added = added_ids.find(token); added != added_ids.end() && added->second == id) continue;
    std::optional<std::string> bytes = spelled_bytes(token);
    if (!bytes)
      return refuse("'model.vocab': token " + quote(token) + ": expected characters that stand for bytes, got others");
    CF_TRY(add("model.vocab", token, id, std::move(*bytes), false));
  }
  if (v.tokens_.empty()) return refuse("'model.vocab' is empty, expected tokens");
  return v;
}

std::string_view Vocabulary::bytes(std::int32_t id) const {
  const auto token = tokens_.find(id);
  return token == tokens_.end() ? std::string_view() : token->second.bytes;
}

bool Vocabulary::is_special(std::int32_t id) const {
  const auto token = tokens_.find(id);
  return token != tokens_.end() && token->second.is_special;
}

std::string Vocabulary::text(std::span<const std::int32_t> ids, bool skip_special) const {
  Utf8Stream stream;
  std::string text;
  for (std::int32_t id : ids)
    if (!(skip_special && is_special(id))) text += stream.put(bytes(id));
  return text += stream.finish();
}

std::string Utf8Stream::put(std::string_view bytes) {
  rest_ += bytes;
  std::string whole;
  std::size_t at = 0;
  while (at < rest_.size()) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(rest_[at + i]); };
    const Lead c = lead(byte(0));
    const auto continues = [&](std::size_t i) {
      return i == 1 ? byte(i) >= c.first && byte(i) <= c.last : byte(i) >= 0x80 && byte(i) <= 0xbf;
    };
    std::size_t n = 1;
    while (n < c.bytes && at + n < rest_.size() && continues(n)) ++n;
    if (n < c.bytes && at + n == rest_.size()) break;  // the next bytes may end it
    whole += n == c.bytes ? std::string_view(rest_).substr(at, n) : kReplacement;
    at += n;
  }
  rest_.erase(0, at);
  return whole;
}

std::string Utf8Stream::finish() {
  return std::string(std::exchange(rest_, {}).empty() ? std::string_view() : kReplacement);
}

}  // namespace cf::checkpoint
