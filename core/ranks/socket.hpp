#pragma once
// Connections between ranks, which wait no longer than they are told. Private to core/ranks.
#include <poll.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "core/status.hpp"

namespace cf::ranks {

/// How long a call may wait.
struct Wait {
  std::chrono::steady_clock::time_point until;
  std::function<Status()> check{};  // asked meanwhile: an error ends the call
  Status stopped{};                 // what it has said
};
Wait wait_seconds(double seconds, std::function<Status()> check = {});

/// How a call has ended: done; the other side has closed the connection; too late; ended by Wait::check.
enum class Io { done, gone, late, stopped };

/// Waits until one of the sockets is ready.
Io wait_for(std::span<pollfd> sockets, Wait& wait);
/// Waits for so long, as before another attempt.
Io pause(double seconds, Wait& wait);

/// A file descriptor of a connection, or of what listens for some.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Socket();
  explicit operator bool() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }

  /// Listens at that host's address. Refuses a name that is no host's, and a port or an address that cannot be had.
  static Result<Socket> listen(const std::string& host, int port);
  /// Connects as soon as somebody listens there: `socket` is empty where the call does not end with Io::done.
  static Result<Io> connect(const std::string& host, int port, Wait& wait, Socket& socket);
  /// The connection that waits at a listening socket, or none.
  Socket accept() const;

  Io send(std::span<const std::byte> bytes, Wait& wait) const;
  Io receive(std::span<std::byte> bytes, Wait& wait) const;

 private:
  int descriptor_ = -1;
};

}  // namespace cf::ranks
