#include "cuda/ops/appended_row.hpp"
#include "cuda/ops/ln_qkv/ln_qkv.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"

namespace cf::cuda {
namespace {

/// Where an element of the product goes: to element `column` of a part of a head. The product's rows are in the order
/// of RopePairs, so that one tile holds both elements of a pair.
struct Destination {
  int part_of_head, column;  // part_of_head is 3 * head + 0, 1 or 2 for its q, k or v
  __device__ int head() const { return part_of_head / 3; }
  __device__ int part() const { return part_of_head % 3; }
};

/// An element of the product: its token and destination, the bits of its bias and of the bias of the other element of
/// its pair, and the pair's angle.
struct QkvElement {
  int token;
  Destination to;
  std::uint32_t bias, other_bias;
  float cos, sin;
};

/// A block's normalised tokens, and what becomes of the product's elements: RoPE, the stores of q, k and v, and the
/// append to the cache.
template <class T, int Warps>
struct RopeAndAppend : NormalisedTokens<T, Warps> {
  using Tokens = NormalisedTokens<T, Warps>;
  using Call = LnQkvCall<ops::LnQkv::Args>;

  /// A token's row in the RoPE table, and the first head's row of its entry among all rows of the cache. -1 stands for
  /// none.
  struct Token {
    int position, cache_row;
  };

  const Call& c;
  int head_dim, half;
  Token* token_of;  // [tokens]

  __device__ RopeAndAppend(const Call& call, char* smem)
      : Tokens(call.norm, smem),
        c(call),
        head_dim(int(c.args.q.shape[2])),
        half(int(c.args.cos.shape[1])),
        token_of(static_cast<Token*>(Tokens::end())) {}

  __device__ bool is_turned(const Destination& p) const { return p.part() < 2 && p.column < 2 * half; }
  __device__ bool is_second(const Destination& p) const { return p.column >= half; }
  __device__ Destination destination_of(int r) const {
    const int part_of_head = r / head_dim, c = r % head_dim;
    return {part_of_head, RopePairs::element(part_of_head % 3 < 2, c, half)};
  }
  __device__ int row(const Destination& p) const { return p.part_of_head * head_dim + p.column; }
  __device__ long row(int r) const { return row(destination_of(r)); }
  __device__ int rows() const { return int(c.args.q.shape[1]) * 3 * head_dim; }
  __device__ int sequence_of(int token) const { return c.q_len == 1 ? token : token / c.q_len; }

  /// A position outside of the table makes the token's rotated elements NaN. A kv_len that the cache has no room for
  /// appends nothing.
  __device__ void normalise() const {
    const auto& a = c.args;
    const int t = int(blockDim.x - 1 - threadIdx.x);  // in the last warp, which has the fewest parts of a row
    int kv_len = 0, position = 0, nth = 0;
    if (t < c.norm.count) {
      const int of = c.norm.first + t, sequence = sequence_of(of);
      kv_len = a.kv_len.data[sequence];
      position = a.positions.data[of];
      nth = of - sequence * c.q_len;
    }
    Tokens::normalise([&] {
      if (t < c.norm.count)  // here, so that the norm does not wait for the two loads
        token_of[t] = {.position = position >= a.cos.shape[0] ? -1 : position,
                       .cache_row = appended_row(AnyCacheView(a.k_cache, a.page_table, {}), a.k_cache.shape[0],
                                                 sequence_of(c.norm.first + t), kv_len, c.q_len, nth)};
    });
  }

  __device__ QkvElement prepare(int t, int r) const {
    const auto& bias = c.args.linear.bias;
    const Destination p = destination_of(r);
    const auto load_bias = [&](int of) { return bias ? load_bits(bias.data, bias.dtype, of) : 0; };
    return {.token = t,
            .to = p,
            .bias = load_bias(row(p)),
            .other_bias = is_turned(p) ? load_bias(is_second(p) ? row(p) - half : row(p) + half) : 0,
            .cos = 1,
            .sin = 0};
  }

  __device__ void begin(QkvElement& e) const {
    const int position = token_of[e.token].position;
    if (!is_turned(e.to) || position < 0) return;
    const long at = long(position) * half + e.to.column - (is_second(e.to) ? half : 0);
    e.cos = c.args.cos.data[at];
    e.sin = c.args.sin.data[at];
  }

  /// Stores one element of q, k or v, and of the cache. `own` and `other` are the sums of the pair's elements. Both are
  /// rounded to T before they are rotated, as linear rounds them where rope is an op of its own.
  __device__ void finish(const QkvElement& e, float own, float other) const {
    const auto& a = c.args;
    const auto rounded = [&](float sum, std::uint32_t bits) {
      if (a.linear.bias) sum += from_bits(bits, a.linear.bias.dtype);
      return to_float(from_float<T>(sum));
    };
    const auto [position, cache_row] = token_of[e.token];
    const Destination& p = e.to;
    float v = rounded(own, e.bias);
    if (is_turned(p)) {
      const float of_pair = rounded(other, e.other_bias);
      float first = is_second(p) ? of_pair : v, second = is_second(p) ? v : of_pair;
      rotate(first, second, e.cos, e.sin);
      v = position < 0 ? NAN : is_second(p) ? second : first;
    }
    const T stored = from_float<T>(v);
    const int of = c.norm.first + e.token, heads = int(a.q.shape[1]);
    void* const out = p.part() == 0 ? a.q.data : p.part() == 1 ? a.k.data : a.v.data;
    static_cast<T*>(out)[long(of * heads + p.head()) * head_dim + p.column] = stored;
    if (p.part() == 0 || cache_row < 0) return;
    void* const cache = p.part() == 1 ? a.k_cache.data : a.v_cache.data;
    const int row = cache_row + p.head() * int(a.k_cache.shape[2]);
    static_cast<T*>(cache)[long(row) * head_dim + p.column] = stored;
  }
};

}  // namespace

Status prepare(const ops::LnQkv::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_ln_qkv_packed(const ops::LnQkv::Args& a, const LnQkvPacked& plan, LaunchList& launches) {
  return launch_packed_of<RopeAndAppend>(a, plan, launches);
}
Status launch_ln_qkv_dense(const ops::LnQkv::Args& a, const LnQkvDense& plan, LaunchList& launches) {
  return launch_dense_of<RopeAndAppend>(a, plan.plan, launches);
}

}  // namespace cf::cuda
