#pragma once
#include <nanobind/nanobind.h>

#include <mutex>
#include <utility>

#include "core/status.hpp"

namespace cf::python {

/// Gives the calling thread's parallel work the number of threads that set_num_threads() chose. OpenMP keeps that
/// number for each thread by itself.
void use_threads();

/// Adds set_num_threads(), num_threads() and instruction_set() to the module.
void bind_threads(nanobind::module_& m);

/// While a model works: an error Status once Python's handler of a signal has raised an exception, otherwise ok. It asks
/// a few times a second. The GIL must not be held.
class Interrupt {
 public:
  Status check();

 private:
  long long next_ns_ = 0;
};

/// Runs f, which returns a Status or a Result, without the GIL and with the mutex of the object that f works on. Raises
/// the exception that a signal's handler has left.
template <class F>
auto work(std::mutex& mutex, F&& f) {
  auto result = [&] {
    const nanobind::gil_scoped_release release;
    const std::lock_guard lock(mutex);
    use_threads();
    return f();
  }();
  if (PyErr_Occurred()) throw nanobind::python_error();
  return result;
}

}  // namespace cf::python
