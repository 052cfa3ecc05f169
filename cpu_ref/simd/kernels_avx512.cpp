#include <immintrin.h>

#include <cstring>

#define CF_EIGEN Eigen_avx512
#include "cpu_ref/simd/kernels_impl.hpp"

namespace cf::cpu_ref {
namespace {

struct Avx512 {
  static constexpr const char* name = "avx512";
  static constexpr int lanes = 16;
  static constexpr int registers = 32;
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
  /// Codes first .. first + lanes - 1 of a row of codes that are packed into words, as floats.
  template <int bits>
  static V packed_codes(const std::int32_t* words, std::int64_t first) {
    static constexpr PackedCodes<lanes, bits> codes;
    __m128i packed{};
    std::memcpy(&packed, words + first * bits / 32, codes.bytes);
    const Words spread = _mm512_permutexvar_epi32(_mm512_load_si512(codes.word), _mm512_castsi128_si512(packed));
    const Words shifted = _mm512_srlv_epi32(spread, _mm512_load_si512(codes.shift));
    return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32((1 << bits) - 1)));
  }
  template <int count>
  static Words shift_right(Words words) {
    return _mm512_srli_epi32(words, count);
  }
  /// The float whose bits are those of (words & mask) and those of `raise` together.
  static V raised(Words words, int mask, float raise) {
    constexpr int a_and_b_or_c = 0xea;
    const Words c = _mm512_castps_si512(_mm512_set1_ps(raise));
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(words, _mm512_set1_epi32(mask), c, a_and_b_or_c));
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
