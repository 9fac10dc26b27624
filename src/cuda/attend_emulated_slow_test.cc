// The tests of the CPU kernels, on the block programs of this folder, emulated.
#include "cuda/emulation.h"

#define RINGSPAN_TEST_ATTEND_KERNELS cuda::emulated_attend_kernels()
#include "kernels/attend_results_test.cc"
#include "kernels/attend_tasks_test.cc"
#include "kernels/attend_test.cc"
