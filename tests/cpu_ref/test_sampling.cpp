// The sampler: which ids it keeps, against a plain one in double that can be given faults, and against Hugging Face;
// how often it draws each id; what it refuses.
#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "core/procedural.hpp"
#include "cpu_ref/sample.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using cpu_ref::kept_tokens;
using cpu_ref::sample;

namespace {

using Ids = std::vector<std::int32_t>;
using Probabilities = std::map<std::int32_t, double>;  // by id, of the kept tokens
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kMostWeight = 0x1p42, kWeightError = 0.5 + 0x1p-6;

struct Case {
  std::vector<float> logits;
  Ids history;
  Sampling settings;
};

/// The ways in which the plain sampler can be wrong.
enum class Fault {
  none,
  penalty_at_each_occurrence,
  penalty_always_divides,
  temperature_after_cut_offs,
  one_more_at_top_k,
  one_less_at_top_k,
  ties_kept_at_top_k,
  higher_ids_first,
  one_more_at_top_p,
  one_less_at_top_p,
  top_p_before_top_k,
  min_p_before_top_p,
  min_p_of_the_sum,
  one_more_at_min_p,
  one_less_at_min_p,
  last
};

/// What is kept, from the definition: scores in float32, all else in double over sorted ids.
Probabilities plain(const Case& c, Fault fault = Fault::none) {
  const Sampling& s = c.settings;
  std::vector<float> scores = c.logits;
  Ids penalised = c.history;
  if (fault != Fault::penalty_at_each_occurrence) {
    std::sort(penalised.begin(), penalised.end());
    penalised.erase(std::unique(penalised.begin(), penalised.end()), penalised.end());
  }
  const auto penalty = float(s.repetition_penalty), temperature = s.greedy() ? 1.0f : float(s.temperature);
  for (const auto id : penalised) {
    float& x = scores[std::size_t(id)];
    x = x < 0 && fault != Fault::penalty_always_divides ? x * penalty : x / penalty;
  }
  const auto weights_at = [&](float divisor) {
    std::vector<float> scaled;
    for (const float x : scores) scaled.push_back(x / divisor);
    const float highest = *std::max_element(scaled.begin(), scaled.end());
    std::vector<double> weights;
    for (const float x : scaled) {
      const float difference = x - highest;
      const double w = std::exp(double(difference));
      weights.push_back(w * kMostWeight < 0.5 ? 0 : w);
    }
    return weights;
  };
  const std::vector<double> weights = weights_at(temperature),
                            cut_weights = fault == Fault::temperature_after_cut_offs ? weights_at(1) : weights;

  Ids kept;
  for (std::size_t id = 0; id < scores.size(); ++id)
    if (weights[id] > 0) kept.push_back(std::int32_t(id));
  const auto score = [&](std::int32_t id) { return scores[std::size_t(id)] / temperature; };
  std::sort(kept.begin(), kept.end(), [&](auto a, auto b) {
    if (score(a) != score(b)) return score(a) > score(b);
    return fault == Fault::higher_ids_first ? a > b : a < b;
  });

  const auto weight = [&](std::int32_t id) { return cut_weights[std::size_t(id)]; };
  const auto sum = [&] {
    double total = 0;
    for (const auto id : kept) total += weight(id);
    return total;
  };
  /// Keeps the first n, or one more or less where that is the fault.
  const auto keep = [&](std::size_t n, Fault more, Fault less) {
    n += std::size_t(fault == more) - std::size_t(fault == less);
    kept.resize(std::clamp(n, std::size_t(1), kept.size()));
  };
  const auto top_k = [&] {
    auto n = std::size_t(s.greedy() ? 1 : s.top_k);
    if (n == 0 || n >= kept.size()) return;
    if (fault == Fault::ties_kept_at_top_k)
      while (n < kept.size() && score(kept[n]) == score(kept[n - 1])) ++n;
    keep(n, Fault::one_more_at_top_k, Fault::one_less_at_top_k);
  };
  const auto top_p = [&] {
    if (s.top_p == 1) return;
    const double total = sum();
    double ascending = 0;
    std::size_t n = kept.size();
    while (n > 1 && (ascending += weight(kept[n - 1]) / total) <= 1 - s.top_p) --n;
    keep(n, Fault::one_more_at_top_p, Fault::one_less_at_top_p);
  };
  const auto min_p = [&] {
    if (s.min_p == 0) return;
    const double least = s.min_p * (fault == Fault::min_p_of_the_sum ? sum() : weight(kept[0]));
    std::size_t n = 0;
    while (n < kept.size() && weight(kept[n]) >= least) ++n;
    keep(n, Fault::one_more_at_min_p, Fault::one_less_at_min_p);
  };
  if (fault == Fault::top_p_before_top_k) top_p();
  top_k();
  if (fault == Fault::min_p_before_top_p) min_p();
  if (fault != Fault::top_p_before_top_k) top_p();
  min_p();

  double total = 0;
  for (const auto id : kept) total += weights[std::size_t(id)];
  Probabilities result;
  for (const auto id : kept) result[id] = weights[std::size_t(id)] / total;
  return result;
}

Probabilities kept(const Case& c) {
  const auto tokens = kept_tokens(c.logits, c.settings, c.history);
  INFO(tokens.status().message());
  REQUIRE(tokens);
  Probabilities result;
  for (const auto& [id, probability] : *tokens) {
    REQUIRE((result.empty() || result.rbegin()->first < id));
    result[id] = probability;
  }
  return result;
}

Ids ids_of(const Probabilities& p) {
  Ids ids;
  for (const auto& [id, probability] : p) ids.push_back(id);
  return ids;
}

std::int32_t drawn(const Case& c, std::uint64_t sequence, std::int64_t position) {
  const auto id = sample(c.logits, c.settings, c.history, sequence, position);
  INFO(id.status().message());
  REQUIRE(id);
  return *id;
}

/// Rows of all kinds under settings of all kinds. No row with ties meets a top_p or min_p here exactly, where sums in
/// double could decide otherwise than exact ones; the case "Exact boundaries" has those.
std::vector<Case> cases() {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0, 2);
  const auto pick = [&](const auto& values) { return values[random() % values.size()]; };
  const std::vector<double> temperatures{0, 0.3, 0.7, 1, 1.7}, top_ps{1, 1, 0.93, 0.57, 0.11},
      min_ps{0, 0, 0.013, 0.31, 1}, penalties{1, 1.3, 0.8};
  const std::vector<int> top_ks{0, 0, 1, 2, 5, 50};

  std::vector<Case> all;
  const auto add = [&](std::vector<float> logits) {
    const double temperature = pick(temperatures);
    Sampling settings{.temperature = temperature, .repetition_penalty = pick(penalties)};
    if (temperature != 0) settings.top_k = pick(top_ks), settings.top_p = pick(top_ps), settings.min_p = pick(min_ps);
    Ids history;
    for (std::uint64_t n = random() % 20; n > 0; --n) history.push_back(std::int32_t(random() % logits.size() / 2));
    all.push_back({std::move(logits), std::move(history), settings});
  };
  for (const std::size_t n : {1, 2, 7, 97, 97, 97, 97, 997})
    for (int repeat = 0; repeat < 30; ++repeat) {
      std::vector<float> row(n);
      for (float& x : row) x = normal(random);
      add(row);
      std::vector<float> ties = row, peaked = row, sparse = row;
      for (float& x : ties) x = std::round(x);
      add(ties);
      peaked[random() % n] += 20;
      add(peaked);
      for (std::size_t i = 1; i < n; i += 1 + random() % 3) sparse[i] = -kInfinity;
      add(sparse);
      add(std::vector<float>(n, row[0]));
    }
  std::vector<float> whole(50304);
  for (float& x : whole) x = normal(random);
  for (int repeat = 0; repeat < 4; ++repeat) add(whole);
  return all;
}

}  // namespace

TEST_CASE("The kept tokens and their probabilities are those of a plain sampler", "[sampling]") {
  for (const Case& c : cases()) {
    INFO(to_string(c.settings) << ", " << c.logits.size() << " logits");
    const Probabilities got = kept(c), expected = plain(c);
    REQUIRE(ids_of(got) == ids_of(expected));
    double most = 0;
    for (const auto& [id, p] : expected) most = std::max(most, p);
    // Each weight is wrong by kWeightError at most, and their sum by that many times as much.
    const double unit = c.settings.greedy() ? 0 : kWeightError * most / kMostWeight;
    for (const auto& [id, p] : expected)
      REQUIRE(std::abs(got.at(id) - p) <= unit * (1 + double(got.size()) * p) + 1e-13 * p);
  }
}

TEST_CASE("The comparison with the plain sampler finds each fault", "[sampling]") {
  std::vector<std::pair<Case, Ids>> kept_of;
  for (Case& c : cases())
    if (c.logits.size() <= 97) {
      Ids ids = ids_of(kept(c));
      kept_of.emplace_back(std::move(c), std::move(ids));
    }
  for (int fault = 1; fault < int(Fault::last); ++fault) {
    CAPTURE(fault);
    CHECK(std::any_of(kept_of.begin(), kept_of.end(),
                      [&](const auto& of) { return ids_of(plain(of.first, Fault(fault))) != of.second; }));
  }
}

TEST_CASE("Exact boundaries", "[sampling]") {
  const auto ids = [](std::vector<float> logits, Sampling settings) {
    settings.temperature = 1;
    return ids_of(kept({std::move(logits), {}, settings}));
  };
  const std::vector<float> four(4, -2.5f);
  CHECK(ids(four, {.top_p = 0.25}) == Ids{0});
  CHECK(ids(four, {.top_p = 0.25 + 1e-12}) == Ids{0, 1});
  CHECK(ids(four, {.top_p = 0.5}) == Ids{0, 1});
  CHECK(ids(four, {.top_p = 0.5 + 1e-12}) == Ids{0, 1, 2});
  CHECK(ids(four, {.top_p = 0.75}) == Ids{0, 1, 2});
  CHECK(ids(four, {.top_p = 1}) == Ids{0, 1, 2, 3});
  CHECK(ids(four, {.min_p = 1}) == Ids{0, 1, 2, 3});
  CHECK(ids(four, {.top_k = 3}) == Ids{0, 1, 2});
  CHECK(ids(four, {.top_k = 4}) == Ids{0, 1, 2, 3});
  CHECK(ids(four, {.top_k = 5}) == Ids{0, 1, 2, 3});
  CHECK(ids(four, {.top_k = 3, .top_p = 0.66}) == Ids{0, 1});
  CHECK(ids(four, {.top_k = 3, .top_p = 0.67}) == Ids{0, 1, 2});
  CHECK(ids({1, 3, -kInfinity, 3, 3, 0}, {.top_k = 2}) == Ids{1, 3});
  CHECK(ids({0.0f, -0.0f, 0.0f}, {.top_k = 2}) == Ids{0, 1});

  const double weight = double(sampling::weight(0, -1));
  CHECK(ids({-1, 0}, {.min_p = weight / kMostWeight}) == Ids{0, 1});
  CHECK(ids({-1, 0}, {.min_p = (weight + 0.25) / kMostWeight}) == Ids{1});
}

TEST_CASE("A repeated id is penalised once", "[sampling]") {
  const std::vector<float> logits{1.5f, -0.75f, 0.25f};
  const Sampling settings{.temperature = 1, .repetition_penalty = 1.5};
  const Probabilities once = kept({logits, {0, 1}, settings}), often = kept({logits, {1, 0, 1, 1, 0}, settings});
  CHECK(once == often);
  const Probabilities expected = kept({{1.0f, -1.125f, 0.25f}, {}, {.temperature = 1}});
  CHECK(once == expected);
}

TEST_CASE("Temperature 0 chooses the highest logit, and the lowest id of equal ones", "[sampling]") {
  const auto greedy = [](std::vector<float> logits, Ids history = {}, double penalty = 1) {
    const Case c{std::move(logits), std::move(history), {.repetition_penalty = penalty, .seed = 5}};
    const std::int32_t id = drawn(c, 3, 4);
    CHECK(kept(c) == Probabilities{{id, 1}});
    return id;
  };
  CHECK(greedy({1, 3, 2}) == 1);
  CHECK(greedy({2, 3, 3, 3, -kInfinity}) == 1);
  CHECK(greedy({-0.0f, 0.0f}) == 0);
  CHECK(greedy(std::vector<float>(1000, -7.0f)) == 0);
  CHECK(greedy({-kInfinity, -1e38f}) == 1);
  CHECK(greedy({3, 2.5f}, {0}, 1.5) == 1);
  CHECK(greedy({3, 2}, {0}, 1.5) == 0);  // a tie after the penalty
  CHECK(greedy({-1, -1.25f}, {0}, 1.5) == 1);
}

TEST_CASE("Doubles: the greedy choice compares them, a draw rounds them to float32", "[sampling]") {
  const std::vector<double> close{1, 1 + 1e-12, 1 - 1e-12, -1e300};
  CHECK(*sample(std::span(close), {}, {}, 0, 0) == 1);
  const std::vector<float> rounded(close.begin(), close.end() - 1);
  CHECK(*sample(std::span(rounded), {}, {}, 0, 0) == 0);
  const std::vector<double> huge{1e299, 1e300};
  CHECK(*sample(std::span(huge), {}, {}, 0, 0) == 1);

  std::mt19937_64 random(1);
  std::normal_distribution<double> normal(0, 2);
  std::vector<double> logits(97);
  for (double& x : logits) x = normal(random);
  const Case c{{logits.begin(), logits.end()}, {1, 2}, {.temperature = 0.9, .top_p = 0.9, .repetition_penalty = 1.2}};
  for (std::int64_t position = 0; position < 200; ++position)
    REQUIRE(*sample(std::span(logits), c.settings, c.history, 1, position) == drawn(c, 1, position));
  const auto of_doubles = kept_tokens(std::span(logits), c.settings, c.history);
  REQUIRE(of_doubles);
  Probabilities as_map;
  for (const auto& [id, p] : *of_doubles) as_map[id] = p;
  CHECK(as_map == kept(c));
}

namespace {

/// How far counts are from the frequencies p, as a normal deviate: Pearson's chi-square through Wilson and Hilferty's
/// cube root. Tokens that are expected less than ten times share a bin. Infinite where a token that is not kept came.
double deviate(const Probabilities& p, const std::map<std::int32_t, int>& counts) {
  int draws = 0;
  for (const auto& [id, count] : counts) {
    if (!p.contains(id)) return kInfinity;
    draws += count;
  }
  double chi_square = 0, rare_expected = 0, rare_count = 0;
  int bins = 0;
  const auto add = [&](double expected, double count) {
    chi_square += (count - expected) * (count - expected) / expected;
    ++bins;
  };
  for (const auto& [id, probability] : p) {
    const double expected = probability * draws, count = counts.contains(id) ? counts.at(id) : 0;
    if (expected >= 10)
      add(expected, count);
    else
      rare_expected += expected, rare_count += count;
  }
  if (rare_expected >= 10) add(rare_expected, rare_count);
  const double freedom = bins - 1, variance = 2 / (9 * freedom);
  return (std::cbrt(chi_square / freedom) - (1 - variance)) / std::sqrt(variance);
}

Case drawn_case(Sampling settings) {
  Case c{std::vector<float>(97), {3, 5, 5, 40}, settings};
  fill_procedural(c.logits.data(), DType::f32, 0, 97, ProceduralKind::activation, 1, "logits");
  return c;
}

}  // namespace

TEST_CASE("Draws are as frequent as their probabilities", "[sampling]") {
  constexpr int draws = 100'000;
  // One in 150,000 right samplers would leave this, counted over both sides; the seeds are fixed.
  constexpr double most = 4.5;
  const Sampling settings = GENERATE(
      Sampling{.temperature = 1, .seed = 1}, Sampling{.temperature = 0.7, .top_k = 20, .seed = 2},
      Sampling{.temperature = 1.5, .top_p = 0.8, .seed = 3}, Sampling{.temperature = 1, .min_p = 0.1, .seed = 4},
      Sampling{.temperature = 0.9, .top_k = 40, .top_p = 0.95, .min_p = 0.02, .repetition_penalty = 1.4, .seed = 5});
  INFO(to_string(settings));
  Case c = drawn_case(settings);
  const Probabilities p = plain(c);
  std::map<std::int32_t, int> counts;

  SECTION("over positions") {
    for (int i = 0; i < draws; ++i) ++counts[drawn(c, 7, i)];
    // Slightly different probabilities are found out.
    Case other = c;
    other.settings.temperature *= 1.05;
    CHECK(deviate(plain(other), counts) > most);
  }
  SECTION("over sequences") {
    for (int i = 0; i < draws; ++i) ++counts[drawn(c, std::uint64_t(i), 11)];
  }
  SECTION("over seeds") {
    for (int i = 0; i < draws; ++i) {
      c.settings.seed = std::uint64_t(i);
      ++counts[drawn(c, 7, 11)];
    }
  }
  const double z = deviate(p, counts);
  CAPTURE(z);
  CHECK(std::abs(z) < most);
}

TEST_CASE("A draw depends on the seed, its sequence and its position alone", "[sampling]") {
  const Case c = drawn_case({.temperature = 1, .seed = 1});
  const auto draws_of = [&](std::uint64_t sequence, std::int64_t position, const Case& of) {
    Ids ids;
    for (int i = 0; i < 64; ++i) ids.push_back(drawn(of, sequence, position + i));
    return ids;
  };
  std::map<std::uint64_t, Ids> together;
  for (std::uint64_t sequence = 0; sequence < 8; ++sequence) together[sequence].resize(64);
  for (int i = 0; i < 64; ++i)
    for (auto& [sequence, ids] : together) ids[std::size_t(i)] = drawn(c, sequence, i);
  for (const std::uint64_t sequence : {5, 0, 3}) CHECK(draws_of(sequence, 0, c) == together[sequence]);

  // All bits of the three count, and none stands for another.
  Case other_seed = c, high_seed = c;
  other_seed.settings.seed = 2;
  high_seed.settings.seed = 1 | std::uint64_t(1) << 63;
  const std::uint64_t high = std::uint64_t(1) << 63;
  const std::set<Ids> different{draws_of(1, 2, c),
                                draws_of(2, 1, c),
                                draws_of(1 | high, 2, c),
                                draws_of(1, 2 | std::int64_t(1) << 62, c),
                                draws_of(std::uint64_t(1) << 32, 2, c),
                                draws_of(1, std::int64_t(2) << 32, c),
                                draws_of(1, 2, other_seed),
                                draws_of(1, 2, high_seed)};
  CHECK(different.size() == 8);
}

TEST_CASE("What cannot be sampled is refused", "[sampling]") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto fault = [](const std::vector<float>& logits, const Sampling& settings, const Ids& history,
                        std::initializer_list<std::string_view> parts, std::int64_t position = 0) {
    if (position == 0) {
      const auto probabilities = kept_tokens(logits, settings, history);
      CHECK(test::refusal_fault(probabilities.status(), Code::invalid_argument, parts) == "");
    }
    return test::refusal_fault(sample(logits, settings, history, 0, position).status(), Code::invalid_argument, parts);
  };
  for (const double temperature : {0.0, 1.0}) {
    const Sampling s{.temperature = temperature};
    CHECK(fault({}, s, {}, {"number of logits", "1 to 2097152", "got 0"}) == "");
    CHECK(fault({1, nan, kInfinity}, s, {}, {"logits[1]", "NaN"}) == "");
    CHECK(fault({1, 2, kInfinity, nan}, s, {}, {"logits[2]", "infinity"}) == "");
    CHECK(fault({1, -nan}, s, {1}, {"logits[1]", "NaN"}) == "");
    CHECK(fault({-kInfinity, -kInfinity}, s, {}, {"every score is -infinity"}) == "");
    CHECK(fault({1, 2}, s, {0, 2}, {"history[1]", "0 to 1", "got 2"}) == "");
    CHECK(fault({1, 2}, s, {-1}, {"history[0]", "0 to 1", "got -1"}) == "");
    CHECK(fault({1, 2}, s, {}, {"position", "0 or more", "got -1"}, -1) == "");
    CHECK(fault(std::vector<float>(sampling::kMostTokens + 1), s, {}, {"number of logits", "got 2097153"}) == "");
  }
  CHECK(fault({1, 2}, {.temperature = -1}, {}, {"temperature"}) == "");
  CHECK(fault({1, 1e30f}, {.temperature = 1e-20}, {}, {"the score of logits[1]", "infinity", "temperature 1e-20"}) ==
        "");
  CHECK(fault({1, 1e30f}, {.repetition_penalty = 1e-20}, {1}, {"logits[1]", "repetition_penalty 1e-20"}) == "");

  const std::vector<double> beyond{1, 1e300}, bad{1, std::numeric_limits<double>::quiet_NaN()};
  CHECK(test::refusal_fault(sample(std::span(beyond), {.temperature = 1}, {}, 0, 0).status(), Code::invalid_argument,
                            {"the score of logits[1]", "finite number"}) == "");
  CHECK(test::refusal_fault(sample(std::span(bad), {}, {}, 0, 0).status(), Code::invalid_argument,
                            {"logits[1]", "NaN"}) == "");

  // -infinity beside a finite logit is a token that is never chosen.
  for (std::int64_t i = 0; i < 100; ++i)
    CHECK(drawn({{-kInfinity, 1, -kInfinity}, {0}, {.temperature = 1}}, 0, i) == 1);
}

// data/sampling_cases.json: what Hugging Face's own processors keep of procedural logits, and the softmax in float64 of
// the float32 scores that they leave. golden/tools/make_sampling_cases.py writes it and says what the logits are.
TEST_CASE("Hugging Face's processors keep the same tokens with the same probabilities", "[sampling]") {
  std::ifstream file(CF_DATA_DIR "/sampling_cases.json");
  const auto json = nlohmann::json::parse(file);
  CHECK(json["about"]["versions"].contains("transformers"));
  CHECK(json["cases"].size() >= 12);
  for (const auto& hf : json["cases"]) {
    CAPTURE(hf["name"].get<std::string>());
    Case c{std::vector<float>(hf["vocabulary"].get<std::size_t>()),
           hf["history"].get<Ids>(),
           {.temperature = hf["temperature"],
            .top_k = hf["top_k"],
            .top_p = hf["top_p"],
            .min_p = hf["min_p"],
            .repetition_penalty = hf["repetition_penalty"]}};
    fill_procedural(c.logits.data(), DType::f32, 0, std::int64_t(c.logits.size()), ProceduralKind::activation,
                    hf["seed"].get<std::uint64_t>(), "logits");
    for (std::size_t i = 0; i < c.logits.size(); ++i)
      c.logits[i] = c.logits[i] * hf["scale"].get<float>() + float(i) * 0x1p-20f;

    const Probabilities got = kept(c);
    const auto ids = hf["ids"].get<Ids>();
    const auto expected = hf["probabilities"].get<std::vector<double>>();
    REQUIRE(ids_of(got) == ids);
    if (c.settings.greedy()) continue;

    // The scores are the same float32. Their differences d to the highest are rounded to float32 here, by d * 2^-24 at
    // most, and weights by kWeightError of kMostWeight * p / most; the sum's error is the weights' mean error. The file
    // has ten digits.
    const double most = *std::max_element(expected.begin(), expected.end());
    const auto relative_error = [&](double p) {
      return std::log(most / p) * 0x1p-24 + kWeightError * most / (kMostWeight * p) + 5e-10;
    };
    double mean = 0;
    for (const double p : expected) mean += p * relative_error(p);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const double p = expected[i], bound = relative_error(p) + mean;
      REQUIRE(std::abs(got.at(ids[i]) - p) <= bound * p);
      // Above e^-10 of the highest probability that is closer than a millionth.
      if (p > most * std::exp(-10)) REQUIRE(bound < 1e-6);
    }
  }
}
