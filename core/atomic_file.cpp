#include "core/atomic_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>

namespace cf {
namespace {

namespace fs = std::filesystem;

Status cannot_write(const std::string& path, int error) {
  return Status::error(Code::io_error, path + ": cannot be written: " + std::strerror(error));
}

/// The file to replace: the target of a symbolic link, so that the link stays, also where the target does not exist.
/// Where the target has no path, as /dev/stdout's may, it is the link itself.
std::string resolved(const std::string& path) {
  constexpr int most_links = 40;  // as Linux
  fs::path target(path);
  std::error_code error;
  if (fs::exists(target, error)) {
    const fs::path known = fs::canonical(target, error);
    return error ? path : known.string();
  }
  for (int i = 0; i < most_links && fs::is_symlink(target, error); ++i)
    target = target.parent_path() / fs::read_symlink(target, error);
  return target.string();
}

std::string directory_of(const std::string& path) {
  const std::string parent = fs::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

/// A file that is open for writing, and errno where something failed.
class OpenFile {
 public:
  OpenFile(const std::string& path, int flags)
      : fd_(::open(path.c_str(), O_WRONLY | O_CLOEXEC | flags, 0666)), error_(fd_ < 0 ? errno : 0) {}
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() { close(); }

  int error() const { return error_; }
  void write(std::initializer_list<std::string_view> parts) {
    for (std::string_view bytes : parts)
      while (!error_ && !bytes.empty()) {
        const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
        if (n < 0 && errno != EINTR) error_ = errno;
        if (n > 0) bytes.remove_prefix(std::size_t(n));
      }
    // fsync fails with EINVAL or EROFS on a pipe or a device, which needs none.
    if (!error_ && ::fsync(fd_) != 0 && errno != EINVAL && errno != EROFS) error_ = errno;
  }
  /// Does nothing on a file system without modes.
  void set_mode(mode_t mode) {
    if (!error_ && ::fchmod(fd_, mode) != 0) errno = 0;
  }
  /// Names an unnamed file. Returns 0, or errno; EEXIST where the name is taken.
  int link(const std::string& name) const {
    const std::string self = "/proc/self/fd/" + std::to_string(fd_);
    return ::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0 ? 0 : errno;
  }
  int close() {
    if (fd_ >= 0 && ::close(fd_) != 0 && !error_) error_ = errno;
    fd_ = -1;
    return error_;
  }

 private:
  int fd_, error_;
};

/// Tries file names in the directory until make(name) does not return EEXIST, and returns what it returned: 0 or errno.
/// Names contain the process's number. Another process that had this number may have left such a file: one that was
/// killed, or one of another container.
template <class Make>
int with_free_name(const std::string& directory, std::string& name, Make&& make) {
  static std::atomic<unsigned> count{0};
  int error = EEXIST;
  while (error == EEXIST) {
    name = directory + "/.cf-" + std::to_string(::getpid()) + "." + std::to_string(count++) + ".tmp";
    error = make(name);
  }
  return error;
}

int rename(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) return 0;
  const int error = errno;
  ::unlink(from.c_str());
  return error;
}

/// Writes to an unnamed file (O_TMPFILE) and names it when it is complete: a signal leaves no partial file. Returns
/// nothing where the file system has no unnamed files.
std::optional<int> write_unnamed(const std::string& target, std::optional<mode_t> mode,
                                 std::initializer_list<std::string_view> parts) {
  const std::string directory = directory_of(target);
  OpenFile file(directory, O_TMPFILE);
  if (file.error()) return std::nullopt;
  if (mode) file.set_mode(*mode);
  file.write(parts);
  if (file.error()) return file.error();
  int error = file.link(target);
  if (error == EEXIST) {
    std::string temporary;
    error = with_free_name(directory, temporary, [&](const std::string& name) { return file.link(name); });
    if (!error) return rename(temporary, target);
  }
  if (error) return std::nullopt;  // without /proc, for example
  return file.close();
}

int write_named(const std::string& target, std::optional<mode_t> mode, std::initializer_list<std::string_view> parts) {
  std::string temporary;
  std::optional<OpenFile> file;
  const int error = with_free_name(directory_of(target), temporary, [&](const std::string& name) {
    return file.emplace(name, O_CREAT | O_EXCL).error();
  });
  if (error) return error;
  if (mode) file->set_mode(*mode);
  file->write(parts);
  if (file->close() == 0) return rename(temporary, target);
  ::unlink(temporary.c_str());
  return file->error();
}

}  // namespace

Status write_file_atomically(const std::string& path, std::initializer_list<std::string_view> parts) {
  CF_TRY(check_writable(path));
  const std::string target = resolved(path);
  struct stat info {};
  std::optional<mode_t> mode;
  if (::stat(target.c_str(), &info) == 0) {
    if (!S_ISREG(info.st_mode)) {
      OpenFile file(target, 0);
      file.write(parts);
      return file.close() ? cannot_write(path, file.error()) : Status();
    }
    mode = info.st_mode & 07777;
  }
  std::optional<int> error = write_unnamed(target, mode, parts);
  if (!error) error = write_named(target, mode, parts);
  return *error ? cannot_write(path, *error) : Status();
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
  } else if (errno != ENOENT) {
    return cannot_write(path, errno);
  }
  const std::string directory = directory_of(target);
  if (::stat(directory.c_str(), &info) != 0) return cannot_write(path, errno);
  if (!S_ISDIR(info.st_mode)) return cannot_write(path, ENOTDIR);
  if (info.st_nlink == 0) return cannot_write(path, ENOENT);  // the current directory, which was removed
  if (::access(directory.c_str(), W_OK | X_OK) != 0) return cannot_write(path, errno);
  return {};
}

}  // namespace cf
