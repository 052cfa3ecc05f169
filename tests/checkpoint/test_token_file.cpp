#include <filesystem>
#include <string>
#include <vector>

#include "golden/checkpoint/token_file.hpp"
#include "tests/apps/run_program.hpp"
#include "tests/checkpoint/npy_writer.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/temp_dir.hpp"

namespace {

using namespace cf;
using namespace cf::checkpoint;
using namespace cf::test;

using Ids = std::vector<std::int32_t>;

Result<TokenFile> parse(const std::string& bytes) { return parse_token_file(bytes, "f"); }

// What numpy.save writes for numpy.array([0, 1, -2, 50303, 2**31 - 1], numpy.int32), and for
// numpy.arange(6, dtype=numpy.int32).reshape(2, 3).
const std::string kFive =
    std::string("\x93NUMPY\x01\x00v\x00", 10) + "{'descr': '<i4', 'fortran_order': False, 'shape': (5,), }" +
    std::string(60, ' ') + "\n" +
    std::string("\x00\x00\x00\x00\x01\x00\x00\x00\xfe\xff\xff\xff\x7f\xc4\x00\x00\xff\xff\xff\x7f", 20);
const std::string kTwoByThree =
    std::string("\x93NUMPY\x01\x00v\x00", 10) + "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }" +
    std::string(58, ' ') + "\n" +
    std::string("\x00\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00\x04\x00\x00\x00\x05\x00\x00\x00", 24);

}  // namespace

TEST_CASE("token file: numpy's bytes, read and written") {
  struct Case {
    std::string bytes;
    Shape shape;
    Ids ids;
  };
  const Case cases[] = {{kFive, {5}, {0, 1, -2, 50303, 2147483647}}, {kTwoByThree, {2, 3}, {0, 1, 2, 3, 4, 5}}};
  const TempDir dir;
  const std::string path = dir / "ids.npy";
  for (const Case& c : cases) {
    const Status written = write_token_file(path, c.ids, c.shape);
    CHECK(written.message() == "");
    CHECK(read_file(path) == c.bytes);
    const auto file = read_token_file(path);
    REQUIRE(file.status().message() == "");
    CHECK(file->shape == c.shape);
    CHECK(file->ids == c.ids);
  }
}

TEST_CASE("token file: dtypes are converted") {
  const auto ids = [](const std::string& descr, const std::string& data, const std::string& shape) {
    const auto file = parse(npy(1, descr, shape, data));
    REQUIRE(file.status().message() == "");
    return file->ids;
  };
  CHECK(ids("<i4", std::string("\xff\xff\xff\xff\x01\x02\x03\x04", 8), "(2,)") == Ids{-1, 0x04030201});
  CHECK(ids("<i8", std::string("\xff\xff\xff\x7f\x00\x00\x00\x00\x00\x00\x00\x80\xff\xff\xff\xff", 16), "(2,)") ==
        Ids{2147483647, -2147483647 - 1});
  CHECK(ids("<u2", "\xff\xff\x01\x02", "(2, 1)") == Ids{65535, 0x0201});
  CHECK(ids("<u4", std::string("\xff\xff\xff\x7f\x05\x00\x00\x00", 8), "(1, 2)") == Ids{2147483647, 5});
}

TEST_CASE("token file: no more ids are read than are asked for") {
  const auto file = parse_token_file(kTwoByThree, "f", 4);
  REQUIRE(file);
  CHECK(file->shape == Shape{2, 3});
  CHECK(file->ids == Ids{0, 1, 2, 3});
  CHECK(parse_token_file(kFive, "f", 5)->ids.size() == 5);
  CHECK(parse_token_file(kFive, "f", 6)->ids.size() == 5);
  // An id that is not asked for may be any.
  const std::string wide = npy(1, "<u4", "(2,)", std::string("\1\0\0\0\xff\xff\xff\xff", 8));
  CHECK(parse_token_file(wide, "f", 1)->ids == Ids{1});
  CHECK_FALSE(parse_token_file(wide, "f", 2));
  // 3 GB, as a hole that takes no room on the disk: neither the others' pages nor memory for them is touched.
  const TempDir dir;
  const std::string path = dir / "big.npy";
  const std::string bytes = npy(1, "<u2", "(1500000000,)", "");
  write_file(path, bytes);
  std::filesystem::resize_file(path, bytes.size() + 3'000'000'000);
  const auto big = read_token_file(path, 16);
  REQUIRE(big);
  CHECK(big->shape == Shape{1'500'000'000});
  CHECK(big->ids == Ids(16));
  CHECK(big->ids.capacity() == 16);
}

TEST_CASE("token file: headers of every version and of other writers") {
  const std::string data("\7\0\0\0\10\0\0\0", 8);
  for (int version : {1, 2, 3}) {
    const auto file = parse(npy(version, "<i4", "(1, 2)", data));
    REQUIRE(file.status().message() == "");
    CHECK(file->shape == Shape{1, 2});
    CHECK(file->ids == Ids{7, 8});
  }
  for (const char* header : {"{'descr': '<i4', 'fortran_order': False, 'shape': (1, 2)}",
                             "{\"shape\":(1,2,),\"descr\":\"<i4\",\"fortran_order\":False}\n",
                             " \t{ 'fortran_order' : False , 'shape' : ( 1 , 2 ) , 'descr' : '<i4' , } \r\n\n"}) {
    CAPTURE(header);
    const auto file = parse(npy_with_header(1, header, data));
    REQUIRE(file.status().message() == "");
    CHECK(file->shape == Shape{1, 2});
  }
}

TEST_CASE("token file: what is no file of ids", "[bad]") {
  struct Bad {
    std::string bytes;
    std::vector<std::string_view> parts;
  };
  const std::string data(24, '\1');
  const auto header = [&](const std::string& text) { return npy_with_header(1, text, data); };
  const auto shape = [&](const std::string& text) { return npy(1, "<i4", text, data); };
  const auto descr = [&](const std::string& text) { return npy(1, text, "(6,)", data); };
  const std::string begin = "{'descr': '<i4', 'fortran_order': False, ";
  const std::vector<Bad> table{
      {"", {"is empty, expected a .npy file"}},
      {"PK\3\4 a zip file", {"begins with '\\x93NUMPY', got 'PK\\x03\\x04 a'"}},
      {"\x93NUMPX", {"expected a .npy file, which begins with '\\x93NUMPY', got '\\x93NUMPX'"}},
      {"\x93NUM", {"truncated: expected the format's version, the file has 4 bytes"}},
      {"\x93NUMPY\1", {"truncated: expected the format's version, the file has 7 bytes"}},
      {std::string("\x93NUMPY\1\0v", 9), {"truncated: expected the header's length, the file has 9 bytes"}},
      {std::string("\x93NUMPY\2\0v\0\0", 11), {"truncated: expected the header's length, the file has 11 bytes"}},
      {std::string("\x93NUMPY\0\0v\0", 10), {"format version: expected 1.0, 2.0 or 3.0, got 0.0"}},
      {std::string("\x93NUMPY\1\1v\0", 10), {"format version: expected 1.0, 2.0 or 3.0, got 1.1"}},
      {std::string("\x93NUMPY\xff\0v\0", 10), {"got 255.0"}},
      {kFive.substr(0, 127), {"truncated: expected a header of 118 bytes, the file has 127 bytes"}},
      {std::string("\x93NUMPY\3\0\xff\xff\xff\xff{}", 14), {"truncated: expected a header of 4294967295 bytes"}},
      {kFive.substr(0, 128), {"truncated: expected 20 bytes behind the header for shape (5) of <i4, got 0"}},
      {kFive.substr(0, 147), {"truncated: expected 20 bytes behind the header", "got 19"}},
      {kFive + "\1", {"f: expected 20 bytes behind the header for shape (5) of <i4, got 21"}},

      {header(""), {"header: expected '{' at byte 0, got its end"}},
      {header("[1]"), {"header: expected '{' at byte 0, got '[1]'"}},
      {header("{}"), {"header: 'descr' is missing"}},
      {header("{,}"), {"header: expected a name in quotes or '}' at byte 1, got ',}'"}},
      {header("{'descr': '<i4', 'shape': (6,)}"), {"header: 'fortran_order' is missing"}},
      {header(begin + "}"), {"header: 'shape' is missing"}},
      {header(begin + "'shape': (6,), 'descr': '<i4'}"), {"header: duplicate name 'descr'"}},
      {header(begin + "'order': 1}"), {"expected 'descr', 'fortran_order' or 'shape' at byte 41, got ''order': 1}'"}},
      {header(begin + "'shape': (6,)"), {"expected ',' or '}' at byte 54, got its end"}},
      {header(begin + "'shape': (6,) 'x'"), {"expected ',' or '}' at byte 55, got ''x''"}},
      {header(begin + "'shape': (6,)} x"), {"expected nothing but spaces behind the dict at byte 56, got 'x'"}},
      {header(begin + "'shape' (6,)}"), {"expected ':' at byte 49, got '(6,)}'"}},
      {header(begin + "'shape"), {"expected a name in quotes or '}' at byte 41"}},
      {header(begin + "'sha\\x70e': (6,)}"), {"expected a name in quotes or '}' at byte 41"}},
      {header("{'descr': <i4}"), {"expected a dtype in quotes at byte 10, got '<i4}'"}},
      {header("{'descr': '<i4\"}"), {"expected a dtype in quotes at byte 10"}},
      {header("{'descr': [('a', '<i4')]}"), {"expected a dtype in quotes at byte 10, got '[("}},
      {header("{'fortran_order': 0}"), {"expected True or False at byte 18, got '0}'"}},
      {header("{'fortran_order': Falsey}"), {"expected ',' or '}' at byte 23, got 'y}'"}},
      {header("{'shape': 6}"), {"expected '(' at byte 10, got '6}'"}},
      {header("{'shape': (6)}"), {"expected ',' at byte 12, got ')}'"}},
      {header("{'shape': (2 3)}"), {"expected ',' at byte 13, got '3)}'"}},
      {header("{'shape': (2, 3 4)}"), {"expected ',' or ')' at byte 16, got '4)}'"}},
      {header("{'shape': (2, 3"), {"expected ',' or ')' at byte 15, got its end"}},
      {header("{'shape': (,)}"), {"expected a size of 0 to 2^63 - 1 at byte 11, got ',)}'"}},
      {header("{'shape': (-1,)}"), {"expected a size of 0 to 2^63 - 1 at byte 11, got '-1,)}'"}},
      {header("{'shape': (-0,)}"), {"expected a size of 0 to 2^63 - 1 at byte 11"}},
      {header("{'shape': (06,)}"), {"expected a size of 0 to 2^63 - 1 at byte 11, got '06,)}'"}},
      {header("{'shape': (6L,)}"), {"expected ',' at byte 12, got 'L,)}'"}},
      {header("{'shape': (9223372036854775808,)}"), {"expected a size of 0 to 2^63 - 1 at byte 11"}},
      {header("{'shape': (__import__('os'),)}"), {"expected a size of 0 to 2^63 - 1 at byte 11"}},

      {descr("<f4"), {"dtype: expected '<i4', '<i8', '<u2' or '<u4', got '<f4'"}},
      {descr(">i4"), {"dtype: expected", "got '>i4'"}},
      {descr("|u1"), {"dtype: expected", "got '|u1'"}},
      {descr(""), {"dtype: expected", "got ''"}},
      {descr("<i4\xff"), {"dtype: expected", "got '<i4\\xff'"}},
      {header("{'descr': '<i4', 'fortran_order': True, 'shape': (2, 3)}"), {"fortran_order: expected False, got True"}},
      {shape("()"), {"shape: expected 1 or 2 dimensions, got 0"}},
      {shape("(1, 2, 3)"), {"shape: expected 1 or 2 dimensions, got 3"}},
      {npy(1, "<i4", "(0,)", ""), {"shape: expected one id at least, got (0)"}},
      {npy(1, "<i4", "(2, 0)", ""), {"shape: expected one id at least, got (2, 0)"}},
      {shape("(4294967296, 4294967296)"), {"shape: expected fewer than 2^63 bytes, got (4294967296, 4294967296) of"}},
      {shape("(9223372036854775807,)"), {"shape: expected fewer than 2^63 bytes"}},
      {shape("(2, 2305843009213693951)"), {"shape: expected fewer than 2^63 bytes"}},
      {shape("(1, 2305843009213693951)"), {"truncated: expected 9223372036854775804 bytes", "got 24"}},
      {npy(1, "<u4", "(2,)", std::string("\1\0\0\0\0\0\0\x80", 8)),
       {"element 1: expected an id inside int32, got 2147483648"}},
      {npy(1, "<i8", "(1,)", std::string("\xff\xff\xff\x7f\xff\xff\xff\xff", 8)),
       {"element 0: expected an id inside int32, got -2147483649"}},
  };
  for (const Bad& bad : table) {
    CAPTURE(bad.bytes);
    const Status s = parse(bad.bytes).status();
    CHECK(s.message().starts_with("f: "));
    for (std::string_view part : bad.parts) CHECK(refusal_fault(s, Code::invalid_file, {part}) == "");
  }
}

TEST_CASE("token file: from and to a path", "[bad]") {
  const TempDir dir;
  const std::string path = dir / "ids.npy";
  CHECK(refusal_fault(read_token_file(path).status(), Code::not_found, {path, "no such file"}) == "");
  CHECK(refusal_fault(read_token_file(dir.path()).status(), Code::invalid_file, {dir.path(), "is a directory"}) == "");
  const auto refused = [&](const Ids& ids, const Shape& shape, std::string_view what) {
    const std::string fault = refusal_fault(write_token_file(path, ids, shape), Code::invalid_argument, {path, what});
    return std::filesystem::exists(path) ? "wrote a file" : fault;
  };
  CHECK(refused({1, 2}, {3}, "shape: expected one of 2 ids, got (3)") == "");
  CHECK(refused({1, 2}, {2, 2}, "shape: expected one of 2 ids, got (2, 2)") == "");
  CHECK(refused({1, 2}, {-1, -2}, "shape: expected one id at least, got (-1, -2)") == "");
  CHECK(refused({1, 2}, {4294967297, 4294967298}, "shape: expected one of 2 ids") == "");
  CHECK(refused({}, {0}, "shape: expected one id at least, got (0)") == "");
  CHECK(refused({1}, {}, "shape: expected 1 or 2 dimensions, got 0") == "");
  CHECK(refused({1}, {1, 1, 1}, "shape: expected 1 or 2 dimensions, got 3") == "");
  const std::string nowhere = dir / "none/ids.npy";
  CHECK(refusal_fault(write_token_file(nowhere, Ids{1}, {1}), Code::io_error, {nowhere, "cannot be written"}) == "");
}

#ifdef CF_PYTHON
TEST_CASE("token file: numpy itself, both ways") {
  // Many numbers of digits in the shape, and one dimension or two.
  const std::vector<Shape> shapes{{1}, {9}, {10}, {99999}, {1, 1}, {1, 2048}, {12, 345}, {1000, 1}};
  const TempDir dir;
  const auto id = [](std::size_t i) { return std::int32_t(i * 7919 % 50304); };
  std::string python_shapes;
  for (std::size_t k = 0; k < shapes.size(); ++k) {
    Ids ids;
    for (std::int64_t i = 0; i < element_count(shapes[k]); ++i) ids.push_back(id(std::size_t(i)));
    CHECK(write_token_file(dir / ("ours" + std::to_string(k)), ids, shapes[k]).message() == "");
    python_shapes += "(";
    for (std::int64_t n : shapes[k]) python_shapes += std::to_string(n) + ",";
    python_shapes += "),";
  }
  write_file(dir / "check.py",
             "import io, numpy as np\n"
             "for k, shape in enumerate([" +
                 python_shapes +
                 "]):\n"
                 "    ids = (np.arange(np.prod(shape)) * 7919 % 50304).reshape(shape)\n"
                 "    saved = io.BytesIO()\n"
                 "    np.save(saved, ids.astype(np.int32))\n"
                 "    with open(f'ours{k}', 'rb') as file:\n"
                 "        assert file.read() == saved.getvalue(), shape\n"
                 "    for dtype in ('i4', 'i8', 'u2', 'u4'):\n"
                 "        for version in (1, 2, 3):\n"
                 "            with open(f'numpy{k}-{dtype}-{version}', 'wb') as file:\n"
                 "                array = ids.astype('<' + dtype)\n"
                 "                np.lib.format.write_array(file, array, version=(version, 0))\n");
  const ProgramRun run = run_program("cd '" + dir.path() + "' && " + CF_PYTHON + " check.py");
  CHECK(run.err == "");
  REQUIRE(run.exit_code == 0);
  for (std::size_t k = 0; k < shapes.size(); ++k)
    for (const char* dtype : {"i4", "i8", "u2", "u4"})
      for (const char* version : {"1", "2", "3"}) {
        const auto file = read_token_file(dir / ("numpy" + std::to_string(k) + "-" + dtype + "-" + version));
        REQUIRE(file.status().message() == "");
        CHECK(file->shape == shapes[k]);
        bool equal = true;
        for (std::size_t i = 0; i < file->ids.size(); ++i) equal = equal && file->ids[i] == id(i);
        CHECK(equal);
      }
}
#endif
