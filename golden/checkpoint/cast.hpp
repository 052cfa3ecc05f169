#pragma once
// Private to the checkpoint library: dense weights of one dtype as another, as torch's copy_() casts them.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

#include "core/dtype.hpp"

namespace cf::checkpoint {

/// The dtype of a dense tensor that can be cast, as files spell it.
inline std::optional<DType> float_dtype(std::string_view stored) {
  if (stored == "F16") return DType::f16;
  if (stored == "BF16") return DType::bf16;
  if (stored == "F32") return DType::f32;
  if (stored == "F64") return DType::f64;
  return std::nullopt;
}

/// Casts elements, each rounded to float32 and from there to `to`, to nearest even. `source` may lie anywhere. Returns
/// the first element that is finite and becomes infinite, -1 where there is none.
inline std::int64_t cast_elements(DType from, const void* source, std::int64_t elements, DType to, void* target) {
  std::int64_t overflow = -1;
  dispatch_float(from, [&]<class From>(From) {
    dispatch_float(to, [&]<class To>(To) {
      for (std::int64_t i = 0; i < elements; ++i) {
        From x;
        std::memcpy(&x, static_cast<const char*>(source) + i * std::int64_t(sizeof x), sizeof x);
        const auto exact = widen<double>(x);
        const auto y = narrow<To>(double(float(exact)));
        std::memcpy(static_cast<char*>(target) + i * std::int64_t(sizeof y), &y, sizeof y);
        if (overflow < 0 && std::isfinite(exact) && !std::isfinite(widen<double>(y))) overflow = i;
      }
    });
  });
  return overflow;
}

}  // namespace cf::checkpoint
