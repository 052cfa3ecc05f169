#include "core/model/memorizer.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/model_slots.hpp"
#include "python/src/slots_bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace cf::python {
namespace {

using Rows = nb::ndarray<const std::int32_t, nb::numpy, nb::ndim<2>, nb::c_contig>;
using Made = std::vector<std::tuple<std::int64_t, std::int32_t, std::int32_t>>;  // place, equal, prefix

/// A Memorizer and the slots that it has.
class PythonMemorizer {
 public:
  PythonMemorizer(const Weights& w, const cpu_ref::Model::Options& options) : slots_(w, options) {}
  PythonMemorizer(const std::shared_ptr<SharedModel>& shared, std::int64_t slots) : slots_(shared, slots) {}

  void begin(std::int64_t context, std::int64_t continuation, bool exact_only, const Ids& never) {
    check(slots_.use([&](ModelRunner&) -> Status {
      CF_TRY_ASSIGN(Memorizer made,
                    Memorizer::create(
                        slots_.lease(),
                        {.context = context, .continuation = continuation, .exact_only = exact_only, .never = never}));
      memorizer_ = std::move(made);
      return {};
    }));
  }
  void add(std::int64_t place, const Rows& rows) {
    check(slots_.use([&](ModelRunner&) -> Status {
      CF_TRY(check_begun());
      const std::size_t length = rows.shape(1);
      for (std::size_t i = 0; i < rows.shape(0); ++i)
        CF_TRY(memorizer_->add(place + std::int64_t(i), std::span(rows.data() + i * length, length)));
      return {};
    }));
  }
  Made step(std::int64_t steps) {
    Made made;
    check(slots_.use([&](ModelRunner&) -> Status {
      CF_TRY(check_begun());
      for (std::int64_t i = 0; i < steps && memorizer_->running() > 0; ++i) {
        CF_TRY_ASSIGN(const std::vector<Memorized> ended, memorizer_->step());
        for (const auto& [place, equal, prefix] : ended) made.emplace_back(place, equal, prefix);
      }
      return {};
    }));
    return made;
  }
  std::int64_t running() {
    return take(slots_.look([&]() -> Result<std::int64_t> { return memorizer_ ? memorizer_->running() : 0; }));
  }
  void close() { slots_.close(); }

 private:
  Status check_begun() const {
    return memorizer_ ? Status() : Status::error(Code::invalid_argument, "memorizer: expected begin() first");
  }
  ModelSlots slots_;
  std::optional<Memorizer> memorizer_;
};

}  // namespace

void bind_memorizer(nb::module_& m) {
  nb::class_<PythonMemorizer> bound(m, "Memorizer",
                                    "Continues sequences and compares them with their own ids. Threads take turns.");
  bind_constructors(bound);
  bound
      .def("begin", &PythonMemorizer::begin, nb::kw_only(), "context"_a, "continuation"_a, "exact_only"_a = false,
           "never"_a = Ids{},
           "Sequences have `context` ids that are given and `continuation` that are to be made, greedily and without "
           "the ids of `never`. With exact_only a sequence ends at its first id that differs. Raises ValueError for "
           "sizes below 1 and ids outside the vocabulary.")
      .def("add", &PythonMemorizer::add, "place"_a, "rows"_a,
           nb::sig("def add(self, place: int, rows: numpy.typing.NDArray[numpy.int32]) -> None"),
           "Takes sequences (n, context + continuation), whose numbers are `place` and on. Raises ValueError for ids "
           "outside the vocabulary.")
      .def("step", &PythonMemorizer::step, "steps"_a = 1,
           "Makes up to `steps` ids of each sequence that has a slot, and returns those that have ended: number, equal "
           "ids or -1, and equal ids before the first that differs. Raises CfError or ValueError where a sequence "
           "fails, such as by logits that are NaN.")
      .def_prop_ro("running", &PythonMemorizer::running, "How many sequences were added and have not ended.")
      .def("close", &PythonMemorizer::close, kClose);
}

}  // namespace cf::python
