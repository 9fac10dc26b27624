# One target per folder of src/: ringspan_layer(NAME DEPS lower layers ...) makes the object library ringspan_NAME from the
# folder's *.cc, test programs from its *_test.cc and a benchmark from its *_bench.cc. ringspan_library() joins the layers to
# libringspan. What tests of this layer and of higher ones share is in *_testing.cc.
#
# The kind of a test, its ctest label, is read off the file's name: foo_property_test.cc and property_test.cc are of the kind
# "property"; a file that names no kind is a unit test. The files of one kind make one program: pattern_test,
# pattern_property_test. Kinds: unit, property, parity, gradient, faults, conformance, errors (packaging: tests/packaging).
# Two labels are orthogonal: "core" is run under the sanitizers too, "slow" is left out of `make test-quick`. Every layer test
# is core, but for files called *_slow_test.cc, which are slow instead.
include_guard(GLOBAL)

# Not core under ThreadSanitizer: pure functions.
set(RINGSPAN_TESTS_WITHOUT_THREADS "^(pattern|lowering|plan|oracle|random_problem|io|verify_words|verification|kernels_property)_")
# Not compiled as one with RINGSPAN_UNITY: their files have helpers of the same names.
set(RINGSPAN_TESTS_APART "^(cuda|oracle|device_fused)_test$")
set(RINGSPAN_TEST_KINDS property parity gradient faults conformance errors)

add_library(ringspan_options INTERFACE)
target_include_directories(ringspan_options INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                      $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>)
# The same bits on machines with and without fused multiply-adds; kernels ask for them by name (src/kernels).
target_compile_options(ringspan_options INTERFACE -Wall -Wextra -Wshadow $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>
                       -ffp-contract=off)
if(RINGSPAN_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)  # it takes a file that another one includes for a header
  target_compile_options(ringspan_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
endif()
if(RINGSPAN_SANITIZE)
  # AddressSanitizer finds what null and object-size do, whose checks take a sixth of compiling.
  target_compile_options(ringspan_options INTERFACE -fsanitize=${RINGSPAN_SANITIZE} -fno-sanitize=null,object-size
                         -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(ringspan_options INTERFACE -fsanitize=${RINGSPAN_SANITIZE})
endif()

# Of a test's own code; linked after ringspan_options.
add_library(ringspan_test_options INTERFACE)
if(RINGSPAN_SANITIZE MATCHES undefined)  # checking its every pointer takes a fifth of compiling it
  target_compile_options(ringspan_test_options INTERFACE -fno-sanitize=vptr,alignment)
elseif(CMAKE_BUILD_TYPE STREQUAL Release)  # what they test is optimised in full; a third less to compile
  target_compile_options(ringspan_test_options INTERFACE -O1)
endif()

set_property(GLOBAL PROPERTY RINGSPAN_LIBRARY_LAYERS "")
if(RINGSPAN_TESTS)
  add_custom_target(core_tests)  # what runs under the sanitizers
endif()
if(RINGSPAN_BENCH)
  add_custom_target(benches)
endif()

# ringspan_layer(NAME [OUTSIDE_LIBRARY] [DEPS lower layers] [LINK libraries] [EXCLUDE regexes of files])
function(ringspan_layer name)
  cmake_parse_arguments(arg "OUTSIDE_LIBRARY" "" "DEPS;LINK;EXCLUDE" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  set(tests ${sources})
  set(benches ${sources})
  set(testing ${sources})
  list(FILTER sources EXCLUDE REGEX "_test\\.cc$|_bench\\.cc$|_testing\\.cc$")
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  list(FILTER benches INCLUDE REGEX "_bench\\.cc$")
  list(FILTER testing INCLUDE REGEX "_testing\\.cc$")
  foreach(pattern ${arg_EXCLUDE})
    list(FILTER sources EXCLUDE REGEX ${pattern})
  endforeach()
  if(NOT sources)  # a folder of headers
    file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/empty.cc "")
    set(sources ${CMAKE_CURRENT_BINARY_DIR}/empty.cc)
  endif()
  add_library(ringspan_${name} OBJECT ${sources})
  target_link_libraries(ringspan_${name} PRIVATE ringspan_options fmt::fmt Threads::Threads ${arg_LINK})
  set_target_properties(ringspan_${name} PROPERTIES UNITY_BUILD ${RINGSPAN_UNITY} UNITY_BUILD_BATCH_SIZE 8)
  if(NOT arg_OUTSIDE_LIBRARY)
    set_property(GLOBAL APPEND PROPERTY RINGSPAN_LIBRARY_LAYERS ringspan_${name})
  endif()
  # A test program links this layer and those below it only, so that a use of a higher one does not link.
  set(objects $<TARGET_OBJECTS:ringspan_${name}>)
  set(links "${arg_LINK}")
  foreach(dep ${arg_DEPS})
    list(APPEND objects $<TARGET_OBJECTS:ringspan_${dep}>)
    get_target_property(dep_links ringspan_${dep} RINGSPAN_LINK)
    list(APPEND links ${dep_links})
  endforeach()
  list(REMOVE_DUPLICATES links)
  set_target_properties(ringspan_${name} PROPERTIES RINGSPAN_OBJECTS "${objects}" RINGSPAN_LINK "${links}")
  set(shared "")
  if(RINGSPAN_TESTS AND testing)
    ringspan_testing(${name} ${testing})
    list(APPEND shared $<TARGET_OBJECTS:ringspan_${name}_testing>)
  endif()
  foreach(dep ${arg_DEPS})
    get_target_property(of_dep ringspan_${dep} RINGSPAN_TESTING)
    list(APPEND shared ${of_dep})
  endforeach()
  list(REMOVE_DUPLICATES shared)
  set_target_properties(ringspan_${name} PROPERTIES RINGSPAN_TESTING "${shared}")
  if(RINGSPAN_TESTS AND tests)
    ringspan_tests_by_kind(${name} SOURCES ${tests} OBJECTS ${objects} ${shared} LINK ${links})
  endif()
  if(RINGSPAN_BENCH AND benches)
    ringspan_bench(${name}_bench SOURCES ${benches} OBJECTS ${objects} LINK ${links})
  endif()
endfunction()

# Oracles mostly, which take longer than what they judge: optimised in every build, and no sanitizer looks at them.
function(ringspan_testing name)
  add_library(ringspan_${name}_testing OBJECT ${ARGN})
  target_link_libraries(ringspan_${name}_testing PRIVATE ringspan_options fmt::fmt Threads::Threads)
  set(options -O2)
  if(RINGSPAN_SANITIZE)
    list(APPEND options -fno-sanitize=all)
  endif()
  set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS "${options}")
endfunction()

# A Google Benchmark program, built by the target `benches` only; scripts/bench, which has the same rule of names, runs all of them.
function(ringspan_bench name)
  cmake_parse_arguments(arg "" "" "SOURCES;OBJECTS;LINK" ${ARGN})
  add_executable(${name} EXCLUDE_FROM_ALL ${arg_SOURCES} ${arg_OBJECTS})
  target_link_libraries(${name} PRIVATE ringspan_options fmt::fmt Threads::Threads benchmark::benchmark_main ${arg_LINK})
  add_dependencies(benches ${name})
endfunction()

# One test program per kind of test file; see the top of this file.
function(ringspan_tests_by_kind name)
  cmake_parse_arguments(arg "" "" "SOURCES;OBJECTS;LINK" ${ARGN})
  set(slow ${arg_SOURCES})
  list(FILTER slow INCLUDE REGEX "_slow_test\\.cc$")
  list(FILTER arg_SOURCES EXCLUDE REGEX "_slow_test\\.cc$")
  if(slow)
    ringspan_test(${name}_slow_test SOURCES ${slow} OBJECTS ${arg_OBJECTS} LINK ${arg_LINK} LABELS unit slow)
  endif()
  foreach(kind ${RINGSPAN_TEST_KINDS})
    set(of_kind ${arg_SOURCES})
    list(FILTER of_kind INCLUDE REGEX "[/_]${kind}_test\\.cc$")
    list(FILTER arg_SOURCES EXCLUDE REGEX "[/_]${kind}_test\\.cc$")
    if(of_kind)
      ringspan_test(${name}_${kind}_test SOURCES ${of_kind} OBJECTS ${arg_OBJECTS} LINK ${arg_LINK} LABELS ${kind} core)
    endif()
  endforeach()
  if(arg_SOURCES)
    ringspan_test(${name}_test SOURCES ${arg_SOURCES} OBJECTS ${arg_OBJECTS} LINK ${arg_LINK} LABELS unit core)
  endif()
endfunction()

# GoogleTest, compiled once for all test programs, by a program like them.
function(ringspan_test_headers)
  if(TARGET ringspan_test_headers)
    return()
  endif()
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/test_headers.cc CONTENT "")
  add_executable(ringspan_test_headers EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/test_headers.cc)
  target_link_libraries(ringspan_test_headers PRIVATE ringspan_options fmt::fmt Threads::Threads GTest::gtest_main GTest::gmock
                        rapidcheck ringspan_test_options)
  target_precompile_headers(ringspan_test_headers PRIVATE <gmock/gmock.h> <gtest/gtest.h>)
endfunction()

# ringspan_test(NAME SOURCES files [LAYERS layers, with those below them] [OBJECTS more] [LINK libraries] [LABELS kinds])
# A GoogleTest program and the ctest of the same name. Without LABELS it is a unit test, and core.
function(ringspan_test name)
  cmake_parse_arguments(arg "" "" "SOURCES;LAYERS;OBJECTS;LINK;LABELS" ${ARGN})
  if(NOT arg_LABELS)
    set(arg_LABELS unit core)
  endif()
  if(RINGSPAN_SANITIZE MATCHES thread AND name MATCHES "${RINGSPAN_TESTS_WITHOUT_THREADS}")
    list(REMOVE_ITEM arg_LABELS core)
  endif()
  foreach(layer ${arg_LAYERS})
    get_target_property(objects ringspan_${layer} RINGSPAN_OBJECTS)
    get_target_property(shared ringspan_${layer} RINGSPAN_TESTING)
    get_target_property(links ringspan_${layer} RINGSPAN_LINK)
    list(APPEND arg_OBJECTS ${objects} ${shared})
    list(APPEND arg_LINK ${links})
  endforeach()
  list(REMOVE_DUPLICATES arg_OBJECTS)
  list(REMOVE_DUPLICATES arg_LINK)
  add_executable(${name} ${arg_SOURCES} ${arg_OBJECTS})
  if(NOT name MATCHES "${RINGSPAN_TESTS_APART}")
    set_target_properties(${name} PROPERTIES UNITY_BUILD ${RINGSPAN_UNITY} UNITY_BUILD_BATCH_SIZE 8)
  endif()
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE ringspan_options fmt::fmt Threads::Threads GTest::gtest_main GTest::gmock
                        rapidcheck ${arg_LINK} ringspan_test_options)
  if(NOT "${arg_SOURCES}" MATCHES "\\.c(;|$)")
    ringspan_test_headers()
    target_precompile_headers(${name} REUSE_FROM ringspan_test_headers)
  endif()
  if(core IN_LIST arg_LABELS)
    add_dependencies(core_tests ${name})
  endif()
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 1800 LABELS "${arg_LABELS}")
endfunction()

function(ringspan_library)
  get_property(layers GLOBAL PROPERTY RINGSPAN_LIBRARY_LAYERS)
  set(objects "")
  set(links "")
  foreach(layer ${layers})
    list(APPEND objects $<TARGET_OBJECTS:${layer}>)
    get_target_property(layer_links ${layer} RINGSPAN_LINK)
    list(APPEND links ${layer_links})
  endforeach()
  list(REMOVE_DUPLICATES links)
  add_library(ringspan SHARED ${objects})
  add_library(ringspan::ringspan ALIAS ringspan)
  # Before 1.0 a minor version may change the C++ interface (ringspanConfigVersion.cmake says the same).
  set(soversion ${PROJECT_VERSION_MAJOR})
  if(soversion EQUAL 0)
    set(soversion ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  endif()
  set(exports ${PROJECT_SOURCE_DIR}/cmake/exports.map)
  set_target_properties(ringspan PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${soversion} LINK_DEPENDS ${exports})
  target_link_options(ringspan PRIVATE -Wl,--version-script=${exports})
  target_include_directories(ringspan PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
  target_compile_features(ringspan PUBLIC cxx_std_20)
  # Consumers need none of these, so that they are not part of the exported target: $<BUILD_INTERFACE:...>.
  foreach(link ringspan_options fmt::fmt Threads::Threads ${links})
    target_link_libraries(ringspan PRIVATE $<BUILD_INTERFACE:${link}>)
  endforeach()
endfunction()
