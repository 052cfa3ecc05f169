#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/status.hpp"
#include "core/tensor.hpp"

namespace cf::checkpoint {

class MappedFile;

/// One tensor of a safetensors file, in the file's own memory.
struct TensorEntry {
  std::string name;
  std::string stored_dtype;  // as the header spells it: "F16", "BF16", "F32", "I64", "BOOL", ...
  Shape shape;
  const void* data = nullptr;  // the mapped bytes; alignment is not guaranteed by the format
  std::int64_t bytes = 0;
};

/// A safetensors file mapped into memory. open() reads and checks the header alone; the system reads a tensor's pages
/// when they are accessed.
/// Format: the header's length as u64, little-endian; the header, JSON of at most 100,000,000 bytes, which may end in
/// spaces; the buffer, from whose begin data_offsets count. Tensors leave no holes, do not overlap and are in C order.
class SafetensorsFile {
 public:
  SafetensorsFile() = default;
  /// Refuses, naming the file and the tensor, with expected and got: a file shorter than its header asks for
  /// ("truncated"), a git-lfs pointer, a header that is not a JSON object, offsets that overlap or leave holes, sizes
  /// that do not match shape and dtype, unknown dtypes, duplicate names.
  static Result<SafetensorsFile> open(const std::string& path);

  /// Lists tensors that a caller holds in memory, not in a file. `owner` keeps that memory; messages name `source`.
  static SafetensorsFile in_memory(std::vector<TensorEntry> tensors, std::shared_ptr<const void> owner,
                                   const std::string& source);

  const std::string& path() const { return path_; }
  bool is_mapped() const { return bool(file_); }                        // whether the tensors lie in a mapped file
  const std::vector<TensorEntry>& tensors() const { return tensors_; }  // in the order of their offsets
  /// The entry of that name, or null.
  const TensorEntry* find(std::string_view name) const;
  /// What MappedFile says of the file; nothing is wrong with tensors in a caller's memory.
  Status check_file() const;
  bool is_changed() const;

 private:
  SafetensorsFile(std::string path, std::vector<TensorEntry> tensors);

  std::string path_;
  std::shared_ptr<const MappedFile> file_;  // null for tensors in a caller's memory
  std::shared_ptr<const void> owner_;       // of these
  std::vector<TensorEntry> tensors_;
  std::vector<std::size_t> by_name_;  // places in tensors_, in the order of the names
};

/// Checks a header against the size of the buffer that follows it. SafetensorsFile::open calls this with the file's
/// bytes. Where `buffer` is null, the data of all entries are null.
Result<std::vector<TensorEntry>> parse_safetensors_header(std::string_view json, const void* buffer,
                                                          std::uint64_t buffer_bytes, const std::string& source);

}  // namespace cf::checkpoint
