#pragma once
// What the bindings of several classes share: those that hold ModelSlots.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <string>

#include "python/src/shared_model.hpp"
#include "python/src/weights.hpp"

namespace cf::python {

inline constexpr const char* kClose =
    "Gives the slots of a model on a GPU back; every other call is refused then. Does nothing on the CPU.";

/// The constructors of a class that holds ModelSlots, which take the same arguments.
template <class C>
void bind_constructors(nanobind::class_<C>& bound) {
  namespace nb = nanobind;
  using namespace nb::literals;
  bound
      .def(nb::init<const Weights&, std::int64_t, std::int64_t, std::int64_t, const std::string&, std::int64_t,
                    std::int64_t>(),
           "weights"_a, nb::kw_only(), "slots"_a = 1, "capacity"_a = 2048, "chunk"_a = 512, "activation"_a = "float32",
           "window"_a = 0, "sinks"_a = 0,
           "Takes memory for a cache of `slots` sequences of `capacity` entries and for activations of dtype "
           "`activation`; `chunk` tokens of a prompt go through the model at once. With a `window` each slot is a "
           "stream without end: a token sees so many tokens, its own among them, and the first `sinks`; `capacity` has "
           "no effect then. Raises ValueError for sizes below 1 or another dtype, and MemoryError where the memory is "
           "not free.")
      .def(nb::init<const std::shared_ptr<SharedModel>&, std::int64_t>(), "model"_a, nb::kw_only(), "slots"_a = 1,
           "Takes `slots` of a model on a GPU until it ends. Raises ValueError where fewer are free.");
}

}  // namespace cf::python
