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

__device__ Phase phase_at(const DecodeCall& c, int step) { return Phase(c.phases >> (4 * step) & 0xf); }

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
      : block(Block::products(call)), c(call), reader(Ring{call}, int(threadIdx.x) / (kProductThreads / 2)) {}

  /// One layer; false when a wait took too long.
  __device__ bool run(int layer) {
    l = layer;
#pragma unroll 1
    for (int step = 0; step < kPhases; ++step) {
      const Phase phase = phase_at(c, step);
      make_anew(l);
      block.maybe_dawdle(l * kPhases + step);
      if (phase == Phase::attention ? !attend() : !prepare(phase) || !project(phase)) return false;
    }
    return true;
  }

 private:
  /// Makes or awaits what the product's tokens are, but for mlp.act, which comes in pieces.
  __device__ bool prepare(Phase phase) {
    switch (phase) {
      case Phase::qkv: return norms(0, c.parallel_residual ? 2 : 1);
      case Phase::up_first: return c.parallel_residual || norms(1, 2);
      case Phase::dense: return block.hear(Signal::context_here);
      default: return true;
    }
  }

  /// LayerNorms [first, end) of one row: input_layernorm for qkv and post_attention_layernorm for up. In a parallel residual
  /// both are of the layer's input and share its mean and deviation; in a sequential one the second is of attn_residual.
  __device__ bool norms(int first, int end) {
    return c.dims.hidden <= 2 * kVec * kProductThreads ? norms<2>(first, end) : norms<kMaxNormPieces>(first, end);
  }
  template <int Pieces>
  __device__ bool norms(int first, int end) {
    NormWeights<T, Pieces> weights[2];
    const auto of_norm = [&](const char* const(&all)[2], int i) { return all[i] + l * c.layer_stride; };
    if (first == 0) weights[0].load(block, of_norm(c.first_layer.gamma, 0), of_norm(c.first_layer.beta, 0));
    // Registers have no room for three pieces of both while they await the row.
    constexpr bool late = Pieces > 2;
    const auto load_second = [&] {
      weights[1].load(block, of_norm(c.first_layer.gamma, 1), of_norm(c.first_layer.beta, 1));
    };
    if (end == 2 && !late) load_second();
    if (end == 2 && late)
      prefetch_norm<T, Pieces>(block, of_norm(c.first_layer.gamma, 1), of_norm(c.first_layer.beta, 1));
#pragma unroll 1
    for (int token = 0; token < c.dims.batch; ++token) {
      const long at = long(token) * c.dims.hidden;
      RowPart<Pieces> row;
      if (first == 0 && from_input())
        load_row(block, static_cast<const T*>(c.input) + at, row);
      else
        await_row(block, (first == 0 ? c.hidden[l % 2] : c.attn_residual) + at, first == 0 && l == c.first, l,
                  first == 0 ? Dependency::hidden : Dependency::attn_residual, row);
      if (end == 2 && late && token == 0) load_second();
      const Moments m = moments(block, row, token % 2);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (first <= i && i < end) {
          T* const tap = static_cast<T*>(i == 0 ? c.taps.attn_in : c.taps.mlp_in);
          normalise(block, row, m, weights[i],
                    block.at<char>(i == 0 ? c.layout.attn_x : c.layout.mlp_x) + token * c.layout.hidden_row,
                    tap ? tap + at : nullptr);
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
    if (!consume_product<T, Columns>(reader, product, sums, begun,
                                     phase == Phase::down ? c.layout.act_row : c.layout.hidden_row,
                                     [&](int slice) -> std::uint32_t {
                                       if (phase == Phase::down) {
                                         if (slice > 0) block.tell(Signal::act_used);
                                         if (!block.hear(Signal::act_here)) return 0;
                                       }
                                       return shared_address(block.at<char>(of_mlp ? c.layout.mlp_x : c.layout.attn_x));
                                     }))
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
    if (own)
      __syncwarp();
    else
      block.sync();
    return true;
  }

  /// dense adds to the layer's input, down to what dense has made of the block's own row.
  __device__ Addends begin(Phase phase, const Product& product, int token, int mine) const {
    const int row = product.row(mine);
    const char* const bias = c.first_layer.bias[int(Product::weight_of(phase))];
    const long at = long(token) * c.dims.hidden + row;
    Addends a{};
    if (bias) a.bias = reinterpret_cast<const std::uint16_t*>(bias + l * c.layer_stride)[row];
    if (phase == Phase::dense)
      a.residual = from_input() ? to_float(static_cast<const T*>(c.input)[at]) : __ldcg(&c.hidden[l % 2][at].value);
    return a;
  }
  __device__ void finish(Phase phase, int token, int mine, int row, float v) const {
    const long at = long(token) * c.dims.hidden + row;
    float* const residual = block.at<float>(c.layout.residual) + token * c.plan.out_rows + mine;
    const auto pass_on = [&](Dependency d, TaggedElement* to, void* tap, int columns, float value) {
      const T element = from_float<T>(value);
      store_tagged(to + long(token) * columns + row, element, block.tag(l, d));
      if (tap) static_cast<T*>(tap)[long(token) * columns + row] = element;
    };
    switch (phase) {
      case Phase::qkv: pass_on(Dependency::qkv, c.qkv, c.taps.qkv, 3 * c.dims.hidden, v); break;
      case Phase::dense:
        *residual = v;
        if (!c.parallel_residual) store_tagged(c.attn_residual + at, v, block.tag(l, Dependency::attn_residual));
        if (c.taps.attn_residual) static_cast<T*>(c.taps.attn_residual)[at] = from_float<T>(v);
        break;
      case Phase::down:
        v += *residual;
        store_tagged(c.hidden[(l + 1) % 2] + at, v, block.tag(l, Dependency::hidden));
        if (l + 1 == c.last) static_cast<T*>(c.output)[at] = from_float<T>(v);
        break;
      default:
        pass_on(Dependency::mlp_act, c.act, c.taps.act, c.dims.intermediate, c.gelu_tanh ? gelu_tanh(v) : gelu_erf(v));
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
      // The newest key is a stage of its own, but for the ring.
      const int first_stage = (warp / kStageSlices + begun) % 2, stages = part.stages(c);
#pragma unroll 1
      for (int s = first_stage; s < stages + part.has_newest(); s += 2) {
        const bool cached = s < stages;
        const int keys = cached ? min(c.plan.stage_keys, part.old - part.begin - s * c.plan.stage_keys) : 1;
        const T* const k = cached ? reinterpret_cast<const T*>(reader.wait()) : fresh + head_dim;
#pragma unroll 1
        for (int first = unit * tile_keys; first < keys; first += kStageSlices * tile_keys)
          tile.take(fresh, k + first * head_dim, k + (keys + first) * head_dim, min(tile_keys, keys - first), head_dim,
                    c.scale);
        if (cached) reader.release(lane == 0);
      }
      begun += stages;
      if (parts_made++ > 0 && !block.hear(Signal::part_taken)) return false;
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
  RingReader reader;
  int begun = 0;  // stages of the ring
  int parts_made = 0;
  int l = 0;
};

/// The warps that merge parts of heads, and fetch for the products what all blocks have made, while those go on.
template <class T>
class Helpers {
 public:
  __device__ explicit Helpers(const DecodeCall& call) : block(Block::helpers(call)), c(call) {}

  /// One layer; false when a wait took too long.
  __device__ bool run(int layer) {
    l = layer;
    block.maybe_dawdle(-1 - l);
#pragma unroll 1
    for (int item = int(blockIdx.x); item < AttentionPart::count(c); item += c.plan.grid)
      if (!merge(AttentionPart(c, item))) return false;
    if (!block.hear(Signal::qkv_done)) return false;
    if (!fetch_tokens(block, l, Dependency::context, c.context, c.dims.hidden, c.dims.hidden,
                      block.at<char>(c.layout.attn_x), c.layout.hidden_row))
      return false;
    block.tell(Signal::context_here);

    if (!block.hear(Signal::up_done)) return false;
    const int columns = c.plan.act_columns * c.plan.act_resident;
#pragma unroll 1
    for (int from = 0; from < c.dims.intermediate; from += columns) {
      if (from > 0 && !block.hear(Signal::act_used)) return false;
      if (!fetch_tokens(block, l, Dependency::mlp_act, c.act + from, c.dims.intermediate,
                        min(columns, c.dims.intermediate - from), block.at<char>(c.layout.mlp_x), c.layout.act_row))
        return false;
      block.tell(Signal::act_here);
    }
    return true;
  }

 private:
  /// Merges the warps' shares of a part; the first part's block gathers the others' and makes the head's context.
  __device__ bool merge(const AttentionPart& part) {
    const int head_dim = c.dims.head_dim, splits = c.plan.attention_splits, floats = floats_a_part(head_dim);
    const long head = part.whole_head(c);
    const unsigned tag = block.tag(l, Dependency::context);
    Tagged* const parts = c.parts + head * splits * floats;
    float* const gathered = block.at<float>(c.layout.gathered);
    const auto finish = [&](int d, float sum, const SoftmaxState& whole) {
      const T element = from_float<T>(sum / whole.sum);
      store_tagged(c.context + head * head_dim + d, element, tag);
      if (c.taps.context) static_cast<T*>(c.taps.context)[head * head_dim + d] = element;
    };
    const auto keep = [&](int d, float sum, const SoftmaxState& whole) {
      const auto put = [&](int i, float v) {
        if (part.split == 0)
          gathered[i] = v;
        else
          store_tagged(parts + part.split * floats + i, v, tag);
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
    if (splits == 1 || part.split > 0) return true;

    constexpr int at_once = 8;  // pairs whose loads are in flight together
#pragma unroll 1
    for (int begin = floats + 2 * block.thread(); begin < splits * floats; begin += 2 * at_once * block.threads) {
      Tagged two[at_once][2] = {};
      const auto at = [&](int u) { return begin + 2 * u * block.threads; };
      const auto load = [&](int u) {
        if (at(u) < splits * floats) load_tagged(parts + at(u), two[u]);
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
    ring.init();
    for (int s = 0; s < kSignals; ++s) init_barrier(block.signal_barrier(Signal(s)), tellers(Signal(s)));
    publish_barriers();
    block.stopped() = 0;
    block.abandoned() = 0;
    block.first_tag() = c.flags->launches * unsigned(c.layers + 1) + 1;
  }
  for (int i = int(threadIdx.x); i < c.dims.batch * 2 * half; i += kDecodeThreads) {
    const int sequence = i / (2 * half), at = i % (2 * half), position = c.positions[sequence];
    const float* const table = at < half ? c.cos : c.sin;
    block.at<float>(c.layout.angles)[i] =
        position >= 0 && position < c.dims.table_rows ? table[long(position) * half + at % half] : NAN;
  }
  if (int(threadIdx.x) < c.dims.batch) block.at<int>(c.layout.lengths)[threadIdx.x] = c.kv_len[threadIdx.x];
  __syncthreads();

  if (threadIdx.x < kProductThreads) {
    Products<T, Columns> products(c);
    for (int layer = c.first; layer < c.last && products.run(layer); ++layer) {
    }
    if (threadIdx.x == 0) block.abandoned() = 1;
  } else if (threadIdx.x < kProductThreads + kHelperThreads) {
    Helpers<T> helpers(c);
    for (int layer = c.first; layer < c.last && helpers.run(layer); ++layer) {
    }
  } else {
    RingWriter writer(ring, c.plan.stages_in_flight, block.abandoned());
    bool go = true;
#pragma unroll 1
    for (int layer = c.first; layer < c.last; ++layer)
#pragma unroll 1
      for (int step = 0; go && step < kPhases; ++step) {
        const Phase phase = phase_at(c, step);
        go = phase == Phase::attention ? stream_keys(writer, c, layer)
                                       : stream_product<Columns == 0>(writer, Product(c, phase, layer));
      }
    writer.drain();
  }
  __syncthreads();
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

}  // namespace

Status launch_decode_stack(const DecodeCall& call, DType dtype, CUstream_st* stream) {
  const auto kernel = dtype == DType::f16 ? kernel_for<f16>(call.plan) : kernel_for<bf16>(call.plan);
  CF_TRY(from_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, call.plan.smem_bytes),
                   "decode_stack"));
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(call.plan.grid);
  config.blockDim = kDecodeThreads;
  config.dynamicSmemBytes = std::size_t(call.plan.smem_bytes);
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  return from_cuda(cudaLaunchKernelEx(&config, kernel, call), "decode_stack");
}

}  // namespace cf::cuda
