#pragma once
#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python/src/bound_op.hpp"
#include "python/src/torch_tensors.hpp"

namespace cf::python {

/// Calls of one op on torch tensors of a GPU, known by what a check of them looks at: the tensors' types, devices,
/// dtypes, shapes and strides, which of them are there, and the scalars that a BoundOp depends on. A call that is like
/// one that was checked is launched at once. Nothing is refused here: every other call is left to whoever checks it.
///
/// Nothing of a tensor is kept but its dtype and shape. Its address is read anew by every call.
class KnownCalls {
 public:
  /// `numbers` are the names of the scalars that every call is given anew, and whether they are integers; `states` the
  /// places of the tensors that the op writes.
  KnownCalls(std::vector<std::pair<std::string, bool>> numbers, std::vector<std::size_t> states)
      : numbers_(std::move(numbers)), states_(std::move(states)) {}

  /// The outputs of a call like one that is known: a tensor, a tuple of several, or an empty tuple of none. None for
  /// any other call, of which nothing is launched then.
  ///
  /// `given` has tensors, None for one that is not there, GptqWeights, and at most one dict of those by their names.
  /// `fixed` is None, a str or a tuple. A number that is None has the value that remember() was given.
  nanobind::object run(const nanobind::tuple& given, nanobind::handle fixed, const nanobind::tuple& numbers);

  /// What a call that was checked and has run is like. `values` are its numbers, `outputs` the sizes and the strides
  /// of what it made. `weights` says for each GPTQ weight of the BoundOp which of the given GptqWeights it is.
  void remember(const nanobind::tuple& given, nanobind::handle fixed, const nanobind::tuple& numbers,
                const nanobind::tuple& values, nanobind::object bound, std::vector<std::size_t> weights,
                const nanobind::list& outputs, nanobind::object dtype, nanobind::callable allocate);

  /// The names of the scalars that every call is given anew.
  std::vector<std::string> numbers() const {
    std::vector<std::string> names;
    for (const auto& [name, is_integer] : numbers_) names.push_back(name);
    return names;
  }
  /// How many calls are known.
  std::size_t size() const { return calls_.size(); }

 private:
  static constexpr std::size_t kMostCalls = 256, kMostWords = 256, kMostNumbers = 2, kMostOutputs = 16;

  /// A call as it is given: what it is like in words, and its addresses in the order of its BoundOp.
  struct Given {
    std::array<std::int64_t, kMostWords> words;
    std::size_t word_count = 0;
    std::uint64_t hash = 0;
    int device = -1;
    nanobind::handle like;  // the first tensor
    BoundOp::Addresses addresses;
    std::vector<nanobind::handle> names;                            // the keys of the dict
    std::vector<std::pair<nanobind::handle, std::size_t>> weights;  // GptqWeights, and where their addresses begin
    std::array<Number, kMostNumbers> numbers;

    bool add(std::int64_t word) {
      if (word_count == kMostWords) return false;
      words[word_count++] = word;
      return true;
    }
  };
  struct Call {
    std::uint64_t hash;
    std::vector<std::int64_t> words;
    nanobind::object fixed;
    std::vector<nanobind::object> names;
    std::array<Number, kMostNumbers> numbers;
    nanobind::object bound;  // keeps `op`
    const BoundOp* op;
    nanobind::tuple form;  // the key of the weights' packed forms
    std::vector<std::size_t> weights;
    std::vector<std::pair<nanobind::tuple, nanobind::tuple>> outputs;
    nanobind::object dtype;
    nanobind::callable allocate;
  };

  bool read(const nanobind::tuple& given, const nanobind::tuple& numbers, Given& found) const;
  bool read_one(const Torch& torch, nanobind::handle item, Given& found) const;
  bool read_tensor(const Torch& torch, nanobind::handle item, Given& found) const;
  bool read_number(std::size_t i, nanobind::handle value, Number& number) const;
  std::shared_ptr<const Call> find(const Given& given, nanobind::handle fixed) const;

  std::vector<std::pair<std::string, bool>> numbers_;
  std::vector<std::size_t> states_;
  std::vector<std::shared_ptr<const Call>> calls_;
  std::size_t next_ = 0;  // the index of the call that is forgotten next
};

/// Adds KnownCalls to the module.
void bind_known_calls(nanobind::module_& m);

}  // namespace cf::python
