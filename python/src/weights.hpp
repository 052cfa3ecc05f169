#pragma once
#include "golden/checkpoint/model_source.hpp"

namespace cf::python {

/// Where weights lie: `none` after drop_values().
enum class Place { host, device, none };

/// A model as Python shares it. `owner` keeps the weights' memory: the mapped files, or a Python object.
struct Weights : checkpoint::LoadedModel {
  Place place = Place::host;
  bool procedural = false;           // no checkpoint's
  std::int64_t layers_left_out = 0;  // behind the last one of `weights`

  /// Gives the weights' memory back. Formats, dtypes and shapes stay.
  void drop_values() {
    LoadedModel::drop_values();
    place = Place::none;
  }
};

}  // namespace cf::python
