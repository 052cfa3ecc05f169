#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "cuda/fused/attention.cuh"
#include "cuda/fused/launch.hpp"
#include "cuda/fused/norm.cuh"
#include "cuda/fused/product.cuh"
#include "cuda/launch.hpp"

// Blocks that an SM must have registers for. Tests ask for two, to run plans of more blocks than the device has SMs.
#ifndef CF_DECODE_BLOCKS_PER_SM
#define CF_DECODE_BLOCKS_PER_SM 1
#endif

namespace cf::cuda {
namespace {

/// Where a slice of mlp.act lies, and who says so: the next one may be there before.
struct ActPlace {
  int offset;
  Signal here;

  __device__ ActPlace(const DecodeCall& c, int slice)
      : offset(c.alternates && slice % 2 ? c.layout.attn_x : c.layout.mlp_x),
        here(c.alternates && slice % 2 ? Signal::act_here_too : Signal::act_here) {}
};

/// What a row's sum becomes part of, the bias as it lies in memory.
struct Addends {
  std::uint16_t bias;
  float residual;
};

/// The warps that go through the layer: norms, products, attention.
template <class T, int Columns>
class Products {
  static constexpr bool Wide = Columns == 0;

 public:
  __device__ explicit Products(const DecodeCall& call)
      : block(Block::products(call)), c(call), reader(Ring{call}, Wide ? 0 : thread_index() / (kProductThreads / 2)) {}

  /// One layer; false when a wait took too long.
  __device__ bool run(int layer) {
    l = layer;
#pragma unroll 1
    for (int step = 0; step < c.phases.count; ++step) {
      const Phase phase = c.phases.at(step);
      make_anew(l);
      block.maybe_dawdle(l * kPhases + step);
      if (phase == Phase::attention ? !attend() : !prepare(phase) || !project(phase)) return false;
    }
    return true;
  }

 private:
  /// Makes or awaits what the product's tokens are, but for mlp.act, which comes in pieces.
  __device__ bool prepare(Phase phase) {
    // Where neither is cut, a row of dense and the same row of down may be two warps'.
    if (phase == c.phases.last() && c.plan.act_slices == 1) block.sync();
    switch (phase) {
      case Phase::qkv: return norms(0, c.parallel_residual ? 2 : 1);
      case Phase::up_first: return c.parallel_residual || norms(1, 2);
      case Phase::dense: return block.hear(Signal::context_here);
      default: return true;
    }
  }

  /// LayerNorms [first, end) of each token: input_layernorm for qkv and post_attention_layernorm for up. In a parallel
  /// residual both are of the layer's input and share its mean and deviation; in a sequential one the second is of
  /// attn_residual.
  __device__ bool norms(int first, int end) {
    if constexpr (Wide)
      return norms<kWideNormPieces>(first, end);
    else
      return c.dims.hidden <= 2 * kVec * kProductThreads ? norms<2>(first, end) : norms<kMaxNormPieces>(first, end);
  }
  template <int Pieces>
  __device__ bool norms(int first, int end) {
    const int hidden = c.dims.hidden, batch = Wide ? c.dims.batch : 1;
    const RowWarps rows = Wide ? RowWarps::beside(hidden, batch) : RowWarps{1};
    const auto gamma = [&](int i) { return c.first_layer.gamma[i] + l * c.layer_stride; };
    const auto beta = [&](int i) { return c.first_layer.beta[i] + l * c.layer_stride; };
    // Beside several rows registers have no room for weights, and beside three pieces of one for those of one norm only
    // while they await the row.
    constexpr bool late = Pieces > 2;
    NormWeights<T, Wide ? 1 : Pieces> weights[2];
    T* const shared = block.at<T>(c.layout.norm_weights);
    const auto load = [&](int i) {
      if constexpr (!Wide) weights[i].load(rows, hidden, gamma(i), beta(i));
    };
    const bool brought = Wide && c.plan.shared_norms;
    if constexpr (Wide) {
      if (brought && thread_index() == 0) {
        std::uint64_t* const here = block.signal_barrier(Signal::norm_here);
        arrive_expecting(here, (end - first) * 2 * hidden * 2);
        for (int i = first; i < end; ++i) {
          copy_bulk(shared + 2 * i * hidden, gamma(i), hidden * 2, here);
          copy_bulk(shared + (2 * i + 1) * hidden, beta(i), hidden * 2, here);
        }
      }
    } else {
      if (first == 0) load(0);
      if (end == 2 && !late) load(1);
      if (end == 2 && late) prefetch_norm<T, Pieces>(rows, hidden, gamma(1), beta(1));
    }
#pragma unroll 1
    for (int begin = 0; begin < batch; begin += rows.tokens) {
      const int token = begin + rows.token();
      const bool there = token < batch;
      const long at = long(token) * hidden;
      RowPart<Pieces> row;
      if (!there) {
      } else if (first == 0 && from_input()) {
        load_row(rows, hidden, static_cast<const T*>(c.input) + at, row);
      } else {
        await_row(block, rows, (first == 0 ? c.hidden[l % 2] : c.attn_residual) + at, first == 0 && l == c.first, l,
                  first == 0 ? Dependency::hidden : Dependency::attn_residual, row);
      }
      if (end == 2 && late) load(1);
      const Moments m = moments(block, rows, row, (begin & rows.tokens) != 0);
      if (brought && begin == 0) block.await(Signal::norm_here);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (there && first <= i && i < end) {
          T* const tap = static_cast<T*>(i == 0 ? c.taps.attn_in : c.taps.mlp_in);
          char* const to = block.at<char>(i == 0 ? c.layout.attn_x : c.layout.mlp_x) + token * c.layout.hidden_row;
          const auto make = [&](const auto& of_norm) {
            normalise(rows, hidden, row, m, of_norm, to, tap ? tap + at : nullptr);
          };
          if constexpr (Wide)
            make(brought
                     ? StoredNormWeights<T>{shared + 2 * i * hidden, shared + (2 * i + 1) * hidden}
                     : StoredNormWeights<T>{reinterpret_cast<const T*>(gamma(i)), reinterpret_cast<const T*>(beta(i))});
          else
            make(weights[i]);
        }
    }
    return block.sync_and_go_on();
  }

  /// The product, and what becomes of its rows. A warp that has whole rows finishes them itself; where rows are cut into
  /// slices, all warps wait for each other first.
  __device__ bool project(Phase phase) {
    const Product product(c, phase, l);
    const int thread = thread_index(), lane = thread % 32, warp = thread / 32, unit = warp % kStageSlices;
    const Sums<Wide> sums(block, product, warp);
    const bool own = sums.warps_own(product);
    // A worker's elements are rows and their tokens; a warp's own rows are one a stage.
    const int first = own ? (warp / kStageSlices + begun) % 2 * kStageSlices + unit : 0;
    const int step = own ? 2 * kStageSlices : 1, worker = own ? lane : thread;
    const int elements = max(product.count - first + step - 1, 0) / step * c.dims.batch;
    const auto place_of = [&](int element) { return Wide ? element / c.dims.batch : element; };
    const auto token_of = [&](int element) { return Wide ? element % c.dims.batch : 0; };
    const auto row_of = [&](int element) { return first + place_of(element) * step; };
    // What the first sum is added to is on its way while the product runs.
    Addends addends{};
    if (worker < elements) addends = begin(phase, product, token_of(worker), row_of(worker));
    const bool of_mlp = phase == Phase::up_first || phase == Phase::up_rest || phase == Phase::down;
    const bool is_down = phase == Phase::down;
    // One token's mlp.act comes whole, that of several slice by slice.
    const auto x_at = [&](int slice) -> const char* {
      if (is_down) {
        const ActPlace place(c, slice);
        return block.hear(place.here) ? block.at<char>(place.offset) : nullptr;
      }
      return block.at<char>(of_mlp ? c.layout.mlp_x : c.layout.attn_x) + slice * product.slice_columns * 2;
    };
    const auto x_taken = [&](int slice) {
      // As often as the helpers hear it.
      if (is_down && (slice == 0 ? product.slices > 1 : slice + 1 + c.alternates < product.slices))
        block.tell(Signal::act_used);
    };
    if (!consume_product<T, Columns>(c, reader, product, sums, begun, is_down ? c.layout.act_row : c.layout.hidden_row,
                                     x_at, x_taken))
      return false;
    begun += product.template stages<Wide>();
    if (phase == Phase::qkv) block.tell(Signal::qkv_done);
    if (phase == Phase::up_rest) block.tell(Signal::up_done);
    if (own)
      __syncwarp();
    else
      block.sync();
#pragma unroll 1
    for (int i = worker; i < elements; i += own ? 32 : kProductThreads) {
      const int token = token_of(i), mine = row_of(i);
      if (i > worker) addends = begin(phase, product, token, mine);
      finish(phase, token, mine, product.row(mine),
             sums.total(place_of(i), token) + to_float(T{addends.bias}) + addends.residual);
    }
    if (Wide && phase == Phase::up_rest)
      say_done(block, c.act_done + blockIdx.x, block.tag(l, Dependency::mlp_act));
    else if (own)
      __syncwarp();
    else
      block.sync();
    return true;
  }

  /// dense adds to the layer's input, in a sequential residual down to what that has made, which the block itself has
  /// stored.
  __device__ Addends begin(Phase phase, const Product& product, int token, int mine) const {
    const int row = product.row(mine);
    const char* const bias = c.first_layer.bias[int(Product::weight_of(phase))];
    const long at = long(token) * c.dims.hidden + row;
    Addends a{};
    if (bias) a.bias = reinterpret_cast<const std::uint16_t*>(bias + l * c.layer_stride)[row];
    if (phase == Phase::dense)
      a.residual = from_input() ? to_float(static_cast<const T*>(c.input)[at]) : __ldcg(&c.hidden[l % 2][at].value);
    if (phase == Phase::down && !c.parallel_residual) a.residual = __ldcg(&c.attn_residual[at].value);
    return a;
  }
  __device__ void finish(Phase phase, int token, int mine, int row, float v) const {
    const long at = long(token) * c.dims.hidden + row;
    float* const residual = block.at<float>(c.layout.residual) + token * c.plan.out_rows + mine;
    const auto pass_on = [&](Dependency d, TaggedElement* to, bool tagged, void* tap, int columns, float value) {
      const T element = from_float<T>(value);
      const long at = long(token) * columns + row;
      if (tagged)
        store_tagged(to + at, element, block.tag(l, d));
      else
        reinterpret_cast<T*>(to)[at] = element;
      if (tap) static_cast<T*>(tap)[at] = element;
    };
    switch (phase) {
      case Phase::qkv: pass_on(Dependency::qkv, c.qkv, true, c.taps.qkv, 3 * c.dims.hidden, v); break;
      case Phase::dense:
        if (c.taps.attn_residual) static_cast<T*>(c.taps.attn_residual)[at] = from_float<T>(v);
        if (!c.parallel_residual) {
          store_tagged(c.attn_residual + at, v, block.tag(l, Dependency::attn_residual));
          break;
        }
        [[fallthrough]];
      case Phase::down:
        // A parallel residual's output is the sum of both, in either order.
        if (phase != c.phases.last()) {
          *residual = v;
          break;
        }
        if (c.parallel_residual) v += *residual;
        store_tagged(c.hidden[(l + 1) % 2] + at, v, block.tag(l, Dependency::hidden));
        if (l + 1 == c.last) static_cast<T*>(c.output)[at] = from_float<T>(v);
        break;
      default:
        pass_on(Dependency::mlp_act, c.act, !Wide, c.taps.act, c.dims.intermediate,
                c.gelu_tanh ? gelu_tanh(v) : gelu_erf(v));
    }
  }
  __device__ bool from_input() const { return l == c.first && c.input; }

  /// RoPE, the append and attention for the block's parts; the warps' shares of each go to the helpers.
  template <int Blocks>
  __device__ bool attend() {
    const int head_dim = c.dims.head_dim, width = (head_dim + 15) / 16 * 16;
    const int thread = thread_index(), lane = thread % 32, warp = thread / 32, unit = warp % kStageSlices;
    const T* const fresh = block.at<T>(c.layout.fresh);
    constexpr int tile_keys = AttentionTile<T, Blocks>::kKeys;
#pragma unroll 1
    for (int item = int(blockIdx.x); item < AttentionPart::count(c); item += c.plan.grid) {
      const AttentionPart part(c, item);
      if (!prepare_head<T>(block, part, l)) return false;
      AttentionTile<T, Blocks> tile;
      // The newest key is a stage of its own, but for the ring. Of the warps each half has every second stage.
      const int half = warp / kStageSlices, first_stage = Wide ? half : (half + begun) % 2, stages = part.stages(c);
#pragma unroll 1
      for (int s = Wide ? 0 : first_stage; s < stages + part.has_newest(); s += Wide ? 1 : 2) {
        const bool cached = s < stages;
        const int keys = cached ? min(c.plan.stage_keys, part.old - part.begin - s * c.plan.stage_keys) : 1;
        const T* const k = cached ? reinterpret_cast<const T*>(reader.wait()) : fresh + head_dim;
        if (!Wide || s % 2 == half)
#pragma unroll 1
          for (int first = unit * tile_keys; first < keys; first += kStageSlices * tile_keys)
            tile.take(fresh, k + first * head_dim, k + (keys + first) * head_dim, min(tile_keys, keys - first),
                      head_dim, c.scale);
        if (cached) reader.release(lane == 0);
      }
      begun += stages;
      if (!block.hear(Signal::part_taken)) return false;
      // The same keys lie in the same place whatever the ring has brought before.
      const int share = first_stage * kStageSlices + unit;
      tile.put(block.at<float>(c.layout.values) + share * width, block.at<SoftmaxState>(c.layout.states) + share,
               head_dim);
      block.tell(Signal::part_done);
    }
    return true;
  }
  __device__ bool attend() {
    return c.dims.head_dim <= 80 ? attend<5>() : c.dims.head_dim <= 128 ? attend<8>() : attend<16>();
  }

  Block block;
  const DecodeCall& c;
  RingReader<Wide ? 1 : 2> reader;
  int begun = 0;  // stages of the ring
  int l = 0;
};

/// The warps that merge parts of heads, and fetch for the products what all blocks have made, while those go on.
template <class T, bool Wide>
class Helpers {
 public:
  __device__ explicit Helpers(const DecodeCall& call) : block(Block::helpers(call)), c(call) {}

  /// One layer, in the order of the launch's phases; false when a wait took too long.
  __device__ bool run(int layer) {
    l = layer;
    block.maybe_dawdle(-1 - l);
    bool up = false;  // its input lies where mlp.act is to be
    // In the second of two launches that is there: where all of it has room it comes while the products' warps attend.
    const bool early = !Wide && c.continues && c.parallel_residual;
    if (early && !fetch_act()) return false;
#pragma unroll 1
    for (int step = 0; step < c.phases.count; ++step) {
      bool go = true;
      switch (c.phases.at(step)) {
        case Phase::qkv: go = block.hear(Signal::qkv_done); break;
        case Phase::attention: go = merge(); break;
        case Phase::up_rest: up = true; break;  // over when down is near: the context comes before
        case Phase::dense: go = fetch_context(); break;
        case Phase::down: go = early || ((!up || block.hear(Signal::up_done)) && fetch_act()); break;
        default: break;
      }
      if (!go) return false;
    }
    return true;
  }

 private:
  __device__ bool fetch_context() {
    char* const to = block.at<char>(c.layout.attn_x);
    if constexpr (Wide) {
      if (!await_done(block, l, Dependency::context, c.context_done, c.dims.batch * c.dims.heads)) return false;
      copy_tokens(block, reinterpret_cast<const char*>(c.context), c.dims.hidden * 2, c.dims.hidden * 2, to,
                  c.layout.hidden_row);
    } else if (!fetch_token(block, l, Dependency::context, c.context, c.dims.hidden, to)) {
      return false;
    }
    block.tell(Signal::context_here);
    return true;
  }
  __device__ bool fetch_act() {
    if constexpr (Wide) {
      if (!await_done(block, l, Dependency::mlp_act, c.act_done, c.plan.grid)) return false;
#pragma unroll 1
      for (int slice = 0; slice < c.plan.act_slices; ++slice) {
        const ActPlace place(c, slice);
        // Each place is free when the slice before in it is used up; that of the context when the first slice is.
        if (slice > 0 && !(c.alternates && slice == 2) && !block.hear(Signal::act_used)) return false;
        copy_tokens(block, reinterpret_cast<const char*>(c.act) + slice * c.plan.act_columns * 2,
                    c.dims.intermediate * 2, c.plan.act_columns * 2, block.at<char>(place.offset), c.layout.act_row);
        block.tell(place.here);
      }
      return true;
    } else {
      if (!fetch_token(block, l, Dependency::mlp_act, c.act, c.dims.intermediate, block.at<char>(c.layout.mlp_x)))
        return false;
      block.tell(Signal::act_here);
      return true;
    }
  }
  __device__ bool merge() {
#pragma unroll 1
    for (int item = int(blockIdx.x); item < AttentionPart::count(c); item += c.plan.grid)
      if (!merge(AttentionPart(c, item), item)) return false;
    return true;
  }
  /// Where a head's parts come together: in device memory, or in the shared memory of the first one's block, where their
  /// blocks are a cluster, in the order of the parts.
  __device__ Tagged* parts_of(const AttentionPart& part, int item, int floats) const {
    if (!c.plan.cluster_merge) return c.parts + part.whole_head(c) * floats;
    Tagged* const inbox = block.at<Tagged>(c.layout.inbox) + item / c.plan.grid * floats;
    return part.split == 0 ? inbox : cooperative_groups::this_cluster().map_shared_rank(inbox, 0);
  }
  /// Merges the warps' shares of a part; the first part's block gathers the others' and makes the head's context.
  __device__ bool merge(const AttentionPart& part, int item) {
    const int head_dim = c.dims.head_dim, splits = c.plan.attention_splits, floats = floats_a_part(head_dim);
    const long head = part.whole_head(c);
    const unsigned tag = block.tag(l, Dependency::context);
    Tagged* const parts = parts_of(part, item, splits * floats);
    float* const gathered = block.at<float>(c.layout.gathered);
    const auto finish = [&](int d, float sum, const SoftmaxState& whole) {
      const T element = from_float<T>(sum / whole.sum);
      if constexpr (Wide)
        reinterpret_cast<T*>(c.context)[head * head_dim + d] = element;
      else
        store_tagged(c.context + head * head_dim + d, element, tag);
      if (c.taps.context) static_cast<T*>(c.taps.context)[head * head_dim + d] = element;
    };
    const auto keep = [&](int d, float sum, const SoftmaxState& whole) {
      const auto put = [&](int i, float v) {
        if (part.split == 0)
          gathered[i] = v;
        else
          store_tagged_anywhere(parts + part.split * floats + i, v, tag);
      };
      put(2 + d, sum);
      if (d == 0) put(0, whole.max), put(1, whole.sum);
    };
    if (!block.hear(Signal::part_done)) return false;
    const float* const values = block.at<float>(c.layout.values);
    const SoftmaxState* const states = block.at<SoftmaxState>(c.layout.states);
    const int width = (head_dim + 15) / 16 * 16;
    const auto of_warp = [&](int i) { return states[i]; };
    const auto of_warp_value = [&](int i, int d) { return values[i * width + d]; };
    if (splits == 1)
      merge_in_order(block, kProductWarps, of_warp, of_warp_value, finish);
    else
      merge_in_order(block, kProductWarps, of_warp, of_warp_value, keep);
    block.tell(Signal::part_taken);
    if (Wide && splits == 1) say_done(block, c.context_done + head, tag);
    if (splits == 1 || part.split > 0) return true;

    constexpr int at_once = 8;  // pairs whose loads are in flight together
#pragma unroll 1
    for (int begin = floats + 2 * block.thread(); begin < splits * floats; begin += 2 * at_once * block.threads) {
      Tagged two[at_once][2] = {};
      const auto at = [&](int u) { return begin + 2 * u * block.threads; };
      const auto load = [&](int u) {
        if (at(u) < splits * floats) load_tagged_anywhere(parts + at(u), two[u]);
      };
      const auto here = [&](int u) {
        return at(u) >= splits * floats || (two[u][0].tag == block.tag(l) && two[u][1].tag == block.tag(l));
      };
      if (!await_pieces<at_once>(block, l, Dependency::context, load, here)) break;  // to where the others wait
#pragma unroll
      for (int u = 0; u < at_once; ++u)
        if (at(u) < splits * floats) *reinterpret_cast<float2*>(gathered + at(u)) = {two[u][0].value, two[u][1].value};
    }
    if (!block.sync_and_go_on()) return false;
    merge_in_order(
        block, splits,
        [&](int i) {
          return SoftmaxState{gathered[i * floats], gathered[i * floats + 1]};
        },
        [&](int i, int d) { return gathered[i * floats + 2 + d]; }, finish);
    if constexpr (Wide)
      say_done(block, c.context_done + head, tag);
    else
      block.sync();  // before the next part's shares come here
    return true;
  }

  Block block;
  const DecodeCall& c;
  int l = 0;
};

/// The last block to leave makes everything ready for the next launch.
__device__ void leave(const DecodeCall& c) {
  if (fetch_add(&c.flags->left, 1) != unsigned(c.plan.grid) - 1) return;
  c.flags->left = c.flags->stopped = 0;
  ++c.flags->launches;
}

template <class T, int Columns>
__global__ void __launch_bounds__(kDecodeThreads, CF_DECODE_BLOCKS_PER_SM)
    decode_stack_kernel(const __grid_constant__ DecodeCall c) {
  const Ring ring{c};
  const Block block = Block::products(c);
  const int half = c.dims.half_rotary;
  if (threadIdx.x == 0) {
    ring.init(Columns == 0 ? kProductWarps : kProductWarps / 2);
    for (int s = 0; s < kSignals; ++s) init_barrier(block.signal_barrier(Signal(s)), tellers(Signal(s)));
    publish_barriers();
    block.stopped() = 0;
    block.abandoned() = 0;
    block.first_tag() = (c.flags->launches - c.continues) * unsigned(c.layers + 1) + 1;
  }
  for (int i = int(threadIdx.x); i < c.dims.batch * 2 * half; i += kDecodeThreads) {
    const int sequence = i / (2 * half), at = i % (2 * half), position = c.positions[sequence];
    const float* const table = at < half ? c.cos : c.sin;
    block.at<float>(c.layout.angles)[i] =
        position >= 0 && position < c.dims.table_rows ? table[long(position) * half + at % half] : NAN;
  }
  if (int(threadIdx.x) < c.dims.batch) block.at<int>(c.layout.lengths)[threadIdx.x] = c.kv_len[threadIdx.x];
  for (int i = int(threadIdx.x); i < c.layout.inbox_bytes / 4; i += kDecodeThreads)
    block.at<unsigned>(c.layout.inbox)[i] = 0;  // no tag
  __syncthreads();
  if (c.plan.cluster_merge) cooperative_groups::this_cluster().sync();  // before another block sends

  if (threadIdx.x < kProductThreads) {
    Products<T, Columns> products(c);
    for (int layer = c.first; layer < c.last && products.run(layer); ++layer) {
    }
    if (threadIdx.x == 0) block.abandoned() = 1;
  } else if (threadIdx.x < kProductThreads + kHelperThreads) {
    Helpers<T, Columns == 0> helpers(c);
    for (int layer = c.first; layer < c.last && helpers.run(layer); ++layer) {
    }
  } else {
    RingWriter writer(ring, c.plan.stages_in_flight, block.abandoned());
    bool go = true;
#pragma unroll 1
    for (int layer = c.first; layer < c.last; ++layer)
#pragma unroll 1
      for (int step = 0; go && step < c.phases.count; ++step) {
        const Phase phase = c.phases.at(step);
        go = phase == Phase::attention ? stream_keys(writer, c, layer)
                                       : stream_product<Columns == 0>(writer, Product(c, phase, layer));
      }
    writer.drain();
  }
  __syncthreads();
  if (c.plan.cluster_merge) cooperative_groups::this_cluster().sync();  // what is sent arrives while there is a block
  if (threadIdx.x == 0) leave(c);
}

template <class T>
auto kernel_for(const DecodeStackPlan& plan) {
  switch (plan.narrow_columns) {
    case kNarrowColumns[0]: return decode_stack_kernel<T, kNarrowColumns[0]>;
    case kNarrowColumns[1]: return decode_stack_kernel<T, kNarrowColumns[1]>;
    case kNarrowColumns[2]: return decode_stack_kernel<T, kNarrowColumns[2]>;
    default: return decode_stack_kernel<T, 0>;
  }
}

/// Calls f(config, kernel) for a launch of the plan's kernel.
template <class F>
Status with_launch(const DecodeStackPlan& plan, DType dtype, bool cooperative, CUstream_st* stream, F f) {
  const auto kernel = dtype == DType::f16 ? kernel_for<f16>(plan) : kernel_for<bf16>(plan);
  CF_TRY(from_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.smem_bytes),
                   "decode_stack"));
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = cooperative;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(plan.attention_splits), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(plan.grid);
  config.blockDim = kDecodeThreads;
  config.dynamicSmemBytes = std::size_t(plan.smem_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = plan.cluster_merge ? 2 : 1;
  return from_cuda(f(config, kernel), "decode_stack");
}

}  // namespace

Status launch_decode_stack(const DecodeCall& call, DType dtype, bool cooperative, CUstream_st* stream) {
  return with_launch(call.plan, dtype, cooperative, stream,
                     [&](const auto& config, auto kernel) { return cudaLaunchKernelEx(&config, kernel, call); });
}

Result<int> resident_cluster_blocks(const DecodeStackPlan& plan, DType dtype) {
  int clusters = 0;
  const Status s = with_launch(plan, dtype, false, nullptr, [&](const auto& config, auto kernel) {
    return cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  });
  if (!s) return s;
  return clusters * plan.attention_splits;
}

}  // namespace cf::cuda
