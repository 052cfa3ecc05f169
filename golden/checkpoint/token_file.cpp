#include "golden/checkpoint/token_file.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <system_error>
#include <utility>

#include "core/atomic_file.hpp"
#include "core/resources.hpp"
#include "golden/checkpoint/mapped_file.hpp"
#include "golden/checkpoint/printable.hpp"

namespace cf::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, ".npy files are read and written as little-endian");

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kVersionBytes = 2;
constexpr std::size_t kAlignment = 64;  // of the first element, in the file
constexpr std::size_t kMaxRank = 2;

struct Header {
  std::string descr;
  bool fortran_order = false;
  Shape shape;
};

/// Reads a header: the Python literal of a dict with three known names, and white space around its parts. It takes the
/// literals that numpy writes, and not all that Python knows: no escapes in strings, no expressions, no comments.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& source) : text_(text), source_(source) {}

  Result<Header> parse() {
    Header h;
    std::vector<std::string_view> given;
    CF_TRY(expect('{'));
    while (!accept('}')) {
      const std::size_t begin = skip_space();
      CF_TRY_ASSIGN(const std::string_view name, string("a name in quotes or '}'"));
      if (std::find(given.begin(), given.end(), name) != given.end()) return refuse("duplicate name " + quote(name));
      given.push_back(name);
      CF_TRY(expect(':'));
      if (name == "descr") {
        CF_TRY_ASSIGN(h.descr, string("a dtype in quotes"));
      } else if (name == "fortran_order") {
        CF_TRY_ASSIGN(h.fortran_order, boolean());
      } else if (name == "shape") {
        CF_TRY_ASSIGN(h.shape, tuple());
      } else {
        at_ = begin;
        return unexpected("'descr', 'fortran_order' or 'shape'");
      }
      if (accept(',')) continue;
      if (!accept('}')) return unexpected("',' or '}'");
      break;
    }
    for (const char* name : {"descr", "fortran_order", "shape"})
      if (std::find(given.begin(), given.end(), name) == given.end()) return refuse(quote(name) + " is missing");
    if (skip_space() != text_.size()) return unexpected("nothing but spaces behind the dict");
    return h;
  }

 private:
  Status refuse(const std::string& what) const {
    return Status::error(Code::invalid_file, source_ + ": header: " + what);
  }
  Status unexpected(const std::string& expected) const {
    return refuse("expected " + expected + " at byte " + std::to_string(at_) + ", got " +
                  (at_ < text_.size() ? quote(text_.substr(at_, 24)) : "its end"));
  }

  std::size_t skip_space() { return at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }
  bool accept(char c) {
    if (skip_space() == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  Status expect(char c) {
    if (accept(c)) return {};
    return unexpected(std::string("'") + c + "'");
  }

  Result<std::string_view> string(const char* expected) {
    const std::size_t begin = skip_space() + 1;
    if (at_ == text_.size() || (text_[at_] != '\'' && text_[at_] != '"')) return unexpected(expected);
    const std::size_t end = text_.find_first_of(std::string{text_[at_], '\\', '\n'}, begin);
    if (end == text_.npos || text_[end] != text_[at_]) return unexpected(expected);
    at_ = end + 1;
    return text_.substr(begin, end - begin);
  }
  Result<bool> boolean() {
    skip_space();
    for (const auto& [literal, value] : {std::pair{std::string_view("False"), false}, {"True", true}})
      if (text_.substr(at_).starts_with(literal)) {
        at_ += literal.size();
        return value;
      }
    return unexpected("True or False");
  }
  Result<std::int64_t> size() {
    const std::string_view rest = text_.substr(skip_space());
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
    const auto digits = std::size_t(end - rest.data());
    if (error != std::errc() || value < 0 || rest[0] == '-' || (rest[0] == '0' && digits > 1))
      return unexpected("a size of 0 to 2^63 - 1");
    at_ += digits;
    return value;
  }
  /// "()", "(3,)" or "(3, 4)"; "(3)" is no tuple.
  Result<Shape> tuple() {
    Shape sizes;
    CF_TRY(expect('('));
    while (!accept(')')) {
      CF_TRY_ASSIGN(const std::int64_t n, size());
      sizes.push_back(n);
      if (accept(',')) continue;
      if (sizes.size() == 1 || !accept(')')) return unexpected(sizes.size() == 1 ? "','" : "',' or ')'");
      break;
    }
    return sizes;
  }

  std::string_view text_;
  const std::string& source_;
  std::size_t at_ = 0;
};

/// Copies elements of type T. Returns the first one that is outside int32, and its index.
template <class T>
std::optional<std::pair<std::size_t, std::int64_t>> copy_ids(std::string_view elements,
                                                             std::vector<std::int32_t>& ids) {
  ids.resize(elements.size() / sizeof(T));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    T value;  // the file's elements may lie unaligned
    std::memcpy(&value, elements.data() + i * sizeof(T), sizeof(T));
    if (!std::in_range<std::int32_t>(value)) return std::pair{i, std::int64_t(value)};
    ids[i] = std::int32_t(value);
  }
  return std::nullopt;
}

/// A dtype that is read.
struct StoredType {
  std::string_view descr;
  std::int64_t bytes;
  decltype(&copy_ids<std::int32_t>) copy;
};
constexpr StoredType kStoredTypes[] = {{"<i4", 4, copy_ids<std::int32_t>},
                                       {"<i8", 8, copy_ids<std::int64_t>},
                                       {"<u2", 2, copy_ids<std::uint16_t>},
                                       {"<u4", 4, copy_ids<std::uint32_t>}};

/// What is wrong with the shape of a file of ids; otherwise "".
std::string shape_fault(const Shape& shape) {
  if (shape.empty() || shape.size() > kMaxRank)
    return "shape: expected 1 or 2 dimensions, got " + std::to_string(shape.size());
  if (std::any_of(shape.begin(), shape.end(), [](std::int64_t n) { return n < 1; }))
    return "shape: expected one id at least, got " + to_string(shape);
  return "";
}

}  // namespace

Result<TokenFile> parse_token_file(std::string_view bytes, const std::string& source, std::int64_t most) {
  const auto refuse = [&](const std::string& what) { return Status::error(Code::invalid_file, source + ": " + what); };
  const auto truncated = [&](const std::string& what) {
    return refuse("truncated: expected " + what + ", the file has " + std::to_string(bytes.size()) + " bytes");
  };
  if (bytes.empty()) return refuse("is empty, expected a .npy file");
  const std::string_view begin = bytes.substr(0, kMagic.size());
  if (!kMagic.starts_with(begin))
    return refuse("expected a .npy file, which begins with " + quote(kMagic) + ", got " + quote(begin));
  if (bytes.size() < kMagic.size() + kVersionBytes) return truncated("the format's version");
  const int major = static_cast<unsigned char>(bytes[kMagic.size()]);
  const int minor = static_cast<unsigned char>(bytes[kMagic.size() + 1]);
  if (major < 1 || major > 3 || minor != 0)
    return refuse("format version: expected 1.0, 2.0 or 3.0, got " + std::to_string(major) + "." +
                  std::to_string(minor));

  std::string_view rest = bytes.substr(kMagic.size() + kVersionBytes);
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  if (rest.size() < length_bytes) return truncated("the header's length");
  std::uint32_t header_bytes = 0;
  std::memcpy(&header_bytes, rest.data(), length_bytes);
  rest.remove_prefix(length_bytes);
  if (rest.size() < header_bytes) return truncated("a header of " + std::to_string(header_bytes) + " bytes");
  CF_TRY_ASSIGN(Header header, HeaderParser(rest.substr(0, header_bytes), source).parse());
  rest.remove_prefix(header_bytes);

  const auto* type = std::find_if(std::begin(kStoredTypes), std::end(kStoredTypes),
                                  [&](const StoredType& t) { return t.descr == header.descr; });
  if (type == std::end(kStoredTypes))
    return refuse("dtype: expected '<i4', '<i8', '<u2' or '<u4', got " + quote(header.descr));
  if (header.fortran_order) return refuse("fortran_order: expected False, got True");
  if (const std::string fault = shape_fault(header.shape); !fault.empty()) return refuse(fault);
  std::int64_t expected_bytes = type->bytes;
  for (std::int64_t n : header.shape)
    if (__builtin_mul_overflow(expected_bytes, n, &expected_bytes))
      return refuse("shape: expected fewer than 2^63 bytes, got " + to_string(header.shape) + " of " + header.descr);
  if (std::uint64_t(expected_bytes) != rest.size())
    return refuse((rest.size() < std::uint64_t(expected_bytes) ? "truncated: expected " : "expected ") +
                  std::to_string(expected_bytes) + " bytes behind the header for shape " + to_string(header.shape) +
                  " of " + header.descr + ", got " + std::to_string(rest.size()));

  const std::int64_t count = std::min(most, expected_bytes / type->bytes);
  const auto needed = double(count) * double(sizeof(std::int32_t));
  CF_TRY(check_free_memory(needed, source + ": " + std::to_string(count) + " ids need " + gigabytes(needed)));
  TokenFile file{std::move(header.shape), {}};
  try {
    if (const auto outside = type->copy(rest.substr(0, std::size_t(count * type->bytes)), file.ids))
      return refuse("element " + std::to_string(outside->first) + ": expected an id inside int32, got " +
                    std::to_string(outside->second));
  } catch (const std::bad_alloc&) {
    return Status::error(Code::out_of_memory, source + ": no memory for " + std::to_string(count) + " ids");
  }
  return file;
}

Result<TokenFile> read_token_file(const std::string& path, std::int64_t most) {
  CF_TRY_ASSIGN(const MappedFile file, map_file(path));
  Result<TokenFile> ids = parse_token_file(file.text(), path, most);
  CF_TRY(file.check());
  return ids;
}

Status write_token_file(const std::string& path, std::span<const std::int32_t> ids, const Shape& shape) {
  const auto refuse = [&](const std::string& what) {
    return Status::error(Code::invalid_argument, path + ": " + what);
  };
  if (const std::string fault = shape_fault(shape); !fault.empty()) return refuse(fault);
  std::int64_t elements = 1;
  bool overflow = false;
  for (std::int64_t n : shape) overflow = overflow || __builtin_mul_overflow(elements, n, &elements);
  if (overflow || std::uint64_t(elements) != ids.size())
    return refuse("shape: expected one of " + std::to_string(ids.size()) + " ids, got " + to_string(shape));

  std::string header = "{'descr': '<i4', 'fortran_order': False, 'shape': (" + std::to_string(shape[0]) + ",";
  if (shape.size() == 2) header += " " + std::to_string(shape[1]);
  header += "), }";
  const std::size_t before = kMagic.size() + kVersionBytes + 2;
  const std::size_t unpadded = before + header.size() + 1;
  header.append((kAlignment - unpadded % kAlignment) % kAlignment, ' ');
  header += '\n';
  std::string beginning(kMagic);
  beginning += {'\1', '\0', char(header.size()), '\0'};  // version 1.0; the header is shorter than 128 bytes
  return write_file_atomically(
      path, {beginning, header, std::string_view(reinterpret_cast<const char*>(ids.data()), ids.size_bytes())});
}

}  // namespace cf::checkpoint
