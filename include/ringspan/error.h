// Errors of ringspan. Every error thrown by the library derives from Error; messages are lower case, name the value
// and say what was expected. The library never prints, aborts or exits. Besides, std::bad_alloc passes where there is not the
// memory that was asked for; a std::logic_error "internal error ..." is a mistake of the library's own.
#pragma once

#include <stdexcept>
#include <string>

namespace ringspan {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An argument is wrong by itself or against another one.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// The request is meaningful, but this combination is not implemented; the capability table lists it.
class Unsupported : public Error {
 public:
  using Error::Error;
};

// A peer died, disagreed or stayed silent past the deadline. The communicator stays failed.
class CommError : public Error {
 public:
  using Error::Error;
};

// No plan fits the memory budget; the message names the smallest possible budget and what dominates it. Or a plan would have
// more tasks than memory should hold. Also what the other ranks, and callers from C, get where a rank has not the memory that
// it asks for.
class OutOfBudget : public Error {
 public:
  using Error::Error;
};

// A device refused a launch or an allocation.
class DeviceError : public Error {
 public:
  using Error::Error;
};

}  // namespace ringspan
