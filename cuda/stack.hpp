#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "core/layer.hpp"
#include "core/model_config.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"
#include "cuda/cuda.hpp"

namespace cf::cuda {

/// How a step is put onto the stream. unfused and graph give the same bits; so do split, fused and stack, which keep the
/// residual stream in float32 from layer to layer and of the sites' outputs write a launch's last layer's output and no
/// other.
///   unfused  every kernel launched by the host, one after the other, its arguments checked each time
///   graph    a CUDA graph, captured when a range of layers is first stepped and replayed from then on, in which an op
///            waits for those alone whose data it needs: with a parallel residual the attention and the MLP's first
///            product run side by side. Of few tokens ln_qkv makes q, k and v, and attn_in and qkv stay as they are
///   split    the persistent kernel twice a layer, regular launches without a wait for the whole grid: what needs the
///            layer's input alone, then the rest; with a sequential residual attention, then the MLP
///   fused    one persistent kernel a layer
///   stack    one persistent kernel for all layers
enum class Impl { unfused, graph, split, fused, stack };
inline constexpr Impl kImpls[] = {Impl::unfused, Impl::graph, Impl::split, Impl::fused, Impl::stack};

std::string_view to_string(Impl);
/// The inverse of to_string; empty for a name that is none of ours.
std::optional<Impl> impl_from_string(std::string_view name);

/// Layers [0, L) of a model resident on a device, stepped together: weights, every layer's KV cache and one set of
/// activations in a single allocation, quantised weights and the persistent kernel's scratch, less than 4 MB, aside. A
/// step runs q_len new tokens of each of batch sequences through a range of layers. Layer 0 reads the hidden state of
/// set_hidden(), which no step changes; every other layer reads the output of the one before it. What else the sites make
/// lies in buffers that all layers share: they hold the last layer's.
///
/// Calls put their work onto the context's stream. Those that take host data wait until it has arrived; a step and
/// advance() wait for nothing and allocate nothing, but for the first graph step of a range. Lengths and positions are
/// read on the device, so that one graph serves them all.
///
/// Not shared between threads. Any number of stacks may exist side by side, each with a thread of its own; those of one
/// stream run in the order of the calls.
class Stack {
 public:
  /// `load` gives batch, q_len and the cache's capacity; plans are made for a full cache. Weights are of config.dtype,
  /// but those of the Linears that are GptqWeight in `like`, of which nothing else is looked at: they are so in every
  /// layer, and lie, repacked as GptqTiles, in memory that load_layer() takes. The RoPE table is the library's own,
  /// kv_len starts at q_len. The context is copied: changes to it afterwards do not reach the stack. Refuses a config
  /// that describes no layer, layers outside 1 .. num_hidden_layers, a q_len beyond the capacity, and dtypes that the
  /// ops have no kernels for (Code::unimplemented). Code::out_of_memory says how much was needed and how much is free;
  /// nothing is kept then.
  static Result<Stack> create(const Context& context, const ModelConfig& config, std::int64_t layers,
                              const Workload& load, DType activation, const LayerWeights& like = {});
  Stack(Stack&&) noexcept;
  Stack& operator=(Stack&&) noexcept;
  /// Waits for the stream: the memory may be in use.
  ~Stack();

  /// Copies a layer's weights to the device. Refuses shapes and dtypes that are not the config's, a dense weight where
  /// there is to be a quantised one and the reverse, and what repack_gptq() refuses.
  Status load_layer(std::int64_t layer, const LayerWeights& host);
  /// The hidden state that layer 0 reads: (tokens, hidden), of the activation's dtype.
  Status set_hidden(const Tensor& hidden);
  /// A layer's cache: (batch, heads, capacity, head_dim) each, of the activation's dtype.
  Status set_cache(std::int64_t layer, const Tensor& k_cache, const Tensor& v_cache);
  /// Each sequence's kv_len after the next step's append, q_len to capacity; its last token's position is kv_len - 1.
  Status set_kv_len(std::span<const std::int32_t> kv_len);
  /// Adds q_len to every kv_len and position on the device. Nothing is looked at: beyond the capacity a step's results
  /// are NaN and its cache stays as it is. May be captured into a graph.
  Status advance();

  /// Runs all layers, or layers [first, last). Refuses a range that is empty or beyond the stack and layers that
  /// load_layer() has not filled. split, fused and stack take one new token a sequence, up to 8 sequences, and dense 16-bit
  /// weights of the activations' dtype (Code::unimplemented otherwise); Code::device_error, at the next such step, when
  /// the device could not run all blocks of a kernel at once.
  Status step(Impl impl);
  Status step(Impl impl, std::int64_t first, std::int64_t last);

  const ModelConfig& config() const;
  std::int64_t layers() const;
  /// A layer's step on the device, 0 <= layer < layers(); for whoever walks its sites.
  LayerTensors tensors(std::int64_t layer) const;
  LayerWeights weights(std::int64_t layer) const;
  /// Of all allocations.
  std::size_t device_bytes() const;

 private:
  struct State;
  explicit Stack(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

}  // namespace cf::cuda
