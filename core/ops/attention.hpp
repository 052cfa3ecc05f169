#pragma once
#include "core/contract.hpp"

namespace cf::ops {

/// Causal attention of q_len new tokens over each sequence's cache, which holds their keys and values already:
///   n = kv_len[b] - q_len + i + 1                             keys that query i sees
///   s[j] = scale * q[b * q_len + i, h, :] . k_cache[b, h, j, :]   for j < n
///   y[b * q_len + i, h, :] = sum_j softmax(s)[j] * v_cache[b, h, j, :]
/// The softmax is float32 or wider, whatever the dtype. Cache entries at kv_len[b] and beyond are never read.
/// Source: Vaswani et al. 2017 (arXiv:1706.03762); transformers' GPTNeoXAttention, sdpa.
/// Refuses scale <= 0, tokens that batch does not divide, max_kv_len beyond capacity, and kv_len outside
/// q_len .. max_kv_len where it can be read on the host.
struct Attention {
  static constexpr std::string_view name = "attention";
  struct Dims {
    std::int64_t batch, q_len, heads, head_dim, capacity, max_kv_len;
  };
  struct Args {
    using Op = Attention;
    ConstAnyView<3> q{};                   // (batch * q_len, heads, head_dim)
    ConstAnyView<4> k_cache{}, v_cache{};  // (batch, heads, capacity, head_dim)
    View<const std::int32_t, 1> kv_len{};  // (batch)
    AnyView<3> y{};                        // (batch * q_len, heads, head_dim)
    double scale = 1;
    std::int64_t max_kv_len = 0;  // no kv_len[b] is larger; plans are made from it, since kv_len may be on a device
  };

  static Dims dims(const Args& a) {
    const std::int64_t batch = a.kv_len.shape[0];
    return {batch, batch > 0 ? a.q.shape[0] / batch : 0, a.q.shape[1], a.q.shape[2], a.k_cache.shape[2], a.max_kv_len};
  }
  static std::pair<Dims, Args> example(const ModelConfig& m, const Workload& w) {
    return {{w.batch, w.q_len, m.num_attention_heads, m.head_dim(), w.cache_capacity(), w.kv_len},
            {.scale = m.attention_scale(), .max_kv_len = w.kv_len}};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(Role::input, "q", a.q, extents(d.batch * d.q_len, d.heads, d.head_dim));
    f(Role::input, "k_cache", a.k_cache, extents(d.batch, d.heads, d.capacity, d.head_dim));
    f(Role::input, "v_cache", a.v_cache, extents(d.batch, d.heads, d.capacity, d.head_dim));
    f(Role::index, "kv_len", a.kv_len, extents(d.batch));
    f(Role::output, "y", a.y, extents(d.batch * d.q_len, d.heads, d.head_dim));
  }
  static Status check(const Args& a) {
    CF_TRY(check_tensors<Attention>(a));
    const Dims d = dims(a);
    if (!(a.scale > 0)) return bad_argument(name, "scale must be positive, got " + std::to_string(a.scale));
    if (a.max_kv_len < d.q_len || a.max_kv_len > d.capacity)
      return bad_argument(name, "max_kv_len must be q_len " + std::to_string(d.q_len) + " to capacity " +
                                    std::to_string(d.capacity) + ", got " + std::to_string(a.max_kv_len));
    return {};
  }
  /// Counts max_kv_len entries a sequence, those that are read; causality spares a prefill part of the flops.
  static Cost cost(const Dims& d, DType activation, DType) {
    const double rows = double(d.batch * d.heads), q = double(d.q_len), kv = double(d.max_kv_len),
                 hd = double(d.head_dim);
    return {rows * hd * (2 * kv + 2 * q) * double(size_bytes(activation)) + 4 * double(d.batch),
            4 * rows * hd * q * (kv - (q - 1) / 2)};
  }
  static Budget budget(const Dims& d, Precision p, Condition c = {}) { return reduction_budget(d.max_kv_len, p, c); }
};

}  // namespace cf::ops
