// The tests of the CPU kernels, backward, on the kernels of a GPU, in memory that both reach. Without a GPU there is nothing to
// run.
#include "cuda/gpu_kernels.h"

#define RINGSPAN_TEST_ATTEND_BACKWARD_KERNELS ringspan::testing::gpu_kernels<true>()
#include "kernels/attend_gradient_test.cc"
