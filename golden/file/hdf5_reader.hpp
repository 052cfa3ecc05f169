#pragma once
// Private to the golden library: reads golden files without libhdf5.
//
// libhdf5 trusts the metadata of its files: of golden files with a few changed bytes and a valid seal it crashes on
// about one in seventy (1.10.8), with or without variable-length strings. This reader therefore parses the file itself.
// It accepts only the part of HDF5 that golden files consist of, and refuses everything else:
//   - superblock 0, with offsets and lengths of 8 bytes;
//   - groups as symbol tables: a b-tree of version 1, symbol table nodes and a local heap;
//   - object headers of version 1;
//   - datasets of a DType, contiguous and unfiltered, with their data in the file;
//   - attributes of version 1: one 64-bit integer, one fixed-length string, or (schema 1) one variable-length string in
//     a global heap.
// These are the formats that libhdf5 writes with H5Pset_libver_bounds(H5F_LIBVER_EARLIEST, ...). Format: "HDF5 File
// Format Specification Version 2.0", whose section names the parsing functions cite.
//
// The reader is safe for any content: it looks at bytes within the mapped file only, enters each structure once, so
// that no cycle holds it, and enters a bounded number of them. A file that another process shortens while it is read is
// refused where checkpoint::guard_mapped_files() was called; elsewhere it raises SIGBUS, as any mapped file does.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.hpp"
#include "core/tensor.hpp"
#include "golden/checkpoint/mapped_file.hpp"

namespace cf::golden {

/// Objects are named by their path without a leading slash; "" is the root group.
class Hdf5Reader {
 public:
  /// Verifies the seal (golden_file.hpp), then parses all groups, attributes and the descriptions of all datasets.
  static Result<Hdf5Reader> open(const std::string& path);

  const std::string& path() const { return path_; }
  bool is_group(const std::string& object) const;
  /// The names in a group, sorted.
  Result<std::vector<std::string>> names(const std::string& group) const;

  Result<std::string> text(const std::string& object, const std::string& attribute) const;
  Result<std::int64_t> integer(const std::string& object, const std::string& attribute) const;
  Result<std::uint64_t> unsigned_integer(const std::string& object, const std::string& attribute) const;
  /// The first attribute that is a variable-length string, or "".
  const std::string& variable_length_text() const { return variable_length_text_; }

  struct Info {
    DType dtype;
    Shape shape;
  };
  Result<Info> info(const std::string& dataset) const;
  /// The dataset's elements, bit for bit.
  Result<Tensor> read(const std::string& dataset) const;

  /// "file: /object: what" in printable characters: the form of every refusal.
  Status refuse(Code code, std::string_view object, std::string_view what,
                SourceLocation at = SourceLocation::current()) const;

 private:
  struct Attribute {
    enum class Kind { text, signed_integer, unsigned_integer } kind;
    std::string text;
    std::uint64_t bits = 0;  // of an integer
  };
  struct Object {
    bool is_group = false;
    std::vector<std::string> members;  // of a group
    Info info{};                       // of a dataset, with its elements
    const char* data = nullptr;
    std::map<std::string, Attribute> attributes;
  };
  class Parser;

  Result<const Object*> find(const std::string& object) const;
  Result<const Object*> find_dataset(const std::string& dataset) const;
  Result<const Attribute*> find(const std::string& object, const std::string& attribute) const;
  Result<const Attribute*> find_integer(const std::string& object, const std::string& attribute) const;

  std::string path_;
  checkpoint::MappedFile file_;
  std::map<std::string, Object> objects_;
  std::string variable_length_text_;
};

}  // namespace cf::golden
