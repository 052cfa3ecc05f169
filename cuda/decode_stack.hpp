#pragma once
// Private to cuda.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/layer.hpp"
#include "core/model_config.hpp"
#include "core/status.hpp"
#include "cuda/arch.hpp"
#include "cuda/cuda.hpp"
#include "cuda/memory.hpp"

namespace cf::cuda {

class Stack;

/// How decode_stack's one kernel is laid out. Plans are values; every plan computes the same, but for the order in which
/// the keys of a head are summed.
struct DecodeStackPlan {
  int grid;            // blocks, one an SM, all resident at once
  int narrow_columns;  // of a slice, where one token's activations stay in registers for a whole product; else 0
  int hidden_slices;   // that a row of hidden columns is cut into, a power of two
  int act_slices;      // that a row of intermediate columns is cut into, no fewer
  int hidden_columns;  // of a slice
  int act_columns;
  bool shared_norms;     // several tokens' norms find gamma and beta in shared memory
  int stages;            // of the ring
  int stages_in_flight;  // asked for and not there yet, at most
  int stage_bytes;
  int up_eighths;        // of a block's rows of the MLP's first product that come before attention
  int attention_splits;  // of a head's keys
  bool cluster_merge;    // those are merged in a cluster's shared memory, not in device memory
  int stage_keys;        // keys and values that a stage holds, a multiple of sixteen
  int out_rows;          // a block's rows of hidden, at most
  int own_rows;          // that a warp has, at most, where rows are not cut
  int sums;  // over the other products: a block's rows' slices, or of several tokens its rows' shares of warps
  int smem_bytes;
};
/// Parts of a stage, one for each of half of the products' warps; columns of a slice, at most.
inline constexpr int kStageSlices = 4, kMaxSliceColumns = 2560;
/// Columns of slices that there are kernels for: for one sequence.
inline constexpr int kNarrowColumns[] = {2560, 2048, 1024};

/// A block's warps: some take products of the weights and attend, some merge and fetch what other blocks have made, one
/// streams the weights, keys and values. Three warps a scheduler leave each thread 168 registers.
inline constexpr int kProductWarps = 8, kHelperWarps = 3;
inline constexpr int kProductThreads = 32 * kProductWarps, kHelperThreads = 32 * kHelperWarps;
inline constexpr int kDecodeThreads = kProductThreads + kHelperThreads + 32;
inline constexpr int kMaxDecodeBatch = 8, kMaxDecodeHeadDim = 256;

/// What a plan is to have instead of its own choice; empty for that.
struct DecodeChoices {
  std::optional<int> blocks = {};            // 1 to one an SM
  std::optional<int> stages = {};            // 3 to what fits
  std::optional<int> stages_in_flight = {};  // 1 to two fewer than the ring has
  std::optional<int> up_eighths = {};        // 0 to 8: 0 hides nothing of what q, k and v take from block to block, 8
                                             // nothing of what the context does
  std::optional<int> attention_splits = {};  // 1 to 32, or to what 8 KB hold of their sums
  bool cluster_merge = false;                // of 2 splits to a cluster's limit; blocks are a multiple of them
};

/// A pure function of the device's limits, the model and the choices. Code::unimplemented, with the reason, for what
/// the kernel does not take: another dtype than float16 and bfloat16, sizes of rows that are no multiple of 8, head_dim
/// beyond 256, hidden beyond 6144, more than 8 sequences, a shared memory that a ring of three stages does not fit.
/// Code::invalid_argument for choices out of their bounds.
Result<DecodeStackPlan> plan_decode_stack(const Arch& arch, const ModelConfig& config, std::int64_t batch,
                                          const DecodeChoices& choices = {});

std::string to_string(const DecodeStackPlan&);

/// Steps layers of a resident stack, each the layer of core/layer.hpp (Hugging Face's GPTNeoXLayer), with one persistent
/// kernel: ClusterFusion's idea (Luo et al. 2025, arXiv:2508.18850) for a whole stack. One new token a sequence; dense
/// 16-bit weights of the activations' dtype. KV caches get the new keys and values; of the sites only the output is
/// kept. Between the layers of a launch, and from one launch to the next that continues it, the residual stream is
/// float32. Not shared between threads.
class DecodeStack {
 public:
  /// Where layers lie: those of layer 0, and how far on each next layer lies.
  struct Layers {
    LayerWeights first;
    LayerTensors tensors;
    std::int64_t stride_bytes;
  };
  /// Plans, and takes its scratch memory, for layers on the device, on whose memory it works: that must outlive it.
  /// Refuses what plan_decode_stack() refuses, several new tokens a sequence, activations of another dtype than the
  /// weights', and quantised weights; Code::out_of_memory where there is no room. Clusters are as many as the device
  /// holds at once, where no number of blocks is chosen.
  static Result<DecodeStack> create(const Context& context, const ModelConfig& config, std::int64_t layers,
                                    const Layers& where, const DecodeChoices& choices = {});
  /// The same for a stack's.
  static Result<DecodeStack> create(const Context& context, const Stack& stack, const DecodeChoices& choices = {});
  DecodeStack(DecodeStack&&) noexcept;
  DecodeStack& operator=(DecodeStack&&) noexcept;
  ~DecodeStack();

  /// What tests ask for.
  struct Probe {
    bool taps = false;                    // write every site's output of a launch's last layer to the stack's tensors
    unsigned delay_seed = 0;              // blocks dawdle at random; 0 for not
    std::int64_t withheld_layer = -1;     // no block says that it has done this layer's
    std::string_view withheld_site = {};  // site, by its name
    std::int64_t wait_limit_ms = kWaitLimitMs;
  };
  static constexpr std::int64_t kWaitLimitMs = 2000;  // longer than a block waits for another that runs
  /// Refuses a site that no block waits for.
  Status set_probe(const Probe& probe);

  const DecodeStackPlan& plan() const;
  /// Launches layers [first, last) in one kernel: from `input`, or where that is empty from where the launch before left
  /// off, to `output`. Code::device_error, once, when an earlier launch was given up: a block waited longer than it may for
  /// what the message names. Nothing is launched then.
  Status enqueue(CUstream_st* stream, std::int64_t first, std::int64_t last, const ConstAnyView<2>& input,
                 const AnyView<2>& output);
  /// Launches one layer in two regular kernels, with the same bits: what all blocks need of the first is there when the
  /// second begins. With a parallel residual, norms, q, k and v and the MLP's first product, of which no block waits
  /// for another; then attention, the MLP's second product and dense. With a sequential one, all up to dense, then the
  /// MLP. Within a kernel blocks still wait for each other between attention and dense, as for q, k and v and between
  /// the MLP's products with a sequential residual, and nobody sees to it that all are resident at once: beside another
  /// such kernel on the same SMs a wait may take too long, which is the error of enqueue().
  Status enqueue_split(CUstream_st* stream, std::int64_t layer, const ConstAnyView<2>& input, const AnyView<2>& output);

 private:
  struct State;
  explicit DecodeStack(std::unique_ptr<State>);
  Status take_report();
  std::unique_ptr<State> state_;
};

}  // namespace cf::cuda
