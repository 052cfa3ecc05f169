#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "core/model/layer.hpp"
#include "core/model/shape.hpp"
#include "core/status.hpp"
#include "core/weights.hpp"
#include "cuda/ops/linear/pack/pack.hpp"
#include "cuda/runtime/context.hpp"

namespace cf::cuda {

/// Layers [first, last) of a model, by the model's own numbers.
struct LayerRange {
  std::int64_t first = 0, last = 0;
  constexpr std::int64_t count() const { return last - first; }
  constexpr bool contains(std::int64_t layer) const { return layer >= first && layer < last; }
  bool operator==(const LayerRange&) const = default;
};

/// How a layer's Linear is packed. Models whose layers begin with the op ln_qkv have the rows of query_key_value in the
/// order that this op reads.
PackHint pack_hint(const Site& site, const ModelSpec& model);

/// The weights of a model, or of a range of its layers, in the memory of a device, in the layouts that its kernels
/// read: row-major as Hugging Face has them, fp8 weights as fp8.hpp has them, and GPTQ weights packed. They are read by any number of executors and
/// belong to none. layer(i) is the table of a layer's pointers. A layer's place does not follow from another layer's.
/// Not shared between threads while layers are loaded.
class ResidentWeights {
 public:
  /// Takes the memory of all layers' dense tensors, in one block. `like` says which Linears are quantised, in every
  /// layer; nothing else of it is looked at. A layer's packed weights are in a block of their own, which load_layer()
  /// takes.
  /// Refuses a model that describes no layer, a range outside its layers, and a dtype other than float16, bfloat16 and
  /// float32 (Code::unimplemented). Code::out_of_memory says how much was needed and how much is free.
  static Result<ResidentWeights> create(const Context& context, const ModelSpec& model, DType dtype, LayerRange layers,
                                        const LayerWeights& like = {});
  /// Takes memory for a whole model and copies its weights there: the embedding, all layers, the final LayerNorm and
  /// the LM head, which is the embedding itself where the model's embeddings are tied. Refuses what create() and
  /// load_layer() refuse, a number of layers that is not num_layers, and shapes and dtypes that are not the model's.
  /// With `layer_of` each layer's weights are what it makes, one layer at a time; those of `model` say which Linears are
  /// quantised.
  using LayerOf = std::function<Result<OwnedLayerWeights>(std::int64_t layer)>;
  static Result<ResidentWeights> load(const Context& context, const ModelSpec& spec, DType dtype,
                                      const ModelWeights& model, const LayerOf& layer_of = {});
  /// The weights of a whole model where they lie in the device's memory, without a copy: dense, or packed with the
  /// pack_hint() of their Linear. Their owner keeps the memory for as long as this object lives, and orders what it
  /// writes there with the steps that read it. Refuses what load() refuses, quantised weights that are not packed
  /// (Code::unimplemented), and a tensor that is not in the memory of the context's device or does not begin at a
  /// multiple of kAlignment bytes.
  static Result<ResidentWeights> in_place(const Context& context, const ModelSpec& spec, DType dtype,
                                          const ModelWeights& model);
  static constexpr std::size_t kAlignment = 256;
  ResidentWeights(ResidentWeights&&) noexcept;
  ResidentWeights& operator=(ResidentWeights&&) noexcept;
  /// Waits for the device: the weights may be in use.
  ~ResidentWeights();

  /// Copies a layer's weights from the memory of the host or of a device, and packs what is quantised. Waits until all
  /// is there. Refuses shapes and dtypes that are not the model's, a dense weight where a quantised one is expected and
  /// the reverse, and what pack() refuses.
  Status load_layer(std::int64_t layer, const LayerWeights& source);

  /// Copies the weights of another model of this spec to the places of those that load() has brought: no pointer and no
  /// layout changes. Waits for what is on the stream, and until all is there. All is checked and packed before the
  /// first byte is written. Refuses what load() refuses, and, with Code::unimplemented, weights in place and a
  /// quantised weight that is packed in another layout, such as one with another order of inputs. After
  /// Code::device_error is_loaded() is false.
  Status swap(const ModelWeights& model);

  const ModelSpec& model() const;
  DType dtype() const;  // of the dense tensors
  LayerRange layers() const;
  bool is_loaded(std::int64_t layer) const;
  /// The layer's views of device memory; `layer` is within layers().
  LayerWeights layer(std::int64_t layer) const;
  /// The weights of the whole model as views of device memory. Where create() made this object, all but the layers'
  /// views are empty.
  ModelWeights model_weights() const;
  /// The memory that this object has taken: 0 after in_place().
  std::size_t device_bytes() const;
  /// A number that is new after every change of where weights lie, and that no other object has.
  std::uint64_t version() const;

 private:
  struct State;
  explicit ResidentWeights(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

}  // namespace cf::cuda
