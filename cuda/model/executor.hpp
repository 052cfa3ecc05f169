#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "core/status.hpp"
#include "cuda/model/kv_cache.hpp"
#include "cuda/model/resident_weights.hpp"
#include "cuda/model/workspace.hpp"
#include "cuda/runtime/context.hpp"
#include "cuda/step/impl.hpp"

namespace cf::cuda {

/// What one step runs, and where.
struct Step {
  std::int64_t q_len = 1;                 // tokens appended to each sequence; the cache's q_len()
  std::optional<LayerRange> layers = {};  // all that are resident where it is empty
  CUstream_st* stream = nullptr;          // may differ from step to step; ordering the streams is the caller's
  ConstAnyView<2> input = {};             // (tokens, hidden_size) on the device, in place of the workspace's own
};

/// A way of stepping layers. It holds no weights, no cache and no activations: it is given them at each step, and any
/// executor may take over from another between two steps. What a step needs is checked and prepared when the same
/// objects, layers and q_len first meet; the steps that follow launch and check nothing else. A step that is to be
/// captured into a graph of the caller's is prepared before. Not shared between threads.
class Executor {
 public:
  /// Works on the context's device, with its launch plans. The context is copied; its stream is not used.
  Executor(const Context& context, Impl impl);
  Executor(Executor&&) noexcept;
  Executor& operator=(Executor&&) noexcept;
  ~Executor();

  Impl impl() const;
  /// Checks a step and prepares it: launches with their arguments, a captured graph, or the persistent kernel with its
  /// scratch memory. Waits for the device. Refuses layers that are not in both the weights and the cache or are not
  /// loaded, more tokens than the workspace has room for, and dtypes without kernels (Code::unimplemented).
  /// split, layer and persistent take one new token a sequence and up to 8 sequences. Each Linear is dense, of the
  /// activations' 16-bit dtype, or GPTQ in groups of a multiple of 32 inputs. Errors name the model's layer.
  Status prepare(const ResidentWeights& weights, const KvCache& cache, const Workspace& workspace, const Step& step);
  /// Puts the step onto its stream. A step that is not prepared is prepared first; a prepared one waits for nothing.
  /// The layers append q_len keys and values to each sequence and read kv_len from the cache.
  /// Refuses a q_len that is not the cache's. Code::device_error where an earlier step was given up, as synchronize()
  /// reports it.
  Status step(const ResidentWeights& weights, const KvCache& cache, const Workspace& workspace, const Step& step);
  /// Waits for the stream. Code::device_error, once, where an earlier step was given up: a block of the persistent
  /// kernel has waited too long for another. The message names the model's layer and the site that it waited for.
  Status synchronize(CUstream_st* stream);
  /// The same without waiting, for a caller that has waited for the step itself.
  Status take_report();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cf::cuda
