#pragma once
// The plans of kernels.def, and their functions. Private to cuda.
#include "cuda/ops/all_reduce/all_reduce.hpp"
#include "cuda/ops/attention/attention.hpp"
#include "cuda/ops/attention/kv_append.hpp"
#include "cuda/ops/embedding/embedding.hpp"
#include "cuda/ops/linear/linear.hpp"
#include "cuda/ops/linear/packed/sum.hpp"
#include "cuda/ops/linear/wgmma/sum.hpp"
#include "cuda/ops/ln_qkv/ln_qkv.hpp"
#include "cuda/ops/norm/layernorm.hpp"
#include "cuda/ops/norm/qk_norm.hpp"
#include "cuda/ops/rms_linear/rms_linear.hpp"
#include "cuda/ops/rope/rope.hpp"
