#include "core/ranks/group.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <vector>

#include "core/ranks/socket.hpp"

namespace cf {
namespace {

using ranks::Io;
using ranks::Socket;
using ranks::Wait;

constexpr std::array<char, 8> kMagic{'c', 'f', '-', 'r', 'a', 'n', 'k', 's'};
constexpr std::int64_t kProtocol = 1;

/// The first that a rank says to rank 0.
struct Hello {
  std::array<char, 8> magic = kMagic;
  std::int64_t protocol = kProtocol, rank = 0, ranks = 0;
};

enum class Kind : std::int64_t { part, failure };
/// What stands before a part, or before the words that say what has failed.
struct Header {
  Kind kind = Kind::part;
  std::int64_t exchange = 0, bytes = 0;
};
/// A failure has one line.
constexpr std::size_t kMostWords = 4096;

template <class T>
std::span<const std::byte> bytes_of(const T& t) {
  return std::as_bytes(std::span(&t, 1));
}
template <class T>
std::span<std::byte> room_of(T& t) {
  return std::as_writable_bytes(std::span(&t, 1));
}

std::string name(std::int64_t rank) { return "rank " + std::to_string(rank); }
std::string seconds(double s) {
  std::array<char, 32> text{};
  (void)std::snprintf(text.data(), text.size(), "%g s", s);
  return text.data();
}
Status broken(std::string what) { return Status::error(Code::io_error, "ranks: " + std::move(what)); }

/// The first line that differs, or what stands for it where one of the texts has ended.
std::string line_of(const std::string& text, std::size_t number) {
  std::size_t first = 0;
  for (std::size_t i = 0; i < number && first <= text.size(); ++i)
    first = std::min(text.find('\n', first), text.size()) + 1;
  if (first > text.size()) return "no more";
  return "'" + text.substr(first, text.find('\n', first) - first) + "'";
}

}  // namespace

struct RankGroup::State {
  RankEnvironment environment;
  Options options;
  std::vector<Socket> peers;  // on rank 0 by rank, on another rank rank 0's alone
  std::int64_t exchange = 0;  // of the next one
  Status status;

  std::int64_t rank() const { return environment.rank; }
  std::string address() const { return environment.host + ":" + std::to_string(environment.port); }
  /// Rank 0 may be waiting for another rank, and then says so.
  double patience_s() const {
    const double own = exchange == 0 ? options.join_s : options.patience_s;
    return rank() == 0 ? own : 2 * own;
  }
  Wait wait() const { return ranks::wait_seconds(patience_s(), options.check); }
  Socket& peer(std::int64_t r) { return peers[rank() == 0 ? std::size_t(r) : 0]; }

  /// Ends the group. The others are told as far as they listen.
  Status end(Status why) {
    status = std::move(why);
    const std::string& words = status.message();
    const Header header{.kind = Kind::failure, .bytes = std::int64_t(std::min(words.size(), kMostWords))};
    std::vector<std::byte> message(sizeof header + std::size_t(header.bytes));
    std::memcpy(message.data(), &header, sizeof header);
    std::memcpy(message.data() + sizeof header, words.data(), std::size_t(header.bytes));
    for (const Socket& p : peers) {
      Wait at_once = ranks::wait_seconds(0);
      if (p) (void)p.send(message, at_once);
    }
    return status;
  }

  /// What it means that a call on the connection to a rank has not ended well.
  Status fault(std::int64_t r, Io io, const Wait& wait) const {
    if (io == Io::stopped) return Status::error(wait.stopped.code(), name_own(wait.stopped));
    const std::string at = exchange > 0 ? " in exchange " + std::to_string(exchange) : "";
    if (io == Io::gone) return broken(name(r) + " has gone" + at);
    return broken(name(r) + " has not answered " + name(rank()) + " within " + seconds(patience_s()) + at);
  }

  /// A failure of this rank, as all ranks are told it.
  std::string name_own(const Status& s) const {
    return s.message().starts_with("ranks: ") ? s.message() : "ranks: " + name(rank()) + ": " + s.message();
  }

  /// A header of a rank, or what it says has failed.
  Status receive(std::int64_t r, Header& header, Wait& wait) {
    if (const Io io = peer(r).receive(room_of(header), wait); io != Io::done) return fault(r, io, wait);
    if (header.kind == Kind::part) return {};
    std::string words(std::clamp<std::size_t>(std::size_t(header.bytes), 0, kMostWords), ' ');
    if (const Io io = peer(r).receive(std::as_writable_bytes(std::span(words)), wait); io != Io::done)
      return fault(r, io, wait);
    return Status::error(Code::io_error, std::move(words));
  }

  Status receive_part(std::int64_t r, std::span<std::byte> to, Wait& wait) {
    Header header;
    CF_TRY(receive(r, header, wait));
    if (header.exchange != exchange || header.bytes != std::int64_t(to.size()))
      return broken(name(r) + " makes exchange " + std::to_string(header.exchange) + " of " +
                    std::to_string(header.bytes) + " bytes, " + name(rank()) + " exchange " + std::to_string(exchange) +
                    " of " + std::to_string(to.size()) + ": expected the same exchanges on all ranks");
    if (const Io io = peer(r).receive(to, wait); io != Io::done) return fault(r, io, wait);
    return {};
  }

  Status send(std::int64_t r, std::span<const std::byte> bytes, Wait& wait) {
    const Header header{.exchange = exchange, .bytes = std::int64_t(bytes.size())};
    Io io = peer(r).send(bytes_of(header), wait);
    if (io == Io::done) io = peer(r).send(bytes, wait);
    if (io == Io::done) return {};
    // Of a rank that has gone, the last words say why.
    if (Header last; io == Io::gone) CF_TRY(receive(r, last, wait));
    return fault(r, io, wait);
  }

  // Rank 0.

  /// "rank 1 has", "ranks 1, 3 have" not come; empty where all have.
  std::string missing() const {
    std::string who;
    std::int64_t count = 0;
    for (std::size_t r = 1; r < std::size_t(environment.ranks); ++r)
      if (!peers[r]) who += (count++ ? ", " : "") + std::to_string(r);
    return count == 0 ? "" : count == 1 ? "rank " + who + " has" : "ranks " + who + " have";
  }

  /// Gives a connection that has come its rank. A stranger's is closed.
  Status greet(Socket came, Wait& wait) {
    constexpr double greeting_s = 5;
    Hello hello;
    Wait shortly = ranks::wait_seconds(greeting_s, wait.check);
    shortly.until = std::min(shortly.until, wait.until);
    const Io io = came.receive(room_of(hello), shortly);
    wait.stopped = shortly.stopped;
    if (io == Io::stopped) return fault(0, io, wait);
    if (io != Io::done || hello.magic != kMagic) return {};
    const auto refuse = [&](const std::string& why) {
      peers.push_back(std::move(came));  // is told, too
      return broken(why);
    };
    if (hello.protocol != kProtocol) return refuse("a rank has another version of cf-ops than rank 0");
    if (hello.ranks != environment.ranks)
      return refuse(name(hello.rank) + " has WORLD_SIZE " + std::to_string(hello.ranks) + ", expected " +
                    std::to_string(environment.ranks) + " as rank 0 has");
    if (hello.rank < 1 || hello.rank >= hello.ranks || peers[std::size_t(hello.rank)])
      return refuse("two processes have RANK " + std::to_string(hello.rank) + ", expected each rank once");
    peers[std::size_t(hello.rank)] = std::move(came);
    return {};
  }

  Status wait_for_all() {
    CF_TRY_ASSIGN(const Socket listener, Socket::listen(environment.host, environment.port));
    peers.resize(std::size_t(environment.ranks));
    Wait until = wait();
    while (!missing().empty()) {
      pollfd coming{.fd = listener.descriptor(), .events = POLLIN, .revents = 0};
      const Io io = ranks::wait_for({&coming, 1}, until);
      if (io == Io::late) return broken(missing() + " not come to " + address() + " within " + seconds(patience_s()));
      if (io != Io::done) return fault(0, io, until);
      if (Socket came = listener.accept()) CF_TRY(greet(std::move(came), until));
    }
    for (std::int64_t r = 1; r < environment.ranks; ++r) CF_TRY(send(r, {}, until));
    return {};
  }

  Status gather_here(std::span<const std::byte> mine, std::span<std::byte> all) {
    Wait until = wait();
    const auto part = [&](std::int64_t r) { return all.subspan(std::size_t(r) * mine.size(), mine.size()); };
    std::ranges::copy(mine, part(0).begin());
    std::vector<std::int64_t> left;
    for (std::int64_t r = 1; r < environment.ranks; ++r) left.push_back(r);
    // Whoever comes first is read first: a rank that has gone shows while another is late.
    while (!left.empty()) {
      std::vector<pollfd> sockets;
      for (const std::int64_t r : left) sockets.push_back({.fd = peer(r).descriptor(), .events = POLLIN, .revents = 0});
      if (const Io io = ranks::wait_for(sockets, until); io != Io::done) return fault(left.front(), io, until);
      for (std::size_t i = sockets.size(); i-- > 0;) {
        if (!sockets[i].revents) continue;
        CF_TRY(receive_part(left[i], part(left[i]), until));
        left.erase(left.begin() + std::ptrdiff_t(i));
      }
    }
    for (std::int64_t r = 1; r < environment.ranks; ++r) CF_TRY(send(r, all, until));
    return {};
  }

  // The other ranks.

  Status come_to_rank_0() {
    peers.resize(1);
    Wait until = ranks::wait_seconds(options.join_s, options.check);
    CF_TRY_ASSIGN(const Io io, Socket::connect(environment.host, environment.port, until, peers[0]));
    if (io == Io::late)
      return broken(name(rank()) + " has found no rank 0 at " + address() + " within " + seconds(options.join_s));
    if (io != Io::done) return fault(0, io, until);
    const Hello hello{.rank = rank(), .ranks = environment.ranks};
    until = wait();
    if (const Io sent = peers[0].send(bytes_of(hello), until); sent != Io::done) return fault(0, sent, until);
    return receive_part(0, {}, until);
  }

  Status gather_there(std::span<const std::byte> mine, std::span<std::byte> all) {
    Wait until = wait();
    CF_TRY(send(0, mine, until));
    return receive_part(0, all, until);
  }
};

RankGroup::RankGroup(std::unique_ptr<State> state) : state_(std::move(state)) {}
RankGroup::~RankGroup() = default;

Result<std::unique_ptr<RankGroup>> RankGroup::join(const RankEnvironment& environment, const Options& options) {
  auto state = std::make_unique<State>();
  State& s = *state;
  s.environment = environment;
  s.options = options;
  if (environment.ranks > 1) {
    const Status joined = environment.rank == 0 ? s.wait_for_all() : s.come_to_rank_0();
    if (!joined) return s.end(joined);
  }
  s.exchange = 1;
  return std::unique_ptr<RankGroup>(new RankGroup(std::move(state)));
}

std::int64_t RankGroup::rank() const { return state_->rank(); }
std::int64_t RankGroup::ranks() const { return state_->environment.ranks; }
const Status& RankGroup::status() const { return state_->status; }
void RankGroup::check_between(std::function<Status()> check) { state_->options.check = std::move(check); }

Status RankGroup::gather(std::span<const std::byte> mine, std::span<std::byte> all) {
  State& s = *state_;
  CF_TRY(s.status);
  if (all.size() != mine.size() * std::size_t(ranks()))
    return Status::error(Code::invalid_argument, "ranks: gather: expected room for " +
                                                     std::to_string(mine.size() * std::size_t(ranks())) +
                                                     " bytes, got " + std::to_string(all.size()));
  if (ranks() == 1) {
    std::ranges::copy(mine, all.begin());
    return {};
  }
  const Status gathered = rank() == 0 ? s.gather_here(mine, all) : s.gather_there(mine, all);
  if (!gathered) return s.end(gathered);
  ++s.exchange;
  return {};
}

Status RankGroup::agree(const std::string& text) {
  const auto count = std::size_t(ranks());
  const auto own = std::int64_t(text.size());
  std::vector<std::int64_t> sizes(count);
  CF_TRY(gather(bytes_of(own), std::as_writable_bytes(std::span(sizes))));
  constexpr std::int64_t most_bytes = 1 << 20;
  for (std::size_t r = 0; r < count; ++r)
    if (sizes[r] < 0 || sizes[r] > most_bytes) {
      fail(broken(name(std::int64_t(r)) + " has a text of " + std::to_string(sizes[r]) + " bytes, expected at most " +
                  std::to_string(most_bytes)));
      return status();
    }
  const auto most = std::size_t(std::ranges::max(sizes));
  std::string padded = text, all(most * count, '\0');
  padded.resize(most);
  CF_TRY(gather(std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(all))));
  const auto text_of = [&](std::size_t r) { return all.substr(r * most, std::size_t(sizes[r])); };
  const std::string expected = text_of(0);
  for (std::size_t r = 1; r < count; ++r) {
    const std::string got = text_of(r);
    if (got == expected) continue;
    std::size_t line = 0;
    while (line_of(got, line) == line_of(expected, line)) ++line;
    return Status::error(Code::invalid_argument, "ranks: " + name(std::int64_t(r)) + " has " + line_of(got, line) +
                                                     ", expected " + line_of(expected, line) + " as rank 0 has");
  }
  return {};
}

void RankGroup::fail(const Status& failed) {
  State& s = *state_;
  if (s.status) (void)s.end(Status::error(failed.code(), s.name_own(failed)));
}

}  // namespace cf
