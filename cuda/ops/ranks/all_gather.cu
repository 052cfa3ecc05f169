#include "cuda/ops/ranks/all_gather.hpp"

#include "cuda/comm/exchange.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// A thread has a lane of one rank's part.
__global__ void __launch_bounds__(256)
    all_gather_parts_kernel(const uint4* x, uint4* y, long lanes, long width, int ranks) {
  let_successor_start();
  wait_for_predecessors();
  const long i = long(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < lanes * ranks) y[gathered(i % lanes, int(i / lanes), ranks, width)] = x[i];
}

__global__ void __launch_bounds__(128, 1)
    all_gather_words_kernel(const uint4* x, uint4* y, long lanes, long width, const __grid_constant__ Peers peers) {
  begin_exchange(peers);
  gather_by_words(PeerExchange(peers), x, y, lanes, width);
}

__global__ void __launch_bounds__(512, 1)
    all_gather_slices_kernel(const uint4* x, uint4* y, long lanes, long width, const __grid_constant__ Peers peers) {
  begin_exchange(peers);
  gather_by_slices(PeerExchange(peers), x, y, lanes, width);
}

std::int64_t most_words(const ExchangeLayout& l) { return l.one_shot_lanes; }
std::int64_t most_slices(const ExchangeLayout& l) { return l.slice_lanes; }

/// The lanes of a token's part.
long width_of(const ops::AllGather::Args& a) {
  return long(a.x.shape[2] * std::int64_t(size_bytes(a.x.dtype)) / kLaneBytes);
}

Status launch_exchange(const ops::AllGather::Args& a, const ExchangePlan& plan, LaunchList& launches) {
  const std::int64_t lanes = a.x.bytes() / kLaneBytes;
  CF_TRY_ASSIGN(const Peers peers, peers_of(a, lanes, plan.shots == 1 ? most_words : most_slices, launches));
  return launch(ops::AllGather::name, launches, {.grid = unsigned(plan.blocks), .block = unsigned(plan.threads)},
                plan.shots == 1 ? all_gather_words_kernel : all_gather_slices_kernel,
                static_cast<const uint4*>(a.x.data), static_cast<uint4*>(a.y.data), long(lanes), width_of(a), peers);
}

}  // namespace

Status prepare(const ops::AllGather::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_all_gather_parts(const ops::AllGather::Args& a, const ExchangePlan& plan, LaunchList& launches) {
  return launch(ops::AllGather::name, launches, {.grid = unsigned(plan.blocks), .block = unsigned(plan.threads)},
                all_gather_parts_kernel, static_cast<const uint4*>(a.x.data), static_cast<uint4*>(a.y.data),
                long(a.x.bytes() / kLaneBytes / a.ranks), width_of(a), int(a.ranks));
}

Status launch_all_gather_words(const ops::AllGather::Args& a, const ExchangePlan& plan, LaunchList& launches) {
  return launch_exchange(a, plan, launches);
}

Status launch_all_gather_slices(const ops::AllGather::Args& a, const ExchangePlan& plan, LaunchList& launches) {
  return launch_exchange(a, plan, launches);
}

}  // namespace cf::cuda
