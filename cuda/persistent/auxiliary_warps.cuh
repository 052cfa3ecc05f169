#pragma once
// What the auxiliary warps of a block do beside the consumer warps: they merge partial attention results and fetch what
// all blocks have made.
#include "cuda/persistent/attention.cuh"

namespace cf::cuda {

template <class T, Products Kind, bool Grouped>
class AuxiliaryWarps {
  static constexpr bool Tiles = is_tiled(Kind);

 public:
  __device__ explicit AuxiliaryWarps(const PersistentArguments& arguments)
      : block(Block::auxiliaries(arguments)), c(arguments) {}

  /// Runs a layer, in the order of the launch's phases. False where a wait took too long.
  __device__ bool run(int number) {
    layer = number;
    block.maybe_delay(-1 - layer);
    bool after_up = false;  // mlp.act must wait for the memory of up's tokens
#pragma unroll 1
    for (int step = c.first_phase(layer), is_last = false; !is_last; ++step) {
      const PhaseSpec phase = load_phase(c, step);
      is_last = phase.is_last;
      if (phase.frees == Frees::attn_x) {
        if (!block.wait(Signal::attn_x_free)) return false;
        // The next layer's pointers replace the previous layer's, which the consumer warps have left. The
        // consumer warps wait for context_here before they begin the next layer.
        if (layer + 1 < c.end_layer) block.bring_pointers(layer + 1, block.token, block.thread());
      }
      if (phase.frees == Frees::mlp_x)
        after_up = true;  // mlp_x_free is awaited before mlp.act: the context comes first
      if (phase.brings != Dependency::none) {
        const bool is_act = phase.brings == Dependency::mlp_act;
        if (is_act && after_up && !block.wait(Signal::mlp_x_free)) return false;
        if (!fetch(phase, is_act)) return false;
      }
      if (phase.is_attention() && !merge()) return false;
      if (phase.publishes == Dependency::choice) hear_host();
    }
    return true;
  }

  /// Goes on to the launch's next token.
  __device__ void next_token() { ++block.token; }

 private:
  /// Block 0 looks whether the host wants the next token, while the consumer warps are in the head: an access to the
  /// host's memory takes long.
  __device__ void hear_host() const {
    if (blockIdx.x == 0 && block.thread() == 0 && c.token.chooses)
      block.asked_to_end() =
          int(c.token.first_serial + unsigned(block.token) + 1 - load_from_host(c.token.end_serial)) >= 0;
  }
  /// Fetches the context or mlp.act. With one token both have the same code: a layer runs through more code than the
  /// instruction cache holds.
  __device__ bool fetch(PhaseSpec phase, bool is_act) {
    if constexpr (Tiles) {
      return is_act ? fetch_act() : fetch_context();
    } else {
      // The context's memory may be that of the partial results, which another auxiliary warp may still be reading.
      if (!is_act && !block.sync_unless_stopped()) return false;
      if (!PhaseCode<Kind>::fetched_by_consumers(phase) && !fetch_token(block, layer, is_act)) return false;
      block.signal(is_act ? Signal::act_here : Signal::context_here);
      return true;
    }
  }
  /// Fetches the context of several tokens.
  __device__ bool fetch_context() {
    if (!await_done(block, layer, Dependency::context, c.exchange.context_done, c.dims.batch * c.dims.heads))
      return false;
    copy_tokens(block, reinterpret_cast<const char*>(c.exchange.context), c.dims.attention * 2, c.dims.attention * 2,
                block.at<char>(c.layout.attn_x), c.layout.hidden_row);
    block.signal(Signal::context_here);
    return true;
  }
  /// Fetches mlp.act of several tokens, slice by slice.
  __device__ bool fetch_act() {
    if (!await_done(block, layer, Dependency::mlp_act, c.exchange.act_done, c.plan.grid)) return false;
#pragma unroll 1
    for (int slice = 0; slice < c.plan.act_slices; ++slice) {
      const ActBuffer buffer(c, slice);
      // A buffer is free when the previous slice there has been used. attn_x, the buffer of slice 1, is free when slice
      // 0 has been used: dense, which reads the context there, is done by then.
      const Signal free = slice == 1 ? ActBuffer(c, 0).used : buffer.used;
      if (slice > 0 && !(c.two_act_buffers && slice == 2) && !block.wait(free)) return false;
      const int begin = slice * c.plan.act_columns;  // the last slice may be smaller
      copy_tokens(block, reinterpret_cast<const char*>(c.exchange.mlp_act) + begin * 2, c.dims.intermediate * 2,
                  min(c.plan.act_columns, c.dims.intermediate - begin) * 2, block.at<char>(buffer.offset),
                  c.layout.act_row);
      block.signal(buffer.here);
    }
    return true;
  }

  __device__ bool merge() {
#pragma unroll 1
    for (int item = int(blockIdx.x); item < KeySplit::count(c); item += c.plan.grid) {
      const KeySplit split(c, item, block.token);
      if (split.is_used() && !merge(split)) return false;
    }
    return true;
  }
  /// The split whose block merges head `of` of a GQA tile. This block may merge further heads.
  static __device__ int merger(int of, int splits) { return Grouped ? of % splits : 0; }
  /// Where, among the partial results that a head's merging block gathers, those of this head begin.
  static __device__ int first_gathered(int of, int splits, int floats) {
    return Grouped ? of / splits * splits * floats : 0;
  }
  /// Where the partial results of a head's splits meet in device memory.
  __device__ FloatWord* head_partials(const KeySplit& split, int of, int floats) const {
    return c.exchange.partials + (split.batch_head<Grouped>(c) + of) * c.plan.attention_splits * floats;
  }
  /// Merges the partial results of the block's warps. Where a GQA tile's keys have several splits, each split's block
  /// first sends its partial result of a head to the block that merges this head. It then merges its own heads, from
  /// the partial results of all splits. Blocks take key splits in the order of their numbers, and a block has at most
  /// one split of a GQA tile, since there are no more splits than blocks. So a split waits for splits of its own GQA
  /// tile and of earlier GQA tiles alone: no two blocks wait for each other forever.
  __device__ bool merge(const KeySplit& split) {
    const int head_dim = c.dims.head_dim, splits = split.splits, floats = partial_floats(head_dim),
              heads = gqa_heads<Grouped>(c), lane = block.thread() % 32;
    const long first_head = split.batch_head<Grouped>(c);
    const unsigned epoch = block.epoch(layer, Dependency::context);
    const int* const columns = is_packed(Kind) ? block.input_columns(block.kind(layer), Weight::dense, layer) : nullptr;
    const long row = long(split.sequence) * c.dims.attention;
    const auto publish = [&](int of) {
      return
          [this, epoch, columns, row, at = (first_head + of) * head_dim](int d, float sum, const SoftmaxState& whole) {
            const T element = from_float<T>(sum / whole.sum);
            const long to = columns ? row + __ldg(columns + (at - row) + d) : at + d;
            if constexpr (Tiles)
              reinterpret_cast<T*>(c.exchange.context)[to] = element;
            else
              store_word(c.exchange.context + to, element, epoch);
            if (c.taps.context) static_cast<T*>(c.taps.context)[at + d] = element;
          };
    };
    float* const all_gathered = block.at<float>(c.layout.gathered);
    const auto gather = [&](int of) {
      return [epoch, keeps = split.split == merger(of, splits),
              kept = all_gathered + first_gathered(of, splits, floats) + split.split * floats,
              sent = head_partials(split, of, floats) + split.split * floats](int d, float sum,
                                                                              const SoftmaxState& whole) {
        const auto put = [&](int i, float v) {
          if (keeps)
            kept[i] = v;
          else
            store_word(sent + i, v, epoch);
        };
        put(2 + d, sum);
        if (d == 0) put(0, whole.max), put(1, whole.sum);
      };
    };
    if (!block.wait(Signal::partials_ready)) return false;
    const float* const values = block.at<float>(c.layout.warp_values);
    const SoftmaxState* const states = block.at<SoftmaxState>(c.layout.warp_states);
    const int width = values_stride(head_dim, heads);
    // Of a lone head each auxiliary warp merges some elements; of several heads it merges every third one.
    const MergedElements all{block.thread(), kAuxiliaryThreads}, of_warp = Grouped ? MergedElements{lane, 32} : all;
#pragma unroll 1
    for (int of = Grouped ? block.thread() / 32 : 0; of < heads; of += kAuxiliaryWarps) {
      const auto warp_state = [&](int i) { return states[i * heads + of]; };
      const auto warp_value = [&](int i, int d) { return values[(i * heads + of) * width + d]; };
      if (splits == 1)
        merge_partials(block, kConsumerWarps, of_warp, warp_state, warp_value, publish(of));
      else
        merge_partials(block, kConsumerWarps, of_warp, warp_state, warp_value, gather(of));
    }
    block.signal(Signal::partials_taken);
    if (split.split >= heads) return true;
    if (splits > 1)
#pragma unroll 1
      for (int of = split.split; of < heads; of += splits) {
        float* const gathered = all_gathered + first_gathered(of, splits, floats);
        if (!await_partials(head_partials(split, of, floats), gathered, floats, split)) return false;
        merge_partials(
            block, splits, all,
            [&](int i) {
              return SoftmaxState{gathered[i * floats], gathered[i * floats + 1]};
            },
            [&](int i, int d) { return gathered[i * floats + 2 + d]; }, publish(of));
      }
    if constexpr (Tiles)
      publish_done(block, c.exchange.context_done + first_head + split.split, epoch,
                   Grouped ? (heads - split.split + splits - 1) / splits : 1, splits);
    else if (splits > 1)
      block.sync();  // before the next key split's partial results are gathered here
    return true;
  }
  /// Gathers the partial results of all splits but the block's own in shared memory. False where that took too long.
  __device__ bool await_partials(const FloatWord* partials, float* gathered, int floats, const KeySplit& split) const {
    constexpr int at_once = 8;  // pairs whose loads are in flight together
    const int end = (split.splits - 1) * floats, own = split.split * floats;
#pragma unroll 1
    for (int begin = 2 * block.thread(); begin < end; begin += 2 * at_once * block.threads) {
      FloatWord two[at_once][2] = {};
      const auto in_range = [&](int u) { return begin + 2 * u * block.threads < end; };
      const auto at = [&](int u) {
        const int of_others = begin + 2 * u * block.threads;
        return of_others + (Grouped && of_others < own ? 0 : floats);
      };
      const auto load = [&](int u) {
        if (in_range(u)) load_words(partials + at(u), two[u]);
      };
      const auto here = [&](int u) {
        return !in_range(u) || (two[u][0].epoch == block.epoch(layer) && two[u][1].epoch == block.epoch(layer));
      };
      // After a time-out the thread goes on to the barrier: the other threads wait there for it.
      if (!await_pieces<at_once>(block, layer, Dependency::context, load, here)) break;
#pragma unroll
      for (int u = 0; u < at_once; ++u)
        if (in_range(u)) *reinterpret_cast<float2*>(gathered + at(u)) = {two[u][0].value, two[u][1].value};
    }
    return block.sync_unless_stopped();
  }

  Block block;
  const PersistentArguments& c;
  int layer = 0;
};

}  // namespace cf::cuda
