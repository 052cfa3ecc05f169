#pragma once
// Reduce: a tile's sums from the warps' lanes through the block's shared memory and the cluster to the epilogue.
#include "cuda/ops/linear/packed/config.cuh"
#include "cuda/ops/linear/packed/decode.cuh"
#include "cuda/ops/linear/packed/ring.cuh"

namespace cf::cuda {

/// Where a lane's sums of rows g and g + 8 go, tile after tile.
template <GptqConfig C>
class GptqPartial {
 public:
  __device__ GptqPartial(const GptqPlan& plan, const GptqWarp& warp, const GptqSmem& at)
      : tile_elements_(kGptqRows << plan.token_bits), t_(warp.t) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      to_[i] = at.partial + (warp.turn * kGptqParts + warp.part) * tile_elements_ +
               (C.one_token() ? warp.g + 8 * i : warp.t * kGptqRows + (warp.g + 8 * i ^ (warp.t & 2) * 4));
  }

  /// Stores the sums of the warp's next tile.
  __device__ void store(const float (&sum)[C.octets()][4], int tokens) {
    if constexpr (C.one_token()) {
      if (t_ == 0) {
        *to_[0] = sum[0][0];
        *to_[1] = sum[0][2];
      }
    } else {
#pragma unroll
      for (int o = 0; o < C.octets(); ++o)
#pragma unroll
        for (int of = 0; of < 2; ++of)
          if (const int from_t = 8 * o + 4 * of; t_ + from_t < tokens) {
            to_[0][from_t * kGptqRows] = sum[o][of];
            to_[1][from_t * kGptqRows] = sum[o][2 + of];
          }
    }
#pragma unroll
    for (float*& to : to_) to += C.turns * kGptqParts * tile_elements_;
  }

 private:
  const int tile_elements_, t_;
  float* to_[2];
};

/// The elements that a block finishes, each of C.rows rows of one token. A cluster's sums are in the order tile, token,
/// row. The cluster's first block finishes all of them or, where they are many, each block its share: count_ elements,
/// the first of which begins at sum first_own_. An Epilogue is that of gptq_block(). An epilogue with apart() belongs
/// to two products: the cluster's first block has the sums of one, the other blocks those of the other, and the first
/// block finishes all elements.
template <class T, GptqConfig C, class Epilogue>
class GptqElements {
 public:
  __device__ GptqElements(const GptqMatrix& m, const GptqPlan& plan, const GptqWarp& warp, const GptqSmem& at,
                          int tokens, const Epilogue& epilogue)
      : m_(m),
        plan_(plan),
        warp_(warp),
        at_(at),
        epilogue_(epilogue),
        tokens_(tokens),
        tile_elements_(kGptqRows << plan.token_bits),
        all_(warp.tiles * tile_elements_),
        shared_out_(!C.one_token() && plan.block_elements < plan.tiles * tile_elements_),
        first_own_(shared_out_ ? warp.rank * plan.block_elements : 0),
        count_((shared_out_      ? max(min(all_ - first_own_, plan.block_elements), 0)
                : warp.rank == 0 ? all_
                                 : 0) /
               C.rows) {}

  /// Prepares the thread's first elements, as many as registers have room for.
  __device__ void prepare() {
#pragma unroll
    for (int i = 0; i < C.prepared(); ++i) {
      const int e = threadIdx.x + i * C.threads();
      exists_[i] = exists(e);
      if (exists_[i]) own_[i] = epilogue_.prepare(token_of(e), row_of(e));
    }
  }
  /// Begins the elements that prepare() has prepared.
  __device__ void begin() {
#pragma unroll
    for (int i = 0; i < C.prepared(); ++i)
      if (exists_[i]) epilogue_.begin(own_[i]);
  }

  /// Sends this block's sums of other blocks' elements to those blocks, and receives their sums of this block's
  /// elements. False in a block that has nothing to finish.
  __device__ bool exchange(ClusterInbox& inbox) const {
    inbox.connect();
    if (shared_out_ || warp_.rank > 0)
#pragma unroll 1
      for (int e = 4 * int(threadIdx.x); e < all_; e += 4 * C.threads()) {
        const int to = shared_out_ ? e / plan_.block_elements : 0;
        if (to == warp_.rank) continue;
        float sum[4];
        sum_block(e, sum);
        inbox.send(to, at_.received + (warp_.rank - (warp_.rank > to) - to) * plan_.block_elements + e, sum);
      }
    if (count_ == 0) return false;
    inbox.receive((plan_.split - 1) * count_ * C.rows * int(sizeof(float)));
    return true;
  }

  /// Sums up and finishes the thread's elements.
  __device__ void finish() {
    const int lane = warp_.lane;
#pragma unroll
    for (int i = 0; i < C.prepared(); ++i)
      if (const int e = threadIdx.x + i * C.threads(); e - lane < count_) finish_element(e, exists_[i], own_[i]);
    constexpr int last = C.prepared();
#pragma unroll 1
    for (int e = threadIdx.x + last * C.threads(); e - lane < count_; e += C.threads()) {
      exists_[last] = exists(e);
      if (exists_[last]) {
        own_[last] = epilogue_.prepare(token_of(e), row_of(e));
        epilogue_.begin(own_[last]);
      }
      finish_element(e, exists_[last], own_[last]);
    }
  }

 private:
  using Element = decltype(std::declval<const Epilogue&>().prepare(0, 0));

  __device__ int row_of(unsigned e) const {
    const unsigned first = first_own_ + e * C.rows;
    return (warp_.first_tile + int(first >> (4 + plan_.token_bits))) * kGptqRows + int(first % kGptqRows);
  }
  __device__ int token_of(unsigned e) const {
    return C.one_token() ? 0 : int((first_own_ + e * C.rows) / kGptqRows & ((1u << plan_.token_bits) - 1));
  }
  /// Whether element e is of a token and a row that exist.
  __device__ bool exists(int e) const {
    return e < count_ && token_of(unsigned(e)) < tokens_ && row_of(unsigned(e)) < m_.out;
  }

  /// The block's sums from `first` on, added up in the parts' order.
  template <int N>
  __device__ void sum_block(unsigned first, float (&sum)[N]) const {
    unsigned in_tile = first & unsigned(tile_elements_ - 1);
    if constexpr (!C.one_token()) in_tile ^= in_tile >> 2 & 8;
    const float* of = at_.partial + (first >> (4 + plan_.token_bits)) * kGptqParts * tile_elements_ + in_tile;
#pragma unroll
    for (float& s : sum) s = 0;
#pragma unroll
    for (int p = 0; p < kGptqParts; ++p) add_few(of + p * tile_elements_, sum);
  }

  /// Adds what block k of the cluster's other blocks sent.
  __device__ void add_received(int k, int e, float (&sum)[C.rows]) const {
    add_few(at_.received + k * plan_.block_elements + e * C.rows, sum);
  }
  __device__ static void scale(float (&sum)[C.rows]) {
    if constexpr (!C.one_token())  // one token's sums are scaled already
#pragma unroll
      for (float& s : sum) s *= GptqDecode<T>::unit;
  }

  /// The sums of the cluster's blocks, added up in the order of their ranks, whichever block finishes the element.
  __device__ void sum_cluster(int e, float (&sum)[C.rows]) const {
    sum_block(first_own_ + e * C.rows, sum);
    if (shared_out_) {
      float before[C.rows] = {};
#pragma unroll 1
      for (int k = 0; k < warp_.rank; ++k) add_received(k, e, before);
#pragma unroll
      for (int i = 0; i < C.rows; ++i) sum[i] = warp_.rank > 0 ? before[i] + sum[i] : sum[i];
    }
#pragma unroll 1
    for (int k = warp_.rank; k < plan_.split - 1; ++k) add_received(k, e, sum);
    scale(sum);
  }

  /// If one lane of a warp has an element, all lanes of the warp call: lanes with elements of one row exchange sums
  /// with their neighbours.
  __device__ void finish_element(int e, bool exists, const Element& element) const {
    float sum[C.rows] = {};
    if constexpr (requires { epilogue_.apart(); }) {
      if (!exists) return;
      float others[C.rows] = {};
      sum_block(e * C.rows, sum);
#pragma unroll 1
      for (int k = 0; k < plan_.split - 1; ++k) add_received(k, e, others);
      scale(sum);
      scale(others);
      epilogue_.finish(element, sum, others);
    } else if constexpr (C.rows == 1) {
      if (e < count_) sum_cluster(e, sum);
      const float both[] = {sum[0], __shfl_xor_sync(~0u, sum[0], 1)};
      if (exists) epilogue_.finish(element, both);
    } else {
      if (e < count_) sum_cluster(e, sum);
      if (exists) epilogue_.finish(element, sum);
    }
  }

  const GptqMatrix& m_;
  const GptqPlan& plan_;
  const GptqWarp& warp_;
  const GptqSmem& at_;
  const Epilogue& epilogue_;
  const int tokens_, tile_elements_, all_;
  const bool shared_out_;
  const int first_own_, count_;
  Element own_[C.prepared() + 1];
  bool exists_[C.prepared() + 1];
};

}  // namespace cf::cuda
