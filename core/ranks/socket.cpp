#include "core/ranks/socket.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>

namespace cf::ranks {
namespace {

using Clock = std::chrono::steady_clock;

struct FreeAddresses {
  void operator()(addrinfo* a) const { ::freeaddrinfo(a); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

std::string system_words(int error) { return std::generic_category().message(error); }

Result<Addresses> addresses_of(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error == 0) return Addresses(found);
  return Status::error(Code::invalid_argument, "MASTER_ADDR: expected the name or address of rank 0's host, got '" +
                                                   host + "' (" + ::gai_strerror(error) + ")");
}

/// A socket that blocks no call and that no other program inherits.
Socket make(const addrinfo& a) {
  return Socket(::socket(a.ai_family, a.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, a.ai_protocol));
}

/// Words are sent at once, however few they are.
void send_at_once(const Socket& s) {
  const int yes = 1;
  (void)::setsockopt(s.descriptor(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

bool would_wait(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

Wait wait_seconds(double seconds, std::function<Status()> check) {
  return {.until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)),
          .check = std::move(check)};
}

Io wait_for(std::span<pollfd> sockets, Wait& wait) {
  while (true) {
    if (wait.check) {
      wait.stopped = wait.check();
      if (!wait.stopped) return Io::stopped;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(wait.until - Clock::now()).count();
    if (left <= 0) return Io::late;
    constexpr std::int64_t often_ms = 100, most_ms = 60000;
    const auto slice_ms = std::min<std::int64_t>(left, wait.check ? often_ms : most_ms);
    const int ready = ::poll(sockets.data(), sockets.size(), int(slice_ms));
    if (ready > 0) return Io::done;
    if (ready < 0 && errno != EINTR) return Io::gone;
  }
}

Io pause(double seconds, Wait& wait) {
  Wait shorter = wait_seconds(seconds, wait.check);
  const bool is_last = wait.until <= shorter.until;
  if (is_last) shorter.until = wait.until;
  const Io ended = wait_for({}, shorter);
  wait.stopped = shorter.stopped;
  return ended == Io::late && !is_last ? Io::done : ended;
}

Socket::~Socket() {
  if (descriptor_ >= 0) (void)::close(descriptor_);
}

Result<Socket> Socket::listen(const std::string& host, int port) {
  CF_TRY_ASSIGN(const Addresses addresses, addresses_of(host, port));
  int error = 0;
  for (const addrinfo* a = addresses.get(); a; a = a->ai_next) {
    Socket s = make(*a);
    const int yes = 1;
    // A port that an earlier group has left is free at once.
    if (s && ::setsockopt(s.descriptor(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0 &&
        ::bind(s.descriptor(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(s.descriptor(), SOMAXCONN) == 0)
      return s;
    error = errno;
  }
  return Status::error(Code::io_error, "ranks: rank 0 cannot listen at " + host + ":" + std::to_string(port) + " (" +
                                           system_words(error) + "), expected a free port of this host");
}

Result<Io> Socket::connect(const std::string& host, int port, Wait& wait, Socket& socket) {
  constexpr double again_s = 0.02;
  CF_TRY_ASSIGN(const Addresses addresses, addresses_of(host, port));
  while (true) {
    for (const addrinfo* a = addresses.get(); a; a = a->ai_next) {
      Socket s = make(*a);
      if (!s) continue;
      if (::connect(s.descriptor(), a->ai_addr, a->ai_addrlen) != 0) {
        if (errno != EINPROGRESS) continue;
        pollfd polled{.fd = s.descriptor(), .events = POLLOUT, .revents = 0};
        if (const Io ended = wait_for({&polled, 1}, wait); ended != Io::done) return ended;
        int error = 0;
        socklen_t size = sizeof error;
        if (::getsockopt(s.descriptor(), SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) continue;
      }
      send_at_once(s);
      socket = std::move(s);
      return Io::done;
    }
    if (const Io ended = pause(again_s, wait); ended != Io::done) return ended;
  }
}

Socket Socket::accept() const {
  Socket s(::accept4(descriptor_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (s) send_at_once(s);
  return s;
}

Io Socket::send(std::span<const std::byte> bytes, Wait& wait) const {
  while (!bytes.empty()) {
    const ssize_t n = ::send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n >= 0) {
      bytes = bytes.subspan(std::size_t(n));
      continue;
    }
    if (!would_wait(errno)) return Io::gone;
    pollfd polled{.fd = descriptor_, .events = POLLOUT, .revents = 0};
    if (const Io ended = wait_for({&polled, 1}, wait); ended != Io::done) return ended;
  }
  return Io::done;
}

Io Socket::receive(std::span<std::byte> bytes, Wait& wait) const {
  while (!bytes.empty()) {
    const ssize_t n = ::recv(descriptor_, bytes.data(), bytes.size(), 0);
    if (n > 0) {
      bytes = bytes.subspan(std::size_t(n));
      continue;
    }
    if (n == 0 || !would_wait(errno)) return Io::gone;
    pollfd polled{.fd = descriptor_, .events = POLLIN, .revents = 0};
    if (const Io ended = wait_for({&polled, 1}, wait); ended != Io::done) return ended;
  }
  return Io::done;
}

}  // namespace cf::ranks
