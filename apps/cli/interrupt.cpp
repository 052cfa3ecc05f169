#include "apps/cli/interrupt.hpp"

#include <cstddef>

namespace cf::apps {
namespace {

volatile sig_atomic_t last_signal = 0;

}  // namespace

void Interrupts::note(int signal) {
  last_signal = signal;
  for (const int each : kSignals) ::signal(each, SIG_DFL);
}

Interrupts::Interrupts() {
  struct sigaction noting {};
  noting.sa_handler = note;
  last_signal = 0;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], &noting, &before_[i]);
    if (kSignals[i] == SIGHUP && before_[i].sa_handler == SIG_IGN) ::sigaction(SIGHUP, &before_[i], nullptr);
  }
}

Interrupts::~Interrupts() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
}

int Interrupts::noted() const { return last_signal; }

Status Interrupts::check() const { return last_signal == 0 ? Status() : Status::error(Code::io_error, "interrupted"); }

}  // namespace cf::apps
