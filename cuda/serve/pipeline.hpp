#pragma once
// The speculation of the host: which steps a GPU runs before they are asked for, and where the logits of each slot lie.
// Without CUDA: a PipelineDevice does what is to be done, a Model on a GPU or a test's own.
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "core/model/runner.hpp"
#include "core/model/slot_lengths.hpp"
#include "core/status.hpp"

namespace cf::cuda {

/// The memory that holds logits: that of prompts, or one of the two that steps write in turn, so that a step may run
/// while the logits before it are still read.
enum class LogitsBuffer { prompts, even_steps, odd_steps };
inline constexpr int kLogitsBuffers = 3;

/// What a step begins with: its tokens are on the device; they are those chosen last; or they are chosen first, among
/// the logits of the step before.
enum class Start { placed, follows, chooses };
inline constexpr int kStarts = 3;

/// Where a launch of many tokens ends a slot's sequence: after `tokens` tokens of the launch, or with a stop id.
struct SlotEnd {
  std::int64_t tokens = 0;
  std::span<const std::int32_t> stop_ids{};
};

/// What a pipeline asks of a device: to put work onto its stream, in the order of the calls. Calls that wait say so.
class PipelineDevice {
 public:
  using Token = ModelRunner::Token;
  using Draw = ModelRunner::Draw;

  virtual ~PipelineDevice() = default;
  /// Makes these tokens those of the next step, in which all other slots are idle.
  virtual Status place(std::span<const Token> tokens) = 0;
  /// Makes room for a step of these tokens, which is not asked for yet. False where it must wait until it is: another
  /// slot needs that room, or would have a token in the step, too.
  virtual Result<bool> make_room(std::span<const Token>) { return true; }
  /// Makes room for the entries of a launch, a run for each slot that appends any. False where there is too little.
  virtual Result<bool> make_room_for_launch(std::span<const Run>) { return true; }
  /// Runs a step, whose logits go to `to`.
  virtual Status run(Start start, LogitsBuffer to) = 0;
  /// Copies a slot's logits to the buffer of prompts. `length` is the number of the slot's entries.
  virtual Status keep(std::int64_t slot, LogitsBuffer from, std::int64_t length) = 0;
  /// Brings how ids are chosen among a buffer's logits to the device.
  virtual Status prepare_choice(LogitsBuffer from, std::span<const Draw> draws) = 0;
  /// Chooses an id for each draw that was prepared.
  virtual Status choose(LogitsBuffer from) = 0;
  /// Waits for the ids of these draws; writes one each to `ids`.
  virtual Status await(std::span<const Draw> draws, std::span<std::int32_t> ids) = 0;
  /// Runs a launch of `count` greedy tokens of each slot, whose logits go to `to`. The first one's id is the one chosen
  /// last. A slot's sequence ends where its SlotEnd says. Returns the number of the launch's first token; numbers are
  /// consecutive over all launches.
  virtual Result<unsigned> launch(std::int64_t count, LogitsBuffer to, std::span<const SlotEnd> ends) = 0;
  /// Waits until token `number` of a launch has led to an id for each draw; writes them to `ids`.
  virtual Status await_launched(unsigned number, std::span<const Draw> draws, std::span<std::int32_t> ids) = 0;
  /// Asks the launch to end before token `number`. It may run more tokens all the same.
  virtual void end_before(unsigned number) = 0;
};

/// What of launches of many tokens a device has.
struct LaunchLimits {
  bool launches = false;          // whether it has any
  std::size_t most_stop_ids = 0;  // of a slot
};

/// The states of a pipeline.
///   idle         no step can follow what is on the stream
///   placed       the device has the tokens of the step that was asked for last, and the next one may follow it
///   ahead(1)     one step is on the stream that was not asked for yet
///   launched(n)  a launch is on the stream that has n tokens more than were asked for
enum class Phase { idle, placed, ahead, launched };
inline constexpr int kPhases = 4;
std::string_view to_string(Phase);

/// What happens to a pipeline.
///   give_up       what runs ahead is not wanted: by release() of a slot that has a token in it, by run_after(), and
///                 before each other event that it does not fit
///   begin_prompt  a slot gets entries, those of its prompt
///   begin_pass    several slots get entries in one pass: prompts, pieces of prompts, and tokens of running sequences
///   end_prompt    a slot has the logits of its prompt, or of its last token in a pass
///   place         a step that was not foreseen, and the step that makes lost logits again
///   take          the step that is ahead is asked for
///   choose        ids are chosen, and steps put onto the stream that continue them
///   read          ids are read that a launch has chosen
enum class PipelineEvent { give_up, begin_prompt, begin_pass, end_prompt, place, take, choose, read };
inline constexpr int kPipelineEvents = 8;
std::string_view to_string(PipelineEvent);

/// A set of phases.
class Phases {
 public:
  template <class... P>
  explicit constexpr Phases(P... phases) : bits_(((1u << unsigned(phases)) | ... | 0u)) {}
  constexpr bool has(Phase p) const { return (bits_ >> unsigned(p) & 1u) != 0; }
  constexpr bool empty() const { return bits_ == 0; }

 private:
  unsigned bits_;
};

/// The one table: the phases that may follow an event, by the event and the phase before it. Without any the event is
/// refused.
inline constexpr std::array<std::array<Phases, kPhases>, kPipelineEvents> kTransitions = [] {
  constexpr Phase idle = Phase::idle, placed = Phase::placed, ahead = Phase::ahead, launched = Phase::launched;
  using P = Phases;
  return std::array<std::array<Phases, kPhases>, kPipelineEvents>{{
      // from              idle             placed                      ahead      launched
      /* give_up      */ {{P(idle), P(placed), P(idle), P(idle)}},
      /* begin_prompt */ {{P(idle), P(idle), P(), P()}},
      /* begin_pass   */ {{P(idle), P(idle), P(), P()}},
      /* end_prompt   */ {{P(idle, placed), P(), P(), P()}},
      /* place        */ {{P(placed), P(placed), P(), P()}},
      /* take         */ {{P(), P(), P(placed), P(placed, launched)}},
      /* choose       */ {{P(idle), P(placed, ahead, launched), P(), P()}},
      /* read         */ {{P(idle), P(placed, launched), P(), P(launched)}},
  }};
}();

/// The owner of the logits buffers: which one holds the logits of a slot's last entry.
class LogitsLeases {
 public:
  explicit LogitsLeases(std::int64_t slots) : leases_(std::size_t(slots)) {}

  /// The buffer that the last step wrote, and the one that the next step writes.
  LogitsBuffer last_step() const { return last_step_; }
  LogitsBuffer next_step() const {
    return last_step_ == LogitsBuffer::even_steps ? LogitsBuffer::odd_steps : LogitsBuffer::even_steps;
  }
  /// The buffer of a slot's logits; where they are lost, the one that they were in.
  LogitsBuffer of(std::int64_t slot) const { return leases_[std::size_t(slot)].buffer; }
  /// The token of a launch that made the slot's last entry. The launch has gone on, and the logits are lost.
  std::optional<unsigned> lost_to(std::int64_t slot) const { return leases_[std::size_t(slot)].token; }

  /// A step writes this buffer.
  void write(LogitsBuffer to) { last_step_ = to; }
  /// Records where a slot's logits are. With `token`, that launch has gone on and overwritten them.
  void lease(std::int64_t slot, LogitsBuffer buffer, std::optional<unsigned> token = {}) {
    leases_[std::size_t(slot)] = {buffer, token};
  }
  /// A slot gets other entries: what a launch made of it is no more.
  void forget(std::int64_t slot) { leases_[std::size_t(slot)].token.reset(); }

 private:
  struct Lease {
    LogitsBuffer buffer = LogitsBuffer::prompts;
    std::optional<unsigned> token{};
  };
  LogitsBuffer last_step_ = LogitsBuffer::odd_steps;
  std::vector<Lease> leases_;  // by slot
};

/// Puts the steps that a runner is asked for onto a device's stream, and further ones that it may be asked for next.
/// What is observed, ids and logits, is that of a runner which does only what it is asked for. Refusals are those of
/// SlotLengths, and events that kTransitions does not have.
class Pipeline {
 public:
  using Token = ModelRunner::Token;
  using Draw = ModelRunner::Draw;

  /// `device` must outlive the pipeline.
  Pipeline(PipelineDevice& device, std::int64_t slots, const ModelSpec& model, std::int64_t capacity)
      : Pipeline(device, slots, capacity, entry_limit(model, capacity)) {}
  /// The same, where a slot's limit is another.
  Pipeline(PipelineDevice& device, std::int64_t slots, std::int64_t capacity, const EntryLimit& limit);
  /// Of a device that is known later than the pipeline.
  void set_launches(const LaunchLimits& limits) { limits_ = limits; }

  const SlotLengths& lengths() const { return lengths_; }
  /// The token of a slot's last entry, and the id that was chosen last.
  std::int32_t last_id(std::int64_t slot) const { return slots_[std::size_t(slot)].last_id; }
  std::int32_t chosen(std::int64_t slot) const { return slots_[std::size_t(slot)].chosen; }
  /// Where a slot's logits lie once restore() was called.
  LogitsBuffer buffer_of(std::int64_t slot) const { return leases_.of(slot); }
  Phase phase() const { return Phase(state_.index()); }
  /// Whether these are the tokens of the step that is on the stream already.
  bool foresees(std::span<const Token> tokens) const;

  /// A prompt: begin_prompt(), extend() for each of its parts, and end_prompt() where its logits become the slot's own,
  /// in the buffer of prompts.
  Status begin_prompt(std::int64_t slot, std::int64_t first, std::int64_t tokens);
  Status extend(std::int64_t slot, std::int64_t length, std::int32_t last_id);
  Status end_prompt(std::int64_t slot);
  /// A pass of these runs, in the place of begin_prompt() for each of them. A running sequence's token is a run of one.
  Status begin_pass(std::span<const Run> runs);
  /// A step of these tokens, one a slot at most.
  Status step(std::span<const Token> tokens);
  /// Chooses an id for each draw, which chosen() has from then on.
  Status choose(std::span<const Draw> draws);
  /// The caller reads logits of these slots, which are restored. Until the next prompt each launch has one token.
  Status read_logits(std::span<const std::int64_t> slots);
  /// Where a slot's logits are lost, runs the last token of every such slot again, which gives the same bits.
  Status restore(std::int64_t slot);
  /// Forgets a slot's entries.
  void release(std::int64_t slot);
  /// Gives a slot without entries n that it shares with another one. It has no logits until its next token.
  void adopt(std::int64_t slot, std::int64_t n);
  /// Forgets a slot's entries from n on, where it has more.
  void cut(std::int64_t slot, std::int64_t n);
  /// Gives up the work that runs ahead: it did not wait for other work that comes first, or its memory is needed.
  void give_up();

 private:
  struct Idle {};
  struct Placed {};
  struct Ahead {
    std::vector<Token> next;  // the tokens of the step; their ids are those chosen last
  };
  struct Launched {
    unsigned token, end;      // the numbers of the token that `next` is, and one past the launch's last
    std::vector<Token> next;  // none until the ids of the last step are known
  };
  using State = std::variant<Idle, Placed, Ahead, Launched>;
  struct End {
    std::int64_t position;  // of the sequence's last token, if no stop id comes before
    std::vector<std::int32_t> stop_ids;
    bool operator==(const End&) const = default;
  };
  struct Slot {
    std::int32_t last_id = 0;
    std::int32_t chosen = -1;
    std::optional<End> told_end{};  // the end that the launches so far were given
  };

  /// Refuses what kTransitions does not have. stay() is for an event that leaves the state as it is.
  Status check(PipelineEvent event, Phase next) const;
  Status enter(PipelineEvent event, State next);
  Status stay(PipelineEvent event) const { return check(event, phase()); }
  /// The tokens of the step that is on the stream already; null where there is none.
  const std::vector<Token>* foreseen() const;
  std::vector<Token>* foreseen();
  bool has_logits(std::int64_t slot) const { return !leases_.lost_to(slot) || lengths_[slot] == 0; }
  /// Keeps the logits of slots that a step leaves out, where the step would overwrite them.
  Status keep_logits(std::span<const Token> tokens, LogitsBuffer overwritten);
  Status keep(std::int64_t slot);
  Status place(std::span<const Token> tokens);
  /// Whether the next step has a token of each of these draws, and of no other slot.
  bool knows_next(std::span<const Draw> draws) const;
  /// Whether a launch chooses what these draws ask for.
  bool launch_chooses(std::span<const Draw> draws) const;
  /// Puts the next step of these draws onto the stream.
  Status run_next(std::span<const Draw> draws, Start start);
  /// Makes room for a launch of up to `count` tokens behind `in_flight` ones, of the slots that `ends` gives any. Returns
  /// the tokens that there is room for, which may be 0.
  Result<std::int64_t> room_for_launch(std::span<const Draw> draws, std::span<const SlotEnd> ends,
                                       std::int64_t in_flight, std::int64_t count);
  /// Puts a launch onto the stream that continues the ids of these draws, where the one before is about to end.
  Status launch_next(PipelineEvent event, std::span<const Draw> draws);
  Status choose_now(std::span<const Draw> draws);
  Status read_launched(std::span<const Draw> draws);
  End end_of(const Draw& draw) const;
  /// Whether a draw has chosen one of the stop ids that end its sequence inside a launch.
  bool has_stopped(const Draw& draw) const;
  Slot& slot_of(const Draw& draw) { return slots_[std::size_t(draw.slot)]; }

  PipelineDevice& device_;
  LaunchLimits limits_;
  SlotLengths lengths_;
  LogitsLeases leases_;
  std::vector<Slot> slots_;
  State state_ = Idle{};
  /// The number of the step that was asked for last, where a launch has made it.
  std::optional<unsigned> last_token_;
  bool logits_read_ = false;  // since the last prompt
};

}  // namespace cf::cuda
