#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "core/status.hpp"

namespace cf {

/// Which of the processes that share a model this one is, and where they meet.
struct RankEnvironment {
  std::int64_t rank = 0, ranks = 1;
  std::string host;  // of rank 0
  int port = 0;      // at which rank 0 listens
  /// Which of its host's ranks it is, and so which GPU is its own; none where nothing says so.
  std::optional<int> local_rank{};
};

/// What the variables say that torchrun sets: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK. Where torchrun
/// itself listens at MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE=True), `port` is the one above.
/// Refuses a variable but LOCAL_RANK that is missing or empty; a WORLD_SIZE outside 1 .. 1024; a RANK or a LOCAL_RANK
/// outside 0 .. WORLD_SIZE - 1; a port outside 1 .. 65535. `variable(name)` gives a variable's value, or null.
/// Source: torch.distributed's env:// initialisation.
Result<RankEnvironment> rank_environment(const std::function<const char*(const char* name)>& variable);
/// Of this process.
Result<RankEnvironment> rank_environment();

}  // namespace cf
