#include "cuda/ops/ranks/all_reduce.hpp"

#include "cuda/comm/exchange.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// A thread has an element.
template <class T>
__global__ void __launch_bounds__(256) all_reduce_parts_kernel(const T* x, T* y, long size, int ranks) {
  let_successor_start();
  wait_for_predecessors();
  const long i = long(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= size) return;
  float sum = to_float(x[i]);
  for (int r = 1; r < ranks; ++r) sum += to_float(x[r * size + i]);
  y[i] = from_float<T>(sum);
}

template <class T>
__global__ void __launch_bounds__(128, 1)
    all_reduce_words_kernel(const uint4* x, uint4* y, long lanes, const __grid_constant__ Peers peers) {
  begin_exchange(peers);
  sum_by_words<T>(PeerExchange(peers), x, y, lanes);
}

template <class T>
__global__ void __launch_bounds__(512, 1)
    all_reduce_slices_kernel(const uint4* x, uint4* y, long lanes, const __grid_constant__ Peers peers) {
  begin_exchange(peers);
  sum_by_slices<T>(PeerExchange(peers), x, y, lanes);
}

std::int64_t most_words(const ExchangeLayout& l) { return l.one_shot_lanes; }
std::int64_t most_slices(const ExchangeLayout& l) { return l.slice_lanes * l.ranks; }

Status launch_exchange(const ops::AllReduce::Args& a, const ExchangePlan& plan, LaunchList& launches) {
  const std::int64_t lanes = a.y.bytes() / kLaneBytes;
  CF_TRY_ASSIGN(const Peers peers, peers_of(a, lanes, plan.shots == 1 ? most_words : most_slices, launches));
  const auto* const x = static_cast<const uint4*>(a.x.data);
  return with_activation(ops::AllReduce::name, a.y.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = plan.shots == 1 ? all_reduce_words_kernel<T> : all_reduce_slices_kernel<T>;
    return launch(ops::AllReduce::name, launches, {.grid = unsigned(plan.blocks), .block = unsigned(plan.threads)},
                  kernel, x, static_cast<uint4*>(a.y.data), long(lanes), peers);
  });
}

}  // namespace

Status prepare(const ops::AllReduce::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_all_reduce_parts(const ops::AllReduce::Args& a, const ExchangePlan& plan, LaunchList& launches) {
  return with_activation(ops::AllReduce::name, a.y.dtype, [&](auto zero) {
    using T = decltype(zero);
    return launch(ops::AllReduce::name, launches, {.grid = unsigned(plan.blocks), .block = unsigned(plan.threads)},
                  all_reduce_parts_kernel<T>, static_cast<const T*>(a.x.data), static_cast<T*>(a.y.data),
                  long(a.y.size()), int(a.ranks));
  });
}

Status launch_all_reduce_words(const ops::AllReduce::Args& a, const ExchangePlan& plan, LaunchList& launches) {
  return launch_exchange(a, plan, launches);
}

Status launch_all_reduce_slices(const ops::AllReduce::Args& a, const ExchangePlan& plan, LaunchList& launches) {
  return launch_exchange(a, plan, launches);
}

}  // namespace cf::cuda
