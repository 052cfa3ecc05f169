# cmake -DBUILD=... -DPREFIX=... -DDOC=<the documentation's folder> -P: installs the build into the empty prefix. The
# component, which has every file of the project, makes a manifest with a name of its own: install_manifest.txt belongs
# to whoever installs the build.
cmake_minimum_required(VERSION 3.25)
set(manifest ${BUILD}/install_manifest.txt)
function(state variable)
  if(EXISTS ${manifest})
    file(TIMESTAMP ${manifest} when "%Y-%m-%dT%H:%M:%S")
    file(SHA256 ${manifest} hash)
    set(${variable} "${when} ${hash}" PARENT_SCOPE)
  else()
    set(${variable} "none" PARENT_SCOPE)
  endif()
endfunction()

file(REMOVE_RECURSE ${PREFIX})
state(before)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${PREFIX} --component Unspecified
                COMMAND_ERROR_IS_FATAL ANY)
state(after)
if(NOT after STREQUAL before)
  message(FATAL_ERROR "${manifest}: it changed from '${before}' to '${after}', expected it to be left alone")
endif()
if(NOT EXISTS ${PREFIX}/${DOC}/LICENSE)
  message(FATAL_ERROR "${PREFIX}/${DOC}/LICENSE is missing, expected the licence among the installed files")
endif()
