// Sets the pinned memory aside before the first test asks for memory.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

namespace ringspan::testing {
bool open_pinned_pool();
}

int main(int argc, char** argv) {
  if (!ringspan::testing::open_pinned_pool()) {
    std::printf("skipped: no CUDA device can be used: %s\n", cudaGetErrorString(cudaGetLastError()));
    return 77;
  }
  ::testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  std::fflush(nullptr);
  std::_Exit(result);  // what outlives main lies in memory that the driver takes back before
}
