// Products with fp8 weights on the GPU against the oracle, and small models of such weights.
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/fp8.hpp"
#include "tests/cuda/device_check.hpp"
#include "tests/cuda/small_model.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;
using ops::Epilogue;

namespace {

/// What a scale belongs to.
enum class Scales { row, matrix, block };
constexpr Scales kScales[] = {Scales::row, Scales::matrix, Scales::block};

/// An fp8 matrix in memory that the host and the GPU read at the same address.
class SharedFp8 {
 public:
  /// `code(i)` is the bits of element i.
  template <class Code>
  SharedFp8(std::int64_t out, std::int64_t in, std::int64_t group_size, Code code, float scale, std::uint64_t seed = 1)
      : weight_(fp8_outline(out, in, group_size)) {
    void* memory = nullptr;
    require_cuda(cudaMallocManaged(&memory, std::size_t(weight_.data.bytes())));
    memory_.reset(memory);
    weight_.data.data = static_cast<const std::int32_t*>(memory);
    auto* const codes = static_cast<e4m3*>(memory);
    for (std::int64_t i = 0; i < out * in; ++i) codes[i].bits = std::uint8_t(code(i));
    const Fp8Weight w = fp8_of(weight_);
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<float> around(0.5f, 1.5f);
    for (std::int64_t i = 0; i < out * w.groups(); ++i)
      const_cast<float*>(w.scales)[i] = seed == 0 ? scale : scale * around(random);
  }
  const PackedWeight& weight() const { return weight_; }
  Fp8Weight view() const { return fp8_of(weight_); }

 private:
  struct Free {
    void operator()(void* memory) const {
      cudaDeviceSynchronize();
      cudaFree(memory);
    }
  };
  PackedWeight weight_;
  std::unique_ptr<void, Free> memory_;
};

/// Random codes without NaN.
SharedFp8 random_fp8(std::int64_t out, std::int64_t in, Scales scales, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto code = [&](std::int64_t) {
    const auto bits = random();
    return (bits & 0x7f) == 0x7f ? bits ^ 1 : bits;
  };
  const std::int64_t group = scales == Scales::block ? std::min<std::int64_t>(128, in) : in;
  return SharedFp8(out, in, group, code, 0x1p-10f, scales == Scales::matrix ? 0 : seed + 1);
}

Setup setup(DType activation, std::uint64_t seed = 1) {
  Setup s{.model = model_of(1, 2, 2, 2), .activation = activation, .seed = seed};
  s.weight = s.values = activation == DType::f32 ? DType::f16 : activation;
  return s;
}

/// check_on_device() of a product with this weight.
bool check_fp8_on_device(const Setup& s, std::int64_t tokens, std::int64_t out, Epilogue epilogue, const SharedFp8& w,
                         bool has_bias = true) {
  Problem<ops::Linear> p(s, linear_example(tokens, w.view().in, out, epilogue));
  return check_on_device<ops::Linear>(s, p, {}, [&](ops::Linear::Args& a) {
    a.linear.weight = w.weight();
    if (!has_bias) a.linear.bias = {};
  });
}

/// A product's bytes of y, where the rows of x from `tokens` on are NaN and y has `tokens` rows, from `first` on.
std::vector<std::byte> y_of(DeviceProblem<ops::Linear>& p, Problem<ops::Linear>& host, const SharedFp8& w,
                            cuda::Context& c, std::int64_t first, std::int64_t tokens) {
  ops::Linear::Args a = p.args();
  const std::int64_t in = a.x.shape[1], out = a.y.shape[1], all = a.x.shape[0];
  p.restore(host);
  const auto part = [&](auto view, std::int64_t columns) {
    using Pointer = decltype(view.data);
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte, std::byte>;
    view.data = static_cast<Byte*>(view.data) + first * columns * std::int64_t(size_bytes(view.dtype));
    view.shape[0] = tokens;
    return view;
  };
  const std::int64_t row_bytes = in * std::int64_t(size_bytes(a.x.dtype));
  auto* const x = static_cast<std::byte*>(const_cast<void*>(a.x.data));
  require_cuda(cudaMemset(x, 0xff, std::size_t(first * row_bytes)));
  require_cuda(cudaMemset(x + (first + tokens) * row_bytes, 0xff, std::size_t((all - first - tokens) * row_bytes)));
  a.x = part(a.x, in);
  a.y = part(a.y, out);
  if (a.residual) a.residual = part(a.residual, out);
  a.linear.weight = w.weight();
  require_cuda(cudaDeviceSynchronize());
  const Status s = cuda::run(a, c);
  INFO(s.message());
  REQUIRE(s);
  require_cuda(cudaDeviceSynchronize());
  std::vector<std::byte> bytes(std::size_t(a.y.bytes()));
  require_cuda(cudaMemcpy(bytes.data(), a.y.data, bytes.size(), cudaMemcpyDefault));
  return bytes;
}

}  // namespace

TEST_CASE("linear on the GPU: fp8 weights with every kind of scales, number of tokens and size", "[gpu][fp8]") {
  for (Scales scales : kScales)
    for (auto [in, out] : {std::pair<std::int64_t, std::int64_t>{16, 8},
                           {128, 16},
                           {144, 41},
                           {264, 63},
                           {640, 72},
                           {1296, 33},
                           {4096, 24}}) {
      for (Epilogue epilogue : {Epilogue::none, Epilogue::swiglu}) {
        const SharedFp8 w = random_fp8(out * ops::rows_of_output(epilogue), in, scales, std::uint64_t(in));
        for (DType activation : {DType::f16, DType::bf16, DType::f32})
          for (std::int64_t tokens : {1, 2, 7, 8, 9, 15, 16, 17, 64, 129}) {
            if (in > 1000 && tokens > 17) continue;  // the oracle takes these long
            INFO("in " << in << ", out " << out << ", tokens " << tokens << ", scales " << int(scales));
            CHECK(check_fp8_on_device(setup(activation, std::uint64_t(tokens)), tokens, out, epilogue, w));
          }
      }
    }
}

TEST_CASE("linear on the GPU: fp8 weights with every epilogue, with and without a bias, of another type too",
          "[gpu][fp8]") {
  for (Epilogue epilogue : kEpilogues)
    for (Scales scales : {Scales::row, Scales::block}) {
      const SharedFp8 w = random_fp8(72 * ops::rows_of_output(epilogue), 400, scales, 3);
      for (DType activation : {DType::f16, DType::bf16, DType::f32})
        for (std::int64_t tokens : {1, 5, 16, 23, 100, 300})
          for (bool has_bias : {true, false}) {
            INFO("tokens " << tokens << ", epilogue " << int(epilogue));
            Setup s = setup(activation);
            CHECK(check_fp8_on_device(s, tokens, 72, epilogue, w, has_bias));
            if (tokens > 23) continue;
            s.weight = DType::f32;
            CHECK(check_fp8_on_device(s, tokens, 72, epilogue, w, has_bias));
          }
    }
}

TEST_CASE("linear on the GPU: small products of fp8 weights for compute-sanitizer", "[gpu][fp8][small]") {
  for (Scales scales : {Scales::row, Scales::block})
    for (std::int64_t in : {24, 272})
      for (std::int64_t tokens : {1, 9, 70, 140}) {
        const SharedFp8 w = random_fp8(66, in, scales, 5);
        CHECK(check_fp8_on_device(setup(DType::bf16), tokens, 66, Epilogue::residual, w));
        CHECK(check_fp8_on_device(setup(DType::f16), tokens, 33, Epilogue::swiglu, w));
      }
}

TEST_CASE("linear on the GPU: every float8 number times one is itself", "[gpu][fp8]") {
  // Row o has number o + k in column k. A token is one in one column: y is the number, of either 16-bit type.
  constexpr std::int64_t in = 256, out = 256;
  const auto code = [](std::int64_t i) {
    const std::int64_t bits = (i / in + i % in) % 256;
    return (bits & 0x7f) == 0x7f ? 0 : bits;
  };
  for (Scales scales : {Scales::row, Scales::block}) {
    const SharedFp8 w(out, in, scales == Scales::block ? 128 : in, code, 1.f, 0);
    for (DType activation : {DType::f16, DType::bf16, DType::f32})
      for (std::int64_t tokens : {4, 12, 200}) {
        Problem<ops::Linear> host(setup(activation), linear_example(tokens, in, out));
        for (auto& b : host.blocks())
          if (b.name == "x" || b.name == "bias")
            dispatch_float(b.dtype, [&](auto zero) {
              using T = decltype(zero);
              for (std::int64_t i = 0; i < element_count(b.shape); ++i)
                static_cast<T*>(b.data())[i] = narrow<T>(b.name == "x" && i % in == i / in * 37 % in ? 1 : 0);
            });
        DeviceProblem<ops::Linear> p(host);
        p.args().linear.weight = w.weight();
        cuda::Context c = context();
        Problem<ops::Linear>& got = p.run(c);
        const Tensor y = got.tensor(got.blocks().back());
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < tokens * out; ++i)
          wrong += y.at(i) != widen<double>(w.view().codes[i % out * in + i / out * 37 % in]);
        INFO(to_string(activation) << ", tokens " << tokens);
        CHECK(wrong == 0);
      }
  }
}

TEST_CASE("linear on the GPU: fp8 weights of the largest and of subnormal numbers, and heavy-tailed activations",
          "[gpu][fp8]") {
  constexpr std::int64_t in = 1024, out = 40;
  std::mt19937_64 random(9);
  const auto largest = [&](std::int64_t) { return 0x7e | (random() & 0x80); };
  const auto subnormal = [&](std::int64_t) { return random() & 0x87; };
  for (std::int64_t group : {std::int64_t(128), in})
    for (bool is_large : {false, true}) {
      const SharedFp8 w =
          is_large ? SharedFp8(out, in, group, largest, 0x1p-12f) : SharedFp8(out, in, group, subnormal, 0x1p+3f);
      for (DType activation : {DType::f16, DType::bf16})
        for (Fill fill : {Fill::normal, Fill::heavy_tailed, Fill::shifted})
          for (std::int64_t tokens : {1, 11, 90}) {
            Setup s = setup(activation);
            s.fill = fill;
            INFO("large " << is_large << ", group " << group << ", tokens " << tokens);
            CHECK(check_fp8_on_device(s, tokens, out, Epilogue::none, w));
          }
    }
}

TEST_CASE(
    "linear on the GPU: fp8 weights give a token the same bits, whatever its launch's other tokens and rows behind",
    "[gpu][fp8]") {
  cuda::Context c = context();
  for (DType activation : {DType::f16, DType::bf16})
    for (Scales scales : {Scales::row, Scales::block})
      for (std::int64_t in : {264, 1296, 4096}) {
        const std::int64_t out = 56;
        const SharedFp8 w = random_fp8(out, in, scales, std::uint64_t(in));
        Problem<ops::Linear> host(setup(activation), linear_example(48, in, out, Epilogue::residual));
        DeviceProblem<ops::Linear> p(host);
        const std::vector<std::byte> all = y_of(p, host, w, c, 0, 16);
        const std::size_t row_bytes = all.size() / 16;
        std::int64_t wrong = 0;
        for (std::int64_t tokens = 1; tokens <= 16; ++tokens) {
          const std::vector<std::byte> got = y_of(p, host, w, c, 0, tokens);
          wrong += std::memcmp(got.data(), all.data(), got.size()) != 0;
          const std::vector<std::byte> last = y_of(p, host, w, c, 16 - tokens, tokens);
          wrong += std::memcmp(last.data(), all.data() + std::size_t(16 - tokens) * row_bytes, last.size()) != 0;
        }
        const std::vector<std::byte> many = y_of(p, host, w, c, 0, 40);
        wrong += std::memcmp(many.data(), all.data(), all.size()) != 0;
        INFO("in " << in << ", scales " << int(scales) << ", " << to_string(activation));
        CHECK(wrong == 0);
      }
  // In tiles of tokens, too: any number of them, at any place.
  for (DType activation : {DType::f16, DType::bf16}) {
    const SharedFp8 w = random_fp8(136, 656, Scales::block, 2);
    Problem<ops::Linear> host(setup(activation), linear_example(280, 656, 136, Epilogue::residual));
    DeviceProblem<ops::Linear> p(host);
    const std::vector<std::byte> all = y_of(p, host, w, c, 0, 280);
    const std::size_t row_bytes = all.size() / 280;
    for (auto [first, tokens] : {std::pair<std::int64_t, std::int64_t>{0, 65}, {0, 129}, {7, 128}, {100, 180}}) {
      const std::vector<std::byte> got = y_of(p, host, w, c, first, tokens);
      INFO(to_string(activation) << ", " << tokens << " tokens from " << first << " on");
      CHECK(std::memcmp(got.data(), all.data() + std::size_t(first) * row_bytes, got.size()) == 0);
    }
  }
}

TEST_CASE("linear on the GPU: fp8 weights give the same bits a thousand times", "[gpu][fp8]") {
  cuda::Context c = context();
  for (auto [tokens, in, out] :
       {std::array<std::int64_t, 3>{1, 4096, 6144}, {8, 14336, 512}, {16, 2560, 512}, {130, 1280, 256}}) {
    const SharedFp8 w = random_fp8(out, in, Scales::block, 4);
    DeviceProblem<ops::Linear> p(setup(DType::bf16), linear_example(tokens, in, out));
    p.args().linear.weight = w.weight();
    const auto first = p.run(c).bytes();
    for (int i = 1; i < 1000; ++i) REQUIRE(cuda::run(p.args(), c));
    CHECK(p.fetch().bytes() == first);
  }
}

TEST_CASE("linear on the GPU: fp8 weights that no kernel takes are refused by name", "[gpu][fp8][bad]") {
  cuda::Context c = context();
  const auto refused = [&](std::int64_t in, std::int64_t group, std::string_view part) {
    const SharedFp8 w(
        16, in, group, [](std::int64_t) { return 0x38; }, 1.f);
    DeviceProblem<ops::Linear> p(setup(DType::f16), linear_example(2, in, 16));
    p.args().linear.weight = w.weight();
    CHECK(refusal_fault(cuda::run(p.args(), c), Code::unimplemented, {part}) == "");
  };
  refused(132, 132, "linear: cuda takes in a multiple of 8, got 132");
  refused(128, 20, "linear: cuda takes fp8 groups of a multiple of 8, got 20");
}

TEST_CASE("model on the GPU: fp8 weights: a prompt and then single tokens are the oracle's", "[gpu][fp8][model]") {
  const DType dtype = GENERATE(DType::f16, DType::bf16);
  const Impl impl = GENERATE(Impl::unfused, Impl::graph);
  const bool gated = GENERATE(false, true);
  const WeightFormat linears = GENERATE(WeightFormat{.bits = 8, .group_size = -1, .is_fp8 = true},
                                        WeightFormat{.bits = 8, .group_size = 128, .is_fp8 = true});
  const Small small(dtype, linears, gated ? gated_config() : small_config());
  const Ids ids = ids_of(80, 2);
  const Reference reference = reference_of(small, ids);
  for (std::size_t split : {1, 9, 70}) {
    const auto model = small.model({.capacity = 96, .chunk = 96, .impl = impl});
    CAPTURE(to_string(impl), gated, linears.group_size, split);
    require_ok(model->prefill(0, 0, std::span(ids).first(split)));
    check_rows(row_of(*model, 0), reference, std::int64_t(split) - 1);
    for (std::size_t i = split; i < ids.size(); ++i) {
      const ModelRunner::Token token{0, ids[i], std::int64_t(i)};
      require_ok(model->step(std::span(&token, 1)));
      check_rows(row_of(*model, 0), reference, std::int64_t(i));
    }
  }
}

TEST_CASE("model on the GPU: fp8 weights: many sequences, the graph by itself, its bytes, weights in place and swapped",
          "[gpu][fp8][model][small]") {
  const WeightFormat linears{.bits = 8, .group_size = 128, .is_fp8 = true};
  const Small small(DType::bf16, linears, gated_config());
  const ModelSpec spec = small.config;
  const std::int64_t slots = GENERATE(1, 5, 20);
  const Model::Options options{.slots = slots, .capacity = 64, .chunk = 128};
  const auto all_rows = [&](Model& model) {
    std::string all;
    for (std::int64_t s = 0; s < slots; ++s) require_ok(model.prefill(s, 0, ids_of(7 + s % 5, std::uint64_t(s))));
    for (std::int64_t step = 0; step < 3; ++step) {
      std::vector<ModelRunner::Token> tokens;
      for (std::int64_t s = 0; s < slots; ++s)
        tokens.push_back({s, ids_of(4, std::uint64_t(90 + s))[std::size_t(step)], 7 + s % 5 + step});
      require_ok(model.step(tokens));
      for (std::int64_t s = 0; s < slots; ++s) all += bits(row_of(model, s));
    }
    return all;
  };
  const auto model = small.model(options);
  CHECK(model->impl() == Impl::graph);
  const std::string expected = all_rows(*model);
  for (std::int64_t s = 0; s < slots; ++s) {
    Ids ids = ids_of(7 + s % 5, std::uint64_t(s));
    const Ids more = ids_of(4, std::uint64_t(90 + s));
    ids.insert(ids.end(), more.begin(), more.begin() + 3);
    check_rows(row_of(*model, s), reference_of(small, ids), std::int64_t(ids.size()) - 1);
  }
  // The launches one by one, and weights where they lie, have the same bits.
  Model::Options unfused = options;
  unfused.impl = Impl::unfused;
  CHECK((all_rows(*small.model(unfused)) == expected));
  const auto source = taken(cuda::ResidentWeights::load(context(), spec, DType::bf16, small.weights->weights));
  CHECK(double(source.device_bytes()) >=
        double(weight_bytes(spec, small.weights->weights) + packed_bytes(spec, small.weights->weights)));
  Model::Options in_place = options;
  in_place.in_place = true;
  const auto there = taken(Model::create(context(), "gated", spec, source.model_weights(), in_place));
  CHECK((all_rows(*there) == expected));
  CHECK(model->bytes().weights >= Model::bytes(spec, small.weights->weights, options).weights);

  // Other weights in their place, and back.
  Small other = small;
  other.weights = std::make_shared<OwnedModelWeights>(procedural_model(small.config, DType::bf16, 8, linears));
  require_ok(model->swap_weights(spec, other.weights->weights, other.weights));
  CHECK((all_rows(*model) == all_rows(*other.model(options))));
  require_ok(model->swap_weights(spec, small.weights->weights, small.weights));
  CHECK((all_rows(*model) == expected));

  if (slots > 1) return;
  for (Impl impl : {Impl::split, Impl::layer, Impl::persistent}) {
    Model::Options o = options;
    o.impl = impl;
    CHECK(refusal_fault(small.try_model(o).status(), Code::unimplemented,
                        {"the persistent kernel has dense and packed GPTQ weights, no fp8 ones"}) == "");
  }
}
