// The sampler's arithmetic alone: random words, order keys, weights, and the same bits from any compiler's options.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/sampling.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;

// tests/core/sampling_bits.cpp, compiled with -ffp-contract=fast and with -ffp-contract=off.
namespace cf_fast {
void sampling_bits(const float*, const bool*, int, float, std::uint64_t*);
float difference_and_product(float, float, float);
}  // namespace cf_fast
namespace cf_off {
void sampling_bits(const float*, const bool*, int, float, std::uint64_t*);
float difference_and_product(float, float, float);
}  // namespace cf_off

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr auto kMostWeight = std::uint64_t(1) << sampling::kWeightBits;

/// The error that weight()'s comment allows, in units of the weights.
constexpr long double kWeightError = 0.5L + 0x1p-6L;

/// How far the weight of a score that is `below` the highest one is from its exact value.
long double weight_error(float below) {
  const long double exact = std::ldexp(std::exp(-static_cast<long double>(below)), sampling::kWeightBits);
  return std::abs(static_cast<long double>(sampling::weight(0, -below)) - exact);
}

}  // namespace

TEST_CASE("Philox makes the words of Random123's known answers", "[sampling]") {
  struct Known {
    PhiloxBlock counter;
    PhiloxKey key;
    PhiloxBlock words;
  };
  const std::uint32_t ones = 0xffffffff;
  for (const auto& [counter, key, words] :
       {Known{{{0, 0, 0, 0}}, {{0, 0}}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
        Known{{{ones, ones, ones, ones}}, {{ones, ones}}, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
        Known{{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
              {{0xa4093822, 0x299f31d0}},
              {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}}}) {
    const PhiloxBlock got = philox4x32_10(counter, key);
    for (int i = 0; i < 4; ++i) CHECK(got.word[i] == words.word[i]);
  }
  // The counter is the sequence and then the position, each with its lower half first; the key is the seed.
  CHECK(sampling::random_bits(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e) == 0x94fdccebd16cfe09);
}

TEST_CASE("multiply_high is the upper half of the product", "[sampling]") {
  std::mt19937_64 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const std::uint64_t a = random() >> random() % 64, b = random() >> random() % 64;
    const std::uint64_t a0 = std::uint32_t(a), a1 = a >> 32, b0 = std::uint32_t(b), b1 = b >> 32;
    const std::uint64_t middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + std::uint32_t(middle);
    REQUIRE(sampling::multiply_high(a, b) == a1 * b1 + (middle >> 32) + (other >> 32));
  }
  CHECK(sampling::multiply_high(~0ull, ~0ull) == ~0ull - 1);
}

TEST_CASE("Order keys put scores in order, and the lower of two ids first among equals", "[sampling]") {
  std::mt19937_64 random(1);
  std::vector<float> scores{0.0f,
                            -0.0f,
                            1.0f,
                            -1.0f,
                            kInfinity,
                            -kInfinity,
                            std::numeric_limits<float>::denorm_min(),
                            -std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::lowest(),
                            std::nextafter(1.0f, 2.0f)};
  while (scores.size() < 400) {
    const auto x = std::bit_cast<float>(std::uint32_t(random()));
    if (!std::isnan(x)) scores.push_back(x);
  }
  for (std::size_t i = 0; i < scores.size(); ++i)
    for (std::size_t j = 0; j < scores.size(); ++j) {
      const auto a = std::int32_t(i), b = std::int32_t(j);
      const bool above = scores[i] > scores[j] || (scores[i] == scores[j] && a < b);
      REQUIRE((sampling::order_key(scores[i], a) > sampling::order_key(scores[j], b)) == above);
    }
  for (const std::int32_t id : {0, 1, 50303, (1 << 21) - 1, std::numeric_limits<std::int32_t>::max()})
    CHECK(sampling::id_of(sampling::order_key(-3, id)) == id);
}

TEST_CASE("Weights are the exponential within their derived error, over the whole range", "[sampling]") {
  const auto last = std::bit_cast<std::uint32_t>(32.0f);
  long double worst = 0;
  // A stride that is prime: every exponent has mantissas of all kinds.
  for (std::uint32_t bits = 0; bits <= last; bits += 1499)
    worst = std::max(worst, weight_error(std::bit_cast<float>(bits)));
  // Where one halving passes into the next, and where weights end.
  for (int halvings = 1; halvings <= sampling::kWeightBits + 2; ++halvings) {
    float below = float(halvings * std::log(2.0L));
    for (int i = 0; i < 500; ++i) below = std::nextafter(below, 0.0f);
    for (int i = 0; i < 1000; ++i, below = std::nextafter(below, 99.0f)) worst = std::max(worst, weight_error(below));
  }
  CAPTURE(double(worst));
  CHECK(worst <= kWeightError);
  CHECK(worst > 0.49L);  // rounding to an integer alone makes as much

  CHECK(sampling::weight(7.25f, 7.25f) == kMostWeight);
  CHECK(sampling::weight(-1e30f, -1e30f) == kMostWeight);
  for (const float never : {-32.0f, -1e30f, -kInfinity}) CHECK(sampling::weight(0, never) == 0);
  CHECK(sampling::weight(0, std::nextafter(-32.0f, 0.0f)) == 0);
}

TEST_CASE("A higher score never has a smaller weight", "[sampling]") {
  std::uint64_t before = kMostWeight;
  const auto follow = [&](float below) {
    const std::uint64_t weight = sampling::weight(0, -below);
    REQUIRE(weight <= before);
    before = weight;
  };
  for (std::uint32_t bits = 0; bits <= std::bit_cast<std::uint32_t>(32.0f); bits += 977)
    follow(std::bit_cast<float>(bits));
  CHECK(before == 0);
  for (int halvings = 1; halvings <= sampling::kWeightBits + 2; ++halvings) {
    float below = float(halvings * std::log(2.0L));
    for (int i = 0; i < 2000; ++i) below = std::nextafter(below, 0.0f);
    before = kMostWeight;
    for (int i = 0; i < 4000; ++i, below = std::nextafter(below, 99.0f)) follow(below);
  }
}

TEST_CASE("Contraction changes no bit of scores and weights", "[sampling]") {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("fma")) {
    SUCCEED("this processor has no instruction that contracts");
    return;
  }
#endif
  constexpr int n = 4096;
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(10, 5);
  std::vector<float> logits(n);
  bool seen[n];
  // No score is above the highest one that sampling_bits() takes, 30.
  for (int i = 0; i < n; ++i) logits[std::size_t(i)] = std::min(normal(random), 20.f), seen[i] = random() % 2;

  int contracted = 0;
  for (const float penalty : {1.3f, 0.7f, 1.0f}) {
    std::vector<std::uint64_t> fast(3 * n), off(3 * n);
    cf_fast::sampling_bits(logits.data(), seen, n, penalty, fast.data());
    cf_off::sampling_bits(logits.data(), seen, n, penalty, off.data());
    CHECK(fast == off);
    for (const float x : logits)
      contracted += cf_fast::difference_and_product(x, penalty, 30) != cf_off::difference_and_product(x, penalty, 30);
  }
  // The options do what this test is about.
  CHECK(contracted > 1000);
}

TEST_CASE("Settings are refused by name", "[sampling]") {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  struct Bad {
    Sampling settings;
    std::initializer_list<std::string_view> parts;
  };
  for (const Bad& bad :
       {Bad{{.temperature = -1}, {"temperature", "got -1"}}, Bad{{.temperature = nan}, {"temperature", "got nan"}},
        Bad{{.temperature = infinity}, {"temperature", "got inf"}},
        Bad{{.temperature = 1e-50}, {"temperature", "got 1e-50"}},
        Bad{{.temperature = 1e50}, {"temperature", "got 1e+50"}},
        Bad{{.temperature = 1, .top_k = -1}, {"top_k", "0 (all) or more", "got -1"}},
        Bad{{.temperature = 1, .top_p = 0}, {"top_p", "above 0 and at most 1", "got 0"}},
        Bad{{.temperature = 1, .top_p = 1.5}, {"top_p", "got 1.5"}},
        Bad{{.temperature = 1, .top_p = nan}, {"top_p", "got nan"}},
        Bad{{.temperature = 1, .min_p = -0.25}, {"min_p", "0 to 1", "got -0.25"}},
        Bad{{.temperature = 1, .min_p = 1.5}, {"min_p", "got 1.5"}},
        Bad{{.temperature = 1, .min_p = nan}, {"min_p", "got nan"}},
        Bad{{.repetition_penalty = 0}, {"repetition_penalty", "above 0", "got 0"}},
        Bad{{.repetition_penalty = -1.5}, {"repetition_penalty", "got -1.5"}},
        Bad{{.repetition_penalty = nan}, {"repetition_penalty", "got nan"}},
        Bad{{.repetition_penalty = infinity}, {"repetition_penalty", "got inf"}},
        Bad{{.top_k = 5}, {"top_k must be 0", "temperature 0", "got 5"}},
        Bad{{.top_p = 0.5}, {"top_p must be 1", "temperature 0", "got 0.5"}},
        Bad{{.min_p = 0.5}, {"min_p must be 0", "temperature 0", "got 0.5"}}}) {
    INFO(to_string(bad.settings));
    CHECK(test::refusal_fault(bad.settings.validate(), Code::invalid_argument, bad.parts) == "");
  }
  for (const Sampling& good : {Sampling{}, Sampling{.repetition_penalty = 1.5, .seed = 3}, Sampling{.temperature = 1},
                               Sampling{.temperature = 1e-3, .top_k = 1, .top_p = 1e-300, .min_p = 1}}) {
    INFO(to_string(good));
    CHECK(good.validate());
  }
  CHECK(to_string(Sampling{.temperature = 0.7, .top_k = 50, .top_p = 0.95, .seed = 9}) ==
        "temperature 0.7, top_k 50, top_p 0.95, min_p 0, repetition_penalty 1, seed 9");
}

TEST_CASE("A rule holds the settings as exact numbers", "[sampling]") {
  const SamplingRule greedy = Sampling{.repetition_penalty = 1.5}.rule();
  CHECK((greedy.top_k == 1 && greedy.temperature == 1 && greedy.repetition_penalty == 1.5f));

  const SamplingRule all = Sampling{.temperature = 0.5, .seed = 7}.rule();
  CHECK((all.top_k == sampling::kMostTokens && all.temperature == 0.5f && all.seed == 7));
  CHECK((all.top_p_rest == 0 && all.least_weight == 1));
  const std::uint64_t most = kMostWeight * std::uint64_t(sampling::kMostTokens);
  CHECK(most == std::uint64_t(1) << 63);
  CHECK(sampling::kept_sum(most, all) == most);

  const SamplingRule cut = Sampling{.temperature = 1, .top_k = 3, .top_p = 0.75, .min_p = 0.5}.rule();
  CHECK((cut.top_k == 3 && cut.top_p_rest == std::uint64_t(1) << 62 && cut.least_weight == kMostWeight / 2));
  CHECK(sampling::kept_sum(400, cut) == 300);
  CHECK(sampling::kept_sum(401, cut) == 301);  // 300.75: a sum of 300 does not reach it

  // However small top_p is, something is kept.
  const SamplingRule least = Sampling{.temperature = 1, .top_p = 1e-300}.rule();
  for (const std::uint64_t sum : {std::uint64_t(1), kMostWeight, most}) {
    CHECK(sampling::kept_sum(sum, least) >= 1);
    CHECK(sampling::kept_sum(sum, least) <= kMostWeight);
  }
  CHECK(sampling::target(0, most) == 0);
  CHECK(sampling::target(~std::uint64_t(0), most) == most - 1);
}
