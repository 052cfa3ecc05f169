#include "cuda/model/executor.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/model/passes.hpp"
#include "cuda/model/arena.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/persistent/persistent_kernel.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "cuda/runtime/stream.hpp"
#include "cuda/step/capture.hpp"
#include "cuda/step/graph.hpp"
#include "cuda/step/lower.hpp"

namespace cf::cuda {
namespace {

constexpr std::string_view kName = "step";

/// One step's layers on the device.
struct Layers {
  ModelSpec model;
  LayerRange range;
  std::vector<LayerWeights> weights;
  std::vector<LayerTensors> tensors;
  Scratch scratch;
};

/// Calls f(model, weights, tensors) for every layer in order and names the one that it fails for.
template <class F>
Status for_each_layer(const Layers& layers, F&& f) {
  for (std::size_t i = 0; i < layers.weights.size(); ++i) {
    const std::int64_t layer = layers.range.first + std::int64_t(i);
    if (Status s = f(layers.model.of_layer(layer), layers.weights[i], layers.tensors[i]); !s)
      return Status::error(s.code(), layer_prefix(layer) + s.message());
  }
  return {};
}

/// A prepared step.
class Prepared {
 public:
  virtual ~Prepared() = default;
  virtual Status launch(CUstream_st* stream) = 0;
  /// The error of an earlier launch that was given up, reported once.
  virtual Status take_report() { return {}; }
};

class PreparedLaunches : public Prepared {
 public:
  PreparedLaunches(LaunchList launches, bool early) : launches_(std::move(launches)), early_(early) {}
  Status launch(CUstream_st* stream) override { return launches_.submit(stream, {.early = early_}); }

 private:
  LaunchList launches_;
  bool early_;
};

class PreparedGraph : public Prepared {
 public:
  explicit PreparedGraph(GraphExec graph) : graph_(std::move(graph)) {}
  Status launch(CUstream_st* stream) override {
    return from_cuda(cudaGraphLaunch(graph_.get(), stream), "cudaGraphLaunch");
  }

 private:
  GraphExec graph_;
};

class PreparedPersistent : public Prepared {
 public:
  PreparedPersistent(PersistentKernel kernel, Impl impl, const Layers& layers)
      : kernel_(std::move(kernel)), impl_(impl) {
    input_ = layers.tensors.front().hidden;
    for (const LayerTensors& t : layers.tensors) outputs_.push_back(t.output);
  }
  Status launch(CUstream_st* stream) override {
    const std::int64_t count = std::int64_t(outputs_.size());
    if (impl_ == Impl::persistent) return kernel_.enqueue(stream, 0, count, input_, outputs_.back());
    for (std::int64_t i = 0; i < count; ++i) {
      const ConstAnyView<2> input = i == 0 ? input_ : ConstAnyView<2>();
      CF_TRY(impl_ == Impl::split ? kernel_.enqueue_split(stream, i, input, outputs_[std::size_t(i)])
                                  : kernel_.enqueue(stream, i, i + 1, input, outputs_[std::size_t(i)]));
    }
    return {};
  }
  Status take_report() override { return kernel_.take_report(); }

 private:
  PersistentKernel kernel_;
  Impl impl_;
  ConstAnyView<2> input_;
  std::vector<AnyView<2>> outputs_;
};

Result<std::unique_ptr<Prepared>> prepare_unfused(const Context& context, const Layers& layers) {
  LaunchList launches(context, layers.scratch);
  CF_TRY(for_each_layer(layers, [&](const ModelSpec& m, const LayerWeights& w, const LayerTensors& t) -> Status {
    if (m.ranks == 1) return prepare(ops::DecodeLayer::Args{.model = m, .weights = w, .t = t}, launches);
    CF_TRY_ASSIGN(Program program, record_layer(m, w, t));
    for (const Node& node : with_all_reduce(std::move(program), m).nodes) {
      launches.set_label(node.at.site.name.data());  // a literal, which ends in a zero byte
      CF_TRY(prepare(node, launches));
    }
    return {};
  }));
  return std::unique_ptr<Prepared>(std::make_unique<PreparedLaunches>(std::move(launches), context.overlap()));
}

Result<std::unique_ptr<Prepared>> prepare_graph(const Context& context, const Layers& layers, CUstream_st* stream) {
  const auto record = [&](DataflowCapture& capture) {
    return for_each_layer(layers, [&](const ModelSpec& m, const LayerWeights& w, const LayerTensors& t) {
      return capture_layer(m, w, t, capture);
    });
  };
  CF_TRY_ASSIGN(GraphExec graph, capture_dataflow(context, record, layers.scratch));
  // The graph's own memory is taken now rather than at the first launch.
  CF_TRY(from_cuda(cudaGraphUpload(graph.get(), stream), "cudaGraphUpload"));
  return std::unique_ptr<Prepared>(std::make_unique<PreparedGraph>(std::move(graph)));
}

Result<std::unique_ptr<Prepared>> prepare_persistent(const Context& context, Impl impl, DType dtype,
                                                     const Layers& layers) {
  const LayerTensors& t = layers.tensors.front();
  Program program;
  for (std::size_t i = 0; i < layers.weights.size(); ++i) {
    CF_TRY_ASSIGN(Program layer, record_layer(layers.model, layers.weights[i], layers.tensors[i],
                                              layers.range.first + std::int64_t(i)));
    std::ranges::move(layer.nodes, std::back_inserter(program.nodes));
  }
  CF_TRY_ASSIGN(const LoweredProgram lowered, lower(with_all_reduce(std::move(program), layers.model)));
  CF_TRY_ASSIGN(
      PersistentKernel kernel,
      PersistentKernel::create(context, persistent_model(layers.model, dtype), lowered.layers, {t.positions, t.kv_len},
                               {t.cos, t.sin}, {.first_model_layer = layers.range.first}));
  return std::unique_ptr<Prepared>(std::make_unique<PreparedPersistent>(std::move(kernel), impl, layers));
}

}  // namespace

struct Executor::State {
  /// What a step's launches depend on.
  using Key =
      std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::int64_t, std::int64_t, std::int64_t, const void*>;

  State(const Context& c, Impl i) : context(c), impl(i) {}
  ~State() { (void)cudaDeviceSynchronize(); }

  LayerRange range(const ResidentWeights& weights, const Step& step) const {
    return step.layers.value_or(weights.layers());
  }
  Key key(const ResidentWeights& w, const KvCache& c, const Workspace& s, const Step& step) const {
    const LayerRange r = range(w, step);
    return {w.version(), c.version(), s.version(), step.q_len, r.first, r.last, step.input.data};
  }
  Result<Layers> layers_of(const ResidentWeights& weights, const KvCache& cache, const Workspace& workspace,
                           const Step& step) const;
  Result<Prepared*> find(const ResidentWeights& weights, const KvCache& cache, const Workspace& workspace,
                         const Step& step);

  Context context;
  Impl impl;
  std::map<Key, std::unique_ptr<Prepared>> prepared;
};

Result<Layers> Executor::State::layers_of(const ResidentWeights& weights, const KvCache& cache,
                                          const Workspace& workspace, const Step& step) const {
  const LayerRange r = range(weights, step), all = weights.layers();
  const auto is_within = [&](const LayerRange& outer) {
    return outer.first <= r.first && r.first < r.last && r.last <= outer.last;
  };
  for (const auto& [what, outer] : {std::pair{"weights'", all}, {"cache's", cache.layers()}})
    if (!is_within(outer))
      return bad_argument(kName, "layers [first, last) must be a range within the " + std::string(what) + " [" +
                                     std::to_string(outer.first) + ", " + std::to_string(outer.last) + "), got [" +
                                     std::to_string(r.first) + ", " + std::to_string(r.last) + ")");
  for (std::int64_t layer = r.first; layer < r.last; ++layer)
    if (!weights.is_loaded(layer))
      return bad_argument(kName, "layer " + std::to_string(layer) + " has no weights, expected load_layer() first");
  if (step.q_len < 1 || cache.batch() * step.q_len > workspace.max_tokens())
    return bad_argument(kName, "q_len must be 1 to " + std::to_string(workspace.max_tokens() / cache.batch()) +
                                   ", what the workspace has room for with " + std::to_string(cache.batch()) +
                                   " sequences, got " + std::to_string(step.q_len));
  Layers layers{.model = weights.model(), .range = r, .weights = {}, .tensors = {}, .scratch = workspace.scratch()};
  for (std::int64_t layer = r.first; layer < r.last; ++layer) {
    layers.weights.push_back(weights.layer(layer));
    layers.tensors.push_back(workspace.tensors(cache, all.first, layer, step.q_len));
  }
  if (step.input) layers.tensors.front().hidden = step.input;
  return layers;
}

Result<Prepared*> Executor::State::find(const ResidentWeights& weights, const KvCache& cache,
                                        const Workspace& workspace, const Step& step) {
  const Key key = this->key(weights, cache, workspace, step);
  if (const auto found = prepared.find(key); found != prepared.end()) return found->second.get();
  CF_TRY_ASSIGN(const Layers layers, layers_of(weights, cache, workspace, step));
  CF_TRY_ASSIGN(std::unique_ptr<Prepared> made, impl == Impl::unfused ? prepare_unfused(context, layers)
                                                : impl == Impl::graph
                                                    ? prepare_graph(context, layers, step.stream)
                                                    : prepare_persistent(context, impl, weights.dtype(), layers));
  // A graph is uploaded, and the persistent kernel's scratch memory is cleared, on a stream that need not be the
  // step's.
  if (impl != Impl::unfused) CF_TRY(from_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"));
  return (prepared[key] = std::move(made)).get();
}

Executor::Executor(const Context& context, Impl impl) : state_(std::make_unique<State>(context, impl)) {}
Executor::Executor(Executor&&) noexcept = default;
Executor& Executor::operator=(Executor&&) noexcept = default;
Executor::~Executor() = default;

Impl Executor::impl() const { return state_->impl; }

Status Executor::prepare(const ResidentWeights& weights, const KvCache& cache, const Workspace& workspace,
                         const Step& step) {
  return state_->find(weights, cache, workspace, step).status();
}

Status Executor::step(const ResidentWeights& weights, const KvCache& cache, const Workspace& workspace,
                      const Step& step) {
  if (step.q_len != cache.q_len())
    return bad_argument(kName, "q_len must be " + std::to_string(cache.q_len()) +
                                   ", what the cache was extended by, got " + std::to_string(step.q_len));
  CF_TRY_ASSIGN(Prepared* const prepared, state_->find(weights, cache, workspace, step));
  return (prepared)->launch(step.stream);
}

Status Executor::synchronize(CUstream_st* stream) {
  const Status done = from_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  CF_TRY(take_report());
  return done;
}

Status Executor::take_report() {
  for (const auto& entry : state_->prepared) CF_TRY(entry.second->take_report());
  return {};
}

}  // namespace cf::cuda
