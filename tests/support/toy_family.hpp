#pragma once
// A family of models of two sites, which shows what a new one needs: sizes, weights, tensors and a walk. No backend
// knows of it.
#include <vector>

#include "core/families/site.hpp"
#include "core/ops/layernorm.hpp"
#include "core/ops/linear.hpp"
#include "core/procedural.hpp"
#include "core/tensor_spec.hpp"

namespace cf::test {

struct ToySpec {
  std::int64_t hidden_size = 0;
  double norm_eps = 1e-5;
};

struct ToyWeights {
  NormParams norm{};
  LinearParams linear{};  // (hidden, hidden)
};

struct ToyTensors {
  ConstAnyView<2> x{};            // (tokens, hidden)
  AnyView<2> normed{}, output{};  // (tokens, hidden)
};

namespace toy_site {
inline constexpr Site norm{"norm", "normed"}, linear{"linear", "output"};
}  // namespace toy_site

/// output = x + norm(x) W^T + b: calls f(site, args) for both sites in order and stops at the first Status that is not
/// ok.
template <class F>
Status for_each_toy_site(const ToySpec& m, const ToyWeights& w, const ToyTensors& t, F&& f) {
  CF_TRY(f(toy_site::norm, ops::LayerNorm::Args{.x = t.x, .norm = w.norm, .y = t.normed, .eps = m.norm_eps}));
  return f(toy_site::linear,
           ops::Linear::Args{
               .x = t.normed, .linear = w.linear, .residual = t.x, .y = t.output, .epilogue = ops::Epilogue::residual});
}

/// Calls f(spec, view, shape) for every tensor.
template <class F>
void for_each_toy_tensor(const ToySpec& m, std::int64_t tokens, ToyWeights& w, ToyTensors& t, F&& f) {
  const std::int64_t h = m.hidden_size;
  f(TensorSpec{Role::input, "x"}, t.x, extents(tokens, h));
  ops::LayerNorm::norm_tensors({tokens, h}, w.norm, f);
  ops::Linear::linear_tensors(h, h, w.linear, f);
  f(TensorSpec{Role::output, "normed"}, t.normed, extents(tokens, h));
  f(TensorSpec{Role::output, "output"}, t.output, extents(tokens, h));
}

/// A model of the family on the host, its numbers procedural and exact in 16 bits; activations are of one dtype,
/// weights of another.
struct ToyModel {
  ToySpec spec;
  std::int64_t tokens;
  ToyWeights weights{};
  ToyTensors tensors{};
  std::vector<Tensor> storage{};  // in the order of for_each_toy_tensor

  ToyModel(const ToySpec& m, std::int64_t n, DType activation, DType weight) : spec(m), tokens(n) {
    for_each_toy_tensor(spec, tokens, weights, tensors, [&](const TensorSpec& t, auto& view, auto shape) {
      // Activations have values that `weight` holds exactly, whatever their own dtype: oracle and device get the same.
      Tensor made(weight, Shape(shape.begin(), shape.end()));
      const ProceduralKind kind = t.role == Role::gain ? ProceduralKind::gain
                                  : is_weight(t.role)  ? ProceduralKind::weight
                                                       : ProceduralKind::activation;
      fill_procedural(made.data(), made.dtype(), 0, made.size(), kind, 3, t.name);
      if (!is_weight(t.role)) made = made.converted(activation);
      point(view, made.data(), shape, made.dtype());
      storage.push_back(std::move(made));
    });
  }
};

}  // namespace cf::test
