#include "cuda/ops/ln_qkv/ln_qkv.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"

namespace cf::cuda {
namespace {

/// An element of the product, and the bits of its bias.
struct HeadElement {
  int token, row;
  std::uint32_t bias;
};

/// A block's normalised tokens, and where the product's elements go. The weight's rows are the heads of q, then of k,
/// then of v.
template <class T, int Warps>
struct ByHead : NormalisedTokens<T, Warps> {
  using Call = LnQkvCall<ops::LnQkvHeads::Args>;

  const Call& c;

  __device__ ByHead(const Call& call, char* smem) : NormalisedTokens<T, Warps>(call.norm, smem), c(call) {}

  __device__ void normalise() const {
    NormalisedTokens<T, Warps>::normalise([] {});
  }
  __device__ long row(int r) const { return r; }
  __device__ int rows() const { return int(c.args.q.shape[1] + 2 * c.args.k.shape[1]) * int(c.args.q.shape[3]); }

  __device__ HeadElement prepare(int t, int r) const {
    const auto& bias = c.args.linear.bias;
    return {.token = t, .row = r, .bias = bias ? load_bits(bias.data, bias.dtype, r) : 0};
  }
  __device__ void begin(HeadElement&) const {}

  __device__ void finish(const HeadElement& e, float sum, float) const {
    const auto& a = c.args;
    if (a.linear.bias) sum += from_bits(e.bias, a.linear.bias.dtype);
    const int head_dim = int(a.q.shape[3]), heads = int(a.q.shape[1]), kv_heads = int(a.k.shape[1]);
    const int block = e.row / head_dim;
    const bool is_q = block < heads, is_k = !is_q && block < heads + kv_heads;
    const int head = is_q ? block : is_k ? block - heads : block - heads - kv_heads;
    const int token = c.norm.first + e.token, sequence = token / c.q_len;
    void* const to = is_q ? a.q.data : is_k ? a.k.data : a.v.data;
    const long of_head = long(sequence * (is_q ? heads : kv_heads) + head) * c.q_len + token % c.q_len;
    static_cast<T*>(to)[of_head * head_dim + e.row % head_dim] = from_float<T>(sum);
  }
};

}  // namespace

Status prepare(const ops::LnQkvHeads::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_ln_qkv_heads_packed(const ops::LnQkvHeads::Args& a, const LnQkvPacked& plan, LaunchList& launches) {
  return launch_packed_of<ByHead>(a, plan, launches);
}
Status launch_ln_qkv_heads_dense(const ops::LnQkvHeads::Args& a, const LnQkvDense& plan, LaunchList& launches) {
  return launch_dense_of<ByHead>(a, plan.plan, launches);
}

}  // namespace cf::cuda
