#pragma once
// One call of an op on tensors of its own: inputs are filled by role; outputs and cache entries beyond kv_len are NaN;
// every block lies between guard bytes. All values are exact in `values`, float16 or bfloat16. Problems of a seed hold
// equal numbers in every dtype: the oracle and the backend compute from the same inputs.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/model/config.hpp"
#include "core/model/examples.hpp"
#include "core/row_runs.hpp"
#include "core/tensor.hpp"

namespace cf::test {

/// What the inputs look like. heavy_tailed: a few elements a thousand times the rest. peaked: scores so large that the
/// softmax is nearly one-hot. shifted: a mean a hundred times the deviation.
enum class Fill { normal, heavy_tailed, peaked, shifted };

/// How an op's Linears are quantised; bits = 0 means dense.
struct GptqSetup {
  int bits = 0;
  std::int64_t group_size = 128;
  std::int32_t zero_offset = 0;
  bool desc_act = false;
};

struct Setup {
  ModelConfig model{};
  Workload load{};
  std::int64_t kv_heads = 0;  // of grouped-query attention; 0 means one for each query head
  DType activation = DType::f32;
  DType weight = DType::f16;
  DType values = DType::f16;
  Fill fill = Fill::normal;
  GptqSetup gptq{};
  std::uint64_t seed = 1;
  /// A mixed step's runs, none of more than load.q_len rows. Ops without runs take load.q_len of each sequence.
  std::vector<RowRun> runs{};
};

/// How many rows a sequence has in a setup's step.
inline std::int64_t count_of(const Setup& s, std::int64_t sequence) {
  if (s.runs.empty()) return s.load.q_len;
  for (const RowRun& run : s.runs)
    if (run.sequence == sequence) return run.count;
  return 0;
}

/// ops::example for a setup, with its kv_heads where the op has any.
template <class Op>
std::pair<typename Op::Dims, typename Op::Args> example_of(const Setup& s) {
  auto sizes = ops::example<Op>(s.model, s.load);
  // RoPE's kv heads follow from the model's layout of q, k and v.
  if constexpr (
      requires { sizes.first.kv_heads; } && !requires { sizes.first.layout; })
    if (s.kv_heads) sizes.first.kv_heads = s.kv_heads;
  return sizes;
}

/// Each sequence's kv_len: the first has the workload's, the others fewer, never below q_len.
inline std::int32_t kv_len_of(const Workload& w, std::int64_t sequence) {
  return std::int32_t(std::max(w.q_len, w.kv_len - 3 * sequence));
}

template <class Op>
class Problem {
  static constexpr std::byte guard{0xa5};
  // A longer block repeats its first values. Their number is prime, so that rows of the block differ.
  static constexpr std::int64_t kMostDrawn = 131071;

 public:
  explicit Problem(const Setup& s) : Problem(s, example_of<Op>(s)) {}
  Problem(const Setup& s, const std::pair<typename Op::Dims, typename Op::Args>& sizes)
      : setup_(s), dims_(sizes.first), args_(sizes.second), random_(s.seed) {
    if (s.gptq.bits) quantise();
    if (!s.runs.empty()) {
      mix(args_);
      const std::int64_t rows = s.runs.back().first_row + s.runs.back().count;
      if constexpr (requires { dims_.mixed; }) dims_.mixed = rows;
      if constexpr (requires { dims_.step.mixed; }) dims_.step.mixed = rows;
    }
    Op::tensors(dims_, args_, [&](const TensorSpec& t, auto& view, auto shape) { add(t, view, shape); });
  }
  Problem(const Problem& other) : Problem(other, other.setup_.activation) {}
  /// The same numbers, with activations of another dtype.
  Problem(const Problem& other, DType activation)
      : setup_(other.setup_), dims_(other.dims_), args_(other.args_), blocks_(other.blocks_) {
    setup_.activation = activation;
    mix(args_);
    auto block = blocks_.begin();
    Op::tensors(dims_, args_, [&](const TensorSpec& t, auto& view, auto) {
      if (is_activation(t.role)) block->convert_to(activation);
      bind(view, *block++);
    });
  }
  Problem& operator=(const Problem&) = delete;

  struct Block {
    Role role;
    std::string name;
    DType dtype;
    Shape shape;
    std::vector<std::byte> memory;  // guard, elements, guard
    void* data() { return memory.data() + guard_bytes; }
    std::size_t bytes() const { return memory.size() - 2 * guard_bytes; }
    bool written() const { return is_written(role); }
    /// Memory for the elements, between its guards.
    void allocate() { memory.assign(std::size_t(element_count(shape)) * size_bytes(dtype) + 2 * guard_bytes, guard); }
    void convert_to(DType to) {
      if (to == dtype) return;
      Block from = std::move(*this);
      *this = {from.role, from.name, to, from.shape, {}};
      allocate();
      convert(from.data(), from.dtype, data(), to, element_count(shape));
    }
  };
  static constexpr std::size_t guard_bytes = 64;

  const typename Op::Dims& dims() const { return dims_; }
  typename Op::Args& args() { return args_; }
  std::vector<Block>& blocks() { return blocks_; }

  /// A copy of a block's elements.
  Tensor tensor(const Block& b) const {
    Tensor t(b.dtype, b.shape);
    std::memcpy(t.data(), b.memory.data() + guard_bytes, b.bytes());
    return t;
  }
  /// All bytes of all blocks. Two runs are compared by them.
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> all;
    std::size_t size = 0;
    for (const Block& b : blocks_) size += b.memory.size();
    all.reserve(size);
    for (const Block& b : blocks_) all.insert(all.end(), b.memory.begin(), b.memory.end());
    return all;
  }
  /// The name of the first block whose guard bytes were overwritten, or "".
  std::string broken_guard() const {
    for (const Block& b : blocks_)
      for (std::size_t i = 0; i < guard_bytes; ++i)
        if (b.memory[i] != guard || b.memory[b.memory.size() - 1 - i] != guard) return b.name;
    return "";
  }
  /// Whether an element of a cache, (batch, kv_heads, capacity, head_dim) or the rows of one sequence, lies in an entry
  /// that the op appends.
  bool appended(std::int64_t element, const Shape& shape) const {
    const auto [sequence, entry] = entry_of(element, shape);
    return entry >= first_appended(sequence, shape) && entry < kv_len_of(setup_.load, sequence);
  }

 private:
  /// Gives arguments the setup's runs.
  template <class Args>
  void mix(Args& args) {
    if (setup_.runs.empty()) return;
    if constexpr (requires { args.runs; }) args.runs = setup_.runs;
    if constexpr (requires { args.t.runs; }) args.t.runs = setup_.runs;
  }
  static constexpr bool takes_runs = requires(typename Op::Args a) { a.runs; }
  || requires(typename Op::Args a) { a.t.runs; };

  /// Makes every Linear of the op quantised.
  void quantise() {
    const GptqSetup& q = setup_.gptq;
    const auto set = [&](LinearParams& l) {
      l.weight = GptqWeight{.bits = q.bits, .group_size = q.group_size, .zero_offset = q.zero_offset};
    };
    if constexpr (requires { args_.linear; }) set(args_.linear);
    if constexpr (requires { args_.linear2; }) set(args_.linear2);
    if constexpr (requires { args_.weights; })
      for_each_linear(setup_.model, args_.weights, [&](const Site&, LinearParams& l, auto...) { set(l); });
  }

  template <class View, class Extents>
  void add(const TensorSpec& t, View& view, const Extents& shape) {
    const DType dtype = dtype_of_view<View>(is_weight(t.role) ? setup_.weight : setup_.activation);
    Block b{t.role, std::string(t.name), dtype, Shape(shape.begin(), shape.end()), {}};
    b.allocate();
    fill(b);
    blocks_.push_back(std::move(b));
    bind(view, blocks_.back());  // a moved vector keeps its memory
  }
  template <class View>
  static void bind(View& view, Block& b) {
    view.data = static_cast<decltype(view.data)>(b.data());
    std::copy(b.shape.begin(), b.shape.end(), view.shape.begin());
    if constexpr (std::is_void_v<std::remove_const_t<typename View::element>>) view.dtype = b.dtype;
  }

  void fill(Block& b) {
    const std::int64_t n = element_count(b.shape);
    if (is_index(b.role)) {
      auto* out = static_cast<std::int32_t*>(b.data());
      for (std::int64_t i = 0; i < n; ++i) out[i] = index(b.role, i);
      return;
    }
    if (b.role == Role::gptq) return fill_gptq(b);
    const bool cache = b.role == Role::cache || b.role == Role::state, sine = b.role == Role::sine;
    const Values like = values_of(b);
    dispatch_float(b.dtype, [&](auto zero) {
      using T = decltype(zero);
      T* const out = static_cast<T*>(b.data());
      const T poison = narrow<T>(std::numeric_limits<double>::quiet_NaN());
      if (b.role == Role::output) {
        std::fill_n(out, n, poison);
      } else if (is_table(b.role)) {
        for (std::int64_t i = 0; i < n; ++i) out[i] = narrow<T>(sine ? std::sin(angle(b, i)) : std::cos(angle(b, i)));
      } else {
        const std::int64_t drawn = std::min(n, kMostDrawn);
        for (std::int64_t i = 0; i < drawn; ++i) out[i] = narrow<T>(value(like, i));
        for (std::int64_t i = drawn; i < n; ++i) out[i] = out[i - drawn];
        for (std::int64_t i = 0; cache && i < n; ++i)
          if (beyond(b, i)) out[i] = poison;
      }
    });
  }

  /// Codes and zeros are random, scales give weights as large as dense ones; with desc_act the groups are shuffled.
  void fill_gptq(Block& b) {
    const std::int64_t n = element_count(b.shape);
    auto* words = static_cast<std::int32_t*>(b.data());
    if (b.name.ends_with("scales")) {
      for (std::int64_t i = 0; i < n; ++i)
        static_cast<f16*>(b.data())[i] = narrow<f16>((1 + 0.2 * normal_(random_)) * std::ldexp(0.2, -setup_.gptq.bits));
    } else if (b.name.ends_with("g_idx")) {
      for (std::int64_t i = 0; i < n; ++i) words[i] = std::int32_t(i / setup_.gptq.group_size);
      if (setup_.gptq.desc_act) std::shuffle(words, words + n, random_);
    } else {
      for (std::int64_t i = 0; i < n; ++i) words[i] = std::int32_t(std::uint32_t(random_()));
    }
  }

  /// Whether a cache element lies beyond the entries that hold values. Before an append these are the old entries.
  bool beyond(const Block& b, std::int64_t element) const {
    const auto [sequence, entry] = entry_of(element, b.shape);
    return entry >= (b.role == Role::state ? first_appended(sequence, b.shape) : kv_len_of(setup_.load, sequence));
  }
  struct Entry {
    std::int64_t sequence, number;
  };
  static Entry entry_of(std::int64_t element, const Shape& shape) {
    if (shape.size() == 2) return {0, element / shape[1]};
    return {element / (shape[1] * shape[2] * shape[3]), element / shape[3] % shape[2]};
  }
  /// The first entry that the op writes of a sequence.
  std::int64_t first_appended(std::int64_t sequence, const Shape& shape) const {
    if constexpr (requires { args_.rows.first; }) return shape.size() == 2 ? args_.rows.last : args_.rows.first;
    return kv_len_of(setup_.load, sequence) - count_of(setup_, sequence);
  }
  double angle(const Block& b, std::int64_t i) const {
    const double row = double(i / b.shape[1]), column = double(i % b.shape[1]);
    return row * std::pow(setup_.model.rope_theta, -column / double(b.shape[1]));
  }
  std::int32_t index(Role role, std::int64_t i) {
    if (role == Role::length) return kv_len_of(setup_.load, i);
    if (role == Role::position && takes_runs && !setup_.runs.empty()) {
      const auto run = std::find_if(setup_.runs.begin(), setup_.runs.end(),
                                    [&](const RowRun& r) { return i < r.first_row + r.count; });
      return std::int32_t(kv_len_of(setup_.load, run->sequence) - run->count + i - run->first_row);
    }
    if (role == Role::position) {
      const std::int64_t sequence = i / setup_.load.q_len;
      return std::int32_t(kv_len_of(setup_.load, sequence) - setup_.load.q_len + i % setup_.load.q_len);
    }
    return std::int32_t(random_() % std::uint64_t(setup_.model.vocab_size));
  }
  /// A block's values: mean + deviation * normal; every 97th is multiplied by `outlier`.
  struct Values {
    double mean, deviation, outlier;
  };
  Values values_of(const Block& b) const {
    if (b.role == Role::gain) return {1, 0.1, 1};
    if (b.role == Role::weight) return {0, 0.05, 1};
    if (setup_.fill == Fill::heavy_tailed) return {0, 1, 1000};
    if (setup_.fill == Fill::shifted) return {100, 1, 1};
    if (setup_.fill == Fill::peaked && (b.name == "q" || b.name == "k_cache")) return {0, 30, 1};
    return {0, 1, 1};
  }
  double value(const Values& like, std::int64_t i) {
    double v = like.mean + like.deviation * normal_(random_);
    if (i % 97 == 5) v *= like.outlier;
    return setup_.values == DType::bf16 ? widen<double>(narrow<bf16>(v)) : widen<double>(narrow<f16>(v));
  }

  Setup setup_;
  typename Op::Dims dims_;
  typename Op::Args args_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  std::vector<Block> blocks_;
};

/// Calls change(spec, view) for the nth tensor of a problem's arguments; false when there is none.
template <template <class> class AnyProblem, class Op, class F>
bool change_tensor(AnyProblem<Op>& p, int nth, F&& change) {
  int i = 0;
  bool found = false;
  Op::tensors(p.dims(), p.args(), [&](const TensorSpec& t, auto& view, auto) {
    if (i++ == nth) {
      change(t, view);
      found = true;
    }
  });
  return found;
}

/// Moves a view's pointer by any number of bytes.
template <class View>
void move_pointer(View& view, std::size_t bytes) {
  view.data = reinterpret_cast<decltype(view.data)>(reinterpret_cast<std::uintptr_t>(view.data) + bytes);
}

}  // namespace cf::test
