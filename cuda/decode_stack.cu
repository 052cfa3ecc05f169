#include <cuda_runtime.h>

#include "cuda/fused/attention.cuh"
#include "cuda/fused/launch.hpp"
#include "cuda/fused/norm.cuh"
#include "cuda/fused/product.cuh"
#include "cuda/launch.hpp"

namespace cf::cuda {
namespace {

/// The order of a layer's products, of its weights in the ring. In a parallel residual the MLP's first product needs no
/// attention, and streams while the helpers attend.
__device__ Weight product_at(const DecodeCall& c, int step) {
  return Weight(c.parallel_residual || step % 3 == 0 ? step : 3 - step);
}
constexpr int kProducts = 4;

/// What a row's sum becomes part of, the bias as it lies in memory.
struct Addends {
  std::uint16_t bias;
  float residual;
};

/// The warps that take the products, and with them the layer's main line: norms, weights, residual.
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
    for (int step = 0; step < kProducts; ++step) {
      const Weight of = product_at(c, step);
      if (!prepare(of)) return false;
      if (!project(of)) return false;
    }
    return true;
  }

 private:
  /// Makes or awaits what the product's tokens are, but for mlp.act, which comes in parts.
  __device__ bool prepare(Weight of) {
    switch (of) {
      case Weight::qkv: return norms(0, c.parallel_residual ? 2 : 1);
      case Weight::up: return c.parallel_residual || norms(1, 2);
      case Weight::dense: return block.hear(Signal::context_here);
      default: return true;
    }
  }

  /// LayerNorms [first, end) of one row: input_layernorm for qkv and post_attention_layernorm for up. In a parallel residual
  /// both are of the layer's input and share its mean and deviation; in a sequential one the second is of attn_residual.
  __device__ bool norms(int first, int end) {
    NormWeights<T> weights[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (first <= i && i < end)
        weights[i].load(block, c.first_layer.gamma[i] + l * c.layer_stride, c.first_layer.beta[i] + l * c.layer_stride);
    if (first == 1) {
      block.publish(l, Dependency::attn_residual);
      if (!block.await(l, Dependency::attn_residual, c.plan.grid)) return false;
    }
#pragma unroll 1
    for (int token = 0; token < c.dims.batch; ++token) {
      const long at = long(token) * c.dims.hidden;
      RowPart row;
      if (first == 1)
        load_row(block, c.attn_residual + at, row);
      else if (from_input())
        load_row(block, static_cast<const T*>(c.input) + at, row);
      else
        await_row(block, c.hidden[l % 2] + at, l == c.first, tag(), l - 1, row);
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
    block.sync();
    return !block.stopped();
  }

  /// The product, and what becomes of its rows.
  __device__ bool project(Weight of) {
    const Product product(c, of, l);
    // A token's rows are finished by the same share of the threads, a power of two.
    const int token_threads = kProductThreads >> (32 - __clz(c.dims.batch - 1));
    const int token = block.thread() / token_threads, lane = block.thread() % token_threads;
    const bool mine = token < c.dims.batch && lane < product.deal.count;
    // What the first row's sum is added to is on its way while the product runs.
    Addends addends{};
    if (mine) addends = begin(of, token, product.deal.row(lane));
    const Sums<Wide> sums{block.at<float>(c.layout.sums), c.dims.batch, product.slices};
    const int x = of == Weight::up || of == Weight::down ? c.layout.mlp_x : c.layout.attn_x;
    if (!consume_product<T, Columns>(reader, product, sums, begun,
                                     of == Weight::down ? c.layout.act_row : c.layout.hidden_row,
                                     [&](int slice) -> std::uint32_t {
                                       if (of == Weight::down) {
                                         if (slice > 0) block.tell(Signal::act_used);
                                         if (!block.hear(Signal::act_here)) return 0;
                                       }
                                       return shared_address(block.at<char>(x));
                                     }))
      return false;
    begun += product.template stages<Wide>();
    block.sync();
#pragma unroll 1
    for (int i = lane; token < c.dims.batch && i < product.deal.count; i += token_threads) {
      const int row = product.deal.row(i);
      if (i > lane) addends = begin(of, token, row);
      finish(of, token, row, sums.total(i, token) + to_float(T{addends.bias}) + addends.residual);
    }
    if (of == Weight::qkv) block.tell(Signal::qkv_done);
    if (of == Weight::up) block.tell(Signal::act_done);
    block.sync();
    return true;
  }

  /// dense adds to the layer's input, down to what dense has made: a block's own row.
  __device__ Addends begin(Weight of, int token, int row) const {
    const char* const bias = c.first_layer.bias[int(of)];
    const long at = long(token) * c.dims.hidden + row;
    Addends a{};
    if (bias) a.bias = reinterpret_cast<const std::uint16_t*>(bias + l * c.layer_stride)[row];
    if (of == Weight::down) a.residual = c.attn_residual[at];
    if (of == Weight::dense)
      a.residual =
          from_input() ? to_float(static_cast<const T*>(c.input)[at]) : load_shared_work(&c.hidden[l % 2][at].value);
    return a;
  }
  __device__ void finish(Weight of, int token, int row, float v) const {
    const long at = long(token) * c.dims.hidden + row;
    switch (of) {
      case Weight::qkv: static_cast<T*>(c.qkv)[long(token) * 3 * c.dims.hidden + row] = from_float<T>(v); break;
      case Weight::up:
        static_cast<T*>(c.act)[long(token) * c.dims.intermediate + row] =
            from_float<T>(c.gelu_tanh ? gelu_tanh(v) : gelu_erf(v));
        break;
      case Weight::dense:
        c.attn_residual[at] = v;
        if (c.taps.attn_residual) static_cast<T*>(c.taps.attn_residual)[at] = from_float<T>(v);
        break;
      case Weight::down:
        store_tagged(c.hidden[(l + 1) % 2] + at, v, block.withholds(l, Dependency::hidden) ? 0 : tag() + 1);
        if (l + 1 == c.last) static_cast<T*>(c.output)[at] = from_float<T>(v);
    }
  }
  __device__ bool from_input() const { return l == c.first && c.input; }
  /// Of the hidden state that the layer reads; the next layer's is one more.
  __device__ unsigned tag() const { return block.first_tag() + unsigned(l); }

  Block block;
  const DecodeCall& c;
  RingReader reader;
  int begun = 0;  // stages of the ring
  int l = 0;
};

/// The warps that attend, and fetch for the products what all blocks have made, while those stream on.
template <class T>
class Helpers {
 public:
  __device__ explicit Helpers(const DecodeCall& call) : block(Block::helpers(call)), c(call), cache(call) {}

  /// One layer; false when a wait took too long.
  __device__ bool run(int index) {
    l = index;
    if (!block.hear(Signal::qkv_done)) return false;
    block.publish(l, Dependency::qkv);
    if (!block.await(l, Dependency::qkv, c.plan.grid)) return false;
    for (int item = int(blockIdx.x); item < AttentionPart::count(c); item += c.plan.grid)
      attend(AttentionPart(c, item, block.at<int>(c.layout.lengths)));
    // q, k and v are done, and with them the products' use of attn_x.
    if (!block.await(l, Dependency::context, c.dims.batch * c.dims.heads)) return false;
    fetch_tokens(block, static_cast<const T*>(c.context), c.dims.hidden, c.dims.hidden, block.at<char>(c.layout.attn_x),
                 c.layout.hidden_row);
    block.tell(Signal::context_here);

    if (!block.hear(Signal::act_done)) return false;
    block.publish(l, Dependency::mlp_act);
    if (!block.await(l, Dependency::mlp_act, c.plan.grid)) return false;
    const int columns = c.dims.intermediate / c.plan.act_slices * c.plan.act_resident;
    for (int from = 0; from < c.dims.intermediate; from += columns) {
      if (from > 0 && !block.hear(Signal::act_used)) return false;
      fetch_tokens(block, static_cast<const T*>(c.act) + from, c.dims.intermediate,
                   min(columns, c.dims.intermediate - from), block.at<char>(c.layout.mlp_x), c.layout.act_row);
      block.tell(Signal::act_here);
    }
    return true;
  }
  __device__ void drain() { cache.drain(); }

 private:
  /// RoPE, the append and attention for one part of a head's keys; the context where it is the last part to be done.
  __device__ void attend(const AttentionPart& part) {
    const int head_dim = c.dims.head_dim, splits = c.plan.attention_splits, part_floats = head_dim + 2;
    const int warp = block.thread() / 32;
    const T* const fresh = block.at<T>(c.layout.fresh);
    const long offset = l * c.layer_stride;
    prepare_head<T>(block, part, c.first_layer.k_cache + offset, c.first_layer.v_cache + offset);
    block.sync();
    AttentionTile<T> tile;
    constexpr int at_once = AttentionTile<T>::kKeys;
    for (int key = part.begin, keys; key < part.end; key += keys) {
      const bool cached = key < part.old;
      keys = cached ? min(c.plan.cache_keys, part.old - key) : 1;
      const T* const k = cached ? reinterpret_cast<const T*>(cache.wait()) : fresh + head_dim;
      for (int first = warp * at_once; first < keys; first += kHelperWarps * at_once)
        tile.take(fresh, k + first * head_dim, k + (keys + first) * head_dim, min(at_once, keys - first), head_dim,
                  c.scale);
      if (cached) cache.release();
    }
    float* const values = block.at<float>(c.layout.values);
    SoftmaxState* const states = block.at<SoftmaxState>(c.layout.states);
    const int width = (head_dim + 15) / 16 * 16;
    tile.put(values + warp * width, states + warp, head_dim);
    block.sync();

    const long head = part.whole_head(c);
    T* const context = static_cast<T*>(c.context) + head * head_dim;
    float* const parts = c.splits + head * splits * part_floats;
    const auto finish = [&](int d, float sum, const SoftmaxState& whole) {
      context[d] = from_float<T>(sum / whole.sum);
    };
    const auto keep = [&](int d, float sum, const SoftmaxState& whole) {
      float* const mine = parts + part.split * part_floats;
      mine[2 + d] = sum;
      if (d == 0) mine[0] = whole.max, mine[1] = whole.sum;
    };
    const auto of_warp = [&](int i) { return states[i]; };
    const auto of_warp_value = [&](int i, int d) { return values[i * width + d]; };
    if (splits == 1) {
      merge_parts(block, kHelperWarps, of_warp, of_warp_value, finish);
    } else {
      merge_parts(block, kHelperWarps, of_warp, of_warp_value, keep);
      if (!last_split(head)) return;
      merge_parts(
          block, splits,
          [&](int i) {
            return SoftmaxState{load_shared_work(parts + i * part_floats),
                                load_shared_work(parts + i * part_floats + 1)};
          },
          [&](int i, int d) { return load_shared_work(parts + i * part_floats + 2 + d); }, finish);
    }
    block.publish(l, Dependency::context);
  }

  /// Whether all of a head's other splits are there.
  __device__ bool last_split(long head) {
    block.sync();
    if (block.thread() == 0)
      block.notice() =
          fetch_add(c.arrivals + head, 1) % unsigned(c.plan.attention_splits) == unsigned(c.plan.attention_splits) - 1;
    block.sync();
    return block.notice();
  }

  Block block;
  const DecodeCall& c;
  CacheRing cache;
  int l = 0;
};

/// The last block to leave makes everything ready for the next launch.
__device__ void leave(const DecodeCall& c) {
  if (fetch_add(&c.flags->left, 1) != unsigned(c.plan.grid) - 1) return;
  for (int i = 0; i < (c.last - c.first) * kDependencies; ++i) c.done[i] = 0;
  for (int i = 0; i < c.dims.batch * c.dims.heads; ++i) c.arrivals[i] = 0;
  c.flags->left = c.flags->stopped = 0;
  ++c.flags->launches;
}

template <class T, int Columns>
__global__ void __launch_bounds__(kDecodeThreads, 1) decode_stack_kernel(const __grid_constant__ DecodeCall c) {
  const Ring ring{c};
  const Block block = Block::products(c);
  const int half = c.dims.half_rotary;
  if (threadIdx.x == 0) {
    ring.init();
    for (int s = 0; s < c.plan.cache_stages; ++s) init_barrier(ring.full(2 * c.plan.stages + s), 1);
    for (int s = 0; s < kSignals; ++s)
      init_barrier(block.signal_barrier(Signal(s)), Signal(s) < Signal::context_here ? kProductWarps : kHelperWarps);
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
    helpers.drain();
  } else {
    RingWriter writer(ring, c.plan.stages_in_flight, block.abandoned());
    bool go = true;
#pragma unroll 1
    for (int step = c.first * kProducts; go && step < c.last * kProducts; ++step)
      go = stream_product<Columns == 0>(writer, Product(c, product_at(c, step % kProducts), step / kProducts));
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
