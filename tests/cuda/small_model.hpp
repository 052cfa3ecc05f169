#pragma once
// Small models on the GPU and what the oracle makes of the same, for tests of whole models.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/compare.hpp"
#include "core/model/decoder.hpp"
#include "core/procedural.hpp"
#include "cpu_ref/model.hpp"
#include "cuda/serve/model.hpp"
#include "tests/cuda/device_tensors.hpp"
#include "tests/support/setups.hpp"
#include "tests/support/taken.hpp"

namespace cf::test {

using cuda::Impl;
using cuda::Model;
using Ids = std::vector<std::int32_t>;

inline constexpr std::int64_t kVocab = 333;  // rows of logits begin at addresses that are no multiple of 16 bytes

inline ModelConfig small_config(std::int64_t layers = 3) {
  ModelConfig m = model_of(4, 64, 16, 512);
  m.name = "small";
  m.num_hidden_layers = layers;
  m.vocab_size = kVocab;
  m.max_position_embeddings = 96;
  return m;
}

/// The same with RMSNorm, SwiGLU and separate q, k and v, three query heads for each kv head. Its heads do not make up
/// hidden_size.
inline ModelConfig gated_config(ModelType type = ModelType::llama) {
  ModelConfig m = gated_model_of(type, 6, 2, 64, 256, 320);
  m.name = "gated";
  m.num_hidden_layers = 3;
  m.vocab_size = kVocab;
  m.max_position_embeddings = 96;
  m.tie_word_embeddings = type == ModelType::llama;
  m.rope_scaling = {.kind = ops::RopeScaling::Kind::llama3,
                    .factor = 8,
                    .low_freq_factor = 1,
                    .high_freq_factor = 4,
                    .original_max_positions = 32};
  return m;
}

/// A small model with its weights on the host.
struct Small {
  ModelConfig config;
  std::shared_ptr<OwnedModelWeights> weights;

  explicit Small(DType dtype = DType::f16, WeightFormat linears = {}, ModelConfig m = small_config())
      : config(m), weights(std::make_shared<OwnedModelWeights>(procedural_model(m, dtype, 7, linears))) {}

  Result<std::unique_ptr<Model>> try_model(const Model::Options& o) const {
    return Model::create(context(), config.name, config, weights->weights, o);
  }
  std::unique_ptr<Model> model(const Model::Options& o = {.capacity = 96}) const { return taken(try_model(o)); }
  Decoder decoder(const Model::Options& o) const { return Decoder(model(o)); }
};

inline Ids ids_of(std::int64_t count, std::uint64_t seed) {
  Tensor t(DType::f32, {count});
  fill_procedural(t.data(), DType::f32, 0, count, ProceduralKind::activation, seed, "ids");
  Ids ids;
  for (std::int64_t i = 0; i < count; ++i) ids.push_back(std::int32_t(std::abs(t.at(i)) * 1000) % kVocab);
  return ids;
}

/// The oracle's logits behind every id, (ids, vocab), and the bound of a GPU's error from them.
struct Reference {
  Tensor logits;
  Budget budget;
};

inline Reference reference_of(const Small& small, const Ids& ids) {
  const auto n = std::int64_t(ids.size());
  const auto oracle = taken(cpu_ref::Model::create(small.config, small.weights->weights, small.weights,
                                                   {.capacity = n, .chunk = n, .activation = DType::f64}));
  Condition condition{0, 0};
  oracle->measure(&condition);
  Reference r{.logits = Tensor(DType::f64, {n, kVocab}), .budget = {}};
  require_ok(oracle->forward(0, 0, ids, r.logits.view<2>()));
  r.budget = model_budget(small.config, small.weights->weights.embed_in.dtype, condition);
  return r;
}

/// Compares rows of logits with the oracle's rows from `first` on.
inline void check_rows(const Tensor& ours, const Reference& reference, std::int64_t first) {
  Tensor theirs(DType::f64, ours.shape());
  std::copy_n(reference.logits.as<double>() + first * kVocab, theirs.size(), theirs.as<double>());
  const auto error = compare(ours, theirs);
  REQUIRE(error);
  CAPTURE(first, error->rel_l2, error->rel_max, reference.budget.rel_l2, reference.budget.rel_max);
  CHECK(error->within(reference.budget));
}

/// A slot's logits as one row.
inline Tensor row_of(ModelRunner& runner, std::int64_t slot) {
  const Tensor row = taken(runner.logits(slot));
  Tensor matrix(row.dtype(), {1, kVocab});
  std::memcpy(matrix.data(), row.data(), std::size_t(row.size_bytes()));
  return matrix;
}

inline std::string bits(const Tensor& t) { return {static_cast<const char*>(t.data()), std::size_t(t.size_bytes())}; }

}  // namespace cf::test
