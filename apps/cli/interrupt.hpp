#pragma once
#include <signal.h>

#include <array>

#include "core/status.hpp"

namespace cf::apps {

/// While one lives, the first SIGINT, SIGTERM or SIGHUP is noted and ends nothing: the program ends its work in an
/// orderly way. The second one ends the program at once. A SIGHUP that is ignored, as below nohup, stays so. One at a
/// time.
class Interrupts {
 public:
  Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;
  ~Interrupts();

  /// The signal that came; 0 for none.
  int noted() const;
  /// An error once a signal came. Long calls ask for it, such as run() by ModelRunner::check_between().
  Status check() const;

 private:
  static constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};
  static void note(int signal);
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace cf::apps
