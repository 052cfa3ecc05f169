#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/model/decoder.hpp"
#include "core/model/slot_lease.hpp"
#include "core/status.hpp"

namespace cf {

struct MemorizeOptions {
  std::int64_t context = 32, continuation = 32;  // ids of a sequence: those that are given, and those to be made
  bool exact_only = false;                       // whether a sequence ends at its first id that differs
  std::vector<std::int32_t> never{};             // ids that are not chosen
};

/// How a model has continued a sequence. The score of EleutherAI/pythia's predictable-memorization/eval_memorization.py
/// is equal / continuation.
struct Memorized {
  std::int64_t place;   // the caller's number of the sequence
  std::int32_t equal;   // ids that are the sequence's own at their place; -1 where not all were made
  std::int32_t prefix;  // equal ids before the first that differs

  bool operator==(const Memorized&) const = default;
};

/// Continues sequences greedily in the slots of a decoder, and compares each id with the sequence's own as it is made.
/// A sequence that ends gives its slot to the next. Not shared between threads.
class Memorizer {
 public:
  /// Refuses sizes below 1, and ids of `never` outside the vocabulary or that are all of it.
  static Result<Memorizer> create(std::shared_ptr<SlotLease> slots, MemorizeOptions options);
  Memorizer(Memorizer&&) noexcept;
  Memorizer& operator=(Memorizer&&) noexcept;
  ~Memorizer();

  /// Takes a sequence of context + continuation ids. Refuses another number of ids, and what Decoder::add() refuses.
  Status add(std::int64_t place, std::span<const std::int32_t> ids);
  /// Sequences that were added and have not ended.
  std::int64_t running() const;
  /// Makes an id of each sequence that has a slot, and returns those that have ended. A sequence that fails, such as by
  /// logits that are NaN, ends the call: the message names its place.
  Result<std::vector<Memorized>> step();

 private:
  struct State;
  explicit Memorizer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace cf
