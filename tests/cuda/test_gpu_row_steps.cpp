// Steps of a layer whose caller has the cache as rows, too: one graph launch has the bits of the launches one by one,
// wherever the step's tensors lie.
#include <array>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "cuda/port/row_ops.hpp"
#include "cuda/port/row_steps.hpp"
#include "tests/cuda/device_layers.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/setups.hpp"

using namespace cf;
using namespace cf::test;
using cuda::RowSteps;
using cuda::TokenRows;

namespace {

using Call = std::pair<ops::DecodeLayer::Args, TokenRows>;

/// One sequence of a layer. Each step has an input and outputs of its own, and weights in one of two places.
class Sequence {
 public:
  Sequence(const cuda::Context& c, const HostLayers& host) : context_(c), host_(host) {
    for (auto& copy : copies_) copy = std::make_unique<DeviceLayers>(c, host);
    const ModelShape s = host.config.spec().shape;
    capacity_ = host.load.cache_capacity();
    std::vector<std::int32_t> numbers(std::size_t(capacity_) + 1);
    std::iota(numbers.begin(), numbers.end(), 0);
    numbers_ = static_cast<const std::int32_t*>(memory().copy(numbers.data(), std::int64_t(numbers.size()) * 4));
    rows_.k = own<2>(activations(host.config.dtype, {capacity_, s.num_kv_heads * s.head_dim}, "k rows"));
    rows_.v = own<2>(activations(host.config.dtype, {capacity_, s.num_kv_heads * s.head_dim}, "v rows"));
  }

  /// What a step behind `length` tokens is given; rows `first` .. length - 1 become entries of the cache.
  Call step(std::int64_t length, std::int64_t first) {
    const std::size_t number = outputs_.size();
    DeviceLayers& at = *copies_[number % copies_.size()];
    ops::DecodeLayer::Args a{.model = host_.config.spec(), .weights = at.layers[0].weights, .t = memory().tensors(0)};
    const Shape hidden{1, host_.config.hidden_size};
    a.t.hidden = own<2>(activations(host_.config.dtype, hidden, "hidden " + std::to_string(number)));
    a.t.cos = at.tensors(0).cos;
    a.t.sin = at.tensors(0).sin;
    a.t.positions = {numbers_ + length, {1}};
    a.t.kv_len = {numbers_ + length + 1, {1}};
    a.t.max_kv_len = length + 1;
    for (AnyView<3>* made : {&a.t.k, &a.t.v}) made->data = memory().allocate(made->bytes());
    a.t.output.data = memory().allocate(a.t.output.bytes());
    outputs_.push_back({a.t.output, a.t.k, a.t.v});
    TokenRows rows = rows_;
    rows.first = first;
    rows.last = length;
    return {a, rows};
  }

  Status launch(const Call& call) {
    cuda::LaunchList launches(context_);
    CF_TRY(cuda::prepare_layer(call.first, call.second, launches));
    return launches.submit(context_.stream(), {.early = true, .first_waits = true});
  }

  /// Every step's outputs, then the caches and the rows.
  std::vector<Tensor> results() {
    std::vector<Tensor> all;
    for (const Made& made : outputs_) {
      all.push_back(fetch<2>(made.output));
      all.push_back(fetch<3>(made.k));
      all.push_back(fetch<3>(made.v));
    }
    for (const LayerCache& cache : memory().caches()) {
      all.push_back(fetch<4>(cache.k));
      all.push_back(fetch<4>(cache.v));
    }
    all.push_back(fetch<2>(rows_.k));
    all.push_back(fetch<2>(rows_.v));
    return all;
  }

 private:
  struct Made {
    AnyView<2> output;
    AnyView<3> k, v;
  };
  DeviceLayers& memory() { return *copies_[0]; }
  template <int Rank>
  AnyView<Rank> own(const Tensor& from) {
    AnyView<Rank> view(nullptr, {from.shape()[0], from.shape()[1]}, from.dtype());
    view.data = const_cast<void*>(memory().copy(from.data(), from.size_bytes()));
    return view;
  }

  cuda::Context context_;
  const HostLayers& host_;
  std::array<std::unique_ptr<DeviceLayers>, 2> copies_;  // weights in two places
  std::int64_t capacity_ = 0;
  const std::int32_t* numbers_ = nullptr;
  TokenRows rows_;
  std::vector<Made> outputs_;
};

ModelConfig layer_of(ModelConfig m, DType dtype) {
  m.num_hidden_layers = 1;
  m.dtype = dtype;
  m.max_position_embeddings = 640;
  return m;
}

HostLayers host_layers(const ModelConfig& m) { return HostLayers(m, {.batch = 1, .kv_len = 1, .capacity = 640}); }

/// Runs steps of these lengths on two sequences, by graphs where they follow the last one, and kernel by kernel, and
/// compares all that they leave. Nothing waits between two steps: those on the stream keep the tensors that they were
/// given.
void check_steps(cuda::Context& c, const HostLayers& host, RowSteps& steps, std::span<const std::int64_t> lengths) {
  Sequence one(c, host), other(c, host);
  std::vector<Call> by_graph, by_host;
  std::int64_t valid = -1;
  for (const std::int64_t length : lengths) {
    const std::int64_t first = valid == length ? length : 0;
    by_graph.push_back(one.step(length, first));
    by_host.push_back(other.step(length, first));
    valid = length + 1;
  }
  for (const auto& [args, rows] : by_graph)
    require_ok(rows.first < rows.last ? one.launch({args, rows}) : steps.step(args, rows, c.stream()));
  for (const Call& call : by_host) require_ok(other.launch(call));
  const std::vector<Tensor> got = one.results(), expected = other.results();
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
}

/// Steps in a row, over lengths at which attention is planned anew, one twice, and back.
constexpr std::array<std::int64_t, 15> kLengths{126, 127, 128, 129, 127, 127, 128, 255, 256, 257, 511, 512, 513, 0, 1};

}  // namespace

TEST_CASE("steps with rows: a graph has the bits of its launches, wherever tensors lie", "[gpu][row_steps][small]") {
  const DType dtype = GENERATE(DType::f16, DType::bf16);
  ModelConfig one_branch = model_of(2, 80, 20, 640);
  one_branch.use_parallel_residual = false;
  // ln_qkv with a parallel and a sequential residual; sites' own kernels, with RMSNorm and SwiGLU.
  for (const ModelConfig& m :
       {model_of(2, 80, 20, 640), one_branch, gated_model_of(ModelType::llama, 4, 4, 64, 256, 320)})
    for (cuda::Context& c : contexts()) {
      INFO("hidden " << m.hidden_size << ", plans for " << to_string(c.arch()));
      const HostLayers host = host_layers(layer_of(m, dtype));
      RowSteps steps(c);
      check_steps(c, host, steps, kLengths);
      CHECK(steps.graphs() > 1);
    }
}

TEST_CASE("steps with rows: a graph of a layer of Pythia-2.8B has the bits of its launches", "[gpu][row_steps]") {
  const ModelConfig m = layer_of(model_of(32, 80, 20, 10240), DType::f16);
  cuda::Context c = context();
  const HostLayers host = host_layers(m);
  RowSteps steps(c);
  std::array<std::int64_t, 20> lengths;
  std::iota(lengths.begin(), lengths.end(), 120);
  check_steps(c, host, steps, lengths);
  CHECK(steps.graphs() == 2);  // up to 128 keys, and with two splits
}

TEST_CASE("steps with rows: the same step has the same bits a thousand times", "[gpu][row_steps]") {
  const ModelConfig m = layer_of(model_of(2, 80, 20, 640), DType::f16);
  cuda::Context c = context();
  const HostLayers host = host_layers(m);
  Sequence sequence(c, host);
  RowSteps steps(c);
  require_ok(sequence.launch(sequence.step(300, 0)));
  const auto call = sequence.step(300, 300);
  require_ok(steps.step(call.first, call.second, c.stream()));
  const Tensor expected = fetch<2>(call.first.t.output);
  for (int i = 0; i < 1000; ++i) {
    require_cuda(cudaMemsetAsync(call.first.t.output.data, 0xff, std::size_t(call.first.t.output.bytes()), c.stream()));
    require_ok(steps.step(call.first, call.second, c.stream()));
    if (!same_bits(fetch<2>(call.first.t.output), expected)) FAIL("run " << i << " has other bits");
  }
  CHECK(steps.graphs() == 1);
}

TEST_CASE("steps with rows: a step that needs more than its own row is refused", "[gpu][row_steps][bad]") {
  const ModelConfig m = layer_of(model_of(2, 80, 20, 640), DType::f16);
  cuda::Context c = context();
  const HostLayers host = host_layers(m);
  Sequence sequence(c, host);
  RowSteps steps(c);
  const auto call = sequence.step(5, 3);
  CHECK(refusal_fault(steps.step(call.first, call.second, c.stream()), Code::invalid_argument,
                      {"decode_layer: rows before 5 must be entries of the cache, got rows that are none from 3 on"}) ==
        "");
  auto bad = sequence.step(5, 5);
  bad.first.t.output.shape[1] = 152;
  CHECK(refusal_fault(steps.step(bad.first, bad.second, c.stream()), Code::invalid_argument, {"'output' has shape"}) ==
        "");
  CHECK(steps.graphs() == 0);
}
