#include "python/src/port/port_layer.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <string>

#include "golden/checkpoint/hf_config.hpp"
#include "python/src/bindings.hpp"
#include "python/src/device_ops.hpp"
#include "python/src/work.hpp"

namespace nb = nanobind;

namespace cf::python {
namespace {

/// The tensors of a call, in their order.
enum Argument : std::size_t {
  kInput,
  kCos,
  kSin,
  kKRows,
  kVRows,
  kQkvWeight,
  kQkvBias,
  kOutWeight,
  kOutBias,
  kNormGamma,
  kNormBeta,
  kPostNormGamma,
  kPostNormBeta,
  kUpWeight,
  kUpBias,
  kDownWeight,
  kDownBias,
  kArguments
};
constexpr const char* kGiven =
    "input, cos, sin, k_cache, v_cache, weight_qkv, bias_qkv, weight_o, bias_o, ln_weight, ln_bias, post_ln_weight, "
    "post_ln_bias, mlp_up_weight, mlp_up_bias, mlp_down_weight, mlp_down_bias";
constexpr std::int64_t kSpareEntries =
    64;                                   // a cache that lasts one call has a multiple of so many: few sizes of memory
constexpr std::int64_t kAlignment = 128;  // elements, 256 bytes: where each part of a block of memory begins
constexpr std::uintptr_t kVectorBytes = 16;

using Call = std::array<TorchTensor, kArguments>;

template <class... Size>
bool has_shape(const TorchTensor& t, Size... sizes) {
  const std::array<std::int64_t, sizeof...(Size)> shape{std::int64_t(sizes)...};
  return t.rank == int(shape.size()) && std::equal(shape.begin(), shape.end(), t.shape);
}

/// Whether the tensors are those of a call: all on one GPU, float16 but for cos and sin, of the model's shapes.
bool fits(const ModelShape& s, const Call& given) {
  for (std::size_t i = 0; i < kArguments; ++i) {
    const bool is_table = i == kCos || i == kSin;
    if (given[i].device != given[kInput].device || given[i].dtype != (is_table ? kTorchF32 : kTorchF16)) return false;
  }
  for (const Argument table : {kCos, kSin}) {
    std::int64_t elements = 1;
    for (int i = 0; i < given[table].rank; ++i) elements *= given[table].shape[i];
    if (elements != s.head_dim) return false;
  }
  for (const Argument rows : {kKRows, kVRows})
    if (given[rows].rank != 2 || given[rows].shape[0] != given[kKRows].shape[0] ||
        given[rows].shape[1] != s.hidden_size || given[rows].address % kVectorBytes)
      return false;
  for (const Argument row : {kOutBias, kNormGamma, kNormBeta, kPostNormGamma, kPostNormBeta, kDownBias})
    if (!has_shape(given[row], s.hidden_size)) return false;
  return has_shape(given[kInput], 1, s.hidden_size) && has_shape(given[kQkvWeight], s.qkv_size(), s.hidden_size) &&
         has_shape(given[kQkvBias], s.qkv_size()) && has_shape(given[kOutWeight], s.hidden_size, s.hidden_size) &&
         has_shape(given[kUpWeight], s.intermediate_size, s.hidden_size) &&
         has_shape(given[kUpBias], s.intermediate_size) &&
         has_shape(given[kDownWeight], s.hidden_size, s.intermediate_size);
}

template <class V>
void point_at(V& view, std::uintptr_t address, const decltype(V::shape)& shape) {
  point(view, reinterpret_cast<void*>(address), shape, DType::f16);
}

/// Lays parts of a block of float16 side by side, each at a multiple of 256 bytes.
class Block {
 public:
  std::int64_t add(std::int64_t elements) {
    const std::int64_t at = elements_;
    elements_ += (elements + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  std::int64_t elements() const { return elements_; }

 private:
  std::int64_t elements_ = 0;
};

/// Where the parts of a call's memory begin, in elements: caches that last one call, and activations.
struct Parts {
  Parts(const ModelShape& s, std::int64_t cache_elements) {
    Block block;
    k_cache = block.add(cache_elements);
    v_cache = block.add(cache_elements);
    attn_in = block.add(s.hidden_size);
    qkv = block.add(s.qkv_size());
    q = block.add(s.hidden_size);
    context = block.add(s.hidden_size);
    attn_residual = block.add(s.hidden_size);
    mlp_in = block.add(s.hidden_size);
    mlp_act = block.add(s.intermediate_size);
    elements = block.elements();
  }

  std::int64_t k_cache, v_cache, attn_in, qkv, q, context, attn_residual, mlp_in, mlp_act, elements;
};

template <class... Size>
nb::tuple sizes(Size... size) {
  return nb::make_tuple(std::int64_t(size)...);
}

}  // namespace

PortLayer::PortLayer(const std::string& config)
    : model_(take(checkpoint::parse_hf_config(config, "PortLayer")).spec()) {}

std::int64_t PortLayer::spare_elements() const { return Parts(model_.shape, 0).elements; }

nb::object PortLayer::run(const nb::tuple& given, nb::handle length, nb::handle own, std::int64_t valid,
                          PortSteps* steps) {
  const Torch* const torch = Torch::find();
  if (!torch || given.size() != kArguments || !PyLong_CheckExact(length.ptr())) return nb::none();
  Call call;
  for (std::size_t i = 0; i < kArguments; ++i) {
    const std::optional<TorchTensor> tensor = torch->read(given[i]);
    if (!tensor) return nb::none();
    call[i] = *tensor;
  }
  const ModelShape& s = model_.shape;
  if (s.head_dim % 8 || !fits(s, call)) return nb::none();
  for (const Argument rows : {kKRows, kVRows})
    if (Torch::may_require_grad(given[std::size_t(rows)])) return nb::none();
  int overflow = 0;
  const std::int64_t tokens = PyLong_AsLongLongAndOverflow(length.ptr(), &overflow);
  if (overflow || tokens < 0 || tokens >= call[kKRows].shape[0]) return nb::none();
  const int device = call[kInput].device;
  const auto numbers = numbers_.find(device);
  const std::optional<std::uintptr_t> stream = torch->stream(device);
  if (numbers == numbers_.end() || numbers->second.second < tokens + 1 || !stream) return nb::none();

  std::array<TorchTensor, 2> caches;
  if (!own.is_none()) {
    if (!PyTuple_CheckExact(own.ptr()) || PyTuple_Size(own.ptr()) != 2) return nb::none();
    for (std::size_t i = 0; i < 2; ++i) {
      const std::optional<TorchTensor> cache = torch->read(nb::handle(PyTuple_GetItem(own.ptr(), Py_ssize_t(i))));
      if (!cache || cache->dtype != kTorchF16 || cache->device != device || cache->rank != 4) return nb::none();
      if (!has_shape(*cache, 1, s.num_heads, cache->shape[2], s.head_dim) || cache->shape[2] <= tokens)
        return nb::none();
      if (i == 1 && cache->shape[2] != caches[0].shape[2]) return nb::none();
      caches[i] = *cache;
    }
  }
  const std::int64_t capacity =
      own.is_none() ? (tokens + kSpareEntries) / kSpareEntries * kSpareEntries : caches[0].shape[2];
  const Parts parts(s, own.is_none() ? s.num_heads * capacity * s.head_dim : 0);

  const nb::object input = given[std::size_t(kInput)], dtype = input.attr("dtype");
  TorchTensor spare;
  nb::object memory;
  if (steps) {
    const std::optional<TorchTensor> found = torch->read(steps->memory_);
    if (!found || found->dtype != kTorchF16 || found->device != device || found->rank != 1 ||
        found->shape[0] < parts.elements)
      return nb::none();
    memory = steps->memory_;
    spare = *found;
  } else {
    // Gone when the call is launched: the memory is used again in the stream's order.
    memory = torch->empty(sizes(parts.elements), sizes(1), dtype, input, device, spare);
  }
  std::array<TorchTensor, 3> made;
  const nb::tuple row = sizes(1, s.hidden_size), row_strides = sizes(s.hidden_size, 1);
  const nb::tuple heads = sizes(1, s.num_heads, s.head_dim), head_strides = sizes(s.hidden_size, s.head_dim, 1);
  const nb::object output = torch->empty(row, row_strides, dtype, input, device, made[0]);
  const nb::object k = torch->empty(heads, head_strides, dtype, input, device, made[1]);
  const nb::object v = torch->empty(heads, head_strides, dtype, input, device, made[2]);
  if (!memory.is_valid() || !output.is_valid() || !k.is_valid() || !v.is_valid()) return nb::none();
  const auto at = [&](std::int64_t element) { return spare.address + std::uintptr_t(element) * 2; };

  RowsLayer args;
  args.layer.model = model_;
  LayerTensors& t = args.layer.t;
  const std::array<std::int64_t, 2> hidden{1, s.hidden_size};
  const std::array<std::int64_t, 3> by_head{1, s.num_heads, s.head_dim};
  const std::array<std::int64_t, 4> cache{1, s.num_heads, capacity, s.head_dim};
  point_at(t.hidden, call[kInput].address, hidden);
  const auto number = [&](std::int64_t value) {
    return View<const std::int32_t, 1>{
        reinterpret_cast<const std::int32_t*>(numbers->second.first + std::uintptr_t(value) * sizeof(std::int32_t)),
        {1}};
  };
  t.positions = number(0);  // the row of cos and sin
  t.kv_len = number(tokens + 1);
  t.cos = {reinterpret_cast<const float*>(call[kCos].address), {1, s.rotary_dim / 2}};
  t.sin = {reinterpret_cast<const float*>(call[kSin].address), {1, s.rotary_dim / 2}};
  point_at(t.k_cache, own.is_none() ? at(parts.k_cache) : caches[0].address, cache);
  point_at(t.v_cache, own.is_none() ? at(parts.v_cache) : caches[1].address, cache);
  point_at(t.attn_in, at(parts.attn_in), hidden);
  point_at(t.qkv, at(parts.qkv), {1, s.num_heads, 3, s.head_dim});
  point_at(t.q, at(parts.q), by_head);
  point_at(t.k, made[1].address, by_head);
  point_at(t.v, made[2].address, by_head);
  point_at(t.context, at(parts.context), by_head);
  point_at(t.attn_residual, at(parts.attn_residual), hidden);
  point_at(t.mlp_in, at(parts.mlp_in), hidden);
  point_at(t.mlp_act, at(parts.mlp_act), {1, s.intermediate_size});
  point_at(t.output, made[0].address, hidden);
  t.max_kv_len = tokens + 1;  // the plan of a GPU's attention follows from it, and not from the cache's room
  const auto norm = [&](NormParams& params, Argument gamma, Argument beta) {
    point_at(params.gamma, call[gamma].address, {s.hidden_size});
    point_at(params.beta, call[beta].address, {s.hidden_size});
  };
  const auto linear = [&](LinearParams& params, Argument weight, Argument bias) {
    DenseWeight dense;
    point_at(dense.weight, call[weight].address, {call[weight].shape[0], call[weight].shape[1]});
    params.weight = dense;
    point_at(params.bias, call[bias].address, {call[bias].shape[0]});
  };
  LayerWeights& w = args.layer.weights;
  norm(w.input_layernorm, kNormGamma, kNormBeta);
  norm(w.post_attention_layernorm, kPostNormGamma, kPostNormBeta);
  linear(w.query_key_value, kQkvWeight, kQkvBias);
  linear(w.dense, kOutWeight, kOutBias);
  linear(w.dense_h_to_4h, kUpWeight, kUpBias);
  linear(w.dense_4h_to_h, kDownWeight, kDownBias);
  const std::array<std::int64_t, 2> rows{call[kKRows].shape[0], s.hidden_size};
  point_at(args.k_rows, call[kKRows].address, rows);
  point_at(args.v_rows, call[kVRows].address, rows);
  args.first = !own.is_none() && valid == tokens ? tokens : 0;
  args.last = tokens;
  check([&] {
    const WithoutGil without_gil;
    const DeviceStream to{device, *stream};
    return steps ? steps->steps_.run(args, to) : run_on_device(args, to);
  }());
  return nb::make_tuple(output, k, v);
}

void bind_port_layer(nb::module_& m) {
  using namespace nb::literals;
  static const std::string doc =
      std::string(
          "(output, k, v) of one token behind `length` others, stored in both caches; None where something does "
          "not look right, and nothing is launched then. `given` is (") +
      kGiven +
      "); `own` is None, or both caches in this library's layout, whose first `valid` entries are right; `steps` are "
      "those of these caches, None to launch kernel by kernel.";
  nb::class_<PortSteps>(m, "PortSteps", "What a graph context's steps on a GPU keep, which are CUDA graphs then.")
      .def(nb::init<nb::object>(), "memory"_a,
           "`memory` is a tensor of PortLayer.spare_elements float16 elements on the GPU.")
      .def_prop_ro("graphs", &PortSteps::graphs,
                   "How many graphs are kept: one for each plan of attention that steps have had.");
  nb::class_<PortLayer>(m, "PortLayer",
                        "One token through one layer of ClusterFusion's Pythia port, on a GPU. Refuses nothing.")
      .def(nb::init<const std::string&>(), "config"_a, "`config` is the text of a config.json.")
      .def("use_numbers", &PortLayer::use_numbers, "device"_a, "address"_a, "most"_a,
           "Lets calls read the numbers 0 .. most, int32 in the GPU's memory at this address for ever.")
      .def("run", &PortLayer::run, "given"_a, "length"_a.none(), "own"_a.none(), "valid"_a, "steps"_a.none(),
           nb::sig("def run(self, given: tuple[object, ...], length: object, own: tuple[object, object] | None, valid: "
                   "int, steps: PortSteps | None) -> tuple[typing.Any, typing.Any, typing.Any] | None"),
           doc.c_str())
      .def_prop_ro("spare_elements", &PortLayer::spare_elements,
                   "The float16 elements of a step's activations but for its outputs.");
}

}  // namespace cf::python
