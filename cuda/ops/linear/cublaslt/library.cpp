#include "cuda/ops/linear/cublaslt/library.hpp"

#include "cuda/ops/prepare.hpp"

#ifdef CF_HAVE_CUBLASLT
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/ops/linear/cublaslt/plan.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/runtime/stream.hpp"

namespace cf::cuda {
namespace {

#define CF_CUBLASLT_FUNCTIONS(F)          \
  F(cublasLtCreate)                       \
  F(cublasLtGetStatusString)              \
  F(cublasLtGetVersion)                   \
  F(cublasLtMatmul)                       \
  F(cublasLtMatmulAlgoCheck)              \
  F(cublasLtMatmulAlgoConfigGetAttribute) \
  F(cublasLtMatmulAlgoGetHeuristic)       \
  F(cublasLtMatmulDescCreate)             \
  F(cublasLtMatmulDescDestroy)            \
  F(cublasLtMatmulDescSetAttribute)       \
  F(cublasLtMatmulPreferenceCreate)       \
  F(cublasLtMatmulPreferenceDestroy)      \
  F(cublasLtMatmulPreferenceSetAttribute) \
  F(cublasLtMatrixLayoutCreate)           \
  F(cublasLtMatrixLayoutDestroy)

/// The library's functions, and what was chosen with them. One exists for the process and is never destroyed: at its
/// end CUDA may be gone before it.
struct Library {
#define CF_DECLARE(name) decltype(&::name) name = nullptr;
  CF_CUBLASLT_FUNCTIONS(CF_DECLARE)
#undef CF_DECLARE
  std::string name, fault;  // one of the two is empty

  /// Device, in, out, dtype, output, bias, residual.
  using Key = std::tuple<int, std::int64_t, std::int64_t, DType, DType, bool, bool>;
  /// By the index of kGemmTokens.
  using Algorithms = std::array<cublasLtMatmulHeuristicResult_t, kGemmTokens.size()>;
  std::mutex mutex;
  std::map<int, cublasLtHandle_t> handles;          // by device
  std::map<Key, std::optional<Algorithms>> chosen;  // empty where cuBLASLt has none
  std::set<std::pair<Key, std::size_t>> used;       // what products have had, with the index of kGemmTokens

  Library();
  bool load(const std::string& file);
};

Library::Library() {
  if (const char* file = std::getenv("CF_CUBLASLT"); file && *file) {
    (void)load(file);
    return;
  }
  for (const char* file : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"})
    if (load(file)) return;
}

bool Library::load(const std::string& file) {
  const auto failed = [&](const std::string& why) {
    if (fault.empty()) fault = why;
    return false;
  };
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* const why = dlerror();
    return failed(why ? why : file + ": cannot be loaded");
  }
#define CF_LOAD(function)                                                     \
  function = reinterpret_cast<decltype(function)>(dlsym(library, #function)); \
  if (!function) return failed(file + ": expected the function " #function ", which it lacks");
  CF_CUBLASLT_FUNCTIONS(CF_LOAD)
#undef CF_LOAD
  fault.clear();
  name = file + ", version " + std::to_string(cublasLtGetVersion());
  return true;
}

Library& library() {
  static Library& all = *new Library;
  return all;
}

Status from_cublas(cublasStatus_t status, const char* what, SourceLocation at = SourceLocation::current()) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return Status::error(status == CUBLAS_STATUS_ALLOC_FAILED ? Code::out_of_memory : Code::device_error,
                       std::string(what) + ": " + library().cublasLtGetStatusString(status), at);
}
#define CF_TRY_CUBLAS(function, ...) CF_TRY(from_cublas(library().function(__VA_ARGS__), #function))

cudaDataType_t type_of(DType dtype) {
  return dtype == DType::f16 ? CUDA_R_16F : dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

/// A number of an algorithm's configuration; -1 where it has none.
int config(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  std::int32_t value = 0;
  std::size_t written = 0;
  const cublasStatus_t status =
      library().cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof value, &written);
  return status == CUBLAS_STATUS_SUCCESS ? value : -1;
}

/// All tensors may lie at any multiple of this. It is told to cuBLASLt in place of the tensors' own alignment, so that
/// the algorithm does not depend on where they lie.
constexpr std::uint32_t kAlignmentBytes = 16;

/// A product in cuBLASLt's terms. Its matrices are column-major, so that a row-major matrix (rows, columns) is one of
/// (columns, rows): y (out, tokens) = transposed weight (in, out) * x (in, tokens).
class Product {
 public:
  static Result<std::shared_ptr<Product>> create(const Gemm& gemm) {
    const std::shared_ptr<Product> p(new Product(gemm));
    CF_TRY(p->describe());
    return p;
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;
  ~Product() {
    if (operation_) (void)library().cublasLtMatmulDescDestroy(operation_);
    for (cublasLtMatrixLayout_t layout : {weight_, x_, y_})
      if (layout) (void)library().cublasLtMatrixLayoutDestroy(layout);
  }

  /// cuBLASLt's algorithms for products like this one of up to `tokens` tokens, best first: those alone that take
  /// products of `least` tokens, too, and whose sums are each made by one block.
  Result<std::vector<cublasLtMatmulHeuristicResult_t>> ask(cublasLtHandle_t handle, std::int64_t tokens,
                                                           std::int64_t least) const;
  /// Whether an algorithm takes the product.
  bool takes(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm) const {
    cublasLtMatmulHeuristicResult_t result{};
    return library().cublasLtMatmulAlgoCheck(handle, operation_, weight_, x_, y_, y_, &algorithm, &result) ==
               CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= kGemmWorkspaceBytes;
  }
  /// Chooses what multiply() runs.
  void choose(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm) {
    handle_ = handle;
    algorithm_ = algorithm;
  }
  Status multiply(CUstream_st* stream) const {
    const float alpha = 1, beta = gemm_.residual ? 1 : 0;
    CF_TRY_CUBLAS(cublasLtMatmul, handle_, operation_, &alpha, gemm_.weight, weight_, gemm_.x, x_, &beta,
                  gemm_.residual ? gemm_.residual : gemm_.y, y_, gemm_.y, y_, &algorithm_, gemm_.workspace,
                  kGemmWorkspaceBytes, stream);
    return {};
  }

 private:
  explicit Product(const Gemm& gemm) : gemm_(gemm) {}
  /// The product of another number of tokens, whose tensors all lie at multiples of kAlignmentBytes and of no more.
  Result<std::shared_ptr<Product>> with_tokens(std::int64_t tokens) const {
    Gemm like = gemm_;
    like.tokens = tokens;
    // cuBLASLt reads the bias' alignment off its address.
    if (like.bias) like.bias = reinterpret_cast<const void*>(std::uintptr_t(kAlignmentBytes));
    return create(like);
  }
  template <class T>
  Status set(cublasLtMatmulDescAttributes_t attribute, T value) {
    CF_TRY_CUBLAS(cublasLtMatmulDescSetAttribute, operation_, attribute, &value, sizeof value);
    return {};
  }
  Status describe();

  Gemm gemm_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t weight_ = nullptr, x_ = nullptr, y_ = nullptr;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_{};
};

Status Product::describe() {
  CF_TRY_CUBLAS(cublasLtMatmulDescCreate, &operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  CF_TRY(set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T));
  if (gemm_.bias) {
    CF_TRY(set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS));
    CF_TRY(set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, std::int32_t(type_of(gemm_.dtype))));
    CF_TRY(set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, gemm_.bias));
  }
  const auto in = std::uint64_t(gemm_.in), out = std::uint64_t(gemm_.out), tokens = std::uint64_t(gemm_.tokens);
  CF_TRY_CUBLAS(cublasLtMatrixLayoutCreate, &weight_, type_of(gemm_.dtype), in, out, gemm_.in);
  CF_TRY_CUBLAS(cublasLtMatrixLayoutCreate, &x_, type_of(gemm_.dtype), in, tokens, gemm_.in);
  CF_TRY_CUBLAS(cublasLtMatrixLayoutCreate, &y_, type_of(gemm_.output), out, tokens, gemm_.out);
  return {};
}

Result<std::vector<cublasLtMatmulHeuristicResult_t>> Product::ask(cublasLtHandle_t handle, std::int64_t tokens,
                                                                  std::int64_t least) const {
  CF_TRY_ASSIGN(const std::shared_ptr<Product> p, with_tokens(tokens));
  CF_TRY_ASSIGN(const std::shared_ptr<Product> of_least, with_tokens(least));

  cublasLtMatmulPreference_t preference = nullptr;
  CF_TRY_CUBLAS(cublasLtMatmulPreferenceCreate, &preference);
  const auto destroy = [](cublasLtMatmulPreference_t made) { (void)library().cublasLtMatmulPreferenceDestroy(made); };
  const std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>, decltype(destroy)> owner(preference,
                                                                                                    destroy);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) -> Status {
    CF_TRY_CUBLAS(cublasLtMatmulPreferenceSetAttribute, preference, attribute, &value, sizeof value);
    return {};
  };
  CF_TRY(prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t(kGemmWorkspaceBytes)));
  CF_TRY(prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t(CUBLASLT_REDUCTION_SCHEME_NONE)));
  for (auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                         CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    CF_TRY(prefer(attribute, kAlignmentBytes));

  std::vector<cublasLtMatmulHeuristicResult_t> results(16);
  int count = 0;
  const cublasStatus_t status = library().cublasLtMatmulAlgoGetHeuristic(
      handle, p->operation_, p->weight_, p->x_, p->y_, p->y_, preference, int(results.size()), results.data(), &count);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) CF_TRY(from_cublas(status, "cublasLtMatmulAlgoGetHeuristic"));
  results.resize(status == CUBLAS_STATUS_SUCCESS ? std::size_t(count) : 0);
  std::erase_if(results, [&](const cublasLtMatmulHeuristicResult_t& r) {
    return r.state != CUBLAS_STATUS_SUCCESS || config(r.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1 ||
           !of_least->takes(handle, r.algo);
  });
  return results;
}

/// Makes a device the thread's current device, and restores the earlier one at its end.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    status_ = from_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (status_) status_ = from_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { (void)cudaSetDevice(before_); }
  const Status& status() const { return status_; }

 private:
  int before_ = 0;
  Status status_;
};

/// Small numbers of a 16-bit dtype with either sign, whose sums are rounded at almost every term.
std::vector<std::uint16_t> random_numbers(DType dtype) {
  // A prime, so that the rows of a matrix that is filled with repetitions differ.
  std::vector<std::uint16_t> numbers(262139);
  std::uint32_t state = 1;
  for (std::uint16_t& n : numbers) {
    state = state * 1664525 + 1013904223;
    const std::uint32_t bits = state >> 16;
    // From 1/16 to 1, and from 1/8 to 2.
    n = std::uint16_t(dtype == DType::f16 ? (bits & 0x8000) | (0x2c00 + (bits & 0x0fff))
                                          : (bits & 0x8000) | (0x3e00 + (bits & 0x01ff)));
  }
  return numbers;
}

/// A product of random numbers with a product's columns, dtypes, bias and residual. Its bits tell the order in which an
/// algorithm adds a sum's terms.
class OrderProbe {
 public:
  /// Works on the current device.
  static Result<std::unique_ptr<OrderProbe>> create(const Gemm& like, cublasLtHandle_t handle);
  /// The bits of y; empty where the algorithm does not take the product.
  Result<std::vector<std::byte>> bits(const cublasLtMatmulAlgo_t& algorithm);

 private:
  static constexpr std::int64_t kTokens = 64, kLeastRows = 256;
  struct Free {
    void operator()(std::byte* p) const { (void)cudaFree(p); }
  };

  cublasLtHandle_t handle_ = nullptr;
  Stream stream_;
  std::unique_ptr<std::byte, Free> memory_;
  std::byte* y_ = nullptr;
  std::size_t y_bytes_ = 0;
  std::shared_ptr<Product> product_;
};

Result<std::unique_ptr<OrderProbe>> OrderProbe::create(const Gemm& like, cublasLtHandle_t handle) {
  auto probe = std::make_unique<OrderProbe>();
  probe->handle_ = handle;
  CF_TRY_ASSIGN(probe->stream_, make_stream());
  CUstream_st* const stream = probe->stream_.get();
  const std::int64_t rows = kLeastRows + like.out % 8;  // where rows of y are not aligned, they are not here
  // The workspace, then x, the weight, the bias and the residual of random numbers, then y.
  const auto number_bytes = [](std::int64_t numbers) { return std::size_t(numbers) * 2; };
  const std::size_t x = kGemmWorkspaceBytes, weight = x + number_bytes(kTokens * like.in),
                    bias = weight + number_bytes(rows * like.in), residual = bias + number_bytes(kLeastRows + 8),
                    y = residual + number_bytes(kTokens * (kLeastRows + 8));
  probe->y_bytes_ = std::size_t(kTokens * rows) * size_bytes(like.output);
  void* memory = nullptr;
  CF_TRY(from_cuda(cudaMalloc(&memory, y + probe->y_bytes_), "cudaMalloc"));
  std::byte* const at = static_cast<std::byte*>(memory);
  probe->memory_.reset(at);
  probe->y_ = at + y;
  CF_TRY(from_cuda(cudaMemsetAsync(at, 0, kGemmWorkspaceBytes, stream), "cudaMemsetAsync"));
  const std::vector<std::uint16_t> numbers = random_numbers(like.dtype);
  for (std::size_t filled = x, bytes; filled < y; filled += bytes) {
    bytes = std::min(y - filled, number_bytes(std::int64_t(numbers.size())));
    CF_TRY(from_cuda(cudaMemcpyAsync(at + filled, numbers.data(), bytes, cudaMemcpyHostToDevice, stream),
                     "cudaMemcpyAsync"));
  }
  CF_TRY(from_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize"));
  Gemm gemm = like;
  gemm.tokens = kTokens;
  gemm.out = rows;
  gemm.x = at + x;
  gemm.weight = at + weight;
  gemm.bias = like.bias ? at + bias : nullptr;
  gemm.residual = like.residual ? at + residual : nullptr;
  gemm.y = probe->y_;
  gemm.workspace = at;
  CF_TRY_ASSIGN(probe->product_, Product::create(gemm));
  return probe;
}

Result<std::vector<std::byte>> OrderProbe::bits(const cublasLtMatmulAlgo_t& algorithm) {
  std::vector<std::byte> bits;
  if (!product_->takes(handle_, algorithm)) return bits;
  CF_TRY(from_cuda(cudaMemsetAsync(y_, 0xff, y_bytes_, stream_.get()), "cudaMemsetAsync"));
  product_->choose(handle_, algorithm);
  if (!product_->multiply(stream_.get())) return bits;
  bits.resize(y_bytes_);
  CF_TRY(
      from_cuda(cudaMemcpyAsync(bits.data(), y_, y_bytes_, cudaMemcpyDeviceToHost, stream_.get()), "cudaMemcpyAsync"));
  CF_TRY(from_cuda(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize"));
  return bits;
}

/// An algorithm for each of kGemmTokens, all of which give a row the same bits. Works on the current device.
Result<std::optional<Library::Algorithms>> choose_algorithms(const Gemm& gemm, const Product& product,
                                                             cublasLtHandle_t handle) {
  using Chosen = std::optional<Library::Algorithms>;
  CF_TRY_ASSIGN(const auto of_most, product.ask(handle, kGemmTokens.back(), 1));
  if (of_most.empty()) return Chosen();
  Library::Algorithms all;
  all.fill(of_most.front());
  const int id = config(all.back().algo, CUBLASLT_ALGO_CONFIG_ID);
  // Where there is no memory for comparisons, one algorithm takes all tokens.
  Result<std::unique_ptr<OrderProbe>> probe = OrderProbe::create(gemm, handle);
  if (probe.status().code() == Code::out_of_memory) return Chosen(all);
  if (!probe) return probe.status();
  CF_TRY_ASSIGN(const std::vector<std::byte> expected, (*probe)->bits(all.back().algo));
  if (expected.empty()) return Chosen(all);
  for (std::size_t i = 0; i + 1 < all.size(); ++i) {
    CF_TRY_ASSIGN(const auto found, product.ask(handle, kGemmTokens[i], i ? kGemmTokens[i - 1] + 1 : 1));
    if (found.empty()) continue;
    // The best one of the same kind, if any: for few tokens and many columns the first may be one for older GPUs.
    auto best =
        std::ranges::find_if(found, [&](const auto& r) { return config(r.algo, CUBLASLT_ALGO_CONFIG_ID) == id; });
    if (best == found.end()) best = found.begin();
    CF_TRY_ASSIGN(const std::vector<std::byte> bits, (*probe)->bits(best->algo));
    if (bits == expected) all[i] = *best;
  }
  return Chosen(all);
}

/// The handle of a device, which is the current one. The caller holds the library's mutex.
Result<cublasLtHandle_t> handle_of(int device) {
  if (const auto found = library().handles.find(device); found != library().handles.end()) return found->second;
  cublasLtHandle_t handle = nullptr;
  CF_TRY_CUBLAS(cublasLtCreate, &handle);
  return library().handles[device] = handle;
}

}  // namespace

Result<LaunchList::Call> make_gemm(const Gemm& g, int device) {
  Library& lib = library();
  if (lib.name.empty()) return LaunchList::Call();
  // The first call may come while a stream is captured.
  const RelaxedCapture relaxed;
  CF_TRY_ASSIGN(const std::shared_ptr<Product> product, Product::create(g));
  const Library::Key key{device, g.in, g.out, g.dtype, g.output, g.bias != nullptr, g.residual != nullptr};
  const std::lock_guard lock(lib.mutex);
  const OnDevice on_device(device);
  CF_TRY(on_device.status());
  CF_TRY_ASSIGN(const cublasLtHandle_t handle, handle_of(device));
  auto found = lib.chosen.find(key);
  if (found == lib.chosen.end()) {
    CF_TRY_ASSIGN(auto chosen, choose_algorithms(g, *product, handle));
    found = lib.chosen.emplace(key, std::move(chosen)).first;
  }
  if (!found->second) return LaunchList::Call();
  const std::size_t index = gemm_tokens_index(g.tokens);
  const cublasLtMatmulAlgo_t *algorithm = &(*found->second)[index].algo, *of_most = &found->second->back().algo;
  if (!product->takes(handle, *algorithm)) algorithm = of_most;
  if (!product->takes(handle, *algorithm))
    return Status::error(Code::unimplemented, "linear: cuBLASLt's algorithm for many tokens takes no " +
                                                  std::to_string(g.tokens) + " tokens, " + std::to_string(g.in) +
                                                  " -> " + std::to_string(g.out));
  lib.used.emplace(key, index);
  product->choose(handle, *algorithm);
  return LaunchList::Call([product](CUstream_st* stream) { return product->multiply(stream); });
}

std::vector<GemmAlgorithm> gemm_algorithms() {
  Library& lib = library();
  std::vector<GemmAlgorithm> all;
  const std::lock_guard lock(lib.mutex);
  for (const auto& [key, index] : lib.used) {
    const cublasLtMatmulHeuristicResult_t& r = (*lib.chosen.at(key))[index];
    const auto& [device, in, out, dtype, output, bias, residual] = key;
    all.push_back({.device = device,
                   .tokens = kGemmTokens[index],
                   .in = in,
                   .out = out,
                   .dtype = dtype,
                   .output = output,
                   .bias = bias,
                   .residual = residual,
                   .id = config(r.algo, CUBLASLT_ALGO_CONFIG_ID),
                   .tile = config(r.algo, CUBLASLT_ALGO_CONFIG_TILE_ID),
                   .stages = config(r.algo, CUBLASLT_ALGO_CONFIG_STAGES_ID),
                   .split_k = config(r.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
                   .workspace_bytes = r.workspaceSize});
  }
  return all;
}

Result<std::string> gemm_library() {
  if (!library().name.empty()) return library().name;
  return Status::error(Code::unimplemented, "no cuBLASLt: " + library().fault);
}

}  // namespace cf::cuda

#else

namespace cf::cuda {

Result<LaunchList::Call> make_gemm(const Gemm&, int) { return LaunchList::Call(); }
std::vector<GemmAlgorithm> gemm_algorithms() { return {}; }
Result<std::string> gemm_library() {
  return Status::error(Code::unimplemented, "no cuBLASLt: this build was made without cublasLt.h");
}

}  // namespace cf::cuda

#endif

namespace cf::cuda {

bool has_gemm() { return bool(gemm_library()); }

}  // namespace cf::cuda
