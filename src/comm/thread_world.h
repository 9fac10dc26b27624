// Ranks as threads whose messages may lie in memory of devices: the side that posts second enqueues the copy on its stream.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/device_stream.h"
#include "ringspan/communicator.h"

namespace ringspan {

// A rank per factory; all factories are empty, ranks without a device, or none is. What a factory throws is passed on.
std::vector<std::unique_ptr<Communicator>> make_thread_world_of(std::span<const DeviceStreamFactory> streams);

}  // namespace ringspan
