#include <immintrin.h>

#include <cstring>

#define CF_EIGEN Eigen_avx2
#include "cpu_ref/simd/kernels_impl.hpp"

namespace cf::cpu_ref {
namespace {

struct Avx2 {
  static constexpr const char* name = "avx2";
  static constexpr int lanes = 8;
  static constexpr int registers = 16;
  using V = __m256;
  static V zero() { return _mm256_setzero_ps(); }
  static V broadcast(float a) { return _mm256_set1_ps(a); }
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static V load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static V load(const bf16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static void store(float* p, V v) { _mm256_storeu_ps(p, v); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  using Words = __m256i;
  static Words load_words(const std::int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  /// Codes first .. first + lanes - 1 of a row of codes that are packed into words, as floats.
  template <int bits>
  static V packed_codes(const std::int32_t* words, std::int64_t first) {
    static constexpr PackedCodes<lanes, bits> codes;
    __m128i packed{};
    std::memcpy(&packed, words + first * bits / 32, codes.bytes);
    const Words spread = _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(packed), load_words(codes.word));
    const Words shifted = _mm256_srlv_epi32(spread, load_words(codes.shift));
    return _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32((1 << bits) - 1)));
  }
  template <int count>
  static Words shift_right(Words words) {
    return _mm256_srli_epi32(words, count);
  }
  /// The float whose bits are those of (words & mask) and those of `raise` together.
  static V raised(Words words, int mask, float raise) {
    const Words masked = _mm256_and_si256(words, _mm256_set1_epi32(mask));
    return _mm256_or_ps(_mm256_castsi256_ps(masked), _mm256_set1_ps(raise));
  }
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static float sum(V v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static float widen(float x) { return x; }
  static float widen(f16 x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits))); }
  static float widen(bf16 x) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(int(unsigned(x.bits) << 16)))); }
};

}  // namespace

const Kernels kAvx2Kernels = make_kernels<Avx2>();

}  // namespace cf::cpu_ref
