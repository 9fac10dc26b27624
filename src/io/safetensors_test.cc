#include "io/safetensors.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "ringspan/error.h"

namespace ringspan::io {
namespace {

namespace fs = std::filesystem;

class Safetensors : public testing::Test {
 protected:
  Safetensors() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    directory_ = fs::path(testing::TempDir()) / ("safetensors-" + std::string(test->name()) + "-" + std::to_string(::getpid()));
    fs::create_directories(directory_);
    path_ = (directory_ / "x.safetensors").string();
  }
  ~Safetensors() override { fs::remove_all(directory_); }

  void write_bytes(const std::string& bytes) { std::ofstream(path_, std::ios::binary) << bytes; }

  // Length, header and `data_bytes` bytes 0, 1, 2, ...
  void write_file(const std::string& header, int data_bytes) {
    std::string bytes(8, '\0');
    for (std::size_t b = 0; b < 8; ++b) bytes[b] = static_cast<char>(header.size() >> (8 * b) & 0xffU);
    bytes += header;
    for (int x = 0; x < data_bytes; ++x) bytes += static_cast<char>(x);
    write_bytes(bytes);
  }

  // The message with which opening fails, without the path.
  std::string error() const {
    try {
      SafetensorsReader reader(path_);
    } catch (const InvalidArgument& caught) {
      const std::string message = caught.what();
      EXPECT_EQ(message.rfind(path_ + ": ", 0), 0U) << message;
      return message.substr(path_.size() + 2);
    }
    return "no error";
  }
  std::string error_of(const std::string& header, int data_bytes) {
    write_file(header, data_bytes);
    return error();
  }

  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()));
  }

  fs::path directory_;
  std::string path_;
};

// A file of other things beside what is asked for is no less a file.
TEST_F(Safetensors, KnowsDTypesThatNobodyComputesWith) {
  write_file(
      R"({"x":{"dtype":"C64","shape":[2],"data_offsets":[0,16]},"y":{"dtype":"F8_E8M0","shape":[3],"data_offsets":[16,19]},)"
      R"("z":{"dtype":"F8_E4M3FNUZ","shape":[1],"data_offsets":[19,20]},"u":{"dtype":"F8_E5M2FNUZ","shape":[1],)"
      R"("data_offsets":[20,21]}})",
      21);
  const SafetensorsReader reader(path_);
  EXPECT_EQ(reader.at("x").elements(), 2);
  EXPECT_EQ(reader.at("y").elements(), 3);
  EXPECT_EQ(error_of(R"({"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}})", 2), "tensor 'x' has the unknown dtype 'F4'");
}

TEST_F(Safetensors, RoundTrip) {
  const float a[] = {1, 2, 3, 4, 5, 6};
  const std::uint16_t b[] = {7, 8, 9};
  const std::vector<TensorSpec> specs = {{"b", "BF16", {3}}, {"a", "F32", {2, 3}}, {"empty", "F32", {0, 5}}, {"one", "U8", {}}};
  SafetensorsWriter writer(path_, specs, {{"key", "välue \"x\""}});
  EXPECT_FALSE(fs::exists(path_));
  writer.write("b", 0, b, 6);
  writer.write("a", 12, a + 3, 12);  // rows in any order
  writer.write("a", 0, a, 12);
  writer.finish();
  EXPECT_EQ(files(), 1U);

  const SafetensorsReader reader(path_);
  EXPECT_EQ(reader.metadata(), (Metadata{{"key", "välue \"x\""}}));
  ASSERT_EQ(reader.tensors().size(), 4U);
  EXPECT_EQ(reader.tensors()[0], *reader.find("a"));  // the widest elements first
  EXPECT_EQ(reader.at("a").shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(reader.at("a").elements(), 6);
  EXPECT_EQ(reader.at("one").bytes, 1);
  EXPECT_EQ(reader.at("empty").bytes, 0);
  EXPECT_EQ(reader.find("c"), nullptr);
  EXPECT_EQ(std::memcmp(reader.data(reader.at("a")), a, sizeof a), 0);
  EXPECT_EQ(std::memcmp(reader.data(reader.at("b")), b, sizeof b), 0);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(reader.data(reader.at("a"))) % 8, 0U);
}

TEST_F(Safetensors, WhatIsWrittenNeedsNoCopyToBeRead) {
  for (std::size_t length = 0; length < 8; ++length) {  // of the header, modulo its alignment
    const std::vector<TensorSpec> specs = {{"b", "U8", {3}}, {"h", "F16", {3}}, {"d", "F64", {1}}, {"s", "F32", {1}}};
    SafetensorsWriter(path_, specs, {{"key", std::string(length, 'x')}}).finish();
    const SafetensorsReader reader(path_);
    for (const TensorInfo& tensor : reader.tensors()) {
      EXPECT_EQ(reader.data(tensor), reader.raw(tensor).data()) << tensor.name << " " << length;
    }
  }
}

TEST_F(Safetensors, MisalignedTensorsAreReadFromAnAlignedCopy) {
  write_file(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},"y":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
             9);
  const SafetensorsReader reader(path_);
  const std::byte* data = reader.data(reader.at("x"));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % 4, 0U);
  for (int x = 0; x < 8; ++x) EXPECT_EQ(std::to_integer<int>(data[x]), x + 1);
  EXPECT_EQ(reader.data(reader.at("x")), data);
  const std::span<const std::byte> raw = reader.raw(reader.at("x"));  // where it lies in the file
  EXPECT_EQ(raw.data(), reader.mapped().data() + reader.at("x").offset);
  EXPECT_EQ(std::memcmp(raw.data(), data, raw.size()), 0);
}

TEST_F(Safetensors, HeadersMayBePadded) {
  write_file("{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}    ", 1);
  EXPECT_EQ(error(), "no error");
  write_file("{}", 0);
  EXPECT_EQ(error(), "no error");
}

TEST_F(Safetensors, MissingFile) { EXPECT_EQ(error(), "cannot be opened: No such file or directory"); }

TEST_F(Safetensors, Directory) {
  fs::create_directory(path_);
  EXPECT_EQ(error(), "is not a regular file");
}

TEST_F(Safetensors, APipeIsNotWaitedFor) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_EQ(error(), "is not a regular file");
}

TEST_F(Safetensors, TooShort) {
  write_bytes("");
  EXPECT_EQ(error(), "is truncated: 0 bytes cannot hold the length of a header");
  write_bytes("1234567");
  EXPECT_EQ(error(), "is truncated: 7 bytes cannot hold the length of a header");
}

TEST_F(Safetensors, HeaderBeyondTheLimit) {
  write_bytes(std::string(8, '\xff') + "{}");
  EXPECT_EQ(error(), "the header of 18446744073709551615 bytes exceeds the limit of 100000000");
}

TEST_F(Safetensors, HeaderBeyondTheFile) {
  write_bytes(std::string("\x03\0\0\0\0\0\0\0{}", 10));
  EXPECT_EQ(error(), "is truncated: the header takes 3 bytes, but only 2 follow");
}

TEST_F(Safetensors, NoHeader) {
  EXPECT_EQ(error_of("", 0), "the header does not begin with '{': not a safetensors file");
  EXPECT_EQ(error_of("[1]", 0), "the header does not begin with '{': not a safetensors file");
}

TEST_F(Safetensors, InvalidJson) {
  EXPECT_EQ(error_of("{\"x\":", 0).rfind("the header is not valid JSON: ", 0), 0U);
  EXPECT_EQ(error_of("{\"\xff\":1}", 0).rfind("the header is not valid JSON: ", 0), 0U);
  EXPECT_EQ(error_of("{" + std::string(100000, '['), 0).rfind("the header is not valid JSON: ", 0), 0U);
}

// Nothing may hide behind a NUL, at which the parser of JSON would stop.
TEST_F(Safetensors, NulBytes) {
  const std::string x = R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  EXPECT_EQ(error_of(x + '\0', 1), "the header is not valid JSON: it holds a NUL byte at 53");
  EXPECT_EQ(error_of(x + '\0' + "{ garbage", 1), "the header is not valid JSON: it holds a NUL byte at 53");
  EXPECT_EQ(error_of(std::string("{\"\0\":1}", 8), 1), "the header is not valid JSON: it holds a NUL byte at 2");
}

// In time that grows with the file: an algorithm quadratic in the tensors takes minutes.
TEST_F(Safetensors, ManyTensors) {
  std::string header = "{";
  constexpr int kTensors = 50000;
  for (int i = 0; i < kTensors; ++i) {
    header += (i == 0 ? "\"" : ",\"") + std::to_string(i) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  }
  const auto begin = std::chrono::steady_clock::now();
  write_file(header + "}", 0);
  EXPECT_EQ(SafetensorsReader(path_).tensors().size(), std::size_t{kTensors});
  EXPECT_EQ(error_of(header + ",\"7\":{}}", 0), "the name '7' occurs twice in the header");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

TEST_F(Safetensors, DuplicateNames) {
  const std::string x = R"("x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_EQ(error_of("{" + x + "," + x + "}", 1), "the name 'x' occurs twice in the header");
  EXPECT_EQ(error_of(R"({"x":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1),
            "the name 'dtype' occurs twice in the header");
}

TEST_F(Safetensors, DeepNesting) {
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  EXPECT_EQ(error_of("{\"x\":" + deep + "}", 0), "tensor 'x' must be an object");
  EXPECT_EQ(error_of(R"({"x":{"dtype":"U8","shape":[)" + deep + R"(],"data_offsets":[0,1]}})", 1),
            "tensor 'x': shape must hold sizes from 0 up, not array");
}

TEST_F(Safetensors, BadMetadata) {
  EXPECT_EQ(error_of(R"({"__metadata__":[]})", 0), "__metadata__ must be an object of strings");
  EXPECT_EQ(error_of(R"({"__metadata__":{"a":1}})", 0), "__metadata__ entry 'a' must be a string");
}

TEST_F(Safetensors, TensorOfAnotherType) { EXPECT_EQ(error_of(R"({"x":1})", 0), "tensor 'x' must be an object"); }

TEST_F(Safetensors, MissingField) {
  EXPECT_EQ(error_of(R"({"x":{"shape":[1],"data_offsets":[0,1]}})", 1), "tensor 'x' has no dtype");
  EXPECT_EQ(error_of(R"({"x":{"dtype":"U8","data_offsets":[0,1]}})", 1), "tensor 'x' has no shape");
  EXPECT_EQ(error_of(R"({"x":{"dtype":"U8","shape":[1]}})", 1), "tensor 'x' has no data_offsets");
}

TEST_F(Safetensors, BadDType) {
  EXPECT_EQ(error_of(R"({"x":{"dtype":1,"shape":[1],"data_offsets":[0,1]}})", 1), "tensor 'x': dtype must be a string");
  EXPECT_EQ(error_of(R"({"x":{"dtype":"F31","shape":[1],"data_offsets":[0,1]}})", 1), "tensor 'x' has the unknown dtype 'F31'");
}

TEST_F(Safetensors, BadShape) {
  EXPECT_EQ(error_of(R"({"x":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", 1), "tensor 'x': shape must be a list of sizes");
  EXPECT_EQ(error_of(R"({"x":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1),
            "tensor 'x': shape must hold sizes from 0 up, not -1");
  EXPECT_EQ(error_of(R"({"x":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})", 1),
            "tensor 'x': shape must hold sizes from 0 up, not 1.5");
  EXPECT_EQ(error_of(R"({"x":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,1]}})", 1),
            "tensor 'x': shape must hold sizes from 0 up, not 18446744073709551615");
}

TEST_F(Safetensors, ShapeOverflow) {
  EXPECT_EQ(error_of(R"({"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0),
            "tensor 'x': the shape [4294967296, 4294967296] overflows");
  EXPECT_EQ(error_of(R"({"x":{"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}})", 0), "no error");
}

TEST_F(Safetensors, BadOffsets) {
  const auto with = [&](const std::string& offsets) {
    return error_of(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":)" + offsets + "}}", 1);
  };
  for (const char* offsets : {"1", "[0]", "[0,1,2]", "[-1,1]", "[0,\"1\"]", "[0,1e3]"}) {
    EXPECT_EQ(with(offsets), "tensor 'x': data_offsets must be two offsets from 0 up") << offsets;
  }
  EXPECT_EQ(with("[1,0]"), "tensor 'x' begins at 1, after its end at 0");
  EXPECT_EQ(with("[0,2]"), "tensor 'x' ends at 2, but the file holds only 1 bytes of data");
  EXPECT_EQ(with("[0,9223372036854775807]"), "tensor 'x' ends at 9223372036854775807, but the file holds only 1 bytes of data");
}

TEST_F(Safetensors, SizeMismatch) {
  EXPECT_EQ(error_of(R"({"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,4]}})", 4),
            "tensor 'x': F32 of shape [2, 3] takes 24 bytes, but data_offsets give it 4");
}

TEST_F(Safetensors, OverlapsAndHoles) {
  const auto two = [&](const std::string& a, const std::string& b, int bytes) {
    return error_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)" + a +
                        R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + b + "}}",
                    bytes);
  };
  EXPECT_EQ(two("[0,2]", "[1,3]", 3), "tensors 'a' and 'b' overlap at byte 1");
  EXPECT_EQ(two("[3,5]", "[0,2]", 5), "bytes 2 to 3 of the data belong to no tensor");
  EXPECT_EQ(two("[2,4]", "[0,2]", 5), "bytes 4 to 5 of the data belong to no tensor");
  EXPECT_EQ(two("[2,4]", "[0,2]", 4), "no error");
}

TEST_F(Safetensors, UnknownTensor) {
  write_file(R"({"k":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"q":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2);
  const SafetensorsReader reader(path_);
  try {
    reader.at("v");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.what(), path_ + ": has no tensor 'v', only: k, q");
  }
}

TEST_F(Safetensors, UnknownTensorOfNoneAndOfMany) {
  const auto error_of = [&] {
    try {
      SafetensorsReader(path_).at("v");
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  write_file("{}", 0);
  EXPECT_EQ(error_of(), path_ + ": has no tensor 'v', and no other");
  std::string header, names;
  for (int i = 0; i < 20; ++i) {
    const std::string name = std::string(1, static_cast<char>('a' + i)), at = std::to_string(i), end = std::to_string(i + 1);
    header += (i > 0 ? ",\"" : "\"") + name + R"(":{"dtype":"U8","shape":[1],"data_offsets":[)" + at + "," + end + "]}";
    if (i < 16) names += (i > 0 ? ", " : "") + name;
  }
  write_file("{" + header + "}", 20);
  EXPECT_EQ(error_of(), path_ + ": has no tensor 'v', only: " + names + " and 4 more");
}

TEST_F(Safetensors, UnfinishedWritersLeaveNothing) {
  write_bytes("before");
  {
    const std::vector<TensorSpec> specs = {{"x", "U8", {4}}};
    SafetensorsWriter writer(path_, specs, {});
    EXPECT_EQ(files(), 2U);
    writer.write("x", 0, "1234", 4);
  }
  EXPECT_EQ(files(), 1U);
  std::ifstream file(path_);
  std::string text;
  file >> text;
  EXPECT_EQ(text, "before");
}

TEST_F(Safetensors, WritersRefuseWhatDoesNotFit) {
  const auto message = [&](auto action) -> std::string {
    try {
      action();
    } catch (const Error& error) {
      return std::string(error.what()).substr(std::strlen(path_.c_str()) + 2);
    }
    return "no error";
  };
  const std::vector<TensorSpec> specs = {{"x", "U8", {4}}};
  SafetensorsWriter writer(path_, specs, {});
  EXPECT_EQ(message([&] { writer.write("x", 1, "1234", 4); }), "bytes 1 to 5 are outside tensor 'x' of 4 bytes");
  EXPECT_EQ(message([&] { writer.write("x", -1, "1234", 1); }), "bytes -1 to 0 are outside tensor 'x' of 4 bytes");
  EXPECT_EQ(message([&] { writer.write("x", 2, "1234", -1); }), "bytes 2 to 1 are outside tensor 'x' of 4 bytes");
  EXPECT_EQ(message([&] { writer.write("y", 0, "1234", 1); }), "no tensor 'y' is to be written");
  const std::vector<TensorSpec> reserved = {{"__metadata__", "U8", {4}}};
  EXPECT_EQ(message([&] { SafetensorsWriter(path_, reserved, {}); }), "a tensor cannot be called '__metadata__'");
  for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{-3, -2}, {0, -3}}) {
    const std::vector<TensorSpec> negative = {{"x", "U8", shape}};
    EXPECT_EQ(message([&] { SafetensorsWriter(path_, negative, {}); }),
              "tensor 'x': shape must hold sizes from 0 up, not " + std::to_string(std::min(shape[0], shape[1])));
  }
  const std::vector<TensorSpec> unreadable = {{"\xff", "U8", {4}}};
  const std::string what = "a name or a text of __metadata__ is not valid UTF-8: ";
  EXPECT_EQ(message([&] { SafetensorsWriter(path_, unreadable, {}); }).substr(0, what.size()), what);
  EXPECT_EQ(message([&] { SafetensorsWriter(path_, specs, {{"key", "\xff"}}); }).substr(0, what.size()), what);
  const std::vector<TensorSpec> twice = {{"x", "U8", {4}}, {"x", "U8", {4}}};
  EXPECT_EQ(message([&] { SafetensorsWriter(path_, twice, {}); }), "two tensors are called 'x'");
  const std::vector<TensorSpec> huge = {{"x", "F64", {std::int64_t{1} << 40, std::int64_t{1} << 40}}};
  EXPECT_EQ(message([&] { SafetensorsWriter(path_, huge, {}); }),
            "tensor 'x': the shape [1099511627776, 1099511627776] overflows");
  const std::vector<TensorSpec> unknown = {{"x", "F31", {1}}};
  EXPECT_THROW(SafetensorsWriter(path_, unknown, {}), InvalidArgument);
}

TEST_F(Safetensors, WritersReportANameThatIsTaken) {
  const std::vector<TensorSpec> specs = {{"x", "U8", {1}}};
  SafetensorsWriter writer(path_, specs, {});
  std::filesystem::create_directories(std::filesystem::path(path_) / "full");  // a folder with content is not replaced
  try {
    writer.finish();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find(path_ + ": cannot be renamed to its name: "), 0U) << error.what();
  }
  std::filesystem::remove_all(path_);
}

TEST_F(Safetensors, SizesAreOfKnownDTypes) {
  EXPECT_EQ(bytes_of_dtype("BF16"), 2);
  try {
    bytes_of_dtype("F31");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "unknown safetensors dtype 'F31'");
  }
}

TEST_F(Safetensors, WritersReportTheDirectoryThatIsMissing) {
  const std::string path = (directory_ / "no" / "x.safetensors").string();
  try {
    const std::vector<TensorSpec> specs = {{"x", "U8", {4}}};
    SafetensorsWriter writer(path, specs, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), path + ": cannot be created: No such file or directory");
  }
}

}  // namespace
}  // namespace ringspan::io
