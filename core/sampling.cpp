#include "core/sampling.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

namespace cf {
namespace {

/// The shortest text that reads back as the same double.
std::string number(double x) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof text, x).ptr);
}

Status refuse(const std::string& what, const std::string& got) {
  return Status::error(Code::invalid_argument, "sampling: " + what + ", got " + got);
}

bool is_normal_float(double x) {
  return x >= std::numeric_limits<float>::min() && x <= std::numeric_limits<float>::max();
}

}  // namespace

Status Sampling::validate() const {
  if (!greedy() && !is_normal_float(temperature))
    return refuse("temperature must be 0 or a normal float32 above 0", number(temperature));
  if (top_k < 0) return refuse("top_k must be 0 (all) or more", std::to_string(top_k));
  if (!(top_p > 0 && top_p <= 1)) return refuse("top_p must be above 0 and at most 1", number(top_p));
  if (!(min_p >= 0 && min_p <= 1)) return refuse("min_p must be 0 to 1", number(min_p));
  if (!is_normal_float(repetition_penalty))
    return refuse("repetition_penalty must be a normal float32 above 0", number(repetition_penalty));
  const std::string no_effect = " without effect at temperature 0";
  if (greedy() && top_k != 0) return refuse("top_k must be 0," + no_effect, std::to_string(top_k));
  if (greedy() && top_p != 1) return refuse("top_p must be 1," + no_effect, number(top_p));
  if (greedy() && min_p != 0) return refuse("min_p must be 0," + no_effect, number(min_p));
  return {};
}

SamplingRule Sampling::rule() const {
  // 1 - top_p is the double 1 for a top_p below 2^-54. The next smaller double keeps the highest token alone, too.
  const double rest = std::min(1 - top_p, 1 - std::numeric_limits<double>::epsilon() / 2);
  return {
      .repetition_penalty = float(repetition_penalty),
      .temperature = greedy() ? 1.0f : float(temperature),
      .top_k = greedy()     ? 1
               : top_k == 0 ? sampling::kMostTokens
                            : top_k,
      .top_p_rest = std::uint64_t(std::ldexp(rest, 64)),
      .least_weight = std::max(std::uint64_t(std::ceil(std::ldexp(min_p, sampling::kWeightBits))), std::uint64_t(1)),
      .seed = seed};
}

std::string to_string(const Sampling& s) {
  return "temperature " + number(s.temperature) + ", top_k " + std::to_string(s.top_k) + ", top_p " + number(s.top_p) +
         ", min_p " + number(s.min_p) + ", repetition_penalty " + number(s.repetition_penalty) + ", seed " +
         std::to_string(s.seed);
}

}  // namespace cf
