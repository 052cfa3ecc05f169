#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/serve/model.hpp"

namespace cf::cuda {

/// A model on several GPUs of one host, one rank each: a Model of its part, driven by a thread of its own. Each call is
/// made of all ranks at the same time, and each rank's answer is the same to the bit: the first rank's is returned.
/// What `Model` says holds here too. No visitor may watch, and logits go to the host's memory alone
/// (Code::unimplemented).
/// A rank that fails ends the others' waiting within the communicator's patience; later calls are refused with what
/// failed first.
class RankedModel final : public ModelRunner {
 public:
  /// The ranks run on these GPUs, rank 0 first. Refuses what Communicator::create(), layer_of_rank() and
  /// Model::create() refuse: the message names the rank where it is one's alone.
  static Result<std::unique_ptr<RankedModel>> create(std::span<const int> devices, const std::string& name,
                                                     const ModelSpec& model, const ModelWeights& weights,
                                                     const Model::Options& options,
                                                     const Model::LayerOf& layer_of = {});
  /// What create() takes on each GPU. Refuses what layer_of_rank() refuses.
  static Result<ModelBytes> bytes(std::int64_t ranks, const ModelSpec& model, const ModelWeights& weights,
                                  const Model::Options& options);
  /// Refuses more memory than is free on one of the GPUs (Code::out_of_memory), and what bytes() refuses.
  static Status check_memory(std::span<const int> devices, const std::string& name, const ModelSpec& model,
                             const ModelWeights& weights, const Model::Options& options);
  ~RankedModel() override;

  std::int64_t ranks() const;
  Impl impl() const;
  /// What create() took on each GPU.
  const ModelBytes& bytes() const;

  const ModelSpec& model() const override;  // the whole
  std::int64_t slots() const override;
  std::int64_t capacity() const override;
  EntryLimit limit() const override;
  DType activation() const override;
  std::int64_t length(std::int64_t slot) const override;
  std::int64_t pass_tokens() const override;
  std::int64_t preferred_step_tokens() const override;
  bool runs_ahead(std::span<const Run> runs, std::span<const std::int32_t> ids) const override;
  Status run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) override;
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
  /// run() refuses while a visitor watches.
  void watch(Visit visit) override;
  /// Called on rank 0's thread: the caller waits meanwhile.
  void check_between(Check check) override;
  Status fetch(const SiteTensor& tensor, void* to) override;

 private:
  struct State;
  explicit RankedModel(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

}  // namespace cf::cuda
