#include "core/model/tap_reader.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/procedural.hpp"
#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/model_slots.hpp"
#include "python/src/slots_bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace cf::python {
namespace {

/// The values of a block, which numpy's arrays keep.
class PythonTapBlock {
 public:
  explicit PythonTapBlock(TapBlock block) : block_(std::move(block)) {}

  nb::dict arrays() const {
    check([&] {
      const WithoutGil without_gil;
      return block_.await();
    }());
    nb::dict made;
    for (const auto& [name, values] : block_.taps) {
      auto* const kept = new std::shared_ptr<const void>(block_.owner);
      const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<const void>*>(p); });
      const std::vector<std::size_t> shape(values.shape.begin(), values.shape.end());
      made[name.c_str()] =
          nb::cast(Array(const_cast<void*>(values.data), shape.size(), shape.data(), owner, nullptr, stored(values)));
    }
    return made;
  }

 private:
  static nb::dlpack::dtype stored(const TapBlock::Values& values) {
    switch (values.dtype) {
      case DType::f64: return nb::dtype<double>();
      case DType::f16: return {std::uint8_t(nb::dlpack::dtype_code::Float), 16, 1};
      case DType::bf16: return nb::dtype<std::uint16_t>();
      default: return nb::dtype<float>();
    }
  }
  TapBlock block_;
};

/// A TapReader and the slots that it has.
class PythonTapReader {
 public:
  PythonTapReader(const Weights& w, const cpu_ref::Model::Options& options)
      : slots_(w, options), known_(model_taps(w.config, w.weights)) {}
  PythonTapReader(const std::shared_ptr<SharedModel>& shared, std::int64_t slots)
      : slots_(shared, slots), known_(model_taps(slots_.spec(), outline_model(slots_.spec(), slots_.activation()))) {}

  void begin(const std::vector<std::string>& names) {
    std::vector<Tap> taps;
    for (const std::string& name : names) {
      const auto found = std::ranges::find(known_, name, &Tap::name);
      if (found == known_.end()) refuse("tap '" + name + "' is unknown");
      taps.push_back(*found);
    }
    check(slots_.look([&]() -> Status {
      reader_.emplace(slots_.lease(), std::move(taps));
      return {};
    }));
  }
  PythonTapBlock read(const std::vector<nb::object>& from) {
    std::vector<Ids> prompts;
    for (const nb::object& ids : from) {
      const std::string name = "prompt " + std::to_string(prompts.size());
      prompts.push_back(ids_of(name.c_str(), ids, slots_.vocab_size()));
    }
    return PythonTapBlock(take(slots_.use([&](ModelRunner&) -> Result<TapBlock> {
      if (!reader_) return Status::error(Code::invalid_argument, "tap reader: expected begin() first");
      return reader_->read(prompts);
    })));
  }
  std::int64_t pass_tokens() {
    return take(slots_.use([&](ModelRunner& runner) -> Result<std::int64_t> { return runner.pass_tokens(); }));
  }
  std::vector<std::string> taps() const {
    std::vector<std::string> names;
    for (const Tap& t : known_) names.push_back(t.name);
    return names;
  }
  void close() { slots_.close(); }

 private:
  ModelSlots slots_;
  std::vector<Tap> known_;
  std::optional<TapReader> reader_;
};

}  // namespace

void bind_tap_reader(nb::module_& m) {
  nb::class_<PythonTapBlock>(m, "TapBlock", "Taps of a block of prompts, which may be on their way from a GPU.")
      .def("arrays", &PythonTapBlock::arrays,
           nb::sig("def arrays(self) -> dict[str, numpy.typing.NDArray[typing.Any]]"),
           "Waits for the values, and returns them by tap, (ids of all prompts, ...) in the model's dtype; those of "
           "bfloat16 are their bits in uint16. The arrays keep the memory, which a later block takes once they are "
           "gone.");
  nb::class_<PythonTapReader> bound(m, "TapReader", "Reads prompts for their taps. Threads take turns.");
  bind_constructors(bound);
  bound.def("begin", &PythonTapReader::begin, "taps"_a, "Chooses the taps. Raises ValueError for an unknown one.")
      .def("read", &PythonTapReader::read, "prompts"_a,
           nb::sig("def read(self, prompts: collections.abc.Sequence[object]) -> TapBlock"),
           "Reads prompts, at most one a slot, from position 0 on. On a GPU the call returns when their work is there. "
           "Raises ValueError for ids outside the vocabulary and more prompts than slots.")
      .def_prop_ro("taps", &PythonTapReader::taps, "The names of all taps, in the order of the model.")
      .def_prop_ro("pass_tokens", &PythonTapReader::pass_tokens,
                   "The ids that go through a GPU's model at once; 0 on the CPU, which reads each prompt by itself.")
      .def("close", &PythonTapReader::close, kClose);
}

}  // namespace cf::python
