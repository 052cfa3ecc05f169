// A block answers for one row of logits. Whatever is summed is an integer, so equal logits give equal bits, wherever
// their row begins.
#include "cuda/ops/sample/score.hpp"

#include <algorithm>

#include "core/sampling.hpp"
#include "cuda/device/sync.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/ops/sample/row.cuh"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

constexpr std::string_view kName = "score";
// Two blocks share an SM: while one waits for its threads or for memory, the other computes.
constexpr int kWarps = 16, kThreads = 32 * kWarps, kBlocksOfSm = 2;
constexpr int kInFlight = 4;  // vectors of a row that a thread loads at once

/// The order key of a logit that is NaN or +infinity: above those of all others, and highest for the lowest id.
__device__ std::uint64_t refused_key(std::int32_t id) { return std::uint64_t(~0u) << 32 | ~std::uint32_t(id); }

/// The largest key of a block, in all threads. `of_warps` is shared memory.
__device__ std::uint64_t block_max(std::uint64_t key, std::uint64_t (&of_warps)[kWarps]) {
  key = warp_max(key);
  __syncthreads();  // every thread has read what the call before left here
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = key;
  __syncthreads();
  return warp_max(of_warps[threadIdx.x % kWarps]);
}

/// The sum over a block, in all threads.
__device__ std::uint64_t block_sum(std::uint64_t x, std::uint64_t (&of_warps)[kWarps]) {
  const int lane = int(threadIdx.x % 32);
  const std::uint64_t of_warp = warp_scan(x, lane);
  __syncthreads();  // every thread has read what the call before left here
  if (lane == 31) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  return __shfl_sync(~0u, warp_scan(lane < kWarps ? of_warps[lane] : 0, lane), 31);
}

/// The highest logit of a row, of equal ones the lowest id; before all others the first one that is NaN or +infinity.
template <class T>
__device__ LogitOf highest_logit(const T* logits, std::int32_t vocab, std::uint64_t (&of_warps)[kWarps]) {
  float highest = -INFINITY;
  std::int32_t highest_id = 0, refused = vocab;
  // A thread's ids ascend: it keeps the first one of each.
  for_each_logit<kThreads, kInFlight>(logits, vocab, [&](float logit, std::int32_t id) {
    if (!(logit < INFINITY)) refused = min(refused, id);
    if (logit > highest) {
      highest = logit;
      highest_id = id;
    }
  });
  const std::uint64_t key = refused < vocab ? refused_key(refused) : sampling::order_key(highest, highest_id);
  const std::int32_t id = sampling::id_of(block_max(key, of_warps));
  return {to_float(logits[id]), id};
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm) score_kernel(const __grid_constant__ ScoreArgs a) {
  let_successor_start();
  wait_for_predecessors();
  __shared__ std::uint64_t of_warps[kWarps];
  const long row = blockIdx.x;
  const auto vocab = std::int32_t(a.logits.shape[1]);
  const T* const logits = static_cast<const T*>(a.logits.data) + row * vocab;

  const LogitOf most = highest_logit(logits, vocab, of_warps);
  const bool is_finite = most.logit < INFINITY && most.logit > -INFINITY;
  std::uint64_t weights = 0;
  if (is_finite) {
    constexpr auto one = float(std::uint64_t(1) << sampling::kWeightBits);
    for_each_logit<kThreads, kInFlight>(logits, vocab, [&](float logit, std::int32_t) {
      weights += __float2ull_rn(expf(__fsub_rn(logit, most.logit)) * one);
    });
    weights = block_sum(weights, of_warps);
  }
  if (threadIdx.x == 0) a.sums[row] = {weights, most};
  if (!is_finite) return;

  LogitOf* const likely = a.likely + row * a.top;
  if (a.top > 0 && threadIdx.x == 0) likely[0] = most;
  std::uint64_t above = sampling::order_key(most.logit, most.id);
  for (long i = 1; i < a.top; ++i) {
    std::uint64_t highest = 0;
    for_each_logit<kThreads, kInFlight>(logits, vocab, [&](float logit, std::int32_t id) {
      const std::uint64_t key = sampling::order_key(logit, id);
      if (key < above && key > highest) highest = key;
    });
    above = block_max(highest, of_warps);
    if (threadIdx.x == 0) likely[i] = {to_float(logits[sampling::id_of(above)]), sampling::id_of(above)};
  }

  const std::int32_t end = a.next_end.data[row];
  const long begin = row == 0 ? a.next_begin : long(a.next_end.data[row - 1]);
  for (long i = begin + long(threadIdx.x); i < end; i += kThreads) a.next_logits[i] = to_float(logits[a.next.data[i]]);
}

/// Lists the call's tensors, arrays of structs as words of four bytes.
template <class F>
void tensors(const ScoreArgs& a, F&& f) {
  const auto words = [](auto* data, auto shape) {
    return View<const std::int32_t, int(shape.size())>{reinterpret_cast<const std::int32_t*>(data), shape};
  };
  const auto [rows, vocab] = a.logits.shape;
  const auto sums = extents(rows, std::int64_t(sizeof(RowSum) / 4)), likely = extents(rows, 2 * a.top);
  f(TensorSpec{Role::input, "logits"}, a.logits, extents(rows, vocab));
  f(TensorSpec{Role::position, "next_end"}, a.next_end, extents(rows));
  f(TensorSpec{Role::position, "sums"}, words(a.sums, sums), sums);
  if (const auto next = a.next.shape; next[0] > 0) {
    f(TensorSpec{Role::token_id, "next"}, a.next, next);
    f(TensorSpec{Role::position, "next_logits"}, words(a.next_logits, next), next);
  }
  if (a.top > 0) f(TensorSpec{Role::position, "likely"}, words(a.likely, likely), likely);
}

Status check(const ScoreArgs& a, const LaunchList& launches) {
  const std::int64_t vocab = a.logits.shape[1], most = std::min(vocab, kMostLikely);
  if (a.top < 0 || a.top > most)
    return bad_argument(kName, "top must be 0 to " + std::to_string(most) + ", got " + std::to_string(a.top));
  TensorCheck check(kName);
  tensors(a, check);
  CF_TRY(check.status());
  if (vocab > sampling::kMostTokens)
    return bad_argument(
        kName, "vocab must be 1 to " + std::to_string(sampling::kMostTokens) + ", got " + std::to_string(vocab));
  if (launches.trusts_addresses()) return {};
  // Only the sums and the likely logits need another alignment than that of their elements.
  static_assert(alignof(RowSum) == 8 && alignof(LogitOf) == 4);
  DeviceCheck elements(kName, launches.device(), 1), structs(kName, launches.device(), alignof(RowSum));
  tensors(a, [&](const TensorSpec& t, const auto& view, const auto& shape) {
    (t.name == "sums" ? structs : elements)(t, view, shape);
  });
  CF_TRY(elements.status());
  return structs.status();
}

}  // namespace

Status prepare(const ScoreArgs& a, LaunchList& launches) {
  CF_TRY(check(a, launches));
  return with_activation(kName, a.logits.dtype, [&](auto zero) {
    return launch(kName, launches, {.grid = unsigned(a.logits.shape[0]), .block = kThreads},
                  score_kernel<decltype(zero)>, a);
  });
}

}  // namespace cf::cuda
