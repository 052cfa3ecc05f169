#pragma once
// A call on the device whose caches lie in pages, and what is asked of it.
#include <algorithm>
#include <functional>
#include <vector>

#include "tests/cuda/device_check.hpp"
#include "tests/support/paged.hpp"

namespace cf::test {

/// A DeviceProblem with the caches of a contiguous problem in pages of the device, in random order and between pages of
/// NaN (Paged).
template <class Op>
class PagedDeviceProblem {
 public:
  PagedDeviceProblem(const Problem<Op>& contiguous, std::int64_t page_entries, std::uint64_t seed = 1)
      : host_(contiguous),
        pages_(host_, page_entries, seed),
        device_(contiguous),
        k_(guarded(pages_.k)),
        v_(guarded(pages_.v)),
        table_(std::as_bytes(std::span(pages_.table))) {
    auto &args = cache_args(device_.args()), &paged = cache_args(host_.args());
    args.k_cache = {k_.data() + kGuardBytes, paged.k_cache.shape, paged.k_cache.dtype};
    args.v_cache = {v_.data() + kGuardBytes, paged.v_cache.shape, paged.v_cache.dtype};
    args.page_table = {reinterpret_cast<const std::int32_t*>(table_.data()), paged.page_table.shape};
  }

  typename Op::Args& args() { return device_.args(); }
  /// Runs the op to its end and brings everything back. Of the problem that it returns, the contiguous caches are those
  /// of the beginning.
  Problem<Op>& run(cuda::Context& context, cuda::Scratch scratch = {}) {
    Problem<Op>& got = device_.run(context, scratch);
    fetch(k_, pages_.k);
    fetch(v_, pages_.v);
    return got;
  }
  /// Whether the pages have, bit by bit, the entries of a contiguous cache that the same call was made on, and nothing
  /// else has changed.
  bool same_as(Problem<Op>& contiguous) { return pages_.same_as(contiguous); }

 private:
  static constexpr std::size_t kGuardBytes = 256;
  static constexpr std::byte kGuard{0xa5};
  static std::vector<std::byte> guarded(const Tensor& pool) {
    std::vector<std::byte> bytes(kGuardBytes + std::size_t(pool.size_bytes()) + kGuardBytes, kGuard);
    std::memcpy(bytes.data() + kGuardBytes, pool.data(), std::size_t(pool.size_bytes()));
    return bytes;
  }
  static void fetch(const DeviceBytes& from, Tensor& pool) {
    std::vector<std::byte> bytes(from.size());
    from.fetch(bytes.data());
    std::memcpy(pool.data(), bytes.data() + kGuardBytes, std::size_t(pool.size_bytes()));
    CHECK(bytes == guarded(pool));
  }

  Problem<Op> host_;
  Paged<Op> pages_;
  DeviceProblem<Op> device_;
  DeviceBytes k_, v_, table_;
};

/// What check_pages_on_device() may change of a call, and asks of it.
template <class Op>
struct PageCheck {
  std::function<void(typename Op::Args&)> change = [](auto&) {};  // applied to the device's and the oracle's calls
  bool same_bits = true;  // the outputs, too, are those of the same call on a contiguous cache
  cuda::Scratch scratch{};
};

/// Makes a setup's call on the device with its caches in pages. The outputs agree with the oracle's of a contiguous
/// cache, all bits are the same again, and what the call appends are the bits that it appends to a contiguous cache.
template <class Op>
void check_pages_on_device(const Setup& s, std::int64_t page_entries, const PageCheck<Op>& check = {}) {
  INFO(Op::name << ": " << describe(s) << ", pages of " << page_entries);
  Problem<Op> untouched(s), reference(untouched, DType::f64);
  check.change(reference.args());
  REQUIRE(cpu_ref::run(reference.args()));
  const auto condition = cpu_ref::condition(reference.args());
  REQUIRE(condition);
  const Budget budget = Op::budget(reference.dims(), {.compute = DType::f32, .output = s.activation}, *condition);
  for (cuda::Context& c : contexts()) {
    INFO("planned for " << to_string(c.arch()));
    DeviceProblem<Op> contiguous(untouched);
    PagedDeviceProblem<Op> paged(untouched, page_entries, s.seed), again(untouched, page_entries, s.seed + 1);
    for (typename Op::Args* args : {&contiguous.args(), &paged.args(), &again.args()}) check.change(*args);
    Problem<Op>& expected = contiguous.run(c, check.scratch);
    Problem<Op>&got = paged.run(c, check.scratch), &repeated = again.run(c, check.scratch);
    CHECK(paged.same_as(expected));
    CHECK(again.same_as(expected));
    for (std::size_t i = 0; i < got.blocks().size(); ++i) {
      auto& block = got.blocks()[i];
      if (block.role != Role::output) continue;
      INFO(block.name);
      CHECK(bool(repeated.blocks()[i].memory == block.memory));
      if (check.same_bits) CHECK(bool(expected.blocks()[i].memory == block.memory));
      const auto result = compare(got.tensor(block), reference.tensor(reference.blocks()[i]));
      REQUIRE(result);
      INFO("relative L2 " << result->rel_l2 << " (budget " << budget.rel_l2 << "), relative max " << result->rel_max
                          << " (budget " << budget.rel_max << ") at " << result->worst_coordinate);
      CHECK(result->within(budget));
    }
  }
}

}  // namespace cf::test
