#pragma once
// Hopper's tensor cores: products of tiles in shared memory, which a warpgroup (four warps, the first a multiple of
// four) starts together and waits for later. PTX, one instruction a function. Compute capability 9.0 alone has them;
// in code for another one the products are left out, and no kernel that calls them is launched.
//
// A tile in shared memory has rows of 128 bytes, 64 elements, as cuda/runtime/tensor_map.hpp describes them, and begins
// at a multiple of 1024 bytes. A column of tiles side by side makes longer rows.
#include <cstdint>

#include "core/dtype.hpp"
#include "cuda/device/address.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CF_HAVE_WGMMA 1
#endif

namespace cf::cuda {

inline constexpr int kTileRowBytes = 128;

/// Describes a tile whose rows run along k: row i of the tile is row i of operand a, or column i of operand b. To move
/// on by 16 elements along k, add kWgmmaStep.
__device__ inline std::uint64_t tile_along_k(const void* tile) {
  return std::uint64_t(shared_address(tile) >> 4 & 0x3fff) | std::uint64_t(8 * kTileRowBytes >> 4) << 32 |
         std::uint64_t(1) << 62;
}
inline constexpr std::uint64_t kWgmmaStep = 16 * 2 >> 4;
/// The tile whose tile_along_k() has this low word: sums of 32 bits take fewer instructions than those of 64.
__device__ inline std::uint64_t tile_along_k_at(std::uint32_t low) {
  return std::uint64_t((8 * kTileRowBytes >> 4) | 1 << 30) << 32 | low;
}

/// Describes operand b whose k runs along the tile's rows: row i of the tile is row i of b. Columns beyond the first 64
/// lie in the next tile, `next_tile_bytes` behind this one. To move on by 16 rows, add kWgmmaRows.
__device__ inline std::uint64_t tile_across_k(const void* tile, int next_tile_bytes) {
  return std::uint64_t(shared_address(tile) >> 4 & 0x3fff) | std::uint64_t(next_tile_bytes >> 4 & 0x3fff) << 16 |
         std::uint64_t(8 * kTileRowBytes >> 4) << 32 | std::uint64_t(1) << 62;
}
inline constexpr std::uint64_t kWgmmaRows = 16 * kTileRowBytes >> 4;

/// Orders the warpgroup's accesses to registers before the products that follow. Called before the first product, and
/// whenever other code has touched the registers of sums or of operand a.
__device__ inline void wgmma_fence() {
#ifdef CF_HAVE_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
/// Ends a group of products.
__device__ inline void wgmma_commit() {
#ifdef CF_HAVE_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
/// Waits until at most Pending of the groups are unfinished.
template <int Pending>
__device__ void wgmma_wait() {
#ifdef CF_HAVE_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#endif
}

/// Orders this thread's accesses to registers before what follows in the compiler's eyes: called for sums and for
/// operand a after wgmma_wait(), and before wgmma_fence() where other code has touched them.
template <int N>
__device__ void keep_in_registers(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ void keep_in_registers(std::uint32_t (&a)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

/// to = from, by an instruction of its own. It makes a new operand a out of registers that were written while other
/// products were running. Without the copy the compiler takes these registers for the operand itself, and lets no
/// products run at the same time.
template <int N>
__device__ void copy_registers(std::uint32_t (&to)[N], const std::uint32_t (&from)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("mov.b32 %0, %1;" : "=r"(to[i]) : "r"(from[i]));
}
/// The same where ptxas sees through moves: it then says C7513, "wgmma.mma_async instructions are serialized". `zero`
/// is 0, which the compiler does not know.
template <int N>
__device__ void copy_registers(std::uint32_t (&to)[N], const std::uint32_t (&from)[N], std::uint32_t zero) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("xor.b32 %0, %1, %2;" : "=r"(to[i]) : "r"(from[i]), "r"(zero));
}

/// Orders this thread's plain stores to shared memory before products that read what was stored. The threads that start
/// the products wait for this thread after the call.
__device__ inline void let_products_see() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Releases registers until each of the calling warpgroup's threads has Registers left, a multiple of 8.
template <int Registers>
__device__ void give_registers() {
#ifdef CF_HAVE_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
#endif
}
/// Waits until each of the calling warpgroup's threads has Registers, which others of the block have given away.
template <int Registers>
__device__ void take_registers() {
#ifdef CF_HAVE_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
#endif
}

// wgmma(d, a, b, add, T): d = a * b, or d += a * b where `add` is true, in float32. a is 64 x 16, b is 16 x n, d is
// 64 x n with n = 2 * the registers of d. a and b are described by tile_along_k(). In warp w of the warpgroup a lane
// holds, with g = lane / 4 and t = lane % 4,
//   d[4j..4j+1] = d[16w + g][8j + 2t..]   d[4j+2..4j+3] = d[16w + g + 8][8j + 2t..]
// Operand a may also be in registers as mma() takes it, rows 16w..16w+15 in warp w.
// wgmma_across(d, a, b, T): d += a * b with operand a in registers and b described by tile_across_k().
#define CF_NUMBERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CF_NUMBERS_16 CF_NUMBERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CF_NUMBERS_24 CF_NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CF_NUMBERS_32 CF_NUMBERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CF_NUMBERS_40 CF_NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CF_NUMBERS_48 CF_NUMBERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CF_NUMBERS_56 CF_NUMBERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CF_NUMBERS_64 CF_NUMBERS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CF_NUMBERS_72 CF_NUMBERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CF_NUMBERS_80 CF_NUMBERS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CF_NUMBERS_88 CF_NUMBERS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CF_NUMBERS_96 CF_NUMBERS_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define CF_NUMBERS_104 CF_NUMBERS_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define CF_NUMBERS_112 CF_NUMBERS_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define CF_NUMBERS_120 CF_NUMBERS_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define CF_NUMBERS_128 CF_NUMBERS_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define CF_SUMS_8(i)                                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define CF_SUMS_16(i) CF_SUMS_8(i), CF_SUMS_8(i + 8)
#define CF_SUMS_32(i) CF_SUMS_16(i), CF_SUMS_16(i + 16)
#define CF_SUMS_40(i) CF_SUMS_32(i), CF_SUMS_8(i + 32)
#define CF_SUMS_48(i) CF_SUMS_32(i), CF_SUMS_16(i + 32)
#define CF_SUMS_64(i) CF_SUMS_32(i), CF_SUMS_32(i + 32)
#define CF_SUMS_80(i) CF_SUMS_64(i), CF_SUMS_16(i + 64)
#define CF_SUMS_96(i) CF_SUMS_64(i), CF_SUMS_32(i + 64)
#define CF_SUMS_128(i) CF_SUMS_64(i), CF_SUMS_64(i + 64)

#ifdef CF_HAVE_WGMMA
#define CF_WGMMA_ASM(n, registers, type, a, b, add)                                                          \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n     \
               "k16.f32." type "." type " {" CF_NUMBERS_##registers "}, %" a ", %" b ", add, 1, 1, 0, 0;\n}" \
               : CF_SUMS_##registers(0)                                                                      \
               : "l"(tile_a), "l"(tile_b), "r"(int(is_added)))
#define CF_WGMMA_ROWS_ASM(n, registers, type, a0, a1, a2, a3, b, add)                                              \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n           \
               "k16.f32." type "." type " {" CF_NUMBERS_##registers "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b \
                                                                    ", add, 1, 1, 0;\n}"                           \
               : CF_SUMS_##registers(0)                                                                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile_b), "r"(int(is_added)))
#define CF_WGMMA_ACROSS_ASM(n, registers, type, a0, a1, a2, a3, b)                                         \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" CF_NUMBERS_##registers \
               "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b ", 1, 1, 1, 1;"                              \
               : CF_SUMS_##registers(0)                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile_b))
#else
#define CF_WGMMA_ASM(...)
#define CF_WGMMA_ROWS_ASM(...)
#define CF_WGMMA_ACROSS_ASM(...)
#endif
#define CF_WGMMA(n, registers, a, b, add)                                                                     \
  __device__ inline void wgmma([[maybe_unused]] float(&d)[registers], [[maybe_unused]] std::uint64_t tile_a,  \
                               [[maybe_unused]] std::uint64_t tile_b, [[maybe_unused]] bool is_added, f16) {  \
    CF_WGMMA_ASM(n, registers, "f16", a, b, add);                                                             \
  }                                                                                                           \
  __device__ inline void wgmma([[maybe_unused]] float(&d)[registers], [[maybe_unused]] std::uint64_t tile_a,  \
                               [[maybe_unused]] std::uint64_t tile_b, [[maybe_unused]] bool is_added, bf16) { \
    CF_WGMMA_ASM(n, registers, "bf16", a, b, add);                                                            \
  }
#define CF_WGMMA_ROWS(n, registers, a0, a1, a2, a3, b, add)                                                        \
  __device__ inline void wgmma([[maybe_unused]] float(&d)[registers], [[maybe_unused]] const std::uint32_t(&a)[4], \
                               [[maybe_unused]] std::uint64_t tile_b, [[maybe_unused]] bool is_added, f16) {       \
    CF_WGMMA_ROWS_ASM(n, registers, "f16", a0, a1, a2, a3, b, add);                                                \
  }                                                                                                                \
  __device__ inline void wgmma([[maybe_unused]] float(&d)[registers], [[maybe_unused]] const std::uint32_t(&a)[4], \
                               [[maybe_unused]] std::uint64_t tile_b, [[maybe_unused]] bool is_added, bf16) {      \
    CF_WGMMA_ROWS_ASM(n, registers, "bf16", a0, a1, a2, a3, b, add);                                               \
  }
#define CF_WGMMA_ACROSS(n, registers, a0, a1, a2, a3, b)                             \
  __device__ inline void wgmma_across([[maybe_unused]] float(&d)[registers],         \
                                      [[maybe_unused]] const std::uint32_t(&a)[4],   \
                                      [[maybe_unused]] std::uint64_t tile_b, f16) {  \
    CF_WGMMA_ACROSS_ASM(n, registers, "f16", a0, a1, a2, a3, b);                     \
  }                                                                                  \
  __device__ inline void wgmma_across([[maybe_unused]] float(&d)[registers],         \
                                      [[maybe_unused]] const std::uint32_t(&a)[4],   \
                                      [[maybe_unused]] std::uint64_t tile_b, bf16) { \
    CF_WGMMA_ACROSS_ASM(n, registers, "bf16", a0, a1, a2, a3, b);                    \
  }
CF_WGMMA(16, 8, "8", "9", "10")
CF_WGMMA(32, 16, "16", "17", "18")
CF_WGMMA(64, 32, "32", "33", "34")
CF_WGMMA(128, 64, "64", "65", "66")
CF_WGMMA(160, 80, "80", "81", "82")
CF_WGMMA_ROWS(32, 16, "16", "17", "18", "19", "20", "21")
CF_WGMMA_ROWS(64, 32, "32", "33", "34", "35", "36", "37")
CF_WGMMA_ROWS(80, 40, "40", "41", "42", "43", "44", "45")
CF_WGMMA_ROWS(96, 48, "48", "49", "50", "51", "52", "53")
CF_WGMMA_ROWS(128, 64, "64", "65", "66", "67", "68", "69")
CF_WGMMA_ROWS(160, 80, "80", "81", "82", "83", "84", "85")
CF_WGMMA_ROWS(192, 96, "96", "97", "98", "99", "100", "101")
CF_WGMMA_ROWS(256, 128, "128", "129", "130", "131", "132", "133")
CF_WGMMA_ACROSS(64, 32, "32", "33", "34", "35", "36")
CF_WGMMA_ACROSS(80, 40, "40", "41", "42", "43", "44")
CF_WGMMA_ACROSS(128, 64, "64", "65", "66", "67", "68")
#undef CF_WGMMA
#undef CF_WGMMA_ROWS
#undef CF_WGMMA_ACROSS
#undef CF_WGMMA_ASM
#undef CF_WGMMA_ROWS_ASM
#undef CF_WGMMA_ACROSS_ASM
#undef CF_NUMBERS_8
#undef CF_NUMBERS_16
#undef CF_NUMBERS_24
#undef CF_NUMBERS_32
#undef CF_NUMBERS_40
#undef CF_NUMBERS_48
#undef CF_NUMBERS_56
#undef CF_NUMBERS_64
#undef CF_NUMBERS_72
#undef CF_NUMBERS_80
#undef CF_SUMS_8
#undef CF_SUMS_16
#undef CF_SUMS_32
#undef CF_SUMS_40
#undef CF_SUMS_48
#undef CF_SUMS_64
#undef CF_SUMS_80

}  // namespace cf::cuda
