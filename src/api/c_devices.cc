// The part of the C API that is about devices: what there is, and memory of them.
#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "api/c_support.h"
#include "comm/rounds.h"
#include "exec/handshake.h"
#include "ringspan/device.h"
#include "ringspan/transports.h"

using ringspan::c_api::guard;
using ringspan::c_api::read_optional;
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

int32_t ringspan_device_buffer_create_pinned(const char* device, int64_t bytes, ringspan_device_buffer** buffer) {
  return guard([&] {
    require(buffer, "buffer") = nullptr;
    constexpr auto kPinned = ringspan::DeviceBuffer::Place::pinned_host;
    *buffer = new ringspan_device_buffer{ringspan::DeviceBuffer(&require(device, "device"), bytes, kPinned)};
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

int32_t ringspan_comm_create_threads_on(const char* const* devices, int32_t ranks, ringspan_comm** comms) {
  return guard([&] {
    require(devices, "devices");
    require(comms, "comms");
    std::vector<std::string> names;
    for (int32_t rank = 0; rank < ranks; ++rank) names.emplace_back(&require(devices[rank], "devices of a rank"));
    std::vector<std::unique_ptr<ringspan_comm>> made;
    for (auto& communicator : ranks < 1 ? ringspan::make_thread_world(ranks) : ringspan::make_thread_world(names)) {
      made.push_back(std::make_unique<ringspan_comm>(ringspan_comm{std::move(communicator)}));
    }
    for (std::size_t rank = 0; rank < made.size(); ++rank) comms[rank] = made[rank].release();
  });
}

int32_t ringspan_comm_create_nccl(ringspan_comm* host, const ringspan_nccl_options* options, ringspan_comm** comm) {
  return guard([&] {
    const std::shared_ptr<ringspan::Communicator> below = require(host, "host").communicator;
    ringspan_nccl_options given;
    try {
      require(comm, "comm") = nullptr;
      given = read_optional(options, "options");
    } catch (const ringspan::Error&) {  // the other ranks are told instead of left to wait
      ringspan::internal::refuse(*below, std::current_exception(), ringspan::NcclOptions{}.deadline, ringspan::kNcclRounds);
    }
    ringspan::NcclOptions nccl;
    if (given.device != nullptr) nccl.device = given.device;
    if (given.library != nullptr) nccl.library = given.library;
    const auto* id = static_cast<const std::byte*>(given.unique_id);
    if (id != nullptr) nccl.unique_id.assign(id, id + RINGSPAN_NCCL_UNIQUE_ID_BYTES);
    if (given.deadline_seconds != 0) nccl.deadline = ringspan::Communicator::Seconds(given.deadline_seconds);
    auto made = std::make_unique<ringspan_comm>();
    // The host transport lives as long as what it serves.
    made->communicator = {ringspan::make_nccl_communicator(*below, nccl).release(),
                          [below](ringspan::Communicator* communicator) { delete communicator; }};
    *comm = made.release();
  });
}

}  // extern "C"
