#include "comm/error_code.h"

#include <new>

#include "comm/transport.h"
#include "ringspan/error.h"

namespace ringspan {

ErrorText describe_error(const std::exception_ptr& error) {
  if (error == nullptr) return {};
  try {
    std::rethrow_exception(error);
  } catch (const PeerFailure& e) {
    return {ErrorCode::peer_failure, e.what()};
  } catch (const CommError& e) {
    return {ErrorCode::comm_error, e.what()};
  } catch (const InvalidArgument& e) {
    return {ErrorCode::invalid_argument, e.what()};
  } catch (const Unsupported& e) {
    return {ErrorCode::unsupported, e.what()};
  } catch (const OutOfBudget& e) {
    return {ErrorCode::out_of_budget, e.what()};
  } catch (const DeviceError& e) {
    return {ErrorCode::device_error, e.what()};
  } catch (const Error& e) {
    return {ErrorCode::error, e.what()};
  } catch (const std::bad_alloc&) {
    return {ErrorCode::out_of_budget, "out of memory"};
  } catch (const std::exception& e) {
    return {ErrorCode::internal, e.what()};
  } catch (...) {
    return {ErrorCode::internal, "unknown exception"};
  }
}

std::exception_ptr make_error(ErrorCode code, const std::string& text) {
  switch (code) {
    case ErrorCode::ok:
      return nullptr;
    case ErrorCode::invalid_argument:
      return std::make_exception_ptr(InvalidArgument(text));
    case ErrorCode::unsupported:
      return std::make_exception_ptr(Unsupported(text));
    case ErrorCode::comm_error:
      return std::make_exception_ptr(CommError(text));
    case ErrorCode::peer_failure:
      return std::make_exception_ptr(PeerFailure(text));
    case ErrorCode::out_of_budget:
      return std::make_exception_ptr(OutOfBudget(text));
    case ErrorCode::device_error:
      return std::make_exception_ptr(DeviceError(text));
    case ErrorCode::error:
    case ErrorCode::internal:
      break;
  }
  return std::make_exception_ptr(Error(text));
}

}  // namespace ringspan
