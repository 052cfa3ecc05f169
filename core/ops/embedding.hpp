#pragma once
#include "core/contract.hpp"

namespace cf::ops {

/// y[t, :] = table[ids[t], :], widened or rounded to the activation's dtype.
/// Source: transformers GPTNeoXModel.embed_in (torch.nn.Embedding).
/// Refuses ids outside 0 .. vocab - 1 where they can be read on the host.
struct Embedding {
  static constexpr std::string_view name = "embedding";
  struct Dims {
    std::int64_t tokens, vocab, hidden;
  };
  struct Args {
    using Op = Embedding;
    View<const std::int32_t, 1> ids{};  // (tokens)
    ConstAnyView<2> table{};            // (vocab, hidden)
    AnyView<2> y{};                     // (tokens, hidden)
  };

  static Dims dims(const Args& a) { return {a.ids.shape[0], a.table.shape[0], a.table.shape[1]}; }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::token_id, "ids"}, a.ids, extents(d.tokens));
    f(TensorSpec{Role::weight, "table"}, a.table, extents(d.vocab, d.hidden));
    f(TensorSpec{Role::output, "y"}, a.y, extents(d.tokens, d.hidden));
  }
  static Status check(const Args& a) { return check_tensors<Embedding>(a); }
  static Cost cost(const Dims& d, DType activation, DType weight) {
    const double n = double(d.tokens) * double(d.hidden);
    return {n * double(size_bytes(weight) + size_bytes(activation)) + 4 * double(d.tokens), 0};
  }
  static Budget budget(const Dims&, Precision p, Condition = {}) {
    return {unit_roundoff(p.output), unit_roundoff(p.output)};
  }
};

}  // namespace cf::ops
