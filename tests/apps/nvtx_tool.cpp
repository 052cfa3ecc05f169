// A tool for NVTX: writes the name of every range to the file CF_NVTX_RANGES, a line each. Programs load it by the
// environment's NVTX_INJECTION64_PATH.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>

namespace {

int write_name(const char* name) {
  static std::FILE* const file = std::fopen(std::getenv("CF_NVTX_RANGES"), "w");
  return file && std::fprintf(file, "%s\n", name) > 0 ? 0 : NVTX_NO_PUSH_POP_TRACKING;
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const auto* const callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) return 0;
  if (size <= NVTX_CBID_CORE_RangePushA) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(write_name);
  return 1;
}
