#pragma once
// RoPE's rows for streams, whose positions have no bound: a step has rows of its own. Private to cuda/model.
#include <cstdint>

#include "core/view.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// A table of RoPE with two rows for each token of a step.
struct StreamTable {
  View<float, 2> cos, sin;            // (2 * tokens, half)
  View<const double, 1> frequencies;  // (half)
  std::int64_t last_position;         // that a query has within a full cache
};

/// Adds the launch that makes rows i and tokens + i of the table for the token at positions[i]: for its position, and
/// for its query's position within the cache. The angles, their cosines and sines are of double, rounded once, as
/// ops::rope_rows() has them.
Status add_stream_rows(const StreamTable& table, View<const std::int32_t, 1> positions, LaunchList& launches);

}  // namespace cf::cuda
