# The installed package: find_package(ringspan) gives ringspan::ringspan. The library is shared and its dependencies are
# private, so that a consumer needs nothing but the headers and the library.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ringspan)
install(TARGETS ringspan EXPORT ringspanTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ringspan DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT ringspanTargets NAMESPACE ringspan:: DESTINATION ${package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/ringspanConfig.cmake.in ${PROJECT_BINARY_DIR}/ringspanConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/ringspanConfigVersion.cmake COMPATIBILITY SameMinorVersion)
file(RELATIVE_PATH prefix_from_pkgconfig ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(${CMAKE_CURRENT_LIST_DIR}/ringspan.pc.in ${PROJECT_BINARY_DIR}/ringspan.pc @ONLY)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES ${PROJECT_BINARY_DIR}/ringspan.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES ${PROJECT_BINARY_DIR}/ringspanConfig.cmake ${PROJECT_BINARY_DIR}/ringspanConfigVersion.cmake
        DESTINATION ${package_dir})

if(TARGET ringspan_program)
  file(RELATIVE_PATH library_from_bin ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  # Where it is built too: what keeps room for a longer path is empty entries, by which the loader means the current folder.
  set_target_properties(ringspan_program PROPERTIES INSTALL_RPATH $ORIGIN/${library_from_bin} BUILD_WITH_INSTALL_RPATH ON)
  install(TARGETS ringspan_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
