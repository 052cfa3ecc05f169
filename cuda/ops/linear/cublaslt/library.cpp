#include "cuda/ops/linear/cublaslt/library.hpp"

#include "cuda/ops/prepare.hpp"

#ifdef CF_HAVE_CUBLASLT
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

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

  /// Device, the class' planned_as, in, out, dtype, output, bias, residual.
  using Key = std::tuple<int, std::int64_t, std::int64_t, std::int64_t, DType, DType, bool, bool>;
  std::mutex mutex;
  std::map<int, cublasLtHandle_t> handles;                             // by device
  std::map<Key, std::optional<cublasLtMatmulHeuristicResult_t>> best;  // empty where cuBLASLt has no algorithm

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

/// The workspace of an algorithm that counts its tiles there. Partial sums of one tile take more.
constexpr std::size_t kMostCountersBytes = 4096;

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

  /// cuBLASLt's best algorithm for all products of the class; empty where it has none.
  Result<std::optional<cublasLtMatmulHeuristicResult_t>> best(cublasLtHandle_t handle) const;
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

Result<std::optional<cublasLtMatmulHeuristicResult_t>> Product::best(cublasLtHandle_t handle) const {
  CF_TRY_ASSIGN(const std::shared_ptr<Product> p, with_tokens(gemm_.step_class.planned_as));
  CF_TRY_ASSIGN(const std::shared_ptr<Product> least, with_tokens(gemm_.step_class.first));

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

  std::array<cublasLtMatmulHeuristicResult_t, 16> results{};  // best first
  int count = 0;
  const cublasStatus_t status = library().cublasLtMatmulAlgoGetHeuristic(
      handle, p->operation_, p->weight_, p->x_, p->y_, p->y_, preference, int(results.size()), results.data(), &count);
  using Best = std::optional<cublasLtMatmulHeuristicResult_t>;
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return Best();
  CF_TRY(from_cublas(status, "cublasLtMatmulAlgoGetHeuristic"));
  for (int i = 0; i < count; ++i) {
    const cublasLtMatmulHeuristicResult_t& r = results[std::size_t(i)];
    const bool one_sum = config(r.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1 && r.workspaceSize <= kMostCountersBytes;
    if (r.state == CUBLAS_STATUS_SUCCESS && one_sum && least->takes(handle, r.algo)) return Best(r);
  }
  return Best();
}

/// The handle of a device. The caller holds the library's mutex.
Result<cublasLtHandle_t> handle_of(int device) {
  if (const auto found = library().handles.find(device); found != library().handles.end()) return found->second;
  // cuBLASLt makes a handle for the current device.
  int current = 0;
  CF_TRY(from_cuda(cudaGetDevice(&current), "cudaGetDevice"));
  CF_TRY(from_cuda(cudaSetDevice(device), "cudaSetDevice"));
  cublasLtHandle_t handle = nullptr;
  const Status made = from_cublas(library().cublasLtCreate(&handle), "cublasLtCreate");
  CF_TRY(from_cuda(cudaSetDevice(current), "cudaSetDevice"));
  CF_TRY(made);
  return library().handles[device] = handle;
}

}  // namespace

Result<LaunchList::Call> make_gemm(const Gemm& g, int device) {
  Library& lib = library();
  if (lib.name.empty()) return LaunchList::Call();
  // The first call may come while a stream is captured.
  const RelaxedCapture relaxed;
  CF_TRY_ASSIGN(const std::shared_ptr<Product> product, Product::create(g));
  const Library::Key key{
      device, g.step_class.planned_as, g.in, g.out, g.dtype, g.output, g.bias != nullptr, g.residual != nullptr};
  const std::lock_guard lock(lib.mutex);
  CF_TRY_ASSIGN(const cublasLtHandle_t handle, handle_of(device));
  auto found = lib.best.find(key);
  if (found == lib.best.end()) {
    CF_TRY_ASSIGN(auto best, product->best(handle));
    found = lib.best.emplace(key, std::move(best)).first;
  }
  if (!found->second) return LaunchList::Call();
  if (!product->takes(handle, found->second->algo))
    return Status::error(Code::unimplemented, "linear: cuBLASLt's algorithm for steps of " +
                                                  std::to_string(g.step_class.first) + " tokens and more takes no " +
                                                  std::to_string(g.tokens) + " tokens, " + std::to_string(g.in) +
                                                  " -> " + std::to_string(g.out));
  product->choose(handle, found->second->algo);
  return LaunchList::Call([product](CUstream_st* stream) { return product->multiply(stream); });
}

std::vector<GemmAlgorithm> gemm_algorithms() {
  Library& lib = library();
  std::vector<GemmAlgorithm> all;
  const std::lock_guard lock(lib.mutex);
  for (const auto& [key, best] : lib.best) {
    if (!best) continue;
    const auto& [device, planned_as, in, out, dtype, output, bias, residual] = key;
    all.push_back({.device = device,
                   .planned_as = planned_as,
                   .in = in,
                   .out = out,
                   .dtype = dtype,
                   .output = output,
                   .bias = bias,
                   .residual = residual,
                   .id = config(best->algo, CUBLASLT_ALGO_CONFIG_ID),
                   .tile = config(best->algo, CUBLASLT_ALGO_CONFIG_TILE_ID),
                   .stages = config(best->algo, CUBLASLT_ALGO_CONFIG_STAGES_ID),
                   .split_k = config(best->algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
                   .workspace_bytes = best->workspaceSize});
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
