#pragma once
// Every function of core/sampling.hpp and core/philox.hpp that a kernel calls, over given inputs, by one source for the
// host and the device.
#include <cstdint>

#include "core/philox.hpp"
#include "core/sampling.hpp"

struct CUstream_st;

namespace cf::test {

/// No float is NaN; the penalty and the temperature are normal and above 0.
struct SamplingInput {
  float logit, highest, repetition_penalty, temperature;
  std::int32_t id, seen;
  std::uint64_t a, b, top_p_rest;
  std::uint64_t seed, sequence, position;
};

/// Results, each as its bits.
struct SamplingBits {
  std::uint64_t word[14];
};

CF_HD inline std::uint64_t bits_of(float x) {
  return x == x ? __builtin_bit_cast(std::uint32_t, x) : 0x7fc00000u;  // NaN's other bits do not count
}

CF_HD inline SamplingBits sampling_bits(const SamplingInput& in) {
  using namespace sampling;
  const float score = sampling::score(in.logit, in.seen != 0, in.repetition_penalty, in.temperature);
  const std::uint64_t key = order_key(score, in.id);
  const SamplingRule rule{.repetition_penalty = in.repetition_penalty,
                          .temperature = in.temperature,
                          .top_k = 1,
                          .top_p_rest = in.top_p_rest,
                          .least_weight = 1,
                          .seed = in.seed};
  const auto low = [](std::uint64_t x) { return std::uint32_t(x); };
  const auto high = [](std::uint64_t x) { return std::uint32_t(x >> 32); };
  const PhiloxBlock random =
      philox4x32_10({{low(in.a), high(in.a), low(in.b), high(in.b)}}, {{low(in.seed), high(in.seed)}});
  return {{bits_of(score), bits_of(product(in.logit, in.repetition_penalty)),
           bits_of(quotient(in.logit, in.temperature)), bits_of(difference(in.highest, in.logit)), key,
           std::uint64_t(id_of(key)), weight(in.highest > score ? in.highest : score, score),
           weight(in.highest > in.logit ? in.highest : in.logit, in.logit), multiply_high(in.a, in.b),
           kept_sum(in.a, rule), random_bits(in.seed, in.sequence, in.position), target(in.b, in.a),
           std::uint64_t(random.word[0]) << 32 | random.word[1], std::uint64_t(random.word[2]) << 32 | random.word[3]}};
}

/// bits[i] = sampling_bits(in[i]) by a kernel; both arrays lie on the device.
void sampling_bits_on_device(const SamplingInput* in, SamplingBits* bits, int n, CUstream_st* stream);

}  // namespace cf::test
