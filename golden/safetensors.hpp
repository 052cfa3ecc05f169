#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/status.hpp"
#include "core/tensor.hpp"

namespace cf::golden {

/// One tensor of a safetensors file, in the file's own memory.
struct TensorEntry {
  std::string name;
  std::string stored_dtype;  // as the header spells it: "F16", "BF16", "F32", "I64", "BOOL", ...
  Shape shape;
  const void* data = nullptr;  // the mapped bytes; alignment is not guaranteed by the format
  std::int64_t bytes = 0;
};

/// A safetensors file mapped into memory. Opening it reads and checks the header alone: a tensor's pages are touched
/// when someone reads them.
/// Format: u64 little-endian header length, that many bytes of JSON (at most 100,000,000, may be space-padded), then the
/// buffer that data_offsets count from; no holes, no overlaps, C order.
class SafetensorsFile {
 public:
  /// Refuses, naming the file and the tensor, with expected and got: a file shorter than its header says, a header that
  /// is no JSON object, offsets out of range, overlapping or leaving holes, sizes that do not match shape and dtype,
  /// unknown dtypes, duplicate names.
  static Result<SafetensorsFile> open(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<TensorEntry>& tensors() const { return tensors_; }  // by offset
  /// The entry of that name, or null.
  const TensorEntry* find(std::string_view name) const;

 private:
  std::string path_;
  std::shared_ptr<const void> mapping_;  // unmapped with the last copy
  std::vector<TensorEntry> tensors_;
};

/// Checks a header against the size of the buffer behind it; what SafetensorsFile::open does with a file's bytes.
/// `buffer` may be null: the entries' data are then null too.
Result<std::vector<TensorEntry>> parse_safetensors_header(std::string_view json, const void* buffer,
                                                          std::uint64_t buffer_bytes, const std::string& source);

}  // namespace cf::golden
