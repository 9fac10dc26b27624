// The part of the C API that is about devices: what there is, and memory of them.
#include <algorithm>
#include <cstring>
#include <string>

#include "api/c_support.h"
#include "ringspan/device.h"

using ringspan::c_api::guard;
using ringspan::c_api::require;

struct ringspan_device_buffer {
  ringspan::DeviceBuffer buffer;
};

extern "C" {

int32_t ringspan_device_report(char* text, uint64_t capacity, uint64_t* length) {
  return guard([&] {
    std::string report;
    for (const std::string& line : ringspan::device_report()) report += line + "\n";
    require(length, "length") = report.size();
    if (text == nullptr || capacity == 0) return;
    const std::size_t written = std::min<std::size_t>(report.size(), capacity - 1);
    std::memcpy(text, report.data(), written);
    text[written] = '\0';
  });
}

int32_t ringspan_device_buffer_create(const char* device, int64_t bytes, ringspan_device_buffer** buffer) {
  return guard([&] {
    require(buffer, "buffer") = nullptr;
    *buffer = new ringspan_device_buffer{ringspan::DeviceBuffer(&require(device, "device"), bytes)};
  });
}

void ringspan_device_buffer_destroy(ringspan_device_buffer* buffer) { delete buffer; }

int32_t ringspan_device_buffer_data(const ringspan_device_buffer* buffer, void** data) {
  return guard([&] { require(data, "data") = require(buffer, "buffer").buffer.data(); });
}

int32_t ringspan_device_buffer_write(ringspan_device_buffer* buffer, const void* source, int64_t bytes, int64_t offset) {
  return guard([&] {
    if (bytes > 0) require(static_cast<const char*>(source), "source");
    require(buffer, "buffer").buffer.copy_from_host(source, bytes, offset);
  });
}

int32_t ringspan_device_buffer_read(const ringspan_device_buffer* buffer, void* target, int64_t bytes, int64_t offset) {
  return guard([&] {
    if (bytes > 0) require(static_cast<char*>(target), "target");
    require(buffer, "buffer").buffer.copy_to_host(target, bytes, offset);
  });
}

}  // extern "C"
