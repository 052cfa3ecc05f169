// The same bits on every run, for every op: a thousand runs on restored activations, each compared on the device, with
// and without overlap of dependent kernels, under the plans of both GPUs.
#include "cuda/runtime/stream.hpp"
#include "tests/cuda/device_bytes.hpp"
#include "tests/cuda/device_check.hpp"
#include "tests/support/op_test_case.hpp"

using namespace cf;
using namespace cf::test;

namespace {

/// Copies of all blocks of a problem but its weights and tables, which a kernel may read before its predecessor is
/// done, and the pairs of blocks and copies.
class Copies {
 public:
  template <class Op>
  explicit Copies(DeviceProblem<Op>& p) : pairs_(std::as_bytes(std::span<const BytePair>(copy(p)))) {}

  const BytePair* pairs() const { return reinterpret_cast<const BytePair*>(pairs_.data()); }
  int count() const { return int(copies_.size()); }
  /// The copy of the nth such block.
  const DeviceBytes& operator[](std::size_t nth) const { return copies_[nth]; }

 private:
  template <class Op>
  std::vector<BytePair> copy(DeviceProblem<Op>& p) {
    std::vector<BytePair> pairs;
    for (std::size_t i = 0; i < p.blocks().size(); ++i) {
      const Role role = p.blocks()[i].role;
      if (is_weight(role) || is_table(role)) continue;
      const DeviceBytes& memory = p.memory()[i];
      copies_.emplace_back(std::span(memory.data(), memory.size()));
      pairs.push_back({memory.data(), copies_.back().data(), memory.size()});
    }
    return pairs;
  }

  std::vector<DeviceBytes> copies_;
  DeviceBytes pairs_;
};

/// The bytes in which any of 10 * `replays` runs differs from `expected`. They are replays of a graph: launches from
/// the host are too far apart for kernels to overlap.
template <class Op>
std::uint64_t differences(DeviceProblem<Op>& p, const Copies& before, const Copies& expected, cuda::Context& context,
                          int replays) {
  const std::uint64_t zero = 0;
  const DeviceBytes different(std::as_bytes(std::span(&zero, 1)));
  const Result<cuda::GraphExec> runs = cuda::capture(context.stream(), [&]() -> Status {
    for (int i = 0; i < 10; ++i) {
      restore_late(before.pairs(), before.count(), context.stream());
      CF_TRY(cuda::run(p.args(), context));
      count_differences_and_scrub(expected.pairs(), expected.count(),
                                  reinterpret_cast<std::uint64_t*>(different.data()), context.stream());
    }
    return {};
  });
  INFO(runs.status().message());
  REQUIRE(runs);
  for (int i = 0; i < replays; ++i) require_cuda(cudaGraphLaunch(runs->get(), context.stream()));
  require_cuda(cudaStreamSynchronize(context.stream()));
  std::uint64_t n = 0;
  different.fetch(&n);
  return n;
}

/// A problem's runs have the same bits under the plans of both GPUs.
template <class Op>
void check_reruns(const Setup& s) {
  const auto stream = cuda::make_stream();
  REQUIRE(stream);
  INFO(Op::name << ": " << describe(s));
  DeviceProblem<Op> p(s);
  const Copies before(p);
  for (cuda::Context& c : contexts(stream->get())) {
    INFO("planned for " << to_string(c.arch()));
    restore_late(before.pairs(), before.count(), c.stream());
    p.run(c);
    const Copies expected(p);
    for (bool overlap : {false, true}) {
      INFO("overlap " << overlap);
      c.set_overlap(overlap);
      CHECK(differences(p, before, expected, c, 100) == 0);
    }
  }
}

}  // namespace

OP_TEST_CASE("Every op on the GPU makes the same bits a thousand times", "[gpu][reruns]", DeviceOps) {
  // 80 queries a step: an H200's plan and an RTX 5090's split their keys differently.
  const ModelConfig gated = gated_model_of(ModelType::qwen2, 20, 5, 64, 1280, 640);
  for (const auto& [model, load] : {std::pair{model_of(20, 80, 20, 640), Workload{4, 1, 129, 130}},
                                    {model_of(20, 80, 20, 640), Workload{2, 9, 40, 40}},
                                    {gated, Workload{4, 1, 129, 130}},
                                    {gated, Workload{2, 9, 40, 40}}})
    for (DType dtype : {DType::f16, DType::bf16}) {
      Setup s{.model = model, .load = load, .activation = dtype, .weight = dtype, .values = dtype};
      s.model.max_position_embeddings = load.kv_len;
      check_reruns<TestType>(s);
    }
}

OP_TEST_CASE("Every fused op on the GPU makes the same bits a thousand times", "[gpu][reruns][gptq]", ops::Fused) {
  for (DType dtype : {DType::f16, DType::bf16})
    check_reruns<TestType>({.model = gated_model_of(ModelType::llama, 8, 2, 128, 1024, 512),
                            .load = {.batch = 1, .q_len = 1, .kv_len = 9, .capacity = 12},
                            .activation = dtype,
                            .weight = dtype,
                            .values = dtype,
                            .gptq = {4, 128, 1, false}});
}

TEST_CASE("A run that differs in one byte is counted", "[gpu][reruns][small]") {
  const auto stream = cuda::make_stream();
  REQUIRE(stream);
  cuda::Context c = context(stream->get());
  DeviceProblem<ops::LayerNorm> p({.model = model_of(2, 80, 20, 8), .activation = DType::f16});
  const Copies before(p);
  p.run(c);
  const Copies expected(p);
  CHECK(differences(p, before, expected, c, 1) == 0);
  std::byte* last = expected[1].data() + expected[1].size() - Problem<ops::LayerNorm>::guard_bytes - 1;
  require_cuda(cudaMemset(last, 0xff, 1));
  CHECK(differences(p, before, expected, c, 1) == 10);
}
