#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "golden/checkpoint/fp8_config.hpp"
#include "golden/checkpoint/generation_config.hpp"
#include "golden/checkpoint/gptq_config.hpp"
#include "golden/checkpoint/hf_config.hpp"
#include "golden/checkpoint/safetensors.hpp"
#include "golden/checkpoint/token_file.hpp"
#include "golden/checkpoint/vocabulary.hpp"

namespace cf::test {

/// What every header that the reader accepts must obey: the entries fill the buffer, one behind the other, and each is
/// as long as its shape and dtype say. Empty, or the first fault.
inline std::string header_fault(const std::vector<checkpoint::TensorEntry>& entries, const void* buffer,
                                std::int64_t buffer_bytes) {
  const char* end = static_cast<const char*>(buffer);
  for (const checkpoint::TensorEntry& t : entries) {
    if (t.data != end) return t.name + " does not begin where the one before ends";
    if (t.bytes < 0 || t.bytes > buffer_bytes - (end - static_cast<const char*>(buffer)))
      return t.name + " reaches beyond the buffer";
    end += t.bytes;
    // With the element's bits at the name's end, where BOOL has none.
    const std::size_t digits = t.stored_dtype.find_first_of("0123456789");
    const std::int64_t element_bytes = digits == std::string::npos ? 1 : std::stoll(t.stored_dtype.substr(digits)) / 8;
    __int128 bytes = element_bytes;
    for (std::int64_t d : t.shape) {
      if (d < 0) return t.name + " has a negative size";
      bytes *= d;
      if (bytes > std::numeric_limits<std::int64_t>::max()) return t.name + " has a shape beyond 64 bits";
    }
    if (bytes != t.bytes) return t.name + " is not as long as its shape says";
  }
  return end == static_cast<const char*>(buffer) + buffer_bytes ? "" : "the entries do not fill the buffer";
}

/// The same for a config: it is valid, and reads back from its own text.
inline std::string config_fault(const ModelConfig& m) {
  if (const Status s = m.validate(); !s) return s.message();
  const auto same = checkpoint::parse_hf_config(checkpoint::to_hf_json(m), "its own text");
  if (!same) return same.status().message();
  return same->spec() == m.spec() ? "" : "does not read back";
}

inline std::string gptq_config_fault(const checkpoint::GptqConfig& c) {
  if (c.bits != 4 && c.bits != 8) return "has " + std::to_string(c.bits) + " bits";
  if (c.group_size != -1 && c.group_size < 1) return "has group_size " + std::to_string(c.group_size);
  return "";
}

/// An fp8 config that is accepted is known for one, and its scales have a tensor that goes with them.
inline std::string fp8_config_fault(const checkpoint::Fp8Config& c, std::string_view text) {
  if (!checkpoint::is_fp8_config(text)) return "is not known for an fp8 config";
  if (c.scale_name == "weight_scale") return "";
  return c.scale_name == "weight_scale_inv" && c.scales == checkpoint::Fp8Scales::block ? "" : "has other scales";
}

/// The text of a vocabulary's ids is UTF-8, and ids from size() on stand for nothing.
inline std::string vocabulary_fault(const checkpoint::Vocabulary& v) {
  if (v.size() < 1 || v.size() > v.kMaxIds) return "has size " + std::to_string(v.size());
  std::vector<std::int32_t> ids;
  for (std::int64_t id = std::max<std::int64_t>(v.size() - 64, 0); id < v.size(); ++id) ids.push_back(std::int32_t(id));
  const std::string text = v.text(ids);
  checkpoint::Utf8Stream stream;
  if (stream.put(text) != text || !stream.finish().empty()) return "has a text that is no UTF-8";
  return v.bytes(std::int32_t(v.size())).empty() ? "" : "has a token beyond its size";
}

inline std::string token_file_fault(const checkpoint::TokenFile& file) {
  if (file.shape.size() != 1 && file.shape.size() != 2) return "has rank " + std::to_string(file.shape.size());
  if (file.ids.empty()) return "has no ids";
  return element_count(file.shape) == std::int64_t(file.ids.size()) ? "" : "has another shape than ids";
}

inline std::string generation_config_fault(const checkpoint::GenerationConfig& c) {
  const bool valid = std::all_of(c.eos_token_ids.begin(), c.eos_token_ids.end(), [](auto id) { return id >= 0; });
  return valid ? "" : "has a value out of range";
}

/// What a refusal must be: one printable line that begins with the source's name.
inline std::string message_fault(const Status& s, const std::string& source) {
  if (!s.message().starts_with(source + ": ")) return "does not name the source: " + s.message();
  for (char c : s.message())
    if (c < ' ' || c > '~') return "is not printable: " + s.message();
  return s.message().size() < 2000 ? "" : "is no line to read: " + s.message();
}

}  // namespace cf::test
