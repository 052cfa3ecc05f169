#pragma once
// Softmax over scores that come in parts. Functions with CF_HD are compiled for the host, too, where their tests run.
#include "core/host_device.hpp"
#include "cuda/device/math.cuh"

namespace cf::cuda {

/// The state of a softmax over a part of the scores s: their maximum, and the sum of the weights exp(s - max). The
/// caller holds the weighted sum of the values. Two ways lead from the parts to the whole: merge() of their states, or
/// raise() and add_weights() of one state, part by part.
/// Source: Milakov, Gimelshein 2018 (arXiv:1805.02867).
struct SoftmaxState {
  float max = -INFINITY, sum = 0;

  /// The factor that rescales this state's sums to the maximum `larger`. An empty state's factor is 0, even if `larger`
  /// is an empty state's maximum: the difference of two infinities would be NaN.
  CF_HD float factor(float larger) const { return max == -INFINITY ? 0.f : expf(max - larger); }

  /// The factors for the caller's two weighted sums of values, before it adds them.
  struct Factors {
    float mine, other;
  };
  /// Makes this the state of both parts. Either may be empty.
  CF_HD Factors merge(const SoftmaxState& o) {
    const float larger = max > o.max ? max : o.max;
    const Factors f{factor(larger), o.factor(larger)};
    sum = sum * f.mine + o.sum * f.other;
    max = larger;
    return f;
  }

  /// Makes `larger` the maximum, and returns the factor for the caller's weighted sum of values.
  CF_HD float raise(float larger) {
    const float factor = exp2_approximate((max - larger) * kLog2E);
    sum *= factor;
    max = larger;
    return factor;
  }
  /// Replaces N scores by their weights exp(scale * score - max), and adds the weights to the sum. score(i) is a
  /// reference to the i-th score.
  template <int N, class Score>
  CF_HD void add_weights(Score score, float scale) {
    const float to_log2 = scale * kLog2E, shift = max * kLog2E;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < N; ++i) {
      float& p = score(i);
      p = exp2_approximate(p * to_log2 - shift);
      sum += p;
    }
  }
};

#ifdef __CUDACC__
/// The largest x of four neighbouring lanes, in each of them.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
/// The sum of x over four neighbouring lanes, the same bits in each of them.
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

/// One step of a row's softmax on tensor cores: replaces the row's next scores by their weights. The scores lie in four
/// neighbouring lanes, as mma() leaves them. score(i) is a reference to the lane's i-th of N scores before the scale,
/// -infinity where there is no key. At least one score so far must be finite. The state's sum is over the lane's own
/// scores. rescale(factor) multiplies the row's weighted sum of values. It is called where a maximum of the warp grows;
/// with Always it is called in any case, without a vote of the warp.
template <int N, bool Always, class Score, class Rescale>
__device__ void weigh(SoftmaxState& state, float scale, Score score, Rescale rescale) {
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < N; ++i) top = fmaxf(top, score(i));
  top = quad_max(top) * scale;
  if (Always || __any_sync(~0u, top > state.max)) rescale(state.raise(fmaxf(top, state.max)));
  state.template add_weights<N>(score, scale);
}
#endif

}  // namespace cf::cuda
