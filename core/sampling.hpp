#pragma once
// How logits become a token. Host and device share this arithmetic, and equal logits give both the same token: whatever
// is summed is an integer, and no float32 operation can be contracted with another.
#include <cstdint>
#include <limits>
#include <numbers>
#include <string>

#include "core/host_device.hpp"
#include "core/philox.hpp"
#include "core/status.hpp"

namespace cf {

struct SamplingRule;

/// How the next token is chosen from a sequence's logits l. The steps and their order are those of Hugging Face's
/// generate() (GenerationMixin._get_logits_processor):
///   repetition_penalty  l < 0 ? l * repetition_penalty : l / repetition_penalty, for every id that the prompt or the
///                       output has, once however often it occurs
///   temperature         the score s = l / temperature
///   top_k               keeps the top_k highest scores; 0 keeps all
///   top_p               keeps the fewest highest of these whose probabilities reach the sum top_p, where the
///                       probabilities of what top_k kept sum to 1
///   min_p               keeps those of these whose probability is at least min_p times the largest
/// A kept token is drawn with the probability exp(s) / sum of exp(s) over the kept ones, or never where that is below
/// 2^-43 of the largest. At temperature 0 nothing is drawn: the token is the one of the highest penalised logit.
/// Of equal scores, that of the lower id counts as the higher one. Rounding aside, Hugging Face differs in this alone:
/// its top_k keeps every score that equals the last kept one, and its top_p leaves the choice among equals to an
/// unstable sort.
struct Sampling {
  double temperature = 0;
  int top_k = 0;
  double top_p = 1;
  double min_p = 0;
  double repetition_penalty = 1;
  std::uint64_t seed = 0;

  bool greedy() const { return temperature == 0; }
  /// Refuses a temperature that is neither 0 nor a normal float32, a negative top_k, a top_p outside (0, 1], a min_p
  /// outside [0, 1], a repetition_penalty that is no normal float32 above 0, and a cut-off beside temperature 0, where
  /// it would have no effect.
  Status validate() const;
  /// The same as the numbers that a token's arithmetic takes. The settings are valid ones.
  SamplingRule rule() const;
};

/// "temperature 0.7, top_k 50, top_p 1, min_p 0, repetition_penalty 1, seed 0"
std::string to_string(const Sampling&);

/// A Sampling as the arithmetic below takes it. The kept tokens are the highest ones by order_key(): at most top_k, as
/// many as kept_sum() asks for, and none whose weight is below least_weight. Greedy settings are top_k = 1 and
/// temperature = 1.
struct SamplingRule {
  float repetition_penalty;
  float temperature;
  std::int64_t top_k;
  std::uint64_t top_p_rest;    // (1 - top_p) * 2^64
  std::uint64_t least_weight;  // min_p * 2^kWeightBits rounded up, but at least 1
  std::uint64_t seed;
};

namespace sampling {

/// The largest weight is 2^kWeightBits. The weights of kMostTokens tokens then sum to 2^63 at most.
inline constexpr int kWeightBits = 42;
inline constexpr std::int64_t kMostTokens = std::int64_t(1) << 21;

__extension__ using UInt128 = unsigned __int128;  // g++, clang++ and nvcc have it, ISO C++ does not

/// The upper 64 of the 128 bits of a * b.
CF_HD constexpr std::uint64_t multiply_high(std::uint64_t a, std::uint64_t b) {
  return std::uint64_t(UInt128(a) * b >> 64);
}

/// a * b, a / b and a - b, each rounded to float32 by itself. On the host `volatile` keeps the compiler from fusing the
/// product and a following subtraction into one FMA.
CF_HD inline float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  const volatile float rounded = a * b;
  return rounded;
#endif
}
CF_HD inline float quotient(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
CF_HD inline float difference(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}
/// The same of doubles, which the oracle's greedy choice compares and does not subtract.
CF_HD inline double product(double a, double b) { return a * b; }
CF_HD inline double quotient(double a, double b) { return a / b; }

/// A token's score. `seen` says whether the prompt or the output has the token's id.
template <class Real>
CF_HD Real score(Real logit, bool seen, Real repetition_penalty, Real temperature) {
  if (seen) logit = logit < 0 ? product(logit, repetition_penalty) : quotient(logit, repetition_penalty);
  return quotient(logit, temperature);
}

/// A number by which a sequence's tokens are ordered: larger for the higher score, and for the lower id of two equal
/// scores. The score is not NaN.
CF_HD inline std::uint64_t order_key(float score, std::int32_t id) {
  const auto bits = __builtin_bit_cast(std::uint32_t, score);
  constexpr std::uint32_t sign = 0x80000000;
  // The bits of floats above 0 grow with them, those of floats below 0 shrink. -0 counts as 0.
  const std::uint32_t ordered = bits <= sign ? bits | sign : ~bits;
  return std::uint64_t(ordered) << 32 | ~std::uint32_t(id);
}
/// The order key of a logit that is NaN or +infinity: above that of every other score.
inline constexpr std::uint64_t kRefusedKey = ~std::uint64_t(0);
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
/// The order key of any logit: kRefusedKey where no token can be chosen beside it, 0 where it is -infinity.
CF_HD inline std::uint64_t logit_key(float logit, std::int32_t id) {
  return !(logit < kInfinity) ? kRefusedKey : logit > -kInfinity ? order_key(logit, id) : 0;
}
/// The id of the token that has this order key.
CF_HD constexpr std::int32_t id_of(std::uint64_t key) { return std::int32_t(~std::uint32_t(key)); }

/// 2^-f = sum over n of (-1)^n c_n f^n, where c_n = ln(2)^n / n!. f and c_n are in units of 2^-64.
/// The last term taken has an even n, so the sum lies above 2^-f, by less than ln(2)^15 / 15! < 3.2e-15.
inline constexpr int kLastTerm = 14;
CF_HD constexpr std::uint64_t coefficient(int n) {
  constexpr auto ln2 = std::uint64_t(std::numbers::ln2 * 0x1p64);
  std::uint64_t c = ln2;
  for (int i = 2; i <= n; ++i) c = multiply_high(c, ln2) / std::uint64_t(i);
  return c;
}
/// c_n - f (c_(n+1) - f (c_(n+2) - ...)), which is never negative, since c_(n+1) < c_n.
template <int n>
CF_HD constexpr std::uint64_t series(std::uint64_t f) {
  constexpr std::uint64_t c = coefficient(n);
  if constexpr (n == kLastTerm)
    return c;
  else
    return c - multiply_high(f, series<n + 1>(f));
}

/// The weight of a score beside the highest score: exp(score - highest) * 2^kWeightBits, rounded to an integer; 0 where
/// that is below 1/2, as for -infinity. Only the difference is rounded in floating point, to float32. All that follows
/// is exact or in integers. The weight is within 1/2 + 2^-6 of exp(difference) * 2^kWeightBits: the final rounding, and
/// 2^42 times the sum of 3.2e-15 (the series), 2^-53 (ln2 and log2(e) as doubles) and 2^-56 (what products drop).
/// A higher score never has a smaller weight: one more in `halved` lowers `power` by 11 at least, what products drop
/// changes it by 8 at most, and the series lies above 2^-f where one halving passes into the next.
CF_HD inline std::uint64_t weight(float highest, float score) {
  const float below = difference(highest, score);
  if (!(below < 32)) return 0;
  // below * log2(e) = halvings + f. A power of two scales a float exactly.
  constexpr auto log2e = std::uint64_t(std::numbers::log2e * 0x1p63);
  constexpr int fraction_bits = 58;  // 59 + 63 - 64
  const std::uint64_t halved = multiply_high(std::uint64_t(below * 0x1p59f), log2e);
  const int halvings = int(halved >> fraction_bits);
  if (halvings > kWeightBits) return 0;
  const std::uint64_t f = halved << (64 - fraction_bits);
  const std::uint64_t power = (std::uint64_t(1) << 63) - (multiply_high(f, series<1>(f)) >> 1);  // 2^-f * 2^63
  const int shift = 63 - kWeightBits + halvings;
  return (power + (std::uint64_t(1) << (shift - 1))) >> shift;
}

/// What top_p asks for, where `sum` is that of the weights that top_k kept: a token is kept if the weights of the
/// tokens above it sum to less than this. It is at least 1, so the highest token is always kept.
CF_HD constexpr std::uint64_t kept_sum(std::uint64_t sum, const SamplingRule& rule) {
  return sum - multiply_high(sum, rule.top_p_rest);
}

/// 64 random bits for one token: a function of the seed, the caller's number of the sequence, and the position, and of
/// no other sequence.
CF_HD constexpr std::uint64_t random_bits(std::uint64_t seed, std::uint64_t sequence, std::uint64_t position) {
  const auto low = [](std::uint64_t x) { return std::uint32_t(x); };
  const auto high = [](std::uint64_t x) { return std::uint32_t(x >> 32); };
  const PhiloxBlock x =
      philox4x32_10({{low(sequence), high(sequence), low(position), high(position)}}, {{low(seed), high(seed)}});
  return std::uint64_t(x.word[1]) << 32 | x.word[0];
}

/// What a draw aims at, where `sum` is that of the kept weights: the drawn token is the first in the order of ids whose
/// weight and the kept weights before it sum to more than this. Each probability is met to 2^-64.
CF_HD constexpr std::uint64_t target(std::uint64_t random, std::uint64_t sum) { return multiply_high(random, sum); }

}  // namespace sampling
}  // namespace cf
