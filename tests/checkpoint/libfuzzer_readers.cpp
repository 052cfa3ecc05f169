// libFuzzer's entry to the parsers. The first byte chooses the parser, and a header's buffer size.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "golden/checkpoint/fp8_config.hpp"
#include "golden/checkpoint/generation_config.hpp"
#include "golden/checkpoint/gptq_config.hpp"
#include "golden/checkpoint/hf_config.hpp"
#include "golden/checkpoint/safetensors.hpp"
#include "golden/checkpoint/token_file.hpp"
#include "golden/checkpoint/vocabulary.hpp"
#include "tests/checkpoint/reader_invariants.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cf;
  using namespace cf::test;
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  static const char buffer[127] = {};
  std::string fault;
  if (data[0] < 128) {
    const auto entries = checkpoint::parse_safetensors_header(text, buffer, data[0] & 127, "f");
    fault = entries ? header_fault(*entries, buffer, data[0] & 127) : message_fault(entries.status(), "f");
  } else if (data[0] < 144) {
    const auto c = checkpoint::parse_fp8_config(text, "f");
    fault = c ? fp8_config_fault(*c, text) : message_fault(c.status(), "f");
  } else if (data[0] < 160) {
    const auto c = checkpoint::parse_gptq_config(text, "f");
    fault = c ? gptq_config_fault(*c) : message_fault(c.status(), "f");
  } else if (data[0] < 176) {
    const auto v = checkpoint::Vocabulary::parse(text, "f");
    fault = v ? vocabulary_fault(*v) : message_fault(v.status(), "f");
  } else if (data[0] < 192) {
    const auto file = checkpoint::parse_token_file(text, "f");
    fault = file ? token_file_fault(*file) : message_fault(file.status(), "f");
  } else if (data[0] < 208) {
    const auto c = checkpoint::parse_generation_config(text, "f");
    fault = c ? generation_config_fault(*c) : message_fault(c.status(), "f");
  } else {
    const auto m = checkpoint::parse_hf_config(text, "f");
    fault = m ? config_fault(*m) : message_fault(m.status(), "f");
  }
  if (!fault.empty()) {
    std::fprintf(stderr, "%s\n", fault.c_str());
    std::abort();
  }
  return 0;
}
