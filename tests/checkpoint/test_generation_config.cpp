#include <filesystem>
#include <string>
#include <vector>

#include "golden/checkpoint/generation_config.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::checkpoint;
using namespace cf::test;

using Ids = std::vector<std::int32_t>;

Result<GenerationConfig> parse(const std::string& text) { return parse_generation_config(text, "f"); }

}  // namespace

TEST_CASE("generation config: eos_token_id alone is read") {
  for (const auto& [text, ids] : {std::pair{R"({"bos_token_id":0,"eos_token_id":[0,50276],"top_k":40})", Ids{0, 50276}},
                                  {R"({"eos_token_id":2147483647})", Ids{2147483647}},
                                  {R"({"eos_token_id":2,"top_k":-1,"top_p":0,"temperature":"hot"})", Ids{2}},
                                  {R"({"eos_token_id":null,"top_p":null})", Ids{}},
                                  {R"({"eos_token_id":[]})", Ids{}},
                                  {"{}", Ids{}}}) {
    CAPTURE(text);
    const auto c = parse(text);
    REQUIRE(c.status().message() == "");
    CHECK(c->eos_token_ids == ids);
  }
}

TEST_CASE("generation config: what is refused", "[bad]") {
  struct Bad {
    std::string text, part;
  };
  const std::string ids = ", expected an id of 0 to 2147483647 or a list of ids";
  const std::vector<Bad> table{
      {"", "is empty, expected a JSON object"},
      {"[]", "expected a JSON object, got an array"},
      {"{", "is not JSON at byte"},
      {R"({"top_k":1,"top_k":1})", "duplicate name 'top_k'"},
      {R"({"eos_token_id":-1})", "'eos_token_id' is -1" + ids},
      {R"({"eos_token_id":2147483648})", "'eos_token_id' is 2147483648" + ids},
      {R"({"eos_token_id":0.0})", "'eos_token_id' is 0.0" + ids},
      {R"({"eos_token_id":"0"})", "'eos_token_id' is \"0\"" + ids},
      {R"({"eos_token_id":true})", "'eos_token_id' is true" + ids},
      {R"({"eos_token_id":{}})", "'eos_token_id' is an object" + ids},
      {R"({"eos_token_id":[0,-1]})", "'eos_token_id' holds -1" + ids},
      {R"({"eos_token_id":[null]})", "'eos_token_id' holds null" + ids},
      {R"({"eos_token_id":[[0]]})", "'eos_token_id' holds an array" + ids},
  };
  for (const Bad& bad : table) {
    CAPTURE(bad.text);
    CHECK(refusal_fault(parse(bad.text).status(), Code::invalid_file, {"f: " + bad.part}) == "");
  }
}

TEST_CASE("generation config: from a directory") {
  const TempDir dir;
  const std::string own = dir / "generation_config.json", of_model = dir / "config.json";
  const auto read = [&] { return read_generation_config(dir.path()); };
  REQUIRE(read().status().message() == "");
  CHECK(*read() == GenerationConfig{});
  CHECK(*read_generation_config(dir / "none") == GenerationConfig{});

  // Of config.json, eos_token_id alone.
  for (const auto& [value, expected] : {std::pair{"7", Ids{7}}, {"[1, 2]", Ids{1, 2}}, {"null", Ids{}}}) {
    write_file(of_model, R"({"model_type":"gpt_neox","top_k":-5,"eos_token_id":)" + std::string(value) + "}");
    REQUIRE(read().status().message() == "");
    CHECK(*read() == GenerationConfig{.eos_token_ids = expected});
  }
  write_file(of_model, R"({"eos_token_id":"x"})");
  CHECK(refusal_fault(read().status(), Code::invalid_file, {of_model + ": 'eos_token_id' is \"x\", expected"}) == "");
  write_file(of_model, "");
  CHECK(refusal_fault(read().status(), Code::invalid_file, {of_model + ": is empty"}) == "");

  // generation_config.json comes first, and nothing is taken from beside it.
  write_file(own, "{}");
  REQUIRE(read().status().message() == "");
  CHECK(*read() == GenerationConfig{});
  write_file(own, R"({"eos_token_id":3})");
  CHECK(read()->eos_token_ids == Ids{3});
  write_file(own, R"({"eos_token_id":-2})");
  CHECK(refusal_fault(read().status(), Code::invalid_file, {own + ": 'eos_token_id' is -2, expected"}) == "");
  write_file(own, "version https://git-lfs.github.com/spec/v1\nsize 111\n");
  CHECK(refusal_fault(read().status(), Code::invalid_file, {own + ": is a git-lfs pointer"}) == "");

  const TempDir other;
  std::filesystem::create_directory(other / "generation_config.json");
  CHECK(refusal_fault(read_generation_config(other.path()).status(), Code::invalid_file, {"is a directory"}) == "");
}

TEST_CASE("generation config: of a checkpoint that transformers saved") {
  const auto c = read_generation_config(CF_DATA_DIR "/checkpoints/neox-d80");
  REQUIRE(c.status().message() == "");
  CHECK(*c == GenerationConfig{.eos_token_ids = {0}});
}
