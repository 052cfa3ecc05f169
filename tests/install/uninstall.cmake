# cmake -DBUILD=... -DPREFIX=... -DSOURCE=... -P: removes what install.cmake installed. A file of someone else's stays.
cmake_minimum_required(VERSION 3.25)
set(other ${PREFIX}/include/cf/other.txt)
file(WRITE ${other} "someone else's\n")
execute_process(COMMAND ${CMAKE_COMMAND} -DMANIFEST=${BUILD}/install_manifest_Unspecified.txt
                        -P ${SOURCE}/scripts/uninstall.cmake COMMAND_ERROR_IS_FATAL ANY)
file(GLOB_RECURSE rest LIST_DIRECTORIES false ${PREFIX}/*)
if(NOT rest STREQUAL other)
  message(FATAL_ERROR "${PREFIX} still has '${rest}', expected ${other} alone")
endif()
file(GLOB_RECURSE folders LIST_DIRECTORIES true RELATIVE ${PREFIX} ${PREFIX}/*)
list(FILTER folders INCLUDE REGEX "/cf/.*[^t]$")
if(folders)
  message(FATAL_ERROR "${PREFIX} still has the empty folders '${folders}'")
endif()

execute_process(COMMAND ${CMAKE_COMMAND} -DMANIFEST=${PREFIX}/none.txt -P ${SOURCE}/scripts/uninstall.cmake
                RESULT_VARIABLE result ERROR_VARIABLE error)
if(result EQUAL 0 OR NOT error MATCHES "\n +cf: [^\n]*none\\.txt: no such file, expected [^\n]*\n")
  message(FATAL_ERROR "a missing manifest: exit ${result}, '${error}'")
endif()
