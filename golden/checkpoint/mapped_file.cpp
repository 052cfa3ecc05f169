#include "golden/checkpoint/mapped_file.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <system_error>

#include "golden/checkpoint/checkpoint.hpp"

namespace cf::checkpoint {
namespace {

/// Addresses of a mapping, for the handler of SIGBUS: it may take no lock, so a range is never freed but used again.
struct Range {
  std::atomic<std::uintptr_t> begin = 0, end = 0;
  std::atomic<bool> taken = true, lost = false;
  Range* next = nullptr;
};
std::atomic<Range*> ranges = nullptr;

Range& take_range() {
  for (Range* r = ranges; r; r = r->next)
    if (bool taken = false; r->taken.compare_exchange_strong(taken, true)) return *r;
  auto* const made = new Range;
  made->next = ranges;
  while (!ranges.compare_exchange_weak(made->next, made)) {
  }
  return *made;
}

struct sigaction before_guard {};

/// An access to a page that a mapped file no longer has, or that could not be read. Zeros take the place of the page
/// and of those behind it; the thread goes on, and MappedFile::check() tells.
void on_bus_error(int, siginfo_t* info, void*) {
  const int saved = errno;
  const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (Range* r = ranges; r; r = r->next) {
    const std::uintptr_t begin = r->begin, end = r->end;
    if (at < begin || at >= end) continue;
    r->lost = true;
    const std::uintptr_t page = at - at % std::uintptr_t(::sysconf(_SC_PAGE_SIZE));
    if (::mmap(reinterpret_cast<void*>(page), end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
        MAP_FAILED)
      break;
    errno = saved;
    return;
  }
  ::sigaction(SIGBUS, &before_guard, nullptr);  // the access is repeated, and its signal is another's
  errno = saved;
}

}  // namespace

void guard_mapped_files() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigaction(SIGBUS, &action, &before_guard);
  });
}

class MappedFile::Mapping {
 public:
  static Result<std::shared_ptr<const Mapping>> create(const std::string& path) {
    const auto refuse = [&](Code code, const std::string& what) { return Status::error(code, path + ": " + what); };
    const auto system_error = [&](const char* call) {
      return refuse(Code::io_error, std::string(call) + ": " + std::generic_category().message(errno));
    };
    const auto made = std::make_shared<Mapping>(path);
    // Without O_NONBLOCK, opening a pipe would wait for its writer.
    made->fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (made->fd_ < 0) {
      if (errno == ENOENT || errno == ENOTDIR) return refuse(Code::not_found, "no such file");
      return system_error("open");
    }
    struct stat& info = made->info_;
    if (::fstat(made->fd_, &info) != 0) return system_error("fstat");
    if (S_ISDIR(info.st_mode)) return refuse(Code::invalid_file, "is a directory, expected a file");
    if (!S_ISREG(info.st_mode)) return refuse(Code::invalid_file, "expected a regular file, got another kind");
    if (info.st_size == 0) return std::shared_ptr<const Mapping>(made);  // mmap takes no empty range
    void* const data = ::mmap(nullptr, made->bytes(), PROT_READ, MAP_PRIVATE, made->fd_, 0);
    if (data == MAP_FAILED) return system_error("mmap");
    made->data_ = data;
    made->range_ = &take_range();
    made->range_->lost = false;
    made->range_->begin = reinterpret_cast<std::uintptr_t>(data);
    made->range_->end = reinterpret_cast<std::uintptr_t>(data) + made->bytes();
    return std::shared_ptr<const Mapping>(made);
  }

  explicit Mapping(std::string path) : path_(std::move(path)) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (range_) {
      range_->end = 0;
      range_->begin = 0;
      range_->taken = false;
    }
    if (data_) ::munmap(data_, bytes());
    if (fd_ >= 0) ::close(fd_);
  }

  const void* data() const { return data_; }
  std::size_t bytes() const { return std::size_t(info_.st_size); }
  Status check() const {
    struct stat now {};
    if (::fstat(fd_, &now) == 0 && now.st_size < info_.st_size)
      return Status::error(Code::io_error, path_ + ": expected the " + std::to_string(info_.st_size) +
                                               " bytes that it had when it was opened, got " +
                                               std::to_string(now.st_size) + ": it became shorter while it was used");
    if (range_ && range_->lost)
      return Status::error(Code::io_error, path_ +
                                               ": could not be read while it was used: it became shorter, or its "
                                               "device failed");
    return {};
  }
  bool is_changed() const {
    struct stat now {};
    return ::fstat(fd_, &now) == 0 && (now.st_size != info_.st_size || now.st_mtim.tv_sec != info_.st_mtim.tv_sec ||
                                       now.st_mtim.tv_nsec != info_.st_mtim.tv_nsec);
  }

 private:
  std::string path_;
  int fd_ = -1;
  struct stat info_ {};
  void* data_ = nullptr;
  Range* range_ = nullptr;
};

std::uint64_t MappedFile::size_bytes() const { return mapping_->bytes(); }
std::string_view MappedFile::text() const { return {static_cast<const char*>(mapping_->data()), mapping_->bytes()}; }
Status MappedFile::check() const { return mapping_->check(); }
bool MappedFile::is_changed() const { return mapping_->is_changed(); }

Result<MappedFile> map_file(const std::string& path) {
  MappedFile file;
  CF_TRY_ASSIGN(file.mapping_, MappedFile::Mapping::create(path));
  if (const std::string fault = lfs_pointer_fault(file.text()); !fault.empty())
    return Status::error(Code::invalid_file, path + ": " + fault);
  return file;
}

}  // namespace cf::checkpoint
