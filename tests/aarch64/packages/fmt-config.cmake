include(${CMAKE_CURRENT_LIST_DIR}/headers.cmake)
header_package(fmt::fmt fmt)
target_compile_definitions(fmt::fmt INTERFACE FMT_HEADER_ONLY)
