// What compute-sanitizer's racecheck makes of the rings of cuda/ops/linear/wgmma: the pattern by itself. All lanes of
// a warp read a stage, and one lane, behind __syncwarp(), tells the producer that it may be filled again. By PTX that
// is an order: the lanes' loads come before __syncwarp(), that before the lane's arrival, and the arrival before the
// end of the producer's wait. racecheck follows __syncwarp() and it follows an mbarrier, but not one behind the other:
// it reports the loads of the lanes that do not arrive themselves. Cases with such a ring have the tag [lane].
//
// And synccheck: it follows so many barriers a block, by default a number that it makes up itself. Where a block has
// more it warns of an overflow and the launch fails. --num-cuda-barriers says how many there are; sanitize_gpu does so.
#include <cuda_runtime.h>

#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/ring.cuh"
#include "tests/support/catch.hpp"

using namespace cf::cuda;

namespace {

/// Who gives a stage back: one lane behind __syncwarp(), every lane, or one lane before the others have read it.
enum class Release { by_one_lane, by_all_lanes, too_early };

constexpr int kWarps = 8, kTileWords = 128, kTileBytes = 4 * kTileWords, kStages = 2;

__device__ unsigned word_of(unsigned i) {
  i *= 2654435761u;
  return i ^ i >> 15;
}

__global__ void fill_kernel(unsigned* words, unsigned count) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    words[i] = word_of(i);
}

/// A producer's warp copies a tile for each of kWarps warps, step after step. These compare all words with what they
/// must be; `wrong` counts the lanes that found others.
template <Release R>
__global__ void ring_kernel(const unsigned* tiles, int steps, unsigned long long* wrong) {
  __shared__ alignas(128) unsigned stages[kStages][kWarps * kTileWords];
  __shared__ std::uint64_t full[kStages], empty[kStages];
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  if (threadIdx.x == 0)
    for (int s = 0; s < kStages; ++s) {
      init_barrier(full + s, 1);
      init_barrier(empty + s, R == Release::by_all_lanes ? 32 * kWarps : kWarps);
    }
  publish_barriers();
  __syncthreads();
  RingSlot slot;
  if (warp == kWarps) {
    for (int i = 0; i < steps; ++i, slot.next(kStages)) {
      if (i >= kStages) wait_barrier(empty + slot.stage, slot.parity ^ 1);
      if (lane == 0) arrive_expecting(full + slot.stage, kWarps * kTileBytes);
      __syncwarp();
      if (lane < kWarps)
        copy_bulk(stages[slot.stage] + lane * kTileWords, tiles + (i * kWarps + lane) * kTileWords, kTileBytes,
                  full + slot.stage);
    }
    return;
  }
  unsigned long long found = 0;
  for (int i = 0; i < steps; ++i, slot.next(kStages)) {
    wait_barrier(full + slot.stage, slot.parity);
    if (R == Release::too_early) {
      if (lane == 0) arrive(empty + slot.stage);
      __nanosleep(2000);
    }
    const uint4 v = reinterpret_cast<const uint4*>(stages[slot.stage] + warp * kTileWords)[lane];
    const unsigned first = unsigned((i * kWarps + warp) * kTileWords + 4 * lane);
    found +=
        v.x != word_of(first) || v.y != word_of(first + 1) || v.z != word_of(first + 2) || v.w != word_of(first + 3);
    if (R == Release::by_all_lanes) arrive(empty + slot.stage);
    if (R == Release::by_one_lane) {
      __syncwarp();
      if (lane == 0) arrive(empty + slot.stage);
    }
  }
  if (found) atomicAdd(wrong, found);
}

/// Threads use barriers of their own; `wrong` counts phases that are over before the thread has arrived.
__global__ void barriers_kernel(int count, unsigned long long* wrong) {
  extern __shared__ std::uint64_t barriers[];
  for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) {
    init_barrier(barriers + i, 1);
    for (int parity = 0; parity < 2; ++parity) {
      if (test_barrier(shared_address(barriers + i), unsigned(parity))) atomicAdd(wrong, 1ull);
      arrive(barriers + i);
      wait_barrier(barriers + i, parity);
    }
  }
}

void require_cuda(cudaError_t e) {
  INFO(cudaGetErrorString(e));
  REQUIRE(e == cudaSuccess);
}

/// How many of blocks * steps * 8 * 32 lanes' values are wrong.
template <Release R>
unsigned long long wrong_values(int blocks, int steps) {
  const unsigned words = unsigned(steps * kWarps * kTileWords);
  unsigned* tiles = nullptr;
  unsigned long long *wrong = nullptr, found = 0;
  require_cuda(cudaMalloc(&tiles, 4ull * words));
  require_cuda(cudaMalloc(&wrong, sizeof *wrong));
  require_cuda(cudaMemset(wrong, 0, sizeof *wrong));
  fill_kernel<<<128, 256>>>(tiles, words);
  ring_kernel<R><<<unsigned(blocks), 32 * (kWarps + 1)>>>(tiles, steps, wrong);
  require_cuda(cudaGetLastError());
  require_cuda(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
  require_cuda(cudaFree(tiles));
  require_cuda(cudaFree(wrong));
  return found;
}

}  // namespace

TEST_CASE("a ring given back by one lane behind __syncwarp(): racecheck reports it", "[gpu][handovers][small][lane]") {
  CHECK(wrong_values<Release::by_one_lane>(2, 6) == 0);
}

TEST_CASE("the same ring given back by every lane: racecheck reports nothing", "[gpu][handovers][small]") {
  CHECK(wrong_values<Release::by_all_lanes>(2, 6) == 0);
}

TEST_CASE("64 barriers in a block: synccheck overflows where it expects 16", "[gpu][handovers][small][barriers]") {
  unsigned long long *wrong = nullptr, found = 0;
  require_cuda(cudaMalloc(&wrong, sizeof *wrong));
  require_cuda(cudaMemset(wrong, 0, sizeof *wrong));
  barriers_kernel<<<4, 32, 64 * sizeof(std::uint64_t)>>>(64, wrong);
  require_cuda(cudaGetLastError());
  require_cuda(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
  require_cuda(cudaFree(wrong));
  CHECK(found == 0);
}

TEST_CASE("rings hand 33 million right values over by one lane and by all, and wrong ones if given back early",
          "[gpu][handovers]") {
  CHECK(wrong_values<Release::by_one_lane>(132, 1000) == 0);
  CHECK(wrong_values<Release::by_all_lanes>(132, 1000) == 0);
  CHECK(wrong_values<Release::too_early>(132, 1000) > 1'000'000);
}
