#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "core/status.hpp"

namespace cf::checkpoint {

/// The bytes of token ids, from a tokenizer.json of Hugging Face's tokenizers that holds byte-level BPE, as those of
/// GPT-2 and GPT-NeoX do. An id stands for bytes and not for characters: the bytes of a character may come from several
/// ids.
class Vocabulary {
 public:
  static constexpr std::int32_t kMaxIds = 1 << 21;

  /// Reads a tokenizer.json. Refuses a file that is missing, not readable or a git-lfs pointer, and what parse()
  /// refuses.
  static Result<Vocabulary> open(const std::string& tokenizer_json);

  /// Reads a tokenizer.json's text. A token of model.vocab spells each byte as one character, by GPT-2's
  /// bytes_to_unicode (src/encoder.py). The content of an added token is the text itself. An old file without
  /// model.type is BPE where it has model.merges; tokenizers reads it in the same way. Refuses, naming `source` and the
  /// field or token: text that is empty or not a JSON object; a model.type other than "BPE"; a decoder.type other than
  /// "ByteLevel"; byte_fallback; a vocabulary without tokens; an id outside 0 to kMaxIds - 1; an id that two tokens
  /// have; a token of model.vocab with a character that stands for no byte; a field of the wrong type.
  static Result<Vocabulary> parse(std::string_view json, const std::string& source);

  /// The largest id of a token, plus 1.
  std::int64_t size() const { return size_; }
  /// The bytes that an id stands for; none for an id without a token. The view lives as long as this vocabulary.
  std::string_view bytes(std::int32_t id) const;
  /// Whether an id's token marks something in the text, such as its end, and is no part of it.
  bool is_special(std::int32_t id) const;
  /// The text of ids in UTF-8: what tokenizers' decode() returns. Bytes that are no UTF-8 become U+FFFD. The two differ
  /// for an added token whose content could spell bytes: decode() returns those bytes, and text() returns the content.
  std::string text(std::span<const std::int32_t> ids, bool skip_special = false) const;

 private:
  struct Token {
    std::string bytes;
    bool is_special = false;
  };

  std::unordered_map<std::int32_t, Token> tokens_;
  std::int64_t size_ = 0;
};

/// Turns bytes that come in pieces into whole characters of UTF-8, so that a program can print tokens as they come.
/// U+FFFD replaces bytes that form no character, in the way of Python and Rust. Source: the Unicode Standard, section
/// 3.9, "U+FFFD substitution of maximal subparts".
class Utf8Stream {
 public:
  /// Takes bytes. Returns the characters that are whole now and were not returned before.
  std::string put(std::string_view bytes);
  /// Ends the text. Returns U+FFFD for a character that was begun and not ended, otherwise nothing.
  std::string finish();

 private:
  std::string rest_;  // the beginning of a character, 3 bytes at most
};

}  // namespace cf::checkpoint
