#include <random>
#include <string>
#include <vector>

#include "golden/checkpoint/vocabulary.hpp"
#include "tests/checkpoint/small_tokenizer.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::checkpoint;
using namespace cf::test;

using Ids = std::vector<std::int32_t>;

Result<Vocabulary> parse(const std::string& json) { return Vocabulary::parse(json, "f"); }

/// A file with these members of model.vocab and of added_tokens.
std::string tokenizer(const std::string& vocab, const std::string& added = "") {
  return R"({"added_tokens":[)" + added + R"(],"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{)" +
         vocab + "}}}";
}

/// The same with the first `from` replaced.
std::string replaced(std::string text, const std::string& from, const std::string& to) {
  REQUIRE(text.find(from) != text.npos);
  return text.replace(text.find(from), from.size(), to);
}

/// The whole text of bytes that come in these pieces.
std::string streamed(const std::vector<std::string>& pieces) {
  Utf8Stream stream;
  std::string text;
  for (const std::string& piece : pieces) text += stream.put(piece);
  return text + stream.finish();
}

}  // namespace

TEST_CASE("vocabulary: a file that tokenizers saved") {
  const TempDir dir;
  const std::string path = dir / "tokenizer.json";
  write_file(path, kSmallTokenizer);
  const auto v = Vocabulary::open(path);
  REQUIRE(v.status().message() == "");
  CHECK(v->size() == 46);
  CHECK(v->bytes(31) == "hello");
  CHECK(v->bytes(37) == " world");
  CHECK(v->bytes(20) == "\t");
  CHECK(v->bytes(21) == "\n");
  CHECK(v->bytes(19) == "\xf0");
  CHECK(v->bytes(42) == "   ");
  CHECK(v->bytes(0) == "<|endoftext|>");
  for (std::int32_t id = 0; id < 46; ++id) {
    CAPTURE(id);
    CHECK(v->is_special(id) == (id <= 1));
    CHECK(!v->bytes(id).empty());
  }
  for (std::int32_t none : {-1, 46, 2147483647, -2147483647 - 1}) {
    CHECK(v->bytes(none) == "");
    CHECK(!v->is_special(none));
  }
}

// The texts are those that Tokenizer.decode() of tokenizers 0.23.3 gives for that file and these ids.
TEST_CASE("vocabulary: ids become text") {
  const auto v = parse(kSmallTokenizer);
  REQUIRE(v.status().message() == "");
  CHECK(v->text(Ids{}) == "");
  CHECK(v->text(Ids{31, 37, 22, 19, 27, 26, 23, 18, 25, 24, 21}) == "hello world 🙂☃\n");
  const Ids marked{40, 17, 16, 17, 27, 6, 43, 31, 0, 42, 18, 25, 24};
  CHECK(v->text(marked) == "grüße  hello<|endoftext|>   ☃");
  CHECK(v->text(marked, true) == "grüße  hello   ☃");
  CHECK(v->text(Ids{31, 19, 27, 26}) == "hello\ufffd");
  CHECK(v->text(Ids{19, 0, 27}) == "\ufffd<|endoftext|>\ufffd");
  CHECK(v->text(Ids{31, 46, -1, 31}) == "hellohello");
}

TEST_CASE("vocabulary: an added token is its content") {
  const auto v = parse(kSmallTokenizer);
  REQUIRE(v.status().message() == "");
  CHECK(v->text(Ids{44, 45}) == "né🙂é");
  // Listed in model.vocab, too: as special tokens are, and with a character that stands for no byte.
  const auto both = parse(tokenizer(R"("a b":0,"Ġ":1)", R"({"id":0,"content":"a b"},{"id":2,"content":"Ġ"})"));
  REQUIRE(both.status().message() == "");
  CHECK(both->bytes(0) == "a b");
  CHECK(both->bytes(1) == " ");
  CHECK(both->bytes(2) == "Ġ");
}

TEST_CASE("vocabulary: every byte has its character") {
  // GPT-2's bytes_to_unicode() of the bytes 0 to 255.
  const std::string characters =
      R"(ĀāĂăĄąĆćĈĉĊċČčĎďĐđĒēĔĕĖėĘęĚěĜĝĞğĠ!"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\]^_`abcdefghijkl)"
      R"(mnopqrstuvwxyz{|}~ġĢģĤĥĦħĨĩĪīĬĭĮįİıĲĳĴĵĶķĸĹĺĻļĽľĿŀŁł¡¢£¤¥¦§¨©ª«¬Ń®¯°±²³´µ¶·¸¹º»¼½¾¿ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖ×)"
      R"(ØÙÚÛÜÝÞßàáâãäåæçèéêëìíîïðñòóôõö÷øùúûüýþÿ)";
  std::string vocab, all;
  int byte = 0;
  for (std::size_t at = 0; at < characters.size(); ++byte) {
    const std::size_t length = static_cast<unsigned char>(characters[at]) < 0x80 ? 1 : 2;
    const std::string character = characters.substr(at, length);
    vocab += (byte ? ",\"" : "\"") + std::string(character == "\"" || character == "\\" ? "\\" : "") + character +
             "\":" + std::to_string(byte);
    all += char(byte);
    at += length;
  }
  REQUIRE(byte == 256);
  const auto v = parse(tokenizer(vocab));
  REQUIRE(v.status().message() == "");
  std::string bytes;
  for (int id = 0; id < 256; ++id) bytes += v->bytes(id);
  CHECK(bytes == all);
}

TEST_CASE("vocabulary: what a file may leave out") {
  const auto v = parse(R"({"decoder":{"type":"ByteLevel"},"model":{"merges":[],"vocab":{"b":7}}})");
  REQUIRE(v.status().message() == "");
  CHECK(v->size() == 8);
  CHECK(v->bytes(7) == "b");
  CHECK(v->bytes(6) == "");
  const auto last = parse(tokenizer(R"("":2097151)"));
  REQUIRE(last.status().message() == "");
  CHECK(last->size() == 2097152);
  CHECK(last->bytes(2097151) == "");
}

TEST_CASE("vocabulary: what is none that is read") {
  struct Bad {
    std::string text;
    std::vector<std::string_view> parts;
  };
  const std::string good = tokenizer(R"("a":0,"b":1)");
  REQUIRE(parse(good).status().message() == "");
  const auto added = [](const std::string& element) { return tokenizer(R"("a":0)", element); };
  const std::vector<Bad> table{
      {"", {"is empty, expected a JSON object"}},
      {"[]", {"expected a JSON object, got an array"}},
      {good.substr(0, 60), {"not JSON"}},
      {"{}", {"'model.type' is missing, expected a string"}},
      {R"({"model":{"vocab":{},"max_input_chars_per_word":100}})", {"'model.type' is missing"}},
      {R"({"model":7})", {"'model' is 7, expected an object"}},
      {replaced(good, "\"BPE\"", "\"Unigram\""), {"'model.type' is 'Unigram', expected 'BPE'"}},
      {replaced(good, "\"BPE\"", "\"WordPiece\""), {"'model.type' is 'WordPiece', expected 'BPE'"}},
      {replaced(good, "\"BPE\"", "null"), {"'model.type' is null, expected a string"}},
      {replaced(good, R"("decoder":{"type":"ByteLevel"},)", ""), {"'decoder.type' is missing"}},
      {replaced(good, R"({"type":"ByteLevel"})", "null"), {"'decoder' is null, expected an object"}},
      {replaced(good, "\"ByteLevel\"", "\"Sequence\""), {"'decoder.type' is 'Sequence', expected 'ByteLevel'"}},
      {replaced(good, "\"BPE\",", R"("BPE","byte_fallback":true,)"), {"'model.byte_fallback' is true, expected false"}},
      {replaced(good, "\"BPE\",", R"("BPE","byte_fallback":1,)"), {"'model.byte_fallback' is 1, expected true or"}},
      {replaced(good, "vocab", "words"), {"'model.vocab' is missing, expected an object of token to id"}},
      {replaced(good, R"({"a":0,"b":1})", R"([["a",0.5]])"), {"'model.vocab' is an array, expected an object"}},
      {tokenizer(""), {"'model.vocab' is empty, expected tokens"}},
      {tokenizer(R"("a":0,"a":1)"), {"duplicate name 'a'"}},
      {tokenizer(R"("a":3,"Ġb":3)"),
       {"'model.vocab': token '\\xc4\\xa0b': expected an id of its own, got 3, which 'a' has"}},
      {tokenizer(R"("a":-1)"), {"'model.vocab': token 'a': expected an id of 0 to 2097151, got -1"}},
      {tokenizer(R"("a":2097152)"), {"token 'a': expected an id of 0 to 2097151, got 2097152"}},
      {tokenizer(R"("a":18446744073709551615)"), {"token 'a'", "0 to 2097151, got 18446744073709551615"}},
      {tokenizer(R"("a":1.0)"), {"token 'a'", "got 1.0"}},
      {tokenizer(R"("a":"1")"), {"token 'a'", "got \"1\""}},
      {tokenizer(R"("a b":0)"), {"'model.vocab': token 'a b': expected characters that stand for bytes, got others"}},
      {tokenizer(R"("a\n":0)"), {"token 'a\\x0a': expected characters that stand for bytes"}},
      {tokenizer(R"("\u00ad":0)"), {"token '\\xc2\\xad'"}},
      {tokenizer(R"("ń":0)"), {"token '\\xc5\\x84'"}},
      {tokenizer(R"("☃":0)"), {"token '\\xe2\\x98\\x83'"}},
      {tokenizer(R"("🙂":0)"), {"token '\\xf0\\x9f\\x99\\x82'"}},
      {replaced(good, "[]", "{}"), {"'added_tokens' is an object, expected a list"}},
      {added("5"), {"'added_tokens': element 0: expected an object of id and content, got 5"}},
      {added(R"({"id":1})"), {"'added_tokens': element 0: 'content' is missing, expected a string"}},
      {added(R"({"id":1,"content":7})"), {"'content' is 7, expected a string"}},
      {added(R"({"id":1,"content":"x"},{"content":"y"})"), {"element 1: 'id' is missing, expected a 64-bit integer"}},
      {added(R"({"id":"1","content":"x"})"), {"'id' is \"1\", expected a 64-bit integer"}},
      {added(R"({"id":1,"content":"x","special":0})"), {"'special' is 0, expected true or false"}},
      {added(R"({"id":-1,"content":"x"})"), {"'added_tokens': token 'x': expected an id of 0 to 2097151, got -1"}},
      {added(R"({"id":2097152,"content":"x"})"), {"token 'x'", "got 2097152"}},
      {added(R"({"id":4,"content":"x y"},{"id":4,"content":"z"})"),
       {"'added_tokens': token 'z': expected an id of its own, got 4, which 'x y' has"}},
      {added(R"({"id":0,"content":"x"})"),
       {"'model.vocab': token 'a': expected an id of its own, got 0, which 'x' has"}},
  };
  for (const Bad& bad : table) {
    CAPTURE(bad.text);
    const Status s = parse(bad.text).status();
    CHECK(s.message().starts_with("f: "));
    for (std::string_view part : bad.parts) CHECK(refusal_fault(s, Code::invalid_file, {part}) == "");
  }
}

TEST_CASE("vocabulary: from a file") {
  const TempDir dir;
  const std::string path = dir / "tokenizer.json";
  CHECK(refusal_fault(Vocabulary::open(path).status(), Code::not_found, {path, "no such file"}) == "");
  CHECK(refusal_fault(Vocabulary::open(dir.path()).status(), Code::invalid_file, {dir.path(), "is a directory"}) == "");
  write_file(path, "version https://git-lfs.github.com/spec/v1\nsize 2113710\n");
  CHECK(refusal_fault(Vocabulary::open(path).status(), Code::invalid_file, {path, "git-lfs pointer", "2113710"}) == "");
  write_file(path, "{}");
  CHECK(refusal_fault(Vocabulary::open(path).status(), Code::invalid_file, {path + ": 'model.type' is missing"}) == "");
}

TEST_CASE("utf-8 stream: a character comes when its last byte does") {
  const std::string text = "aé߿ࠀ☃\ud7ff\U00010000🙂\U0010ffff\n";
  for (std::size_t at = 0; at <= text.size(); ++at) {
    CAPTURE(at);
    std::size_t begun = at;  // where the character begins that the cut goes through
    while (begun < text.size() && (text[begun] & 0xc0) == 0x80) --begun;
    Utf8Stream stream;
    CHECK(stream.put(text.substr(0, at)) == text.substr(0, begun));
    CHECK(stream.put("") == "");
    CHECK(stream.put(text.substr(at)) == text.substr(begun));
    CHECK(stream.finish() == "");
  }
}

TEST_CASE("utf-8 stream: every character is left as it is") {
  for (char32_t first = 0; first < 0x110000; first += 0x800) {
    std::string text;
    for (char32_t c = first; c < first + 0x800; ++c) {
      const auto add = [&](char32_t bits) { text += char(bits); };
      if (c >= 0x10000)
        add(0xf0 | c >> 18), add(0x80 | (c >> 12 & 63));
      else if (c >= 0x800)
        add(0xe0 | c >> 12);
      if (c >= 0x800) add(0x80 | (c >> 6 & 63));
      if (c >= 0x80 && c < 0x800) add(0xc0 | c >> 6);
      add(c < 0x80 ? c : 0x80 | (c & 63));
    }
    CAPTURE(std::uint32_t(first));
    const bool is_surrogate = first == 0xd800;
    CHECK((streamed({text}) == text) == !is_surrogate);
  }
}

// The texts are those of Python's bytes.decode("utf-8", "replace"); rows two to five are the examples of the Unicode
// Standard, tables 3-8 to 3-11.
TEST_CASE("utf-8 stream: what is no character is replaced") {
  struct Case {
    std::string bytes, text;
  };
  const std::string r = "\ufffd";
  const Case cases[] = {
      {"a\xf0\x9f\x99"
       "b",
       "a" + r + "b"},
      {"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", r + r + r + r + r + r + r + r + "A"},
      {"\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41", r + r + r + r + r + r + r + r + "A"},
      {"\xf4\x91\x92\x93\xff\x41\x80\xbf\x42", r + r + r + r + r + "A" + r + r + "B"},
      {"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", r + r + r + r + "A"},
      {"\x80", r},
      {"\xf0\x9f\x99\x82\xe2\x98", "🙂" + r},
      {"\xf5\x80\x80\x80", r + r + r + r},
      {"\xc3\xc3\xa9", r + "é"},
      {"\xe0\xa0", r},
      {"\xc1\xbf", r + r},
      {"\xf0\x8f\xbf\xbf", r + r + r + r},
  };
  for (const Case& c : cases) {
    CHECK(streamed({c.bytes}) == c.text);
    std::vector<std::string> single;
    for (char byte : c.bytes) single.emplace_back(1, byte);
    CHECK(streamed(single) == c.text);
  }
}

TEST_CASE("utf-8 stream: the pieces do not matter") {
  std::mt19937_64 random(5);
  const auto below = [&](std::size_t n) { return std::size_t(random() % n); };
  const std::string bytes = "a\x7f\x80\x8f\x90\x9f\xa0\xbf\xc1\xc2\xdf\xe0\xe1\xed\xef\xf0\xf1\xf4\xf5\xff";
  for (int i = 0; i < 20000; ++i) {
    std::string text;
    for (std::size_t n = below(12); n > 0; --n) text += bytes[below(bytes.size())];
    std::vector<std::string> pieces;
    for (std::size_t at = 0; at < text.size();) {
      pieces.push_back(text.substr(at, below(4)));
      at += pieces.back().size();
    }
    const std::string whole = streamed({text});
    if (streamed(pieces) != whole || streamed({whole}) != whole) FAIL("text " << i);
  }
}
