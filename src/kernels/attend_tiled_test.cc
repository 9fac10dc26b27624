#include "kernels/attend_tiled.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>

namespace ringspan::kernels {
namespace {

constexpr std::int64_t kLine = 64;

std::int64_t line_of(const char* p) { return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p)) / kLine; }

// Rows that begin anywhere in a line, as vectors of C++ and arrays of NumPy do: every line that holds a byte of a row, and at
// most two more for each.
TEST(AheadRows, CoverTheLinesOfEachRow) {
  alignas(64) static char memory[16384];
  for (const std::int64_t offset : {0, 2, 16, 48, 62}) {
    for (const auto& [stride, width, count] : {std::tuple{128, 128, 9},
                                               {512, 128, 9},
                                               {512, 130, 9},
                                               {130, 130, 9},
                                               {200, 100, 9},
                                               {64, 2, 5},
                                               {66, 64, 5},
                                               {1024, 1024, 1}}) {
      const AheadRows rows = ahead_rows(memory + offset, stride, width, count);
      EXPECT_EQ(rows.next, 0);
      std::set<std::int64_t> wanted, fetched;
      for (std::int64_t r = 0; r < count; ++r) {
        for (std::int64_t b = 0; b < width; ++b) wanted.insert(line_of(memory + offset + r * stride + b));
      }
      for (std::int64_t r = 0; r < rows.rows; ++r) {
        for (std::int64_t l = 0; l < rows.row_lines; ++l) fetched.insert(line_of(rows.data + r * rows.stride + l * kLine));
      }
      for (const std::int64_t line : wanted) EXPECT_TRUE(fetched.contains(line)) << offset << ' ' << stride << ' ' << width;
      EXPECT_LE(fetched.size(), wanted.size() + 2 * static_cast<std::size_t>(count)) << offset << ' ' << stride << ' ' << width;
    }
  }
}

}  // namespace
}  // namespace ringspan::kernels
