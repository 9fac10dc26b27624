// Damaged files: whatever bytes a header holds, opening either throws InvalidArgument or gives tensors that lie in the file.
// The sanitizer builds run this too. A failure prints the seed.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "ringspan/error.h"

namespace ringspan::io {
namespace {

std::string sample_file() {
  const std::string header =
      R"({"__metadata__":{"layout":"bshd"},"cu":{"dtype":"I32","shape":[3],"data_offsets":[0,12]},)"
      R"("q":{"dtype":"BF16","shape":[1,2,3],"data_offsets":[12,24]},"k":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}})";
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.size());
  bytes += header;
  bytes.append(32, 'x');
  return bytes;
}

std::string damage(std::string bytes, std::mt19937& random) {
  const std::string alphabet = "{}[]\",:0123456789-eE.BFIU\\u\xff";
  for (unsigned count = random() % 4 + 1; count > 0 && !bytes.empty(); --count) {
    const std::size_t at = random() % bytes.size();
    switch (random() % 5) {
      case 0:
        bytes[at] = static_cast<char>(random());
        break;
      case 1:
        bytes[at] = alphabet[random() % alphabet.size()];
        break;
      case 2:
        bytes.erase(at, random() % 8 + 1);
        break;
      case 3:
        bytes.insert(at, 1 + random() % 3, alphabet[random() % alphabet.size()]);
        break;
      default:
        bytes.resize(at);
    }
  }
  return bytes;
}

TEST(SafetensorsProperty, DamagedFilesAreRefusedOrRead) {
  const char* given = std::getenv("RINGSPAN_SEED");
  const unsigned seed = given != nullptr ? static_cast<unsigned>(std::strtoul(given, nullptr, 10)) : 1;
  SCOPED_TRACE("RINGSPAN_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  const std::string path =
      (std::filesystem::path(testing::TempDir()) / ("damaged-" + std::to_string(::getpid()) + ".safetensors")).string();
  int refused = 0, read = 0;
  for (int round = 0; round < 3000; ++round) {
    const std::string bytes = round == 0 ? sample_file() : damage(sample_file(), random);
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
    try {
      const SafetensorsReader reader(path);
      ++read;
      for (const TensorInfo& tensor : reader.tensors()) {
        ASSERT_GE(tensor.offset, 8);
        ASSERT_GE(tensor.bytes, 0);
        ASSERT_LE(tensor.offset + tensor.bytes, static_cast<std::int64_t>(bytes.size()));
        const std::byte* data = reader.data(tensor);
        for (std::int64_t x = 0; x < tensor.bytes; ++x) {
          ASSERT_EQ(std::to_integer<char>(data[x]), bytes[static_cast<std::size_t>(tensor.offset + x)]);
        }
      }
    } catch (const InvalidArgument& error) {
      ++refused;
      ASSERT_EQ(std::string(error.what()).rfind(path + ": ", 0), 0U) << error.what();
    }
  }
  std::filesystem::remove(path);
  EXPECT_GT(refused, 1000);
  EXPECT_GT(read, 10);
}

}  // namespace
}  // namespace ringspan::io
