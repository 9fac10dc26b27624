// Threads of the OpenMP runtime that the process has loaded, such as torch's, for the kernels of a session.
#pragma once

#include "ringspan/threads.h"

namespace ringspan::python {

// None (run_on is null) where no runtime is loaded for all to see, and in a process that was forked from the one which imported
// the extension: a runtime that was used before a fork may wait for ever after it.
CallerThreads openmp_threads();

}  // namespace ringspan::python
