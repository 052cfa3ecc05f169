// What every op refuses: each tensor of its contract in turn null, misshapen, misaligned or of a foreign dtype, and the
// scalars and indices out of bounds. Nothing may be written by a call that is refused.
#include "cpu_ref/cpu_ref.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/op_test_case.hpp"
#include "tests/support/setups.hpp"

using namespace cf;
using namespace cf::test;

namespace {

const Setup kSetup{.model = model_of(2, 16, 8, 24), .load = {.batch = 2, .q_len = 1, .kv_len = 5, .capacity = 6}};

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

/// Runs a call that must be refused: the message names the op and the parts, and no byte changes.
template <class Op>
void check_refused(Problem<Op>& p, Code code, std::initializer_list<std::string_view> parts) {
  const auto before = p.bytes();
  const Status s = cpu_ref::run(p.args());
  INFO(s.message());
  REQUIRE_FALSE(s);
  CHECK(s.code() == code);
  for (std::string_view part : parts) {
    INFO("expected to read: " << part);
    CHECK(contains(s.message(), part));
  }
  CHECK_FALSE(contains(s.message(), "\n"));
  CHECK(p.bytes() == before);
}

}  // namespace

OP_TEST_CASE("Every tensor of every op is checked", "[bad]", ops::Contracts) {
  Setup setup = kSetup;
  setup.gptq = GENERATE(GptqSetup{}, GptqSetup{4, 16, 0, false});
  for (int nth = 0;; ++nth) {
    Problem<TestType> null(setup), shape(setup), aligned(setup), dtype(setup);
    std::string name;
    bool may_be_null = false, more = change_tensor(null, nth, [&](const TensorSpec&t, auto&view) {
                                name = std::string("'").append(t.name).append("'");
                                may_be_null = t.optional;
                                view.data = nullptr;
                              });
    if (!more) {
      CHECK(nth >= 2);
      break;
    }
    INFO(TestType::name << ": " << name);
    // Without the tensor the call may be another one that has no such tensor, as linear_sum is without a residual.
    bool is_asked_for = false;
    TestType::tensors(TestType::dims(null.args()), null.args(), [&](const TensorSpec& t, auto&, auto) {
      is_asked_for = is_asked_for || name == std::string("'").append(t.name).append("'");
    });
    if (is_asked_for && !may_be_null)
      check_refused(null, Code::invalid_argument, {TestType::name, name, "null", "expected"});

    // A last dimension of 0 contradicts the other tensors' sizes, or is below 1.
    change_tensor(shape, nth, [](const TensorSpec&, auto& view) { view.shape.back() = 0; });
    check_refused(shape, Code::invalid_argument, {"expected"});

    change_tensor(aligned, nth, [](const TensorSpec&, auto& view) { move_pointer(view, 1); });
    check_refused(aligned, Code::invalid_argument, {TestType::name, name, "misaligned"});

    bool typed = false;
    change_tensor(dtype, nth, [&](const TensorSpec&, auto& view) {
      if constexpr (requires { view.dtype = DType::i32; }) {
        view.dtype = DType::i32;
        typed = true;
      }
    });
    if (typed) check_refused(dtype, Code::invalid_argument, {TestType::name, name, "int32", "expected"});
  }
}

OP_TEST_CASE("Activations of two dtypes in one call are refused", "[bad]", ops::Contracts) {
  Problem<TestType> p(kSetup);
  int activations = 0;
  std::string second;
  TestType::tensors(p.dims(), p.args(), [&](const TensorSpec& t, auto& view, auto) {
    if constexpr (requires { view.dtype = DType::f64; })
      if (is_activation(t.role) && ++activations == 2) {
        view.dtype = DType::f64;
        second = t.name;
      }
  });
  if (activations >= 2)
    check_refused(p, Code::invalid_argument, {second, "float64", "expected float32"});
  else
    CHECK(std::string(TestType::name) == "embedding");
}

OP_TEST_CASE("16-bit activations are said to be unimplemented on the CPU", "[bad]", ops::Contracts) {
  Setup s = kSetup;
  s.activation = DType::f16;
  if (std::string(TestType::name) == "kv_append" || std::string(TestType::name) == "append_rows" ||
      std::string(TestType::name) == "all_gather") {
    Problem<TestType> p(s);  // a copy has no arithmetic, and takes any dtype
    CHECK(cpu_ref::run(p.args()));
    return;
  }
  Problem<TestType> p(s);
  check_refused(p, Code::unimplemented, {"float16", "float32 or float64"});
}

TEST_CASE("append_rows refuses rows, lengths and runs that are not its token's", "[bad]") {
  const auto refused = [](std::int64_t first, std::int64_t last, std::string_view text) {
    Problem<ops::AppendRows> p(kSetup);  // rows 2 to 4 of six, of a cache of six entries
    p.args().rows.first = first;
    p.args().rows.last = last;
    check_refused(p, Code::invalid_argument, {text});
  };
  refused(-1, 4, "append_rows: first must be 0 to last 4, got -1");
  refused(5, 4, "append_rows: first must be 0 to last 4, got 5");
  refused(INT64_MIN, INT64_MAX, "append_rows: first must be 0 to last 9223372036854775807, got -9223372036854775808");
  refused(2, 6, "append_rows: last must be at most 5, the last row or entry that there is, got 6");
  refused(2, 3, "append_rows: 'kv_len'[0] must be last + 1 = 4, got 5");
  Problem<ops::AppendRows> p(kSetup);
  const std::vector<RowRun> runs{{0, 0, 1}};
  p.args().append.runs = runs;
  check_refused(p, Code::invalid_argument, {"append_rows: runs must be empty"});
}

TEST_CASE("Scalars out of bounds are refused", "[bad]") {
  for (double eps : {0.0, -1e-5, std::nan("")}) {
    Problem<ops::LayerNorm> a(kSetup);
    a.args().eps = eps;
    check_refused(a, Code::invalid_argument, {"layernorm: eps must be positive"});
    Problem<ops::LayerNormResidual> b(kSetup);
    b.args().eps = eps;
    check_refused(b, Code::invalid_argument, {"layernorm_residual: eps must be positive"});
    Problem<ops::ResidualLayerNorm> c(kSetup);
    c.args().eps = eps;
    check_refused(c, Code::invalid_argument, {"residual_layernorm: eps must be positive"});
    Problem<ops::QkNorm> n(kSetup);
    n.args().eps = eps;
    check_refused(n, Code::invalid_argument, {"qk_norm: eps must be positive"});
    Problem<ops::Attention> d(kSetup);
    d.args().scale = eps;
    check_refused(d, Code::invalid_argument, {"attention: scale must be positive"});
  }
  for (std::int64_t most : {0, 7}) {
    Problem<ops::Attention> p(kSetup);
    p.args().max_kv_len = most;
    check_refused(p, Code::invalid_argument,
                  {"max_kv_len must be q_len 1 to capacity 6", "got " + std::to_string(most)});
  }
}

TEST_CASE("Heads that do not make up the product are refused", "[bad]") {
  for (std::int64_t kv_heads : {-1, 0, 3, 4}) {
    Problem<ops::QkNorm> p(
        kSetup, {{2, 4, 1, 16, ops::QkvLayout::separate}, {.layout = ops::QkvLayout::separate, .kv_heads = 1}});
    p.args().kv_heads = kv_heads;
    check_refused(p, Code::invalid_argument,
                  {"qk_norm: kv_heads must be at least 1 and leave a head of q, got " + std::to_string(kv_heads)});
  }
}

TEST_CASE("Indices out of bounds are refused", "[bad]") {
  const auto set = [](auto& p, const char* name, std::int32_t value) {
    for (auto& b : p.blocks())
      if (b.name == name) static_cast<std::int32_t*>(b.data())[1] = value;
  };
  for (std::int32_t kv_len : {-1, 7}) {
    Problem<ops::KvAppend> append(kSetup);
    set(append, "kv_len", kv_len);
    check_refused(append, Code::invalid_argument,
                  {"kv_append: 'kv_len'[1] must be 1 to 6", "got " + std::to_string(kv_len)});
    Problem<ops::RopeAppend> rope_append(kSetup);
    set(rope_append, "kv_len", kv_len);
    check_refused(rope_append, Code::invalid_argument,
                  {"rope_append: 'kv_len'[1] must be 1 to 6", "got " + std::to_string(kv_len)});
  }
  for (std::int32_t kv_len : {-1, 6}) {
    Problem<ops::Attention> attention(kSetup);
    set(attention, "kv_len", kv_len);
    check_refused(attention, Code::invalid_argument,
                  {"attention: 'kv_len'[1] must be 1 to 5", "got " + std::to_string(kv_len)});
  }
  for (std::int32_t position : {-1, 6}) {
    Problem<ops::Rope> rope(kSetup);
    set(rope, "positions", position);
    check_refused(rope, Code::invalid_argument,
                  {"rope: 'positions'[1] must be 0 to 5", "got " + std::to_string(position)});
    Problem<ops::RopeAppend> rope_append(kSetup);
    set(rope_append, "positions", position);
    check_refused(rope_append, Code::invalid_argument,
                  {"rope_append: 'positions'[1] must be 0 to 5", "got " + std::to_string(position)});
  }
  for (std::int32_t id : {-1, 37}) {
    Problem<ops::Embedding> embedding(kSetup);
    set(embedding, "ids", id);
    check_refused(embedding, Code::invalid_argument,
                  {"embedding: 'ids'[1] must be 0 to 36", "got " + std::to_string(id)});
  }
  for (std::int32_t position : {-1, 12}) {
    Problem<ops::Embedding> embedding(kSetup, {{2, 37, 32, 12}, {}});
    set(embedding, "positions", position);
    check_refused(embedding, Code::invalid_argument,
                  {"embedding: 'positions'[1] must be 0 to 11", "got " + std::to_string(position)});
  }
}

TEST_CASE("A table wider than a head is refused", "[bad]") {
  Setup s = kSetup;
  s.model.rotary_dim = 18;
  Problem<ops::Rope> p(s);
  check_refused(p, Code::invalid_argument, {"rope: rotary_dim must be at most head_dim 16, got 18"});
  Problem<ops::RopeAppend> append(s);
  check_refused(append, Code::invalid_argument, {"rope_append: rotary_dim must be at most head_dim 16, got 18"});
}

TEST_CASE("Query heads that kv_heads does not divide are refused", "[bad]") {
  for (auto [heads, kv_heads] : {std::pair<std::int64_t, std::int64_t>{4, 3}, {2, 4}}) {
    Setup s = kSetup;
    s.model = model_of(heads, 16, 8, 24);
    s.kv_heads = kv_heads;
    const std::string expected =
        "heads must be a multiple of kv_heads " + std::to_string(kv_heads) + ", got " + std::to_string(heads);
    Problem<ops::Attention> attention(s);
    check_refused(attention, Code::invalid_argument, {"attention: ", expected});
    Problem<ops::LnQkvHeads> projection(s);
    check_refused(projection, Code::invalid_argument, {"ln_qkv_heads: ", expected});
  }
}

TEST_CASE("Keys and values of different kv heads are refused", "[bad]") {
  Setup s = kSetup;
  s.kv_heads = 1;
  Problem<ops::Attention> p(s);
  p.args().v_cache.shape[1] = 2;
  check_refused(p, Code::invalid_argument, {"attention: 'v_cache' has shape (2, 2, 6, 16), expected (2, 1, 6, 16)"});
}

TEST_CASE("rope_append refuses a cache of fewer heads than qkv has", "[bad]") {
  for (auto [name, refused] :
       {std::pair{"k_cache", &ops::RopeAppend::Args::k_cache}, {"v_cache", &ops::RopeAppend::Args::v_cache}}) {
    Problem<ops::RopeAppend> p(kSetup);
    (p.args().*refused).shape[1] = 1;
    check_refused(p, Code::invalid_argument,
                  {"rope_append: '", name, "' has shape (2, 1, 6, 16), expected (2, 2, 6, 16)"});
  }
}

TEST_CASE("More new tokens than the cache holds are refused", "[bad]") {
  Problem<ops::KvAppend> p(kSetup, {{.batch = 1, .q_len = 4, .kv_heads = 2, .head_dim = 16, .capacity = 3}, {}});
  check_refused(p, Code::invalid_argument, {"kv_append: q_len must be at most capacity 3, got 4"});
  auto sizes = example_of<ops::RopeAppend>(kSetup);
  sizes.first.q_len = 7;
  Problem<ops::RopeAppend> rope_append(kSetup, sizes);
  check_refused(rope_append, Code::invalid_argument, {"rope_append: q_len must be at most capacity 6, got 7"});
}

TEST_CASE("A residual goes with its epilogue and with nothing else", "[bad]") {
  Problem<ops::Linear> stray(kSetup, {{2, 8, 4, true}, {.epilogue = ops::Epilogue::residual}});
  stray.args().epilogue = ops::Epilogue::none;
  check_refused(stray, Code::invalid_argument, {"linear: 'residual' is given, expected Epilogue::residual"});
  Problem<ops::Linear> missing(kSetup, {{2, 8, 4, false}, {}});
  missing.args().epilogue = ops::Epilogue::residual;
  check_refused(missing, Code::invalid_argument, {"linear: 'residual' is null"});
}

TEST_CASE("A layer writes nothing where a later site would refuse its arguments", "[bad]") {
  Setup setup = kSetup;
  setup.model = model_of(2, 16, 8, 32);
  setup.gptq = {.bits = 4, .group_size = 32};
  for (const auto& [block, value, expected] :
       {std::tuple{"kv_len", 6, "decode_layer: 'kv_len'[1] must be 1 to 5, got 6 (0 is idle)"},
        std::tuple{"positions", 6, "decode_layer: 'positions'[1] must be 0 to 5, got 6"},
        std::tuple{"mlp.dense_4h_to_h.g_idx", 1, "decode_layer: 'mlp.dense_4h_to_h.g_idx'[1] must be 0 to 0, got 1"}}) {
    Problem<ops::DecodeLayer> p(setup);
    for (auto& b : p.blocks())
      if (b.name == block) static_cast<std::int32_t*>(b.data())[1] = value;
    check_refused(p, Code::invalid_argument, {expected});
  }
  Problem<ops::DecodeLayer> p(setup);
  p.args().t.max_kv_len = 7;
  check_refused(p, Code::invalid_argument, {"max_kv_len must be q_len 1 to capacity 6, got 7"});
}

TEST_CASE("A layer without a model, or of a model that has no such layer, is refused", "[bad]") {
  Problem<ops::DecodeLayer> p(kSetup);
  const ModelSpec sound = p.args().model;
  p.args().model = {};
  check_refused(p, Code::invalid_argument, {"hidden_size must be 1 to 1048576, got 0"});
  p.args().model = sound;
  p.args().model.shape.rotary_dim = 3;
  check_refused(p, Code::invalid_argument, {"rotary_dim must be even, 2 to head_dim", "got 3"});
  p.args().model = sound;
  p.args().model.shape.num_heads *= 2;
  check_refused(p, Code::invalid_argument, {"kv_heads must be heads"});
  p.args().model = sound;
  p.args().model.traits.window = -1;
  check_refused(p, Code::invalid_argument, {"window must be 0 or more, got -1"});
  for (std::int64_t window : {p.args().t.max_kv_len - 1, p.args().t.max_kv_len}) {
    p.args().model.traits.window = window;
    CHECK(cpu_ref::run(p.args()).message() == "");
  }
}
