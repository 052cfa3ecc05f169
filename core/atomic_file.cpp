#include "core/atomic_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

namespace cf {
namespace {

Status cannot_write(const std::string& path, int error) {
  return Status::error(Code::io_error, path + ": cannot be written: " + std::strerror(error));
}

/// The file to replace: the target of a symbolic link, so that the link stays.
std::string resolved(const std::string& path) {
  std::error_code error;
  const auto target = std::filesystem::canonical(path, error);
  return error ? path : target.string();
}

/// Returns 0, or errno.
int write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno != EINTR) return errno;
    if (n > 0) bytes.remove_prefix(std::size_t(n));
  }
  return 0;
}

int write_to(const std::string& path, int flags, std::initializer_list<std::string_view> parts) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | flags, 0666);
  if (fd < 0) return errno;
  int error = 0;
  for (std::string_view part : parts)
    if (!error) error = write_all(fd, part);
  // fsync fails with EINVAL or EROFS on a pipe or a device, which needs none.
  if (!error && ::fsync(fd) != 0 && errno != EINVAL && errno != EROFS) error = errno;
  if (::close(fd) != 0 && !error) error = errno;
  return error;
}

bool is_special(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode);
}

}  // namespace

Status write_file_atomically(const std::string& path, std::initializer_list<std::string_view> parts) {
  CF_TRY(check_writable(path));
  const std::string target = resolved(path);
  if (is_special(target)) {
    const int error = write_to(target, 0, parts);
    return error ? cannot_write(path, error) : Status();
  }
  static std::atomic<int> count{0};
  const std::string temporary = target + ".tmp" + std::to_string(::getpid()) + "." + std::to_string(count++);
  int error = write_to(temporary, O_CREAT | O_EXCL, parts);
  if (!error && ::rename(temporary.c_str(), target.c_str()) != 0) error = errno;
  if (!error) return {};
  if (error != EEXIST) ::unlink(temporary.c_str());
  return cannot_write(path, error);
}

Status write_file_atomically(const std::string& path, std::string_view text) {
  return write_file_atomically(path, {text});
}

Status check_writable(const std::string& path) {
  const std::string target = resolved(path);
  struct stat info {};
  if (::stat(target.c_str(), &info) == 0) {
    if (S_ISDIR(info.st_mode)) return cannot_write(path, EISDIR);
    if (!S_ISREG(info.st_mode)) return {};
  }
  const std::string parent = std::filesystem::path(target).parent_path().string();
  const std::string directory = parent.empty() ? "." : parent;
  if (::stat(directory.c_str(), &info) != 0) return cannot_write(path, errno);
  if (!S_ISDIR(info.st_mode)) return cannot_write(path, ENOTDIR);
  if (::access(directory.c_str(), W_OK | X_OK) != 0) return cannot_write(path, errno);
  return {};
}

}  // namespace cf
