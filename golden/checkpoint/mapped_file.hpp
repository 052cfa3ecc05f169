#pragma once
// Private to the checkpoint and golden libraries: files mapped into memory.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/status.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <charconv>

namespace cf::checkpoint {

/// A regular file mapped read-only. The system reads a page of it at the first access.
class MappedFile {
 public:
  std::uint64_t size_bytes() const;  // when it was mapped
  std::string_view text() const;
  /// Refuses, naming the file, one that has become shorter since it was mapped, and one of which pages could not be
  /// read. Bytes that were read before a call which is ok are the file's.
  Status check() const;
  /// Whether the file's size or its time of modification is another than when it was mapped.
  bool is_changed() const;

 private:
  friend Result<MappedFile> map_file(const std::string& path);
  class Mapping;
  std::shared_ptr<const Mapping> mapping_;  // unmapped with the last copy
};

/// What is wrong with a file that git-lfs has not fetched yet: in its place lies a text of a few lines. Otherwise "".
inline std::string lfs_pointer_fault(std::string_view text) {
  if (text.size() > 1024 || !text.starts_with("version https://git-lfs.github.com/spec/")) return "";
  std::uint64_t bytes = 0;
  if (const std::size_t size = text.find("\nsize "); size != text.npos)
    std::from_chars(text.data() + size + 6, text.data() + text.size(), bytes);
  return "is a git-lfs pointer to a file of " + std::to_string(bytes) +
         " bytes, expected the file itself; fetch it with: git lfs pull";
}

/// Maps a file. Refuses, naming the file, one that is missing, not regular or not readable, and a git-lfs pointer.
Result<MappedFile> map_file(const std::string& path);

/// Takes the whole pages of a range of a mapped file out of this process's memory. An access reads them again.
inline void drop_pages(const void* data, std::uint64_t bytes) {
  const auto page = std::uintptr_t(::sysconf(_SC_PAGE_SIZE)), begin = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = (begin + page - 1) / page * page, end = (begin + bytes) / page * page;
  if (first < end) ::madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
}

}  // namespace cf::checkpoint
