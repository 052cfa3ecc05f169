#pragma once
// Private to the golden library.
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
#include <system_error>

namespace cf::golden {

/// A regular file mapped read-only; a page is read when someone touches it.
struct MappedFile {
  std::shared_ptr<const void> data;  // unmapped with the last copy; null where the file is empty
  std::uint64_t size_bytes = 0;

  std::string_view text() const { return {static_cast<const char*>(data.get()), std::size_t(size_bytes)}; }
};

/// Maps a file. Refuses, naming it, what is missing, no regular file, or unreadable.
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
  if (!S_ISREG(info.st_mode)) return refuse(Code::invalid_file, "is no regular file, expected one");

  MappedFile mapped{nullptr, std::uint64_t(info.st_size)};
  if (mapped.size_bytes == 0) return mapped;  // mmap takes no empty range
  const std::size_t bytes = std::size_t(mapped.size_bytes);
  void* data = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (data == MAP_FAILED) return system_error("mmap");
  mapped.data = std::shared_ptr<const void>(data, [bytes](const void* p) { ::munmap(const_cast<void*>(p), bytes); });
  return mapped;
}

}  // namespace cf::golden
