#pragma once
// What the consumer warps of a block do in each phase: norms, products, attention. Behind the head: the greedy choice.
#include "core/sampling.hpp"
#include "cuda/device/warp.cuh"
#include "cuda/persistent/attention.cuh"
#include "cuda/persistent/norm.cuh"
#include "cuda/persistent/product.cuh"

namespace cf::cuda {

/// What is added to a row's product: the bias, as stored, and the residual. Of a pair of rows the bias is the gate's.
/// The up row's bias stands in `residual`: a pair has no residual.
struct Addends {
  std::uint16_t bias;
  float residual;

  __device__ float up_bias() const { return residual; }
};

/// OnRanks: the residual stream is the sum of what several ranks make (RankExchange).
template <class T, Products Kind, bool Grouped, bool OnRanks>
class ConsumerWarps {
  static constexpr bool Tiles = is_tiled(Kind), Packed = is_packed(Kind);
  using Code = PhaseCode<Kind>;
  /// Whether all consumer warps empty every stage of the ring, and each has partial sums of every row.
  static constexpr bool Together = Tiles || Packed;

 public:
  __device__ explicit ConsumerWarps(const PersistentArguments& arguments)
      : block(Block::consumers(arguments)),
        c(arguments),
        reader(arguments, Together ? 0 : thread_index() / (kConsumerThreads / 2)) {}

  /// Runs a layer. False where a wait took too long.
  __device__ __forceinline__ bool run(int number) {
    start = number == c.first_layer ? c.deals.start(number) : c.deals.next_start(start);
    layer = number;
    if constexpr (Packed) kind_number = int(block.pointers(layer).kind);
#pragma unroll 1
    for (int step = c.first_phase(layer);; ++step) {
      make_anew(layer), make_anew(step);
      const PhaseSpec phase = load_phase(c, step);
      block.maybe_delay(layer * kPhases + step);
      if (phase.is_attention()) {
        if (!attend(phase)) return false;
        continue;
      }
      // Work needs no activations. It is made here, before prepare() waits for them.
      const int parts = Product::parts(c, phase, start);
      Work work(*this, phase, 0);
      reader.begin(work.product.stage);
      if (!prepare(phase)) return false;
#pragma unroll 1
      for (int part = 0; part < parts; ++part) {
        if (part > 0) work = Work(*this, phase, part), reader.begin(work.product.stage);
        if (!multiply(phase, work)) return false;
      }
      if (phase.is_last) return true;
    }
  }

  /// Behind a launch's last layer: stores the block's part of the output, which the ranks have made parts of.
  __device__ void store_sums() const {
    const long count = long(c.dims.batch) * c.dims.hidden;
    const int last = c.end_layer - 1, buffer = block.rank_buffer(Dependency::hidden, last);
    const unsigned epoch = block.rank_epoch(c.end_layer);
#pragma unroll 1
    for (long at = blockIdx.x * long(kConsumerThreads) + thread_index(); at < count;
         at += c.plan.grid * long(kConsumerThreads)) {
      float sum = 0;
#pragma unroll 1
      for (int rank = 0; rank < c.ranks.ranks; ++rank) {
        FloatWord part;
        block.poll(
            last, Dependency::hidden,
            [&] {
              part = load_part(c.ranks, buffer, rank, at);
              return part.epoch == epoch;
            },
            [&] { return rank; });
        sum += part.value;
      }
      if (block.stopped()) return;
      static_cast<T*>(c.output)[at] = from_float<T>(sum);
    }
  }

  /// Publishes the block's best tokens, behind the head, and waits for those of all blocks: the next token of every
  /// sequence is the best one. Then makes the block ready for it. False where the launch ends here.
  __device__ bool next_token() {
    if (!c.token.chooses) return false;
    block.sync();                        // all warps' keys are in `best`
    block.token = block.tokens_begun();  // so no register holds the token's number through all layers
    publish_best();
    const bool is_last = block.token + 1 == c.token.count;
    if (is_last && blockIdx.x != 0) return false;
    // All consumer warps have passed the barrier: they do not read the last token's pointers and angles any more.
    block.bring_pointers(c.first_layer, block.token + 1, block.thread());
    const int* const positions = block.at<int>(c.layout.positions);
    store_angles(block, block.thread(), kConsumerThreads, [&](int s) { return positions[s] + block.token + 1; });
    if (const int s = block.thread(); s < c.dims.batch)
      if (const int length = block.at<int>(c.layout.lengths)[s]; length != kIdleLength)
        store_newest_page(block, s, length + block.token + 1);
    if (!await_choices()) return false;
    if (take_choices(is_last || block.asked_all_to_end())) {
      if (thread_index() == 0) block.stopped() = 1;  // the auxiliary warps may wait for a layer that does not come
      return false;
    }
    ++block.token;
    if (thread_index() == 0) block.tokens_begun() = block.token;
    return true;
  }

 private:
  /// Makes the product's activations or waits for them, except for mlp.act of dense weights, which may arrive slice by
  /// slice.
  __device__ bool prepare(PhaseSpec phase) {
    // Where no row is sliced, the two rows that the output adds, one of dense and one of down, may be two warps'.
    if (Code::kept_rows && phase.adds_kept && c.plan.act_slices == 1) block.sync();
    if (phase.norms != Norms::none) {
      int first = phase.norms == Norms::second, end = phase.norms == Norms::first ? 1 : 2;
      make_anew(first), make_anew(end);  // nvcc would inline a copy of norms() for each pair of values
      if (!norms(first, end)) return false;
    }
    if (phase.input == Input::context || phase.input == Input::mlp_act) {
      const bool is_act = phase.input == Input::mlp_act;
      return (is_act && (Tiles || is_act_in_registers(phase))) ||
             (await_token(phase, is_act) && make_digits(phase.weight()));
    }
    return phase.rows == PhaseRows::behind_attention || digits_of_norm(phase.weight());
  }
  /// Waits for mlp.act or for the context, or fetches it.
  __device__ bool await_token(PhaseSpec phase, bool is_act) {
    // Where the consumer warps fetch, no signal says that mlp.act is there, and context_here says that the context's
    // memory is free.
    const bool fetches = Code::fetched_by_consumers(phase);
    if (!is_act || !fetches)
      if (!block.wait(is_act ? Signal::act_here : Signal::context_here)) return false;
    if (Tiles || !fetches) return true;
    if (is_act) block.sync();  // the memory is free: no warp needs up's tokens there any more
    fetch_token(block, layer, is_act);
    return block.sync_unless_stopped();
  }

  /// Norms [first, end) of each token: norm 0 is input_layernorm, norm 1 post_attention_layernorm. With a parallel
  /// residual both are of the layer's input and share its moments; with a sequential one norm 1 is of attn_residual.
  __device__ bool norms(int first, int end) {
    if constexpr (Tiles)
      return norms<kTokensNormPieces>(first, end);
    else
      return c.dims.hidden <= 2 * kVec * kConsumerThreads ? norms<2>(first, end) : norms<kMaxNormPieces>(first, end);
  }
  template <int Pieces>
  __device__ bool norms(int first, int end) {
    const int hidden = c.dims.hidden, batch = Tiles ? c.dims.batch : 1;
    const RowWarps rows = Tiles ? RowWarps::for_batch(hidden, batch) : RowWarps{1};
    // How many norms a call may make. Both norms of a sequential residual have the same code.
    constexpr int kNorms = Code::both_norms ? 2 : 1;
    const auto norm_of = [&](int i) { return Code::both_norms ? i : first; };
    const auto gamma = [&](int norm) { return block.pointers(layer).weights.gamma[norm]; };
    const auto beta = [&](int norm) { return block.pointers(layer).weights.beta[norm]; };
    // With several tokens no registers are left for the norms' weights. With three pieces of one token there is room
    // for one norm's weights while the row is awaited; the other norm's are loaded after that.
    constexpr bool late = Code::both_norms && Pieces > 2;
    NormWeights<T, Tiles ? 1 : Pieces> weights[kNorms];
    T* const shared = block.at<T>(c.layout.norm_weights);
    const auto load = [&](int i) {
      if constexpr (!Tiles) weights[i].load(rows, hidden, gamma(norm_of(i)), c.rms_norm ? nullptr : beta(norm_of(i)));
    };
    const bool are_shared = Tiles && c.plan.shared_norms;
    if constexpr (Tiles) {
      if (are_shared && thread_index() == 0) {
        std::uint64_t* const here = block.signal_barrier(Signal::norms_here);
        arrive_expecting(here, (end - first) * 2 * hidden * 2);
        for (int i = first; i < end; ++i) {
          copy_bulk(shared + 2 * i * hidden, gamma(i), hidden * 2, here);
          copy_bulk(shared + (2 * i + 1) * hidden, beta(i), hidden * 2, here);
        }
      }
    } else {
      if (!Code::both_norms || first == 0) load(0);
      if (Code::both_norms && end == 2 && !late) load(1);
      if (end == 2 && late) prefetch_norm<T, Pieces>(rows, hidden, gamma(1), beta(1));
    }
#pragma unroll 1
    for (int begin = 0; begin < batch; begin += rows.tokens) {
      const int token = begin + rows.token();
      const bool has_token = token < batch;
      const long at = long(token) * hidden;
      RowPieces<Pieces> row;
      if (!has_token) {
      } else if (first == 0 && reads_input()) {
        load_row(rows, hidden, input_row(token), row);
      } else if constexpr (OnRanks) {
        await_sum(block, rows, at, layer, first == 0 ? Dependency::hidden : Dependency::attn_residual, row);
      } else {
        await_row(block, rows, (first == 0 ? c.exchange.norm_hidden : c.exchange.norm_attn_residual) + at,
                  first == 0 && layer == c.first_layer, layer,
                  first == 0 ? Dependency::hidden : Dependency::attn_residual, row);
      }
      if (end == 2 && late) load(1);
      const RowMoments m = moments(block, rows, row, (begin & rows.tokens) != 0);
      if (are_shared && begin == 0) block.wait_for_copy(Signal::norms_here);
#pragma unroll
      for (int i = 0; i < kNorms; ++i)
        if (const int norm = norm_of(i); has_token && first <= norm && norm < end) {
          T* const tap = static_cast<T*>(norm == 0 ? c.taps.attn_in : c.taps.mlp_in);
          char* const to = block.at<char>(norm == 0 ? c.layout.attn_x : c.layout.mlp_x) + token * c.layout.hidden_row;
          const auto store = [&](const auto& norm_weights) {
            const Weight w = norm == 0 ? Weight::qkv : Weight::up;
            const bool packed = Packed && kind().packed[int(w)].is_packed();
            const int* const columns = packed ? input_columns(w) : nullptr;
            if (!Tiles && packed && !columns)
              normalise(rows, hidden, row, m, norm_weights, digits(w).first, tap ? tap + at : nullptr);
            else
              normalise(rows, hidden, row, m, norm_weights, to, columns, tap ? tap + at : nullptr);
          };
          if constexpr (Tiles)
            store(are_shared ? StoredNormWeights<T>{shared + 2 * norm * hidden, shared + (2 * norm + 1) * hidden}
                             : StoredNormWeights<T>{reinterpret_cast<const T*>(gamma(norm)),
                                                    reinterpret_cast<const T*>(beta(norm))});
          else
            store(weights[i]);
        }
    }
    return block.sync_unless_stopped();
  }

  /// The block's part of a product, and the thread's part of its epilogue. An element is the value of one token in one
  /// row; with SwiGLU, in one pair of rows. A worker is a thread that finishes elements. A warp that owns rows has one
  /// row in each of its stages, and its lanes are the workers of these rows. Otherwise all consumer threads are the
  /// workers of all rows.
  struct Work {
    Product product;
    Sums<Together> sums;
    bool own_rows;
    int first_row, row_step;  // the workers' rows, counted within the phase
    int elements;             // that the workers share
    int lane_bits;    // 2^lane_bits neighbouring lanes finish an element together: one for each slice of its row
    Addends addends;  // of the thread's first element: their loads run beside the product

    __device__ Work(const ConsumerWarps& of, PhaseSpec phase, int part)
        : product(of.c, of.kind(), phase, of.start, part),
          sums(of.block, product, thread_index() / 32),
          own_rows(sums.warps_own_rows(product)),
          addends{} {
      const int thread = thread_index(), warp = thread / 32;
      first_row = own_rows ? of.reader.first() * kStageSlices + warp % kStageSlices : 0;
      row_step = own_rows ? 2 * kStageSlices : product.together();
      elements = (own_rows ? max(product.count - first_row + 2 * kStageSlices - 1, 0) / (2 * kStageSlices)
                           : product.elements()) *
                 of.c.dims.batch;
      lane_bits = Together ? 0 : 31 - __clz(product.slices);
      // A thread beyond the last element loads the last element's addends too: the lanes of a warp do not diverge.
      const int element = min((own_rows ? thread % 32 : thread) >> lane_bits, elements - 1);
      if (elements > 0) addends = of.load_addends(phase, product, token(of.c, element), row(of.c, element));
    }
    /// The number of an element's row among the workers' rows.
    __device__ static int number(const PersistentArguments& c, int element) {
      return Tiles ? element / c.dims.batch : element;
    }
    __device__ static int token(const PersistentArguments& c, int element) {
      return Tiles ? element % c.dims.batch : 0;
    }
    /// The element's row, or the first one of its pair, counted within the phase.
    __device__ int row(const PersistentArguments& c, int element) const {
      return first_row + number(c, element) * row_step;
    }
  };
  /// The phase's product and its epilogue. A warp that owns whole rows finishes them itself. Where rows are sliced, all
  /// consumer warps first wait for each other.
  __device__ bool multiply(PhaseSpec phase, const Work& work) {
    const Product& product = work.product;
    const Sums<Together>& sums = work.sums;
    const bool own_rows = work.own_rows;
    Addends addends = work.addends;
    const bool is_down = phase.input == Input::mlp_act;
    // With several tokens mlp.act arrives slice by slice.
    const auto x_at = [&](int slice) -> char* {
      if (is_down && Tiles) {
        const ActBuffer buffer(c, slice);
        return block.wait(buffer.here) ? block.at<char>(buffer.offset) : nullptr;
      }
      return block.at<char>(is_in_mlp_x(phase.input) ? c.layout.mlp_x : c.layout.attn_x) +
             slice * product.slice_columns * 2;
    };
    const auto x_used = [&](int slice) {
      // Signals once for each wait of the auxiliary warps.
      const int slices = c.plan.act_slices;
      if (Tiles && is_down && (slice == 0 ? slices > 1 : slice + 1 + c.two_act_buffers < slices))
        block.signal(ActBuffer(c, slice).used);
    };
    const Weight weight = phase.weight();
    const bool awaits_slices = is_act_in_registers(phase);
    if constexpr (!Together) {
      const char* const x = awaits_slices ? nullptr : x_at(0);
      consume_row_product<T, Code::act_in_registers>(reader, product, sums, RowTokens{block, layer, x});
    } else if (Packed && !Tiles && has_digits(weight)) {
      consume_packed(reader, product, kind().packed[int(weight)], sums, digits(weight).first);
    } else {
      // One wait for a slice, whatever the weights: nvcc 13.0 does not end on two.
      const bool packed = Packed && Tiles && kind().packed[int(weight)].is_packed();
      const int inputs = Packed && packed ? kind().packed[int(weight)].inputs : product.columns;
      const int x_row = is_down ? c.layout.act_row : c.layout.hidden_row;
#pragma unroll 1
      for (int slice = 0, begin = 0; begin < inputs; ++slice, begin += product.slice_columns) {
        char* const x = x_at(slice);
        if (!x) return false;
        const int columns = min(product.slice_columns, inputs - begin);
        if (Packed && packed) {
          const DigitRows rows = digits_at(x, is_down ? 0 : begin, x_row);
          if (is_down) replace_all(rows, columns);
          consume_packed_slice(reader, product, kind().packed[int(weight)], sums, rows, begin, columns);
          x_used(slice);
        } else {
          const TileTokens tokens(c, x, x_row, sums.batch, columns, thread_index() / 32);
          x_used(slice);
          consume_tiles<T>(reader, product, sums, slice, columns, tokens);
        }
      }
    }
    if constexpr (Together) reader.end(0);
    // Signals once for each wait of the auxiliary warps.
    if (phase.frees != Frees::none)
      block.signal(phase.frees == Frees::attn_x ? Signal::attn_x_free : Signal::mlp_x_free);
    if (own_rows)
      __syncwarp();
    else if (!awaits_slices)
      block.sync();
    else if (!block.sync_unless_stopped())
      return false;
    std::uint64_t best = 0;  // of one token's elements
    const bool is_head = phase.publishes == Dependency::choice;
    // A lane beyond the last element finishes the last element again and stores the same bits. So the lanes of a
    // warp do not diverge.
    const int step = own_rows ? 32 : kConsumerThreads, first = own_rows ? 0 : thread_index() / 32 * 32;
#pragma unroll 1
    for (int begin = first; begin < work.elements << work.lane_bits; begin += step) {
      const int i = min((begin + thread_index() % 32) >> work.lane_bits, work.elements - 1);
      const int token = work.token(c, i), row = work.row(c, i);
      if (begin > first) [[unlikely]]
        addends = load_addends(phase, product, token, row);
      float v = sums.total(own_rows ? work.number(c, i) : row, token) + to_float(T{addends.bias});
      int column = matrix_row(phase, product, row);
      if (product.gated) {
        v = silu(v) * (sums.total(row + 1, token) + addends.up_bias());
        column /= 2;
      } else {
        v += addends.residual;
      }
      if (is_head) [[unlikely]]
        keep_better(best, token, finish_logit(token, column, v));
      else
        finish(phase, token, row, column, v);
    }
    if (is_head && !Tiles) [[unlikely]] {
      best = warp_max(best);
      if (thread_index() % 32 == 0) keep(0, best);
    }
    if (Tiles && phase.rows == PhaseRows::behind_attention)
      publish_done(block, c.exchange.act_done + blockIdx.x, block.epoch(layer, Dependency::mlp_act));
    else if (own_rows)
      __syncwarp();
    else if (Tiles || phase.publishes != Dependency::hidden)
      block.sync();  // behind a layer the barrier in the next norms is enough
    return true;
  }

  /// Whether each warp loads its slice of mlp.act from device memory to registers.
  static __device__ bool is_act_in_registers(PhaseSpec phase) {
    return Code::act_in_registers && phase.fetched_by == Fetcher::each_consumer;
  }

  /// How the layer's weights are stored.
  __device__ const LayerKind& kind() const { return c.kinds[Packed ? kind_number : 0]; }
  /// Whether the layer's matrix is packed: it is multiplied by digits.
  __device__ bool has_digits(Weight w) const { return Packed && kind().packed[int(w)].is_packed(); }
  /// The column of each input of a matrix; null where column k is input k.
  __device__ const int* input_columns(Weight w) const {
    return Packed ? block.input_columns(kind(), w, layer) : nullptr;
  }
  /// Makes the digits of a product's activations, which lie in shared memory, where it is packed.
  __device__ bool make_digits(Weight w) {
    if (has_digits(w)) replace_all(digits(w), kind().packed[int(w)].inputs);
    return true;
  }
  /// Converts `columns` elements of each token to digits.
  __device__ void replace_all(const DigitRows& x, int columns) {
#pragma unroll 1
    for (int token = 0; token < (Tiles ? c.dims.batch : 1); ++token) x.of(token).template replace<T>(columns);
    block.sync();
  }
  /// The norm of one token makes the digits itself, unless it stores its elements in other columns.
  __device__ bool digits_of_norm(Weight w) { return (!Tiles && !input_columns(w)) || make_digits(w); }
  /// The digits of a product's activations, in shared memory.
  __device__ DigitRows digits(Weight w) const {
    const bool of_mlp = w == Weight::up || w == Weight::down;
    return {{block.at<char>(of_mlp ? c.layout.mlp_x : c.layout.attn_x),
             block.at<DigitScale>(of_mlp ? c.digit_offsets.mlp : c.digit_offsets.attn)},
            c.layout.hidden_row,
            c.digit_offsets.row / kDigitScaleBytes};
  }
  /// The digits of a slice of several tokens, which lies at `x` from column `begin` on; tokens are `row` bytes apart.
  __device__ DigitRows digits_at(char* x, int begin, int row) const {
    DigitRows rows = digits(x >= block.at<char>(c.layout.mlp_x) ? Weight::up : Weight::qkv);
    rows.first = {x, rows.first.scales + begin / kDigitColumns};
    rows.row_bytes = row;
    return rows;
  }

  /// The checkpoint's row for row `row` of the phase. Packed rows of qkv may lie in the order of RopePairs.
  __device__ int matrix_row(PhaseSpec phase, const Product& product, int row) const {
    const int at = product.row(row);
    if (!Packed || phase.publishes != Dependency::qkv) return at;
    return RopePairs{kind().pairs_head_dim, kind().pairs_rotary, kind().pairs_turned_heads}.row(at);
  }
  /// Loads what is added to the product of a row or of a pair of rows. This block has stored the row of attn_residual
  /// itself. `row` counts the phase's rows.
  __device__ Addends load_addends(PhaseSpec phase, const Product& product, int token, int row) const {
    const int matrix_row = this->matrix_row(phase, product, row);
    const char* const bias = block.pointers(layer).weights.bias[int(phase.weight())];
    const long at = long(token) * c.dims.hidden + matrix_row;
    Addends a{};
    if (bias) a.bias = __ldg(reinterpret_cast<const unsigned short*>(bias) + matrix_row);
    if (bias && product.gated)
      a.residual = to_float(T{__ldg(reinterpret_cast<const unsigned short*>(bias) + matrix_row + 1)});
    if (phase.adds == Residuals::input)
      a.residual = reads_input() ? to_float(input_row(token)[matrix_row]) : hidden_of(at);
    if (Code::attn_residual && phase.adds == Residuals::attn_residual) {
      if constexpr (OnRanks)
        a.residual = sum_of(Dependency::attn_residual, layer, at);
      else
        a.residual = __ldcg(c.exchange.attn_residual + at);
    }
    return a;
  }
  /// An element of the layer's input, in float32. The block has seen the element's NormWord, which its thread stored
  /// after the FloatWord that this function reads. Stores may become visible in any order, so the FloatWord is read
  /// until it has the layer's epoch. What an earlier launch stored is complete.
  __device__ float hidden_of(long at) const {
    if constexpr (OnRanks) return sum_of(Dependency::hidden, layer - 1, at);
    const bool complete = layer == c.first_layer, is_second = at % 2;
    FloatWord two[2];
    do load_words(c.exchange.hidden[layer % 2] + (at - is_second), two);
    while (!complete && (is_second ? two[1].epoch : two[0].epoch) != block.epoch(layer));
    return is_second ? two[1].value : two[0].value;
  }
  /// The same of what the ranks have made parts of in layer `made_in`.
  __device__ float sum_of(Dependency d, int made_in, long at) const {
    const RankExchange& x = c.ranks;
    const int buffer = block.rank_buffer(d, made_in);
    const unsigned epoch = block.rank_epoch(layer);
    float sum = 0;
#pragma unroll 1
    for (int rank = 0; rank < x.ranks; rank += 2) {
      const bool is_pair = rank + 1 < x.ranks;
      FloatWord first, second;
      do {
        first = load_part(x, buffer, rank, at);
        second = load_part(x, buffer, rank + is_pair, at);
      } while (first.epoch != epoch || second.epoch != epoch);
      sum += first.value;
      if (is_pair) sum += second.value;
    }
    return sum;
  }
  /// Publishes v, a token's element, which becomes element `column` of what the phase makes. `row` counts the phase's
  /// rows.
  __device__ void finish(PhaseSpec phase, int token, int row, int column, float v) const {
    const long at = long(token) * c.dims.hidden + column;
    float* const residual = block.at<float>(c.layout.residual) + token * c.plan.out_rows + row;
    const auto publish = [&](Dependency d, ElementWord* to, bool with_epoch, void* tap, int columns, float value,
                             const int* columns_of = nullptr) {
      const T element = from_float<T>(value);
      const long index = long(token) * columns + column;
      const long to_index = columns_of ? long(token) * columns + __ldg(columns_of + column) : index;
      if (with_epoch)
        store_word(to + to_index, element, block.epoch(layer, d));
      else
        reinterpret_cast<T*>(to)[to_index] = element;
      if (tap) [[unlikely]]
        static_cast<T*>(tap)[index] = element;
    };
    if (phase.adds == Residuals::input && c.taps.attn_residual)
      static_cast<T*>(c.taps.attn_residual)[at] = from_float<T>(v);
    switch (phase.publishes) {
      case Dependency::qkv: publish(Dependency::qkv, c.exchange.qkv, true, c.taps.qkv, c.dims.qkv_rows, v); break;
      case Dependency::mlp_act:
        publish(Dependency::mlp_act, c.exchange.mlp_act, !Tiles, c.taps.mlp_act, c.dims.intermediate, activated(v),
                input_columns(Weight::down));
        break;
      case Dependency::hidden: {
        if (Code::kept_rows && phase.adds_kept) v += *residual;
        if constexpr (OnRanks) {
          publish_part(c.ranks, block.rank_buffer(Dependency::hidden, layer), at, v,
                       block.rank_epoch(layer, Dependency::hidden));
        } else {
          const unsigned epoch = block.epoch(layer, Dependency::hidden);
          publish_hidden(c.exchange, layer + 1, at, v, epoch);
          if (layer + 1 == c.end_layer) static_cast<T*>(c.output)[at] = from_float<T>(v);
        }
        break;
      }
      case Dependency::attn_residual:
        if constexpr (Code::attn_residual && OnRanks)
          publish_part(c.ranks, block.rank_buffer(Dependency::attn_residual, layer), at, v,
                       block.rank_epoch(layer, Dependency::attn_residual));
        else if constexpr (Code::attn_residual)
          publish_attn_residual(c.exchange, at, v, block.epoch(layer, Dependency::attn_residual));
        break;
      default:
        if constexpr (Code::kept_rows) *residual = v;
    }
  }
  /// mlp.act of a finished sum. SwiGLU's is finished already.
  __device__ float activated(float v) const {
    switch (c.activation) {
      case Activation::gelu_erf: return gelu_erf(v);
      case Activation::gelu_tanh: return gelu_tanh(v);
      default: return v;
    }
  }
  /// Whether the layer reads the launch's input, not the residual stream in scratch memory.
  __device__ bool reads_input() const { return layer == c.first_layer && (c.input || c.token.count > 0); }
  /// The sequence's row of that input: where the launch makes whole tokens, its token's row of the embedding.
  __device__ const T* input_row(int sequence) const {
    const bool embeds = c.token.count > 0;
    const long row = embeds ? block.at<int>(c.layout.ids)[sequence] : sequence;
    return static_cast<const T*>(embeds ? c.token.embed_in : c.input) + row * c.dims.hidden;
  }

  /// Stores a logit and returns its order key.
  __device__ std::uint64_t finish_logit(int sequence, int id, float v) const {
    const T logit = from_float<T>(v);
    static_cast<T*>(c.token.logits)[long(sequence) * c.token.vocab + id] = logit;
    return sampling::logit_key(to_float(logit), id);
  }
  /// With one sequence a thread keeps its own best key. With several its elements are of any sequence.
  __device__ void keep_better(std::uint64_t& best, int sequence, std::uint64_t key) const {
    if constexpr (Tiles)
      keep(sequence, key);
    else
      best = max(best, key);
  }
  /// Keys are integers: the highest one does not depend on the threads' order.
  __device__ void keep(int sequence, std::uint64_t key) const {
    atomicMax(block.at<unsigned long long>(c.layout.best) + sequence, static_cast<unsigned long long>(key));
  }

  /// Publishes the block's best tokens. What the block has appended to the caches is visible to who sees them.
  __device__ void publish_best() const {
    const int sequence = block.thread();
    if (sequence >= c.dims.batch) return;
    __threadfence();
    std::uint64_t* const best = block.at<std::uint64_t>(c.layout.best) + sequence;
    const unsigned epoch = block.epoch(layer, Dependency::choice);
    FloatWord* const to = c.exchange.candidates + (long(blockIdx.x) * c.dims.batch + sequence) * 2;
    store_word(to, __uint_as_float(unsigned(*best >> 32)), epoch);
    store_word(to + 1, __uint_as_float(unsigned(*best)), epoch);
    *best = 0;
    if (blockIdx.x != 0 || sequence != 0) return;
    FloatWord* const end = c.exchange.candidates + long(c.plan.grid) * c.dims.batch * 2;
    store_word(end, __uint_as_float(block.asked_to_end() ? 1u : 0u), epoch);
    store_word(end + 1, 0.f, epoch);
  }
  /// Waits for the best tokens of all blocks. False where that took too long.
  __device__ bool await_choices() const {
    const int thread = thread_index(), batch = c.dims.batch, warp = thread / 32;
    const unsigned epoch = block.epoch(layer);
    std::uint64_t* const of_warps = block.at<std::uint64_t>(c.layout.best_of_warps);
    const auto await = [&](const FloatWord* from) {
      FloatWord two[2] = {};
      block.poll(layer, Dependency::choice, [&] {
        load_words(from, two);
        return two[0].epoch == epoch && two[1].epoch == epoch;
      });
      return std::uint64_t(__float_as_uint(two[0].value)) << 32 | __float_as_uint(two[1].value);
    };
#pragma unroll 1
    for (int sequence = 0; sequence < batch; ++sequence) {
      std::uint64_t key = 0;
#pragma unroll 1
      for (int other = thread; other < c.plan.grid; other += kConsumerThreads)
        key = max(key, await(c.exchange.candidates + (long(other) * batch + sequence) * 2));
      key = warp_max(key);
      if (thread % 32 == 0) of_warps[sequence * kConsumerWarps + warp] = key;
    }
    if (thread == kConsumerThreads - 1 && await(c.exchange.candidates + long(c.plan.grid) * batch * 2) != 0)
      block.asked_all_to_end() = 1;
    __threadfence();
    return block.sync_unless_stopped();
  }
  /// Each sequence's choice becomes the token to run next, or ends the sequence. True where the launch ends: where it
  /// has no more tokens (`is_last`), or no sequence goes on. Block 0 tells the choices to the host, and leaves the
  /// sequences' state where the launch ends. A sequence whose logits are refused has the choice -1; it goes on with
  /// token 0, so that the others can go on.
  __device__ bool take_choices(bool is_last) const {
    const int s = block.thread();
    const bool has_sequence = s < c.dims.batch, tells = has_sequence && blockIdx.x == 0;
    int id = -1, ran = 0;
    if (has_sequence) {
      const std::uint64_t* const of_warps = block.at<std::uint64_t>(c.layout.best_of_warps) + s * kConsumerWarps;
      std::uint64_t key = 0;
#pragma unroll
      for (int w = 0; w < kConsumerWarps; ++w) key = max(key, of_warps[w]);
      if (key != 0 && key != sampling::kRefusedKey) id = sampling::id_of(key);
      const unsigned serial = c.token.first_serial + unsigned(block.token);
      if (tells) store_for_host(c.token.made + serial % kMadeTokens * kMaxPersistentBatch + s, made_token(serial, id));
      int& runs = block.at<int>(c.layout.ids)[s];
      ran = runs;
      runs = max(id, 0);
      const SequenceEnd& end = c.sequence_ends[s];
      if (block.token + 1 >= end.tokens || end.stops_at(id)) block.end_sequence(s);
    }
    block.sync();
    const bool ends = is_last || block.all_sequences_ended();
    if (ends && tells) {
      const int position = block.at<int>(c.layout.positions)[s] + block.token;
      const bool idle = block.at<int>(c.layout.lengths)[s] == kIdleLength || position >= c.capacity;
      c.token.ids[s] = ran;
      c.token.positions[s] = idle ? 0 : position;
      c.token.kv_len[s] = idle ? kIdleLength : position + 1;
      c.token.chosen[s] = id;
    }
    return ends;
  }

  /// RoPE, the append and attention for the block's key splits. The warps' partial results go to the auxiliary warps.
  __device__ bool attend(PhaseSpec phase) {
    const int head_dim = c.dims.head_dim;
    if constexpr (Grouped) {
      return head_dim <= 80 ? attend<Tile<5>>(phase) : attend<Tile<kMaxGqaHeadDim / 16>>(phase);
    } else {
      if (head_dim == 64 || head_dim == 128) return attend<DiagonalTile<T>>(phase);
      if constexpr (Packed)
        return attend<Tile<5>>(phase);
      else
        return head_dim <= 80    ? attend<Tile<5>>(phase)
               : head_dim <= 128 ? attend<Tile<8>>(phase)
                                 : attend<Tile<16>>(phase);
    }
  }
  template <int Blocks>
  using Tile = AttentionTile<T, Blocks, Grouped>;

  /// The calling thread's lane. It is computed anew for each tile, since registers are scarce.
  static __device__ int tile_lane() { return thread_index() % 32; }
  /// Makes q, k and v of the split's new token ready. Norms of heads have code of their own, so that a family without
  /// them does not go past their instructions (data/bench/TRIALS.md, head-norms).
  __device__ bool prepare(const KeySplit& split, PhaseSpec phase) const {
    if (Code::head_norm && phase.norms_heads) [[unlikely]]
      return prepare<Code::head_norm>(split);
    return prepare<false>(split);
  }
  template <bool Norms>
  __device__ bool prepare(const KeySplit& split) const {
    if constexpr (Grouped)
      return prepare_tile<T, Norms>(block, split, layer);
    else
      return prepare_head<T, Norms>(block, split, layer);
  }
  template <class Tile>
  __device__ bool attend(PhaseSpec phase) {
    const int head_dim = c.dims.head_dim, heads = gqa_heads<Grouped>(c), stride = query_stride(head_dim, heads);
    const int thread = thread_index(), lane = thread % 32, warp = thread / 32, unit = warp % kStageSlices;
    const T *const queries = block.at<T>(c.layout.new_token), *const newest_key = queries + heads * stride;
    const T* const query = queries + (Grouped ? min(lane / 4, heads - 1) * stride : 0);
    constexpr int tile_keys = Tile::kKeys;
    reader.begin(c.plan.key_stage);
#pragma unroll 1
    for (int item = int(blockIdx.x); item < KeySplit::count(c); item += c.plan.grid) {
      const KeySplit split(c, item, block.token);
      if (!split.is_used()) continue;
      if (!prepare(split, phase)) return false;
      Tile tile;
      // The newest key is a stage of its own, which is not in the ring. Warps 0 to 3 have every second stage and warps
      // 4 to 7 the others.
      const int half = warp / kStageSlices, first_stage = Together ? half : reader.first(), stages = split.stages(c);
      int s = Together ? 0 : first_stage;
#pragma unroll 1
      for (; s < stages + split.has_newest(); s += Together ? 1 : 2) {
        const bool cached = s < stages;
        const int keys = cached ? min(c.plan.stage_keys, split.end_of_cached - split.begin - s * c.plan.stage_keys) : 1;
        const T* const k = cached ? reinterpret_cast<const T*>(shared_pointer(reader.wait())) : newest_key;
        const int first_tile = Tile::kInTurn ? unit - s / 2 * (c.plan.stage_keys / tile_keys) & kStageSlices - 1 : unit;
        if (!Together || s % 2 == half)
#pragma unroll 1
          for (int first = first_tile * tile_keys; first < keys; first += kStageSlices * tile_keys)
            tile.add(tile_lane(), query, k + first * head_dim, k + (keys + first) * head_dim,
                     min(tile_keys, keys - first), head_dim, c.attention_scale);
        if (cached) reader.release(lane == 0);
      }
      reader.end(Together ? 0 : (s - stages) & 1);
      if (!block.wait(Signal::partials_taken)) return false;
      // A warp's number depends on its keys, not on what the ring has brought before, so that the merge has one order.
      const int number = first_stage * kStageSlices + unit;
      tile.store(block.at<float>(c.layout.warp_values) + number * heads * values_stride(head_dim, heads),
                 block.at<SoftmaxState>(c.layout.warp_states) + number * heads, head_dim, heads);
      block.signal(Signal::partials_ready);
    }
    return true;
  }

  Block block;
  const PersistentArguments& c;
  RingReader<Together ? 1 : 2> reader;
  int layer = 0, start = 0;  // the layer, and the block with which its deals begin
  int kind_number = 0;       // the layer's kind
};

}  // namespace cf::cuda
