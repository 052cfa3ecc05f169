#pragma once
// A runner that works ahead of its caller, as one on a GPU does.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/model/draft.hpp"
#include "cpu_ref/model.hpp"

namespace cf::test {

/// A model on the CPU that runs ahead of a decoder's steps. It reads several prompts in a pass where that is asked for.
class AheadRunner final : public ModelRunner, public ExactRuns {
 public:
  explicit AheadRunner(std::unique_ptr<cpu_ref::Model> model, std::int64_t pass_tokens = 0,
                       std::int64_t preferred_step_tokens = 0)
      : model_(std::move(model)), pass_tokens_(pass_tokens), preferred_step_tokens_(preferred_step_tokens) {}
  const ModelSpec& model() const override { return model_->model(); }
  std::int64_t slots() const override { return model_->slots(); }
  std::int64_t capacity() const override { return model_->capacity(); }
  DType activation() const override { return model_->activation(); }
  std::int64_t length(std::int64_t slot) const override { return model_->length(slot); }
  std::int64_t pass_tokens() const override { return pass_tokens_; }
  std::int64_t preferred_step_tokens() const override { return preferred_step_tokens_; }
  std::int64_t exact_run_tokens() const override { return model_->exact_run_tokens(); }
  bool runs_ahead(std::span<const Run> runs, std::span<const std::int32_t>) const override {
    return !ahead_.empty() && std::ranges::equal(runs, ahead_);
  }
  Status run(std::span<const Run> runs, std::span<const std::int32_t> ids, const StepLogits& logits) override {
    std::vector<std::int64_t>& counts = steps.emplace_back();
    for (const Run& r : runs) counts.push_back(r.count);
    if (!ahead_.empty()) ++(std::ranges::equal(runs, ahead_) ? met : wasted);
    ahead_.clear();
    return model_->run(runs, ids, logits);
  }
  std::vector<Result<std::int32_t>> choose(std::span<const Draw> draws) override {
    if (std::ranges::all_of(draws, [](const Draw& d) { return d.left > 0; }))
      for (const Draw& d : draws) ahead_.push_back({.sequence = d.slot, .first_position = d.position});
    return model_->choose(draws);
  }
  Result<Tensor> logits(std::int64_t slot) override { return model_->logits(slot); }
  void release(std::int64_t slot) override { model_->release(slot); }
  void watch(Visit visit) override { model_->watch(std::move(visit)); }
  void check_between(Check check) override { model_->check_between(std::move(check)); }
  Status fetch(const SiteTensor& tensor, void* to) override { return model_->fetch(tensor, to); }

  std::vector<std::vector<std::int64_t>> steps;  // the counts of each step's runs
  int met = 0, wasted = 0;                       // steps begun ahead that were asked for, and that were not

 private:
  std::unique_ptr<cpu_ref::Model> model_;
  std::int64_t pass_tokens_, preferred_step_tokens_;
  std::vector<Run> ahead_;
};

}  // namespace cf::test
