#pragma once
// What the helper warps of a block do beside the product warps: they merge partial attention results and fetch what all
// blocks have made.
#include "cuda/persistent/attention.cuh"

namespace cf::cuda {

template <class T, Products Kind, bool Grouped>
class HelperWarps {
  static constexpr bool Tiles = is_tiled(Kind);

 public:
  __device__ explicit HelperWarps(const PersistentArguments& arguments)
      : block(Block::helpers(arguments)), c(arguments) {}

  /// Runs a layer, in the order of the launch's phases. False where a wait took too long.
  __device__ bool run(int number) {
    layer = number;
    block.maybe_delay(-1 - layer);
    const PhaseOrder phases = c.phases_of(layer);
    bool after_up = false;  // up comes before down here: mlp.act must wait for the place of up's tokens
    // The second launch of a layer with a parallel residual finds mlp.act complete. With one token it is fetched while
    // the product warps attend.
    const bool early = !Tiles && c.continues && has_parallel_residual<Kind>(c);
#pragma unroll 1
    for (int step = early ? -1 : 0; step < phases.count; ++step) {
      bool go = true;
      const Phase phase = step < 0 ? Phase::down : phases.at(step);
      switch (phase) {
        case Phase::qkv:
          go = block.wait(Signal::qkv_done);
          // The next layer's pointers take the place of the previous layer's, which the product warps have left. The
          // product warps wait for context_here before they begin the next layer.
          if (go && layer + 1 < c.end_layer) block.bring_pointers(layer + 1, block.token, block.thread());
          break;
        case Phase::attention: go = merge(); break;
        case Phase::up_rest: after_up = true; break;  // up_done is awaited before down: the context comes first
        case Phase::head: hear_host(); break;
        case Phase::down:
          if (product_warps_fetch<Kind>(c) || (early && step >= 0)) break;
          if (after_up && !block.wait(Signal::up_done)) return false;
          [[fallthrough]];
        case Phase::dense: go = fetch(phase); break;
        default: break;
      }
      if (!go) return false;
    }
    return true;
  }

  /// Goes on to the launch's next token.
  __device__ void next_token() { ++block.token; }

 private:
  /// Block 0 looks whether the host wants the next token, while the product warps are in the head: an access to the
  /// host's memory takes long.
  __device__ void hear_host() const {
    if (blockIdx.x == 0 && block.thread() == 0 && c.token.chooses)
      block.asked_to_end() =
          int(c.token.first_serial + unsigned(block.token) + 1 - load_from_host(c.token.end_serial)) >= 0;
  }
  /// Fetches the tokens of dense, which are the context, or of down, which are mlp.act. With one token both have the
  /// same code: a layer runs through more code than the instruction cache holds.
  __device__ bool fetch(Phase phase) {
    const bool is_act = phase == Phase::down;
    if constexpr (Tiles) {
      return is_act ? fetch_act() : fetch_context();
    } else {
      // The context's place may be that of the partial results, which another helper warp may still be reading.
      if (!is_act && !block.sync_unless_stopped()) return false;
      if (!product_warps_fetch<Kind>(c) && !fetch_token(block, layer, is_act)) return false;
      block.signal(is_act ? Signal::act_here : Signal::context_here);
      return true;
    }
  }
  /// Fetches the context of several tokens.
  __device__ bool fetch_context() {
    if (!await_done(block, layer, Dependency::context, c.context_done, c.dims.batch * c.dims.heads)) return false;
    copy_tokens(block, reinterpret_cast<const char*>(c.context), c.dims.attention * 2, c.dims.attention * 2,
                block.at<char>(c.layout.attn_x), c.layout.hidden_row);
    block.signal(Signal::context_here);
    return true;
  }
  /// Fetches mlp.act of several tokens, slice by slice.
  __device__ bool fetch_act() {
    if (!await_done(block, layer, Dependency::mlp_act, c.act_done, c.plan.grid)) return false;
#pragma unroll 1
    for (int slice = 0; slice < c.plan.act_slices; ++slice) {
      const ActPlace place(c, slice);
      // A place is free when the previous slice there has been used. attn_x, the place of slice 1, is free when slice 0
      // has been used: dense, which reads the context there, is done by then.
      const Signal free = slice == 1 ? ActPlace(c, 0).used : place.used;
      if (slice > 0 && !(c.two_act_places && slice == 2) && !block.wait(free)) return false;
      const int begin = slice * c.plan.act_columns;  // the last slice may be smaller
      copy_tokens(block, reinterpret_cast<const char*>(c.mlp_act) + begin * 2, c.dims.intermediate * 2,
                  min(c.plan.act_columns, c.dims.intermediate - begin) * 2, block.at<char>(place.offset),
                  c.layout.act_row);
      block.signal(place.here);
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
  /// The split whose block merges head `of` of a share. This block may merge further heads.
  static __device__ int merger(int of, int splits) { return Grouped ? of % splits : 0; }
  /// Where, among the partial results that a head's merging block gathers, those of this head begin.
  static __device__ int first_gathered(int of, int splits, int floats) {
    return Grouped ? of / splits * splits * floats : 0;
  }
  /// Where the partial results of a head's splits meet in device memory.
  __device__ Tagged* head_partials(const KeySplit& split, int of, int floats) const {
    return c.partials + (split.batch_head<Grouped>(c) + of) * c.plan.attention_splits * floats;
  }
  /// Merges the partial results of the block's warps. Where a share's keys have several splits, each split's block
  /// first sends its partial result of a head to the block that merges this head. It then merges its own heads, from
  /// the partial results of all splits. Blocks take key splits in the order of their numbers, and a block has at most
  /// one split of a share, since there are no more splits than blocks. So a split waits for splits of its own share and
  /// of earlier shares alone: no two blocks wait for each other forever.
  __device__ bool merge(const KeySplit& split) {
    const int head_dim = c.dims.head_dim, splits = split.splits, floats = partial_floats(head_dim),
              heads = share_heads<Grouped>(c), lane = block.thread() % 32;
    const long first_head = split.batch_head<Grouped>(c);
    const unsigned tag = block.tag(layer, Dependency::context);
    const int* const places = is_packed(Kind) ? block.input_places(block.kind(layer), Weight::dense, layer) : nullptr;
    const long row = long(split.sequence) * c.dims.attention;
    const auto publish = [&](int of) {
      return [this, tag, places, row, at = (first_head + of) * head_dim](int d, float sum, const SoftmaxState& whole) {
        const T element = from_float<T>(sum / whole.sum);
        const long to = places ? row + __ldg(places + (at - row) + d) : at + d;
        if constexpr (Tiles)
          reinterpret_cast<T*>(c.context)[to] = element;
        else
          store_tagged(c.context + to, element, tag);
        if (c.taps.context) static_cast<T*>(c.taps.context)[at + d] = element;
      };
    };
    float* const all_gathered = block.at<float>(c.layout.gathered);
    const auto gather = [&](int of) {
      return [tag, keeps = split.split == merger(of, splits),
              kept = all_gathered + first_gathered(of, splits, floats) + split.split * floats,
              sent = head_partials(split, of, floats) + split.split * floats](int d, float sum,
                                                                              const SoftmaxState& whole) {
        const auto put = [&](int i, float v) {
          if (keeps)
            kept[i] = v;
          else
            store_tagged(sent + i, v, tag);
        };
        put(2 + d, sum);
        if (d == 0) put(0, whole.max), put(1, whole.sum);
      };
    };
    if (!block.wait(Signal::partials_ready)) return false;
    const float* const values = block.at<float>(c.layout.warp_values);
    const SoftmaxState* const states = block.at<SoftmaxState>(c.layout.warp_states);
    const int width = values_stride(head_dim, heads);
    // Of a lone head each helper warp merges some elements; of several heads it merges every third one.
    const MergedElements all{block.thread(), kHelperThreads}, of_warp = Grouped ? MergedElements{lane, 32} : all;
#pragma unroll 1
    for (int of = Grouped ? block.thread() / 32 : 0; of < heads; of += kHelperWarps) {
      const auto warp_state = [&](int i) { return states[i * heads + of]; };
      const auto warp_value = [&](int i, int d) { return values[(i * heads + of) * width + d]; };
      if (splits == 1)
        merge_partials(block, kProductWarps, of_warp, warp_state, warp_value, publish(of));
      else
        merge_partials(block, kProductWarps, of_warp, warp_state, warp_value, gather(of));
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
      publish_done(block, c.context_done + first_head + split.split, tag,
                   Grouped ? (heads - split.split + splits - 1) / splits : 1, splits);
    else if (splits > 1)
      block.sync();  // before the next key split's partial results are gathered here
    return true;
  }
  /// Gathers the partial results of all splits but the block's own in shared memory. False where that took too long.
  __device__ bool await_partials(const Tagged* partials, float* gathered, int floats, const KeySplit& split) const {
    constexpr int at_once = 8;  // pairs whose loads are in flight together
    const int end = (split.splits - 1) * floats, own = split.split * floats;
#pragma unroll 1
    for (int begin = 2 * block.thread(); begin < end; begin += 2 * at_once * block.threads) {
      Tagged two[at_once][2] = {};
      const auto in_range = [&](int u) { return begin + 2 * u * block.threads < end; };
      const auto at = [&](int u) {
        const int of_others = begin + 2 * u * block.threads;
        return of_others + (Grouped && of_others < own ? 0 : floats);
      };
      const auto load = [&](int u) {
        if (in_range(u)) load_tagged(partials + at(u), two[u]);
      };
      const auto here = [&](int u) {
        return !in_range(u) || (two[u][0].tag == block.tag(layer) && two[u][1].tag == block.tag(layer));
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
