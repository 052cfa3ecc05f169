#include "cuda/model/resident_weights.hpp"

#include <cuda_runtime_api.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/fp8.hpp"
#include "cuda/model/arena.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/runtime/upload.hpp"
#include "cuda/step/choose.hpp"

namespace cf::cuda {
namespace {

constexpr std::string_view kName = "weights";

Status check_layer_count(const ModelSpec& spec, const ModelWeights& model) {
  if (std::int64_t(model.layers.size()) == spec.shape.num_layers) return {};
  return bad_argument(kName, "the model has " + std::to_string(model.layers.size()) + " layers, expected " +
                                 std::to_string(spec.shape.num_layers));
}

Status check_biases(const ModelSpec& spec, std::int64_t layer, const LayerWeights& source) {
  Status status;
  for_each_linear(spec, source, [&](const Site& site, const LinearParams& linear, const LinearSize& size) {
    if (status && !size.has_bias && linear.bias)
      status = bad_argument(kName, layer_prefix(layer) + std::string(site.name) + " has a bias, expected none");
  });
  return status;
}

/// Refuses an address at which kernels cannot read a weight.
Status check_address(const Context& context, const std::string& name, const void* data) {
  cudaPointerAttributes found{};
  CF_TRY(from_cuda(cudaPointerGetAttributes(&found, data), "cudaPointerGetAttributes"));
  const bool on_device = found.type == cudaMemoryTypeDevice || found.type == cudaMemoryTypeManaged;
  if (!on_device || found.device != context.device())
    return bad_argument(kName, "'" + name + "' is in the memory of " +
                                   (on_device ? "device " + std::to_string(found.device) : "the host") +
                                   ", expected device " + std::to_string(context.device()));
  const auto past = reinterpret_cast<std::uintptr_t>(data) % ResidentWeights::kAlignment;
  if (past == 0) return {};
  return bad_argument(kName, "'" + name + "' begins " + std::to_string(past) + " bytes past a multiple of " +
                                 std::to_string(ResidentWeights::kAlignment) + ", expected one");
}

/// Refuses memory that threads of the host cannot read.
Status check_on_host(const std::string& name, const void* data) {
  cudaPointerAttributes found{};
  CF_TRY(from_cuda(cudaPointerGetAttributes(&found, data), "cudaPointerGetAttributes"));
  if (found.type != cudaMemoryTypeDevice) return {};
  return bad_argument(kName, "swap: '" + name + "' is in the memory of a device, expected the host's");
}

/// Whether launches that were prepared for a packed weight read another one in its place. The order of rows is a
/// model's.
bool is_same(const GptqLayout& a, const GptqLayout& b) {
  const auto sizes = [](const GptqLayout& l) {
    return std::tuple(l.row_tiles, l.chunks, l.groups, l.columns_per_group, l.inputs, l.has_order, l.in_order,
                      l.fits_f16);
  };
  return sizes(a) == sizes(b);
}

/// Refuses a Linear whose quantised weight is not packed as this model's steps read it, in the memory of the device.
Status check_in_place(const Context& context, const ModelSpec& m, const std::string& name, const Site& site,
                      const LinearParams& linear, const LinearSize& size) {
  const std::string weight = name + ".weight";
  if (std::holds_alternative<GptqWeight>(linear.weight))
    return Status::error(Code::unimplemented, std::string(kName) + ": '" + weight +
                                                  "' is quantised, expected dense or packed weights in place");
  const auto* packed = std::get_if<PackedWeight>(&linear.weight);
  if (!packed) return {};
  CF_TRY(ops::Linear::check_linear(std::string(kName) + ": " + name, size.out, size.in, linear));
  if (is_fp8(linear.weight)) {
    CF_TRY(check_fp8(std::string(kName) + ": " + name, *packed));
    return check_address(context, weight, packed->data.data);
  }
  CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(kName, *packed));
  if (layout.pairs != pack_hint(site, m).pairs)
    return bad_argument(kName, "'" + weight + "' is packed in an order of rows that this model's steps do not read");
  return check_address(context, weight, packed->data.data);
}

/// How a Linear's weight is stored, in the words of a refusal.
struct Storage {
  const char *got, *expected;
};
Storage storage_of(const LinearWeight& weight) {
  if (std::holds_alternative<DenseWeight>(weight)) return {"dense", "a dense weight"};
  if (is_fp8(weight)) return {"fp8", "an fp8 weight"};
  return {"quantised", "a GPTQ weight"};
}

/// What is copied of a packed weight: pack() makes a block of its own of GPTQ weights alone.
const void* block_of(const Packed& packed) {
  return is_fp8(packed.weight) ? std::get<PackedWeight>(packed.weight).data.data : packed.storage.data();
}

}  // namespace

PackHint pack_hint(const Site& site, const ModelSpec& model) {
  if (site.id != SiteId::query_key_value) return {};
  return {.pairs = qkv_pairs(model)};
}

struct ResidentWeights::State {
  struct Layer {
    LayerWeights weights;
    DeviceMemory packed;
    bool loaded = false;
  };

  State(const Context& c, const ModelSpec& m, DType d, LayerRange r)
      : context(c), model(m), dtype(d), range(r), layers(std::size_t(r.count())) {}
  ~State() { (void)cudaDeviceSynchronize(); }

  Layer& at(std::int64_t layer) { return layers[std::size_t(layer - range.first)]; }
  const Layer& at(std::int64_t layer) const { return layers[std::size_t(layer - range.first)]; }
  /// Gives every dense tensor its place in the block; returns the bytes that a block must have.
  std::size_t lay_out(std::byte* block);
  /// A layer's quantised Linears in the layout of this model's steps, in the order of the walk; dense ones are empty.
  /// What is fp8 stays where it is.
  Result<std::vector<Packed>> pack_layer(std::int64_t layer, const LayerWeights& source);
  /// The packed weights of a layer, in the order of the walk; null for a dense one.
  std::vector<PackedWeight*> packed_of(std::int64_t layer);
  /// Packs a layer's quantised weights and copies them to memory of their own.
  Status load_packed(std::int64_t layer, const LayerWeights& source);

  Context context;
  ModelSpec model;
  DType dtype;
  LayerRange range;
  std::vector<Layer> layers;
  ModelWeights outside;  // of a whole model: the weights that belong to no layer
  DeviceMemory dense, outside_memory;
  std::uint64_t version = next_version();
};

std::size_t ResidentWeights::State::lay_out(std::byte* block) {
  Arena arena(block);
  for (Layer& layer : layers)
    for_each_weight(model, layer.weights,
                    [&](const TensorSpec&, auto& view, auto shape) { arena.allocate(view, shape, dtype); });
  return arena.bytes();
}

Result<std::vector<Packed>> ResidentWeights::State::pack_layer(std::int64_t layer, const LayerWeights& source) {
  std::vector<Storage> expected;
  for_each_linear(model, at(layer).weights,
                  [&](const Site&, const LinearParams& l, auto...) { expected.push_back(storage_of(l.weight)); });
  std::vector<Packed> packed(expected.size());
  Status status;
  std::size_t i = 0;
  for_each_linear(model, source, [&](const Site& site, const LinearParams& l, const LinearSize& size) {
    const std::size_t at = i++;
    const Storage given = storage_of(l.weight);
    const std::string name = layer_prefix(layer) + std::string(site.name);
    if (!status) return;
    if (std::string_view(given.got) != expected[at].got) {
      status = bad_argument(kName, "'" + name + ".weight' is " + given.got + ", expected " + expected[at].expected);
      return;
    }
    if (std::holds_alternative<DenseWeight>(l.weight)) return;
    const std::string owner = std::string(kName) + ": " + name;
    status = ops::Linear::check_linear(owner, size.out, size.in, l);
    if (status && is_fp8(l.weight)) status = check_fp8(owner, std::get<PackedWeight>(l.weight));
    if (!status) return;
    TensorCheck check(owner);
    ops::Linear::linear_tensors(size.out, size.in, l, check);
    status = check.status();
    if (!status) return;
    Result<Packed> made = pack(l.weight, pack_hint(site, model), context);
    if (made)
      packed[at] = std::move(*made);
    else
      status = bad_argument(kName, "'" + name + ".weight' " + made.status().message());
  });
  CF_TRY(status);
  return packed;
}

Status ResidentWeights::State::load_packed(std::int64_t layer, const LayerWeights& source) {
  CF_TRY_ASSIGN(const std::vector<Packed> packed, pack_layer(layer, source));
  Layer& to = at(layer);
  const std::vector<PackedWeight*> targets = packed_of(layer);
  const auto lay_out = [&](Arena& arena) {
    for (std::size_t l = 0; l < targets.size(); ++l) {
      if (!targets[l]) continue;
      *targets[l] = std::get<PackedWeight>(packed[l].weight);
      arena.allocate(targets[l]->data, targets[l]->data.shape, DType::i32);
    }
  };
  Arena measure(nullptr);
  lay_out(measure);
  if (measure.bytes() == 0) return {};
  CF_TRY_ASSIGN(DeviceMemory block,
                DeviceMemory::create(context, measure.bytes(), layer_prefix(layer) + "packed weights"));
  Arena arena(block.data());
  lay_out(arena);
  for (std::size_t l = 0; l < targets.size(); ++l)
    if (targets[l])
      CF_TRY(copy_to_device(context, const_cast<std::int32_t*>(targets[l]->data.data), block_of(packed[l]),
                            std::size_t(targets[l]->data.bytes())));
  to.packed = std::move(block);
  return {};
}

std::vector<PackedWeight*> ResidentWeights::State::packed_of(std::int64_t layer) {
  std::vector<PackedWeight*> packed;
  for_each_linear(model, at(layer).weights, [&](const Site&, LinearParams& l, auto...) {
    packed.push_back(std::get_if<PackedWeight>(&l.weight));
  });
  return packed;
}

ResidentWeights::ResidentWeights(std::unique_ptr<State> state) : state_(std::move(state)) {}
ResidentWeights::ResidentWeights(ResidentWeights&&) noexcept = default;
ResidentWeights& ResidentWeights::operator=(ResidentWeights&&) noexcept = default;
ResidentWeights::~ResidentWeights() = default;

Result<ResidentWeights> ResidentWeights::create(const Context& context, const ModelSpec& model, DType dtype,
                                                LayerRange layers, const LayerWeights& like) {
  CF_TRY(check_model(model));
  const std::int64_t all = model.shape.num_layers;
  if (layers.first < 0 || layers.first >= layers.last || layers.last > all)
    return bad_argument(kName, "layers [first, last) must be a range within [0, " + std::to_string(all) + "), got [" +
                                   std::to_string(layers.first) + ", " + std::to_string(layers.last) + ")");
  CF_TRY(with_activation(kName, dtype, [](auto) { return Status(); }));

  auto state = std::make_unique<State>(context, model, dtype, layers);
  std::vector<LinearWeight> formats;
  for_each_linear(model, like, [&](const Site&, const LinearParams& l, auto...) {
    if (is_fp8(l.weight))
      formats.emplace_back(PackedWeight{.packer = kFp8Packer});
    else if (std::holds_alternative<GptqWeight>(l.weight))
      formats.emplace_back(PackedWeight{});
    else
      formats.emplace_back();
  });
  for (State::Layer& layer : state->layers) {
    std::size_t i = 0;
    for_each_linear(model, layer.weights, [&](const Site&, LinearParams& l, auto...) { l.weight = formats[i++]; });
  }
  CF_TRY_ASSIGN(DeviceMemory memory, DeviceMemory::create(context, state->lay_out(nullptr),
                                                          "weights of " + std::to_string(layers.count()) + " layers"));
  state->dense = std::move(memory);
  state->lay_out(state->dense.data());
  return ResidentWeights(std::move(state));
}

Status ResidentWeights::load_layer(std::int64_t layer, const LayerWeights& source) {
  State& s = *state_;
  if (!s.range.contains(layer))
    return bad_argument(kName, "layer must be " + std::to_string(s.range.first) + " to " +
                                   std::to_string(s.range.last - 1) + ", got " + std::to_string(layer));
  CF_TRY(check_biases(s.model, layer, source));
  State::Layer& to = s.at(layer);
  to.loaded = false;
  s.version = next_version();
  CF_TRY(s.load_packed(layer, source));
  // The source's dense tensors come in the order of the targets.
  std::vector<const void*> targets;
  for_each_weight(s.model, to.weights,
                  [&](const TensorSpec&, const auto& view, const auto&) { targets.push_back(view.data); });
  std::size_t i = 0;
  Status status;
  for_each_weight(s.model, source, [&]<class V>(const TensorSpec& t, const V& view, const auto& shape) {
    if constexpr (std::is_void_v<std::remove_const_t<typename V::element>>) {
      // The memory is this object's own; only its users' views of it are const.
      const AnyView<V::rank> target(const_cast<void*>(targets[i++]), shape, s.dtype);
      if (status) status = copy_in<V::rank>(s.context, kName, layer_prefix(layer) + std::string(t.name), target, view);
    }
  });
  to.loaded = bool(status);
  return status;
}

Result<ResidentWeights> ResidentWeights::load(const Context& context, const ModelSpec& spec, DType dtype,
                                              const ModelWeights& model, const LayerOf& layer_of) {
  CF_TRY(check_layer_count(spec, model));
  CF_TRY_ASSIGN(ResidentWeights weights,
                create(context, spec, dtype, {0, spec.shape.num_layers}, model.layers.front()));
  State& s = *weights.state_;
  const auto lay_out = [&](std::byte* block) {
    Arena arena(block);
    for_each_model_weight(spec, s.outside,
                          [&](const TensorSpec&, auto& view, auto shape) { arena.allocate(view, shape, dtype); });
    return arena.bytes();
  };
  CF_TRY_ASSIGN(s.outside_memory, DeviceMemory::create(context, lay_out(nullptr), "embedding, final norm and LM head"));
  lay_out(s.outside_memory.data());
  tie_embeddings(spec, s.outside);

  // The source's tensors come in the order of the targets.
  std::vector<const void*> targets;
  for_each_model_weight(spec, s.outside,
                        [&](const TensorSpec&, const auto& view, auto) { targets.push_back(view.data); });
  ModelWeights source{.embed_in = model.embed_in,
                      .embed_positions = model.embed_positions,
                      .layers = {},
                      .final_layer_norm = model.final_layer_norm,
                      .embed_out = model.embed_out};
  std::size_t i = 0;
  Status status;
  for_each_model_weight(spec, source, [&]<class V>(const TensorSpec& t, const V& view, const auto& shape) {
    if constexpr (std::is_void_v<std::remove_const_t<typename V::element>>) {
      const AnyView<V::rank> target(const_cast<void*>(targets[i++]), shape, dtype);
      if (status) status = copy_in<V::rank>(context, kName, std::string(t.name), target, view);
    }
  });
  CF_TRY(status);
  for (std::int64_t layer = 0; layer < spec.shape.num_layers; ++layer) {
    if (!layer_of) {
      CF_TRY(weights.load_layer(layer, model.layers[std::size_t(layer)]));
      continue;
    }
    CF_TRY_ASSIGN(const OwnedLayerWeights made, layer_of(layer));
    CF_TRY(weights.load_layer(layer, made.weights));
  }
  return weights;
}

Status ResidentWeights::swap(const ModelWeights& model) {
  State& s = *state_;
  if (!s.outside_memory.data())
    return Status::error(Code::unimplemented, std::string(kName) + ": swap: expected weights that load() has brought");
  CF_TRY(check_layer_count(s.model, model));
  ModelWeights source = model;
  std::vector<std::vector<Packed>> packed;
  for (std::int64_t l = 0; l < s.range.count(); ++l) {
    CF_TRY(check_biases(s.model, l, model.layers[std::size_t(l)]));
    CF_TRY_ASSIGN(packed.emplace_back(), s.pack_layer(l, model.layers[std::size_t(l)]));
    const std::vector<PackedWeight*> targets = s.packed_of(l);
    for (std::size_t i = 0; i < targets.size(); ++i) {
      if (!targets[i]) continue;
      const PackedWeight& given = std::get<PackedWeight>(packed.back()[i].weight);
      if (is_fp8(*targets[i])) {
        if (given.format.group_size != targets[i]->format.group_size)
          return bad_argument(kName, layer_prefix(l) + "swap: expected fp8 groups of " +
                                         std::to_string(targets[i]->format.group_size) + ", got " +
                                         std::to_string(given.format.group_size));
        CF_TRY(check_on_host(layer_prefix(l) + "fp8 weight", given.data.data));
        continue;
      }
      CF_TRY_ASSIGN(const GptqLayout made, gptq_layout(kName, given));
      CF_TRY_ASSIGN(const GptqLayout before, gptq_layout(kName, *targets[i]));
      if (!is_same(made, before))
        return Status::error(Code::unimplemented, std::string(kName) + ": " + layer_prefix(l) +
                                                      "swap: a quantised weight is packed in another layout than the "
                                                      "one before it, expected the same order of inputs and range");
    }
    // What is packed is no tensor of the lists below.
    for_each_linear(s.model, source.layers[std::size_t(l)], [&](const Site&, LinearParams& linear, auto...) {
      if (std::holds_alternative<GptqWeight>(linear.weight)) linear.weight = PackedWeight{};
    });
  }
  struct Copy {
    void* to;
    const void* from;
    std::size_t bytes;
  };
  std::vector<Copy> copies;
  ModelWeights there = model_weights();
  for_each_model_weight(s.model, there, [&](const TensorSpec&, const auto& view, auto&&) {
    // The memory is this object's own; only its users' views of it are const.
    copies.push_back({const_cast<void*>(static_cast<const void*>(view.data)), nullptr, std::size_t(view.bytes())});
  });
  std::size_t next = 0;
  Status status;
  for_each_model_weight(s.model, source, [&]<class V>(const TensorSpec& t, const V& view, const auto& shape) {
    copies[next++].from = view.data;
    if constexpr (std::is_void_v<std::remove_const_t<typename V::element>>)
      if (status) status = check_source<V::rank>(kName, std::string(t.name), view, shape, s.dtype);
    if (status) status = check_on_host(std::string(t.name), view.data);
  });
  CF_TRY(status);
  for (std::int64_t l = 0; l < s.range.count(); ++l) {
    const std::vector<PackedWeight*> targets = s.packed_of(l);
    for (std::size_t i = 0; i < targets.size(); ++i)
      if (targets[i])
        copies.push_back({const_cast<std::int32_t*>(targets[i]->data.data), block_of(packed[std::size_t(l)][i]),
                          std::size_t(targets[i]->data.bytes())});
  }
  CF_TRY_ASSIGN(Upload upload, Upload::create(s.context));
  const auto set_loaded = [&](bool loaded) {
    for (State::Layer& layer : s.layers) layer.loaded = loaded;
  };
  set_loaded(false);
  for (const Copy& c : copies) CF_TRY(upload.add(c.to, c.from, c.bytes));
  CF_TRY(upload.finish());
  set_loaded(true);
  return {};
}

Result<ResidentWeights> ResidentWeights::in_place(const Context& context, const ModelSpec& spec, DType dtype,
                                                  const ModelWeights& model) {
  CF_TRY(check_model(spec));
  CF_TRY(with_activation(kName, dtype, [](auto) { return Status(); }));
  CF_TRY(check_layer_count(spec, model));
  const LayerRange all{0, spec.shape.num_layers};
  auto state = std::make_unique<State>(context, spec, dtype, all);
  state->outside = {.embed_in = model.embed_in,
                    .embed_positions = model.embed_positions,
                    .layers = {},
                    .final_layer_norm = model.final_layer_norm,
                    .embed_out = model.embed_out};
  Status status;
  for (std::int64_t l = all.first; l < all.last; ++l) {
    const LayerWeights& source = model.layers[std::size_t(l)];
    CF_TRY(check_biases(spec, l, source));
    for_each_linear(spec, source, [&](const Site& site, const LinearParams& linear, const LinearSize& size) {
      if (status) status = check_in_place(context, spec, layer_prefix(l) + std::string(site.name), site, linear, size);
    });
    state->at(l) = {.weights = source, .packed = {}, .loaded = true};
  }
  CF_TRY(status);
  tie_embeddings(spec, state->outside);
  ResidentWeights weights(std::move(state));
  const ModelWeights there = weights.model_weights();
  for_each_model_weight(spec, there, [&]<class V>(const TensorSpec& t, const V& view, const auto& shape) {
    if constexpr (std::is_void_v<std::remove_const_t<typename V::element>>) {
      const std::string name(t.name);
      if (status) status = check_source<V::rank>(kName, name, view, shape, dtype);
      if (status) status = check_address(context, name, view.data);
    }
  });
  CF_TRY(status);
  return weights;
}

ModelWeights ResidentWeights::model_weights() const {
  ModelWeights all = state_->outside;
  for (const State::Layer& layer : state_->layers) all.layers.push_back(layer.weights);
  return all;
}

const ModelSpec& ResidentWeights::model() const { return state_->model; }
DType ResidentWeights::dtype() const { return state_->dtype; }
LayerRange ResidentWeights::layers() const { return state_->range; }
bool ResidentWeights::is_loaded(std::int64_t layer) const {
  return state_->range.contains(layer) && state_->at(layer).loaded;
}
LayerWeights ResidentWeights::layer(std::int64_t layer) const { return state_->at(layer).weights; }
std::size_t ResidentWeights::device_bytes() const {
  std::size_t bytes = state_->dense.bytes() + state_->outside_memory.bytes();
  for (const State::Layer& layer : state_->layers) bytes += layer.packed.bytes();
  return bytes;
}
std::uint64_t ResidentWeights::version() const { return state_->version; }

}  // namespace cf::cuda
