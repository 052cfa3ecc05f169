#include <immintrin.h>

#define CF_EIGEN Eigen_avx512
#include "cpu_ref/simd/kernels_impl.hpp"

namespace cf::cpu_ref {
namespace {

struct Avx512 {
  static constexpr const char* name = "avx512";
  static constexpr int lanes = 16;
  using V = __m512;
  static V zero() { return _mm512_setzero_ps(); }
  static V broadcast(float a) { return _mm512_set1_ps(a); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static V load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static V load(const bf16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  using Words = __m512i;
  static Words load_words(const std::int32_t* p) { return _mm512_loadu_si512(p); }
  /// Code i of each word, low bits first.
  template <int bits>
  static V code(Words words, int i) {
    const Words shifted = _mm512_srl_epi32(words, _mm_cvtsi32_si128(i * bits));
    return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32((1 << bits) - 1)));
  }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static float sum(V v) { return _mm512_reduce_add_ps(v); }
  static float widen(float x) { return x; }
  static float widen(f16 x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits))); }
  static float widen(bf16 x) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(int(unsigned(x.bits) << 16)))); }
};

}  // namespace

const Kernels kAvx512Kernels = make_kernels<Avx512>();

}  // namespace cf::cpu_ref
