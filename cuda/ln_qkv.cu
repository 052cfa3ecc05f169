#include "cuda/ln_qkv.cuh"

namespace cf::cuda {
namespace {

/// Where an element of the product goes. The product's rows are in an order of their own: a head's elements that RoPE
/// turns lie in pairs, first and second half side by side, so that one tile holds both.
struct Place {
  int part_of_head, column;  // 3 * head + 0, 1, 2: its q, k, v
  __device__ int head() const { return part_of_head / 3; }
  __device__ int part() const { return part_of_head % 3; }
};

/// An element of the product: its token and place, its own bias and that of the other of its pair, as they lie in
/// memory, and the pair's angle.
struct QkvElement {
  int token;
  Place place;
  std::uint32_t bias, other_bias;
  float cos, sin;
};

/// A block's normalised tokens, and what its epilogues need of each.
template <class T, int Warps>
struct RopeAndAppend : NormalisedTokens<T, Warps> {
  using Tokens = NormalisedTokens<T, Warps>;
  using Call = LnQkvCall<ops::LnQkv::Args>;

  /// Of a token: its row in the table, or -1; its entry of its sequence's cache, or -1.
  struct Token {
    int position, entry;
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

  __device__ bool is_turned(const Place& p) const { return p.part() < 2 && p.column < 2 * half; }
  __device__ bool is_second(const Place& p) const { return p.column >= half; }
  __device__ Place place_of(int r) const {
    const Place in_order{.part_of_head = r / head_dim, .column = r % head_dim};
    if (!is_turned(in_order)) return in_order;
    return {in_order.part_of_head, in_order.column / 2 + in_order.column % 2 * half};
  }
  __device__ int row(const Place& p) const { return p.part_of_head * head_dim + p.column; }
  __device__ long row(int r) const { return row(place_of(r)); }
  __device__ int rows() const { return int(c.args.q.shape[1]) * 3 * head_dim; }
  __device__ int sequence_of(int token) const { return c.q_len == 1 ? token : token / c.q_len; }

  /// A position outside the table makes a token's turned elements NaN, a kv_len that the cache has no room for appends
  /// nothing.
  __device__ void normalise() const {
    const auto& a = c.args;
    const int t = int(blockDim.x - 1 - threadIdx.x);  // the last warp has the fewest parts
    int kv_len = 0, position = 0, after = 0;
    if (t < c.norm.count) {
      const int of = c.norm.first + t, sequence = sequence_of(of);
      kv_len = a.kv_len.data[sequence];
      position = a.positions.data[of];
      after = of - (sequence + 1) * c.q_len;
    }
    Tokens::normalise([&] {
      if (t < c.norm.count)  // not before: nothing of the norm waits for the two loads
        token_of[t] = {.position = position >= a.cos.shape[0] ? -1 : position,
                       .entry = kv_len < c.q_len || kv_len > a.k_cache.shape[2] ? -1 : kv_len + after};
    });
  }

  __device__ QkvElement prepare(int t, int r) const {
    const auto& bias = c.args.linear.bias;
    const Place p = place_of(r);
    const auto load_bias = [&](int of) { return bias ? load_bits(bias.data, bias.dtype, of) : 0; };
    return {.token = t,
            .place = p,
            .bias = load_bias(row(p)),
            .other_bias = is_turned(p) ? load_bias(is_second(p) ? row(p) - half : row(p) + half) : 0,
            .cos = 1,
            .sin = 0};
  }

  __device__ void begin(QkvElement& e) const {
    const int position = token_of[e.token].position;
    if (!is_turned(e.place) || position < 0) return;
    const long at = long(position) * half + e.place.column - (is_second(e.place) ? half : 0);
    e.cos = c.args.cos.data[at];
    e.sin = c.args.sin.data[at];
  }

  /// Stores one element of q, k or v, and of the cache; `other` is the sum of the other of its pair. Each is rounded to
  /// T before it is turned, as where linear stores it for rope.
  __device__ void finish(const QkvElement& e, float own, float other) const {
    const auto& a = c.args;
    const auto rounded = [&](float sum, std::uint32_t bits) {
      if (a.linear.bias) sum += from_bits(bits, a.linear.bias.dtype);
      return to_float(from_float<T>(sum));
    };
    const auto [position, entry] = token_of[e.token];
    const Place& p = e.place;
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
    if (p.part() == 0 || entry < 0) return;
    void* const cache = p.part() == 1 ? a.k_cache.data : a.v_cache.data;
    const long first_entry = long(sequence_of(of) * heads + p.head()) * a.k_cache.shape[2];
    static_cast<T*>(cache)[(first_entry + entry) * head_dim + p.column] = stored;
  }
};

}  // namespace

Status run(const ops::LnQkv::Args& a, Context& context) {
  CF_TRY(check_call(a, context));
  const auto d = ops::LnQkv::dims(a);
  return run_ln_qkv<RopeAndAppend>(a, {d.head_dim, d.rotary_dim}, context);
}

}  // namespace cf::cuda
