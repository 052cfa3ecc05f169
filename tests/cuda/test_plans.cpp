// Launch plans without a GPU: for every Pythia model, up to 16 sequences and every length of the cache, what a plan
// asks for is what the device has, and its blocks divide the work without gap or overlap.
#include <algorithm>
#include <array>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "core/contract.hpp"
#include "core/model/config.hpp"
#include "core/model/workload.hpp"
#include "cuda/model/linear_scratch.hpp"
#include "cuda/ops/attention/attention.hpp"
#include "cuda/ops/linear/gemv/plan.hpp"
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/ops/linear/tiles/plan.hpp"
#include "cuda/ops/linear/wgmma/plan.hpp"
#include "cuda/ops/ln_qkv/ln_qkv.hpp"
#include "cuda/ops/norm/layernorm.hpp"
#include "cuda/ops/ranks/exchange_plan.hpp"
#include "cuda/ops/rope/rope.hpp"
#include "cuda/ops/token_plan.hpp"
#include "tests/support/catch.hpp"

using namespace cf;
using namespace cf::cuda;

namespace {

/// A half-open range of a launch's items: rows, tiles or keys.
struct Range {
  std::int64_t begin, end;
};

/// What a plan makes of a call. `share` tells, for each of the blocks that divide `items` among them, which are its
/// own.
struct Launch {
  std::int64_t grid[3] = {1, 1, 1};
  int threads = 0;
  int blocks_per_sm = 1;  // that the plan counts on
  int smem_bytes = 0;     // dynamic, of a block
  int cluster_blocks = 1;
  std::int64_t items = 0, sharers = 0;
  std::function<std::vector<Range>(std::int64_t block)> share;
};

/// The first thing that is wrong with a launch, or an empty string.
std::string fault(const Arch& arch, const Launch& l) {
  // Shared memory that CUDA keeps of every block; the least registers that nvcc allots a thread of a busy kernel.
  constexpr int reserved_smem_bytes = 1024, least_registers = 32;
  const std::int64_t most[] = {(std::int64_t(1) << 31) - 1, 65535, 65535};
  for (int i = 0; i < 3; ++i)
    if (l.grid[i] < 1 || l.grid[i] > most[i]) return "grid of " + std::to_string(l.grid[i]);
  if (l.threads < 32 || l.threads > 1024 || l.threads % 32) return std::to_string(l.threads) + " threads";
  if (l.smem_bytes < 0 || l.smem_bytes > arch.smem_per_block_bytes)
    return std::to_string(l.smem_bytes) + " bytes of shared memory";
  if (l.blocks_per_sm < 1 || l.blocks_per_sm * l.threads > arch.threads_per_sm ||
      l.blocks_per_sm * (l.smem_bytes + reserved_smem_bytes) > arch.smem_per_sm_bytes ||
      l.blocks_per_sm * l.threads * least_registers > arch.registers_per_sm)
    return std::to_string(l.blocks_per_sm) + " blocks an SM";
  const int c = l.cluster_blocks;
  if (c < 1 || c > arch.largest_cluster_blocks || (c & (c - 1)) || l.grid[0] % c)
    return "clusters of " + std::to_string(c) + " blocks";

  std::vector<Range> ranges;
  for (std::int64_t block = 0; block < l.sharers; ++block)
    for (const Range& r : l.share(block))
      if (r.begin < r.end) ranges.push_back(r);
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::int64_t covered = 0;
  for (const Range& r : ranges) {
    if (r.begin != covered) return "item " + std::to_string(std::min(r.begin, covered)) + " not covered once";
    covered = r.end;
  }
  return covered == l.items ? "" : std::to_string(covered) + " of " + std::to_string(l.items) + " items covered";
}

/// Items dealt to the blocks in turn.
std::vector<Range> dealt(std::int64_t block, std::int64_t blocks, std::int64_t items) {
  std::vector<Range> ranges;
  for (std::int64_t i = block; i < items; i += blocks) ranges.push_back({i, i + 1});
  return ranges;
}

/// Items in one run a block, each as long as the others, the last ones shorter.
std::vector<Range> run_of(std::int64_t block, std::int64_t blocks, std::int64_t items) {
  const std::int64_t length = (items + blocks - 1) / blocks;
  return {{std::min(block * length, items), std::min((block + 1) * length, items)}};
}

ops::Attention::Dims attention_dims(const ModelConfig& m, const Workload& w) {
  return {.batch = w.batch,
          .q_len = w.q_len,
          .heads = m.num_attention_heads,
          .kv_heads = m.kv_heads(),
          .head_dim = m.head_dim(),
          .capacity = w.kv_len,
          .max_kv_len = w.kv_len};
}

/// The items are the tiles of a GQA tile's keys.
Launch attention_launch(const Arch& arch, const ModelConfig& m, const Workload& w) {
  const int padded = padded_head_dim(m.head_dim()), tile = decode_tile(padded);
  const AttentionPlan plan = attention_plan(arch, attention_dims(m, w), DType::f16);
  const int tiles = int((w.kv_len + tile - 1) / tile);
  return {.grid = {w.q_len * plan.splits, m.num_attention_heads / plan.gqa_heads, w.batch},
          .threads = 32 * kAttentionWarps,
          .blocks_per_sm = decode_blocks_per_sm(padded),
          .smem_bytes = plan.smem_bytes,
          .cluster_blocks = plan.splits,
          .items = tiles,
          .sharers = plan.splits,
          .share = [=](std::int64_t split) {
            const SplitTiles own(tiles, plan.splits, int(split));
            return std::vector<Range>{{own.begin, own.end}};
          }};
}

/// The items are the rows of a kv head and sequence. The rings' barriers are static shared memory.
Launch wgmma_prefill_launch(const Arch& arch, std::int64_t head_dim, std::int64_t kv_heads, std::int64_t group,
                            const Workload& w) {
  constexpr int static_smem_bytes = 256;
  const std::int64_t rows = w.q_len * group;
  const WgmmaPlan plan = wgmma_plan(arch, head_dim, rows, w.batch * kv_heads);
  const std::int64_t block_rows = plan.warpgroups * kWgmmaQueryRows;
  return {.grid = {kv_heads, plan.row_blocks, w.batch},
          .threads = wgmma_threads(plan.warpgroups),
          .blocks_per_sm = wgmma_blocks_per_sm(plan.warpgroups),
          .smem_bytes = plan.smem_bytes + static_smem_bytes,
          .items = rows,
          .sharers = plan.row_blocks,
          .share = [=](std::int64_t block) {
            return std::vector<Range>{{block * block_rows, std::min((block + 1) * block_rows, rows)}};
          }};
}

Launch linear_launch(const Arch& arch, std::int64_t in, std::int64_t out, const Workload& w) {
  const GemvPlan plan = gemv_plan(arch, in, out, w.tokens());
  const std::int64_t tiles = (out + kTileRows - 1) / kTileRows;
  return {.grid = {plan.grid, 1, 1},
          .threads = kGemvThreads,
          .blocks_per_sm = plan.blocks_per_sm,
          .items = tiles,
          .sharers = plan.grid,
          .share = [=](std::int64_t block) { return dealt(block, plan.grid, tiles); }};
}

Launch ln_qkv_launch(const Arch& arch, const ModelConfig& m, const Workload& w) {
  constexpr int static_smem_bytes = 2 * kGemvWarps * kMmaTokens * kTileRows * 4;
  const std::int64_t out = 3 * m.hidden_size, tiles = (out + kTileRows - 1) / kTileRows;
  const LnQkvPlan plan = ln_qkv_plan(arch, m.hidden_size, out, w.tokens(), 2, 2);
  if (plan.tokens == 0) return {.threads = 32, .share = {}};  // no token fits: the call is refused
  return {.grid = {plan.product.grid, 1, 1},
          .threads = kGemvThreads,
          .smem_bytes = plan.smem_bytes + static_smem_bytes,
          .items = tiles,
          .sharers = plan.product.grid,
          .share = [=](std::int64_t block) { return dealt(block, plan.product.grid, tiles); }};
}

/// The items are groups of tiles; the kernel's static shared memory are its barriers and the bias.
Launch linear_tiles_launch(const LinearTilesPlan& plan) {
  return {.grid = {plan.clusters * kLinearTilesBlocks, 1, 1},
          .threads = 384,
          .smem_bytes = plan.smem_bytes + kLinearTilesStaticBytes,
          .cluster_blocks = kLinearTilesBlocks,
          .items = plan.groups(),
          .sharers = plan.clusters,
          .share = [=](std::int64_t cluster) { return dealt(cluster, plan.clusters, plan.groups()); }};
}

/// The items are chunks of 64 columns of tiles of 16 rows, a tile's one after the other.
Launch linear_gptq_launch(const Arch& arch, std::int64_t in, std::int64_t out, const Workload& w,
                          int turns = kLinearGptqTurns, int blocks_per_sm = kLinearGptqBlocksPerSm,
                          bool shares_sms = false) {
  GptqSizes sizes{int((out + 15) / 16), int((in + 63) / 64), 4, w.tokens() == 1};
  sizes.wide = turns == kLinearGptqTurns && gptq_is_wide(arch, sizes, w.tokens());
  if (turns == kLinearGptqTurns) blocks_per_sm = linear_gptq_blocks_per_sm(sizes.wide, w.tokens());
  GptqPlan plan = gptq_plan(arch, sizes, w.tokens(), turns, blocks_per_sm);
  if (plan.grid > 0 && shares_sms) fill_device(arch, sizes.tiles, blocks_per_sm, plan);
  if (plan.grid == 0) return {.threads = 32, .share = {}};  // too many columns: the call is refused
  return {.grid = {plan.grid, 1, 1},
          .threads = gptq_threads(turns),
          .smem_bytes = plan.smem_bytes,
          .cluster_blocks = plan.split,
          .items = std::int64_t(sizes.tiles) * sizes.chunks,
          .sharers = std::int64_t(plan.grid) * kGptqParts * turns,
          .share = [=](std::int64_t warp) {
            const int block = int(warp) / (kGptqParts * turns), part = int(warp) % kGptqParts,
                      turn = int(warp) % (kGptqParts * turns) / kGptqParts;
            const GptqSlice slice = gptq_slice(plan, gptq_part(plan, block % plan.split, part));
            std::vector<Range> ranges;
            const GptqTiles tiles = gptq_tiles(plan, sizes.tiles, block / plan.split);
            for (int t = turn; t < tiles.count; t += turns) {
              const std::int64_t first = std::int64_t(tiles.first + t) * sizes.chunks + slice.first;
              ranges.push_back({first, first + slice.count});
            }
            return ranges;
          }};
}

/// The items are the vectors of a token's q, k and v, in the order of qkv. The launch is rope_append's, too.
Launch rope_launch(const Arch& arch, const ModelConfig& m, const Workload& w) {
  const std::int64_t heads = m.num_attention_heads;
  const RopePlan plan = rope_plan(arch, w.tokens(), heads, heads, m.head_dim(), m.rotary_dim, 8);
  return {.grid = {w.tokens(), plan.blocks.blocks, 1},
          .threads = plan.blocks.threads,
          .blocks_per_sm = rope_blocks_per_sm(plan.heads),
          .items = heads * 3 * plan.vectors,
          .sharers = plan.blocks.blocks,
          .share = [=](std::int64_t block) {
            std::vector<Range> ranges;
            for (int thread = 0; thread < plan.blocks.threads; ++thread) {
              const int index = int(block) * plan.blocks.threads + thread;
              if (index >= plan.units()) continue;
              const RopeUnit unit = plan.unit<ops::QkvLayout::interleaved_by_head>(index);
              for (std::int64_t i = 0; i < plan.heads; ++i)
                if (const std::int64_t head = unit.group * plan.heads + i; head < heads) {
                  const std::int64_t item = (head * 3 + unit.part) * plan.vectors + unit.vector;
                  ranges.push_back({item, item + 1});
                }
            }
            return ranges;
          }};
}

/// The items are the vectors of a token's keys.
Launch kv_append_launch(const Arch&, const ModelConfig& m, const Workload& w) {
  const std::int64_t vectors = m.hidden_size * 2 / 16;
  const TokenPlan plan = token_plan(vectors);
  return {.grid = {w.tokens(), plan.blocks, 1},
          .threads = plan.threads,
          .items = vectors,
          .sharers = plan.blocks,
          .share = [=](std::int64_t block) {
            return std::vector<Range>{{block * plan.threads, std::min((block + 1) * plan.threads, vectors)}};
          }};
}

/// `inputs` tensors are added to give a row.
template <int inputs>
Launch layernorm_launch(const Arch& arch, const ModelConfig& m, const Workload& w) {
  const LayerNormPlan plan = layernorm_plan(arch, w.tokens(), m.hidden_size, inputs);
  const auto thread_end = [=](std::int64_t threads) { return std::min(threads * plan.elements, m.hidden_size); };
  return {.grid = {w.tokens(), 1, 1},
          .threads = plan.threads,
          .items = m.hidden_size,
          .sharers = plan.threads,
          .share = [=](std::int64_t thread) {
            return std::vector<Range>{{thread_end(thread), thread_end(thread + 1)}};
          }};
}

/// One line a plan: its name, the launch that it makes, whether it depends on kv_len.
struct Plan {
  const char* name;
  Launch (*launch)(const Arch&, const ModelConfig&, const Workload&);
  bool reads_cache = false;
};

using Model = const ModelConfig&;
using Load = const Workload&;
const Plan plans[] = {
    {"attention", attention_launch, true},
    {"rope", rope_launch},
    {"kv_append", kv_append_launch},
    {"layernorm", layernorm_launch<1>},
    {"residual_layernorm", layernorm_launch<2>},
    {"ln_qkv", ln_qkv_launch},
    {"query_key_value",
     [](const Arch& a, Model m, Load w) { return linear_launch(a, m.hidden_size, 3 * m.hidden_size, w); }},
    {"dense", [](const Arch& a, Model m, Load w) { return linear_launch(a, m.hidden_size, m.hidden_size, w); }},
    {"dense_h_to_4h",
     [](const Arch& a, Model m, Load w) { return linear_launch(a, m.hidden_size, m.intermediate_size, w); }},
    {"dense_4h_to_h",
     [](const Arch& a, Model m, Load w) { return linear_launch(a, m.intermediate_size, m.hidden_size, w); }},
    {"ln_qkv of 4 bits",
     [](const Arch& a, Model m, Load w) {
       return linear_gptq_launch(a, m.hidden_size, 3 * m.hidden_size, w, kLnQkvGptqTurns, 1);
     }},
    {"query_key_value of 4 bits",
     [](const Arch& a, Model m, Load w) { return linear_gptq_launch(a, m.hidden_size, 3 * m.hidden_size, w); }},
    {"dense_h_to_4h of 4 bits, on SMs that it shares",
     [](const Arch& a, Model m, Load w) {
       return linear_gptq_launch(a, m.hidden_size, m.intermediate_size, w, kLinearGptqTurns, kLinearGptqBlocksPerSm,
                                 true);
     }},
    {"dense_4h_to_h of 4 bits",
     [](const Arch& a, Model m, Load w) { return linear_gptq_launch(a, m.intermediate_size, m.hidden_size, w); }},
    {"embed_out", [](const Arch& a, Model m, Load w) { return linear_launch(a, m.hidden_size, m.vocab_size, w); }},
};

constexpr std::int64_t kMaxBatch = 16, kMaxKvLen = 2048;

}  // namespace

TEST_CASE("every plan fits its device and covers the work once", "[plans]") {
  for (const Arch& arch : {kH200, kRtx5090})
    for (const Plan& plan : plans)
      for (const ModelConfig& m : pythia_presets())
        for (std::int64_t batch = 1; batch <= kMaxBatch; ++batch)
          for (std::int64_t kv_len = 1; kv_len <= (plan.reads_cache ? kMaxKvLen : 1); ++kv_len) {
            const std::string found = fault(arch, plan.launch(arch, m, {.batch = batch, .kv_len = kv_len}));
            if (found.empty()) continue;
            FAIL(plan.name << ", " << m.name << ", sm_" << arch.compute_capability << ", batch " << batch << ", kv_len "
                           << kv_len << ": " << found);
          }
  SUCCEED("no fault");
}

TEST_CASE("plans hold for prefill and for shapes beyond the suite's", "[plans]") {
  const ModelConfig small{
      .name = "one head", .hidden_size = 8, .num_attention_heads = 1, .intermediate_size = 8, .vocab_size = 1};
  const ModelConfig large{.name = "large",
                          .hidden_size = 32768,
                          .num_attention_heads = 128,
                          .intermediate_size = 131072,
                          .vocab_size = 1 << 20};
  for (const Arch& arch : {kH200, kRtx5090})
    for (const Plan& plan : plans)
      for (const ModelConfig& m : {small, large})
        for (const Workload& w :
             {Workload{1, 1, 1}, Workload{1, 17, 17}, Workload{4, 512, 4096}, Workload{1, 1, 131072}}) {
          INFO(plan.name << ", " << m.name << ", sm_" << arch.compute_capability << ", batch " << w.batch << ", q_len "
                         << w.q_len << ", kv_len " << w.kv_len);
          CHECK(fault(arch, plan.launch(arch, m, w)) == "");
        }
}

TEST_CASE("attention: query heads of a group share keys, and splits and blocks cover them once", "[plans][grouped]") {
  struct Case {
    const char* preset;
    int gqa_heads;
  };
  for (const auto& [preset, gqa_heads] :
       {Case{"llama-3.2-1b", 4}, Case{"llama-3.2-3b", 3}, Case{"llama-3.1-8b", 4}, Case{"qwen2.5-7b", 7}}) {
    const ModelConfig m = *find_preset(preset);
    const std::int64_t group = m.num_attention_heads / m.kv_heads();
    for (const Arch& arch : {kH200, kRtx5090})
      for (std::int64_t batch : {1, 2, 3, 8, 16, 64})
        for (std::int64_t q_len : {1, 2, 15})
          for (std::int64_t kv_len = q_len; kv_len <= 4096; kv_len += kv_len < 300 ? 1 : 61) {
            const Workload w{.batch = batch, .q_len = q_len, .kv_len = kv_len};
            const ops::Attention::Dims d = attention_dims(m, w);
            const AttentionPlan plan = attention_plan(arch, d, DType::bf16),
                                plan_of_f32 = attention_plan(arch, d, DType::f32);
            const std::string found = fault(arch, attention_launch(arch, m, w));
            const bool is_large = kv_len * m.head_dim() > arch.tuning->unshared_elements;
            const bool as_expected = plan.gqa_heads == (is_large ? gqa_heads : 1) && plan_of_f32.gqa_heads == 1;
            if (found.empty() && as_expected && plan.stages > 0 && plan_of_f32.splits <= plan.splits) continue;
            FAIL(preset << ", sm_" << arch.compute_capability << ", batch " << batch << ", q_len " << q_len
                        << ", kv_len " << kv_len << ": " << plan.gqa_heads << " heads, " << plan.splits << " splits, "
                        << plan.stages << " stages " << found);
          }
    for (std::int64_t batch : {1, 3})
      for (std::int64_t q_len : {64, 100, 512, 2049}) {
        INFO(preset << ", batch " << batch << ", q_len " << q_len);
        CHECK(fault(kH200, wgmma_prefill_launch(kH200, m.head_dim(), m.kv_heads(), group, {batch, q_len, q_len})) ==
              "");
      }
  }
}

TEST_CASE("attention: GQA tiles are equal, and of every size and head_dim they fit", "[plans][grouped]") {
  for (int group = 1; group <= 128; ++group) {
    INFO("group " << group);
    const int heads = gqa_tile_heads(group);
    CHECK((heads >= 1 && heads <= kMaxGqaHeads && group % heads == 0));
    for (int larger = heads + 1; larger <= kMaxGqaHeads; ++larger) CHECK(group % larger != 0);
    for (const Arch& arch : {kH200, kRtx5090})
      for (std::int64_t head_dim = 8; head_dim <= kMaxHeadDim; head_dim += 8) {
        const AttentionPlan plan = attention_plan(arch,
                                                  {.batch = 1,
                                                   .q_len = 1,
                                                   .heads = group,
                                                   .kv_heads = 1,
                                                   .head_dim = head_dim,
                                                   .capacity = 4096,
                                                   .max_kv_len = 4096},
                                                  DType::f16);
        CHECK(plan.gqa_heads == (4096 * head_dim > arch.tuning->unshared_elements ? heads : 1));
        CHECK(plan.splits <=
              (plan.gqa_heads == 1 || head_dim > 128 ? arch.max_cluster_blocks : arch.largest_cluster_blocks));
        CHECK(plan.stages >= 1);
        CHECK(plan.smem_bytes <= arch.smem_per_block_bytes);
      }
  }
}

TEST_CASE("attention: each head of a GQA tile is merged once, in an inbox with room for its partial results",
          "[plans][grouped]") {
  for (int heads = 1; heads <= kMaxGqaHeads; ++heads)
    for (int used = 2; used <= (heads > 1 ? kMaxGqaSplits : kMaxSplits); ++used) {
      int merged = 0;
      for (int split = 0; split < used; ++split) {
        int own = 0;
        for (int head = split; head < heads; head += used) ++own;
        CHECK(own * used <= inbox_parts(heads));
        merged += own;
      }
      CHECK(merged == heads);
    }
}

TEST_CASE("attention: a query's tiles hold the keys that its window and its sinks let it see, each once", "[plans]") {
  const auto keys_of = [](const SeenTiles& seen, int tile_keys) {
    std::vector<int> keys;
    for (int tile = 0; tile < seen.count(); ++tile) {
      const int part = seen.keys_from(tile);
      REQUIRE(part > 0);
      for (int i = 0; i < std::min(part, tile_keys); ++i) keys.push_back(seen.first_key(tile) + i);
    }
    return keys;
  };
  for (int tile_keys : {64, 128})
    for (const KeyWindow& window : {KeyWindow{}, KeyWindow{1, 0}, {63, 0}, {64, 4}, {65, 4}, {128, 128}, {1, 129}})
      for (int visible : {0, 1, 3, 4, 5, 63, 64, 65, 66, 128, 129, 130, 257, 1000}) {
        INFO("tiles of " << tile_keys << ", window " << window.keys << ", sinks " << window.sinks << ", " << visible);
        const SeenTiles seen(window, visible, tile_keys);
        std::vector<int> expected;
        for (int key = 0; key < visible; ++key)
          if (!window || key < window.sinks || key >= visible - window.keys) expected.push_back(key);
        CHECK(keys_of(seen, tile_keys) == expected);
        if (visible == 0) continue;
        const int last = seen.count() - 1;  // tiles of the sinks hold sinks alone
        CHECK(seen.first_key(seen.newest() / tile_keys) + seen.newest() % tile_keys == visible - 1);
        CHECK(seen.newest() / tile_keys == last);
        for (int tile = 0; tile < seen.sink_tiles(); ++tile)
          CHECK(seen.first_key(tile) + std::min(seen.keys_from(tile), tile_keys) <= window.sinks);
        if (!window) {
          const AllTiles all(visible, tile_keys);
          CHECK((all.count() == seen.count() && all.newest() == seen.newest()));
          for (int tile = 0; tile < all.count(); ++tile) CHECK(all.keys_from(tile) == seen.keys_from(tile));
        }
      }
}

TEST_CASE("attention: a plan counts the keys that are seen, whatever the capacity", "[plans]") {
  for (const char* preset : {"pythia-2.8b", "llama-3.1-8b"})
    for (std::int64_t batch : {1, 8, 1024}) {
      const ModelConfig m = *find_preset(preset);
      const auto plan = [&](const KeyWindow& window, std::int64_t max_kv_len) {
        ops::Attention::Dims d = attention_dims(m, {.batch = batch, .q_len = 1, .kv_len = max_kv_len});
        d.window = window;
        return attention_plan(kH200, d, DType::f16);
      };
      CHECK(plan({.keys = 512}, 32768) == plan({}, 512));
      CHECK(plan({.keys = 2044, .sinks = 4}, 1 << 30) == plan({.keys = 2044, .sinks = 4}, 4096));
      CHECK(plan({.keys = 32768}, 512) == plan({}, 512));
    }
}

TEST_CASE("attention: with many sequences an SM has room for four blocks, whatever the capacity", "[plans]") {
  for (const char* preset : {"pythia-2.8b", "llama-3.2-1b"})
    for (std::int64_t kv_len : {64, 2048}) {
      const ModelConfig m = *find_preset(preset);
      const AttentionPlan plan =
          attention_plan(kH200, attention_dims(m, {.batch = 1024, .q_len = 1, .kv_len = kv_len}), DType::f16);
      INFO(preset << ": " << to_string(plan));
      CHECK((plan.splits == 1 && plan.stages == 1));
      CHECK(plan.smem_bytes <= smem_per_block_bytes(kH200, 4));
    }
  // Few sequences in a contiguous cache keep their rings.
  const ModelConfig m = *find_preset("pythia-2.8b");
  ops::Attention::Dims d = attention_dims(m, {.batch = 64, .q_len = 1, .kv_len = 2048});
  CHECK(attention_plan(kH200, d, DType::f16).stages == 2);
  d.pool = {.pages = 2048, .page_entries = 64};
  CHECK(attention_plan(kH200, d, DType::f16).stages == 1);
}

TEST_CASE("attention: the blocks of up to 1024 sequences fit a grid, and cover their keys once", "[plans]") {
  for (const char* preset : {"pythia-2.8b", "pythia-12b", "llama-3.1-8b"})
    for (const Arch& arch : {kH200, kRtx5090})
      for (std::int64_t batch : {65, 256, 1024})
        for (std::int64_t kv_len : {1, 32, 64, 65, 2048, 32768}) {
          INFO(preset << ", batch " << batch << ", kv_len " << kv_len);
          const ModelConfig m = *find_preset(preset);
          CHECK(fault(arch, attention_launch(arch, m, {.batch = batch, .q_len = 1, .kv_len = kv_len})) == "");
        }
}

TEST_CASE("attention: a prefill on Hopper's tensor cores covers its rows and leaves few SMs without a block",
          "[plans]") {
  for (std::int64_t head_dim = 8; head_dim <= kMaxHeadDim; head_dim += 8)
    for (std::int64_t group : {1, 3, 8})
      for (std::int64_t q_len = 1; q_len <= 2049; q_len += group) {
        const std::int64_t rows = q_len * group;
        CHECK_FALSE(wgmma_pays(kRtx5090, head_dim, rows));
        if (!wgmma_pays(kH200, head_dim, rows)) continue;
        for (std::int64_t kv_heads : {1, 12, 32, 65})
          for (std::int64_t batch : {1, 3}) {
            const Launch l = wgmma_prefill_launch(kH200, head_dim, kv_heads, group, {batch, q_len, q_len});
            const std::string found = fault(kH200, l);
            const bool two = l.threads == wgmma_threads(2);
            if (found.empty() && two == ((rows + 127) / 128 * kv_heads * batch >= kH200.sm_count)) continue;
            FAIL("head_dim " << head_dim << ", q_len " << q_len << ", group " << group << ", kv_heads " << kv_heads
                             << ", batch " << batch << ": " << (found.empty() ? "other warpgroups" : found));
          }
      }
  // Pythia-2.8B and Pythia-12B; heads that the kernel does not take; a prompt that other kernels are faster for.
  CHECK(wgmma_pays(kH200, 80, 128));
  CHECK(wgmma_pays(kH200, 128, 2048));
  CHECK_FALSE(wgmma_pays(kH200, 136, 2048));
  CHECK_FALSE(wgmma_pays(kH200, 256, 2048));
  CHECK_FALSE(wgmma_pays(kH200, 80, 16));
  CHECK(wgmma_plan(kH200, 80, 128, 32).warpgroups == 1);
  CHECK(wgmma_plan(kH200, 80, 2048, 32).warpgroups == 2);
}

TEST_CASE("attention: a head's and a row's quotients by the group are exact", "[plans][grouped]") {
  constexpr int most = INT32_MAX;
  for (std::int64_t size = 1; size <= most; size = size < 300 ? size + 1 : size * 2 + 1) {
    const int group = int(size);
    const HeadGroup by(group);
    std::int64_t wrong = by.size() != group;
    const auto check = [&](std::int64_t n) {
      if (n >= 0 && n <= most) wrong += by.quotient(int(n)) != n / group;
    };
    for (int n = 0; n < 65536; ++n) check(n);
    // Around multiples of the group, up to the largest int.
    for (std::int64_t n = most / size * size; n >= size; n -= std::max<std::int64_t>(most / size / 1000, 1) * size)
      for (int near : {-1, 0, 1}) check(n + near);
    check(most);
    INFO("group " << group);
    CHECK(wrong == 0);
  }
}

TEST_CASE("rope: a decode step has one head a thread, a long prefill four", "[plans]") {
  for (const Arch& arch : {kH200, kRtx5090}) {
    CHECK(rope_plan(arch, 1, 32, 32, 80, 20, 8).heads == 1);
    CHECK(rope_plan(arch, 64, 32, 32, 80, 20, 8).heads == 1);
    CHECK(rope_plan(arch, 4096, 32, 32, 80, 20, 8).heads == 4);
  }
  // 20 rotated elements lie in 64 of a head's 160 bytes; 256 elements, in all of them; 8, in all 16 bytes of a head.
  CHECK(rope_plan(kH200, 1, 32, 32, 80, 20, 8).turning == 4);
  CHECK(rope_plan(kH200, 1, 32, 32, 256, 256, 8).turning == 32);
  CHECK(rope_plan(kH200, 1, 32, 32, 8, 8, 8).turning == 1);
  CHECK(rope_plan(kH200, 1, 32, 32, 80, 20, 4).turning == 6);
}

TEST_CASE("rope: each vector of a token is one thread's, and those with rotated elements come first and turn",
          "[plans]") {
  using enum ops::QkvLayout;
  // Heads and kv heads: as many of both, and 3, 4, 7 and 8 query heads for each kv head.
  using Heads = std::pair<std::int64_t, std::int64_t>;
  for (auto [heads, kv_heads] :
       {Heads{1, 1}, {3, 3}, {4, 4}, {5, 5}, {32, 32}, {6, 2}, {4, 1}, {14, 2}, {28, 4}, {8, 1}, {24, 3}})
    for (ops::QkvLayout layout : {interleaved_by_head, separate}) {
      if (layout == interleaved_by_head && heads != kv_heads) continue;
      for (int lane : {4, 8})
        for (std::int64_t head_dim : {8, 16, 64, 80, 104, 128, 256, 4096})
          for (std::int64_t rotary_dim : {std::int64_t(2), head_dim / 4, head_dim / 4 + 2, head_dim})
            for (std::int64_t tokens : {1, 100000}) {
              const RopePlan plan = rope_plan(kH200, tokens, heads, kv_heads, head_dim, rotary_dim, lane);
              const auto groups_of = [&](int part) { return part == 0 ? plan.groups : plan.kv_groups; };
              std::set<std::array<int, 3>> seen;
              bool turned = true, orderly = true;
              for (int index = 0; index < plan.units(); ++index) {
                const RopeUnit u =
                    layout == separate ? plan.unit<separate>(index) : plan.unit<interleaved_by_head>(index);
                orderly &= u.turns <= turned && u.part >= 0 && u.part < 3 && u.group >= 0 &&
                           u.group < groups_of(u.part) && u.vector >= 0 && u.vector < plan.vectors;
                // What does not turn has no rotated element.
                orderly &= u.turns || u.part == 2 || u.vector * lane >= rotary_dim;
                orderly &= !u.turns || u.part < 2;
                turned = u.turns;
                seen.insert({u.group, u.part, u.vector});
              }
              CAPTURE(int(layout), lane, head_dim, rotary_dim, heads, kv_heads, tokens);
              CHECK(orderly);
              CHECK(std::int64_t(seen.size()) == std::int64_t(plan.groups + 2 * plan.kv_groups) * (head_dim / lane));
              for (auto [groups, of] : {std::pair{plan.groups, heads}, {plan.kv_groups, kv_heads}})
                CHECK((groups * plan.heads >= of && (groups - 1) * plan.heads < of));
            }
    }
}

TEST_CASE("linear: the blocks' tiles differ by one at most", "[plans]") {
  for (const Arch& arch : {kH200, kRtx5090})
    for (const ModelConfig& m : pythia_presets())
      for (std::int64_t tokens : {1, 8, 9, 16})
        for (std::int64_t out : {m.hidden_size, 3 * m.hidden_size, m.intermediate_size, m.vocab_size}) {
          const Launch l = linear_launch(arch, m.hidden_size, out, {.batch = tokens});
          const auto first = l.share(0), last = l.share(l.sharers - 1);
          INFO(m.name << ", sm_" << arch.compute_capability << ", tokens " << tokens << ", out " << out);
          REQUIRE(!last.empty());
          CHECK(first.size() - last.size() <= 1);
          CHECK(l.grid[0] <= arch.sm_count * l.blocks_per_sm);
        }
}

TEST_CASE("linear on Hopper's tensor cores: each step and each warp's rows are one block's, and all has room",
          "[plans]") {
  for (std::int64_t tokens : {9, 16, 17, 32, 33, 64, 65, 128})
    for (std::int64_t in : {8, 64, 256, 2560, 10240, 16384})
      for (std::int64_t out : {8, 128, 136, 2560, 7680, 10240, 50304}) {
        CAPTURE(tokens, in, out);
        const LinearWgmmaPlan p = linear_wgmma_plan(kH200, tokens, in, out);
        CHECK(p.token_tile >= tokens);
        CHECK(p.row_tiles * kLinearWgmmaTileRows >= out);
        CHECK((p.row_tiles - 1) * kLinearWgmmaTileRows < out);
        CHECK(p.splits >= 1);
        CHECK(p.splits <= kH200.max_cluster_blocks);
        CHECK((p.splits == 1 || in / kLinearWgmmaColumns >= p.splits));
        CHECK(p.stages >= 3);
        CHECK(p.stages <= kMostLinearWgmmaStages);
        CHECK(p.smem_bytes + 256 <= smem_per_block_bytes(kH200, tokens > 64 ? 1 : 2));
        CHECK(linear_wgmma_parts_bytes(p.token_tile, p.splits) <= p.stages * linear_wgmma_stage_bytes(p.token_tile));
        CHECK(linear_wgmma_first_warp(p.splits, 0) == 0);
        CHECK(linear_wgmma_first_warp(p.splits, p.splits) == kLinearWgmmaWarps);
        for (int warp = 0; warp < kLinearWgmmaWarps; ++warp) {
          const int owner = warp * p.splits / kLinearWgmmaWarps;
          CHECK(warp >= linear_wgmma_first_warp(p.splits, owner));
          CHECK(warp < linear_wgmma_first_warp(p.splits, owner + 1));
        }
      }
  using enum DType;
  CHECK(is_linear_wgmma(kH200, 9, 64, 64, f16, false));
  CHECK(is_linear_wgmma(kH200, 128, 64, 64, bf16, false));
  for (bool other : {is_linear_wgmma(kH200, 8, 64, 64, f16, false), is_linear_wgmma(kH200, 129, 64, 64, f16, false),
                     is_linear_wgmma(kH200, 64, 64, 64, f32, false), is_linear_wgmma(kH200, 64, 60, 64, f16, false),
                     is_linear_wgmma(kH200, 64, 64, 60, f16, false), is_linear_wgmma(kH200, 64, 64, 64, f16, true),
                     is_linear_wgmma(kRtx5090, 64, 64, 64, f16, false)})
    CHECK_FALSE(other);
}

TEST_CASE("linear's tiles on Hopper's tensor cores: all has room, is covered and has its SMs at once", "[plans]") {
  for (std::int64_t tokens : {129, 255, 256, 257, 512, 640, 2048, 2049, 40000})
    for (std::int64_t out : {8, 128, 136, 2560, 10240, 16384, 50304})
      for (const LinearTilesPlan& p :
           {linear_tiles_plan(kH200, tokens, out), linear_tiles_layout(kH200, tokens, out, kLinearTilesShared),
            linear_tiles_layout(kH200, tokens, out, kLinearTilesInTurn)}) {
        CAPTURE(tokens, out, p.shape.width);
        CHECK(fault(kH200, linear_tiles_launch(p)) == "");
        const std::int64_t group_tokens = p.shape.token_blocks() * kLinearTilesTokenRows,
                           group_features = p.shape.feature_blocks() * p.shape.width;
        CHECK(p.token_groups * group_tokens >= tokens);
        CHECK((p.token_groups - 1) * group_tokens < tokens);
        CHECK(p.feature_groups * group_features >= out);
        CHECK((p.feature_groups - 1) * group_features < out);
        CHECK(p.clusters * kLinearTilesBlocks <= kH200.sm_count);
      }
  for (const LinearTilesShape& shape : {kLinearTilesShared, kLinearTilesInTurn}) {
    CAPTURE(shape.width);
    CHECK(shape.width % kLinearTilesChunk == 0);
    CHECK(shape.token_blocks() * shape.feature_blocks() == kLinearTilesBlocks);
    // Copies are shared in pieces of whole eights of rows, the unit of the swizzle.
    CHECK(shape.width / shape.token_blocks() % 8 == 0);
    CHECK(linear_tiles_stages(shape.width) >= 4);
  }
}

TEST_CASE("linear's tiles on Hopper's tensor cores: they take products of many tokens with GELU in 16 bits",
          "[plans]") {
  using enum DType;
  using enum ops::Epilogue;
  for (ops::Epilogue gelu : {gelu_erf, gelu_tanh}) {
    CHECK(is_linear_tiles(kH200, 129, 64, 64, f16, false, gelu));
    CHECK(is_linear_tiles(kH200, kLinearTilesTokens, 64, 64, bf16, false, gelu));
  }
  for (bool other :
       {is_linear_tiles(kH200, 128, 64, 64, f16, false, gelu_erf),
        is_linear_tiles(kH200, kLinearTilesTokens + 1, 8, 8, f16, false, gelu_erf),
        is_linear_tiles(kH200, 512, 64, 64, f32, false, gelu_erf),
        is_linear_tiles(kH200, 512, 60, 64, f16, false, gelu_erf),
        is_linear_tiles(kH200, 512, 64, 60, f16, false, gelu_erf),
        is_linear_tiles(kH200, 512, 64, 64, f16, true, gelu_erf), is_linear_tiles(kH200, 512, 64, 64, f16, false, none),
        is_linear_tiles(kH200, 512, 64, 64, f16, false, residual),
        is_linear_tiles(kRtx5090, 512, 64, 64, f16, false, gelu_erf)})
    CHECK_FALSE(other);
}

TEST_CASE("linear's tiles on Hopper's tensor cores: Pythia-2.8B's products have the measured shapes, SMs are busy",
          "[plans]") {
  for (auto [tokens, in_turn] : {std::pair<std::int64_t, bool>{256, false}, {512, false}, {1024, true}, {2048, true}}) {
    CAPTURE(tokens);
    const LinearTilesPlan p = linear_tiles_plan(kH200, tokens, 10240);
    CHECK(p.shape.in_turn == in_turn);
    // Of what all SMs could multiply in the plan's rounds.
    CHECK(double(tokens * 10240) / (double(p.rounds()) * kH200.sm_count * kLinearTilesTokenRows * p.shape.width) > 0.9);
  }
}

TEST_CASE("linear of 4 bits: a part's chunks and groups are what its kernel and its ring have room for", "[plans]") {
  for (const Arch& arch : {kH200, kRtx5090})
    for (int halves : {1, 2, 3, 4, 8, 640})
      for (int chunks : {1, 2, 7, 40, 64, 65, 160, 256, 319, 320})
        for (auto [tokens, one_token] : {std::pair<std::int64_t, bool>{1, false}, {1, true}, {8, false}, {16, false}}) {
          if (one_token && halves % 2) continue;
          const GptqSizes sizes{160, chunks, halves, one_token};
          const GptqPlan p = gptq_plan(arch, sizes, tokens, kLinearGptqTurns, kLinearGptqBlocksPerSm);
          INFO(chunks << " chunks, " << halves << " half chunks a group, sm_" << arch.compute_capability
                      << (one_token ? ", one token" : ""));
          REQUIRE(p.grid > 0);
          CHECK((p.tokens >= 1 && p.tokens <= tokens && p.tokens <= 1 << p.token_bits));
          CHECK((p.early >= 1 && p.early <= p.stages));
          const int elements = p.tiles * kGptqRows << p.token_bits;
          CHECK((p.block_elements % kGptqRows == 0 && p.block_elements <= elements &&
                 p.block_elements * p.split >= elements));
          CHECK(kGptqOneTokenGroups * kGptqTileBytes <= p.stage_bytes);  // that one token multiplies in any case
          CHECK(bool(p.digit_bytes) == one_token);
          for (int half = 0; half < 2 * chunks; ++half) REQUIRE(gptq_group(p, half) == half / halves);
          for (int i = 0; i < p.split * kGptqParts; ++i) {
            const GptqSlice s = gptq_slice(p, i);
            CHECK(s.count <= gptq_most_chunks(arch, sizes));
            if (one_token) {
              CHECK(s.count * kGptqDigitBytes <= p.digit_bytes);
              // A fifth group is the slice's last chunk, and its fifth.
              const bool has_fifth = s.groups > kGptqOneTokenGroups;
              CHECK((!has_fifth || (s.groups == kGptqOneTokenGroups + 1 && s.count == s.groups)));
            }
            CHECK(s.count * kGptqTileBytes + s.groups * kGptqRows * 4 <= p.stage_bytes);
          }
        }
  // A weight of 2.8B's or 6.9B's keeps every SM of an H200 busy with one token; the larger have the longer rings.
  for (auto [in, out] :
       {std::pair{2560, 7680}, {2560, 10240}, {10240, 2560}, {4096, 12288}, {4096, 16384}, {16384, 4096}}) {
    const GptqPlan p = gptq_plan(kH200, {out / 16, in / 64, 4, true}, 1, kLinearGptqTurns, kLinearGptqBlocksPerSm);
    const bool is_far = p.tiles >= kH200Tuning.packed_ahead_of_many.many_tiles;
    CHECK(is_far == (in == 16384));
    // Few tiles have two stages. Many have four, but shared memory has room for two of 16,384 columns.
    CHECK(p.stages == 2);
    CHECK(p.early == (is_far ? 2 : kH200Tuning.packed_ahead.early));
    CHECK(p.grid >= 200);
    CHECK(p.grid <= kLinearGptqBlocksPerSm * kH200.sm_count);
    const int smem_bytes = linear_gptq_smem_bytes(kH200, p) + 1024;
    CHECK(kLinearGptqBlocksPerSm * smem_bytes <= kH200.smem_per_sm_bytes);
    CHECK((kLinearGptqBlocksPerSm + 1) * smem_bytes > kH200.smem_per_sm_bytes);
  }
  // The MLP's first product of Pythia-2.8B has 640 tiles. By its plan 213 blocks take three tiles and the last block
  // takes one. fill_device() makes 264 blocks, each with two or three tiles.
  GptqPlan up = gptq_plan(kH200, {640, 40, 4, true}, 1, kLinearGptqTurns, kLinearGptqBlocksPerSm);
  CHECK((up.grid == 214 && up.tiles == 3 && gptq_tiles(up, 640, 213).count == 1));
  fill_device(kH200, 640, kLinearGptqBlocksPerSm, up);
  CHECK((up.grid == 264 && up.tiles == 3 && up.full == 112 && gptq_tiles(up, 640, 112).count == 2));
  // Where a cluster's elements are up to four a thread, one of its blocks finishes them; where they are more, all do.
  const auto finishers = [](std::int64_t in, std::int64_t out, std::int64_t tokens) {
    const GptqPlan p = gptq_plan(kH200, {int(out / 16), int((in + 63) / 64), 4, tokens == 1}, tokens, kLinearGptqTurns,
                                 kLinearGptqBlocksPerSm);
    return ((p.tiles * kGptqRows << p.token_bits) + p.block_elements - 1) / p.block_elements;
  };
  CHECK(finishers(10240, 2560, 8) == 1);
  CHECK(finishers(16384, 4096, 1) == 1);
  CHECK(finishers(16384, 4096, 8) == 8);
  CHECK(finishers(5128, 9728, 8) == 4);
  CHECK(finishers(2560, 50304, 8) == 1);  // of a cluster of one
  CHECK(gptq_plan(kH200, {160, 321, 4}, 1, kLinearGptqTurns, kLinearGptqBlocksPerSm).grid == 0);
}

TEST_CASE("linear of 4 bits: which calls the wide kernel takes, and its blocks have equal parts of the columns",
          "[plans]") {
  const GptqSizes sizes{160, 40, 4};
  for (std::int64_t tokens : {1, 8}) CHECK_FALSE(gptq_is_wide(kH200, sizes, tokens));
  for (std::int64_t tokens : {9, 16, 17, 300}) CHECK(gptq_is_wide(kH200, sizes, tokens));
  CHECK(gptq_is_wide(kH200, {160, 192, 2}, 16));
  CHECK_FALSE(gptq_is_wide(kH200, {160, 193, 2}, 16));
  CHECK_FALSE(gptq_is_wide(kH200, {160, 40, 1}, 16));
  CHECK_FALSE(gptq_is_wide(kRtx5090, sizes, 16));
  CHECK_FALSE(gptq_is_wide(invariant_arch(kH200), sizes, 16));
  // The plan of a launch of all these tokens. An SM has room for two blocks of up to 16 tokens, for one of more.
  const auto wide_plan = [](const GptqSizes& of, int tokens) {
    const int blocks = linear_gptq_blocks_per_sm(true, tokens);
    CHECK(blocks == (tokens > 16 ? 1 : 2));
    const GptqPlan p = gptq_plan(kH200, of, tokens, kLinearGptqTurns, blocks);
    REQUIRE((p.grid > 0 && p.tokens == tokens));
    CHECK(blocks * (linear_gptq_smem_bytes(kH200, p) + 1024) <= kH200.smem_per_sm_bytes);
    return p;
  };
  for (int halves : {2, 4, 8})
    for (int chunks : {1, 3, 10, 11, 40, 64, 65, 160, 192}) {
      CAPTURE(halves, chunks);
      const GptqSizes of{chunks == 64 ? 1792 : 160, chunks, halves, false, false, true};
      const GptqPlan p = wide_plan(of, 16), of_32 = wide_plan(of, 32);
      // The same columns, so that a row has the same bits.
      CHECK((of_32.split == p.split && of_32.chunks == p.chunks && of_32.longer == p.longer));
      std::vector<int> of_block(static_cast<std::size_t>(p.split)), taken(static_cast<std::size_t>(chunks));
      for (int rank = 0; rank < p.split; ++rank)
        for (int part = 0; part < kGptqParts; ++part) {
          const GptqSlice s = gptq_slice(p, gptq_part(p, rank, part));
          CHECK(s.count <= kGptqWideChunks);
          CHECK(s.count * kGptqTileBytes + s.groups * kGptqRows * 4 <= p.stage_bytes);
          of_block[std::size_t(rank)] += s.count;
          for (int c = s.first; c < s.first + s.count; ++c) ++taken[std::size_t(c)];
        }
      const auto [least, most] = std::minmax_element(of_block.begin(), of_block.end());
      CHECK(*most - *least <= 1);
      for (int times : taken) CHECK(times == 1);
    }
  // Parts of four whole chunks.
  for (int chunks : {32, 64, 128, 160, 224, 256}) {
    CAPTURE(chunks);
    const GptqSizes of{chunks == 64 ? 1792 : 256, chunks, 4, false, true, true};
    CHECK(gptq_is_wide(kH200, of, 16));
    for (const int tokens : {16, 32}) {
      const GptqPlan p = wide_plan(of, tokens);
      CHECK(p.split == chunks / (kGptqParts * kGptqQuad));
      CHECK((p.chunks == kGptqQuad && p.longer == 0));
    }
  }
  CHECK_FALSE(gptq_is_wide(kH200, {256, 288, 4, false, true}, 16));
  const GptqLayout whole{.row_tiles = 256, .chunks = 64, .columns_per_group = 128, .inputs = 4096};
  GptqLayout ordered = whole, last_chunk = whole, groups_of_64 = whole;
  ordered.has_order = true;
  last_chunk.inputs = 4088;
  groups_of_64.columns_per_group = 64;
  CHECK(gptq_sizes(whole, 16).in_quads);
  for (const GptqLayout& other : {ordered, last_chunk, groups_of_64}) CHECK_FALSE(gptq_sizes(other, 16).in_quads);
  // The wide kernel is preferred to wgmma where its parts have three or four chunks.
  for (auto [chunks, in_quads, first] : {std::tuple{40, false, true},
                                         {48, false, true},
                                         {80, false, true},
                                         {56, false, false},
                                         {64, false, false},
                                         {64, true, true},
                                         {10, false, false}})
    for (std::int64_t tokens : {8, 9, 17, 32, 33}) {
      CAPTURE(chunks, in_quads, tokens);
      CHECK(gptq_wide_comes_first(kH200, {160, chunks, 4, false, in_quads}, tokens) ==
            (first && tokens > 8 && tokens <= 32));
    }
  // Calls of as many tokens as a launch takes and of more: the last launch has what is left, by the same plan.
  std::vector<std::int64_t> launches;
  REQUIRE(for_each_gptq_launch(kH200, sizes, 35, [&](std::int64_t first, const GptqPlan& p) {
    CHECK((p.wide && p.split == 2));
    launches.push_back(first);
    launches.push_back(p.tokens);
    return Status();
  }));
  CHECK(launches == std::vector<std::int64_t>{0, 32, 32, 3});
}

TEST_CASE("two products of 4 bits in one launch: a cluster's blocks take all columns of both, the first finishes",
          "[plans]") {
  for (std::int64_t tokens : {1, 2, 8})
    for (auto [hidden, intermediate] : {std::pair{2560, 10240}, {2048, 8192}, {1024, 4096}, {512, 2048}}) {
      CAPTURE(tokens, hidden, intermediate);
      const GptqSizes sizes[] = {{hidden / 16, hidden / 64, 4}, {hidden / 16, intermediate / 64, 4}};
      const GptqSumPlan plan = gptq_sum_plan(kH200, sizes[0], sizes[1], tokens);
      const GptqPlan* const plans[] = {&plan.first, &plan.second};
      REQUIRE(plan.second.grid > 0);
      CHECK(plan.first.first_rank == 0);
      CHECK(plan.second.first_rank == 1);
      for (int product = 0; product < 2; ++product) {
        const GptqPlan& p = *plans[product];
        CHECK((p.grid == plan.second.grid && p.split == plan.second.split && p.tiles == plan.second.tiles));
        CHECK((p.stage_bytes == plan.second.stage_bytes && p.smem_bytes == plan.second.smem_bytes));
        CHECK((p.tokens == tokens && p.block_elements == p.tiles * kGptqRows << p.token_bits));
        // The columns by the plan that the product alone has, so that its sums have the same order.
        const GptqPlan alone = gptq_plan(kH200, sizes[product], tokens, kLinearGptqTurns, kLinearGptqBlocksPerSm);
        const int blocks = product == 0 ? 1 : p.split - 1;
        CHECK(alone.split == blocks);
        int next = 0;
        for (int i = 0; i < blocks * kGptqParts; ++i) {
          const GptqSlice slice = gptq_slice(p, i), expected = gptq_slice(alone, i);
          CHECK(slice.first == next);
          CHECK((slice.count == expected.count && slice.first_group == expected.first_group));
          next += slice.count;
        }
        CHECK(next == sizes[product].chunks);
      }
    }
  // Other rows, too many columns, groups that end within a chunk, too many tokens.
  for (const auto& [first, second, tokens] :
       {std::tuple<GptqSizes, GptqSizes, std::int64_t>{{160, 40, 4}, {161, 160, 4}, 1},
        {{256, 64, 4}, {256, 256, 4}, 1},
        {{160, 40, 1}, {160, 160, 4}, 1},
        {{160, 40, 4}, {160, 160, 3}, 1},
        {{160, 40, 4}, {160, 160, 4}, 9}})
    CHECK(gptq_sum_plan(kH200, first, second, tokens).second.grid == 0);
}

TEST_CASE("linear of 4 bits: lanes that load x from shared memory at once use every bank once", "[plans]") {
  // Eight lanes load 16 bytes each: four vectors of two product columns.
  for (int column = 0; column < 8; column += 2)
    for (int vector = 0; vector < kGptqTokenBytes / 16; vector += 4) {
      std::set<int> places;
      for (int lane = 0; lane < 8; ++lane)
        places.insert((gptq_token_of_column(column + lane / 4) * kGptqTokenBytes + (vector + lane % 4) * 16) % 128 /
                      16);
      CHECK(places.size() == 8);
    }
  std::set<int> tokens;
  for (int column = 0; column < 8; ++column) tokens.insert(gptq_token_of_column(column));
  CHECK((tokens.size() == 8 && *tokens.begin() == 0 && *tokens.rbegin() == 7));
}

TEST_CASE("gemm: a model's scratch memory has room for each of its products, and few tokens take none", "[plans]") {
  for (const ModelConfig& m : pythia_presets())
    for (DType dtype : {DType::f16, DType::bf16})
      for (bool quantised : {false, true}) {
        CAPTURE(m.name, to_string(dtype), quantised);
        CHECK(linear_scratch_bytes(m, dtype, kH200Tuning.gemv_tokens, quantised) == 0);
        CHECK(linear_scratch_bytes(m, DType::f32, 4096, quantised) == 0);
        for (std::int64_t tokens : {kH200Tuning.packed_tokens + 1, std::int64_t(2048)}) {
          const std::size_t bytes = linear_scratch_bytes(m, dtype, tokens, quantised);
          CHECK(bytes % 4 == 0);
          CHECK(bytes >= kGemmWorkspaceBytes + std::size_t(tokens * m.intermediate_size * 4));
          CHECK(bytes >= linear_scratch_bytes(m, dtype, tokens - 1, quantised));
          for_each_linear(m, LayerWeights{}, [&](const Site& site, const LinearParams&, const LinearSize& size) {
            const bool gelu = site.id == SiteId::dense_h_to_4h;
            for (int bits : {4, 8}) {
              const int parts = quantised ? gptq_parts(dtype, bits) : 0;
              CHECK(bytes >= gemm_scratch(tokens, size.in, size.out, parts, gelu || quantised).bytes);
            }
          });
        }
      }
}

TEST_CASE("gemm: the parts of scratch memory lie one behind the other, from multiples of 256 bytes on", "[plans]") {
  for (int parts : {0, 2, 3})
    for (bool has_sums : {false, true}) {
      const GemmScratch s = gemm_scratch(17, 72, 63, parts, has_sums);
      CHECK(s.weight == kGemmWorkspaceBytes);
      CHECK(s.x >= s.weight + std::size_t(63 * parts * 72 * 2));
      CHECK(s.sums >= s.x + std::size_t(17 * parts * 72 * 2));
      CHECK(s.bytes >= s.sums + (has_sums ? std::size_t(17 * 63 * 4) : 0));
      CHECK(s.bytes < kGemmWorkspaceBytes + std::size_t((63 + 17) * parts * 72 * 2 + 17 * 63 * 4 + 3 * 256));
      for (std::size_t at : {s.weight, s.x, s.sums}) CHECK(at % 256 == 0);
    }
}

TEST_CASE("gemm: the parts of a GPTQ weight hold all of its bits", "[plans]") {
  // Significant bits of a float16 scale times a difference of codes, and of a number of each dtype.
  for (int bits : {4, 8}) {
    CHECK(gptq_parts(DType::f16, bits) * 11 >= 11 + bits);
    CHECK(gptq_parts(DType::bf16, bits) * 8 >= 11 + bits);
    for (DType dtype : {DType::f16, DType::bf16}) CHECK(gptq_parts(dtype, bits) <= kMostGptqParts);
  }
}

TEST_CASE("a launch that does not fit or does not cover is found", "[plans]") {
  const Launch good{.grid = {8, 1, 1},
                    .threads = 256,
                    .blocks_per_sm = 2,
                    .smem_bytes = 40 << 10,
                    .cluster_blocks = 4,
                    .items = 20,
                    .sharers = 8,
                    .share = [](std::int64_t block) { return run_of(block, 8, 20); }};
  CHECK(fault(kH200, good) == "");
  CHECK(fault(kRtx5090, good) == "");
  const auto found = [&](auto change) {
    Launch l = good;
    change(l);
    return fault(kRtx5090, l);
  };
  CHECK(found([](Launch& l) { l.grid[0] = 0; }) == "grid of 0");
  CHECK(found([](Launch& l) { l.grid[1] = 65536; }) == "grid of 65536");
  CHECK(found([](Launch& l) { l.threads = 1056; }) == "1056 threads");
  CHECK(found([](Launch& l) { l.threads = 33; }) == "33 threads");
  CHECK(found([](Launch& l) { l.smem_bytes = 101377; }) == "101377 bytes of shared memory");
  CHECK(found([](Launch& l) { l.smem_bytes = 51 << 10; }) == "2 blocks an SM");
  CHECK(found([](Launch& l) { l.blocks_per_sm = 7; }) == "7 blocks an SM");
  CHECK(found([](Launch& l) { l.cluster_blocks = 16; }) == "clusters of 16 blocks");
  CHECK(found([](Launch& l) { l.cluster_blocks = 3; }) == "clusters of 3 blocks");
  CHECK(found([](Launch& l) { l.grid[0] = 6; }) == "clusters of 4 blocks");
  CHECK(found([](Launch& l) { l.sharers = 6; }) == "18 of 20 items covered");
  CHECK(found([](Launch& l) { l.share = [](std::int64_t) { return run_of(0, 1, 20); }; }) == "item 0 not covered once");
  CHECK(found([](Launch& l) { l.share = [](std::int64_t block) { return dealt(block, 9, 20); }; }) ==
        "item 8 not covered once");
}

TEST_CASE("a plan prints in one line, with every number that a choice changes", "[plans]") {
  const GptqPlan gptq{.split = 2,
                      .tiles = 3,
                      .block_elements = 16,
                      .stages = 4,
                      .full = 1,
                      .early = 3,
                      .stage_bytes = 2560,
                      .chunks = 4,
                      .longer = 1,
                      .halves_a_group = 4,
                      .halves_magic = 0,
                      .digit_bytes = 640,
                      .turns = 1,
                      .tokens = 1,
                      .token_bits = 0,
                      .grid = 264,
                      .smem_bytes = 77824};
  const std::string of_gptq =
      "1 tokens a launch, 264 blocks, 2 splits, 3 tiles a cluster, 5 chunks a part, 4 stages, 3 of them early, 77824 B "
      "of shared memory";
  CHECK(to_string(gptq) == of_gptq);
  CHECK(to_string(GptqSumPlan{gptq, gptq}) == "first: " + of_gptq + "; second: " + of_gptq);
  CHECK(to_string(LnQkvGptqPlan{gptq, 90000}) == of_gptq + ", 90000 with the tokens");
  const GemvPlan gemv{.depth = 5, .blocks_per_sm = 3, .grid = 320};
  CHECK(to_string(gemv) == "320 blocks, 3 blocks an SM, 5 loads ahead");
  CHECK(to_string(LnQkvPlan{gemv, 4, 30000}) ==
        "4 tokens a launch, 320 blocks, 3 blocks an SM, 5 loads ahead, 30000 B of shared memory");
  CHECK(to_string(LinearWgmmaPlan{64, 80, 2, 6, 150000}) ==
        "80 row tiles, 2 splits, 64 tokens a tile, 6 stages, 150000 B of shared memory");
  CHECK(to_string(LinearTilesPlan{{true, 128}, 4, 40, 66, 200000}) ==
        "66 clusters, 3 rounds, 4 token groups, 40 feature groups, 128 features a tile, 200000 B of shared memory, "
        "warpgroups in turn");
  CHECK(to_string(LinearTilesPlan{{false, 160}, 1, 64, 64, 200000}) ==
        "64 clusters, 1 rounds, 1 token groups, 64 feature groups, 160 features a tile, 200000 B of shared memory, "
        "warpgroups share tiles");
  CHECK(to_string(AttentionPlan{4, 8, 3, 60000}) == "4 heads a GQA tile, 8 splits, 3 stages, 60000 B of shared memory");
  CHECK(to_string(WgmmaPlan{2, 5, 70000}) == "5 blocks a kv head, 2 warpgroups, 70000 B of shared memory");
  CHECK(to_string(LayerNormPlan{8, 320}) == "320 threads a row, 8 elements a thread");
  CHECK(to_string(TokenPlan{128, 8}) == "8 blocks a token, 128 threads");
  CHECK(to_string(RopePlan{1, 32, 8, 10, 4, {128, 4}}) ==
        "1 heads a thread, 480 units a token, 4 turning vectors a head, 4 blocks a token, 128 threads");
}

TEST_CASE("a GPU's measured numbers are found by its name, and say where they were measured", "[plans]") {
  CHECK(&tuning_of("NVIDIA H100 80GB HBM3") == &kH100Tuning);
  CHECK(&tuning_of("NVIDIA H200") == &kH200Tuning);
  CHECK(&tuning_of("NVIDIA GeForce RTX 5090") == &kRtx5090Tuning);
  CHECK(&tuning_of("a GPU of next year") == &kH200Tuning);
  CHECK((kH100.tuning == &kH100Tuning && kH200.tuning == &kH200Tuning && kRtx5090.tuning == &kRtx5090Tuning));
  for (const Arch& arch : {kH100, kH200, kRtx5090}) CHECK(arch.tuning->measured_on == "NVIDIA H200");
  CHECK((kH100.has_wgmma() && kH200.has_wgmma() && !kRtx5090.has_wgmma()));
}

TEST_CASE("a plan follows the numbers of its GPU", "[plans]") {
  Tuning tuning = kH200Tuning;
  Arch arch = kH200;
  arch.tuning = &tuning;
  CHECK(is_linear_wgmma(arch, 9, 64, 64, DType::f16, false));
  CHECK(is_gemm(arch, 65, 64, DType::f16, true));
  CHECK_FALSE(is_linear_tiles(arch, 128, 64, 64, DType::f16, false, ops::Epilogue::gelu_erf));
  CHECK_FALSE(prefill_pays(arch, 15));
  const auto wide = [&] { return gptq_wide_comes_first(arch, {160, 40, 4, false, false}, 32); };
  CHECK(wide());
  const ops::Attention::Dims d = attention_dims(*find_preset("pythia-2.8b"), {.batch = 64, .q_len = 1, .kv_len = 2048});
  CHECK(attention_plan(arch, d, DType::f16).stages == 2);
  const auto blocks = [&](std::int64_t bytes) { return plan_slices({arch}, bytes / kLaneBytes).blocks; };
  CHECK((blocks(2 << 20) == 32 && blocks((2 << 20) + kLaneBytes) == 64));
  CHECK((blocks(8 << 20) == 64 && blocks((8 << 20) + kLaneBytes) == kMostExchangeBlocks));
  tuning.packed_wide_tokens = 16;
  tuning.two_tile_sequences = 63;
  tuning.two_shot_blocks[0].most_bytes = 1 << 20;
  tuning.gemv_tokens = 16;
  tuning.packed_tokens = 80;
  tuning.wgmma_tokens = 64;
  tuning.prefill_queries = 8;
  CHECK_FALSE(is_linear_wgmma(arch, 9, 64, 64, DType::f16, false));
  CHECK_FALSE(is_gemm(arch, 65, 64, DType::f16, true));
  CHECK(is_linear_tiles(arch, 128, 64, 64, DType::f16, false, ops::Epilogue::gelu_erf));
  CHECK(prefill_pays(arch, 15));
  CHECK_FALSE(wide());
  CHECK(attention_plan(arch, d, DType::f16).stages == 1);
  CHECK(blocks(2 << 20) == 64);
}
