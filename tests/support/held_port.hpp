#pragma once
// A port of this machine for rank 0 of a group, which no other process is given meanwhile.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/support/catch.hpp"

namespace cf::test {

/// The port is taken, but nobody listens there: a socket that may share its address can.
class HeldPort {
 public:
  HeldPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    REQUIRE(socket_ >= 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    const int yes = 1;
    REQUIRE(::bind(socket_, reinterpret_cast<sockaddr*>(&at), size) == 0);
    REQUIRE(::getsockname(socket_, reinterpret_cast<sockaddr*>(&at), &size) == 0);
    // Behind the bind: two of these do not share a port.
    REQUIRE(::setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0);
    port_ = ntohs(at.sin_port);
  }
  HeldPort(const HeldPort&) = delete;
  HeldPort& operator=(const HeldPort&) = delete;
  ~HeldPort() { (void)::close(socket_); }

  int port() const { return port_; }
  /// Lets this object itself listen, as another program would.
  void listen() const { REQUIRE(::listen(socket_, 1) == 0); }

 private:
  int socket_, port_ = 0;
};

}  // namespace cf::test
