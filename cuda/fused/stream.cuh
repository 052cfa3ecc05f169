#pragma once
// What streams into a block's ring, stage by stage: weights, and the keys and values that are in the cache already.
#include "cuda/fused/attention.cuh"
#include "cuda/fused/product.cuh"

namespace cf::cuda {

/// What a layer does at a step.
__device__ inline Phase phase_at(const DecodeCall& c, int step) { return Phase(c.phases >> (4 * step) & 0xf); }

/// What a stage is filled with: pieces of device memory, which come to lie one behind the other.
struct StageSource {
  const char* from;
  long stride;  // from one piece to the next
  int pieces, piece_bytes;

  __device__ int bytes() const { return pieces * piece_bytes; }
};

/// The stages of a launch, in the order in which its products and its attention empty them: runs of one kind, of which each
/// stage takes the next share. Wide: a run is a slice of all rows, a stage that of some rows; else bytes as they lie.
template <bool Wide>
class StageCursor {
 public:
  __device__ explicit StageCursor(const DecodeCall& c) : c_(c), layer_(c.first) { begin_step(); }

  /// False behind the last.
  __device__ bool next(StageSource& s) {
    while (left_ <= 0)
      if (!next_run()) return false;
    const int share = min(a_stage_, left_);
    s = run_;
    s.from = at_;
    left_ -= share;
    if (rows_) {
      s.pieces = share;
      at_ += share * s.stride;
    } else {
      s.piece_bytes = share;
      at_ += share;
    }
    return true;
  }

 private:
  /// The next slice of all rows, the next part of a head, the next step or the next layer, of which there may be nothing.
  __device__ bool next_run() {
    if (phase_at(c_, step_) == Phase::attention) {
      item_ += c_.plan.grid;
      if (item_ < AttentionPart::count(c_)) {
        begin_part();
        return true;
      }
    } else if (rows_ && ++slice_ < slices_) {
      at_ = run_.from + long(slice_) * run_.piece_bytes;
      left_ = rows_;
      return true;
    }
    if (++step_ == kPhases) {
      step_ = 0;
      if (++layer_ == c_.last) return false;
    }
    begin_step();
    return true;
  }
  __device__ void begin_step() {
    const Phase phase = phase_at(c_, step_);
    left_ = rows_ = slice_ = 0;
    if (phase == Phase::attention) {
      item_ = int(blockIdx.x);
      if (item_ < AttentionPart::count(c_)) begin_part();
      return;
    }
    const Product p(c_, phase, layer_);
    const long row_bytes = p.columns * 2;
    at_ = p.weight + p.row(0) * row_bytes;
    run_ = {.from = at_, .stride = row_bytes, .pieces = 1, .piece_bytes = p.slice_columns * 2};
    if constexpr (Wide) {
      slices_ = p.slices;
      left_ = rows_ = p.count;
      a_stage_ = kStageSlices;
    } else {
      left_ = p.count * p.columns * 2;
      a_stage_ = kStageSlices * p.slice_columns * 2;
    }
  }
  __device__ void begin_part() {
    const AttentionPart part(c_, item_);
    const int key_bytes = c_.dims.head_dim * 2;
    left_ = (part.old - part.begin) * key_bytes;
    a_stage_ = c_.plan.stage_keys * key_bytes;
    at_ = c_.first_layer.k_cache + part.row(c_, part.begin) * key_bytes + layer_ * c_.layer_stride;
    run_ = {.from = at_, .stride = c_.first_layer.v_cache - c_.first_layer.k_cache, .pieces = 2, .piece_bytes = 0};
  }

  const DecodeCall& c_;
  int layer_, step_ = 0, item_ = 0, slice_ = 0, slices_ = 0;
  int rows_ = 0;     // of the run, where it is of rows
  int left_ = 0;     // of the run: rows, or bytes of each piece
  int a_stage_ = 0;  // that a stage takes
  const char* at_ = nullptr;
  StageSource run_{};
};

/// Fills the ring until the launch's end or until nobody empties it any more.
template <bool Wide>
__device__ void stream(const DecodeCall& c, RingWriter& ring) {
  const int lane = int(threadIdx.x) % 32;
  StageCursor<Wide> cursor(c);
  StageSource s;
#pragma unroll 1
  while (cursor.next(s)) {
    char* const stage = ring.next(s.bytes());
    if (!stage) break;
    if (lane < s.pieces) ring.copy(stage + lane * s.piece_bytes, s.from + lane * s.stride, s.piece_bytes);
  }
  ring.drain();
}

}  // namespace cf::cuda
