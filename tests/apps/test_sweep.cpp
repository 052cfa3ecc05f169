// The numbers of a sweep's axis, and the statistics of a series.
#include "apps/bench/timing.hpp"
#include "apps/cli/sweep.hpp"
#include "tests/support/catch.hpp"

using namespace cf;
using namespace cf::apps;

namespace {

const Range range{0, 31, "layers of tiny"};

using Values = std::vector<std::int64_t>;

Values sweep(std::string_view text) {
  const auto r = parse_sweep("--layer", text, range);
  CAPTURE(text, r.status().message());
  REQUIRE(r);
  return *r;
}

std::string refusal(std::string_view text) {
  const auto r = parse_sweep("--layer", text, range);
  CHECK((r || r.status().code() == Code::invalid_argument));
  return r.status().message();
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
    CHECK(refusal(text) == "--layer: expected numbers and ranges such as 0-3,7, got '" + std::string(text) + "'");
  }
  CHECK(refusal("0,3-1") == "--layer: expected a range that runs upwards, got '3-1'");
}

TEST_CASE("sweep: values outside the bounds are refused before a range is walked") {
  CHECK(refusal("32") == "--layer: expected 0 to 31 (layers of tiny), got '32'");
  CHECK(refusal("1,0-32") == "--layer: expected 0 to 31 (layers of tiny), got '0-32'");
  CHECK(refusal("0-9223372036854775807") == "--layer: expected 0 to 31 (layers of tiny), got '0-9223372036854775807'");
  CHECK(parse_sweep("--seq-len", "0-4", {1, 8}).status().message() == "--seq-len: expected 1 to 8, got '0-4'");
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
