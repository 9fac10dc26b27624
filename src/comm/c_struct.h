// Structs of the C API that a caller passes, by the rule at the top of ringspan_c.h; docs/decisions/0024 has the reasons.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "ringspan/error.h"
#include "ringspan/version.h"

namespace ringspan::c_api {

// "0.1.0", of this library.
inline std::string version_text() {
  return std::to_string(RINGSPAN_VERSION_MAJOR) + "." + std::to_string(RINGSPAN_VERSION_MINOR) + "." +
         std::to_string(RINGSPAN_VERSION_PATCH);
}

template <typename T>
T& require(T* pointer, const char* name) {
  if (pointer == nullptr) throw InvalidArgument(std::string(name) + " is null");
  return *pointer;
}

// Of the caller's struct, in its version: with members to come, or without the latest.
template <typename Struct>
std::uint64_t size_of_struct(const Struct* given, const char* name) {
  const std::uint64_t size = require(given, name).struct_size;
  if (size < sizeof(std::uint64_t) || size > sizeof(Struct) * 16 || size % alignof(Struct) != 0) {
    throw InvalidArgument(std::string(name) + ".struct_size (" + std::to_string(size) + ") must be the size of the struct (" +
                          std::to_string(sizeof(Struct)) + ")");
  }
  return size;
}

// The caller's struct: members that it does not have are zero, and those that we do not have must be.
template <typename Struct>
Struct read(const Struct* given, const char* name) {
  const std::uint64_t size = size_of_struct(given, name);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::uint64_t at = sizeof(Struct); at < size; ++at) {
    if (bytes[at] == 0) continue;
    throw Unsupported(std::string(name) + " has something set at byte " + std::to_string(at) + " that this version (" +
                      version_text() + ") does not know: its struct has " + std::to_string(sizeof(Struct)) + " bytes");
  }
  Struct copy;
  std::memset(&copy, 0, sizeof copy);
  std::memcpy(&copy, given, std::min<std::uint64_t>(size, sizeof copy));
  return copy;
}

}  // namespace ringspan::c_api
