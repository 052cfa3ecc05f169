#include "core/ranks/environment.hpp"

#include <charconv>
#include <cstdlib>
#include <string_view>

namespace cf {
namespace {

using Variable = std::function<const char*(const char*)>;

Status refuse(const char* name, const std::string& expected, const std::string& got) {
  return Status::error(Code::invalid_argument, std::string(name) + ": expected " + expected + ", got " + got);
}

Result<std::string> text_of(const Variable& variable, const char* name, const std::string& expected) {
  const char* const text = variable(name);
  if (!text || !*text) return refuse(name, expected + ", as torchrun sets it", "none");
  return std::string(text);
}

Result<std::int64_t> integer_of(const Variable& variable, const char* name, std::int64_t least, std::int64_t most) {
  const std::string expected = "an integer of " + std::to_string(least) + " to " + std::to_string(most);
  CF_TRY_ASSIGN(const std::string text, text_of(variable, name, expected));
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most)
    return refuse(name, expected, "'" + text + "'");
  return value;
}

}  // namespace

Result<RankEnvironment> rank_environment(const Variable& variable) {
  constexpr std::int64_t most_ranks = 1024, last_port = 65535;
  RankEnvironment e;
  CF_TRY_ASSIGN(e.ranks, integer_of(variable, "WORLD_SIZE", 1, most_ranks));
  CF_TRY_ASSIGN(e.rank, integer_of(variable, "RANK", 0, e.ranks - 1));
  CF_TRY_ASSIGN(e.host, text_of(variable, "MASTER_ADDR", "the name or address of rank 0's host"));
  // torchrun's own store listens at the port that it names.
  const char* const store = variable("TORCHELASTIC_USE_AGENT_STORE");
  const int above = store && std::string_view(store) == "True" ? 1 : 0;
  CF_TRY_ASSIGN(const std::int64_t port, integer_of(variable, "MASTER_PORT", 1, last_port - above));
  e.port = int(port) + above;
  if (const char* const local = variable("LOCAL_RANK"); local && *local) {
    CF_TRY_ASSIGN(const std::int64_t local_rank, integer_of(variable, "LOCAL_RANK", 0, e.ranks - 1));
    e.local_rank = int(local_rank);
  }
  return e;
}

Result<RankEnvironment> rank_environment() {
  return rank_environment([](const char* name) -> const char* { return std::getenv(name); });
}

}  // namespace cf
