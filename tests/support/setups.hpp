#pragma once
// The table that every op is tested over: model shapes, workloads, dtypes and kinds of input.
#include <ostream>
#include <vector>

#include "tests/support/op_problem.hpp"

namespace cf::test {

/// A layer of `heads` heads: head_dim and rotary_dim are what matters, the rest is kept small.
inline ModelConfig model_of(std::int64_t heads, std::int64_t head_dim, std::int64_t rotary_dim,
                            std::int64_t intermediate) {
  ModelConfig m;
  m.name = std::to_string(heads) + " heads of " + std::to_string(head_dim);
  m.hidden_size = heads * head_dim;
  m.num_hidden_layers = 1;
  m.num_attention_heads = heads;
  m.intermediate_size = intermediate;
  m.vocab_size = 37;
  m.max_position_embeddings = 64;
  m.rotary_dim = rotary_dim;
  return m;
}

/// The same with the arithmetic of a model type beside GPT-NeoX: RMSNorm, SwiGLU, separate q, k and v, RoPE over the
/// whole head. The heads need not make up hidden_size.
inline ModelConfig gated_model_of(ModelType type, std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim,
                                  std::int64_t hidden, std::int64_t intermediate) {
  ModelConfig m = model_of(heads, head_dim, head_dim, intermediate);
  m.model_type = type;
  m.name = std::string(to_string(type)) + " of " + m.name;
  m.hidden_size = hidden;
  m.num_key_value_heads = kv_heads;
  m.attention_head_dim = head_dim;
  m.use_parallel_residual = false;
  m.attention_bias = type == ModelType::qwen2;
  m.mlp_bias = false;
  m.hidden_act = Activation::swiglu;
  return m;
}

/// GPT-2: learned positions and no RoPE.
inline ModelConfig learned_model_of(std::int64_t heads, std::int64_t head_dim, std::int64_t intermediate) {
  ModelConfig m = model_of(heads, head_dim, 0, intermediate);
  m.model_type = ModelType::gpt2;
  m.name = "gpt2 of " + m.name;
  m.use_parallel_residual = false;
  m.hidden_act = Activation::gelu_tanh;
  return m;
}

/// The sizes of a Linear's call, with Args that hold its epilogue.
inline ops::Example<ops::Linear> linear_example(std::int64_t tokens, std::int64_t in, std::int64_t out,
                                                ops::Epilogue epilogue = ops::Epilogue::none) {
  return {{tokens, in, out, epilogue == ops::Epilogue::residual, {}, ops::rows_of_output(epilogue)},
          {.epilogue = epilogue}};
}

/// Every epilogue.
inline constexpr ops::Epilogue kEpilogues[] = {ops::Epilogue::none, ops::Epilogue::gelu_erf, ops::Epilogue::gelu_tanh,
                                               ops::Epilogue::residual, ops::Epilogue::swiglu};

inline std::string describe(const Setup& s) {
  const char* fills[] = {"normal", "heavy-tailed", "peaked", "shifted"};
  return s.model.name + (s.kv_heads ? ", " + std::to_string(s.kv_heads) + " kv heads" : "") + ", rotary " +
         std::to_string(s.model.rotary_dim) + ", batch " + std::to_string(s.load.batch) + ", q_len " +
         std::to_string(s.load.q_len) + (s.runs.empty() ? "" : " or fewer") + ", kv_len " +
         std::to_string(s.load.kv_len) + ", capacity " + std::to_string(s.load.cache_capacity()) + ", activation " +
         std::string(to_string(s.activation)) + ", weight " + std::string(to_string(s.weight)) + ", " +
         fills[int(s.fill)] +
         (s.gptq.bits
              ? ", GPTQ of " + std::to_string(s.gptq.bits) + " bits, group " + std::to_string(s.gptq.group_size) +
                    ", offset " + std::to_string(s.gptq.zero_offset) + (s.gptq.desc_act ? ", desc_act" : "")
              : "") +
         (s.model.use_parallel_residual ? "" : ", sequential") +
         (s.model.hidden_act == Activation::gelu_erf ? "" : ", tanh");
}

/// The setups for activations of one dtype.
inline std::vector<Setup> setups(DType activation) {
  std::vector<Setup> all;
  const ModelConfig usual = model_of(2, 80, 20, 200);
  // Every head size, an odd one with it, and rotary_dim from 2 to all of head_dim.
  for (const ModelConfig& m : {model_of(3, 6, 2, 13), model_of(4, 32, 8, 96), model_of(2, 64, 64, 136), usual,
                               model_of(2, 96, 24, 88), model_of(2, 128, 32, 120), model_of(1, 256, 64, 72)})
    all.push_back({.model = m, .load = {.batch = 1, .q_len = 1, .kv_len = 17, .capacity = 19}});
  // Decode at lengths around tile sizes, of one sequence and of several of different lengths; steps of several tokens,
  // with and without old entries.
  for (const Workload& load :
       {Workload{1, 1, 1, 0}, Workload{1, 1, 2, 2}, Workload{3, 1, 31, 40}, Workload{2, 1, 32, 32},
        Workload{1, 1, 33, 64}, Workload{1, 1, 127, 0}, Workload{2, 1, 128, 130}, Workload{1, 1, 129, 0},
        Workload{1, 1, 2047, 2048}, Workload{1, 1, 2048, 0}, Workload{1, 5, 9, 12}, Workload{3, 4, 17, 20},
        Workload{2, 9, 9, 9}, Workload{17, 1, 5, 0}})
    all.push_back({.model = usual, .load = load});
  for (Fill fill : {Fill::heavy_tailed, Fill::peaked, Fill::shifted})
    all.push_back({.model = usual, .load = {.batch = 2, .q_len = 1, .kv_len = 65}, .fill = fill});
  for (DType weight : {DType::bf16, DType::f32})
    all.push_back({.model = usual, .load = {.batch = 2, .q_len = 2, .kv_len = 7}, .weight = weight});
  ModelConfig other = usual;
  other.use_parallel_residual = false;
  other.hidden_act = Activation::gelu_tanh;
  other.attention_bias = false;
  all.push_back({.model = other, .load = {.batch = 2, .q_len = 1, .kv_len = 12}});
  // Group sizes that divide the inputs, that do not, and one above their number.
  for (const GptqSetup& gptq :
       {GptqSetup{4, 32, 0, false}, GptqSetup{4, 128, 1, false}, GptqSetup{4, 32, 1, true},
        GptqSetup{4, 1024, 0, false}, GptqSetup{4, 64, 0, true}, GptqSetup{8, 32, 1, false}, GptqSetup{8, 64, 0, true}})
    all.push_back({.model = usual, .load = {.batch = 2, .q_len = 1, .kv_len = 6}, .gptq = gptq});
  all.push_back({.model = usual, .load = {.batch = 3, .q_len = 4, .kv_len = 17}, .gptq = {4, 32, 1, true}});
  // 3, 4, 7 and 8 query heads for each kv head.
  const auto grouped = [](std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim, const Workload& load) {
    return Setup{.model = model_of(heads, head_dim, 8, 40), .load = load, .kv_heads = kv_heads};
  };
  all.push_back(grouped(6, 2, 80, {2, 1, 33, 40}));
  all.push_back(grouped(4, 1, 64, {1, 5, 23, 24}));
  all.push_back(grouped(14, 2, 32, {1, 1, 300, 0}));
  all.push_back(grouped(16, 2, 32, {2, 17, 40, 41}));
  // The same groups in whole layers, and one kv head for each query head.
  const auto gated = [&](const ModelConfig& m, const Workload& load, const GptqSetup& gptq = {}) {
    all.push_back({.model = m, .load = load, .gptq = gptq});
  };
  using enum ModelType;
  gated(gated_model_of(llama, 2, 2, 64, 128, 96), {2, 1, 33, 40});
  gated(gated_model_of(llama, 6, 2, 64, 96, 72), {1, 5, 23, 24});
  gated(gated_model_of(mistral, 4, 1, 128, 256, 80), {3, 1, 17, 0});
  gated(gated_model_of(qwen2, 14, 2, 64, 128, 136), {2, 4, 9, 9});
  gated(gated_model_of(qwen2, 8, 1, 32, 80, 40), {1, 1, 300, 0});
  gated(gated_model_of(llama, 6, 2, 32, 64, 64), {2, 1, 6, 8}, {4, 32, 1, true});
  gated(gated_model_of(qwen2, 4, 1, 32, 64, 96), {1, 3, 6, 8}, {8, 64, 0, false});
  gated(gated_model_of(qwen3, 6, 2, 64, 96, 72), {2, 1, 17, 20});
  gated(gated_model_of(qwen3, 4, 1, 128, 64, 96), {1, 3, 6, 8}, {4, 32, 1, false});
  gated(learned_model_of(3, 32, 88), {2, 3, 9, 12});
  gated(learned_model_of(2, 64, 512), {1, 1, 300, 0}, {8, 64, 0, false});
  ModelConfig biased = gated_model_of(llama, 3, 1, 6, 14, 9);  // sizes that no vector divides
  biased.attention_bias = biased.mlp_bias = true;
  gated(biased, {2, 1, 5, 7});
  // Mixed steps: runs of several lengths, in any order, and a sequence without one.
  const auto mixed = [&](const ModelConfig& m, const Workload& load, std::vector<RowRun> runs) {
    all.push_back({.model = m, .load = load, .runs = std::move(runs)});
  };
  mixed(usual, {5, 5, 17, 20}, {{3, 0, 1}, {0, 1, 5}, {4, 6, 2}, {1, 8, 1}});
  mixed(usual, {3, 1, 7, 8}, {{0, 0, 1}, {2, 1, 1}});
  mixed(gated_model_of(llama, 6, 2, 64, 96, 72), {3, 17, 40, 41}, {{0, 0, 1}, {1, 1, 1}, {2, 2, 17}});
  std::uint64_t seed = 1;
  for (Setup& s : all) {
    s.activation = activation;
    s.seed = seed++;
    if (activation == DType::bf16 || s.weight == DType::bf16) s.values = DType::bf16;
    s.model.max_position_embeddings = std::max(s.model.max_position_embeddings, s.load.kv_len);
  }
  return all;
}

}  // namespace cf::test
