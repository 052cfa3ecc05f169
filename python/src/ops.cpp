#include "python/src/bindings.hpp"

namespace cf::python {

void bind_ops(nanobind::module_&) {}

}  // namespace cf::python
