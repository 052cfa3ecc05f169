#pragma once
#include "core/contract.hpp"

namespace cf::ops {

/// y[t, :] = table[ids[t], :], and with a table of learned positions + position_table[positions[t], :]. The sum is
/// float32 or wider; y is rounded once.
/// Source: transformers GPTNeoXModel.embed_in (torch.nn.Embedding), GPT2Model.wte and wpe.
/// Refuses ids outside 0 .. vocab - 1 and positions outside their table where they can be read on the host.
struct Embedding {
  static constexpr std::string_view name = "embedding";
  struct Dims {
    std::int64_t tokens, vocab, hidden;
    std::int64_t position_rows = 0;  // 0: no table of positions
  };
  struct Args {
    using Op = Embedding;
    View<const std::int32_t, 1> ids{};        // (tokens)
    ConstAnyView<2> table{};                  // (vocab, hidden)
    ConstAnyView<2> position_table{};         // (position_rows, hidden), or empty
    View<const std::int32_t, 1> positions{};  // (tokens), read with a position_table alone
    AnyView<2> y{};                           // (tokens, hidden)
  };

  static Dims dims(const Args& a) {
    return {a.ids.shape[0], a.table.shape[0], a.table.shape[1], a.position_table.shape[0]};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    f(TensorSpec{Role::token_id, "ids"}, a.ids, extents(d.tokens));
    f(TensorSpec{Role::weight, "table"}, a.table, extents(d.vocab, d.hidden));
    if (d.position_rows > 0) {
      f(TensorSpec{Role::weight, "position_table"}, a.position_table, extents(d.position_rows, d.hidden));
      f(TensorSpec{Role::position, "positions"}, a.positions, extents(d.tokens));
    }
    f(TensorSpec{Role::output, "y"}, a.y, extents(d.tokens, d.hidden));
  }
  static Status check(const Args& a) { return check_tensors<Embedding>(a); }
  static Cost cost(const Dims& d, DType activation, DType weight) {
    const double n = double(d.tokens) * double(d.hidden);
    const Cost one{n * double(size_bytes(weight) + size_bytes(activation)) + 4 * double(d.tokens), 0};
    if (d.position_rows == 0) return one;
    return {one.bytes + n * double(size_bytes(weight)) + 4 * double(d.tokens), n};
  }
  static Budget budget(const Dims& d, Precision p, Condition c = {}) {
    if (d.position_rows > 0) return reduction_budget(2, p, c);
    return {unit_roundoff(p.output), unit_roundoff(p.output)};
  }
};

}  // namespace cf::ops
