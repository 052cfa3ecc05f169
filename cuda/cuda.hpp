#pragma once
// The CUDA backend: a device, its memory, every op, resident weights, caches and ways of stepping them. Views point to
// device memory; calls are asynchronous on the context's stream.
#include "cuda/model/session.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/runtime/arch.hpp"
#include "cuda/runtime/context.hpp"
#include "cuda/runtime/memory.hpp"
