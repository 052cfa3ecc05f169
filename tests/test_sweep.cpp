// The numbers of a sweep's axis, and the statistics of a series.
#include "apps/layer_bench.hpp"
#include "apps/sweep.hpp"
#include "tests/catch.hpp"
#include "tests/refusal.hpp"

using namespace cf;
using namespace cf::apps;
using cf::test::refusal_fault;

namespace {

const Bounds bounds{0, 31, "tiny has layers 0 to 31"};

using Values = std::vector<std::int64_t>;

Values sweep(std::string_view text) {
  const auto r = parse_sweep("--layer", text, bounds);
  CAPTURE(text, r.status().message());
  REQUIRE(r);
  return *r;
}

}  // namespace

TEST_CASE("sweep: numbers, lists and ranges, in their order") {
  CHECK(sweep("3") == Values{3});
  CHECK(sweep("003") == Values{3});
  CHECK(sweep("0-3,7") == Values{0, 1, 2, 3, 7});
  CHECK(sweep("7,0-1") == Values{7, 0, 1});
  CHECK(sweep("5-5") == Values{5});
  CHECK(sweep("2,2") == Values{2, 2});
  CHECK(sweep("0-31").size() == 32);
}

TEST_CASE("sweep: malformed text is refused with its part") {
  for (const char* text : {"",
                           ",",
                           "1,",
                           ",1",
                           "1,,2",
                           "-",
                           "-1",
                           "1-",
                           "1-2-3",
                           "1--2",
                           "a",
                           "1a",
                           "0x3",
                           "1.5",
                           "+1",
                           " 1",
                           "1 ",
                           "1, 2",
                           "1;2",
                           "1:3",
                           "99999999999999999999",
                           "0-99999999999999999999"}) {
    CAPTURE(text);
    CHECK(refusal_fault(parse_sweep("--layer", text, bounds).status(), Code::invalid_argument,
                        {"--layer '" + std::string(text) + "'", "expected numbers and ranges", "got '"}) == "");
  }
  CHECK(refusal_fault(parse_sweep("--layer", "0,3-1", bounds).status(), Code::invalid_argument,
                      {"--layer 3-1", "upwards", "got 3 to 1"}) == "");
}

TEST_CASE("sweep: values outside the bounds are refused before a range is walked") {
  CHECK(parse_sweep("--layer", "32", bounds).status().message() == "--layer 32: tiny has layers 0 to 31");
  CHECK(parse_sweep("--layer", "0-32", bounds).status().message() == "--layer 32: tiny has layers 0 to 31");
  CHECK(parse_sweep("--layer", "0-9223372036854775807", bounds).status().message() ==
        "--layer 9223372036854775807: tiny has layers 0 to 31");
  CHECK(parse_sweep("--seq-len", "0-4", {1, 8, "from 1"}).status().message() == "--seq-len 0: from 1");
  CHECK(check_bounds("--runs", 1, {1, 2, "why"}));
  CHECK(check_bounds("--runs", 2, {1, 2, "why"}));
  CHECK(check_bounds("--runs", 3, {1, 2, "why"}).message() == "--runs 3: why");
}

TEST_CASE("spread: percentiles lie between neighbours, whatever the order") {
  const Spread one = spread({5});
  CHECK(one.median == 5);
  CHECK(one.p10 == 5);
  CHECK(one.p99 == 5);
  CHECK(one.noise_percent() == 0);
  const Spread even = spread({4, 1, 3, 2});
  CHECK(even.median == 2.5);
  std::vector<double> series;
  for (int i = 100; i >= 0; --i) series.push_back(i);
  const Spread many = spread(series);
  CHECK(many.median == 50);
  CHECK(many.p10 == 10);
  CHECK(many.p99 == 99);
  CHECK(many.noise_percent() == 178);
}
