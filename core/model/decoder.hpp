#pragma once
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/model/model.hpp"
#include "core/sampling.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"

namespace cf {

/// What a decoder asks of a backend: a model on one device, with a KV cache of `slots` sequences. Each slot is
/// one row of a step's batch, also while no sequence holds the slot.
class ModelRunner {
 public:
  /// A slot's new token: `id` is appended at `position`.
  struct Token {
    std::int64_t slot;
    std::int32_t id;
    std::int64_t position;
  };
  /// A choice among a slot's logits; `position` is that of the chosen token.
  struct Draw {
    std::int64_t slot;
    Sampling sampling;
    std::uint64_t sequence;  // the caller's number of the sequence
    std::int64_t position;
    std::span<const std::int32_t> history;  // prompt and chosen ids, for the repetition penalty
    /// How many tokens the sequence may get after the chosen one; with 0 it ends with that, whichever it is.
    std::int64_t left = std::numeric_limits<std::int64_t>::max();
    /// Ids that end the sequence: it gets no token behind one of these.
    std::span<const std::int32_t> stop = {};
  };

  /// A tensor of a site's call: what the op reads, what it has written, or a weight.
  struct SiteTensor {
    Role role;
    std::string name;  // in the op's contract
    const void* data;  // where the model runs: on the host or on a device
    DType dtype;
    Shape shape;

    std::int64_t size() const { return element_count(shape); }
    std::int64_t bytes() const { return size() * std::int64_t(size_bytes(dtype)); }
  };
  /// Called after a site has run, with all its tensors in the order of Op::tensors.
  using Visit = std::function<Status(const ModelSite&, std::span<const SiteTensor>)>;
  /// Whether a long call shall go on: an error ends it.
  using Check = std::function<Status()>;

  virtual ~ModelRunner() = default;

  virtual const ModelSpec& model() const = 0;
  virtual std::int64_t slots() const = 0;
  virtual std::int64_t capacity() const = 0;
  /// The dtype of the activations, the cache and the logits.
  virtual DType activation() const = 0;

  /// Gives a slot the entries of `ids` at the positions from `first` on, which is at most the number of the slot's
  /// entries, and makes the logits of the last one.
  virtual Status prefill(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids) = 0;
  /// The same with the logits of the last `rows` tokens, which it writes to `logits`, (rows, vocab) of the host's
  /// memory and of the activations' dtype. The slot's own logits stay as they are.
  virtual Status forward(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids,
                         AnyView<2> logits) = 0;
  /// One step of all slots: those of `tokens` get a new entry and logits, the others keep what they have. Slots share
  /// each read of a weight.
  virtual Status step(std::span<const Token> tokens) = 0;
  /// Chooses the next id of each draw's slot. A choice that fails, for example among logits that are NaN, has a Status
  /// of its own.
  virtual std::vector<Result<std::int32_t>> choose(std::span<const Draw> draws) = 0;
  /// A slot's logits, (vocab), in the runner's own dtype.
  virtual Result<Tensor> logits(std::int64_t slot) = 0;
  /// Forgets a slot's entries.
  virtual void release(std::int64_t slot) = 0;

  /// Calls `visit` for every site of every prefill(), forward() and step() from now on; an empty one ends that. A call
  /// ends with the first Status of `visit` that is not ok.
  virtual void watch(Visit visit) = 0;
  /// Calls `check`, on the caller's thread, between the parts of every prefill(), forward() and step() from now on; an
  /// empty one ends that. Parts are blocks of an op on the CPU, which also checks at the end of a call, and a prompt's
  /// passes on a GPU. A call ends with the first Status of `check` that is not ok; the slot's entries are then those
  /// before the call, or of a part of it, and its logits are none.
  virtual void check_between(Check check) = 0;
  /// Copies a tensor that `visit` was called with to the host's memory, before `visit` returns.
  virtual Status fetch(const SiteTensor& tensor, void* to) = 0;
};

/// How a sequence is continued, and until when.
struct SequenceOptions {
  Sampling sampling{};
  /// The caller's number of the sequence. The random numbers depend on sampling.seed, this number and a token's
  /// position, and on nothing else.
  std::uint64_t id = 0;
  std::vector<std::int32_t> stop{};  // ids that end the sequence; the id that ended it is its last
  std::int64_t max_new_tokens = std::numeric_limits<std::int64_t>::max();
};

/// Why a sequence has ended.
enum class Finish { running, stop, length, failed };
std::string_view to_string(Finish);

/// Continues several sequences at once, each in a slot of its own: prompts in, ids out. A sequence may come while
/// others decode; its slot is free again when it ends. With the same number of slots a sequence's ids do not depend on
/// what the other slots hold. Not shared between threads.
class Decoder {
 public:
  /// A sequence, in the order of add() from 0 on.
  using Sequence = std::int64_t;
  /// An id that a sequence was given.
  struct Emitted {
    Sequence sequence;
    std::int32_t id;
    bool operator==(const Emitted&) const = default;
  };

  explicit Decoder(std::unique_ptr<ModelRunner> runner);
  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;
  ~Decoder();

  /// Takes a slot for a sequence; the next prefill() or decode() reads its prompt. Refuses a prompt that is empty,
  /// longer than entry_limit() allows or holds an id outside the vocabulary; sampling parameters that
  /// Sampling::validate() refuses; stop ids outside the vocabulary; max_new_tokens below 1; and a sequence more than
  /// there are slots.
  Result<Sequence> add(std::span<const std::int32_t> prompt, SequenceOptions options = {});
  /// Reads the prompts of all sequences that were added since, and returns each one's first id.
  Result<std::vector<Emitted>> prefill();
  /// `steps` steps, or fewer where all sequences end before: a step gives each running sequence one id. Sequences that
  /// were added since are prefilled first. An error is the device's; what was emitted before is in ids(). A sequence
  /// that would need more entries than entry_limit() allows, or whose logits are NaN, ends with Finish::failed and a
  /// status(); the others go on.
  Result<std::vector<Emitted>> decode(std::int64_t steps = 1);
  /// Ends a sequence and forgets it. Refuses one that is unknown or was dropped.
  Status drop(Sequence sequence);

  /// Whether any sequence is running.
  bool active() const;
  std::int64_t free_slots() const;
  /// Of a sequence that was not dropped: its ids behind the prompt, why it ended, and where it failed, how.
  Result<std::vector<std::int32_t>> ids(Sequence sequence) const;
  Result<Finish> finish(Sequence sequence) const;
  Status status(Sequence sequence) const;
  /// The logits (vocab) that a running sequence's last id was chosen from.
  Result<Tensor> logits(Sequence sequence);

  const ModelRunner& runner() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cf
