// Which of linear's kernels takes a call, without a GPU: for every kind of weight, epilogue, number of tokens and size,
// with and without scratch memory and cuBLASLt, on every GPU that plans are made for.
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/fp8.hpp"
#include "cuda/ops/linear/linear.hpp"
#include "cuda/ops/linear/wgmma/sum.hpp"
#include "cuda/ops/norm/layernorm.hpp"
#include "cuda/step/classes.hpp"
#include "tests/support/catch.hpp"

using namespace cf;
using namespace cf::cuda;
using ops::Epilogue;
using Args = ops::Linear::Args;

namespace {

/// An address that no plan reads from.
void* address(std::uintptr_t n = 4096) { return reinterpret_cast<void*>(n); }

/// A packed weight's properties that the choice depends on. Of an fp8 weight has_order stands for a scale a block.
struct Packing {
  int bits = 4;
  bool has_order = false, fits_f16 = true, in_rope_order = false, is_fp8 = false;
};

struct Call {
  DType activation = DType::f16;
  std::int64_t tokens = 1, in = 2560, out = 7680;
  Epilogue epilogue = Epilogue::none;
  std::optional<Packing> packing = {};
};

PackedWeight packed_weight(const Call& c, std::int64_t rows) {
  const Packing& p = *c.packing;
  if (p.is_fp8) {
    PackedWeight w = fp8_outline(rows, c.in, p.has_order ? 128 : c.in);
    w.data.data = static_cast<const std::int32_t*>(address());
    return w;
  }
  const std::int64_t planes = p.bits / 4, columns = planes * c.in;
  GptqLayout layout{.row_tiles = std::int32_t((rows + 15) / 16),
                    .chunks = std::int32_t((columns + 63) / 64),
                    .groups = std::int32_t((columns + 127) / 128),
                    .columns_per_group = 128,
                    .inputs = std::int32_t(c.in),
                    .has_order = p.has_order || planes > 1,
                    .in_order = !p.has_order,
                    .fits_f16 = p.fits_f16};
  if (p.in_rope_order) layout.pairs = {80, 20};
  PackedWeight w{.packer = kCudaPacker,
                 .format = {p.bits, 128},
                 .out = rows,
                 .in = c.in,
                 .data = {static_cast<const std::int32_t*>(address()), {layout.words()}},
                 .layout = {}};
  std::memcpy(w.layout.data(), &layout, sizeof layout);
  return w;
}

Args args_of(const Call& c) {
  const std::int64_t rows = c.out * ops::rows_of_output(c.epilogue);
  Args a;
  a.x = {address(), {c.tokens, c.in}, c.activation};
  a.y = {address(), {c.tokens, c.out}, c.activation};
  a.epilogue = c.epilogue;
  if (c.epilogue == Epilogue::residual) a.residual = {address(), {c.tokens, c.out}, c.activation};
  if (c.packing)
    a.linear.weight = packed_weight(c, rows);
  else
    a.linear.weight = DenseWeight{{address(), {rows, c.in}, c.activation}};
  return a;
}

/// What the choice depends on beside the call.
struct Place {
  Arch arch;
  bool scratch, library, wgmma;

  Target target() const {
    return {.arch = arch,
            .scratch = {scratch ? static_cast<std::byte*>(address()) : nullptr, std::size_t(1) << 40},
            .has_wgmma = wgmma,
            .has_gemm = library ? [] { return true; } : [] { return false; }};
  }
};

/// The kernel that takes a call, said in another way than by plans: the rows of cuda/ops/linear/README.md with the
/// numbers of tokens written out.
std::string expected(const Place& p, const Call& c) {
  const bool half = c.activation != DType::f32, hopper = p.arch.compute_capability == 90 && p.wgmma;
  const bool aligned = c.in % 8 == 0 && c.out * ops::rows_of_output(c.epilogue) % 8 == 0;
  const bool library = half && p.scratch && p.library && c.in % 8 == 0;
  if (!c.packing) {
    if (half && hopper && aligned && c.tokens >= 9 && c.tokens <= 128) return "wgmma";
    if (half && hopper && aligned && c.tokens > 128 && ops::is_gelu(c.epilogue)) return "tiles";
    return library && c.tokens > 8 ? "cublaslt" : "gemv";
  }
  if (c.packing->is_fp8) return half && c.in % 16 == 0 && c.tokens > 64 ? "tiles_fp8" : "gemv_fp8";
  const bool is_odd = c.packing->in_rope_order && (c.epilogue == Epilogue::residual || c.epilogue == Epilogue::swiglu);
  const bool in_order = c.packing->bits == 4 && !c.packing->has_order;
  // Parts of four chunks, which the kernel of four rows has, and of three, in clusters of up to four blocks. A cluster
  // has up to ten tiles of 16 rows, and the device holds 132 of one block, 66 of two, 30 of four.
  const bool in_quads = c.in % 2048 == 0 && !c.packing->in_rope_order, in_threes = c.in == 2560;
  const std::int64_t blocks = in_quads ? c.in / 2048 : 2, clusters = blocks == 1 ? 132 : blocks == 2 ? 66 : 30;
  const bool in_one_round = blocks <= 4 && c.out * ops::rows_of_output(c.epilogue) <= clusters * 160;
  const bool wide =
      in_order && c.tokens <= 32 && (in_quads || in_threes) && in_one_round && p.arch.compute_capability == 90;
  if (half && hopper && aligned && c.tokens >= 17 && !wide && !is_odd && (in_order || p.scratch))
    return c.tokens <= 128 ? "wgmma_packed" : "tiles_packed";
  const bool fits = c.packing->fits_f16 || c.activation != DType::f16;
  return library && c.tokens > 64 && fits ? "cublaslt_packed" : "packed";
}

std::vector<Place> places() {
  std::vector<Place> all;
  for (const Arch& arch : {kH100, kH200, kRtx5090})
    for (bool scratch : {false, true})
      for (bool library : {false, true})
        for (bool wgmma : {false, true}) all.push_back({arch, scratch, library, wgmma});
  return all;
}

constexpr Epilogue kEpilogues[] = {Epilogue::none, Epilogue::gelu_erf, Epilogue::gelu_tanh, Epilogue::residual,
                                   Epilogue::swiglu};
constexpr std::int64_t kTokens[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 64, 65, 127, 128, 129, 300, 512, 2048};
/// Inputs and outputs: of Pythia-410M, 2.8B and Llama-3.1-8B, a small one, and one whose rows of y are not aligned.
constexpr std::pair<std::int64_t, std::int64_t> kSizes[] = {{1024, 3072}, {2560, 7680},  {10240, 2560}, {4096, 14336},
                                                            {128, 128},   {2560, 50252}, {136, 64}};

}  // namespace

TEST_CASE("linear: the kernel that takes a call is the first of the list that can", "[plans][kernels]") {
  std::map<std::string, int> taken;
  int calls = 0, faults = 0;
  for (const Place& place : places()) {
    const Target target = place.target();
    for (const auto& [in, out] : kSizes)
      for (std::int64_t tokens : kTokens)
        for (Epilogue epilogue : kEpilogues)
          for (DType dtype : {DType::f16, DType::bf16, DType::f32})
            for (int packing = 0; packing < 19; ++packing) {
              Call c{.activation = dtype, .tokens = tokens, .in = in, .out = out, .epilogue = epilogue};
              if (packing > 16) {
                c.packing = Packing{.bits = 8, .has_order = packing > 17, .is_fp8 = true};
              } else if (packing > 0) {
                const int i = packing - 1;
                c.packing = Packing{i & 1 ? 8 : 4, (i & 2) != 0, (i & 4) == 0, (i & 8) != 0};
                // What no kernel takes: float32 activations, and gates in RoPE's order.
                if (dtype == DType::f32 || (c.packing->in_rope_order && epilogue == Epilogue::swiglu)) continue;
              }
              const Result<Choice> choice = choose(target, args_of(c));
              ++calls;
              const std::string want = expected(place, c),
                                got = choice ? std::string(choice->kernel) : choice.status().message();
              ++taken[got];
              if (got == want && !choice->planned.text().empty()) continue;
              INFO("sm_" << place.arch.compute_capability << ", scratch " << place.scratch << ", library "
                         << place.library << ", wgmma " << place.wgmma << ": " << tokens << " tokens of " << in
                         << " to " << out << ", packing " << packing << ", epilogue " << int(epilogue));
              CHECK(got == want);
              if (++faults > 10) FAIL("more than ten faults");
            }
  }
  CHECK(calls > 200'000);
  std::set<std::string> kernels;
  for (const auto& [kernel, count] : taken) kernels.insert(kernel);
  CHECK(kernels == std::set<std::string>{"wgmma", "tiles", "cublaslt", "gemv", "wgmma_packed", "tiles_packed",
                                         "cublaslt_packed", "packed", "tiles_fp8", "gemv_fp8"});
}

namespace {

/// What decides on the order of a row's sums: the kernel, and that of its plan which divides the columns.
std::string order_of_sums(const Choice& choice) {
  constexpr const char* in_order = "from the first column to the last";
  if (std::any_cast<LinearTilesPlan>(&choice.planned.plan)) return in_order;
  std::set<std::string> orders;
  if (const auto* const p = std::any_cast<LinearWgmmaPlan>(&choice.planned.plan)) {
    if (p->splits == 1) return in_order;
    orders.insert(std::to_string(p->splits) + " splits");
  }
  if (const auto* const p = std::any_cast<WgmmaPackedPlan>(&choice.planned.plan))
    orders.insert(std::to_string(p->product.splits) + " splits");
  if (const auto* const all = std::any_cast<PackedLaunches>(&choice.planned.plan))
    for (const auto& [first, count, p] : all->launches)
      orders.insert(std::to_string(p.split) + " splits, " + std::to_string(p.chunks) + " chunks, " +
                    std::to_string(p.longer) + " longer" + (p.digit_bytes ? ", digits" : ""));
  std::string text(choice.kernel);
  for (const std::string& order : orders) text += ": " + order;
  return text;
}

}  // namespace

TEST_CASE("step classes: within one, kernels, the order of a product's sums and norms do not depend on the tokens",
          "[plans][kernels][classes]") {
  // Plans change at multiples of eight tokens and at the ends of classes, which are such multiples.
  std::vector<std::int64_t> sizes;
  for (std::int64_t tokens = 1; tokens <= 140; ++tokens)
    if (tokens <= 34 || (tokens + 1) % 8 < 3) sizes.push_back(tokens);
  for (std::int64_t tokens :
       {192, 255, 256, 257, 300, 511, 512, 513, 528, 529, 844, 845, 1000, 2048, 4096, 4225, 70000})
    sizes.push_back(tokens);
  std::set<std::string> orders;
  // Devices that lack nothing, and one without scratch, without a library and without wgmma.
  for (const Place& place :
       {Place{kH100, true, true, true}, Place{kH200, true, true, true}, Place{kRtx5090, true, true, true},
        Place{kH200, false, true, true}, Place{kH200, true, false, true}, Place{kH200, true, true, false}}) {
    for (const Arch& arch : {place.arch, invariant_arch(place.arch)}) {
      Target target = place.target();
      target.arch = arch;
      for (const std::optional<Packing>& packing : std::initializer_list<std::optional<Packing>>{
               std::nullopt, Packing{4}, Packing{4, true}, Packing{8}, Packing{.in_rope_order = true},
               Packing{.bits = 8, .has_order = true, .is_fp8 = true}}) {
        std::vector<WeightFormat> formats;
        if (packing) formats.push_back({.bits = packing->bits, .group_size = 128, .is_fp8 = packing->is_fp8});
        const std::vector<TokenRange> classes = step_classes(arch, formats);
        REQUIRE(classes.front().first == 1);
        REQUIRE(classes.back().last == kAnyTokens);
        CHECK((classes.size() == 1) == arch.tuning->is_invariant());
        for (const auto& [in, out] : kSizes)
          for (Epilogue epilogue : {Epilogue::none, Epilogue::gelu_erf, Epilogue::residual, Epilogue::swiglu}) {
            if (packing && packing->in_rope_order && epilogue == Epilogue::swiglu) continue;
            std::size_t i = 0;
            std::string order;
            for (std::int64_t tokens : sizes) {
              if (tokens > classes[i].last) {
                while (tokens > classes[i].last) ++i;
                order.clear();
              }
              const Result<Choice> choice = choose(
                  target, args_of({.tokens = tokens, .in = in, .out = out, .epilogue = epilogue, .packing = packing}));
              if (!choice) FAIL(choice.status().message());
              const std::string got = order_of_sums(*choice);
              orders.insert(got);
              if (order.empty()) order = got;
              if (got == order) continue;
              CAPTURE(arch.compute_capability, tokens, in, out, int(epilogue), place.scratch, place.library,
                      place.wgmma);
              CHECK(got == order);
            }
          }
        for (std::int64_t hidden : {64, 512, 768, 2560, 4096, 8192, 12288})
          for (int inputs : {1, kResidualLayerNormInputs})
            for (const TokenRange& r : classes)
              for (std::int64_t tokens : sizes)
                if (r.first <= tokens && tokens <= r.last &&
                    layernorm_plan(arch, tokens, hidden, inputs).elements !=
                        layernorm_plan(arch, r.first, hidden, inputs).elements)
                  FAIL_CHECK("layernorm of " << hidden << " elements: " << tokens << " tokens");
      }
    }
  }
  CHECK(orders.size() > 15);
}

TEST_CASE("step classes: as programs print them", "[plans][classes]") {
  const auto text = [](const Arch& arch, const std::vector<int>& bits, bool is_fp8 = false) {
    std::vector<WeightFormat> formats;
    for (int of : bits) formats.push_back({.bits = of, .group_size = 128, .is_fp8 = is_fp8});
    return to_string(step_classes(arch, formats));
  };
  CHECK(text(kH100, {}) == "1 to 8, 9 to 128, 129 or more");
  CHECK(text(kRtx5090, {}) == "1 to 8, 9 to 128, 129 or more");
  CHECK(text(kH200, {4}) == "1, 2 to 8, 9 to 16, 17 to 32, 33 to 64, 65 to 128, 129 or more");
  CHECK(text(kH200, {8}) == text(kH200, {4}));
  CHECK(text(kH200, {8}, true) == "1 to 8, 9 to 64, 65 to 128, 129 or more");
  CHECK(text(invariant_arch(kH200), {4, 8}) == "1 or more");
  CHECK(text(invariant_arch(kH200), {8}, true) == "1 or more");
  const auto attention = [](const Arch& arch, std::int64_t head_dim, std::int64_t group) {
    return to_string(attention_classes(arch, head_dim, group));
  };
  CHECK(attention(kH100, 80, 1) == "1 to 15, 16 to 63, 64 or more");
  CHECK(attention(kH100, 128, 3) == "1 to 15, 16 to 21, 22 or more");
  CHECK(attention(kH100, 128, 4) == "1 to 15, 16 or more");
  CHECK(attention(kH100, 256, 1) == "1 to 15, 16 or more");
  CHECK(attention(kRtx5090, 64, 1) == "1 to 15, 16 or more");
  CHECK(attention(invariant_arch(kH100), 64, 1) == "1 or more");
  const auto queries = [](const Arch& arch, std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim,
                          std::int64_t capacity) {
    return to_string(query_classes(arch,
                                   {.batch = 1,
                                    .q_len = 1,
                                    .heads = heads,
                                    .kv_heads = kv_heads,
                                    .head_dim = head_dim,
                                    .capacity = capacity,
                                    .max_kv_len = capacity},
                                   DType::f16));
  };
  CHECK(queries(kH100, 32, 32, 80, 2048) == "1, 2 to 3, 4 or more");
  CHECK(queries(kH100, 32, 32, 80, 128) == "1 or more");  // one tile of keys
  CHECK(queries(kH100, 32, 8, 128, 2048) == "1, 2 to 3, 4 to 6, 7 to 12, 13 or more");
  CHECK(queries(invariant_arch(kH100), 32, 32, 80, 2048) == "1 or more");
}

TEST_CASE("linear: a choice says what it plans, and why the kernels before it leave the call", "[plans][kernels]") {
  const auto chosen = [](const Place& place, const Call& c) {
    const Result<Choice> choice = choose(place.target(), args_of(c));
    if (!choice) return choice.status().message();
    std::string text;
    for (const PassedOver& p : choice->passed_over) text += std::string(p.kernel) + " " + p.reason + "; ";
    return text + std::string(choice->kernel) + ": " + choice->planned.text();
  };
  const Place h200{kH200, true, true, true}, rtx5090{kRtx5090, true, true, true};
  CHECK(chosen(h200, {}) == "wgmma takes more tokens; tiles takes more tokens; cublaslt takes more tokens; gemv: " +
                                to_string(gemv_plan(kH200, 2560, 7680, 1)));
  CHECK(chosen(h200, {.tokens = 300, .epilogue = Epilogue::gelu_erf}) ==
        "wgmma takes fewer tokens; tiles: " + to_string(linear_tiles_plan(kH200, 300, 7680)));
  CHECK(chosen(h200, {.tokens = 300}) ==
        "wgmma takes fewer tokens; tiles takes products with GELU; cublaslt: 0 matrices of a dequantised weight, " +
            std::to_string(kGemmWorkspaceBytes) + " B of scratch memory");
  const Packing blocks{.bits = 8, .has_order = true, .is_fp8 = true};
  CHECK(chosen(h200, {.in = 4096, .out = 4096, .packing = blocks})
            .ends_with("packed takes packed GPTQ weights; tiles_fp8 takes more tokens; gemv_fp8: 256 blocks, 2 blocks "
                       "an SM, 8 loads ahead"));
  CHECK(chosen(h200, {.tokens = 20, .in = 4096, .out = 4096, .packing = blocks})
            .ends_with("gemv_fp8: 2 launches: 256 blocks, 2 blocks an SM, 4 loads ahead; the last: 256 blocks, 2 "
                       "blocks an SM, 8 loads ahead"));
  CHECK(chosen(rtx5090, {.tokens = 65, .in = 4096, .out = 4100, .packing = blocks})
            .ends_with("packed takes packed GPTQ weights; tiles_fp8: 1 tiles of tokens, 33 tiles of rows, 4 stages"));
  CHECK(chosen(h200, {.tokens = 65, .in = 136, .packing = blocks})
            .find("tiles_fp8 takes rows of a multiple of 16; gemv_fp8: 5 launches: ") != std::string::npos);
  CHECK(chosen(h200, {.in = 132, .packing = blocks}) == "linear: cuda takes in a multiple of 8, got 132");
  CHECK(chosen(rtx5090, {.tokens = 64}).starts_with("wgmma needs wgmma; tiles takes more tokens; cublaslt: "));
  CHECK(chosen({kRtx5090, true, false, true}, {.tokens = 20}) ==
        "wgmma needs wgmma; tiles takes more tokens; cublaslt needs cuBLASLt; gemv: 2 launches: " +
            to_string(gemv_plan(kRtx5090, 2560, 7680, 16)) +
            "; the last: " + to_string(gemv_plan(kRtx5090, 2560, 7680, 4)));
  const std::string dense =
      "wgmma takes dense weights; tiles takes dense weights; cublaslt takes dense weights; gemv "
      "takes dense weights; ";
  CHECK(chosen({kH200, false, true, false}, {.tokens = 300, .packing = Packing{}})
            .starts_with(dense + "wgmma_packed needs wgmma; tiles_packed needs wgmma; cublaslt_packed needs scratch "
                                 "memory; packed: "));
  const Call many{.tokens = 300, .packing = Packing{}};
  const Result<GptqLayout> layout = gptq_layout("test", packed_weight(many, many.out));
  REQUIRE(layout);
  CHECK(chosen(h200, many) == dense + "wgmma_packed takes fewer tokens; tiles_packed: " +
                                  to_string(packed_tiles_plan(kH200, *layout, many.tokens, many.out)));
  const Place without{kH200, false, true, true};
  for (const Packing& ordered : {Packing{.has_order = true}, Packing{.bits = 8}}) {
    CHECK(chosen(without, {.tokens = 40, .packing = ordered})
              .find("wgmma_packed needs scratch memory; tiles_packed takes more tokens; cublaslt_packed takes more "
                    "tokens; packed: ") != std::string::npos);
    CHECK(chosen(h200, {.tokens = 40, .packing = ordered}).ends_with(" B of x in the order of the columns"));
  }
  CHECK(chosen({kH200, true, true, false}, {.tokens = 300, .packing = Packing{.fits_f16 = false}})
            .find("cublaslt_packed takes weights within float16's range; ") != std::string::npos);
}

TEST_CASE("linear: a call that no kernel takes is refused in the words of the kernel of few tokens",
          "[plans][kernels]") {
  const Target target = Place{kH200, true, true, true}.target();
  const auto refusal = [&](const Args& a, Code code = Code::unimplemented, const Target* at = nullptr) {
    const Result<Choice> choice = choose(at ? *at : target, a);
    REQUIRE_FALSE(choice);
    CHECK(choice.status().code() == code);
    return choice.status().message();
  };
  CHECK(refusal(args_of({.tokens = 64, .in = 60})) == "linear: cuda takes in a multiple of 8, got 60");
  Args mixed = args_of({});
  std::get<DenseWeight>(mixed.linear.weight).weight.dtype = DType::bf16;
  CHECK(refusal(mixed) == "linear: cuda takes float16 activations with weights of the same dtype, got bfloat16");
  Args doubles = args_of({.activation = DType::f64});
  CHECK(refusal(doubles) == "linear: cuda takes float16, bfloat16 or float32 activations, got float64");
  CHECK(refusal(args_of({.activation = DType::f32, .packing = Packing{}})) ==
        "linear: cuda takes float16 or bfloat16 activations with GPTQ weights, got float32");
  CHECK(refusal(args_of({.epilogue = Epilogue::swiglu, .packing = Packing{.in_rope_order = true}})) ==
        "linear: cuda takes rows that are packed in order with Epilogue::swiglu, got RoPE's order");
  CHECK(refusal(args_of({.in = 2 * kGptqMaxColumns, .packing = Packing{}})) ==
        "linear: cuda takes GPTQ weights of up to " + std::to_string(kGptqMaxColumns) + " columns, got " +
            std::to_string(2 * kGptqMaxColumns));
  Args unpacked = args_of({});
  unpacked.linear.weight = GptqWeight{};
  CHECK(refusal(unpacked) == unpacked_gptq("linear").message());
  Args foreign = args_of({.packing = Packing{}});
  std::get<PackedWeight>(foreign.linear.weight).packer = "another";
  CHECK(refusal(foreign) == "linear: cuda takes weights packed by cf::cuda::pack(), got a weight packed by another");
  // These are the caller's faults, whatever kernels are behind.
  Args short_block = args_of({.packing = Packing{}});
  std::get<PackedWeight>(short_block.linear.weight).data.shape[0] -= 1;
  CHECK(refusal(short_block, Code::invalid_argument).starts_with("linear: 'packed' has "));
  Target misaligned = target;
  misaligned.scratch.data += 16;
  for (const Args& a : {args_of({.tokens = 300}), args_of({.tokens = 20, .packing = Packing{.has_order = true}})})
    CHECK(refusal(a, Code::invalid_argument, &misaligned) ==
          "linear: the scratch memory is misaligned, expected a multiple of 256 bytes");
  CHECK(choose(misaligned, args_of({})));
}

TEST_CASE("linear_sum: dense weights of the tokens of wgmma, with the splits that each product has alone",
          "[plans][kernels]") {
  const auto args = [](std::int64_t tokens, std::int64_t in, std::int64_t in2, std::int64_t out,
                       DType dtype = DType::f16) {
    Args first = args_of({.activation = dtype, .tokens = tokens, .in = in, .out = out, .epilogue = Epilogue::residual}),
         second =
             args_of({.activation = dtype, .tokens = tokens, .in = in2, .out = out, .epilogue = Epilogue::residual});
    return ops::LinearSum::of_parts(first, second);
  };
  const Target target = Place{kH200, true, true, true}.target();
  for (const auto& [in, out] :
       {std::pair<std::int64_t, std::int64_t>{512, 512}, {1024, 1024}, {2560, 2560}, {8192, 8192}})
    for (std::int64_t tokens : kTokens) {
      CAPTURE(in, tokens);
      const ops::LinearSum::Args a = args(tokens, in, 4 * in, out);
      const Result<LinearSumWgmmaPlan> plan = plan_linear_sum_wgmma(target, a);
      REQUIRE(bool(plan) == (tokens >= 9 && tokens <= 128));
      if (!plan) continue;
      CHECK(choose(target, a)->kernel == "linear_sum_wgmma");
      CHECK(plan->first.splits == linear_wgmma_plan(kH200, tokens, in, out).splits);
      CHECK(plan->second.splits == linear_wgmma_plan(kH200, tokens, 4 * in, out).splits);
      CHECK(plan->smem_bytes <= kH200.smem_per_block_bytes);
      // Up to 64 tokens an SM has room for a block of the next launch.
      if (tokens <= 64) CHECK(plan->smem_bytes <= smem_per_block_bytes(kH200, 2) - 256);
    }
  const auto refusal = [](const Target& at, const ops::LinearSum::Args& a) {
    return plan_linear_sum_wgmma(at, a).status().message();
  };
  Target invariant = target, without_wgmma = target;
  invariant.arch = invariant_arch(kH200);
  without_wgmma.has_wgmma = false;
  CHECK(refusal(target, args(8, 512, 2048, 512)) == "takes more tokens");
  CHECK(refusal(target, args(129, 512, 2048, 512)) == "takes fewer tokens");
  CHECK(refusal(target, args(16, 512, 2048, 512, DType::f32)) == "takes 16-bit activations");
  CHECK(refusal(target, args(16, 2048, 512, 512)) == "takes a first product of no more splits");
  CHECK(refusal(invariant, args(16, 512, 2048, 512)) == "takes classes of step sizes");
  CHECK(refusal(without_wgmma, args(16, 512, 2048, 512)) == "needs wgmma");
}
