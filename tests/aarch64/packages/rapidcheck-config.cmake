# Debian has no sources of it: what links it is not built for AArch64.
include(${CMAKE_CURRENT_LIST_DIR}/headers.cmake)
header_package(rapidcheck)
