# Toolchain: AArch64 Linux with Debian's cross compiler; tests run under qemu-user, which has SVE vectors of 256 bits.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max,sve-default-vector-length=32)

# Libraries of the build machine are for another processor: only headers are taken from it, through tests/aarch64/packages.
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE BOTH)
set(CMAKE_FIND_PACKAGE_PREFER_CONFIG ON)
foreach(package fmt nlohmann_json CLI11 GTest rapidcheck)
  set(${package}_DIR ${CMAKE_CURRENT_LIST_DIR}/../tests/aarch64/packages)
endforeach()
