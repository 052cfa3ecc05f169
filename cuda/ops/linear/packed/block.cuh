#pragma once
// GEMV: a block's part of the product of up to 16 tokens with a packed 4-bit matrix that is read once. The parts:
//   config.cuh       what the block is compiled for
//   decode.cuh       codes as 16-bit operands
//   fragment.cuh     products of fragments
//   ring.cuh         stages of codes and scales in shared memory
//   activations.cuh  x in registers or in shared memory
//   product.cuh      the product of a warp's slice of one tile
//   reduce.cuh       sums across warps and the cluster, and the epilogue's elements
#include <type_traits>

#include "cuda/ops/linear/packed/product.cuh"
#include "cuda/ops/linear/packed/reduce.cuh"

namespace cf::cuda {

/// A block's part of y = W x. T is float16 or bfloat16. An Epilogue has
///   prepare(token, row)     an element of y, C.rows rows of a token from `row` on, with what it needs of tensors that
///                           no earlier kernel writes
///   ready()                 called by all threads after the first weights' loads, before the first use of x
///   x(token)                where a token's activations lie
///   begin(element)          called early, after ready(): loads the rest of what the element needs
///   finish(element, sums)   takes each element once, with its rows' sums; where C.rows is 1, sums[1] is that of the
///                           neighbouring row, row ^ 1
///   gain(), scale()         only where the block normalises one token's x (RmsLinear, RmsQkv): the norm's gamma, and
///                           the scale of the row, for which all threads call, before begin()
///   apart()                 only where the sums are of two products (LinearSum): finish(element, sums, others) then
///                           takes those of the cluster's first block and those of its others
/// A block runs for a few thousand cycles, and most of its code once. So what can be computed before ready() is
/// computed there, while the block waits for x.
template <class T, GptqConfig C, class Epilogue>
__device__ void gptq_block(const GptqMatrix& m, const GptqPlan& plan, int tokens, const Epilogue& epilogue,
                           char* smem) {
  const GptqWarp warp(m, plan, C.turns);
  const GptqSmem at(plan, smem, int(warp.index));
  GptqRing<C.turns> ring(m, plan, warp, at);
  ring.start();
  ClusterInbox inbox(at.arrived);
  if (plan.split > 1) inbox.open();

  GptqElements<T, C, Epilogue> elements(m, plan, warp, at, tokens, epilogue);
  elements.prepare();
  const GptqChunkOrder<C> order(plan, warp.slice);
  using Several = std::conditional_t<C.x_in_registers(), GptqRegisterX<T, C>, GptqSharedX<T, C>>;
  using X = std::conditional_t<C.one_token(), GptqOneTokenX<T, C>, Several>;
  X x(m, plan, warp, order, at, tokens);
  const GptqStage<C> stage(plan, warp, order, ring.code_bytes());
  GptqPartial<C> partial(plan, warp, at);

  constexpr bool normalises = requires { epilogue.gain(); };
  if constexpr (normalises) x.load_gain(epilogue.gain());
  epilogue.ready();
  x.load([&](int token) { return epilogue.x(token); });
  if constexpr (!normalises) elements.begin();
  ring.fill();
  if constexpr (normalises) {
    x.normalise(epilogue.scale());
    elements.begin();
  }
  x.prepare();
#pragma unroll 1
  for (int tile = warp.turn; tile < warp.tiles; tile += C.turns) {
    float sum[C.octets()][4] = {};
    if (warp.slice.count > 0) {
      multiply_tile(ring.wait(), stage, warp, order, tile == warp.turn, x, sum);
      ring.release(tile);
    }
    partial.store(sum, tokens);
  }

  __syncthreads();
  if (plan.split > 1 && !elements.exchange(inbox)) return;
  elements.finish();
}

}  // namespace cf::cuda
