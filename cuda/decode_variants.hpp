#pragma once
// Private to cuda and cf-layer.
#include <string>
#include <vector>

#include "cuda/arch.hpp"
#include "cuda/decode_stack.hpp"

namespace cf::cuda {

/// A plan that differs from another in one part of the design.
struct DecodeVariant {
  std::string part;  // "bytes in flight"
  std::string name;  // "20 KB"
  DecodeChoices choices;
  bool same_bits;  // as the other's: all but those that sum a head's keys in another order
};

/// What to hold the plan that a device makes against, part by part: bytes in flight, the ring's size, which dependencies
/// between blocks other work hides, splits of a head's keys, and where those are merged. The first is the plan itself.
std::vector<DecodeVariant> decode_variants(const Arch& arch, const DecodeStackPlan& plan);

}  // namespace cf::cuda
