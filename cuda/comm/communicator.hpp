#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/status.hpp"
#include "cuda/runtime/context.hpp"

namespace cf::cuda {

struct Peers;  // cuda/comm/peers.hpp

/// What joins ranks that share a model: memory on each rank's GPU that the kernels of all ranks reach. The ranks are of
/// one process, a thread each, one GPU each; ranks that share a GPU are for tests. Every rank launches the same
/// exchanges in the same order. Outlives what the ranks' contexts make.
class Communicator {
 public:
  struct Options {
    std::int64_t part_bytes = 0;  // the most bytes of a rank's part in an exchange
    double patience_s = 10;       // how long a kernel waits for another rank
    std::int64_t area_bytes = 0;  // for a kernel with exchanges of its own (ExchangeLayout)
  };
  /// The ranks run on these GPUs, rank 0 first. Gives each GPU access to the others' memory, and takes memory on each.
  /// Refuses fewer than two ranks or more than eight, and GPUs of different kinds or that cannot reach each other's
  /// memory (Code::unimplemented), by name. Code::out_of_memory says how much was needed and how much is free.
  static Result<std::unique_ptr<Communicator>> create(std::span<const int> devices, const Options& options);
  /// The bytes that create() takes on each GPU.
  static double bytes(std::int64_t ranks, std::int64_t part_bytes, std::int64_t area_bytes = 0);
  /// Waits for the devices.
  ~Communicator();

  int ranks() const;
  /// A rank's GPU. What is launched with this context may exchange with the other ranks. Its stream is the default one.
  const Context& context(int rank) const;
  /// Says how a rank's thread waits for the others' (meet_ranks()): not before all of them use their contexts.
  void set_meetings(const std::function<Status(int rank)>& meet);
  std::size_t device_bytes() const;  // on each GPU
  /// Code::device_error where a rank's kernels have given an exchange up: the message says which rank has waited for
  /// which. It stays: the ranks cannot exchange any more.
  Status status() const;

 private:
  struct State;
  explicit Communicator(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

/// The status of the communicator that a context's rank belongs to; ok for a context that is no rank's.
Status check_exchanges(const Context& context);
/// Waits until the threads of all ranks have called this as often as the context's rank; nothing where the context is no
/// rank's, or one thread drives all ranks. Fails where another rank's call has ended before.
Status meet_ranks(const Context& context);

}  // namespace cf::cuda
