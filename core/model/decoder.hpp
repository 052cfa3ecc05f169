#pragma once
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/model/choice.hpp"
#include "core/model/draft.hpp"
#include "core/model/runner.hpp"
#include "core/model/slot_lease.hpp"
#include "core/sampling.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"

namespace cf {

/// How a sequence is continued, and until when.
struct SequenceOptions {
  Sampling sampling{};
  /// The caller's number of the sequence. The random numbers depend on sampling.seed, this number and a token's
  /// position, and on nothing else.
  std::uint64_t id = 0;
  std::vector<std::int32_t> stop{};  // ids that end the sequence; the id that ended it is its last
  std::int64_t max_new_tokens = std::numeric_limits<std::int64_t>::max();
  LogitsChanges changes{};
  /// How many alternatives each id has in logprobs(), which has none where this is empty.
  std::optional<std::int64_t> logprobs{};
  /// What makes drafts, at most one a step, of 1 to draft_tokens ids; lookup_drafter() is one. With or without drafts
  /// the sequence is given the same ids, log-probabilities and Finish, but more than one of the ids in a step.
  Drafter draft{};
  std::int64_t draft_tokens = kMostDraft;
  bool draft_adapts = true;  // whether drafts get longer and shorter, up to draft_tokens, as DraftLength says
};

/// Why a sequence has ended.
enum class Finish { running, stop, length, failed };
std::string_view to_string(Finish);

/// What a decoder's steps are made of.
struct DecoderOptions {
  /// The most tokens of a step: those of all running sequences, and behind them pieces of prompts, at least one token
  /// where a prompt waits to be read. A long prompt never stops the others for longer than such a step takes. With 0
  /// all prompts are read whole, in steps of their own: as many in a step as the runner takes in one pass. By default
  /// what the runner prefers; if it takes several prompts in a pass, they are then read as with 0 where no one runs.
  std::optional<std::int64_t> step_tokens{};
  /// Whether prompts share pages: one that begins with the ids of a sequence in a slot takes the full pages of these
  /// ids from it, and is read from there on. Without effect where the runner's cache has no pages.
  bool share_prefixes = false;
};

/// Continues several sequences at once, each in a slot: prompts in, ids out. A sequence may come while others decode;
/// where no slot is free it waits, and the first that waits gets the slot of the next one that ends. A sequence's ids
/// depend neither on what the other slots hold nor on the tokens of a step, where the runner's logits do not: see
/// ModelRunner::run(). Not shared between threads.
/// Where the cache's pages are a pool and none is free, the youngest sequence gives up its slot and its entries and
/// waits. It keeps its ids, is read again when there is room, and goes on as if that had not been.
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

  /// Of all slots of a runner of its own, or of those of an open lease.
  explicit Decoder(std::unique_ptr<ModelRunner> runner, const DecoderOptions& options = {});
  explicit Decoder(std::shared_ptr<SlotLease> slots, const DecoderOptions& options = {});
  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;
  ~Decoder();

  /// Takes a sequence, which waits where no slot is free or others wait; the next prefill() or decode() with a slot for
  /// it reads its prompt. Refuses a prompt that is empty, longer than entry_limit() allows or holds an id outside the
  /// vocabulary; sampling parameters that Sampling::validate() refuses; changes that LogitsChanges::validate() refuses;
  /// stop ids outside the vocabulary; max_new_tokens below 1 or changes.min_new_tokens; logprobs outside 0 to the
  /// vocabulary's size; draft_tokens outside 1 to kMostDraft; and drafts where the runner has no exact_run_tokens().
  Result<Sequence> add(std::span<const std::int32_t> prompt, SequenceOptions options = {});
  /// Takes a sequence whose prompt is the first `tokens` tokens of another one, of its prompt and its ids; by default
  /// its prompt. It is given what add() of these tokens would be given. Where the cache has pages it shares those of a
  /// sequence in a slot that begins alike, and the rest alone is read: several samples of one prompt read that once.
  /// Refuses a sequence that is unknown or was dropped, `tokens` outside 1 .. its tokens, and what add() refuses.
  Result<Sequence> fork(Sequence sequence, SequenceOptions options = {}, std::optional<std::int64_t> tokens = {});
  /// Reads the prompts of all sequences that have a slot and were not read yet, and returns each one's first id.
  Result<std::vector<Emitted>> prefill();
  /// `steps` steps, or fewer where all sequences end before: a step gives each running sequence one id, and each whose
  /// prompt it has read to the end its first. A step that verifies a draft gives the sequence the ids up to the first
  /// that is not the draft's, each chosen as if it came by itself: at its own position, among the logits behind the ids
  /// before it, with the random number of that position. So a drawn id that a draft has with probability p is accepted
  /// with probability p, and another one comes from the rest of the distribution: the rejection of speculative sampling
  /// (Leviathan et al. 2023, arXiv:2211.17192) for a draft without a distribution of its own. An error is the device's, or Code::out_of_memory where others hold the
  /// pages that the oldest sequence needs; what was emitted before is in ids(). A sequence that would need more entries
  /// than entry_limit() allows, or whose logits are NaN, ends with Finish::failed and a status(); the others go on.
  Result<std::vector<Emitted>> decode(std::int64_t steps = 1);
  /// Ends a sequence and forgets it. Refuses one that is unknown or was dropped.
  Status drop(Sequence sequence);

  /// Whether any sequence is running or waits.
  bool active() const;
  std::int64_t free_slots() const;
  /// The sequences that have ended and were not dropped, in the order of add().
  std::vector<Sequence> ended() const;
  /// Of a sequence that was not dropped: whether it waits for a slot, its ids behind the prompt, why it ended, and how
  /// it failed. The status of one that gave up its slot for want of pages is Code::out_of_memory until it goes on.
  Result<bool> waits(Sequence sequence) const;
  Result<std::vector<std::int32_t>> ids(Sequence sequence) const;
  /// The log-probabilities of its ids behind the prompt from ids()[first] on; none where it does not ask for them.
  Result<std::vector<TokenLogprobs>> logprobs(Sequence sequence, std::int64_t first = 0) const;
  /// What became of its drafts.
  Result<DraftCounts> drafts(Sequence sequence) const;
  Result<Finish> finish(Sequence sequence) const;
  Status status(Sequence sequence) const;
  /// The logits (vocab) that a running sequence's last id was chosen from.
  Result<Tensor> logits(Sequence sequence);

  /// The runner's model and dtype, as they were when the decoder was made.
  const ModelSpec& model() const;
  DType activation() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cf
