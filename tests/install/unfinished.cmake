# cmake -DSOURCE=... -DFOLDER=... -DGENERATOR=... -DCOMPILER=... -P: configures the libraries in the folder, builds
# nothing and installs. The installation must refuse with one line and write nothing.
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${FOLDER})
execute_process(COMMAND ${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE} -B ${FOLDER}/build
                        -DCMAKE_CXX_COMPILER=${COMPILER} -DCF_CUDA=OFF -DCF_APPS=OFF -DCF_TESTS=OFF
                OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${FOLDER}/build --prefix ${FOLDER}/prefix
                RESULT_VARIABLE result ERROR_VARIABLE error)
if(result EQUAL 0)
  message(FATAL_ERROR "the installation of an unfinished build passed")
endif()
if(NOT error MATCHES "\n +cf: [^\n]*libcf_core\\.a is not built, expected a whole build first: cmake --build [^\n]*\n")
  message(FATAL_ERROR "expected one line that names libcf_core.a, got:\n${error}")
endif()
if(error MATCHES "Call Stack")
  message(FATAL_ERROR "expected no call stack, got:\n${error}")
endif()
if(EXISTS ${FOLDER}/prefix)
  message(FATAL_ERROR "${FOLDER}/prefix exists, expected nothing to be written")
endif()
