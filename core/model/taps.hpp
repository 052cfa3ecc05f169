#pragma once
// Taps of a model that runs: what a visitor of ModelRunner::watch() makes of a site's tensors.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/model/decoder.hpp"
#include "core/model/model.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"

namespace cf {

/// The tensors of a site's call, as a visitor is given them.
template <class Args>
std::vector<ModelRunner::SiteTensor> tensors_of(const Args& args) {
  using Op = typename Args::Op;
  std::vector<ModelRunner::SiteTensor> tensors;
  Op::tensors(Op::dims(args), args, [&](const TensorSpec& spec, const auto& view, const auto&) {
    if (view)
      tensors.push_back(
          {spec.role, std::string(spec.name), view.data, view.dtype, {view.shape.begin(), view.shape.end()}});
  });
  return tensors;
}

/// Memory of the host for a tap of the tokens that go through a model, in chunks or one by one.
struct TapMemory {
  std::byte* to;
  DType dtype;                 // the runner's
  Shape shape;                 // (tokens, ...)
  std::int64_t made_rows = 0;  // those that are there
};

/// Appends the rows that a site has made to the site's tap. `find(name)` returns the tap of a name, null where nobody
/// wants it. `fetch` copies the rows. The visitor of a ModelRunner calls this function. Refuses rows of another dtype
/// or shape than the tap's, and more rows than the tap has room for.
Status append_taps(const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors,
                   const std::function<TapMemory*(const std::string& name)>& find,
                   const std::function<Status(const ModelRunner::SiteTensor&, void* to)>& fetch);

/// A tap of the tokens that go through a model, in chunks or one by one.
struct TapRows {
  Tensor rows;                 // (tokens, ...), of the runner's dtype
  std::int64_t made_rows = 0;  // those that are there
};

/// append_taps() for those of `taps`, by ModelRunner::fetch() of the visitor's runner.
Status append_taps(ModelRunner& runner, const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors,
                   std::map<std::string, TapRows>& taps);

/// Whether a tensor in the host's memory holds a NaN.
bool has_nan(const ModelRunner::SiteTensor& tensor);

}  // namespace cf
