#pragma once
#include "core/contract.hpp"

namespace cf::ops {

/// Writes the keys and values of each sequence's q_len new tokens behind its old ones:
///   k_cache[b, h, kv_len[b] - q_len + i, :] = k[b * q_len + i, h, :], and v likewise,
/// for every kv head h. kv_len counts the entries that are valid after the append. The rest of the cache keeps its
/// bits. Keys are stored after RoPE.
/// Source: transformers' DynamicCache.update.
/// Refuses tokens that batch does not divide, and kv_len outside q_len .. capacity where the host can read it.
struct KvAppend {
  static constexpr std::string_view name = "kv_append";
  struct Dims {
    std::int64_t batch, q_len, kv_heads, head_dim, capacity;
  };
  struct Args {
    using Op = KvAppend;
    ConstAnyView<3> k{}, v{};              // (batch * q_len, kv_heads, head_dim)
    View<const std::int32_t, 1> kv_len{};  // (batch)
    AnyView<4> k_cache{}, v_cache{};       // (batch, kv_heads, capacity, head_dim)
  };

  static Dims dims(const Args& a) {
    const std::int64_t batch = a.kv_len.shape[0];
    return {batch, batch > 0 ? a.k.shape[0] / batch : 0, a.k.shape[1], a.k.shape[2], a.k_cache.shape[2]};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::input, "k"}, a.k, extents(d.batch * d.q_len, d.kv_heads, d.head_dim));
    f(TensorSpec{Role::input, "v"}, a.v, extents(d.batch * d.q_len, d.kv_heads, d.head_dim));
    f(TensorSpec{Role::length, "kv_len"}, a.kv_len, extents(d.batch));
    f(TensorSpec{Role::state, "k_cache"}, a.k_cache, extents(d.batch, d.kv_heads, d.capacity, d.head_dim));
    f(TensorSpec{Role::state, "v_cache"}, a.v_cache, extents(d.batch, d.kv_heads, d.capacity, d.head_dim));
  }
  static Status check(const Args& a) {
    CF_TRY(check_tensors<KvAppend>(a));
    const Dims d = dims(a);
    return check_q_len(name, d.q_len, d.capacity);
  }
  static Cost cost(const Dims& d, DType activation, DType) {
    const double elements = double(d.batch * d.q_len * d.kv_heads * d.head_dim);
    return {4 * elements * double(size_bytes(activation)) + 4 * double(d.batch), 0};
  }
  /// A copy: the bits are the input's.
  static Budget budget(const Dims&, Precision, Condition = {}) { return {}; }

  /// Refuses more new tokens than the cache has room for.
  static Status check_q_len(std::string_view op, std::int64_t q_len, std::int64_t capacity) {
    if (q_len <= capacity) return {};
    return bad_argument(
        op, "q_len must be at most capacity " + std::to_string(capacity) + ", got " + std::to_string(q_len));
  }
};

}  // namespace cf::ops
