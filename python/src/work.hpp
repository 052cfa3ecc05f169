#pragma once
#include <nanobind/nanobind.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include "core/status.hpp"
#include "python/src/bindings.hpp"

namespace cf::python {

/// Gives the calling thread's parallel work the number of threads that set_num_threads() chose. OpenMP keeps that
/// number for each thread by itself. Refuses what cpu_ref::start_threads() refuses of OMP_NUM_THREADS and
/// OMP_STACKSIZE.
Status use_threads();

/// Adds set_num_threads(), num_threads() and instruction_set() to the module.
void bind_threads(nanobind::module_& m);

/// While one lives, the thread works without the GIL. A daemon thread may still work when the interpreter ends. Python
/// would end it where it takes the GIL back, and C++ cannot be left that way: the thread waits for the process's end.
class WithoutGil {
 public:
  WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil();

 private:
  PyThreadState* state_;
};

/// Whether the interpreter ends, in another thread than the one that ends it: the GIL must not be taken any more.
bool interpreter_ends();

/// Makes the threads of WithoutGil notice the interpreter's end.
void watch_interpreter_end();

/// Lets Python handle signals while a model works.
class Interrupt {
 public:
  /// Returns an error where the Python handler of a signal has raised an exception, and where the interpreter ends. The
  /// call is cheap: it takes the GIL only a few times a second, and the handlers run then. The caller must not hold the
  /// GIL.
  Status check();

 private:
  long long next_ns_ = 0;
};

/// Threads that work on one object take turns.
class Turns {
 public:
  class Turn {
   public:
    explicit Turn(Turns& turns) : turns_(turns), lock_(turns.mutex_) { turns_.holder_ = std::this_thread::get_id(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn() { turns_.holder_ = std::thread::id(); }

   private:
    Turns& turns_;
    std::lock_guard<std::mutex> lock_;
  };

  /// Refuses the thread whose turn it is already: a signal's handler that uses the object whose work it interrupts.
  Status check() const;

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> holder_{};
};

/// Runs f, which returns a Status or a Result, without the GIL and in turn with other threads. Raises the exception of
/// a signal's handler.
template <class F>
auto work(Turns& turns, F&& f) {
  check(turns.check());
  auto result = [&] {
    const WithoutGil without_gil;
    const Turns::Turn turn(turns);
    if (const Status usable = use_threads(); !usable) return decltype(f())(usable);
    return f();
  }();
  if (PyErr_Occurred()) throw nanobind::python_error();
  return result;
}

}  // namespace cf::python
