#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/model/decoder.hpp"
#include "core/model/draft.hpp"
#include "core/model/model.hpp"
#include "cuda/model/executor.hpp"
#include "cuda/runtime/context.hpp"

namespace cf::cuda {

/// The device memory that a model takes.
struct ModelBytes {
  double weights = 0, cache = 0, workspace = 0;  // may be more than 64 bits can count
  double total() const { return weights + cache + workspace; }
};

/// A whole model on a GPU: what cpu_ref::Model is on the CPU. Prompts go through the walk of the model's sites; a step
/// of all slots goes through the layers by an Executor. The same calls give the same bits, with a visitor or without.
/// With the same number of slots and impl a slot's results do not depend on what the other slots hold. What a call reads
/// in one pass are products of as many rows: their bits depend on the class of that number (cuda/step/classes.hpp), those
/// of the head on the class of the number of rows of logits that the pass makes. With `invariant` results depend neither
/// on the number of slots nor on what is read in one pass.
class Model final : public ModelRunner, public ExactRuns {
 public:
  struct Options {
    std::int64_t slots = 1;
    std::int64_t capacity = 2048;  // cache entries of a slot
    std::int64_t chunk = 2048;     // tokens that go through the model at once: of a prompt, or of several
    std::optional<Impl> impl{};    // of steps; auto_impl() where it is empty
    bool in_place = false;         // whether the weights lie on the device and are read there, without a copy
    /// Whether a token's bits are the same whatever else is in its step: all steps have kernels with one order of sums,
    /// which are slower for few tokens (data/bench/README.md has the price). It takes the impls unfused and graph.
    bool invariant = false;
    /// As in cpu_ref::Model::Options. A page has a multiple of 64 entries up to 1024. The impls unfused and graph alone
    /// take streams, and a capacity beyond the model's own window.
    std::int64_t window = 0, sinks = 0;
    std::int64_t pages = 0, page_entries = 64;

    KeyWindow stream() const { return {.keys = window, .sinks = sinks}; }
    PageSizes pool() const { return pages == 0 ? PageSizes{} : PageSizes{pages, page_entries}; }
  };

  /// Of ranks that share a model: with up to so many slots they divide the LM head's rows of a step among them. More
  /// slots' logits take longer to exchange than each rank takes to make them all.
  static constexpr std::int64_t kRankHeadRows = 64;

  /// The fastest impl that takes these options on a GPU of this kind, by its measured bounds. A pure function of its
  /// arguments, which reads the weights' formats and dtypes alone. invariant_arch() has graph.
  static Impl auto_impl(const Arch& arch, const ModelSpec& model, const ModelWeights& weights, const Options& options);
  /// What create() takes on the device for these weights. Their values may be on the host, on a device or nowhere.
  static ModelBytes bytes(const ModelSpec& model, const ModelWeights& weights, const Options& options);
  /// Refuses more memory than is free on the current device (Code::out_of_memory). `name` is the model's in the
  /// message. It reads the weights' formats, dtypes and shapes alone, as bytes() does.
  static Status check_memory(const std::string& name, const ModelSpec& model, const ModelWeights& weights,
                             const Options& options);
  /// Copies the weights to the device and packs what is quantised, or reads them in place as
  /// ResidentWeights::in_place() does; takes memory for cache and activations. `name` is the model's in messages.
  /// Activations, cache and logits have the weights' dtype. Refuses weights that check_model_weights() or in_place()
  /// refuses, sizes below 1, an impl that is not for `invariant`, more memory than is free (Code::out_of_memory), and
  /// what the impl does not take (Code::unimplemented).
  /// With the context of a rank (cuda/comm/communicator.hpp) the model is that rank's part, and every rank's part is
  /// asked the same at the same time: RankedModel does that. It takes the impls unfused and graph.
  /// With `layer_of` each layer's weights are what it makes, one layer at a time: those of `weights` have formats, dtypes
  /// and shapes, and need no values. It is called for every rank, by several threads at once.
  using LayerOf = ResidentWeights::LayerOf;
  static Result<std::unique_ptr<Model>> create(const Context& context, const std::string& name, const ModelSpec& model,
                                               const ModelWeights& weights, const Options& options,
                                               const LayerOf& layer_of = {});
  ~Model() override;

  const ModelSpec& model() const override;
  std::int64_t slots() const override;
  std::int64_t capacity() const override;
  DType activation() const override;
  EntryLimit limit() const override;
  /// The chunk, as far as all slots have room for one, and at least a token of each slot.
  std::int64_t pass_tokens() const override;
  /// A token of each slot and 128 to 255 of prompts, a multiple of 128 in all, as far as a pass has room for them. A lone
  /// slot's prompts are read whole.
  std::int64_t preferred_step_tokens() const override;
  /// With `invariant` the capacity. None without it, nor of streams.
  std::int64_t exact_run_tokens() const override;
  bool runs_ahead(std::span<const Run> runs, std::span<const std::int32_t> ids) const override;
  Impl impl() const;
  /// What create() took.
  const ModelBytes& bytes() const;

  std::int64_t length(std::int64_t slot) const override;

  /// A lone prompt goes through the model a chunk at a time. Several, and tokens that decode beside them, share passes
  /// of up to pass_tokens() tokens. Tokens that decode without a prompt are one step of all slots, which reads each
  /// weight once for up to 8 slots. With more, Hopper's tensor cores or cuBLASLt read a dense 16-bit weight once for
  /// all; linear's own kernels take other weights 16 slots at a time, or 8 where shared memory is short. A call returns
  /// when its work is on the stream; choose(), logits() and rows for the host wait for it. A pass waits until the device
  /// has taken the ids of the pass before. Whoever asks for rows of a step of all slots gets steps of one token from
  /// then on.
  Status run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) override;
  /// The head and the scores are made on the device, for a few hundred rows at a time; one copy brings all answers to
  /// the host. A row's score does not depend on how many others there are. With a visitor, or for more than 64 likely
  /// ids, all rows' logits go to the host.
  Result<std::vector<RowScore>> score(std::span<const Run> runs, std::span<const std::int32_t> ids,
                                      const ScoreRequest& request) override;
  ScoreSizes score_sizes(std::int64_t slots, std::int64_t top) const override;
  std::vector<Result<std::int32_t>> choose(std::span<const Draw> draws) override;
  Result<Tensor> logits(std::int64_t slot) override;
  void release(std::int64_t slot) override;
  std::int64_t page_entries() const override;
  std::int64_t free_pages() const override;
  Status check_room(std::span<const Run> runs) const override;
  Status fork(std::int64_t from, std::int64_t to, std::int64_t n) override;

  /// What the model is asked for from now on comes after all that is on `stream`, another stream of the device.
  /// Code::device_error where an earlier step was given up.
  Status run_after(CUstream_st* stream);
  /// What is put onto `stream` from now on comes after all that the model was asked for.
  Status run_before(CUstream_st* stream);
  /// Copies the logits of slots to the rows of a matrix on the device, without waiting: run_before() says who may read
  /// them.
  Status copy_logits(std::span<const std::int64_t> slots, AnyView<2> logits);

  /// The next steps come after the copies, and the copies after all that the model was asked for. The call waits for
  /// them; it needs no owner then. Code::unimplemented with weights in place, which their owner writes.
  Status swap_weights(const ModelSpec& model, const ModelWeights& weights, std::shared_ptr<const void> owner) override;
  /// Launches are put onto the stream site by site while a visitor watches; `visit` is called when a site's are there. A
  /// step of all slots has no sites of its own: what decodes is then read as prompts are, with the bits of a pass.
  void watch(Visit visit) override;
  /// Asked before each step, and before each pass of prompts, which begins when the device is at work on the pass
  /// before.
  void check_between(Check check) override;
  /// Waits for the launches before it.
  Status fetch(const SiteTensor& tensor, void* to) override;
  /// Pinned memory.
  Result<std::shared_ptr<std::byte[]>> host_memory(std::size_t bytes) override;
  /// Copies the tensor on the device, in the stream's order, and from there to the host beside the launches that follow.
  Status fetch_later(const SiteTensor& tensor, void* to) override;
  Result<Await> fetched() override;

 private:
  struct State;
  explicit Model(std::unique_ptr<State> state);
  static Result<std::unique_ptr<Model>> create_part(const Context& context, const std::string& name,
                                                    const ModelSpec& part, const ModelWeights& weights,
                                                    const Options& options, const LayerOf& layer_of);
  static Result<std::unique_ptr<Model>> create_rank(const Context& context, const std::string& name,
                                                    const ModelSpec& whole, const ModelWeights& weights,
                                                    const Options& options, const LayerOf& layer_of);
  std::unique_ptr<State> state_;
};

}  // namespace cf::cuda
