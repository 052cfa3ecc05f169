#include "apps/cli/interrupt.hpp"

#include <cstddef>

namespace cf::apps {
namespace {

volatile sig_atomic_t last_signal = 0;

}  // namespace

Interrupts::Interrupts() {
  struct sigaction note {};
  note.sa_handler = [](int signal) { last_signal = signal; };
  last_signal = 0;
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &note, &before_[i]);
}

Interrupts::~Interrupts() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
}

int Interrupts::noted() const { return last_signal; }

}  // namespace cf::apps
