include(${CMAKE_CURRENT_LIST_DIR}/headers.cmake)
header_package(CLI11::CLI11 CLI)
