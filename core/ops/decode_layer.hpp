#pragma once
#include "core/model/layer.hpp"

namespace cf::ops {

/// One layer for new tokens of each sequence: every site of for_each_site writes its output to its tensor. With one
/// token a sequence this is a decode step, with more a prefill of each sequence's last tokens. With runs each sequence
/// has as many as its run says.
/// Refuses what its sites refuse, what check_model() refuses, and max_kv_len beyond the model's learned positions.
struct DecodeLayer {
  static constexpr std::string_view name = "decode_layer";
  struct Dims {
    ModelSpec model;
    StepSizes step;
    std::int64_t max_kv_len;
    std::array<WeightFormat, 4> linears{};  // in the order of for_each_linear
  };
  struct Args {
    using Op = DecodeLayer;
    ModelSpec model{};
    LayerWeights weights{};
    LayerTensors t{};
  };

  static Dims dims(const Args& a) {
    const LayerWeights& w = a.weights;
    const StepRows rows = step_rows(a.t.hidden.shape[0], a.t.kv_len.shape[0], a.t.runs);
    return {a.model,
            {rows.batch, rows.q_len, a.t.cos.shape[0], cache_capacity(a.t), rows.mixed, page_sizes(a.t),
             a.t.stream.sinks > 0},
            a.t.max_kv_len,
            {format_of(w.query_key_value.weight), format_of(w.dense.weight), format_of(w.dense_h_to_4h.weight),
             format_of(w.dense_4h_to_h.weight)}};
  }
  template <class A, class F>
  static void tensors(const Dims& d, A& a, F&& f) {
    for_each_activation(d.model.shape, d.step, f, a.t);
    for_each_weight(d.model, a.weights, f);
  }
  static Status check(const Args& a) {
    CF_TRY(check_model(a.model));
    if (const EntryLimit limit = entry_limit(a.model, a.t.max_kv_len, true); a.t.max_kv_len > limit.most)
      return bad_argument(name, "max_kv_len must be at most " + std::to_string(limit.most) + ", " +
                                    std::string(limit.name) + ", got " + std::to_string(a.t.max_kv_len));
    Status status;
    for_each_linear(a.model, a.weights, [&](const Site&, const LinearParams& l, const LinearSize& size) {
      // The cast keeps nvcc from warning that the assignment's result is ignored.
      if (status) (void)(status = Linear::check_linear(name, size.out, size.in, l));
    });
    CF_TRY(status);
    CF_TRY(check_tensors<DecodeLayer>(a));
    if (a.t.runs.empty()) return {};
    return check_row_runs(name, a.t.runs, a.t.kv_len.shape[0], a.t.hidden.shape[0]);
  }
  /// Counts the bytes that any implementation moves: the weights, the cache, and the hidden state read and written. The
  /// tensors between sites are not counted.
  static Cost cost(const Dims& d, DType activation, DType weight) {
    const ModelShape& s = d.model.shape;
    Cost c = Attention::cost({.batch = d.step.batch,
                              .q_len = d.step.q_len,
                              .heads = s.num_heads,
                              .kv_heads = s.num_kv_heads,
                              .head_dim = s.head_dim,
                              .capacity = d.step.capacity,
                              .max_kv_len = d.max_kv_len,
                              .mixed = d.step.mixed,
                              .window = {.keys = d.model.traits.window}},
                             activation, weight);
    // Attention's cost counts q and y. A layer writes the new keys and values instead.
    c.bytes += 2 * double(d.step.tokens()) * double(s.head_dim) * double(s.num_kv_heads - s.num_heads) *
               double(size_bytes(activation));
    c.bytes += 2 * double(d.step.tokens()) * double(s.hidden_size) * double(size_bytes(activation));
    // Gamma, and LayerNorm's beta, of two norms.
    c.bytes +=
        (d.model.traits.norm == NormKind::layernorm ? 4 : 2) * double(s.hidden_size) * double(size_bytes(weight));
    if (s.head_norm) c.bytes += 2 * double(s.head_dim) * double(size_bytes(weight));
    std::size_t i = 0;
    for_each_linear(d.model, LayerWeights{}, [&](const Site&, const LinearParams&, const LinearSize& size) {
      c.bytes += d.linears[i++].bytes(size.out, size.in, weight);
      if (size.has_bias) c.bytes += double(size.out) * double(size_bytes(weight));
      c.flops += 2 * double(d.step.tokens()) * double(size.out) * double(size.in);
    });
    return c;
  }
  /// To first order each site passes on the relative error of its input and adds its own. `condition` is the sum over
  /// the sites of their conditions times sqrt(terms), as cpu_ref::condition() measures it.
  static Budget budget(const Dims& d, Precision p, Condition c = {}) {
    Budget b = reduction_budget(1, p, c);
    const double stores = double(names_of(d.model).sites().size() - 1) * unit_roundoff(p.output);
    return b += {stores, stores};
  }
};

}  // namespace cf::ops
