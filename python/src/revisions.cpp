#include "golden/checkpoint/revisions.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "golden/checkpoint/checkpoint.hpp"
#include "python/src/bindings.hpp"
#include "python/src/work.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace cf::python {
namespace {

using checkpoint::Identity;
/// name, step, config, sha256, tensors, elements, error
using Row = std::tuple<std::string, std::int64_t, std::string, std::string, std::map<std::string, std::string>,
                       std::string, std::optional<std::string>>;

Identity identify(const std::string& directory, int threads) {
  checkpoint::guard_mapped_files();
  Interrupt interrupt;
  Result<Identity> made = [&] {
    const WithoutGil without_gil;
    return checkpoint::identify(directory, threads, [&] { return interrupt.check(); });
  }();
  if (PyErr_Occurred()) throw nb::python_error();
  return take(std::move(made));
}

std::vector<std::pair<std::string, std::string>> faults_of(const std::vector<Row>& rows) {
  std::vector<checkpoint::Revision> revisions;
  for (const auto& [name, step, config, sha256, tensors, elements, error] : rows)
    revisions.push_back({.name = name,
                         .step = step,
                         .identity = {.config = config, .tensors = tensors, .sha256 = sha256, .elements = elements},
                         .error = error});
  std::vector<std::pair<std::string, std::string>> made;
  for (const checkpoint::RevisionFault& fault : checkpoint::faults_of(revisions))
    made.emplace_back(fault.revision, fault.what);
  return made;
}

}  // namespace

void bind_revisions(nb::module_& m) {
  nb::class_<Identity>(m, "Identity", "What the files of a checkpoint hold, in checksums.")
      .def_ro("config", &Identity::config, "config.json, as JSON text.")
      .def_ro("files", &Identity::files, "The bytes of each file that holds tensors.")
      .def_ro("files_sha256", &Identity::files_sha256, "The SHA-256 of each of these files.")
      .def_ro("tensors", &Identity::tensors, "Of each tensor: dtype, shape and the SHA-256 of its elements.")
      .def_ro("sha256", &Identity::sha256, "Of all tensors, their names, dtypes and shapes.")
      .def_ro("elements", &Identity::elements, "Some elements of the matrices: float32 in hexadecimal digits.");
  m.def("identify", &identify, "directory"_a, "threads"_a,
        "Reads every byte of a checkpoint's tensors on several threads. Raises what Weights.open() raises of files.");
  m.def("faults_of", &faults_of, "revisions"_a,
        "What is wrong with revisions (name, step, config, sha256, tensors, elements, error): pairs of a name and what "
        "it is.");
  m.def("step_of", &checkpoint::step_of, "name"_a, "place"_a,
        "The training step that a revision's name says; `place` where it says none.");
}

}  // namespace cf::python
