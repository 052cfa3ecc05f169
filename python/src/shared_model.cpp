#include "python/src/shared_model.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/weights.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace cf::python {

SharedModel::~SharedModel() {
  const WithoutGil without_gil;
  (void)close();
}

Status SharedModel::close() {
  return on_device(device_, [&] {
    runner_->close();
    weights_.reset();
    return Status();
  });
}

Status SharedModel::swap(const Weights& weights) {
  if (weights.memory != Memory::host)
    return Status::error(Code::invalid_argument, "swap: expected weights in the memory of the host, got others");
  if (const std::int64_t leased = slots() - free_slots(); leased > 0)
    return Status::error(Code::invalid_argument,
                         "swap: expected no call that runs, got " + std::to_string(leased) + " slots in use");
  return on_device(device_, [&]() -> Status {
    CF_TRY_ASSIGN(ModelRunner* const runner, runner_->runner());
    Status status = runner->swap_weights(weights.config.spec(), weights.weights, weights.owner);
    if (status && weights.checkpoint)
      status = weights.checkpoint->check_files();
    else if (status.code() != Code::device_error)
      return status;
    if (!status) runner_->close();
    return status;
  });
}

namespace {

/// Copies a model to a GPU, or reads the weights that lie there in place.
std::shared_ptr<SharedModel> make_shared_model(const Weights& w, int device, std::int64_t slots, std::int64_t capacity,
                                               std::int64_t chunk, const std::string& impl, std::int64_t window,
                                               std::int64_t sinks, std::int64_t pages, std::int64_t page_entries,
                                               bool invariant, const std::vector<int>& devices) {
  if (w.memory == Memory::none) refuse("weights: expected their values, got none: drop_values() gave them back");
  const bool in_place = w.memory == Memory::device;
  DeviceModel made = take([&]() -> Result<DeviceModel> {
    const WithoutGil without_gil;
    return make_device_model(w.config.name, w.config.spec(), w.weights,
                             {.device = devices.empty() ? device : devices.front(),
                              .devices = devices,
                              .slots = slots,
                              .capacity = capacity,
                              .chunk = chunk,
                              .impl = impl,
                              .in_place = in_place,
                              .invariant = invariant,
                              .window = window,
                              .sinks = sinks,
                              .pages = pages,
                              .page_entries = page_entries});
  }());
  return std::make_shared<SharedModel>(std::move(made), devices.empty() ? device : devices.front(),
                                       in_place ? w.owner : nullptr);
}

}  // namespace

void bind_device(nb::module_& m) {
  m.def("has_cuda", &has_cuda, "Whether this build has the CUDA backend.");
  m.attr("WEIGHT_ALIGNMENT") = kWeightAlignment;
  m.def(
      "cuda_versions", [] { return take(cuda_versions()); },
      "The newest CUDA that the driver runs, \"0.0\" without a driver, and the CUDA that this build links.");
  m.def("cublaslt", &cublaslt, "The cuBLASLt that was found, or why there is none.");
  m.def(
      "check_cuda_device", [](int device) { check(check_device(device)); }, "device"_a = 0,
      "Raises CfError for a GPU that is not there or that this build has no kernels for, and NotImplementedError where "
      "the build has no CUDA backend. Takes no memory of the device.");
  m.def(
      "cuda_device",
      [](int device) {
        const DeviceInfo d = take([&] {
          const WithoutGil without_gil;
          return device_info(device);
        }());
        return std::tuple(d.name, d.compute_capability, std::int64_t(d.memory_bytes), std::int64_t(d.free_bytes));
      },
      "device"_a = 0,
      "A GPU's name, its compute capability (90 for 9.0), the bytes of its memory and those that are free. Raises what "
      "check_cuda_device() raises.");
  nb::class_<SharedModel>(m, "DeviceModel",
                          "A model in the memory of a GPU. Runners and decoders share it, each with slots of its own; "
                          "threads take turns.")
      .def(nb::new_(&make_shared_model), "weights"_a, nb::kw_only(), "device"_a = 0, "slots"_a = 1, "capacity"_a = 2048,
           "chunk"_a = 512, "impl"_a = "auto", "window"_a = 0, "sinks"_a = 0, "pages"_a = 0, "page_entries"_a = 64,
           "invariant"_a = false, "devices"_a = std::vector<int>(),
           "Copies the weights to the device, or reads in place those that lie there, and takes memory for a cache of "
           "`slots` sequences of `capacity` entries. With several `devices` each has a part of the model. window, "
           "sinks, pages, page_entries and invariant are as on the "
           "CPU. Raises ValueError for sizes below 1 and an unknown `impl`, "
           "NotImplementedError for what the impl "
           "or the backend does not take, MemoryError where the device's memory is not free, and CfError where there "
           "is no such device.")
      .def_prop_ro("device", &SharedModel::device, "The number of the GPU.")
      .def_prop_ro("slots", &SharedModel::slots, "Sequences that the cache holds.")
      .def_prop_ro("free_slots", &SharedModel::free_slots, "Slots that no runner and no decoder has.")
      .def_prop_ro("capacity", &SharedModel::capacity, "Entries that a slot has room for.")
      .def_prop_ro("impl", &SharedModel::impl, "How a step is launched.")
      .def_prop_ro(
          "activation", [](const SharedModel& s) { return std::string(to_string(s.activation())); },
          "The dtype of activations, cache and logits.")
      .def_prop_ro("weight_bytes", &SharedModel::weights_bytes,
                   "The bytes of the model's own weights on the device: 0 where it reads them in place.")
      .def_prop_ro("cache_bytes", &SharedModel::cache_bytes, "The bytes of the cache.")
      .def_prop_ro("workspace_bytes", &SharedModel::workspace_bytes, "The bytes of the activations.")
      .def(
          "swap",
          [](SharedModel& s, const Weights& weights) { check(work(s.turns(), [&] { return s.swap(weights); })); },
          "weights"_a,
          "Copies other weights of the same config to the place of the model's own, which take no other memory. Raises "
          "ValueError for weights of another config, shape, dtype or format, and while a runner or a decoder has "
          "slots, and NotImplementedError for weights in place and those that are packed in another layout; the "
          "model keeps its own then.")
      .def(
          "close", [](SharedModel& s) { check(work(s.turns(), [&] { return s.close(); })); },
          "Gives the device's memory back. What its runners are asked from now on raises CfError.");
}

}  // namespace cf::python
