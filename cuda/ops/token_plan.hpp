#pragma once
#include <cstdint>

#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// The most threads of a block that a TokenPlan has.
inline constexpr int kTokenThreads = 128;

/// How a kernel covers its tokens when each thread takes one vector of a token: block (t, i) takes vectors
/// i * threads .. (i + 1) * threads - 1 of token t. One token's vectors spread over several SMs, and no thread takes a
/// second vector, so that the time is that of one vector's loads and stores.
struct TokenPlan {
  int threads;  // of a block, whole warps
  int blocks;   // of a token
};

inline std::string to_string(const TokenPlan& p) {
  return plan_text({{p.blocks, "blocks a token"}, {p.threads, "threads"}});
}

constexpr TokenPlan token_plan(std::int64_t vectors) {
  const std::int64_t blocks = (vectors + kTokenThreads - 1) / kTokenThreads;
  const std::int64_t threads = (vectors + blocks - 1) / blocks;
  return {.threads = int((threads + 31) / 32 * 32), .blocks = int(blocks)};
}

}  // namespace cf::cuda
