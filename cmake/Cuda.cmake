# CUDA: RINGSPAN_CUDA = AUTO (on where nvcc is found), ON, OFF. Sets RINGSPAN_HAS_CUDA.
#
# Only the *.cu files of src/cuda need nvcc: kernels and their launches, no host code. cudart is linked statically, so that the
# library loads where there is no driver.
# RINGSPAN_CUDA_ARCHITECTURES: what machine code is made for, as CMAKE_CUDA_ARCHITECTURES has it. "all" is what is released: sm_80,
# sm_90a, sm_100, and PTX for what comes later; the default is one of them, since each takes minutes.
set(RINGSPAN_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO (where nvcc is found), ON or OFF")
set_property(CACHE RINGSPAN_CUDA PROPERTY STRINGS AUTO ON OFF)
set(RINGSPAN_CUDA_ARCHITECTURES 90a-real CACHE STRING "all, native, or a list as CMAKE_CUDA_ARCHITECTURES")
option(RINGSPAN_CUDA_PHASES "Let wgmma kernels tell what their blocks spend cycles on (src/cuda/phases.h)" OFF)
option(RINGSPAN_CUDA_RACECHECK "Let every thread of a warp arrive at barriers, for compute-sanitizer --tool racecheck" OFF)
set(RINGSPAN_HAS_CUDA FALSE)

if(RINGSPAN_SANITIZE)
  set(cuda_wanted OFF)  # device code knows no sanitizers of the host; the emulated kernels are run under them
elseif(RINGSPAN_WHEEL AND RINGSPAN_CUDA STREQUAL AUTO)
  set(cuda_wanted OFF)  # minutes of compilation that most who install it do not need; -C cmake.define.RINGSPAN_CUDA=ON
else()
  set(cuda_wanted ${RINGSPAN_CUDA})
endif()

if(cuda_wanted)
  if(RINGSPAN_CUDA_ARCHITECTURES STREQUAL all)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real 100-real 100-virtual)
  else()
    set(CMAKE_CUDA_ARCHITECTURES ${RINGSPAN_CUDA_ARCHITECTURES})
  endif()
  if(CMAKE_CXX_COMPILER_LAUNCHER AND NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit 12.8 REQUIRED)
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(RINGSPAN_HAS_CUDA TRUE)
    message(STATUS "CUDA: kernels for ${CMAKE_CUDA_ARCHITECTURES}, with nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
  elseif(cuda_wanted STREQUAL AUTO)
    message(STATUS "CUDA: nvcc was not found; the CUDA kernels are not built")
  else()
    message(FATAL_ERROR "RINGSPAN_CUDA is ${RINGSPAN_CUDA}, but nvcc was not found: put it on PATH, or set CUDACXX")
  endif()
endif()

# The folder's *.cu files as a layer of their own, below the layer that calls them: `result` becomes its name, or nothing.
function(ringspan_cuda_layer name result)
  set(${result} "" PARENT_SCOPE)
  if(NOT RINGSPAN_HAS_CUDA)
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cu)
  add_library(ringspan_${name} OBJECT ${sources})
  target_include_directories(ringspan_${name} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_compile_options(ringspan_${name} PRIVATE --expt-relaxed-constexpr)
  target_compile_definitions(ringspan_${name} PRIVATE $<$<BOOL:${RINGSPAN_CUDA_RACECHECK}>:RINGSPAN_CUDA_RACECHECK>
                                                      $<$<BOOL:${RINGSPAN_CUDA_PHASES}>:RINGSPAN_CUDA_PHASES>)
  set_property(GLOBAL APPEND PROPERTY RINGSPAN_LIBRARY_LAYERS ringspan_${name})
  # Its symbols stay inside: a process may have another CUDA runtime, that of torch.
  set_target_properties(ringspan_${name} PROPERTIES RINGSPAN_OBJECTS $<TARGET_OBJECTS:ringspan_${name}> RINGSPAN_TESTING ""
                        RINGSPAN_LINK "CUDA::cudart_static;-Wl,--exclude-libs,libcudart_static.a")
  set(${result} ${name} PARENT_SCOPE)
endfunction()
