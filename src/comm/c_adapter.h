// Communicators across the C boundary. make_communicator (ringspan/transports.h) makes one from a C struct of callbacks; this
// is the way back: a C struct from any communicator, for embedders that hand ours on and for tests, which run through both.
// Cost: one translation of the batch per post, no allocation after warm-up. Thread safety: as the communicator.
#pragma once

#include <memory>

#include "ringspan/communicator.h"
#include "ringspan/ringspan_c.h"

namespace ringspan {

// The struct owns the communicator: its `destroy` must be called once.
ringspan_communicator export_communicator(std::unique_ptr<Communicator> communicator);

}  // namespace ringspan
