#pragma once
// Private to cuda, apps and tests.
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "core/model/layer.hpp"
#include "core/model/model.hpp"
#include "core/status.hpp"
#include "cuda/persistent/plan.hpp"
#include "cuda/runtime/context.hpp"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace cf::cuda {

/// A layer on the device: dense weights of the model's dtype or packed ones, and the cache that the layer's steps read
/// and append to.
struct PersistentLayer {
  LayerWeights weights{};
  LayerCache cache{};
  /// (batch, pages of a sequence), or empty: a contiguous cache. All layers have one table, and their caches lie as
  /// PagedCacheView says. The kernel reads the table when it runs: a launch of many tokens needs the pages of all entries
  /// that it appends.
  View<const std::int32_t, 2> page_table{};
};

/// The sequences' state on the device. The kernel reads positions and kv_len when it runs.
struct PersistentSequences {
  View<const std::int32_t, 1> positions{};  // (batch)  the new token's row of cos and sin
  View<const std::int32_t, 1> kv_len{};     // (batch)  valid entries after the append
};

/// The RoPE table on the device: (table_rows, rotary_dim / 2).
struct RopeTable {
  View<const float, 2> cos{}, sin{};
};

/// What lies outside a model's layers, on the device (Hugging Face's GPTNeoXForCausalLM: embed_in, final_layer_norm,
/// embed_out; LlamaForCausalLM: embed_tokens, norm, lm_head, which may be the embedding). With it launches make whole
/// tokens. `ids`, `positions` and `kv_len` are the sequences' next step, as Model has it. The weights have the model's
/// dtype; the LM head has no bias.
struct PersistentEnds {
  ConstAnyView<2> embed_in{};  // (vocab, hidden)
  NormParams final_layer_norm{};
  ConstAnyView<2> embed_out{};        // (vocab, hidden)
  View<std::int32_t, 1> ids{};        // (batch)
  View<std::int32_t, 1> positions{};  // (batch)
  View<std::int32_t, 1> kv_len{};     // (batch)
  View<std::int32_t, 1> chosen{};     // (batch)
};

/// Returns the compiled kernel for a plan and a dtype. It is compiled for the plan's products, and for GQA tiles of one
/// head or of several.
using PersistentKernelLookup = const void* (*)(const PersistentPlan& plan, DType dtype);

/// Where a launch of many tokens ends a sequence by itself: behind its `tokens`-th token, or where it chooses one of
/// `stop_ids`, of which there are at most most_stop_ids(). A sequence whose first token is a stop id, or that has 0
/// tokens, has ended before.
struct PersistentEnd {
  std::int64_t tokens = std::numeric_limits<std::int64_t>::max();
  std::span<const std::int32_t> stop_ids = {};
};

struct PersistentOptions {
  PersistentChoices choices{};
  std::int64_t first_model_layer = 0;        // the model's number of layers[0], for errors
  std::optional<PersistentEnds> ends = {};   // of the whole model that the layers are
  PersistentKernelLookup kernels = nullptr;  // for tests: other kernels than the library's
};

/// Runs layers of a model with the persistent kernel, each the layer of core/model/layer.hpp (Hugging Face's
/// GPTNeoXLayer and LlamaDecoderLayer): ClusterFusion's idea (Luo et al. 2025, arXiv:2508.18850) for many layers. A
/// step is one new token for each of batch sequences. It appends to the caches. Of the sites' outputs it writes the
/// last layer's output, or a whole model's logits, and no other. Between the layers of a launch, and from a launch to
/// the one that continues it, the residual stream is float32.
///
/// Layers are numbered as in `layers`; errors name the model's layer. Nothing that the views show is copied or owned:
/// it must outlive the object and every launch, captured ones included. Not shared between threads.
class PersistentKernel {
 public:
  /// Plans the kernel for the layers and takes its scratch memory. Of a model that ranks share, the context is that of a
  /// rank, whose peers have an area of rank_area_bytes(); every rank makes the same launches, in the same order as the
  /// others; none of them continues another one. What a rank has given up ends all ranks' launches, and later ones are
  /// refused with the same report. Each Linear is dense or packed by cuda::pack().
  /// Layers may be packed in up to seven ways. Code::unimplemented for what plan_persistent() refuses, a grid of more
  /// blocks than the device holds at once, views of another dtype than the model's, more layers than
  /// kMaxPersistentLayers, layers packed in more ways, groups that differ in size or are no multiple of 32 columns, and
  /// pages of a size that is_page_size() does not have; Code::invalid_argument for no layers, for views of other shapes
  /// and for layers with different page tables; Code::out_of_memory without room.
  static Result<PersistentKernel> create(const Context& context, const PersistentModel& model,
                                         std::span<const PersistentLayer> layers, const PersistentSequences& sequences,
                                         const RopeTable& rope, const PersistentOptions& options = {});
  PersistentKernel(PersistentKernel&&) noexcept;
  PersistentKernel& operator=(PersistentKernel&&) noexcept;
  ~PersistentKernel();

  /// The bytes of a Communicator's area that kernels of so many ranks take.
  static std::int64_t rank_area_bytes(std::int64_t ranks);

  const PersistentPlan& plan() const;

  /// Launches layers [first, last) in one kernel. They read `input` (batch, hidden) or, where it is empty, the residual
  /// stream of the launch before, and write `output` (batch, hidden). Launches nothing and returns the report where
  /// take_report() has one.
  Status enqueue(CUstream_st* stream, std::int64_t first, std::int64_t last, const ConstAnyView<2>& input,
                 const AnyView<2>& output);
  /// Launches one layer in two regular kernels, with the same bits. With a parallel residual the first makes what needs
  /// the layer's input alone (norms, q, k, v and mlp.act), the second attention, mlp.dense_4h_to_h and attention.dense.
  /// With a sequential residual the first ends with attention.dense, the second is the MLP. Blocks still wait for each
  /// other within a kernel, and a regular launch does not guarantee that all of them are resident: beside another such
  /// kernel on the same SMs a wait may take too long, which is a report.
  Status enqueue_split(CUstream_st* stream, std::int64_t layer, const ConstAnyView<2>& input, const AnyView<2>& output);

  /// Launches the whole model for one token of each sequence, those of PersistentEnds::ids: embedding, layers, final
  /// norm and LM head, whose logits go to `logits` (batch, vocab). Refuses a kernel without PersistentEnds.
  Status enqueue_token(CUstream_st* stream, const AnyView<2>& logits);
  /// Launches the same for `count` tokens of each sequence, 1 to most_tokens(). Each next token is the greedy choice
  /// among the logits, the lowest id of equal ones; -1, and then 0 in its place, where the logits are refused as
  /// cpu_ref::sample() refuses them. The launch leaves ids, positions and kv_len as those of the last token that it
  /// ran, its choices in PersistentEnds::chosen, and its logits in `logits`. Tokens are numbered over all launches;
  /// returns the number of the launch's first token. At most four launches may be in flight at once.
  ///
  /// `sequence_ends` (batch), or none, says where sequences end. A sequence that has ended gets no more entries, and
  /// what made() has of its later tokens means nothing. The launch ends with its last sequence. It leaves a sequence
  /// that has ended idle, with a kv_len of kIdleLength.
  Result<unsigned> enqueue_tokens(CUstream_st* stream, std::int64_t count, const AnyView<2>& logits,
                                  std::span<const PersistentEnd> sequence_ends = {});
  /// The most tokens of one launch, and the most stop ids of a sequence.
  static std::int64_t most_tokens();
  static std::size_t most_stop_ids();
  /// The choice of a sequence that token `number` has led to, or empty where it has not been made yet. Waits for
  /// nothing.
  std::optional<std::int32_t> made(unsigned number, std::int64_t sequence) const;
  /// Asks launches to end before token `number`. A launch ends at least one token after it has seen this.
  void end_before(unsigned number);

  /// The report of a launch that was given up, once: Code::device_error, which names the model's layer and the site
  /// whose output did not come in time. ok where there is none. After a synchronisation of the stream the answer covers
  /// every launch that was enqueued before it.
  Status take_report();

  /// What tests ask for.
  struct Probe {
    std::optional<LayerTensors> taps = {};  // where every site's output of a launch's last layer is written
    unsigned delay_seed = 0;                // random delays of the blocks; 0 for none
    std::int64_t withheld_layer = -1;       // no block publishes this layer's
    std::string_view withheld_site = {};    // output of this site
    std::int64_t wait_limit_ms = kWaitLimitMs;
  };
  static constexpr std::int64_t kWaitLimitMs = 2000;  // a block waits far less for one that runs
  /// Applies to the launches that follow. Refuses a site that no block waits for.
  Status set_probe(const Probe& probe);

 private:
  struct State;
  explicit PersistentKernel(std::unique_ptr<State>);
  std::unique_ptr<State> state_;
};

}  // namespace cf::cuda
