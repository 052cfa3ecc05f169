#include "python/src/work.hpp"

#include <nanobind/stl/string.h>
#include <omp.h>

#include <atomic>
#include <chrono>

#include "core/resources.hpp"
#include "cpu_ref/cpu_ref.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace cf::python {
namespace {

std::atomic<int> threads = omp_get_max_threads();

constexpr long long kNsBetweenChecks = 50'000'000;

}  // namespace

Status Turns::check() const {
  if (holder_ != std::this_thread::get_id()) return {};
  return Status::error(Code::device_error, "a signal's handler used the object whose work it interrupted");
}

Status use_threads() {
  static std::atomic<int> started = 0;
  const int n = threads;
  if (n != started) {
    CF_TRY(cpu_ref::start_threads("OMP_NUM_THREADS", n));
    started = n;
  }
  omp_set_num_threads(n);
  return {};
}

Status Interrupt::check() {
  const long long now = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  if (now < next_ns_) return {};
  next_ns_ = now + kNsBetweenChecks;
  const nb::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() == 0 ? Status() : Status::error(Code::io_error, "interrupted");
}

void bind_threads(nb::module_& m) {
  m.def(
      "set_num_threads",
      [](std::int64_t n) {
        check(check_threads("threads", n));
        threads = int(n);
      },
      "n"_a, "Sets the number of threads that the CPU backend works with from now on, in every Python thread.");
  m.def(
      "instruction_set", [] { return std::string(cpu_ref::instruction_set()); },
      "The vector instructions that the CPU backend uses in float32 on this processor.");
  m.def(
      "num_threads", [] { return threads.load(); }, "The number of threads that the CPU backend works with.");
}

}  // namespace cf::python
