#include "golden/file/hdf5_reader.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <set>

#include "golden/checkpoint/mapped_file.hpp"
#include "golden/checkpoint/printable.hpp"
#include "golden/file/seal.hpp"

static_assert(std::endian::native == std::endian::little, "golden files are read in place, little-endian");

namespace cf::golden {
namespace {

using namespace std::literals;

constexpr std::uint64_t kUndefined = ~std::uint64_t{0};  // HDF5's address of what is not there
constexpr std::size_t kMaxDepth = 8;                     // of groups within groups, and of a b-tree
constexpr std::size_t kMaxRank = 32;                     // libhdf5's own limit
// The most structures and entries of structures in a file. The largest golden files have a few thousand.
constexpr std::size_t kMaxParts = std::size_t{1} << 18;

/// Datatype messages, byte for byte: class and version, bit field, size in bytes, properties.
constexpr std::pair<DType, std::string_view> kDatatypes[] = {
    {DType::f16, "\x11\x20\x0f\0\x02\0\0\0\0\0\x10\0\x0a\x05\0\x0a\x0f\0\0\0"sv},
    {DType::bf16, "\x10\0\0\0\x02\0\0\0\0\0\x10\0"sv},  // uint16, with an attribute on the dataset
    {DType::f32, "\x11\x20\x1f\0\x04\0\0\0\0\0\x20\0\x17\x08\0\x17\x7f\0\0\0"sv},
    {DType::f64, "\x11\x20\x3f\0\x08\0\0\0\0\0\x40\0\x34\x0b\0\x34\xff\x03\0\0"sv},
    {DType::i32, "\x10\x08\0\0\x04\0\0\0\0\0\x20\0"sv},
};
constexpr std::string_view kInt64 = "\x10\x08\0\0\x08\0\0\0\0\0\x40\0"sv, kUint64 = "\x10\0\0\0\x08\0\0\0\0\0\x40\0"sv;

/// Takes bytes off the front of a range. What lies beyond the end reads as zeros, and ok() is false from then on.
class Cursor {
 public:
  explicit Cursor(std::string_view bytes) : rest_(bytes) {}

  bool ok() const { return ok_; }
  std::size_t size() const { return rest_.size(); }
  std::string_view take(std::uint64_t bytes) {
    if (bytes > rest_.size()) {
      ok_ = false;
      rest_ = {};
      return {};
    }
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }
  /// The same, with the padding to a multiple of 8 bytes skipped.
  std::string_view take_padded(std::uint64_t bytes) {
    const std::string_view taken = take(bytes);
    take((8 - bytes % 8) % 8);
    return taken;
  }
  /// An unsigned little-endian number.
  std::uint64_t number(std::size_t bytes) {
    std::uint64_t value = 0;
    const std::string_view taken = take(bytes);
    if (!taken.empty()) std::memcpy(&value, taken.data(), taken.size());
    return value;
  }
  void skip(std::uint64_t bytes) { take(bytes); }
  bool starts_with(std::string_view signature) { return take(signature.size()) == signature; }

 private:
  std::string_view rest_;
  bool ok_ = true;
};

/// Refuses a file that a golden writer did not write whole.
Status check_seal(const std::string& path, std::string_view file) {
  const auto refuse = [&](const std::string& what) { return Status::error(Code::invalid_file, path + ": " + what); };
  if (file.substr(0, kSealMagic.size()) != kSealMagic)
    return refuse("no golden file: expected '" + std::string(kSealMagic) + "' at its start");
  if (file.size() < kSealBytes)
    return refuse("truncated: expected at least " + std::to_string(kSealBytes) + " bytes, got " +
                  std::to_string(file.size()));
  Cursor seal(file.substr(kSealMagic.size(), 8));
  const std::uint64_t length = seal.number(8), got = file.size() - kSealBytes;
  if (length != got)
    return refuse("truncated or extended: expected " + std::to_string(length) + " bytes behind the seal, got " +
                  std::to_string(got));
  if (std::memcmp(file.data(), seal_of(file.substr(kSealBytes)).data(), kSealBytes) != 0)
    return refuse("damaged: its bytes do not match the checksum in its seal");
  return {};
}

/// A dataspace message of version 1 (section IV.A.2.b), without the sizes that a dataset may grow to.
std::optional<Shape> parse_shape(std::string_view message) {
  Cursor c(message);
  const std::uint64_t version = c.number(1), rank = c.number(1);
  c.skip(6);
  if (version != 1 || rank > kMaxRank) return std::nullopt;
  Shape shape;
  for (std::uint64_t i = 0; i < rank; ++i) {
    const std::uint64_t size = c.number(8);
    if (size > std::uint64_t(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
    shape.push_back(std::int64_t(size));
  }
  if (!c.ok()) return std::nullopt;
  return shape;
}

/// The bytes of an array, where 64 bits hold the number.
std::optional<std::int64_t> array_bytes(DType dtype, const Shape& shape) {
  auto bytes = std::int64_t(size_bytes(dtype));
  for (std::int64_t size : shape)
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  return bytes;
}

}  // namespace

Status Hdf5Reader::refuse(Code code, std::string_view object, std::string_view what, SourceLocation at) const {
  return Status::error(code, path_ + ": /" + checkpoint::printable(object) + ": " + std::string(what), at);
}

/// Parses the file behind the seal. All of HDF5's addresses count from there.
class Hdf5Reader::Parser {
 public:
  Parser(Hdf5Reader& reader, std::string_view file) : reader_(reader), file_(file) {}

  /// Parses the superblock (section II.A) and everything that can be reached from it.
  Status parse() {
    Cursor c(file_);
    const bool signed_hdf5 = c.starts_with("\x89HDF\r\n\x1a\n"sv);
    // Versions of the superblock, the free space and the root group; a reserved byte; the version of shared messages.
    const std::string_view versions = c.take(5);
    const std::uint64_t offset_bytes = c.number(1), length_bytes = c.number(1);
    c.skip(1 + 2 + 2 + 4 + 8 + 8 + 8 + 8);  // the superblock's other fields
    c.skip(8);                              // the name in the root group's entry
    const std::uint64_t root = c.number(8);
    if (!signed_hdf5 || versions != "\0\0\0\0\0"sv || offset_bytes != 8 || length_bytes != 8 || !c.ok())
      return Status::error(Code::invalid_file,
                           reader_.path_ + ": expected HDF5 of superblock 0 with addresses of 8 bytes behind the seal");
    return parse_object("", root, 0);
  }

 private:
  struct Messages {
    std::optional<std::string_view> dataspace, datatype, layout, symbol_table;
    std::vector<std::string_view> attributes;
  };

  Status refuse(const std::string& object, std::string_view what) const {
    return reader_.refuse(Code::invalid_file, object, what);
  }

  /// Counts a structure or an entry of one.
  Status count(const std::string& object) {
    if (++parts_ <= kMaxParts) return {};
    return refuse(object, "expected at most " + std::to_string(kMaxParts) + " HDF5 structures in a file, got more");
  }

  /// The file from an address on. Each address is entered once: no two structures may begin there.
  Result<std::string_view> enter(const std::string& object, const char* structure, std::uint64_t address) {
    CF_TRY(count(object));
    if (address >= file_.size())
      return refuse(object, std::string(structure) + ": expected an address below " + std::to_string(file_.size()) +
                                ", got " + std::to_string(address));
    if (!entered_.insert(address).second)
      return refuse(object, std::string(structure) + " at " + std::to_string(address) +
                                ": expected a structure of its own, got one that the file uses twice");
    return file_.substr(address);
  }

  /// An object header of version 1 (section IV.A.1.a) and the group or dataset that it describes.
  Status parse_object(const std::string& name, std::uint64_t address, std::size_t depth) {
    if (depth > kMaxDepth) return refuse(name, "expected groups at most " + std::to_string(kMaxDepth) + " deep");
    Messages m;
    CF_TRY(parse_header(name, address, m));
    Object object;
    for (std::string_view attribute : m.attributes) CF_TRY(parse_attribute(name, attribute, object));
    if (m.symbol_table) {
      if (m.dataspace || m.datatype || m.layout) return refuse(name, "expected a group or a dataset, got both");
      object.is_group = true;
      return parse_group(name, *m.symbol_table, depth, std::move(object));
    }
    if (!m.dataspace || !m.datatype || !m.layout)
      return refuse(name, "expected a group of symbol tables or a dataset with a shape, a type and a layout");
    CF_TRY(parse_dataset(name, m, object));
    reader_.objects_.emplace(name, std::move(object));
    return {};
  }

  Status parse_header(const std::string& name, std::uint64_t address, Messages& m) {
    CF_TRY_ASSIGN(const std::string_view header, enter(name, "object header", address));
    Cursor prefix(header);
    const std::uint64_t version = prefix.number(1);
    prefix.skip(1);
    const std::uint64_t messages = prefix.number(2);
    prefix.skip(4);  // the number of links to this object
    const std::uint64_t first_bytes = prefix.number(4);
    prefix.skip(4);
    std::vector<std::string_view> blocks{prefix.take(first_bytes)};
    if (version != 1 || !prefix.ok()) return refuse(name, "expected a whole object header of version 1");

    std::uint64_t seen = 0;
    for (std::size_t i = 0; i < blocks.size(); ++i)
      for (Cursor c(blocks[i]); c.size() > 0; ++seen) {
        CF_TRY(count(name));
        const std::uint64_t type = c.number(2), bytes = c.number(2), flags = c.number(1);
        c.skip(3);
        const std::string_view body = c.take(bytes);
        if (!c.ok()) return refuse(name, "a message of its object header goes beyond the header's end");
        if (flags & 2) return refuse(name, "expected the object header's own messages, got a shared one");
        CF_TRY(parse_message(name, type, body, m, blocks));
      }
    if (seen != messages)
      return refuse(name,
                    "object header: expected " + std::to_string(messages) + " messages, got " + std::to_string(seen));
    return {};
  }

  Status parse_message(const std::string& name, std::uint64_t type, std::string_view body, Messages& m,
                       std::vector<std::string_view>& blocks) {
    const auto set = [&](std::optional<std::string_view>& message) -> Status {
      if (message) return refuse(name, "object header: message type " + std::to_string(type) + " is there twice");
      message = body;
      return {};
    };
    switch (type) {
      case 0x00: return {};  // nothing
      case 0x01: return set(m.dataspace);
      case 0x03: return set(m.datatype);
      case 0x04:
      case 0x05: return {};  // fill values: every element of a dataset is stored
      case 0x08: return set(m.layout);
      case 0x0c: m.attributes.push_back(body); return {};
      case 0x0e:
      case 0x12: return {};  // modification times
      case 0x10: {
        Cursor c(body);
        const std::uint64_t address = c.number(8), bytes = c.number(8);
        CF_TRY_ASSIGN(const std::string_view rest, enter(name, "object header's continuation", address));
        if (!c.ok() || bytes > rest.size())
          return refuse(name, "object header's continuation: expected it to end in the file");
        blocks.push_back(rest.substr(0, bytes));
        return {};
      }
      case 0x11: return set(m.symbol_table);
      default:
        return refuse(
            name,
            "expected a group of symbol tables, or a dataset contiguous and unfiltered in this file, got HDF5 "
            "message type " +
                std::to_string(type));
    }
  }

  /// A group's symbol table (section IV.A.2.r): a b-tree of nodes whose entries name objects by a local heap.
  Status parse_group(const std::string& name, std::string_view message, std::size_t depth, Object group) {
    Cursor c(message);
    const std::uint64_t tree = c.number(8), heap_address = c.number(8);
    CF_TRY_ASSIGN(const std::string_view heap, enter(name, "local heap", heap_address));
    Cursor h(heap);
    const bool is_heap = h.starts_with("HEAP\0"sv);
    h.skip(3);
    const std::uint64_t bytes = h.number(8);
    h.skip(8);
    const std::uint64_t address = h.number(8);
    if (!is_heap || !h.ok() || address > file_.size() || bytes > file_.size() - address)
      return refuse(name, "expected a local heap with its names in the file");
    std::vector<std::pair<std::string, std::uint64_t>> members;
    CF_TRY(parse_tree(name, tree, std::nullopt, file_.substr(address, bytes), members));

    std::sort(members.begin(), members.end());
    for (const auto& [member, header] : members) {
      if (!group.members.empty() && group.members.back() == member)
        return refuse(name, "expected each name once, got " + checkpoint::quote(member) + " twice");
      group.members.push_back(member);
      CF_TRY(parse_object(name.empty() ? member : name + "/" + member, header, depth + 1));
    }
    reader_.objects_.emplace(name, std::move(group));
    return {};
  }

  /// A node of a group's b-tree (section III.A.1). Below the root its level is known.
  Status parse_tree(const std::string& name, std::uint64_t address, std::optional<std::uint64_t> expected_level,
                    std::string_view heap, std::vector<std::pair<std::string, std::uint64_t>>& members) {
    CF_TRY_ASSIGN(const std::string_view node, enter(name, "b-tree node", address));
    Cursor c(node);
    const bool is_tree = c.starts_with("TREE\0"sv);  // with the node type of groups
    const std::uint64_t level = c.number(1), entries = c.number(2);
    c.skip(8 + 8 + 8);  // the siblings and the first key
    if (!is_tree || !c.ok() || level > kMaxDepth || (expected_level && level != *expected_level))
      return refuse(name, "expected a b-tree node of a group at " + std::to_string(address));
    for (std::uint64_t i = 0; i < entries; ++i) {
      const std::uint64_t child = c.number(8);
      c.skip(8);
      if (!c.ok())
        return refuse(name, "expected the b-tree node at " + std::to_string(address) + " to end in the file");
      CF_TRY(level > 0 ? parse_tree(name, child, level - 1, heap, members) : parse_symbols(name, child, heap, members));
    }
    return {};
  }

  /// A symbol table node (section III.B) and its entries (III.C).
  Status parse_symbols(const std::string& name, std::uint64_t address, std::string_view heap,
                       std::vector<std::pair<std::string, std::uint64_t>>& members) {
    CF_TRY_ASSIGN(const std::string_view node, enter(name, "symbol table node", address));
    Cursor c(node);
    const bool is_node = c.starts_with("SNOD\1"sv);
    c.skip(1);
    const std::uint64_t symbols = c.number(2);
    if (!is_node || !c.ok()) return refuse(name, "expected a symbol table node at " + std::to_string(address));
    for (std::uint64_t i = 0; i < symbols; ++i) {
      CF_TRY(count(name));
      const std::uint64_t offset = c.number(8), header = c.number(8), cache_type = c.number(4);
      c.skip(4 + 16);
      if (!c.ok() || offset >= heap.size())
        return refuse(name, "expected the entries and names of the symbol table node at " + std::to_string(address) +
                                " in the file");
      const std::string_view from = heap.substr(offset, 256), member = from.substr(0, from.find('\0'));
      if (member.empty() || member.size() > 255 || member.find('/') != member.npos)
        return refuse(name, "expected members' names of 1 to 255 bytes without '/', got " + checkpoint::quote(member));
      if (cache_type > 1)
        return refuse(name.empty() ? std::string(member) : name + "/" + std::string(member),
                      "a link, expected the object itself");
      members.emplace_back(member, header);
    }
    return {};
  }

  Status parse_dataset(const std::string& name, const Messages& m, Object& object) {
    const auto type = std::find_if(std::begin(kDatatypes), std::end(kDatatypes),
                                   [&](const auto& t) { return m.datatype->substr(0, t.second.size()) == t.second; });
    const auto mark = object.attributes.find("dtype");
    const bool is_marked = mark != object.attributes.end() && mark->second.kind == Attribute::Kind::text &&
                           mark->second.text == to_string(DType::bf16);
    if (type == std::end(kDatatypes) || (type->first == DType::bf16 && !is_marked))
      return refuse(name,
                    "expected little-endian float16, float32, float64, int32, or uint16 with dtype = \"bfloat16\"");
    object.info.dtype = type->first;
    std::optional<Shape> shape = parse_shape(*m.dataspace);
    if (!shape) return refuse(name, "expected a shape of at most " + std::to_string(kMaxRank) + " sizes below 2^63");
    object.info.shape = std::move(*shape);
    const std::optional<std::int64_t> bytes = array_bytes(object.info.dtype, object.info.shape);
    if (!bytes) return refuse(name, "its shape " + to_string(object.info.shape) + " overflows 64 bits");

    // A data layout message of version 3 (section IV.A.2.i).
    Cursor c(*m.layout);
    const std::uint64_t version = c.number(1), layout_class = c.number(1), address = c.number(8), stored = c.number(8);
    if (version != 3 || layout_class != 1 || !c.ok())
      return refuse(name, "expected its data contiguous in this file, got another layout");
    if (*bytes == 0) return {};
    const bool in_file = address < file_.size() && std::uint64_t(*bytes) <= file_.size() - address;
    if (stored != std::uint64_t(*bytes) || !in_file)
      return refuse(name, "its shape " + to_string(object.info.shape) + " needs " + std::to_string(*bytes) +
                              " bytes, got " + std::to_string(address == kUndefined ? 0 : stored) +
                              (in_file ? "" : ", not all of them") + " in the file");
    object.data = file_.data() + address;
    return {};
  }

  /// An attribute message of version 1 (section IV.A.2.m).
  Status parse_attribute(const std::string& owner, std::string_view message, Object& object) {
    Cursor c(message);
    const std::uint64_t version = c.number(1);
    c.skip(1);
    const std::uint64_t name_bytes = c.number(2), type_bytes = c.number(2), shape_bytes = c.number(2);
    std::string_view name = c.take_padded(name_bytes);
    const std::string_view type = c.take_padded(type_bytes), space = c.take_padded(shape_bytes);
    name = name.substr(0, name.find('\0'));
    if (version != 1 || !c.ok() || name.empty()) return refuse(owner, "expected attributes of version 1 with a name");
    const std::string where = (owner.empty() ? "" : owner + " ") + "attribute " + checkpoint::quote(name.substr(0, 64));
    const auto expected = [&] { return refuse(where, "expected one string or one integer of 64 bits"); };
    const std::optional<Shape> shape = parse_shape(space);
    const auto is_one = [](std::int64_t size) { return size == 1; };
    if (!shape || !std::all_of(shape->begin(), shape->end(), is_one)) return expected();

    Attribute a{};
    Cursor t(type);
    const std::uint64_t class_and_version = t.number(1), padding = t.number(1) & 15;
    t.skip(2);
    const std::uint64_t bytes = t.number(4);
    if (type.substr(0, kInt64.size()) == kInt64 || type.substr(0, kUint64.size()) == kUint64) {
      a.kind =
          type.substr(0, kInt64.size()) == kInt64 ? Attribute::Kind::signed_integer : Attribute::Kind::unsigned_integer;
      a.bits = c.number(8);
    } else if (class_and_version == 0x13 && padding <= 1) {  // a string that ends with its size or at a zero byte
      const std::string_view text = c.take(bytes);
      a.text = text.substr(0, text.find('\0'));
    } else if (class_and_version == 0x19 && padding == 1) {  // a string of variable length
      const std::uint64_t length = c.number(4), address = c.number(8), index = c.number(4);
      CF_TRY(parse_variable_length(where, length, address, index, a.text));
      if (reader_.variable_length_text_.empty()) reader_.variable_length_text_ = where;
    } else {
      return expected();
    }
    if (!c.ok()) return refuse(where, "its value goes beyond the object header's end");
    if (!object.attributes.emplace(name, std::move(a)).second) return refuse(where, "is there twice");
    return {};
  }

  /// An object of a global heap (section III.E).
  Status parse_variable_length(const std::string& where, std::uint64_t length, std::uint64_t address,
                               std::uint64_t index, std::string& text) {
    if (length == 0) return {};
    // Texts that attributes share would be copied for each.
    if (length > file_.size() - text_bytes_)
      return refuse(where, "expected variable-length texts of at most " + std::to_string(file_.size()) +
                               " bytes in all, as many as the file has, got more");
    text_bytes_ += length;
    const auto outside = [&] { return refuse(where, "expected its text in a global heap of the file"); };
    if (address >= file_.size()) return outside();
    Cursor heap(file_.substr(address));
    const bool is_heap = heap.starts_with("GCOL\1"sv);
    heap.skip(3);
    const std::uint64_t heap_bytes = heap.number(8), header_bytes = 16;
    if (!is_heap || !heap.ok() || heap_bytes < header_bytes) return outside();
    Cursor c(heap.take(heap_bytes - header_bytes));
    while (heap.ok() && c.size() > 0) {
      CF_TRY(count(where));
      const std::uint64_t object_index = c.number(2);
      c.skip(2 + 4);
      const std::uint64_t bytes = c.number(8);
      if (object_index == 0) break;  // the free space at the end
      const std::string_view object = c.take_padded(bytes);
      if (!c.ok() || (object_index == index && length > bytes)) break;
      if (object_index != index) continue;
      text = object.substr(0, length);
      text.resize(std::min(text.find('\0'), text.size()));
      return {};
    }
    return outside();
  }

  Hdf5Reader& reader_;
  std::string_view file_;
  std::set<std::uint64_t> entered_;
  std::size_t parts_ = 0;
  std::uint64_t text_bytes_ = 0;  // of variable-length texts
};

Result<Hdf5Reader> Hdf5Reader::open(const std::string& path) {
  CF_TRY_ASSIGN(checkpoint::MappedFile file, checkpoint::map_file(path));
  CF_TRY(check_seal(path, file.text()));
  Hdf5Reader reader;
  reader.path_ = path;
  CF_TRY(Parser(reader, file.text().substr(kSealBytes)).parse());
  CF_TRY(file.check());
  reader.file_ = std::move(file);
  return reader;
}

Result<const Hdf5Reader::Object*> Hdf5Reader::find(const std::string& object) const {
  const auto it = objects_.find(object);
  if (it == objects_.end()) return refuse(Code::not_found, object, "missing");
  return &it->second;
}

bool Hdf5Reader::is_group(const std::string& object) const {
  const auto it = objects_.find(object);
  return it != objects_.end() && it->second.is_group;
}

Result<std::vector<std::string>> Hdf5Reader::names(const std::string& group) const {
  CF_TRY_ASSIGN(const Object* const object, find(group));
  if (!(object)->is_group) return refuse(Code::invalid_file, group, "expected a group, got a dataset");
  return (object)->members;
}

Result<const Hdf5Reader::Attribute*> Hdf5Reader::find(const std::string& object, const std::string& attribute) const {
  CF_TRY_ASSIGN(const Object* const owner, find(object));
  const auto it = (owner)->attributes.find(attribute);
  if (it == (owner)->attributes.end())
    return refuse(Code::not_found, (object.empty() ? "" : object + " ") + "attribute '" + attribute + "'", "missing");
  return &it->second;
}

Result<std::string> Hdf5Reader::text(const std::string& object, const std::string& attribute) const {
  CF_TRY_ASSIGN(const Attribute* const a, find(object, attribute));
  if ((a)->kind != Attribute::Kind::text)
    return refuse(Code::invalid_file, (object.empty() ? "" : object + " ") + "attribute '" + attribute + "'",
                  "expected one string, got an integer");
  return (a)->text;
}

Result<const Hdf5Reader::Attribute*> Hdf5Reader::find_integer(const std::string& object,
                                                              const std::string& attribute) const {
  const Result<const Attribute*> a = find(object, attribute);
  if (a && (*a)->kind == Attribute::Kind::text)
    return refuse(Code::invalid_file, (object.empty() ? "" : object + " ") + "attribute '" + attribute + "'",
                  "expected one integer, got a string");
  return a;
}

Result<std::int64_t> Hdf5Reader::integer(const std::string& object, const std::string& attribute) const {
  CF_TRY_ASSIGN(const Attribute* const a, find_integer(object, attribute));
  const std::uint64_t bits = a->bits;
  if (a->kind == Attribute::Kind::unsigned_integer && bits > std::uint64_t(std::numeric_limits<std::int64_t>::max()))
    return refuse(Code::invalid_file, "attribute '" + attribute + "'",
                  "expected a signed 64-bit integer, got " + std::to_string(bits));
  return std::int64_t(bits);
}

Result<std::uint64_t> Hdf5Reader::unsigned_integer(const std::string& object, const std::string& attribute) const {
  CF_TRY_ASSIGN(const Attribute* const a, find_integer(object, attribute));
  const std::uint64_t bits = (a)->bits;
  if ((a)->kind == Attribute::Kind::signed_integer && std::int64_t(bits) < 0)
    return refuse(Code::invalid_file, "attribute '" + attribute + "'",
                  "expected an unsigned integer, got " + std::to_string(std::int64_t(bits)));
  return bits;
}

Result<const Hdf5Reader::Object*> Hdf5Reader::find_dataset(const std::string& dataset) const {
  const Result<const Object*> object = find(dataset);
  if (object && (*object)->is_group) return refuse(Code::invalid_file, dataset, "expected a dataset, got a group");
  return object;
}

Result<Hdf5Reader::Info> Hdf5Reader::info(const std::string& dataset) const {
  CF_TRY_ASSIGN(const Object* const object, find_dataset(dataset));
  return (object)->info;
}

Result<Tensor> Hdf5Reader::read(const std::string& dataset) const {
  CF_TRY_ASSIGN(const Object* const object, find_dataset(dataset));
  Tensor tensor((object)->info.dtype, (object)->info.shape);
  if (tensor.size() > 0) std::memcpy(tensor.data(), (object)->data, std::size_t(tensor.size_bytes()));
  CF_TRY(file_.check());
  return tensor;
}

}  // namespace cf::golden
