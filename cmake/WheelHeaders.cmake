# What the library includes from outside, for wheels: nothing of the distribution, so that `pip install .` works in a fresh
# environment. nlohmann-json is a build requirement in pyproject.toml; the part of {fmt} that the library uses is python/without_fmt.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

add_library(ringspan_without_fmt INTERFACE)
target_include_directories(ringspan_without_fmt BEFORE INTERFACE ${PROJECT_SOURCE_DIR}/python/without_fmt)
add_library(fmt::fmt ALIAS ringspan_without_fmt)

execute_process(COMMAND ${Python_EXECUTABLE} -c "import nlohmann_json, os; print(os.path.dirname(nlohmann_json.__file__), end='')"
                OUTPUT_VARIABLE nlohmann_folder ERROR_QUIET)
if(NOT EXISTS "${nlohmann_folder}/include/nlohmann/json.hpp")
  message(FATAL_ERROR "the wheel needs the headers of nlohmann-json (see pyproject.toml); without build isolation:\n"
                      "    ${Python_EXECUTABLE} -m pip install nlohmann-json==3.11.2")
endif()
add_library(ringspan_nlohmann INTERFACE)
target_include_directories(ringspan_nlohmann SYSTEM INTERFACE ${nlohmann_folder}/include)
add_library(nlohmann_json::nlohmann_json ALIAS ringspan_nlohmann)
