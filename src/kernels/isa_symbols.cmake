# cmake -DNM=nm -DOBJECTS=a.o;b.o -P isa_symbols.cmake: objects of ISA files must define no weak symbol. A weak one is an inline
# function compiled for that instruction set which the linker may choose for the whole program, to crash on other machines.
set(checked 0)
foreach(object ${OBJECTS})
  if(NOT object MATCHES "/tile_[a-z0-9]+\\.cc\\.o$" OR object MATCHES "/tile_portable\\.cc\\.o$")
    continue()
  endif()
  math(EXPR checked "${checked} + 1")
  execute_process(COMMAND ${NM} -C --defined-only ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  # A reference to the handler of exceptions, data, is the same in every object.
  string(REGEX REPLACE "[^\n]* DW.ref.__gxx_personality_v0" "" symbols "${symbols}")
  string(REGEX MATCHALL "[^\n]* [WwVvu] [^\n]*" weak "${symbols}")
  if(weak)
    message(FATAL_ERROR "weak symbols in ${object}:\n${weak}")
  endif()
endforeach()
if(checked EQUAL 0)
  message(FATAL_ERROR "no ISA object among: ${OBJECTS}")
endif()
