#include <nanobind/stl/string.h>

#include <string>

#include "python/src/bindings.hpp"
#include "python/src/work.hpp"

namespace nb = nanobind;

namespace cf::python {
namespace {

PyObject* cf_error = nullptr;  // cf_ops.CfError, alive as long as the module

PyObject* exception_of(Code code) {
  switch (code) {
    case Code::invalid_argument:
    case Code::invalid_file: return PyExc_ValueError;
    case Code::not_found: return PyExc_FileNotFoundError;
    case Code::io_error: return PyExc_OSError;
    case Code::unimplemented: return PyExc_NotImplementedError;
    case Code::out_of_memory: return PyExc_MemoryError;
    case Code::ok:
    case Code::device_error: break;
  }
  return cf_error;
}

}  // namespace

void check(const Status& status) {
  if (status) return;
  PyErr_SetString(exception_of(status.code()), status.message().c_str());
  throw nb::python_error();
}

}  // namespace cf::python

NB_MODULE(_core, m) {
  m.doc() = "The compiled part of cf_ops.";
  m.def(
      "version", [] { return CF_VERSION; }, "The version of the compiled part.");
  // The stub's generator writes the classes whose module has this module's name.
  const std::string name = nb::cast<std::string>(m.attr("__name__")) + ".CfError";
  cf::python::cf_error = PyErr_NewExceptionWithDoc(name.c_str(), "What failed in a device or in cf_ops itself.",
                                                   PyExc_RuntimeError, nullptr);
  m.attr("CfError") = nb::borrow(cf::python::cf_error);
  // Python does not promise to end every object before itself: those of a daemon thread or a global list stay.
  nb::set_leak_warnings(false);
  cf::python::watch_interpreter_end();
  cf::python::bind_ops(m);
  cf::python::bind_threads(m);
  cf::python::bind_weights(m);
  cf::python::bind_device(m);
  cf::python::bind_runner(m);
  cf::python::bind_decoder(m);
  cf::python::bind_scorer(m);
  cf::python::bind_memorizer(m);
  cf::python::bind_tap_reader(m);
  cf::python::bind_revisions(m);
}
