include(${CMAKE_CURRENT_LIST_DIR}/headers.cmake)
header_package(nlohmann_json::nlohmann_json nlohmann)
