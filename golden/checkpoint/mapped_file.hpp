#pragma once
// Private to the checkpoint and golden libraries: files mapped into memory.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/status.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <system_error>

namespace cf::checkpoint {

/// A regular file mapped read-only. The system reads a page of it at the first access.
struct MappedFile {
  std::shared_ptr<const void> data;  // unmapped with the last copy; null where the file is empty
  std::uint64_t size_bytes = 0;

  std::string_view text() const { return {static_cast<const char*>(data.get()), std::size_t(size_bytes)}; }
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
inline Result<MappedFile> map_file(const std::string& path) {
  struct Descriptor {
    int fd;
    ~Descriptor() {
      if (fd >= 0) ::close(fd);
    }
  };
  const auto refuse = [&](Code code, const std::string& what) { return Status::error(code, path + ": " + what); };
  const auto system_error = [&](const char* call) {
    return refuse(Code::io_error, std::string(call) + ": " + std::generic_category().message(errno));
  };
  // Without O_NONBLOCK, opening a pipe would wait for its writer.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) {
    if (errno == ENOENT || errno == ENOTDIR) return refuse(Code::not_found, "no such file");
    return system_error("open");
  }
  struct stat info {};
  if (::fstat(file.fd, &info) != 0) return system_error("fstat");
  if (S_ISDIR(info.st_mode)) return refuse(Code::invalid_file, "is a directory, expected a file");
  if (!S_ISREG(info.st_mode)) return refuse(Code::invalid_file, "expected a regular file, got another kind");

  MappedFile mapped{nullptr, std::uint64_t(info.st_size)};
  if (mapped.size_bytes == 0) return mapped;  // mmap takes no empty range
  const std::size_t bytes = std::size_t(mapped.size_bytes);
  void* data = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (data == MAP_FAILED) return system_error("mmap");
  mapped.data = std::shared_ptr<const void>(data, [bytes](const void* p) { ::munmap(const_cast<void*>(p), bytes); });
  if (const std::string fault = lfs_pointer_fault(mapped.text()); !fault.empty())
    return refuse(Code::invalid_file, fault);
  return mapped;
}

/// Takes the whole pages of a range of a mapped file out of this process's memory. An access reads them again.
inline void drop_pages(const void* data, std::uint64_t bytes) {
  const auto page = std::uintptr_t(::sysconf(_SC_PAGE_SIZE)), begin = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = (begin + page - 1) / page * page, end = (begin + bytes) / page * page;
  if (first < end) ::madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
}

}  // namespace cf::checkpoint
