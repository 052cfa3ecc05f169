#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/model/layer.hpp"
#include "core/model/shape.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"
#include "cuda/model/kv_cache.hpp"
#include "cuda/runtime/context.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// The activations of a step on a device: the hidden state that goes in, what the sites hand each other, the RoPE
/// table, and the scratch memory of products of many tokens. All layers share it, so that after a step it holds what
/// the last layer's sites made. Steps that run at the same time need a workspace each.
class Workspace {
 public:
  /// Memory for steps of up to `tokens` tokens (batch * q_len), and a table of `table_rows` positions. Products of many
  /// tokens with quantised weights are made in more scratch memory, which `quantised` asks for; without it other
  /// kernels take them. With a context of invariant_arch() there is scratch memory for any number of tokens.
  /// For a stream the table has rows of a step's own instead, which add_rope_rows() makes.
  /// Refuses a model that describes no layer, sizes below 1, and a dtype other than float16, bfloat16 and float32.
  static Result<Workspace> create(const Context& context, const ModelSpec& model, DType activation, std::int64_t tokens,
                                  std::int64_t table_rows, bool quantised = false, const KeyWindow& stream = {});
  /// The bytes that create() takes. May be called with sizes that create() refuses.
  static double bytes(const ModelSpec& model, DType activation, std::int64_t tokens, std::int64_t table_rows,
                      bool quantised, bool invariant = false, const KeyWindow& stream = {});
  Workspace(Workspace&&) noexcept;
  Workspace& operator=(Workspace&&) noexcept;
  /// Waits for the device: the memory may be in use.
  ~Workspace();

  /// Copies the hidden state that the first layer reads, (tokens, hidden_size) of a step, and waits until it is there.
  Status set_hidden(const Tensor& hidden);
  /// The same memory, (tokens, hidden_size), for callers that write it on the device.
  AnyView<2> hidden(std::int64_t tokens) const;

  std::int64_t max_tokens() const;
  DType activation() const;
  /// The tensors of a layer's step of q_len tokens a sequence. The layer `first` reads hidden(), every other the output
  /// of the layer before it. Outputs lie in two buffers in turn.
  LayerTensors tensors(const KvCache& cache, std::int64_t first, std::int64_t layer, std::int64_t q_len) const;
  /// Of streams: adds the launch that makes the table's rows for a step of these positions, which comes before the
  /// layers. The positions that tensors() has are rows of that table: 0, 1, 2 ... for every step.
  Status add_rope_rows(View<const std::int32_t, 1> positions, LaunchList& launches) const;
  /// Scratch memory for the launches of a step; empty where no product wants any.
  Scratch scratch() const;
  std::size_t device_bytes() const;
  /// A number that no other workspace has.
  std::uint64_t version() const;

 private:
  struct State;
  explicit Workspace(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

}  // namespace cf::cuda
