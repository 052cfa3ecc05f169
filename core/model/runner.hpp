#pragma once
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/model/model.hpp"
#include "core/model/run.hpp"
#include "core/sampling.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"

namespace cf {

/// The logits that a step makes.
struct StepLogits {
  /// Whether the logits of each run's last token become its sequence's own, which choose() and logits() read. Where
  /// they do not, a sequence's own stay those of an earlier step.
  bool own = true;
  /// The last rows[i] tokens of run i have their logits in `to` besides. None for no run where it is empty.
  std::span<const std::int64_t> rows{};
  /// Where these logits go: (sum of rows, vocab) in the runner's dtype, those of the first run first. The memory is the
  /// host's, or the device's where there is a stream.
  AnyView<2> to{};
  /// Whether these rows go through the last norm alone, for a visitor of its site: no logits are made, and `to` has
  /// their shape and is not written. Without own logits.
  bool norm_alone = false;
  /// CUDA's handle of another stream of the runner's device. The step comes after what that stream holds, and before
  /// what it is given later; the call does not wait for the step.
  std::optional<std::uintptr_t> stream{};
};

/// What is asked of a step's log-probabilities, and what a row of logits says: core/model/score.hpp.
struct ScoreRequest;
struct RowScore;
/// How prompts that are scored are best cut for a runner.
struct ScoreSizes {
  std::int64_t piece = 128;  // ids of a prompt that a step reads
  std::int64_t rows = 0;     // rows of logits that a step makes at most, where a piece has no more
};

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
    /// How many tokens the sequence may get after the chosen one in steps that have these draws' sequences alone: so
    /// many a runner may make ahead.
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
  /// The entries that a sequence may have, and what says so: entry_limit(), where the model sees all keys alike.
  virtual EntryLimit limit() const { return entry_limit(model(), capacity()); }
  /// The dtype of the activations, the cache and the logits.
  virtual DType activation() const = 0;
  /// A slot's valid cache entries.
  virtual std::int64_t length(std::int64_t slot) const = 0;

  /// One step: the tokens of all runs, whose ids follow each other in `ids`, get their entries, and the runs the logits
  /// that are asked for. Entries from a run's first position on are replaced. What a run is given does not depend on
  /// the others. Refuses what check_step() refuses.
  ///   A run of one token behind others, with own logits, decodes: all such runs share each read of a weight.
  ///   Every other run is a prompt's: its tokens share each read.
  virtual Status run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) = 0;

  /// run() for a prompt, or a part of one, that makes a slot's own logits.
  Status prefill(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids);
  /// run() for the logits of a slot's last tokens, as many as `logits` has rows. The slot's own stay as they are.
  Status forward(std::int64_t slot, std::int64_t first, std::span<const std::int32_t> ids, AnyView<2> logits);
  /// run() for one token of each of these slots, which makes their own logits. Nothing happens without tokens.
  Status step(std::span<const Token> tokens);

  /// run() for the log-probabilities of ids behind the runs' tokens, by row; the slots' own logits stay as they are.
  /// Refuses what check_step() and check_request() refuse. Here all rows' logits are made on the host, and threads of
  /// the host score them; a backend may do without.
  virtual Result<std::vector<RowScore>> score(std::span<const Run> runs, std::span<const std::int32_t> ids,
                                              const ScoreRequest& request);
  /// The sizes of such calls for prompts in so many slots, of which `top` likely ids are asked for. The CPU reads
  /// longer pieces no faster: a prompt of 512 ids goes through Pythia-160M at 238 ids/s in pieces of 64, at 269 of
  /// 128, 273 of 256, 265 of 512.
  virtual ScoreSizes score_sizes([[maybe_unused]] std::int64_t slots, [[maybe_unused]] std::int64_t top) const {
    return {};
  }

  /// Chooses the next id of each draw's slot. A choice that fails, for example among logits that are NaN, has a Status
  /// of its own.
  virtual std::vector<Result<std::int32_t>> choose(std::span<const Draw> draws) = 0;
  /// A slot's logits, (vocab), in the runner's own dtype.
  virtual Result<Tensor> logits(std::int64_t slot) = 0;
  /// Forgets a slot's entries.
  virtual void release(std::int64_t slot) = 0;

  /// The tokens that a decoder gives a step where its user does not say: those of running sequences first, then pieces
  /// of prompts. 0: prompts are read whole, in steps of their own.
  virtual std::int64_t preferred_step_tokens() const { return 0; }
  /// The tokens that go through the model at once: a decoder reads whole prompts together, up to so many. 0: each is
  /// read in a step of its own.
  virtual std::int64_t pass_tokens() const { return 0; }
  /// Whether the device is at work on exactly this step already: the running sequences' ids need not wait for more.
  virtual bool runs_ahead(std::span<const Run>, std::span<const std::int32_t>) const { return false; }
  /// The entries of a page of the cache, whose pages all slots take from one pool; 0: each slot has entries of its own.
  virtual std::int64_t page_entries() const { return 0; }
  /// Pages of the pool that no slot has; 0 without pages. A step that a device began early has its pages.
  virtual std::int64_t free_pages() const { return 0; }
  /// Code::out_of_memory where too few pages are free for the entries that run() would write.
  virtual Status check_room(std::span<const Run>) const { return {}; }
  /// Gives a slot without entries the first n of another slot. They share pages, and each of the two gets a copy of a
  /// page before it writes to it. Code::unimplemented without pages.
  virtual Status fork(std::int64_t from, std::int64_t to, std::int64_t n);

  /// Replaces the model's weights by others of the same model, such as those of another revision. The new weights take
  /// the memory of the old ones. Slots lose their entries. `owner` keeps the memory of `weights` alive, for backends
  /// that read weights where they lie. Refuses what check_swap() refuses, and with Code::unimplemented weights that
  /// the backend would pack in another layout. A model that refuses keeps its weights. After Code::device_error it has
  /// no weights.
  virtual Status swap_weights(const ModelSpec& model, const ModelWeights& weights, std::shared_ptr<const void> owner);

  /// Calls `visit` for every site of every run() from now on; an empty one ends that. A call
  /// ends with the first Status of `visit` that is not ok. A tensor of several runs has their rows in turn, or those of
  /// one after the other's.
  virtual void watch(Visit visit) = 0;
  /// Calls `check`, on the caller's thread, between the parts of every run() from now on; an
  /// empty one ends that. Parts are blocks of an op on the CPU, which also checks at the end of a call, and a prompt's
  /// passes on a GPU. A call ends with the first Status of `check` that is not ok; the slot's entries are then those
  /// before the call, or of a part of it, and its logits are none.
  virtual void check_between(Check check) = 0;
  /// Copies a tensor that `visit` was called with to the host's memory, before `visit` returns.
  virtual Status fetch(const SiteTensor& tensor, void* to) = 0;

  /// Waits until values are there; any thread may call it.
  using Await = std::function<Status()>;
  /// Memory of the host that a device copies to without waiting. It may outlive the runner.
  virtual Result<std::shared_ptr<std::byte[]>> host_memory(std::size_t bytes);
  /// fetch() to host_memory(), which returns before the values are there: what fetched() returns waits for them.
  virtual Status fetch_later(const SiteTensor& tensor, void* to) { return fetch(tensor, to); }
  virtual Result<Await> fetched() {
    return Await([] { return Status(); });
  }
};

/// Refuses other weights for a model: another spec, a tensor of another shape, dtype or format than `own` has, and a
/// tensor without data. The message names the tensor. `own` needs no values.
Status check_swap(const ModelSpec& own_spec, const ModelWeights& own, const ModelSpec& spec,
                  const ModelWeights& weights);

/// The valid entries of a runner's slots: core/model/slot_lengths.hpp.
class SlotLengths;

/// Refuses a call of run(): what SlotLengths::check() refuses of the runs; other ids than one a token, or ids outside
/// the vocabulary; rows for other than each run, or more than a run has tokens; and other memory than for these rows.
Status check_step(const ModelRunner& runner, const SlotLengths& lengths, std::span<const Run> runs,
                  std::span<const std::int32_t> ids, const StepLogits& logits);

/// A run of a step with its ids and its rows of logits.
struct StepPart {
  Run run;
  std::span<const std::int32_t> ids;  // its tokens
  AnyView<2> rows;                    // where the logits of its last tokens go
  bool decodes;                       // as ModelRunner::run() says; the others are prompts
};
/// The parts of a step that check_step() has taken.
std::vector<StepPart> parts_of(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits);

}  // namespace cf
