// The tests of the CPU kernels of backward, on the block programs of this folder, emulated.
#include "cuda/emulation.h"

#define RINGSPAN_TEST_ATTEND_BACKWARD_KERNELS cuda::emulated_attend_backward_kernels()
#include "kernels/attend_gradient_test.cc"
