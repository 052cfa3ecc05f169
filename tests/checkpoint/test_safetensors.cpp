#include <sys/stat.h>

#include <array>
#include <cstring>
#include <numeric>

#include "golden/checkpoint/safetensors.hpp"
#include "tests/checkpoint/safetensors_writer.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::checkpoint;
using namespace cf::test;

constexpr std::string_view kPath = "dir/model.safetensors";

Status refused_header(std::string_view json, std::uint64_t buffer_bytes) {
  return parse_safetensors_header(json, nullptr, buffer_bytes, std::string(kPath)).status();
}

/// A header of one F32 tensor "w" with these members.
std::string one_tensor(const std::string& members) { return "{\"w\":{" + members + "}}"; }

}  // namespace

TEST_CASE("safetensors: tensors come back as stored, in the order of the file") {
  const TempDir dir;
  const std::array<float, 6> matrix{1, 2, 3, 4, 5, 6};
  const std::array<std::uint16_t, 3> halves{0x3c00, 0xc000, 0x7bff};
  const std::int64_t scalar = -7;
  const std::string path = dir / "model.safetensors";
  write_safetensors(path, {{"matrix", "F32", {2, 3}, 24, matrix.data()},
                           {"none", "I64", {0, 5}, 0, nullptr},
                           {"halves", "F16", {3}, 6, halves.data()},
                           {"a.scalar", "I64", {}, 8, &scalar}});
  const auto file = SafetensorsFile::open(path);
  REQUIRE(file.status().message() == "");
  CHECK(file->path() == path);
  REQUIRE(file->tensors().size() == 4);
  std::vector<std::string> names;
  for (const TensorEntry& t : file->tensors()) names.push_back(t.name);
  CHECK(names == std::vector<std::string>{"matrix", "none", "halves", "a.scalar"});

  const TensorEntry* m = file->find("matrix");
  REQUIRE(m);
  CHECK(m->stored_dtype == "F32");
  CHECK(m->shape == Shape{2, 3});
  CHECK(m->bytes == 24);
  CHECK(std::memcmp(m->data, matrix.data(), 24) == 0);
  CHECK(std::memcmp(file->find("halves")->data, halves.data(), 6) == 0);
  CHECK(file->find("a.scalar")->shape.empty());
  CHECK(std::memcmp(file->find("a.scalar")->data, &scalar, 8) == 0);
  CHECK(file->find("none")->bytes == 0);
  CHECK(file->find("matri") == nullptr);
}

TEST_CASE("safetensors: every dtype of the format is accepted with its size") {
  const std::pair<const char*, int> dtypes[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1},
                                                {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
                                                {"U32", 4},  {"F32", 4}, {"F64", 8}, {"I64", 8},     {"U64", 8}};
  for (const auto& [dtype, size] : dtypes) {
    CAPTURE(dtype);
    const auto entries =
        parse_safetensors_header("{" + header_member("w", dtype, "3,5", 0, 15 * size) + "}", nullptr, 15 * size, "f");
    REQUIRE(entries.status().message() == "");
    CHECK(entries->at(0).stored_dtype == dtype);
    CHECK(entries->at(0).bytes == 15 * size);
    CHECK(entries->at(0).data == nullptr);
  }
}

TEST_CASE("safetensors: mapped without a copy, as long as someone holds it") {
  const TempDir dir;
  const std::array<float, 2> x{0.5f, -3};
  const std::string path = dir / "model.safetensors";
  write_safetensors(path, {{"x", "F32", {2}, 8, x.data()}}, 3);
  SafetensorsFile copy;
  {
    const auto file = SafetensorsFile::open(path);
    REQUIRE(file.status().message() == "");
    copy = *file;
    CHECK(copy.find("x")->data == file->find("x")->data);
  }
  std::filesystem::remove(path);
  CHECK(reinterpret_cast<std::uintptr_t>(copy.find("x")->data) % 8 == 3);
  CHECK(std::memcmp(copy.find("x")->data, x.data(), 8) == 0);
}

TEST_CASE("safetensors: a file without tensors") {
  const TempDir dir;
  write_file(dir / "empty.safetensors", with_length("{}"));
  const auto file = SafetensorsFile::open(dir / "empty.safetensors");
  REQUIRE(file.status().message() == "");
  CHECK(file->tensors().empty());
}

TEST_CASE("safetensors: a header of many tensors") {
  // Quadratic work on the header would hang here.
  constexpr int n = 50000;
  std::string json = "{";
  for (int i = n; i-- > 0;)
    json += header_member("t" + std::to_string(i), "U8", "2", 2 * i, 2 * i + 2) + (i ? "," : "}");
  const auto entries = parse_safetensors_header(json, nullptr, 2 * n, "f");
  REQUIRE(entries.status().message() == "");
  REQUIRE(entries->size() == n);
  CHECK(entries->front().name == "t0");
  CHECK(entries->back().name == "t" + std::to_string(n - 1));
}

TEST_CASE("safetensors: truncated at any byte") {
  const TempDir dir;
  const std::array<float, 6> x{1, 2, 3, 4, 5, 6};
  const std::string path = dir / "model.safetensors";
  write_safetensors(path, {{"first", "F32", {2}, 8, x.data()}, {"last", "F32", {4}, 16, x.data() + 2}});
  const std::uintmax_t whole = std::filesystem::file_size(path), header = whole - 24;
  for (std::uintmax_t size = whole; size-- > 0;) {
    CAPTURE(size);
    std::filesystem::resize_file(path, size);
    const Status s = SafetensorsFile::open(path).status();
    const std::string asks = size < 8
                                 ? "expected at least the 8 bytes of the header's length"
                                 : "the header asks for " + std::to_string(size < header ? header : whole) + " bytes";
    CHECK(s.message() == path + ": truncated: " + asks + ", the file has " + std::to_string(size));
    CHECK(s.code() == Code::invalid_file);
  }
}

TEST_CASE("safetensors: bytes behind the last tensor") {
  const TempDir dir;
  const std::string path = dir / "model.safetensors";
  write_safetensors(path, {{"w", "F32", {2}, 8, nullptr}});
  std::filesystem::resize_file(path, std::filesystem::file_size(path) + 4);
  CHECK(refusal_fault(SafetensorsFile::open(path).status(), Code::invalid_file,
                      {path, "'w'", "expected 8 bytes", "got 12"}) == "");
}

TEST_CASE("safetensors: the header's length") {
  const TempDir dir;
  const std::string path = dir / "model.safetensors";
  const auto refusal = [&](std::uint64_t length, std::initializer_list<std::string_view> parts) {
    write_file(path, with_length("{}", length));
    return refusal_fault(SafetensorsFile::open(path).status(), Code::invalid_file, parts);
  };
  CHECK(refusal(3, {path, "truncated: the header asks for 11 bytes, the file has 10"}) == "");
  CHECK(refusal(100'000'000, {path, "truncated: the header asks for 100000008 bytes, the file has 10"}) == "");
  CHECK(refusal(100'000'001, {path, "at most 100000000 bytes", "got 100000001"}) == "");
  CHECK(refusal(~std::uint64_t(0), {path, "at most 100000000 bytes", "got 18446744073709551615"}) == "");
  CHECK(refusal(~std::uint64_t(0) - 7, {path, "at most 100000000 bytes"}) == "");
  CHECK(refusal(1, {path, "not JSON"}) == "");
  CHECK(refusal(0, {path, "expected it to start with '{'", "got an empty header"}) == "");
}

TEST_CASE("safetensors: what is no file") {
  const TempDir dir;
  const auto refusal = [&](const char* name, Code code, std::initializer_list<std::string_view> parts) {
    return refusal_fault(SafetensorsFile::open(dir / name).status(), code, parts);
  };
  CHECK(refusal("absent", Code::not_found, {dir / "absent", "no such file"}) == "");
  CHECK(refusal("", Code::invalid_file, {dir.path(), "is a directory"}) == "");
  write_file(dir / "empty", "");
  CHECK(refusal("empty", Code::invalid_file, {dir / "empty", "truncated", "the 8 bytes", "the file has 0"}) == "");
  CHECK(refusal("empty/below", Code::not_found, {dir / "empty/below", "no such file"}) == "");
  REQUIRE(::mkfifo((dir / "pipe").c_str(), 0600) == 0);
  CHECK(refusal("pipe", Code::invalid_file, {dir / "pipe", "expected a regular file"}) == "");
}

TEST_CASE("safetensors: a header that is no JSON object") {
  const auto refusal = [](std::string_view json, std::initializer_list<std::string_view> parts) {
    const Status s = refused_header(json, 0);
    return refusal_fault(s, Code::invalid_file, {kPath}) + refusal_fault(s, Code::invalid_file, parts);
  };
  CHECK(refusal("[]", {"start with '{'", "got '['"}) == "");
  CHECK(refusal(" {}", {"start with '{'", "got ' '"}) == "");
  CHECK(refusal("\xff", {"start with '{'", "got '\\xff'"}) == "");
  CHECK(refusal("{", {"not JSON at byte 2"}) == "");
  CHECK(refusal("{}x", {"not JSON at byte 3"}) == "");
  CHECK(refusal(std::string_view("{}\0{}", 5), {"not JSON at byte 3", "zero byte"}) == "");
  CHECK(refusal("{\"\xc3(\":1}", {"not JSON"}) == "");
  CHECK(refusal("{\"a\":1e999}", {"not JSON"}) == "");
  CHECK(refusal("{\"a\":" + std::string(1'000'000, '['), {"nested deeper than 32"}) == "");
  CHECK(refusal("{\"a\":" + std::string(31, '[') + std::string(31, ']') + "}", {"tensor 'a'", "got an array"}) == "");
  CHECK(refusal("{\"a\":" + std::string(100'000, 'x'), {"not JSON"}) == "");
}

TEST_CASE("safetensors: members that are no tensors") {
  const std::string dtype = "\"dtype\":\"F32\",", shape = "\"shape\":[2],", offsets = "\"data_offsets\":[0,8]";
  struct Bad {
    std::string json;
    std::vector<std::string_view> parts;
  };
  const std::vector<Bad> table{
      {"{\"w\":3}", {"'w'", "expected an object", "got 3"}},
      {"{\"w\":null}", {"'w'", "expected an object", "got null"}},
      {one_tensor(dtype + shape + "\"offset\":[0,8]"), {"'w'", "data_offsets is missing"}},
      {one_tensor(dtype + offsets), {"'w'", "shape is missing"}},
      {one_tensor(shape + offsets), {"'w'", "dtype is missing"}},
      {one_tensor("\"dtype\":4," + shape + offsets), {"'w'", "dtype", "expected a string", "got 4"}},
      {one_tensor("\"dtype\":\"F31\"," + shape + offsets), {"'w'", "dtype", "expected", "got 'F31'"}},
      {one_tensor("\"dtype\":\"f32\"," + shape + offsets), {"'w'", "dtype", "got 'f32'"}},
      {one_tensor(dtype + "\"shape\":2," + offsets), {"'w'", "shape", "expected an array", "got 2"}},
      {one_tensor(dtype + "\"shape\":[-2]," + offsets), {"'w'", "shape", "got -2"}},
      {one_tensor(dtype + "\"shape\":[2.0]," + offsets), {"'w'", "shape", "got 2.0"}},
      {one_tensor(dtype + "\"shape\":[\"2\"]," + offsets), {"'w'", "shape", "got \"2\""}},
      {one_tensor(dtype + "\"shape\":[[2]]," + offsets), {"'w'", "shape", "got an array"}},
      {one_tensor(dtype + "\"shape\":[9223372036854775808]," + offsets), {"'w'", "shape", "got 9223372036854775808"}},
      {one_tensor(dtype + "\"shape\":[4294967296,4294967296]," + offsets), {"'w'", "(4294967296, 4294967296)", "2^63"}},
      {one_tensor(dtype + "\"shape\":[4611686018427387904]," + offsets), {"'w'", "4611686018427387904", "2^63"}},
      // Wrapped around 2^64, these two would be 8 bytes and none.
      {one_tensor(dtype + "\"shape\":[4611686018427387906]," + offsets), {"'w'", "2^63"}},
      {one_tensor(dtype + "\"shape\":[4611686018427387904,4]," + "\"data_offsets\":[0,0]"), {"'w'", "2^63"}},
      {one_tensor(dtype + "\"shape\":[" + "1" +
                  [] {
                    std::string ones;
                    for (int i = 0; i < 64; ++i) ones += ",1";
                    return ones;
                  }() +
                  "]," + offsets),
       {"'w'", "shape", "at most 64", "got 65"}},
      {one_tensor(dtype + shape + "\"data_offsets\":8"), {"'w'", "data_offsets", "expected [begin, end]", "got 8"}},
      {one_tensor(dtype + shape + "\"data_offsets\":[0]"), {"'w'", "data_offsets", "expected [begin, end]"}},
      {one_tensor(dtype + shape + "\"data_offsets\":[0,8,8]"), {"'w'", "data_offsets", "expected [begin, end]"}},
      {one_tensor(dtype + shape + "\"data_offsets\":[8,0]"), {"'w'", "data_offsets", "expected 0 <=", "got [8, 0]"}},
      {one_tensor(dtype + shape + "\"data_offsets\":[1,9]"), {"'w'", "leaves a hole", "byte 0", "got 1"}},
      {one_tensor(dtype + shape + "\"data_offsets\":[-8,0]"), {"'w'", "data_offsets", "got [-8, 0]"}},
      {one_tensor(dtype + shape + "\"data_offsets\":[0,18446744073709551615]"),
       {"'w'", "data_offsets", "got [0, 18446744073709551615]"}},
      {one_tensor(dtype + "\"shape\":[3],\"data_offsets\":[0,12]"), {"truncated", "the header asks for 75 bytes"}},
      {one_tensor(dtype + shape + "\"data_offsets\":[0,1e3]"), {"'w'", "data_offsets", "got [0, 1000.0]"}},
      {one_tensor(dtype + shape + "\"data_offsets\":[0,4]"), {"'w'", "expected 8 bytes", "(2) of F32", "got 4"}},
      {one_tensor(dtype + "\"shape\":[3]," + offsets), {"'w'", "expected 12 bytes", "(3) of F32", "got 8"}},
      {one_tensor("\"dtype\":\"F64\"," + shape + offsets), {"'w'", "expected 16 bytes", "(2) of F64", "got 8"}},
      {"{\"__metadata__\":[]}", {"__metadata__", "expected an object", "got an array"}},
      {"{\"__metadata__\":{\"k\":1}}", {"__metadata__", "'k'", "expected a string", "got 1"}},
      {"{}", {"expected 0 bytes", "no tensor", "got 8"}},
  };
  for (const Bad& bad : table) {
    CAPTURE(bad.json);
    const Status s = refused_header(bad.json, 8);
    CHECK(refusal_fault(s, Code::invalid_file, {kPath}) == "");
    for (std::string_view part : bad.parts) CHECK(refusal_fault(s, Code::invalid_file, {part}) == "");
  }
}

TEST_CASE("safetensors: names, overlaps and holes") {
  const auto refusal = [](const std::string& a, const std::string& b, std::uint64_t buffer_bytes,
                          std::initializer_list<std::string_view> parts) {
    return refusal_fault(refused_header("{" + a + "," + b + "}", buffer_bytes), Code::invalid_file, parts);
  };
  const auto bytes = [](const char* name, int begin, int end) {
    return header_member(name, "U8", std::to_string(end - begin), begin, end);
  };
  CHECK(refusal(bytes("a", 0, 4), bytes("a", 4, 8), 8, {kPath, "duplicate name 'a'"}) == "");
  // The same name, spelled with an escape.
  CHECK(refusal(bytes("a", 0, 4), bytes("\\u0061", 4, 8), 8, {kPath, "duplicate name 'a'"}) == "");
  CHECK(refusal(bytes("a", 0, 4), "\"b\":{\"dtype\":\"U8\",\"dtype\":\"I8\"}", 8, {kPath, "duplicate name 'dtype'"}) ==
        "");
  CHECK(refusal("\"__metadata__\":{}", "\"__metadata__\":{}", 0, {kPath, "duplicate name '__metadata__'"}) == "");
  CHECK(refusal(bytes("a", 0, 5), bytes("b", 4, 8), 8,
                {kPath, "'b' overlaps another", "expected it to begin at byte 5", "got 4"}) == "");
  CHECK(refusal(bytes("a", 0, 8), bytes("b", 0, 8), 8, {kPath, "'b' overlaps another"}) == "");
  CHECK(refusal(bytes("a", 0, 8), bytes("b", 2, 6), 8, {kPath, "'b' overlaps another", "byte 8", "got 2"}) == "");
  CHECK(refusal(bytes("a", 0, 3), bytes("b", 4, 8), 8, {kPath, "'b' leaves a hole", "byte 3", "got 4"}) == "");
  CHECK(refusal(bytes("a", 1, 4), bytes("b", 4, 8), 8, {kPath, "'a' leaves a hole", "byte 0", "got 1"}) == "");
  CHECK(refusal(bytes("a", 0, 4), bytes("b", 6, 6), 8, {kPath, "'b' leaves a hole", "byte 4", "got 6"}) == "");
  CHECK(refusal(bytes("a", 0, 4), bytes("b", 4, 7), 8, {kPath, "expected 7 bytes", "'b'", "got 8"}) == "");
  // Tensors without elements fit anywhere between others.
  CHECK(refused_header("{" + bytes("a", 4, 8) + "," + bytes("z", 4, 4) + "," + bytes("b", 0, 4) + "," +
                           bytes("y", 8, 8) + "," + bytes("x", 0, 0) + "}",
                       8)
            .message() == "");
}

TEST_CASE("safetensors: whatever a name holds, a message is one printable line") {
  const Status s = refused_header("{\"a\\nb\\u001b[31m\\u00e9" + std::string(5000, 'n') + "\":1}", 0);
  CHECK(refusal_fault(s, Code::invalid_file, {kPath, "'a\\x0ab\\x1b[31m\\xc3\\xa9nnn", "...'"}) == "");
  CHECK(s.message().size() < 400);
}

TEST_CASE("safetensors: each of many tensors is found without a walk through all of them") {
  // 2^18 tensors: as many walks would take hours.
  std::vector<TensorEntry> tensors;
  for (unsigned i = 0; i < 1u << 18; ++i) {
    tensors.emplace_back();
    tensors.back().name = std::to_string(i * 2654435761u);
  }
  const SafetensorsFile file = SafetensorsFile::in_memory(tensors, {}, "memory");
  std::size_t found = 0;
  for (const TensorEntry& t : tensors) found += file.find(t.name) != nullptr && file.find(t.name)->name == t.name;
  CHECK(found == tensors.size());
  CHECK(file.find("none") == nullptr);
  CHECK(SafetensorsFile().find("none") == nullptr);
}
