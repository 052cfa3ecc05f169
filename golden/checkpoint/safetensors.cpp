#include "golden/checkpoint/safetensors.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "golden/checkpoint/json.hpp"
#include "golden/checkpoint/mapped_file.hpp"

namespace cf::checkpoint {
namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::size_t kMaxRank = 64;

/// The element size of a dtype that the format knows, in bytes.
std::optional<std::int64_t> stored_size_bytes(std::string_view dtype) {
  constexpr std::pair<std::string_view, int> sizes[] = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
      {"BF16", 2}, {"I32", 4}, {"U32", 4}, {"F32", 4},     {"F64", 8},     {"I64", 8}, {"U64", 8}};
  for (const auto& [name, bytes] : sizes)
    if (name == dtype) return bytes;
  return std::nullopt;
}

/// A JSON number that is an integer of 0 to 2^63 - 1.
std::optional<std::int64_t> natural(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto n = value.get<std::uint64_t>();
  if (n > std::uint64_t(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
  return std::int64_t(n);
}

struct PlacedTensor {
  std::int64_t begin, end;
  TensorEntry entry;
};

/// The refusal of a file that ends too early, as after a broken download.
Status truncated(const std::string& source, std::uint64_t expected_bytes, std::uint64_t file_bytes) {
  return Status::error(Code::invalid_file, source + ": truncated: the header asks for " +
                                               std::to_string(expected_bytes) + " bytes, the file has " +
                                               std::to_string(file_bytes));
}

/// Reads one member of the header. `where` names file and tensor.
Result<PlacedTensor> parse_tensor(const std::string& name, const Json& value, const std::string& where) {
  const auto refuse = [&](const std::string& what) { return Status::error(Code::invalid_file, where + ": " + what); };
  const auto member = [&](const char* key) -> const Json* {
    const auto it = value.find(key);
    return it == value.end() ? nullptr : &*it;
  };
  if (!value.is_object()) return refuse("expected an object of dtype, shape and data_offsets, got " + shown(value));
  const Json *dtype = member("dtype"), *shape = member("shape"), *offsets = member("data_offsets");
  for (const auto& [key, given] : {std::pair{"dtype", dtype}, {"shape", shape}, {"data_offsets", offsets}})
    if (!given) return refuse(std::string(key) + " is missing");

  PlacedTensor t{};
  t.entry.name = name;
  if (!dtype->is_string()) return refuse("dtype: expected a string, got " + shown(*dtype));
  t.entry.stored_dtype = dtype->get<std::string>();
  const auto element_bytes = stored_size_bytes(t.entry.stored_dtype);
  if (!element_bytes) return refuse("dtype: expected one that the format knows, got " + quote(t.entry.stored_dtype));

  if (!shape->is_array() || shape->size() > kMaxRank)
    return refuse("shape: expected an array of at most " + std::to_string(kMaxRank) + " sizes, got " +
                  (shape->is_array() ? std::to_string(shape->size()) + " of them" : shown(*shape)));
  t.entry.bytes = *element_bytes;
  bool overflow = false;
  for (const Json& size : *shape) {
    const auto n = natural(size);
    if (!n) return refuse("shape: expected sizes from 0 to 2^63 - 1, got " + shown(size));
    t.entry.shape.push_back(*n);
    overflow = overflow || __builtin_mul_overflow(t.entry.bytes, *n, &t.entry.bytes);
  }
  if (overflow)
    return refuse("shape " + to_string(t.entry.shape) + " of " + t.entry.stored_dtype +
                  ": expected fewer than 2^63 bytes, got more");

  if (!offsets->is_array() || offsets->size() != 2)
    return refuse("data_offsets: expected [begin, end], got " + shown(*offsets));
  const auto begin = natural((*offsets)[0]), end = natural((*offsets)[1]);
  if (!begin || !end || *begin > *end)
    return refuse("data_offsets: expected 0 <= begin <= end < 2^63, got [" + shown((*offsets)[0]) + ", " +
                  shown((*offsets)[1]) + "]");
  if (*end - *begin != t.entry.bytes)
    return refuse("data_offsets: expected " + std::to_string(t.entry.bytes) + " bytes for shape " +
                  to_string(t.entry.shape) + " of " + t.entry.stored_dtype + ", got " + std::to_string(*end - *begin));
  t.begin = *begin;
  t.end = *end;
  return t;
}

Status check_metadata(const Json& metadata, const std::string& source) {
  const auto refuse = [&](const std::string& what) {
    return Status::error(Code::invalid_file, source + ": __metadata__" + what);
  };
  if (!metadata.is_object()) return refuse(": expected an object, got " + shown(metadata));
  for (const auto& [key, value] : metadata.items())
    if (!value.is_string()) return refuse(" " + quote(key) + ": expected a string, got " + shown(value));
  return {};
}

}  // namespace

Result<std::vector<TensorEntry>> parse_safetensors_header(std::string_view json, const void* buffer,
                                                          std::uint64_t buffer_bytes, const std::string& source) {
  if (!json.starts_with('{'))
    return Status::error(Code::invalid_file, source + ": header: expected it to start with '{', got " +
                                                 (json.empty() ? "an empty header" : quote(json.substr(0, 1))));
  CF_TRY_ASSIGN(const Json header, parse_json_object(json, source + ": header"));

  std::vector<PlacedTensor> placed;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      CF_TRY(check_metadata(value, source));
      continue;
    }
    CF_TRY_ASSIGN(PlacedTensor t, parse_tensor(name, value, source + ": tensor " + quote(name)));
    placed.push_back(std::move(t));
  }
  // Of two tensors with one begin, the one without elements comes first.
  std::sort(placed.begin(), placed.end(), [](const PlacedTensor& a, const PlacedTensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });

  std::int64_t end = 0;
  for (const PlacedTensor& t : placed) {
    if (t.begin != end)
      return Status::error(Code::invalid_file, source + ": tensor " + quote(t.entry.name) +
                                                   (t.begin < end ? " overlaps another" : " leaves a hole before it") +
                                                   ": expected it to begin at byte " + std::to_string(end) + ", got " +
                                                   std::to_string(t.begin));
    end = t.end;
  }
  const std::uint64_t header_bytes = kLengthBytes + json.size();
  if (std::uint64_t(end) > buffer_bytes)
    return truncated(source, header_bytes + std::uint64_t(end), header_bytes + buffer_bytes);
  if (std::uint64_t(end) < buffer_bytes)
    return Status::error(Code::invalid_file,
                         source + ": expected " + std::to_string(end) + " bytes behind the header, the end of " +
                             (placed.empty() ? "no tensor" : "tensor " + quote(placed.back().entry.name)) + ", got " +
                             std::to_string(buffer_bytes));
  std::vector<TensorEntry> entries;
  for (PlacedTensor& t : placed) {
    if (buffer) t.entry.data = static_cast<const char*>(buffer) + t.begin;
    entries.push_back(std::move(t.entry));
  }
  return entries;
}

SafetensorsFile::SafetensorsFile(std::string path, std::vector<TensorEntry> tensors)
    : path_(std::move(path)), tensors_(std::move(tensors)), by_name_(tensors_.size()) {
  std::iota(by_name_.begin(), by_name_.end(), std::size_t(0));
  std::sort(by_name_.begin(), by_name_.end(),
            [&](std::size_t a, std::size_t b) { return tensors_[a].name < tensors_[b].name; });
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  const auto refuse = [&](const std::string& what) { return Status::error(Code::invalid_file, path + ": " + what); };
  CF_TRY_ASSIGN(MappedFile mapped, map_file(path));
  const std::string_view bytes = mapped.text();
  if (bytes.size() < kLengthBytes)
    return refuse("truncated: expected at least the " + std::to_string(kLengthBytes) +
                  " bytes of the header's length, the file has " + std::to_string(bytes.size()));
  std::uint64_t header_bytes = 0;
  for (std::uint64_t i = 0; i < kLengthBytes; ++i)
    header_bytes |= std::uint64_t(static_cast<unsigned char>(bytes[i])) << (8 * i);
  if (header_bytes > kMaxHeaderBytes)
    return refuse("header length: expected at most " + std::to_string(kMaxHeaderBytes) + " bytes, got " +
                  std::to_string(header_bytes));
  if (header_bytes > bytes.size() - kLengthBytes) return truncated(path, kLengthBytes + header_bytes, bytes.size());

  const std::string_view buffer = bytes.substr(kLengthBytes + header_bytes);
  CF_TRY_ASSIGN(auto tensors,
                parse_safetensors_header(bytes.substr(kLengthBytes, header_bytes), buffer.data(), buffer.size(), path));
  SafetensorsFile file(path, std::move(tensors));
  file.file_ = std::make_shared<const MappedFile>(std::move(mapped));
  return file;
}

SafetensorsFile SafetensorsFile::in_memory(std::vector<TensorEntry> tensors, std::shared_ptr<const void> owner,
                                           const std::string& source) {
  SafetensorsFile file(source, std::move(tensors));
  file.owner_ = std::move(owner);
  return file;
}

Status SafetensorsFile::check_file() const { return file_ ? file_->check() : Status(); }
bool SafetensorsFile::is_changed() const { return file_ && file_->is_changed(); }

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto it = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                   [&](std::size_t i, std::string_view n) { return tensors_[i].name < n; });
  return it == by_name_.end() || tensors_[*it].name != name ? nullptr : &tensors_[*it];
}

}  // namespace cf::checkpoint
