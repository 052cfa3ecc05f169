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

namespace cf::cuda {

/// How a step is put onto a stream. unfused and graph give the same bits; so do split, layer and persistent, which keep
/// the residual stream in float32 from layer to layer and write no site's output but the last layer's.
///   unfused     every kernel launched by the host, one after the other
///   graph       a CUDA graph in which an op waits for those alone whose data it needs: with a parallel residual the
///               attention and the MLP's first product run side by side. For few tokens ln_qkv makes q, k and v, and
///               attn_in and qkv are not written; for more, rope_append makes q, and k and v are not written. For
///               one token of a model with RMSNorm and quantised weights, the products' kernels normalise the token,
///               and attn_in, qkv, k, v and mlp_in are not written
///   split       the persistent kernel in two launches a layer, neither of them cooperative. With a parallel residual
///               the first makes what needs the layer's input alone, the second the rest; with a sequential residual
///               the first is the attention, the second the MLP
///   layer       one launch of the persistent kernel a layer
///   persistent  one launch of the persistent kernel for all layers; of a Model, for whole tokens, and for many of them
///               where they are greedy
enum class Impl { unfused, graph, split, layer, persistent };
inline constexpr Impl kImpls[] = {Impl::unfused, Impl::graph, Impl::split, Impl::layer, Impl::persistent};

std::string_view to_string(Impl);
/// The inverse of to_string; empty for any other name.
std::optional<Impl> impl_from_string(std::string_view name);

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
