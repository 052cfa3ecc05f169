#include "apps/bench/op_bench.hpp"

#include <algorithm>
#include <functional>
#include <optional>

#include "core/model/config.hpp"
#include "core/model/examples.hpp"
#include "core/model/layer.hpp"
#include "core/procedural.hpp"
#include "cuda/model/linear_scratch.hpp"
#include "cuda/ops/linear/pack/pack.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/port/run.hpp"
#include "cuda/runtime/memory.hpp"
#include "cuda/runtime/range.hpp"
#include "cuda/step/graph.hpp"

namespace cf::apps {
namespace {

constexpr std::size_t kAlignment = 256;

/// One tensor of an op, at its offset in the memory of a set.
struct Block {
  Role role;
  std::string name;
  DType dtype;
  std::int64_t elements;
  std::size_t offset;
  const void* contents;  // what it is filled with; null for procedural elements
};

/// A site's op, its type erased, with one set of tensors for each layer.
struct Step {
  Timing timing;
  double written_bytes = 0;
  std::size_t set_bytes = 0;
  std::function<Status(cuda::Context&, std::int64_t layers)> allocate;
  std::function<Status(cuda::LaunchList&, std::int64_t layer)> prepare;
  std::vector<const void*> reads{}, writes{};  // of a layer's tensors, where a layer is several steps
};

/// A block's procedural elements, or the indices that the workload asks for.
Tensor made(const Block& b, const ModelConfig& m, const Workload& load) {
  Tensor t(b.dtype, {b.elements});
  if (is_index(b.role)) {
    for (std::int64_t i = 0; i < b.elements; ++i) {
      const std::int64_t value = b.role == Role::length     ? load.kv_len
                                 : b.role == Role::position ? load.kv_len - 1
                                                            : i * 7919 % m.vocab_size;
      t.as<std::int32_t>()[i] = std::int32_t(value);
    }
    return t;
  }
  const ProceduralKind kind = is_activation(b.role)  ? ProceduralKind::activation
                              : b.role == Role::gain ? ProceduralKind::gain
                                                     : ProceduralKind::weight;
  fill_procedural(t.data(), b.dtype, 0, b.elements, kind, 0, b.name);
  return t;
}

template <class Op>
class Sets {
 public:
  /// `sizes` are an op's dims and arguments. A quantised weight among these points to its codes.
  Sets(const ModelConfig& m, const Workload& load, DType dtype, const ops::Example<Op>& sizes)
      : model_(m), load_(load), dims_(sizes.first), args_(sizes.second) {
    Op::tensors(dims_, args_, [&](const TensorSpec&, auto& view, auto shape) {
      using Element = typename std::decay_t<decltype(view)>::element;
      if constexpr (std::is_void_v<Element>) view.dtype = dtype;
      std::copy(shape.begin(), shape.end(), view.shape.begin());
    });
    packing_ = pack();
    Op::tensors(dims_, args_, [&](const TensorSpec& t, auto& view, auto) {
      blocks_.push_back({t.role, std::string(t.name), view.dtype, view.size(), bytes_, view.data});
      const std::size_t bytes = std::size_t(view.bytes());
      bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
      if (t.role == Role::output) output_bytes_ += double(bytes);
      if (is_read(t.role)) input_bytes_ += double(bytes);
    });
  }
  std::size_t bytes() const { return bytes_; }
  /// The bytes of the cost that are written. An op without outputs writes to its state all bytes that it does not read.
  double written_bytes(const Cost& cost) const { return output_bytes_ > 0 ? output_bytes_ : cost.bytes - input_bytes_; }
  /// The bytes of the cost that each set has in memory of its own.
  double own_bytes(const Cost& cost) const { return cost.bytes - (HoldsLinear<Op> ? input_bytes_ + output_bytes_ : 0); }

  Status allocate(cuda::Context& context, std::int64_t layers) {
    CF_TRY(packing_);
    CF_TRY_ASSIGN(auto memory,
                  cuda::DeviceMemory::create(context, bytes_ * std::size_t(layers), "the tensors to rotate over"));
    memory_ = std::move(memory);
    for (const Block& b : blocks_) {
      if (b.role == Role::output) continue;
      const Tensor t = b.contents ? Tensor() : made(b, model_, load_);
      for (std::int64_t layer = 0; layer < layers; ++layer)
        CF_TRY(cuda::copy_to_device(context, set(layer) + b.offset, b.contents ? b.contents : t.data(),
                                    std::size_t(b.elements) * size_bytes(b.dtype)));
    }
    return {};
  }

  /// The arguments with a layer's tensors, valid until the next call.
  const typename Op::Args& args(std::int64_t layer) {
    auto block = blocks_.begin();
    Op::tensors(dims_, args_, [&](const TensorSpec& t, auto& view, auto) {
      const bool shared = HoldsLinear<Op> && (t.role == Role::input || t.role == Role::output);
      view.data = reinterpret_cast<decltype(view.data)>(set(shared ? 0 : layer) + block++->offset);
    });
    return args_;
  }

 private:
  Status pack() {
    CF_TRY(cuda::pack_call(args_, packed_));
    if constexpr (requires { args_.linear2; }) {
      CF_TRY_ASSIGN(packed2_, cuda::pack(args_.linear2.weight, {}));
      args_.linear2.weight = packed2_.weight;
    }
    return {};
  }
  std::byte* set(std::int64_t layer) { return memory_.data() + bytes_ * std::size_t(layer); }

  const ModelConfig& model_;
  Workload load_;
  typename Op::Dims dims_;
  typename Op::Args args_;
  cuda::Packed packed_, packed2_;  // own the weights that are quantised
  Status packing_;
  std::vector<Block> blocks_;
  std::size_t bytes_ = 0;
  double output_bytes_ = 0, input_bytes_ = 0;
  cuda::DeviceMemory memory_;
};

template <class Op>
Step step(std::string_view site, const ModelConfig& m, const Workload& load, DType dtype, ops::Example<Op> sizes) {
  if constexpr (HoldsLinear<Op>) sizes.first.weight = format_of(sizes.second.linear.weight);
  if constexpr (requires { sizes.second.linear2; }) sizes.first.weight2 = format_of(sizes.second.linear2.weight);
  const auto sets = std::make_shared<Sets<Op>>(m, load, dtype, sizes);
  Step s;
  s.timing.site = site;
  s.timing.op = Op::name;
  const Cost cost = Op::cost(sizes.first, dtype, dtype);
  s.timing.bytes = cost.bytes;
  s.timing.own_bytes = sets->own_bytes(cost);
  s.written_bytes = sets->written_bytes(cost);
  s.set_bytes = sets->bytes();
  s.allocate = [=](cuda::Context& context, std::int64_t layers) { return sets->allocate(context, layers); };
  s.prepare = [=](cuda::LaunchList& launches, std::int64_t layer) {
    return cuda::prepare(sets->args(layer), launches);
  };
  return s;
}

/// Puts a layer's matrices, which may be quantised, into a call of the shapes of its contract's example.
template <class Args>
void set_matrices(Args& args, const LayerWeights& of) {
  if constexpr (std::is_same_v<Args, ops::LinearSum::Args>) {
    args.linear.weight = of.dense.weight;
    args.linear2.weight = of.dense_4h_to_h.weight;
  } else if constexpr (std::is_same_v<Args, ops::RmsLinear::Args>) {
    args.linear.weight = of.dense_h_to_4h.weight;
  } else if constexpr (requires { args.linear; }) {
    args.linear.weight = of.query_key_value.weight;
  }
}

template <class Op>
std::vector<Step> steps_of(const ModelConfig& m, const Workload& load, DType dtype, const LayerWeights& weights) {
  auto sizes = ops::example<Op>(m, load);
  set_matrices(sizes.second, weights);
  return {step<Op>(Op::name, m, load, dtype, std::move(sizes))};
}

template <>
std::vector<Step> steps_of<ops::Linear>(const ModelConfig& m, const Workload& load, DType dtype,
                                        const LayerWeights& weights) {
  const ModelSpec spec = m.spec();
  const ModelNames& names = names_of(spec);
  const std::int64_t t = load.tokens(), h = m.hidden_size, i = m.intermediate_size,
                     attention = spec.shape.attention_size();
  // Addresses that stand for the tensors through which the products of a layer with a parallel residual wait for each
  // other. The products that are timed have tensors of their own.
  static constexpr char hidden = 0, qkv = 0, attn_residual = 0, mlp_act = 0;
  using Names = std::vector<const void*>;
  const auto linear = [&](const Site& site, const LinearParams& params, std::int64_t in, std::int64_t out,
                          ops::Epilogue epilogue, Names reads, const void* writes) {
    Step s = step<ops::Linear>(site.name, m, load, dtype,
                               {{t, in, out, epilogue == ops::Epilogue::residual, {}, ops::rows_of_output(epilogue)},
                                {.linear = {params.weight}, .epilogue = epilogue}});
    s.reads = std::move(reads);
    s.writes = {writes};
    return s;
  };
  using ops::Epilogue;
  return {
      linear(names.query_key_value, weights.query_key_value, h, spec.shape.qkv_size(), Epilogue::none, {&hidden}, &qkv),
      linear(names.dense, weights.dense, attention, h, Epilogue::residual, {&qkv, &hidden}, &attn_residual),
      linear(names.dense_h_to_4h, weights.dense_h_to_4h, h, i, epilogue_of(spec.traits.activation), {&hidden},
             &mlp_act),
      linear(names.dense_4h_to_h, weights.dense_4h_to_h, i, h, Epilogue::residual, {&mlp_act, &attn_residual}, &hidden),
  };
}

/// The timings of the op's sites for one workload.
Result<std::vector<OpTiming>> time_op(DeviceTimer& timer, const OpBenchRequest& r, const Workload& load) {
  // Dense weights are made with each step's tensors.
  OwnedLayerWeights quantised;
  if (r.linears.bits) quantised = procedural_layer(r.model, r.model.dtype, 0, 0, r.linears);
  std::vector<Step> steps;
#define CF_OP(Op) \
  if (r.op == ops::Op::name) steps = steps_of<ops::Op>(r.model, load, r.dtype, quantised.weights);
#include "core/ops/fused.def"
#include "core/ops/ops.def"
#include "core/ops/port.def"
#include "core/ops/ranks.def"
#undef CF_OP

  cuda::Context& context = timer.context();
  context.set_overlap(r.overlap);
  const double rotated_bytes = 4 * double(timer.info().l2_bytes);
  std::int64_t layers = r.layers;
  if (layers == 0)
    for (const Step& s : steps) layers = std::max(layers, std::int64_t(rotated_bytes / double(s.set_bytes)) + 1);
  layers = std::min(layers, OpBenchRequest::kMaxLayers);
  for (const Step& s : steps) CF_TRY(s.allocate(context, layers));

  // As in a model's steps, products of many tokens have scratch memory. All of a graph's share it.
  cuda::DeviceMemory scratch_memory;
  if (const std::size_t bytes =
          cuda::linear_scratch_bytes(r.model, r.dtype, load.tokens(), r.linears.bits != 0 && !r.linears.is_fp8)) {
    CF_TRY_ASSIGN(scratch_memory, cuda::DeviceMemory::create(context, bytes, "scratch memory"));
  }
  const cuda::Scratch scratch{scratch_memory.data(), scratch_memory.bytes()};

  std::vector<OpTiming> timings;
  const auto measure = [&](Timing timing, double written_bytes, const auto& enqueue_layer) -> Status {
    const cuda::Range range(timing.site.c_str());
    const auto all_layers = [&]() -> Status {
      for (std::int64_t layer = 0; layer < layers; ++layer) CF_TRY(enqueue_layer(layer));
      return {};
    };
    CF_TRY_ASSIGN(std::vector<double> time_us, timer.time_graph_us(r.bench, all_layers));
    for (double& t : time_us) t /= double(layers);
    timing.time_us = spread(std::move(time_us));
    timings.push_back({.timing = timing,
                       .layers = layers,
                       .cold = timing.bytes * double(layers) >= rotated_bytes,
                       .roofline_is_copy = 5 * written_bytes >= timing.bytes});
    return {};
  };
  Timing all;
  all.site = "layer";
  all.op = r.op;
  double written_bytes = 0;
  for (const Step& s : steps) {
    const auto run = [&](std::int64_t layer) -> Status {
      cuda::LaunchList launches(context, scratch);
      CF_TRY(s.prepare(launches, layer));
      return launches.submit(context.stream(), {.early = context.overlap()});
    };
    CF_TRY(measure(s.timing, s.written_bytes, run));
    all.bytes += s.timing.bytes;
    all.own_bytes += s.timing.own_bytes;
    written_bytes += s.written_bytes;
  }
  if (steps.size() == 1) return timings;
  std::optional<cuda::DataflowCapture> graph;
  const auto run_all = [&](std::int64_t layer) -> Status {
    if (layer == 0) graph.emplace(context);
    for (const Step& s : steps) {
      cuda::LaunchList launches(context, scratch);
      CF_TRY(s.prepare(launches, layer));
      CF_TRY(graph->add(s.reads, s.writes, launches, /*early=*/true));
    }
    return {};
  };
  CF_TRY(measure(all, written_bytes, run_all));
  return timings;
}

}  // namespace

Status bench_ops(const OpBenchRequest& request, const OpBenchSink& sink) {
  CF_TRY_ASSIGN(DeviceTimer timer, DeviceTimer::create());
  CF_TRY_ASSIGN(std::vector<double> read, timer.read_bytes_per_s(request.bench));
  CF_TRY_ASSIGN(std::vector<double> copy, timer.copy_bytes_per_s(request.bench));
  sink.device(timer.info(), {std::move(read), std::move(copy)});
  for (const Workload& load : request.loads) {
    CF_TRY_ASSIGN(const auto timings, time_op(timer, request, load));
    CF_TRY(sink.timed(load, timings));
  }
  return {};
}

}  // namespace cf::apps
