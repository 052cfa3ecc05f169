#include "cuda/device/async.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/launch.hpp"

namespace cf::cuda {
namespace {

/// A block a token, a thread a pair or a passed-through element. A position outside the table makes the token's turned
/// elements NaN instead of reading beyond it.
template <class T>
__global__ void rope_kernel(const __grid_constant__ ops::Rope::Args a) {
  let_successor_start();
  wait_for_predecessors();
  const long heads = a.qkv.shape[1], head_dim = a.qkv.shape[3], half = a.cos.shape[1], token = blockIdx.x;
  const long position = a.positions.data[token];
  const bool known = position >= 0 && position < a.cos.shape[0];
  const long units = head_dim - half;  // of a head: its pairs, then the rest
  for (long i = threadIdx.x; i < heads * units; i += blockDim.x) {
    const long head = i / units, u = i % units, row = (token * heads + head) * head_dim;
    const T* in = static_cast<const T*>(a.qkv.data) + 3 * row;
    T *q = static_cast<T*>(a.q.data) + row, *k = static_cast<T*>(a.k.data) + row, *v = static_cast<T*>(a.v.data) + row;
    if (u < half) {
      const float cos = known ? a.cos.data[position * half + u] : NAN,
                  sin = known ? a.sin.data[position * half + u] : NAN;
      const auto turn = [&](const T* x, T* y) {
        float first = to_float(x[u]), second = to_float(x[u + half]);
        rotate(first, second, cos, sin);
        y[u] = from_float<T>(first);
        y[u + half] = from_float<T>(second);
      };
      turn(in, q);
      turn(in + head_dim, k);
      v[u] = in[2 * head_dim + u];
      v[u + half] = in[2 * head_dim + u + half];
    } else {
      const long c = u + half;
      q[c] = in[c];
      k[c] = in[head_dim + c];
      v[c] = in[2 * head_dim + c];
    }
  }
}

}  // namespace

Status run(const ops::Rope::Args& a, Context& context) {
  CF_TRY(check_call(a, context));
  return with_activation(ops::Rope::name, a.qkv.dtype, [&](auto zero) {
    return launch(ops::Rope::name, context, {.grid = unsigned(a.qkv.shape[0]), .block = 512},
                  rope_kernel<decltype(zero)>, a);
  });
}

}  // namespace cf::cuda
