#pragma once
// Private to cuda. Which way of launching steps is the fastest. Without CUDA: the host tests it.
#include <cstdint>

#include "core/dtype.hpp"
#include "core/model/shape.hpp"
#include "cuda/runtime/arch.hpp"
#include "cuda/step/impl.hpp"

namespace cf::cuda {

/// The fastest impl for steps of `slots` slots of a model on a GPU of this kind, by its measured bounds. `dtype` is
/// that of the activations; `is_quantised` says whether any Linear is quantised. A pure function of its arguments.
Impl fastest_impl(const Arch& arch, const ModelSpec& model, DType dtype, bool is_quantised, std::int64_t slots);

}  // namespace cf::cuda
