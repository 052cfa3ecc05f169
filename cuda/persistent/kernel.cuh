#pragma once
// The persistent kernel: one block an SM, all blocks resident, many layers in one launch. Each block streams its rows
// of every weight matrix through a ring in shared memory, in the order of the phases. Activations travel from block to
// block through device memory.
//
// Who does what in a layer with a parallel residual, one token, float16. h: hidden, i: intermediate, b: batch, n:
// kv_len, d: head_dim. A formula counts the bytes of the whole grid; in the column of who waits, those of each block.
// The figures are Pythia-2.8B's (h 2560, i 10240, 32 heads, d 80) with 132 blocks. What others wait for
// counts epochs: 8 bytes a float32, 4 bytes an element, and 4 bytes an element of the residual stream that a norm
// reads.
//
// phase      the producer warp brings    the consumer warps make     who waits for other blocks  what others wait for
// ---------  --------------------------  --------------------------  --------------------------  ---------------------
// qkv        W_qkv: 3 h h 2              both norms, then the        consumer warps, for all of  q, k, v: 3 h b 4
//            39.3 MB, 298 KB a block     block's rows of q, k, v     hidden: 4 h b               30.7 KB
//                                                                    10.2 KB a block
// up_first   W_up, about half of h i 2   36 of the block's 77 or 78  nobody                      mlp.act of these rows
//            24.3 MB, 184 KB a block     rows of mlp.act                                         19.0 KB
// attention  cached keys and values:     RoPE and the append of the  consumer warps, for q, k, v partial results:
//            4 h (n - 1) b               newest key, attention over  of one head: 12 d, 960 B    8 (d + 2) a key split
//            1.3 MB at n 128,            the block's key splits;     auxiliary warps of split 0, 656 B
//            41 KB a split of 128 keys   auxiliary warps: the merge  for the head's others       context: 4 h b
//                                                                                                10.2 KB
// up_rest    W_up, the other rows        the block's other rows of   nobody                      mlp.act of these rows
//            28.1 MB, 213 KB a block     mlp.act                                                 22.0 KB
// dense      W_dense: h h 2              the block's rows of the     auxiliary warps, for all of nothing
//            13.1 MB, 99 KB a block      layer's input + attention,  the context: 4 h b
//                                        kept in shared memory       10.2 KB a block
// down       W_down: h i 2               the same rows of the MLP,   auxiliary warps, for all of hidden: 4 h b
//            52.4 MB, 397 KB a block     plus what dense has kept    mlp.act: 4 i b              10.2 KB
//                                                                    41.0 KB a block
//
// With SwiGLU W_up has 2 i rows: the gate's and the up row of an element of mlp.act lie side by side in one block. With
// g heads of k and v W_qkv has (heads + 2 g) d rows. Where the heads do not make up h, W_dense has heads d columns.
//
// Few keys have one split. Its block makes the context itself, without partial results in device memory.
//
// In large caches (Tuning::unshared_entries), query heads with the same keys and values form GQA tiles of up to eight
// heads. A key split then belongs to a GQA tile. The ring brings its keys and values once, and the consumer warps
// attend to them with all heads of the GQA tile. The consumer warps wait for 4 (s + 2) d bytes of q, k and v; a GQA
// tile has s heads. With n splits, the block of split i merges the heads i, i + n, i + 2 n and so on of the GQA tile.
// Kernels for one head a GQA tile are compiled separately: all rows of the tensor cores' operand hold its query.
//
// With a sequential residual the order is qkv, attention, dense, up_first, up_rest, down. Dense publishes attn_residual
// (4 h b), and the consumer warps wait for all of it before up_first, whose input is its norm. Down adds
// attn_residual. With one token the consumer warps fetch the context and mlp.act themselves. Slices of mlp.act that are
// long enough go to registers, one slice to each consumer warp. The ring then gets the shared memory of mlp.act. Row
// products have a kernel for each kind of residual.
//
// A launch of whole tokens (TokenArguments) reads its input from the embedding, and has the head behind the last layer
// (v: vocab):
//
// head       W_head: v h 2               the final norm, then the    consumer warps, for all of  the block's best token
//            257.6 MB, 1.95 MB a block   block's rows of logits      hidden: 4 h b               of a sequence: 16 b
//
// Every block then reads the best tokens of all blocks, and goes on with the best of these. A sequence ends behind a
// stop id or at its limit (SequenceEnd), as every block sees for itself; the launch ends with its last sequence. The
// producer warp has brought the next token's first weights meanwhile: which token it is does not matter to them. Keys
// that a token has appended are brought once the consumer warps have begun the next one.
//
// With several sequences the context and mlp.act have no epochs and 2 bytes an element. The auxiliary warps then wait
// for one word a head or a block, and the copy engine brings the elements.
//
// Packed weights (packed.cuh) are dealt in tiles of sixteen rows, and a stage brings codes and scales of one tile. A
// block converts the activations in its shared memory to digits. Blocks hand each other the same as above. A matrix may
// have its columns in another order than its inputs: then the warp that makes an input stores it in its column.
// A dense matrix beside packed ones is dealt in tiles of sixteen rows too. Its product is a tile product.
//
// While consumer warps wait for other blocks, the ring fills up. The producer warp then prefetches the dense weights
// that follow into the L2, from where the ring gets them faster than from the memory. Packed weights are not
// prefetched: consumer warps, not the memory, bound their kernels.
//
// Every block reads all that the others make, while weights stream in. Fewer bytes to read make a shorter wait: for
// this reason the norms read rounded elements. Loads that poll in vain make waits longer, too.
//
// On ranks (RankExchange) the hidden state, and attn_residual, are sums of what the ranks make. Others wait for 4 bytes an
// element of each rank, on every rank, and sum them. Products that add to the residual stream, of one rank alone, read 8
// bytes an element of each rank. A launch ends with the sum of its last layer, which every rank stores whole.
//
// Four rules hold the kernel together.
// - The producer warp never waits for activations: the order of its stages is known at the launch.
// - What a block makes for another carries its epoch in the same access, or is announced by a word behind a fence.
// - Every block makes rows of q, k and v, and rows of each layer's output. So no block ends a layer before all blocks
//   have normalised the layer's input. And no block falls a layer behind: what it waits for would be overwritten with a
//   later epoch, and its wait would not end.
// - No warp leaves while others wait for it at a named barrier. Block::wait() receives every signal that was given
//   before a stop. Block::sync_unless_stopped() lets all threads of a barrier go on, or none. Copies are awaited even
//   after a stop.
//
// Instructions bound small models. A layer runs through more code than an SM holds (32 KB on Hopper), most of it once.
// One build missed the instruction cache 727 times a layer. Another build missed it 1010 times. The second one was
// 1.3 % slower with Pythia-1.4B and 5 % slower with Pythia-410M (data/bench/TRIALS.md, instruction-cache). So all
// phases share the code of norms, set-up, product and epilogue, and one call fetches both the context and mlp.act. With
// code of its own a phase runs fewer instructions, but a layer fetches more. The lanes of a warp do not diverge in an
// epilogue: code behind it would run twice.
#include <cuda_runtime.h>

#include "cuda/persistent/auxiliary_warps.cuh"
#include "cuda/persistent/consumer_warps.cuh"
#include "cuda/persistent/launch.hpp"
#include "cuda/persistent/producer_warp.cuh"

namespace cf::cuda {

/// Makes the block's shared memory ready: barriers, notice, the first layer's pointers, each sequence's length and cos
/// and sin. All threads call.
template <bool Together, bool OnRanks>
__device__ void begin_block(const Block& block, const Ring& ring, const PersistentArguments& c) {
  const int thread = int(threadIdx.x);
  if (thread < kMaxRingStages) {
    ring.init(unsigned(thread), Together ? kConsumerWarps : kConsumerWarps / 2);
    publish_barriers();
  }
  if (thread == 0) {
    for (int s = 0; s < kSignals; ++s) init_barrier(block.signal_barrier(Signal(s)), arrivals(Signal(s)));
    publish_barriers();
    block.notice() = {.stopped = 0,
                      .consumer_warps = kConsumerWarps,
                      .tokens_begun = 0,
                      .asked_to_end = 0,
                      .asked_all_to_end = 0,
                      .first_epoch = c.exchange.first_epoch(
                          OnRanks ? *c.ranks.launches : c.exchange.grid_state->launches, c.continues)};
    if constexpr (OnRanks) block.rank_notice() = RankNotice::begin(*c.ranks.state(c.ranks.rank), c.first_layer);
  }
  if (thread == 0) block.pointers(c.first_layer) = c.first_pointers;
  store_angles(block, thread, kBlockThreads, [&](int sequence) { return c.positions[sequence]; });
  if (thread < c.dims.batch) {
    block.at<int>(c.layout.lengths)[thread] = c.kv_len[thread];
    block.at<int>(c.layout.positions)[thread] = c.positions[thread];
    store_newest_page(block, thread, c.kv_len[thread]);
    if (c.token.count > 0) block.at<int>(c.layout.ids)[thread] = min(max(c.token.ids[thread], 0), c.token.vocab - 1);
    if (c.token.chooses) {
      // The launch's first token may be a stop id: it was chosen before the launch.
      const SequenceEnd& end = c.sequence_ends[thread];
      if (end.tokens < 1 || end.stops_at(c.token.ids[thread])) block.end_sequence(thread);
    }
    block.at<std::uint64_t>(c.layout.best)[thread] = 0;
  }
  __syncthreads();
}

/// Leaves the kernel. The last block to leave makes the grid's state ready for the next launch. Where the grid has
/// stopped, the other ranks' must stop too: they wait for what this one has not made.
template <bool OnRanks>
__device__ void end_block(const PersistentArguments& c) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  GridState* const grid = c.exchange.grid_state;
  if (fetch_add(&grid->blocks_left, 1) != unsigned(c.plan.grid) - 1) return;
  if constexpr (OnRanks) {
    if (load_acquire(&grid->stopped))
#pragma unroll 1
      for (int to = 0; to < c.ranks.ranks; ++to)
        if (to != c.ranks.rank) store_to_peer(&c.ranks.state(to)->grid.stopped, 1u);
    c.ranks.state(c.ranks.rank)->exchanges += unsigned(c.end_layer - c.first_layer);
    ++*c.ranks.launches;
  }
  grid->blocks_left = grid->stopped = 0;
  grid->launches += unsigned(max(c.token.count, 1));
}

/// T: the dtype of weights and activations. Grouped: whether a GQA tile has several heads.
/// BlocksPerSm: blocks that an SM must have registers for; the plan has one, tests ask for two. OnRanks: the model is
/// shared with other ranks.
template <class T, Products Kind, bool Grouped, int BlocksPerSm, bool OnRanks>
__global__ void __launch_bounds__(kBlockThreads, BlocksPerSm)
    persistent_kernel(const __grid_constant__ PersistentArguments c) {
  const Ring ring(c);
  const Block block = Block::consumers(c);
  begin_block<is_tiled(Kind) || is_packed(Kind), OnRanks>(block, ring, c);
  if (threadIdx.x < kConsumerThreads) {
    ConsumerWarps<T, Kind, Grouped, OnRanks> consumer_warps(c);
    bool go = true;
    do
#pragma unroll 1
      for (int layer = c.first_layer; go && layer < c.end_layer; ++layer) go = consumer_warps.run(layer);
    while (go && consumer_warps.next_token());
    if constexpr (OnRanks)
      if (go) consumer_warps.store_sums();
    if (threadIdx.x % 32 == 0) atomicSub(&block.notice().consumer_warps, 1);
  } else if (threadIdx.x < kConsumerThreads + kAuxiliaryThreads) {
    AuxiliaryWarps<T, Kind, Grouped> auxiliary_warps(c);
    const int tokens = max(c.token.count, 1);
    bool go = true;
#pragma unroll 1
    for (int token = 0; go && token < tokens; ++token, auxiliary_warps.next_token())
#pragma unroll 1
      for (int layer = c.first_layer; go && layer < c.end_layer; ++layer) go = auxiliary_warps.run(layer);
  } else {
    stream_layers<Kind>(block, ring, c);
  }
  end_block<OnRanks>(c);
}

/// The instantiation for a plan's products, which are packed or not.
template <class T, bool Packed, bool Grouped, int BlocksPerSm, bool OnRanks = false>
const void* find_persistent_kernel(Products products) {
  const auto of = []<Products Kind>(std::integral_constant<Products, Kind>) {
    return reinterpret_cast<const void*>(persistent_kernel<T, Kind, Grouped, BlocksPerSm, OnRanks>);
  };
  if constexpr (Packed) {
    if (products == Products::packed) return of(std::integral_constant<Products, Products::packed>());
    return of(std::integral_constant<Products, Products::packed_tiles>());
  } else {
    if constexpr (!(OnRanks && Grouped))  // registers of this one spill, and no plan asks for it
      if (products == Products::rows) return of(std::integral_constant<Products, Products::rows>());
    if (products == Products::sequential_rows) return of(std::integral_constant<Products, Products::sequential_rows>());
    return of(std::integral_constant<Products, Products::tiles>());
  }
}

}  // namespace cf::cuda
