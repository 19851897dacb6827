# cmake --install build/release --prefix DIR: a folder that runs where the packages it was built from
# are not installed. bin/ finds its libraries in lib/ beside it; what stays with the system is the C
# and C++ runtime, and the CUDA libraries, which come with the GPU's software.
include(GNUInstallDirs)

# writescope_program(TARGET): built into bin/, and part of the bundle.
function(writescope_program target)
  # As RPATH, not RUNPATH: it then serves the libraries' own needs too, which lie in the same folder.
  target_link_options(${target} PRIVATE -Wl,--disable-new-dtags)
  set_target_properties(${target} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin
    INSTALL_RPATH "$ORIGIN/../lib")
  install(TARGETS ${target} RUNTIME_DEPENDENCY_SET writescope_libraries RUNTIME DESTINATION bin)
endfunction()

# After the last program.
function(writescope_install_libraries)
  install(RUNTIME_DEPENDENCY_SET writescope_libraries
    PRE_EXCLUDE_REGEXES "^lib(c|m|dl|rt|pthread|resolv)\\.so" "^ld-linux" "^libstdc\\+\\+" "^libgcc_s"
                        "^libcuda" "^libcublas"
    POST_EXCLUDE_REGEXES "/ld-linux" "/lib(c|m|dl|rt|pthread|resolv)\\.so"
    LIBRARY DESTINATION lib)
  # civetweb, which serves the metrics, looks for OpenSSL by the names that only its -dev package has.
  install(CODE [[
    foreach(name ssl crypto)
      execute_process(COMMAND ${CMAKE_COMMAND} -E create_symlink lib${name}.so.3
                              "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/lib/lib${name}.so")
    endforeach()
  ]])
endfunction()
