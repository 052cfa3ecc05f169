#pragma once
// A step's plan as a text. Private to cuda and the programs.
#include <string>

#include "cuda/step/choose.hpp"

namespace cf::cuda {

/// The nodes in order. A node's first line has its site, kernel, compulsory bytes and mode; below it stand the kernel's
/// plan, and each kernel before it in the op's list with the reason why it does not take the call.
std::string to_string(const StepPlan& plan);

}  // namespace cf::cuda
