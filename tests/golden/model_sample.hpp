#pragma once
// Small golden files of whole models made on the spot. Their logits are made from a hash and choose the ids, which is
// all that a reader can check.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "golden/file/model_golden.hpp"
#include "tests/golden/golden_sample.hpp"

namespace cf::test {

struct ModelSampleOptions {
  DType dtype = DType::f16;
  std::int64_t top = 0;  // logits of a position; 0 for all
};

/// A golden file's content, for a test to change before it is written.
struct ModelSample {
  golden::ModelGoldenMeta meta;
  Tensor ids;
  std::map<std::string, Tensor> inputs, logits;               // logits by variant; empty where `top` has them
  std::map<std::string, golden::TopLogits> top;               // by variant
  std::map<std::string, std::map<std::string, Tensor>> taps;  // by variant
  std::map<std::string, golden::VariantInfo> variants;
};

/// The `count` largest logits of each row, the largest first, of equal ones the lowest id first.
inline Tensor top_ids(const Tensor& logits, std::int64_t count) {
  const std::int64_t rows = logits.shape()[0], vocab = logits.shape()[1];
  Tensor ids(DType::i32, {rows, count});
  std::vector<std::int32_t> order(std::size_t(vocab), 0);
  for (std::int64_t p = 0; p < rows; ++p) {
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](std::int32_t a, std::int32_t b) {
      const double x = logits.at(p * vocab + a), y = logits.at(p * vocab + b);
      return x != y ? x > y : a < b;
    });
    std::copy_n(order.begin(), count, ids.as<std::int32_t>() + p * count);
  }
  return ids;
}

/// The logits of those ids, and of each row the logarithm of its sum of exponentials.
inline golden::TopLogits top_logits(const Tensor& logits, const Tensor& ids) {
  const std::int64_t rows = ids.shape()[0], count = ids.shape()[1], vocab = logits.shape()[1];
  Tensor values(DType::f64, ids.shape()), sums(DType::f64, {rows});
  for (std::int64_t i = 0; i < ids.size(); ++i)
    values.as<double>()[i] = logits.at(i / count * vocab + ids.as<std::int32_t>()[i]);
  for (std::int64_t i = 0; i < logits.size(); ++i) sums.as<double>()[i / vocab] += std::exp(logits.at(i));
  for (std::int64_t p = 0; p < rows; ++p) sums.as<double>()[p] = std::log(sums.as<double>()[p]);
  return {ids.clone(), values.converted(logits.dtype()), std::move(sums)};
}

inline ModelSample make_model_sample(const ModelSampleOptions& o = {}) {
  ModelConfig c{.name = "small",
                .hidden_size = 16,
                .num_hidden_layers = 2,
                .num_attention_heads = 2,
                .intermediate_size = 24,
                .vocab_size = 20,
                .max_position_embeddings = 16,
                .rotary_dim = 4};
  c.dtype = o.dtype;
  ModelSample s;
  golden::ModelGoldenMeta& m = s.meta;
  m.producer = "the tests";
  m.command = "a 'quoted' command, \xc3\xa9";
  m.versions = "{\"oracle\": \"1\"}";
  m.model = c.name;
  m.config = c;
  m.dtype = o.dtype;
  m.seed = 0xfedcba9876543210;
  m.weights = "procedural";
  m.weights_checksum = weights_checksum(c, procedural_model(c, o.dtype, m.seed).weights);
  m.tokens = 9;
  m.prompt_len = 4;
  m.top = o.top;

  const std::int64_t fed = m.fed(), hidden = c.hidden_size;
  const Tensor reference = procedural_tensor(DType::f64, {fed, c.vocab_size}, "logits", m.seed);
  const Tensor best = top_ids(reference, std::max<std::int64_t>(o.top, 1));
  s.ids = Tensor(DType::i32, {m.tokens});
  for (std::int64_t p = 0; p < fed; ++p)
    s.ids.as<std::int32_t>()[p + 1] =
        p + 1 < m.prompt_len ? std::int32_t(3 * p) : best.as<std::int32_t>()[p * best.shape()[1]];
  for (const char* name : {"cos", "sin"}) s.inputs[name] = procedural_tensor(DType::f32, {fed, 2}, name, m.seed);
  const std::string low = std::string(to_string(o.dtype)) + "_eager";
  for (const std::string& name : {std::string(golden::kReference), low}) {
    const DType dtype = name == low ? o.dtype : DType::f64;
    s.variants[name] = {name, std::string(to_string(dtype)), name == low ? "eager" : "sdpa", "cpu", {}};
    Tensor logits = reference.converted(dtype);
    if (o.top > 0)
      s.top[name] = top_logits(logits, best);
    else
      s.logits[name] = std::move(logits);
    for (const std::string& tap :
         {std::string("embed_in"), golden::layer_output_tap(1), std::string("final_layer_norm")})
      s.taps[name][tap] = procedural_tensor(dtype, {fed, hidden}, tap, m.seed);
  }
  return s;
}

inline Status write_sample(const ModelSample& s, const std::string& path) {
  CF_TRY_ASSIGN(golden::ModelGoldenWriter writer, golden::ModelGoldenWriter::create(path, s.meta));
  if (s.ids) CF_TRY(writer.add_ids(s.ids));
  for (const auto& [name, tensor] : s.inputs) CF_TRY(writer.add_input(name, tensor));
  for (const auto& [variant, logits] : s.logits) CF_TRY(writer.add_logits(s.variants.at(variant), logits));
  for (const auto& [variant, top] : s.top) CF_TRY(writer.add_logits(s.variants.at(variant), top));
  for (const auto& [variant, taps] : s.taps)
    for (const auto& [name, tensor] : taps) CF_TRY(writer.add_tap(s.variants.at(variant), name, tensor));
  return writer.commit();
}

}  // namespace cf::test
