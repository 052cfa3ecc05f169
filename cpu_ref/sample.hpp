#pragma once
#include "core/host_sampler.hpp"

/// The oracle's sampler is the host's.
namespace cf::cpu_ref {

using cf::kept_tokens;
using cf::sample;
using cf::TokenProbability;

}  // namespace cf::cpu_ref
