#pragma once
#include <nanobind/nanobind.h>

#include <map>
#include <optional>
#include <utility>

#include "core/model/shape.hpp"
#include "python/src/port/port_steps.hpp"
#include "python/src/torch_tensors.hpp"

namespace cf::python {

/// What a graph context keeps for its steps on a GPU: memory for activations, and CUDA graphs. Steps of one context do
/// not run side by side.
class PortSteps {
 public:
  /// `memory` is a contiguous tensor of at least PortLayer::spare_elements() float16 elements on the context's GPU.
  explicit PortSteps(nanobind::object memory) : memory_(std::move(memory)) {}

  /// How many graphs are kept.
  std::size_t graphs() const { return steps_.graphs(); }

 private:
  friend class PortLayer;
  nanobind::object memory_;
  DeviceSteps steps_;
};

/// One token through one layer of ClusterFusion's Pythia port, on a GPU: what cf_ops.clusterfusion does there, in one
/// call. Nothing is refused here: what does not look right is left to cf_ops.clusterfusion, which says why.
class PortLayer {
 public:
  /// `config` is the text of the config.json of a model of one layer.
  explicit PortLayer(const std::string& config);

  /// Lets calls on a GPU read the numbers 0 .. most, int32 in its memory at this address for ever.
  void use_numbers(int device, std::uintptr_t address, std::int64_t most) { numbers_[device] = {address, most}; }

  /// (output, k, v) of a token behind `length` others, which is stored in both caches of the caller's. None where
  /// something does not look right, and nothing is launched then.
  ///
  /// `given` has the tensors in the order of kGiven. `own` is None, or two tensors (1, heads, capacity, head_dim): the
  /// caches in this library's layout, whose first `valid` entries are those of the caller's caches. The others are
  /// turned into that layout first. `steps` is what the context of these caches keeps. Where it is null, the host
  /// launches every kernel, and the call takes memory of its own.
  nanobind::object run(const nanobind::tuple& given, nanobind::handle length, nanobind::handle own, std::int64_t valid,
                       PortSteps* steps);
  /// The float16 elements of a step's activations but for its outputs.
  std::int64_t spare_elements() const;

 private:
  ModelSpec model_;
  std::map<int, std::pair<std::uintptr_t, std::int64_t>> numbers_;
};

/// Adds PortLayer to the module.
void bind_port_layer(nanobind::module_& m);

}  // namespace cf::python
