#include "cuda/ln_qkv.cuh"

namespace cf::cuda {
namespace {

/// Where an element of the product goes, for the product's rows in their own order: a head's elements that RoPE turns
/// lie in pairs, first and second half side by side, so that one tile holds both.
struct Place {
  int head, part, column;  // part 0, 1, 2: q, k, v
  int pair;                // of the cosines; -1: not turned
  bool second;             // of the pair

  __device__ Place(int r, int head_dim, int half) {
    const int c = r % head_dim, block = r / head_dim;
    head = block / 3;
    part = block % 3;
    const bool turned = part < 2 && c < 2 * half;
    pair = turned ? c / 2 : -1;
    second = turned && c % 2;
    column = turned ? pair + (second ? half : 0) : c;
  }
  __device__ int row(int head_dim) const { return (head * 3 + part) * head_dim + column; }
};

/// What becomes of an element of the product: its own bias and that of the other of its pair, as they lie in memory,
/// and the pair's angle.
struct Begun {
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
    int position, sequence, entry;
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

  __device__ Place place(int r) const { return {r, head_dim, half}; }
  __device__ long row(int r) const { return place(r).row(head_dim); }
  __device__ int rows() const { return int(c.args.q.shape[1]) * 3 * head_dim; }

  /// A position outside the table makes a token's turned elements NaN, a kv_len that the cache has no room for appends
  /// nothing.
  __device__ void normalise() const {
    const auto& a = c.args;
    const int q_len = int(a.x.shape[0]) / int(a.kv_len.shape[0]);
    const int t = int(blockDim.x - 1 - threadIdx.x);  // the last warp has the fewest parts
    const int of = c.norm.first + t, sequence = of / q_len;
    int kv_len = 0, position = 0;
    if (t < c.norm.count) {
      kv_len = a.kv_len.data[sequence];
      position = a.positions.data[of];
    }
    Tokens::normalise();
    if (t < c.norm.count)  // not before: nothing of the norm waits for the two loads
      token_of[t] = {.position = position >= a.cos.shape[0] ? -1 : position,
                     .sequence = sequence,
                     .entry = kv_len < q_len || kv_len > a.k_cache.shape[2] ? -1 : kv_len - q_len + of % q_len};
    __syncthreads();
  }

  __device__ Begun begin(int t, int r) const {
    const Place p = place(r);
    const auto& bias = c.args.linear.bias;
    const int row = p.row(head_dim);
    Begun b{.bias = bias ? load_bits(bias.data, bias.dtype, row) : 0, .other_bias = 0, .cos = 1, .sin = 0};
    if (p.pair < 0) return b;
    if (bias) b.other_bias = load_bits(bias.data, bias.dtype, p.second ? row - half : row + half);
    if (const int position = token_of[t].position; position >= 0) {
      b.cos = c.args.cos.data[long(position) * half + p.pair];
      b.sin = c.args.sin.data[long(position) * half + p.pair];
    }
    return b;
  }

  /// Stores one element of q, k or v, and of the cache; `other` is the sum of the other of its pair. Each is rounded to
  /// T before it is turned, as where linear stores it for rope.
  __device__ void finish(int t, int r, float own, float other, const Begun& begun) const {
    const auto& a = c.args;
    const int heads = int(a.q.shape[1]);
    const Place p = place(r);
    const auto rounded = [&](float sum, std::uint32_t bits) {
      if (a.linear.bias) sum += from_bits(bits, a.linear.bias.dtype);
      return to_float(from_float<T>(sum));
    };
    const auto [position, sequence, entry] = token_of[t];
    float v = rounded(own, begun.bias);
    if (p.pair >= 0) {
      const float of_pair = rounded(other, begun.other_bias);
      float first = p.second ? of_pair : v, second = p.second ? v : of_pair;
      rotate(first, second, begun.cos, begun.sin);
      v = position < 0 ? NAN : p.second ? second : first;
    }
    const T stored = from_float<T>(v);
    const long of = c.norm.first + t;
    void* const out = p.part == 0 ? a.q.data : p.part == 1 ? a.k.data : a.v.data;
    static_cast<T*>(out)[(of * heads + p.head) * head_dim + p.column] = stored;
    if (p.part == 0 || entry < 0) return;
    void* const cache = p.part == 1 ? a.k_cache.data : a.v_cache.data;
    static_cast<T*>(cache)[(long(sequence * heads + p.head) * a.k_cache.shape[2] + entry) * head_dim + p.column] =
        stored;
  }
};

}  // namespace

Status run(const ops::LnQkv::Args& a, Context& context) {
  CF_TRY(check_call(a, context));
  const auto d = ops::LnQkv::dims(a);
  return run_ln_qkv<RopeAndAppend>(a, {d.head_dim, d.rotary_dim}, context);
}

}  // namespace cf::cuda
