#pragma once
#include <array>
#include <optional>
#include <span>

#include "core/model/workload.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"
#include "cuda/model/executor.hpp"
#include "cuda/model/kv_cache.hpp"
#include "cuda/model/resident_weights.hpp"
#include "cuda/model/workspace.hpp"

namespace cf::cuda {

/// Weights, a cache, a workspace and every executor for steps of one batch and q_len: for benchmarks and tests, which
/// step layers in several ways on one stream. The parts are public, so that each may also be used by itself.
class Session {
 public:
  /// Takes the memory of all parts. `load` gives batch, q_len and the cache's capacity; kv_len starts at q_len. The
  /// RoPE table has a row for each entry of the cache. Refuses what the parts refuse, and a q_len beyond the capacity.
  static Result<Session> create(const Context& context, const ModelSpec& model, LayerRange layers, const Workload& load,
                                DType activation, DType weights_dtype, const LayerWeights& like = {});

  ResidentWeights weights;
  KvCache cache;
  Workspace workspace;

  /// Each sequence's kv_len after the next step.
  Status set_kv_len(std::span<const std::int32_t> kv_len) { return cache.set_kv_len(kv_len, q_len_); }
  /// Adds q_len to every kv_len on the device.
  Status extend() { return cache.extend(context_.stream(), q_len_); }

  /// Prepares a step, and puts one onto the context's stream: through all layers, or a range of them. `input` takes the
  /// place of what the range's first layer reads.
  Status prepare(Impl impl, std::optional<LayerRange> layers = {}, const ConstAnyView<2>& input = {}) {
    return executor(impl).prepare(weights, cache, workspace, step_of(layers, input));
  }
  Status step(Impl impl, std::optional<LayerRange> layers = {}, const ConstAnyView<2>& input = {}) {
    return executor(impl).step(weights, cache, workspace, step_of(layers, input));
  }
  /// Waits for the context's stream; reports a step that was given up.
  Status synchronize();

  const ModelSpec& model() const { return weights.model(); }
  LayerRange layers() const { return weights.layers(); }
  std::int64_t q_len() const { return q_len_; }
  const Context& context() const { return context_; }
  /// The tensors of a layer's step on the device, for callers that walk its sites.
  LayerTensors tensors(std::int64_t layer) const { return workspace.tensors(cache, layers().first, layer, q_len_); }
  std::size_t device_bytes() const { return weights.device_bytes() + cache.device_bytes() + workspace.device_bytes(); }

 private:
  Session(const Context& context, std::int64_t q_len, ResidentWeights w, KvCache c, Workspace s);
  Executor& executor(Impl impl) { return executors_[std::size_t(impl)]; }
  Step step_of(std::optional<LayerRange> layers, const ConstAnyView<2>& input = {}) const {
    return {.q_len = q_len_, .layers = layers, .stream = context_.stream(), .input = input};
  }

  Context context_;
  std::int64_t q_len_;
  std::array<Executor, std::size(kImpls)> executors_;  // by Impl
};

}  // namespace cf::cuda
