#include "python/src/work.hpp"

#include <nanobind/stl/string.h>
#include <omp.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "core/resources.hpp"
#include "cpu_ref/cpu_ref.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace cf::python {
namespace {

std::atomic<int> threads = omp_get_max_threads();

constexpr long long kNsBetweenChecks = 50'000'000;

std::atomic<int> without_gil = 0;            // threads without the GIL, or waiting for it
std::atomic<std::thread::id> ends_python{};  // set when the interpreter begins to end: the thread that ends it

/// What Python calls at its end, when threads can still take the GIL. Those that are about to do so take it now; those
/// that compute find out later.
void end_python() {
  using namespace std::chrono_literals;
  ends_python = std::this_thread::get_id();
  const nb::gil_scoped_release release;
  for (int ms = 0; without_gil > 0 && ms < 1000; ++ms) std::this_thread::sleep_for(1ms);
}

/// Makes OpenMP's threads spin less while they wait, where a library such as torch has loaded OpenMP with its defaults.
/// GCC's threads spin less as soon as there are more of them than CPUs (its manual, GOMP_SPINCOUNT). One thread a CPU
/// works; two more are begun here and sleep.
void shorten_spins() {
  std::thread([] {
#pragma omp parallel num_threads(2)
    std::atomic_signal_fence(std::memory_order_seq_cst);  // keeps the compiler from removing an empty region
    for (;;) ::pause();
  }).detach();
}

}  // namespace

bool interpreter_ends() {
  const std::thread::id thread = ends_python;
  return thread != std::thread::id() && thread != std::this_thread::get_id();
}

void watch_interpreter_end() { nb::module_::import_("atexit").attr("register")(nb::cpp_function(&end_python)); }

WithoutGil::WithoutGil() {
  ++without_gil;  // counted before the state is read: end_python() waits for threads that did not see it
  state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (interpreter_ends()) {
    --without_gil;
    for (;;) ::pause();
  }
  PyEval_RestoreThread(state_);
  --without_gil;
}

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
  if (interpreter_ends()) return Status::error(Code::io_error, "the interpreter ends");
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
  m.def("shorten_spins", &shorten_spins, "Makes the threads of an OpenMP that another package has loaded spin less.");
  m.def(
      "instruction_set", [] { return std::string(cpu_ref::instruction_set()); },
      "The vector instructions that the CPU backend uses in float32 on this processor.");
  m.def(
      "num_threads", [] { return threads.load(); }, "The number of threads that the CPU backend works with.");
}

}  // namespace cf::python
