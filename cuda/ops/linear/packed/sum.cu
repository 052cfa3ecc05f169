#include "cuda/ops/linear/packed/sum.hpp"

#include "cuda/ops/linear/packed/call.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"

namespace cf::cuda {
namespace {

constexpr int kRows = kLinearSumRows;

/// The first product and the second.
struct SumCall {
  GptqMatrix matrix[2];
  GptqPlan plan[2];
  const void* x[2];
  LinearOutput output[2];
  int tokens;
};

template <class T>
struct SumEpilogue {
  const SumCall& c;
  int product;  // the block's

  struct Element {
    long offset;  // in y
    StoredWeight<kRows> bias[2], residual;
  };

  __device__ void ready() const { wait_for_predecessors(); }
  __device__ void apart() const {}
  __device__ const T* x(int token) const {
    return static_cast<const T*>(c.x[product]) + long(token) * c.matrix[product].in;
  }
  __device__ Element prepare(int token, int row) const {
    Element e{.offset = token * c.output[0].out + row, .bias = {}, .residual = {}};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (c.output[i].bias) e.bias[i].load(static_cast<const T*>(c.output[i].bias) + row);
    return e;
  }
  __device__ void begin(Element& e) const {
    if (c.output[0].residual) e.residual.load(static_cast<const T*>(c.output[0].residual) + e.offset);
  }
  __device__ void finish(const Element& e, float (&first)[kRows], float (&second)[kRows]) const {
    const auto add = [](float(&v)[kRows], const StoredWeight<kRows>& stored) {
      float added[kRows];
      stored.unpack(added, T{});
#pragma unroll
      for (int i = 0; i < kRows; ++i) v[i] += added[i];
    };
    if (c.output[0].bias) add(first, e.bias[0]);
    if (c.output[0].residual) add(first, e.residual);
    store_few(static_cast<T*>(c.output[0].y) + e.offset, first);
    if (c.output[1].bias) add(second, e.bias[1]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) second[i] += to_float(from_float<T>(first[i]));
    store_few(static_cast<T*>(c.output[1].y) + e.offset, second);
  }
};

extern __shared__ __align__(128) char gptq_smem[];

template <class T, GptqTokens Tokens, int Chunks>
__global__ void __launch_bounds__(gptq_threads(kLinearGptqTurns), kLinearGptqBlocksPerSm)
    linear_sum_kernel(const __grid_constant__ SumCall c) {
  constexpr GptqConfig config = linear_gptq_config(Tokens, false, kRows, Chunks);
  let_successor_start();
  const int product = cluster_rank() >= c.plan[1].first_rank;
  gptq_block<T, config>(c.matrix[product], c.plan[product], c.tokens, SumEpilogue<T>{c, product}, gptq_smem);
}

template <class T>
auto kernel_for(const GptqSumPlan& plan) {
  if (plan.second.digit_bytes == 0) return linear_sum_kernel<T, GptqTokens::eight, kGptqMaxChunks>;
  const int chunks = std::max(gptq_slice_chunks(plan.first), gptq_slice_chunks(plan.second));
  return chunks > kGptqMaxChunks ? linear_sum_kernel<T, GptqTokens::one, kGptqOneTokenChunks>
                                 : linear_sum_kernel<T, GptqTokens::one, kGptqMaxChunks>;
}

}  // namespace

Status prepare(const ops::LinearSum::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_linear_sum(const ops::LinearSum::Args& a, const GptqSumPlan& plan, LaunchList& launches) {
  constexpr std::string_view name = ops::LinearSum::name;
  SumCall c{.matrix = {},
            .plan = {plan.first, plan.second},
            .x = {a.x.data, a.x2.data},
            .output = {},
            .tokens = plan.second.tokens};
  int i = 0;
  CF_TRY(ops::LinearSum::for_each_part(a, [&](const ops::Linear::Args& part) -> Status {
    const auto& weight = std::get<PackedWeight>(part.linear.weight);
    CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(name, weight));
    c.matrix[i] = gptq_matrix(weight, layout);
    c.output[i++] = linear_output(part);
    return {};
  }));
  return with_gptq_activation(name, a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    return launch(name, launches, linear_gptq_shape(plan.second, linear_gptq_smem_bytes(launches.arch(), plan.second)),
                  kernel_for<T>(plan), c);
  });
}

}  // namespace cf::cuda
