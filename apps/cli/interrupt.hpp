#pragma once
#include <signal.h>

#include <array>

namespace cf::apps {

/// While one lives, SIGINT and SIGTERM are noted and end nothing: the program ends its work in an orderly way. One at a
/// time.
class Interrupts {
 public:
  Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;
  ~Interrupts();

  /// The last signal that came; 0 for none.
  int noted() const;

 private:
  static constexpr std::array kSignals{SIGINT, SIGTERM};
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace cf::apps
