#pragma once
#include "cuda/ops/kernel.hpp"
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/ops/norm/layernorm.hpp"

namespace cf::cuda {

// Products with packed GPTQ weights whose kernels normalise the one token themselves, in every block. The bits are
// those of the ops one after the other, by fewer launches.

/// Rows that a launch finishes at once.
inline constexpr int kRmsRows = 2;
/// The most parts of a row: rmsnorm's warps at eight elements a thread.
inline constexpr int kRmsParts = max_layernorm_threads(8) / 32;

/// The static shared memory of a block, in bytes: a float for each part of the row, and two integers of RmsQkv.
inline constexpr int kRmsStaticBytes = (kRmsParts + 2) * int(sizeof(float));

/// Packed weights of one token. Those of rms_qkv have their rows in the order of RopePairs.
Result<GptqPlan> plan_rms_linear(const Target&, const ops::RmsLinear::Args&);
Result<GptqPlan> plan_rms_qkv(const Target&, const ops::RmsQkv::Args&);
Status launch_rms_linear(const ops::RmsLinear::Args&, const GptqPlan&, LaunchList&);
Status launch_rms_qkv(const ops::RmsQkv::Args&, const GptqPlan&, LaunchList&);

}  // namespace cf::cuda
