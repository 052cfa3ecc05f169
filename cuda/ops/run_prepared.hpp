#pragma once
// A call by what prepare() makes of it. Private to cuda.
#include "cuda/runtime/context.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

/// Puts the launches of a call onto the context's stream.
template <class Args>
Status run_prepared(const Args& args, Context& context) {
  LaunchList launches(context);
  CF_TRY(prepare(args, launches));
  return launches.submit(context.stream(), {.early = context.overlap()});
}

}  // namespace cf::cuda
