// The readers of vocabularies, token files and generation configs, on damaged bytes: each refuses them in one line or
// accepts them, and what it accepts obeys its invariants.
#include <string>
#include <string_view>
#include <vector>

#include "golden/checkpoint/generation_config.hpp"
#include "golden/checkpoint/token_file.hpp"
#include "golden/checkpoint/vocabulary.hpp"
#include "tests/checkpoint/mutator.hpp"
#include "tests/checkpoint/npy_writer.hpp"
#include "tests/checkpoint/reader_invariants.hpp"
#include "tests/checkpoint/small_tokenizer.hpp"
#include "tests/support/catch.hpp"

namespace {

using namespace cf;
using namespace cf::checkpoint;
using namespace cf::test;

/// Reads the seeds, their first bytes, which must be refused however many they are, and mutations of the seeds.
/// `fault_of` says what is wrong with an accepted value. Returns how many mutations were accepted.
template <class Parse, class FaultOf>
int fuzz(const std::vector<std::string>& seeds, Mutator mutator, int mutations, Parse parse, FaultOf fault_of) {
  const auto accepts = [&](const std::string& bytes) {
    const auto value = parse(bytes, "f");
    const std::string fault = value ? fault_of(*value) : message_fault(value.status(), "f");
    if (!fault.empty()) FAIL(fault << "\n" << bytes);
    return bool(value);
  };
  for (const std::string& seed : seeds) {
    CHECK(accepts(seed));
    for (std::size_t size = 0; size < seed.size(); ++size)
      if (accepts(seed.substr(0, size))) FAIL("accepts the first " << size << " bytes of\n" << seed);
  }
  int accepted = 0;
  for (int i = 0; i < mutations; ++i) accepted += accepts(mutator.mutate(seeds[mutator.below(seeds.size())]));
  return accepted;
}

constexpr std::string_view kHeaderTokens[] = {"{",
                                              "}",
                                              "(",
                                              ")",
                                              ",",
                                              ":",
                                              "'",
                                              "\"",
                                              "\\",
                                              "\n",
                                              "0",
                                              "-1",
                                              "9223372036854775807",
                                              "(6,",
                                              "(2, 3)",
                                              "(1, 1, 6)",
                                              "'<i8'",
                                              "'<u2'",
                                              "'<f4'",
                                              "True",
                                              "'descr'",
                                              "'shape'",
                                              "\xff",
                                              "\x93NUMPY"};

}  // namespace

TEST_CASE("fuzz: damaged vocabularies") {
  const std::vector<std::string> seeds{
      kSmallTokenizer, R"({"decoder":{"type":"ByteLevel"},"model":{"merges":[],"vocab":{"a":0,"Ġb":1,"Ã":2}}})",
      R"({"added_tokens":[{"id":0,"content":"<|x|>","special":true},{"id":9,"content":"  "}],)"
      R"("decoder":{"type":"ByteLevel"},"model":{"type":"BPE","byte_fallback":false,"vocab":{"<|x|>":0,"c":1}}})"};
  // Otherwise the mutations are too coarse to test anything behind the JSON parser.
  CHECK(fuzz(seeds, Mutator(23), 15000, &Vocabulary::parse, vocabulary_fault) > 500);
}

TEST_CASE("fuzz: damaged token files") {
  const std::string data("\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0\5\0\0\0\6\0\0\0", 24);
  const std::vector<std::string> seeds{npy(1, "<i4", "(6,)", data), npy(1, "<u2", "(2, 6)", data),
                                       npy(2, "<i8", "(3, 1)", std::string(24, '\0')), npy(3, "<u4", "(2, 3)", data)};
  const auto parse = [](std::string_view text, const std::string& source) { return parse_token_file(text, source); };
  CHECK(fuzz(seeds, Mutator(29, kHeaderTokens), 40000, parse, token_file_fault) > 500);
}

TEST_CASE("fuzz: damaged generation configs") {
  const std::vector<std::string> seeds{
      R"({"eos_token_id":[0,5],"max_new_tokens":64,"do_sample":true,"temperature":0.7,"top_p":0.95,"min_p":0.05})",
      R"({"bos_token_id":0,"eos_token_id":0,"repetition_penalty":1.1,"top_k":40,"sep_token_id":null})"};
  CHECK(fuzz(seeds, Mutator(31), 15000, parse_generation_config, generation_config_fault) > 500);
}
