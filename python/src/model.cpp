#include "python/src/bindings.hpp"

namespace cf::python {

void bind_model(nanobind::module_&) {}

}  // namespace cf::python
