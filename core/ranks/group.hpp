#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "core/ranks/environment.hpp"
#include "core/status.hpp"

namespace cf {

/// Processes that share a model, joined by sockets: rank 0 listens, and each other rank has a connection to it. The
/// bytes of an exchange lie in host memory. The group carries the sums of models on the CPU, and what ranks on GPUs
/// must agree on.
/// A rank that fails, ends or does not answer ends the group: every rank's call then returns one line that names that
/// rank and the reason, and so do all later calls. Rank 0 waits for a rank as long as the options say. The other ranks
/// wait twice as long for rank 0, since rank 0 may itself be waiting.
/// The group has no authentication: any program that reaches the port can join, as with torch's store. The network must
/// be trusted. All hosts have the same byte order.
class RankGroup {
 public:
  struct Options {
    double join_s = 300;     // how long a rank waits until all have come
    double patience_s = 60;  // how long it waits for another one from then on
    /// Asked again and again while a rank waits: an error ends the call, and with it the group.
    std::function<Status()> check{};
  };

  /// Waits until all ranks have come. Refuses what the ranks do not have alike: their number; a rank that two processes
  /// claim; a port where rank 0 cannot listen. Every rank that has come is told.
  static Result<std::unique_ptr<RankGroup>> join(const RankEnvironment& environment, const Options& options);
  /// Says to the others that this rank has gone.
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  std::int64_t rank() const;
  std::int64_t ranks() const;
  /// What ended the group; ok while it lasts.
  const Status& status() const;
  /// Replaces Options::check from now on.
  void check_between(std::function<Status()> check);

  /// An exchange: all ranks' bytes, side by side in the order of the ranks. All ranks make the same exchanges in the
  /// same order; what differs in its number or size ends the group. `all` has ranks() times the bytes of `mine`.
  Status gather(std::span<const std::byte> mine, std::span<std::byte> all);
  /// Refuses texts that differ, on all ranks with the same line. It names the first rank that differs from rank 0, and
  /// the first of its lines that does: "ranks: rank 1 has 'hidden_size 64', expected 'hidden_size 32' as rank 0 has".
  /// The group goes on.
  Status agree(const std::string& text);
  /// Ends the group: the other ranks' calls return what has failed here. Nothing where it has ended.
  void fail(const Status& status);

 private:
  struct State;
  explicit RankGroup(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

}  // namespace cf
