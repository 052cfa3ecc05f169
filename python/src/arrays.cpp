#include "python/src/arrays.hpp"

#include <nanobind/stl/string.h>

#include <stdexcept>
#include <utility>

#include "python/src/bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace cf::python {

void refuse(std::string what) {
  check(Status::error(Code::invalid_argument, std::move(what)));
  throw std::logic_error("an error Status raises");
}

Array array_of(Tensor tensor) {
  if (size_bytes(tensor.dtype()) == 2) tensor = tensor.converted(DType::f32);
  auto* const owned = new Tensor(std::move(tensor));
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Tensor*>(p); });
  const std::vector<std::size_t> shape(owned->shape().begin(), owned->shape().end());
  return Array(owned->data(), shape.size(), shape.data(), owner, nullptr,
               owned->dtype() == DType::f64 ? nb::dtype<double>() : nb::dtype<float>());
}

Ids ids_of(const char* what, nb::handle from, std::int64_t vocab_size) {
  const nb::module_ numpy = nb::module_::import_("numpy");
  const nb::object array = numpy.attr("asarray")(from);
  const std::string name = what;
  if (nb::cast<int>(array.attr("ndim")) != 1)
    refuse(name + ": expected ids in one dimension, got " + std::to_string(nb::cast<int>(array.attr("ndim"))));
  if (nb::cast<std::size_t>(array.attr("size")) == 0) return {};
  const std::string kind = nb::cast<std::string>(array.attr("dtype").attr("kind"));
  if ((kind != "i" && kind != "u") || !nb::cast<bool>(numpy.attr("can_cast")(array.attr("dtype"), numpy.attr("int64"))))
    refuse(name + ": expected integers of at most 64 bits, got " +
           nb::cast<std::string>(array.attr("dtype").attr("name")));
  using Int64s = nb::ndarray<const std::int64_t, nb::numpy, nb::ndim<1>, nb::c_contig>;
  const auto wide = nb::cast<Int64s>(numpy.attr("ascontiguousarray")(array, "dtype"_a = "int64"));
  Ids ids;
  ids.reserve(wide.size());
  for (std::size_t i = 0; i < wide.size(); ++i) {
    const std::int64_t id = wide.data()[i];
    if (id < 0 || id >= vocab_size)
      refuse(name + "[" + std::to_string(i) + "]: expected an id of 0 to " + std::to_string(vocab_size - 1) + ", got " +
             std::to_string(id));
    ids.push_back(std::int32_t(id));
  }
  return ids;
}

}  // namespace cf::python
