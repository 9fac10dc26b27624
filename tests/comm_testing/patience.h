// How long a test of communicators waits for what happens at once if the code is right, and never if it is wrong.
#pragma once

#include "ringspan/communicator.h"

namespace ringspan::comm_testing {

inline constexpr Communicator::Seconds kPatience{60.0};

}  // namespace ringspan::comm_testing
