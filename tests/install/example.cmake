# cmake -DEXAMPLE=... -DFOLDER=... -DGENERATOR=... -DOPTIONS=... -DCF_MODEL=... -DCHECKPOINT=... -P: builds the example
# against the installation as on a machine without HDF5. It must print the text that cf-model does for its prompt.
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${FOLDER})
execute_process(COMMAND ${CMAKE_COMMAND} -G ${GENERATOR} -S ${EXAMPLE} -B ${FOLDER} ${OPTIONS}
                        -DCMAKE_DISABLE_FIND_PACKAGE_HDF5=ON
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${FOLDER} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${FOLDER}/example ${CHECKPOINT} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CF_MODEL} generate --model ${CHECKPOINT} --prompt-ids 486,856,8,278 --max-new-tokens 32
                        --stop none
                OUTPUT_VARIABLE expected COMMAND_ERROR_IS_FATAL ANY)
if(text STREQUAL "" OR NOT expected STREQUAL "${text}\n")
  message(FATAL_ERROR "expected '${expected}', got '${text}'")
endif()
execute_process(COMMAND ${FOLDER}/example ${CHECKPOINT}/none RESULT_VARIABLE result ERROR_VARIABLE error)
if(NOT result EQUAL 2 OR NOT error MATCHES "^example: [^\n]*none[^\n]*\n$")
  message(FATAL_ERROR "a missing folder: exit ${result}, '${error}'")
endif()
