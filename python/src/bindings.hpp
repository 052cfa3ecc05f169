#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "core/status.hpp"
#include "core/tensor.hpp"

namespace cf::python {

/// A tensor that Python describes by its address in memory, the name of its dtype (numpy's), and its shape.
using MemoryTensor = std::tuple<std::uintptr_t, std::string, Shape>;

/// Raises the Python exception of a Status that is not ok, with its one line: ValueError (invalid_argument,
/// invalid_file), FileNotFoundError (not_found), OSError (io_error), NotImplementedError (unimplemented), MemoryError
/// (out_of_memory) or cf_ops.CfError (device_error). The GIL must be held.
void check(const Status& status);

/// The value of a Result, or its Status's exception.
template <class T>
T take(Result<T> result) {
  check(result.status());
  return std::move(*result);
}

/// Adds the ops to the module.
void bind_ops(nanobind::module_& m);
/// Adds whole models to the module.
void bind_weights(nanobind::module_& m);
void bind_device(nanobind::module_& m);
void bind_runner(nanobind::module_& m);
void bind_decoder(nanobind::module_& m);
void bind_scorer(nanobind::module_& m);
void bind_memorizer(nanobind::module_& m);
void bind_tap_reader(nanobind::module_& m);
/// Adds what tells revisions of a model apart.
void bind_revisions(nanobind::module_& m);

}  // namespace cf::python
