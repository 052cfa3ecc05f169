// Within a class of step sizes a row has the same bits on the GPU, whatever the number of rows and its place among
// them; in an invariant model it has them in steps of any size. Products of many tokens need cuBLASLt, as those of
// test_gpu_gemm do.
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "core/cache_view.hpp"
#include "core/procedural.hpp"
#include "cuda/ops/linear/cublaslt/library.hpp"
#include "cuda/runtime/memory.hpp"
#include "cuda/serve/model.hpp"
#include "cuda/step/classes.hpp"
#include "tests/cuda/device_check.hpp"
#include "tests/support/op_test_case.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/taken.hpp"

using namespace cf;
using namespace cf::test;
using ops::Epilogue;

namespace {

/// Scratch memory with room for these tests' products.
class Scratch {
 public:
  Scratch() : memory_(taken(cuda::DeviceMemory::create(context(), kBytes, "a test's scratch memory"))) {
    const Result<std::string> library = cuda::gemm_library();
    INFO(library.status().message() << "; CF_CUBLASLT may name the file");
    REQUIRE(library);
  }
  cuda::Scratch get() const { return {memory_.data(), kBytes}; }

 private:
  static constexpr std::size_t kBytes = std::size_t(320) << 20;
  cuda::DeviceMemory memory_;
};

/// Contexts with this device's own plans, with those of an RTX 5090, and with those of invariant models of both.
std::vector<cuda::Context> all_contexts() {
  std::vector<cuda::Context> all;
  for (const cuda::Context& c : contexts()) all.push_back(c);
  for (std::size_t i = 0; i < 2; ++i) {
    all.push_back(all[i]);
    all.back().set_plan_arch(cuda::invariant_arch(all[i].arch()));
  }
  return all;
}

/// Rows [first, first + count) of a view.
template <class View>
View rows_of(View v, std::int64_t first, std::int64_t count) {
  std::int64_t elements = first;
  for (std::size_t i = 1; i < v.shape.size(); ++i) elements *= v.shape[i];
  if constexpr (std::is_void_v<std::remove_const_t<std::remove_pointer_t<decltype(v.data)>>>) {
    using Byte = std::conditional_t<std::is_same_v<decltype(v.data), const void*>, const std::byte, std::byte>;
    v.data = static_cast<Byte*>(v.data) + elements * std::int64_t(size_bytes(v.dtype));
  } else {
    v.data += elements;
  }
  v.shape[0] = count;
  return v;
}

/// A call of `count` of the rows of a call, from row `first` on. `rows` are all of them.
template <class Op>
typename Op::Args part_of(typename Op::Args args, std::int64_t rows, std::int64_t first, std::int64_t count) {
  Op::tensors(Op::dims(args), args, [&](const TensorSpec& spec, auto& view, const auto& shape) {
    const bool is_of_rows = spec.role == Role::input || spec.role == Role::output;
    if (is_of_rows && view.data && shape[0] == rows) view = rows_of(view, first, count);
  });
  return args;
}

/// Runs a call, whose outputs begin as NaNs, and returns their bits, row by row.
template <class Op>
std::vector<std::string> row_bits(typename Op::Args args, std::int64_t rows, cuda::Context& c, cuda::Scratch scratch) {
  const auto for_each_output = [&](auto&& f) {
    Op::tensors(Op::dims(args), args, [&](const TensorSpec& spec, auto& view, const auto&) {
      if constexpr (std::is_same_v<decltype(view.data), void*>)
        if (spec.role == Role::output) f(view.data, std::size_t(view.bytes()));
    });
  };
  for_each_output([&](void* data, std::size_t bytes) { require_cuda(cudaMemset(data, 0xff, bytes)); });
  require_cuda(cudaDeviceSynchronize());
  cuda::LaunchList launches(c, scratch);
  const Status prepared = cuda::prepare(args, launches);
  INFO(prepared.message());
  REQUIRE(prepared);
  REQUIRE(launches.submit(c.stream()));
  require_cuda(cudaDeviceSynchronize());
  std::vector<std::string> all(static_cast<std::size_t>(rows));
  for_each_output([&](void* data, std::size_t bytes) {
    std::string host(bytes, '\0');
    require_cuda(cudaMemcpy(host.data(), data, bytes, cudaMemcpyDefault));
    const std::size_t row = bytes / std::size_t(rows);
    for (std::size_t i = 0; i < all.size(); ++i) all[i].append(host, i * row, row);
  });
  return all;
}

/// Numbers of tokens around the bounds of classes, of tiles and of launches.
constexpr std::int64_t kMostTokens = 2048;
constexpr std::int64_t kTokens[] = {1,   2,   3,   7,   8,   9,   15,  16,  17,  31,  33,  63,  64,  65,  66,   100,
                                    127, 128, 129, 130, 192, 255, 256, 300, 511, 512, 513, 700, 844, 845, 1000, 2048};

/// Checks that each row of a call of kMostTokens rows has one value in all steps of a class, whose sizes are among
/// `sizes`: among the first n rows of the call, and among n others. Returns how often two sizes were compared.
template <class Op>
int check_classes(DeviceProblem<Op>& p, std::span<const WeightFormat> formats, cuda::Context& c, cuda::Scratch scratch,
                  std::span<const std::int64_t> sizes = kTokens) {
  int compared = 0;
  for (const cuda::TokenRange& range : cuda::step_classes(c.arch(), formats)) {
    std::vector<std::string> expected;  // of the rows that were seen in this class
    for (auto n = sizes.rbegin(); n != sizes.rend(); ++n) {
      if (*n < range.first || *n > range.last) continue;
      const bool is_first = expected.empty();
      if (is_first) expected.resize(kMostTokens);
      // Rows of an odd size are aligned at every eighth row.
      for (std::int64_t first : {std::int64_t(0), std::int64_t(8), (kMostTokens - *n) / 8 * 8}) {
        if (first + *n > kMostTokens) continue;
        const auto part = part_of<Op>(p.args(), kMostTokens, first, *n);
        const std::vector<std::string> got = row_bits<Op>(part, *n, c, scratch);
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < *n; ++i) {
          std::string& known = expected[std::size_t(first + i)];
          if (known.empty()) known = got[std::size_t(i)];
          wrong += known != got[std::size_t(i)];
        }
        INFO("rows " << first << " to " << first + *n << ", class of " << range.first << " to " << range.last
                     << " tokens, sm_" << c.arch().compute_capability);
        CHECK(wrong == 0);
      }
      compared += !is_first;
    }
  }
  return compared;
}

Setup setup(DType activation, const GptqSetup& gptq = {}) {
  Setup s{.model = model_of(1, 2, 2, 2), .activation = activation, .gptq = gptq};
  s.weight = s.values = activation == DType::f32 ? DType::f16 : activation;
  return s;
}

}  // namespace

TEST_CASE("classes on the GPU: a row of a product has the same bits in all steps of a class", "[gpu][classes]") {
  const Scratch scratch;
  for (DType dtype : {DType::f16, DType::bf16, DType::f32})
    for (const GptqSetup& gptq :
         {GptqSetup{}, GptqSetup{4, 128, 1, false}, GptqSetup{4, 32, 0, true}, GptqSetup{8, 64, 1, false}}) {
      if (dtype == DType::f32 && gptq.bits) continue;
      const std::vector<WeightFormat> formats(gptq.bits ? 1 : 0, {.bits = gptq.bits, .group_size = gptq.group_size});
      for (Epilogue epilogue : kEpilogues) {
        if (epilogue == Epilogue::gelu_tanh && dtype != DType::f16) continue;
        DeviceProblem<ops::Linear> p(setup(dtype, gptq), linear_example(kMostTokens, 648, 264, epilogue));
        INFO(to_string(dtype) << ", " << gptq.bits << " bits, epilogue " << int(epilogue));
        for (cuda::Context& c : all_contexts()) CHECK(check_classes(p, formats, c, scratch.get()) >= 10);
      }
    }
}

TEST_CASE("classes on the GPU: a row of a product with a packed weight has the same bits at every width of a class",
          "[gpu][classes]") {
  const Scratch scratch;
  std::vector<std::int64_t> sizes;
  for (std::int64_t tokens = 1; tokens <= 300; ++tokens) sizes.push_back(tokens);
  sizes.insert(sizes.end(), {512, 1000, 1999, 2048});
  cuda::Context c = context();
  for (DType dtype : {DType::f16, DType::bf16})
    for (const GptqSetup& gptq : {GptqSetup{4, 128, 1, false}, GptqSetup{4, 32, 0, true}, GptqSetup{8, 64, 1, false}}) {
      const std::vector<WeightFormat> formats{{.bits = gptq.bits, .group_size = gptq.group_size}};
      DeviceProblem<ops::Linear> p(setup(dtype, gptq), linear_example(kMostTokens, 648, 264, Epilogue::residual));
      INFO(to_string(dtype) << ", " << gptq.bits << " bits");
      CHECK(check_classes(p, formats, c, scratch.get(), sizes) >= 290);
    }
}

TEST_CASE("classes on the GPU: the products of Pythia-2.8B and Llama-3.1-8B, and a head of odd rows",
          "[gpu][classes]") {
  const Scratch scratch;
  for (auto [dtype, in, out, epilogue] :
       {std::tuple<DType, std::int64_t, std::int64_t, Epilogue>{DType::f16, 2560, 7680, Epilogue::none},
        {DType::f16, 2560, 2560, Epilogue::residual},
        {DType::f16, 2560, 10240, Epilogue::gelu_erf},
        {DType::f16, 10240, 2560, Epilogue::residual},
        {DType::bf16, 4096, 6144, Epilogue::none},
        {DType::bf16, 14336, 4096, Epilogue::residual},
        {DType::bf16, 768, 4321, Epilogue::none}}) {
    INFO(in << " -> " << out << ", epilogue " << int(epilogue));
    DeviceProblem<ops::Linear> p(setup(dtype), linear_example(kMostTokens, in, out, epilogue));
    cuda::Context own = context(), invariant = own;
    invariant.set_plan_arch(cuda::invariant_arch(own.arch()));
    for (cuda::Context* c : {&own, &invariant}) CHECK(check_classes(p, {}, *c, scratch.get()) >= 10);
  }
}

TEST_CASE("classes on the GPU: GPTQ weights and 1 to 300 tokens, of Pythia-2.8B's and Llama-3.1-8B's sizes too",
          "[gpu][classes][gptq]") {
  const Scratch scratch;
  std::vector<std::int64_t> all{512, 1000, 2048};
  for (std::int64_t n = 300; n > 0; --n) all.insert(all.begin(), n);
  for (const GptqSetup& gptq : {GptqSetup{4, 128, 1, false}, GptqSetup{4, 64, 0, false}, GptqSetup{4, 128, 1, true},
                                GptqSetup{4, 32, 1, false}, GptqSetup{8, 128, 1, false}}) {
    INFO(gptq.bits << " bits, groups of " << gptq.group_size << ", act-order " << gptq.desc_act);
    DeviceProblem<ops::Linear> p(setup(DType::f16, gptq), linear_example(kMostTokens, 1288, 136, Epilogue::none));
    cuda::Context own = context();
    CHECK(check_classes(p, std::vector{WeightFormat{gptq.bits, gptq.group_size}}, own, scratch.get(), all) >= 290);
  }
  for (auto [dtype, in, out, epilogue] :
       {std::tuple<DType, std::int64_t, std::int64_t, Epilogue>{DType::f16, 2560, 7680, Epilogue::none},
        {DType::f16, 2560, 10240, Epilogue::gelu_erf},
        {DType::f16, 10240, 2560, Epilogue::residual},
        {DType::f16, 2560, 5120, Epilogue::swiglu},
        {DType::bf16, 4096, 6144, Epilogue::none},
        {DType::bf16, 14336, 1024, Epilogue::residual}}) {
    INFO(in << " -> " << out << ", epilogue " << int(epilogue));
    DeviceProblem<ops::Linear> p(setup(dtype, {4, 128, 1, false}), linear_example(kMostTokens, in, out, epilogue));
    cuda::Context own = context();
    CHECK(check_classes(p, std::vector{WeightFormat{4, 128}}, own, scratch.get()) >= 10);
  }
}

namespace {

using Norms = std::tuple<ops::LayerNorm, ops::RmsNorm, ops::LayerNormResidual, ops::ResidualLayerNorm>;

}  // namespace

OP_TEST_CASE("classes on the GPU: a normalised row has the same bits in all steps of a class", "[gpu][classes]",
             Norms) {
  for (DType dtype : {DType::f16, DType::bf16, DType::f32})
    for (std::int64_t hidden : {264, 2560, 8192}) {
      if (hidden > 2560 && dtype != DType::f16) continue;  // to save time
      INFO(to_string(dtype) << ", hidden " << hidden);
      DeviceProblem<TestType> p(setup(dtype), {{kMostTokens, hidden}, {}});
      for (cuda::Context& c : all_contexts()) CHECK(check_classes(p, {}, c, {}) >= 10);
    }
}

namespace {

/// The last `count` queries of sequences [first, first + batch) of a call with q_len queries of each.
ops::Attention::Args queries_of(ops::Attention::Args a, std::int64_t q_len, std::int64_t first, std::int64_t count) {
  a.q = rows_of(a.q, (first + 1) * q_len - count, count);
  a.y = rows_of(a.y, (first + 1) * q_len - count, count);
  a.k_cache = cache_of(a.k_cache, first, 1);
  a.v_cache = cache_of(a.v_cache, first, 1);
  a.kv_len = rows_of(a.kv_len, first, 1);
  return a;
}

}  // namespace

TEST_CASE("classes on the GPU: attention of a prompt gives a query the same bits in runs of any length of its class",
          "[gpu][classes]") {
  for (DType dtype : {DType::f16, DType::bf16, DType::f32})
    for (auto [heads, kv_heads, head_dim] : {std::tuple<std::int64_t, std::int64_t, std::int64_t>{4, 4, 64},
                                             {2, 2, 80},
                                             {8, 2, 128},
                                             {6, 2, 96},
                                             {2, 1, 256}})
      for (cuda::Context base : all_contexts())
        for (int sm_count : {1, 132, 4000}) {                                        // two warpgroups a block, or one
          if (dtype == DType::f32 && !base.arch().tuning->is_invariant()) continue;  // splits depend on the queries
          cuda::Arch arch = base.arch();
          arch.sm_count = sm_count;
          base.set_plan_arch(arch);
          constexpr std::int64_t q_len = 333, sequences = 3;
          Setup s = setup(dtype);
          s.model = model_of(heads, head_dim, 8, 8);
          s.kv_heads = kv_heads;
          s.load = {.batch = sequences, .q_len = q_len, .kv_len = 500, .capacity = 512};
          DeviceProblem<ops::Attention> p(s);
          const std::vector<std::string> together = row_bits<ops::Attention>(p.args(), sequences * q_len, base, {});
          const std::vector<cuda::TokenRange> ranges = cuda::attention_classes(arch, head_dim, heads / kv_heads);
          for (std::int64_t count : {1, 2, 15, 16, 17, 22, 63, 64, 65, 128, 129, 300}) {
            if (count < ranges.back().first) continue;
            for (std::int64_t sequence = 0; sequence < sequences; ++sequence) {
              const std::vector<std::string> alone =
                  row_bits<ops::Attention>(queries_of(p.args(), q_len, sequence, count), count, base, {});
              std::int64_t wrong = 0;
              for (std::int64_t i = 0; i < count; ++i)
                wrong += alone[std::size_t(i)] != together[std::size_t((sequence + 1) * q_len - count + i)];
              INFO(to_string(dtype) << ", " << heads << " heads of " << head_dim << ", " << kv_heads
                                    << " kv heads, the last " << count << " queries of sequence " << sequence
                                    << ", planned for " << to_string(arch));
              CHECK(wrong == 0);
            }
          }
        }
}

namespace {

using Ids = std::vector<std::int32_t>;
constexpr std::int64_t kVocab = 333, kLength = 80;

/// A small model of three layers.
struct Small {
  ModelConfig config;
  std::shared_ptr<OwnedModelWeights> weights;

  Small(ModelConfig m, DType dtype, WeightFormat linears = {}) : config(std::move(m)) {
    config.name = "small";
    config.num_hidden_layers = 3;
    config.vocab_size = kVocab;
    config.max_position_embeddings = 512;
    weights = std::make_shared<OwnedModelWeights>(procedural_model(config, dtype, 7, linears));
  }
  std::unique_ptr<cuda::Model> model(cuda::Model::Options o) const {
    o.invariant = true;
    return taken(cuda::Model::create(context(), config.name, config, weights->weights, o));
  }
};

Ids ids_of(std::int64_t count, std::uint64_t seed) {
  Tensor t(DType::f32, {count});
  fill_procedural(t.data(), DType::f32, 0, count, ProceduralKind::activation, seed, "ids");
  Ids ids;
  for (std::int64_t i = 0; i < count; ++i) ids.push_back(std::int32_t(std::abs(t.at(i)) * 1000) % kVocab);
  return ids;
}

std::string bits_of(const Tensor& t) { return {static_cast<const char*>(t.data()), std::size_t(t.size_bytes())}; }

void require_ok(const Status& s) {
  INFO(s.message());
  REQUIRE(s);
}

/// The bits of the logits behind every id, where the first `prompt` ids are read at once, or none, and the others are
/// steps of the slot and of `others` slots beside it, each with a sequence of its own.
std::vector<std::string> logits_by_steps(cuda::Model& model, const Ids& ids, std::size_t prompt, std::int64_t slot,
                                         const std::vector<std::int64_t>& others = {}) {
  std::vector<std::string> rows(ids.size());
  require_ok(model.prefill(slot, 0, std::span(ids).first(prompt)));
  rows[prompt - 1] = bits_of(taken(model.logits(slot)));
  std::vector<Ids> beside;
  for (std::int64_t other : others) {
    const auto length = std::size_t(1 + other % 13);
    beside.push_back(ids_of(kLength, std::uint64_t(100 + other)));
    require_ok(model.prefill(other, 0, std::span(beside.back()).first(length)));
  }
  for (std::size_t i = prompt; i < ids.size(); ++i) {
    std::vector<ModelRunner::Token> tokens{{slot, ids[i], std::int64_t(i)}};
    for (std::size_t o = 0; o < others.size(); ++o) {
      const auto position = std::size_t(1 + others[o] % 13) + i - prompt;
      if (position < beside[o].size()) tokens.push_back({others[o], beside[o][position], std::int64_t(position)});
    }
    require_ok(model.step(tokens));
    rows[i] = bits_of(taken(model.logits(slot)));
  }
  return rows;
}

/// The same where pieces of the ids are read one after another, with the logits of all ids of a piece.
std::vector<std::string> logits_by_pieces(cuda::Model& model, const Ids& ids, std::size_t piece) {
  std::vector<std::string> rows;
  const std::size_t row = std::size_t(kVocab) * size_bytes(model.activation());
  for (std::size_t first = 0; first < ids.size(); first += piece) {
    const std::size_t n = std::min(piece, ids.size() - first);
    Tensor logits(model.activation(), {std::int64_t(n), kVocab});
    require_ok(model.forward(0, std::int64_t(first), std::span(ids).subspan(first, n), logits.view<2>()));
    const std::string all = bits_of(logits);
    for (std::size_t i = 0; i < n; ++i) rows.push_back(all.substr(i * row, row));
  }
  return rows;
}

/// The same in slot 1 of four, whose steps read pieces of all slots' ids: one token of some, more of others.
std::vector<std::string> logits_in_mixed_steps(cuda::Model& model, const Ids& ids) {
  std::vector<std::string> rows(ids.size());
  const std::vector<Ids> all{ids_of(kLength, 200), ids, ids_of(kLength, 201), ids_of(kLength, 202)};
  constexpr std::int64_t pieces[] = {1, 5, 1, 17, 1, 1, 2, 33, 1, 9};
  std::vector<std::int64_t> done(all.size());
  for (std::size_t step = 0; done[1] < std::int64_t(ids.size()); ++step) {
    std::vector<Run> runs;
    Ids of_step;
    for (std::size_t slot = 0; slot < all.size(); ++slot) {
      const std::int64_t left = std::int64_t(all[slot].size()) - done[slot],
                         count = std::min(left, pieces[(step + 3 * slot) % std::size(pieces)]);
      if (count == 0) continue;
      runs.push_back({.sequence = std::int64_t(slot), .first_position = done[slot], .count = count});
      of_step.insert(of_step.end(), all[slot].begin() + done[slot], all[slot].begin() + done[slot] + count);
      done[slot] += count;
    }
    require_ok(model.run(runs, of_step, {}));
    rows[std::size_t(done[1] - 1)] = bits_of(taken(model.logits(1)));
  }
  return rows;
}

/// The rows that are known, compared with those of one pass over all ids.
void check_rows(const std::vector<std::string>& got, const std::vector<std::string>& expected) {
  REQUIRE(got.size() == expected.size());
  std::size_t wrong = 0, known = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    known += !got[i].empty();
    wrong += !got[i].empty() && got[i] != expected[i];
  }
  CHECK(known > 0);
  CHECK(wrong == 0);
}

}  // namespace

namespace {

/// Checks that a token's logits have the same bits in chunks, by steps and beside others.
void check_invariant(const Small& small) {
  const Ids ids = ids_of(kLength, 3);
  const auto expected = logits_by_pieces(*small.model({.capacity = 96, .chunk = 96}), ids, ids.size());
  // Chunks: those of a prompt, and pieces that the caller makes.
  for (std::int64_t chunk : {1, 7, 33})
    check_rows(logits_by_pieces(*small.model({.capacity = 96, .chunk = chunk}), ids, ids.size()), expected);
  for (std::size_t piece : {1, 5, 64})
    check_rows(logits_by_pieces(*small.model({.capacity = 96}), ids, piece), expected);
  // Token by token, by both ways to launch a step.
  for (cuda::Impl impl : {cuda::Impl::graph, cuda::Impl::unfused})
    check_rows(logits_by_steps(*small.model({.capacity = 96, .impl = impl}), ids, 1, 0), expected);
  // In steps that have pieces of other prompts.
  check_rows(logits_in_mixed_steps(*small.model({.slots = 4, .capacity = 96}), ids), expected);
  // In pages, with and without such steps.
  const cuda::Model::Options pages{.slots = 4, .capacity = 96, .pages = 9, .page_entries = 64};
  check_rows(logits_in_mixed_steps(*small.model(pages), ids), expected);
  check_rows(logits_by_steps(*small.model(pages), ids, 20, 2, {0, 3}), expected);
  // Beside idle slots, and beside others that decode.
  check_rows(logits_by_steps(*small.model({.slots = 3, .capacity = 96}), ids, 20, 1), expected);
  std::vector<std::int64_t> others;
  for (std::int64_t slot = 0; slot < 64; ++slot)
    if (slot != 17) others.push_back(slot);
  check_rows(logits_by_steps(*small.model({.slots = 64, .capacity = 96}), ids, 20, 17, others), expected);
}

}  // namespace

TEST_CASE("an invariant model on the GPU: a token's bits in chunks, by steps and beside others",
          "[gpu][classes][model]") {
  check_invariant({model_of(4, 64, 16, 512), DType::f16});
  check_invariant({model_of(2, 80, 20, 320), DType::bf16});
  check_invariant({learned_model_of(4, 64, 512), DType::f16});  // GPT-2
}

TEST_CASE("an invariant model on the GPU: the same of Llama and Qwen3", "[gpu][classes][model]") {
  check_invariant({gated_model_of(ModelType::llama, 6, 2, 64, 256, 320), DType::bf16});
  check_invariant({gated_model_of(ModelType::qwen3, 6, 2, 64, 256, 320), DType::f16});
}

TEST_CASE("an invariant model on the GPU: the same of weights of 4 bits, of fp8 ones, and in float32",
          "[gpu][classes][model]") {
  const WeightFormat four_bits{.bits = 4, .group_size = 64};
  check_invariant({model_of(4, 64, 16, 512), DType::f16, four_bits});
  check_invariant({gated_model_of(ModelType::llama, 6, 2, 64, 256, 320), DType::f16, four_bits});
  const WeightFormat fp8{.bits = 8, .group_size = 128, .is_fp8 = true};
  check_invariant({gated_model_of(ModelType::llama, 6, 2, 64, 256, 320), DType::bf16, fp8});
  check_invariant({model_of(4, 64, 16, 512), DType::f32});
}

TEST_CASE("classes on the GPU: a prompt's logits have the same bits alone, in pieces and in one pass with others",
          "[gpu][classes][model]") {
  const Small neox(model_of(4, 64, 16, 512), DType::f16),
      llama(gated_model_of(ModelType::llama, 6, 2, 64, 256, 320), DType::bf16);
  for (const Small* small : {&neox, &llama}) {
    // All passes have more than 128 tokens, all runs 64 and more, and the head eight rows or fewer.
    const std::vector<Ids> prompts{ids_of(130, 1), ids_of(200, 2), ids_of(401, 3)};
    const auto model = [&] {
      return taken(cuda::Model::create(context(), small->config.name, small->config, small->weights->weights,
                                       {.slots = 3, .capacity = 512}));
    };
    std::vector<std::string> expected;
    const auto alone = model();
    for (std::size_t slot = 0; slot < prompts.size(); ++slot) {
      require_ok(alone->prefill(std::int64_t(slot), 0, prompts[slot]));
      expected.push_back(bits_of(taken(alone->logits(std::int64_t(slot)))));
    }
    const auto pieces = model();
    for (std::size_t first : {0, 138, 270}) {
      const std::size_t end = first == 0 ? 138 : first == 138 ? 270 : 401;
      require_ok(pieces->prefill(2, std::int64_t(first), std::span(prompts[2]).subspan(first, end - first)));
    }
    CHECK((bits_of(taken(pieces->logits(2))) == expected[2]));
    const auto together = model();
    std::vector<Run> runs;
    Ids ids;
    for (std::size_t slot = 0; slot < prompts.size(); ++slot) {
      runs.push_back({.sequence = std::int64_t(slot), .count = std::int64_t(prompts[slot].size())});
      ids.insert(ids.end(), prompts[slot].begin(), prompts[slot].end());
    }
    require_ok(together->run(runs, ids, {}));
    for (std::size_t slot = 0; slot < prompts.size(); ++slot)
      CHECK((bits_of(taken(together->logits(std::int64_t(slot)))) == expected[slot]));
  }
}

TEST_CASE("an invariant model on the GPU: its impls, and its memory for few tokens", "[gpu][classes][model]") {
  const Small small(model_of(4, 64, 16, 512), DType::f16);
  const auto create = [&](const cuda::Model::Options& o) {
    return cuda::Model::create(context(), small.config.name, small.config, small.weights->weights, o);
  };
  for (cuda::Impl impl : {cuda::Impl::split, cuda::Impl::layer, cuda::Impl::persistent})
    CHECK(refusal_fault(
              create({.capacity = 96, .impl = impl, .invariant = true}).status(), Code::invalid_argument,
              {"model: invariant: expected the impl graph or unfused, got " + std::string(to_string(impl))}) == "");
  CHECK(small.model({.capacity = 96})->impl() == cuda::Impl::graph);
  const cuda::Model::Options few{.capacity = 4, .chunk = 1, .invariant = true};
  const auto model = small.model(few);
  require_ok(model->prefill(0, 0, ids_of(3, 1)));
  CHECK(taken(model->logits(0)).size() == kVocab);
}
