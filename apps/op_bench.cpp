#include "apps/op_bench.hpp"

#include <algorithm>
#include <functional>
#include <optional>

#include "apps/device_ops.hpp"
#include "core/layer.hpp"
#include "core/ops/all.hpp"
#include "core/procedural.hpp"
#include "cuda/cuda.hpp"
#include "cuda/dataflow_capture.hpp"
#include "cuda/memory.hpp"

namespace cf::apps {
namespace {

constexpr std::size_t kAlignment = 256;

template <class Op>
concept HoldsLinear = requires(typename Op::Args args) {
  args.linear;
};

/// One tensor of an op within its set's memory.
struct Block {
  Role role;
  std::string name;
  DType dtype;
  std::int64_t elements;
  std::size_t offset;
  const void* contents;  // null: procedural
};

/// A site's op with as many sets of tensors as there are layers; what it is made of is forgotten.
struct Step {
  Timing timing;
  double written_bytes = 0;
  std::size_t set_bytes = 0;
  std::function<Status(cuda::Context&, std::int64_t layers)> allocate;
  std::function<Status(cuda::Context&, std::int64_t layer)> run;
  std::vector<const void*> reads{}, writes{};  // among a layer's tensors, where several steps make a layer
};

/// The elements of a block, procedural: `seed` differs from block to block.
Tensor made(const Block& b, const ModelConfig& m, const Workload& load) {
  Tensor t(b.dtype, {b.elements});
  if (b.role == Role::index) {
    for (std::int64_t i = 0; i < b.elements; ++i) {
      const std::int64_t value = b.name == "kv_len"      ? load.kv_len
                                 : b.name == "positions" ? load.kv_len - 1
                                                         : i * 7919 % m.vocab_size;
      t.as<std::int32_t>()[i] = std::int32_t(value);
    }
    return t;
  }
  const bool gain = b.name == "gamma" || b.name.ends_with("layernorm.weight");
  const ProceduralKind kind = b.role == Role::input || b.role == Role::state ? ProceduralKind::activation
                              : gain                                         ? ProceduralKind::gain
                                                                             : ProceduralKind::weight;
  fill_procedural(t.data(), b.dtype, 0, b.elements, kind, 0, b.name);
  return t;
}

template <class Op>
class Sets {
 public:
  /// Of the arguments, a quantised weight holds its codes already.
  Sets(const ModelConfig& m, const Workload& load, DType dtype,
       const std::pair<typename Op::Dims, typename Op::Args>& sizes)
      : model_(m), load_(load), dims_(sizes.first), args_(sizes.second) {
    Op::tensors(dims_, args_, [&](Role, std::string_view, auto& view, auto shape, bool = false) {
      using Element = typename std::decay_t<decltype(view)>::element;
      if constexpr (std::is_void_v<Element>) view.dtype = dtype;
      std::copy(shape.begin(), shape.end(), view.shape.begin());
    });
    repacked_ = repack(args_, tiles_);
    for_each_tensor([&](Role role, std::string_view name, auto& view) {
      blocks_.push_back({role, std::string(name), view.dtype, view.size(), bytes_, view.data});
      const std::size_t bytes = std::size_t(view.size()) * size_bytes(view.dtype);
      bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
      if (role == Role::output) output_bytes_ += double(bytes);
      if (role == Role::input) input_bytes_ += double(bytes);
    });
  }
  std::size_t bytes() const { return bytes_; }
  /// Of the bytes that must move. What has no output writes into its state what it does not read.
  double written_bytes(const Cost& cost) const { return output_bytes_ > 0 ? output_bytes_ : cost.bytes - input_bytes_; }

  Status allocate(cuda::Context& context, std::int64_t layers) {
    CF_TRY(repacked_);
    auto memory = cuda::DeviceMemory::create(context, bytes_ * std::size_t(layers), "the tensors to rotate over");
    if (!memory) return memory.status();
    memory_ = std::move(*memory);
    for (const Block& b : blocks_) {
      if (b.role == Role::output) continue;
      const Tensor t = b.contents ? Tensor() : made(b, model_, load_);
      for (std::int64_t layer = 0; layer < layers; ++layer)
        CF_TRY(cuda::copy_to_device(context, set(layer) + b.offset, b.contents ? b.contents : t.data(),
                                    std::size_t(b.elements) * size_bytes(b.dtype)));
    }
    return {};
  }

  /// The call on a layer's tensors, until the next.
  const typename Op::Args& args(std::int64_t layer) {
    auto block = blocks_.begin();
    for_each_tensor([&](Role role, std::string_view, auto& view) {
      const bool shared = HoldsLinear<Op> && (role == Role::input || role == Role::output);
      view.data = reinterpret_cast<decltype(view.data)>(set(shared ? 0 : layer) + block++->offset);
    });
    return args_;
  }

 private:
  std::byte* set(std::int64_t layer) { return memory_.data() + bytes_ * std::size_t(layer); }
  /// Calls f(role, name, view), but for an order of columns that the tiles do not have.
  template <class F>
  void for_each_tensor(F&& f) {
    Op::tensors(dims_, args_, [&](Role role, std::string_view name, auto& view, auto, bool = false) {
      if (role != Role::gptq || view.data) f(role, name, view);
    });
  }

  const ModelConfig& model_;
  Workload load_;
  typename Op::Dims dims_;
  typename Op::Args args_;
  OwnedGptqTiles tiles_;
  Status repacked_;
  std::vector<Block> blocks_;
  std::size_t bytes_ = 0;
  double output_bytes_ = 0, input_bytes_ = 0;
  cuda::DeviceMemory memory_;
};

template <class Op>
Step step(std::string_view site, const ModelConfig& m, const Workload& load, DType dtype,
          std::pair<typename Op::Dims, typename Op::Args> sizes) {
  if constexpr (HoldsLinear<Op>) sizes.first.weight = format_of(sizes.second.linear.weight);
  const auto sets = std::make_shared<Sets<Op>>(m, load, dtype, sizes);
  Step s;
  s.timing.site = site;
  s.timing.op = Op::name;
  const Cost cost = Op::cost(sizes.first, dtype, dtype);
  s.timing.bytes = cost.bytes;
  s.written_bytes = sets->written_bytes(cost);
  s.set_bytes = sets->bytes();
  s.allocate = [=](cuda::Context& context, std::int64_t layers) { return sets->allocate(context, layers); };
  s.run = [=](cuda::Context& context, std::int64_t layer) { return cuda::run(sets->args(layer), context); };
  return s;
}

template <class Op>
std::vector<Step> steps_of(const ModelConfig& m, const Workload& load, DType dtype, const LayerWeights& weights) {
  auto sizes = Op::example(m, load);
  if constexpr (HoldsLinear<Op>) sizes.second.linear.weight = weights.query_key_value.weight;
  return {step<Op>(Op::name, m, load, dtype, std::move(sizes))};
}

template <>
std::vector<Step> steps_of<ops::Linear>(const ModelConfig& m, const Workload& load, DType dtype,
                                        const LayerWeights& weights) {
  const std::int64_t t = load.tokens(), h = m.hidden_size, i = m.intermediate_size;
  // What waits for what, of a parallel residual; each product has tensors of its own, whose numbers stay as they are.
  static constexpr char hidden = 0, qkv = 0, attn_residual = 0, mlp_act = 0;
  using Names = std::vector<const void*>;
  const auto linear = [&](const Site& site, const LinearParams& params, std::int64_t in, std::int64_t out,
                          ops::Epilogue epilogue, Names reads, const void* writes) {
    Step s = step<ops::Linear>(
        site.name, m, load, dtype,
        {{t, in, out, epilogue == ops::Epilogue::residual}, {.linear = {params.weight}, .epilogue = epilogue}});
    s.reads = std::move(reads);
    s.writes = {writes};
    return s;
  };
  using ops::Epilogue;
  return {
      linear(site::query_key_value, weights.query_key_value, h, 3 * h, Epilogue::none, {&hidden}, &qkv),
      linear(site::dense, weights.dense, h, h, Epilogue::residual, {&qkv, &hidden}, &attn_residual),
      linear(site::dense_h_to_4h, weights.dense_h_to_4h, h, i, Epilogue::gelu_erf, {&hidden}, &mlp_act),
      linear(site::dense_4h_to_h, weights.dense_4h_to_h, i, h, Epilogue::residual, {&mlp_act, &attn_residual}, &hidden),
  };
}

}  // namespace

std::vector<std::string_view> op_names() {
  return {
#define CF_OP(Op) ops::Op::name,
#include "core/ops/ops.def"
#undef CF_OP
  };
}

std::vector<std::string_view> linear_op_names() {
  std::vector<std::string_view> names;
#define CF_OP(Op) \
  if constexpr (HoldsLinear<ops::Op>) names.push_back(ops::Op::name);
#include "core/ops/ops.def"
#undef CF_OP
  return names;
}

Result<std::vector<OpTiming>> time_op(DeviceTimer& timer, std::string_view op, const ModelConfig& model,
                                      const Workload& load, const OpBenchOptions& options) {
  // Dense weights are each step's own.
  OwnedLayerWeights quantised;
  if (options.linears.bits) quantised = procedural_layer(model, 0, 0, options.linears);
  std::vector<Step> steps;
#define CF_OP(Op) \
  if (op == ops::Op::name) steps = steps_of<ops::Op>(model, load, options.dtype, quantised.weights);
#include "core/ops/ops.def"
#undef CF_OP

  cuda::Context& context = timer.context();
  context.set_overlap(options.overlap);
  const double rotated_bytes = 4 * double(timer.info().l2_bytes);
  std::int64_t layers = options.layers;
  if (layers == 0)
    for (const Step& s : steps) layers = std::max(layers, std::int64_t(rotated_bytes / double(s.set_bytes)) + 1);
  layers = std::min(layers, OpBenchOptions::kMaxLayers);
  for (const Step& s : steps)
    if (Status status = s.allocate(context, layers); !status) return status;

  std::vector<OpTiming> timings;
  const auto measure = [&](Timing timing, double written_bytes, const auto& enqueue_layer) -> Status {
    const auto time_us = timer.time_graph_us(options.bench, [&]() -> Status {
      for (std::int64_t layer = 0; layer < layers; ++layer) CF_TRY(enqueue_layer(layer));
      return {};
    });
    if (!time_us) return time_us.status();
    std::vector<double> a_layer = *time_us;
    for (double& t : a_layer) t /= double(layers);
    timing.time_us = spread(std::move(a_layer));
    timings.push_back({.timing = timing,
                       .layers = layers,
                       .cold = timing.bytes * double(layers) >= rotated_bytes,
                       .limited_by_copy = 5 * written_bytes >= timing.bytes});
    return {};
  };
  Timing all;
  all.site = "layer";
  all.op = op;
  double written_bytes = 0;
  for (const Step& s : steps) {
    const auto run = [&](std::int64_t layer) { return s.run(context, layer); };
    if (Status status = measure(s.timing, s.written_bytes, run); !status) return status;
    all.bytes += s.timing.bytes;
    written_bytes += s.written_bytes;
  }
  if (steps.size() == 1) return timings;
  std::optional<cuda::DataflowCapture> graph;
  const auto run_all = [&](std::int64_t layer) -> Status {
    if (layer == 0) graph.emplace(context);
    for (const Step& s : steps)
      CF_TRY(graph->run(s.reads, s.writes, false, true, [&](cuda::Context& c) { return s.run(c, layer); }));
    return {};
  };
  if (Status status = measure(all, written_bytes, run_all); !status) return status;
  return timings;
}

}  // namespace cf::apps
