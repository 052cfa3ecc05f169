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

TEST_CASE("generation config: every field") {
  const auto c = parse(R"({"_from_model_config":true,"bos_token_id":0,"eos_token_id":[0,50276],"max_new_tokens":64,)"
                       R"("do_sample":true,"temperature":0.7,"top_p":0.95,"min_p":0.05,"repetition_penalty":1.1,)"
                       R"("top_k":40,"transformers_version":"5.17.0","use_cache":true})");
  REQUIRE(c.status().message() == "");
  CHECK(*c == GenerationConfig{.eos_token_ids = {0, 50276},
                               .max_new_tokens = 64,
                               .do_sample = true,
                               .temperature = 0.7,
                               .top_p = 0.95,
                               .min_p = 0.05,
                               .repetition_penalty = 1.1,
                               .top_k = 40});
}

TEST_CASE("generation config: absent and null are the same") {
  for (const char* text : {"{}",
                           R"({"eos_token_id":null,"max_new_tokens":null,"do_sample":null,"temperature":null,)"
                           R"("top_p":null,"min_p":null,"repetition_penalty":null,"top_k":null,"other":null})",
                           R"({"eos_token_id":[]})"}) {
    CAPTURE(text);
    const auto c = parse(text);
    REQUIRE(c.status().message() == "");
    CHECK(*c == GenerationConfig{});
  }
}

TEST_CASE("generation config: values at the ends of their ranges") {
  const auto c = parse(R"({"eos_token_id":2147483647,"max_new_tokens":1,"do_sample":false,"temperature":0,"top_p":1,)"
                       R"("min_p":0,"repetition_penalty":1e-300,"top_k":0})");
  REQUIRE(c.status().message() == "");
  CHECK(*c == GenerationConfig{.eos_token_ids = {2147483647},
                               .max_new_tokens = 1,
                               .do_sample = false,
                               .temperature = 0.0,
                               .top_p = 1.0,
                               .min_p = 0.0,
                               .repetition_penalty = 1e-300,
                               .top_k = 0});
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
      {R"({"max_new_tokens":0})", "'max_new_tokens' is 0, expected 1 or more"},
      {R"({"max_new_tokens":20.0})", "'max_new_tokens' is 20.0, expected a 64-bit integer"},
      {R"({"do_sample":1})", "'do_sample' is 1, expected true or false"},
      {R"({"temperature":-0.5})", "'temperature' is -0.5, expected 0 or more"},
      {R"({"temperature":"1"})", "'temperature' is \"1\", expected a number"},
      {R"({"temperature":1e999})", "is not JSON at byte"},
      {R"({"top_p":0})", "'top_p' is 0, expected more than 0 and at most 1"},
      {R"({"top_p":1.5})", "'top_p' is 1.5, expected more than 0 and at most 1"},
      {R"({"top_p":[]})", "'top_p' is an array, expected a number"},
      {R"({"min_p":-0.1})", "'min_p' is -0.1, expected 0 to 1"},
      {R"({"min_p":1.1})", "'min_p' is 1.1, expected 0 to 1"},
      {R"({"min_p":false})", "'min_p' is false, expected a number"},
      {R"({"repetition_penalty":0.0})", "'repetition_penalty' is 0.0, expected more than 0"},
      {R"({"repetition_penalty":{}})", "'repetition_penalty' is an object, expected a number"},
      {R"({"top_k":-1})", "'top_k' is -1, expected 0 (all) or more"},
      {R"({"top_k":18446744073709551615})", "'top_k' is 18446744073709551615, expected a 64-bit integer"},
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
  write_file(own, R"({"top_p":2})");
  CHECK(refusal_fault(read().status(), Code::invalid_file, {own + ": 'top_p' is 2, expected"}) == "");
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
