# Built from the sources that libgtest-dev brings.
if(NOT TARGET GTest::gtest_main)
  set(INSTALL_GTEST OFF)
  add_subdirectory(/usr/src/googletest ${CMAKE_BINARY_DIR}/googletest EXCLUDE_FROM_ALL)
  foreach(library gtest gtest_main gmock)
    target_compile_options(${library} PRIVATE -w)
  endforeach()
endif()
