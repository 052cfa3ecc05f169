#pragma once
// What Python gives and gets: ids and arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/tensor.hpp"

namespace cf::python {

using Ids = std::vector<std::int32_t>;
using Array = nanobind::ndarray<nanobind::numpy>;

/// Raises ValueError.
[[noreturn]] void refuse(std::string what);

/// A numpy array over a tensor's memory, which the array keeps: of float32 or float64, which 16-bit values are widened
/// to.
Array array_of(Tensor tensor);

/// Token ids from a list, an array or whatever numpy.asarray takes. Refuses other than integers in one dimension, and
/// ids outside the vocabulary.
Ids ids_of(const char* what, nanobind::handle from, std::int64_t vocab_size);

}  // namespace cf::python
