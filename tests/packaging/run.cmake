# The packaging test: what is installed works away from the source and build trees.
function(must)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    string(REPLACE ";" " " command "${ARGN}")
    message(FATAL_ERROR "${command}: exit ${status}\n${output}")
  endif()
  message(STATUS "${output}")
endfunction()

# An outside project: configured against the moved installation, built, its tests run.
function(outside_project name source)
  must(${CMAKE_COMMAND} -S ${source} -B ${WORK_DIR}/${name} -G ${GENERATOR} -DCMAKE_PREFIX_PATH=${prefix}
       -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DCMAKE_BUILD_TYPE=Release)
  must(${CMAKE_COMMAND} --build ${WORK_DIR}/${name})
  must(${CMAKE_CTEST_COMMAND} --test-dir ${WORK_DIR}/${name} --output-on-failure --no-tests=error)
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
must(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/installed)
set(prefix ${WORK_DIR}/moved)
file(RENAME ${WORK_DIR}/installed ${prefix})

file(GLOB_RECURSE texts ${prefix}/*.cmake ${prefix}/*.h)
foreach(text ${texts})
  file(STRINGS ${text} leaked REGEX "${SOURCE_DIR}/|${WORK_DIR}")
  if(leaked)
    message(FATAL_ERROR "${text} names a path of this machine: ${leaked}")
  endif()
endforeach()

outside_project(consumer ${SOURCE_DIR}/tests/packaging/consumer)
foreach(example 06_cpp 07_c)
  outside_project(example_${example} ${SOURCE_DIR}/examples/${example})
endforeach()
must(${prefix}/bin/ringspan --version)
