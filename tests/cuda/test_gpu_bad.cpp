// What the CUDA backend refuses: each tensor of every op in turn null, on the host, misaligned, misshapen or of a
// foreign dtype, and what has no kernel. A refused call launches nothing and leaves the context usable. Indices in
// device memory cannot be refused: they read and write nothing out of bounds and make NaN.
#include <algorithm>
#include <cstdio>

#include "cuda/runtime/check.hpp"
#include "tests/cuda/device_check.hpp"
#include "tests/support/op_test_case.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;

namespace {

const Setup kSetup{.model = model_of(2, 16, 8, 24),
                   .load = {.batch = 2, .q_len = 1, .kv_len = 5, .capacity = 6},
                   .activation = DType::f16};

/// Makes a fault in a problem's arguments and runs them: refused by one line that holds every part, with no byte
/// written and no error left behind. The arguments are then what they were.
template <class Op, class F>
void check_refused(DeviceProblem<Op>& p, cuda::Context& c, Code code, std::initializer_list<std::string_view> parts,
                   F&& fault) {
  const auto args = p.args();
  const auto before = p.fetch().bytes();
  fault();
  CHECK(refusal_fault(cuda::run(p.args(), c), code, parts) == "");
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  CHECK(p.fetch().bytes() == before);
  p.args() = args;
}

/// The same for a call that is refused as it stands.
template <class Op>
void check_unimplemented(const Setup& s, const std::pair<typename Op::Dims, typename Op::Args>& sizes,
                         std::initializer_list<std::string_view> parts) {
  INFO(Op::name << ": " << describe(s));
  cuda::Context c = context();
  DeviceProblem<Op> p(s, sizes);
  check_refused(p, c, Code::unimplemented, parts, [] {});
}
template <class Op>
void check_unimplemented(const Setup& s, std::initializer_list<std::string_view> parts) {
  check_unimplemented<Op>(s, example_of<Op>(s), parts);
}

template <class Op>
bool has_weights() {
  Problem<Op> p(kSetup);
  return std::any_of(p.blocks().begin(), p.blocks().end(), [](const auto& b) { return is_weight(b.role); });
}

}  // namespace

OP_TEST_CASE("Every tensor of every op is checked before a launch", "[gpu][bad][small]", DeviceOps) {
  cuda::Context c = context();
  DeviceProblem<TestType> p(kSetup);
  alignas(64) static std::byte pageable[64];
  void* pinned = nullptr;
  require_cuda(cudaMallocHost(&pinned, 64));
  for (int nth = 0;; ++nth) {
    std::string name;
    bool may_be_null = false, is_single = false;
    const bool more = change_tensor(p, nth, [&](const TensorSpec& t, auto&) {
      name = std::string("'").append(t.name).append("'");
      may_be_null = t.optional;
      is_single = is_table(t.role) || is_index(t.role);
    });
    if (!more) {
      CHECK(nth >= 2);
      break;
    }
    INFO(TestType::name << ": " << name);
    const auto refused = [&](std::initializer_list<std::string_view> parts, auto change) {
      check_refused(p, c, Code::invalid_argument, parts,
                    [&] { change_tensor(p, nth, [&](const TensorSpec&, auto& view) { change(view); }); });
    };
    if (!may_be_null) refused({TestType::name, name, "is null, expected"}, [](auto& view) { view.data = nullptr; });
    for (void* host : {static_cast<void*>(pageable), pinned})
      refused({TestType::name, name, "points to host memory, expected memory of device 0"},
              [&](auto& view) { view.data = static_cast<decltype(view.data)>(host); });
    refused({TestType::name, name, "is misaligned"}, [](auto& view) { move_pointer(view, 1); });
    if (!is_single)
      refused({TestType::name, name, "is misaligned, expected a multiple of 16 bytes"},
              [](auto& view) { move_pointer(view, size_bytes(view.dtype)); });
    refused({"expected"}, [](auto& view) { view.shape.back() = 0; });
    refused({"expected"}, [](auto& view) { view.shape.back() += 8; });
    refused({"expected"}, [](auto& view) { view.shape.front() = -1; });
    bool typed = false;
    change_tensor(p, nth, [&](const TensorSpec&, auto& view) {
      typed = requires { view.dtype = DType::i32; };
    });
    if (typed)
      refused({TestType::name, name, "has dtype int32, expected"}, [](auto& view) {
        if constexpr (requires { view.dtype = DType::i32; }) view.dtype = DType::i32;
      });
  }
  require_cuda(cudaFreeHost(pinned));
  p.run(c);  // the context is as usable as before
}

TEST_CASE("A launch list that trusts addresses looks at their alignment alone", "[gpu][bad][small]") {
  DeviceProblem<ops::LayerNorm> p(kSetup);
  alignas(64) static std::byte host[64];
  ops::LayerNorm::Args args = p.args();
  args.x.data = host;
  cuda::LaunchList asks(context()), trusts(context());
  trusts.trust_addresses();
  CHECK(refusal_fault(cuda::prepare(args, asks), Code::invalid_argument, {"layernorm: 'x' points to host memory"}) ==
        "");
  CHECK(cuda::prepare(args, trusts));
  CHECK(trusts.size() == 1);
  args.x.data = host + 8;
  CHECK(refusal_fault(cuda::prepare(args, trusts), Code::invalid_argument, {"layernorm: 'x' is misaligned"}) == "");
}

OP_TEST_CASE("float64 is said to be unimplemented on the GPU", "[gpu][bad][small]", DeviceOps) {
  Setup activation = kSetup, weight = kSetup;
  activation.activation = weight.weight = DType::f64;
  cuda::Context c = context();
  if (std::is_same_v<TestType, ops::KvAppend> || std::is_same_v<TestType, ops::AppendRows> ||
      std::is_same_v<TestType, ops::AllGather>)
    DeviceProblem<TestType>(activation).run(c);  // a copy has no arithmetic, and takes any dtype
  else
    check_unimplemented<TestType>(activation, {"cuda takes float16, bfloat16 or float32 activations, got float64"});
  if (has_weights<TestType>())
    check_unimplemented<TestType>(
        weight, {TestType::name, "has dtype float64, cuda takes float16, bfloat16 or float32 weights"});
  else
    DeviceProblem<TestType>(weight).run(c);
}

TEST_CASE("Sizes and dtypes that have no kernel are refused with the reason", "[gpu][bad][small]") {
  const auto with_model = [](const ModelConfig& m) {
    Setup s = kSetup;
    s.model = m;
    return s;
  };
  const Setup odd_hidden = with_model(model_of(1, 156, 4, 24)), wide = with_model(model_of(1, 32776, 4, 24)),
              odd_head = with_model(model_of(2, 12, 4, 24)), wide_head = with_model(model_of(1, 264, 8, 24)),
              odd_intermediate = with_model(model_of(2, 16, 8, 20));
  for (auto [setup, size] : {std::pair{&odd_hidden, "156"}, {&wide, "32776"}}) {
    const std::string part = std::string("cuda takes hidden a multiple of 8 up to 32768, got ") + size;
    check_unimplemented<ops::LayerNorm>(*setup, {"layernorm: ", part});
    check_unimplemented<ops::LayerNormResidual>(*setup, {"layernorm_residual: ", part});
    check_unimplemented<ops::ResidualLayerNorm>(*setup, {"residual_layernorm: ", part});
  }
  check_unimplemented<ops::Embedding>(odd_hidden, {"embedding: cuda takes hidden a multiple of 8, got 156"});
  check_unimplemented<ops::Linear>(odd_hidden, {"linear: cuda takes in a multiple of 8, got 156"});
  check_unimplemented<ops::KvAppend>(odd_head, {"kv_append: cuda takes head_dim a multiple of 8, got 12"});
  check_unimplemented<ops::Rope>(odd_head, {"rope: cuda takes head_dim a multiple of 8, got 12"});
  check_unimplemented<ops::RopeAppend>(odd_head, {"rope_append: cuda takes head_dim a multiple of 8, got 12"});
  check_unimplemented<ops::Attention>(odd_head, {"attention: cuda takes head_dim a multiple of 8, got 12"});
  check_unimplemented<ops::Attention>(wide_head, {"attention: cuda takes head_dim up to 256, got 264"});
  // Of a layer, whichever site it is that has no kernel, no site before it is launched.
  check_unimplemented<ops::DecodeLayer>(odd_hidden, {"hidden a multiple of 8", "got 156"});
  check_unimplemented<ops::DecodeLayer>(odd_head, {"cuda takes head_dim a multiple of 8, got 12"});
  check_unimplemented<ops::DecodeLayer>(wide_head, {"cuda takes head_dim up to 256, got 264"});
  check_unimplemented<ops::DecodeLayer>(odd_intermediate, {"cuda takes in a multiple of 8, got 20"});

  Setup mixed = kSetup;
  mixed.weight = DType::bf16;
  const std::string_view same = "cuda takes float16 activations with weights of the same dtype, got bfloat16";
  check_unimplemented<ops::Linear>(mixed, {"linear: ", same});
  check_unimplemented<ops::DecodeLayer>(mixed, {same});
}

TEST_CASE("GPTQ weights that nobody packed are said to be unimplemented on the GPU", "[gpu][bad][small]") {
  Setup quantised = kSetup;
  quantised.gptq = {4, 16, 0, false};
  check_unimplemented<ops::DecodeLayer>(
      quantised, {"linear: cuda takes GPTQ weights packed by cf::cuda::pack(), got one as checkpoints store it"});
}

TEST_CASE("Scalars out of bounds are refused on the GPU", "[gpu][bad][small]") {
  cuda::Context c = context();
  DeviceProblem<ops::LayerNorm> norm(kSetup);
  check_refused(norm, c, Code::invalid_argument, {"layernorm: eps must be positive"}, [&] { norm.args().eps = 0; });
  DeviceProblem<ops::Attention> attention(kSetup);
  check_refused(attention, c, Code::invalid_argument, {"attention: scale must be positive"},
                [&] { attention.args().scale = std::nan(""); });
  for (std::int64_t most : {0, 7})
    check_refused(attention, c, Code::invalid_argument, {"max_kv_len must be q_len 1 to capacity 6, got"},
                  [&] { attention.args().max_kv_len = most; });

  Setup wide_table = kSetup;
  wide_table.model.rotary_dim = 18;
  DeviceProblem<ops::Rope> rope(wide_table);
  check_refused(rope, c, Code::invalid_argument, {"rope: rotary_dim must be at most head_dim 16, got 18"}, [] {});

  DeviceProblem<ops::DecodeLayer> layer(kSetup);
  check_refused(layer, c, Code::invalid_argument, {"hidden_size must be 1 to 1048576, got 0"},
                [&] { layer.args().model = {}; });
  for (std::int64_t rotary_dim : {7, 18}) {
    ModelConfig m = kSetup.model;
    m.rotary_dim = rotary_dim;
    const std::string part = "rotary_dim must be even, 2 to head_dim 16, got " + std::to_string(rotary_dim);
    check_refused(layer, c, Code::invalid_argument, {part}, [&] { layer.args().model = m; });
  }
  layer.run(c);
}

namespace {

using Bytes = std::span<const std::byte>;

/// A block's elements of its `part`th of `parts` equal parts along the first dimension.
template <class Block>
Bytes part_of(Block& b, std::int64_t part, std::int64_t parts) {
  const std::size_t bytes = b.bytes() / std::size_t(parts);
  return {static_cast<const std::byte*>(b.data()) + std::size_t(part) * bytes, bytes};
}

bool same(Bytes a, Bytes b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

std::int64_t count_nan(Bytes b, DType dtype) {
  std::int64_t n = 0;
  for (std::size_t i = 0; i < b.size() / size_bytes(dtype); ++i)
    n += std::isnan(load_element(b.data(), dtype, std::int64_t(i)));
  return n;
}

/// Runs an op whose index tensor `block` holds `value` for its element `at`: its token comes out NaN where an output
/// depends on the index, a kv_len appends nothing, and the other sequences come out as in `good`.
template <class Op>
void check_bad_index(const Setup& s, Problem<Op>& good, std::size_t block, std::int64_t at, std::int32_t value) {
  INFO(Op::name << ": '" << good.blocks()[block].name << "'[" << at << "] = " << value << ", q_len " << s.load.q_len);
  cuda::Context c = context();
  DeviceProblem<Op> p(s);
  p.run(c);  // so that NaN is not what was there before
  std::byte* element = p.memory()[block].data() + Problem<Op>::guard_bytes + std::size_t(at) * sizeof(value);
  require_cuda(cudaMemcpy(element, &value, sizeof(value), cudaMemcpyHostToDevice));
  Problem<Op>& got = p.run(c);
  const std::int64_t indices = got.blocks()[block].shape[0], tokens = s.load.tokens();
  const std::int64_t sequence = at * s.load.batch / indices;
  const bool is_kv_len = got.blocks()[block].role == Role::length;
  constexpr bool appends = std::is_same_v<Op, ops::LnQkv> || std::is_same_v<Op, ops::RopeAppend>;
  std::int64_t token_nan = 0;
  bool outputs = false;
  for (std::size_t i = 0; i < got.blocks().size(); ++i) {
    auto& b = got.blocks()[i];
    if (!b.written()) continue;
    INFO("in '" << b.name << "'");
    const bool appends_nothing = b.role == Role::state && is_kv_len;
    for (std::int64_t other = 0; other < s.load.batch; ++other)
      if (other != sequence || appends_nothing)
        CHECK(same(part_of(b, other, s.load.batch), part_of(good.blocks()[i], other, s.load.batch)));
    // Outputs of an append's op do not depend on kv_len.
    if (b.role == Role::state || (appends && is_kv_len)) continue;
    outputs = true;
    const std::int64_t token = at * tokens / indices;
    const Bytes row = part_of(b, token, tokens);
    token_nan += count_nan(row, b.dtype);
    if (b.name == "y" || b.name == "output") CHECK(count_nan(row, b.dtype) == element_count(b.shape) / tokens);
  }
  CHECK((token_nan > 0) == outputs);
}

}  // namespace

OP_TEST_CASE("Indices out of bounds in device memory make NaN and touch no one else's memory", "[gpu][bad][small]",
             ops::All) {
  for (std::int64_t q_len : {1, 3}) {
    Setup s = kSetup;
    s.load.q_len = q_len;
    cuda::Context c = context();
    DeviceProblem<TestType> device(s);
    Problem<TestType>& good = device.run(c);
    for (std::size_t i = 0; i < good.blocks().size(); ++i) {
      const auto& b = good.blocks()[i];
      if (!is_index(b.role)) continue;
      std::vector<std::int64_t> bad{INT32_MIN, -1, INT32_MAX};
      if (b.role == Role::length)
        bad.insert(bad.end(), {0, q_len - 1, s.load.capacity + 1, s.load.capacity + q_len});
      else
        bad.push_back(b.role == Role::token_id ? s.model.vocab_size : s.load.capacity);
      for (std::int64_t value : bad)
        for (std::int64_t at : {std::int64_t(0), b.shape[0] - 1})
          check_bad_index<TestType>(s, good, i, at, std::int32_t(value));
    }
  }
}

TEST_CASE("A device is taken for what its properties say, or refused", "[gpu][bad][small]") {
  cudaDeviceProp p{};
  std::snprintf(p.name, sizeof(p.name), "a GPU");
  for (auto [major, minor, number] : {std::tuple{8, 0, "8.0"}, {8, 9, "8.9"}, {10, 0, "10.0"}, {12, 1, "12.1"}}) {
    p.major = major;
    p.minor = minor;
    const std::string got = std::string("has compute capability ") + number;
    CHECK(refusal_fault(cuda::arch_of(p, 3).status(), Code::device_error,
                        {"device 3 (a GPU) ", got, ", expected 9.0 or 12.0"}) == "");
  }
  p.major = 12;
  p.minor = 0;
  p.multiProcessorCount = 170;
  p.sharedMemPerBlockOptin = 101376;
  const Result<cuda::Arch> arch = cuda::arch_of(p, 0);
  REQUIRE(arch);
  CHECK(arch->compute_capability == cuda::kRtx5090.compute_capability);
  CHECK(arch->sm_count == cuda::kRtx5090.sm_count);
  CHECK(arch->smem_per_block_bytes == cuda::kRtx5090.smem_per_block_bytes);

  int count = 0;
  require_cuda(cudaGetDeviceCount(&count));
  for (int device : {-1, count}) {
    const std::string part = "no CUDA device " + std::to_string(device) + ", there are " + std::to_string(count);
    CHECK(refusal_fault(cuda::Context::create(device).status(), Code::device_error, {part}) == "");
  }
}
