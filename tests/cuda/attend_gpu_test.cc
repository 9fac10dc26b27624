// The tests of the CPU kernels, forward, on the kernels of a GPU, in memory that both reach. Without a GPU there is nothing to
// run.
#include "cuda/gpu_kernels.h"
#include "cuda/pinned_new.h"

#define RINGSPAN_TEST_ATTEND_KERNELS ringspan::testing::gpu_kernels<false>()
#include "kernels/attend_results_test.cc"
#include "kernels/attend_tasks_test.cc"
#include "kernels/attend_test.cc"

namespace ringspan::testing {
// 1 GiB; called by gpu_main.cc.
bool open_pinned_pool() { return has_gpu() && pinned_pool.open(std::size_t{1} << 30); }
}  // namespace ringspan::testing
