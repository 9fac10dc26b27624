include(${CMAKE_CURRENT_LIST_DIR}/headers.cmake)
header_package(fmt::fmt fmt)
target_compile_definitions(fmt::fmt INTERFACE FMT_HEADER_ONLY)
include_directories(${CMAKE_BINARY_DIR}/headers)  # xxhash.h has no package
header_package(xxhash xxhash.h)
