#include "cpu_ref/ops/widen.hpp"

#include <algorithm>

#include "cpu_ref/simd/kernels.hpp"

namespace cf::cpu_ref {

template <class Real>
void widen_row(const void* data, DType dtype, std::int64_t first, std::int64_t n, Real* to) {
  dispatch_float(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(data) + first;
    if constexpr (dtype_of<T> == DType::f16) {
      constexpr std::int64_t block = 256;
      float wide[block];
      for (std::int64_t i = 0; i < n; i += block) {
        const std::int64_t m = std::min(block, n - i);
        kernels().widen_f16(from + i, wide, m);
        std::copy(wide, wide + m, to + i);
      }
    } else {
      for (std::int64_t i = 0; i < n; ++i) to[i] = Real(widen<double>(from[i]));
    }
  });
}

template void widen_row(const void*, DType, std::int64_t, std::int64_t, float*);
template void widen_row(const void*, DType, std::int64_t, std::int64_t, double*);

}  // namespace cf::cpu_ref
