// Passes on the oracle: a rewritten program computes what the program computed, bit by bit, since a fused op's oracle
// runs its parts.
#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "core/model/passes.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/small_model.hpp"
#include "tests/support/toy_family.hpp"

using namespace cf;
using namespace cf::test;

namespace {

/// A pass, or several, and how many nodes fewer it leaves of a layer of each kind of model.
struct Pass {
  const char* name;
  std::function<Program(Program, const Wanted&)> run;
  std::function<int(const ModelSpec&)> fewer;
};

bool is_rms(const ModelSpec& m) { return m.traits.norm == NormKind::rmsnorm; }
bool is_parallel(const ModelSpec& m) { return m.traits.residual == Residual::parallel; }
bool is_interleaved(const ModelSpec& m) { return m.shape.qkv_layout == ops::QkvLayout::interleaved_by_head; }

const std::vector<Pass>& passes() {
  static const std::vector<Pass> all{
      {"rope_append", with_rope_append, [](const ModelSpec&) { return 1; }},
      {"ln_qkv", with_ln_qkv, [](const ModelSpec& m) { return is_rms(m) || !is_interleaved(m) ? 0 : 3; }},
      {"linear_sum", with_linear_sum, [](const ModelSpec& m) { return int(is_parallel(m)); }},
      {"rms_linear", with_rms_linear, [](const ModelSpec& m) { return is_rms(m) ? 2 : 0; }},
      {"rms_qkv",
       [](Program p, const Wanted& wanted) {
         return with_rms_qkv(with_rope_append(with_rms_linear(std::move(p), wanted), wanted), wanted);
       },
       [](const ModelSpec& m) { return is_rms(m) ? 4 - m.shape.head_norm : 1; }},
      {"all of them",
       [](Program p, const Wanted& wanted) {
         p = with_rms_linear(with_linear_sum(with_ln_qkv(std::move(p), wanted), wanted), wanted);
         return with_rms_qkv(with_rope_append(std::move(p), wanted), wanted);
       },
       [](const ModelSpec& m) {
         if (is_rms(m)) return 4 - m.shape.head_norm;
         return is_interleaved(m) ? 3 + is_parallel(m) : 1;
       }}};
  return all;
}

void require_ok(const Status& s) {
  INFO(s.message());
  REQUIRE(s);
}

Program recorded(const HostStep& step) {
  Result<Program> program = step.record();
  require_ok(program.status());
  return *std::move(program);
}

void run_on_oracle(const Program& program) {
  require_ok(run_program(program, [](const auto& args) { return cpu_ref::run(args); }));
}

template <class V>
bool same_bytes(const V& a, const V& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0;
}

/// The final norm of RMS models is followed by the head: one more RmsLinear.
int fewer_outside(const Pass& pass, const ModelSpec& m) {
  const std::string name = pass.name;
  return is_rms(m) && (name == "rms_linear" || name == "rms_qkv" || name == "all of them");
}

}  // namespace

TEST_CASE("A rewritten program computes the program's logits and caches, bit by bit", "[program]") {
  for (const ModelConfig& m : small_models())
    for (const DType activation : {DType::f64, DType::f32})
      for (const DType weight : {DType::f16, DType::bf16, DType::f32})
        for (const WeightFormat linears : {WeightFormat{}, WeightFormat{.bits = 4, .group_size = 16}}) {
          if (linears.bits && weight != DType::f16) continue;
          for (const auto& [batch, q_len] : {std::pair{1, 1}, {3, 1}, {1, 300}}) {
            HostStep plain(m, batch, q_len, activation, weight, linears);
            const Program program = recorded(plain);
            run_on_oracle(program);
            for (const Pass& pass : passes()) {
              INFO(m.name << ", " << to_string(activation) << ", weights " << to_string(weight) << ", " << linears.bits
                          << " bits, " << batch << " x " << q_len << " tokens, " << pass.name);
              HostStep fused(m, batch, q_len, activation, weight, linears);
              const Program rewritten = pass.run(recorded(fused), always);
              CHECK(program.nodes.size() - rewritten.nodes.size() ==
                    std::size_t(2 * pass.fewer(plain.spec) + fewer_outside(pass, plain.spec)));
              run_on_oracle(rewritten);
              CHECK(same_bytes(plain.tensors.logits, fused.tensors.logits));
              for (std::size_t i = 0; i < plain.caches.size(); ++i) {
                CHECK(same_bytes(plain.caches[i].k, fused.caches[i].k));
                CHECK(same_bytes(plain.caches[i].v, fused.caches[i].v));
              }
            }
          }
        }
}

TEST_CASE("A pass leaves alone what is not wanted, and what another node reads", "[program]") {
  for (const ModelConfig& m : small_models()) {
    HostStep step(m, 1, 1, DType::f32, DType::f16, {});
    const Program program = recorded(step);
    for (const Pass& pass : passes()) {
      INFO(m.name << ", " << pass.name);
      CHECK(pass.run(program, [](Node&) { return false; }).nodes.size() == program.nodes.size());
      // A node at the end of each layer that reads all that the layer's nodes have written.
      Program watched;
      std::vector<const void*> written;
      for (std::size_t i = 0; i < program.nodes.size(); ++i) {
        const Node& node = program.nodes[i];
        watched.nodes.push_back(node);
        written.insert(written.end(), node.writes.begin(), node.writes.end());
        if (i + 1 < program.nodes.size() && program.nodes[i + 1].at.layer == node.at.layer) continue;
        watched.nodes.push_back(node);
        watched.nodes.back().reads = written;
        watched.nodes.back().writes = {};
        watched.nodes.back().call = ops::Embedding::Args{};
        written.clear();
      }
      const Program rewritten = pass.run(watched, always);
      for (const Node& node : rewritten.nodes) {
        // Fused ops that write all that their parts write are left: LnQkv writes k and v, LinearSum both sums.
        CHECK_FALSE(std::holds_alternative<ops::RopeAppend::Args>(node.call));
        CHECK_FALSE(std::holds_alternative<ops::LnQkv::Args>(node.call));
        CHECK_FALSE(std::holds_alternative<ops::RmsLinear::Args>(node.call));
        CHECK_FALSE(std::holds_alternative<ops::RmsQkv::Args>(node.call));
      }
    }
  }
}

TEST_CASE("Nodes say what they read and write: indices are read, caches written, weights left out", "[program]") {
  HostStep step(small_models().front(), 1, 1, DType::f32, DType::f16, {});
  const Program program = recorded(step);
  const auto node_of = [&](SiteId id) -> const Node& {
    return *std::find_if(program.nodes.begin(), program.nodes.end(), [&](const Node& n) { return n.at.site.id == id; });
  };
  const LayerTensors& t = step.tensors.layer;
  using Tensors = std::vector<const void*>;
  CHECK(node_of(SiteId::embed_in).reads == Tensors{step.tensors.ids.data});
  CHECK(node_of(SiteId::embed_in).writes == Tensors{step.tensors.hidden[0].data});
  const Node& append = node_of(SiteId::kv_append);
  CHECK(append.at.layer == 0);
  CHECK(append.at.name() == "gpt_neox.layers.0.attention.kv_append");
  CHECK(append.reads == Tensors{t.k.data, t.v.data, t.kv_len.data});
  CHECK(append.writes == Tensors{step.caches[0].k.data, step.caches[0].v.data});
}

TEST_CASE("Any walk can be recorded, and a program names the node that refuses", "[program]") {
  ToyModel toy({.hidden_size = 8, .norm_eps = 0}, 1, DType::f64, DType::f16);
  const Result<Program> program =
      record([&](auto&& add) { return for_each_toy_site(toy.spec, toy.weights, toy.tensors, add); });
  require_ok(program.status());
  CHECK(program->nodes.size() == 2);
  const Status s = run_program(*program, [](const auto& args) { return cpu_ref::run(args); });
  CHECK(s.code() == Code::invalid_argument);
  CHECK(s.message() == "norm: layernorm: eps must be positive, got 0.000000");
}
