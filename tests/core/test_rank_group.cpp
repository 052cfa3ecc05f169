// Processes that share a model, here as threads: where they meet, what they exchange, and what they say when one of
// them is missing, fails, differs or is silent.
#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "core/ranks/group.hpp"
#include "core/ranks/socket.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/held_port.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

using Variables = std::map<std::string, std::string>;

Result<RankEnvironment> environment_of(const Variables& variables) {
  return rank_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

const Variables kVariables{{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}};

constexpr double kLong = 120;

/// What each rank does with its group, or the Status of its join().
using Work = std::function<Status(Result<std::unique_ptr<RankGroup>> group, std::int64_t rank)>;

/// Joins `ranks` threads and lets each work. `change` may give a rank another environment or other options.
std::vector<Status> on_ranks(
    std::int64_t ranks, const Work& work,
    const std::function<void(RankEnvironment&, RankGroup::Options&)>& change = [](auto&, auto&) {}) {
  const HeldPort port;
  std::vector<Status> ended(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (std::int64_t r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      RankEnvironment environment{.rank = r, .ranks = ranks, .host = "127.0.0.1", .port = port.port()};
      RankGroup::Options options{.join_s = kLong, .patience_s = kLong};
      change(environment, options);
      ended[std::size_t(r)] = work(RankGroup::join(environment, options), r);
    });
  for (std::thread& t : threads) t.join();
  return ended;
}

/// An exchange of one number a rank: the numbers of all.
Status gather(RankGroup& group, std::int64_t number, std::vector<std::int64_t>& all) {
  all.resize(std::size_t(group.ranks()));
  return group.gather(std::as_bytes(std::span(&number, 1)), std::as_writable_bytes(std::span(all)));
}

Status gather(RankGroup& group) {
  std::vector<std::int64_t> all;
  return gather(group, 1, all);
}

}  // namespace

TEST_CASE("A rank is what torchrun's variables say", "[ranks]") {
  const auto e = environment_of(kVariables);
  REQUIRE(e);
  CHECK(e->rank == 1);
  CHECK(e->ranks == 4);
  CHECK(e->host == "127.0.0.1");
  CHECK(e->port == 29500);
  CHECK(e->local_rank == std::nullopt);
  Variables torchrun = kVariables;
  torchrun["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  CHECK(environment_of(torchrun)->port == 29500);
  torchrun["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  CHECK(environment_of(torchrun)->port == 29501);
  torchrun["LOCAL_RANK"] = "";
  CHECK(environment_of(torchrun)->local_rank == std::nullopt);
  torchrun["LOCAL_RANK"] = "3";
  CHECK(environment_of(torchrun)->local_rank == 3);
  torchrun["MASTER_PORT"] = "65535";
  CHECK(refusal_fault(environment_of(torchrun).status(), Code::invalid_argument,
                      {"MASTER_PORT: expected an integer of 1 to 65534, got '65535'"}) == "");
}

TEST_CASE("A variable that is missing or wrong is named, with what was expected and what came", "[ranks]") {
  const auto fault = [](const char* name, const char* value, std::initializer_list<std::string_view> parts) {
    Variables variables = kVariables;
    if (value)
      variables[name] = value;
    else
      variables.erase(name);
    return refusal_fault(environment_of(variables).status(), Code::invalid_argument, parts);
  };
  CHECK(fault("RANK", nullptr, {"RANK: expected an integer of 0 to 3, as torchrun sets it, got none"}) == "");
  CHECK(fault("RANK", "", {"RANK: expected", "got none"}) == "");
  CHECK(fault("RANK", "4", {"RANK: expected an integer of 0 to 3, got '4'"}) == "");
  CHECK(fault("RANK", "-1", {"RANK", "'-1'"}) == "");
  CHECK(fault("RANK", "1 ", {"RANK", "'1 '"}) == "");
  CHECK(fault("RANK", "99999999999999999999", {"RANK"}) == "");
  CHECK(fault("WORLD_SIZE", nullptr, {"WORLD_SIZE", "got none"}) == "");
  CHECK(fault("WORLD_SIZE", "0", {"WORLD_SIZE: expected an integer of 1 to 1024, got '0'"}) == "");
  CHECK(fault("WORLD_SIZE", "two", {"WORLD_SIZE", "'two'"}) == "");
  CHECK(fault("MASTER_ADDR", nullptr, {"MASTER_ADDR", "host", "got none"}) == "");
  CHECK(fault("MASTER_PORT", "0", {"MASTER_PORT: expected an integer of 1 to 65535, got '0'"}) == "");
  CHECK(fault("MASTER_PORT", "65536", {"MASTER_PORT"}) == "");
  CHECK(fault("LOCAL_RANK", "4", {"LOCAL_RANK: expected an integer of 0 to 3, got '4'"}) == "");
  CHECK(fault("LOCAL_RANK", "-1", {"LOCAL_RANK", "'-1'"}) == "");
  CHECK(fault("LOCAL_RANK", "1,2", {"LOCAL_RANK", "'1,2'"}) == "");
}

TEST_CASE("Every rank is given the parts of all, in the order of the ranks", "[ranks]") {
  for (const std::int64_t ranks : {1, 2, 4}) {
    std::vector<std::vector<std::int64_t>> small(std::size_t(ranks), std::vector<std::int64_t>{});
    std::vector<std::string> large(static_cast<std::size_t>(ranks));
    constexpr std::size_t bytes = 3 << 20;  // more than sockets hold
    const auto ended = on_ranks(ranks, [&](auto group, std::int64_t r) -> Status {
      CF_TRY(group.status());
      for (int i = 0; i < 50; ++i) CF_TRY(gather(**group, 10 * i + r, small[std::size_t(r)]));
      const std::string mine(bytes, char('a' + r));
      large[std::size_t(r)].resize(bytes * std::size_t(ranks));
      CF_TRY(
          (*group)->gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(large[std::size_t(r)]))));
      return (*group)->gather({}, {});
    });
    for (std::size_t r = 0; r < std::size_t(ranks); ++r) {
      INFO(ended[r].message());
      CHECK(ended[r]);
      for (std::int64_t from = 0; from < ranks; ++from) {
        CHECK(small[r][std::size_t(from)] == 490 + from);
        CHECK(large[r].substr(std::size_t(from) * bytes, bytes) == std::string(bytes, char('a' + from)));
      }
    }
  }
}

TEST_CASE("Ranks that differ are all told which one does and in which line, and the group goes on", "[ranks]") {
  std::array<Status, 3> differed;
  const auto ended = on_ranks(3, [&](auto group, std::int64_t r) -> Status {
    CF_TRY(group.status());
    CF_TRY((*group)->agree("hidden_size 32\nlayers 2\n"));
    differed[std::size_t(r)] = (*group)->agree(r == 1 ? "hidden_size 32\nlayers 3" : "hidden_size 32\nlayers 2\n");
    CF_TRY((*group)->status());
    CF_TRY((*group)->agree(""));
    if ((*group)->agree(r == 2 ? "a\nb" : "a").message() != "ranks: rank 2 has 'b', expected no more as rank 0 has")
      return Status::error(Code::io_error, "another message");
    return gather(**group);
  });
  for (const Status& s : ended) {
    INFO(s.message());
    CHECK(s);
  }
  for (const Status& s : differed)
    CHECK(refusal_fault(s, Code::invalid_argument,
                        {"ranks: rank 1 has 'layers 3', expected 'layers 2' as rank 0 has"}) == "");
}

TEST_CASE("A rank that never starts is named", "[ranks]") {
  const auto ended = on_ranks(
      4, [](auto group, std::int64_t) { return group.status(); },
      [](RankEnvironment& e, RankGroup::Options& o) {
        o.join_s = e.rank == 0 || e.rank == 2 ? 0.5 : 5;
        if (e.rank == 2) e.port = 1;  // it looks for rank 0 where nobody is
      });
  CHECK(refusal_fault(ended[0], Code::io_error, {"ranks: rank", "2", " not come to 127.0.0.1:", " within 0.5 s"}) ==
        "");
  CHECK(refusal_fault(ended[2], Code::io_error, {"ranks: rank 2 has found no rank 0 at 127.0.0.1:1 within 0.5 s"}) ==
        "");
  for (const std::size_t r : {1, 3}) {
    // The others are told, but where they come when rank 0 has given up.
    INFO(ended[r].message());
    CHECK(
        (ended[r].message() == ended[0].message() || ended[r].message().find("found no rank 0") != std::string::npos));
  }
}

TEST_CASE("Ranks of other groups, two of a kind, and strangers", "[ranks]") {
  const auto sized = on_ranks(
      2, [](auto group, std::int64_t) { return group.status(); }, [](RankEnvironment& e, auto&) { e.ranks += e.rank; });
  for (const Status& s : sized)
    CHECK(refusal_fault(s, Code::io_error, {"ranks: rank 1 has WORLD_SIZE 3, expected 2 as rank 0 has"}) == "");

  const auto twice = on_ranks(
      3, [](auto group, std::int64_t) { return group.status(); },
      [](RankEnvironment& e, auto&) { e.rank = std::min<std::int64_t>(e.rank, 1); });
  for (const Status& s : twice)
    CHECK(refusal_fault(s, Code::io_error, {"ranks: two processes have RANK 1, expected each rank once"}) == "");

  // A stranger that says something else does not come between.
  const auto ended = on_ranks(
      2, [](auto group, std::int64_t) { return group ? gather(**group) : group.status(); },
      [](RankEnvironment& e, auto&) {
        if (e.rank == 0) return;
        ranks::Socket stranger;
        ranks::Wait wait = ranks::wait_seconds(kLong);
        if (!ranks::Socket::connect(e.host, e.port, wait, stranger)) return;
        const std::string words(64, 'x');
        (void)stranger.send(std::as_bytes(std::span(words)), wait);
      });
  for (const Status& s : ended) {
    INFO(s.message());
    CHECK(s);
  }
}

TEST_CASE("Where rank 0 cannot listen, or no such host is, the line says so", "[ranks]") {
  const HeldPort taken;
  taken.listen();
  const RankEnvironment zero{.rank = 0, .ranks = 2, .host = "127.0.0.1", .port = taken.port()};
  CHECK(refusal_fault(RankGroup::join(zero, {}).status(), Code::io_error,
                      {"ranks: rank 0 cannot listen at 127.0.0.1:", "in use", "expected a free port of this host"}) ==
        "");
  for (const std::int64_t rank : {0, 1})
    CHECK(refusal_fault(RankGroup::join({.rank = rank, .ranks = 2, .host = "no host", .port = 1}, {}).status(),
                        Code::invalid_argument, {"MASTER_ADDR: expected", "'no host'"}) == "");
}

TEST_CASE("A rank that goes, fails or is silent ends the calls of all, and is named", "[ranks]") {
  struct Case {
    const char* what;
    std::int64_t rank;  // whose fault it is
    std::function<Status(RankGroup&)> fault;
    std::string expected;  // of the other ranks
    bool at_once = false;  // before any exchange
  };
  std::atomic<int> waiting = 0;
  const Case cases[] = {
      {"goes", 1, [](RankGroup&) { return Status(); }, "ranks: rank 1 has gone in exchange 2"},
      {"goes", 0, [](RankGroup&) { return Status(); }, "ranks: rank 0 has gone in exchange 2"},
      {"fails", 2,
       [](RankGroup& g) {
         g.fail(Status::error(Code::out_of_memory, "no memory"));
         return g.status();
       },
       "ranks: rank 2: no memory"},
      {"fails", 0,
       [](RankGroup& g) {
         g.fail(Status::error(Code::out_of_memory, "no memory"));
         return g.status();
       },
       "ranks: rank 0: no memory"},
      {"makes another exchange", 1,
       [](RankGroup& g) {
         std::array<std::byte, 16> mine{};
         std::array<std::byte, 48> all{};
         return g.gather(mine, all);
       },
       "ranks: rank 1 makes exchange 2 of 16 bytes, rank 0 exchange 2 of 8: expected the same exchanges on all ranks"},
      {"is silent", 1,
       [&](RankGroup& g) {
         while (waiting < 2) std::this_thread::yield();  // until the others' calls have ended
         return g.status();
       },
       "ranks: rank 1 has not answered rank 0 within 0.5 s in exchange 1", true}};
  for (const Case& c : cases) {
    INFO(c.what);
    waiting = 0;
    std::array<Status, 3> later;
    const auto ended = on_ranks(
        3,
        [&](auto group, std::int64_t r) -> Status {
          CF_TRY(group.status());
          if (!c.at_once) CF_TRY(gather(**group));
          if (r == c.rank) return c.fault(**group);
          const Status first = gather(**group);
          ++waiting;
          later[std::size_t(r)] = gather(**group);
          return first;
        },
        [&](RankEnvironment& e, RankGroup::Options& o) {
          if (e.rank == 0 && c.at_once) o.patience_s = 0.5;
        });
    for (std::size_t r = 0; r < 3; ++r) {
      if (std::int64_t(r) == c.rank) continue;
      INFO(r);
      CHECK(ended[r].message() == c.expected);
      CHECK(later[r].message() == c.expected);
    }
  }
}

TEST_CASE("A check ends a rank's waiting, and the others hear of it", "[ranks]") {
  std::atomic<bool> has_ended = false;
  const auto ended = on_ranks(2, [&](auto group, std::int64_t r) -> Status {
    CF_TRY(group.status());
    if (r == 1) {
      (*group)->check_between(
          [asked = 0]() mutable { return ++asked < 3 ? Status() : Status::error(Code::io_error, "enough"); });
      const Status stopped = gather(**group);
      has_ended = true;
      return stopped;
    }
    while (!has_ended) std::this_thread::yield();
    CF_TRY(gather(**group));  // whose part rank 1 has sent
    return gather(**group);
  });
  CHECK(ended[0].message() == "ranks: rank 1: enough");
  CHECK(ended[1].message() == "ranks: rank 1: enough");
}
