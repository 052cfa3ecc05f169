// Products of many tokens on the GPU, against the oracle within linear's budget: on Hopper's tensor cores, and through
// cuBLASLt. The latter need the library: where the dynamic linker does not find it, CF_CUBLASLT names its file.
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "cpu_ref/dequantise.hpp"
#include "cuda/ops/linear/cublaslt/cublaslt.hpp"
#include "cuda/ops/linear/cublaslt/library.hpp"
#include "cuda/ops/linear/cublaslt/plan.hpp"
#include "cuda/ops/linear/gemv/plan.hpp"
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/ops/linear/tiles/tiles.hpp"
#include "cuda/ops/linear/wgmma/packed_plan.hpp"
#include "cuda/runtime/memory.hpp"
#include "cuda/runtime/stream.hpp"
#include "cuda/step/graph.hpp"
#include "tests/cuda/device_check.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;
using ops::Epilogue;
using Dims = ops::Linear::Dims;
using Args = ops::Linear::Args;

namespace {

constexpr Epilogue kGeluEpilogues[] = {Epilogue::gelu_erf, Epilogue::gelu_tanh};
/// The numbers are the same for all GPUs.
constexpr const cuda::Tuning& kTuning = cuda::kH200Tuning;
/// The fewest tokens that cuBLASLt takes of any weight by library_context(), and other numbers of tokens.
constexpr std::int64_t kMany = std::max({kTuning.gemv_tokens, kTuning.packed_tokens, kTuning.wgmma_tokens}) + 1;
constexpr std::int64_t kTokens[] = {kTuning.gemv_tokens + 1, 17, 31, kTuning.packed_tokens + 1, kMany, 512};

/// Scratch memory with room for these tests' products.
class DeviceScratch {
 public:
  explicit DeviceScratch(std::size_t bytes = std::size_t(96) << 20) {
    Result<cuda::DeviceMemory> memory = cuda::DeviceMemory::create(context(), bytes, "a test's scratch memory");
    INFO(memory.status().message());
    REQUIRE(memory);
    memory_ = std::move(*memory);
    const Result<std::string> library = cuda::gemm_library();
    INFO(library.status().message() << "; CF_CUBLASLT may name the file");
    REQUIRE(library);
  }
  cuda::Scratch get() const { return {memory_.data(), memory_.bytes()}; }

 private:
  cuda::DeviceMemory memory_;
};

Setup setup(DType dtype, const GptqSetup& gptq = {}, std::uint64_t seed = 1) {
  Setup s{.model = model_of(1, 2, 2, 2), .activation = dtype, .gptq = gptq, .seed = seed};
  s.weight = s.values = dtype;
  return s;
}

std::pair<Dims, Args> linear(std::int64_t tokens, std::int64_t in, std::int64_t out,
                             Epilogue epilogue = Epilogue::none) {
  return linear_example(tokens, in, out, epilogue);
}

/// Whether a product of two hostile sums is beyond the dtype's range.
bool overflows(DType dtype, Epilogue epilogue) { return dtype == DType::f16 && epilogue == Epilogue::swiglu; }

void no_bias(Args& a) { a.linear.bias = {}; }

/// A context whose plans leave every product of many tokens in 16 bits to cuBLASLt: some go to Hopper's own kernels.
cuda::Context library_context(cudaStream_t stream = nullptr) { return contexts(stream)[1]; }

/// Whether Hopper's tensor cores take a product by the plans of the test's own GPU.
bool takes_wgmma(std::int64_t tokens, std::int64_t in, std::int64_t out, DType dtype, bool packed,
                 Epilogue epilogue = Epilogue::none) {
  const cuda::Arch arch = context().arch();
  return cuda::is_linear_wgmma(arch, tokens, in, out * ops::rows_of_output(epilogue), dtype, packed) ||
         cuda::is_linear_tiles(arch, tokens, in, out, dtype, packed, epilogue);
}

/// The same of a packed weight with `rows` rows.
bool takes_packed(std::int64_t tokens, std::int64_t in, std::int64_t rows, DType dtype) {
  const cuda::Arch arch = context().arch();
  return cuda::is_wgmma_packed(arch, tokens, in, rows, dtype) || cuda::is_tiles_packed(arch, tokens, in, rows, dtype);
}

/// Whether tiles_packed takes a call by the plans of a GPU.
bool takes_tiles_packed(const Args& args, const cuda::Arch& arch) {
  if (!std::holds_alternative<PackedWeight>(args.linear.weight)) return false;
  const Dims d = ops::Linear::dims(args);
  return cuda::is_tiles_packed(arch, d.tokens, d.in, d.rows(), args.x.dtype);
}

cuda::LaunchList prepared(const Args& args, cuda::Scratch scratch, const cuda::Context& c = context()) {
  cuda::LaunchList launches(c, scratch);
  const Status s = cuda::prepare(args, launches);
  INFO(s.message());
  REQUIRE(s);
  return launches;
}

/// Whether cuBLASLt takes the call.
bool takes_library(const Args& args, cuda::Scratch scratch, const cuda::Context& c = library_context()) {
  const cuda::LaunchList launches = prepared(args, scratch, c);
  CHECK(launches.uses_scratch() == launches.has_calls());
  return launches.has_calls();
}

/// A problem's block of this name.
Problem<ops::Linear>::Block& block(Problem<ops::Linear>& p, std::string_view name) {
  for (auto& b : p.blocks())
    if (b.name == name) return b;
  FAIL("no block " << name);
  return p.blocks().front();
}

/// Sets every element of a block: value(i).
template <class F>
void set(Problem<ops::Linear>::Block& b, F value) {
  dispatch_float(b.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t i = 0; i < element_count(b.shape); ++i) static_cast<T*>(b.data())[i] = narrow<T>(value(i));
  });
}

std::vector<std::byte> row_bytes(Problem<ops::Linear>& p, std::int64_t row) {
  auto& y = block(p, "y");
  const std::size_t bytes = std::size_t(y.shape[1]) * size_bytes(y.dtype);
  const auto* data = static_cast<const std::byte*>(y.data()) + std::size_t(row) * bytes;
  return {data, data + bytes};
}

/// Makes p's residual what rounding leaves of the product, with the other sign. So y is u times the product: whatever
/// is rounded to 16 bits before the residual is added, or a weight that is, shows as an error as large as y.
void cancel_product(Problem<ops::Linear>& p, Problem<ops::Linear>& product) {
  Problem<ops::Linear> oracle(product, DType::f64);
  REQUIRE(block(p, "x").memory == block(product, "x").memory);
  REQUIRE(cpu_ref::run(oracle.args()));
  const Tensor y = oracle.tensor(block(oracle, "y"));
  set(block(p, "residual"), [&](std::int64_t i) { return -y.at(i); });
}

/// How many of a thousand runs, early and late, captured and not, differ from the first.
std::int64_t same_bits_a_thousand_times(DeviceProblem<ops::Linear>& p, cuda::Context& c, cuda::Scratch scratch) {
  CUstream_st* const stream = c.stream();
  const auto first = p.run(c, scratch).bytes();
  const cuda::LaunchList launches = prepared(p.args(), scratch, c);
  const Result<cuda::GraphExec> graph = cuda::capture(stream, [&] { return launches.submit(stream, {.early = true}); });
  REQUIRE(graph);
  std::int64_t different = 0;
  for (int i = 0; i < 1000; ++i) {
    require_cuda(cudaMemsetAsync(p.args().y.data, 0xff, std::size_t(p.args().y.bytes()), stream));
    if (i % 3 == 2)
      require_cuda(cudaGraphLaunch(graph->get(), stream));
    else
      REQUIRE(launches.submit(stream, {.early = i % 3 == 1}));
    require_cuda(cudaStreamSynchronize(stream));
    different += p.fetch().bytes() != first;
  }
  return different;
}

/// Checks that a row of y has the same bits whatever the other rows of x hold.
void rows_are_independent(const GptqSetup& gptq, Epilogue epilogue, std::int64_t tokens, cuda::Context& c,
                          cuda::Scratch scratch) {
  const std::int64_t in = 640;
  Problem<ops::Linear> untouched(setup(DType::bf16, gptq), linear(tokens, in, 72, epilogue)), changed(untouched);
  DeviceProblem<ops::Linear> p(untouched);
  Problem<ops::Linear> expected(p.run(c, scratch));
  for (std::int64_t row : {std::int64_t(0), tokens / 2, tokens - 1})
    for (double value : {std::numeric_limits<double>::quiet_NaN(), 1e30, 0.}) {
      const Tensor x = untouched.tensor(block(untouched, "x"));
      set(block(changed, "x"), [&](std::int64_t i) { return i / in == row ? x.at(i) : value; });
      p.restore(changed);
      Problem<ops::Linear>& got = p.run(c, scratch);
      INFO("row " << row << " of " << tokens << ", the others " << value);
      CHECK(row_bytes(got, row) == row_bytes(expected, row));
    }
}

}  // namespace

TEST_CASE("linear of many tokens: every epilogue, number of tokens and size, with and without a bias", "[gpu][gemm]") {
  const DeviceScratch scratch;
  for (DType dtype : {DType::f16, DType::bf16})
    for (Epilogue epilogue : kEpilogues)
      for (std::int64_t tokens : kTokens)
        for (auto [in, out] :
             {std::pair<std::int64_t, std::int64_t>{8, 8}, {24, 64}, {264, 72}, {264, 63}, {1288, 648}}) {
          if (tokens > kMany && out == 648 && epilogue == Epilogue::gelu_tanh) continue;  // takes the oracle long
          INFO("in " << in << ", out " << out << ", tokens " << tokens << ", epilogue " << int(epilogue));
          const Setup s = setup(dtype, {}, std::uint64_t(in));
          Problem<ops::Linear> p(s, linear(tokens, in, out, epilogue));
          CHECK(check_on_device<ops::Linear>(s, p, scratch.get()));
          CHECK(check_on_device<ops::Linear>(s, p, scratch.get(), no_bias));
          // An odd `out` is for cuBLASLt to take or to leave.
          if (out % 8 == 0) {
            DeviceProblem<ops::Linear> device(p);
            CHECK(takes_library(device.args(), scratch.get()));
            CHECK(takes_library(device.args(), scratch.get(), context()) !=
                  takes_wgmma(tokens, in, out, dtype, false, epilogue));
          }
        }
}

namespace {

void check_small_products(const GptqSetup& gptq) {
  const DeviceScratch scratch;
  for (Epilogue epilogue : {Epilogue::gelu_erf, Epilogue::residual, Epilogue::swiglu})
    for (std::int64_t out : {40, 64})
      CHECK(check_on_device<ops::Linear>(setup(DType::bf16, gptq), linear(kMany, 72, out, epilogue), scratch.get()));
}

}  // namespace

TEST_CASE("linear of many tokens: small products for compute-sanitizer", "[gpu][gemm][small]") {
  check_small_products({});
}

// On Hopper's tensor cores: warps give stages of codes back by one lane.
TEST_CASE("linear of many tokens: small products of packed weights for compute-sanitizer",
          "[gpu][gemm][gptq][small][lane]") {
  check_small_products({4, 32, 0, false});
  check_small_products({8, 32, 1, true});
}

TEST_CASE("linear of many tokens: hostile inputs", "[gpu][gemm]") {
  const DeviceScratch scratch;
  for (DType dtype : {DType::f16, DType::bf16})
    for (Fill fill : {Fill::heavy_tailed, Fill::shifted})
      for (const GptqSetup& gptq : {GptqSetup{}, GptqSetup{4, 128, 1, true}, GptqSetup{8, 64, 0, false}})
        for (Epilogue epilogue : kEpilogues) {
          if (overflows(dtype, epilogue)) continue;
          Setup s = setup(dtype, gptq);
          s.fill = fill;
          for (std::int64_t tokens : {std::int64_t(30), std::int64_t(50), std::int64_t(100), kMany + 16})
            CHECK(check_on_device<ops::Linear>(s, linear(tokens, 640, 72, epilogue), scratch.get()));
        }
}

TEST_CASE("linear of many tokens: nothing is rounded to 16 bits before y", "[gpu][gemm]") {
  const DeviceScratch scratch;
  for (DType dtype : {DType::f16, DType::bf16})
    for (const GptqSetup& gptq : {GptqSetup{}, GptqSetup{4, 128, 1, false}, GptqSetup{4, 32, 0, true},
                                  GptqSetup{8, 64, 1, false}, GptqSetup{8, 1 << 14, 0, true}})
      for (std::int64_t tokens : {kMany, kMany + 47}) {
        INFO("tokens " << tokens);
        const Setup s = setup(dtype, gptq);
        Problem<ops::Linear> p(s, linear(tokens, 256, 72, Epilogue::residual)), product(s, linear(tokens, 256, 72));
        cancel_product(p, product);
        CHECK(check_on_device<ops::Linear>(s, p, scratch.get()));
        CHECK(takes_library(DeviceProblem<ops::Linear>(p).args(), scratch.get()));
      }
}

// x is a unit matrix, with rows of zeros behind it where it has few, so that y is W; the residual takes away W rounded
// to 16 bits. What is left is exact, but for the roundings of tiles.
TEST_CASE("linear of many tokens: every bit of a GPTQ weight arrives", "[gpu][gemm][gptq]") {
  const DeviceScratch scratch;
  cuda::Context c = context();
  for (DType dtype : {DType::f16, DType::bf16})
    for (const GptqSetup& gptq :
         {GptqSetup{4, 32, 0, false}, GptqSetup{4, 32, 1, true}, GptqSetup{4, 24, 1, false}, GptqSetup{4, 96, 0, true},
          GptqSetup{4, 1 << 14, 1, false}, GptqSetup{8, 32, 1, false}, GptqSetup{8, 96, 0, true},
          GptqSetup{8, 1 << 14, 1, false}})
      for (auto [in, out, tokens] : {std::tuple<std::int64_t, std::int64_t, std::int64_t>{64, 16, 64},
                                     {64, 16, 100},
                                     {64, 16, kMany},
                                     {264, 40, 264},
                                     {640, 72, 640}}) {
        INFO("in " << in << ", out " << out << ", tokens " << tokens << ", " << gptq.bits << " bits, group "
                   << gptq.group_size << ", desc_act " << gptq.desc_act << ", " << to_string(dtype));
        Problem<ops::Linear> p(setup(dtype, gptq, std::uint64_t(in)), linear(tokens, in, out, Epilogue::residual));
        const Tensor w = cpu_ref::dequantise(std::get<GptqWeight>(p.args().linear.weight), DType::f64);
        const auto rounded = [&](double v) {
          return dtype == DType::f16 ? widen<double>(narrow<f16>(v)) : widen<double>(narrow<bf16>(v));
        };
        const auto weight = [&, n = in, m = out](std::int64_t i) {  // of element i of y
          return i / m < n ? w.at(i % m * n + i / m) : 0.;
        };
        set(block(p, "x"), [&, n = in](std::int64_t i) { return i / n == i % n ? 1. : 0.; });
        set(block(p, "residual"), [&](std::int64_t i) { return -rounded(weight(i)); });
        DeviceProblem<ops::Linear> device(p);
        no_bias(device.args());
        REQUIRE(takes_library(device.args(), scratch.get()) == (tokens > kTuning.packed_tokens));
        Problem<ops::Linear>& got = device.run(c, scratch.get());
        const Tensor y = got.tensor(block(got, "y"));
        // Tiles bring a sum to each group's scale in turn, of 8 bits in both planes, and to that of columns without an
        // input: three roundings each, two of the ratio of scales and one of the product. Two more: planes, scale.
        const std::int64_t groups = (in + gptq.group_size - 1) / gptq.group_size * (gptq.bits / 4);
        const bool is_rounded = groups > 1 && takes_tiles_packed(device.args(), c.arch());
        const double roundings = is_rounded ? double(3 * groups + 2) * 0x1p-24 : 0;
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < y.size(); ++i) {
          const double exact = weight(i) - rounded(weight(i)), bound = roundings * std::abs(weight(i));
          wrong += !(rounded(exact - bound) <= y.at(i) && y.at(i) <= rounded(exact + bound));
        }
        CHECK(wrong == 0);
      }
}

TEST_CASE("linear of many tokens: packed rows whose groups have scales of 0, small and large ones in turn",
          "[gpu][gemm][gptq]") {
  const DeviceScratch scratch;
  for (DType dtype : {DType::f16, DType::bf16})
    for (const GptqSetup& gptq : {GptqSetup{4, 128, 1, false}, GptqSetup{4, 32, 0, true}})
      for (std::int64_t tokens : {20, 60, 100, 300}) {
        INFO("tokens " << tokens << ", group " << gptq.group_size << ", " << to_string(dtype));
        const Setup s = setup(dtype, gptq);
        Problem<ops::Linear> p(s, linear(tokens, 640, 72));
        const double scales[] = {0, 0x1p-24, 0x1p-14, 0.02, 4};
        set(block(p, "scales"), [&](std::int64_t i) { return scales[i % 5]; });
        CHECK(check_on_device<ops::Linear>(s, p, scratch.get()));
      }
}

TEST_CASE("linear of many tokens: every format of GPTQ weights", "[gpu][gemm][gptq]") {
  const DeviceScratch scratch;
  for (DType dtype : {DType::f16, DType::bf16})
    for (const GptqSetup& gptq : {GptqSetup{4, 32, 0, false}, GptqSetup{4, 32, 1, true}, GptqSetup{4, 96, 1, false},
                                  GptqSetup{4, 128, 1, false}, GptqSetup{4, 128, 0, true}, GptqSetup{4, 24, 1, false},
                                  GptqSetup{4, 1 << 14, 0, false}, GptqSetup{8, 32, 1, false},
                                  GptqSetup{8, 128, 0, true}, GptqSetup{8, 1 << 14, 1, false}})
      for (std::int64_t tokens : {std::int64_t(20), std::int64_t(60), std::int64_t(100), kMany, kMany + 48})
        for (auto [in, out] : {std::pair<std::int64_t, std::int64_t>{64, 16}, {264, 40}, {640, 72}}) {
          INFO("in " << in << ", out " << out << ", tokens " << tokens);
          const Setup s = setup(dtype, gptq, std::uint64_t(in));
          Problem<ops::Linear> p(s, linear(tokens, in, out));
          CHECK(check_on_device<ops::Linear>(s, p, scratch.get()));
          CHECK(takes_library(DeviceProblem<ops::Linear>(p).args(), scratch.get()) == (tokens > kTuning.packed_tokens));
        }
}

TEST_CASE("linear of many tokens: GPTQ weights with every epilogue, number of tokens and dtype of the bias",
          "[gpu][gemm][gptq]") {
  const DeviceScratch scratch;
  for (DType dtype : {DType::f16, DType::bf16})
    for (Epilogue epilogue : kEpilogues)
      for (std::int64_t tokens : kTokens)
        for (auto [in, out] : {std::pair<std::int64_t, std::int64_t>{32, 24}, {1280, 160}}) {
          INFO("in " << in << ", out " << out << ", tokens " << tokens << ", epilogue " << int(epilogue));
          CHECK(check_on_device<ops::Linear>(setup(dtype, {4, 128, 1, false}, std::uint64_t(tokens)),
                                             linear(tokens, in, out, epilogue), scratch.get()));
        }
  for (DType dtype : {DType::f16, DType::bf16})
    for (DType bias : {DType::f16, DType::bf16, DType::f32})
      for (Epilogue epilogue : kEpilogues) {
        Setup s = setup(dtype, {4, 128, 1, true});
        s.weight = bias;
        CHECK(check_on_device<ops::Linear>(s, linear(kMany + 16, 640, 72, epilogue), scratch.get()));
      }
}

TEST_CASE("linear of many tokens: packed rows in RoPE's order are the matrix's rows", "[gpu][gemm][gptq]") {
  const DeviceScratch scratch;
  cuda::Context c = context();
  for (const GptqSetup& gptq : {GptqSetup{4, 32, 1, true}, GptqSetup{8, 64, 0, false}}) {
    Problem<ops::Linear> p(setup(DType::f16, gptq), linear(kMany + 16, 264, 72));
    DeviceProblem<ops::Linear> device(p);
    const auto expected = device.run(c, scratch.get()).bytes();
    const Result<cuda::Packed> packed = cuda::pack(p.args().linear.weight, {.pairs = {8, 4}});
    REQUIRE(packed);
    const DeviceBytes memory(
        std::span(static_cast<const std::byte*>(packed->storage.data()), std::size_t(packed->storage.size_bytes())));
    auto weight = std::get<PackedWeight>(packed->weight);
    weight.data.data = reinterpret_cast<const std::int32_t*>(memory.data());
    device.args().linear.weight = weight;
    device.restore(p);
    CHECK(takes_library(device.args(), scratch.get()));
    CHECK(device.run(c, scratch.get()).bytes() == expected);
  }
}

TEST_CASE("linear of many tokens: the same bits a thousand times, early and late, captured and not", "[gpu][gemm]") {
  const DeviceScratch scratch;
  const auto stream = cuda::make_stream();
  REQUIRE(stream);
  cuda::Context c = library_context(stream->get());
  for (const GptqSetup& gptq : {GptqSetup{}, GptqSetup{4, 128, 1, true}})
    for (auto [epilogue, tokens, in, out] :
         {std::tuple<Epilogue, std::int64_t, std::int64_t, std::int64_t>{Epilogue::gelu_erf, kMany + 48, 2560, 512},
          {Epilogue::swiglu, kMany + 48, 2560, 256},
          {Epilogue::residual, kMany, 2560, 256}}) {
      DeviceProblem<ops::Linear> p(setup(DType::f16, gptq), linear(tokens, in, out, epilogue));
      REQUIRE(takes_library(p.args(), scratch.get(), c));
      CHECK(same_bits_a_thousand_times(p, c, scratch.get()) == 0);
    }
}

TEST_CASE("linear of many tokens: packed weights on Hopper's tensor cores, the same bits a thousand times",
          "[gpu][gemm]") {
  const DeviceScratch scratch;
  const auto stream = cuda::make_stream();
  REQUIRE(stream);
  cuda::Context c = context(stream->get());
  for (const GptqSetup& gptq : {GptqSetup{4, 128, 1, false}, GptqSetup{4, 32, 1, true}})
    for (std::int64_t tokens : {30, 60, 100, 300}) {
      INFO("tokens " << tokens << ", group " << gptq.group_size);
      DeviceProblem<ops::Linear> p(setup(DType::bf16, gptq), linear(tokens, 2560, 512, Epilogue::gelu_tanh));
      CHECK(takes_packed(tokens, 2560, 512, DType::bf16) == c.arch().has_wgmma());
      CHECK(same_bits_a_thousand_times(p, c, scratch.get()) == 0);
    }
}

TEST_CASE("linear of many tokens: packed weights in tiles of every width give the same bits", "[gpu][gemm][gptq]") {
  cuda::Context own = context();
  if (!own.arch().has_wgmma()) return;
  const DeviceScratch scratch;
  for (const GptqSetup& gptq : {GptqSetup{4, 128, 1, false}, GptqSetup{4, 32, 0, false}, GptqSetup{4, 128, 1, true}})
    for (auto [epilogue, in] : {std::pair<Epilogue, std::int64_t>{Epilogue::gelu_erf, 648},
                                {Epilogue::residual, 1032},
                                {Epilogue::swiglu, 1112}}) {
      const bool is_divided = in > 648;
      std::set<int> widths;
      std::set<bool> side_by_side;
      for (const std::int64_t tokens : {160, 192, 250, 256, 288}) {
        DeviceProblem<ops::Linear> p(setup(DType::f16, gptq, 1), linear(tokens, in, 328, epilogue));
        const auto expected = p.run(own, scratch.get()).bytes();
        const std::int64_t rows = ops::Linear::dims(p.args()).rows();
        for (const int sm_count : {2, 4, 8, 20, 28, 44, 66, 132})  // with fewer SMs wider tiles are faster
          for (const bool may_park : {true, false}) {
            cuda::Context few = own;
            cuda::Arch arch = own.arch();
            arch.sm_count = sm_count;
            few.set_plan_arch(arch);
            const Result<cuda::GptqLayout> layout =
                cuda::gptq_layout("linear", std::get<PackedWeight>(p.args().linear.weight));
            REQUIRE(layout);
            const cuda::PackedTilesPlan plan = cuda::packed_tiles_plan(arch, *layout, tokens, rows, may_park);
            CHECK(plan.halves == (is_divided ? 2 : 1));
            widths.insert(plan.token_tile);
            side_by_side.insert(plan.side_by_side);
            INFO("tokens " << tokens << ", in " << in << ", SMs " << sm_count << ", " << to_string(plan));
            // So little memory has room for x in the order of the columns alone.
            cuda::Scratch given = scratch.get();
            if (!may_park) given.bytes = plan.columns_bytes;
            CHECK(p.run(few, given).bytes() == expected);
          }
      }
      CHECK(widths == (gptq.group_size == 32 ? std::set<int>{64, 128} : std::set<int>{64, 96, 128, 160, 192, 256}));
      CHECK(side_by_side == (is_divided ? std::set<bool>{false, true} : std::set<bool>{false}));
    }
}

TEST_CASE("linear of many tokens: packed weights of many rows, columns and tokens", "[gpu][gemm][gptq]") {
  const DeviceScratch scratch;
  for (DType dtype : {DType::f16, DType::bf16})
    for (auto [tokens, in, out, epilogue] :
         {std::tuple<std::int64_t, std::int64_t, std::int64_t, Epilogue>{33, 5120, 776, Epilogue::gelu_erf},
          {64, 10240, 264, Epilogue::residual},
          {128, 10240, 264, Epilogue::residual},
          {300, 264, 2568, Epilogue::swiglu},
          {1000, 264, 520, Epilogue::gelu_erf},
          {4096, 136, 264, Epilogue::none},
          {1000, 2056, 520, Epilogue::residual},
          {300, 4104, 264, Epilogue::gelu_tanh}}) {
      INFO("in " << in << ", out " << out << ", tokens " << tokens);
      CHECK(check_on_device<ops::Linear>(setup(dtype, {4, 128, 1, false}), linear(tokens, in, out, epilogue),
                                         scratch.get()));
    }
}

TEST_CASE("linear of many tokens: a row does not depend on what the other rows hold", "[gpu][gemm]") {
  const DeviceScratch scratch;
  cuda::Context c = library_context();
  for (const GptqSetup& gptq : {GptqSetup{}, GptqSetup{4, 128, 1, true}})
    for (Epilogue epilogue : kEpilogues)
      for (std::int64_t tokens : {kMany, kMany + 48}) {
        REQUIRE(takes_library(DeviceProblem<ops::Linear>(setup(DType::bf16, gptq), linear(tokens, 640, 72)).args(),
                              scratch.get()));
        rows_are_independent(gptq, epilogue, tokens, c, scratch.get());
      }
  c = context();
  for (std::int64_t tokens : {std::int64_t(30), std::int64_t(100), kMany + 48})
    for (const GptqSetup& gptq : {GptqSetup{4, 128, 1, false}, GptqSetup{4, 32, 1, true}})
      rows_are_independent(gptq, Epilogue::residual, tokens, c, scratch.get());
}

TEST_CASE("linear: a call's list has the launches that are counted for it, each of which reads the weight",
          "[gpu][gemm]") {
  const DeviceScratch scratch;
  for (const DType dtype : {DType::f16, DType::f32})
    for (const GptqSetup& gptq : {GptqSetup{}, GptqSetup{4, 128, 1, false}, GptqSetup{8, 32, 1, false}}) {
      if (dtype == DType::f32 && gptq.bits) continue;
      for (const std::int64_t tokens : {1, 3, 8, 16, 64, 65, 128, 129}) {
        DeviceProblem<ops::Linear> p(setup(dtype, gptq), linear(tokens, 640, 72));
        no_bias(p.args());  // one of another dtype is added by a launch of its own
        std::size_t counted = 0;
        const auto count = [&](auto&&...) {
          ++counted;
          return Status();
        };
        const auto* const packed = std::get_if<PackedWeight>(&p.args().linear.weight);
        if (packed) {
          const Result<cuda::GptqLayout> layout = cuda::gptq_layout("linear", *packed);
          REQUIRE(layout);
          REQUIRE(cuda::for_each_gptq_launch(context().arch(), cuda::gptq_sizes(*layout, tokens), tokens, count));
        } else {
          REQUIRE(cuda::for_each_gemv_launch(tokens, count));
        }
        CAPTURE(to_string(dtype), gptq.bits, tokens, counted);
        const bool codes = packed && takes_packed(tokens, 640, 72, dtype), has_order = gptq.bits == 8;
        const bool own = codes || takes_wgmma(tokens, 640, 72, dtype, packed != nullptr);
        if (own && !has_order) counted = 1;
        CHECK(prepared(p.args(), {}).size() == counted);
        const cuda::LaunchList launches = prepared(p.args(), scratch.get());
        CHECK(launches.has_calls() == (!own && cuda::is_gemm(context().arch(), tokens, 640, dtype, packed != nullptr)));
        // Before the product the columns of x are put into another order. Before the library's call a quantised weight
        // is made a dense one, and x is copied.
        CHECK(launches.size() == (codes && has_order ? 2 : !launches.has_calls() ? counted : packed ? 3 : 1));
      }
    }
}

TEST_CASE("linear of many tokens: without scratch memory, or with too little, its own kernels take it", "[gpu][gemm]") {
  const DeviceScratch scratch;
  cuda::Context c = library_context();
  for (const GptqSetup& gptq : {GptqSetup{}, GptqSetup{4, 128, 1, false}}) {
    const Setup s = setup(DType::f16, gptq);
    DeviceProblem<ops::Linear> p(s, linear(kMany + 23, 640, 72, Epilogue::gelu_erf));
    const auto own = p.run(c).bytes();
    const std::size_t least = cuda::gemm_scratch(kMany + 23, 640, 72, gptq.bits ? 2 : 0, true).bytes;
    CHECK(cuda::gemm_scratch_bytes(p.args()) == least);
    CHECK_FALSE(takes_library(p.args(), {}));
    CHECK_FALSE(takes_library(p.args(), {scratch.get().data, least - 1}));
    CHECK(takes_library(p.args(), {scratch.get().data, least}));
    CHECK(p.run(c, {scratch.get().data, least - 1}).bytes() == own);
    CHECK(
        check_on_device<ops::Linear>(s, linear(kMany + 23, 640, 72, Epilogue::gelu_erf), {scratch.get().data, least}));
    cuda::LaunchList misaligned(c, {scratch.get().data + 16, least});
    CHECK(refusal_fault(cuda::prepare(p.args(), misaligned), Code::invalid_argument,
                        {"linear: the scratch memory is misaligned, expected a multiple of 256 bytes"}) == "");
  }
  // Few tokens, and float32 activations.
  const std::int64_t few = std::min(kTuning.gemv_tokens, kTuning.packed_tokens);
  for (const auto& [s, tokens] :
       {std::pair{setup(DType::f16), few}, {setup(DType::f16, {4, 32}), few}, {setup(DType::f32), kMany + 23}}) {
    DeviceProblem<ops::Linear> p(s, linear(tokens, 64, 64));
    CHECK_FALSE(takes_library(p.args(), scratch.get()));
    CHECK(cuda::gemm_scratch_bytes(p.args()) == 0);
  }
}

TEST_CASE("linear of many tokens: quantised weights beyond float16's range are left to its own kernels",
          "[gpu][gemm][gptq]") {
  const DeviceScratch scratch;
  for (auto [scale, fits] : {std::pair{4094., true}, {4096., false}}) {
    Problem<ops::Linear> p(setup(DType::f16, {4, 32}), linear(kMany + 23, 64, 64));
    static_cast<f16*>(block(p, "scales").data())[3] = narrow<f16>(scale);
    CHECK(takes_library(DeviceProblem<ops::Linear>(p).args(), scratch.get()) == fits);
    Problem<ops::Linear> wide(setup(DType::bf16, {4, 32}), linear(kMany + 23, 64, 64));
    static_cast<f16*>(block(wide, "scales").data())[3] = narrow<f16>(scale);
    CHECK(takes_library(DeviceProblem<ops::Linear>(wide).args(), scratch.get()));
  }
}

namespace {

/// Whether the test's GPU has Hopper's tensor cores; says so where it has none.
bool has_wgmma() {
  if (context().arch().has_wgmma()) return true;
  WARN("no GPU of compute capability 9.0: nothing is tested");
  return false;
}

}  // namespace

TEST_CASE("linear on Hopper's tensor cores: every tile of tokens and its edges, sizes, epilogues, biases",
          "[gpu][gemm][wgmma]") {
  if (!has_wgmma()) return;
  for (DType dtype : {DType::f16, DType::bf16})
    for (Epilogue epilogue : kEpilogues)
      for (std::int64_t tokens : {9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128})
        for (auto [in, out] :
             {std::pair<std::int64_t, std::int64_t>{8, 8}, {72, 136}, {264, 120}, {520, 520}, {2048, 136}}) {
          // The oracle takes these long.
          if (in > 264 && (epilogue == Epilogue::gelu_tanh || tokens % 16 == 15)) continue;
          INFO("in " << in << ", out " << out << ", tokens " << tokens << ", epilogue " << int(epilogue));
          const Setup s = setup(dtype, {}, std::uint64_t(in + tokens));
          Problem<ops::Linear> p(s, linear(tokens, in, out, epilogue));
          CHECK(check_on_device<ops::Linear>(s, p));
          if (tokens % 16 == 0) CHECK(check_on_device<ops::Linear>(s, p, {}, no_bias));
          CHECK(prepared(DeviceProblem<ops::Linear>(p).args(), {}).size() == 1);
        }
}

TEST_CASE("linear on Hopper's tensor cores: small products for compute-sanitizer", "[gpu][gemm][wgmma][small]") {
  if (!has_wgmma()) return;
  for (std::int64_t tokens : {9, 40, 100})
    for (std::int64_t in : {72, 1032})  // one block a tile, and clusters
      for (Epilogue epilogue : {Epilogue::residual, Epilogue::swiglu})
        CHECK(check_on_device<ops::Linear>(setup(DType::bf16), linear(tokens, in, 136, epilogue)));
}

TEST_CASE("linear on Hopper's tensor cores: hostile inputs, and nothing is rounded to 16 bits before y",
          "[gpu][gemm][wgmma]") {
  if (!has_wgmma()) return;
  for (DType dtype : {DType::f16, DType::bf16})
    for (std::int64_t tokens : {16, 33, 128}) {
      for (Fill fill : {Fill::heavy_tailed, Fill::shifted})
        for (Epilogue epilogue : kEpilogues) {
          if (overflows(dtype, epilogue)) continue;
          Setup s = setup(dtype);
          s.fill = fill;
          CHECK(check_on_device<ops::Linear>(s, linear(tokens, 640, 136, epilogue)));
        }
      const Setup s = setup(dtype);
      Problem<ops::Linear> p(s, linear(tokens, 1024, 72, Epilogue::residual)), product(s, linear(tokens, 1024, 72));
      cancel_product(p, product);
      CHECK(check_on_device<ops::Linear>(s, p));
    }
}

TEST_CASE("linear on Hopper's tensor cores: the same bits a thousand times, early and late, captured and not",
          "[gpu][gemm][wgmma]") {
  if (!has_wgmma()) return;
  const auto stream = cuda::make_stream();
  REQUIRE(stream);
  cuda::Context c = context(stream->get());
  for (auto [epilogue, tokens, in, out] :
       {std::tuple<Epilogue, std::int64_t, std::int64_t, std::int64_t>{Epilogue::gelu_erf, 16, 520, 1096},
        {Epilogue::residual, 64, 2560, 264},
        {Epilogue::swiglu, 64, 2560, 136},
        {Epilogue::none, 128, 1288, 392}}) {
    DeviceProblem<ops::Linear> p(setup(DType::f16), linear(tokens, in, out, epilogue));
    CHECK(same_bits_a_thousand_times(p, c, {}) == 0);
  }
}

TEST_CASE("linear on Hopper's tensor cores: a row does not depend on what the other rows hold", "[gpu][gemm][wgmma]") {
  if (!has_wgmma()) return;
  cuda::Context c = context();
  for (std::int64_t tokens : {9, 64, 128})
    for (Epilogue epilogue : {Epilogue::residual, Epilogue::swiglu})
      rows_are_independent(GptqSetup{}, epilogue, tokens, c, {});
}

TEST_CASE("linear on Hopper's tensor cores: tiles of many tokens, their edges and sizes, both GELUs",
          "[gpu][gemm][wgmma]") {
  if (!has_wgmma()) return;
  for (DType dtype : {DType::f16, DType::bf16})
    for (Epilogue epilogue : kGeluEpilogues)
      for (std::int64_t tokens : {129, 255, 257, 512, 640})
        for (auto [in, out] :
             {std::pair<std::int64_t, std::int64_t>{8, 8}, {72, 136}, {264, 504}, {1032, 168}, {2056, 264}}) {
          // The oracle takes these long.
          if (in > 264 && (epilogue == Epilogue::gelu_tanh || tokens > 257)) continue;
          INFO("in " << in << ", out " << out << ", tokens " << tokens << ", epilogue " << int(epilogue));
          const Setup s = setup(dtype, {}, std::uint64_t(in + tokens));
          Problem<ops::Linear> p(s, linear(tokens, in, out, epilogue));
          CHECK(check_on_device<ops::Linear>(s, p));
          if (tokens == 257) CHECK(check_on_device<ops::Linear>(s, p, {}, no_bias));
          CHECK(prepared(DeviceProblem<ops::Linear>(p).args(), {}).size() == 1);
        }
}

namespace {

/// Both layouts of tiles, as planned for a GPU of so many SMs.
std::vector<cuda::LinearTilesPlan> tile_layouts(int sm_count, std::int64_t tokens, std::int64_t out) {
  cuda::Arch arch = context().arch();
  arch.sm_count = sm_count;
  return {cuda::linear_tiles_layout(arch, tokens, out, cuda::kLinearTilesShared),
          cuda::linear_tiles_layout(arch, tokens, out, cuda::kLinearTilesInTurn)};
}

/// Runs a problem by a layout of tiles, twice.
void check_layout(Problem<ops::Linear>& untouched, Problem<ops::Linear>& reference, const Budget& budget,
                  const cuda::LinearTilesPlan& plan) {
  CAPTURE(plan.shape.width, plan.shape.in_turn, plan.clusters, plan.groups());
  DeviceProblem<ops::Linear> device(untouched);
  cuda::LaunchList launches(context());
  const Status added = cuda::launch_tiles(device.args(), plan, launches);
  INFO(added.message());
  REQUIRE(added);
  REQUIRE(launches.submit(nullptr));
  Problem<ops::Linear>& got = device.fetch();
  const auto result = compare(got.tensor(block(got, "y")), reference.tensor(block(reference, "y")));
  REQUIRE(result);
  INFO("relative L2 " << result->rel_l2 << ", relative max " << result->rel_max << " at " << result->worst_coordinate);
  CHECK(result->within(budget));
  const auto bytes = got.bytes();
  device.restore(untouched);
  REQUIRE(launches.submit(nullptr, {.early = true}));
  CHECK(device.fetch().bytes() == bytes);
}

/// Runs a problem by both layouts of tiles, where each block has one tile and where it has many.
void check_layouts(const Setup& s, const std::pair<Dims, Args>& sizes) {
  Problem<ops::Linear> untouched(s, sizes), reference(untouched, DType::f64);
  REQUIRE(cpu_ref::run(reference.args()));
  const auto condition = cpu_ref::condition(reference.args());
  REQUIRE(condition);
  const Budget budget =
      ops::Linear::budget(reference.dims(), {.compute = DType::f32, .output = s.activation}, *condition);
  for (int sm_count : {132, 16, 2})
    for (const cuda::LinearTilesPlan& plan : tile_layouts(sm_count, sizes.first.tokens, sizes.first.out))
      check_layout(untouched, reference, budget, plan);
}

}  // namespace

TEST_CASE("linear on Hopper's tensor cores: both layouts of tiles, with one tile a block and with many",
          "[gpu][gemm][wgmma]") {
  if (!has_wgmma()) return;
  // Steps of a tile: more than a ring has stages, and fewer.
  for (auto [dtype, epilogue, tokens, in, out] : {std::tuple<DType, Epilogue, std::int64_t, std::int64_t, std::int64_t>{
                                                      DType::f16, Epilogue::gelu_tanh, 700, 1032, 1048},
                                                  {DType::bf16, Epilogue::gelu_erf, 300, 1032, 520},
                                                  {DType::bf16, Epilogue::gelu_erf, 650, 264, 1288},
                                                  {DType::f16, Epilogue::gelu_erf, 1100, 136, 1928}})
    check_layouts(setup(dtype), linear(tokens, in, out, epilogue));
}

TEST_CASE("linear on Hopper's tensor cores: small tiles for compute-sanitizer", "[gpu][gemm][wgmma][small]") {
  if (!has_wgmma()) return;
  CHECK(check_on_device<ops::Linear>(setup(DType::bf16), linear(200, 1032, 328, Epilogue::gelu_erf)));
  for (const cuda::LinearTilesPlan& plan : tile_layouts(4, 520, 712)) {  // several tiles a block
    DeviceProblem<ops::Linear> p(setup(DType::f16), linear(520, 72, 712, Epilogue::gelu_erf));
    cuda::LaunchList launches(context());
    REQUIRE(cuda::launch_tiles(p.args(), plan, launches));
    REQUIRE(launches.submit(nullptr));
    p.fetch();
  }
}

TEST_CASE("linear on Hopper's tensor cores: tiles with hostile inputs", "[gpu][gemm][wgmma]") {
  if (!has_wgmma()) return;
  for (DType dtype : {DType::f16, DType::bf16})
    for (Fill fill : {Fill::heavy_tailed, Fill::shifted})
      for (Epilogue epilogue : kGeluEpilogues) {
        Setup s = setup(dtype);
        s.fill = fill;
        CHECK(check_on_device<ops::Linear>(s, linear(144, 640, 136, epilogue)));
      }
}

TEST_CASE("linear on Hopper's tensor cores: GELU in tiles of a bias from -16 to 16, of infinity and of NaN",
          "[gpu][gemm][wgmma]") {
  if (!has_wgmma()) return;
  cuda::Context c = context();
  constexpr std::int64_t tokens = 136, out = 8200;
  for (DType dtype : {DType::f16, DType::bf16}) {
    const Setup s = setup(dtype);
    Problem<ops::Linear> p(s, linear(tokens, 8, out, Epilogue::gelu_erf));
    set(block(p, "x"), [](std::int64_t) { return 0.; });
    set(block(p, "bias"), [](std::int64_t i) { return double(i % 8192 - 4096) / 256; });
    DeviceProblem<ops::Linear> device(p);
    const auto run = [&] {
      Problem<ops::Linear>& got = device.run(c);
      return got.tensor(block(got, "y"));
    };
    const Tensor bias = p.tensor(block(p, "bias"));
    {
      const Tensor y = run();
      // Half a unit in the last place for the rounding to 16 bits, and a twentieth of one for GELU.
      const int digits = dtype == DType::f16 ? 11 : 8;
      const double least = dtype == DType::f16 ? 0x1p-24 : 0x1p-133;
      double worst = 0;
      for (std::int64_t token : {std::int64_t(0), tokens - 1})
        for (std::int64_t i = 0; i < out; ++i) {
          const double v = bias.at(i), exact = 0.5 * v * std::erfc(-v / std::sqrt(2.0));
          int exponent;
          std::frexp(exact, &exponent);
          const double error = std::abs(y.at(token * out + i) - exact);
          worst = std::max(worst, error / std::max(std::ldexp(1.0, exponent - digits), least));
        }
      CHECK(worst <= 0.55);
    }
    constexpr double infinity = std::numeric_limits<double>::infinity();
    set(block(p, "bias"), [](std::int64_t i) { return i == 0 ? infinity : i == 1 ? -infinity : i == 2 ? NAN : 1; });
    device.restore(p);
    const Tensor y = run();
    CHECK(y.at(0) == infinity);
    CHECK(y.at(1) == 0);
    CHECK(std::isnan(y.at(2)));
    CHECK(std::abs(y.at(3) - 0.8413447) < 0x1p-9);  // half a unit in bfloat16's last place
  }
}

TEST_CASE("linear on Hopper's tensor cores: tiles have the same bits a thousand times, and on every stream",
          "[gpu][gemm][wgmma]") {
  if (!has_wgmma()) return;
  const auto stream = cuda::make_stream(), other = cuda::make_stream();
  REQUIRE(stream);
  REQUIRE(other);
  cuda::Context c = context(stream->get()), d = context(other->get());
  for (auto [tokens, in, out, in_turn] :
       {std::tuple<std::int64_t, std::int64_t, std::int64_t, bool>{640, 264, 5128, true},
        {256, 2560, 520, true},
        {512, 520, 10248, false}}) {
    CAPTURE(tokens, out);
    CHECK(cuda::linear_tiles_plan(cuda::kH200, tokens, out).shape.in_turn == in_turn);
    DeviceProblem<ops::Linear> p(setup(DType::f16), linear(tokens, in, out, Epilogue::gelu_erf));
    CHECK(same_bits_a_thousand_times(p, c, {}) == 0);
    const auto bytes = p.run(c).bytes();
    CHECK(p.run(d).bytes() == bytes);
  }
}

TEST_CASE("linear on Hopper's tensor cores: a row of tiles does not depend on what the other rows hold",
          "[gpu][gemm][wgmma]") {
  if (!has_wgmma()) return;
  cuda::Context c = context();
  for (std::int64_t tokens : {129, 300}) rows_are_independent(GptqSetup{}, Epilogue::gelu_erf, tokens, c, {});
}

namespace {

struct Edges {
  std::size_t nodes = 0, roots = 0, edges = 0, programmatic = 0;
};

Edges edges_of(cudaGraph_t graph) {
  Edges e;
  require_cuda(cudaGraphGetNodes(graph, nullptr, &e.nodes));
  require_cuda(cudaGraphGetRootNodes(graph, nullptr, &e.roots));
  const auto get = [&](cudaGraphNode_t* from, cudaGraphNode_t* to, cudaGraphEdgeData* data) {
#if CUDART_VERSION >= 13000
    require_cuda(cudaGraphGetEdges(graph, from, to, data, &e.edges));
#else
    require_cuda(cudaGraphGetEdges_v2(graph, from, to, data, &e.edges));
#endif
  };
  get(nullptr, nullptr, nullptr);
  std::vector<cudaGraphNode_t> from(e.edges), to(e.edges);
  std::vector<cudaGraphEdgeData> data(e.edges);
  get(from.data(), to.data(), data.data());
  for (const cudaGraphEdgeData& edge : data) e.programmatic += edge.type == cudaGraphDependencyTypeProgrammatic;
  return e;
}

/// Captures what record(stream) puts onto a stream, and runs it as a graph.
template <class Record>
Edges capture_and_run(Record record) {
  const Result<cuda::Stream> stream = cuda::make_stream();
  REQUIRE(stream);
  require_cuda(cudaStreamBeginCapture(stream->get(), cudaStreamCaptureModeThreadLocal));
  const Status status = record(stream->get());
  cudaGraph_t captured = nullptr;
  require_cuda(cudaStreamEndCapture(stream->get(), &captured));
  const std::unique_ptr<CUgraph_st, cuda::Destroy> graph(captured);
  INFO(status.message());
  REQUIRE(status);
  const Edges edges = edges_of(captured);
  cudaGraphExec_t instantiated = nullptr;
  require_cuda(cudaGraphInstantiate(&instantiated, captured, 0));
  const cuda::GraphExec exec(instantiated);
  require_cuda(cudaGraphLaunch(exec.get(), stream->get()));
  require_cuda(cudaStreamSynchronize(stream->get()));
  return edges;
}

/// Two products that share no tensor.
Edges capture_two(const Args& first, const Args& second, cuda::Scratch scratch) {
  return capture_and_run([&](CUstream_st* stream) -> Status {
    cuda::DataflowCapture capture(library_context(stream), scratch);
    CF_TRY(capture.run(first, {.early = true}));
    return capture.run(second, {.early = true});
  });
}

}  // namespace

TEST_CASE("linear of many tokens: two products of a graph that share scratch memory follow each other", "[gpu][gemm]") {
  const DeviceScratch scratch;
  cuda::Context c = library_context();
  for (const GptqSetup& gptq : {GptqSetup{}, GptqSetup{4, 128, 1, false}})
    for (Epilogue epilogue : {Epilogue::none, Epilogue::gelu_erf}) {
      Problem<ops::Linear> one(setup(DType::f16, gptq, 1), linear(kMany + 48, 640, 72, epilogue)),
          two(setup(DType::f16, gptq, 2), linear(kMany + 16, 640, 512, epilogue));
      DeviceProblem<ops::Linear> a(one), b(two);
      const auto expected_a = a.run(c, scratch.get()).bytes(), expected_b = b.run(c, scratch.get()).bytes();
      a.restore(one);
      b.restore(two);
      const Edges shared = capture_two(a.args(), b.args(), scratch.get());
      // A chain: every node but the first waits for the one before it.
      CHECK(shared.roots == 1);
      CHECK(shared.edges + 1 == shared.nodes);
      CHECK(a.fetch().bytes() == expected_a);
      CHECK(b.fetch().bytes() == expected_b);
      // By full edges, but for those that cuBLASLt may have among its own kernels.
      const Edges plain = capture_and_run([&](CUstream_st* stream) -> Status {
        CF_TRY(prepared(a.args(), scratch.get(), c).submit(stream));
        return prepared(b.args(), scratch.get(), c).submit(stream);
      });
      CHECK(shared.nodes == plain.nodes);
      CHECK(shared.programmatic == plain.programmatic);
      // Without scratch memory they have no order.
      a.restore(one);
      b.restore(two);
      CHECK(capture_two(a.args(), b.args(), {}).roots == 2);
    }
}

TEST_CASE("gemm: an algorithm is asked for once, for several numbers of tokens together, and listed", "[gpu][gemm]") {
  const DeviceScratch scratch;
  constexpr std::int64_t out = 184;  // no other test's
  const auto asked = [](std::int64_t tokens) { return cuda::kGemmTokens[cuda::gemm_tokens_index(tokens)]; };
  const std::int64_t many = asked(kMany + 20);
  const auto prepare = [&](std::int64_t tokens, const GptqSetup& gptq, Epilogue epilogue) {
    DeviceProblem<ops::Linear> p(setup(DType::f16, gptq), linear(tokens, 256, out, epilogue));
    CHECK(takes_library(p.args(), scratch.get()));
  };
  const std::size_t before = cuda::gemm_algorithms().size();
  for (int i = 0; i < 3; ++i) prepare(kMany + 20, {}, Epilogue::residual);
  CHECK(cuda::gemm_algorithms().size() == before + 1);
  prepare(kMany + 20, {}, Epilogue::gelu_erf);
  prepare(kMany + 20, {4, 128}, Epilogue::none);
  prepare(kMany + 21, {}, Epilogue::residual);  // asked for as many tokens
  CHECK(cuda::gemm_algorithms().size() == before + 3);
  prepare(many + 1, {}, Epilogue::residual);
  CHECK(cuda::gemm_algorithms().size() == before + 4);
  std::set<std::tuple<std::int64_t, std::int64_t, DType, bool, bool>> listed;
  for (const cuda::GemmAlgorithm& a : cuda::gemm_algorithms()) {
    CHECK(a.id >= 0);
    CHECK(a.tile >= 0);
    CHECK(a.stages >= 0);
    CHECK(a.split_k <= 1);
    CHECK(a.workspace_bytes <= cuda::kGemmWorkspaceBytes);
    if (a.out == out) listed.insert({a.tokens, a.in, a.output, a.bias, a.residual});
  }
  using T = decltype(listed);
  CHECK(listed == T{{many, 256, DType::f16, true, true},
                    {many, 256, DType::f32, false, false},
                    {many, 512, DType::f16, true, false},
                    {asked(many + 1), 256, DType::f16, true, true}});
}

TEST_CASE("a launch list submits calls in order with its launches, and names the op of one that fails", "[gpu][gemm]") {
  cuda::Context c = context();
  DeviceProblem<ops::LayerNorm> p({.model = model_of(2, 80, 20, 8), .activation = DType::f16});
  Problem<ops::LayerNorm>& host = p.run(c);
  const auto expected = host.bytes();
  const AnyView<2> y = p.args().y;
  const std::size_t bytes = std::size_t(y.bytes());
  const auto scrub = [&](CUstream_st* stream) {
    return cuda::from_cuda(cudaMemsetAsync(y.data, 0xff, bytes, stream), "cudaMemsetAsync");
  };
  const auto submit = [&](bool call_first) {
    cuda::LaunchList launches(c);
    if (call_first) launches.add_call("scrub", scrub);
    REQUIRE(cuda::prepare(p.args(), launches));
    if (!call_first) launches.add_call("scrub", scrub);
    CHECK(launches.has_calls());
    CHECK_FALSE(launches.uses_scratch());
    CHECK(launches.size() == 2);
    REQUIRE(launches.submit(c.stream(), {.early = true}));
    return p.fetch().bytes();
  };
  CHECK(submit(true) == expected);
  CHECK(submit(false) != expected);
  cuda::LaunchList failing(c);
  failing.add_call("odd", [](CUstream_st*) { return Status::error(Code::device_error, "no such thing"); });
  CHECK(refusal_fault(failing.submit(c.stream()), Code::device_error, {"odd: no such thing"}) == "");
}
