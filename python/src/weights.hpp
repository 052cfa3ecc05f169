#pragma once
#include "golden/checkpoint/model_source.hpp"

namespace cf::python {

/// Whose memory holds weights: `none` after drop_values().
enum class Memory { host, device, none };

/// A model as Python shares it. `owner` keeps the weights' memory: the mapped files, or a Python object.
struct Weights : checkpoint::LoadedModel {
  Memory memory = Memory::host;
  bool procedural = false;           // no checkpoint's
  std::int64_t layers_left_out = 0;  // behind the last one of `weights`

  /// Gives the weights' memory back. Formats, dtypes and shapes stay.
  void drop_values() {
    LoadedModel::drop_values();
    memory = Memory::none;
  }
};

}  // namespace cf::python
