#pragma once
// What the bindings of several classes share: those that hold ModelSlots.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include "cpu_ref/model.hpp"
#include "python/src/bindings.hpp"
#include "python/src/shared_model.hpp"
#include "python/src/weights.hpp"

namespace cf::python {

inline constexpr const char* kClose =
    "Gives the slots of a model on a GPU back; every other call is refused then. Does nothing on the CPU.";

/// The constructors of a class that holds ModelSlots, which take the same arguments. `own` are further ones of the
/// class, of the types Own.
template <class... Own, class C, class... Arguments>
void bind_constructors(nanobind::class_<C>& bound, const Arguments&... own) {
  namespace nb = nanobind;
  using namespace nb::literals;
  bound
      .def(
          "__init__",
          [](C* self, const Weights& weights, std::int64_t slots, std::int64_t capacity, std::int64_t chunk,
             const std::string& activation, std::int64_t window, std::int64_t sinks, std::int64_t pages,
             std::int64_t page_entries, bool invariant, Own... of_class) {
            const std::optional<DType> dtype = dtype_from_string(activation);
            if (!dtype) refuse("activation: expected float32 or float64, got '" + activation + "'");
            const cpu_ref::Model::Options options{.slots = slots,
                                                  .capacity = capacity,
                                                  .chunk = chunk,
                                                  .activation = *dtype,
                                                  .invariant = invariant,
                                                  .window = window,
                                                  .sinks = sinks,
                                                  .pages = pages,
                                                  .page_entries = page_entries};
            new (self) C(weights, options, of_class...);
          },
          "weights"_a, nb::kw_only(), "slots"_a = 1, "capacity"_a = 2048, "chunk"_a = 512, "activation"_a = "float32",
          "window"_a = 0, "sinks"_a = 0, "pages"_a = 0, "page_entries"_a = 64, "invariant"_a = false, own...,
          "Takes memory for a cache of `slots` sequences of `capacity` entries and for activations of dtype "
          "`activation`; `chunk` tokens of a prompt go through the model at once. With a `window` each slot is a "
          "stream without end: a token sees so many tokens, its own among them, and the first `sinks`; `capacity` has "
          "no effect then. With `pages` all slots take the entries that they need from a pool of so many pages of "
          "`page_entries` entries. With `invariant` a token's bits do not depend on what else is in its step. Raises "
          "ValueError for sizes below 1, another dtype and options that do not go together, and MemoryError where the "
          "memory is not free.")
      .def(nb::init<const std::shared_ptr<SharedModel>&, std::int64_t, Own...>(), "model"_a, nb::kw_only(),
           "slots"_a = 1, own...,
           "Takes `slots` of a model on a GPU until it ends. Raises ValueError where fewer are free.");
}

}  // namespace cf::python
