#include "cpu_ref/cpu_ref.hpp"
#include "cpu_ref/simd/kernels.hpp"

namespace cf::cpu_ref {

std::string_view instruction_set() { return kernels().name; }

}  // namespace cf::cpu_ref
