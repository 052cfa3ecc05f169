#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/contract.hpp"
#include "core/model/decoder.hpp"
#include "core/model/draft.hpp"
#include "core/model/model.hpp"
#include "core/model/slot_lengths.hpp"
#include "core/model/slot_pages.hpp"
#include "core/ranks/group.hpp"

namespace cf::cpu_ref {

/// The memory that a model takes beside its weights.
struct ModelBytes {
  double cache = 0, workspace = 0;  // large options ask for more than 64 bits count
};

/// A whole model on the CPU: in float64 the oracle, in float32 the fast backend. Weights are read as they are stored,
/// where they lie. With a prompt's tokens many rows share a product (Eigen); a step of few slots reads each weight once
/// for all of them. The same calls give the same bits on any number of threads.
/// In a group of processes a failure in one ends the calls of all. A group refuses a visitor (Code::unimplemented):
/// each process holds only its part of a site's tensor.
class Model final : public ModelRunner, public ExactRuns {
 public:
  struct Options {
    std::int64_t slots = 1;
    std::int64_t capacity = 2048;   // cache entries of a slot
    std::int64_t chunk = 512;       // tokens that a prefill takes through the model at once
    DType activation = DType::f32;  // or f64
    /// Of float32: whether a token's bits are the same whatever else is in its step, which they are not where a product
    /// of more than 8 tokens has another order of sums. A step's runs then go through the model together.
    bool invariant = false;
    /// With a window each slot is a stream without a bound. A token sees the newest `window` tokens, its own among
    /// them, and the first `sinks` of its slot; positions are those inside the cache (StreamingLLM, Xiao et al. 2023,
    /// arXiv:2309.17453, whose recent size is window - 1). The capacity is then what such a cache needs.
    std::int64_t window = 0, sinks = 0;
    /// With pages the slots' entries lie in a pool of so many pages of page_entries entries: a slot takes pages as it
    /// needs them, and shares them with slots that begin alike. Without, each slot has memory for `capacity` entries.
    std::int64_t pages = 0, page_entries = 64;
    /// With a group the model is shared by its processes: each holds a part of every layer, all make the same calls in
    /// the same order, and each call's answers have the same bits in all. Each has the embedding and the head whole.
    std::shared_ptr<RankGroup> group{};

    KeyWindow stream() const { return {.keys = window, .sinks = sinks}; }
    PageSizes pool() const { return pages == 0 ? PageSizes{} : PageSizes{pages, page_entries}; }
  };

  /// Takes memory for cache and activations; `owner` keeps the weights' memory. Refuses weights that
  /// check_model_weights() refuses, sizes below 1, another activation dtype, `invariant` with float64, a stream
  /// of a model without RoPE or beyond its own window, a capacity beyond the pages' entries, streams in pages, and what
  /// check_memory() refuses. Of a group it refuses what layer_of_rank() refuses, and a process that has another model,
  /// other options or other vector instructions than rank 0: on all with the same line.
  static Result<std::unique_ptr<Model>> create(const ModelSpec& model, ModelWeights weights,
                                               std::shared_ptr<const void> owner, const Options& options);
  /// What create() takes for these options.
  static ModelBytes bytes(const ModelSpec& model, const Options& options);
  /// Refuses options for which create() would take more memory than is free; `name` is the model's in the message.
  static Status check_memory(const std::string& name, const ModelSpec& model, const Options& options);

  const ModelSpec& model() const override { return whole_; }
  std::int64_t slots() const override { return options_.slots; }
  std::int64_t capacity() const override { return options_.capacity; }
  DType activation() const override { return options_.activation; }
  EntryLimit limit() const override { return limit_of(spec_, options_); }

  std::int64_t length(std::int64_t slot) const override { return lengths_[slot]; }

  /// A prompt's run goes through the model by itself, `chunk` tokens at a time; those that decode go through it
  /// together. A slot without a run is idle then: its cache keeps its bits, and its row of what a site makes has no
  /// meaning.
  /// With `invariant` all runs go through it together, `chunk` tokens at a time, and no row is idle.
  /// A stream can go back to a token while its cache has all that the token saw: Code::invalid_argument further back.
  Status run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) override;
  /// The rows of logits are scored by the threads that made them.
  Result<std::vector<RowScore>> score(std::span<const Run> runs, std::span<const std::int32_t> ids,
                                      const ScoreRequest& request) override;
  std::vector<Result<std::int32_t>> choose(std::span<const Draw> draws) override;
  Result<Tensor> logits(std::int64_t slot) override;
  void release(std::int64_t slot) override;
  std::int64_t page_entries() const override { return pages_ ? options_.page_entries : 0; }
  std::int64_t free_pages() const override { return pages_.free_pages(); }
  Status check_room(std::span<const Run> runs) const override;
  Status fork(std::int64_t from, std::int64_t to, std::int64_t n) override;
  /// With `invariant` as many tokens as go through the model at once; else whole prompts, as a row's bits depend on
  /// how its prompt is divided.
  std::int64_t preferred_step_tokens() const override { return options_.invariant ? most_tokens() : 0; }
  /// With `invariant` the capacity, and else 8, whose products are then those of a step of up to 8 slots; of streams a
  /// chunk at most. None of float64, of a group, and without `invariant` beside more slots.
  std::int64_t exact_run_tokens() const override;
  /// The new weights are read where they lie, and `owner` keeps their memory; those before are given back. In a group
  /// all processes swap, or none.
  Status swap_weights(const ModelSpec& model, const ModelWeights& weights, std::shared_ptr<const void> owner) override;
  void watch(Visit visit) override { visit_ = std::move(visit); }
  void check_between(Check check) override {
    check_ = std::move(check);
    if (options_.group) options_.group->check_between(check_);
  }
  Status fetch(const SiteTensor& tensor, void* to) override;

  /// Takes the first rows of another RoPE table, (rows, rotary_dim / 2) each, in place of the library's own. Refuses
  /// other sizes, more rows than the capacity, and a table for streams, whose positions have no bound.
  Status set_rope_table(View<const float, 2> cos, View<const float, 2> sin);
  /// With an object, every site adds its condition to it, as ops::DecodeLayer::budget() takes it; null ends that. The
  /// conditions take several times longer than the model.
  void measure(Condition* total) { condition_ = total; }

 private:
  Model(const ModelSpec& whole, const ModelSpec& part, ModelWeights weights, std::shared_ptr<const void> owner,
        const Options& options);
  static EntryLimit limit_of(const ModelSpec& model, const Options& options);
  /// Calls f(member, dtype, shape) for each tensor that a model takes memory for. `member` is a Tensor or a list of
  /// them.
  template <class F>
  static void for_each_tensor(const ModelSpec& model, const Options& options, F&& f);
  /// A part of a run that goes through the model at once.
  struct Piece {
    Run run{};
    std::span<const std::int32_t> ids{};
    AnyView<2> rows{};     // where the logits of its last tokens go
    bool own = false;      // whether its last token's logits become its slot's own
    bool is_idle = false;  // a row in its place, for a slot without a run
  };
  /// The tokens that go through the model at once, at most.
  std::int64_t most_tokens() const;
  /// Divides a step into what goes through the model together.
  std::vector<std::vector<Piece>> passes_of(std::span<const StepPart> parts, bool own) const;
  /// create() for one process, whose group does not hear of what is refused.
  static Result<std::unique_ptr<Model>> create_alone(const ModelSpec& model, ModelWeights weights,
                                                     std::shared_ptr<const void> owner, const Options& options);
  /// What all processes of the group must have alike.
  static std::string identity(const ModelSpec& whole, const ModelWeights& weights, const Options& options);
  /// The sum over the ranks, in the place of this rank's part.
  Status sum_over_ranks(const AnyView<2>& part);
  /// With norm_alone the head makes no logits.
  Status pass(std::span<const Piece> pieces, bool norm_alone, const Visit& visit);
  /// Makes room in the pages for what these runs write. Code::out_of_memory, and no change, where too few are free.
  Status reserve(std::span<const Run> runs);
  /// Goes through a slot's last step again, and names the first site that makes a NaN.
  std::string first_nan(std::int64_t slot);

  ModelSpec whole_;  // what spec_ is a part of, in a group
  ModelSpec spec_;
  Options options_;
  Visit visit_;
  Check check_;
  Condition* condition_ = nullptr;
  ModelWeights weights_;
  std::shared_ptr<const void> owner_;
  SlotLengths lengths_;
  SlotPages pages_;
  std::vector<std::int32_t> last_ids_;       // by slot: the token of its last entry
  std::vector<Tensor> k_caches_, v_caches_;  // by layer: (slots, kv_heads, capacity, head_dim), or of pages
  std::vector<Tensor> activations_;          // the layer's outputs, in the order of for_each_activation
  std::vector<Tensor> hidden_;               // the embedding and the layers' outputs, in turn
  Tensor cos_, sin_;  // (capacity, rotary_dim / 2); of streams a pass's own rows: its tokens', then those for the sinks
  Tensor final_norm_, logits_, step_logits_;
  std::vector<std::byte> parts_;  // of all ranks, in an exchange
};

}  // namespace cf::cpu_ref
