#pragma once
// --quant and --group: how a preset's procedural Linears are quantised.
#include <cstdint>
#include <optional>
#include <string>

#include "apps/cli/options.hpp"
#include "core/weights.hpp"

namespace cf::apps {

struct QuantOptions {
  std::string name;                   // "gptq", "fp8", or none for dense weights
  std::optional<std::int64_t> group;  // inputs that share a scale, -1 for all

  WeightFormat format() const {
    if (name.empty()) return {};
    if (name == "fp8") return {.bits = 8, .group_size = group.value_or(-1), .is_fp8 = true};
    return {.bits = 4, .group_size = group.value_or(128)};
  }
};

/// Declares both options. `what` is what they quantise.
inline void declare_quant(CommandLine& line, QuantOptions& o, const std::string& what) {
  constexpr std::int64_t most_group = 1 << 22;
  line.choice("--quant", o.name, {"gptq", "fp8"}, "Quantise " + what + ": by GPTQ to 4 bits, or to fp8 (e4m3)");
  line.integer("--group", o.group, {1, most_group, "", -1},
               "Inputs that share a scale with --quant, -1 for all; 128 for gptq and -1 for fp8 when left out");
  line.needs("--group", "--quant");
}

}  // namespace cf::apps
