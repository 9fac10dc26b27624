// RuntimeStream: a Runtime as what transports need of a device (comm/device_stream.h). Its stream is one of its own, beside
// that on which the executor computes: messages order the two by points of both (StreamMessages), or the executor waits on the
// host before it posts and after it was sent.
#pragma once

#include <string>

#include "comm/device_stream.h"

namespace ringspan::cuda {

// Of a device by name; the factory throws what make_runtime() throws, and InvalidArgument for "cpu".
DeviceStreamFactory stream_factory(const std::string& device);

}  // namespace ringspan::cuda
