#pragma once
// NVIDIA H200. A record is a file of data/bench, a section of TRIALS.md there, or the commit that measured the number.
#include "cuda/tuning/tuning.hpp"

namespace cf::cuda {

inline constexpr Tuning kH200Tuning{
    .measured_on = "NVIDIA H200",

    // gemv and wgmma take the first two classes with dense weights. In the third cuBLASLt's algorithms have one order of
    // sums: on an H100 all that it chooses for 1 to 2048 tokens without split-k have the bits of the one for 2048.
    .step_classes = {{{.first = 1, .last = 8, .planned_as = 1},
                      {.first = 9, .last = 128, .planned_as = 128},
                      {.first = 129, .last = kAnyTokens, .planned_as = 2048}}},

    // Record: commits 3c98421, 5d78502. A prompt of 16 ids takes Pythia-2.8B 2.9 ms by gemv, 2.4 ms by cuBLASLt and
    // 2.0 ms by wgmma.
    .gemv_tokens = 8,
    // Record: commit 3c98421. Dequantising writes and reads two or three 16-bit matrices. A layer of Pythia-2.8B's
    // products takes 55 us for 16 tokens by packed, which takes 16 tokens a launch, and 228 us for 64 tokens by
    // cuBLASLt.
    .packed_tokens = 64,
    // Record: TRIALS.md, fp8. 64 tokens take gemv_fp8 339 us. 512 take tiles_fp8 1,615 us, a quarter for each 128.
    .fp8_tokens = 64,
    // Record: commit 5d78502. A prompt of 128 ids takes Pythia-2.8B 2.7 ms by wgmma and 2.9 ms by cuBLASLt; the 32
    // layers take 64 sequences 2.6 and 3.0 ms. Alone, cuBLASLt's products of 64 and 128 tokens are faster: wgmma leaves
    // room on an SM for the next kernel and for the other branch of a layer. Of more tokens, with Pythia-2.8B's sizes:
    // without GELU cuBLASLt is faster. QKV of 512 tokens, dense of 2048 and down of 512 take 30.2, 37.5 and 41.1 us by
    // cuBLASLt, and 33.1, 40.0 and 47.0 us by the best of five widths of tiles.
    // With GELU tiles are faster. 256, 512 and 2048 tokens take cuBLASLt's two passes 30.1, 53.1 and 199 us, and tiles
    // 27.8, 51.3 and 188 us: 512 tokens in two rounds of 160 features (55.2 us in three of 128), 2048 in ten of 128.
    .wgmma_tokens = 128,
    .packed_wgmma_first = 17,
    .packed_wgmma_tokens = 128,

    // Record: commit fd8fe5a. A long matrix is read fastest with three blocks; with two and four it is slower.
    .gemv_blocks_per_sm = 3,

    // Record: commit 819d395. The activations' loads queue up behind early stages, so more of them are slower.
    .packed_ahead = {.stages = 2, .early = 1},
    // Record: commit 819d395. The blocks of many tiles wait longer for the kernel beside theirs.
    .packed_ahead_of_many = {.stages = 4, .early = 3, .many_tiles = 5},
    // Record: commit 28c3561. The fastest of 1 to 4 early stages of 2 to 4, for a layer of Pythia-2.8B.
    .packed_ahead_of_sum = {.stages = 4, .early = 2, .many_tiles = 4},
    // Record: commit 40f747c. With two warps a part each has half the registers, and the next kernel's first tiles have
    // room to arrive; that is slower for the four linears of a Pythia-2.8B layer.
    .packed_turns = 1,
    // Record: TRIALS.md, packed-prompts. Of 160 to 512 tokens Pythia-2.8B's matrices of 2,560 rows have tiles for half
    // of the SMs or fewer. With Llama-3.1-8B's, of 4,096 rows, prompts of 512 ids and more lose.
    .packed_divided_rows = 3072,
    // Record: TRIALS.md, wide-launches. For 64 tokens wgmma is faster everywhere.
    .packed_wide_tokens = 32,
    // Record: commit 40f747c. There are blocks for 66 clusters of four and for 33 of eight. The device holds 62 and 30.
    .packed_clusters_elevenths = 10,

    // Record: commit e38a708. For eight queries of four heads to 1,024 keys the decode kernel takes a fifth of the
    // prefill kernels' time.
    .prefill_queries = 16,
    // Record: TRIALS.md, shared-keys-graph. Loads that heads share are faster in the graph of Llama-3.1-8B from 512
    // entries on, and in that of Llama-3.2-1B, whose heads are half as large, from 1024 on. In small caches lone heads
    // are faster, as they have more blocks.
    .unshared_elements = 65536,
    // Record: TRIALS.md, shared-keys-graph. With 16 splits Llama-3.1-8B's attention to 32768 entries takes 48 us and
    // not 60.
    .few_splits_entries = 1024,
    // Record: commit 378db60. The device holds fewer whole clusters than there are blocks for, and clusters that wait
    // for a second turn double the time.
    .split_blocks_on_two_sms = 3,
    // Record: commit c52a401b, of an H100 with 32 heads of 80 elements. With rings of one tile 1,024 sequences of 48
    // entries in caches of 2,048 take 230 us and not 370, 64 in pages of 64 take 25 and not 31, and 64 sequences of
    // 2,048 entries in pages 1 % less. In contiguous caches these take 2 % more.
    .two_tile_sequences = 64,

    // Record: commit 156bb53. ln_qkv is faster for up to four tokens; with a dense weight it is slower from eight on.
    .ln_qkv_tokens = 4,
    // Record: commit 718f4dc; TRIALS.md, old-and-new-gptq. The packed layers of Pythia-410M, 1.4B and 2.8B are 3 to 7 %
    // faster so in caches of up to 512 entries. Attention to more than 1,024 entries takes longer, and it starts later
    // where other kernels hold the registers.
    .shared_sms_entries = 1024,
    // Record: commit 1ff5363. 58 % are 132 KB: attention's block fits beside three blocks of a product, and the rest of
    // the L1 has room for the products' loads. Of 44, 58, 65, 72 and 100, Pythia-2.8B with a cache of 2048 is fastest
    // with 58 and 65. With 100 it is slower than with the driver's own divisions. With packed weights of one token 100
    // is fastest, but not where lone heads' clusters have kMaxSplits blocks, as those of Llama-3.2-3B: TRIALS.md,
    // old-and-new-llama-gptq.
    .dense_shared_percent = 58,

    // Record: commit 8de0c42f, of H100s with NVLink. One shot takes two ranks 2.6 us for 10 KB, 7.0 for 640 KB and 10.1
    // for 1 MB, where two shots take 10.8 and 12.0 of the last two. It takes four ranks 3.5 us for 10 KB, 10.6 for
    // 320 KB and 20.5 for 640 KB, where two shots take 11.4 and 13.8 of the last two.
    .one_shot_bytes = 1 << 20,
    // Record: commit 8de0c42f, of H100s. 32 blocks are the fastest up to 1 MB, 64 for 4 MB and 128 for 20 MB.
    .two_shot_blocks = {{{.most_bytes = 2 << 20, .blocks = 32}, {.most_bytes = 8 << 20, .blocks = 64}}},

    // Records: stack-*.json; for several slots of Llama and Qwen TRIALS.md, llama-batches. The times of all layers in
    // ms, of one slot at kv_len 128 where a row names nothing else:
    //
    //   model                         persistent  graph
    //   parallel residual:
    //   Pythia-410M                         0.38   0.39
    //   Pythia-410M, on an H100            0.413  0.418
    //   Pythia-1.4B                         0.60   0.79
    //   Pythia-2.8B, four slots             1.52   1.68
    //   Pythia-2.8B, eight slots            1.85   1.80
    //   sequential residual, where no work hides the waits between blocks:
    //   Llama-3.2-3B, two slots             2.04   1.78
    //   Qwen2.5-7B, two slots               3.62   3.70
    //   Llama-3.1-8B, two slots             3.85   4.04
    //   Llama-3.1-8B, four slots            4.15   4.08
    //   packed weights:
    //   Pythia-2.8B                         0.92   0.51
    //   Pythia-2.8B, four slots             1.93   0.74
    //   Pythia-6.9B                         1.40   1.02
    //   Llama-3.1-8B, kv_len 512            1.77   1.25
    .persistent_parallel = {{{.most_slots = 1, .least_hidden = 1024}, {.most_slots = 4, .least_hidden = 2048}}},
    .persistent_sequential = {{{.most_slots = 1, .least_hidden = 2048}, {.most_slots = 2, .least_hidden = 3584}}},
    // Record: commit 0c6a13f. The fastest of 20, 40, 60, 80, 100, 120 and 140 KB: with less, a block that lags cannot
    // catch up while others wait for it; more makes every wait between blocks longer.
    .bytes_in_flight = 60 << 10,
    // Record: TRIALS.md, prefetches. The memory delivers about 20 bytes a clock to each SM. At that rate Pythia-12B is
    // slower than without prefetches: its blocks seldom wait. At 13 it is as fast as without them. At 8 the others gain
    // less.
    .ahead_stages = 8,
    .ahead_bytes_per_clock = 13,
    // Record: ablation-pythia-2.8b.json. Of 0, 2, 4, 6 and 8 none is faster at kv_len 128 and 2048.
    .up_eighths = 4,
    // Record: commit 4382172, of an H100. 0 is faster than 2, 3, 4, 6 and 8 for Pythia-2.8B at kv_len 128: all of the
    // product runs while the context travels from block to block.
    .packed_up_eighths = 0,
    // Record: TRIALS.md, shared-keys. With Llama-3.1-8B shared loads are slower up to kv_len 4096 and faster at 8192.
    // With Llama-3.2-1B they are slower up to 2048 and faster from 4096 on.
    .unshared_entries = 4096,
    // Nobody has measured a larger bound for several sequences: their keys are more bytes beside the same weights.
    .unshared_entries_of_many = 2048,
};

// What else was measured on an H200, without a number that a plan reads:
//   cuda/ops/attention/decode.cuh     Code for several heads in the kernel of lone heads makes the packed layers of
//                                     Pythia-2.8B 3 % slower.
//   cuda/ops/linear/packed/plan.hpp   By the wide kernel the four products of a layer of Pythia-2.8B, Llama-3.1-8B and
//                                     Llama-3.2-1B take 25.1, 48.6 and 20.8 us for 16 tokens. By launches of eight
//                                     tokens they take 35.7, 81.2 and 32.4 us, and without quads 25.3, 75.2 and 22.8:
//                                     commit b6a114bf.
//   cuda/ops/rms_linear               With RmsQkv and RmsLinear the packed layers of Llama models are 1 to 5 % faster:
//                                     TRIALS.md, old-and-new-llama-gptq.
//   cuda/runtime/shared_memory.hpp    With the device's whole memory allowed to every kernel, Pythia-2.8B's kernels
//                                     launched one by one take 3 % longer.
//   cuda/step/choose.cpp              An LM head that starts early reads more slowly until its end, for Llama-3.1-8B
//                                     with packed weights.
//   cuda/persistent/plan.cpp          Key splits that fill the grid cost little at kv_len 128 and save a seventh at
//                                     2048.
//   cuda/persistent/packed.cuh        Of an H100: a first version with 16-bit operands, without digits, was slower.
//   cuda/runtime/upload.cpp           From the page cache of an H100's host with 64 cores: 25 GB/s with its numbers, 7
//                                     by the driver alone: commit 82f229e7.
//   cuda/serve/model.cpp              Of an H100: a step of preferred_step_tokens() takes some 5 ms with 2.8 B weights:
//                                     commit 59d6a844.
//   apps/bench/device_probe.cu        A block for each part reads 4.60 TB/s. A grid of resident blocks that loop over
//                                     the data reads 4.45 to 4.57 with 4 or 8 loads in flight: commit a4a6854e. The
//                                     copy kernel moves 4.3 TB/s, cudaMemcpyAsync's copy engine 2.7: commit 6f4d94b0.
//   cuda/device/barrier.cuh           try_wait_barrier() waits for about 4 us.

/// Kernels are compiled with one GPU's numbers, for all architectures.
inline constexpr const Tuning& kCompiledTuning = kH200Tuning;

}  // namespace cf::cuda
