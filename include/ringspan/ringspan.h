// Everything that the library offers to C++; ringspan_c.h is for C.
#pragma once

#include "ringspan/attention.h"     // IWYU pragma: export
#include "ringspan/communicator.h"  // IWYU pragma: export
#include "ringspan/device.h"        // IWYU pragma: export
#include "ringspan/draw.h"          // IWYU pragma: export
#include "ringspan/dtype.h"         // IWYU pragma: export
#include "ringspan/error.h"         // IWYU pragma: export
#include "ringspan/pattern.h"       // IWYU pragma: export
#include "ringspan/plan.h"          // IWYU pragma: export
#include "ringspan/problem.h"       // IWYU pragma: export
#include "ringspan/sharding.h"      // IWYU pragma: export
#include "ringspan/threads.h"       // IWYU pragma: export
#include "ringspan/transports.h"    // IWYU pragma: export
#include "ringspan/tuning.h"        // IWYU pragma: export
#include "ringspan/version.h"       // IWYU pragma: export
