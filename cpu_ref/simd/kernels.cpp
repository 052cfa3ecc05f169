#include "cpu_ref/simd/kernels.hpp"

#ifdef CF_X86
#include <cpuid.h>
#endif

#include <array>
#include <bit>
#include <cstring>

#define CF_EIGEN Eigen_portable
#include "cpu_ref/simd/kernels_impl.hpp"

namespace cf::cpu_ref {
namespace {

/// Plain C++, for processors without the instructions of the other sets.
struct Portable {
  static constexpr const char* name = "portable";
  static constexpr int lanes = 4;
  static constexpr int registers = 16;
  using V = std::array<float, 4>;
  template <class F>
  static V each(F f) {
    return {f(0), f(1), f(2), f(3)};
  }
  static V zero() { return {}; }
  static V broadcast(float a) { return {a, a, a, a}; }
  template <class T>
  static V load(const T* p) {
    return each([p](std::size_t i) { return widen(p[i]); });
  }
  static void store(float* p, V v) {
    for (std::size_t i = 0; i < 4; ++i) p[i] = v[i];
  }
  static V fma(V a, V b, V c) {
    return each([&](std::size_t i) { return a[i] * b[i] + c[i]; });
  }
  static V add(V a, V b) {
    return each([&](std::size_t i) { return a[i] + b[i]; });
  }
  using Words = std::array<std::uint32_t, 4>;
  static Words load_words(const std::int32_t* p) {
    Words words;
    std::memcpy(&words, p, sizeof words);
    return words;
  }
  /// Codes first .. first + lanes - 1 of a row of codes that are packed into words, as floats.
  template <int bits>
  static V packed_codes(const std::int32_t* words, std::int64_t first) {
    return each([&](std::size_t n) {
      const std::int64_t bit = (first + std::int64_t(n)) * bits;
      return float(std::uint32_t(words[bit / 32]) >> (bit % 32) & ((1u << bits) - 1));
    });
  }
  template <int count>
  static Words shift_right(Words words) {
    for (std::uint32_t& word : words) word >>= count;
    return words;
  }
  /// The float whose bits are those of (words & mask) and those of `raise` together.
  static V raised(Words words, int mask, float raise) {
    return each([&](std::size_t n) {
      return std::bit_cast<float>((words[n] & std::uint32_t(mask)) | std::bit_cast<std::uint32_t>(raise));
    });
  }
  static V sub(V a, V b) {
    return each([&](std::size_t i) { return a[i] - b[i]; });
  }
  static V mul(V a, V b) {
    return each([&](std::size_t i) { return a[i] * b[i]; });
  }
  static float sum(V v) { return (v[0] + v[2]) + (v[1] + v[3]); }
  template <class T>
  static float widen(T x) {
    return cf::widen<float>(x);
  }
};

#ifdef CF_X86
/// Whether the processor has F16C. clang 14's __builtin_cpu_supports() has no name for it.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

struct Supported {
  std::array<const Kernels*, 3> sets{};
  std::size_t count = 0;
};

const Supported& supported() {
  static const Supported s = [] {
    Supported list;
#ifdef CF_X86
    if (__builtin_cpu_supports("avx512f")) list.sets[list.count++] = &kAvx512Kernels;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
      list.sets[list.count++] = &kAvx2Kernels;
#endif
    list.sets[list.count++] = &kPortableKernels;
    return list;
  }();
  return s;
}

}  // namespace

const Kernels kPortableKernels = make_kernels<Portable>();

const Kernels& kernels() { return *supported().sets[0]; }

const Kernels* const* all_kernels(std::size_t* count) {
  *count = supported().count;
  return supported().sets.data();
}

}  // namespace cf::cpu_ref
