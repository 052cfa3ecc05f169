#pragma once
// How the persistent kernel is launched. Private to cuda.
#include "core/status.hpp"
#include "cuda/persistent/arguments.hpp"

struct CUstream_st;

namespace cf::cuda {

/// The library's compiled kernel for a plan. The dtype is float16 or bfloat16.
const void* persistent_kernels(const PersistentPlan& plan, DType dtype);
// Each function returns the kernel of one dtype for a plan's products. persistent_kernels_* are for GQA tiles of one
// head, grouped_kernels_* for GQA tiles of several heads, packed_kernels_* for packed weights. Each function has a file
// of its own, so that the files compile side by side.
const void* persistent_kernels_f16(Products products);
const void* persistent_kernels_bf16(Products products);
const void* grouped_kernels_f16(Products products);
const void* grouped_kernels_bf16(Products products);
const void* packed_kernels_f16(Products products);
const void* packed_kernels_bf16(Products products);

/// The same of a model that ranks share, whose weights are dense.
const void* rank_kernels(const PersistentPlan& plan, DType dtype);
const void* rank_kernels_f16(Products products);
const void* rank_kernels_bf16(Products products);
const void* grouped_rank_kernels_f16(Products products);
const void* grouped_rank_kernels_bf16(Products products);

/// Lets the kernel have the plan's shared memory. Comes before the kernel's first launch. Refuses a plan of more blocks
/// than the device holds at once.
Status prepare_persistent(const void* kernel, const PersistentPlan& plan, int device);

/// Launches a kernel. A cooperative launch has all of its blocks resident at once, or is an error where the device
/// cannot hold them. Blocks of any other launch may hold the SMs of blocks that they wait for, until a wait's limit.
Status launch_persistent(const void* kernel, const PersistentArguments& arguments, bool cooperative,
                         CUstream_st* stream);

}  // namespace cf::cuda
