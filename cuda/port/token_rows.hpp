#pragma once
// The append of a token to a cache that others hold as rows, too.
#include "core/ops/append_rows.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

using ops::AppendRows;
using ops::TokenRows;

/// Adds the launch. A row is a multiple of 16 bytes, and the first one begins at a multiple of 16.
Status prepare(const AppendRows::Args& a, LaunchList& launches);

}  // namespace cf::cuda
