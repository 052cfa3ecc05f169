// Which task waits for which, of a layer's and of made-up ones.
#include <random>

#include "core/model/config.hpp"
#include "core/model/layer.hpp"
#include "core/model/passes.hpp"
#include "cuda/step/dataflow.hpp"
#include "cuda/port/row_ops.hpp"
#include "tests/support/catch.hpp"

using namespace cf;
using cuda::Dataflow;

namespace {

using Tasks = std::vector<int>;

Tasks add(Dataflow& flow, std::initializer_list<const void*> reads, std::initializer_list<const void*> writes) {
  return flow.add(reads, writes);
}

/// Adds an op with the tensors that it reads and writes.
template <class Args>
Tasks add_op(Dataflow& flow, const Args& args) {
  std::vector<const void*> reads, writes;
  Args::Op::tensors(Args::Op::dims(args), args, [&](const TensorSpec& spec, const auto& v, const auto&) {
    if (is_read(spec.role) || is_index(spec.role)) reads.push_back(v.data);
    if (is_written(spec.role)) writes.push_back(v.data);
  });
  return flow.add(reads, writes);
}

}  // namespace

TEST_CASE("dataflow: a task waits for those whose data it needs, and for no other") {
  const char t[4] = {};
  const void *a = t, *b = t + 1, *c = t + 2, *d = t + 3;
  SECTION("readers wait for the writer, not for each other") {
    Dataflow flow;
    CHECK(add(flow, {d}, {a}) == Tasks{});
    CHECK(add(flow, {a}, {b}) == Tasks{0});
    CHECK(add(flow, {a}, {c}) == Tasks{0});
    CHECK(add(flow, {b, c}, {d}) == Tasks{1, 2});
  }
  SECTION("a writer waits for the readers and the writer before it") {
    Dataflow flow;
    CHECK(add(flow, {}, {a}) == Tasks{});
    CHECK(add(flow, {a}, {}) == Tasks{0});
    CHECK(add(flow, {a}, {}) == Tasks{0});
    CHECK(add(flow, {}, {a}) == Tasks{1, 2});
    CHECK(add(flow, {}, {a}) == Tasks{3});
    CHECK(add(flow, {a}, {}) == Tasks{4});
  }
  SECTION("who is waited for anyway is left out") {
    Dataflow flow;
    add(flow, {}, {a});
    add(flow, {a}, {b});
    CHECK(add(flow, {a, b}, {c}) == Tasks{1});
    CHECK(add(flow, {a}, {d}) == Tasks{0});
    CHECK(add(flow, {a, b, c, d}, {}) == Tasks{2, 3});
  }
  SECTION("a task that updates a tensor waits for its writer alone") {
    Dataflow flow;
    add(flow, {}, {a});
    CHECK(add(flow, {a}, {a}) == Tasks{0});
    CHECK(add(flow, {a}, {a}) == Tasks{1});
  }
}

TEST_CASE("dataflow: reachability is that of every wanted edge, whatever the tasks") {
  std::mt19937 random(1);
  const char tensors[6] = {};
  for (int round = 0; round < 200; ++round) {
    Dataflow flow;
    struct Task {
      std::vector<const void*> reads, writes;
    };
    std::vector<Task> tasks;
    std::vector<std::vector<bool>> reached;
    for (int task = 0; task < 20; ++task) {
      Task now;
      for (const char& tensor : tensors) {
        if (random() % 3 == 0) now.reads.push_back(&tensor);
        if (random() % 5 == 0) now.writes.push_back(&tensor);
      }
      const Tasks direct = flow.add(now.reads, now.writes);
      std::vector<bool> before(std::size_t(task), false);
      for (int other : direct) {
        REQUIRE(other < task);
        CHECK_FALSE(before[std::size_t(other)]);  // none is reached through one before it in the list
        before[std::size_t(other)] = true;
        for (int i = 0; i < other; ++i)
          if (reached[std::size_t(other)][std::size_t(i)]) before[std::size_t(i)] = true;
      }
      const auto touch = [](const auto& some, const auto& others) {
        for (const void* x : some)
          for (const void* y : others)
            if (x == y) return true;
        return false;
      };
      for (int i = 0; i < task; ++i) {
        const Task& other = tasks[std::size_t(i)];
        if (touch(now.reads, other.writes) || touch(now.writes, other.writes) || touch(now.writes, other.reads))
          CHECK(before[std::size_t(i)]);
      }
      tasks.push_back(now);
      reached.push_back(before);
    }
  }
}

TEST_CASE("dataflow: a parallel residual gives the layer two branches, a sequential one a chain") {
  ModelConfig m;
  m.hidden_size = 8;
  m.num_attention_heads = 1;
  m.intermediate_size = 8;
  m.rotary_dim = 2;
  // Two layers; their tensors have addresses, and nothing is read there.
  LayerState state(m, {.batch = 1, .q_len = 1, .kv_len = 2}, DType::f16),
      cache(m, {.batch = 1, .q_len = 1, .kv_len = 2}, DType::f16);
  LayerTensors first = state.tensors(), second = state.tensors();
  second.hidden = first.output;
  second.output = cache.tensors().output;
  second.k_cache = cache.tensors().k_cache;
  second.v_cache = cache.tensors().v_cache;
  const auto edges = [&](bool parallel, bool joined = false) {
    m.use_parallel_residual = parallel;
    Dataflow flow;
    std::vector<Tasks> all;
    for (const LayerTensors* t : {&first, &second}) {
      const auto add = [&]<class Args>(const Args& args) {
        all.push_back(add_op(flow, args));
        return Status();
      };
      Result<Program> program = record_layer(m, LayerWeights{}, *t);
      REQUIRE(program);
      if (joined) *program = with_rope_append(*program);
      REQUIRE(run_program(*program, add));
    }
    return all;
  };
  // In the walk's order: input_layernorm 0, query_key_value 1, rotary_emb 2, kv_append 3, context 4, dense 5,
  // post_attention_layernorm 6, dense_h_to_4h 7, dense_4h_to_h 8; the second layer's from 9.
  CHECK(edges(true) == std::vector<Tasks>{{},
                                          {0},
                                          {1},
                                          {2},
                                          {3},
                                          {4},
                                          {},
                                          {6},
                                          {5, 7},  //
                                          {8},
                                          {9},
                                          {10},
                                          {11},
                                          {12},
                                          {13},
                                          {8},
                                          {15},
                                          {14, 16}});
  CHECK(edges(false) == std::vector<Tasks>{{},
                                           {0},
                                           {1},
                                           {2},
                                           {3},
                                           {4},
                                           {5},
                                           {6},
                                           {7},  //
                                           {8},
                                           {9},
                                           {10},
                                           {11},
                                           {12},
                                           {13},
                                           {14},
                                           {15},
                                           {16}});

  // With rope_append, 2, in the place of two sites: context 3 waits for its q and for the entries of its caches.
  CHECK(edges(true, true) == std::vector<Tasks>{{},
                                                {0},
                                                {1},
                                                {2},
                                                {3},
                                                {},
                                                {5},
                                                {4, 6},  //
                                                {7},
                                                {8},
                                                {9},
                                                {10},
                                                {11},
                                                {7},
                                                {13},
                                                {12, 14}});
}

TEST_CASE("dataflow: rows are stored beside attention where ln_qkv appends, and before it where they append") {
  ModelConfig m;
  m.hidden_size = 8;
  m.num_attention_heads = 1;
  m.intermediate_size = 8;
  m.rotary_dim = 2;
  LayerState state(m, {.batch = 1, .q_len = 1, .kv_len = 3}, DType::f16);
  const ops::DecodeLayer::Args a{.model = m.spec(), .weights = {}, .t = state.tensors()};
  const char k_rows[3 * 8 * 2] = {}, v_rows[3 * 8 * 2] = {};
  const auto rows = [](const char* data) { return AnyView<2>(const_cast<char*>(data), {3, 8}, DType::f16); };
  const auto edges = [&](bool few, std::int64_t first) {
    Dataflow flow;
    std::vector<Tasks> all;
    const cuda::TokenRows given{.k = rows(k_rows), .v = rows(v_rows), .first = first, .last = 2};
    const auto add = [&]<class Args>(const Site&, const Args& args) {
      all.push_back(add_op(flow, args));
      return Status();
    };
    REQUIRE(cuda::for_each_op_of_rows(few, a, given, add));
    return all;
  };
  // ln_qkv 0, the rows 1, context 2, dense 3, post_attention_layernorm 4, dense_h_to_4h 5, dense_4h_to_h 6.
  CHECK(edges(true, 2) == std::vector<Tasks>{{}, {0}, {0}, {2}, {}, {4}, {3, 5}});
  // Rows that become entries are there before attention.
  CHECK(edges(true, 1) == std::vector<Tasks>{{}, {0}, {1}, {2}, {}, {4}, {3, 5}});
  // The sites: the rows, 3, are the append.
  CHECK(edges(false, 2) == std::vector<Tasks>{{}, {0}, {1}, {2}, {3}, {4}, {}, {6}, {5, 7}});
}

TEST_CASE("dataflow: products that normalise their token make a chain of five ops a layer") {
  ModelConfig m;
  m.model_type = ModelType::llama;
  m.hidden_size = 16;
  m.num_attention_heads = 2;
  m.num_key_value_heads = 1;
  m.intermediate_size = 8;
  m.rotary_dim = 8;
  m.use_parallel_residual = false;
  m.attention_bias = m.mlp_bias = false;
  m.hidden_act = Activation::swiglu;
  LayerState state(m.spec(), {.batch = 1, .q_len = 1, .kv_len = 2}, DType::f16),
      other(m.spec(), {.batch = 1, .q_len = 1, .kv_len = 2}, DType::f16);
  LayerTensors first = state.tensors(), second = state.tensors();
  second.hidden = first.output;
  second.output = other.tensors().output;
  second.k_cache = other.tensors().k_cache;
  second.v_cache = other.tensors().v_cache;
  Dataflow flow;
  std::vector<Tasks> all;
  for (const LayerTensors* t : {&first, &second}) {
    const Result<Program> program = record_layer(m.spec(), LayerWeights{}, *t);
    REQUIRE(program);
    REQUIRE(run_program(with_rms_qkv(with_rope_append(with_rms_linear(*program))), [&](const auto& args) {
      all.push_back(add_op(flow, args));
      return Status();
    }));
  }
  // RmsQkv 0, context 1, dense 2, RmsLinear 3, dense_4h_to_h 4; the second layer's from 5.
  CHECK(all == std::vector<Tasks>{{}, {0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}});
  // What is not written is not read either.
  for (const void* tensor : {first.attn_in.data, first.qkv.data, first.k.data, first.v.data, first.mlp_in.data})
    CHECK(add(flow, {}, {tensor}) == Tasks{});
}
